"""JSON objects as Arrow columns, by Arrow's own reader: many values in one call."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from framework.topology import Fields
from spouts.codecs.codec import BulkCodec, Values

#: Arrow's JSON reader works best on blocks of this size. Longer records get larger blocks.
_BLOCK_BYTES = 1 << 20


class ArrowJsonCodec(BulkCodec):
    """What a JSON value means, and whether it is one: ``JsonCodec`` gives the same results.

    ``schema``: the columns. ``required``: those in which null, or nothing, is an error. Raises an
    Arrow error for a schema that Arrow's reader cannot decode into.
    """

    def __init__(self, schema: pa.Schema, required: Sequence[str]) -> None:
        self.fields = Fields.of_schema(schema)
        self._schema = schema
        self._required = required
        self._floats = [field.name for field in schema if _holds_floats(field.type)]
        self._checked = [field.name for field in schema if not _is_plain(field.type)]
        self._parse([b"{}"])

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
        for name in self._required:
            if batch.column(name).null_count != nulls:
                raise ValueError(f"{name} is required, and is missing or null")
        return batch

    def reason(self, error: Exception) -> str:
        return str(error).removeprefix("JSON parse error: ")

    def _parse(self, values: Sequence[bytes | None]) -> pa.RecordBatch:
        """Parse all values in one call of Arrow's reader. Raises ``ValueError`` if a value is not
        exactly one object."""
        binary = pa.array(values, pa.binary())
        if not values:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self._schema], schema=self._schema)
        # Every value runs from { to }. So as many rows as values means one object each: an object
        # cannot continue in the next value, because there is no comma between them.
        if not (pc.all(pc.starts_with(binary, "{")).as_py() and pc.all(pc.ends_with(binary, "}")).as_py()):
            raise ValueError("not a JSON object")
        joined = b"\n".join(values)  # type: ignore[arg-type]
        lines = joined.count(b"\n") + 1
        longest = pc.max(pc.binary_length(binary)).as_py()
        table = pj.read_json(
            pa.BufferReader(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(_BLOCK_BYTES, 2 * longest + 2)),
            parse_options=pj.ParseOptions(
                explicit_schema=self._schema,
                unexpected_field_behavior="ignore",
                newlines_in_values=lines != len(values),
            ),
        )
        if table.num_rows != len(values):
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
