"""What the messages of a Protobuf value may take in memory.

An empty message within another takes two bytes on the wire, and a word of memory for each field of
its type. So a value is looked through before it is parsed, where its size alone does not rule out
that it becomes too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        left = PARSED_BYTES_MAX
        waiting = [(self._root, 0, len(value), 0)]
        while waiting:
            its, at, end, depth = waiting.pop()
            left -= its.size
            if left < 0:
                raise ValueError(f"its messages take more than {PARSED_BYTES_MAX >> 20} MiB of memory")
            if depth > NESTING_MAX:
                return
            try:
                while at < end:
                    tag, at = _varint(value, at)
                    kind = tag & 7
                    if kind == _VARINT:
                        _, at = _varint(value, at)
                    elif kind == _BYTES:
                        size, at = _varint(value, at)
                        inner = its.messages.get(tag >> 3)
                        if inner is not None:
                            waiting.append((inner, at, min(at + size, end), depth + 1))
                        at += size
                    elif kind in (_GROUP, _GROUP_END):
                        left -= its.messages[tag >> 3].size if kind == _GROUP and tag >> 3 in its.messages else 0
                    elif kind in (_FIXED64, _FIXED32):
                        at += 8 if kind == _FIXED64 else 4
                    else:
                        return
            except IndexError:
                return


def _varint(data: bytes, at: int) -> tuple[int, int]:
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
