"""State management: where the state of stateful bolts is kept, and the protocol of its checkpoints.

Source: *Storm State Management*.
"""

from typing import Any

from framework.operators.count_windows import CountWindow
from framework.operators.watermarks import LATE_STREAM
from framework.state.memory import InMemoryKeyValueStateProvider
from framework.state.serialization import MsgpackSerializer, PickleSerializer, Serializer
from framework.state.time_windows import TimeWindow
from framework.state.windows import BaseWindowedBolt, Window
from framework.topology.stateful import KeyValueState, State, StateProvider

__all__ = [
    "LATE_STREAM",
    "BaseWindowedBolt",
    "CountWindow",
    "InMemoryKeyValueStateProvider",
    "KeyValueState",
    "LmdbKeyValueStateProvider",
    "MsgpackSerializer",
    "PickleSerializer",
    "RedisKeyValueStateProvider",
    "Serializer",
    "State",
    "StateProvider",
    "TimeWindow",
    "Window",
]


def __getattr__(name: str) -> Any:
    """Load providers that need an extra only when they are asked for."""
    if name == "RedisKeyValueStateProvider":
        from framework.state.redis import RedisKeyValueStateProvider

        return RedisKeyValueStateProvider
    if name == "LmdbKeyValueStateProvider":
        from framework.state.lmdb import LmdbKeyValueStateProvider

        return LmdbKeyValueStateProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
