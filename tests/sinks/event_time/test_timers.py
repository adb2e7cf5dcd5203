"""Timers of a committer of one's own: at their time, once, whatever the batches and failures."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import CLOCK_STREAM, Fields, Topology, TopologyFailed, TransactionalTopologyBuilder
from framework.operators.watermarks import LATE_STREAM
from framework.testing import run_on
from sinks import Entry, MemoryBackend, OpaqueMapState, TimerCommitter, WatermarkCommitter
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.targets import examples
from tests.sinks.event_time.test_windows import FAULTS

pytestmark = pytest.mark.rule("C44")

ROW = Fields(id=str, source=int, at=int, number=int)
PATIENCE = 5


class Silent(TimerCommitter):
    """Names what a key has had, when nothing came for five seconds, and then forgets it; with a
    reminder every two seconds until then."""

    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        numbers, last = entry.value or [[], None]
        if last is not None:
            entry.clear_timer(moment(last + PATIENCE))
            entry.clear_timer(moment(last + 2))
        entry.value = [[*numbers, record["number"]], record["at"]]
        entry.set_timer(at + datetime.timedelta(seconds=2))
        entry.set_timer(at + datetime.timedelta(seconds=PATIENCE))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        numbers, last = entry.value
        over = at == moment(last + PATIENCE)
        entry.emit(id=entry.key[0], at=at, numbers=str(numbers), over=over)
        if over:
            entry.value = None


def moment(at: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)


def topology(
    kind: type[TimerCommitter] = Silent, *, opaque: bool = True, readers: int = 2, partition: Sequence[str] = ()
) -> Topology:
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [], 1: []}, ROW, 10)
    builder = TransactionalTopologyBuilder("reminding", "records", spout, readers)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", partition=["source"], max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    output = Fields(id=str, at=datetime.datetime, numbers=str, over=bool)
    silent = kind(OpaqueMapState(MemoryBackend()), key=["id"], on="at", output=output, partition=partition)
    builder.set_bolt("silent", silent, 2).fields_grouping("records", Fields("id")).all_grouping("watermark")
    return builder.build()


def sent(done: Any) -> list[tuple[Any, ...]]:
    return sorted((row["id"], int(row["at"].timestamp()), row["numbers"], row["over"]) for row in done.rows("silent"))


@pytest.mark.parametrize("take", [1, 2, 9])
def test_a_timer_comes_once_when_the_watermark_passes_it(take: int) -> None:
    rows = [["a", 0, 10, 1], ["a", 0, 13, 2], ["b", 0, 14, 3], ["b", 0, 18, 4], ["c", 0, 40, 5]]
    done = run_on(topology(), {0: rows}, take=take)
    assert sent(done) == [
        ("a", 12, "[1]", False),
        ("a", 15, "[1, 2]", False),
        ("a", 18, "[1, 2]", True),
        ("b", 16, "[3]", False),
        ("b", 20, "[3, 4]", False),
        ("b", 23, "[3, 4]", True),
    ]
    assert [(row["id"], row["row_kind"]) for row in done.table("silent")] == [("c", 1)]


class Listing(TimerCommitter):
    """Names the records of a key as they come."""

    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        entry.emit(id=entry.key[0], at=at, numbers=str(record["number"]), over=False)

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        raise AssertionError("it sets none")


@pytest.mark.parametrize("take", [2, 20])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_records_of_one_time_come_by_partition_however_many_tasks_read_them(readers: int, take: int) -> None:
    rows = {source: [["a", source, 10, 10 * source + each] for each in range(2)] for source in range(5)}
    end = {source: [["z", source, 99, 0]] for source in range(5)}
    made = topology(Listing, readers=readers, partition=["source"])
    done = run_on(made, {source: rows[source] + end[source] for source in range(5)}, take=take)
    assert [row["numbers"] for row in done.rows("silent")] == [str(row[3]) for its in rows.values() for row in its]


def test_a_record_behind_the_watermark_is_late() -> None:
    done = run_on(topology(), {0: [["a", 0, 10, 1], ["b", 0, 50, 2], ["a", 0, 20, 3]]}, take=1)
    assert [row["number"] for row in done.rows("silent", LATE_STREAM)] == [3]


class Expiring(TimerCommitter):
    """Forgets the value of a key that had no record for five seconds, and emits it."""

    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        if entry.value is not None:
            entry.clear_timer(moment(entry.value[1] + PATIENCE))
        entry.value = [record["number"], record["at"]]
        entry.set_timer(at + datetime.timedelta(seconds=PATIENCE))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        entry.emit(id=entry.key[0], at=at, numbers=str(entry.value[0]), over=True)
        entry.value = None


@pytest.mark.parametrize("take", [1, 7, 100])
def test_a_value_expires_when_its_key_is_silent_and_a_key_has_one_row(take: int) -> None:
    rows = [["b", 0, 1, 100], *(["a", 0, at, at] for at in range(1, 60, 3)), ["c", 0, 61, 200]]
    done = run_on(topology(Expiring), {0: rows}, take=take)
    assert sent(done) == [("b", 6, "100", True)]
    assert [(row["id"], row["row_kind"]) for row in done.table("silent")] == [("a", 0), ("c", 1)]
    done = run_on(topology(Expiring), {0: [*rows, ["c", 0, 64, 201]]}, take=take)
    assert sent(done) == [("a", 63, "58", True), ("b", 6, "100", True)]


class Backwards(Silent):
    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        entry.set_timer(at)


def test_a_timer_that_is_not_ahead_is_refused() -> None:
    with pytest.raises(Exception, match="key .* a timer at .* is not after .*, which is now"):
        run_on(topology(Backwards), {0: [["a", 0, 10, 1], ["b", 0, 50, 2]]}, take=1)


def expected(rows: list[tuple[str, int, int]], watermark: int) -> list[tuple[Any, ...]]:
    found = []
    for key in {key for key, _, _ in rows}:
        its = sorted((at, number) for name, at, number in rows if name == key and at < watermark)
        numbers: list[int] = []
        for place, (at, number) in enumerate(its):
            numbers.append(number)
            following = its[place + 1][0] if place + 1 < len(its) else watermark
            for wait in (2, PATIENCE):
                if at + wait <= following:
                    found.append((key, at + wait, str(numbers), wait == PATIENCE))
            if at + PATIENCE <= following:
                numbers = []
    return sorted(found)


@settings(max_examples=examples(40))
@given(
    st.tuples(*[st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), min_size=1, max_size=12)] * 2),
    st.integers(1, 9),
    FAULTS,
    st.booleans(),
)
def test_batches_tasks_and_failures_change_no_timer(drawn: Any, take: int, faults: Any, opaque: bool) -> None:
    number = iter(range(1_000))
    times: set[int] = set()  # of two records of one time, the order is that of their coming
    partitions: dict[int, list[Any]] = {0: [], 1: []}
    for source, rows in enumerate(drawn):
        for key, at in sorted(rows, key=lambda each: each[1]):
            if at not in times or not partitions[source]:
                partitions[source].append([key, source, at * 2 + source, next(number)])
                times.add(at)
    transactions = max(-(-len(rows) // take) for rows in partitions.values())
    chosen = [each for each in faults if each.txid <= transactions]
    done = run_on(topology(opaque=opaque), partitions, take=take, faults=chosen)
    watermark = min(rows[-1][2] for rows in partitions.values())
    every = [(row[0], row[2], row[3]) for rows in partitions.values() for row in rows]
    assert sent(done) == expected(every, watermark)


class Misspelt(Silent):
    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        entry.emit(id=entry.key[0], att=at)


def test_a_row_with_a_field_that_is_not_declared_is_refused() -> None:
    said = r"'silent' emits a field 'att', which output= does not declare \(there are: id, at, numbers, over\)"
    with pytest.raises(TopologyFailed, match=said):
        run_on(topology(Misspelt), {0: [["a", 0, 10, 1], ["b", 0, 50, 2]]})
