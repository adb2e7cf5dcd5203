"""Limits that a PostgreSQL server sets to statements and sql_txns, such as ``statement_timeout``.

A statement with many rows that reaches a limit is repeated with fewer rows. If this does not help,
the error names the setting and its origin.
"""

from __future__ import annotations

import threading
from typing import Any

from framework.errors import RetryableError

#: The settings that end a statement or a sql_txn, by SQLSTATE.
SETTINGS = {"57014": "statement_timeout", "25P04": "transaction_timeout", "53400": "temp_file_limit"}
#: The settings for which fewer rows per statement help.
_OF_STATEMENTS = ("statement_timeout", "temp_file_limit")
#: How often the same work may reach a limit, without a success in between, before the topology
#: stops.
_TRIES = 3
#: This many successes in a row double the rows per statement again.
_SUCCESSES = 20
#: The origin of a setting, by the source in ``pg_settings``.
_SOURCES = {
    "default": "by default",
    "environment variable": "in the environment of the server",
    "configuration file": "in the configuration of the server",
    "command line": "in the command line of the server",
    "global": "for all roles (ALTER ROLE ALL SET)",
    "database": "for the database (ALTER DATABASE ... SET)",
    "user": "for the role (ALTER ROLE ... SET)",
    "database user": "for the role in this database (ALTER ROLE ... IN DATABASE ... SET)",
    "client": "by the address (options)",
    "session": "in the session, by another client of the pooler",
}
_SETTING = "SELECT current_setting(name), source FROM pg_settings WHERE name = %s AND setting NOT IN ('0', '-1')"


class LimitReached(RetryableError):
    """A limit of the server has ended a statement or a sql_txn. ``setting``: its name."""

    setting = ""


def reached(text: str, state: str) -> LimitReached:
    error = LimitReached(text)
    error.setting = SETTINGS[state]
    return error


class StatementSize:
    """The rows per statement of a database, by its address, as far as this process knows; and how
    often work has reached a limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[str, int] = {}
        self._successes: dict[str, int] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def rows(self, dsn: str) -> int:
        return self._rows.get(dsn, self._most)

    def halve(self, dsn: str, rows: int, error: LimitReached) -> bool:
        """Reduce the rows per statement, after one with ``rows`` rows has reached a limit. False if
        this does not help."""
        with self._lock:
            size = min(rows, self.rows(dsn))
            if size <= 1 or error.setting not in _OF_STATEMENTS:
                return False
            self._rows[dsn], self._successes[dsn] = size // 2, 0
            return True

    def succeeded(self, dsn: str, work: str) -> None:
        self._failures.pop((dsn, work), None)
        if dsn not in self._rows:
            return
        with self._lock:
            self._successes[dsn] = self._successes.get(dsn, 0) + 1
            if self._successes[dsn] >= _SUCCESSES:
                self._successes[dsn] = 0
                self._rows[dsn] *= 2
                if self._rows[dsn] >= self._most:
                    del self._rows[dsn]

    def failed(self, dsn: str, work: str) -> bool:
        """Whether ``work`` has reached a limit so often that it would do so again."""
        with self._lock:
            self._failures[dsn, work] = self._failures.get((dsn, work), 0) + 1
            return self._failures[dsn, work] >= _TRIES


def limit_of(connection: Any, error: LimitReached) -> str | None:
    """The setting, its value, and its origin. None if the server has no such limit."""
    found = connection.execute(_SETTING, (error.setting,)).fetchone()
    if found is None:
        return None
    value, source = found
    return (
        f"{error.setting} is {value}, set {_SOURCES.get(source, source)}: raise it for this user, or make batches smaller "
        "(batch_records_max of the spout)"
    )
