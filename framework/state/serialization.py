"""How keys and values of states become bytes.

The default is MessagePack, with extensions for what Python has and MessagePack lacks: tuples, sets,
integers of any size, decimals, dates, times and durations. Equal keys become equal bytes. Nothing
that is read is ever executed.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import importlib
import pickle
import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgpack

from framework.errors import BadRecordError, ConfigError, CorruptStateError


class Serializer(Protocol):
    """Turns keys or values into bytes and back. The configuration names its class as
    ``module.Class``; it is made without arguments."""

    def dumps(self, value: Any) -> bytes:
        """Raises ``BadRecordError`` for a value that it cannot take."""

    def loads(self, data: bytes) -> Any:
        """Raises ``CorruptStateError`` for bytes that it has not made."""


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
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRecordError(
                f"a state cannot hold {_shown(value)}: {error}; give a serializer of your own in topology.state.provider.config"
            ) from None

    def loads(self, data: bytes) -> Any:
        try:
            return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False, use_list=True)
        except Exception as error:  # noqa: BLE001 - any error is reported with the data that caused it
            raise CorruptStateError(f"a state holds {data[:40]!r}, which is not MessagePack: {error}") from None


class PickleSerializer:
    """Takes what ``pickle`` takes. Reading executes what was written, so use it only for a store
    that nobody else writes to. Do not use it for keys: equal keys need not become equal bytes."""

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
    """Stores each value with the time that it was put, for a serializer of values that takes
    nothing else."""

    def __init__(self, values: Serializer) -> None:
        self._values = values

    def dumps(self, value: Any) -> bytes:
        put_at, inner = value
        return _TIME_OF.pack(put_at) + self._values.dumps(inner)

    def loads(self, data: bytes) -> Any:
        if len(data) < _TIME_OF.size:
            raise CorruptStateError(f"a state holds {data[:40]!r}, which has no time: was state_ttl_s set only now?")
        return _TIME_OF.unpack_from(data)[0], self._values.loads(data[_TIME_OF.size :])


#: Types that are written as they are, so that they need no ``ClassSerializer``.
_PLAIN = (str, int, float, bool, bytes, list, dict, tuple)


def serializer_of(serializer: str | None, kind: str | None, what: str) -> Serializer:
    """The serializer that a configuration names: ``serializer`` is its class, ``kind`` the class of
    what it takes; without both, the default. ``what``: the key, for messages."""
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


def _extended(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _packed(list(value)))
    if kind in (set, frozenset):
        members = sorted(_packed(each) for each in value)
        return msgpack.ExtType(_SET if kind is set else _FROZENSET, _packed(members))
    if kind is datetime.timedelta:
        return msgpack.ExtType(_DURATION, _packed([value.days, value.seconds, value.microseconds]))
    if kind in _TEXTS:
        code, write = _TEXTS[kind]
        return msgpack.ExtType(code, write(value).encode())
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no form of its own")


def _packed(value: Any) -> bytes:
    return msgpack.packb(value, default=_extended, strict_types=True)  # type: ignore[no-any-return]


def _restored(code: int, data: bytes) -> Any:
    def unpacked(packed: bytes) -> Any:
        return msgpack.unpackb(packed, ext_hook=_restored, strict_map_key=False)

    if code == _TUPLE:
        return tuple(unpacked(data))
    if code in (_SET, _FROZENSET):
        members = (unpacked(each) for each in unpacked(data))
        return set(members) if code == _SET else frozenset(members)
    if code == _DURATION:
        days, seconds, microseconds = unpacked(data)
        return datetime.timedelta(days, seconds, microseconds)
    return _FROM_TEXT[code](data.decode())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
