"""Why a number is what it is: the transactions that changed one key, and the records that did it.

The topology is recomputed for one state (``recompute``). If the committer allows it, only the rows
of the key are recomputed, so that the whole table is not in memory. For the last changes, the
records are found, too: the ranges of a batch are halved as long as one half alone still changes the
key. A record is a cause if the key is written when only this record is processed.

Late records of the key changed nothing. The recomputation finds the transactions that had any.
Their records are found in the same way, by a copy that treats all records as late.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from framework.errors import ConfigError, RetryableError
from framework.inspect.comparison import hold
from framework.inspect.full_recomputation import Batch, Recomputation
from framework.inspect.late_rows import LateRows, Row, clocks_in, lowest
from framework.inspect.narrowing import narrow, with_records
from framework.inspect.sandbox import recounting, shadow_of, with_what_it_needs
from framework.inspect.state_by_name import state_named
from framework.local_paths import held_temporary_folder
from framework.observe.journal import AttemptRecord, TransactionRecord
from framework.operators.timestamps import micros_since_epoch
from framework.topology import Component, Difference, KeyedState, SourceRecord, Topology, ValueType
from framework.topology.canonical_form import comparable
from framework.topology.inspectable import EventTime, NarrowedBolt
from framework.topology.spouts import Meta
from framework.transactions import CoordinationStore
from framework.transactions.documents import committed_or_refused, read_joined
from framework.transactions.history_archive import HistoryTarget
from framework.transactions.history_reader import TransactionRecords
from framework.transactions.plans import Plan
from framework.transactions.spout_dead_letter_reader import letter_component
from framework.transactions.spout_planners import rows_in

#: How many rows of a range are shown that is no single record.
ROWS_SHOWN = 3

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cause:
    """The smallest range that still changes the key: a single record, or several that do it only
    together. ``record``: the first one in it, as the source holds it; None where the source cannot
    show it. ``rows``: then the first rows that the spout emits for it."""

    partition: str
    meta: Meta
    record: SourceRecord | None = None
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class Step:
    """A change of the key. ``first_txid`` to ``txid``: the transactions that made it; one where it
    is recorded, and ``recorded`` is its record. ``before`` and ``after``: column -> value; None: no
    value. ``has_more``: whether there are more causes than those shown. ``time_before`` and
    ``time_after``: event time before it and after it, in a topology that keeps one: what was due in
    between happened in this transaction."""

    first_txid: int
    txid: int
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    _: KW_ONLY
    plan: Plan
    recorded: TransactionRecord | None = None
    causes: list[Cause] = field(default_factory=list)
    has_more: bool = False
    time_before: EventTime | None = None
    time_after: EventTime | None = None

    @property
    def attempt(self) -> AttemptRecord | None:
        """The recorded attempt that made the change."""
        return self.recorded.attempts[-1] if self.recorded is not None and self.recorded.attempts else None


@dataclass(frozen=True, slots=True)
class LateRecord:
    """A record that was late. ``at``: its event time, in microseconds since 1970."""

    cause: Cause
    at: int | None


@dataclass(slots=True)
class Late:
    """Records of the key that were late in a transaction, for the committer ``component_id``.
    ``watermark``: before the transaction, in microseconds since 1970. ``rows``: the rows that the
    committer sent to ``stream``. ``has_more``: whether there are more records than those shown."""

    component_id: str
    stream: str
    txid: int
    watermark: int | None
    _: KW_ONLY
    plan: Plan
    rows: Sequence[Row]
    records: list[LateRecord] = field(default_factory=list)
    has_more: bool = False


@dataclass(slots=True)
class Explanation:
    """``since_txid``: the first recomputed transaction; if above 1, the values lack earlier
    transactions. ``steps``: the last changes, oldest first; ``step_count`` counts all. ``late``:
    the last transactions with late records; ``late_count`` counts all. ``held``: the values of the
    sink as of ``txid``. ``agrees``: whether the source gives the same values; None if that is
    unknown. ``is_independent``: whether the sink shares no code with the computation. ``records``,
    ``batches``, ``seconds``: the cost."""

    topology_id: str
    component_id: str
    location: str
    key: Key
    _: KW_ONLY
    since_txid: int = 1
    txid: int = 0
    steps: list[Step] = field(default_factory=list)
    step_count: int = 0
    late: list[Late] = field(default_factory=list)
    late_count: int = 0
    held: Mapping[str, Any] | None = None
    computed: Mapping[str, Any] | None = None
    agrees: bool | None = None
    is_independent: bool = False
    records: int = 0
    batches: int = 0
    seconds: float = 0.0


def explain(
    topology: Topology,
    store: CoordinationStore,
    conf: Mapping[str, Any] | None = None,
    *,
    state: str,
    key: str,
    last: int = 10,
    causes_max: int = 5,
    recorded_only: bool = False,
    archive: HistoryTarget | None = None,
) -> Explanation:
    """Explain one key of a state. ``state``: the id of its component, or its location, or the end
    of that. ``key``: as ``KeyedState.key_of`` takes it. ``last``: how many changes are shown, with
    ``causes_max`` causes each. ``recorded_only``: begin with the oldest recorded transaction.
    ``archive``: the table of records, where the topology has one.

    Raises ``ConfigError`` for a state or key that there is not, and before the first transaction;
    ``Unverifiable`` when source or records do not reach back; ``RetryableError`` when something
    does not answer, or the topology moves on too fast."""
    with held_temporary_folder("ratchet-explain-") as folder:
        inquiry = _Inquiry(topology, store, conf or {}, folder, state=state, key=key, archive=archive)
        return inquiry.run(last, causes_max, recorded_only=recorded_only)


class _Inquiry:
    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        conf: Mapping[str, Any],
        folder: Path,
        *,
        state: str,
        key: str,
        archive: HistoryTarget | None,
    ) -> None:
        self._archive = archive
        self._topology, self._store, self._conf, self._folder = topology, store, conf, folder
        self._component, self._number = state_named(topology, state)
        self._state = _keyed(self._component, self._number)
        self._key = self._state.key_of(key)

    def run(self, last: int, causes_max: int, *, recorded_only: bool) -> Explanation:
        began_s = time.monotonic()
        committed = committed_or_refused(self._store, self._topology.id)
        steps: deque[Step] = deque(maxlen=last)
        found = Explanation(self._topology.id, self._component.id, self._state.location, self._key)
        shadow, copied = self._shadow("run")
        rows = LateRows(shadow)
        late: deque[Late] = deque(maxlen=last)
        value: list[Any] = [None]
        clocks = clocks_in(shadow.components)
        times: list[EventTime | None] = [None, None]

        def seen(batch: Batch) -> None:
            before, value[0] = value[0], copied.recomputed(self._key)
            times[:] = times[1], lowest([each.event_time() for each in clocks])
            if copied.written(self._key, batch.number):
                found.step_count += 1
                values = map(self._state.by_column, (before, value[0]))
                step = Step(batch.first_txid, batch.txid, *values, plan=batch.plan)
                step.time_before, step.time_after = times
                steps.append(step)
            for component_id, stream, watermark, its in rows.taken():
                own = [row for row in its if self._is_for(rows[component_id].late_for(row))]
                if own:
                    found.late_count += 1
                    late.append(Late(component_id, stream, batch.txid, watermark, plan=batch.plan, rows=own))

        with self._recomputation(rows.shadow, seen, rows) as copy:
            if recorded_only:
                found.since_txid = copy.skip_to_records()
            copy.advance(committed)
            self._compare(found, copy, copied)
            found.computed = self._state.by_column(value[0])
            found.records, found.batches = copy.records, copy.batches
        found.is_independent = type(copied) is not type(self._state)
        found.steps, found.late = list(steps), list(late)
        if causes_max and steps:
            self._find_causes(found, causes_max)
        if causes_max and late:
            self._find_late(found, causes_max)
        found.seconds = time.monotonic() - began_s
        return found

    def _recomputation(
        self, shadow: Topology, seen: Callable[[Batch], None] | None = None, rows: LateRows | None = None
    ) -> Recomputation:
        return Recomputation(
            self._topology, self._store, self._conf, shadow=shadow, seen=seen, archive=self._archive, watcher=rows
        )

    def _is_for(self, late_for: Row) -> bool:
        """Whether records that were late for this result were late for the key, by the columns that
        both have."""
        key = zip(self._state.key_columns(), self._key, strict=False)
        pairs = [(value, late_for[name]) for name, value in key if name in late_for]
        return bool(pairs) and all(_plain(one) == _plain(other) for one, other in pairs)

    def _compare(self, found: Explanation, copy: Recomputation, copied: KeyedState) -> None:
        """Compare with what the sink holds. It may have moved on meanwhile: then follow it."""
        if self._state.value_type is ValueType.NON_TRANSACTIONAL:
            found.txid = copy.txid
            return  # nobody can say what it held after a transaction
        txid, held = hold(self._state, [self._key])
        if txid < copy.txid:
            raise RetryableError(f"{self._state.location} went back to transaction {txid} meanwhile: ask again")
        copy.await_commit(txid)
        copy.advance(txid)
        found.txid, found.held = txid, self._state.by_column(held[self._key])
        if found.since_txid == 1:
            differences: list[Difference] = []
            self._state.compare(held, copied, differences.append)
            found.agrees = not differences

    def _find_causes(self, found: Explanation, causes_max: int) -> None:
        shadow, copied = self._shadow("causes")
        with self._recomputation(shadow) as copy:
            search = _Search(copy, partial(copied.written, self._key))
            records = TransactionRecords(self._store, self._topology.id, self._archive)
            for step in found.steps:
                if step.first_txid == step.txid:
                    step.recorded = records.read(step.txid)
                causes, step.has_more = search.first(step.plan, causes_max)
                step.causes = [self._shown(copy, *each) for each in causes]
            found.records, found.batches = found.records + copy.records, found.batches + copy.batches

    def _find_late(self, found: Explanation, records_max: int) -> None:
        shadow, _ = self._shadow("late")
        rows = LateRows(shadow)
        rows.make_all_late()
        with self._recomputation(rows.shadow, rows=rows) as copy:
            for late in found.late:
                search = _Search(copy, partial(rows.has, late.component_id, late.stream, late.rows))
                causes, late.has_more = search.first(late.plan, records_max)
                for each in causes:
                    search.shown_by(*each)
                    late.records.append(LateRecord(self._shown(copy, *each), rows.newest_of(late.component_id)))
            found.records, found.batches = found.records + copy.records, found.batches + copy.batches

    def _shown(self, copy: Recomputation, partition: str, meta: Meta) -> Cause:
        record = copy.planner.ranges.peek(partition, meta)
        if record is not None:
            return Cause(partition, meta, record)
        return Cause(
            partition, meta, rows=rows_in(self._topology, self._conf, copy.planner, {partition: meta}, ROWS_SHOWN)
        )

    def _shadow(self, name: str) -> tuple[Topology, KeyedState]:
        """A copy of the part of the topology that the state depends on, and the state in it."""
        part = with_what_it_needs(self._topology, self._component, letter_component(self._topology))
        joined = read_joined(self._store, self._topology.id)
        shadow, left_out = shadow_of(part, self._folder / name, recounting, joined=joined)
        for each in left_out:
            if each.component.id == self._component.id:
                raise ConfigError(f"{self._state.location} cannot be explained: {each}")
        copy = shadow[self._component.id]
        bolt: object = copy.instance
        if isinstance(bolt, NarrowedBolt):
            bolt.narrow(self._key)
        return shadow, _keyed(copy, self._number)


@dataclass(slots=True)
class _Search:
    """Finds the smallest ranges of a batch that still have an effect when each is processed alone.
    ``shows``: whether a batch of the copy has the effect."""

    copy: Recomputation
    shows: Callable[[int], bool]

    def first(self, plan: Plan, most: int) -> tuple[list[tuple[str, Meta]], bool]:
        """The first of the smallest ranges, and whether there are more."""
        found = list(itertools.islice(self.smallest(plan), most + 1))
        return found[:most], len(found) > most

    def smallest(self, plan: Plan) -> Iterator[tuple[str, Meta]]:
        found = False
        ranges = with_records(self.copy.planner, plan)
        for partition, meta in ranges.items():
            if len(ranges) == 1 or self.shown_by(partition, meta):
                found = True
                shows = partial(self.shown_by, partition)
                yield from ((partition, each) for each in narrow(self.copy.planner, partition, meta, shows))
        if not found:  # it needs records of several partitions
            yield from ranges.items()

    def shown_by(self, partition: str, meta: Meta) -> bool:
        """Whether the effect shows when only this range is processed."""
        self.copy.empty()
        return self.shows(self.copy.recompute({partition: meta}))


def _plain(value: Any) -> Any:
    """A part of a key in a form to compare, because one state may hold it as a time, and another as
    a number."""
    is_moment = isinstance(value, datetime.datetime) and value.tzinfo is not None
    return micros_since_epoch(value) if is_moment else comparable(value)


def _keyed(component: Component, number: int) -> KeyedState:
    state = component.states[number]
    if not isinstance(state, KeyedState):
        raise ConfigError(f"{state.location} has no keys, so no number in it can be explained")
    return state
