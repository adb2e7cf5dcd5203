"""Every kind of table of a database."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.kit.row_tables import Database, SqliteDatabase


@pytest.fixture(params=["sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return SqliteDatabase(tmp_path / f"{uuid.uuid4().hex}.db")
