"""Commits one recorded transaction again, in this process, and compares what comes out with what
the sinks hold.

The batch is read from the source, goes through the topology's own bolts, and is committed to
copies of the states, which start from what the sinks held before it. Nothing is written anywhere
else. No leadership is needed, and a driver may run meanwhile. User code runs in the calling thread,
so that it can print, and be looked at in a debugger.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import ConfigError, DataLossError, RetryableError
from framework.execution import AttemptHeader, FailureKind, LocalExecutor, ProcessingJob, TaskFailure, plan_execution
from framework.execution.plan import Edge, ExecutionPlan
from framework.topology import ArrowBolt, Bolt, Change, Topology
from framework.transactions import CoordinationStore
from framework.transactions.commit import CommitPhase
from framework.transactions.documents import committed_txid, read_plan, read_transaction
from framework.transactions.plans import Plan, plan_digest
from framework.transactions.shadow import LeftOut, shadow_of
from framework.transactions.sources import planner_of

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
        """How many keys the sink cannot tell of any more."""
        return sum(each.agrees is None for each in self.changes)


@dataclass(slots=True)
class ReplayReport:
    """``committed``: whether the transaction is closed, so that the sinks hold its result.
    ``rows``: edge label -> rows emitted for it. ``failure``: of user code; there are no states
    then. ``left_out``: components that were not replayed, and why."""

    topology_id: str
    txid: int
    _: KW_ONLY
    committed: bool = False
    rows: Counter[str] = field(default_factory=Counter)
    failure: TaskFailure | None = None
    states: list[ReplayedState] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether nothing was found that the sinks hold otherwise."""
        return not (self.committed and any(each.differing() for each in self.states))


@dataclass(frozen=True, slots=True)
class Watch:
    """What the caller wants to see while the batch is replayed. ``edges``: labels of edges, such as
    ``split->count``; ``components``: all edges into and out of them. The spout's rows for a sink
    that is left out are shown, too."""

    edges: Sequence[str] = ()
    components: Sequence[str] = ()
    row: RowSeen | None = None
    error: ErrorSeen | None = None

    def chosen(self, plan: ExecutionPlan) -> frozenset[str]:
        """The labels. Raises ``ConfigError`` for an edge or a component that the topology lacks."""
        labels = [edge.label for edge in plan.edges]
        for label in self.edges:
            if label not in labels:
                raise ConfigError(f"there is no edge {label!r}; there are {', '.join(labels)}")
        for component in self.components:
            if component not in plan.components:
                raise ConfigError(f"there is no component {component!r}; there are {', '.join(plan.components)}")
        at = {edge.label for edge in plan.edges if {edge.source, edge.target} & set(self.components)}
        return frozenset({*self.edges, *at})


