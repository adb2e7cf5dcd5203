"""StateCommitter's folding: exact, in any split of the rows."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import Fields
from framework.errors import BadRecordError
from framework.topology import Input
from framework.topology.groupings import GlobalGrouping
from sinks import Count, Max, MemoryBackend, Min, OpaqueMapState, StateCommitter, Sum
from sinks.committer import _Fold

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


def merger() -> _Fold:
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
