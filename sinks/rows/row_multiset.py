"""Rows of two tables without keys, counted on disk to be compared."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import xxhash

from framework.bounded_pages import pages_of

Values = tuple[Any, ...]
#: Rows that are added by one statement.
_ROWS = 10_000


class Counted(NamedTuple):
    """A row, and how often it is in the sink (``found``) and in the source (``expected``)."""

    row: Values
    found: int
    expected: int


class RowMultiset:
    """How often each row occurs in a sink, and how often it should. The counts are in a temporary
    file, which goes with this object; used by one thread. Equal rows must be equal as text: give
    values in their canonical form."""

    def __init__(self) -> None:
        self._counts = sqlite3.connect("", isolation_level=None)
        self._counts.execute(
            "CREATE TABLE counts (digest BLOB PRIMARY KEY, content BLOB, found INTEGER, expected INTEGER) WITHOUT ROWID"
        )

    def add_found(self, rows: Iterable[Values]) -> None:
        self._add("1, 0", "found = found + 1", rows)

    def add_expected(self, rows: Iterable[Values]) -> None:
        self._add("0, 1", "expected = expected + 1", rows)

    def _add(self, counts: str, change: str, rows: Iterable[Values]) -> None:
        statement = f"INSERT INTO counts VALUES (?, ?, {counts}) ON CONFLICT (digest) DO UPDATE SET {change}"
        for some in pages_of(rows, _ROWS):
            self._counts.execute("BEGIN")
            self._counts.executemany(statement, [(_digest(row), pickle.dumps(row)) for row in some])
            self._counts.execute("COMMIT")

    def compared(self) -> int:
        """The number of rows in the sink, and of those that only the source gives. A row with
        another value is both."""
        (count,) = self._counts.execute("SELECT TOTAL(MAX(found, expected)) FROM counts").fetchone()
        return int(count)

    def rows(self) -> Iterator[Counted]:
        return self._selected("TRUE")

    def differing(self) -> Iterator[Counted]:
        """The rows that the sink has more or less often than the source gives."""
        return self._selected("found <> expected")

    def _selected(self, condition: str) -> Iterator[Counted]:
        for content, found, expected in self._counts.execute(
            f"SELECT content, found, expected FROM counts WHERE {condition}"
        ):
            yield Counted(pickle.loads(content), found, expected)


def _digest(row: Values) -> bytes:
    return xxhash.xxh3_128_digest(repr(row).encode("utf-8", "surrogatepass"))
