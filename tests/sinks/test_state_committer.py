"""``StateCommitter`` folds exactly, however the rows are split."""

from __future__ import annotations

import datetime
import itertools
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import Fields, TransactionAttempt, arrow_spill
from framework.errors import BadRecordError, TopologyError
from framework.topology import Input
from framework.topology.groupings import GlobalGrouping
from sinks import (
    ApproxDistinct,
    Count,
    DeadLetterTable,
    First,
    Last,
    Max,
    Mean,
    MemoryBackend,
    Min,
    OpaqueMapState,
    Reduce,
    StateCommitter,
    Sum,
    key_hash_parts,
    state_committer,
)
from sinks.aggregates import Aggregate
from sinks.state_committer import Fold

AGGREGATES = {
    "rows": Count(),
    "present": Count("n"),
    "total": Sum("n"),
    "again": Sum("n"),
    "least": Min("n"),
    "most": Max("n"),
}
INPUT = Input("spout", "default", Fields(word=str, n=int), GlobalGrouping())


def bound() -> StateCommitter:
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates=AGGREGATES)
    committer.bind("count", [INPUT], 1)
    return committer


def batch(rows: list[tuple[str, int | None]]) -> pa.RecordBatch:
    return pa.record_batch(
        {"word": pa.array([word for word, _ in rows], pa.string()), "n": pa.array([n for _, n in rows], pa.int64())}
    )


def merger() -> Fold:
    committer = bound()
    committer.prepare({}, None, None, None)  # type: ignore[arg-type]
    return committer._prepared()


rows = st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(-100, 100))), max_size=30)


@given(st.lists(rows, max_size=5), st.integers(0, 4))
def test_fold_is_exact_in_any_split(parts: list[list[tuple[str, int | None]]], cut: int) -> None:
    merged = merger()
    for half in (parts[:cut], parts[cut:]):
        combiner = bound().combiner()
        for part in half:
            combiner.add(batch(part))
        partial = combiner.finish()
        if partial is not None:
            merged.add(partial)
    result = merged.finish()
    expected: dict[str, list[int | None]] = {}
    for word, n in (row for part in parts for row in part):
        expected.setdefault(word, []).append(n)
    found = {row["word"]: row for row in (result.to_pylist() if result is not None else [])}
    assert found.keys() == expected.keys()
    for word, values in expected.items():
        present = [value for value in values if value is not None]
        assert found[word] == {
            "word": word,
            "rows": len(values),
            "present": len(present),
            "total": sum(present) if present else None,
            "again": sum(present) if present else None,
            "least": min(present, default=None),
            "most": max(present, default=None),
        }


def test_sum_beyond_64_bits_inside_a_batch_is_an_error() -> None:
    combiner = bound().combiner()
    combiner.add(batch([("a", 2**63 - 1), ("a", 1)]))
    with pytest.raises(BadRecordError, match="'total' does not fit into int64"):
        combiner.finish()


def test_sum_of_large_numbers_that_fits_is_exact() -> None:
    combiner = bound().combiner()
    combiner.add(batch([("a", 2**63 - 1), ("a", -(2**63) + 1), ("b", 2**62)]))
    result = combiner.finish()
    assert result is not None
    assert {row["word"]: row["total"] for row in result.to_pylist()} == {"a": 0, "b": 2**62}


def test_null_key_is_an_error_that_names_the_field() -> None:
    combiner = bound().combiner()
    combiner.add(pa.record_batch({"word": pa.array([None], pa.string()), "n": [1]}))
    with pytest.raises(BadRecordError, match="component 'count': key field 'word' is null"):
        combiner.finish()


def test_fold_travels_as_one_row_per_key() -> None:
    merged = merger()
    for _ in range(3):
        combiner = bound().combiner()
        combiner.add(batch([("a", 1)] * 10_000))
        partial = combiner.finish()
        assert partial is not None
        merged.add(partial)
    assert len(pickle.dumps(merged)) < 10_000


