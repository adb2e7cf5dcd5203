"""State management: the stores for the state of stateful bolts, and their part of the checkpoint
protocol.

Source: *Storm State Management*.
"""

from typing import Any

from framework.operators.count_windows import CountWindow
from framework.operators.watermarks import LATE_STREAM
from framework.state.memory import InMemoryKeyValueStateProvider
from framework.state.serialization import MsgpackSerializer, PickleSerializer, Serializer
from framework.state.time_window_settings import TimeWindow
from framework.state.window_entries import Window
from framework.state.windowed_bolt import BaseWindowedBolt
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
    """Import providers that need an extra only on first use."""
    if name == "RedisKeyValueStateProvider":
        from framework.state.redis import RedisKeyValueStateProvider

        return RedisKeyValueStateProvider
    if name == "LmdbKeyValueStateProvider":
        from framework.state.lmdb import LmdbKeyValueStateProvider

        return LmdbKeyValueStateProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
