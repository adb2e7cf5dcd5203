"""Every kind of table of a database."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    name = f"s_{uuid.uuid4().hex[:12]}"
    if request.param == "sqlite":
        return SqliteDatabase(tmp_path / f"{name}.db")
    if request.param == "mysql":
        return MySqlDatabase(request.getfixturevalue("mariadb").dsn, name)
    return PostgresDatabase(request.getfixturevalue("postgres").dsn, name)
