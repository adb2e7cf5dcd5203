"""Rows that fall due together are read, sent and written by pages, and memory stays bounded."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, arrow_spill
from framework.errors import RetryableError
from framework.operators.event_window_assigner import tumbling
from framework.topology import CommitFence, Header, Input, OpenCommit, Stamp, TopologyContext, TransactionAttempt
from framework.topology.canonical_form import NAN
from framework.topology.groupings import FieldsGrouping, GlobalGrouping
from sinks import (
    AsOfJoiningCommitter,
    Count,
    DeduplicatingCommitter,
    ExpiringCommitter,
    JoiningCommitter,
    MemoryBackend,
    OpaqueMapState,
    SessionCommitter,
    SqliteBackend,
    Sum,
    WindowedCommitter,
    external_row_sorter,
    join_inputs,
    states,
)
from sinks.backend import Key, Row
from sinks.event_time import sessions
from sinks.event_time.timers import Entry, TimerCommitter
from sinks.event_time.two_stream_committer import PairCommitter
from sinks.event_time.watermark import WATERMARK_FIELDS
from sinks.states import MapState

pytestmark = pytest.mark.rule("C44")

ROW = Fields(id=str, at=int, number=int)
PAID = Fields(id=str, paid_at=int, paid=int)
GROUPED = FieldsGrouping(Fields("id"))


class Reminder(TimerCommitter):
    """Sends the sum so far with each record, and once more when a key was silent."""

    def on_record(self, entry: Entry, record: Any, at: Any) -> None:
        entry.value = (entry.value or 0) + record["number"]
        entry.emit(id=entry.key[0], total=entry.value)
        entry.set_timer(at.replace(microsecond=at.microsecond + 7))

    def on_timer(self, entry: Entry, at: Any) -> None:
        entry.emit(id=entry.key[0], total=-(entry.value or 0))
        entry.value = None


ONE: dict[str, Any] = {"on": "at", "key": ["id"], "unit": "us"}
BOTH: dict[str, Any] = {"key": ["id"], "left": "at", "right": "paid_at", "unit": "us"}
TOTALS: dict[str, Any] = {"n": Count(), "total": Sum("number")}
MAKERS: dict[str, Callable[[MapState], Any]] = {
    "windows": lambda state: WindowedCommitter(state, tumbling("0.000008 s"), aggregates=TOTALS, **ONE),
    "late windows": lambda state: WindowedCommitter(
        state, tumbling("0.000004 s"), aggregates=TOTALS, allowed_lateness="0.000009 s", **ONE
    ),
    "sessions": lambda state: SessionCommitter(state, "0.000003 s", aggregates=TOTALS, **ONE),
    "first": lambda state: DeduplicatingCommitter(state, within="0.00001 s", **ONE),
    "expiring": lambda state: ExpiringCommitter(state, ttl="0.000009 s", aggregates=TOTALS, **ONE),
    "pairs": lambda state: JoiningCommitter(state, within="0.00001 s", how="outer", **BOTH),
    "valued": lambda state: AsOfJoiningCommitter(state, within="0.000009 s", **BOTH),
    "timers": lambda state: Reminder(state, output=Fields(id=str, total=int), **ONE),
}


#: Of each transaction, its records, its payments, and the watermarks before and after it. The last
#: but one lets most rows fall due.
BATCHES: list[tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], tuple[int, int]]] = [
    (
        [(key, 100 + (7 * each) % 23, each) for each, key in enumerate("abcdcbaddabcabcdeefgafbc")],
        [(key, 100 + (5 * each) % 19, each) for each, key in enumerate("aabcddcbagfeabc")],
        (0, 101),
    ),
    ([("a", 104, 50), ("h", 119, 51), ("b", 130, 52)], [("b", 101, 60), ("h", 118, 61)], (101, 103)),
    ([("a", 125, 70), ("c", 121, 71), ("i", 126, 72)], [("c", 121, 73), ("d", 122, 74)], (103, 124)),
    ([("z", 190, 80)], [], (124, 180)),
]
WHOLE = (10_000, 50_000)
Emitted = dict[str, list[dict[str, Any]]]


class Collected:
    """Takes what a committer emits, by stream, in its order."""

    def __init__(self) -> None:
        self.rows: Emitted = {}

    def emit_arrow(self, batch: pa.RecordBatch, stream: str = "default") -> None:
        self.rows.setdefault(stream, []).extend(batch.to_pylist())


class Stopped(Exception):
    pass


class Steps:
    """The steps by which a state was written. A task stops before step number ``stops_at``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.stops_at: int | None = None
        for kind in (MemoryBackend, SqliteBackend):
            patch.setattr(kind, "multi_put", self._counted(kind.multi_put))

    def _counted(self, put: Any) -> Any:
        def counted(backend: Any, header: Header, keys: Sequence[Key], *given: Any) -> None:
            if len(self.sizes) == self.stops_at:
                raise Stopped
            self.sizes.append(len(keys))
            put(backend, header, keys, *given)

        return counted


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def resize(patch: pytest.MonkeyPatch, page: int, in_memory: int) -> None:
    for name, value in {"PAGE_ROWS": page, "SORTED_ROWS": in_memory, "CHUNK_ROWS": 2, "RUNS_MAX": 2}.items():
        patch.setattr(external_row_sorter, name, value)
    patch.setattr(sessions, "PANES_MAX", page)


