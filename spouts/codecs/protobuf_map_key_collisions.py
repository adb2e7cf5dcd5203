"""Whether the keys of a Protobuf value collide in the parser's hash tables.

The parser (upb, protobuf 7) hashes an integer key by its own bits, without a secret. So a producer
can choose keys that all have one place in the table of a map: 60,000 of them, 600 kB, took 20 s.
No value takes that long by chance. So a value is looked through before it is parsed, where its size
alone does not rule this out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from spouts.codecs.protobuf_memory_limit import NESTING_MAX, read_varint
from spouts.codecs.protobuf_schema import is_map, is_repeated

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

#: The most pairs of keys in one place that a map may have, about 0.2 s.
COLLISIONS_MAX = 1 << 24
#: An entry of a map takes at least so many bytes: its tag and length, and the tag of the key and
#: the key, unless it is 0.
_ENTRY_BYTES = 4
#: A value of fewer bytes has fewer pairs of keys.
_LOOKED_THROUGH_BYTES = int((2 * COLLISIONS_MAX) ** 0.5) * _ENTRY_BYTES
_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_KEY = 1
#: The load of a table of the parser, at most.
_LOAD = 0.85


class _Type:
    """A type of message: the fields that hold messages, by number."""

    def __init__(self) -> None:
        self.messages: dict[int, _Field] = {}
        self.has_keys = False  # or a message within it has


class _Field(NamedTuple):
    """A field that holds messages. ``key``: of a map with integers as keys, the field of its
    keys."""

    type: _Type
    repeats: bool
    key: FieldDescriptor | None


class _Message:
    """A message of a value: the keys of its maps by field, and its fields that do not repeat. The
    parser merges all occurrences of such a field."""

    __slots__ = ("keys", "single")

    def __init__(self) -> None:
        self.keys: dict[int, list[int]] = {}
        self.single: dict[int, _Message] = {}


class MapKeys:
    """Bounds the collisions of keys in values of a message type."""

    def __init__(self, message: Descriptor) -> None:
        self._types: dict[str, _Type] = {}
        self._root = self._type(message)
        while any(self._spread(each) for each in self._types.values()):
            pass

    def _type(self, message: Descriptor) -> _Type:
        found = self._types.get(message.full_name)
        if found is None:
            found = self._types[message.full_name] = _Type()
            for each in message.fields:
                if each.message_type is not None:
                    key = each.message_type.fields_by_name["key"] if is_map(each) else None
                    if key is not None and key.cpp_type in (key.CPPTYPE_STRING, key.CPPTYPE_BOOL):
                        key = None
                    found.has_keys = found.has_keys or key is not None
                    found.messages[each.number] = _Field(self._type(each.message_type), is_repeated(each), key)
        return found

    @staticmethod
    def _spread(found: _Type) -> bool:
        """Whether it was not known yet that a message within has keys."""
        if found.has_keys or not any(each.type.has_keys for each in found.messages.values()):
            return False
        found.has_keys = True
        return True

    def check(self, value: bytes) -> None:
        """Raise ``ValueError`` for a value with too many collisions. Bytes that are no message are
        left to the parser."""
        if not self._root.has_keys or len(value) < _LOOKED_THROUGH_BYTES:
            return
        messages = [_Message()]
        waiting = [_Part(self._root, messages[0], 0, len(value), 0)]
        while waiting:
            _look_through(value, waiting.pop(), waiting, messages)
        collisions = sum(_collisions(_hashes(keys)) for each in messages for keys in each.keys.values())
        if collisions > COLLISIONS_MAX:
            raise ValueError("keys of a map were chosen so that they collide in the parser's hash table")


class _Part(NamedTuple):
    """Bytes of a message, and within how many others it is."""

    type: _Type
    message: _Message
    begin: int
    end: int
    depth: int


def _look_through(value: bytes, part: _Part, waiting: list[_Part], messages: list[_Message]) -> None:
    """Note the keys directly within a part. Adds those parts to ``waiting`` that may have others.
    Stops where the bytes are no message."""
    its, message, at, end, depth = part
    around: list[tuple[_Type, _Message]] = []  # of the group that is read

    def inside(number: int, field: _Field) -> _Message:
        found = None if field.repeats else message.single.get(number)
        if found is None:
            found = _Message()
            messages.append(found)
            if not field.repeats:
                message.single[number] = found
        return found

    try:
        while at < end:
            tag, at = read_varint(value, at)
            kind, number = tag & 7, tag >> 3
            field = its.messages.get(number)
            if kind == _VARINT:
                _, at = read_varint(value, at)
            elif kind == _BYTES:
                length, at = read_varint(value, at)
                if field is not None and field.key is not None:
                    message.keys.setdefault(number, []).append(_key_of(value, at, min(at + length, end), field.key))
                within = depth + len(around) + 1
                if field is not None and length and field.type.has_keys and within <= NESTING_MAX:
                    waiting.append(_Part(field.type, inside(number, field), at, min(at + length, end), within))
                at += length
            elif kind == _GROUP:
                around.append((its, message))
                if field is not None:
                    its, message = field.type, inside(number, field)
                else:
                    its, message = _Type(), _Message()
            elif kind == _GROUP_END and around:
                its, message = around.pop()
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                break
    except IndexError:
        return


def _key_of(value: bytes, at: int, end: int, key: FieldDescriptor) -> int:
    """The key of an entry, as the 64 bits that the parser hashes: the last of several, 0 if there
    is none."""
    found = 0
    try:
        while at < end:
            tag, at = read_varint(value, at)
            kind = tag & 7
            if kind == _VARINT:
                number, at = read_varint(value, at)
                if key.type in (key.TYPE_SINT32, key.TYPE_SINT64):
                    number = (number >> 1) ^ -(number & 1)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
                number, at = int.from_bytes(value[at : at + size], "little"), at + size
            elif kind == _BYTES:
                length, at = read_varint(value, at)
                at += length
                continue
            else:
                break
            if tag >> 3 == _KEY:
                found = number
    except IndexError:
        pass
    is_narrow = key.cpp_type in (key.CPPTYPE_INT32, key.CPPTYPE_UINT32)
    return found & (0xFFFFFFFF if is_narrow else 0xFFFFFFFFFFFFFFFF)


def _hashes(keys: list[int]) -> npt.NDArray[np.uint64]:
    """As upb computes them, of the keys that differ."""
    found = np.unique(np.array(keys, np.uint64))
    return (found ^ (found >> np.uint64(32))) & np.uint64(0xFFFFFFFF)


def _collisions(hashes: npt.NDArray[np.uint64]) -> int:
    """How many pairs of keys have one place in the table."""
    places = 1 << int(len(hashes) / _LOAD).bit_length()
    _, counts = np.unique(hashes & np.uint64(places - 1), return_counts=True)
    return int((counts * (counts - 1) // 2).sum())
