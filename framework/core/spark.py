"""Rounds on Spark. Tasks live in task workers, processes next to the executors.

In a small round, the driver itself carries the rows: it asks all workers of a level concurrently
(ADR 60). On a cluster, a large round is a Spark job: a chain of levels with shuffles between them,
so that no single process carries all rows. If the driver cannot reach the workers, a small round is
a Spark job with one task, which does what the driver would do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from framework.core.plan import CorePlan
from framework.core.round_protocol import Addressed, Round, RoundRecord, RoundReport, WorkerLostError
from framework.core.worker_client import Address, Channels, WorkerClient, WorkerSettings, close_worker, unreachable
from framework.core.worker_process import ensure_worker
from framework.errors import InvariantViolation, RetryableError
from framework.execution.process_channels import Credentials
from framework.execution.spark.auxiliary_jobs import SparkJobs
from framework.execution.spark.certificate import new_certificate
from framework.observe.logs import get_logger

_log = get_logger()


class SparkRounds:
    """The ``RoundExecutor`` on Spark. ``answer_s``: a worker that does not answer for this long is
    ended."""

    def __init__(
        self, plan: CorePlan, settings: Mapping[str, str], *, collapse_tuples_max: int, answer_s: float
    ) -> None:
        self._plan = plan
        self._jobs = SparkJobs(f"ratchet {plan.plan.topology_id}", settings)
        self._collapse_tuples_max = collapse_tuples_max
        self._answer_s = answer_s
        self._settings: WorkerSettings | None = None
        self._addresses: list[Address] = []
        self._placed: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._suspect = False
        self._finding = threading.Lock()
        self._direct = False  # whether the driver reaches every task worker
        self._said_so = False
        self._channels: list[Channels] = []  # open channels that no round uses
        self._tuples = 0

    @property
    def rounds_max(self) -> int:
        """One at a time when rounds are chains: otherwise the tasks of a later round would hold
        slots that the earlier round needs, and both would wait for ever."""
        return 1 if self._chains or self._jobs.slots == 1 else 2

    def start(self) -> None:
        self._jobs.start()
        if self._jobs.local:
            self._settings = WorkerSettings.of(self._plan, self._answer_s, None)
        else:
            certificate = new_certificate()
            self._settings = WorkerSettings.of(self._plan, self._answer_s, self._jobs.driver_host, certificate)
        tasks = [(level, partition) for level, width in enumerate(self._plan.widths) for partition in range(width)]
        workers = min(self._jobs.slots, len(tasks))
        self._placed = {task: number % workers for number, task in enumerate(tasks)}
        self._names = self._plan.names()
        self._addresses = self._jobs.each(list(range(workers)), _Ensure(self._settings, {}))
        self._reach_workers()

    @property
    def _workers(self) -> WorkerSettings:
        """The settings of every task worker. Raises ``InvariantViolation`` before the start."""
        if self._settings is None:
            raise InvariantViolation("a round was begun before Spark was started")
        return self._settings

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        try:
            with self._finding:
                if self._suspect:
                    self._find_workers()
            if self._direct and not self._chains:
                with self._lent_channels() as channels:
                    records = self._client(channels).walk(round_, self._plan.widths)
            elif self._chains:
                records = self._jobs.chain(self._plan.widths, _Carry(self._client(), round_))
            else:
                records = self._jobs.one(_Walk(self._client(), round_, self._plan.widths))
        except RetryableError as error:
            self._suspect = True
            # Spark passes on only the text of an error in a task
            if WorkerLostError.__name__ in str(error):
                raise WorkerLostError(str(error)) from error
            raise
        self._tuples = sum(
            counts.emitted for record in records if isinstance(record, RoundReport) for counts in record.counts.values()
        )
        return records

    def wake(self) -> None:
        if self._settings is not None:
            WorkerClient(self._addresses, self._settings.credentials, {}, self._settings.answer_s).wake(0)

    def close(self) -> None:
        addresses, self._addresses = self._addresses, []
        if addresses and self._settings is not None:
            close = _Close(self._settings.credentials)
            if self._direct:
                with ThreadPoolExecutor(len(addresses)) as pool:
                    list(pool.map(close, addresses))
            else:
                # a task worker that cannot be reached ends by itself
                with contextlib.suppress(RetryableError):
                    self._jobs.each(addresses, close)
        self._close_channels()
        self._jobs.close()

    def _client(self, channels: Channels | None = None) -> WorkerClient:
        settings = self._workers
        return WorkerClient(
            self._addresses, settings.credentials, self._placed, settings.answer_s, names=self._names, channels=channels
        )

    @contextlib.contextmanager
    def _lent_channels(self) -> Iterator[Channels]:
        """Reserve channels for one round. After a lost round they are closed, because an answer may
        still be on its way."""
        with self._finding:
            channels = self._channels.pop() if self._channels else Channels()
        try:
            yield channels
        except BaseException:
            channels.close()
            raise
        with self._finding:
            self._channels.append(channels)

    def _close_channels(self) -> None:
        while self._channels:
            self._channels.pop().close()

    def _reach_workers(self) -> None:
        """Find out whether the driver can carry rounds itself. It cannot when Spark adds and
        removes executors by demand: without jobs, Spark would end them."""
        reason = None
        if self._jobs.executors_follow_jobs:
            reason = "spark.dynamicAllocation.enabled is true"
        else:
            for address in self._addresses:
                reason = reason or unreachable(address, self._workers.credentials)
        self._direct = reason is None
        if reason is not None and not self._said_so:
            self._said_so = True
            _log.warning("rounds.as_jobs", topology=self._plan.plan.topology_id, reason=reason)

    @property
    def _chains(self) -> bool:
        """Whether rounds are large, judged by the last one."""
        return not self._jobs.local and self._tuples > self._collapse_tuples_max

    def _find_workers(self) -> None:
        """Find the task workers that still answer, and start new ones in place of the others."""
        known = {each.number: each for each in self._addresses}
        found = self._jobs.each(sorted(known), _Ensure(self._workers, known))
        for address in found:
            if address != known[address.number]:
                _log.warning("task_worker.restarted", worker=address.number, pid=address.pid)
        self._addresses = found
        self._close_channels()
        self._reach_workers()
        self._suspect = False


@dataclass(frozen=True)
class _Ensure:
    settings: WorkerSettings
    known: Mapping[int, Address]

    def __call__(self, number: int) -> Address:
        return ensure_worker(self.settings, number, self.known.get(number))


@dataclass(frozen=True)
class _Walk:
    courier: WorkerClient
    round_: Round
    widths: Sequence[int]

    def __call__(self) -> list[RoundRecord]:
        return self.courier.walk(self.round_, self.widths)


@dataclass(frozen=True)
class _Carry:
    courier: WorkerClient
    round_: Round

    def __call__(self, level: int, partition: int, records: Sequence[RoundRecord]) -> Sequence[Addressed]:
        return self.courier.run_task(self.round_, level, partition, records)


@dataclass(frozen=True)
class _Close:
    credentials: Credentials

    def __call__(self, address: Address) -> None:
        close_worker(address, self.credentials)
