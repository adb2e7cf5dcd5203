"""The leader loop of a core topology: one driver at a time runs it. If the topology has state, that
driver writes its checkpoints, and the next leader continues from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from framework.config import Config
from framework.coordination.configured import store_of
from framework.coordination.election import Candidate, leadership_of
from framework.coordination.step_generators import Steps, perform
from framework.coordination.store import CoordinationStore, Leadership, MemoryStore
from framework.coordination.transactional_state import TransactionalState
from framework.core.checkpoint_record import CheckpointRecord, Positions
from framework.core.checkpoints import Checkpoints
from framework.core.driver import RoundDriver
from framework.core.rescaling import Entry, Filling, Namespaces, layout_of, rescaled
from framework.errors import ConfigError
from framework.observe.logs import get_logger
from framework.state.provider_settings import provider_of
from framework.topology import BaseStatefulBolt, Component, CoreTopology, ReplayableSpout, StateProvider

_log = get_logger()

CHECKPOINT = "checkpoint"


def stateful_components(topology: CoreTopology) -> dict[str, Component]:
    return {each.id: each for each in topology.components if isinstance(each.instance, BaseStatefulBolt)}


def retries_of(topology: CoreTopology) -> dict[str, int]:
    """Spout -> how often it retries a record before it gives the record up. Without spouts that
    never give up."""
    spouts = {each.id: each.instance for each in topology.spouts}
    retries = {name: each.retries_max for name, each in spouts.items() if isinstance(each, ReplayableSpout)}
    return {name: each for name, each in retries.items() if each is not None}


def check_stateful(topology: CoreTopology, config: Config) -> None:
    """Check the settings of stateful bolts before the start. Raises ``ConfigError``."""
    stateful = stateful_components(topology)
    if not stateful:
        return
    for name, component in stateful.items():
        bolt = component.instance
        ttl_s = bolt.state_ttl_s if isinstance(bolt, BaseStatefulBolt) else None
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(
                f"bolt {name!r}: state_ttl_s is {ttl_s!r}: give seconds above 0, or None for values that do not expire"
            )
    interval_s = config.checkpoint_interval_ms / 1000
    if interval_s >= config.message_timeout_secs:
        raise ConfigError(
            f"topology.state.checkpoint.interval.ms is {config.checkpoint_interval_ms}: it must be less than "
            f"topology.message.timeout.secs ({config.message_timeout_secs:g} s), or tuples time out before a checkpoint covers them"
        )
    if config.acker_executors == 0:
        raise ConfigError(
            f"topology {topology.id!r} has state, and topology.acker.executors is 0: without ackers nobody knows what a checkpoint "
            "covers; set 1 or more"
        )
    conf = config.for_components()
    provider_of(conf).check_before_start(conf)


def store_for(topology: CoreTopology, config: Config, store: CoordinationStore | None) -> CoordinationStore | None:
    """The store in which drivers are elected and the checkpoint record is kept: ``store``, or else
    ZooKeeper. With neither: None for a topology without state, and a store in memory for states in
    memory. Raises ``ConfigError`` for states that survive, because their record must survive too.
    """
    if store is not None:
        return store
    if config.zookeeper_hosts() is not None:
        return store_of(config)
    stateful = bool(stateful_components(topology))
    if stateful and provider_of(config.for_components()).durable:
        raise ConfigError(
            f"topology {topology.id!r} keeps its state in {config.state_provider}, and transactional.zookeeper.servers is not "
            "set: the record of its checkpoints must survive as its state does"
        )
    _log.warning(
        "driver.unguarded",
        topology=topology.id,
        reason="transactional.zookeeper.servers is not set: nothing keeps a second driver from running beside this one",
    )
    return MemoryStore() if stateful else None


def read_record(store: CoordinationStore, topology_id: str) -> CheckpointRecord | None:
    """The record of a topology's checkpoints; None when there is none."""
    found = TransactionalState(store, topology_id).get_data(CHECKPOINT)
    return None if found is None else CheckpointRecord.of(found, f"{topology_id}/{CHECKPOINT}")


