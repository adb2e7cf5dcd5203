"""Serialization of the keys and values of states.

The default is MessagePack, with extensions for types that MessagePack lacks: tuples, sets, integers
of any size, decimals, dates, times and durations. Equal keys become equal bytes. Reading never
executes stored data.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import importlib
import pickle
import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgpack

from framework.errors import BadRecordError, ConfigError, CorruptStateError


class Serializer(Protocol):
    """Converts keys or values to bytes and back. The configuration names the class as
    ``module.Class``; it is constructed without arguments."""

    def dumps(self, value: Any) -> bytes:
        """Encode a value. Raises ``BadRecordError`` for a value that it does not support."""

    def loads(self, data: bytes) -> Any:
        """Decode a value. Raises ``CorruptStateError`` for bytes that it has not made."""


#: The deepest nesting of tuples and sets: each level takes 40 kB of the stack, and a process whose
#: stack is exhausted ends without a message.
NESTING_MAX = 64
_TIME_OF = struct.Struct(">d")
_TUPLE, _SET, _INT, _DECIMAL, _DATETIME, _DATE, _TIME, _DURATION, _FROZENSET = range(1, 10)
_TEXTS: dict[type, tuple[int, Callable[[Any], str]]] = {
    int: (_INT, str),
    decimal.Decimal: (_DECIMAL, str),
    datetime.datetime: (_DATETIME, datetime.datetime.isoformat),
    datetime.date: (_DATE, datetime.date.isoformat),
    datetime.time: (_TIME, datetime.time.isoformat),
}
_FROM_TEXT: dict[int, Callable[[str], Any]] = {
    _INT: int,
    _DECIMAL: decimal.Decimal,
    _DATETIME: datetime.datetime.fromisoformat,
    _DATE: datetime.date.fromisoformat,
    _TIME: datetime.time.fromisoformat,
}


class MsgpackSerializer:
    """The default.

    >>> MsgpackSerializer().loads(MsgpackSerializer().dumps(("word", 3, {"a", "b"}))) == ("word", 3, {"a", "b"})
    True
    """  # noqa: W505 - doctest lines are not wrapped

    def dumps(self, value: Any) -> bytes:
        try:
            return _packed(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadRecordError(
                f"a state cannot hold {_shown(value)}: {error}; give a serializer of your own in topology.state.provider.config"
            ) from None

    def loads(self, data: bytes) -> Any:
        try:
            return _unpacked(data)
        except Exception as error:  # noqa: BLE001 - any error is reported with the data that caused it
            raise CorruptStateError(f"a state holds {data[:40]!r}, which is not MessagePack: {error}") from None


class PickleSerializer:
    """Supports every value that ``pickle`` supports. Reading executes stored data, so use it only
    for a store that no other program writes to. Do not use it for keys: equal keys need not become
    equal bytes."""

    def dumps(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception as error:  # noqa: BLE001 - any error is reported with the value that caused it
            raise BadRecordError(f"a state cannot hold {_shown(value)}: {error}") from None

    def loads(self, data: bytes) -> Any:
        try:
            return pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - any error is reported with the data that caused it
            raise CorruptStateError(f"a state holds {data[:40]!r}, which cannot be unpickled: {error}") from None


class ClassSerializer:
    """Stores objects of one dataclass or ``NamedTuple`` by their fields."""

    def __init__(self, kind: type) -> None:
        names = getattr(kind, "_fields", None) or (
            [each.name for each in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
        )
        if names is None:
            raise ConfigError(
                f"{kind.__module__}.{kind.__qualname__} is neither a dataclass nor a NamedTuple: states need one of them, or a "
                "serializer"
            )
        self._kind, self._names, self._plain = kind, list(names), MsgpackSerializer()

    def dumps(self, value: Any) -> bytes:
        if type(value) is not self._kind:
            raise BadRecordError(f"a state of {self._kind.__qualname__} cannot hold {_shown(value)}")
        return self._plain.dumps([getattr(value, name) for name in self._names])

    def loads(self, data: bytes) -> Any:
        fields = self._plain.loads(data)
        if not isinstance(fields, list) or len(fields) != len(self._names):
            raise CorruptStateError(f"a state holds {_shown(fields)}, which is no {self._kind.__qualname__}")
        return self._kind(**dict(zip(self._names, fields, strict=True)))


class TimedSerializer:
    """Stores each value with the time when it was put, for a value serializer that supports only
    one class."""

    def __init__(self, values: Serializer) -> None:
        self._values = values

    def dumps(self, value: Any) -> bytes:
        put_at, inner = value
        return _TIME_OF.pack(put_at) + self._values.dumps(inner)

    def loads(self, data: bytes) -> Any:
        if len(data) < _TIME_OF.size:
            raise CorruptStateError(f"a state holds {data[:40]!r}, which has no time: was state_ttl_s set only now?")
        return _TIME_OF.unpack_from(data)[0], self._values.loads(data[_TIME_OF.size :])


#: Types that need no ``ClassSerializer``.
_PLAIN = (str, int, float, bool, bytes, list, dict, tuple)


def serializer_of(serializer: str | None, kind: str | None, what: str) -> Serializer:
    """The serializer that a configuration names: ``serializer`` is its class, ``kind`` the class of
    the values; without both, the default. ``what``: the configuration key, for messages."""
    if serializer is not None:
        return named(serializer, what)()  # type: ignore[no-any-return]
    if kind is None:
        return MsgpackSerializer()
    found = named(kind if "." in kind else f"builtins.{kind}", what)
    return MsgpackSerializer() if found in _PLAIN else ClassSerializer(found)


def named(name: str, what: str) -> Any:
    """The object that ``module.attribute`` names. Raises ``ConfigError`` with a message that begins
    with ``what``."""
    module_name, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}: there is no {name!r} ({error}); write module.Class") from None


def _extended(value: Any, depth: int) -> msgpack.ExtType:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _packed(list(value), depth))
    if kind in (set, frozenset):
        members = sorted(_packed(each, depth) for each in value)
        return msgpack.ExtType(_SET if kind is set else _FROZENSET, _packed(members, depth))
    if kind is datetime.timedelta:
        return msgpack.ExtType(_DURATION, _packed([value.days, value.seconds, value.microseconds], depth))
    if kind in _TEXTS:
        code, write = _TEXTS[kind]
        return msgpack.ExtType(code, write(value).encode())
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no form of its own")


def _packed(value: Any, depth: int = 0) -> bytes:
    """Prepare a value for MessagePack. ``depth``: how many tuples and sets enclose the value."""
    return msgpack.packb(value, default=_inside(_extended, depth), strict_types=True)  # type: ignore[no-any-return]


def _unpacked(data: bytes, depth: int = 0) -> Any:
    return msgpack.unpackb(data, ext_hook=_inside(_restored, depth), strict_map_key=False)


@functools.cache
def _inside(hook: Callable[..., Any], depth: int) -> Callable[..., Any]:
    """The extension hook for values one level deeper."""
    if depth > NESTING_MAX:
        raise ValueError(f"tuples and sets stand in each other more than {NESTING_MAX} deep")
    return functools.partial(hook, depth=depth + 1)


def _restored(code: int, data: bytes, depth: int) -> Any:
    if code == _TUPLE:
        return tuple(_unpacked(data, depth))
    if code in (_SET, _FROZENSET):
        members = (_unpacked(each, depth) for each in _unpacked(data, depth))
        return set(members) if code == _SET else frozenset(members)
    if code == _DURATION:
        days, seconds, microseconds = _unpacked(data, depth)
        return datetime.timedelta(days, seconds, microseconds)
    if code not in _FROM_TEXT:
        raise ValueError(f"nothing is written as extension {code}")
    return _FROM_TEXT[code](data.decode())


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__}, deeply nested"
    return text if len(text) <= 80 else f"{text[:77]}..."
