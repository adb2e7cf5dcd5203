"""Mutations that the simulator of event time must catch: each takes one rule of C43 or C44 out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from framework.operators import interval_join_buckets
from framework.operators.event_clock import EventClock
from framework.operators.watermarks import NEVER
from sinks import ExpiringCommitter, MemoryBackend, OpaqueMapState, TimerCommitter, WatermarkCommitter
from sinks.event_time import as_of_join, join_buffer, sessions
from sinks.event_time.event_time_committer_base import WatermarkedCommitter, Watermarks
from tests.simulation.event_time import run_event_time
from tests.simulation.patches import Patch, PatchMutation


def due_by_what_a_lost_attempt_wrote(patch: pytest.MonkeyPatch) -> None:
    due = OpaqueMapState.due

    def current(self: OpaqueMapState, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(OpaqueMapState, "_base", lambda self, row, txid: row.value)
            return iter(list(due(self, *arguments)))

    patch.setattr(OpaqueMapState, "due", current)


def pages_of_a_lost_attempt_are_gone(patch: pytest.MonkeyPatch) -> None:
    due = MemoryBackend.due
    patch.setattr(MemoryBackend, "due", lambda self, *given, txid: due(self, *given, txid=None))


def written_pages_have_no_previous_values(patch: pytest.MonkeyPatch) -> None:
    write = OpaqueMapState.write

    def forgetting(self: OpaqueMapState) -> None:
        written = self._begun().written
        written.update((key, row._replace(prev=row.value)) for key, row in list(written.items()))
        write(self)

    patch.setattr(OpaqueMapState, "write", forgetting)


def a_key_ends_with_its_page(patch: pytest.MonkeyPatch) -> None:
    """A join with the valid row forgets between two pages of a key which one was the newest."""
    due = as_of_join.AsOfJoiningCommitter._due

    def ended(self: Any, upto: int) -> Any:
        for page in due(self, upto):
            yield page
            yield [as_of_join.Passed(("", 0, 0, 0), 0, None)]

    patch.setattr(as_of_join.AsOfJoiningCommitter, "_due", ended)


def clock_of_the_process(patch: pytest.MonkeyPatch) -> None:
    kept: dict[int, EventClock] = {}
    after = EventClock.after

    def remembered(self: EventClock, *arguments: Any, **options: Any) -> EventClock:
        started = kept.get(0, self) if self.partitions else self
        kept[0] = after(started, *arguments, **options)
        return kept[0]

    patch.setattr(EventClock, "after", remembered)


def watermark_kept_per_task(patch: pytest.MonkeyPatch) -> None:
    """A task that is new, or was away, does not know the watermark of the last transaction."""
    finish = WatermarkedCommitter.finish_batch

    def own(self: Any) -> Any:
        kept = vars(self.state.backend).setdefault("watermarks", {}).setdefault(self._tasks[0], {NEVER: NEVER})
        (told,) = self._told
        kept[self._attempt.txid] = told.after
        self._told = [Watermarks(kept[max(txid for txid in kept if txid < self._attempt.txid)], told.after)]
        return finish(self)

    patch.setattr(WatermarkedCommitter, "finish_batch", own)


def idle_by_the_clock_of_the_host(patch: pytest.MonkeyPatch) -> None:
    after = EventClock.after

    def hosts(self: EventClock, newest: Any, planned_at: int, **options: Any) -> EventClock:
        return after(self, newest, time.time_ns() // 1_000, **options)

    patch.setattr(EventClock, "after", hosts)


def closed_before_the_last_record(patch: pytest.MonkeyPatch) -> None:
    finish = WatermarkedCommitter.finish_batch

    def early(self: WatermarkedCommitter) -> Any:
        self._told = [Watermarks(each.after, each.after) for each in self._told]
        return finish(self)

    patch.setattr(WatermarkedCommitter, "finish_batch", early)


def every_task_writes_what_is_due(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WatermarkedCommitter, "_mine", lambda self, keys: [True] * len(keys))


def records_left_unread_make_partitions_idle(patch: pytest.MonkeyPatch) -> None:
    after = EventClock.after
    patch.setattr(
        EventClock, "after", lambda self, *given, **options: after(self, *given, **{**options, "behind": False})
    )


def partitions_without_event_time_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    after = EventClock.after
    patch.setattr(EventClock, "after", lambda self, *given, **options: after(self, *given, **{**options, "begun": ()}))


def a_session_ends_with_each_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "ends", lambda pane, following: True)


def a_late_session_touches_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions.SessionCommitter, "_behind", lambda self, read, came, watermark: [])


def partners_in_one_bucket_only(patch: pytest.MonkeyPatch) -> None:
    bucket = interval_join_buckets.bucket_of
    patch.setattr(join_buffer, "buckets_around", lambda at, within: [bucket(at, within)])


def partners_are_forgotten_too_soon(patch: pytest.MonkeyPatch) -> None:
    over = join_buffer.WaitingRows.is_over
    patch.setattr(
        join_buffer.WaitingRows,
        "is_over",
        lambda self, each: over(self, each) or each.at + self._within == self._watermark,
    )


def matches_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(join_buffer.WaitingRows, "match", lambda self, side, each: None)


def rows_of_the_same_time_in_any_order(patch: pytest.MonkeyPatch) -> None:
    made = as_of_join.AsOfJoiningCommitter._joined

    def younger(self: Any, key: Any, left: Any, latest: Any) -> Any:
        return made(self, key, left, latest if latest is None or latest.at < left.at else None)

    patch.setattr(as_of_join.AsOfJoiningCommitter, "_joined", younger)


def rows_prolong_what_a_lost_attempt_wrote(patch: pytest.MonkeyPatch) -> None:
    changed = ExpiringCommitter._changed

    def current(self: Any, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(OpaqueMapState, "_base", lambda self, row, txid: row.value)
            return changed(self, *given)

    patch.setattr(ExpiringCommitter, "_changed", current)


def rows_expire_by_the_watermark_of_a_lost_attempt(patch: pytest.MonkeyPatch) -> None:
    commit = ExpiringCommitter._commit

    def first(self: Any, watermarks: Watermarks) -> Any:
        known = vars(self.state.backend).setdefault("watermarks", {})
        return commit(self, known.setdefault(self._attempt.txid, watermarks))

    patch.setattr(ExpiringCommitter, "_commit", first)


def rows_expire_by_the_clock_of_the_host(patch: pytest.MonkeyPatch) -> None:
    commit = ExpiringCommitter._commit
    patch.setattr(
        ExpiringCommitter,
        "_commit",
        lambda self, watermarks: commit(self, Watermarks(watermarks.before, time.time_ns() // 1_000)),
    )


def rows_end_before_the_watermark_has_passed(patch: pytest.MonkeyPatch) -> None:
    extend = ExpiringCommitter._extend
    patch.setattr(ExpiringCommitter, "_extend", lambda self, ends, at, watermark: extend(self, ends, at, 1 << 61))


def records_of_a_time_come_before_its_timers(patch: pytest.MonkeyPatch) -> None:
    fire = TimerCommitter._fire
    patch.setattr(TimerCommitter, "_fire", lambda self, entry, upto: fire(self, entry, upto - 1))


def absurd_times_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WatermarkCommitter, "_is_ahead", lambda self, at: False)


PATCHES: list[Patch] = [
    due_by_what_a_lost_attempt_wrote,
    pages_of_a_lost_attempt_are_gone,
    written_pages_have_no_previous_values,
    a_key_ends_with_its_page,
    clock_of_the_process,
    watermark_kept_per_task,
    idle_by_the_clock_of_the_host,
    closed_before_the_last_record,
    every_task_writes_what_is_due,
    records_left_unread_make_partitions_idle,
    partitions_without_event_time_are_not_waited_for,
    a_session_ends_with_each_part,
    a_late_session_touches_none,
    partners_in_one_bucket_only,
    partners_are_forgotten_too_soon,
    matches_are_not_kept,
    rows_of_the_same_time_in_any_order,
    rows_prolong_what_a_lost_attempt_wrote,
    rows_expire_by_the_watermark_of_a_lost_attempt,
    rows_expire_by_the_clock_of_the_host,
    rows_end_before_the_watermark_has_passed,
    records_of_a_time_come_before_its_timers,
    absurd_times_count,
]

EVENT_TIME_MUTATIONS = tuple(PatchMutation(each, run_event_time, "event time") for each in PATCHES)
