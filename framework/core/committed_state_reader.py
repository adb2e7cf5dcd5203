"""Reads the committed state of a topology from outside, whether or not the topology runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from framework.config import Config
from framework.coordination import CoordinationStore
from framework.core.checkpoint_record import CheckpointRecord, Layout, other_store
from framework.core.leader_loop import read_record, shared_provider, stateful_components
from framework.core.rescaling import Entry, namespace_of, task_of_key
from framework.errors import ConfigError
from framework.state.expiry import ExpiringState
from framework.state.provider_settings import serializers_of, state_of
from framework.state.serialization import Serializer
from framework.topology import CoreTopology, KeyValueState

#: How often the states of all tasks are read until they agree on a checkpoint, and the pause in
#: between.
_TRIES, _PAUSE_S = 100, 0.02


class TopologyState:
    """Reads the last committed checkpoint. It changes nothing and delays no task.

    Raises ``ConfigError`` when there is nothing to read: no stateful bolt, no committed checkpoint,
    or a provider whose states other processes cannot see.
    """

    def __init__(self, topology: CoreTopology, config: Config, store: CoordinationStore) -> None:
        self._topology = topology
        self._components = stateful_components(topology)
        if not self._components:
            raise ConfigError(f"topology {topology.id!r} has no stateful bolt")
        self._conf = config.for_components()
        self._provider = shared_provider(topology, config)
        self._store = store
        self._states: dict[tuple[str, int, int], KeyValueState[Any, Any]] = {}
        self.txid_before = self.txid_after = self.record.txid

    @property
    def record(self) -> CheckpointRecord:
        """The current record of the topology's checkpoints. Raises ``ConfigError`` when no
        checkpoint is committed."""
        found = read_record(self._store, self._topology.id)
        if found is None or not found.txid:
            raise ConfigError(f"topology {self._topology.id!r} has not committed a checkpoint yet")
        return found

    @property
    def serializers(self) -> tuple[Serializer, Serializer]:
        """The serializers of keys and of values."""
        return serializers_of(self._provider, self._conf)

    @property
    def components(self) -> list[str]:
        """The stateful bolts that are part of the checkpoint."""
        layouts = self.record.layouts
        return [each for each in self._components if each in layouts]

    def component(self, name: str | None) -> str:
        """The component with this name; for None, the only one. Raises ``ConfigError``."""
        known = self.components
        if name is None and len(known) == 1:
            return known[0]
        if name not in known:
            raise ConfigError(
                f"topology {self._topology.id!r} has no state of {name!r}: there is {', '.join(known)}"
                if name is not None
                else f"topology {self._topology.id!r} has several states, name one: {', '.join(known)}"
            )
        return name

    def get(self, component_id: str, key: Any, default: Any = None) -> Any:
        """The value of a key; the default when the key is missing."""
        states = self._of(component_id)
        likely = task_of_key(self._components[component_id], key, len(states)) or 0
        for state in (*states[likely:], *states[:likely]):
            if key in state:
                return state.get(key)
        return default

    def items(self, component_id: str) -> Iterator[tuple[Any, Any]]:
        """All keys with their values; see ``entries``."""
        return ((each.key, each.value) for each in self.entries(component_id))

    def entries(self, component_id: str) -> Iterator[Entry]:
        """The entries of all tasks. After the last entry, ``txid_before`` and ``txid_after`` name
        the checkpoint that was read. They differ when the store can only be read while it changes,
        or holds a part of the next checkpoint."""
        for tries_left in range(_TRIES, -1, -1):
            states = self._of(component_id)
            opened = [_entries(state) for state in states]
            txids = {txid for txid, _ in opened}
            if len(txids) == 1 or not tries_left:
                break
            time.sleep(_PAUSE_S)
        self.txid_before, self.txid_after = min(txids), max(txids)
        for task, (state, (txid, entries)) in enumerate(zip(states, opened, strict=True)):
            for key, value, put_at in entries:
                yield Entry(key, value, put_at, task)
            if not state.frozen:
                self.txid_after = max(self.txid_after, state.txid or txid, self._begun())

    def close(self) -> None:
        for each in self._states.values():
            each.close()
        self._provider.close()

    def __enter__(self) -> TopologyState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begun(self) -> int:
        """The last checkpoint of which a store may hold a part."""
        record = self.record
        return record.pending if record.prepared and record.pending is not None else record.txid

    def _of(self, component_id: str) -> list[KeyValueState[Any, Any]]:
        """The states of all tasks. Raises ``CorruptStateError`` for a state that is behind the
        record."""
        record = self.record
        layout = record.layouts[component_id]
        found = []
        for task in range(layout.tasks):
            place = component_id, layout.number, task
            if place not in self._states:
                name = namespace_of(self._topology.id, component_id, layout.number, task)
                state = self._opened(component_id, name, layout)
                txid = 0 if state is None else state.txid
                if state is None or (txid is not None and txid < record.txid):
                    if self.record.layouts.get(component_id) != layout:
                        return self._of(component_id)  # its keys have been moved meanwhile
                    raise other_store(component_id, task, txid or 0, record.txid)
                self._states[place] = state
            found.append(self._states[place])
        return found

    def _opened(self, component_id: str, name: str, layout: Layout) -> KeyValueState[Any, Any] | None:
        """The state of a namespace; None when nothing was ever committed there."""
        if not self._provider.exists(name, self._conf):
            return None
        ttl_s = layout.ttl_of(self._components[component_id].instance)
        state = state_of(self._provider, name, ttl_s, self._conf, None)
        if not isinstance(state, KeyValueState):
            raise ConfigError(f"the state of {component_id!r} is a {type(state).__name__}, and no KeyValueState")
        return state


def _entries(state: KeyValueState[Any, Any]) -> tuple[int, Iterator[tuple[Any, Any, float | None]]]:
    if isinstance(state, ExpiringState):
        return state.committed_entries()
    txid, items = state.committed_items()
    return txid, ((key, value, None) for key, value in items)
