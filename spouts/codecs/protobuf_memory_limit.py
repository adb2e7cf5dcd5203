"""What the messages of a Protobuf value may take in memory.

An empty message within another takes two bytes on the wire, and a word of memory for each field of
its type. So a value is looked through before it is parsed, where its size alone does not rule out
that it becomes too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from spouts.codecs.protobuf_schema import is_repeated

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

#: Memory of one parsed value.
PARSED_BYTES_MAX = 256 << 20
#: The parser's own limit of nesting.
NESTING_MAX = 100
#: A field in memory, and a message beside its fields.
_FIELD_BYTES, _MESSAGE_BYTES = 16, 64
_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)


class _Type:
    """A type of message: its size in memory, and the fields that hold messages, by number."""

    def __init__(self, fields: int) -> None:
        self.size = _MESSAGE_BYTES + _FIELD_BYTES * fields
        self.messages: dict[int, _Type] = {}


#: A group that the type does not have.
_UNKNOWN = _Type(0)


class ParsedSize:
    """Bounds the memory of values of a message type."""

    def __init__(self, message: Descriptor) -> None:
        self._types: dict[str, _Type] = {}
        self._repeats = False
        self._root = self._type(message)
        self._largest = max(each.size for each in self._types.values())

    def _type(self, message: Descriptor) -> _Type:
        found = self._types.get(message.full_name)
        if found is None:
            found = self._types[message.full_name] = _Type(len(message.fields))
            for each in message.fields:
                if each.message_type is not None:
                    self._repeats = self._repeats or is_repeated(each)
                    found.messages[each.number] = self._type(each.message_type)
        return found

    def check(self, value: bytes) -> None:
        """Raise ``ValueError`` for a value that takes too much. Bytes that are no message are left
        to the parser."""
        if not self._repeats or len(value) // 2 * self._largest <= PARSED_BYTES_MAX:
            return
        left = PARSED_BYTES_MAX - self._root.size
        waiting = [_Part(self._root, 0, len(value), 0)]
        while waiting and left >= 0:
            left -= _size_within(value, *waiting.pop(), waiting=waiting)
        if left < 0:
            raise ValueError(f"its messages take more than {PARSED_BYTES_MAX >> 20} MiB of memory")


class _Part(NamedTuple):
    """A message within a value: from where to where, and within how many others."""

    type: _Type
    begin: int
    end: int
    depth: int


def _size_within(value: bytes, its: _Type, at: int, end: int, depth: int, *, waiting: list[_Part]) -> int:
    """The memory of the messages directly within a part. Adds those to ``waiting`` that may have
    others within. Stops where the bytes are no message."""
    size, messages = 0, its.messages
    around: list[_Type] = []  # the messages around the group that is read
    try:
        while at < end:
            tag, at = value[at], at + 1
            if tag > 0x7F:
                tag, at = read_varint(value, at - 1)
            kind, inner = tag & 7, messages.get(tag >> 3)
            if kind == _VARINT:
                _, at = read_varint(value, at)
            elif kind == _BYTES:
                length, at = value[at], at + 1
                if length > 0x7F:
                    length, at = read_varint(value, at - 1)
                if inner is not None:
                    size += inner.size
                    within = depth + len(around) + 1
                    # the parser goes no further, but it comes to the others
                    if length and inner.messages and within <= NESTING_MAX:
                        waiting.append(_Part(inner, at, min(at + length, end), within))
                at += length
            elif kind == _GROUP:
                around.append(its)
                its = inner if inner is not None else _UNKNOWN
                size, messages = size + its.size, its.messages
            elif kind == _GROUP_END and around:
                its = around.pop()
                messages = its.messages
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                break
    except IndexError:
        pass
    return size


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and the place after it. Raises ``IndexError`` where the
    bytes are none."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise IndexError
