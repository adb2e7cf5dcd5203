"""Every backend under the one contract suite."""

from pathlib import Path

import pytest

from framework import Fields
from sinks import MapBackend, MemoryBackend, SqliteBackend
from tests.contracts import BackendContract

KEY, VALUE = Fields(word=str), Fields(n=int)
WIDE = Fields(count=int, total=int, least=int, most=int)


class TestMemoryBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> MapBackend:
        return MemoryBackend()

    @pytest.fixture
    def wide_backend(self) -> MapBackend:
        return MemoryBackend()

    def fresh(self, backend: MapBackend, name: str) -> MapBackend:
        made = MemoryBackend(name)
        made.bind(KEY, WIDE)
        return made


class TestSqliteBackend(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> MapBackend:
        return SqliteBackend(tmp_path / "rows.db", "rows", KEY, VALUE)

    @pytest.fixture
    def wide_backend(self, tmp_path: Path) -> MapBackend:
        self.path = tmp_path / "wide.db"
        return SqliteBackend(self.path, "wide", KEY, WIDE)

    def fresh(self, backend: MapBackend, name: str) -> MapBackend:
        return SqliteBackend(self.path, name, KEY, WIDE)
