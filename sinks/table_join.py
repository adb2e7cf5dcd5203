"""Joins of each record with the row that its key has in a table now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa

from framework.errors import BadRecordError, TopologyError
from framework.operators.watermarks import NEVER
from framework.topology import Fields, Input, OutputFieldsDeclarer
from framework.topology.canonical_form import python_values
from sinks.backend import Key, Value
from sinks.join_inputs import LEFT, RIGHT, JoinInputs
from sinks.keyed_committer import KeyedCommitter, one_stream
from sinks.states import MapState

_VALUE = Fields(row=str, forget_at=int)
_FORGET = "forget_at"
#: When the row of a key is forgotten that is not deleted.
_NEVER_FORGOTTEN = (1 << 62) - 1
#: For how many transactions the sequence of a deleted row is kept, as of an ``UpsertCommitter``.
KEEP_DELETES = 100_000


class TableJoiningCommitter(KeyedCommitter):
    """Joins each record with the newest row of its key in another stream: an order with the
    customer as known now. Its opaque state holds that row of each key.

    ``table``: a field that the rows of the table have and the records have not, which tells the two
    streams apart. Both have the fields of ``key``, with the same types, and share no other.

    A row of the table replaces the one of its key. ``sequence_by``: a field of the table that rises
    with each change of a key: a row with a lower value is left out, and of equal ones the later
    counts. ``deleted``: a field of truth values that says that the key has no row any more.
    ``keep_deletes``: for how many transactions the sequence of a deleted row is kept.

    Default stream: the key, the other fields of the record, those of the table's row; each record
    once, in its own transaction, joined with what the table holds after all rows of that
    transaction, in whatever order the two came. ``how="left"``: a record without a row is sent with
    nulls; "inner": it is not sent.
    """

    def __init__(
        self,
        state: MapState,
        *,
        key: Sequence[str],
        table: str,
        sequence_by: str | None = None,
        deleted: str | None = None,
        how: Literal["inner", "left"] = "left",
        keep_deletes: int = KEEP_DELETES,
    ) -> None:
        super().__init__(state, key)
        if how not in ("inner", "left"):
            raise TopologyError(f"TableJoiningCommitter: how is {how!r}: give 'inner' or 'left'")
        self.table, self.sequence_by, self.deleted, self.how = table, sequence_by, deleted, how
        self.keep_deletes = keep_deletes
        self._sides: JoinInputs | None = None
        self._came: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])

    # --- on the driver ----------------------------------------------------------------------------

    def bind(self, component_id: str, inputs: Sequence[Input], parallelism: int) -> None:
        tables = [each for each in inputs if self.table in each.fields]
        rows = [each for each in inputs if each not in tables]
        if not tables or not rows:
            raise TopologyError(
                f"committer {component_id!r} needs two streams: one with the field {self.table!r}, which is the table, and "
                "one without; rename fields upstream"
            )
        left, right = one_stream(component_id, rows), one_stream(component_id, tables)
        self._bind_keyed(component_id, [*rows, *tables], parallelism)
        right.require(component_id, [each for each in (self.sequence_by, self.deleted) if each is not None])
        if self.deleted is not None and right.fields.type_of(self.deleted) != pa.bool_():
            raise TopologyError(
                f"committer {component_id!r}: {self.deleted!r} is {right.fields.type_of(self.deleted)}, and says whether a row "
                "is deleted: make it bool"
            )
        kept = right.fields.select([each for each in right.fields if each != self.deleted])
        self._sides = JoinInputs(component_id, self.key, left, replace(right, fields=kept))
        self.state.bind(self._sides.key_fields, _VALUE)
        if self.deleted is not None and self.sequence_by is not None:
            self.state.backend.order_by(_FORGET)

    def sends_rows_of(self, fields: Fields) -> bool:
        return self.table not in fields

    def state_settings(self) -> Mapping[str, Any]:
        return {
            "key": list(self.key),
            "table": self.table,
            "sequence_by": self.sequence_by,
            "deleted": self.deleted,
            "how": self.how,
        }

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        if self._sides is not None:
            declarer.declare(Fields.of_schema(self._sides.schema()))

    def _bound(self) -> JoinInputs:
        if self._sides is None:
            raise TopologyError(f"committer {self._component_id!r} was used outside a topology")
        return self._sides

    # --- in tasks ---------------------------------------------------------------------------------

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        side = RIGHT if self.table in batch.schema.names else LEFT
        rows = pa.Table.from_batches([batch])
        self._keys(rows)  # raises before the commit, where a record can still be left out
        if side == RIGHT and self.sequence_by is not None and batch.column(self.sequence_by).null_count:
            raise BadRecordError(
                f"component {self._component_id!r}: the sequence {self.sequence_by!r} is null; give such records a value, or "
                "filter them out"
            )
        self._came[side].append(batch)

    def finish_batch(self) -> Iterable[pa.RecordBatch]:
        if self._attempt is None:
            return []
        self.state.begin_commit(self._attempt)
        newest = self._change_table()
        lefts = list(self._rows(LEFT))
        keys = list(dict.fromkeys(key for key, _ in lefts))
        found = dict(zip(keys, map(self._decoded, keys, self.state.multi_get(keys)), strict=True))
        sides, out = self._bound(), []
        for key, values in lefts:
            row = found[key]
            if row is not None:
                out.append((*key, *values, *row))
            elif self.how == "left":
                out.append(sides.alone(key, LEFT, values))
        if self.deleted is not None and self.sequence_by is not None:
            for page in self.state.due(_FORGET, NEVER, self._attempt.txid, self._mine):
                self.state.delete([key for key, _ in page if key not in newest])
                self.state.write()  # after all values were read
        self.state.commit(self._attempt)
        return sides.batches(out)

    def _change_table(self) -> Mapping[Key, Any]:
        """Put the new rows of the table into the state. Returns them by their keys."""
        sides, txid = self._bound(), self._attempt.txid if self._attempt is not None else 0
        sequence = sides[RIGHT].own.index(self.sequence_by) if self.sequence_by is not None else None
        came = list(zip(self._rows(RIGHT), self._deleted(), strict=True))
        sequences: dict[Key, Any] = {}
        if sequence is not None:
            keys = list(dict.fromkeys(key for (key, _), _ in came))
            held = self.state.multi_get(keys)
            sequences = {
                key: self._values(key, value)[sequence]
                for key, value in zip(keys, held, strict=True)
                if value is not None
            }
        newest: dict[Key, tuple[Value, int]] = {}
        for (key, values), is_deleted in came:
            if sequence is not None:
                if key in sequences and values[sequence] < sequences[key]:
                    continue
                sequences[key] = values[sequence]
            newest[key] = values, txid + self.keep_deletes if is_deleted else _NEVER_FORGOTTEN
        gone = [key for key, (_, until) in newest.items() if sequence is None and until != _NEVER_FORGOTTEN]
        kept = [key for key, (_, until) in newest.items() if sequence is not None or until == _NEVER_FORGOTTEN]
        codec = sides[RIGHT].codec
        self.state.multi_put(kept, [(codec.text_of(newest[key][0]), newest[key][1]) for key in kept])
        self.state.delete(gone)
        return newest

    def _deleted(self) -> list[bool]:
        """Of each row of the table that came, whether its key has no row any more."""
        if self.deleted is None:
            return [False] * sum(batch.num_rows for batch in self._came[RIGHT])
        return [bool(each) for batch in self._came[RIGHT] for each in batch.column(self.deleted).to_pylist()]

    def _rows(self, side: int) -> Iterable[tuple[Key, Value]]:
        """The keys and the other values of the records of a side, as they came."""
        own = self._bound()[side].own
        for batch in self._came[side]:
            rows = pa.Table.from_batches([batch])
            values = zip(*(python_values(rows.column(name), name) for name in own), strict=True) if own else None
            keys = self._keys(rows)
            yield from zip(keys, values if values is not None else [()] * len(keys), strict=True)

    def _decoded(self, key: Key, value: Value | None) -> Value | None:
        """The row that a key has; None where it has none, or none any more."""
        return self._values(key, value) if value is not None and value[1] == _NEVER_FORGOTTEN else None

    def _values(self, key: Key, value: Value) -> Value:
        values_of = self._bound()[RIGHT].codec.values_of
        return self.state.restored(key, lambda its: values_of(its[0]), value)
