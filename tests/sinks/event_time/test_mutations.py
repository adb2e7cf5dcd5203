"""Each rule of event time is needed: without it, windows are wrong, and the checks notice."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt
from framework.operators.event_clock import EventClock
from framework.operators.event_window_assigner import hopping, tumbling
from framework.operators.watermarks import NEVER
from framework.testing import crash, fail_attempt, replay
from framework.topology.planning_time_stream import CLOCK_FIELDS
from sinks import MemoryBackend, OpaqueMapState
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from sinks.event_time.expiry import ExpiringCommitter
from sinks.event_time.watermark import WatermarkCommitter
from sinks.event_time.windowed_committer import WindowedCommitter
from tests.kit.searching import first_seed
from tests.sinks.event_time import test_expiry
from tests.sinks.event_time.test_windows import check

pytestmark = pytest.mark.rule("C43")

Patch = Callable[[pytest.MonkeyPatch], None]
TRIES = 200


def clock_outside_of_the_state(patch: pytest.MonkeyPatch) -> None:
    """The clock is an attribute of the process: a replay starts from the time that it left."""
    kept: dict[str, EventClock] = {}
    after = EventClock.after

    def remembered(self: EventClock, *arguments: Any, **options: Any) -> EventClock:
        started = kept.get("clock", self) if self.partitions else self
        kept["clock"] = after(started, *arguments, **options)
        return kept["clock"]

    patch.setattr(EventClock, "after", remembered)


def clock_of_a_lost_attempt(patch: pytest.MonkeyPatch) -> None:
    """What an attempt has seen in processing counts, though it is dropped."""
    seen: dict[str, int] = {}
    keep = WatermarkCommitter.keep_for_commit

    def remembering(self: WatermarkCommitter) -> bytes:
        for partition, at in self._newest.items():
            seen[partition] = max(at, seen.get(partition, at))
        self._newest = dict(seen)
        return keep(self)

    patch.setattr(WatermarkCommitter, "keep_for_commit", remembering)


def watermark_of_the_fastest_partition(patch: pytest.MonkeyPatch) -> None:
    after = EventClock.after

    def fastest(self: EventClock, newest: Any, *arguments: Any, **options: Any) -> EventClock:
        return after(self, {"all": max(newest.values())} if newest else {}, *arguments, **options)

    patch.setattr(EventClock, "after", fastest)


def closed_before_the_last_record(patch: pytest.MonkeyPatch) -> None:
    """What is due by the watermark after the transaction is late in it."""
    commit = WatermarkedCommitter.finish_batch

    def early(self: WatermarkedCommitter) -> Any:
        self._told = [Watermarks(each.after, each.after) for each in self._told]
        return commit(self)

    patch.setattr(WatermarkedCommitter, "finish_batch", early)


def closed_windows_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpaqueMapState, "delete", lambda self, keys: None)
    due = OpaqueMapState.due
    patch.setattr(OpaqueMapState, "due", lambda self, column, after, *rest: due(self, column, -(1 << 62), *rest))


def replay_finds_no_closed_window(patch: pytest.MonkeyPatch) -> None:
    """What an earlier attempt at the transaction has closed is gone."""
    base = OpaqueMapState._base
    due = OpaqueMapState.due

    def current(self: OpaqueMapState, *arguments: Any) -> Any:
        patch.setattr(OpaqueMapState, "_base", lambda self, row, txid: row.value)
        try:
            return iter(list(due(self, *arguments)))
        finally:
            patch.setattr(OpaqueMapState, "_base", base)

    patch.setattr(OpaqueMapState, "due", current)


def late_by_the_watermark_of_its_own_transaction(patch: pytest.MonkeyPatch) -> None:
    made = WindowedCommitter._commit
    patch.setattr(WindowedCommitter, "_commit", lambda self, marks: made(self, Watermarks(marks.after, marks.after)))


MUTATIONS: list[Patch] = [
    watermark_of_the_fastest_partition,
    closed_before_the_last_record,
    closed_windows_stay,
    replay_finds_no_closed_window,
    late_by_the_watermark_of_its_own_transaction,
]


def records_of_the_transaction_prolong_every_row(patch: pytest.MonkeyPatch) -> None:
    extend = ExpiringCommitter._extend
    patch.setattr(ExpiringCommitter, "_extend", lambda self, ends, at, _: extend(self, ends, at, NEVER))


def a_later_record_ends_a_row_before_the_watermark(patch: pytest.MonkeyPatch) -> None:
    extend = ExpiringCommitter._extend
    patch.setattr(ExpiringCommitter, "_extend", lambda self, ends, at, _: extend(self, ends, at, -NEVER))


def late_behind_the_watermark(patch: pytest.MonkeyPatch) -> None:
    on_time = ExpiringCommitter._on_time
    patch.setattr(ExpiringCommitter, "_on_time", lambda self, watermark: on_time(self, watermark + self.ttl))


MUTATIONS_OF_EXPIRY: list[Patch] = [
    closed_before_the_last_record,
    closed_windows_stay,
    replay_finds_no_closed_window,
    records_of_the_transaction_prolong_every_row,
    a_later_record_ends_a_row_before_the_watermark,
    late_behind_the_watermark,
]


def replanned() -> None:
    """An opaque batch is planned again, and then holds less than the attempt that wrote and was
    lost."""
    state = OpaqueMapState(MemoryBackend())
    committer = WatermarkCommitter(state, "at")
    committer.state.bind(Fields(name=str), Fields(watermark=int, clock=str))

    def watermark(txid: int, number: int, newest: int) -> int:
        task, again = copy.copy(committer), copy.copy(committer)
        granted = TransactionAttempt(txid, number)
        for each in (task, again):
            each.prepare({}, None, None, granted)  # type: ignore[arg-type]
        task.execute_arrow(pa.RecordBatch.from_pylist([{"planned_at": txid, "unread": False}], CLOCK_FIELDS.schema()))
        task.execute_arrow(pa.RecordBatch.from_pylist([{"partition": "0", "newest": newest}]))
        again.take_for_commit(task.keep_for_commit())
        (row,) = again.finish_batch()
        return int(row.column("watermark")[0].as_py())

    assert [watermark(1, 1, 10), watermark(2, 1, 100), watermark(2, 2, 50), watermark(3, 1, 60)] == [10, 100, 50, 60]


def test_a_batch_that_is_planned_again_has_the_watermark_of_its_own_records() -> None:
    replanned()


@pytest.mark.parametrize(
    "mutation", [clock_outside_of_the_state, clock_of_a_lost_attempt], ids=lambda each: each.__name__
)
def test_a_clock_that_remembers_lost_attempts_is_noticed(mutation: Patch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(AssertionError):
            replanned()


def attempt(number: int) -> None:
    chance = random.Random(number)
    drawn = tuple(
        [(chance.choice("abc"), chance.randrange(40), 1) for _ in range(chance.randrange(4, 25))] for _ in range(2)
    )
    kinds = [fail_attempt, replay, lambda txid: crash(txid, "written"), crash]
    faults = [chance.choice(kinds)(txid) for txid in chance.sample(range(1, 5), chance.randrange(4))]
    window = chance.choice([tumbling(8), hopping(9, 4)])
    check(drawn, chance.randrange(1, 9), faults, opaque=chance.random() < 0.5, lag=chance.randrange(3), window=window)


def attempt_at_expiry(number: int) -> None:
    chance = random.Random(number)
    rows = [(chance.choice("abc"), chance.randrange(60), 1) for _ in range(chance.randrange(8, 30))]
    take, lag = chance.randrange(1, 9), chance.randrange(12)
    kinds = [fail_attempt, replay, lambda txid: crash(txid, "written"), crash]
    faults = [chance.choice(kinds)(txid) for txid in range(1, -(-len(rows) // take) + 1) if chance.random() < 0.4]
    assert test_expiry.run(rows, take, faults, lag=lag) == test_expiry.expected(rows, take, lag)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_a_rule_that_is_taken_out_is_noticed(mutation: Patch, seed: int) -> None:
    first_seed(range(seed, seed + TRIES), is_wrong(mutation, attempt))


@pytest.mark.parametrize("mutation", MUTATIONS_OF_EXPIRY, ids=lambda each: each.__name__)
def test_a_rule_of_expiry_that_is_taken_out_is_noticed(mutation: Patch, seed: int) -> None:
    first_seed(range(seed, seed + TRIES), is_wrong(mutation, attempt_at_expiry))


def is_wrong(mutation: Patch, attempt: Callable[[int], None]) -> Callable[[int], bool]:
    """Whether an attempt notices the mutation."""

    def noticed(number: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            try:
                attempt(number)
            except AssertionError:
                return True
        return False

    return noticed
