"""One state's header in a SQL database, and the connections of its writers (C1).

A state is a map (``sinks.sql.backend``) or a table of rows (``sinks.rows``). A subclass provides
connections and a dialect.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar

import pyarrow as pa

from framework.errors import BadRecordError, CorruptStateError
from framework.topology import Header
from sinks.sql.schema import HEADERS_TABLE, Dialect, HeadersTable, header_of, header_values
from sinks.store_identity import StoreIdentity


class SqlRollBack(Exception):
    """Ends a sql_txn that only reads."""


class SqlTableBase(StoreIdentity):
    """A table of a database, and its header in ``_ratchet_headers`` of the same database."""

    dialect: ClassVar[Dialect]
    #: The end of a SELECT that locks the header until the sql_txn ends: shared, to write rows, and
    #: exclusive, to change the header.
    _keep_header: ClassVar[str] = ""
    _own_header: ClassVar[str] = ""
    #: The schema of the tables; empty while unknown, and in a database without schemas.
    _home: str = ""
    #: The name of the table.
    _table: str

    # --- provided by a database -------------------------------------------------------------------

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Any]:
        """A connection. Converts the database's errors to Ratchet's error classes by recovery."""

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Any]:
        """A connection in one sql_txn, committed at the end. Raises ``CommitOutcomeUnknown`` when
        the commit gets no answer."""

    def _writing_grouped(self) -> AbstractContextManager[Any]:
        """As ``_writing``; if the database can do that, statements travel together, and the error
        of one is raised by a later one or at the end."""
        return self._writing()

    @abstractmethod
    def _named_errors(self) -> AbstractContextManager[None]:
        """Converts the database's errors to Ratchet's, which name this table."""

    @abstractmethod
    def _store(self, connection: Any) -> str:
        """A SQL expression for the identity of this store. It differs if a store with older data
        replaces this one (C27)."""

    def _stored(self, value: Any, declared: pa.DataType) -> Any:
        """The value as a bound parameter."""
        return value

    def _keeps(self, declared: pa.DataType) -> bool:
        """Whether ``_stored`` and ``_loaded`` return every value of this type as it is."""
        return False

    def _loaded(self, value: Any, declared: pa.DataType) -> Any:
        """A selected value as a Python value of the declared type."""
        return value

    def _probe(self, connection: Any, *, exists: bool) -> None:
        """Raise ``ConfigError`` if the store or the user's permissions do not allow the statements
        of a run.
        """

    @abstractmethod
    def _prepare(self, connection: Any, topology_id: str) -> Header:
        """Create missing parts, check existing ones, and return the header, in the sql_txn of this
        connection."""

    @contextmanager
    def _creating(self, connection: Any) -> Iterator[None]:
        """For statements that create or alter tables."""
        yield

    # --- header -----------------------------------------------------------------------------------

    @property
    def _headers(self) -> HeadersTable:
        return HeadersTable(self.dialect, self._home)

    def _create_headers(self, connection: Any) -> None:
        connection.execute(self._headers.ddl())

    def check(self, topology_id: str) -> Header | None:
        """Prepares in an sql_txn that is rolled back."""
        header = None
        with suppress(SqlRollBack), self._writing() as connection:
            header = self._prepare(connection, topology_id)
            raise SqlRollBack
        return header

    def prepare(self, topology_id: str) -> Header:
        with self._writing() as connection:
            return self._prepare(connection, topology_id)

    def read_header(self) -> Header:
        with self._reading() as connection:
            return self._found_header(connection, "")

    def raise_header(self, expected: Header, new: Header) -> None:
        must_be = self._must_be(expected, new)
        with self._writing_grouped() as connection:
            found, store = self._select_header_and_store(connection)
            if found != expected:
                raise found.refused(expected, self.location)
            if must_be not in ("", store):
                raise self._another_store(expected)
            self._enter(connection, expected, new)
            connection.execute(self._headers.update(), (*header_values(new), self._table))
        self._opened_in = store

    def _enter(self, connection: Any, expected: Header, new: Header) -> None:
        """Prepare the table for a new attempt, in the sql_txn that opens it. Called for every new
        header. Statements may travel together, so no row count is known."""

    # --- inside -----------------------------------------------------------------------------------

    def _accepts(self, write: Callable[[Any], object]) -> bool:
        """Whether the database accepts a write. The write is rolled back."""
        try:
            with suppress(SqlRollBack), self._writing() as connection:
                write(connection)
                raise SqlRollBack
        except BadRecordError:
            return False
        return True

    def _select_header(self, connection: Any, lock: str) -> Header | None:
        row = self._select(connection, self._headers.select() + lock)
        return header_of(row, self.location) if row is not None else None

    def _select(self, connection: Any, statement: str) -> Any:
        """The row of a statement about the header; None if there is none."""
        return connection.execute(statement, (self._table,)).fetchone()

    def _select_header_and_store(self, connection: Any) -> tuple[Header, str]:
        """The header, locked for a change, and the identity of the store, in one statement."""
        row = self._select(connection, self._headers.select(self._store(connection)) + self._own_header)
        if row is None:
            raise self._no_header()
        return header_of(row, self.location), row[-1]

    def _found_header(self, connection: Any, lock: str) -> Header:
        header = self._select_header(connection, lock)
        if header is None:
            raise self._no_header()
        return header

    def _no_header(self) -> CorruptStateError:
        return CorruptStateError(f"{self.location}: its header is gone from {HEADERS_TABLE}; restore the database")

    def _check_header(self, connection: Any, expected: Header, lock: str) -> None:
        found = self._found_header(connection, lock)
        if found != expected:
            raise found.refused(expected, self.location)
