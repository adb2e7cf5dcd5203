"""The task of a stateful bolt, which lives across rounds.

Its state goes back only together with those of all other bolts. So after an error the task does
nothing until the recovery that the driver then begins. Under at-least-once, its acks wait until the
checkpoint that covers them is committed, so tuples lost with a process are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from framework.acking.ack_reports import SEQUENCES_PER_ROUND, origin_of, root_of
from framework.acking.rotating_map import RotatingMap
from framework.core.bolt_task import BoltTask, received
from framework.core.checkpoint_messages import CheckpointAction, CheckpointMarker, CheckpointReport
from framework.core.component_task import ROTATIONS_PER_TIMEOUT, AnchoredTuple, ComponentTask
from framework.core.event_times import Marks, Path, reading_of
from framework.core.outcome import Surroundings
from framework.core.rescaling import namespace_of
from framework.core.round_protocol import TreeOutcomes
from framework.errors import CorruptStateError, InvariantViolation, RetryableError
from framework.execution.failures import ignoring_users_errors, users_errors
from framework.execution.plan import Edge, TaskComponent
from framework.execution.tasks import PlannedTopology
from framework.operators.watermarks import Reading, Source
from framework.state.provider_settings import state_of
from framework.topology import BaseStatefulBolt, KeyValueState, State, StateProvider, Tuple
from framework.topology.tuples import rows_of


class Follows(NamedTuple):
    """Settings of a bolt that follows the sources. ``paths``: of its inputs. ``spout_tasks``,
    ``rooted_tasks``: numbers of tasks; spout tasks have the lowest numbers."""

    paths: Mapping[Source, Path]
    spout_tasks: int
    rooted_tasks: int

    def origin_of(self, roots: Sequence[int]) -> int | None:
        """The origin of a row of these trees. None when they have several origins or none, or when
        a bolt began the tree."""
        origin = origin_of(roots[0]) if len(roots) == 1 else None
        return origin if origin is not None and origin % self.rooted_tasks < self.spout_tasks else None


class StatefulBoltTask(BoltTask):
    """A task of a stateful bolt.

    * ``provider``: makes the states of this process.
    * ``number``: its number among all tasks at which trees may begin.
    * ``follows``: set if the bolt follows the sources.

    Invariant under exactly-once: a checkpoint that includes a tick's or hook's change of the state
    is prepared only when all rows anchored to the tick, or emitted by the hook, have been
    processed. So each tick, and each hook that emits, starts a tree of its own, which is pending
    like a spout's tuple."""

    def __init__(
        self,
        topology: PlannedTopology,
        component: TaskComponent,
        task: int,
        surroundings: Surroundings,
        provider: StateProvider,
        *,
        number: int,
        first_round: int,
        tick_s: float | None = None,
        follows: Follows | None = None,
    ) -> None:
        super().__init__(topology, component, task, surroundings, tick_s=tick_s)
        self._number = number
        self._next = first_round * SEQUENCES_PER_ROUND
        self._ticks: RotatingMap[int, None] = RotatingMap(ROTATIONS_PER_TIMEOUT + 1, self._tick_expired)
        self._provider = provider
        self._state: State | None = None
        self._marker: CheckpointMarker | None = None
        self._exact = False
        self._acked: list[AnchoredTuple] = []
        self._prepared: list[AnchoredTuple] = []
        self._done: CheckpointAction | None = None
        self._in_hook = False
        self._hook_roots: Sequence[int] = ()
        self._own_roots: Sequence[int] = ()
        self._held = 0  # tuples that were executed, but neither acked nor failed
        self._no_tick = False
        self._follows = follows

    def instance(self) -> Any:
        """The user's object. None from an error until the recovery."""
        return self._instance

    def begin(self, made: BaseStatefulBolt) -> None:
        super().begin(made)
        marker = self._marker
        if marker is None:
            raise InvariantViolation(f"{self.component.id} begins before it was told as of which checkpoint")
        layout = marker.layouts[self.component.id]
        namespace = namespace_of(self.context.topology_id, self.component.id, layout, self.task)
        conf, ttl_s = self.topology.conf, made.state_ttl_s
        state = state_of(self._provider, namespace, ttl_s, conf, self.context, expires=made.expires)
        if self._follows is not None:
            made.follows = {source: path.in_order for source, path in self._follows.paths.items()}
        try:
            self._place(state, marker)
            made.init_state(state)
        except users_errors():
            state.close()
            with ignoring_users_errors():
                super().end(made)
            raise
        self._state = state

    def _place(self, state: State, marker: CheckpointMarker) -> None:
        """Set a state to a checkpoint."""
        known = self.component.id in marker.known
        try:
            state.recover(marker.txid if known else 0, prepared=marker.prepared and known, upto=marker.upto)
        except CorruptStateError:
            if self._provider.durable:
                raise
            state.rollback()  # the state was lost with its process; the driver decides how to go on

    def end(self, made: BaseStatefulBolt) -> None:
        state, self._state = self._state, None
        try:
            super().end(made)
        finally:
            if state is not None:
                state.close()

    def tell(self, outcomes: TreeOutcomes, lost: int, *, rotates: bool) -> None:
        """Take in decisions about the trees of its ticks, and whether time has gone on."""
        if rotates:
            self._ticks.age()
        for root in outcomes.completed.ids():
            self._ticks.remove(root)
        for roots, ended in ((outcomes.failed, self._tick_failed), (outcomes.expired, self._tick_expired)):
            for root in roots.ids():
                if self._ticks.contains(root):
                    self._ticks.remove(root)
                    ended(root)
        for root in outcomes.reset.ids():
            if self._ticks.contains(root):
                self._ticks.put(root, None)
        if rotates:
            self._ticks.expire()

    def hear_marks(self, round_number: int, marks: Marks | None) -> None:
        """Tell the bolt which round begins, and the progress of the source partitions. ``marks``:
        None when there is nothing new."""
        if self._follows is None or self._instance is None:
            return
        reading = Reading(round_number, 0, {})
        if marks is not None:
            reading = reading_of(marks, self.component.id, self._follows.paths, round_number)
        self._instance.hear_reading(reading)

    def tick_roots(self) -> Sequence[int]:
        if not self._exact:
            return ()
        root = root_of(self._number, self._next)
        self._next += 1
        self.outcome.ledger.born(root)
        self._ticks.put(root, None)
        return (root,)

    def roots_for(self, tup: AnchoredTuple) -> Sequence[int]:
        """When a row combines several input records (or is emitted at a tick), start a new tree of
        this task for it, so that a failure downstream is not counted against any one of those
        records."""
        if not (self._surroundings.blames and self._serves_several):
            return super().roots_for(tup)
        if not self._own_roots:
            self._own_roots = self.tick_roots()
        return self._own_roots

    def _blame(self, roots: Sequence[int], error: BaseException) -> None:
        if not self._serves_several:
            super()._blame(roots, error)

    @property
    def _serves_several(self) -> bool:
        return self._instance is not None and self._instance.serves_several

    def roots_of_nothing(self) -> Sequence[int]:
        if self._in_hook and not self._hook_roots:
            self._hook_roots = self.tick_roots()
        return self._hook_roots

    def look(self) -> None:
        super().look()
        self.counts.pending = len(self._ticks)
        if self._instance is not None:
            self.counts.late += self._instance.late_tuples
            self._instance.late_tuples = 0
        if self._follows is not None and self._instance is not None:
            self.outcome.newest[self.component.id] = self._instance.take_seen()
            wanted_in_s = self._wanted_in()
            self.counts.due = int(wanted_in_s is not None and wanted_in_s <= 0)

    def ack(self, tup: Tuple) -> None:
        if self._exact:
            super().ack(tup)
        elif self.settle(kept := received(tup)):
            self._acked.append(kept)

    def settle(self, tup: AnchoredTuple) -> bool:
        first = super().settle(tup)
        self._held -= first
        return first

    def tick(self, *, settles: bool) -> None:
        """Under exactly-once, a tick starts a tree. While all trees have to end (``settles``), only
        a bolt that holds tuples gets a tick, because it may need the tick to release them.
        Otherwise bolts whose ticks come at different times would start new trees for ever."""
        self._no_tick = settles and self._exact and not self._held
        if not self._no_tick:
            super().tick(settles=settles)

    def end_for(self, marker: CheckpointMarker) -> None:
        made = self._instance
        if isinstance(made, BaseStatefulBolt):
            self._guarded(made.pre_rollback)
        self.close()

    def recover(self, marker: CheckpointMarker, before: ComponentTask | None) -> None:
        self._marker, self._exact = marker, marker.exact
        BoltTask.instance(self)
        self._done = CheckpointAction.RECOVER if self._instance is not None else None

    def prepare(self, marker: CheckpointMarker) -> None:
        made, state = self._instance, self._state
        if made is not None and state is not None and self._guarded(lambda: self._prepare(made, state, marker.txid)):
            self._prepared += self._acked
            self._acked = []
            self._done = CheckpointAction.PREPARE

    def commit(self, marker: CheckpointMarker) -> None:
        made, state = self._instance, self._state
        if made is not None and state is not None and self._guarded(lambda: self._commit(made, state, marker.txid)):
            for tup in self._prepared:
                self.acked(tup)
            self._prepared = []
            self._done = CheckpointAction.COMMIT

    def kept(self) -> Iterable[int]:
        yield from super().kept()
        for tup in (*self._acked, *self._prepared):
            yield from tup.roots

    def checkpoint_report(self, marker: CheckpointMarker) -> CheckpointReport | None:
        done, self._done = self._done, None
        state = self._state
        if done is not marker.action or state is None:
            return None
        found: list[int | None] = []
        if not self._guarded(lambda: found.append(state.txid)):
            return None
        size = None
        if done is CheckpointAction.COMMIT:
            with ignoring_users_errors():
                size = state.size
        return CheckpointReport(self.component.id, self.task, found[0], size=size)

    def expect(self, edge: Edge, batch: pa.RecordBatch) -> None:
        """Read the state's values for the next rows in one request, if the keys of the state are
        the grouping keys of the rows (``grouping_key``). A wrong guess costs a read. An error here
        is ignored: the later read of the value meets it again."""
        bolt, state, fields = self._instance, self._state, edge.grouping.key_fields()
        if not fields or not isinstance(state, KeyValueState) or not state.reads_ahead:
            return
        if type(bolt).grouping_key is not BaseStatefulBolt.grouping_key:
            return
        with ignoring_users_errors():
            rows = rows_of(batch.select(list(fields.names)))
            state.read_ahead([row[0] for row in rows] if len(fields) == 1 else rows)

    def _tick_due_in(self) -> float | None:
        """Seconds until the next tick is due, by the settings or the bolt's ``tick_in_s``. None
        between an error and the recovery, and while the bolt gets no tick."""
        if self._instance is None or self._no_tick:
            return None
        wanted = super()._tick_due_in(), self._wanted_in()
        return min((each for each in wanted if each is not None), default=None)

    def _wanted_in(self) -> float | None:
        """Seconds until the bolt itself wants a tick."""
        try:
            found: float | None = self._instance.tick_in_s()
        except users_errors() as error:
            self.died(error)
            return None
        return found

    def _execute(self, bolt: Any, tup: AnchoredTuple) -> None:
        self._held += 1
        if self._follows is not None:
            bolt.origin = self._follows.origin_of(tup.roots)
        super()._execute(bolt, tup)
        self._own_roots = ()

    def _tick_failed(self, root: int, _: None = None) -> None:
        """Count a failure. The driver then takes everything back."""
        self.counts.failed += 1

    def _tick_expired(self, root: int, _: None = None) -> None:
        """As ``_tick_failed``: rows emitted at the tick were not processed in time."""
        self.counts.timed_out += 1
        self._tick_failed(root)

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Returns whether ``action`` succeeded. After an error the instance is not used any
        more."""
        try:
            action()
        except RetryableError as error:
            self.report(error)
            self.close()
        except users_errors() as error:
            self.died(error)
        else:
            return True
        return False

    def _prepare(self, made: BaseStatefulBolt, state: State, txid: int) -> None:
        self._call(made.pre_prepare, txid)
        state.prepare_commit(txid)

    def _commit(self, made: BaseStatefulBolt, state: State, txid: int) -> None:
        self._call(made.pre_commit, txid)
        state.commit(txid)

    def _call(self, hook: Callable[[int], None], txid: int) -> None:
        """Call a hook. Rows that it emits without anchors form a tree of their own, which begins
        with the first row."""
        self._in_hook = True
        try:
            hook(txid)
        finally:
            self._in_hook, self._hook_roots = False, ()
