"""Commits one recorded transaction again, in this process, and compares what comes out with what
the sinks hold.

The batch is read from the source, goes through the topology's own bolts, and is committed to
copies of the states, which start from what the sinks held before it. Nothing is written anywhere
else. No leadership is needed, and a driver may run meanwhile. User code runs in the calling thread,
so that it can print, and be looked at in a debugger.
"""

from __future__ import annotations

import bdb
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import ConfigError, DataLossError, RetryableError
from framework.execution import AttemptHeader, FailureKind, ProcessingJob, TaskFailure, plan_execution
from framework.execution.plan import Edge, ExecutionPlan
from framework.execution.ports import GENERAL_PARTITION
from framework.inspect.sandbox import LeftOut, Sandbox, shadow_of, with_ends
from framework.local_paths import held_temporary_folder
from framework.topology import Bolt, Change, Topology, TransactionalSpout
from framework.topology.canonical_form import equal
from framework.topology.inspectable import ReplayedBolt, inspectable
from framework.topology.spouts import PartitionPlanner
from framework.transactions import CoordinationStore
from framework.transactions.documents import committed_txid, read_joined, read_plan, read_transaction
from framework.transactions.plans import Plan, plan_digest
from framework.transactions.spout_planners import processing_job, shown_row

#: Gets each row that an edge takes which is watched: the edge's label, and field -> value.
RowSeen = Callable[[str, Mapping[str, Any]], None]
#: Gets the failure of user code and its error, with the traceback.
ErrorSeen = Callable[[TaskFailure, BaseException], None]


@dataclass(slots=True)
class ReplayedState:
    """One state: every key that the transaction changes, with the values before and after."""

    component_id: str
    location: str
    changes: list[Change] = field(default_factory=list)

    def differing(self) -> list[Change]:
        return [each for each in self.changes if each.agrees is False]

    def unknown(self) -> int:
        """The number of keys for which the sink no longer has the value."""
        return sum(each.agrees is None for each in self.changes)


@dataclass(slots=True)
class ReplayReport:
    """``committed``: whether the transaction is closed, so that the sinks hold its result.
    ``rows``: edge label -> rows emitted for it. ``failure``: of user code; there are no states
    then. ``lacked_values``: whether the component that failed, or one above it, asked for values
    that are no longer known, and got none. ``left_out``: component -> why it was not replayed."""

    topology_id: str
    txid: int
    _: KW_ONLY
    committed: bool = False
    rows: Counter[str] = field(default_factory=Counter)
    failure: TaskFailure | None = None
    lacked_values: bool = False
    states: list[ReplayedState] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool | None:
        """Whether the sinks hold the same values; None if nothing was compared."""
        if not self.committed or not self.states:
            return None
        return not any(each.differing() for each in self.states)


@dataclass(frozen=True, slots=True)
class Watch:
    """What the caller wants to see while the batch is replayed. ``edges``: labels of edges, such as
    ``split->count``; ``components``: all edges into and out of them; ``rows_max``: of each edge.
    The spout's rows for a sink that is left out are shown, too."""

    edges: Sequence[str] = ()
    components: Sequence[str] = ()
    row: RowSeen | None = None
    error: ErrorSeen | None = None
    rows_max: int | None = None

    def chosen(self, plan: ExecutionPlan, left_out: Iterable[LeftOut]) -> frozenset[str]:
        """The labels. Raises ``ConfigError`` for an edge or a component that the topology lacks,
        or that gets no rows because of what is left out."""
        labels = [edge.label for edge in plan.edges]
        for each in left_out:
            if each.component.id in self.components and each.component.id not in plan.components:
                raise ConfigError(f"there are no rows to show of {each}")
        for label in self.edges:
            if label not in labels:
                raise ConfigError(f"there is no edge {label!r}; there are {', '.join(labels)}")
        for component in self.components:
            if component not in plan.components:
                raise ConfigError(f"there is no component {component!r}; there are {', '.join(plan.components)}")
        at = {edge.label for edge in plan.edges if {edge.source, edge.target} & set(self.components)}
        return frozenset({*self.edges, *at})


