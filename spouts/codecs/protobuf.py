"""Protobuf messages as Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Values, joined
from spouts.codecs.encoding_codec import ColumnEncodingCodec
from spouts.codecs.protobuf_columns import CELLS_MAX, CELLS_PER_BYTE, Columns, spread
from spouts.codecs.protobuf_map_key_collisions import MapKeys
from spouts.codecs.protobuf_memory_limit import ParsedSize
from spouts.codecs.protobuf_required_fields import check_required
from spouts.codecs.protobuf_schema import Files, arrow_schema, file_set, imported
from spouts.codecs.protobuf_writer import MessageWriter

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Values become Arrow columns after this many bytes.
_CHUNK_BYTES = 1 << 16


class ProtobufDecoder:
    """Decodes the messages of one type. Raises ``TopologyError`` for a type without columns."""

    def __init__(self, files: Files, name: str) -> None:
        from google.protobuf import message_factory
        from google.protobuf.message import DecodeError

        message = files.message(name)
        self.schema = arrow_schema(message)
        self.name = name
        self._size, self._keys = ParsedSize(message), MapKeys(message)
        self._columns = Columns(message)
        self._parse: Any = message_factory.GetMessageClass(message).FromString
        self._error = DecodeError

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """One row per value that can be decoded, and the bad values."""
        batches: list[pa.RecordBatch] = []
        bad: list[BadRecord] = []
        chunk: list[tuple[int, int, Any]] = []  # index, size, message; None for a tombstone
        size = 0
        for index, value in enumerate(values):
            try:
                chunk.append((index, len(value or b""), None if value is None else self._message(value)))
            except ValueError as error:
                bad.append(BadRecord(index, str(error)))
                continue
            size += chunk[-1][1]
            if size > _CHUNK_BYTES:
                self._add(chunk, batches, bad)
                chunk, size = [], 0
        self._add(chunk, batches, bad)
        if not batches:
            batches.append(self._batch([], 0, 0))
        return joined(batches), sorted(bad, key=lambda each: each.index)

    def _message(self, value: bytes) -> Any:
        """Raises ``ValueError`` with the reason."""
        self._size.check(value)
        self._keys.check(value)
        try:
            found = self._parse(value)
            check_required(found)
        except (self._error, ValueError) as error:
            raise ValueError(f"no message {self.name}: {str(error)[:200]}") from None
        return found

    def _add(self, chunk: Sequence[tuple[int, int, Any]], batches: list[pa.RecordBatch], bad: list[BadRecord]) -> None:
        """Add the rows of a chunk. Whether a value is bad does not depend on other values, so
        halving finds bad values."""
        if not chunk:
            return
        cells = CELLS_MAX if len(chunk) > 1 else CELLS_MAX + CELLS_PER_BYTE * chunk[0][1]
        try:
            size = sum(size for _, size, _ in chunk)
            batches.append(self._batch([message for _, _, message in chunk], cells, size))
        except (ValueError, pa.ArrowException) as error:
            if len(chunk) == 1:
                bad.append(BadRecord(chunk[0][0], str(error)))
                return
            half = len(chunk) // 2
            self._add(chunk[:half], batches, bad)
            self._add(chunk[half:], batches, bad)

    def _batch(self, messages: Sequence[Any], cells: int, size: int) -> pa.RecordBatch:
        present = np.fromiter((each is not None for each in messages), np.bool_, len(messages))
        columns = self._columns([each for each in messages if each is not None], cells, size)
        if not present.all():
            columns = [spread(each, present) for each in columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class ProtobufCodec(PerValueCodec, ColumnEncodingCodec):
    """Protobuf messages of one type, without a header.

    ``message``: a generated class, or the full name of a message in ``descriptor_set``: a file that
    ``protoc --include_imports --descriptor_set_out=FILE`` has written, or its bytes. The message's
    fields are the codec's. ``spouts.codecs.protobuf_schema`` lists the Arrow types. Fields that the
    type does not have are ignored, as Protobuf does.

    Errors: bytes that are no such message, text that is not UTF-8, an absent required field (of
    proto2), a Timestamp outside the years 1 to 9999, more than 256 MiB of messages, keys of a map
    that were chosen to collide.

    It encodes rows: a null is an absent field. Errors: a null where Protobuf does not tell absence
    (a list, an item, a proto3 field that is not ``optional``), a text that is no value of an enum,
    two members of a ``oneof``.

    >>> from google.protobuf.type_pb2 import Option
    >>> ProtobufCodec(Option).decode([b"\\x0a\\x01a", None]).to_pydict()["name"]
    ['a', None]
    """

    def __init__(self, message: type[Message] | str, descriptor_set: bytes | str | Path | None = None) -> None:
        imported()
        if isinstance(message, str) == (descriptor_set is None):
            raise TopologyError(
                "ProtobufCodec needs a generated class, or the name of a message and descriptor_set=, the file that protoc "
                "--include_imports --descriptor_set_out=FILE has written"
            )
        self._name = message if isinstance(message, str) else str(message.DESCRIPTOR.full_name)
        self._files = file_set(descriptor_set if isinstance(message, str) else message)  # type: ignore[arg-type]
        self._decoder: ProtobufDecoder | None = self._new_decoder()
        self.fields = Fields.of_schema(self._decoder.schema)

    def _new_decoder(self) -> ProtobufDecoder:
        return ProtobufDecoder(Files(self._files), self._name)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        if self._decoder is None:
            self._decoder = self._new_decoder()
        return self._decoder.decode_good(values)

    def _new_writer(self) -> MessageWriter:
        return MessageWriter(Files(self._files), self._name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_decoder": None}  # the receiver makes its own
