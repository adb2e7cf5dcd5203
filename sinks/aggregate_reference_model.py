"""Recomputes the aggregates of a ``StateCommitter`` for ``verify``, by independent arithmetic.

Arrow folds nothing here. Rows are grouped by a dictionary, and added as integers and fractions,
which are exact. Only the result is rounded, once. So a recount can detect errors in the sinks.
Functions from elsewhere are called again: those of ``Reduce``, and the sketches of
``ApproxDistinct``.

A scratch table keeps the *tallies* of each key, one per column, from batch to batch.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError
from framework.topology import (
    ArrowBolt,
    Committer,
    Fields,
    OutputCollector,
    OutputFieldsDeclarer,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.canonical_form import RowForm, canonical_column, python_values
from framework.topology.refused_row_bisection import OnRefused
from sinks.aggregates import Aggregate, Count, Estimate, First, Last, Max, Min, Ratio, Sketch, Sum
from sinks.backend import Key, Row, Value
from sinks.expected_values import Expected
from sinks.sql.sqlite_backend import SqliteBackend
from sinks.states import OpaqueMapState

#: Two sums of the same floats, up to millions of them, added in different orders, differ by less
#: than this share of the sum of their magnitudes.
FLOAT_SHARE = Fraction(1, 10**9)
#: Two sketches of the same values may differ in their estimates by this share: six standard errors.
ESTIMATE_SHARE = Fraction(1, 10)


class Column(ABC):
    """One aggregated column. The tally of a key is plain data; None: no value yet."""

    @abstractmethod
    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        """The tally after adding the values of more rows, in their order. ``values`` may contain
        None. A column without a field gets one None per row."""

    @abstractmethod
    def value(self, tally: Any) -> Any:
        """The expected value in a sink for this tally."""

    def agrees(self, tally: Any, found: Any) -> bool:
        expected = self.value(tally)
        return bool(found == expected) or (found != found and expected != expected)


@dataclass(frozen=True)
class _Counted(Column):
    every_row: bool

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        return (tally or 0) + (len(values) if self.every_row else sum(value is not None for value in values))

    def value(self, tally: Any) -> Any:
        return tally or 0


@dataclass(frozen=True)
class _Total(Column):
    """The sum of integers (``scale`` None) or of decimals."""

    scale: int | None

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        present = [value for value in values if value is not None]
        if not present:
            return tally
        return (tally or 0) + (sum(present) if self.scale is None else sum(map(Fraction, present)))

    def value(self, tally: Any) -> Any:
        if tally is None or self.scale is None:
            return tally
        digits = tally * Fraction(10) ** self.scale
        return Decimal((int(digits < 0), tuple(map(int, str(abs(digits.numerator)))), -self.scale))


class FloatTally(NamedTuple):
    """``total``: the exact sum of the finite values. ``size``: the sum of their magnitudes.
    ``beyond``: the sum of the infinite and NaN values; None if there are none."""

    total: Fraction
    size: Fraction
    beyond: float | None


class _FloatTotal(Column):
    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        present = [value for value in values if value is not None]
        if not present:
            return tally
        total, size, beyond = tally or FloatTally(Fraction(0), Fraction(0), None)
        for value in present:
            if value - value == 0:
                exact = Fraction(value)
                total, size = total + exact, size + abs(exact)
            else:
                beyond = value if beyond is None else beyond + value
        return FloatTally(total, size, beyond)

    def value(self, tally: Any) -> Any:
        return None if tally is None else tally.beyond if tally.beyond is not None else _rounded(tally.total)

    def agrees(self, tally: Any, found: Any) -> bool:
        if tally is None or tally.beyond is not None or not isinstance(found, float):
            return super().agrees(tally, found)
        return _near(found, tally.total, tally.size * FLOAT_SHARE)


@dataclass(frozen=True)
class _Extreme(Column):
    greatest: bool

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        for value in values:
            if value is not None and (tally is None or self._above(value, tally) == self.greatest):
                tally = value
        return tally

    @staticmethod
    def _above(one: Any, other: Any) -> bool:
        if one != one or other != other:  # NaN is above all numbers
            return bool(one != one)
        return bool(one > other)

    def value(self, tally: Any) -> Any:
        return tally


@dataclass(frozen=True)
class _Ordered(Column):
    last: bool

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        present = [value for value in values if value is not None]
        if not present or (tally is not None and not self.last):
            return tally
        return present[-1 if self.last else 0]

    def value(self, tally: Any) -> Any:
        return tally


@dataclass(frozen=True)
class _Own(Column):
    """Recounted by the aggregate itself. For a sketch, only its existence is compared."""

    aggregate: Aggregate

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        return self.aggregate.merge(tally, self.aggregate.fold(values, partial=False))

    def value(self, tally: Any) -> Any:
        return tally

    def agrees(self, tally: Any, found: Any) -> bool:
        if isinstance(self.aggregate, Sketch):  # the bytes depend on the order; the estimate is compared
            return (tally is None) == (found is None)
        if isinstance(tally, float) and isinstance(found, float) and tally - tally == 0:
            return _near(found, Fraction(tally), abs(Fraction(tally)) * FLOAT_SHARE)
        return super().agrees(tally, found)


class _Quotient(Column):
    """The quotient of a total and a count. Its tally is the tallies of these two."""

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        return None

    def value(self, tally: Any) -> Any:
        total, count = tally
        if not count or total is None:
            return None
        if isinstance(total, FloatTally):
            return total.beyond if total.beyond is not None else _rounded(total.total / count)
        return _rounded(Fraction(total) / count)

    def agrees(self, tally: Any, found: Any) -> bool:
        total, count = tally
        if not count or total is None or not isinstance(found, float):
            return super().agrees(tally, found)
        if isinstance(total, FloatTally):
            if total.beyond is not None:
                return super().agrees(tally, found)
            return _near(found, total.total / count, total.size / count * FLOAT_SHARE)
        exact = Fraction(total) / count
        return _near(found, exact, abs(exact) * FLOAT_SHARE)


@dataclass(frozen=True)
class _Estimated(Column):
    aggregate: Aggregate

    def add(self, tally: Any, values: Sequence[Any]) -> Any:
        return None

    def value(self, tally: Any) -> Any:
        return self.aggregate.derive(tally)

    def agrees(self, tally: Any, found: Any) -> bool:
        expected = self.value(tally)
        return isinstance(found, int) and abs(found - expected) <= ESTIMATE_SHARE * max(found, expected)


def _near(found: float, exact: Fraction, slack: Fraction) -> bool:
    """Whether a float differs from ``exact`` by at most ``slack``, plus 1e-300 because the smallest
    floats have fewer digits."""
    return found - found == 0 and abs(Fraction(found) - exact) <= slack + Fraction(1, 10**300)


def _rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def column_of(aggregate: Aggregate, declared: pa.DataType) -> Column:
    """The recount of an aggregate whose result has the type ``declared``."""
    if isinstance(aggregate, Count):
        return _Counted(aggregate.field is None)
    if isinstance(aggregate, Sum):
        if pa.types.is_floating(declared):
            return _FloatTotal()
        return _Total(declared.scale if pa.types.is_decimal(declared) else None)
    if isinstance(aggregate, (Min, Max)):
        return _Extreme(isinstance(aggregate, Max))
    if isinstance(aggregate, (First, Last)):
        return _Ordered(isinstance(aggregate, Last))
    if isinstance(aggregate, Ratio):
        return _Quotient()
    return _Estimated(aggregate) if isinstance(aggregate, Estimate) else _Own(aggregate)


@dataclass(frozen=True)
class Columns:
    """All columns of a state. A derived column takes the tallies of the columns it derives from."""

    aggregates: Mapping[str, Aggregate]
    value_fields: Fields

    def __post_init__(self) -> None:
        made = {name: column_of(each, self.value_fields.type_of(name)) for name, each in self.aggregates.items()}
        object.__setattr__(self, "by_name", made)

    by_name: Mapping[str, Column] = ()  # type: ignore[assignment]

    def add(self, tallies: Mapping[str, Any], rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """``rows``: for each column, the values of its field."""
        return {name: column.add(tallies.get(name), rows[name]) for name, column in self.by_name.items()}

    def taken(self, name: str, tallies: Mapping[str, Any]) -> Any:
        parts = self.aggregates[name].derived_from
        return [tallies[part] for part in parts] if parts else tallies[name]

    def values(self, tallies: Mapping[str, Any]) -> Value:
        return tuple(column.value(self.taken(name, tallies)) for name, column in self.by_name.items())

    def agrees(self, tallies: Mapping[str, Any], found: Value) -> bool:
        return all(
            column.agrees(self.taken(name, tallies), value)
            for (name, column), value in zip(self.by_name.items(), found, strict=True)
        )


class _Recounted(Expected):
    """The expected row of a sink, from its tallies."""

    def __init__(self, columns: Columns, tallies: Mapping[str, Any]) -> None:
        self._columns, self._tallies = columns, tallies

    @property
    def value(self) -> Value:
        return self._columns.values(self._tallies)

    def agrees(self, found: Value) -> bool:
        return self._columns.agrees(self._tallies, found)


class RecountState(OpaqueMapState):
    """Tallies by key, in a scratch file. Keys are stored as text, so any type can be a key."""

    def __init__(self, folder: Path, key: Fields, columns: Columns) -> None:
        super().__init__(
            SqliteBackend(folder / "scratch.db", "scratch", Fields(name=str), Fields(key=bytes, row=bytes))
        )
        self.columns = columns
        self._key_form = RowForm(key)

    def name_of(self, key: Key) -> str:
        return repr(self._key_form(key))

    def tallies(self, keys: Sequence[Key]) -> list[dict[str, Any]]:
        """The tallies from which a commit starts; an empty dict for a new key."""
        return [pickle.loads(row[1]) if row is not None else {} for row in self.multi_get([*map(self.name_of, keys)])]

    def put_tallies(self, keys: Sequence[Key], tallies: Sequence[Mapping[str, Any]]) -> None:
        rows = [(pickle.dumps(key), pickle.dumps(each)) for key, each in zip(keys, tallies, strict=True)]
        self.multi_put([*map(self.name_of, keys)], rows)

    def expected_keys(self) -> Iterator[Key]:
        for _, row in self.backend.scan():
            if row.value is not None:
                yield self._key_form(pickle.loads(row.value[0]))

    def _row_of(self, key: Key) -> Row | None:
        return super()._row_of((self.name_of(key),))

    def expected(self, keys: Sequence[Key]) -> list[Expected | None]:
        rows = self.backend.multi_get([(self.name_of(key),) for key in keys])
        return [
            _Recounted(self.columns, pickle.loads(row.value[1])) if row is not None and row.value is not None else None
            for row in rows
        ]


class Recount(ArrowBolt, Committer):
    """Replaces a ``StateCommitter`` in the copy of a topology that ``verify`` runs. It has no
    combiner, so it gets every input row."""

    deterministic = True
    commits_on_driver = True
    takes_batches_whole = True

    def __init__(self, folder: Path, key: Sequence[str], aggregates: Mapping[str, Aggregate], output: Fields) -> None:
        self._key = tuple(key)
        self._aggregates = dict(aggregates)
        self._output = output
        columns = Columns(self._aggregates, output.select(list(self._aggregates)))
        self.state = RecountState(folder, output.select(self._key), columns)
        self._only: Key | None = None
        self._batches: list[pa.RecordBatch] = []
        self._collector: Any = None
        self._attempt: TransactionAttempt | None = None

    def narrow(self, key: Key) -> None:
        self._only = key

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self._output)

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._collector, self._attempt = collector, batch_id

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if self._only is not None:
            batch = self._narrowed(batch, self._only)
        if any(batch.column(name).null_count for name in self._key):
            raise BadRecordError("a key field is null")
        if batch.num_rows:
            self._batches.append(batch)

    def _narrowed(self, batch: pa.RecordBatch, key: Key) -> pa.RecordBatch:
        """The rows of that key."""
        found = None
        for name, value in zip(self._key, key, strict=True):
            column = canonical_column(pa.chunked_array([batch.column(name)]))
            same = pc.is_nan(column) if value != value else pc.equal(column, pa.scalar(value, column.type))
            found = same if found is None else pc.and_(found, same)
        return batch.filter(found.combine_chunks()) if found is not None else batch

    def finish_batch(self) -> Iterable[pa.RecordBatch]:
        groups = self._grouped()
        if not groups or self._attempt is None:
            return []
        keys = list(groups)
        self.state.begin_commit(self._attempt)
        tallies = [
            self.state.columns.add(before, groups[key])
            for key, before in zip(keys, self.state.tallies(keys), strict=True)
        ]
        if self._on_refused is not None:
            keys, tallies = self._accepted(keys, tallies, self._on_refused)
        self.state.put_tallies(keys, tallies)
        self.state.commit(self._attempt)
        subscribed = getattr(self._collector, "subscribed", None)
        return self._emitted(keys, tallies) if subscribed is None or subscribed() else []

    def _accepted(
        self, keys: Sequence[Key], tallies: Sequence[dict[str, Any]], on_refused: OnRefused
    ) -> tuple[list[Key], list[dict[str, Any]]]:
        """Without the keys with a value beyond its type, which keep their former values."""
        kept: list[tuple[Key, dict[str, Any]]] = []
        for each in zip(keys, tallies, strict=True):
            try:
                self._emitted(each[:1], each[1:])
            except (pa.ArrowException, ArithmeticError, ValueError) as error:
                on_refused(BadRecordError(f"key {each[0]!r}: {error}"))
            else:
                kept.append(each)
        return [key for key, _ in kept], [tally for _, tally in kept]

    def _grouped(self) -> dict[Key, dict[str, list[Any]]]:
        """For each key and column, the values of the column's field in the order of arrival."""
        groups: dict[Key, dict[str, list[Any]]] = {}
        form = RowForm(self._output.select(self._key))
        for batch in self._batches:
            nothing = [None] * batch.num_rows
            keys = zip(*(_values(batch, name) for name in self._key), strict=True)
            columns = [
                nothing if each.field is None else _values(batch, each.field) for each in self._aggregates.values()
            ]
            for key, *values in zip(keys, *columns, strict=True):
                group = groups.setdefault(form(key), {name: [] for name in self._aggregates})
                for held, value in zip(group.values(), values, strict=True):
                    held.append(value)
        return groups

    def _emitted(self, keys: Sequence[Key], tallies: Sequence[Mapping[str, Any]]) -> list[pa.RecordBatch]:
        rows = [(*key, *self.state.columns.values(each)) for key, each in zip(keys, tallies, strict=True)]
        columns = zip(*rows, strict=True)
        schema = pa.schema([(name, self._output.type_of(name)) for name in self._output])
        return [pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)]


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    return python_values(pa.chunked_array([batch.column(name)]))
