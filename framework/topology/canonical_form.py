"""The canonical form of values (C29). Every value is converted to it before it is grouped, merged,
compared or stored.

1. -0.0 is 0.0. Every NaN is ``NAN``, one object, and sorts above all numbers, as in PostgreSQL and
   in Spark.
2. A value has exactly the type of its column: a decimal has the column's scale, an integer has no
   fraction and fits its size, a timestamp has no more digits than its unit, a text is a text. A
   value that the type cannot hold without rounding is an error. So is a value of another kind, such
   as a datetime in a column of dates.
3. A timestamp is in UTC. If its column has a zone, a timestamp without one is taken as UTC. The
   conversion to UTC also distinguishes the two hours of the same name in the night when clocks go
   back, which Python treats as equal within their zone.

Text and bytes are unchanged, and compare by code points. Hashes do not depend on the form: see
``hashing``.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError
from framework.topology.fields import Fields
from framework.topology.python_datetime_range import holds_times, in_microseconds, outside_python

#: The only NaN object, so that tuples and dictionaries find it.
NAN = math.nan
#: The most digits with which Python writes integers as text.
_DIGITS_MAX = 4_300
Form = Callable[[Any], Any]
#: The errors of a form, for a value that the type cannot hold.
_UNFIT = (ValueError, TypeError, ArithmeticError, pa.ArrowException)


def canonical_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column in a form in which equal values have equal bytes, which is what Arrow
    groups by.

    >>> canonical_column(pa.chunked_array([[0.0, -0.0, None]])).to_pylist()
    [0.0, 0.0, None]
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return canonical_column(column.cast(kind.value_type))
    if not pa.types.is_floating(kind):
        return column
    if pa.types.is_float16(kind):  # Arrow cannot add float16
        return canonical_column(column.cast(pa.float32())).cast(kind)
    column = pc.add(column, pa.scalar(0.0, kind))
    return pc.if_else(pc.is_nan(column), pa.scalar(NAN, kind), column) if has_nan(column) else column


def has_nan(column: pa.ChunkedArray) -> bool:
    return pa.types.is_floating(column.type) and bool(pc.any(pc.is_nan(column)).as_py())


def python_objects(column: pa.Array | pa.ChunkedArray, name: str = "") -> list[Any]:
    """A column's values as Python objects. ``name``: of the field. Raises ``BadRecordError`` for a
    moment, a time of day or a duration that Python cannot represent: Arrow returns 24:00 as 00:00
    and, if pandas is installed, pandas objects for nanoseconds."""
    try:
        if holds_times(column.type):
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            if any(outside_python(chunk) is not None for chunk in chunks):
                raise ValueError(f"the years 1 to 9999 and 00:00 to 23:59:59 are held, and a {column.type} is another")
        held = in_microseconds(column.type)
        values: list[Any] = (column if held == column.type else column.cast(held)).to_pylist()
    except (ValueError, OverflowError) as error:
        raise BadRecordError(
            f"{f'field {name!r}: ' if name else ''}Python cannot hold a value: {error}",
            advice="take the field out, round it, or make it another type, in an ArrowBolt before this one",
        ) from error
    return values


def python_values(column: pa.ChunkedArray, name: str = "") -> list[Any]:
    """A column's values as Python objects, in canonical form. ``name``, and errors: as in
    ``python_objects``."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    values = python_objects(canonical_column(column), name)
    if has_nan(column):
        return [NAN if value != value else value for value in values]
    return values


