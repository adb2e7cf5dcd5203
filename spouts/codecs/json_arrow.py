"""JSON objects as Arrow columns, by Arrow's own reader: many values in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from framework.topology import Fields
from spouts.codecs.codec import BulkCodec, Values, joined, joined_column
from spouts.codecs.json_decimals import DecimalRewriter
from spouts.codecs.json_reasons import reason_of

#: Arrow's JSON reader works best on blocks of this size. Longer records get larger blocks.
_BLOCK_BYTES = 1 << 20


class ArrowJsonCodec(BulkCodec):
    """What a JSON value means, and whether it is one: ``JsonCodec`` gives the same results.

    ``declared``: the columns. In a field that is not nullable, null, or nothing, is an error; in
    one of a nested object, only where that object is there. The rows have the schema
    ``nullable(declared)``. ``shown``: the types that reasons name, where they are others. Raises an
    Arrow error for a schema that Arrow's reader cannot decode into.
    """

    def __init__(self, declared: pa.Schema, shown: pa.Schema | None = None) -> None:
        schema = nullable(declared)
        self._shown = schema if shown is None else shown
        self.fields = Fields.of_schema(schema)
        self._schema = schema
        self._required = [each for each in declared if _demands(each)]
        self._floats = [field.name for field in schema if _holds_floats(field.type)]
        self._checked = [field.name for field in schema if not _is_plain(field.type)]
        self._decimals = DecimalRewriter(schema)
        self._parse([b"{}"])

    def decode_together(self, values: Values) -> pa.RecordBatch:
        parts = _parts(values)
        if len(parts) > 1:
            return joined([self.decode_together(part) for part in parts])
        nulls = values.count(None)
        present = [b"{}" if value is None else value for value in values] if nulls else values
        try:
            batch = self._parse_stripped(present)
        except pa.ArrowException as error:
            if len(values) == 1:
                raise ValueError(reason_of(error, present[0] or b"", self._shown, self._schema)) from error
            raise
        for field in self._required:
            missing = _missing(batch.column(field.name), field, nulls, field.name)
            if missing is not None:
                raise ValueError(f"{missing} is required, and is missing or null")
        return batch

    def _parse_stripped(self, values: Values) -> pa.RecordBatch:
        """``_parse``. Whitespace around an object is legal but rare: only values with it are parsed
        twice."""
        try:
            return self._parse(values)
        except (pa.ArrowException, ValueError):
            stripped = [(value or b"").strip(b" \t\r\n") for value in values]
            if stripped == list(values):
                raise
        return self._parse(stripped)

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
        values = self._decimals.rewritten(values, binary)
        joined = b"\n".join(values)  # type: ignore[arg-type]
        lines = joined.count(b"\n") + 1
        longest = pc.max(pc.binary_length(binary)).as_py()
        table = pj.read_json(
            pa.BufferReader(joined),
            read_options=pj.ReadOptions(
                use_threads=False, block_size=min(max(_BLOCK_BYTES, 2 * longest + 2), 2**31 - 1)
            ),
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
            try:
                table.column(name).validate(full=True)  # Arrow's reader does not check UTF-8
            except pa.ArrowInvalid:
                declared = self._shown.field(name).type
                wrong = f"more digits than {declared} holds" if pa.types.is_decimal(declared) else "invalid UTF-8"
                raise ValueError(f"{name}: {wrong}") from None
        for name in self._floats:
            if not all(map(_is_finite, table.column(name).chunks)):
                raise ValueError(f"{name} is not a finite number")
        return pa.RecordBatch.from_arrays([joined_column(column) for column in table.columns], names=table.schema.names)


def _parts(values: Values) -> list[Values]:
    """The values in parts that offsets of 32 bits reach: usually all of them."""
    array = pa.array(values, pa.binary())
    if not isinstance(array, pa.ChunkedArray):
        return [values]
    ends = np.cumsum([len(chunk) for chunk in array.chunks]).tolist()
    return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with every field nullable, nested ones too: Arrow's reader refuses a nested field
    that is not, even where the object around it is null."""
    return pa.schema([pa.field(each.name, _nullable(each.type)) for each in schema])


def _nullable(declared: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(declared):
        return pa.struct([pa.field(each.name, _nullable(each.type)) for each in declared])
    if pa.types.is_list(declared):
        return pa.list_(pa.field(declared.value_field.name, _nullable(declared.value_type)))
    return declared


def _demands(field: pa.Field) -> bool:
    """Whether null is an error in a field, or inside it."""
    return not field.nullable or any(map(_demands, _children(field.type)))


def _children(declared: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(declared):
        return list(declared)
    return [declared.value_field] if pa.types.is_list(declared) else []


def _missing(column: pa.Array, field: pa.Field, nulls: int, where: str) -> str | None:
    """The first place at which null is an error, and is. ``nulls``: so many of the column are null
    because what is around them is."""
    if not field.nullable and column.null_count != nulls:
        return where
    children = [each for each in _children(field.type) if _demands(each)]
    if not children:
        return None
    if pa.types.is_list(field.type):
        return _missing(column.flatten(), children[0], 0, f"{where}[]")
    parts = dict(zip((each.name for each in field.type), column.flatten(), strict=True))
    found = (_missing(parts[each.name], each, column.null_count, f"{where}.{each.name}") for each in children)
    return next((each for each in found if each is not None), None)


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