def bound(name: str, state: MapState) -> Any:
    committer = MAKERS[name](state)
    records = [Input("records", "default", ROW, GROUPED)]
    if name in ("pairs", "valued"):
        records.append(Input("paid", "default", PAID, GROUPED))
    committer.bind("closing", [*records, Input("watermark", "default", WATERMARK_FIELDS, GlobalGrouping())], 1)
    state.prepare("timed")
    return committer


def attempt(committer: Any, txid: int, number: int) -> Emitted:
    """Open and commit the transaction. Returns what it emits."""
    state, sent = committer.state, Collected()
    records, paid, marks = BATCHES[txid - 1]
    header = state.read_header()
    state.raise_header(header, header.opened(1, OpenCommit(txid, number, "")))
    made = copy.copy(committer)
    made._batches, made._came = [], ([], [])
    context = TopologyContext("timed", "closing", 0, 1, {}, parallelisms={})
    made.prepare({}, context, sent, TransactionAttempt(txid, number, CommitFence("timed", 1, "", "closing:0")))
    for batch in (table(ROW, records), table(PAID, paid if isinstance(made, PairCommitter) else [])):
        combiner = made.combiner()
        if combiner is not None and batch.num_rows:
            combiner.add(batch)
            batch = combiner.finish()
        if batch.num_rows:
            made.execute_arrow(batch)
    made.execute_arrow(mark(*marks))
    for each in made.finish_batch():
        sent.emit_arrow(each)
    if number > 1:
        state.sweep(state.read_header())
    header = state.read_header()
    state.raise_header(header, header.finished(txid))
    return sent.rows


def mark(before: int, after: int) -> pa.RecordBatch:
    values = dict(zip(WATERMARK_FIELDS, (before, after), strict=False))
    return pa.RecordBatch.from_pylist([values], WATERMARK_FIELDS.schema())


