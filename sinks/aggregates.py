"""Aggregates: how a column of many rows becomes one value, in parts that can be merged in any grouping.

Each is a monoid with null as its neutral element: ``merge(merge(a, b), c)`` is ``merge(a, merge(b, c))`` and merging
with null gives the other. So the same aggregate folds record batches before a shuffle, folds their partial results after
it, and adds the outcome to a row in a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError


@dataclass(frozen=True)
class Aggregate(ABC):
    """One aggregated column. ``field`` is the input field, None where the rows themselves are counted."""

    field: str | None = None

    #: Arrow's group-by functions: over input rows, and over partial results.
    partial_function = ""
    merge_function = ""
    #: How stores merge, by name: "add", "min" or "max".
    merge_rule = ""

    @abstractmethod
    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        """The type of the result. Raises ``TopologyError`` for an input that cannot be aggregated this way."""

    def merge(self, old: Any, new: Any) -> Any:
        """Merge two partial results; None is neutral."""
        if old is None or new is None:
            return new if old is None else old
        return self._merge(old, new)

    @abstractmethod
    def _merge(self, old: Any, new: Any) -> Any: ...


@dataclass(frozen=True)
class Count(Aggregate):
    """The number of rows; with a field, of rows in which it is not null."""

    merge_function = "sum"
    merge_rule = "add"

    @property
    def partial_function(self) -> str:  # type: ignore[override]
        return "count_all" if self.field is None else "count"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return pa.int64()

    def _merge(self, old: Any, new: Any) -> Any:
        return old + new


@dataclass(frozen=True)
class Sum(Aggregate):
    """The sum of the values that are not null; null when there are none. Integers are exact: a sum beyond 64 bits is an
    error, not a wrong number. Sums of floats depend, in their last digits, on the order of addition."""

    partial_function = "sum"
    merge_function = "sum"
    merge_rule = "add"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        if input_type is not None and (pa.types.is_integer(input_type) or pa.types.is_boolean(input_type)):
            return pa.int64()
        if input_type is not None and pa.types.is_floating(input_type):
            return pa.float64()
        raise TopologyError(f"Sum({self.field!r}) needs a number, and the field is {input_type}")

    def _merge(self, old: Any, new: Any) -> Any:
        return old + new


@dataclass(frozen=True)
class Min(Aggregate):
    """The least value that is not null."""

    partial_function = "min"
    merge_function = "min"
    merge_rule = "min"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return _orderable(self, input_type)

    def _merge(self, old: Any, new: Any) -> Any:
        return min(old, new)


@dataclass(frozen=True)
class Max(Aggregate):
    """The greatest value that is not null."""

    partial_function = "max"
    merge_function = "max"
    merge_rule = "max"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return _orderable(self, input_type)

    def _merge(self, old: Any, new: Any) -> Any:
        return max(old, new)


def _orderable(aggregate: Aggregate, input_type: pa.DataType | None) -> pa.DataType:
    if input_type is None:
        raise TopologyError(f"{type(aggregate).__name__}({aggregate.field!r}) needs a field with a declared type")
    if pa.types.is_integer(input_type):
        return pa.int64()
    if pa.types.is_floating(input_type):
        return pa.float64()
    if pa.types.is_string(input_type) or pa.types.is_temporal(input_type) or pa.types.is_binary(input_type):
        return input_type
    raise TopologyError(f"{type(aggregate).__name__}({aggregate.field!r}) cannot order {input_type}")