def shared_provider(topology: CoreTopology, config: Config) -> StateProvider:
    """The state provider of a topology, for access from other processes. Raises ``ConfigError``
    when its states cannot be reached from outside."""
    provider = provider_of(config.for_components())
    if not provider.durable:
        raise ConfigError(
            f"the states of topology {topology.id!r} are kept by {config.state_provider}, in the memory of its own processes: "
            "nobody else can reach them; give the --config of the run"
        )
    return provider


def restore_state(
    topology: CoreTopology,
    config: Config,
    store: CoordinationStore,
    *,
    document: Any,
    entries: Callable[[], Iterable[tuple[str, Entry]]],
    where: str,
) -> tuple[int, int]:
    """Replace a topology's state by a snapshot.

    * ``document``: the record of the snapshot's checkpoint.
    * ``entries``: component ids and entries of its states.
    * ``where``: names the snapshot in errors.

    Returns the checkpoint from which the topology continues, and the number of its keys. Raises
    ``ConfigError`` while a driver leads, for states in memory, and for state of a bolt that the
    topology does not have. Raises ``CorruptStateError`` when the document cannot be read, and
    ``TopologyError`` for keys that belong to no task."""
    snapshot = CheckpointRecord.of(document, where)
    conf, components = config.for_components(), stateful_components(topology)
    missing = sorted(set(snapshot.layouts) - set(components))
    if missing:
        raise ConfigError(
            f"{where} has state of {', '.join(missing)}, and topology {topology.id!r} has no such stateful bolt"
        )
    provider = shared_provider(topology, config)
    namespaces = Namespaces(topology.id, provider, conf)
    fillings: dict[str, Filling] = {}
    try:
        with leadership_of(topology.id, store, config.zookeeper_election_timeout_secs) as leadership:
            log = _RecordLog(store, leadership, topology.id)
            current = read_record(store, topology.id) or CheckpointRecord()
            txid = max(current.highest, snapshot.highest) + 1
            log.save(replace(current, last=txid))
            layouts = {name: layout_of(components[name], txid) for name in snapshot.layouts}
            for name, layout in layouts.items():
                fillings[name] = Filling(namespaces, components[name], layout)
            count = 0
            for name, entry in entries():
                fillings[name].put(entry, snapshot.layouts[name].tasks)
                count += 1
            for each in fillings.values():
                each.finish(txid)
            positions = snapshot.positions
            forgotten = _without_positions(topology, current, positions) if positions is not None else []
            log.save(
                CheckpointRecord(
                    txid=txid, positions=positions, layouts=layouts, assigned=layouts, last=txid, forgotten=forgotten
                )
            )
            _drop(namespaces, current)
    finally:
        for each in fillings.values():
            each.close()
        provider.close()
    return txid, count


def forget_state(topology: CoreTopology, config: Config, store: CoordinationStore) -> int:
    """Remove all states of a topology and the positions of its spouts, so that it starts from the
    beginning. Returns the forgotten checkpoint, 0 for none. Raises ``ConfigError`` while a driver
    leads, and for states in memory."""
    conf = config.for_components()
    provider = shared_provider(topology, config)
    try:
        with leadership_of(topology.id, store, config.zookeeper_election_timeout_secs) as leadership:
            current = read_record(store, topology.id) or CheckpointRecord()
            # Ids and namespaces are never reused, so late writes of a former driver cannot touch
            # new state.
            forgot = CheckpointRecord(last=current.highest, forgotten=_without_positions(topology, current, {}))
            _RecordLog(store, leadership, topology.id).save(forgot)
            _drop(Namespaces(topology.id, provider, conf), current)
    finally:
        provider.close()
    return current.txid


def _without_positions(topology: CoreTopology, record: CheckpointRecord, positions: Positions) -> list[str]:
    """Spouts without a known position. Positions that they keep elsewhere belong to removed
    states."""
    spouts = {*(each.id for each in topology.spouts), *(record.positions or ()), *record.forgotten}
    return sorted(spouts - positions.keys())


