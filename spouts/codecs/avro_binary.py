"""Readers of Avro's binary encoding.

A reader takes the bytes of a value, a position, and the bounds of the value, and returns what it
has read and the next position. It accepts what the specification allows and nothing else, because
an ignored byte may be the damaged one. ``ValueError``: the bytes are not an encoding of the type.
``IndexError`` or ``struct.error``: the value ends early.

Source: Apache Avro 1.12, specification, binary encoding. Java ignores what these refuse: bytes of a
boolean other than 0 and 1, and bits of an int beyond the 32nd and of a long beyond the 64th.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spouts.codecs.avro_schema import DEPTH_MAX

#: Items of one value that take no bytes, such as nulls in an array. Without a bound, a count of
#: four bytes fills the memory.
EMPTY_ITEMS_MAX = 1_000
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
#: Bits of the last byte that a varint may use: 32 = 4 * 7 + 4, and 64 = 9 * 7 + 1.
_INT_LAST_SHIFT, _INT_LAST_BYTE_MAX = 28, 0x0F
_LONG_LAST_SHIFT, _LONG_LAST_BYTE_MAX = 63, 0x01


class Bounds:
    """What one value may still take: levels of nesting, and items without bytes."""

    __slots__ = ("depth", "empty_items")

    def __init__(self) -> None:
        self.depth = DEPTH_MAX
        self.empty_items = EMPTY_ITEMS_MAX

    def too_deep(self) -> ValueError:
        return ValueError(f"it nests more than {DEPTH_MAX} records, arrays and maps")

    def take_empty(self, items: int) -> None:
        self.empty_items -= items
        if self.empty_items < 0:
            raise ValueError(f"more than {EMPTY_ITEMS_MAX:,} items of arrays and maps take no bytes")


Read = Callable[[bytes, int, Bounds], tuple[Any, int]]


def read_null(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    return None, at


def read_boolean(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    byte = data[at]
    if byte > 1:
        raise ValueError(f"byte {at} is {byte}, which is not a boolean")
    return byte == 1, at + 1


def read_int(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    byte = data[at]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    return _long_varint(data, at, _INT_LAST_SHIFT, _INT_LAST_BYTE_MAX)


def read_long(data: bytes, at: int, bounds: Bounds | None = None) -> tuple[Any, int]:
    byte = data[at]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    return _long_varint(data, at, _LONG_LAST_SHIFT, _LONG_LAST_BYTE_MAX)


def _long_varint(data: bytes, at: int, last_shift: int, last_byte_max: int) -> tuple[int, int]:
    begin = at
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        if shift == last_shift and byte > last_byte_max:
            bits = 32 if last_shift == _INT_LAST_SHIFT else 64
            raise ValueError(f"the number at byte {begin} has more than {bits} bits")
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        shift += 7


def read_float(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    return _FLOAT.unpack_from(data, at)[0], at + 4


def read_double(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    return _DOUBLE.unpack_from(data, at)[0], at + 8


def read_bytes(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    begin = at
    size, at = read_long(data, at)
    end = at + size
    if size < 0:
        raise ValueError(f"the length at byte {begin} is negative")
    if end > len(data):
        raise IndexError
    return data[at:end], end


def read_string(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
    size = data[at]
    if size < 0x80 and not size & 1:  # the most frequent case: up to 63 bytes
        at += 1
        end = at + (size >> 1)
        if end > len(data):
            raise IndexError
        return data[at:end].decode(), end
    found, end = read_bytes(data, at, bounds)
    return str(found, "utf-8"), end


def fixed_reader(size: int) -> Read:
    def read_fixed(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        end = at + size
        if end > len(data):
            raise IndexError
        return data[at:end], end

    return read_fixed


def choice_reader(what: str, choices: Sequence[Read]) -> Read:
    """Reader of a number, and then of what the choice with this number reads. ``what`` names the
    type in messages."""
    by_byte: Mapping[int, Read] = {2 * number: each for number, each in enumerate(choices[:64])}

    def read_choice(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        chosen = by_byte.get(data[at])
        if chosen is not None:
            return chosen(data, at + 1, bounds)
        number, after = read_int(data, at, bounds)
        if not 0 <= number < len(choices):
            raise ValueError(f"byte {at} chooses number {number} of {what}, which has {len(choices)}")
        read: Read = choices[number]
        return read(data, after, bounds)

    return read_choice


def constant_reader(value: Any) -> Read:
    def read_constant(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        return value, at

    return read_constant


def refusing_reader(reason: str) -> Read:
    def read_refused(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        raise ValueError(reason)

    return read_refused


def converting_reader(read: Read, convert: Callable[[Any], Any]) -> Read:
    def read_converted(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        value, at = read(data, at, bounds)
        return convert(value), at

    return read_converted


def record_reader(fields: Sequence[tuple[str | None, Read]], defaults: Mapping[str, Any]) -> Read:
    """Reader of a record into a dict. ``fields``: as written; without a name, it is not kept."""

    def read_record(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        bounds.depth -= 1
        if bounds.depth < 0:
            raise bounds.too_deep()
        row = dict(defaults)
        for name, read in fields:
            value, at = read(data, at, bounds)
            if name is not None:
                row[name] = value
        bounds.depth += 1
        return row, at

    return read_record


def pair_reader(read: Read) -> Read:
    """Reader of a key and a value."""

    def read_pair(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        key, at = read_string(data, at, bounds)
        value, at = read(data, at, bounds)
        return (key, value), at

    return read_pair


def items_reader(read: Read, *, empty: bool = False) -> Read:
    """Reader of an array, or of the pairs of a map, into a list. ``empty``: an item takes no
    bytes, so that the length of the value does not bound the number of items."""

    def read_items(data: bytes, at: int, bounds: Bounds) -> tuple[Any, int]:
        bounds.depth -= 1
        if bounds.depth < 0:
            raise bounds.too_deep()
        found: list[Any] = []
        while True:
            begin = at
            count, at = read_long(data, at)
            if count == 0:
                break
            end = None
            if count < 0:
                size, at = read_long(data, at)
                count, end = -count, at + size
            if empty:
                bounds.take_empty(count)
            for _ in range(count):
                value, at = read(data, at, bounds)
                found.append(value)
            if end is not None and at != end:
                raise ValueError(f"the items of the block at byte {begin} do not take the bytes that it names")
        bounds.depth += 1
        return found, at

    return read_items
