"""Queries to a PostgreSQL server about itself.

A managed service may not answer all of them: Aurora has no functions of the write-ahead log. Then a
weaker check is used, and logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

#: The SQLSTATEs of queries that a server refuses or does not know.
_REFUSED = ("42501", "0A000", "42883", "42P01", "55000")
_STARTED = "extract(epoch FROM pg_postmaster_start_time())"
_TIMELINE = "CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END"
#: The identity of the store, as SQL expressions, the best one first: the database cluster, its
#: timeline, and the start time of the server. It changes after a restore, after the promotion of a
#: standby, and after a restart (which may have used a copy of the files). Each comes with the parts
#: that the server does not report.
_IDENTITIES = (
    (f"(SELECT system_identifier FROM pg_control_system()) || '/' || {_TIMELINE} || '/' || {_STARTED}", ""),
    (f"coalesce(host(inet_server_addr()), '') || '/' || {_STARTED}", "its cluster and timeline"),
    (f"{_STARTED}::text", "its cluster, timeline and address"),
    ("''", "its cluster, timeline, address and start time"),
)


def answer(connection: Any, query: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
    """The row of a query's result; None if the server refuses the query. The sql_txn continues."""
    try:
        with connection.transaction():
            row: tuple[Any, ...] | None = connection.execute(query, parameters).fetchone()
            return row
    except psycopg.Error as error:
        if error.sqlstate not in _REFUSED:
            raise
        return None


def identity(connection: Any) -> tuple[str, str]:
    """A SQL expression for the identity of the store, and the parts that the server does not
    report.
    """
    return next(each for each in _IDENTITIES if answer(connection, f"SELECT {each[0]}") is not None)


def losses(connection: Any, tables: dict[str, str], untold: str) -> Iterator[tuple[str, str]]:
    """The ways in which the server can lose committed data, with their remedies.

    ``tables``: the names of tables, and their names with the schema. ``untold``: the parts of its
    identity that the server does not report.
    """
    if untold:
        yield (
            f"the server does not tell {untold}: that another one has taken its place within a commit may not be noticed",
            "allow pg_control_system, pg_current_wal_lsn, pg_walfile_name and pg_postmaster_start_time if the service can",
        )
    names = ("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")
    settings = {name: (answer(connection, "SELECT current_setting(%s, true)", (name,)) or (None,))[0] for name in names}
    for setting in ("fsync", "full_page_writes"):
        if settings[setting] == "off":
            yield f"{setting} is off", f"set {setting} = on"
    (followers,) = answer(connection, "SELECT count(*) FROM pg_stat_replication") or (0,)
    if followers and (not settings["synchronous_standby_names"] or settings["synchronous_commit"] == "local"):
        yield (
            f"{followers} standby{'s' if followers > 1 else ''} may follow later than a commit is acknowledged",
            "set synchronous_standby_names, and synchronous_commit = on",
        )
    for table, name in tables.items():
        query = "SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass(%s)"
        if connection.execute(query, (name,)).fetchone() == (True,):
            yield f"table {table} is unlogged", f"ALTER TABLE {name} SET LOGGED"