def comparable(value: Any) -> Any:
    """The value in a hashable form that can be found again, at any depth: one NaN object, tuples
    for lists and mappings, timestamps in UTC."""
    if isinstance(value, float):
        return value if value == value else NAN
    if isinstance(value, Mapping):
        return tuple((name, comparable(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(comparable, value))
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC)
    return value


def key_form(value: Any) -> Any:
    """The form of a key without a declared type: keys that are equal, as in a dictionary, have one
    form, whatever their types; but a bool is no number. A number becomes an integer if it is one,
    else a float if that is exact, else a decimal without trailing zeros. Agrees with ``hashing``.
    Raises ``BadRecordError`` for a decimal with more digits than a state supports.

    >>> [key_form(each) for each in (1.0, decimal.Decimal("1.00"), -0.0, decimal.Decimal("2.50"))]
    [1, 1, 0, 2.5]
    >>> key_form(("a", [decimal.Decimal("0.10")], True))
    ('a', [Decimal('0.1')], True)
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool:
        return value
    if kind is tuple:
        return tuple([key_form(each) for each in value])
    if kind is list:
        return [key_form(each) for each in value]
    if kind is dict:
        return {name: key_form(each) for name, each in value.items()}
    if isinstance(value, float):
        value = _float(value)
        return int(value) if value.is_integer() else value
    if isinstance(value, decimal.Decimal):
        return _decimal_key(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC)
    return value


def _decimal_key(value: decimal.Decimal) -> Any:
    if not value.is_finite():
        return NAN if value.is_nan() else float(value)
    if value.adjusted() >= _DIGITS_MAX:  # converting 1E+1000000 to an integer takes a minute
        raise BadRecordError(f"a key of {value.adjusted() + 1:,} digits: a state holds up to {_DIGITS_MAX:,}")
    if value == value.to_integral_value():
        return int(value)
    as_float = float(value)
    if decimal.Decimal(as_float) == value:
        return as_float
    sign, digits, exponent = value.as_tuple()
    shown = "".join(map(str, digits)).rstrip("0")
    return decimal.Decimal((sign, tuple(map(int, shown)), int(exponent) + len(digits) - len(shown)))


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, NaN included, at any depth.

    >>> equal([1.0, float("nan")], [1.0, float("nan")])
    True
    """
    return bool((comparable(one),) == (comparable(other),))


def form_of(declared: pa.DataType | None) -> Form:
    """Return a function that converts a Python value other than None to canonical form. It raises
    ``ValueError``, ``TypeError`` or ``ArithmeticError`` for a value that the type cannot hold
    exactly. Without a type, values keep their own type.

    >>> form_of(pa.decimal128(10, 2))(decimal.Decimal("1.5"))
    Decimal('1.50')
    >>> form_of(pa.float64())(-0.0)
    0.0
    """
    types = pa.types
    if declared is None:
        return _untyped
    if types.is_floating(declared):
        return (
            _float if types.is_float64(declared) else lambda value: _float(pa.scalar(_float(value), declared).as_py())
        )
    if types.is_dictionary(declared):
        return form_of(declared.value_type)
    if types.is_integer(declared):
        return _integer_of(declared.bit_width, unsigned=types.is_unsigned_integer(declared))
    if types.is_decimal(declared):
        return _decimal_of(declared.precision, declared.scale)
    if types.is_timestamp(declared):
        form = _moment if declared.tz is not None else _local
        return _in_units(lambda value: form(_of(datetime.datetime, value)), declared.unit)
    if types.is_duration(declared):
        return _in_units(lambda value: _of(datetime.timedelta, value), declared.unit)
    if types.is_time(declared):
        return _in_units(_time, declared.unit)
    for kind, form in _FORMS:
        if kind(declared):
            return form
    return _same


class RowForm:
    """Converts rows of these fields to canonical form. ``fields`` None: the values have no declared
    types."""

    def __init__(self, fields: Fields | None) -> None:
        self._columns = [(name, form_of(fields.type_of(name))) for name in fields] if fields is not None else None

    def __call__(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the row in canonical form. Raises ``ValueError`` when the number of values is
        wrong, or, with the name of the column, when a value does not fit."""
        if self._columns is None:
            return tuple([_untyped(value) for value in values])
        if len(values) != len(self._columns):
            raise ValueError(f"{len(values)} values for {len(self._columns)} columns")
        try:
            return tuple(
                [None if each is None else form(each) for (_, form), each in zip(self._columns, values, strict=True)]
            )
        except _UNFIT:
            return self._one_by_one(values, self._columns)

    @staticmethod
    def _one_by_one(values: tuple[Any, ...], columns: Sequence[tuple[str, Form]]) -> tuple[Any, ...]:
        made = []
        for (name, form), value in zip(columns, values, strict=True):
            try:
                made.append(None if value is None else form(value))
            except _UNFIT as error:
                raise ValueError(f"{name!r}: {error}") from error
        return tuple(made)


def _same(value: Any) -> Any:
    return value


def _untyped(value: Any) -> Any:
    if isinstance(value, float):
        return _float(value)
    return _moment(value) if isinstance(value, datetime.datetime) and value.tzinfo is not None else value


def _float(value: Any) -> Any:
    if type(value) is not float:
        made = float(value)
        if made != value and made == made:
            raise ValueError(f"{value!r} is not exactly a float")
        value = made
    return value + 0.0 if value == value else NAN


def _integer_of(bits: int, *, unsigned: bool) -> Form:
    least, most = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    def form(value: Any) -> Any:
        made = value if type(value) is int else int(value)
        if made != value:
            raise ValueError(f"{value!r} is not an integer")
        if not least <= made <= most:
            raise ValueError(f"{value!r} is beyond {bits} bits{' without a sign' if unsigned else ''}")
        return made

    return form


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _text(value: Any) -> Any:
    return value if type(value) is str else str(_of(str, value))


def _bytes(value: Any) -> Any:
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else _of(bytes, value)


def _boolean(value: Any) -> Any:
    if value != 0 and value != 1:
        raise ValueError(f"{value!r} is neither true nor false")
    return bool(value)


def _date(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        raise TypeError(f"{value!r} is a moment, not a date")
    return _of(datetime.date, value)


def _time(value: Any) -> Any:
    if _of(datetime.time, value).tzinfo is not None:
        raise TypeError(f"{value!r} has a zone, and its column has none")
    return value


def _in_units(form: Form, unit: str) -> Form:
    """Wrap ``form`` so that it refuses a value finer than ``unit``. Python's own timestamps are
    limited to microseconds."""
    whole = {"s": 10**6, "ms": 1_000}.get(unit, 1)
    if whole == 1:
        return form

    def in_units(value: Any) -> Any:
        made = form(value)
        if (made.microseconds if isinstance(made, datetime.timedelta) else made.microsecond) % whole:
            raise ValueError(f"{value!r} is finer than {unit}")
        return made

    return in_units


_FORMS = (
    (pa.types.is_string, _text),
    (pa.types.is_large_string, _text),
    (pa.types.is_binary, _bytes),
    (pa.types.is_large_binary, _bytes),
    (pa.types.is_boolean, _boolean),
    (pa.types.is_date, _date),
)


def _decimal_of(precision: int, scale: int) -> Form:
    exact = decimal.Context(prec=precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    unit = decimal.Decimal(1).scaleb(-scale)

    def form(value: Any) -> Any:
        if not isinstance(value, (decimal.Decimal, int)):
            raise TypeError(f"{value!r} is no decimal")
        try:
            made = exact.quantize(decimal.Decimal(value), unit)
        except decimal.DecimalException:
            made = None
        if made is None or not made.is_finite():
            raise ValueError(f"{value!r} is not exactly a number of {precision} digits, {scale} of them decimals")
        return made if made else made.copy_abs()

    return form


def _moment(value: Any) -> Any:
    if not isinstance(value, datetime.datetime):
        return value
    return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value.astimezone(datetime.UTC)


def _local(value: Any) -> Any:
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        return value
    return value.astimezone(datetime.UTC).replace(tzinfo=None)
