"""The ready-made committer: groups a batch by key, aggregates it with Arrow, and merges the result
into a state."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework.arrow_spill import RowBuffer
from framework.errors import BadRecordError, BatchTooLargeError, TopologyError
from framework.topology import (
    ArrowBolt,
    Bolt,
    Combiner,
    Committer,
    Fields,
    Input,
    OutputCollector,
    OutputFieldsDeclarer,
    TopologyContext,
    TransactionAttempt,
)
from framework.topology.canonical_form import canonical_column, form_of, has_nan, python_objects
from framework.topology.groupings import FieldsGrouping, GlobalGrouping
from framework.topology.inspectable import with_scratch_states
from framework.topology.refused_row_bisection import OnRefused, RefusedTogether, accepted
from sinks.aggregate_reference_model import Recount
from sinks.aggregates import (
    EXACT,
    Aggregate,
    aggregate_settings,
    expanded_aggregates,
    input_fields,
    output_types,
)
from sinks.key_hash_parts import KeyParts, halves_by_key
from sinks.states import MapState, checked_state

#: Rows to collect before grouping: grouping a few large tables is cheaper than many small ones.
GROUPED_AT_ROWS = 262_144
#: Rows with so many bytes are grouped even if they are few, because grouping needs several times as
#: much memory.
GROUPED_AT_BYTES = 32 << 20
_INT64_MAX = 2**63 - 1


def check_one_writer(component_id: str, source: Input, key: Sequence[str], parallelism: int) -> None:
    """Raise ``TopologyError`` unless all rows of a key go to one task (C12)."""
    grouping = source.grouping
    narrowed = isinstance(grouping, FieldsGrouping) and set(grouping.fields) <= set(key)
    if parallelism > 1 and not narrowed and not isinstance(grouping, GlobalGrouping):
        raise TopologyError(
            f"committer {component_id!r} has {parallelism} tasks, and {type(grouping).__name__} from "
            f"{source.component_id!r} can bring one key to several of them: use fields_grouping on a part of the key "
            f"({', '.join(key)}), global_grouping, or parallelism 1"
        )


def check_key_types(component_id: str, source: Input, key: Sequence[str]) -> None:
    """Raise ``TopologyError`` for a key field that an input lacks, or that has no type."""
    source.require(component_id, key)
    for name in key:
        if source.fields.type_of(name) is None:
            raise TopologyError(
                f"committer {component_id!r}: key field {name!r} of {source.component_id!r} has no type; declare it, "
                f"as in Fields({name}=str)"
            )


def check_no_null_key(component_id: str, key: Sequence[str], rows: pa.Table | pa.RecordBatch) -> None:
    """Raise ``BadRecordError`` for a null in a key column."""
    for name in key:
        if rows.column(name).null_count:
            raise BadRecordError(
                f"component {component_id!r}: key field {name!r} is null; a key cannot be null, so filter such "
                "tuples out upstream or give them a value"
            )


def finish_without_writes(committer: Any, attempt: TransactionAttempt) -> None:
    """Do what ``finish_batch`` of a committer of one state does, without its writes."""
    own, committer.state = committer.state, committer.state.trying(attempt)
    try:
        for _ in committer.finish_batch():
            pass
    finally:
        committer.state = own


class StateCommitter(ArrowBolt, Committer):
    """Keeps aggregates per key in a state.

    * ``key``: the input fields that form the key.
    * ``aggregates``: result column -> an ``Aggregate``, such as ``Count()`` or ``Sum("field")``.

    One key must have one writer (C12). So give the committer parallelism 1, or group its input
    globally, or by fields that are part of the key. Rows are folded before the shuffle, so that
    each sending task sends one row per key.

    In the commit phase each task merges its whole batch in one round trip, or if it is large, in
    parts with different keys. It emits each key with its new values.

    ::

        StateCommitter(OpaqueMapState(SqliteBackend("words.db", "word_counts")), key=["word"],
                       aggregates={"count": Count(), "amount": Sum("amount")})
    """

    deterministic = True
    commits_on_driver = True

    def __init__(self, state: MapState, key: Sequence[str], aggregates: Mapping[str, Aggregate]) -> None:
        if not key:
            raise TopologyError("StateCommitter needs at least one key field")
        expanded = expanded_aggregates("StateCommitter", aggregates, key)
        self.state = checked_state(type(self).__name__, state)
        self.key = tuple(key)
        self.aggregates = expanded
        self._component_id = ""
        self._output: Fields | None = None
        self._fold: Fold | None = None
        self._collector: Any = None
        self._attempt: TransactionAttempt | None = None

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._component_id = component_id
        outputs = {self._bound_to(component_id, each, parallelism) for each in inputs}
        if len(outputs) != 1:
            raise TopologyError(
                f"committer {component_id!r}: its inputs give the same fields different types; make them equal"
            )
        self._output = outputs.pop()
        self.state.bind(self._output.select(self.key), self._output.select(list(self.aggregates)))

    def _bound_to(self, component_id: str, source: Input, parallelism: int) -> Fields:
        """Check the fields, types and grouping of one input; return the output fields."""
        source.require(component_id, (*self.key, *input_fields(self.aggregates)))
        check_key_types(component_id, source, self.key)
        check_one_writer(component_id, source, self.key, parallelism)
        types = {name: source.fields.type_of(name) for name in self.key}
        return Fields.of({**types, **output_types(self.aggregates, source.fields)})

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._output is not None:
            declarer.declare(self._output)

    def state_settings(self) -> Mapping[str, Any]:
        return aggregate_settings(self.aggregates)

    def combiner(self) -> Combiner:
        return Fold(self._component_id, self.key, self.aggregates, self._schema(), partial_input=False)

    def recounting(self, folder: Path) -> Bolt:
        if type(self) is not StateCommitter:  # a subclass may do more, and verify must repeat that
            return with_scratch_states(self, folder)
        return Recount(folder, self.key, self.aggregates, Fields.of_schema(self._schema()))

    # --- in tasks ---------------------------------------------------------------------------------

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self._collector = collector
        self._attempt = batch_id
        self._fold = Fold(self._component_id, self.key, self.aggregates, self._schema(), partial_input=True)

    def leave_out_refused(self, on_refused: OnRefused) -> None:
        super().leave_out_refused(on_refused)
        self._prepared().leave_out_refused(on_refused)

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        """Takes the output of the combiners: one row per key and sender."""
        self._prepared().add(batch)

    def keep_for_commit(self) -> bytes | None:
        """The folded rows: a new copy of this committer needs nothing else."""
        if self._fold is None:  # in a subclass whose prepare keeps its rows elsewhere
            return None
        partials = self._fold.keep()
        for each in partials:
            self.state.check_rows(pa.Table.from_batches([each]))
        if type(self) is not StateCommitter:  # a subclass may have more data
            return None
        return pickle.dumps(partials, protocol=pickle.HIGHEST_PROTOCOL) if partials else b""

    #: The records of a key before a record decide whether its value still fits.
    tries_in_order = True

    def may_try_writes(self) -> bool:
        return type(self) is StateCommitter

    def try_writes(self, *, alone: bool) -> None:
        """Does nothing for a batch that waits in a file."""
        if self._attempt is not None and not self._prepared().is_large:
            finish_without_writes(self, self._attempt)

    def take_for_commit(self, kept: bytes) -> None:
        if kept:
            self._prepared().restore(pickle.loads(kept))

    def commits_in_one_step(self) -> bool:
        return type(self) is StateCommitter and self.state.commits_in_one_step

    def finish_batch(self) -> Iterable[pa.RecordBatch]:
        fold = self._prepared()
        attempt = self._attempt
        if fold.is_large and attempt is not None and attempt.fence is not None and not attempt.is_one_step:
            return self._commit_parts(fold, attempt)
        deltas = fold.finish()
        if attempt is None:
            return []
        if deltas is None:
            self.state.commit_unchanged(attempt)
            return []
        return self._accepted(attempt, deltas)

    def _commit_parts(self, fold: Fold, attempt: TransactionAttempt) -> Iterator[pa.RecordBatch]:
        """Commit in several steps of the store, each for other keys (ADR 124)."""
        for deltas in fold.finish_parts():
            for first in range(0, deltas.num_rows, GROUPED_AT_ROWS):
                yield from self._accepted(attempt, deltas.slice(first, GROUPED_AT_ROWS))

    def _accepted(self, attempt: TransactionAttempt, deltas: pa.RecordBatch) -> list[pa.RecordBatch]:
        made = accepted(deltas, partial(self._applied, attempt), self._on_refused)
        return list(chain.from_iterable(made))

    def _applied(self, attempt: TransactionAttempt, deltas: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Merge folded rows into the state. Returns the new values, if any bolt wants them."""
        subscribed = getattr(self._collector, "subscribed", None)
        want_values = subscribed() if subscribed is not None else True
        values = self.state.apply(attempt, pa.Table.from_batches([deltas]), self.aggregates, want_values=want_values)
        return values.combine_chunks().to_batches() if values is not None and want_values else []

    def _schema(self) -> pa.Schema:
        schema = self._output.schema() if self._output is not None else None
        if schema is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return schema

    def _prepared(self) -> Fold:
        if self._fold is None:
            raise TopologyError(f"committer {self._component_id!r} was used before prepare()")
        return self._fold


