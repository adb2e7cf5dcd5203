"""Aggregates per key and session; each session is sent once, when it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

import pyarrow as pa

from framework.bounded_pages import pages_of
from framework.durations import Duration, micros_above_0
from framework.errors import BadRecordError, InvariantViolation
from framework.operators.sessions import Pane, ends, pane_starts, runs, together
from framework.operators.timestamps import times_of
from framework.operators.watermarks import LATE_STREAM
from framework.topology import Combiner, Fields, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from framework.topology.refused_row_bisection import RefusedTogether, accepted
from sinks.aggregates import Aggregate, Max, Min, row_folder, row_merger
from sinks.backend import Key
from sinks.event_time.event_time_committer_base import Watermarks
from sinks.event_time.session_sum_overflow import LargeSums, marks_in
from sinks.event_time.windowed_aggregation_base import AggregatingCommitter, Closed, Folded, TimedFold
from sinks.external_row_sorter import by_time, merged
from sinks.state_committer import Fold
from sinks.states import MapState
from sinks.value_encoding import whole_number

_START, _END = "session_start", "session_end"
_PANE, _FIRST, _DUE = "session_pane", "first_at", "due_at"
#: The most panes that are read in one step for several sessions.
PANES_MAX = 20_000
#: The most keys whose sessions are added together before they end.
CHECKED_TOGETHER = 200
_AT_PANE, _AT_FIRST, _AT_LAST = "@pane", "@first", "@last"


class SessionCommitter(AggregatingCommitter):
    """Aggregates per key and session, in an opaque state that holds the open sessions only. A
    session ends when its key has no record within ``gap`` after the session's last one.

    * ``on``: the field with a record's event time, as in a ``WatermarkCommitter``.
    * ``key``, ``aggregates``: as in a ``StateCommitter``.

    Default stream: each session once, in the transaction whose watermark passes its end. Columns:
    the key, ``session_start`` (the time of its first record), ``session_end`` (the time of its last
    record plus the gap, exclusive), the aggregates. ``LATE_STREAM``: records that belong to no open
    session, and whose session would have ended before the watermark, in the same columns.

    The state has one row per ``gap`` of time in a session, so a record changes one row, however
    long its session is, and however many sessions are open. A record by which a sum of its session
    leaves the type is bad. To find such records, a transaction reads all rows of a session in which
    the sum of one row is beyond 2^40, or uses the first seven of 38 digits.

    In addition to the records, subscribe it by ``all_grouping`` to a ``WatermarkCommitter``.
    """

    _bounds = (_START, _END)
    _parts: ClassVar[Mapping[str, str]] = {_AT_PANE: _PANE}
    _times: ClassVar[Mapping[str, Aggregate]] = {_AT_FIRST: Min(_AT_FIRST), _AT_LAST: Max(_AT_LAST)}

    def __init__(
        self,
        state: MapState,
        gap: Duration,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        unit: Literal["s", "ms", "us"] = "s",
    ) -> None:
        super().__init__(state, on=on, key=key, aggregates=aggregates, unit=unit, own=[_FIRST, _DUE])
        self.gap = micros_above_0(gap, "gap")
        self._totals: dict[str, Any] = {}  # the types of the aggregates
        self._sums = LargeSums({}, self._totals)

    # --- on the driver ----------------------------------------------------------------------------

    def _bind_state(self, partial: Fields) -> None:
        types = {name: partial.type_of(name) for name in self.aggregates}
        self._totals, self._sums = types, LargeSums(self.aggregates, types)
        self.state.bind(self._state_key(partial), Fields.of({_FIRST: pa.int64(), _DUE: pa.int64(), **types}))
        self.state.backend.order_by(_DUE)

    def state_settings(self) -> Mapping[str, Any]:
        return {**super().state_settings(), "gap": self.gap}

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        types = self._output_types()
        if types:
            declarer.declare(Fields.of(types))
            declarer.declare(Fields.of(types), LATE_STREAM)

    def _folding(self, fold: Fold) -> Combiner:
        return _PaneFold(fold, self)

    # --- in tasks ---------------------------------------------------------------------------------

    def may_try_writes(self) -> bool:
        return type(self) is SessionCommitter

    def _commit(self, watermarks: Watermarks) -> Iterator[pa.RecordBatch]:
        own, came, marks, late, records = self._taken(self._folded(), watermarks.before)
        if late is not None:
            self._emit_late(late, LATE_STREAM, records)
        if self.state.is_tried:
            return  # parts of sessions that end are not stored, and a try cannot know which will
        ending = [(key, pane) for key, pane in came.items() if watermarks.before < pane.due <= watermarks.after]
        marks = {key: mark for key, mark in marks.items() if mark.due > watermarks.after}
        due = self._unchanged(watermarks, came.keys() | marks.keys())
        for page in merged(due, ending, lambda each: by_time(each[1].due, each[0])):
            # A pane that was due before is part of a session that ends later.
            for sessions, read in self._ended(page, own.panes):
                batch = self._sent(sessions, read, came)
                if batch is not None:
                    yield batch
                for key in (gone := [key for keys in sessions for key in keys]):
                    came.pop(key, None)
                self.state.delete(gone)
                self.state.write()
        came |= marks
        self.state.multi_put(list(came), [(each.first, each.due, *each.values) for each in came.values()])

    def _sent(self, sessions: Sequence[list[Key]], read: _Read, came: Mapping[Key, Pane]) -> pa.RecordBatch | None:
        """The rows of sessions that end. A session without records of the transaction is left out,
        if that is allowed, when a function of the user's refuses to merge its parts: otherwise each
        record with which it would end were refused (ADR 126)."""

        def rows_of(some: Sequence[list[Key]]) -> pa.RecordBatch | None:
            return self._batch(self._closed(keys, {key: read.at(key) for key in keys}) for keys in some)

        try:
            return rows_of(sessions)
        except BadRecordError:
            if self._leave_out_due is None:
                raise
        kept = []
        for keys in sessions:
            try:
                rows_of([keys])
            except BadRecordError as error:
                if any(key in came for key in keys):
                    raise
                self._leave_out_due(error)
            else:
                kept.append(keys)
        return rows_of(kept)

    def _taken(self, folded: Mapping[Key, Folded], watermark: int) -> _Taken:
        """Take the transaction's records. Keys whose sums leave their type are left out, if that is
        allowed; otherwise raises ``BadRecordError``."""
        if self._on_refused is None:
            return self._changed(folded, watermark)
        by_key: dict[Key, dict[Key, Folded]] = {}
        for key, each in folded.items():
            by_key.setdefault(key[:-1], {})[key] = each
        kept: dict[Key, Folded] = {}

        def take(keys: list[Mapping[Key, Folded]]) -> _Taken:
            its = dict(chain.from_iterable(map(Mapping.items, keys)))
            taken = self._changed(its, watermark)
            kept.update(its)
            return taken

        parts = list(accepted(list(by_key.values()), take, self._on_refused))
        return parts[0] if len(parts) == 1 else self._changed(kept, watermark)

    def _changed(self, folded: Mapping[Key, Folded], watermark: int) -> _Taken:
        """Merge these records with the panes of the state, without a write. Raises
        ``BadRecordError`` for a sum that leaves its type."""
        own, late, records = _Read(self.state, {}), [], 0
        came = self._merged(own, folded)
        for run in self._behind(own, came, watermark):
            late.append(self._closed(run, came))
            records += sum(folded[key].records for key in run)
            for key in run:
                own.panes[key] = None
                del came[key]
        marks = self._checked_sums(own, came) if self._sums else {}
        try:
            sent = self._batch(late)
        except BadRecordError as error:
            raise RefusedTogether(str(error)) from error
        return _Taken(own, came, marks, sent, records)

    def _folded(self) -> dict[Key, Folded]:
        """The folded records of the transaction, by pane."""
        table = self._folded_rows()
        rows = zip(*(python_values(table.column(name), name) for name in table.column_names), strict=True)
        width = len(self.key) + len(self._parts)
        return {row[:width]: Folded(row[width], row[width + 1 :]) for row in rows}

    def _unchanged(self, watermarks: Watermarks, came: Set[Key]) -> Iterator[list[tuple[Key, Pane]]]:
        """Pages of the panes that are due, and that the transaction's records do not change."""
        for page in self.state.due(_DUE, watermarks.before, watermarks.after, self._mine):
            unchanged = [(key, value) for key, value in page if key not in came]
            marks = marks_in(key for key, _ in unchanged)
            self.state.delete(list(marks))
            yield [(key, self.state.restored(key, _pane, value)) for key, value in unchanged if key not in marks]

    def _merged(self, read: _Read, folded: Mapping[Key, Folded]) -> dict[Key, Pane]:
        """The panes that the transaction's records change, including these records."""
        merge = row_merger(self.aggregates)
        came: dict[Key, Pane] = {}
        for key, each in folded.items():
            first, last, *values = each.values
            came[key] = Pane(first, last + self.gap, tuple(values))
        marks = dict.fromkeys(map(self._sums.mark_of, came)) if self._sums else ()
        read.all([*came, *marks])
        for key, pane in came.items():
            held = read.panes[key]
            if held is not None:
                first, due = min(held.first, pane.first), max(held.due, pane.due)
                came[key] = Pane(first, due, merge(held.values, pane.values))
            else:
                read.new.add(key)
            read.panes[key] = came[key]
        return came

    def _checked_sums(self, own: _Read, came: Mapping[Key, Pane]) -> dict[Key, Pane]:
        """The marks that the transaction changes. Raises ``BadRecordError`` for a session whose sum
        leaves its type."""
        sums, marks = self._sums, dict[Key, Pane]()
        asked: dict[Key, list[Key]] = {}
        for key, pane in came.items():
            if own[sums.mark_of(key)] is not None or sums.large(pane):
                asked.setdefault(key[:-1], []).append(key)
        totals = []
        for page in pages_of(asked.values(), CHECKED_TOGETHER):
            for panes in self._sessions_at(_Read(self.state, own.panes), [key for keys in page for key in keys]):
                whole = together(list(panes.values()), row_folder(self.aggregates))
                totals.append(whole.values)
                if any(map(sums.large, panes.values())):
                    at = sums.mark_of(next(iter(panes)))
                    before = marks.get(at) or own[at]
                    marks[at] = sums.mark(max(whole.due, before.due if before is not None else whole.due))
        if totals:
            for (name, kind), values in zip(self._totals.items(), zip(*totals, strict=True), strict=True):
                self._column(name, values, kind)
        return marks

    def _sessions_at(self, read: _Read, keys: Sequence[Key]) -> Iterator[dict[Key, Pane]]:
        """The panes of each open session that contains one of these panes, in ascending order."""
        found: dict[Key, dict[int, Pane]] = {}
        for key in keys:
            found.setdefault(key[:-1], {})[key[-1]] = read.at(key)
        edges, ahead = [(key, step) for key in keys for step in (-1, 1)], 1
        while edges:
            read.all([self._beside(key, step * far) for key, step in edges for far in range(1, ahead + 1)])
            edges = [
                (last, step)
                for key, step in edges
                if (last := self._followed(read, key, step * ahead, found[key[:-1]])) is not None
            ]
            ahead = min(2 * ahead, max(1, PANES_MAX // max(1, len(edges))))
        for key, panes in found.items():
            for run in runs(panes, self.gap, panes):
                yield {(*key, start): panes[start] for start in run}

    def _followed(self, read: _Read, key: Key, steps: int, found: dict[int, Pane]) -> Key | None:
        """Add the panes of a session after its pane ``key``, or before it. Returns the last pane if
        there may be more."""
        for _ in range(abs(steps)):
            beside = self._joined(read, key, 1 if steps > 0 else -1)
            if beside is None or beside[-1] in found:  # another one's way begins there
                return None
            found[beside[-1]], key = read.at(beside), beside
        return key

    def _behind(self, read: _Read, came: Mapping[Key, Pane], watermark: int) -> list[list[Key]]:
        """Sessions that would have ended before the watermark, and touch no open session."""
        if all(pane.due > watermark for pane in came.values()):
            return []
        by_key: dict[Key, dict[int, Pane]] = {}
        for (*key, start), pane in came.items():
            by_key.setdefault(tuple(key), {})[start] = pane
        found = [
            [(*key, start) for start in run]
            for key, panes in by_key.items()
            for run in runs(panes, self.gap, panes)
            if panes[run[-1]].due <= watermark and all((*key, start) in read.new for start in run)
        ]
        beside = [(self._beside(run[0], -1), self._beside(run[-1], 1)) for run in found]
        read.all([key for pair in beside for key in pair])
        late = []
        for run, (before, after) in zip(found, beside, strict=True):
            preceding = read.panes[before]
            if ends(read.at(run[-1]), read.panes[after]) and not (preceding and preceding.reaches(read.at(run[0]))):
                late.append(run)
        return late

    def _ended(
        self, due: Sequence[tuple[Key, Pane]], own: Mapping[Key, Pane | None]
    ) -> Iterator[tuple[list[list[Key]], _Read]]:
        """The panes of each session that ends with one of these panes, in ascending order; and
        these panes. A session with more panes than are read together is returned in several
        parts."""
        read = _Read(self.state, own)
        read.panes.update(due)
        read.all([self._beside(key, step) for key, _ in due for step in (1, -1)])
        last = [(key, pane) for key, pane in due if ends(pane, read[self._beside(key, 1)])]
        sessions = self._whole(read, [key for key, _ in last])
        if sessions is not None:
            yield sessions, read
            return
        half = len(last) // 2
        for part in (last[:half], last[half:]):
            yield from self._ended(part, own)

    def _whole(self, read: _Read, last: Sequence[Key]) -> list[list[Key]] | None:
        """The panes of each session that ends with one of these panes, in ascending order. Each
        step reads twice as many earlier panes. None: too many panes to read several sessions
        together."""
        found = {key: [key] for key in last}
        unknown, ahead = list(last), 1
        while unknown:
            if len(last) > 1 and len(unknown) * ahead > PANES_MAX:
                return None
            read.all([self._beside(found[key][-1], -step) for key in unknown for step in range(1, ahead + 1)])
            unknown = [key for key in unknown if self._goes_on(read, found[key], ahead)]
            ahead = min(2 * ahead, PANES_MAX)
        return [found[key][::-1] for key in last]

    def _goes_on(self, read: _Read, keys: list[Key], steps: int) -> bool:
        """Add the panes before the last of these keys; return whether there may be more."""
        for _ in range(steps):
            before = self._joined(read, keys[-1], -1)
            if before is None:
                return False
            keys.append(before)
        return True

    def _joined(self, read: _Read, key: Key, step: int) -> Key | None:
        """The pane after this one (``step`` 1) or before it (-1), if both are of one session."""
        beside = self._beside(key, step)
        pane = read[beside]
        if pane is None:
            return None
        one, other = (read.at(key), pane)[::step]
        return beside if one.reaches(other) else None

    def _beside(self, key: Key, step: int) -> Key:
        return (*key[:-1], key[-1] + step * self.gap)

    def _closed(self, keys: Sequence[Key], panes: Mapping[Key, Pane]) -> Closed:
        whole = together([panes[key] for key in keys], row_folder(self.aggregates))
        return Closed(keys[0][:-1], whole.first, whole.due, whole.values)


class _Read:
    """The panes that were read. ``panes``: the state's panes with the transaction's own records;
    None for a pane that does not exist. ``new``: panes that did not exist before. ``own``: panes of
    another ``_Read``, which are not read again."""

    def __init__(self, state: MapState, own: Mapping[Key, Pane | None]) -> None:
        self._state, self._own = state, own
        self.panes: dict[Key, Pane | None] = {}
        self.new: set[Key] = set()

    def all(self, keys: Sequence[Key]) -> None:
        missing = list(dict.fromkeys(key for key in keys if key not in self.panes and key not in self._own))
        if missing:
            for key, value in zip(missing, self._state.multi_get(missing), strict=True):
                self.panes[key] = self._state.restored(key, _pane, value) if value is not None else None

    def __getitem__(self, key: Key) -> Pane | None:
        return self._own[key] if key in self._own else self.panes[key]

    def at(self, key: Key) -> Pane:
        pane = self[key]
        if pane is None:
            raise InvariantViolation(f"no part of a session at {key!r}")
        return pane


class _Taken(NamedTuple):
    """The changes by the records of a transaction. ``own``: the panes that were read. ``came``: the
    panes with records. ``marks``: the marks of large sums. ``late``: sessions that have ended
    before, of ``records`` records."""

    own: _Read
    came: dict[Key, Pane]
    marks: dict[Key, Pane]
    late: pa.RecordBatch | None
    records: int


def _pane(value: Any) -> Pane:
    first, due, *values = value
    return Pane(whole_number(first), whole_number(due), tuple(values))


class _PaneFold(TimedFold):
    """Assigns a pane to each record, and folds."""

    def __init__(self, fold: Fold, committer: SessionCommitter) -> None:
        super().__init__(fold)
        self._committer = committer

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        its = self._committer
        times = times_of(batch.column(its.on), its.on, its.unit)
        panes = pane_starts(times, its.gap)
        self._fold.add(its._with_times(batch, {_AT_PANE: panes, _AT_FIRST: times, _AT_LAST: times}))
