"""Quantiles and lists: the same however a stream is divided, and as exact as they say."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from framework import Fields, TransactionalTopologyBuilder
from framework.errors import CorruptStateError, TopologyError
from framework.testing import replay, run_on
from sinks import Aggregate, Collect, OpaqueMapState, Quantile, SqliteBackend, StateCommitter, Top
from spouts import OpaqueMemoryTransactionalSpout

NUMBERS = st.one_of(st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1), st.none(), st.just(math.nan))


def folded(aggregate: Aggregate, values: list[Any], cuts: list[int]) -> Any:
    """The values in parts, merged from the left."""
    parts = [values[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    found = None
    for each in parts:
        found = aggregate.merge(found, aggregate.fold(each, partial=False))
    return found


@given(st.lists(NUMBERS, max_size=60), st.data())
def test_a_sketch_is_the_same_however_the_values_are_divided(values: list[Any], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    sketch = Quantile("x", 0.5).expanded("q")["q_sketch"]
    whole = folded(sketch, values, [])
    assert folded(sketch, values, cuts) == whole
    assert folded(sketch, values[::-1], cuts) == whole


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_is_within_a_hundredth_of_the_value_of_its_rank(values: list[float], share: float) -> None:
    parts = Quantile("x", share).expanded("q")
    found = parts["q"].derive([parts["q_sketch"].fold(values, partial=False)])
    ordered = sorted(values)
    rank = math.floor(share * (len(ordered) - 1))
    near = {ordered[rank], ordered[min(rank + 1, len(ordered) - 1)]}
    assert any(math.isclose(found, each, rel_tol=0.0101, abs_tol=1e-300) for each in near), (found, near)


def test_a_large_stream_has_a_small_sketch(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.lognormvariate(3, 2) for _ in range(50_000)]
    parts = Quantile("ms", 0.99).expanded("p99")
    sketch = parts["p99_sketch"].fold(values, partial=False)
    assert len(sketch) < 16_384
    assert parts["p99"].derive([sketch]) == pytest.approx(sorted(values)[49_500], rel=0.011)
    assert parts["p99"].derive([None]) is None
    assert parts["p99"].derive([parts["p99_sketch"].fold([math.nan], partial=False)]) is None
    assert parts["p99"].derive([parts["p99_sketch"].fold([1.7e308], partial=False)]) == pytest.approx(1.7e308, rel=0.01)


def test_bytes_that_are_no_sketch_are_named() -> None:
    sketch = Quantile("ms", 0.99).expanded("p99")["p99_sketch"]
    for data in (b"", b"\x02" * 17, sketch.fold([1.0], partial=False)[:-1]):
        with pytest.raises(CorruptStateError, match="are no sketch of quantiles"):
            sketch.merge(data, data)


def test_a_list_has_the_first_values_in_their_forms() -> None:
    collect = Collect("x", 3)
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert folded(collect, [None, 1, 2, None, 3, 4], [3]) == "[1,2,3]"
    assert folded(collect, [None], []) is None
    mixed: list[list[Any]] = [[moment], [b"a"], ['ü"'], [decimal.Decimal("1.50")], [math.inf], [True]]
    found = [json.loads(collect.fold(each, partial=False)) for each in mixed]
    assert found == [["2026-01-02T00:00:00.000000Z"], ["YQ=="], ['ü"'], ["1.50"], ["Infinity"], [True]]


VALUES = st.one_of(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.none() | st.floats()),
    st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)),
    st.lists(st.datetimes().map(lambda each: each.replace(tzinfo=datetime.UTC))),
)


@example(values=[-0.0, math.nan, 0.0, math.inf, -1.5, -math.inf], cuts=[1, 3], most=6, seed=random.Random(1))
@given(values=VALUES, cuts=st.lists(st.integers(0, 50)), most=st.integers(1, 5), seed=st.randoms(use_true_random=False))
def test_the_greatest_values_do_not_depend_on_the_order_or_the_batches(
    values: list[Any], cuts: list[int], most: int, seed: Any
) -> None:
    present = [each for each in values if each is not None and each == each]
    greatest = sorted((each + 0 if isinstance(each, float) else each for each in present), reverse=True)[:most]
    expected = Collect("x", most).fold(greatest, partial=False)
    shuffled = seed.sample(values, len(values))
    assert [folded(Top("x", most), each, sorted(cuts)) or "[]" for each in (values, shuffled)] == [expected or "[]"] * 2


TEXTS = st.lists(st.text(st.sampled_from("aü\x01\U0001f600"), max_size=6), max_size=20)


@example(texts=["aaaa", "aaaaaa", "a"], sizes=[1], bytes_max=8, pairs=[])
@given(
    texts=TEXTS,
    sizes=st.lists(st.integers(1, 5)),
    bytes_max=st.integers(1, 60),
    pairs=st.lists(st.integers(0, 20), max_size=20),
)
@pytest.mark.parametrize("of", [Collect, Top])
def test_the_values_of_a_list_end_with_the_one_that_reaches_the_bytes(
    of: Any, texts: list[str], sizes: list[int], bytes_max: int, pairs: list[int]
) -> None:
    """However the values are divided, and in whichever order neighbouring parts are merged."""
    expected, size = [], 0
    for each in texts if of is Collect else sorted(texts, reverse=True):
        if size < bytes_max and len(expected) < 7:
            expected.append(each)
            size += len(json.dumps(each, ensure_ascii=False).encode())
    aggregate, left, parts = of("x", 7, bytes_max), texts, []
    for each in (*sizes, len(texts)):
        parts.append(aggregate.fold(left[:each], partial=False))
        left = left[each:]
    for each in (*pairs, *[0] * len(parts)):
        at = each % len(parts)
        parts[at : at + 2] = [aggregate.fold(parts[at : at + 2], partial=True)]
    assert json.loads(parts[0] or "[]") == expected


@pytest.mark.parametrize("batch", [1, 1_000])
def test_large_values_fill_a_row_to_its_bound_whatever_the_batches_and_replays(batch: int, tmp_path: Any) -> None:
    chance = random.Random(1)
    rows = {0: [["k", chance.choice("abc") * chance.choice([5, 300, 3_000])] for _ in range(60)]}
    spout = OpaqueMemoryTransactionalSpout(rows, Fields(k=str, x=str), batch)
    builder = TransactionalTopologyBuilder("t", "spout", spout, 1)
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "found"))
    aggregates = {"all": Collect("x", bytes_max=10_000), "top": Top("x", 50, bytes_max=10_000)}
    builder.set_bolt("found", StateCommitter(state, ["k"], aggregates), 1).fields_grouping("spout", Fields("k"))
    (row,) = run_on(builder.build(), rows, faults=[replay()]).table("found")
    values = [value for _, value in rows[0]]
    for name, ordered in (("all", values), ("top", sorted(values, reverse=True))):
        found = json.loads(row[name])
        assert found == ordered[: len(found)]
        assert (
            len(row[name]) - len(found) - 1 >= 10_000 > len(json.dumps(found[:-1], separators=(",", ":"))) - len(found)
        )


@pytest.mark.parametrize("tasks", [1, 3])
def test_all_work_in_a_committer_though_batches_are_replayed(tasks: int, tmp_path: Any) -> None:
    rows = {part: [["k", float(number)] for number in range(part, 100, 4)] for part in range(4)}
    spout = OpaqueMemoryTransactionalSpout(rows, Fields(k=str, x=float), 7)
    builder = TransactionalTopologyBuilder("t", "spout", spout, tasks)
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "found"))
    aggregates = {"median": Quantile("x", 0.5), "all": Collect("x", 200), "top": Top("x", 3)}
    builder.set_bolt("found", StateCommitter(state, ["k"], aggregates), tasks).fields_grouping("spout", Fields("k"))
    (row,) = run_on(builder.build(), rows, faults=[replay()]).table("found")
    assert row["median"] == pytest.approx(49, rel=0.02)
    assert row["top"] == "[99.0,98.0,97.0]"
    assert sorted(json.loads(row["all"])) == [float(each) for each in range(100)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Quantile(), "Quantile needs a field"),
        (lambda: Quantile("x", 2), "share is 2: give a number between 0 and 1"),
        (lambda: Quantile("x", 0.5).output_type(pa.string()), "a quantile of 'x' needs a number, not string"),
        (lambda: Collect(), "Collect needs a field"),
        (lambda: Collect("x", 0), "most is 0: give a number above 0"),
        (lambda: Collect("x", bytes_max=0), "bytes_max is 0: give a number above 0"),
        (lambda: Collect("x").output_type(pa.list_(pa.int64())), "takes single values, not list"),
        (lambda: Top(), "Top needs a field"),
        (lambda: Top("x", 0), "most is 0: give a number above 0"),
        (
            lambda: Top("x").output_type(pa.decimal128(9, 2)),
            "takes integers, floats, text, dates and timestamps, not deci",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        make()
