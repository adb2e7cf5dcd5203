"""What a component emits, on its way into record batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from framework.errors import TopologyError
from framework.execution.collector import BUFFERED_ROWS_MAX, TaskCollector
from framework.topology import Fields
from tests.kit.values import KINDS, Breaks, Lies

STREAMS = {"default": Fields(word=str, n=int), "other": Fields(x=int), "to one": Fields(y=int)}


class Sent:
    """What a collector has sent: (stream, rows, task)."""

    def __init__(self, collector: TaskCollector) -> None:
        self.batches: list[tuple[str, list[dict[str, Any]], int | None]] = []
        collector.sink = self

    def __call__(self, stream: str, batch: pa.RecordBatch, task: int | None) -> None:
        self.batches.append((stream, batch.to_pylist(), task))


def collector(streams: dict[str, Fields] | None = None, direct: Sequence[str] = ("to one",)) -> TaskCollector:
    return TaskCollector("split", STREAMS if streams is None else streams, frozenset(direct))


def test_rows_leave_in_the_order_of_each_stream() -> None:
    made = collector()
    sent = Sent(made)
    made.emit(["a", 1])
    made.emit([7], "other")
    made.emit(("b", 2), stream="default")
    made.emit_direct(3, [9], "to one")
    assert sent.batches == []
    made.flush()
    assert sent.batches == [
        ("default", [{"word": "a", "n": 1}, {"word": "b", "n": 2}], None),
        ("other", [{"x": 7}], None),
        ("to one", [{"y": 9}], 3),
    ]
    made.flush()
    assert len(sent.batches) == 3  # nothing goes twice
    assert made.emitted == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", ["default", "pairs"])
def test_values_come_in_any_sequence(kind: str, stream: str) -> None:
    made = collector({stream: Fields(n=int, text=str)})
    sent = Sent(made)
    for number in range(3):
        made.emit(KINDS[kind](number, str(number)), stream)
    made.flush()
    assert sent.batches == [(stream, [{"n": number, "text": str(number)} for number in range(3)], None)]


@pytest.mark.parametrize("stream", ["default", "pairs"])
def test_a_list_may_be_used_again_after_it_was_emitted(stream: str) -> None:
    made = collector({stream: Fields(n=int, text=str)})
    sent = Sent(made)
    values = [0, "a"]
    for number in range(3):
        values[0] = number
        made.emit(values, stream)
    values.clear()
    made.flush()
    assert [row["n"] for _, rows, _ in sent.batches for row in rows] == [0, 1, 2]


@pytest.mark.parametrize("stream", ["default", "pairs"])
def test_a_sequence_that_breaks_or_lies_leaves_the_other_rows_whole(stream: str) -> None:
    made = collector({stream: Fields(n=int, text=str)})
    sent = Sent(made)
    made.emit([1, "a"], stream)
    with pytest.raises(ValueError, match="breaks"):
        made.emit(Breaks([2, "b"]), stream)
    with pytest.raises(TopologyError, match="emitted 3 values"):
        made.emit(Lies([3, "c", "d"]), stream)
    made.emit([4, "d"], stream)
    made.flush()
    assert sent.batches == [(stream, [{"n": 1, "text": "a"}, {"n": 4, "text": "d"}], None)]


@pytest.mark.parametrize("stream", ["default", "other"])
def test_no_more_rows_are_held_than_a_record_batch_takes(stream: str) -> None:
    made = collector({stream: Fields(x=int)})
    sent = Sent(made)
    for number in range(2 * BUFFERED_ROWS_MAX + 3):
        made.emit([number], stream)
    assert [len(rows) for _, rows, _ in sent.batches] == [BUFFERED_ROWS_MAX] * 2
    made.flush()
    rows = [row["x"] for _, batch, _ in sent.batches for row in batch]
    assert rows == list(range(2 * BUFFERED_ROWS_MAX + 3))


def test_record_batches_keep_their_place_among_rows() -> None:
    made = collector()
    sent = Sent(made)
    made.emit(["a", 1])
    made.emit_arrow(pa.record_batch({"word": ["b"], "n": [2]}))
    made.emit(["c", 3])
    made.flush()
    assert [rows[0]["word"] for _, rows, _ in sent.batches] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("values", "stream", "reason"),
    [
        (["a"], "default", "'split' emitted 1 values on stream 'default', which declares 2: word, n"),
        (["a", 1, 2], "default", "'split' emitted 3 values on stream 'default'"),
        ([1], "nosuch", "which it does not declare .declared: default, other, to one."),
        ([1], "to one", "it is direct, so use emit_direct"),
    ],
)
def test_a_mistake_is_named_when_it_is_made(values: list[Any], stream: str, reason: str) -> None:
    made = collector()
    Sent(made)
    with pytest.raises(TopologyError, match=reason):
        made.emit(values, stream)


def test_a_value_that_does_not_fit_is_named_with_its_field() -> None:
    made = collector()
    Sent(made)
    made.emit(["a", "b"])
    with pytest.raises(TopologyError, match="'split', stream 'default': field 'n' does not take every value"):
        made.flush()


@pytest.mark.parametrize(
    ("streams", "direct", "reason"),
    [({"other": Fields(x=int)}, (), "does not declare"), ({"default": Fields(x=int)}, ("default",), "it is direct")],
)
def test_a_default_stream_that_takes_no_rows_refuses_them(
    streams: dict[str, Fields], direct: Sequence[str], reason: str
) -> None:
    with pytest.raises(TopologyError, match=reason):
        collector(streams, direct).emit([1])


class Keeping:
    """A committer that keeps the collector, and the function that emits."""

    def __init__(self, made: TaskCollector) -> None:
        self.collector = made
        self.emit = made.emit


def test_a_committer_emits_after_it_was_pickled_with_its_collector() -> None:
    made = collector()
    first = Sent(made)
    made.emit(["processing", 1])
    made.flush()
    bolt, restored = cloudpickle.loads(cloudpickle.dumps((Keeping(made), made)))
    sent = Sent(restored)
    bolt.collector.emit(["a", 1])
    bolt.emit(["b", 2])
    restored.emit(["c", 3])
    restored.flush()
    assert sent.batches == [("default", [{"word": "a", "n": 1}, {"word": "b", "n": 2}, {"word": "c", "n": 3}], None)]
    assert len(first.batches) == 1  # the original has sent nothing more


class Batches:
    """The sizes of the batches that a collector has sent, and all rows."""

    def __init__(self, made: TaskCollector) -> None:
        self.sizes: list[int] = []
        self.words: list[Any] = []
        made.sink = self

    def __call__(self, stream: str, batch: pa.RecordBatch, task: int | None) -> None:
        batch.validate(full=True)
        self.sizes.append(batch.num_rows)
        self.words += batch.column(0).to_pylist()


@pytest.mark.parametrize("declared", [pa.string(), None])
def test_wide_rows_leave_in_several_batches(declared: pa.DataType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.execution.collector.BATCH_BYTES_MAX", 10_000)
    made = collector({"default": Fields.of({"word": declared})})
    sent = Batches(made)
    words = [f"{number}" * 300 for number in range(10, 60)] + ["w" * 20_000, "end"]
    for each in words:
        made.emit([each])
    made.flush()
    made.emit_arrow(pa.record_batch([pa.array(words)], ["word"]))
    assert sent.words == words * 2
    assert made.emitted == len(words) * 2
    assert len(sent.sizes) > 8
    assert sent.sizes.count(1) >= 2  # a row alone may be wider


@pytest.mark.slow  # some gigabytes
def test_rows_that_are_wider_together_than_an_array_can_be_leave_in_several_batches() -> None:
    made = collector({"default": Fields(word=str, words=pa.list_(pa.string()))})
    rows: list[int] = []
    made.sink = lambda stream, batch, task: rows.append(batch.num_rows)
    wide = "x" * 300_000
    for _ in range(BUFFERED_ROWS_MAX):
        made.emit([wide, [wide]])
    assert sum(rows) == BUFFERED_ROWS_MAX
    assert len(rows) >= 16


@pytest.mark.parametrize(("value", "declared"), [(1.5, int), ("\ud800", str)])
def test_a_row_that_does_not_fit_names_its_field(value: object, declared: type) -> None:
    made = collector({"default": Fields(n=declared)})
    sent = Sent(made)
    made.emit([value])
    with pytest.raises(TopologyError, match="field 'n' does not take every value"):
        made.flush()
    assert sent.batches == []


def test_rows_in_columns_are_not_cut_off() -> None:
    made = collector({"default": Fields.of({"small": pa.float32()})})
    Sent(made)
    with pytest.raises(TopologyError, match="field 'small' is declared float"):
        made.emit_arrow(pa.record_batch({"small": [1e300]}))
