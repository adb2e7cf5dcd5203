"""Messages of Protobuf as Arrow columns, column by column."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spouts.codecs.protobuf_schema import (
    DURATION,
    TIMESTAMP,
    arrow_type,
    is_json,
    is_map,
    is_opaque,
    is_repeated,
    is_wrapper,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

#: The most values of columns that messages within messages may become, at a time. A value alone may
#: become so many more for each of its bytes. An empty message takes two bytes, and has a value in
#: each column of its type.
CELLS_MAX, CELLS_PER_BYTE = 1_000_000, 64
#: So many of these values, and so many for each byte, are read one by one. For the others, only the
#: fields are read that messages have: Protobuf's values are mostly denser.
READ_CELLS, READ_PER_BYTE = 100_000, 2
#: The most values of lists and maps of which a column is made at a time.
PART_VALUES = 10_000
#: The bytes of a short value.
_SHORT_BYTES = 64
#: Seconds of the years 1 and 10,000 since 1970.
FIRST_SECOND, END_SECOND = -62_135_596_800, 253_402_300_800
#: The most seconds of a Duration.
DURATION_S_MAX = 315_576_000_000
_NANOS_END = 1_000_000_000

#: Makes a column of messages that are there.
Column = Callable[[Sequence[Any]], pa.Array]


class _Cells(threading.local):
    """How many values of columns may still be made."""

    left = 0
    read = 0

    def take(self, cells: int) -> bool:
        """Returns whether all of them may be read."""
        self.left -= cells
        if self.left < 0:
            raise ValueError("its messages hold too many fields for its size")
        self.read -= cells
        return self.read >= 0


class Columns:
    """Makes the columns of messages of one type."""

    def __init__(self, message: Descriptor) -> None:
        self._cells = _Cells()
        self._columns = [_column(each, (message.full_name,), self._cells) for each in message.fields]

    def __call__(self, messages: Sequence[Any], cells: int, size: int) -> list[pa.Array]:
        """``cells``: the most values of columns that messages within these may become. ``size``:
        bytes of the messages. Raises ``ValueError`` where they become more, and for a value that
        its column cannot hold."""
        self._cells.left, self._cells.read = cells, READ_CELLS + READ_PER_BYTE * size
        return [column(messages) for column in self._columns]


def _column(field: FieldDescriptor, within: tuple[str, ...], cells: _Cells) -> Column:
    get = attrgetter(field.name)
    declared = arrow_type(field, within)
    if is_map(field):
        return _maps(field, within, cells, declared)
    of_present = _of_values(field, within, cells)
    if is_repeated(field):

        def lists(messages: Sequence[Any]) -> pa.Array:
            items = [get(each) for each in messages]
            return pa.ListArray.from_arrays(_offsets(items), _in_parts(of_present, _flat(items)), type=declared)

        return lists
    if not field.has_presence or (field.message_type is None and field.has_default_value):
        return lambda messages: of_present(list(map(get, messages)))
    has = methodcaller("HasField", field.name)

    def nullable(messages: Sequence[Any]) -> pa.Array:
        present = np.fromiter(map(has, messages), np.bool_, len(messages))
        found = of_present([get(each) for each, is_there in zip(messages, present, strict=True) if is_there])
        return found if present.all() else spread(found, present)

    return nullable


def spread(column: pa.Array, present: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.Array:
    """The values at the places that are present, and null at the others."""
    places = np.cumsum(present) - 1
    return column.take(pa.array(places, pa.int64(), mask=~present))


def _maps(field: FieldDescriptor, within: tuple[str, ...], cells: _Cells, declared: pa.DataType) -> Column:
    get, entry = attrgetter(field.name), field.message_type
    keys_of, values_of = (_of_values(entry.fields_by_name[each], within, cells) for each in ("key", "value"))

    def maps(messages: Sequence[Any]) -> pa.Array:
        # Their order in the bytes says nothing, and a replay must give the same rows.
        entries = [get(each) for each in messages]
        in_order = [sorted(each) for each in entries]
        keys = keys_of(list(_flat(in_order)))
        values = (its[key] for its, ordered in zip(entries, in_order, strict=True) for key in ordered)
        return pa.MapArray.from_arrays(_offsets(in_order), keys, _in_parts(values_of, values), type=declared)

    return maps


def _of_values(field: FieldDescriptor, within: tuple[str, ...], cells: _Cells) -> Column:
    """Makes a column of the values of a field, none of which is absent."""
    message = field.message_type
    if message is None:
        declared = arrow_type(field, within)
        declared = declared.value_type if is_repeated(field) else declared
        if field.enum_type is not None:
            names = {each.number: each.name for each in field.enum_type.values}

            def enums(values: Sequence[Any]) -> pa.Array:
                found = pa.array(values, pa.int32()).dictionary_encode()
                texts = [names.get(each) or str(each) for each in found.dictionary.to_pylist()]
                return pa.array(texts, declared).take(found.indices)

            return enums
        return lambda values: pa.array(values, declared)
    if message.full_name == TIMESTAMP:
        return lambda values: pa.array([_moment(each) for each in values], pa.int64()).cast(pa.timestamp("us", "UTC"))
    if message.full_name == DURATION:
        return lambda values: pa.array([_duration(each) for each in values], pa.int64()).cast(pa.duration("us"))
    if is_json(message):
        return lambda values: pa.array(list(_json_of_each(values)), pa.string())
    if is_wrapper(message):
        inner = _of_values(message.fields[0], within, cells)
        return lambda values: inner([each.value for each in values])
    if is_opaque(message, within):
        return lambda values: pa.array([each.SerializeToString(deterministic=True) for each in values], pa.binary())
    inner_names = (*within, message.full_name)
    columns = [_column(each, inner_names, cells) for each in message.fields]
    fields = [pa.field(each.name, arrow_type(each, inner_names)) for each in message.fields]

    by_number = {each.number: place for place, each in enumerate(message.fields)}
    absent = _empty_of(message)

    def structs(values: Sequence[Any]) -> pa.Array:
        if cells.take(len(values) * len(columns)):
            found = [column(values) for column in columns]
        else:
            found = [
                _scattered(column([*(values[each] for each in its), absent()]), its, len(values))
                for column, its in zip(columns, _places(values, by_number), strict=True)
            ]
        return pa.StructArray.from_arrays(found, fields=fields)

    return structs


def _empty_of(message: Descriptor) -> Callable[[], Any]:
    """Makes a message of a type without fields."""
    from google.protobuf import message_factory

    made: Callable[[], Any] = message_factory.GetMessageClass(message)
    return made


def _places(messages: Sequence[Any], by_number: Mapping[int, int]) -> list[list[int]]:
    """For each field of a type, which messages have it. ``by_number``: which field has a number."""
    found: list[list[int]] = [[] for _ in by_number]
    for place, each in enumerate(messages):
        for field, _ in each.ListFields():
            if not field.is_extension:
                found[by_number[field.number]].append(place)
    return found


def _scattered(column: pa.Array, places: Sequence[int], count: int) -> pa.Array:
    """A column of ``count`` values, with the values of ``column`` at these places, and its last
    value at the others."""
    taken = np.full(count, len(column) - 1, np.int64)
    taken[np.array(places, np.int64)] = np.arange(len(column) - 1)
    return column.take(pa.array(taken))


def _moment(value: Any) -> int:
    if not (FIRST_SECOND <= value.seconds < END_SECOND and 0 <= value.nanos < _NANOS_END):
        raise ValueError(f"a Timestamp of {value.seconds} s and {value.nanos} ns is not between the years 1 and 9999")
    return int(value.seconds) * 1_000_000 + int(value.nanos) // 1_000


def _duration(value: Any) -> int:
    seconds, nanos = int(value.seconds), int(value.nanos)
    if abs(seconds) > DURATION_S_MAX or abs(nanos) >= _NANOS_END or seconds * nanos < 0:
        raise ValueError(f"a Duration of {seconds} s and {nanos} ns is none of Protobuf's")
    micros = abs(nanos) // 1_000
    return seconds * 1_000_000 + (micros if nanos > 0 else -micros)


def _json_of_each(values: Iterable[Any]) -> Iterator[str]:
    """Equal short values are converted once: their conversion takes microseconds per byte."""
    known: dict[bytes, str] = {}
    for each in values:
        content = each.SerializeToString(deterministic=True)
        text = known.get(content)
        if text is None:
            text = _json(each)
            if len(content) <= _SHORT_BYTES:
                known[content] = text
        yield text


def _json(value: Any) -> str:
    from google.protobuf import json_format

    try:
        return str(json_format.MessageToJson(value, indent=None, ensure_ascii=False, sort_keys=True))
    except (json_format.SerializeToJsonError, ValueError) as error:
        raise ValueError(f"{value.DESCRIPTOR.full_name} has no JSON form: {error}") from None


def _in_parts(make: Column, values: Iterator[Any]) -> pa.Array:
    """The column of values, made in parts: the more messages Python has in hand, the more time
    Protobuf takes for another one."""
    parts = []
    while part := list(itertools.islice(values, PART_VALUES)):
        parts.append(make(part))
    return pa.concat_arrays(parts) if parts else make([])


def _flat(items: Sequence[Any]) -> itertools.chain[Any]:
    return itertools.chain.from_iterable(items)


def _offsets(items: Sequence[Any]) -> pa.Array:
    ends = np.cumsum(np.fromiter(map(len, items), np.int64, len(items)))
    return pa.array(np.concatenate([[0], ends]).astype(np.int32), pa.int32())
