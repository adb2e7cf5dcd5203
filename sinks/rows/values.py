"""Values of rows in the forms that databases take: nested values as JSON text."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError
from framework.topology.canonical import python_values
from sinks.sql.schema import Dialect


def is_nested(declared: pa.DataType) -> bool:
    return bool(pa.types.is_nested(declared))


def column_type(dialect: Dialect, json_type: str, name: str, declared: pa.DataType) -> str:
    """The type of a column of our own making. Raises ``TopologyError`` for a type that the database
    cannot hold."""
    if pa.types.is_dictionary(declared):
        declared = declared.value_type
    return json_type if is_nested(declared) else dialect.type_of(name, declared)


def storable(rows: pa.Table, location: str) -> pa.Table:
    """The rows with nested values as JSON text. Raises ``BadRecordError`` for a nested value that
    has no JSON form."""
    for number, field in enumerate(rows.schema):
        column = rows.column(number)
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(number, field.name, column.cast(field.type.value_type))
        elif is_nested(field.type):
            try:
                texts = [
                    None if each is None else _json(each, field.type) for each in python_values(column, field.name)
                ]
            except ValueError as error:
                raise BadRecordError(f"{location}: {field.name!r} has no JSON form: {error}") from error
            rows = rows.set_column(number, field.name, pa.chunked_array([pa.array(texts, pa.string())]))
    return rows


def _json(value: Any, declared: pa.DataType) -> str:
    return json.dumps(_plain(value, declared), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, declared: pa.DataType) -> Any:
    types = pa.types
    if value is None:
        return None
    if types.is_struct(declared):
        return {each.name: _plain(value.get(each.name), each.type) for each in declared}
    if types.is_map(declared):
        pairs = value.items() if isinstance(value, dict) else value
        return {
            each if isinstance(each, str) else _key(_plain(each, declared.key_type)): _plain(item, declared.item_type)
            for each, item in pairs
        }
    if is_nested(declared):
        return [_plain(each, declared.value_type) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number in JSON")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return pa.scalar(value, declared).value
    return value


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
