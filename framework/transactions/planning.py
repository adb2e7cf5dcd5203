"""The planner's thread: asks the source for the next batch until there is one, and keeps I/O out of the driver's loop."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import structlog

from framework.errors import DataLossError, RatchetError, RetryableError
from framework.execution.records import FailureKind, TaskFailure
from framework.topology.spouts import PartitionPlanner
from framework.transactions.coordinator import AskPlan, Plan
from framework.transactions.sources import CoordinatorPlanner

_log = structlog.get_logger()

#: An idle source is asked again after this long, twice as long each time.
IDLE_POLL_S = 0.004
RETRY_S = 0.2


class PlanningThread:
    """Owns the planner: everything that touches it runs here, one thing at a time. ``check`` looks at each plan before anybody
    else does, and may raise what planning may."""

    def __init__(
        self,
        planner: PartitionPlanner,
        *,
        check: Callable[[Plan], None] = lambda plan: None,
        on_plan: Callable[[AskPlan, Plan], None],
        on_failure: Callable[[TaskFailure], None],
        idle_poll_max_s: float,
        empty_batch_every_s: float | None = None,
    ) -> None:
        self._planner = planner
        self._check = check
        self._on_plan = on_plan
        self._on_failure = on_failure
        self._idle_poll_max_s = idle_poll_max_s
        self._empty_batch_every_s = empty_batch_every_s
        self._last_plan_at = time.monotonic()
        self._asked: AskPlan | None = None
        self._committed: Plan | None = None
        self._calls: list[tuple[Callable[[PartitionPlanner], Any], Future[Any]]] = []
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ratchet-planner", daemon=True)
        self.waiting_for: str | None = None

    def start(self) -> None:
        self._thread.start()

    def ask(self, request: AskPlan) -> None:
        """Plan this batch now; forget any other."""
        with self._wake:
            self._asked = request
            self._wake.notify_all()

    def committed(self, plan: Plan) -> None:
        """Tell the planner that this batch is closed; of several that it has not heard of, only the last."""
        with self._wake:
            self._committed = plan
            self._wake.notify_all()

    def call(self, function: Callable[[PartitionPlanner], Any]) -> Future[Any]:
        """Run a function of the planner in its thread."""
        future: Future[Any] = Future()
        with self._wake:
            if self._closed:
                future.cancel()
            else:
                self._calls.append((function, future))
                self._wake.notify_all()
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while True:
                with self._wake:
                    nothing_to_do = not self._calls and not self._closed and self._committed is None
                    if nothing_to_do and (self._asked is None or pause_s):
                        self._wake.wait(pause_s if self._asked is not None else None)
                    calls, self._calls = self._calls, []
                    committed, self._committed = self._committed, None
                    request, closed = self._asked, self._closed
                if committed is not None:
                    self._tell(committed)
                if closed:
                    self._calls = [*calls, *self._calls]
                    return
                for function, future in calls:
                    self._answer(function, future)
                if request is not None:
                    pause_s = self._plan(request, pause_s)
        finally:
            with self._wake:
                self._closed = True
            for _, future in self._calls:
                future.cancel()
            self._planner.close()

    def _plan(self, request: AskPlan, pause_s: float) -> float:
        """Plan once; returns how long to wait before asking again."""
        previous: Mapping[str, Any] = request.previous or {}
        try:
            if isinstance(self._planner, CoordinatorPlanner):
                self._planner.next_txid = request.txid
            plan = self._next_plan(previous, request.divisor) if self._planner.is_ready() else None
            if plan is not None:
                self._check(plan)
        except RetryableError as error:
            if self.waiting_for is None:
                _log.warning("source.waiting", reason=str(error))
            self.waiting_for = str(error)
            return RETRY_S
        except Exception as error:  # noqa: BLE001 - a planner is user code; the run ends with what it raised
            lost = isinstance(error, DataLossError)
            kind = FailureKind.DATA_LOSS if lost else FailureKind.FATAL
            trace = "" if isinstance(error, RatchetError) else traceback.format_exc()
            message = str(error) if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}"
            self._on_failure(TaskFailure(kind, "planner", 0, message, trace, error=type(error).__name__))
            with self._wake:
                self._asked = None
            return 0.0
        if self.waiting_for is not None:
            _log.info("source.back")
            self.waiting_for = None
        if plan is None:
            return min(max(pause_s * 2, IDLE_POLL_S), self._idle_poll_max_s)
        with self._wake:
            if self._asked is request:
                self._asked = None
            else:
                return 0.0  # asked for another one meanwhile
        self._last_plan_at = time.monotonic()
        self._on_plan(request, plan)
        return 0.0

    def _next_plan(self, previous: Mapping[str, Any], divisor: int) -> Plan | None:
        """What the source has; when that is nothing, an empty batch now and then, for topologies that want one."""
        planner = self._planner
        plan = planner.plan(previous) if divisor == 1 else planner.plan_smaller(previous, divisor)
        every = self._empty_batch_every_s
        if plan is None and every is not None and time.monotonic() - self._last_plan_at >= every:
            return planner.empty_plan(previous)
        return plan

    def _tell(self, committed: Plan) -> None:
        try:
            self._planner.committed(committed)
        except Exception as error:  # noqa: BLE001 - it informs others; the batch is closed whatever comes of it
            _log.warning("source.not_told", reason=f"{type(error).__name__}: {error}")

    def _answer(self, function: Callable[[PartitionPlanner], Any], future: Future[Any]) -> None:
        try:
            future.set_result(function(self._planner))
        except Exception as error:  # noqa: BLE001 - handed to whoever asked
            future.set_exception(error)
