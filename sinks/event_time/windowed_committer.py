"""Aggregates per key and window of event time; each window is sent once, when it closes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from framework.durations import Duration, micros_of
from framework.errors import TopologyError
from framework.operators.event_window_assigner import EventWindows
from framework.operators.timestamps import times_of
from framework.operators.watermarks import CHANGED_STREAM, LATE_STREAM, NEVER
from framework.topology import Combiner, Fields, OutputFieldsDeclarer
from sinks.aggregates import Aggregate, row_merger
from sinks.backend import Key, Value
from sinks.event_time.event_time_committer_base import Watermarks
from sinks.event_time.windowed_aggregation_base import AggregatingCommitter, Closed
from sinks.external_row_sorter import by_time, merged
from sinks.state_committer import Fold
from sinks.states import MapState

_START, _END = "window_start", "window_end"
_AT_START, _AT_END = "@start", "@end"
_CORRECTION = "correction"


class _Ended(NamedTuple):
    """A window that ends in the transaction. ``held``: the state may have a row of it. ``came``:
    the transaction has records for it."""

    key: Key
    values: Value
    held: bool
    came: bool


class WindowedCommitter(AggregatingCommitter):
    """Aggregates per key and window, in an opaque state that holds the open windows only.

    * ``window``: ``tumbling(...)``, ``hopping(...)`` or ``sliding(...)``.
    * ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.
    * ``key``, ``aggregates``: as in a ``StateCommitter``.

    Default stream: each window once, in the transaction whose watermark passes its end: the key,
    ``window_start``, ``window_end``, the aggregates. With ``allowed_lateness``, a window is kept
    for this long after its end, and each transaction with records for it sends it again with
    ``correction`` true.

    ``LATE_STREAM``: later records, aggregated per key and window within their transaction.
    ``CHANGED_STREAM``: each window that a transaction changes, with its values so far.

    Records are aggregated before the shuffle. The content of a window when it closes does not
    depend on the sizes of batches, on tasks, or on failures.

    In addition to the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    _bounds = (_START, _END)
    _parts: ClassVar[Mapping[str, str]] = {_AT_START: _START, _AT_END: _END}

    def __init__(
        self,
        state: MapState,
        window: EventWindows,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        allowed_lateness: Duration = 0,
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, on=on, key=key, aggregates=aggregates, unit=unit, own=[_CORRECTION])
        if not isinstance(window, EventWindows):
            raise TopologyError(
                f"WindowedCommitter: {window!r} is no window: give tumbling(...), hopping(...) or sliding(...)"
            )
        self.window = window
        self.allowed_lateness = micros_of(allowed_lateness, "allowed_lateness")

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_state(self, partial: Fields) -> None:
        self.state.bind(self._state_key(partial), partial.select(list(self.aggregates)))
        self.state.backend.order_by(_END)

    def state_settings(self) -> Mapping[str, Any]:
        own = {"window": self.window.settings(), "allowed_lateness": self.allowed_lateness}
        return {**super().state_settings(), **own}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        types = self._output_types()
        if types:
            declarer.declare(Fields.of(types), LATE_STREAM)
            declarer.declare(Fields.of(types), CHANGED_STREAM)
            declarer.declare(Fields.of({**types, _CORRECTION: pa.bool_()} if self.allowed_lateness else types))

    def _folding(self, fold: Fold) -> Combiner:
        return _WindowFold(fold, self)

    # --- in tasks ---------------------------------------------------------------------------------

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        came = self._folded()
        over_before = watermarks.before - self.allowed_lateness
        over_after = watermarks.after - self.allowed_lateness  # windows that end later are kept
        late = {key: each for key, each in came.items() if key[-1] <= over_before}
        self._emit_folded(
            self._windows((key, each.values) for key, each in late.items()), sum(each.records for each in late.values())
        )
        # What the state holds of these windows comes with the rows that are due.
        ending = {key: each.values for key, each in came.items() if watermarks.before < key[-1] <= watermarks.after}
        changed = self._changed({key: came[key].values for key in came if key not in late and key not in ending})
        self._emit_changed(changed.items())
        self._put((key, values) for key, values in changed.items() if key[-1] > over_after)
        self.state.delete([key for key in changed if key[-1] <= over_after])
        # Windows that an earlier transaction has sent, and that were kept for late records until
        # now.
        for page in self.state.due(_END, NEVER, min(watermarks.before, over_after), self._mine):
            self.state.delete([key for key, _ in page if key not in changed])
            self.state.write()
        corrected = [(key, values) for key, values in changed.items() if key[-1] <= watermarks.before]
        for ended in self._ended(ending, corrected, watermarks):
            yield from self._closed([(each.key, each.values) for each in ended], watermarks.before)
            came_now = [(each.key, each.values) for each in ended if each.came]
            self._emit_changed(came_now)
            self._put((key, values) for key, values in came_now if key[-1] > over_after)
            gone = [each.key for each in ended if each.held and each.key[-1] <= over_after and each.key not in changed]
            self.state.delete(gone)
            self.state.write()

    def _changed(self, came: Mapping[Key, Value]) -> dict[Key, Value]:
        """The windows with these records, and their values."""
        merge, held = self._merger(), self.state.multi_get(list(came))
        return {
            key: merge(None if before is None else _row(before), values)
            for (key, values), before in zip(came.items(), held, strict=True)
        }

    def _merger(self) -> Callable[[Value | None, Value], Value]:
        """Adds the values of a transaction to those of a window; None: it is new."""
        merge, nothing = row_merger(self.aggregates), (None,) * len(self.aggregates)
        return lambda before, values: merge(nothing if before is None else before, values)

    def _ended(
        self, ending: Mapping[Key, Value], corrected: Iterable[tuple[Key, Value]], watermarks: Watermarks
    ) -> Iterator[list[_Ended]]:
        """Pages of the windows that the transaction sends, in their order."""
        merge = self._merger()
        # On a first attempt, nothing else has written in its transaction.
        held = self._attempt is None or self._attempt.attempt_id != 1
        own = [
            *(_Ended(key, values, held=True, came=False) for key, values in corrected),
            *(_Ended(key, merge(None, values), held, came=True) for key, values in ending.items()),
        ]
        due = (
            [_Ended(key, values, held=True, came=False) for key, values in page]
            for page in self.state.due(_END, watermarks.before, watermarks.after, self._mine)
        )

        def join(before: _Ended, now: _Ended) -> _Ended:
            return _Ended(now.key, merge(before.values, ending[now.key]), held=True, came=True)

        return merged(due, own, lambda each: by_time(each.key[-1], each.key), join)

    def _put(self, windows: Iterable[tuple[Key, Value]]) -> None:
        rows = dict(windows)
        self.state.multi_put(list(rows), [_bare(values) for values in rows.values()])

    def _emit_changed(self, windows: Iterable[tuple[Key, Value]]) -> None:
        if self._is_subscribed(CHANGED_STREAM) and (batch := self._batch(self._windows(windows))) is not None:
            self._collector.emit_arrow(batch, CHANGED_STREAM)

    def _closed(self, windows: Sequence[tuple[Key, Value]], before: int) -> Iterator[pa.RecordBatch]:
        batch = self._batch(self._windows(windows))
        if batch is not None and self.allowed_lateness:
            sent_before = pc.less_equal(batch.column(_END).cast(pa.int64()), before)
            batch = batch.append_column(_CORRECTION, sent_before)
        if batch is not None:
            yield batch

    def _windows(self, windows: Iterable[tuple[Key, Value]]) -> Iterable[Closed]:
        for (*key, start, end), values in windows:
            yield Closed(tuple(key), start, end, values)


class _WindowFold(Combiner):
    """Assigns windows to each record, and folds."""

    def __init__(self, fold: Fold, committer: WindowedCommitter) -> None:
        self._fold, self._committer = fold, committer

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        its = self._committer
        assigned = its.window.assign(times_of(batch.column(its.on), its.on, its.unit))
        rows = batch.take(pa.array(assigned.rows)) if its.window.step < its.window.length else batch
        self._fold.add(its._with_times(rows, {_AT_START: assigned.starts, _AT_END: assigned.ends}))

    def finish(self) -> pa.RecordBatch | None:
        return self._fold.finish()


def _row(held: Any) -> Value:
    """A result of ``multi_get`` as a row: a state of one column returns bare values."""
    return held if isinstance(held, tuple) else (held,)


def _bare(values: Value) -> Any:
    return values[0] if len(values) == 1 else values
