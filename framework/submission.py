"""``submit``: joins a topology, a store and an executor into a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Union, overload

from framework.config import Config
from framework.coordination import CoordinationStore, store_of
from framework.core.run import CoreRun, submit_core
from framework.errors import ConfigError, RetryableError, TopologyError
from framework.execution import BatchExecutor, ExecutionPlan, LocalExecutor, plan_execution
from framework.execution.executor_name import LOCAL, SPARK, checked_executor
from framework.execution.plan import check_pickles
from framework.observe.logs import get_logger
from framework.topology import Bolt, CoreTopology, Reach, Spout, Topology
from framework.transactions.history_archive import history_target
from framework.transactions.reset import reset_positions
from framework.transactions.run import Run
from framework.ui.serve_run import page_of_core_run, page_of_run

if TYPE_CHECKING:
    from framework.observe.tracing import TransactionTraces

_log = get_logger()

Executor = Union[BatchExecutor, str, None]


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

    * ``config``: dotted keys, see ``framework.config``.
    * ``store``: where transactional state is kept. The default is ZooKeeper at
      ``transactional.zookeeper.servers``, or, when none is configured, a ``MemoryStore`` that ends
      with the process.
    * ``executor``: by default Spark at ``spark.master``; ``"local"`` runs in this process.

    * ``accept_changed_topology``: continue from the state of a topology with the same id and a
      different shape. The difference is logged. A state that is new to the topology starts empty at
      the next txid.
    * ``fresh``: forget the positions in the source and read from where the spout's ``start`` says.
      The txids continue to rise and the states keep their rows, so records that are read again
      count again.
    * ``standby``: prepare everything, let another driver lead first, and take over when it is gone.
      Without it, a driver leads as soon as there is no other leader.

    A core topology, built by ``TopologyBuilder``, takes only ``config``, ``executor`` (a name) and
    ``store``, where its driver is elected and the record of its checkpoints is kept. For it
    ``submit`` returns a ``CoreRun``.

    Raises ``ConfigError`` or ``TopologyError`` before the topology runs, and ``RetryableError``
    when ZooKeeper does not answer.
    """
    checked = Config.of(config or {})
    if isinstance(topology, CoreTopology):
        if accept_changed_topology or fresh or standby or not isinstance(executor, (str, type(None))):
            raise ConfigError(
                f"topology {topology.id!r} is a core topology: it has no transactional state, so submit() takes its "
                "configuration, 'spark' or 'local' as its executor, a store, and nothing else"
            )
        return submit_core(topology, checked, executor, store, page_of_core_run(topology, checked))
    if not isinstance(topology, Topology):
        raise TopologyError(f"submit() takes what builder.build() returns, not a {type(topology).__name__}")
    checked = checked.with_defaults(topology.settings)
    checked.check_transactional()
    if isinstance(executor, (str, type(None))):
        executor = checked_executor(executor)
    if executor == SPARK:
        check_reach(topology, checked.spark.get("spark.master", "local[*]"))
    check_pickles(topology)
    conf = checked.for_components()
    if isinstance(topology.spout.instance, Spout):
        topology.spout.instance.check_written_topics(conf, topology.written_topics())
    for component in topology.components:
        if isinstance(component.instance, (Spout, Bolt)):
            component.instance.check_before_start(conf)
    plan = plan_execution(topology)
    runner = _batch_executor(executor, plan, conf, checked) if isinstance(executor, str) else executor
    history = history_target(checked, topology.id)
    if history is not None:
        with suppress(RetryableError):  # a target that does not answer gets its data later
            history.check(topology.id)
    traces = _traces_of(topology, checked)
    owned = store is None
    try:
        if store is None:
            store = store_of(checked)
        if fresh:
            txid = reset_positions(topology, store, checked.zookeeper_election_timeout_secs)
            _log.warning("positions.forgotten", topology=topology.id, next_txid=txid)
        runner.start()
    except BaseException:
        if owned and store is not None:
            store.close()
        for each in (traces, history):
            if each is not None:
                each.close()
        raise
    return Run(
        topology,
        runner,
        store,
        owned=owned,
        config=checked,
        accept_changed_topology=accept_changed_topology,
        standby=standby,
        traces=traces,
        history=history,
        page=page_of_run(topology, checked),
    )


def _batch_executor(name: str, plan: ExecutionPlan, conf: Mapping[str, Any], config: Config) -> BatchExecutor:
    if name == LOCAL:
        return LocalExecutor(plan, conf)
    # imported here because only runs on Spark need it
    from framework.execution.spark.batch_executor import SparkExecutor

    return SparkExecutor(
        plan,
        conf,
        config.spark,
        collapse_records_max=config.collapse_records_max,
        resident=config.collapse_resident,
    )


def _traces_of(topology: Topology, config: Config) -> TransactionTraces | None:
    """Raises ``ConfigError`` when traces are configured and cannot be made."""
    if config.tracing_endpoint is None:
        return None
    from framework.observe.tracing import TransactionTraces  # imports OpenTelemetry

    return TransactionTraces(config.tracing_endpoint, topology.id, config.tracing_ratio)


def check_reach(topology: Topology, master: str) -> None:
    """Raise ``ConfigError`` for a state that its commit tasks could not reach (C23)."""
    # includes local-cluster, whose executors are processes of this host
    local = master.startswith("local")
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
