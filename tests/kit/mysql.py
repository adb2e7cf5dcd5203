"""Another client of a MariaDB server, with the server's own settings of a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pymysql


class Client:
    def __init__(self, connection: pymysql.Connection[Any]) -> None:
        self.connection = connection

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())


@contextmanager
def client(dsn: str, **settings: Any) -> Iterator[Client]:
    """Each statement commits by itself. Names may stand in double quotes."""
    parts = urlsplit(dsn)
    connection: pymysql.Connection[Any] = pymysql.connect(
        host=parts.hostname,
        port=parts.port or 0,
        user=parts.username,
        password=unquote(parts.password or ""),
        database=parts.path[1:],
        charset="utf8mb4",
        autocommit=True,
        ssl_disabled=True,  # otherwise each connection loads the authorities of the system
        **settings,
    )
    try:
        made = Client(connection)
        made.execute("SET SESSION sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES')")
        yield made
    finally:
        connection.close()
