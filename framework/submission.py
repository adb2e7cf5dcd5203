"""``submit``: joins a topology, a store and an executor into a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass
from typing import Any, Union, overload

import structlog

from framework.config import Config
from framework.coordination.security import ZooKeeperSecurity
from framework.core.run import CoreRun, submit_core
from framework.errors import BadRecordError, ConfigError, DataLossError, RatchetError, RetryableError, TopologyError
from framework.execution import BatchExecutor, FailureKind, LocalExecutor, TaskFailure, plan_execution
from framework.execution.plan import check_pickles
from framework.observe import TransactionEvent, TransactionRecord
from framework.running import RunningThread
from framework.topology import Bolt, CoreTopology, PartitionProgress, Reach, Spout, Topology
from framework.transactions import CoordinationStore, Driver, MemoryStore, ZooKeeperStore
from framework.transactions.context import DriverSettings
from framework.transactions.reset import reset_positions

_log = structlog.get_logger()

Executor = Union[BatchExecutor, str, None]


class TopologyFailed(RatchetError):
    """A run ended because its topology failed; the message is the failure's."""

    def __init__(self, failure: TaskFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    @staticmethod
    def of(failure: TaskFailure) -> TopologyFailed:
        """As the kind of error that it is, for whoever catches by recovery."""
        if failure.kind is FailureKind.DATA_LOSS:
            return TopologyLostData(failure)
        return TopologyMetBadRecord(failure) if failure.error == BadRecordError.__name__ else TopologyFailed(failure)


class TopologyLostData(TopologyFailed, DataLossError):
    """A run ended because its source lost what was not read yet; the message names partition and offsets."""


class TopologyMetBadRecord(TopologyFailed, BadRecordError):
    """A run ended because of records that cannot be decoded; the message names topic, partition and offset."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A snapshot of a run.

    ``phase``: starting, standby (another driver leads), running, stopped, failed. ``lag``: records in the source that
    are not committed yet, None when unknown. ``partitions``: the same per partition. ``read_rows`` and
    ``committed_rows``: source rows that this process has processed (a replayed batch counts again) and committed;
    ``bad_records`` of the committed ones could not be decoded. ``lost_records``: offsets that were gone before they were
    read, and skipped, since the positions began. ``waiting_for``: what the source does not answer. ``repeating``: what failed
    and is tried again, until a transaction is committed.
    """

    topology_id: str
    phase: str
    epoch: int
    committed_txid: int
    in_flight: Mapping[int, str]
    in_flight_rows: int | None
    lag: int | None
    partitions: Mapping[str, PartitionProgress]
    read_rows: int
    committed_rows: int
    bad_records: int
    lost_records: int
    rows_per_second: float
    attempts_failed: int
    last_error: str | None
    waiting_for: str | None
    repeating: str | None

    def rows_done(self) -> int:
        """What the rate of progress is taken of."""
        return self.committed_rows

    def progress_line(self, rate: float) -> str:
        """One line for a person. ``rate``: rows committed per second, lately."""
        in_flight = "unknown" if self.in_flight_rows is None else f"{self.in_flight_rows:,}"
        lag = "unknown" if self.lag is None else f"{self.lag:,}"
        parts = [
            f"{self.phase}",
            f"read {self.read_rows:,}",
            f"in flight {in_flight}",
            f"committed {self.committed_rows:,} (txid {self.committed_txid})",
            f"lag {lag}",
            f"{rate:,.0f} rows/s",
        ]
        if self.lag and rate > 0:
            parts.append(f"{self.lag / rate:,.0f} s left")
        if self.attempts_failed:
            parts.append(f"{self.attempts_failed} attempts failed")
        if self.bad_records:
            parts.append(f"{self.bad_records:,} bad records")
        if self.lost_records:
            parts.append(f"{self.lost_records:,} records lost")
        if self.waiting_for:
            parts.append(f"waiting: {self.waiting_for}")
        if self.repeating:
            parts.append(f"repeated: {self.repeating}")
        return " | ".join(parts)

    def document(self) -> dict[str, Any]:
        """Everything, JSON-able, with the lag of each partition."""
        document = asdict(self)
        for partition, progress in self.partitions.items():
            document["partitions"][partition]["lag"] = progress.lag
        return document


class Run(RunningThread):
    """A topology that runs in threads of this process. Made by ``submit``."""

    def __init__(
        self,
        topology: Topology,
        executor: BatchExecutor,
        store: CoordinationStore,
        owned: bool,
        config: Config,
        accept_changed_topology: bool = False,
        standby: bool = False,
    ) -> None:
        self._topology = topology
        self._executor = executor
        self._store = store
        self._owned = owned
        self._driver = Driver(
            topology,
            executor,
            store,
            DriverSettings(
                config.max_spout_pending,
                int(config.message_timeout_secs * 1000),
                config.max_attempts,
                config.idle_poll_max_ms / 1000,
                config.empty_batch_every_ms / 1000 if config.emit_empty_batches else None,
                accept_changed_topology,
                standby,
                config.for_components(),
            ),
        )
        self._started = time.monotonic()
        self._stop_metrics: Callable[[], None] | None = None
        if config.metrics_port is not None:
            from framework.observe.metrics import RunCollector, serve_metrics  # loaded only by runs that serve them

            self._stop_metrics = serve_metrics(RunCollector(self.status), config.metrics_host, config.metrics_port)
        super().__init__(topology.id)
        self._thread.start()

    def _main(self) -> None:
        try:
            self._driver.run()
        finally:
            self._executor.close()
            if self._owned:
                self._store.close()
            if self._stop_metrics is not None:
                self._stop_metrics()

    def status(self) -> RunStatus:
        """Where the run stands now."""
        status, journal, partitions = self._driver.status(), self._driver.journal, self._driver.partitions()
        elapsed = max(time.monotonic() - self._started, 1e-9)
        return RunStatus(
            self._topology.id,
            status.phase,
            status.epoch,
            status.committed_txid,
            status.in_flight,
            status.in_flight_rows,
            status.lag,
            partitions,
            journal.read_rows,
            journal.committed_rows,
            journal.committed_bad_records,
            sum(each.lost_records for each in partitions.values()),
            journal.committed_rows / elapsed,
            journal.attempts_failed,
            status.last_error,
            status.waiting_for,
            status.repeating,
        )

    def events(self) -> list[TransactionEvent]:
        """The latest steps of transactions, oldest first; bounded."""
        return self._driver.journal.events()

    def transactions(self) -> list[TransactionRecord]:
        """A record for each of the last thousand transactions that this process closed, oldest first, then those in
        flight: plan, attempts, time per phase, rows per edge, outcome. ``framework.transactions.read_history`` reads
        what the store keeps of them, from any process."""
        return self._driver.journal.records()

    def wait_for_commit(self, txid: int, timeout_s: float | None = None) -> None:
        """Wait until ``txid`` is committed. Raises ``TimeoutError``, or what the topology failed with."""
        self._wait(lambda status: status.committed_txid >= txid, timeout_s, f"txid {txid} to be committed")

    def wait_until_caught_up(self, timeout_s: float | None = None) -> None:
        """Wait until everything that the source held at the call is committed. Raises as ``wait_for_commit``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        goal: Any = None
        while goal is None:
            self._wait(lambda status: status.phase == "running", _remaining(deadline), "the run to lead")
            asked = self._driver.call_planner(lambda planner: planner.end())
            if asked is None:
                time.sleep(0.01)
                continue
            try:
                goal = asked.result(_remaining(deadline))
            except (RetryableError, CancelledError):
                time.sleep(0.1)
                continue
            if goal is None:
                raise ConfigError(f"spout {self._topology.spout.id!r} cannot say where its source ends")
        self._wait(lambda status: self._driver.covers(goal), _remaining(deadline), "the run to catch up")

    def _request_stop(self) -> None:
        self._driver.request_stop()

    def _wait(self, condition: Any, timeout_s: float | None, what: str) -> None:
        if self._driver.wait_until(condition, timeout_s):
            return
        self._raise_failure()
        if not self._thread.is_alive() or self._driver.status().phase == "stopped":
            raise TopologyError(f"topology {self._topology.id!r} was stopped while waiting for {what}")
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


@overload
def submit(
    topology: Topology,
    config: Mapping[str, Any] | Config | None = None,
    store: CoordinationStore | None = None,
    executor: Executor = None,
    *,
    accept_changed_topology: bool = False,
    fresh: bool = False,
    standby: bool = False,
) -> Run: ...


@overload
def submit(
    topology: CoreTopology,
    config: Mapping[str, Any] | Config | None = None,
    store: CoordinationStore | None = None,
    executor: str | None = None,
) -> CoreRun: ...


def submit(
    topology: Topology | CoreTopology,
    config: Mapping[str, Any] | Config | None = None,
    store: CoordinationStore | None = None,
    executor: Executor = None,
    *,
    accept_changed_topology: bool = False,
    fresh: bool = False,
    standby: bool = False,
) -> Run | CoreRun:
    """Start a topology and return its run.

    ``config``: dotted keys, see ``framework.config``. ``store``: where transactional state is kept; by default
    ZooKeeper at ``transactional.zookeeper.servers``, and when none is configured a ``MemoryStore`` that ends with the
    process. ``executor``: by default Spark at ``spark.master``; ``"local"`` runs in this process.
    ``accept_changed_topology``: go on from the state of a topology of the same id and another shape; the difference is
    logged. A state that is new to the topology begins empty at the next txid. ``fresh``: forget where the source was read,
    so that it is read from where the spout's ``start`` says; txids go on rising and the states stay as they are, so records
    that are read again count again. ``standby``: make everything ready, leave the lead to another driver, and take over when
    that one is gone; without it a driver leads when nobody else does.

    A core topology, which ``TopologyBuilder`` builds, takes ``config``, ``executor``, and a ``store`` where its driver is elected
    and the record of its checkpoints is kept; it returns a ``CoreRun``.

    Raises ``ConfigError`` or ``TopologyError`` before anything has started.
    """
    checked = Config.of(config or {})
    if isinstance(topology, CoreTopology):
        if accept_changed_topology or fresh or standby or not isinstance(executor, (str, type(None))):
            raise ConfigError(
                f"topology {topology.id!r} is a core topology: it has no transactional state, so submit() takes its "
                "configuration, 'spark' or 'local' as its executor, a store, and nothing else"
            )
        return submit_core(topology, checked, executor, store, store_of)
    if not isinstance(topology, Topology):
        raise TopologyError(f"submit() takes what builder.build() returns, not a {type(topology).__name__}")
    if executor is None or executor == "spark":
        _check_reach(topology, checked.spark.get("spark.master", "local[*]"))
    check_pickles(topology)
    spout = topology.spout.instance
    if isinstance(spout, Spout):
        spout.check(checked.for_components())
    for component in topology.components:
        if isinstance(component.instance, Bolt):
            component.instance.check_before_start(checked.for_components())
    plan = plan_execution(topology)
    runner = _executor(executor, plan, checked)
    owned = store is None
    if store is None:
        store = store_of(checked)
    try:
        if fresh:
            txid = reset_positions(topology, store, checked.zookeeper_election_timeout_secs)
            _log.warning("positions.forgotten", topology=topology.id, next_txid=txid)
        runner.start()
    except BaseException:
        if owned:
            store.close()
        raise
    return Run(topology, runner, store, owned, checked, accept_changed_topology, standby)


def _executor(executor: Executor, plan: Any, config: Config) -> BatchExecutor:
    if executor == "local":
        return LocalExecutor(plan, config.for_components())
    if executor is None or executor == "spark":
        from framework.execution.spark.batches import SparkExecutor  # Spark is loaded only by runs that use it

        return SparkExecutor(
            plan, config.for_components(), config.spark, collapse_records_max=config.collapse_records_max
        )
    if isinstance(executor, str):
        raise ConfigError(f"executor {executor!r} is not known: 'spark', 'local', or a BatchExecutor")
    return executor


def store_of(config: Config) -> CoordinationStore:
    """The store that a configuration names: ZooKeeper, or memory when it names none."""
    hosts = config.zookeeper_hosts()
    if hosts is None:
        _log.warning(
            "store.memory",
            reason="transactional.zookeeper.servers is not set: transactional state ends with this process",
        )
        return MemoryStore()
    return ZooKeeperStore(
        hosts,
        config.zookeeper_root,
        session_timeout_s=config.zookeeper_session_timeout_secs,
        connect_timeout_s=config.zookeeper_connection_timeout_secs,
        security=ZooKeeperSecurity.of(config),
    )


def _check_reach(topology: Topology, master: str) -> None:
    """C23: a state must be reachable from where its commit tasks run."""
    local = master.startswith("local")  # local-cluster too: its executors are processes of this host
    for state in topology.states:
        if state.reach is Reach.PROCESS:
            raise ConfigError(
                f"{state.location} lives in one process, and Spark's tasks run in others: use the executor 'local', or another "
                "backend"
            )
        if state.reach is Reach.HOST and not local:
            raise ConfigError(
                f"{state.location} can be written from one host only, and spark.master is {master!r}: use a backend that all "
                "executors reach, or a local master"
            )


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
