"""Values in plain forms (``framework.topology.json_values``), for stores that lack their types:
stored and returned exactly. ``spouts.JsonCodec`` can read all of them."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.canonical_form import NAN
from framework.topology.json_values import Conversion, integer_bounds, json_encoder

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_UINT64_MAX = 2**64 - 1
#: The most characters of a damaged value that an error shows.
_SHOWN = 60
_FLOATS = {"NaN": NAN, "Infinity": math.inf, "-Infinity": -math.inf}


def whole_number(value: Any) -> int:
    """The value, which is an integer. Raises ``ValueError`` for another."""
    if type(value) is not int:
        raise ValueError(f"{_shown(value)} is no integer")
    return value


def first_number(values: Sequence[Any]) -> int:
    """The first of the values, which is an integer. Raises ``ValueError`` for another."""
    return whole_number(values[0])


def is_plain(declared: pa.DataType) -> bool:
    """Whether values of this type need no conversion."""
    types = pa.types
    return not (types.is_temporal(declared) or types.is_decimal(declared) or types.is_boolean(declared))


def restored(value: Any, declared: pa.DataType) -> Any:
    """The value with this plain form."""
    types = pa.types
    if types.is_boolean(declared):
        return bool(value)
    if types.is_duration(declared):
        return pa.scalar(value, declared).as_py()
    if types.is_timestamp(declared):
        moment = datetime.datetime.fromisoformat(value)
        return moment.replace(tzinfo=datetime.UTC) if declared.tz is not None else moment
    if types.is_time(declared):
        return datetime.time.fromisoformat(value)
    if types.is_date(declared):
        return datetime.date.fromisoformat(value)
    return decimal.Decimal(value) if types.is_decimal(declared) else value


def check_writable(name: str, declared: pa.DataType | None, store: str) -> pa.DataType:
    """As ``check_storable``, for values that are only written: lists and structs of such values,
    too."""
    if declared is not None and (pa.types.is_list(declared) or pa.types.is_large_list(declared)):
        check_writable(name, declared.value_type, store)
        return declared
    if declared is not None and pa.types.is_struct(declared):
        for each in declared:
            check_writable(f"{name}.{each.name}", each.type, store)
        return declared
    return check_storable(name, declared, store)


def check_storable(name: str, declared: pa.DataType | None, store: str) -> pa.DataType:
    """Return the type if its values are stored exactly. Raises ``TopologyError`` otherwise."""
    if declared is None:
        raise TopologyError(f"column {name!r} needs a declared type: give Fields({name}=int) or the like")
    types = pa.types
    if (
        types.is_timestamp(declared) or types.is_time(declared) or types.is_duration(declared)
    ) and declared.unit == "ns":
        raise TopologyError(f"column {name!r}: {declared} is finer than {store} keeps; cast it to microseconds first")
    numbers = types.is_integer(declared) or types.is_floating(declared) or types.is_decimal(declared)
    text = types.is_string(declared) or types.is_large_string(declared)
    raw = types.is_binary(declared) or types.is_large_binary(declared)
    if not (
        numbers
        or text
        or raw
        or types.is_boolean(declared)
        or (types.is_temporal(declared) and not _is_interval(declared))
    ):
        how = (
            "make it a text before, as by json.dumps"
            if types.is_nested(declared)
            else "cast it to a number, text or bytes"
        )
        raise TopologyError(f"column {name!r}: {store} cannot hold {declared} exactly; {how}")
    return declared


def _is_interval(declared: pa.DataType) -> bool:
    return bool(pa.types.is_interval(declared))


class JsonColumns:
    """Converts rows of these fields to lists that any JSON writer accepts, and back. Raises
    ``TopologyError`` for types that it cannot store, and ``ValueError`` for values that do not fit
    their type. ``only_written``: nothing is converted back, so lists and structs are converted,
    too."""

    def __init__(self, fields: Fields, store: str, *, only_written: bool = False) -> None:
        check = check_writable if only_written else check_storable
        types = [check(name, fields.type_of(name), store) for name in fields]
        self._encoders = [json_encoder(each) for each in types]
        self._decoders = [_decoder(each) for each in types]
        self._as_they_are = all(each.equals(pa.int64()) or each.equals(pa.string()) for each in types)
        self._accepted = [_accepted(each) for each in types]
        #: For each column: whether its values are always text in JSON.
        self.textual = [
            not (
                pa.types.is_integer(each)
                or pa.types.is_floating(each)
                or pa.types.is_boolean(each)
                or pa.types.is_duration(each)
            )
            for each in types
        ]

    def encode(self, values: Sequence[Any]) -> Sequence[Any]:
        if self._as_they_are:
            for value in values:
                if type(value) is int and not _INT64_MIN <= value <= _INT64_MAX:
                    raise ValueError(f"{value} is beyond 64 bits")
            return values
        return [None if value is None else encode(value) for encode, value in zip(self._encoders, values, strict=True)]

    def decode(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Decode values. Raises ``ValueError`` for a form that ``encode`` does not make."""
        if type(values) is not list or len(values) != len(self._accepted):
            raise ValueError(f"{_shown(values)} stands in place of {len(self._accepted)} values")
        for value, (kinds, least, most) in zip(values, self._accepted, strict=True):
            if value is not None and (type(value) not in kinds or (type(value) is int and not least <= value <= most)):
                raise ValueError(f"{_shown(value)} is no value of its column")
        if self._as_they_are:
            return tuple(values)
        return tuple(
            [None if value is None else decode(value) for decode, value in zip(self._decoders, values, strict=True)]
        )

    def text_of(self, values: Sequence[Any]) -> str:
        """The values as JSON."""
        return json.dumps(list(self.encode(values)))

    def values_of(self, text: str) -> tuple[Any, ...]:
        """The values of a ``text_of``. Raises ``ValueError`` for another text."""
        return self.decode(json.loads(text))


def _accepted(declared: pa.DataType) -> tuple[tuple[type, ...], int, int]:
    """The JSON types of a column's values, and the bounds of integers."""
    types = pa.types
    if types.is_boolean(declared):
        return (bool,), 0, 0
    if types.is_integer(declared):
        return (int,), *integer_bounds(declared)
    if types.is_duration(declared):
        return (int,), _INT64_MIN, _INT64_MAX
    if types.is_floating(declared):
        return (float, int, str), _INT64_MIN, _UINT64_MAX
    return (str,), 0, 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _decoder(declared: pa.DataType) -> Conversion:
    types = pa.types
    if types.is_floating(declared):
        return lambda value: _FLOATS[value] if isinstance(value, str) else float(value)
    if types.is_binary(declared) or types.is_large_binary(declared):
        return base64.b64decode
    if is_plain(declared):
        return lambda value: value
    return lambda value: restored(value, declared)