def plan_to_replay(store: CoordinationStore, topology: Topology, txid: int | None = None) -> tuple[int, Plan]:
    """A txid and the plan of that transaction; by default the one that is due: the next to commit.
    Raises ``ConfigError`` where the plan is not kept, and for a later transaction."""
    due = committed_txid(store, topology.id) + 1
    if txid is not None and txid > due:
        raise ConfigError(
            f"transaction {txid} cannot be replayed before transaction {due}, which is due: it starts from what the ones before "
            f"it leave; replay {due}"
        )
    if txid is not None:
        recorded = read_transaction(store, topology.id, txid)
        if recorded is not None and recorded.plan:
            return txid, recorded.plan
    return read_plan(store, topology.id, topology.spout.id, txid)


def replay(
    topology: Topology,
    store: CoordinationStore,
    conf: Mapping[str, Any] | None = None,
    *,
    planned: tuple[int, Plan],
    watch: Watch | None = None,
) -> ReplayReport:
    """Commit a transaction again, in scratch copies of the states. ``planned``: its txid and plan,
    from ``plan_to_replay``. ``topology`` may be another version of the one that is recorded.

    Raises ``ConfigError`` for a watch or a state that cannot be, and for a plan that another kind
    of spout made; ``RetryableError`` when the batch cannot be read again, when it is planned again
    meanwhile, or when a server does not answer; ``bdb.BdbQuit`` when a debugger in user code is
    left; and what the watch raises.
    """
    with held_temporary_folder("ratchet-replay-") as folder:
        return _Replay(topology, store, conf or {}, folder, planned=planned, watch=watch or Watch()).run()


class _Replay:
    def __init__(
        self,
        topology: Topology,
        store: CoordinationStore,
        conf: Mapping[str, Any],
        folder: Path,
        *,
        planned: tuple[int, Plan],
        watch: Watch,
    ) -> None:
        self._topology, self._store, self._watch = topology, store, watch
        self._txid, self._plan = planned
        later = {at: first for at, first in read_joined(store, topology.id).items() if first > self._txid}
        self._shadow, left_out = shadow_of(topology, folder, self._replaying, joined=later, strict=False)
        self._report = ReplayReport(
            topology.id, self._txid, left_out={each.component.id: each.why for each in left_out}
        )
        plan = plan_execution(with_ends(self._shadow, left_out))
        self._watched = watch.chosen(plan, left_out)
        self._sandbox = Sandbox(topology, self._shadow, conf, execution=plan, watcher=self)
        self._stopped: BaseException | None = None  # by the watch, or by leaving a debugger

    def _replaying(self, bolt: Bolt, folder: Path) -> Bolt:
        if isinstance(bolt, ReplayedBolt):
            return bolt.replaying(folder, self._txid, self._topology.id)
        for number, state in enumerate(bolt.states()):
            inspectable(state, purpose="be replayed").become_replay(folder / str(number), self._txid, self._topology.id)
        return bolt

    def run(self) -> ReplayReport:
        report = self._report
        self._sandbox.start()
        try:
            report.failure = self._commit()
            if self._stopped is not None:
                raise self._stopped
            report.committed = committed_txid(self._store, self._topology.id) >= self._txid
            self._check_planned()
            states, lacking = self._states()
            if report.failure is None:
                report.states = states
            else:
                report.lacked_values = report.failure.component_id in lacking
        finally:
            self._sandbox.close()
        return report

    def _check_planned(self) -> None:
        """Refuse a batch whose plan was replaced before it was closed: the sinks hold another one.
        Call it after reading what is closed."""
        try:
            _, now = plan_to_replay(self._store, self._topology, self._txid)
        except ConfigError:
            return  # its plan is no longer kept, so it was closed long before
        if plan_digest(now) != plan_digest(self._plan):
            raise RetryableError(f"transaction {self._txid} was planned anew meanwhile; replay it again")

    def _commit(self) -> TaskFailure | None:
        """How user code fails; None when it does not."""
        self._sandbox.commit.open(self._txid, {}, joining=[state.location for state in self._shadow.states])
        try:
            failure = self._sandbox.run(self._txid, self._plan, job=self._job)
        except DataLossError as error:
            raise RetryableError(f"transaction {self._txid} cannot be read again: {error}") from error
        if failure is not None and failure.kind in (FailureKind.RETRYABLE, FailureKind.STALE, FailureKind.DATA_LOSS):
            raise RetryableError(f"transaction {self._txid} cannot be replayed: {failure}")
        return failure

    def _job(self, header: AttemptHeader, planner: PartitionPlanner, plan: Plan) -> ProcessingJob:
        spout = self._topology.spout
        made_by_another = (
            f"spout {spout.id!r} cannot read the plan of transaction {self._txid}: another kind of spout made it"
        )
        if isinstance(spout.instance, TransactionalSpout) and set(plan) != {GENERAL_PARTITION}:
            raise ConfigError(made_by_another)
        try:
            return processing_job(header, planner, plan)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{made_by_another} ({type(error).__name__}: {error})") from error

    def _states(self) -> tuple[list[ReplayedState], set[str]]:
        """The results of the transaction in each state; and the components that lacked values,
        because they, or components above them, asked for values that the sinks no longer have. The
        other results of these components, in other states and below, are not compared. A key of the
        same state is assumed to depend on itself only."""
        found: list[ReplayedState] = []
        lacking: set[str] = set()
        for component in self._shadow.components:
            states = [
                ReplayedState(
                    component.id,
                    state.location,
                    list(inspectable(state, purpose="be compared").changes(replayed, self._txid)),
                )
                for state, replayed in zip(self._topology[component.id].states, component.states, strict=True)
            ]
            below = any(sub.component_id in lacking for sub in component.subscriptions)
            without = [state for state in states if state.unknown()]
            if below or without:
                lacking.add(component.id)
            for state in states:
                if below or any(each is not state for each in without):
                    state.changes = [replace(each, before=None, held=None, agrees=None) for each in state.changes]
            found += states
        return found, lacking

    # --- as the watcher of the tasks --------------------------------------------------------------

    def emitted(self, edge: Edge, rows: pa.RecordBatch) -> None:
        before = self._report.rows[edge.label]
        self._report.rows[edge.label] += rows.num_rows
        if self._watch.row is None or edge.label not in self._watched or self._stopped is not None:
            return
        left = rows.num_rows if self._watch.rows_max is None else max(self._watch.rows_max - before, 0)
        try:
            for number in range(min(left, rows.num_rows)):
                self._watch.row(edge.label, shown_row(rows, number))
        except Exception as error:  # noqa: BLE001 - the watch's own: user code has not failed
            self._stopped = error

    def failed(self, failure: TaskFailure, error: BaseException) -> None:
        if isinstance(error, bdb.BdbQuit):
            self._stopped = error
        elif self._watch.error is not None:
            self._watch.error(failure, error)


