"""The Arrow types of Avro types.

=====================================  ==============================
Avro                                   Arrow
=====================================  ==============================
boolean, int, long, float, double      bool, int32, int64, float, double
string, enum                           string
bytes, fixed                           binary, fixed-size binary
decimal (of bytes or fixed)            decimal128, decimal256
date, time-millis, time-micros         date32, time32[ms], time64[us]
timestamp-{millis,micros,nanos}        timestamp of that unit, UTC
local-timestamp-...                    timestamp without a zone
record, array, map                     struct, list, map
union of null and one type             that type
=====================================  ==============================
"""

from __future__ import annotations

import pyarrow as pa

from framework.errors import TopologyError
from spouts.codecs.avro_schema import DEPTH_MAX, AvroType

#: Columns, and columns in columns, of a schema. A type that is used twice counts twice.
FIELDS_MAX = 10_000
_PRIMITIVES = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "enum": pa.string(),
}
_LOGICAL = {
    "date": pa.date32(),
    "time-millis": pa.time32("ms"),
    "time-micros": pa.time64("us"),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("ns", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
    "local-timestamp-nanos": pa.timestamp("ns"),
}
_DECIMAL128_DIGITS, _DECIMAL256_DIGITS = 38, 76


def arrow_schema(schema: AvroType) -> pa.Schema:
    """The columns of a record. A schema of another type becomes one column, ``value``. Raises
    ``TopologyError`` for a type without an Arrow type."""
    columns = _Columns()
    if schema.kind == "record":
        if not schema.fields:
            raise TopologyError(f"Avro, {schema.name}: a record without fields has no columns")
        return pa.schema(columns.of_record(schema, ()))
    return pa.schema([("value", columns.type_of(schema, "value", ())[0])])


def plain_type(schema: AvroType) -> pa.DataType:
    """The Arrow type of a type that holds no other."""
    if schema.logical is None:
        return pa.binary(schema.size) if schema.kind == "fixed" else _PRIMITIVES[schema.kind]
    _, precision, scale = schema.logical
    if not precision:
        return _LOGICAL[schema.logical.name]
    return pa.decimal128(precision, scale) if precision <= _DECIMAL128_DIGITS else pa.decimal256(precision, scale)


class _Columns:
    """Makes the columns of one schema, and counts them."""

    def __init__(self) -> None:
        self._left = FIELDS_MAX

    def of_record(self, schema: AvroType, inside: tuple[AvroType, ...]) -> list[pa.Field]:
        within = (*inside, schema)
        path = ".".join(each.name for each in within if each.name)
        self._left -= len(schema.fields)
        if self._left < 0:
            raise TopologyError(f"Avro, {path[:200]}: more than {FIELDS_MAX:,} fields in fields")
        found = []
        for each in schema.fields:
            declared, nullable = self.type_of(each.type, f"{path}.{each.name}", within)
            found.append(pa.field(each.name, declared, nullable=nullable))
        return found

    def type_of(self, schema: AvroType, where: str, inside: tuple[AvroType, ...]) -> tuple[pa.DataType, bool]:
        """The Arrow type, and whether it may be null. ``inside``: the types around it."""
        if len(inside) > DEPTH_MAX:
            raise TopologyError(f"Avro, {where[:200]}: more than {DEPTH_MAX} types in types")
        if schema.kind == "union":
            others = [each for each in schema.branches if each.kind != "null"]
            if len(others) != 1:
                raise TopologyError(f"Avro, {where}: a union of {len(others)} types has no one Arrow type")
            return self.type_of(others[0], where, inside)[0], len(schema.branches) > 1
        if schema.kind == "record":
            if schema in inside:
                raise TopologyError(f"Avro, {where}: type {schema.name!r} contains itself, which no Arrow type does")
            return pa.struct(self.of_record(schema, inside)), False
        if schema.kind == "array" and schema.items is not None:
            return pa.list_(self.type_of(schema.items, f"{where}[]", (*inside, schema))[0]), False
        if schema.kind == "map" and schema.items is not None:
            return pa.map_(pa.string(), self.type_of(schema.items, f"{where}{{}}", (*inside, schema))[0]), False
        if schema.logical is not None and schema.logical.precision > _DECIMAL256_DIGITS:
            raise TopologyError(
                f"Avro, {where}: {schema.logical} has more digits than Arrow's {_DECIMAL256_DIGITS}; lower its "
                "precision, or read it as bytes by a reader's schema without the logical type"
            )
        return plain_type(schema), schema.kind == "null"
