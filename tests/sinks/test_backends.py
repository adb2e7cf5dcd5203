"""Every backend under the one contract suite, on real servers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from examples.lmdb_backend import LmdbBackend
from framework import Fields
from integration import PostgresServer, RedisServer
from sinks import MapBackend, MemoryBackend, PostgresBackend, RedisBackend, SqliteBackend
from sinks.contract import BackendContract

pytestmark = pytest.mark.behaviour("3.1", "3.2", "3.3")


class TestMemoryBackend(BackendContract):
    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        made = MemoryBackend(name)
        made.bind(key, value)
        return made


class TestSqliteBackend(BackendContract):
    cannot_hold = (pa.uint64(),)

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "rows.db"

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return SqliteBackend(self.path, name, key, value)


class StagedSqlite(SqliteBackend):
    _staged_from_rows = 0


class TestStagedSqliteBackend(TestSqliteBackend):
    """Batches of any size by way of the temporary table."""

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return StagedSqlite(self.path, name, key, value)


@pytest.mark.behaviour("3.6")
class TestLmdbBackend(BackendContract):
    """A backend that is none of ours, by the suite that its author runs."""

    longest_key = 505

    @pytest.fixture(autouse=True)
    def folder_of_files(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return LmdbBackend(self.folder / name, key, value)


@pytest.mark.integration
class TestPostgresBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer) -> None:
        self.dsn = postgres.dsn

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return PostgresBackend(self.dsn, name, key, value)


class StagedPostgres(PostgresBackend):
    _staged_from_rows = 0


class TestStagedPostgresBackend(TestPostgresBackend):
    """Batches of any size by COPY."""

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return StagedPostgres(self.dsn, name, key, value)


@pytest.mark.integration
class TestRedisBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def server(self, redis_server: RedisServer) -> None:
        self.url = redis_server.url

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return RedisBackend(self.url, name, key, value)
