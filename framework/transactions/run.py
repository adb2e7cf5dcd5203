"""A transactional topology that runs in threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from framework.config import Config
from framework.coordination import CoordinationStore
from framework.coordination.presence import Presence
from framework.errors import BadRecordError, ConfigError, DataLossError, RatchetError, RetryableError, TopologyError
from framework.execution import BatchExecutor, FailureKind, TaskFailure
from framework.observe import TransactionEvent, TransactionRecord
from framework.observe.logs import get_logger
from framework.observe.run_thread import RunningThread
from framework.topology import PartitionPlanner, Topology
from framework.transactions.driver import Driver
from framework.transactions.history_archive import HistoryTarget
from framework.transactions.plans import Plan
from framework.transactions.run_status import RunStatus

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from framework.observe.tracing import TransactionTraces


_log = get_logger()

#: The most partitions that a message names.
_SHOWN = 5

#: Serves the status page of a run, and returns a function that stops it.
RunPage = Callable[[Driver, CoordinationStore, Callable[[], RunStatus]], Callable[[], None]]


class TopologyFailed(RatchetError):
    """A run ended because its topology failed. The message is that of the failure."""

    def __init__(self, failure: TaskFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        for line in failure.lines()[1:]:
            self.add_note(line)

    def lines(self) -> list[str]:
        """Lines for display, with the user's own line of code."""
        return self.failure.lines()

    @staticmethod
    def of(failure: TaskFailure) -> TopologyFailed:
        """The error class that matches the failure, for callers that catch errors by recovery."""
        return _ERRORS.get(failure.kind, TopologyFailed)(failure)


class TopologyLostData(TopologyFailed, DataLossError):
    """A run ended because its source lost unread records. The message names partition and
    offsets."""


class TopologyMetBadRecord(TopologyFailed, BadRecordError):
    """A run ended because of records that cannot be decoded. The message names topic, partition and
    offset."""


class TopologyMisconfigured(TopologyFailed, ConfigError):
    """A run ended because a setting is wrong, as the source or a sink has shown."""


_ERRORS = {
    FailureKind.DATA_LOSS: TopologyLostData,
    FailureKind.BAD_RECORD: TopologyMetBadRecord,
    FailureKind.MISCONFIGURED: TopologyMisconfigured,
}


