"""Counts how often a connection to PostgreSQL waits for answers, from libpq's own trace."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from sinks.sql.postgres_table_base import _connections

#: The messages after which a client waits; psycopg sends a Flush after each Sync of a pipeline.
_WAITS = ("Query", "Sync", "Flush")
#: The kind of each message of the client: time, sender, length, kind.
_SENT = re.compile(r"^[^\t\n]*\tF\t\d+\t(\w+)", re.MULTILINE)


@contextmanager
def counted_exchanges(dsn: str) -> Iterator[Callable[[], int]]:
    """Trace the idle connection that the next user of this address takes. Yields a function that
    returns how many exchanges it had; call it while the connection is idle."""
    with tempfile.TemporaryFile("w+") as trace:
        connection = _connections.take(dsn)
        connection.pgconn.trace(trace.fileno())
        _connections.give_back(dsn, connection)

        def count() -> int:
            connection.pgconn.untrace()
            trace.seek(0)
            sent = _SENT.findall(trace.read())
            return sum(each in _WAITS and (before, each) != ("Sync", "Flush") for before, each in pairwise(["", *sent]))

        yield count