def plan_to_replay(store: CoordinationStore, topology: Topology, txid: int | None = None) -> tuple[int, Plan]:
    """A txid and the plan of that transaction; by default the one that is next to commit. Raises
    ``ConfigError`` where it is not kept."""
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

    Raises ``ConfigError`` for a watch or a state that cannot be, and ``RetryableError`` when the
    batch cannot be read again, or when something outside does not answer.
    """
    folder = Path(tempfile.mkdtemp(prefix="ratchet-replay-"))
    try:
        return _Replay(topology, conf or {}, folder, planned[0], watch or Watch()).run(store, planned[1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Replay:
    def __init__(self, topology: Topology, conf: Mapping[str, Any], folder: Path, txid: int, watch: Watch) -> None:
        self._topology, self._txid, self._watch = topology, txid, watch
        self._shadow, left_out = shadow_of(topology, folder, self._replaying, strict=False)
        self._report = ReplayReport(topology.id, txid, left_out=[str(each) for each in left_out])
        plan = plan_execution(_with_ends(self._shadow, left_out))
        self._watched = watch.chosen(plan)
        self._executor = LocalExecutor(plan, conf, self)
        self._planner = planner_of(topology, conf)

    def _replaying(self, bolt: Bolt, folder: Path) -> Bolt:
        for number, state in enumerate(bolt.states()):
            state.become_replay(folder / str(number), self._txid)
        return bolt

    def run(self, store: CoordinationStore, plan: Plan) -> ReplayReport:
        report = self._report
        self._executor.start()
        try:
            report.failure = self._commit(plan)
            report.committed = committed_txid(store, self._topology.id) >= self._txid
            if report.failure is None:
                report.states = list(self._states())
        finally:
            self._executor.close()
            self._planner.close()
            for state in self._shadow.states:
                state.close()
        return report

    def _commit(self, plan: Plan) -> TaskFailure | None:
        """How user code fails; None when it does not."""
        header = AttemptHeader(self._shadow.id, txid=self._txid, attempt_id=1, epoch=1, plan_digest=plan_digest(plan))
        states = self._shadow.states
        commit = CommitPhase(self._shadow.id, states, self._executor, 1)
        commit.open(self._txid, {}, joining=[state.location for state in states])
        try:
            ranges = {partition: self._planner.for_reading(partition, meta) for partition, meta in plan.items()}
            result = self._executor.process(ProcessingJob(header, ranges, self._planner.record_count(plan)))
            if result.failure is None:
                self._planner.confirm(plan)
                result = commit.run(header, replay=False)
        except DataLossError as error:
            raise RetryableError(f"transaction {self._txid} cannot be read again: {error}") from error
        failure = result.failure
        if failure is not None and failure.kind in (FailureKind.RETRYABLE, FailureKind.STALE, FailureKind.DATA_LOSS):
            raise RetryableError(f"transaction {self._txid} cannot be replayed: {failure}")
        return failure

    def _states(self) -> Iterable[ReplayedState]:
        for component in self._shadow.components:
            for state, replayed in zip(self._topology[component.id].states, component.states, strict=True):
                yield ReplayedState(component.id, state.location, list(state.changes(replayed, self._txid)))

    # --- as the watcher of the tasks --------------------------------------------------------------

    def emitted(self, edge: Edge, rows: pa.RecordBatch) -> None:
        self._report.rows[edge.label] += rows.num_rows
        if self._watch.row is not None and edge.label in self._watched:
            for row in rows.to_pylist():
                self._watch.row(edge.label, row)

    def failed(self, failure: TaskFailure, error: BaseException) -> None:
        if self._watch.error is not None:
            self._watch.error(failure, error)


class _End(ArrowBolt):
    """Takes the rows of a component that is left out, and does nothing."""

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        return None


def _with_ends(shadow: Topology, left_out: Iterable[LeftOut]) -> Topology:
    """The shadow with an end for each component that is left out, so that its rows can be seen."""
    kept = {each.id for each in shadow.components}
    ends = [
        replace(each.component, instance=_End(), factory=None, committer=False, streams={}, subscriptions=taken)
        for each in left_out
        if (taken := tuple(sub for sub in each.component.subscriptions if sub.component_id in kept))
    ]
    return Topology(shadow.id, (*shadow.components, *ends), shadow.at_least_once)


@dataclass(frozen=True, slots=True)
class CodeDifference:
    """A key that two versions of a topology leave with different values; None: no value."""

    component_id: str
    key: Any
    now: Any
    new: Any


def differences(now: ReplayReport, new: ReplayReport) -> list[CodeDifference]:
    """What two replays of one transaction leave differently in the states of their components. A
    component that only one of them has differs in all its keys."""
    found: list[CodeDifference] = []
    ours, theirs = _afters(now), _afters(new)
    for component_id in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(component_id, {}), theirs.get(component_id, {})
        for key in dict.fromkeys([*one, *other]):
            left, right = one.get(key), other.get(key)
            if left != right and not (left != left and right != right):
                found.append(CodeDifference(component_id, key, left, right))
    return found


def _afters(report: ReplayReport) -> dict[str, dict[Any, Any]]:
    return {each.component_id: {change.key: change.after for change in each.changes} for each in report.states}
