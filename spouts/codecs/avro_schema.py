"""Avro schemas: how to parse them, and their Arrow types.

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

Source: Apache Avro 1.12, specification.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException, UnknownType

from framework.errors import TopologyError
from framework.paths import local_path

Schema = Union[str, list[Any], dict[str, Any]]
#: Types that a schema refers to but does not define: full name -> schema. Each type comes after the
#: types that it refers to.
Named = Mapping[str, Schema]

_PRIMITIVES = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_LOGICAL: dict[tuple[str, str | None], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}


def loaded(schema: Schema | Path) -> Schema:
    """A schema as JSON data. ``schema``: JSON data, its text, or the path of a file. Raises
    ``TopologyError`` if it cannot be read."""
    try:
        if isinstance(schema, Path) or (isinstance(schema, str) and schema.endswith(".avsc")):
            schema = local_path(schema, "Avro schema").read_text(encoding="utf-8-sig")
        if isinstance(schema, str) and schema.lstrip()[:1] in ("{", "[", '"'):
            document: Schema = json.loads(schema)
            return document
    except (OSError, ValueError) as error:
        raise TopologyError(f"Avro schema cannot be read: {error}") from error
    return schema


def parsed(schema: Schema, named: Named | None = None) -> Schema:
    """A schema as fastavro parses it, together with the types that it refers to. Raises
    ``TopologyError`` if it is not valid."""
    known: dict[str, Any] = {}
    try:
        # Without logical types fastavro returns plain numbers, as Arrow needs them.
        for each in (named or {}).values():
            fastavro.parse_schema(_without_logical(each), named_schemas=known)
        result: Schema = fastavro.parse_schema(_without_logical(schema), named_schemas=known)
    except (SchemaParseException, UnknownType, KeyError, TypeError, AttributeError) as error:
        raise TopologyError(f"Avro schema is not valid: {type(error).__name__}: {error}") from error
    return result


def arrow_schema(schema: Schema, named: Named | None = None) -> pa.Schema:
    """The columns of a record. A schema of another type becomes one column, ``value``. Raises
    ``TopologyError`` for a type without an Arrow type."""
    types = dict(named or {})
    if isinstance(schema, dict) and schema.get("type") == "record":
        types[_full_name(schema)] = schema
        return pa.schema(_record_fields(schema, types, ()))
    declared, _ = _type(schema, types, "value", ())
    return pa.schema([("value", declared)])


def _record_fields(schema: Mapping[str, Any], named: dict[str, Any], inside: tuple[str, ...]) -> list[pa.Field]:
    fields = []
    name = _full_name(schema)
    for each in schema["fields"]:
        declared, nullable = _type(each["type"], named, f"{'.'.join((*inside, name))}.{each['name']}", (*inside, name))
        fields.append(pa.field(each["name"], declared, nullable=nullable))
    return fields


def _type(schema: Any, named: dict[str, Any], where: str, inside: tuple[str, ...]) -> tuple[pa.DataType, bool]:
    if isinstance(schema, list):
        others = [each for each in schema if each != "null"]
        if len(others) != 1:
            raise TopologyError(f"Avro, {where}: a union of {len(others)} types has no one Arrow type")
        declared, _ = _type(others[0], named, where, inside)
        return declared, "null" in schema
    if isinstance(schema, str):
        if schema in _PRIMITIVES:
            return _PRIMITIVES[schema], schema == "null"
        found = named.get(schema) or next((each for name, each in named.items() if name.endswith(f".{schema}")), None)
        if found is None:
            raise TopologyError(f"Avro, {where}: type {schema!r} is not defined")
        return _type(found, named, where, inside)
    kind = schema["type"]
    if isinstance(kind, (dict, list)):
        return _type(kind, named, where, inside)
    if kind in ("record", "error", "enum", "fixed"):
        named[_full_name(schema)] = schema
    return _complex(schema, kind, named, where, inside), False


def _complex(
    schema: Mapping[str, Any], kind: str, named: dict[str, Any], where: str, inside: tuple[str, ...]
) -> pa.DataType:
    logical = schema.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
        return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)
    if (kind, logical) in _LOGICAL:
        return _LOGICAL[(kind, logical)]
    if kind in ("record", "error"):
        if _full_name(schema) in inside:
            raise TopologyError(f"Avro, {where}: type {_full_name(schema)!r} contains itself, which no Arrow type does")
        return pa.struct(_record_fields(schema, named, inside))
    if kind == "enum":
        return pa.string()
    if kind == "fixed":
        return pa.binary(int(schema["size"]))
    if kind == "array":
        return pa.list_(_type(schema["items"], named, f"{where}[]", inside)[0])
    if kind == "map":
        return pa.map_(pa.string(), _type(schema["values"], named, f"{where}{{}}", inside)[0])
    return _type(kind, named, where, inside)[0]


def _full_name(schema: Mapping[str, Any]) -> str:
    name, namespace = str(schema["name"]), schema.get("namespace")
    return f"{namespace}.{name}" if namespace and "." not in name else name


def _without_logical(schema: Any) -> Any:
    """The schema without its logical types, except decimals."""
    if isinstance(schema, list):
        return [_without_logical(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "logicalType" or value == "decimal"}
    for key in ("type", "items", "values"):
        if key in kept:
            kept[key] = _without_logical(kept[key])
    if isinstance(kept.get("fields"), list):
        kept["fields"] = [_without_logical(each) for each in kept["fields"]]
    return kept
