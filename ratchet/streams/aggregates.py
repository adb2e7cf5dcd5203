"""Aggregates for ``group_by(...).agg(...)``. ``field``: a column, or an expression of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from framework.topology.fields import FieldType
from framework.user_call_argument_checks import checks_call
from sinks import (
    Aggregate,
    ApproxDistinct,
    Collect,
    Count,
    First,
    Last,
    Max,
    Mean,
    Min,
    Quantile,
    Reduce,
    Sum,
    Top,
)
from sinks.collect_aggregate import LIST_BYTES_MAX

Field = str | pl.Expr


@checks_call
def count(field: Field | None = None) -> Aggregate:
    """The number of rows; with a field, of those where it is not null."""
    return Count(field)  # type: ignore[arg-type] # an expression becomes the column of its values


@checks_call
def sum_(field: Field) -> Aggregate:
    """The sum."""
    return Sum(field)  # type: ignore[arg-type]


@checks_call
def min_(field: Field) -> Aggregate:
    """The least value."""
    return Min(field)  # type: ignore[arg-type]


@checks_call
def max_(field: Field) -> Aggregate:
    """The greatest value."""
    return Max(field)  # type: ignore[arg-type]


@checks_call
def mean(field: Field) -> Aggregate:
    """The mean. Its sum and count are in two more columns."""
    return Mean(field)  # type: ignore[arg-type]


@checks_call
def first(field: Field) -> Aggregate:
    """The first value that is not null, in the order of arrival."""
    return First(field)  # type: ignore[arg-type]


@checks_call
def last(field: Field) -> Aggregate:
    """The last value that is not null, in the order of arrival."""
    return Last(field)  # type: ignore[arg-type]


@checks_call
def count_distinct(field: Field) -> Aggregate:
    """About how many different values there are: exact for a few, within 1.6 % for many. Needs the
    extra ``sketches``."""
    return ApproxDistinct(field)  # type: ignore[arg-type]


@checks_call
def quantile(field: Field, share: float) -> Aggregate:
    """The value below which ``share`` of the values lie, within 1 % of itself:
    ``quantile("ms", 0.99)``."""
    return Quantile(field, share)  # type: ignore[arg-type]


@checks_call
def collect(field: Field, *, most: int = 1_000, bytes_max: int = LIST_BYTES_MAX) -> Aggregate:
    """The first ``most`` values that are not null, in the order of arrival: JSON of a list. The
    value by which the list reaches ``bytes_max`` (1 MiB) is the last."""
    return Collect(field, most, bytes_max)  # type: ignore[arg-type]


@checks_call
def top(field: Field, most: int = 10, *, bytes_max: int = LIST_BYTES_MAX) -> Aggregate:
    """The ``most`` greatest values, the greatest first: JSON of a list. Nulls and NaN are left out.
    The value by which the list reaches ``bytes_max`` (1 MiB) is the last."""
    return Top(field, most, bytes_max)  # type: ignore[arg-type]


@checks_call
def reduce(field: Field, function: Callable[[Any, Any], Any], *, returns: FieldType = None) -> Aggregate:
    """Values combined two at a time by an associative function of yours."""
    return Reduce(field, function, returns)  # type: ignore[arg-type]