def table(fields: Fields, found: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*found, strict=True)) if found else [()] * len(fields)
    arrays = [pa.array(column, fields.type_of(name)) for name, column in zip(fields, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=list(fields))


def live(state: MapState) -> dict[Key, Any]:
    return {key: row.value for key, row in state.backend.scan() if row.value is not None}


def whole(name: str) -> list[tuple[Emitted, dict[Key, Any]]]:
    """Of each transaction, what it emits and leaves, if all rows are one page."""
    state = OpaqueMapState(MemoryBackend())
    committer = bound(name, state)
    return [(attempt(committer, txid, 1), live(state)) for txid in range(1, len(BATCHES) + 1)]


@pytest.mark.each_value_once
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_size_of_pages_changes_neither_rows_nor_their_order(
    name: str, store: str, sizes: tuple[int, int], steps: Steps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = whole(name)
    before = len(steps.sizes)
    resize(monkeypatch, *sizes)
    state = OpaqueMapState(MemoryBackend() if store == "memory" else SqliteBackend(tmp_path / "rows.db", "closing"))
    committer = bound(name, state)
    assert [(attempt(committer, txid, 1), live(state)) for txid in range(1, len(BATCHES) + 1)] == expected
    assert len(steps.sizes) > 2 * before
    state.close()


@pytest.mark.parametrize("name", MAKERS)
def test_an_attempt_that_stops_between_two_pages_is_repeated_from_the_values_before_it(
    name: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(name)
    resize(monkeypatch, 1, 2)
    stopped = 0
    for stops_at in range(6):
        state = OpaqueMapState(MemoryBackend())
        committer = bound(name, state)
        for txid, (emitted, left) in enumerate(expected, 1):
            steps.sizes, steps.stops_at = [], stops_at
            number = 1
            try:
                found = attempt(committer, txid, number)
            except Stopped:
                stopped += stops_at > 0
                steps.stops_at = None
                found = attempt(committer, txid, 2)
            assert (found, live(state)) == (emitted, left)
    assert stopped > 3


class Many(MemoryBackend):
    """Holds ``count`` windows that are due, and stores nothing: it counts what is written."""

    count = 0

    def due(self, column: str, after: int, upto: int, *, txid: int | None) -> Iterator[tuple[Key, Row]]:
        for number in range(self.count if after > 0 else 0):
            yield (f"{number * 7_919 % self.count:08}", 100, 108), Row((1, number), Stamp(1, 1, 1), None, "closing:0")

    def multi_put(self, header: Header, keys: Sequence[Key], *given: Any) -> None:
        written.append(len(keys))


written: list[int] = []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows_that_fall_due_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAGE_ROWS": 50, "SORTED_ROWS": 100, "CHUNK_ROWS": 5, "RUNS_MAX": 4}.items():
        monkeypatch.setattr(external_row_sorter, name, value)
    monkeypatch.setattr(states, "PAGE_KEYS", 50)
    peaks = []
    for count in (100, 2_000, 20_000):
        written.clear()
        backend = Many()
        committer = bound("windows", OpaqueMapState(backend))
        backend.count = count
        header = backend.read_header()
        backend.raise_header(header, header.opened(1, OpenCommit(2, 1, "")))
        context = TopologyContext("timed", "closing", 0, 1, {}, parallelisms={})
        granted = TransactionAttempt(2, 1, CommitFence("timed", 1, "", "closing:0"))
        committer.prepare({}, context, Collected(), granted)
        committer.execute_arrow(mark(50, 200))
        tracemalloc.start()
        sent, last = 0, ""
        for batch in committer.finish_batch():
            ids = batch.column("id").to_pylist()
            assert [last, *ids] == sorted([last, *ids])
            sent, last = sent + len(ids), ids[-1]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sent == sum(written) == count
        assert max(written) <= 50
    # Ten times as many rows are runs of one or two more levels.
    assert peaks[2] < 3 * peaks[1], peaks


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pairs_of_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_inputs, "PAGE_KEYS", 50)
    peaks = []
    for keys, count in ((300, 300), (1, 90_000)):
        state = OpaqueMapState(MemoryBackend())
        committer = bound("pairs", state)
        header = state.read_header()
        state.raise_header(header, header.opened(1, OpenCommit(1, 1, "")))
        context = TopologyContext("timed", "closing", 0, 1, {}, parallelisms={})
        granted = TransactionAttempt(1, 1, CommitFence("timed", 1, "", "closing:0"))
        committer.prepare({}, context, Collected(), granted)
        records = [(f"{number % keys:03}", 100, number) for number in range(300)]
        for each in (table(ROW, records), table(PAID, records), mark(0, 99)):
            committer.execute_arrow(each)
        found = total = 0
        tracemalloc.start()
        for batch in committer.finish_batch():
            assert batch.num_rows <= 50
            found += batch.num_rows
            total += sum(
                a * 300 + b for a, b in zip(*(batch.column(n).to_pylist() for n in ("number", "paid")), strict=True)
            )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found == count
        assert total == sum(range(90_000) if keys == 1 else range(0, 301 * 300, 301))
    assert peaks[1] < 1.5 * peaks[0], peaks


def test_pages_of_pairs_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_inputs, "PAGE_BYTES", 3 * 8 * 6)
    expected, batches = whole("pairs"), []
    monkeypatch.setattr(Collected, "emit_arrow", lambda self, batch: batches.append(batch.num_rows))
    attempt(bound("pairs", OpaqueMapState(MemoryBackend())), 1, 1)
    assert sum(batches) == len(expected[0][0]["default"]) and 1 < max(batches[:-1]) < 6


def test_a_value_that_a_file_has_held_is_the_same_value() -> None:
    """A NaN equals only itself, and keys are compared."""
    state = OpaqueMapState(MemoryBackend())
    state.bind(Fields(at=int, ratio=float), Fields(part=float))
    with pytest.MonkeyPatch.context() as patch:
        resize(patch, 1, 1)
        granted = TransactionAttempt(1, 1)
        state.begin_commit(granted)
        keys = [(1, NAN), (2, 0.5), (3, NAN)]
        state.multi_put(keys, [NAN, 1.5, NAN])
        state.commit(granted)
        state.begin_commit(TransactionAttempt(2, 1))
        found = [each for page in state.due("at", 0, 9, lambda keys: [True] * len(keys)) for each in page]
    assert found == [(keys[0], (NAN,)), (keys[1], (1.5,)), (keys[2], (NAN,))]


def test_rows_that_fit_neither_in_memory_nor_into_the_folder_name_the_setting(
    monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    resize(monkeypatch, 1, 1)
    monkeypatch.setattr(arrow_spill.tempfile, "TemporaryFile", full)
    committer = bound("windows", OpaqueMapState(MemoryBackend()))
    attempt(committer, 1, 1)
    attempt(committer, 2, 1)
    with pytest.raises(RetryableError, match=r"No space left on device.*set TMPDIR"):
        attempt(committer, 3, 1)