def test_many_bytes_of_few_rows_are_grouped_and_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest text of each key, and a column that nothing folds."""
    monkeypatch.setattr(state_committer, "GROUPED_AT_BYTES", 20_000)
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", 20_000)
    monkeypatch.setattr(key_hash_parts, "PART_BYTES", 10_000)
    schema = pa.schema({"word": pa.string(), "text": pa.string()})
    fold, seen = Fold("most", ("word",), {"text": Max("text")}, schema, partial_input=False), []
    grouped = Fold._grouped
    monkeypatch.setattr(
        Fold, "_grouped", lambda self, table, *a, **k: (seen.append(table), grouped(self, table, *a, **k))[1]
    )
    for each in range(300):
        row = {"word": f"w{each % 100}", "text": f"{each:03}" * 300, "unused": "x" * 5_000}
        fold.add(pa.RecordBatch.from_pylist([row]))
    again = pickle.loads(pickle.dumps(fold))
    for its in (fold, again):
        parts = list(its.finish_parts())
        found = {row["word"]: row["text"] for part in parts for row in part.to_pylist()}
        assert len(parts) > 5 and found == {f"w{each % 100}": f"{each:03}" * 300 for each in range(200, 300)}
    assert max(table.nbytes for table in seen) < 50_000
    assert again.finish() is not None and again.finish().num_rows == 100


def either(one: int, other: int) -> int:
    return one | other


@given(st.lists(rows, max_size=5), st.integers(0, 4))
def test_aggregates_of_several_columns_and_custom_ones_fold_in_any_split(
    parts: list[list[tuple[str, int | None]]], cut: int
) -> None:
    def make() -> StateCommitter:
        aggregates = {
            "mean": Mean("n"),
            "first": First("n"),
            "last": Last("n"),
            "bits": Reduce("n", function=either),
            "distinct": ApproxDistinct("n"),
        }
        committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates=aggregates)
        committer.bind("count", [INPUT], 1)
        committer.prepare({}, None, None, None)  # type: ignore[arg-type]
        return committer

    merged = make()._prepared()
    for half in (parts[:cut], parts[cut:]):
        combiner = make().combiner()
        for part in half:
            combiner.add(batch(part))
        partial = combiner.finish()
        if partial is not None:
            merged.add(partial)
    found = merged.finish()
    every = [row for part in parts for row in part]
    held = {row["word"]: row for row in found.to_pylist()} if found is not None else {}
    assert set(held) == {word for word, _ in every}
    for word, row in held.items():
        present = [n for each, n in every if each == word and n is not None]
        bits = None
        for n in present:
            bits = n if bits is None else bits | n
        assert row["mean"] == (pytest.approx(sum(present) / len(present)) if present else None)
        assert (row["mean_sum"], row["mean_count"]) == (sum(present) if present else None, len(present))
        assert (row["first"], row["last"]) == ((present[0], present[-1]) if present else (None, None))
        assert row["bits"] == bits
        assert row["distinct"] == len(set(present))


def test_a_sum_of_decimals_is_exact_and_never_overflows_in_silence() -> None:
    source = Input("spout", "default", Fields(word=str, n=pa.decimal128(38, 2)), GlobalGrouping())

    def folded(values: list[Decimal]) -> Decimal:
        committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates={"total": Sum("n")})
        committer.bind("count", [source], 1)
        combiner = committer.combiner()
        combiner.add(pa.record_batch({"word": ["a"] * len(values), "n": pa.array(values, pa.decimal128(38, 2))}))
        made = combiner.finish()
        assert made is not None
        total: Decimal = made.column("total")[0].as_py()
        return total

    assert folded([Decimal("0.10")] * 10 + [Decimal("99999999999999.99")]) == Decimal("100000000000000.99")
    most = Decimal("9" * 36 + ".99")
    assert folded([most]) == most
    assert folded([most, Decimal("0.01"), most.copy_negate()]) == Decimal("0.01")
    with pytest.raises(BadRecordError, match=r"'total' does not fit into decimal128\(38, 2\)"):
        folded([most, Decimal("0.01")])


def test_decimals_too_long_for_any_sum_are_refused() -> None:
    kind = pa.decimal256(76, 0)
    source = Input("spout", "default", Fields(word=str, n=kind), GlobalGrouping())
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates={"total": Sum("n")})
    committer.bind("count", [source], 1)
    combiner = committer.combiner()
    with pytest.raises(BadRecordError, match="more than 76 digits"):
        combiner.add(pa.record_batch({"word": ["a", "a"], "n": pa.array([Decimal("9" * 76)] * 2, kind)}))
        combiner.finish()


def folded_floats(values: list[float], key: str = "word") -> list[dict[str, object]]:
    """Fold floats. ``values`` are either the keys or the aggregated field."""
    source = Input("spout", "default", Fields(word=float, n=float), GlobalGrouping())
    aggregates = {"rows": Count(), "least": Min("n"), "most": Max("n")}
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates=aggregates)
    committer.bind("count", [source], 1)
    first = committer.combiner()
    committer.prepare({}, None, None, None)  # type: ignore[arg-type]
    ones = [1.0] * len(values)
    for each in range(len(values)):
        one = slice(each, each + 1)
        columns = {"word": values[one], "n": ones[one]} if key == "word" else {"word": ones[one], "n": values[one]}
        combiner = committer.combiner()
        combiner.add(pa.record_batch(columns))
        made = combiner.finish()
        assert made is not None
        committer._prepared().add(made)
        first.add(pa.record_batch(columns))
    parts, whole = committer._prepared().finish(), first.finish()
    assert parts is not None and whole is not None
    assert repr(parts.to_pylist()) == repr(whole.to_pylist())
    rows: list[dict[str, object]] = whole.to_pylist()
    return rows


def test_every_form_of_a_float_is_one_key() -> None:
    nan = float("nan")
    rows = folded_floats([0.0, -0.0, nan, -nan, -0.0])
    assert [(repr(row["word"]), row["rows"]) for row in rows] == [("0.0", 3), ("nan", 2)]


@pytest.mark.parametrize("order", list(itertools.permutations([2.0, float("nan"), 1.0, -0.0])))
def test_nan_is_above_all_numbers_in_any_order(order: tuple[float, ...]) -> None:
    (row,) = folded_floats(list(order), key="n")
    assert (repr(row["least"]), repr(row["most"])) == ("0.0", "nan")


def test_columns_that_would_collide_and_fields_that_do_not_fit_are_refused() -> None:
    state = OpaqueMapState(MemoryBackend())
    with pytest.raises(TopologyError, match="'mean' needs a column 'mean_sum', and there is one already"):
        StateCommitter(state, key=["word"], aggregates={"mean_sum": Sum("n"), "mean": Mean("n")})
    with pytest.raises(TopologyError, match="ApproxDistinct needs a field"):
        ApproxDistinct()
    with pytest.raises(TopologyError, match="needs a function of two values"):
        Reduce("n")
    text = Input("spout", "default", Fields(word=str, n=str), GlobalGrouping())
    with pytest.raises(TopologyError, match=r"Sum\('n'\) needs a number, and the field is string"):
        StateCommitter(state, key=["word"], aggregates={"mean": Mean("n")}).bind("count", [text], 1)


def test_approx_distinct_of_many_values_is_close() -> None:
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates={"users": ApproxDistinct("n")})
    committer.bind("count", [INPUT], 1)
    combiner = committer.combiner()
    for start in range(0, 60_000, 10_000):
        combiner.add(batch([("a", each % 50_000) for each in range(start, start + 10_000)]))
    made = combiner.finish()
    assert made is not None
    assert made.column("users")[0].as_py() == pytest.approx(50_000, rel=0.08)
    assert len(made.column("users_sketch")[0].as_py()) <= 4_200


def test_a_function_that_returns_what_its_column_cannot_hold_is_refused() -> None:
    """Arrow would truncate the fraction."""
    state = OpaqueMapState(MemoryBackend())
    halves = StateCommitter(state, key=["word"], aggregates={"half": Reduce("n", lambda one, other: (one + other) / 2)})
    halves.bind("count", [INPUT], 1)
    combiner = halves.combiner()
    combiner.add(batch([("a", 1), ("a", 2)]))
    with pytest.raises(BadRecordError, match=r"'half' does not fit into int64: 1\.5 is not an integer"):
        combiner.finish()

    def merged(txid: int, half: int) -> list[dict[str, object]]:
        halves.prepare({}, None, None, TransactionAttempt(txid, 1))  # type: ignore[arg-type]
        halves.execute_arrow(pa.record_batch({"word": ["a"], "half": [half]}))
        return [row for each in halves.finish_batch() for row in each.to_pylist()]

    assert merged(1, 3) == [{"word": "a", "half": 3}]
    assert merged(2, 5) == [{"word": "a", "half": 4}]
    with pytest.raises(BadRecordError, match=r"'half': 4\.5 is not an integer"):
        merged(3, 5)


SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.duration("s"), [2 * SECOND, -SECOND, 3 * SECOND]),
        (pa.duration("us"), [2 * SECOND, -SECOND, 3 * SECOND]),
        (pa.decimal128(5, 2), [Decimal("2.00"), Decimal("-1.25"), Decimal("3.00")]),
        (pa.decimal256(60, 2), [Decimal("2.00"), Decimal("-1.25"), Decimal("3.00")]),
        (pa.float16(), [2.0, -1.25, 3.0]),
        (pa.float32(), [2.0, -1.25, 3.0]),
        (pa.time32("s"), [datetime.time(2), datetime.time(1), datetime.time(3)]),
        (pa.date64(), [datetime.date(2, 1, 1), datetime.date(1, 1, 1), datetime.date(3, 1, 1)]),
        (pa.binary(), [b"b", b"", b"c"]),
    ],
    ids=str,
)
def test_every_type_that_an_aggregate_takes_is_folded(kind: pa.DataType, values: list[Any]) -> None:
    """Arrow can group by some types of which it computes no minimum or first value."""
    first, least, most = values
    aggregates: dict[str, Aggregate] = {
        "first": First("v"),
        "last": Last("v"),
        "least": Min("v"),
        "most": Max("v"),
        "reduced": Reduce("v", max),
        "different": ApproxDistinct("v"),
    }
    if isinstance(first, (float, Decimal)):
        aggregates["total"] = Sum("v")
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates=aggregates)
    committer.bind("count", [Input("spout", "default", Fields(word=str, v=kind), GlobalGrouping())], 1)
    committer.prepare({}, None, None, TransactionAttempt(1, 1))  # type: ignore[arg-type]
    for part in ([None, first, least], [None], [most, least]):
        combiner = committer.combiner()
        combiner.add(pa.record_batch({"word": ["a"] * len(part), "v": pa.array(part, kind)}))
        made = combiner.finish()
        assert made is not None
        committer.execute_arrow(made)
    (row,) = (row for each in committer.finish_batch() for row in each.to_pylist())
    found = [row[name] for name in ("first", "last", "least", "most", "reduced", "different")]
    assert found == [first, least, least, most, most, 3]
    assert row.get("total") == (first + least + most + least if "total" in aggregates else None)


@pytest.mark.parametrize("values", [["", "a", "\0", "\0" * 8, "", None], [b"", b"a", b"\0", b"\0" * 8, b"", None]])
def test_approx_distinct_counts_an_empty_value_as_a_value(values: list[Any]) -> None:
    kind = pa.array(values).type
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates={"n": ApproxDistinct("v")})
    committer.bind("count", [Input("spout", "default", Fields(word=str, v=kind), GlobalGrouping())], 1)
    combiner = committer.combiner()
    combiner.add(pa.record_batch({"word": ["a"] * len(values), "v": pa.array(values, kind)}))
    made = combiner.finish()
    assert made is not None and made.column("n").to_pylist() == [4]


def test_a_dictionary_column_groups_by_its_values() -> None:
    kind = pa.dictionary(pa.int32(), pa.float64())
    source = Input("spout", "default", Fields(word=kind, n=int), GlobalGrouping())
    committer = StateCommitter(OpaqueMapState(MemoryBackend()), key=["word"], aggregates={"rows": Count()})
    committer.bind("count", [source], 1)
    combiner = committer.combiner()
    for words in ([0.0, 1.5], [-0.0, 2.5, 1.5]):
        combiner.add(pa.record_batch({"word": pa.array(words).dictionary_encode(), "n": [1] * len(words)}))
    made = combiner.finish()
    assert made is not None and made.schema.field("word").type == kind
    assert {str(row["word"]): row["rows"] for row in made.to_pylist()} == {"0.0": 2, "1.5": 2, "2.5": 1}


@pytest.mark.parametrize("committer", [lambda it: StateCommitter(it, ["word"], {"n": Count()}), DeadLetterTable])
def test_a_backend_without_a_value_type_is_no_state(committer: Any) -> None:
    with pytest.raises(
        TopologyError, match=r"writes to a state, not to a MemoryBackend: give OpaqueMapState\(backend\)"
    ):
        committer(MemoryBackend("x"))
