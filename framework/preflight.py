"""All checks that are possible before a topology starts: ``ratchet check`` shows all results,
``ratchet run`` only the problems.

The checks change nothing, and do not start Spark.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Union

from framework.clients.java import find_java
from framework.config import Config
from framework.coordination import CoordinationStore, store_of
from framework.core.leader_loop import check_stateful, stateful_components
from framework.errors import ConfigError, RatchetError, RetryableError, TopologyError
from framework.execution.executor_name import SPARK, checked_executor
from framework.execution.failures import in_users_words, users_errors
from framework.execution.plan import check_pickles
from framework.submission import check_reach
from framework.topology import (
    DEAD_LETTER_STREAM,
    DEFAULT_STREAM,
    BaseRichSpout,
    Bolt,
    Component,
    CoreTopology,
    DataFrameBolt,
    FencedState,
    ReadCounts,
    Spout,
    Topology,
    ValueType,
)
from framework.topology.extra_partition_spout_wrapper import unwrapped
from framework.transactions.documents import committed_txid, differences_to_state
from framework.transactions.history_archive import history_target
from framework.transactions.source_preview import first_rows
from framework.transactions.spout_planners import ImmutableSource, planner_of

Check = Callable[[], str]
AnyTopology = Union[Topology, CoreTopology]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``error``: None when the check passed; otherwise its message is the
    text.
    """

    subject: str
    text: str
    error: RatchetError | None = None

    @property
    def waits(self) -> bool:
        """Whether a run would wait for the missing part, rather than end."""
        return isinstance(self.error, RetryableError)


def preflight(
    topology: AnyTopology,
    config: Config,
    executor: str = "spark",
    accept_changed_topology: bool = False,
    *,
    sample: int = 0,
) -> Iterator[Finding]:
    """Run the checks one after the other, quick ones first. Yields one finding each. ``executor``,
    ``accept_changed_topology``: as in ``submit``. ``sample``: number of records to read, too."""
    if isinstance(topology, Topology):
        config = config.with_defaults(topology.settings)
    for subject, check in _checks(topology, config, executor, accept_changed_topology):
        yield _finding(subject, check)
    if sample:
        yield _finding("sample", lambda: _sampled(topology, config, sample))


def _finding(subject: str, check: Check) -> Finding:
    try:
        return Finding(subject, check())
    except RatchetError as error:
        advice = getattr(error, "advice", "")
        return Finding(subject, f"{error}; {advice}" if advice else str(error), error)
    except users_errors() as error:  # from the user's component, or from the library of a sink
        text = in_users_words(error)
        return Finding(subject, text, TopologyError(f"{subject}: {text}"))


def has_run(topology: AnyTopology, config: Config) -> bool:
    """Whether a topology of this id has committed a transaction or, for a core topology, has had a
    leader: then its servers and topics existed once."""
    if config.zookeeper_hosts() is None:
        return False
    store = store_of(config, observes=True)
    try:
        if isinstance(topology, Topology):
            return committed_txid(store, topology.id) > 0
        return store.get(f"{topology.id}/epoch") is not None
    finally:
        store.close()


def _checks(topology: AnyTopology, config: Config, executor: str, accept_changed: bool) -> Iterator[tuple[str, Check]]:
    yield "python", platform.python_version
    yield "executor", lambda: checked_executor(executor)
    if executor == SPARK:
        yield "java", find_java
        if isinstance(topology, Topology):
            yield "spark.master", lambda: _reachable(topology, config)
        if _needs_no_spark(topology, config):
            yield "local", lambda: "nothing here needs Spark: --executor local starts sooner, in one process"
    yield "components", lambda: _travelling(topology)
    if isinstance(topology, CoreTopology):
        yield "state", lambda: _stateful(topology, config)
    for component in topology.components:
        instance = component.instance
        if isinstance(instance, (Spout, BaseRichSpout, Bolt)):
            yield _named(component), lambda each=instance: _settled(each, config)  # type: ignore[misc]
    yield "zookeeper", lambda: _coordinated(topology, config, accept_changed)
    if isinstance(topology, Topology):
        yield f"source {topology.spout.id}", lambda: _source(topology, config)
        for component in topology.components:
            for state in component.states:
                yield f"sink {component.id}", lambda each=state: _sink(topology, each, config)  # type: ignore[misc]
        if config.history_table is not None:
            yield "history", lambda: _kept(topology, config)


def _reachable(topology: Topology, config: Config) -> str:
    master = config.spark.get("spark.master", "local[*]")
    check_reach(topology, master)
    return master