class Fold(Combiner):
    """Groups by key and aggregates, step by step: input rows to partial results, or partial results
    to fewer partial results."""

    def __init__(
        self,
        component_id: str,
        key: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        schema: pa.Schema,
        *,
        partial_input: bool,
    ) -> None:
        self._component_id = component_id
        self._key = key
        self._aggregates = aggregates
        self._schema = schema
        self._partial_input = partial_input
        self._rows: list[pa.RecordBatch] = []
        self._row_count = self._row_bytes = 0
        self._partials = self._no_rows()
        self._used = list(dict.fromkeys([*key, *input_fields(aggregates)]))

    def __getstate__(self) -> dict[str, Any]:
        self.keep()  # a committer is pickled between the phases
        return vars(self)

    def keep(self) -> RowBuffer:
        """The partial results so far: one row per key, if they are few."""
        self._group()
        if not self.is_large:
            self._compact()
        return self._partials

    def add(self, batch: pa.RecordBatch) -> None:
        parts = [batch] if self._on_refused is None else accepted(batch, self._with_keys, self._on_refused)
        for part in parts:
            self._keep(part)

    def _with_keys(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        check_no_null_key(self._component_id, self._key, batch)
        return batch

    def _keep(self, batch: pa.RecordBatch) -> None:
        rows = batch if self._partial_input else batch.select(self._used)
        self._rows.append(rows)
        self._row_count += rows.num_rows
        self._row_bytes += rows.nbytes
        if self._row_count >= GROUPED_AT_ROWS or self._row_bytes >= GROUPED_AT_BYTES:
            self._group()

    def restore(self, partials: RowBuffer) -> None:
        """Restore from the result of ``keep``."""
        self._partials = partials

    @property
    def is_large(self) -> bool:
        """Whether partial results wait in a file, and are not merged yet."""
        return len(self._partials) > 1 and self._partials.is_large

    def finish(self) -> pa.RecordBatch | None:
        self._compact()
        return next(iter(self._partials), None)

    def finish_parts(self) -> Iterable[pa.RecordBatch]:
        """As ``finish``; if the fold is large, in parts with different keys, of which one is in
        memory."""
        self._group()
        return self._merged_parts()

    def _merged_parts(self) -> Iterable[pa.RecordBatch]:
        if self.is_large:
            return map(self._merged, KeyParts(self._partials, self._key))
        return [self._merged(self._partials)] if len(self._partials) > 1 else self._partials

    def _no_rows(self, partials: Iterable[pa.RecordBatch] = ()) -> RowBuffer:
        return RowBuffer(f"{self._component_id}: more keys come", partials)

    def _compact(self) -> None:
        self._group()
        if len(self._partials) > 1:
            self._partials = self._no_rows([self._in_one(self._merged_parts())])

    def _group(self) -> None:
        rows, self._rows = self._rows, []
        self._row_count = self._row_bytes = 0
        if not rows:
            return
        self._partials.append(self._merged(rows) if self._partial_input else self._aggregated(rows))

    def _aggregated(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Aggregate input rows to partial results."""
        table = pa.Table.from_batches(batches)
        table = pa.table([canonical_column(column) for column in table.columns], names=table.column_names)
        return self._in_one(self._accepted(table, partial=False))

    def _merged(self, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Merge partial results to fewer partial results."""
        return self._in_one(self._accepted(pa.Table.from_batches(batches), partial=True))

    def _accepted(self, table: pa.Table, *, partial: bool) -> Iterable[pa.RecordBatch]:
        """One row per key, of the keys that are not left out."""
        take = self._merged_keys if partial else self._aggregated_keys
        return accepted(table, take, self._on_refused, lambda rows: halves_by_key(rows, self._key))

    def _aggregated_keys(self, table: pa.Table) -> pa.RecordBatch:
        check_no_null_key(self._component_id, self._key, table)
        return self._grouped(table, {name: each.field for name, each in self._aggregates.items()}, partial=False)

    def _merged_keys(self, table: pa.Table) -> pa.RecordBatch:
        return self._grouped(table, {name: name for name in self._aggregates}, partial=True)

    def _grouped(self, table: pa.Table, columns: Mapping[str, str | None], *, partial: bool) -> pa.RecordBatch:
        """Make one row per key. ``columns``: aggregate -> the column that it folds. The aggregate
        itself folds values that Arrow cannot fold. Raises ``RefusedTogether``."""
        try:
            return self._in_groups(table, columns, partial=partial)
        except BatchTooLargeError:
            raise
        except BadRecordError as error:
            raise RefusedTogether(str(error)) from error

    def _in_groups(self, table: pa.Table, columns: Mapping[str, str | None], *, partial: bool) -> pa.RecordBatch:
        columns = dict(columns)
        folded = {name: each for name, each in self._aggregates.items() if not each.derived_from}
        functions = {name: each.merge_function if partial else each.partial_function for name, each in folded.items()}
        for name, function in functions.items():
            column = columns[name]
            if column is not None and not _folds(function, table.column(column)):
                functions[name] = "list"
            elif function == "sum" and column is not None:
                table, columns[name] = _wide_enough(table, column)
        table, places = _with_places(table) if "list" in functions.values() else (table, "")
        specs: list[Any] = [
            (places if function == "list" else [] if columns[name] is None else columns[name], function)
            for name, function in functions.items()
        ]
        grouped = table.group_by(list(self._key), use_threads=False).aggregate(specs)
        # the keys first, then in the given order
        made = dict(zip((*self._key, *folded), grouped.columns, strict=True))
        for name, each in folded.items():
            if functions[name] == "list":
                values = python_objects(table.column(columns[name] or places), columns[name] or "")
                groups = ([values[place] for place in found] for found in made[name].to_pylist())
                made[name] = self._array(name, [each.fold(group, partial=partial) for group in groups])
        for name, each in self._aggregates.items():
            if each.derived_from:
                parts = zip(*(made[part].to_pylist() for part in each.derived_from), strict=True)
                made[name] = self._array(name, [each.derive(values) for values in parts])
        arrays = []
        for field in self._schema:
            try:
                arrays.append(_declared(made[field.name], field.type))
            except pa.ArrowInvalid as error:
                raise self._misfit(field, error) from error
        return self._in_one(pa.table(arrays, schema=self._schema).to_batches())

    def _in_one(self, parts: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        batches = pa.Table.from_batches(parts, self._schema).combine_chunks().to_batches()
        if len(batches) > 1:
            raise TopologyError(
                f"component {self._component_id!r}: the keys and aggregates of a batch need more than 2 GiB in one column; "
                "make batches smaller, with batch_records_max or batch_bytes_max of the spout"
            )
        return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=self._schema)

    def _array(self, name: str, values: list[Any]) -> pa.ChunkedArray:
        field = self._schema.field(name)
        form = form_of(field.type)
        try:
            return pa.chunked_array([pa.array([None if each is None else form(each) for each in values], field.type)])
        except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            raise self._misfit(field, error) from error

    def _misfit(self, field: pa.Field, error: Exception) -> BadRecordError:
        return BadRecordError(
            f"component {self._component_id!r}: {field.name!r} does not fit into {field.type}: {error}"
        )


def _declared(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The column in its declared type. Grouping has replaced dictionaries by their values."""
    return column.cast(kind.value_type).dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)


def _folds(function: str, column: pa.ChunkedArray) -> bool:
    """Whether Arrow can fold such a column correctly."""
    kind = column.type
    if function == "count":
        return True
    if function not in ("sum", "min", "max", "first", "last"):
        return False
    if (
        pa.types.is_float16(kind)
        or pa.types.is_duration(kind)
        or pa.types.is_dictionary(kind)
        or pa.types.is_nested(kind)
    ):
        return False
    if function in ("first", "last"):
        return not (pa.types.is_decimal(kind) or pa.types.is_null(kind))
    return function == "sum" or not has_nan(column)  # Arrow ignores NaN


def _with_places(table: pa.Table) -> tuple[pa.Table, str]:
    """The table with an added column of row numbers, and the name of that column."""
    return _with_column(table, "place", pa.array(range(table.num_rows), pa.int64()))


def _with_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> tuple[pa.Table, str]:
    """The table with an added column, and its name, which no other column has."""
    while name in table.column_names:
        name += "_"
    return table.append_column(name, column), name


def _wide_enough(table: pa.Table, name: str) -> tuple[pa.Table, str]:
    """The table, and the name of a column with the values of ``name`` that is wide enough for the
    sum of all its rows, because Arrow's sum overflows silently. If needed, integers become decimals
    and decimals become wider, in a separate column, because other aggregates take the unchanged
    values.
    """
    column = table.column(name)
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)) or table.num_rows == 0:
        return table, name
    extremes = pc.min_max(column).as_py()
    greatest = max(_unscaled(extremes[end], kind) for end in ("min", "max")) * table.num_rows
    scale = kind.scale if pa.types.is_decimal(kind) else 0
    if pa.types.is_integer(kind):
        wide = kind if greatest <= _INT64_MAX and not pa.types.is_uint64(kind) else pa.decimal128(38, 0)
    else:
        wide = kind if greatest < 10**38 else pa.decimal256(76, scale)
    if greatest >= 10**76:
        raise BadRecordError(f"the sum of {name!r} may have more than 76 digits: use values of fewer digits, or floats")
    return _with_column(table, f"{name} for sums", column.cast(wide)) if wide != kind else (table, name)


def _unscaled(value: Any, kind: pa.DataType) -> int:
    """The absolute value in Arrow's storage: an integer without its decimal scale."""
    if value is None:
        return 0
    return abs(int(value.scaleb(kind.scale, EXACT) if pa.types.is_decimal(kind) else value))
