"""The committers that keep a state of their own, each in a store of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from framework.durations import Duration
from framework.errors import TopologyError
from framework.operators.count_windows import CountWindow
from framework.operators.event_window_assigner import EventWindows
from framework.streams.ports import JoinHow, StatefulSteps
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology import Bolt, Fields
from ratchet.streams.targets import Store
from sinks import (
    AsOfJoiningCommitter,
    CountWindowCommitter,
    DeduplicatingCommitter,
    JoiningCommitter,
    SessionCommitter,
    TableJoiningCommitter,
    TimerCommitter,
    WatermarkCommitter,
    WindowedCommitter,
)


class StatefulStepsIn(StatefulSteps):
    """``state``: the store for a name. A name consists of the names of the pipeline and of the
    step, in the form of a table's name: ``shop_per_hour``. ``note`` takes each store."""

    def __init__(self, pipeline: str, state: Callable[[str], Store], note: Callable[[Store], None]) -> None:
        self._pipeline, self._state, self._note = pipeline, state, note

    def watermark(self, name: str, on: str, partition: Sequence[str], bounds: WatermarkBounds) -> Bolt:
        return WatermarkCommitter(
            self._of(name),
            on,
            partition=partition,
            out_of_orderness=bounds.late,
            max_ahead=bounds.max_ahead,
            idle_after=bounds.idle_after,
            advance_when_idle=bounds.advance_when_idle,
        )

    def windows(
        self,
        name: str,
        windows: EventWindows,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Any],
        allowed_lateness: Duration,
    ) -> Bolt:
        return WindowedCommitter(
            self._of(name), windows, on=on, key=key, aggregates=aggregates, allowed_lateness=allowed_lateness
        )

    def sessions(self, name: str, gap: Duration, on: str, key: Sequence[str], aggregates: Mapping[str, Any]) -> Bolt:
        return SessionCommitter(self._of(name), gap, on=on, key=key, aggregates=aggregates)

    def count_windows(self, name: str, windows: CountWindow, key: Sequence[str], aggregates: Mapping[str, Any]) -> Bolt:
        return CountWindowCommitter(self._of(name), windows.length, step=windows.step, key=key, aggregates=aggregates)

    def timers(
        self, name: str, kind: type[Bolt], *, key: Sequence[str], on: str, output: Fields, partition: Sequence[str]
    ) -> Bolt:
        if not (isinstance(kind, type) and issubclass(kind, TimerCommitter)):
            raise TopologyError(f"{kind!r} is no subclass of TimerCommitter: write one, with on_record and on_timer")
        if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
            raise TopologyError(f"{kind.__name__} has no {lacking[0]}: write it")
        bolt = kind(self._of(name), key=key, on=on, output=output)
        bolt.partition = tuple(partition)
        return bolt

    def first_rows(self, name: str, key: Sequence[str], on: str, within: Duration, *, partition: Sequence[str]) -> Bolt:
        return DeduplicatingCommitter(self._of(name), key=key, on=on, within=within, partition=partition)

    def pairs(self, name: str, key: Sequence[str], times: tuple[str, str], within: Duration, how: JoinHow) -> Bolt:
        left, right = times
        return JoiningCommitter(self._of(name), key=key, left=left, right=right, within=within, how=how)

    def latest_rows(
        self,
        name: str,
        key: Sequence[str],
        times: tuple[str, str],
        within: Duration | None,
        how: JoinHow,
        *,
        partition: Sequence[str],
    ) -> Bolt:
        left, right = times
        bolt = AsOfJoiningCommitter(
            self._of(name), key=key, left=left, right=right, within=within, how=_with_table(how)
        )
        bolt.partition = tuple(partition)
        return bolt

    def current_rows(
        self, name: str, key: Sequence[str], table: str, sequence_by: str | None, *, deleted: str | None, how: JoinHow
    ) -> Bolt:
        return TableJoiningCommitter(
            self._of(name), key=key, table=table, sequence_by=sequence_by, deleted=deleted, how=_with_table(how)
        )

    def _of(self, name: str) -> Any:
        store = self._state(re.sub(r"\W", "_", f"{self._pipeline}_{name}", flags=re.ASCII))
        if not isinstance(store, Store):
            raise TopologyError(
                f"state= of the pipeline gives {store} for it, a {type(store).__name__}: give a store, such as "
                "sqlite('state.db', name), postgres(dsn, name) or redis(url, name)"
            )
        self._note(store)
        return store.state()


def _with_table(how: JoinHow) -> Literal["inner", "left"]:
    if how not in ("inner", "left"):
        raise TopologyError(f"how is {how!r}: with a table, give 'inner' or 'left'")
    return how
