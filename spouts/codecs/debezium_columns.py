"""The columns of a row in a change record: how each is written, and what it means.

A column is described as Kafka Connect describes it in records with schemas: a mapping with
``type``, and with ``name``, which says what a number, text or bytes mean. ``described`` makes such
a description for records without schemas, of the declared type and of one value.

Source: Debezium's documentation, "Data type mappings" of the connectors for PostgreSQL and MariaDB.
"""

from __future__ import annotations

import base64
import binascii
import decimal
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError
from framework.topology.exact_decimals import exact_decimal
from spouts.codecs.iso8601 import dates, moments, times_of_day
from spouts.codecs.json_reasons import shortened

Truths = np.ndarray[Any, np.dtype[np.bool_]]
#: A column, as Kafka Connect describes it.
Described = Mapping[str, Any]
DECIMALS = ("precise", "string", "double")
TIMES = ("adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds")
BINARIES = ("bytes", "base64", "base64-url-safe", "hex")

_DECIMAL, _VARIABLE_DECIMAL = "org.apache.kafka.connect.data.Decimal", "io.debezium.data.VariableScaleDecimal"
_BITS, _NAMED_FLOAT = "io.debezium.data.Bits", "named float"
#: A float in a record that has NaN or Infinity, which are text in JSON.
NAMED_FLOAT = {"type": "string", "name": _NAMED_FLOAT}
_UNITS = {
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    "org.apache.kafka.connect.data.Time": "ms",
    "io.debezium.time.Time": "ms",
    "io.debezium.time.MicroTime": "us",
    "io.debezium.time.NanoTime": "ns",
    "io.debezium.time.MicroDuration": "us",
    "io.debezium.time.NanoDuration": "ns",
}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MOMENTS = {"ms": "io.debezium.time.Timestamp", "us": "io.debezium.time.MicroTimestamp"}
_CLOCKS = {"ms": "io.debezium.time.Time", "us": "io.debezium.time.MicroTime"}
#: Digits of a decimal whose schema has no precision.
_DECIMAL_DIGITS = 38
_DECIMAL_DIGITS_MAX = 76
_PLAIN = {
    "boolean": pa.bool_(),
    "int8": pa.int16(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float64(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
#: The most digits after the point of a number with its own scale: PostgreSQL's limit.
_SCALE_MAX = 16_383
#: The errors of a conversion for values that do not fit their schema.
_NOT_FITTING = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, pa.ArrowNotImplementedError)
_NAMED = ("NaN", "Infinity", "-Infinity")
_DIGITS = decimal.Context(prec=80)
#: What Debezium writes for infinity in a timestamp, in microseconds, and what PostgreSQL stores.
_INFINITIES = {9223372036825200000: 2**63 - 1, -9223372036832400000: -(2**63)}
_NAMED_INFINITIES = ("infinity", "-infinity")


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The settings of the connector that wrote the records. ``unavailable``: what it writes in
    place of a value that it was not given. Raises ``TopologyError``."""

    decimals: str = "precise"
    times: str = "adaptive"
    binaries: str = "bytes"
    unavailable: str = "__debezium_unavailable_value"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("decimals", self.decimals, DECIMALS),
            ("times", self.times, TIMES),
            ("binaries", self.binaries, BINARIES),
        ):
            if value not in known:
                raise TopologyError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def described(declared: pa.DataType, value: Any, settings: SourceSettings) -> dict[str, Any]:
    """How a column of a record without schemas is written. ``value``: one of its values, as JSON
    has it; None if none is known."""
    types = pa.types
    if types.is_list(declared):
        first = next((each for each in value if each is not None), None) if isinstance(value, list) else None
        return {"type": "array", "items": described(declared.value_type, first, settings)}
    if isinstance(value, dict):
        if types.is_decimal(declared) or {"scale", "value"} == set(value):
            return _VARIABLE
        names = value if not types.is_struct(declared) else [each.name for each in declared]
        kinds = {each.name: each.type for each in declared} if types.is_struct(declared) else {"wkb": pa.binary()}
        fields = [
            {"field": name, **described(kinds[name], value.get(name), settings)} for name in names if name in kinds
        ]
        return {"type": "struct", "fields": fields}
    if types.is_struct(declared):
        fields = [{"field": each.name, **described(each.type, None, settings)} for each in declared]
        return {"type": "struct", "fields": fields}
    kind = _kind(value, declared, settings)
    if kind == "string":
        return _described_text(declared, settings)
    if kind in ("boolean", "double"):
        return {"type": kind}
    return {"type": "int64", "name": _name_of_number(declared, settings)}


_VARIABLE = {
    "type": "struct",
    "name": _VARIABLE_DECIMAL,
    "fields": [{"field": "scale", "type": "int32"}, {"field": "value", "type": "bytes"}],
}


def _kind(value: Any, declared: pa.DataType, settings: SourceSettings) -> str:
    types = pa.types
    if isinstance(value, bool) or (value is None and types.is_boolean(declared)):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if types.is_floating(declared) or (types.is_decimal(declared) and value is not None):
        return "double"
    if isinstance(value, (int, float)):
        return "int64" if isinstance(value, int) else "double"
    is_text = types.is_string(declared) or types.is_binary(declared) or types.is_fixed_size_binary(declared)
    if is_text or types.is_decimal(declared):
        return "string"
    zoned = types.is_timestamp(declared) and declared.tz is not None
    temporal = types.is_temporal(declared) and not types.is_duration(declared)
    return "string" if temporal and (zoned or settings.times == "isostring") else "int64"


def _described_text(declared: pa.DataType, settings: SourceSettings) -> dict[str, Any]:
    types = pa.types
    precise = settings.decimals == "precise"
    if types.is_decimal(declared) and precise:
        return {"type": "bytes", "name": _DECIMAL, "parameters": {"scale": str(declared.scale)}}
    if types.is_integer(declared) and precise:
        return {"type": "bytes", "name": _DECIMAL, "parameters": {"scale": "0"}}
    if types.is_floating(declared):
        return NAMED_FLOAT
    if (types.is_binary(declared) or types.is_fixed_size_binary(declared)) and settings.binaries == "bytes":
        return {"type": "bytes"}
    return {"type": "string"}


def _name_of_number(declared: pa.DataType, settings: SourceSettings) -> str | None:
    types = pa.types
    if types.is_date(declared):
        return "io.debezium.time.Date"
    if types.is_duration(declared):
        return "io.debezium.time.MicroDuration"
    if not types.is_timestamp(declared) and not types.is_time(declared):
        return None
    unit = "us" if declared.unit == "us" else "ms" if declared.unit in ("s", "ms") else "ns"
    if settings.times == "connect":
        unit = "ms"
    elif settings.times in ("microseconds", "nanoseconds"):
        unit = "us" if settings.times == "microseconds" else "ns"
    elif settings.times == "adaptive_time_microseconds" and types.is_time(declared):
        unit = "us"
    if types.is_timestamp(declared):
        return _MOMENTS.get(unit, "io.debezium.time.NanoTimestamp")
    return _CLOCKS.get(unit, "io.debezium.time.NanoTime")


def column_type(column: Described) -> pa.DataType:
    """The type of a column that holds every value of a described one. Raises ``ValueError`` for one
    that no column holds."""
    kind, name = column["type"], column.get("name")
    if name == _DECIMAL:
        try:
            scale = _scale(column)
            digits = max(_parameter(column, "connect.decimal.precision", _DECIMAL_DIGITS), scale, 1)
        except ValueError as error:
            raise ValueError(f"{column.get('field', 'a column')}: {error}") from None
        return (
            pa.decimal128(digits, scale)
            if digits <= _DECIMAL_DIGITS
            else pa.decimal256(min(digits, _DECIMAL_DIGITS_MAX), scale)
        )
    if name in _UNITS:
        if name.endswith("Duration"):
            return pa.duration("us")
        return pa.timestamp("us") if name.endswith("Timestamp") else pa.time64("us")
    if name == "io.debezium.time.ZonedTimestamp":
        return pa.timestamp("us", "UTC")
    if name and name.endswith(".Date"):
        return pa.date32()
    if name in (_VARIABLE_DECIMAL, _BITS):
        return pa.string()
    if kind == "array":
        return pa.list_(column_type(column["items"]))
    if kind == "struct":
        if "wkb" in [each["field"] for each in column["fields"]]:
            return pa.binary()
        return pa.struct([(each["field"], column_type(each)) for each in column["fields"]])
    if kind not in _PLAIN:
        raise ValueError(f"{column.get('field', 'a column')}: a {kind}, which no column holds")
    return _PLAIN[kind]


def _scale(column: Described) -> int:
    """The digits after the point of a ``Decimal``. Raises ``ValueError``."""
    scale = _parameter(column, "scale")
    if abs(scale) > _DECIMAL_DIGITS_MAX:
        raise ValueError(f"a decimal of {scale} digits after the point, which no column holds")
    return scale


def _parameter(column: Described, name: str, otherwise: int | None = None) -> int:
    """A parameter that is a number. Raises ``ValueError`` if it is missing, or not a number."""
    value: Any = (column.get("parameters") or {}).get(name, otherwise)
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{column.get('name')} with the {name} {shortened(repr(value))}, which is no number") from None


def in_json(column: Described) -> pa.DataType:
    """The type as which JSON of a described column is read. Raises ``ValueError`` for one that no
    Arrow type holds."""
    kind = column["type"]
    if kind == "struct":
        return pa.struct([(each["field"], in_json(each)) for each in column["fields"]])
    if kind == "array":
        return pa.list_(in_json(column["items"]))
    plain = {"boolean": pa.bool_(), "float": pa.float64(), "double": pa.float64()}
    plain |= {"string": pa.string(), "bytes": pa.string()}
    if kind == "map":
        raise ValueError("a map, which no column holds: set hstore.handling.mode=json in the connector")
    return plain.get(kind, pa.int64())


class ColumnReader:
    """Makes a declared column of a described one. Raises ``ValueError`` if that cannot be."""

    def __init__(self, column: Described, declared: pa.DataType, settings: SourceSettings) -> None:
        self.declared = declared
        self._column = column
        self._settings = settings
        self._unavailable = _unavailable(settings.unavailable)
        self._convert = _converter(column, declared, settings)

    def read(self, raw: pa.Array) -> tuple[pa.Array, Truths, Truths]:
        """The column; for each row whether its value is none of the type; and whether the connector
        was not given it."""
        missing = self._unavailable.found(raw, self._column)
        if missing.any():
            raw = pc.if_else(pa.array(~missing), raw, pa.scalar(None, raw.type))
        made = _or_null(raw, lambda part: _fitted(self._convert(part), self.declared), self.declared)
        bad = made.is_null().to_numpy(zero_copy_only=False) & raw.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_list(made.type):
            bad = bad | _bad_items(raw, made)
        return made, bad, missing


def _bad_items(raw: pa.Array, made: pa.Array) -> Truths:
    """The rows with lists in which an item became null."""
    before, after = raw.flatten(), made.flatten()
    bad: Truths = np.zeros(len(raw), np.bool_)
    if len(before) == len(after) and before.null_count != after.null_count:
        items = after.is_null().to_numpy(zero_copy_only=False) & before.is_valid().to_numpy(zero_copy_only=False)
        bad[pc.list_parent_indices(raw).to_numpy()[items]] = True
    return bad


class _Unavailable:
    """Finds the values in whose place the connector wrote that it was not given them: unchanged
    values that PostgreSQL stores outside the row (TOAST)."""

    def __init__(self, placeholder: str) -> None:
        raw = placeholder.encode()
        encoded = base64.b64encode(raw).decode()
        pairs = json.dumps({placeholder: placeholder}, separators=(",", ":"))
        self._texts = pa.array(sorted({placeholder, pairs}))
        self._of_bytes = pa.array(sorted({placeholder, encoded, raw.hex(), base64.urlsafe_b64encode(raw).decode()}))
        self._numbers = list(raw)

    def found(self, raw: pa.Array, column: Described) -> Truths:
        nothing: Truths = np.zeros(len(raw), np.bool_)
        if pa.types.is_string(raw.type):
            known = self._of_bytes if column["type"] == "bytes" or not column.get("name") else self._texts
            found: Truths = pc.is_in(raw, value_set=known).to_numpy(zero_copy_only=False)
            return found
        if not pa.types.is_list(raw.type) or not len(raw):
            return nothing
        lengths = pc.fill_null(pc.list_value_length(raw), 0).to_numpy()
        if pa.types.is_string(raw.type.value_type):
            candidates, known_lists = lengths == 1, [[each] for each in self._of_bytes.to_pylist()]
        else:
            candidates, known_lists = lengths == len(self._numbers), [self._numbers]
        for row in np.flatnonzero(candidates):
            nothing[row] = raw[int(row)].as_py() in known_lists
        return nothing


#: The same object for all columns, of which schemas have many.
_unavailable = functools.lru_cache(maxsize=16)(_Unavailable)

Convert = Callable[[pa.Array], pa.Array]


def _converter(column: Described, declared: pa.DataType, settings: SourceSettings) -> Convert:
    """The function that makes a column of values, of the declared type or a type that is cast to
    it; null for values of another type."""
    types, name, kind = pa.types, column.get("name"), column["type"]
    if name == _DECIMAL:
        scale = _scale(column)
        return lambda raw: _decimals([_decoded(each, "bytes") for each in raw.to_pylist()], scale)
    if name == _VARIABLE_DECIMAL:
        return lambda raw: _variable_decimals(raw, declared)
    if name == _NAMED_FLOAT:
        return _named_floats
    if name in _UNITS:
        return lambda raw: _counted(raw, _UNITS[name], declared)
    if name and name.endswith(".Date"):
        return lambda raw: raw.cast(pa.int32()).view(pa.date32()) if types.is_date(declared) else raw
    if kind == "array":
        if not types.is_list(declared):
            raise ValueError(f"an array, which {declared} does not hold")
        items = _converter(column["items"], declared.value_type, settings)
        return lambda raw: _lists(raw, _fitted(items(raw.flatten()), declared.value_type))
    if kind == "struct":
        return _struct_converter(column, declared, settings)
    if kind in ("bytes", "string"):
        return _text_converter(column, declared, settings)
    return lambda raw: raw


def _struct_converter(column: Described, declared: pa.DataType, settings: SourceSettings) -> Convert:
    names = [each["field"] for each in column["fields"]]
    if not pa.types.is_struct(declared):  # points and geometries
        if "wkb" not in names or not (pa.types.is_binary(declared) or pa.types.is_large_binary(declared)):
            raise ValueError(f"an object of {', '.join(names)}, which {declared} does not hold")
        at = names.index("wkb")
        return lambda raw: _binaries(raw.flatten()[at], "bytes")
    of, places = {each["field"]: each for each in column["fields"]}, {name: at for at, name in enumerate(names)}
    parts = [(places[each.name], each) for each in declared if each.name in of]
    if len(parts) != declared.num_fields:
        raise ValueError(f"an object of {', '.join(names)}, which lacks fields of {declared}")
    made = [(at, each.type, _converter(of[each.name], each.type, settings)) for at, each in parts]

    def convert(raw: pa.Array) -> pa.Array:
        flat = raw.flatten()
        columns = [_fitted(its(flat[at]), wanted) for at, wanted, its in made]
        return pa.StructArray.from_arrays(columns, fields=list(declared), mask=raw.is_null())

    return convert


def _text_converter(column: Described, declared: pa.DataType, settings: SourceSettings) -> Convert:
    types = pa.types
    if column.get("name") == _BITS and types.is_string(declared):
        length = _parameter(column, "length", 0)
        return lambda raw: pa.array([_bits(each, length) for each in raw.to_pylist()], pa.string())
    if types.is_binary(declared) or types.is_fixed_size_binary(declared) or types.is_large_binary(declared):
        how = "bytes" if column["type"] == "bytes" else settings.binaries
        return lambda raw: _binaries(raw, how)
    if types.is_timestamp(declared):
        return lambda raw: _moments(raw, declared)
    if types.is_date(declared):
        return lambda raw: dates(pc.utf8_rtrim(raw, "Z"), declared)
    if types.is_time(declared):
        return lambda raw: times_of_day(raw, declared)
    return lambda raw: raw


def _counted(raw: pa.Array, unit: str, declared: pa.DataType) -> pa.Array:
    """Moments, times of day and durations, from a count of a unit. What is finer than the declared
    unit is cut off."""
    types = pa.types
    if not (types.is_timestamp(declared) or types.is_time(declared) or types.is_duration(declared)):
        return raw
    was, becomes = _PER_SECOND[unit], _PER_SECOND[declared.unit]
    if becomes > was:
        raw = _or_null(raw, lambda each: pc.multiply_checked(each, pa.scalar(becomes // was, pa.int64())))
    elif becomes < was:
        counts = pc.fill_null(raw, 0).to_numpy() // (was // becomes)
        raw = pa.array(counts, pa.int64(), mask=raw.is_null().to_numpy(zero_copy_only=False))
    if types.is_timestamp(declared) and declared.unit == "us":
        which = pc.index_in(raw, value_set=pa.array(list(_INFINITIES)))
        raw = pc.coalesce(pa.array(list(_INFINITIES.values())).take(which), raw)
    return (raw.cast(pa.int32()) if declared.bit_width == 32 else raw).view(declared)


def _moments(raw: pa.Array, declared: pa.DataType) -> pa.Array:
    which = pc.index_in(raw, value_set=pa.array(_NAMED_INFINITIES))
    if which.null_count == len(raw):
        return moments(raw, declared)
    infinities = pa.array(list(_INFINITIES.values())).take(which).view(declared)
    return pc.coalesce(infinities, moments(pc.if_else(which.is_valid(), pa.scalar(None, raw.type), raw), declared))


def _lists(raw: pa.ListArray, items: pa.Array) -> pa.Array:
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(raw), 0)).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, items, mask=raw.is_null() if raw.null_count else None)


_STANDARD = str.maketrans("-_", "+/")


def _decoded(text: str | None, how: str) -> bytes | None:
    if text is None:
        return None
    try:
        if how == "hex":
            return binascii.unhexlify(text)
        return base64.b64decode(text.translate(_STANDARD), validate=True)
    except ValueError:
        return None


def _binaries(raw: pa.Array, how: str) -> pa.Array:
    return pa.array([_decoded(each, how) for each in raw.to_pylist()], pa.binary())


def _bits(text: str | None, length: int) -> str | None:
    """Bits as text. The first byte has the last bits. ``length``: the most bits of the column, 2^31
    - 1 where it has no limit."""
    found = _decoded(text, "bytes")
    if found is None or length <= 0:
        return None if found is None else ""
    return f"{int.from_bytes(found, 'little'):0{min(length, max(64, 8 * len(found)))}b}"


def _decimals(values: Sequence[bytes | None], scale: int) -> pa.Array:
    found = [None if each is None else _unscaled(each, scale) for each in values]
    return pa.array(found, pa.decimal256(_DECIMAL_DIGITS_MAX, scale))


def _unscaled(value: bytes, scale: int) -> decimal.Decimal | None:
    """None for more digits than a decimal column has."""
    number = int.from_bytes(value, "big", signed=True)
    return decimal.Decimal(number).scaleb(-scale, _DIGITS) if abs(number) < 10**76 else None


def _variable_decimals(raw: pa.Array, declared: pa.DataType) -> pa.Array:
    """Numbers with a scale each, in the declared type or a type that is cast to it. The text of a
    number does not depend on the other numbers."""
    numbers = [_scaled(each) if each is not None else None for each in raw.to_pylist()]
    if pa.types.is_string(declared):
        return pa.array([None if each is None else f"{each:f}" for each in numbers], declared)
    kind = declared if pa.types.is_decimal(declared) else pa.decimal256(_DECIMAL_DIGITS_MAX, _DECIMAL_DIGITS)
    return _exact(numbers, kind)


def _exact(numbers: Sequence[decimal.Decimal | str | None], declared: pa.DataType) -> pa.Array:
    """Numbers, or texts of numbers; null if the type does not hold a number exactly."""
    return pa.array([None if each is None else exact_decimal(each, declared) for each in numbers], declared)


def _scaled(parts: Mapping[str, Any]) -> decimal.Decimal | None:
    scale, value = parts.get("scale"), _decoded(parts.get("value"), "bytes")
    if not isinstance(scale, int) or abs(scale) > _SCALE_MAX or value is None:
        return None
    return _unscaled(value, scale)


def _named_floats(raw: pa.Array) -> pa.Array:
    which = pc.index_in(raw, value_set=pa.array(_NAMED))
    named = pa.array([float("nan"), float("inf"), float("-inf")]).take(which)
    numbers = pc.if_else(which.is_valid(), pa.scalar(None, pa.string()), raw)
    return pc.coalesce(named, _or_null(numbers, lambda part: part.cast(pa.float64())))


def _fitted(column: pa.Array, declared: pa.DataType) -> pa.Array:
    """The column in the declared type; null where a value does not fit exactly."""
    if column.type == declared:
        return column
    types = pa.types
    if types.is_floating(column.type) and types.is_decimal(declared):
        column = pa.array([None if each is None else repr(each) for each in column.to_pylist()], pa.string())
    if types.is_string(column.type) and types.is_decimal(declared):
        return _exact(column.to_pylist(), declared)
    if types.is_decimal(column.type) and types.is_string(declared):
        return pa.array([None if each is None else f"{each:f}" for each in column.to_pylist()], declared)
    return _or_null(column, lambda part: part.cast(declared))


def _or_null(column: pa.Array, convert: Convert, made: pa.DataType | None = None) -> pa.Array:
    """The converted column; null for each value that cannot be converted. ``made``: the type of the
    converted column, if known."""
    try:
        return convert(column)
    except _NOT_FITTING:
        if len(column) < 2:
            return pa.nulls(len(column), made if made is not None else convert(column.slice(0, 0)).type)
    middle = len(column) // 2
    return pa.concat_arrays([_or_null(part, convert, made) for part in (column[:middle], column[middle:])])
