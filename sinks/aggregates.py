"""Aggregates: how a column of many rows becomes one value, in parts that merge in any grouping.

Each aggregate is a monoid with null as its neutral element: ``merge(merge(a, b), c)`` equals
``merge(a, merge(b, c))``, and merging a value with null gives the value. So the same aggregate
folds record batches before a shuffle, folds their partial results after it, and adds the outcome to
a row in a store.

An aggregate may need several columns: ``Mean`` keeps a sum and a count in addition to the quotient.
Such an aggregate is ``expanded`` into one aggregate per column. Some columns are *derived* from
others.
"""

from __future__ import annotations

import decimal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import pyarrow as pa

from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology.fields import Fields, FieldType

#: Log2 of the number of registers. 4096 registers give a relative standard error of
#: 1.04 / sqrt(4096), 1.6 %.
SKETCH_LG_K = 12
#: Represents an empty text, because a sketch ignores empty texts. Its bytes are eight times 255,
#: which no text contains.
_EMPTY = -1
#: Decimals have at most 76 digits; Python's own context rounds to 28.
EXACT = decimal.Context(prec=100, traps=[decimal.Inexact, decimal.InvalidOperation])


@dataclass(frozen=True)
class Aggregate(ABC):
    """One aggregated column. ``field`` is the input field, or None to count the rows themselves."""

    field: str | None = None

    #: Arrow's group-by functions: over input rows, and over partial results. "list": Arrow collects
    #: the values and ``fold`` combines them.
    partial_function = ""
    merge_function = ""
    #: How stores merge: "add", "min", "max", "first", "last" or "ratio". "": only ``merge`` can.
    merge_rule = ""
    #: The columns that this one is computed from. They are merged; this one is not.
    derived_from: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        """The type of the result. Raises ``TopologyError`` for an unsuitable input type."""

    def expanded(self, name: str) -> Mapping[str, Aggregate]:
        """The columns that this aggregate needs under ``name``, each with its own aggregate.
        ``name`` comes first."""
        return {name: self}

    def merge(self, old: Any, new: Any) -> Any:
        """Merge two partial results; None is neutral."""
        if old is None or new is None:
            return new if old is None else old
        return self._merge(old, new)

    @abstractmethod
    def _merge(self, old: Any, new: Any) -> Any: ...

    def fold(self, values: Sequence[Any], *, partial: bool) -> Any:
        """Combine input values, or partial results (``partial``), if Arrow has no function."""
        present = [value for value in values if value is not None]
        return reduce(self._merge, present) if present else None

    def derive(self, values: Sequence[Any]) -> Any:
        """Compute the value from the values of the columns ``derived_from``."""
        raise NotImplementedError


def expanded_aggregates(
    committer: str, aggregates: Mapping[str, Aggregate], taken: Collection[str]
) -> dict[str, Aggregate]:
    """The columns that a committer keeps for its aggregates. ``taken``: its other columns. Raises
    ``TopologyError`` if there is no aggregate, or if a column exists already."""
    if not aggregates:
        raise TopologyError(f'{committer} needs at least one aggregate, such as {{"count": Count()}}')
    found: dict[str, Aggregate] = {}
    for name, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise TopologyError(
                f"aggregate {name!r} is a {type(aggregate).__name__}: give Count(), Sum(...) or another of sinks"
            )
        for column, part in aggregate.expanded(name).items():
            if column in found or column in taken:
                raise TopologyError(
                    f"aggregate {name!r} needs a column {column!r}, and there is one already: rename the aggregate"
                )
            found[column] = part
    return found


def input_fields(aggregates: Mapping[str, Aggregate]) -> list[str]:
    """The fields that aggregates read."""
    return [each.field for each in aggregates.values() if each.field is not None]


def output_types(aggregates: Mapping[str, Aggregate], fields: Fields) -> dict[str, pa.DataType]:
    """The type of each aggregate over these fields. Raises ``TopologyError`` for an unsuitable
    field."""
    return {
        name: each.output_type(fields.type_of(each.field) if each.field is not None else None)
        for name, each in aggregates.items()
    }


def row_merger(aggregates: Mapping[str, Aggregate]) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]:
    """A function that merges two rows of partial results column by column, and then computes the
    derived columns."""
    merges = [each.merge for each in aggregates.values()]
    if not any(each.derived_from for each in aggregates.values()):
        return lambda old, new: tuple([merge(was, now) for merge, was, now in zip(merges, old, new, strict=True)])
    folded = row_folder(aggregates)
    return lambda old, new: folded((old, new))


