"""``verify``, ``explain`` and ``replay`` compute the rows of a ``Mirror`` again here, one change
after the other.

Only the reading of the records is the same: changes are not reduced, and no database applies them.

Unlike the ``Mirror``, it never forgets the position of a deletion.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import BadRecordError
from framework.topology import Fields
from framework.topology.canonical_form import RowForm, form_of
from framework.topology.table_changes import DEFAULT, ChangeReader, TableChanges
from sinks.rows.committer_reference_model import ReferenceCommitter
from sinks.rows.inspectable_mirror import MirroredRow, MirrorState
from sinks.rows.rows_as_of import Key
from sinks.rows.values import stored_fields, stored_values
from sinks.scratch import scratch_backend
from sinks.states import OpaqueMapState

#: Stands for a key where the columns of a table are kept.
_COLUMNS = ""


class _Column(NamedTuple):
    """``default``: what rows hold in it that are older than it, or have no value for it."""

    kind: pa.DataType
    default: Any


class _Held(NamedTuple):
    """The known state of a key. ``row``: None: there is no row. ``deleted_at``: the highest
    position of its deletions; None: it is not known."""

    row: MirroredRow | None
    deleted_at: int | None = None


class ReferenceTables(OpaqueMapState):
    """The rows of all tables of a mirror, in a scratch store, with deleted ones."""

    def __init__(self, folder: Path) -> None:
        key = Fields.of({"table": pa.string(), "key": pa.string()})
        super().__init__(scratch_backend(folder, key, Fields.of({"row": pa.binary()})))

    def found(self, keys: Sequence[Key]) -> dict[Key, _Held]:
        """The known state of these keys at the beginning of this commit."""
        return dict(zip(keys, map(_held, self.multi_get([_packed(key) for key in keys])), strict=True))

    def columns(self, name: str) -> dict[str, _Column] | None:
        """The columns of a table, as this commit starts from them; None: there is no table."""
        (found,) = self.multi_get([(name, _COLUMNS)])
        return pickle.loads(found) if found is not None else None

    def put(self, held: Mapping[Key, _Held], columns: Mapping[str, Mapping[str, _Column]]) -> None:
        packed = [pickle.dumps((key, *each)) for key, each in held.items()]
        self.multi_put([_packed(key) for key in held], packed)
        self.multi_put([(name, _COLUMNS) for name in columns], [pickle.dumps(dict(each)) for each in columns.values()])

    def keys_of(self, name: str) -> list[Key]:
        return [key for key in self.expected_keys() if key[0] == name]

    # --- for the tools ----------------------------------------------------------------------------

    def expected_keys(self) -> Iterator[Key]:
        for (_, key), row in self.backend.scan():
            if key != _COLUMNS and row.value is not None and _row(row.value[0]) is not None:
                yield pickle.loads(row.value[0])[0]

    def expected_rows(self, keys: Sequence[Key]) -> list[MirroredRow | None]:
        names = list(dict.fromkeys(key[0] for key in keys))
        found = self.backend.multi_get([(name, _COLUMNS) for name in names])
        columns = {
            name: pickle.loads(row.value[0]) for name, row in zip(names, found, strict=True) if row and row.value
        }
        rows = self.backend.multi_get([_packed(key) for key in keys])
        return [
            _formed(_row(row.value[0]), columns[key[0]]) if row is not None and row.value is not None else None
            for key, row in zip(keys, rows, strict=True)
        ]

    def changed_keys(self, txid: int) -> list[Key]:
        return [
            pickle.loads(row.value[0])[0]
            for (_, key), row in self.backend.scan()
            if key != _COLUMNS and row.value is not None and row.stamp.txid == txid
        ]

    def written(self, key: Key, txid: int) -> bool:
        (row,) = self.backend.multi_get([_packed(key)])
        if row is None or row.stamp.txid != txid:
            return False
        return any(_row(each[0]) is not None for each in (row.value, row.prev) if each is not None)

    def recomputed(self, key: Key) -> tuple[Any, ...] | None:
        (row,) = self.expected_rows([key])
        return (row,) if row is not None else None


class ReferenceMirror(ReferenceCommitter):
    """Replaces a ``Mirror`` in the copy of a topology. ``reader``, ``named``: as of the mirror.
    ``sink``: where a replay of ``txid`` finds what there was before."""

    def __init__(
        self,
        folder: Path,
        reader: ChangeReader,
        named: Callable[[Sequence[str]], str],
        sink: MirrorState | None = None,
        txid: int = 0,
    ) -> None:
        super().__init__()
        self.state = ReferenceTables(folder)
        self._reader, self._named = reader, named
        self._before, self._txid = [sink] if sink is not None else [], txid  # a list: it is no state of this bolt
        self._batches: list[TableChanges] = []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        self._batches += self._reader.read(batch.column("key"), batch.column("value"))

    def finish_batch(self) -> None:
        if self._attempt is None or not self._batches:
            return
        self.state.begin_commit(self._attempt)
        work = _Work(self.state, self._before[0] if self._before else None, self._txid)
        for each in self._batches:
            name = self._named(each.table)
            if each.rows is None:
                work.empty(name, each.positions[0].as_py() if each.positions is not None else None)
            else:
                work.apply(name, each, each.rows, self._only)
        if self._only is None:  # explain tries parts of a batch, without the change that made the row
            work.check()
        self.state.put(work.changed, work.columns)
        self.state.commit(self._attempt)


class _Work:
    """The rows and columns that a commit changes, as the changes so far have left them."""

    def __init__(self, state: ReferenceTables, sink: MirrorState | None, txid: int) -> None:
        self._state, self._sink, self._txid = state, sink, txid
        self._found: dict[Key, _Held] = {}
        self.changed: dict[Key, _Held] = {}
        self.columns: dict[str, dict[str, _Column]] = {}
        self._lacking: dict[Key, None] = {}

    def check(self) -> None:
        """Raise ``BadRecordError`` if a row lacks values that its change left out."""
        for name, *key in self._lacking:
            raise BadRecordError(
                f"table {name!r}, key {tuple(key)!r}: a change leaves out unchanged values, and has no row"
            )

    def empty(self, name: str, position: int | None) -> None:
        keys = self._sink.changed_keys(name, self._txid) if self._sink is not None else self._state.keys_of(name)
        every = list({*keys, *(each for each in self.changed if each[0] == name)})
        self._find(every)
        for key in every:
            self._delete(key, position)

    def _delete(self, key: Key, position: int | None) -> None:
        known = [each for each in (position, self._held(key).deleted_at) if each is not None]
        self.changed[key] = _Held(None, max(known, default=None))
        self._lacking.pop(key, None)

    def _held(self, key: Key) -> _Held:
        return self.changed.get(key) or self._found.get(key) or _Held(None)

    def apply(self, name: str, changes: TableChanges, rows: pa.Table, only: Key | None) -> None:
        fields = Fields.of_schema(rows.schema)
        self._learn(name, rows.schema)
        values = {each: stored_values(rows.column(each), each, fields.type_of(each)) for each in fields}
        form = RowForm(stored_fields(fields).select(list(changes.key)))
        keys = [(name, *form(each)) for each in zip(*(values[each] for each in changes.key), strict=True)]
        self._find(keys)
        deleted = changes.deleted.to_pylist() if changes.deleted is not None else [False] * len(keys)
        left_out = changes.unchanged.to_pylist() if changes.unchanged is not None else [None] * len(keys)
        positions = changes.positions.to_pylist() if changes.positions is not None else [None] * len(keys)
        rows_of = zip(*values.values(), strict=True)
        for key, dead, kept, at, row in zip(keys, deleted, left_out, positions, rows_of, strict=True):
            if only is not None and key != only:
                continue
            if dead:
                self._delete(key, at)
                continue
            held = self._held(key)
            if kept and held.row is None:
                if self._is_repeated(key, at):
                    continue
                if self._sink is None:  # a replay may not know the row
                    self._lacking[key] = None
            given = {each: value for each, value in zip(values, row, strict=True) if each not in (kept or ())}
            self.changed[key] = held._replace(row={**(held.row or {}), **given})

    def _is_repeated(self, key: Key, position: int | None) -> bool:
        """Whether a change that finds no row was already applied before the row was deleted. In a
        replay of a committed transaction, the missing row itself shows that."""
        if self._sink is not None:
            return key in self.changed or key in self._found
        deleted_at = self._held(key).deleted_at
        return position is not None and deleted_at is not None and position < deleted_at

    def _find(self, keys: Sequence[Key]) -> None:
        missing = [each for each in dict.fromkeys(keys) if each not in self._found]
        if self._sink is not None:
            self._found |= {key: _Held(row) for key, row in self._sink.before(missing, self._txid).items()}
        else:
            self._found |= self._state.found(missing)

    def _learn(self, name: str, schema: pa.Schema) -> None:
        known = self.columns.get(name) or self._state.columns(name)
        columns = dict(known or {})
        for each in schema:
            default = (each.metadata or {}).get(DEFAULT)
            if each.name in columns:
                columns[each.name] = columns[each.name]._replace(kind=each.type)
            else:  # a table that is created has no older rows
                columns[each.name] = _Column(each.type, json.loads(default) if default and known else None)
        self.columns[name] = columns


def _packed(key: Key) -> tuple[str, str]:
    return key[0], repr(key[1:])


def _held(packed: bytes | None) -> _Held:
    return _Held(*pickle.loads(packed)[1:]) if packed is not None else _Held(None)


def _row(packed: bytes | None) -> MirroredRow | None:
    return _held(packed).row


def _formed(row: MirroredRow | None, columns: Mapping[str, _Column]) -> MirroredRow | None:
    """The row with all columns, in the form of their newest types."""
    if row is None:
        return None
    return {name: _value(row.get(name, each.default), each.kind) for name, each in columns.items()}


def _value(value: Any, kind: pa.DataType) -> Any:
    if value is None or pa.types.is_nested(kind):
        return value
    with suppress(ValueError, TypeError, ArithmeticError, pa.ArrowException):
        return form_of(kind)(value)
    return value
