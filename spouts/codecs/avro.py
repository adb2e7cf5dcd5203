"""Avro values as Arrow columns.

Two decoders behind one interface. fastavro decodes any schema, value by value. If polars is
installed and the schema has plain types only, ``avro_bulk`` decodes all values in one call, an
order of magnitude faster. Values that it cannot verify go to fastavro.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException

from framework.topology import Fields
from spouts.codecs.avro_bulk import BulkAvro
from spouts.codecs.avro_schema import Named, Schema, arrow_schema, loaded, parsed
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Values

#: Below this many values, bulk decoding costs more than it saves.
_BULK_FROM = 16
#: Arrow's errors for a value that does not fit its type, such as an int of more than 32 bits.
_UNFIT = (pa.ArrowException, ValueError, OverflowError, TypeError)


class AvroDecoder:
    """Decodes values that were written with one schema into rows of ``target``.

    ``reader``: the schema to resolve values to; None: as written. ``writer_named``,
    ``reader_named``: types that the schemas refer to but do not define."""

    def __init__(
        self,
        writer: Schema,
        reader: Schema | None,
        target: pa.Schema,
        writer_named: Named | None = None,
        reader_named: Named | None = None,
    ) -> None:
        self._writer = parsed(writer, writer_named)
        self._reader = parsed(reader, reader_named) if reader is not None else None
        self._target = target
        outcome = reader if reader is not None else writer
        self._single = not (isinstance(outcome, dict) and outcome["type"] == "record")
        self._bulk = BulkAvro.of(writer, reader, target) if not writer_named and not reader_named else None

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """One row per value that can be decoded, and the bad values."""
        if self._bulk is not None and len(values) >= _BULK_FROM:
            batch = self._bulk.decode(values)
            if batch is not None:
                return batch, []
        rows: dict[int, Mapping[str, Any] | None] = {}
        bad: list[BadRecord] = []
        for index, value in enumerate(values):
            try:
                rows[index] = self._one(value)
            except ValueError as error:
                bad.append(BadRecord(index, str(error)))
        try:
            return self._as_batch(list(rows.values())), bad
        except _UNFIT:
            for index, row in list(rows.items()):
                try:
                    self._as_batch([row])
                except _UNFIT as error:
                    bad.append(BadRecord(index, f"a value does not fit its type: {error}"))
                    del rows[index]
        return self._as_batch(list(rows.values())), sorted(bad, key=lambda each: each.index)

    def _as_batch(self, rows: Sequence[Mapping[str, Any] | None]) -> pa.RecordBatch:
        arrays = [
            pa.array([row[each.name] if row is not None else None for row in rows], each.type) for each in self._target
        ]
        return pa.RecordBatch.from_arrays(arrays, names=self._target.names)

    def _one(self, value: bytes | None) -> Mapping[str, Any] | None:
        """Decode one value. Raises ``ValueError`` with the reason if it cannot."""
        if value is None:
            return None
        stream = io.BytesIO(value)
        try:
            found: Any = fastavro.schemaless_reader(stream, self._writer, self._reader)
        except EOFError:
            raise ValueError(f"not written with this schema: the value ends early, after {len(value)} bytes") from None
        except (SchemaParseException, ArithmeticError, LookupError, TypeError, AttributeError, OSError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if stream.tell() != len(value):
            raise ValueError(
                f"not written with this schema: {len(value) - stream.tell()} bytes are left after the value"
            )
        row: Mapping[str, Any] = {"value": found} if self._single else found
        return row


class AvroCodec(PerValueCodec):
    """Avro values without a header, all written with one schema.

    ``schema``: as JSON data, as text, or as the path of a file. ``reader_schema``: resolve values
    to this schema by Avro's rules; it then gives the codec's fields. ``spouts.codecs.avro_schema``
    lists the Arrow types. A value with too many or too few bytes is an error.

    >>> codec = AvroCodec({"type": "record", "name": "Word", "fields": [{"name": "word", "type": "string"}]})
    >>> codec.decode([b"\\x06dog", None]).to_pylist()
    [{'word': 'dog'}, {'word': None}]
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(self, schema: Schema | Path, reader_schema: Schema | Path | None = None) -> None:
        self._schema = loaded(schema)
        self._reader_schema = loaded(reader_schema) if reader_schema is not None else None
        self._target = arrow_schema(self._schema if self._reader_schema is None else self._reader_schema)
        self.fields = Fields.of_schema(self._target)
        self._decoder: AvroDecoder | None = AvroDecoder(self._schema, self._reader_schema, self._target)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        if self._decoder is None:
            self._decoder = AvroDecoder(self._schema, self._reader_schema, self._target)
        return self._decoder.decode_good(values)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_decoder": None}  # the receiver parses the schema again