def _needs_no_spark(topology: AnyTopology, config: Config) -> bool:
    """Whether no bolt needs Spark SQL, and no other host is used."""
    master = config.spark.get("spark.master", "local[*]")
    here = master.startswith("local") and not master.startswith("local-cluster")
    return here and not any(isinstance(each.instance, DataFrameBolt) for each in topology.components)


def _travelling(topology: AnyTopology) -> str:
    check_pickles(topology)
    return f"{len(topology.components)} components can be sent to tasks"


def _stateful(topology: CoreTopology, config: Config) -> str:
    check_stateful(topology, config)
    names = ", ".join(stateful_components(topology))
    return f"{names}: kept by {config.state_provider}" if names else "none is kept"


def _named(component: Component) -> str:
    return f"{'bolt' if isinstance(component.instance, Bolt) else 'spout'} {component.id}"


def _settled(instance: Spout | BaseRichSpout | Bolt, config: Config) -> str:
    if isinstance(instance, (BaseRichSpout, Bolt)):
        instance.check_servers(config.for_components())
    instance.check_before_start(config.for_components())
    return type(unwrapped(instance)).__name__


def _coordinated(topology: AnyTopology, config: Config, accept_changed: bool) -> str:
    hosts = config.zookeeper_hosts()
    if hosts is None:
        return "transactional.zookeeper.servers is not set: the state ends with the process"
    store = store_of(config, observes=True)
    try:
        changed = differences_to_state(store, topology) if isinstance(topology, Topology) else []
        where = f"{hosts}{config.zookeeper_root}"
        if changed and not accept_changed:
            raise ConfigError(
                f"{where}: the state of topology {topology.id!r} is of another shape, so --accept-changed-topology is needed: "
                f"{'; '.join(changed)}"
            )
        return f"{where}; {_led(store, topology.id)}"
    finally:
        store.close()


def _led(store: CoordinationStore, topology_id: str) -> str:
    return "another driver leads, so this one would stand by" if store.is_led(topology_id) else "nobody leads"


def _source(topology: Topology, config: Config) -> str:
    conf = config.for_components()
    if isinstance(topology.spout.instance, Spout):
        topology.spout.instance.check_written_topics(conf, topology.written_topics())
    planner = planner_of(topology, conf)
    try:
        planner.check()
        with suppress(RetryableError):  # the run waits for it, such as for a leader
            planner.check_first_plan(lambda: _is_known_to_have_run(topology, config))
        partitions = planner.partitions()
        ImmutableSource(planner, topology.skips_replays()).check(partitions)
        return f"{len(partitions)} partitions"
    finally:
        planner.close()


def _is_known_to_have_run(topology: Topology, config: Config) -> bool:
    try:
        return has_run(topology, config)
    except RatchetError:
        return True  # another check reports that ZooKeeper cannot say


def _sampled(topology: AnyTopology, config: Config, sample: int) -> str:
    if not isinstance(topology, Topology):
        return "not read: what the spout of a core topology reads, it takes"
    read = ReadCounts()
    errors: dict[str, str] = {}
    for _, stream, rows in first_rows(topology, config.for_components(), sample, read):
        if stream == DEAD_LETTER_STREAM:
            errors.setdefault(stream, rows.column("error")[0].as_py())
    if not read.records:
        return "the source has no record yet"
    why = "".join(f"; the first: {each}" for each in errors.values())
    absent = [
        f"{name} of stream {stream!r}" if stream != DEFAULT_STREAM else name
        for stream, names in sorted(read.absent.items())
        for name in sorted(names)
    ]
    text = f"{read.records:,} records"
    if read.bad_records:
        text = f"{text}, of which {read.bad_records:,} cannot be decoded{why}"
    if absent:
        raise ConfigError(f"{text}; none has a value for {', '.join(absent)}: are these names those of the records?")
    if read.bad_records * 2 > read.records:
        raise ConfigError(f"{text}: is the codec that of the records?")
    return text


def _kept(topology: Topology, config: Config) -> str:
    target = history_target(config, topology.id)
    if target is None:
        return "the last thousand transactions are recorded, in ZooKeeper"
    try:
        target.check(topology.id)
    finally:
        target.close()
    return f"every transaction is recorded in {target.location}"


def _sink(topology: Topology, state: FencedState, config: Config) -> str:
    try:
        header = state.check(topology.id)
    finally:
        state.close()
    if header is not None and header.done and config.zookeeper_hosts() is None:
        raise ConfigError(
            f"transactional.zookeeper.servers is not set, and {state.location} has state of topology {topology.id!r}: name "
            "the servers that its transactions are recorded on"
        )
    once = "at-least-once" if state.value_type is ValueType.NON_TRANSACTIONAL else "exactly-once"
    return f"{state.location}, {state.value_type.value} values: {once}"
