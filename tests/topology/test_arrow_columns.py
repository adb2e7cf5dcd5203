"""Values that components emit are kept exactly, or are errors."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest

from framework.topology.arrow_columns import cast_column, column_of

MOMENT = datetime.datetime(2024, 1, 1, 12, 0, 0, 123_456)
IN_UTC = MOMENT.replace(tzinfo=datetime.UTC)
FINE = pandas.Timestamp("2024-01-01T00:00:00.123456789")
Q = decimal.Decimal

CUT: list[tuple[Any, pa.DataType]] = [
    (1.5, pa.int64()),
    (Q("1.5"), pa.int32()),
    (np.float64(2.5), pa.uint8()),
    (MOMENT, pa.timestamp("ms")),
    (IN_UTC, pa.timestamp("s", "UTC")),
    (FINE, pa.timestamp("us")),
    (1.5, pa.timestamp("s")),
    (MOMENT, pa.date32()),
    (MOMENT, pa.date64()),
    (MOMENT.time(), pa.time32("ms")),
    (MOMENT.time().replace(tzinfo=datetime.UTC), pa.time64("us")),
    (datetime.timedelta(microseconds=1_500), pa.duration("ms")),
    (pandas.Timedelta(1, "ns"), pa.duration("us")),
    (1e300, pa.float32()),
    (1e300, pa.float16()),
    ([1.5], pa.list_(pa.int64())),
    ({"a": [1, 1.5]}, pa.struct([("a", pa.list_(pa.int64()))])),
    ({"a": 1.5}, pa.map_(pa.string(), pa.int64())),
    ([1e300], pa.list_(pa.float32())),
    ([("a", 1.5)], pa.struct([("a", pa.int64())])),
    (("x", 1.5), pa.struct([("a", pa.string()), ("b", pa.int64())])),
    ([1.5, 2], pa.list_(pa.int64(), 2)),
    (1.5, pa.dictionary(pa.int32(), pa.int64())),
]

KEPT: list[tuple[Any, pa.DataType]] = [
    (1.0, pa.int64()),
    (Q("2.0"), pa.int64()),
    (np.int64(3), pa.int64()),
    (MOMENT.replace(microsecond=123_000), pa.timestamp("ms")),
    (MOMENT, pa.timestamp("us")),
    (IN_UTC, pa.timestamp("us", "UTC")),
    (MOMENT.date(), pa.date32()),
    (MOMENT.time(), pa.time64("us")),
    (datetime.timedelta(milliseconds=1_500), pa.duration("ms")),
    (float("inf"), pa.float32()),
    ([1, None], pa.list_(pa.int64())),
    ({"a": 1}, pa.struct([("a", pa.int64())])),
]


@pytest.mark.parametrize(("value", "declared"), CUT, ids=str)
@pytest.mark.parametrize("among", [1, 1_000])
def test_a_value_that_would_be_cut_off_is_an_error(value: Any, declared: pa.DataType, among: int) -> None:
    with pytest.raises(ValueError, match="is not exactly a value of"):
        column_of([None] * (among - 1) + [value], declared)


@pytest.mark.parametrize(("value", "declared"), KEPT, ids=str)
def test_a_value_of_its_type_is_kept(value: Any, declared: pa.DataType) -> None:
    assert column_of([value, None], declared).to_pylist() == [value, None]


def test_nanoseconds_are_kept_where_the_type_has_them() -> None:
    assert column_of([FINE], pa.timestamp("ns")).view(pa.int64()).to_pylist() == [FINE.value]


@pytest.mark.parametrize(
    "values",
    [
        ["a", b"b"],
        [b"b", "a"],
        [1.0, True],
        [MOMENT.date(), MOMENT],
        [MOMENT, IN_UTC],
        [IN_UTC, MOMENT],
    ],
    ids=str,
)
def test_an_untyped_column_takes_values_of_one_kind(values: list[Any]) -> None:
    """A value would depend on the others in its batch otherwise."""
    with pytest.raises(ValueError, match="values of several kinds"):
        column_of(values, None)


@pytest.mark.parametrize("values", [[1, 2.5], [Q("1.5"), 1], [np.float32(0.5), 1.5], [None, "a", "b"], [IN_UTC, None]])
def test_numbers_are_one_kind(values: list[Any]) -> None:
    assert column_of(values, None).to_pylist() == values


def test_an_untyped_moment_keeps_its_nanoseconds_or_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not exactly a value of"):
        column_of([FINE], None)


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        (pa.array([MOMENT]), pa.date32()),
        (pa.array([MOMENT]), pa.time64("us")),
        (pa.array([0.123]), pa.decimal128(10, 2)),
        (pa.array([2]), pa.bool_()),
        (pa.array([0.5]), pa.bool_()),
        (pa.array([1e300]), pa.float32()),
        (pa.array([70_000.0], pa.float32()), pa.float16()),
        (pa.array([1.5]), pa.int64()),
        (pa.array([MOMENT]), pa.timestamp("ms")),
        (pa.array([[MOMENT]]), pa.list_(pa.date32())),
        (pa.array([{"a": 2}]), pa.struct([("a", pa.bool_())])),
    ],
    ids=str,
)
def test_a_cast_that_would_cut_a_value_off_is_an_error(column: pa.Array, declared: pa.DataType) -> None:
    with pytest.raises(ValueError):
        cast_column(column, declared)


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        (pa.array([MOMENT.replace(hour=0, microsecond=0), None]), pa.date32()),
        (pa.array([0.1, None]), pa.decimal128(10, 2)),
        (pa.array([0, 1, None]), pa.bool_()),
        (pa.array([0.1, float("inf"), float("nan"), None]), pa.float32()),
        (pa.array([Q("0.1"), None]), pa.float64()),
        (pa.array([[0, 1], None]), pa.list_(pa.bool_())),
    ],
    ids=str,
)
def test_whole_values_are_cast(column: pa.Array, declared: pa.DataType) -> None:
    assert cast_column(column, declared).equals(column.cast(declared)) or pa.types.is_floating(declared)