def _drop(namespaces: Namespaces, record: CheckpointRecord) -> None:
    """Remove the namespaces that a record names."""
    for component_id, layout in {**record.assigned, **record.layouts}.items():
        namespaces.drop(component_id, layout)


class _RecordLog:
    """Writes the record of a topology under a leadership."""

    def __init__(self, store: CoordinationStore, leadership: Leadership, topology_id: str) -> None:
        self._state = TransactionalState(store, topology_id, leadership.apply)

    def save(self, record: CheckpointRecord) -> None:
        self._state.set_data(CHECKPOINT, record.document())


class CoreTerms:
    """Runs a driver whenever it leads. ``run`` blocks until the topology is stopped or has failed.
    ``begin_anew``: ends all tasks, so that the next round starts new ones."""

    def __init__(
        self,
        topology: CoreTopology,
        config: Config,
        store: CoordinationStore,
        driver: RoundDriver,
        begin_anew: Callable[[], None],
    ) -> None:
        self._topology = topology
        self._stateful = bool(stateful_components(topology))
        self._durable = self._stateful and provider_of(config.for_components()).durable
        self._begin_anew = begin_anew
        self._config = config
        self._store = store
        self._driver = driver
        self._stop = threading.Event()

    def request_stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        candidate = Candidate(self._store, self._topology.id, self._stop, lead=self._leading, stand_by=self._stand_by)
        perform(candidate.running())
        self._driver.stop_standing_by()

    def _stand_by(self, error: Exception | None) -> None:
        self._driver.stand_by(None if error is None else str(error))

    def _leading(self, leadership: Leadership) -> Steps[bool]:
        yield partial(self._lead, leadership)
        return self._driver.over

    def _lead(self, leadership: Leadership) -> None:
        checkpoints = partial(self._checkpoints, leadership) if self._stateful else None
        self._driver.run(leadership.confirm, checkpoints)
        if not (self._driver.over or (self._durable and self._exact)):
            # otherwise a recovery makes new tasks, from the last committed checkpoint
            self._begin_anew()

    def _checkpoints(self, leadership: Leadership) -> Checkpoints:
        conf = self._config.for_components()
        components = stateful_components(self._topology)
        provider = provider_of(conf)
        log = _RecordLog(self._store, leadership, self._topology.id)
        # For states in memory no record is written or read: a stored record belongs to states that
        # survive.
        save = log.save if provider.durable else lambda _: leadership.confirm()
        record = read_record(self._store, self._topology.id) if provider.durable else None
        leadership.confirm()
        try:
            namespaces = Namespaces(self._topology.id, provider, conf)
            found = rescaled(namespaces, components, record or CheckpointRecord(), save)
        finally:
            provider.close()
        spouts = {each.id: each for each in self._topology.spouts}
        stuck = [name for name, each in spouts.items() if not isinstance(each.instance, ReplayableSpout)]
        exact = self._exact = self._config.state_exactly_once and not stuck
        _log.info("state.guarantee", topology=self._topology.id, **_guarantee(exact, stuck))
        return Checkpoints(
            found,
            {name: each.parallelism for name, each in components.items()},
            {name: each.parallelism for name, each in spouts.items()},
            exact=exact,
            durable=provider.durable,
            interval_s=self._config.checkpoint_interval_ms / 1000,
            attempts_max=self._config.max_attempts,
            save=save,
            layouts={name: layout_of(each, 0) for name, each in components.items()},
            retries=retries_of(self._topology),
        )


def _guarantee(exact: bool, stuck: list[str]) -> Mapping[str, Any]:
    if exact:
        return {"guarantee": "exactly-once"}
    reason = f"spouts that cannot go back: {', '.join(stuck)}" if stuck else "topology.state.exactly.once is false"
    return {"guarantee": "at-least-once", "reason": reason}
