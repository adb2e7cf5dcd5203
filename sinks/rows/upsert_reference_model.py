"""``verify`` computes the rows of an ``UpsertCommitter`` again here, one change after the other.

Only the input of the committer is the same: changes are neither sorted nor reduced, and no database
compares sequences. So a recount finds faults in that, too.

Source: the rules of ``UpsertCommitter``. It departs in one: a deletion is never forgotten. So a row
differs that a change has made which was older than a deletion of ``keep_deletes`` transactions ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import BadRecordError
from framework.topology import Fields
from framework.topology.canonical_form import RowForm
from sinks.backend import Key, Row, Value
from sinks.expected_values import Expected, Recomputed
from sinks.rows.committer_reference_model import ReferenceCommitter
from sinks.rows.reduction import DELETED, UNCHANGED
from sinks.rows.table_definition import Changes
from sinks.rows.values import stored_fields, stored_values
from sinks.scratch import scratch_backend
from sinks.states import OpaqueMapState

#: Columns beside those of a row: whether there is a row, and the sequence of the last deletion.
_EXISTS, _DELETED_AT = "_ratchet_exists", "_ratchet_deleted_at"
#: Makes the columns of a table, ``DELETED`` and ``UNCHANGED`` from what a committer takes.
ChangesOf = Callable[[pa.RecordBatch], pa.Table]


class _Held(NamedTuple):
    """The known state of a key. ``row``: its values beside the key; None: there is no row."""

    row: Value | None
    deleted_at: Any


class ReferenceRows(OpaqueMapState):
    """The rows of a table by key, in a scratch store, with deleted ones."""

    def __init__(self, folder: Path, fields: Fields, changes: Changes) -> None:
        stored = stored_fields(fields)
        values = [name for name in fields if name not in changes.key]
        kinds = {name: stored.type_of(name) for name in values} | {_EXISTS: pa.bool_()}
        if changes.sequence is not None:
            kinds[_DELETED_AT] = stored.type_of(changes.sequence)
        self._width = len(values)
        super().__init__(scratch_backend(folder, stored.select(list(changes.key)), Fields.of(kinds)))

    def found(self, keys: Sequence[Key]) -> list[_Held]:
        """What a commit starts from."""
        return [self._held(packed) for packed in map(self._packed_or_none, self.multi_get(keys))]

    def put(self, held: Mapping[Key, _Held]) -> None:
        has_sequence = self.backend.value_columns > self._width + 1
        nothing = (None,) * self._width
        packed = [
            (*(each.row or nothing), each.row is not None, *([each.deleted_at] if has_sequence else []))
            for each in held.values()
        ]
        self.multi_put(list(held), [each if self.backend.value_columns > 1 else each[0] for each in packed])

    def _packed_or_none(self, value: Any) -> Value | None:
        return (value,) if value is not None and self.backend.value_columns == 1 else value

    def _held(self, value: Value | None) -> _Held:
        if value is None:
            return _Held(None, None)
        deleted_at = value[self._width + 1] if len(value) > self._width + 1 else None
        return _Held(value[: self._width] if value[self._width] else None, deleted_at)

    # --- for verify and explain -------------------------------------------------------------------

    def expected_keys(self) -> Iterator[Key]:
        return (key for key, row in self.backend.scan() if self._held(row.value).row is not None)

    def expected(self, keys: Sequence[Key]) -> Sequence[Expected | None]:
        return [self._expected(row) for row in self.backend.multi_get(keys)]

    def _expected(self, row: Row | None) -> Expected | None:
        held = self._held(row.value).row if row is not None else None
        return Recomputed(held) if held is not None else None

    def written(self, key: Key, txid: int) -> bool:
        """Not where a row was deleted that was not there."""
        row = self._row_of(key)
        if row is None or row.stamp.txid != txid:
            return False
        return any(self._held(each).row is not None for each in (row.value, row.prev))


def _with_effect(changes: Sequence[tuple[Key, Any]], deleted: Sequence[bool]) -> list[tuple[Key, Any]]:
    """The changes of each key from its last deletion on. Those before it have no effect."""
    last = {key: place for place, ((key, _), dead) in enumerate(zip(changes, deleted, strict=True)) if dead}
    return [each for place, each in enumerate(changes) if place >= last.get(each[0], 0)]


class ReferenceUpserts(ReferenceCommitter):
    """Replaces an ``UpsertCommitter`` in the copy of a topology that ``verify`` or ``explain``
    runs. ``changes_of``: as of that committer. ``fields``: of its table."""

    def __init__(self, folder: Path, fields: Fields, changes: Changes, changes_of: ChangesOf) -> None:
        super().__init__()
        self._fields, self._changes, self._changes_of = fields, changes, changes_of
        self._values = [name for name in fields if name not in changes.key]
        self.state = ReferenceRows(folder, fields, changes)
        self._batches: list[pa.Table] = []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        rows = self._changes_of(batch)
        if self._only is not None:
            for name, value in zip(self._changes.key, self._only, strict=True):
                column = rows.column(name)
                rows = rows.filter(
                    pc.is_nan(column) if value != value else pc.equal(column, pa.scalar(value, column.type))
                )
        if rows.num_rows:
            self._batches.append(rows)

    def finish_batch(self) -> None:
        if self._attempt is None or not self._batches:
            return
        changes = list(self._in_order(pa.concat_tables(self._batches)))
        keys = list(dict.fromkeys(key for key, _ in changes))
        if self._changes.sequence is None:
            changes = _with_effect(changes, [bool(change[DELETED]) for _, change in changes])
        self.state.begin_commit(self._attempt)
        before = dict(zip(keys, self.state.found(keys), strict=True))
        after = dict(before)
        for key, change in changes:
            after[key] = self._applied(key, after[key], change)
        self.state.put({key: held for key, held in after.items() if held is not before[key]})
        self.state.commit(self._attempt)

    def _in_order(self, rows: pa.Table) -> Iterator[tuple[Key, dict[str, Any]]]:
        """The key and the columns of each change."""
        columns = {name: stored_values(rows.column(name), name, self._fields.type_of(name)) for name in self._fields}
        columns[DELETED] = rows.column(DELETED).to_pylist()
        if UNCHANGED in rows.column_names:
            columns[UNCHANGED] = rows.column(UNCHANGED).to_pylist()
        form = RowForm(stored_fields(self._fields).select(list(self._changes.key)))
        for values in zip(*columns.values(), strict=True):
            change = dict(zip(columns, values, strict=True))
            yield form(tuple(change[name] for name in self._changes.key)), change

    def _applied(self, key: Key, held: _Held, change: Mapping[str, Any]) -> _Held:
        """What a key holds after a change; ``held`` itself, where the change is older."""
        sequence = self._changes.sequence
        own = change[sequence] if sequence is not None else None
        row = dict(zip(self._values, held.row, strict=True)) if held.row is not None else None
        if sequence is not None:
            newest = [each for each in (row[sequence] if row else None, held.deleted_at) if each is not None]
            if any(own < each for each in newest):
                return held
        if change[DELETED]:
            return _Held(None, own)
        left_out = set(change.get(UNCHANGED) or ()) & set(self._values)
        if left_out and row is None:
            raise BadRecordError(
                f"key {key!r}: a change leaves out unchanged values, and there is no row that has them"
            )
        values = []
        for name in self._values:
            keeps = name in left_out or (self._changes.ignore_nulls and change[name] is None)
            values.append(row[name] if keeps and row is not None else change[name])
        return _Held(tuple(values), held.deleted_at)
