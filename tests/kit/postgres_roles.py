"""Roles of a PostgreSQL server that log in with the password of its administrator."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tests.kit.waiting import wait_for


def login(dsn: str) -> str:
    """Return the options of ``CREATE ROLE`` for such a role. ``dsn``: of the administrator."""
    return f"LOGIN PASSWORD '{urlsplit(dsn).password or ''}'"


def dsn_of(role: str, dsn: str, address: str | None = None) -> str:
    """The dsn of such a role. ``address``: another way to the server (``host:port``)."""
    parts = urlsplit(dsn)
    return urlunsplit(
        parts._replace(netloc=f"{role}:{parts.password or ''}@{address or parts.netloc.rpartition('@')[2]}")
    )


def end_sessions(admin: Any, role: str) -> None:
    """End the sessions of a role, and wait until they are gone. A session that its client has
    closed lasts a moment longer, and may be gone between the look for it and its end. ``admin``: a
    connection that commits by itself."""
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"
    wait_for(lambda: not admin.execute(ended, [role]).fetchall(), what=f"the end of the sessions of {role}")