@dataclass(frozen=True, slots=True)
class CodeDifference:
    """A key that two versions of a topology leave with different values. None: no value.
    ``NOT_TOUCHED``: that version does not change the key, whose value before is not known."""

    component_id: str
    location: str
    key: Any
    now: Any
    new: Any


class _NotTouched:
    def __repr__(self) -> str:
        return "not touched"


NOT_TOUCHED = _NotTouched()


def differences(now: ReplayReport, new: ReplayReport) -> list[CodeDifference]:
    """What two replays of one transaction leave differently in the states of their components. A
    component that only one of them has differs in all its keys; one that is left out is not
    compared."""
    found: list[CodeDifference] = []
    ours, theirs = _numbered(now), _numbered(new)
    for place in dict.fromkeys([*ours, *theirs]):
        if place[0] in {*now.left_out, *new.left_out}:
            continue
        one, other = ours.get(place), theirs.get(place)
        named = one or other or _NO_STATE
        lefts, rights = ({each.key: each for each in (state or _NO_STATE).changes} for state in (one, other))
        same_sink = one is not None and other is not None and one.location == other.location
        for key in dict.fromkeys([*lefts, *rights]):
            left = _left_with(lefts.get(key), rights.get(key), same_sink=same_sink)
            right = _left_with(rights.get(key), lefts.get(key), same_sink=same_sink)
            if not equal(left, right):
                found.append(CodeDifference(named.component_id, named.location, key, left, right))
    return found


_NO_STATE = ReplayedState("", "")


def _numbered(report: ReplayReport) -> dict[tuple[str, int], ReplayedState]:
    """The states by component and number in it."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], ReplayedState] = {}
    for each in report.states:
        found[each.component_id, seen[each.component_id]] = each
        seen[each.component_id] += 1
    return found


def _left_with(change: Change | None, of_the_other: Change | None, *, same_sink: bool) -> Any:
    """The value that one version leaves a key with: if it does not change the key, the one before,
    which the other version has found."""
    if change is not None and (change.agrees is not None or change.after is not None):
        return change.after
    if same_sink and of_the_other is not None and of_the_other.agrees is not None:
        return of_the_other.before
    return NOT_TOUCHED
