"""Arrow columns as messages of Protobuf.

A writer takes columns of the types that ``protobuf_schema`` gives to the fields of a message, and
returns the bytes of a message for each row. The same row has the same bytes: map entries are in the
order of their keys. ``ValueError``: a value is none of its field; the message names the field.

A null is an absent field. So it is an error where Protobuf does not tell absence, or the schema has
a default value: the row would be read with another value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from framework.errors import TopologyError
from spouts.codecs.protobuf_columns import DURATION_S_MAX, END_SECOND, FIRST_SECOND
from spouts.codecs.protobuf_required_fields import check_required
from spouts.codecs.protobuf_schema import (
    DURATION,
    TIMESTAMP,
    Files,
    arrow_schema,
    is_json,
    is_map,
    is_opaque,
    is_repeated,
    is_wrapper,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_MICROS, _NANOS_PER_MICRO = 1_000_000, 1_000
#: Makes what a message's constructor takes of a value that is not null.
Convert = Callable[[Any], Any]


class MessageWriter:
    """Encodes rows as messages of one type. Raises ``TopologyError`` for a type without columns."""

    def __init__(self, files: Files, name: str) -> None:
        from google.protobuf import message_factory
        from google.protobuf.message import EncodeError

        message = files.message(name)
        self._types = {each.name: _as_numbers(each.type) for each in arrow_schema(message)}
        self._fields = _Fields(message, "", (message.full_name,))
        self._new: Any = message_factory.GetMessageClass(message)
        self._error = EncodeError

    def check(self, names: Sequence[str]) -> None:
        """Raise ``TopologyError`` for a required field that rows with these fields do not have."""
        for name in self._fields.required:
            if name not in names:
                raise TopologyError(f"the message requires field {name!r}, and the rows do not have it: add it")

    def write(self, columns: Mapping[str, pa.Array], rows: int) -> list[bytes]:
        """The message of each row. Raises ``ValueError`` with the reason."""
        names = [*columns]
        values = [column.cast(self._types[name]).to_pylist() for name, column in columns.items()]
        if not values:
            return [self._serialized({})] * rows
        return [self._serialized(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]

    def _serialized(self, row: Mapping[str, Any]) -> bytes:
        made = self._new(**self._fields(row))
        check_required(made)
        try:
            return bytes(made.SerializeToString(deterministic=True))
        except self._error as error:
            raise ValueError(str(error)[:200]) from None


def _as_numbers(declared: pa.DataType) -> pa.DataType:
    """The type with integers in place of moments and durations, which Python may not hold."""
    types = pa.types
    if types.is_timestamp(declared) or types.is_duration(declared):
        return pa.int64()
    if types.is_struct(declared):
        return pa.struct([pa.field(each.name, _as_numbers(each.type)) for each in declared])
    if types.is_map(declared):
        return pa.map_(declared.key_type, _as_numbers(declared.item_type))
    return pa.list_(_as_numbers(declared.value_type)) if types.is_list(declared) else declared


class _Fields:
    """Converts the fields of a row. ``where``: the place of the message, in front of its fields."""

    def __init__(self, message: Descriptor, where: str, within: tuple[str, ...]) -> None:
        self._where = where
        self._converts = {each.name: _field(each, f"{where}{each.name}", within) for each in message.fields}
        self._never_null = {each.name for each in message.fields if not _tells_absence(each)}
        self.required = [each.name for each in message.fields if each.is_required]
        self._oneofs = [[each.name for each in oneof.fields] for oneof in message.oneofs if len(oneof.fields) > 1]

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in row.items():
            if value is not None:
                convert = self._converts[name]
                found[name] = value if convert is None else convert(value)
            elif name in self._never_null:
                raise ValueError(f"{self._where}{name} is null, and its field in the message cannot be absent")
        for oneof in self._oneofs:
            there = [name for name in oneof if name in found]
            if len(there) > 1:
                raise ValueError(
                    f"{self._where}{there[0]} and {there[1]} are members of a oneof: one of them must be null"
                )
        return found


def _tells_absence(field: FieldDescriptor) -> bool:
    has_default = field.message_type is None and field.has_default_value
    return bool(field.has_presence and not has_default and not field.is_required)


def _field(field: FieldDescriptor, where: str, within: tuple[str, ...]) -> Convert | None:
    if is_map(field):
        return _map(field, where, within)
    one = _one(field, where, within)
    if not is_repeated(field):
        return one

    def many(values: Sequence[Any]) -> Sequence[Any]:
        if None in values:
            raise ValueError(f"{where}[] is null, and an item of a message cannot be absent")
        return values if one is None else [one(each) for each in values]

    return many


def _map(field: FieldDescriptor, where: str, within: tuple[str, ...]) -> Convert:
    one = _one(field.message_type.fields_by_name["value"], f"{where}{{}}", within)

    def entries(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"{where} has a key twice")
        if None in found.values():
            raise ValueError(f"{where}{{}} is null, and an entry of a message cannot be absent")
        return found if one is None else {key: one(value) for key, value in found.items()}

    return entries


def _one(field: FieldDescriptor, where: str, within: tuple[str, ...]) -> Convert | None:
    """Converts one value of a field; None: it is taken as it is."""
    message = field.message_type
    if message is None:
        return _enum(field, where) if field.enum_type is not None else None
    if message.full_name == TIMESTAMP:
        return lambda value: _moment(value, where)
    if message.full_name == DURATION:
        return lambda value: _duration(value, where)
    if is_wrapper(message):
        return lambda value: {"value": value}
    if is_json(message) or is_opaque(message, within):
        return _parsed(message, where)
    return _Fields(message, f"{where}.", (*within, message.full_name))


def _enum(field: FieldDescriptor, where: str) -> Convert:
    enum = field.enum_type
    numbers: dict[str, int] = {each.name: each.number for each in enum.values}
    known = set(numbers.values())

    def number(text: str) -> int:
        found = numbers.get(text)
        if found is not None:
            return found
        if not enum.is_closed and text.removeprefix("-").isdecimal() and int(text) not in known:
            return int(text)  # as it is decoded, where it has no name
        raise ValueError(f"{where}: {text!r:.60} is no value of {enum.full_name}")

    return number


def _moment(micros: int, where: str) -> dict[str, int]:
    seconds, rest = divmod(micros, _MICROS)
    if not FIRST_SECOND <= seconds < END_SECOND:
        raise ValueError(f"{where}: a Timestamp of {seconds} s is not between the years 1 and 9999")
    return {"seconds": seconds, "nanos": rest * _NANOS_PER_MICRO}


def _duration(micros: int, where: str) -> dict[str, int]:
    seconds, rest = divmod(abs(micros), _MICROS)
    if seconds > DURATION_S_MAX:
        raise ValueError(f"{where}: a Duration has at most {DURATION_S_MAX:,} s")
    sign = -1 if micros < 0 else 1
    return {"seconds": sign * seconds, "nanos": sign * rest * _NANOS_PER_MICRO}


def _parsed(message: Descriptor, where: str) -> Convert:
    """Makes messages of JSON, or of the bytes of which they are kept."""
    from google.protobuf import json_format, message_factory
    from google.protobuf.message import DecodeError

    new: Any = message_factory.GetMessageClass(message)
    as_json = is_json(message)

    def parse(value: Any) -> Any:
        try:
            return json_format.Parse(value, new()) if as_json else new.FromString(value)
        except (json_format.ParseError, DecodeError, RecursionError) as error:
            raise ValueError(f"{where}: no {message.full_name}: {str(error)[:100]}") from None

    return parse
