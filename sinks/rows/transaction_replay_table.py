"""The table that a transaction of an ``UpsertCommitter`` is committed to again."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import InvariantViolation
from sinks.rows.inspectable_table import InspectableTable
from sinks.rows.rows_as_of import Key, Values
from sinks.rows.sqlite_standin_table import ScratchTable
from sinks.rows.table_definition import TXID
from sinks.rows.transactional_table import Look, WriteParts, all_at_once


class ReplayTable(ScratchTable):
    """A scratch table that starts from what ``sink`` held before transaction ``txid``, of the keys
    that the transaction changes. A key of which the sink does not tell that any more has no row.
    The sink is only read."""

    def __init__(self, sink: InspectableTable, folder: Path, txid: int) -> None:
        if sink._changes is None:
            raise InvariantViolation(f"{sink.location} has no keys")
        super().__init__(folder, sink._fields, sink._changes, sink._stamp)
        self._sink, self._held_by, self._txid = sink, sink, txid

    def apply(
        self,
        connection: Any,
        rounds: Iterable[pa.Table],
        txid: int,
        parts: WriteParts = all_at_once,
        *,
        look: Look | None = None,
    ) -> None:
        rounds = list(rounds)
        keys = list(dict.fromkeys(key for each in rounds for key in self._keys_in(each)))
        self._fill(connection, self._sink.before(keys, self._txid))
        if self._by_key().sequence is not None:
            self._fill_deleted(connection, self._sink.deletions(keys, self._txid))
        super().apply(connection, rounds, txid, parts, look=look)

    def _keys_in(self, rows: pa.Table) -> list[Key]:
        columns = []
        for name in self._by_key().key:
            values = rows.column(name).to_pylist()
            columns.append(
                values if self._is_compared(self.schema.field(name)) else [pickle.loads(each) for each in values]
            )
        return list(zip(*columns, strict=True))

    def _fill(self, connection: Any, rows: Sequence[tuple[Key, Values]]) -> None:
        names = [*self._by_key().key, *self._sink.value_names]
        marks = ", ".join(self.dialect.mark for _ in names)
        statement = f"INSERT INTO {self._at(self._table)} ({self._list(names)}) VALUES ({marks})"
        for key, values in rows:
            row = [self._packed(name, value) for name, value in zip(names, (*key, *values), strict=True)]
            self._run(connection, statement, row)

    def _fill_deleted(self, connection: Any, deletions: Sequence[tuple[Key, Any]]) -> None:
        names = [*self._by_key().key, self._by_key().sequence or ""]
        marks = ", ".join(self.dialect.mark for _ in names)
        table = self._at(f"{self._table}_deleted")
        statement = f"INSERT INTO {table} ({self._list(names)}, {TXID}) VALUES ({marks}, {self._txid - 1:d})"
        for key, sequence in deletions:
            row = [self._packed(name, value) for name, value in zip(names, (*key, sequence), strict=True)]
            self._run(connection, statement, row)

    def _packed(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        field = self.schema.field(name)
        return self._stored(value, field.type) if self._is_compared(field) else pickle.dumps(value)
