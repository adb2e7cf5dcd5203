"""JSON objects as Arrow columns, by Arrow's own reader: many values in one call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import BulkCodec, Values
from spouts.codecs.json_schema import schema_of_json_schema, schema_of_sample

#: Arrow's JSON reader works best on blocks of this size. Longer records get larger blocks.
_BLOCK_BYTES = 1 << 20


class JsonCodec(BulkCodec):
    """JSON objects with a declared schema: each value is one object, each field a column.

    ``fields``: typed ``Fields`` or an Arrow schema. Other keys of the objects are ignored. A
    missing field is null. Errors: null in a field that the Arrow schema declares as not nullable, a
    value of another type, an integer beyond 64 bits, NaN, a number beyond a double, invalid UTF-8,
    and a value that is not exactly one object.

    >>> JsonCodec(Fields(word=str, amount=int)).decode([b'{"word": "a", "amount": 7, "x": 1}']).to_pylist()
    [{'word': 'a', 'amount': 7}]
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(self, fields: Fields | pa.Schema) -> None:
        self.fields = fields if isinstance(fields, Fields) else Fields.of_schema(fields)
        schema = self.fields.schema()
        if schema is None or not len(schema):
            raise TopologyError("JsonCodec needs a type for every field, as in JsonCodec(Fields(word=str, amount=int))")
        self._schema = schema
        self._required = [] if isinstance(fields, Fields) else [each.name for each in fields if not each.nullable]
        self._floats = [field.name for field in schema if _holds_floats(field.type)]
        self._checked = [field.name for field in schema if not _is_plain(field.type)]
        try:
            self._parse([b"{}"])
        except pa.ArrowException as error:
            raise TopologyError(f"JsonCodec cannot decode into {schema.to_string()}: {error}") from error

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | str | Path) -> JsonCodec:
        """From a JSON Schema: a mapping, its text, or the path of a file.

        Enforces types, nested objects, arrays, and ``required`` of the root. Ignores other
        restrictions, such as ``minimum`` or ``pattern``. Raises ``TopologyError`` for what has no
        Arrow type (``oneOf``, ``$ref`` to another document).

        >>> JsonCodec.from_json_schema({"type": "object", "properties": {"n": {"type": "integer"}}}).fields
        Fields(n: int64)
        """  # noqa: W505 - doctest lines are not wrapped
        return cls(schema_of_json_schema(schema))

    @classmethod
    def from_sample(cls, values: Sequence[bytes | str | Mapping[str, Any]]) -> JsonCodec:
        """From a few sample values: the fields of all of them, with the types that Arrow infers.
        Text stays text, even if it looks like a time. Raises ``TopologyError`` for a field that is
        null in all values, or has two types.

        >>> JsonCodec.from_sample([b'{"word": "a", "n": 1}', b'{"word": "b", "n": 1.5}']).fields
        Fields(word: string, n: double)
        """
        raw = [
            each if isinstance(each, bytes) else (each if isinstance(each, str) else json.dumps(each)).encode()
            for each in values
        ]
        return cls(schema_of_sample(raw))

    def decode_together(self, values: Values) -> pa.RecordBatch:
        nulls = values.count(None)
        present = [b"{}" if value is None else value for value in values] if nulls else values
        try:
            batch = self._parse(present)
        except (pa.ArrowException, ValueError):
            # Whitespace around an object is legal but rare: only values with it are parsed twice.
            stripped = [value.strip() if value is not None else b"{}" for value in present]
            if stripped == list(present):
                raise
            batch = self._parse(stripped)
        return self._with_required(batch, nulls)

    def reason(self, error: Exception) -> str:
        return str(error).removeprefix("JSON parse error: ")

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        try:
            return self._decode_lying(values)
        except (ValueError, pa.ArrowException):
            return self.decode(values.to_pylist())  # finds the bad value, and takes whitespace away

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        try:
            return self._decode_lying(values), []
        except (ValueError, pa.ArrowException):
            return self.decode_good(values.to_pylist())

    def _decode_lying(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return self._with_required(self._parse(values.fill_null(b"{}")), values.null_count)

    def _with_required(self, batch: pa.RecordBatch, nulls: int) -> pa.RecordBatch:
        for name in self._required:
            if batch.column(name).null_count != nulls:
                raise ValueError(f"{name} is required, and is missing or null")
        return batch

    def _parse(self, values: Sequence[bytes | None] | pa.BinaryArray) -> pa.RecordBatch:
        """Parse all values in one call of Arrow's reader. Raises ``ValueError`` if a value is not
        exactly one object."""
        binary = values if isinstance(values, pa.Array) else pa.array(values, pa.binary())
        count = len(binary)
        if not count:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self._schema], schema=self._schema)
        # Every value runs from { to }. So as many rows as values means one object each: an object
        # cannot continue in the next value, because there is no comma between them.
        if not (pc.all(pc.starts_with(binary, "{")).as_py() and pc.all(pc.ends_with(binary, "}")).as_py()):
            raise ValueError("not a JSON object")
        if isinstance(values, pa.Array):
            together = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)
            joined = pc.binary_join(together, b"\n")[0].as_buffer()
        else:
            joined = pa.py_buffer(b"\n".join(values))  # type: ignore[arg-type]
        lines = int(np.count_nonzero(np.frombuffer(joined, np.uint8) == ord("\n"))) + 1
        longest = pc.max(pc.binary_length(binary)).as_py()
        table = pj.read_json(
            pa.BufferReader(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(_BLOCK_BYTES, 2 * longest + 2)),
            parse_options=pj.ParseOptions(
                explicit_schema=self._schema,
                unexpected_field_behavior="ignore",
                newlines_in_values=lines != count,
            ),
        )
        if table.num_rows != count:
            raise ValueError("not one JSON object per value")
        table = table.select(self._schema.names).combine_chunks()
        for name in self._checked:
            table.column(name).validate(full=True)  # Arrow's reader does not check UTF-8
        for name in self._floats:
            if not all(map(_is_finite, table.column(name).chunks)):
                raise ValueError(f"{name} is not a finite number")
        return table.to_batches()[0]


def _holds_floats(declared: pa.DataType) -> bool:
    nested = (declared.field(number).type for number in range(declared.num_fields))
    return pa.types.is_floating(declared) or any(map(_holds_floats, nested))


def _is_finite(column: pa.Array) -> bool:
    """Whether every float in the column is finite, also floats inside nested values."""
    if pa.types.is_floating(column.type):
        return bool(pc.all(pc.is_finite(column), min_count=0).as_py())
    if pa.types.is_struct(column.type):
        return all(map(_is_finite, column.flatten()))
    return not pa.types.is_nested(column.type) or _is_finite(column.flatten())


def _is_plain(declared: pa.DataType) -> bool:
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(check(declared) for check in checks)
