"""Statements of PostgreSQL that a block of PL/pgSQL runs for each of many rows, without effect for
refused rows."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import psycopg

#: The table of the rows, all as text, with their numbers, and the table of errors.
ROWS_TABLE, NUMBER = "pg_temp._ratchet_rows", "_ratchet_row"
_REFUSED_TABLE, _CURRENT = "pg_temp._ratchet_refused", "_ratchet_current"
#: The most characters of the text of an error.
_TEXT_CHARACTERS = 2_000
#: Whether the user may make temporary tables and run blocks.
_ALLOWED = """
SELECT has_database_privilege(current_database(), 'TEMP') AND EXISTS (
    SELECT 1 FROM pg_language WHERE lanname = 'plpgsql' AND has_language_privilege(oid, 'USAGE')
)
"""


class RowByRow:
    """Takes the place of a connection inside a sql_txn: collects statements about the current row
    (``given``), and ``run`` executes them for each row, in order, in a few exchanges with the
    server."""

    #: The result of a statement that has not run.
    rowcount = 0

    def __init__(self) -> None:
        self._statements: list[str] = []

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> Self:
        self._statements.append(statement % tuple(parameters))  # %% is a % then
        return self

    @property
    def is_empty(self) -> bool:
        """Whether there is no statement, because the statements cannot run row by row."""
        return not self._statements

    @staticmethod
    def given(kinds: Mapping[str, str]) -> str:
        """The query that selects the current row. ``kinds``: quoted column -> its type."""
        columns = ", ".join(f"{name}::{kind} AS {name}" for name, kind in kinds.items())
        return f"SELECT {columns} FROM {ROWS_TABLE} WHERE {NUMBER} = {_CURRENT}"

    def run(self, connection: Any, count: int) -> list[psycopg.Error]:
        """Execute the statements for the first ``count`` rows of ``ROWS_TABLE``. Returns the errors
        of rows, which have no effect."""
        connection.execute(f"DROP TABLE IF EXISTS {_REFUSED_TABLE}")
        connection.execute(
            f"CREATE TEMP TABLE {_REFUSED_TABLE.partition('.')[2]} (place integer, state text, reason text) ON COMMIT DROP"
        )
        tag = f"$_{uuid.uuid4().hex}$"
        connection.execute(
            f"DO {tag}\n#variable_conflict use_column\nDECLARE _state text; _reason text;\n"
            f"BEGIN FOR {_CURRENT} IN 0 .. {count - 1:d} LOOP BEGIN {'; '.join(self._statements)};\n"
            "EXCEPTION WHEN OTHERS THEN GET STACKED DIAGNOSTICS _state = RETURNED_SQLSTATE, _reason = MESSAGE_TEXT;\n"
            f"INSERT INTO {_REFUSED_TABLE} VALUES ({_CURRENT}, _state, left(_reason, {_TEXT_CHARACTERS:d}));\n"
            f"END; END LOOP; END {tag}"
        )
        found = connection.execute(f"SELECT state, reason FROM {_REFUSED_TABLE} ORDER BY place").fetchall()
        return [_error(*each) for each in found]


def allows_blocks(connection: Any) -> bool:
    """Whether the user of a connection may run statements row by row."""
    return bool(connection.execute(_ALLOWED).fetchone()[0])


def _error(state: str, reason: str) -> psycopg.Error:
    error = psycopg.DatabaseError(reason)
    error.sqlstate = state
    return error
