"""State in the memory of the process in which the tasks live. It is lost when that process ends.

Source: ``org.apache.storm.state.InMemoryKeyValueStateProvider``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.errors import CorruptStateError
from framework.state.checkpointed_key_value_state import Changes, LayeredState
from framework.state.provider_settings import SerializerSettings, settings_of
from framework.state.serialization import Serializer
from framework.topology.context import TopologyContext
from framework.topology.stateful import KeyValueState, StateProvider


class InMemoryKeyValueStateProvider(StateProvider):
    """The default provider. When a process of the topology is lost, or the topology is started
    again, all states begin empty. If the spouts can go back, they go back to where the run began.
    """

    durable = False

    def __init__(self) -> None:
        self._stores: dict[str, MemoryBytes] = {}

    def new_state(
        self, namespace: str, conf: Mapping[str, Any], context: TopologyContext | None
    ) -> KeyValueState[Any, Any]:
        settings = settings_of(conf, SerializerSettings)
        store = self._stores.setdefault(namespace, MemoryBytes())
        return LayeredState(store, settings.keys(), settings.values())

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        settings_of(conf, SerializerSettings).values()

    def serializers(self, conf: Mapping[str, Any]) -> tuple[Serializer, Serializer]:
        settings = settings_of(conf, SerializerSettings)
        return settings.keys(), settings.values()

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        return namespace in self._stores and self._stores[namespace].txid() > 0

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        self._stores.pop(namespace, None)

    def close(self) -> None:
        self._stores.clear()


class MemoryBytes:
    """A ``CommittedStore``."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._prepared: dict[int, dict[bytes, bytes | None]] = {}
        self._txid = 0

    location = "a state in memory"

    def txid(self) -> int:
        return self._txid

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def count(self) -> int:
        return len(self._values)

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        for key in list(self._values):
            value = self._values.get(key)
            if value is not None:
                yield key, value

    def part(self, cursor: Any, most: int) -> tuple[list[tuple[bytes, bytes]], Any]:
        keys = cursor if cursor is not None else list(self._values)
        now, later = keys[-most:], keys[:-most]
        return [(key, self._values[key]) for key in now if key in self._values], later or None

    frozen = True

    def snapshot(self) -> tuple[int, Iterator[tuple[bytes, bytes]]]:
        return self._txid, iter(list(self._values.items()))

    def prepare(self, txid: int, changes: Changes) -> None:
        self.discard(txid)
        self._prepared[txid] = dict(changes)

    def commit(self, txid: int) -> None:
        if txid <= self._txid:
            return
        if txid not in self._prepared:
            raise CorruptStateError(f"a state in memory has nothing prepared as checkpoint {txid}")
        self.write(self._prepared[txid], txid)
        self.discard(txid)

    def discard(self, upto: int | None) -> None:
        self._prepared = {txid: each for txid, each in self._prepared.items() if upto is not None and txid > upto}

    def write(self, changes: Changes, txid: int | None) -> None:
        for key, value in changes.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        self._txid = self._txid if txid is None else txid

    def close(self) -> None:
        """Nothing to close: the provider keeps the values."""
