"""``submit`` for core topologies: combines a topology and an executor into a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from framework.config import Config
from framework.coordination import CoordinationStore
from framework.coordination.presence import Presence
from framework.core.driver import RoundDriver
from framework.core.event_times import paths_of
from framework.core.leader_loop import CoreTerms, check_stateful, stateful_components, store_for
from framework.core.local import LocalRounds
from framework.core.plan import CorePlan
from framework.core.round_protocol import ComponentError, ErrorKind, RoundExecutor
from framework.core.status import CoreStatus
from framework.errors import BadRecordError, ConfigError, DataLossError, RatchetError, TopologyError
from framework.execution.executor_name import LOCAL, checked_executor
from framework.execution.failures import FailureKind
from framework.execution.plan import check_pickles, plan_execution
from framework.observe.run_thread import RunningThread
from framework.topology import BaseRichSpout, Bolt, CoreTopology

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


#: Serves the status page of a run, and returns a function that stops it.
CorePage = Callable[[RoundDriver, CoordinationStore | None, Callable[[], CoreStatus]], Callable[[], None]]


class CoreTopologyFailed(RatchetError):
    """A core topology ended because one of its components could not work. The message names the
    component and the task, and ends with the stack trace."""

    @staticmethod
    def of(failure: ComponentError) -> CoreTopologyFailed:
        """The error class that matches the failure, for callers that catch errors by recovery."""
        kind = _ERRORS.get(failure.failure, CoreTopologyFailed)
        return kind(f"{failure}\n{failure.trace}".rstrip())


class CoreTopologyLostData(CoreTopologyFailed, DataLossError):
    """A core topology ended because its source lost unread records."""


class CoreTopologyMetBadRecord(CoreTopologyFailed, BadRecordError):
    """A core topology ended because of a record that cannot be decoded."""

    def __init__(self, message: str, about: str = "") -> None:
        super().__init__("", about)
        # includes the stack trace, so it has several lines and no length limit
        self.args = (message,)


class CoreTopologyMisconfigured(CoreTopologyFailed, ConfigError):
    """A core topology ended because a setting is wrong, as its source has shown."""


_ERRORS: dict[FailureKind, type[CoreTopologyFailed]] = {
    FailureKind.DATA_LOSS: CoreTopologyLostData,
    FailureKind.BAD_RECORD: CoreTopologyMetBadRecord,
    FailureKind.MISCONFIGURED: CoreTopologyMisconfigured,
}


class CoreRun(RunningThread):
    """A core topology that runs in a thread of this process. Made by ``submit``. When it is
    stopped, the spouts emit nothing more, tuples under way get some time to finish, and every
    component is closed."""

    def __init__(
        self,
        topology: CoreTopology,
        plan: CorePlan,
        executor: RoundExecutor,
        config: Config,
        *,
        store: CoordinationStore | None = None,
        owned: bool = False,
        page: CorePage | None = None,
    ) -> None:
        self._topology = topology
        self._executor = executor
        self._driver = RoundDriver(
            plan, executor, timeout_s=config.message_timeout_secs, attempts_max=config.max_attempts
        )
        self._terms = None
        if store is not None:
            self._terms = CoreTerms(topology, config, store, self._driver, self._begin_anew)
        super().__init__(topology.id)
        owns: list[Callable[[], None]] = [executor.close]
        if store is not None:
            address = config.ui_address
            owns.append(
                Presence(
                    store,
                    topology.id,
                    "core",
                    lambda: {**self.status().summary(), "page": address, "graph": topology.shape()},
                ).close
            )
            if owned:
                owns.append(store.close)
        self._begin(config, *owns, page=None if page is None else partial(page, self._driver, store, self.status))

    def _work(self) -> None:
        (self._terms or self._driver).run()

    def _collector(self) -> Collector:
        from framework.observe.metrics import CoreRunCollector

        return CoreRunCollector(self._topology.id, self.status, self._driver.figures)

    def _begin_anew(self) -> None:
        """End all tasks, and start new ones. Needed when this driver no longer leads, because the
        state of its tasks is out of date."""
        self._executor.close()
        self._executor.start()

    def status(self) -> CoreStatus:
        """The current status of the run."""
        return self._driver.status()

    def _rate(self) -> float:
        return self._driver.tuples_per_second()

    def component_errors(self) -> list[ComponentError]:
        """The latest errors that components have raised, oldest first. Without errors that they
        have reported, and without failures caused by a lost process."""
        told = (ErrorKind.REPORTED, ErrorKind.AWAY)
        return [error for _, error in list(self._driver.recent_errors) if error.kind not in told]

    def wait_until_idle(self, timeout_s: float | None = None) -> None:
        """Wait until the spouts emit nothing and every emitted tuple has been acked or failed.
        Raises ``TimeoutError``, the error with which the topology failed, or ``TopologyError`` when
        it was stopped meanwhile."""
        if self._driver.wait_until_idle(timeout_s):
            return
        self._raise_failure()
        status = self.status()
        if status.phase == "stopped":
            raise TopologyError(f"topology {self._topology.id!r} was stopped while waiting for it to be idle")
        raise TimeoutError(
            f"waited {timeout_s:g} s for topology {self._topology.id!r} to be idle: {status.pending} tuples pending, held by "
            f"bolts {status.held}, last error {status.last_error}"
        )

    def _request_stop(self) -> None:
        if self._terms is not None:
            self._terms.request_stop()
        self._driver.request_stop()

    def _raise_failure(self) -> None:
        if self._driver.error is not None:
            raise self._driver.error
        if self._driver.failure is not None:
            raise CoreTopologyFailed.of(self._driver.failure)


def submit_core(
    topology: CoreTopology,
    config: Config,
    executor: str | None,
    store: CoordinationStore | None,
    page: CorePage | None = None,
) -> CoreRun:
    """Start a core topology. ``store``: elects its driver and, if the topology has state, keeps the
    record of its checkpoints; by default the store that the configuration names. Raises
    ``ConfigError`` or ``TopologyError`` before anything has started."""
    check_pickles(topology)
    check_stateful(topology, config)
    conf = config.for_components()
    for component in topology.components:
        if isinstance(component.instance, (BaseRichSpout, Bolt)):
            component.instance.check_before_start(conf)
    stateful = frozenset(stateful_components(topology))
    planned = plan_execution(topology)
    plan = CorePlan(
        planned,
        conf,
        ackers=config.acker_executors,
        pending_max=config.max_tuples_pending,
        stateful=stateful,
        ticks=ticks_of(topology, config.tick_tuple_freq_secs),
        paths=paths_of(topology, planned),
    )
    runner = _round_executor(checked_executor(executor), plan, config)
    owned = store is None
    store = store_for(topology, config, store)
    try:
        runner.start()
    except BaseException:
        if owned and store is not None:
            store.close()
        raise
    return CoreRun(topology, plan, runner, config, store=store, owned=owned, page=page)


def ticks_of(topology: CoreTopology, every_s: float | None = None) -> dict[str, float]:
    """Bolt -> seconds between its ticks, by the bolt's own setting, or else ``every_s``. Without
    bolts that get no ticks. Raises ``ConfigError`` for an interval that is not above 0."""
    found = {}
    for component in topology.components:
        if isinstance(component.instance, Bolt):
            tick_s = component.instance.tick_s if component.instance.tick_s is not None else every_s
            if tick_s is None:
                continue
            if tick_s <= 0:
                raise ConfigError(
                    f"bolt {component.id!r}: tick_s is {tick_s!r}: give seconds above 0, or None for no ticks"
                )
            found[component.id] = tick_s
    return found


def _round_executor(name: str, plan: CorePlan, config: Config) -> RoundExecutor:
    if name == LOCAL:
        return LocalRounds(plan)
    from framework.core.spark import SparkRounds  # imported here because only runs on Spark need it

    return SparkRounds(
        plan,
        config.spark,
        collapse_tuples_max=config.collapse_records_max,
        answer_s=4 * config.message_timeout_secs,
    )
