"""The committer that keeps the newest row of each key in a table of a database."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from framework.arrow_spill import RowBuffer
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology import TOMBSTONE, Bolt, Input
from framework.topology.bolts import OnBadRecord
from framework.topology.canonical_form import canonical_column
from framework.topology.inspectable import inspectable, with_scratch_states
from framework.topology.refused_row_bisection import OnRefused
from sinks.rows.condition_parser import Condition
from sinks.rows.inspectable_table import InspectableTable
from sinks.rows.reduction import DELETED, UNCHANGED, apart, rounds_of
from sinks.rows.sqlite_standin_table import ScratchTable
from sinks.rows.table_definition import DUE, KEEP_DELETES, Changes, OnNewColumn
from sinks.rows.transaction_replay_table import ReplayTable
from sinks.rows.transactional_table import RowTable
from sinks.rows.upsert_reference_model import ReferenceUpserts
from sinks.state_committer import check_one_writer
from sinks.table_committer import TableCommitter

#: The field that names the columns whose values a change leaves out, as of ``DebeziumCodec``.
UNAVAILABLE = "unavailable"
_NAMES = pa.list_(pa.string())


class UpsertCommitter(TableCommitter[RowTable, RowBuffer]):
    """Keeps the newest row of each key in a table of a database, exactly once: a
    ``SqliteTable``, ``PostgresTable`` or ``MySqlTable``.

    ``key``: the fields that a primary key or unique index of the table consists of. A row replaces
    the whole row of its key, nulls included; with ``ignore_nulls``, nulls keep the old values. Of
    several rows of one key, the last in the order of arrival counts.

    A tombstone deletes the row of its key, and so does a row for which ``delete_when`` is true, as
    in ``"op = 'd'"``. A Kafka spout whose rows have the record's key marks tombstones by the field
    ``tombstone``. The spout adds the field by default if every bolt that reads the stream asks for
    it; with bolts in between, give it ``metadata=["tombstone"]``, and let the bolts keep the field.
    ``sequence_by``: a field that rises with each change of a key. A change with a lower value than
    that of the row is left out, also after the row was deleted; of equal values, the later change
    counts. A tombstone without a sequence is bad: use a field that tombstones have, such as
    ``offset``. ``keep_deletes``: for how many transactions the sequence of a deleted row is kept.

    ``unavailable``, a field of lists of names as ``DebeziumCodec`` gives it, names the columns that
    keep their stored values. A change that leaves out values of a missing row is bad, unless a
    later change of the batch deletes the row.

    ``columns``: the fields to write; by default all but ``tombstone`` and ``unavailable``. The key
    and the sequence are always written. ``on_new_column``: what to do about a field that the table
    lacks: "add" a nullable column, in the transaction that first writes it (and widen columns where
    nothing is lost), "ignore" the field, or "fail" at the start. ``on_bad_record``: what becomes of
    a record that the table refuses. "skip": it is left out and counted. "dead_letter": it goes to
    the ``dead_letters`` of the spout. "fail": the ``on_bad_record`` of the spout decides.

    One key must have one writer: give the committer parallelism 1, or group its input by fields of
    the key.
    """

    def __init__(
        self,
        table: RowTable,
        key: Sequence[str],
        *,
        sequence_by: str | None = None,
        delete_when: str | None = None,
        columns: Sequence[str] | None = None,
        ignore_nulls: bool = False,
        on_new_column: OnNewColumn = "fail",
        on_bad_record: OnBadRecord = "fail",
        keep_deletes: int = KEEP_DELETES,
    ) -> None:
        if isinstance(key, str) or not key:
            raise TopologyError(f"UpsertCommitter needs a list of key fields, as in key=['id'], not {key!r}")
        if on_new_column not in ("add", "ignore", "fail"):
            raise TopologyError(f"on_new_column must be 'add', 'ignore' or 'fail', not {on_new_column!r}")
        if not isinstance(table, RowTable):
            raise TopologyError(
                f"UpsertCommitter needs a table of a database, such as PostgresTable(...), not a {type(table).__name__}"
            )
        super().__init__(table, columns, on_bad_record)
        self.key, self.sequence_by = tuple(key), sequence_by
        self._changes = Changes(
            tuple(key),
            sequence_by,
            ignore_nulls=ignore_nulls,
            on_new_column=on_new_column,
            keep_deletes=keep_deletes,
        )
        self._delete_when = Condition(delete_when) if delete_when is not None else None
        self._component_id = ""
        self._tombstones = False
        self._unavailable = False

    # --- on the driver ----------------------------------------------------------------------------

    @property
    def tombstone_keys(self) -> Sequence[str]:
        return (*self.key, *([self.sequence_by] if self.sequence_by is not None else []))

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        self._component_id = component_id
        for each in inputs:
            check_one_writer(component_id, each, self._changes.key, parallelism)
        fields = self._common_fields(component_id, inputs)
        self._tombstones = all(_has(each, TOMBSTONE, pa.bool_()) for each in inputs)
        self._unavailable = all(_has(each, UNAVAILABLE, _NAMES) for each in inputs)
        if self._changes.sequence is not None:
            kind = fields.type_of(self._changes.sequence)
            if kind is not None and not _rises(kind):
                raise TopologyError(
                    f"committer {component_id!r}: {self._changes.sequence!r} is {kind}, which is no sequence: use integers, times "
                    "or texts"
                )
        self.table.bind_changes(fields, self._changes)

    def _chosen(self, component_id: str, source: Input) -> tuple[str, ...]:
        needed = [*self._changes.key, *([self._changes.sequence] if self._changes.sequence is not None else [])]
        asked = self._delete_when.fields if self._delete_when is not None else []
        source.require(component_id, (*needed, *asked, *(self._columns or ())))
        if self._columns is None:
            marks = [
                name for name, kind in ((TOMBSTONE, pa.bool_()), (UNAVAILABLE, _NAMES)) if _has(source, name, kind)
            ]
            return tuple(each for each in source.fields.names if each not in marks)
        return (*self._columns, *(each for each in needed if each not in self._columns))

    def substitute(self, folder: Path) -> Bolt:
        self.table = ScratchTable.of(self.table, folder)
        return self

    def replaying(self, folder: Path, txid: int, topology_id: str) -> Bolt:
        table = inspectable(self.table, purpose="be replayed")
        if not isinstance(table, InspectableTable):
            raise ConfigError(f"{self.table.location} cannot be replayed: it does not tell what it held")
        table.check_replayed(topology_id)
        self.table = ReplayTable(table, folder, txid)
        return self

    def recounting(self, folder: Path) -> Bolt:
        if type(self) is not UpsertCommitter or self.table._fields is None:
            return with_scratch_states(self, folder)
        return ReferenceUpserts(folder, self.table._fields, self._changes, self._held_changes_in)

    def _held_changes_in(self, batch: pa.RecordBatch) -> pa.Table:
        """As ``changes_in``, as the table holds them."""
        return self.table.as_held(self.changes_in(batch))

    # --- in tasks ---------------------------------------------------------------------------------

    def _no_rows(self) -> RowBuffer:
        return RowBuffer(f"{self.table.location}: more rows come")

    def _begin_attempt(self) -> None:
        super()._begin_attempt()
        #: The function to call for each row that falls due by time and is left out.
        self._leave_out_due: OnRefused | None = None

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        is_due = self._on_refused is None and self._on_refused_due is not None
        if is_due:
            self._leave_out_due = self._on_refused_due
        found = self.changes_in(batch)
        for each in found.append_column(DUE, pa.repeat(is_due, found.num_rows)).to_batches():
            self._batches.append(each)

    def changes_in(self, batch: pa.RecordBatch) -> pa.Table:
        """The columns of the table, ``DELETED``, and ``UNCHANGED`` where the input says so. Raises
        ``BadRecordError`` for a change that cannot be made."""
        deleted = pa.array([False] * batch.num_rows)
        if self._tombstones:
            deleted = pc.or_(deleted, pc.fill_null(batch.column(TOMBSTONE), False))
        if self._delete_when is not None:
            deleted = pc.or_(deleted, self._delete_when.rows(batch))
        rows = batch.select(self.table.schema.names).cast(self.table.schema)
        for name in (*self._changes.key, self._changes.sequence):
            if name is not None and rows.column(name).null_count:
                is_sequence = name == self._changes.sequence
                if self._tombstones and _nulls_of_tombstones(batch, name):
                    what = f"sequence {name!r}: use" if is_sequence else f"key field {name!r}: use as the key"
                    such = "such as the metadata 'offset'" if is_sequence else "those of the record's key"
                    raise BadRecordError(
                        f"component {self._component_id!r}: a tombstone has no {what} fields that tombstones have, {such}, or "
                        "filter tombstones out"
                    )
                what = "the sequence" if is_sequence else "key field"
                raise BadRecordError(
                    f"component {self._component_id!r}: {what} {name!r} is null; give such records a value, or filter them out"
                )
        self.table.check_rows(rows)
        table = pa.Table.from_batches([rows])
        for name in self._changes.key:
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(place), canonical_column(table.column(place)))
        table = table.append_column(DELETED, deleted)
        if self._unavailable:
            table = table.append_column(UNCHANGED, batch.column(UNAVAILABLE))
        return table

    @property
    def tries_in_order(self) -> bool:  # type: ignore[override]
        """Whether a row keeps values of the previous row, which may be of the same batch."""
        return self._changes.ignore_nulls or self._unavailable

    def may_try_writes(self) -> bool:
        return True

    def try_writes(self, *, alone: bool) -> None:
        rounds = rounds_of(self._batches, self._changes)
        if self._attempt is not None and rounds:
            self.table.try_change(self._attempt, rounds, alone=alone)

    def finish_batch(self) -> None:
        if self._attempt is None:
            return
        rounds = rounds_of(self._batches, self._changes)
        if self._leave_out_due is not None:
            parts = partial(apart, self._batches, self._changes)
            self.table.change(self._attempt, rounds, self._leave_out_due, apart=parts)
        elif rounds or self._attempt.is_one_step:
            self.table.change(self._attempt, rounds, self._on_refused)


def _has(source: Input, name: str, kind: pa.DataType) -> bool:
    return name in source.fields and source.fields.type_of(name) == kind


def _nulls_of_tombstones(batch: pa.RecordBatch, name: str) -> bool:
    """Whether only tombstones have nulls in this column."""
    others = pc.invert(pc.fill_null(batch.column(TOMBSTONE), False))
    return not pc.any(pc.and_(others, batch.column(name).is_null())).as_py()


def _rises(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_timestamp(kind)
        or types.is_date(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    )
