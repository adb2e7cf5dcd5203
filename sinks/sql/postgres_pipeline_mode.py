"""Statements of PostgreSQL that travel together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import psycopg


class StatementGroup:
    """A connection whose statements are sent without waiting for the answers of earlier ones
    (libpq's pipeline mode). Reading the rows of a statement waits for all that were sent.

    The error of a statement is raised by it or by a later one, at the latest at the end of the
    group. A statement whose row count is needed (``changed_rows``), or which copies
    (``ungrouped``), ends the group. Where libpq has no pipeline mode, each statement waits.
    """

    def __init__(self, connection: Any) -> None:
        self._connection, self._pipeline = connection, ExitStack()
        self._early: dict[tuple[str, tuple[Any, ...]], Any] = {}  # the cursors of sent queries

    def __enter__(self) -> Self:
        if psycopg.Pipeline.is_supported():
            self._pipeline.enter_context(self._connection.pipeline())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._pipeline.__exit__(*raised)

    def execute(self, statement: str, parameters: Sequence[Any] = (), *, binary: bool = False) -> Any:
        early = self._early.pop((statement, tuple(parameters)), None)
        return early if early is not None else self._connection.execute(statement, parameters, binary=binary)

    def send_early(self, query: str, parameters: Sequence[Any]) -> None:
        """Send a query that ``execute`` will be called with, so that its rows arrive together with
        those of a query before it."""
        self._early[query, tuple(parameters)] = self._connection.execute(query, parameters)

    def end(self) -> Any:
        """Wait for all answers. Returns the plain connection."""
        self._early.clear()
        self._pipeline.close()
        return self._connection


def changed_rows(connection: Any, statement: str, parameters: Sequence[Any]) -> int:
    """Execute a statement together with those under way. Returns how many rows it changed."""
    done = connection.execute(statement, parameters)
    ungrouped(connection)
    return int(done.rowcount)


def ungrouped(connection: Any) -> Any:
    """The plain connection; raises the errors of statements that are under way."""
    return connection.end() if isinstance(connection, StatementGroup) else connection
