"""The table that replaces a table of a database in a test.

The committer, its statements and its fence are the real ones, on SQLite. A value that SQLite lacks
is stored pickled, so the table takes all types that the other database takes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from framework.topology.canonical_form import form_of, python_values
from sinks.rows.sqlite import SqliteTable
from sinks.rows.table_definition import Changes, Column
from sinks.rows.transactional_table import RowTable
from sinks.rows.values import is_nested, json_form, json_writer
from sinks.value_encoding import restored


class ScratchTable(SqliteTable):
    """A table of a file in ``folder``, which does not exist yet, with the columns of ``table``."""

    def __init__(
        self, folder: Path, fields: Fields | None, changes: Changes | None = None, stamp: str | None = "_txid"
    ) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder / "rows.db", "rows", stamp=stamp)
        self._fields, self._changes = fields, changes
        self._stands_for: RowTable | None = None
        #: The table whose forms of texts the rows get. It is only read.
        self._held_by: RowTable | None = None

    @staticmethod
    def of(table: RowTable, folder: Path, *, as_held: bool = False) -> ScratchTable:
        """Stand for a table that is bound to its columns, and refuse the values that it is known to
        refuse. ``as_held``: rows get the form in which that table, which is only read, returns
        them."""
        made = ScratchTable(folder, table._fields, table._changes, table._stamp)
        made._stands_for, made._held_by = table, table if as_held else None
        return made

    def rows_written(self) -> pa.Table:
        """The rows, in the order in which they were written."""
        schema = self.schema
        with self._reading() as connection:
            found = connection.execute(
                f"SELECT {self._list(schema.names)} FROM {self._at(self._table)} ORDER BY rowid"
            ).fetchall()
        columns = zip(*found, strict=True) if found else [()] * len(schema)
        return pa.table(
            [
                pa.array([None if value is None else read(value) for value in column], field.type)
                for field, read, column in zip(schema, map(self._reader, schema), columns, strict=True)
            ],
            schema=schema,
        )

    def check_rows(self, rows: pa.RecordBatch) -> None:
        if self._stands_for is not None:
            self._stands_for.check_rows(rows)

    def _column_type(self, field: pa.Field) -> str:
        return super()._column_type(field) if self._is_compared(field) else "BLOB"

    def _storable(self, rows: pa.Table) -> pa.Table:
        if self._held_by is not None:
            rows = self._held_by.as_held(rows)
        for number, field in enumerate(rows.schema):
            if field.name in self.schema.names and not self._is_compared(field):
                values = python_values(rows.column(number), field.name)
                pickled = [None if each is None else pickle.dumps(each) for each in values]
                rows = rows.set_column(number, field.name, pa.chunked_array([pa.array(pickled, pa.large_binary())]))
        return rows

    def _is_compared(self, field: pa.Field) -> bool:
        """Whether statements compare the values, which are stored as SQLite stores them."""
        changes = self._changes
        if changes is None or field.name not in (*changes.key, changes.sequence) or pa.types.is_floating(field.type):
            return False
        try:
            super()._column_type(field)
        except TopologyError:  # equal values are pickled to the same bytes
            return False
        return True

    def key_parameter(self, column: Column, value: Any) -> Any:
        if self._is_compared(self.schema.field(column.name)):
            return super().key_parameter(column, value)
        return pickle.dumps(value)

    def held_form(self, name: str) -> Callable[[Any], Any]:
        field = self.schema.field(name)
        read, form = self._reader(field), form_of(field.type)
        if not is_nested(field.type):
            return lambda value: None if value is None else form(read(value))
        written = json_writer(field.type)

        def converted(value: Any) -> Any:
            if value is None:
                return None
            found = read(value)
            return json_form(found if isinstance(found, str) else written(found))

        return converted

    def _reader(self, field: pa.Field) -> Callable[[Any], Any]:
        """Return a function from what SQLite returns for a column to its value."""
        if self._is_compared(field):
            return lambda value: restored(value, field.type)
        return lambda value: pickle.loads(value) if isinstance(value, bytes) else value
