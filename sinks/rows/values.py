"""Values of rows in the forms that databases take: nested values as JSON text."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError
from framework.topology import Fields
from framework.topology.canonical_form import python_values
from framework.topology.json_values import json_encoder
from sinks.sql.schema import Dialect

#: How databases write truth values as text.
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def is_nested(declared: pa.DataType) -> bool:
    return bool(pa.types.is_nested(declared))


def is_text(declared: pa.DataType) -> bool:
    return bool(pa.types.is_string(declared) or pa.types.is_large_string(declared))


def exactly_of(declared: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that makes a value of a column of another type one of ``declared``, if it
    is exactly one. Other values stay unchanged. The function raises ``ValueError`` or
    ``ArithmeticError`` for a text that is no number."""
    types = pa.types
    if types.is_floating(declared):
        return lambda value: float(value) if isinstance(value, (decimal.Decimal, str)) else value
    if types.is_decimal(declared):
        return lambda value: decimal.Decimal(str(value)) if isinstance(value, (float, str)) else value
    kinds = (
        (types.is_integer, _whole_number),
        (types.is_boolean, _truth),
        (types.is_date, _day),
        (types.is_timestamp, _moment),
    )
    return next((exactly for is_a, exactly in kinds if is_a(declared)), _unchanged)


def _unchanged(value: Any) -> Any:
    return value


def _whole_number(value: Any) -> Any:
    if isinstance(value, bytes):  # a BIT
        return int.from_bytes(value, "big")
    return int(value) if isinstance(value, str) and str(int(value)) == value else value


def _truth(value: Any) -> Any:
    if isinstance(value, bytes):  # a BIT
        return int.from_bytes(value, "big")
    return _TRUTHS.get(value, value) if isinstance(value, str) else value


def _day(value: Any) -> Any:
    if not isinstance(value, datetime.datetime):
        return value
    value = value.astimezone(datetime.UTC) if value.tzinfo is not None else value
    return value.date() if value.time() == datetime.time() else value


def _moment(value: Any) -> Any:
    is_day = isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    return datetime.datetime.combine(value, datetime.time()) if is_day else value


def stored_fields(fields: Fields) -> Fields:
    """The fields with the types of what a table holds: nested values are JSON text."""

    def stored(declared: pa.DataType) -> pa.DataType:
        if pa.types.is_dictionary(declared):
            return stored(declared.value_type)
        return pa.string() if is_nested(declared) else declared

    return Fields.of({name: stored(fields.type_of(name)) for name in fields})


def json_form(value: Any) -> str:
    """The JSON text, or what a database has parsed of it, in a form that is the same for equal
    values: ``jsonb`` orders names, and writes numbers in its own way."""
    parsed = json.loads(value) if isinstance(value, (str, bytes)) else value
    return json.dumps(_with_whole_numbers(parsed), ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
            encode = json_writer(field.type)
            try:
                texts = [None if each is None else encode(each) for each in python_values(column, field.name)]
            except ValueError as error:
                raise BadRecordError(f"{location}: {field.name!r} has no JSON form: {error}") from error
            rows = rows.set_column(number, field.name, pa.chunked_array([pa.array(texts, pa.string())]))
    return rows


def json_writer(declared: pa.DataType) -> Callable[[Any], str]:
    """A function from a nested value to its JSON text. It raises ``ValueError`` for a value that
    has no JSON form."""
    encode = _encoder(declared)
    return lambda value: json.dumps(encode(value), ensure_ascii=False, separators=(",", ":"))


def _encoder(declared: pa.DataType) -> Callable[[Any], Any]:
    """The conversion of values for a JSON writer, as everywhere in Ratchet. Keys of maps that are
    no text are written as JSON."""
    types = pa.types
    if types.is_struct(declared):
        members = [(each.name, _encoder(each.type)) for each in declared]
        return _unless_null(lambda value: {name: encode(value.get(name)) for name, encode in members})
    if types.is_map(declared):
        key, item = _encoder(declared.key_type), _encoder(declared.item_type)
        return _unless_null(lambda value: {_key(key(each)): item(its) for each, its in dict(value).items()})
    if is_nested(declared):
        element = _encoder(declared.value_type)
        return _unless_null(lambda value: [element(each) for each in value])
    return _unless_null(json_encoder(declared))


def _unless_null(encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else encode(value)


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def stored_values(column: pa.ChunkedArray, name: str, declared: pa.DataType) -> list[Any]:
    """The values of a column as a table stores them: nested ones as JSON text."""
    values = python_values(column, name)
    if is_nested(declared):
        encode = json_writer(declared)
        return [None if each is None else json_form(encode(each)) for each in values]
    return values
