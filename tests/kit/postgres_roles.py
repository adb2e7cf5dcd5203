"""Roles of a PostgreSQL server that log in with the password of its administrator."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def login(dsn: str) -> str:
    """Return the options of ``CREATE ROLE`` for such a role. ``dsn``: of the administrator."""
    return f"LOGIN PASSWORD '{urlsplit(dsn).password or ''}'"


def dsn_of(role: str, dsn: str, address: str | None = None) -> str:
    """The dsn of such a role. ``address``: another way to the server (``host:port``)."""
    parts = urlsplit(dsn)
    return urlunsplit(
        parts._replace(netloc=f"{role}:{parts.password or ''}@{address or parts.netloc.rpartition('@')[2]}")
    )