def row_folder(aggregates: Mapping[str, Aggregate]) -> Callable[[Sequence[Sequence[Any]]], tuple[Any, ...]]:
    """A function that merges one or more rows of partial results, in their order, as
    ``row_merger``. Merging them two at a time would copy lists and texts that grow once per row."""

    def folded(rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        row = {
            name: None if each.derived_from else each.fold(values, partial=True)
            for (name, each), values in zip(aggregates.items(), zip(*rows, strict=True), strict=True)
        }
        for name, each in aggregates.items():
            if each.derived_from:
                row[name] = each.derive([row[part] for part in each.derived_from])
        return tuple(row.values())

    return folded


def aggregate_settings(aggregates: Mapping[str, Aggregate]) -> Mapping[str, str]:
    """The kind of each aggregate, as settings of the state that holds its values."""
    return {f"aggregate {name}": type(each).__name__ for name, each in aggregates.items()}


@dataclass(frozen=True)
class Count(Aggregate):
    """The number of rows. With a field: the number of rows in which the field is not null."""

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
    """The sum of the values that are not null; null when there are none.

    Integers and decimals are exact: a sum beyond 64 bits, or beyond 38 digits, is an error, not a
    wrong number. The last digits of a sum of floats depend on the order of addition."""

    partial_function = "sum"
    merge_function = "sum"
    merge_rule = "add"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        if input_type is not None and (pa.types.is_integer(input_type) or pa.types.is_boolean(input_type)):
            return pa.int64()
        if input_type is not None and pa.types.is_floating(input_type):
            return pa.float64()
        if input_type is not None and pa.types.is_decimal(input_type):
            return pa.decimal128(38, input_type.scale)
        raise TopologyError(f"{type(self).__name__}({self.field!r}) needs a number, and the field is {input_type}")

    def _merge(self, old: Any, new: Any) -> Any:
        return EXACT.add(old, new) if isinstance(old, decimal.Decimal) else old + new


@dataclass(frozen=True)
class Min(Aggregate):
    """The least value that is not null. Text is compared by code points. NaN is above all
    numbers."""

    partial_function = "min"
    merge_function = "min"
    merge_rule = "min"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return _orderable(self, input_type)

    def _merge(self, old: Any, new: Any) -> Any:
        return new if new <= old or old != old else old


@dataclass(frozen=True)
class Max(Aggregate):
    """The greatest value that is not null. Text is compared by code points. NaN is above all
    numbers."""

    partial_function = "max"
    merge_function = "max"
    merge_rule = "max"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return _orderable(self, input_type)

    def _merge(self, old: Any, new: Any) -> Any:
        return old if new <= old or old != old else new


@dataclass(frozen=True)
class First(Aggregate):
    """The first value that is not null, in the order of arrival. Within a partition this is the
    order of the offsets. The order between partitions is undefined."""

    partial_function = "first"
    merge_function = "first"
    merge_rule = "first"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return typed(self, input_type)

    def _merge(self, old: Any, new: Any) -> Any:
        return old


@dataclass(frozen=True)
class Last(Aggregate):
    """The last value that is not null, in the order of arrival. Within a partition this is the
    order of the offsets. The order between partitions is undefined."""

    partial_function = "last"
    merge_function = "last"
    merge_rule = "last"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return typed(self, input_type)

    def _merge(self, old: Any, new: Any) -> Any:
        return new


@dataclass(frozen=True)
class Derived(Aggregate):
    """A column that is computed from other columns, ``parts``. Those are merged; this one is
    not."""

    parts: tuple[str, ...] = ()

    @property
    def derived_from(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.parts

    def _merge(self, old: Any, new: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Ratio(Derived):
    """One column divided by another; null if the divisor is 0 or null, or the dividend is null."""

    merge_rule = "ratio"

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return pa.float64()

    def derive(self, values: Sequence[Any]) -> Any:
        total, count = values
        return float(total) / count + 0.0 if count and total is not None else None


@dataclass(frozen=True)
class Mean(Sum):
    """The mean of the values that are not null, a float.

    Columns: ``<name>``, ``<name>_sum`` and ``<name>_count``. The mean is the quotient of the other
    two. Only the sum and the count are merged, so nothing is lost to rounding."""

    def expanded(self, name: str) -> Mapping[str, Aggregate]:
        total, count = f"{name}_sum", f"{name}_count"
        return {name: Ratio(None, (total, count)), total: Sum(self.field), count: Count(self.field)}


def results_column(where: str, name: str, values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    """Merged partial results as a column. ``where``: the beginning of the message. Raises
    ``BadRecordError`` for a result that its type does not hold, such as a sum beyond 64 bits."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise BadRecordError(f"{where}: {name!r} does not fit into {kind}: {error}") from error


@dataclass(frozen=True)
class Reduce(Aggregate):
    """Values that are not null, combined two at a time by your function:
    ``Reduce("tags", union, str)``.

    ``function(a, b)`` must be associative, because partial results are combined with each other. It
    must return the type that it takes: ``returns``, by default the type of the field.
    """

    function: Callable[[Any, Any], Any] | None = None
    returns: FieldType = None

    partial_function = "list"
    merge_function = "list"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TopologyError(f"Reduce({self.field!r}) needs a function of two values")

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        if self.returns is not None:
            return Fields.of({"returned": self.returns}).type_of("returned")
        return typed(self, input_type)

    def fold(self, values: Sequence[Any], *, partial: bool) -> Any:
        """Combine neighbours, then neighbouring results, and so on. So growing results, such as
        joined texts, are copied once per level, and not once per value."""
        present = [value for value in values if value is not None]
        while len(present) > 1:
            pairs = zip(present[::2], present[1::2], strict=False)
            present = [*(self._merge(*pair) for pair in pairs), *present[len(present) // 2 * 2 :]]
        return present[0] if present else None

    def _merge(self, old: Any, new: Any) -> Any:
        if self.function is None:
            raise TopologyError(f"Reduce({self.field!r}) needs a function of two values")
        return self.function(old, new)


@dataclass(frozen=True)
class Estimate(Derived):
    """The number of distinct values that a sketch has seen."""

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return pa.int64()

    def derive(self, values: Sequence[Any]) -> Any:
        return round(_sketches().hll_sketch.deserialize(values[0]).get_estimate()) if values[0] is not None else 0


class Folded(Aggregate):
    """An aggregate for which Arrow has no function: it combines all values at once."""

    partial_function = "list"
    merge_function = "list"

    def _merge(self, old: Any, new: Any) -> Any:
        return self.fold([old, new], partial=True)

    def fold(self, values: Sequence[Any], *, partial: bool) -> Any:
        present = [value for value in values if value is not None]
        return self._combined(present, partial=partial) if present else None

    @abstractmethod
    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        """As ``fold``, for one value or more, none of them null."""


@dataclass(frozen=True)
class Sketch(Folded):
    """A HyperLogLog sketch of Apache DataSketches, in its standard format, which other programs
    can read."""

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return pa.binary()

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        sketches = _sketches()
        if partial:
            union = sketches.hll_union(SKETCH_LG_K)
            for each in present:
                union.update(sketches.hll_sketch.deserialize(each))
            merged: bytes = union.get_result(sketches.tgt_hll_type.HLL_8).serialize_compact()
            return merged
        sketch = sketches.hll_sketch(SKETCH_LG_K, sketches.tgt_hll_type.HLL_8)
        for each in present:
            sketch.update(_EMPTY if each == "" else each if isinstance(each, (str, int, float)) else str(each))
        made: bytes = sketch.serialize_compact()
        return made


@dataclass(frozen=True)
class ApproxDistinct(Aggregate):
    """An estimate of the number of different values, without nulls: exact for a few values, within
    1.6 % (one standard error) for many.

    Columns: ``<name>``, and ``<name>_sketch``, the HyperLogLog sketch that is merged, at most
    4 KiB. Needs the extra ``sketches``."""

    def __post_init__(self) -> None:
        if self.field is None:
            raise TopologyError("ApproxDistinct needs a field")
        _sketches()

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        return pa.int64()

    def expanded(self, name: str) -> Mapping[str, Aggregate]:
        sketch = f"{name}_sketch"
        return {name: Estimate(None, (sketch,)), sketch: Sketch(self.field)}

    def _merge(self, old: Any, new: Any) -> Any:
        raise NotImplementedError


def _sketches() -> Any:
    try:
        import datasketches  # imported only on use: it is an optional extra
    except ImportError as error:
        raise ConfigError(
            "ApproxDistinct needs the package datasketches: pip install 'ratchet-pipelines[sketches]'"
        ) from error
    return datasketches


def typed(aggregate: Aggregate, input_type: pa.DataType | None) -> pa.DataType:
    if input_type is None:
        raise TopologyError(f"{type(aggregate).__name__}({aggregate.field!r}) needs a field with a declared type")
    return input_type


def _orderable(aggregate: Aggregate, input_type: pa.DataType | None) -> pa.DataType:
    declared = typed(aggregate, input_type)
    if pa.types.is_integer(declared):
        return pa.int64()
    if pa.types.is_floating(declared):
        return pa.float64()
    ordered = (pa.types.is_string, pa.types.is_temporal, pa.types.is_binary, pa.types.is_decimal)
    if any(kind(declared) for kind in ordered):
        return declared
    raise TopologyError(f"{type(aggregate).__name__}({aggregate.field!r}) cannot order {declared}")