class Run(RunningThread):
    """A topology that runs in threads of this process. Made by ``submit``."""

    def __init__(
        self,
        topology: Topology,
        executor: BatchExecutor,
        store: CoordinationStore,
        *,
        owned: bool,
        config: Config,
        accept_changed_topology: bool = False,
        standby: bool = False,
        traces: TransactionTraces | None = None,
        history: HistoryTarget | None = None,
        page: RunPage | None = None,
    ) -> None:
        self._topology = topology
        self._driver = Driver(
            topology,
            executor,
            store,
            config,
            accept_changed_topology=accept_changed_topology,
            standby=standby,
            traces=traces,
            history=history,
        )
        super().__init__(topology.id)
        self._config = config
        self._hidden: str | None = None  # which records the run waits for behind open kafka_txns
        presence = Presence(store, topology.id, "transactional", self._told)
        owns = [executor.close, presence.close, *(each.close for each in (traces, history) if each is not None)]
        self._begin(
            config,
            *owns,
            *([store.close] if owned else []),
            page=None if page is None else partial(page, self._driver, store, self.status),
        )

    def _work(self) -> None:
        self._driver.run()

    def _collector(self) -> Collector:
        from framework.observe.metrics import RunCollector

        return RunCollector(self.status, self._driver.journal.figures, [each.value for each in FailureKind])

    def _told(self) -> dict[str, Any]:
        """The run's status document for the store."""
        failed = self._driver.journal.failures_within(3600)
        return {**self.status().summary(), "failures_last_hour": failed, "page": self._config.ui_address}

    def status(self) -> RunStatus:
        """The current status of the run."""
        status, journal, partitions = self._driver.status(), self._driver.journal, self._driver.partitions()
        status.waiting_for = status.waiting_for or self._hidden
        return RunStatus(
            topology_id=self._topology.id,
            partitions=partitions,
            read_rows=journal.read_rows,
            committed_rows=journal.committed_rows,
            bad_records=journal.committed_bad_records,
            late_records=journal.committed_late_records,
            left_out_rows=journal.committed_left_out_rows,
            lost_records=sum(each.lost_records for each in partitions.values()),
            rows_per_second=journal.rows_per_second(),
            attempts_failed=journal.attempts_failed,
            **asdict(status),
        )

    def _rate(self) -> float:
        return self._driver.journal.rows_per_second()

    def events(self) -> list[TransactionEvent]:
        """The latest steps of transactions, oldest first; bounded."""
        return self._driver.journal.events()

    def transactions(self) -> list[TransactionRecord]:
        """A record for each of the last thousand transactions that this process closed, oldest
        first, then those in flight: plan, attempts, time per phase, rows per edge, outcome. In
        other processes, use ``framework.transactions.read_history``, which reads the records in the
        store."""
        return self._driver.journal.records()

    def wait_for_commit(self, txid: int, timeout_s: float | None = None) -> None:
        """Wait until ``txid`` is committed. Raises ``TimeoutError``, the error with which the
        topology failed, or ``TopologyError`` when it was stopped meanwhile."""
        self._wait(lambda status: status.committed_txid >= txid, timeout_s, f"txid {txid} to be committed")

    def wait_until_caught_up(self, timeout_s: float | None = None) -> None:
        """Wait until all records in the source at the time of the call are committed, or a bounded
        topology has finished. Records behind an open kafka_txn, which no consumer may read yet, are
        logged as a warning; the run waits for them if ``topology.open.transactions`` is "wait".
        Raises as ``wait_for_commit``, and ``ConfigError`` when the spout cannot say where its
        source ends."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        goal: Any = None
        while goal is None:
            self._wait(lambda status: status.phase in ("running", "finished"), _remaining(deadline), "the run to lead")
            if self._driver.status().phase == "finished":
                return
            asked = self._driver.call_planner(_end_and_hidden)
            if asked is None:
                time.sleep(0.01)
                continue
            try:
                goal, hidden, counts = asked.result(_remaining(deadline))
            except (RetryableError, CancelledError):
                time.sleep(0.1)
                continue
            except TimeoutError:
                if timeout_s is None:
                    raise  # raised by the spout itself
                raise TimeoutError(
                    f"waited {timeout_s:g} s for spout {self._topology.spout.id!r} to say where its source ends, waiting for "
                    f"{self.status().waiting_for}"
                ) from None
            if goal is None:
                raise ConfigError(f"spout {self._topology.spout.id!r} cannot say where its source ends")
        self._wait_for_goal(goal, deadline)
        if hidden and self._tell_of_hidden(hidden, counts):
            try:
                self._wait_for_goal(hidden, deadline)
            finally:
                self._hidden = None

    def _wait_for_goal(self, goal: Plan, deadline: float | None) -> None:
        with self._driver.awaited(goal):
            self._wait(
                lambda status: status.phase == "finished" or self._driver.covers(goal),
                _remaining(deadline),
                "the run to catch up",
            )

    def _tell_of_hidden(self, hidden: Plan, counts: Mapping[str, int | None]) -> bool:
        """Log which records are behind open kafka_txns. Returns whether to wait for them."""
        waits = self._config.open_transactions == "wait"
        for partition in sorted(hidden):
            _log.warning(
                "run.hidden_records",
                topology=self._topology.id,
                partition=partition,
                records=counts.get(partition),
                waits=waits,
                reason="a kafka_txn of their producer is open, or they come after one that is",
            )
        if waits:
            shown = ", ".join(f"{counts.get(each)} of {each}" for each in sorted(hidden)[:_SHOWN])
            more = f" and {len(hidden) - _SHOWN} more partitions" if len(hidden) > _SHOWN else ""
            self._hidden = f"records behind open kafka_txns: {shown}{more}"
        return waits

    def _request_stop(self) -> None:
        self._driver.request_stop()

    def _wait(self, condition: Any, timeout_s: float | None, what: str) -> None:
        if self._driver.wait_until(condition, timeout_s):
            return
        self._raise_failure()
        if not self._thread.is_alive() or self._driver.status().phase in ("stopped", "finished"):
            ended = "had finished" if self._driver.status().phase == "finished" else "was stopped"
            raise TopologyError(f"topology {self._topology.id!r} {ended} while waiting for {what}")
        status = self.status()
        raise TimeoutError(
            f"waited {timeout_s:g} s for {what}: {status.phase}, committed {status.committed_txid}, in flight "
            f"{dict(status.in_flight)}, last error {status.last_error}, waiting for {status.waiting_for}"
        )

    def _raise_failure(self) -> None:
        if self._driver.error is not None:
            raise self._driver.error
        if self._driver.failure is not None:
            raise TopologyFailed.of(self._driver.failure)


def _end_and_hidden(planner: PartitionPlanner) -> tuple[Plan | None, Plan, Mapping[str, int | None]]:
    """The end of the source, the end of the unreadable records behind open kafka_txns, and the
    number of those records.
    """
    end = planner.end()
    hidden = planner.hidden()
    return end, hidden, planner.record_counts(hidden)


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
