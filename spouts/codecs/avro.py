"""Avro values as Arrow columns.

Two decoders behind one interface. ``avro_resolution`` makes a reader for any pair of schemas, which
decodes value by value. If polars is installed and the schemas have plain types only, ``avro_bulk``
decodes all values in one call, an order of magnitude faster. Values that it cannot verify are
decoded one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.avro_arrow_schema import arrow_schema
from spouts.codecs.avro_binary import Bounds
from spouts.codecs.avro_bulk import BulkAvro
from spouts.codecs.avro_resolution import resolved
from spouts.codecs.avro_schema import AvroType, Schema, loaded, parsed
from spouts.codecs.avro_writer import RowWriter
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Values, joined
from spouts.codecs.encoding_codec import ColumnEncodingCodec

#: Below this many values, bulk decoding costs more than it saves.
_BULK_FROM = 16
#: Values become Arrow columns after this many bytes: as Python objects they can be a hundred times
#: as large, and the garbage collector goes through all of them again and again.
_CHUNK_BYTES = 1 << 16


class AvroDecoder:
    """Decodes values that were written with one schema into rows of ``target``, the Arrow schema of
    ``reader``, to which values are resolved. Raises ``TopologyError`` if they cannot be."""

    def __init__(self, writer: AvroType, reader: AvroType, target: pa.Schema) -> None:
        self._read = resolved(writer, reader)
        self._target = target
        self._single = reader.kind != "record"
        self._bulk = BulkAvro.of(writer, reader, target)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """One row per value that can be decoded, and the bad values."""
        if self._bulk is not None and len(values) >= _BULK_FROM:
            batch = self._bulk.decode(values)
            if batch is not None:
                return batch, []
        batches: list[pa.RecordBatch] = []
        rows: list[Mapping[str, Any] | None] = []
        bad: list[BadRecord] = []
        size = 0
        for index, value in enumerate(values):
            try:
                rows.append(self._one(value) if value is not None else None)
            except ValueError as error:
                bad.append(BadRecord(index, str(error)))
            size += len(value) if value is not None else 0
            if size > _CHUNK_BYTES:
                batches.append(self._as_batch(rows))
                rows, size = [], 0
        if rows or not batches:
            batches.append(self._as_batch(rows))
        return joined(batches), bad

    def _as_batch(self, rows: Sequence[Mapping[str, Any] | None]) -> pa.RecordBatch:
        arrays = [
            pa.array([row[each.name] if row is not None else None for row in rows], each.type) for each in self._target
        ]
        return pa.RecordBatch.from_arrays(arrays, names=self._target.names)

    def _one(self, value: bytes) -> Mapping[str, Any]:
        """Decode one value. Raises ``ValueError`` with the reason if it cannot."""
        try:
            found, end = self._read(value, 0, Bounds())
        except (IndexError, struct.error):
            raise ValueError(f"not written with this schema: the value ends early, after {len(value)} bytes") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"not written with this schema: a text is not valid UTF-8 ({error.reason})") from None
        except ValueError as error:
            raise ValueError(f"not written with this schema: {error}") from None
        if end != len(value):
            raise ValueError(f"not written with this schema: {len(value) - end} bytes are left after the value")
        row: Mapping[str, Any] = {"value": found} if self._single else found
        return row


class AvroCodec(PerValueCodec, ColumnEncodingCodec):
    """Avro values without a header, all written with one schema.

    ``schema``: as JSON data, as text, or as the path of a file. ``reader_schema``: resolve values
    to this schema by Avro's rules; it then gives the codec's fields. ``spouts.codecs.avro_schema``
    lists the Arrow types. A value with too many or too few bytes is an error.

    It encodes rows with ``schema``: a field that the rows do not have gets its default, or null. A
    null where the schema has none, and a text that is no symbol of an enum, are errors. With
    ``reader_schema`` it decodes only.

    >>> codec = AvroCodec({"type": "record", "name": "Word", "fields": [{"name": "word", "type": "string"}]})
    >>> codec.decode([b"\\x06dog", None]).to_pylist()
    [{'word': 'dog'}, {'word': None}]
    >>> codec.encode_row({"word": "dog"})
    b'\\x06dog'
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(self, schema: Schema | Path, reader_schema: Schema | Path | None = None) -> None:
        self._schema = loaded(schema)
        self._reader_schema = loaded(reader_schema) if reader_schema is not None else None
        self._decoder: AvroDecoder | None = self._new_decoder()

    def _new_decoder(self) -> AvroDecoder:
        writer = parsed(self._schema)
        reader = parsed(self._reader_schema) if self._reader_schema is not None else writer
        target = arrow_schema(reader)
        self.fields = Fields.of_schema(target)
        self.names_its_fields = reader.kind == "record"
        return AvroDecoder(writer, reader, target)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        if self._decoder is None:
            self._decoder = self._new_decoder()
        return self._decoder.decode_good(values)

    def check_encodable(self, fields: Fields) -> None:
        if self._reader_schema is not None:
            raise TopologyError("AvroCodec with reader_schema= decodes only: give the schema to write with, alone")
        super().check_encodable(fields)

    def _new_writer(self) -> RowWriter:
        return RowWriter(parsed(self._schema))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_decoder": None}  # the receiver parses the schema again
