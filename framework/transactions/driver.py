"""The driver: stands for election, runs a term while it leads, and stands again when it loses the
leadership."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from framework.config import Config
from framework.coordination.election import Candidate
from framework.coordination.step_generators import Steps, Threads, perform
from framework.coordination.store import CoordinationStore, Leadership
from framework.errors import RatchetError, RetryableError
from framework.execution.failures import TaskFailure, users_errors
from framework.execution.ports import BatchExecutor
from framework.observe.journal import Journal
from framework.observe.logs import get_logger
from framework.topology.builder import Topology
from framework.topology.fencing import PURGE_EVERY, Header
from framework.topology.spouts import PartitionPlanner, PartitionProgress
from framework.transactions.code_version import lineage_of
from framework.transactions.driver_context import DriverContext, DriverStatus
from framework.transactions.history_archive import HistoryKeeper, HistoryTarget
from framework.transactions.plans import Plan
from framework.transactions.recovery import Recovery, recovering
from framework.transactions.term_loop import Term

if TYPE_CHECKING:
    from framework.observe.tracing import TransactionTraces

_log = get_logger()

#: The final phases.
_ENDED = ("finished", "stopped", "failed")


class Driver:
    """Runs one topology until it is stopped, fails or finishes. ``run`` blocks; the other methods
    may be called from other threads. ``standby``: let another driver lead first. The other
    arguments are as in ``DriverContext``."""

    def __init__(
        self,
        topology: Topology,
        executor: BatchExecutor,
        store: CoordinationStore,
        config: Config,
        *,
        accept_changed_topology: bool = False,
        standby: bool = False,
        purge_every: int = PURGE_EVERY,
        threads: Threads | None = None,
        traces: TransactionTraces | None = None,
        history: HistoryTarget | None = None,
    ) -> None:
        threads = threads or Threads()
        self._topology = topology
        self._store = store
        self._standby = standby
        self._stop_requested = threads.event()
        self._changed = threading.Condition()
        self._status = DriverStatus()
        self._term: Term | None = None
        self._finished = False
        self._partitions: Mapping[str, PartitionProgress] = {}
        self.journal = Journal(lineage_of(topology))
        self.failure: TaskFailure | None = None
        self.error: BaseException | None = None
        self._context = DriverContext(
            topology=topology,
            executor=executor,
            store=store,
            config=config,
            conf=config.for_components(),
            accept_changed_topology=accept_changed_topology,
            purge_every=purge_every,
            journal=self.journal,
            threads=threads,
            stop_requested=self._stop_requested,
            update=self._update,
            traces=traces,
            history=HistoryKeeper(store, topology.id, history, self._update) if history is not None else None,
        )

    # --- for other threads ------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Finish the commit under way, then end ``run``."""
        self._stop_requested.set()
        term = self._term
        if term is not None:
            term.request_stop()

    def status(self) -> DriverStatus:
        with self._changed:
            return replace(self._status, in_flight=dict(self._status.in_flight))

    def wait_until(self, condition: Callable[[DriverStatus], bool], timeout_s: float | None) -> bool:
        """Wait until the status meets a condition, or the run has ended. Returns whether the
        condition was met."""
        with self._changed:
            self._changed.wait_for(lambda: condition(self._status) or self._status.phase in _ENDED, timeout_s)
            return condition(self._status)

    def call_planner(self, function: Callable[[PartitionPlanner], Any]) -> Future[Any] | None:
        """Call ``function`` with the planner, in the planner's thread. Returns None outside of a
        term."""
        term = self._term
        return term.call_planner(function) if term is not None else None

    @contextmanager
    def awaited(self, goal: Plan) -> Iterator[None]:
        """While the block runs, no interval delays plans up to ``goal``."""
        self._context.awaited.add(goal)
        try:
            term = self._term
            if term is not None:
                term.look_at_pace()
            yield
        finally:
            self._context.awaited.remove(goal)

    def covers(self, goal: Plan) -> bool:
        """Whether all records in ``goal`` (a result of the planner's ``end``) are committed."""
        term = self._term
        return term is not None and term.covers(goal)

    def partitions(self) -> Mapping[str, PartitionProgress]:
        """The position of each partition of the source; after the run, its last position."""
        term = self._term
        if term is not None:
            self._partitions = term.progress()
        return self._partitions

    def headers(self) -> list[tuple[str, Header]]:
        """Each sink's location, and its header as the leader knows it; empty while this driver does
        not lead."""
        term = self._term
        return term.headers() if term is not None else []

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Stand for election, run while leading, and stand again when leadership is lost. Returns
        when stopped; sets ``failure`` or ``error`` when the topology failed."""
        perform(self.running())

    def running(self) -> Steps[None]:
        """The steps of ``run``."""
        candidate = Candidate(
            self._store,
            self._topology.id,
            self._stop_requested,
            lead=self._lead,
            stand_by=self._stand_by,
            progress=lambda: self._status.committed_txid,
            standby=self._standby,
        )
        try:
            yield from candidate.running()
        except users_errors() as error:  # kept for whoever waits on the run
            self.error = error
            if not isinstance(error, RatchetError):
                _log.error("driver.crashed", topology=self._topology.id, exc_info=True)
        finally:
            if self.error is not None or self.failure is not None:
                self._update(phase="failed", last_error=str(self.error or self.failure), in_flight={})
            else:
                self._update(phase="finished" if self._finished else "stopped", in_flight={})

    def _stand_by(self, error: Exception | None) -> None:
        if error is None:
            self._update(phase="standby")
            return
        repeating = str(error) if isinstance(error, RetryableError) else None  # the driver retries
        self._update(phase="standby", last_error=str(error), repeating=repeating, in_flight={})

    def _lead(self, leadership: Leadership) -> Steps[bool]:
        """Run one term. Returns whether the topology has failed or finished."""
        try:
            recovery = yield from recovering(self._context, leadership)
            if self._context.history is not None:
                self._context.history.begin(recovery.incarnation, leadership.epoch)
            term = self._begin_term(leadership, recovery)
            self.failure = yield from term.running()
            self._finished = term.finished and self.failure is None
        finally:
            self._end_term()
            if self._context.history is not None:
                self._context.history.end()
            self.journal.forget_open()
            if self._context.traces is not None:
                self._context.traces.forget_open()
        return self.failure is not None or self._finished

    def _begin_term(self, leadership: Leadership, recovery: Recovery) -> Term:
        term = self._term = Term(self._context, leadership, recovery)
        if self._stop_requested.is_set():
            term.request_stop()
        return term

    def _end_term(self) -> None:
        self.partitions()
        term, self._term = self._term, None
        if term is not None:
            term.close()

    def _update(self, **changes: Any) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self._status, name, value)
            self._changed.notify_all()
