"""Every kind of table of a database."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.kit.row_tables import Database, PostgresDatabase, SqliteDatabase


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    name = f"s_{uuid.uuid4().hex[:12]}"
    if request.param == "sqlite":
        return SqliteDatabase(tmp_path / f"{name}.db")
    return PostgresDatabase(request.getfixturevalue("postgres").dsn, name)
