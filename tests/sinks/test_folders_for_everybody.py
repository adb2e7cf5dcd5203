"""Tables and files in a sticky folder for everybody, such as ``/tmp``: another user of the host
makes files there first, with the names that Ratchet and SQLite look for."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from framework import Fields
from framework.errors import ConfigError
from framework.state.lmdb import LmdbKeyValueStateProvider, LmdbStore
from framework.topology import REBUILT
from sinks import DeltaLakeTable, ParquetTable, SqliteBackend, SqliteTable
from sinks.lake.file_table_base import FileTable
from tests.kit.file_tables import append
from tests.kit.other_users import give_away, needs_root

FIELDS = Fields(word=str, n=int)
PAGE = 4096


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def table_at(path: Path, kind: type[FileTable] = ParquetTable) -> Any:
    table = kind(path)
    table.bind(FIELDS)
    return table


def sqlite_at(path: Path) -> SqliteTable:
    table = SqliteTable(path, "figures", stamp=None)
    table.bind(FIELDS)
    return table


def junk(path: Path) -> None:
    path.write_text("junk")


def outer_table(path: Path) -> None:
    table_at(path.parent.parent).prepare("theirs")


@needs_root
@pytest.mark.parametrize("forge", [junk, os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name), outer_table])
@pytest.mark.parametrize("kind", [ParquetTable, DeltaLakeTable])
def test_a_table_of_another_user_around_a_table_does_not_refuse_it_its_place(
    shared: Path, kind: type[FileTable], forge: Callable[[Path], None]
) -> None:
    if forge is not outer_table:
        (shared / "_ratchet").mkdir()
    forge(shared / "_ratchet" / "schema.json")
    give_away(shared / "_ratchet")
    table = table_at(shared / "ours", kind)
    assert table.check("topology") is None
    table.prepare("topology")
    append(table, 1, pa.record_batch({"word": ["dog"], "n": [1]}))
    assert table_at(shared / "ours", kind).to_table().to_pylist() == [{"word": "dog", "n": 1}]


@needs_root
@pytest.mark.parametrize("kind", [ParquetTable, DeltaLakeTable])
def test_a_folder_that_another_user_has_made_is_no_place_for_a_table(shared: Path, kind: type[FileTable]) -> None:
    (shared / "ours").mkdir()
    give_away(shared / "ours")
    with pytest.raises(ConfigError, match="another user has made"):
        table_at(shared / "ours", kind).prepare("topology")


@needs_root
def test_a_rebuild_does_not_use_a_folder_that_another_user_has_made_beside_the_table(shared: Path) -> None:
    table = table_at(shared / "ours")
    table.prepare("topology")
    theirs = shared / "ours__rebuilt"
    theirs.mkdir(mode=0o777)
    give_away(theirs)
    for use in (
        lambda: table.check_exchange("topology"),
        lambda: table._beside(REBUILT).remove("topology"),
        lambda: table._beside(REBUILT).prepare("topology"),
    ):
        with pytest.raises(ConfigError, match="another user has made"):
            use()
    assert list(theirs.iterdir()) == []


def hot_journal(pages: bytes) -> bytes:
    """The rollback journal that makes a file contain these pages."""
    count = len(pages) // PAGE
    journal = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", count, 0, count, 512, PAGE)
    found = journal.ljust(512, b"\0")
    for number in range(count):
        page = pages[number * PAGE : (number + 1) * PAGE]
        found += struct.pack(">I", number + 1) + page + struct.pack(">I", sum(page[PAGE - 200 : 0 : -200]))
    return found


@needs_root
def test_a_journal_that_another_user_has_made_beside_a_sqlite_file_changes_no_figure(
    shared: Path, tmp_path: Path
) -> None:
    forged = sqlite_at(tmp_path / "forged.db")
    forged.prepare("topology")
    forged.close()
    ours = shared / "rows.db"
    ours.write_bytes((tmp_path / "forged.db").read_bytes())
    with sqlite3.connect(tmp_path / "forged.db") as connection:
        connection.execute("INSERT INTO figures VALUES ('forged', 666)")
    connection.close()
    journal = shared / "rows.db-journal"
    journal.write_bytes(hot_journal((tmp_path / "forged.db").read_bytes()))
    before = ours.read_bytes()
    give_away(journal)
    table = sqlite_at(ours)
    reader = SqliteBackend(ours, "figures", Fields(word=str), Fields(n=int)).for_reading()
    for use in (table.check, table.prepare, reader.check):
        with pytest.raises(ConfigError, match="another user has made it"):
            use("topology")
    assert ours.read_bytes() == before
    journal.unlink()
    with capture_logs() as logs:
        table.prepare("topology")
    table.close()
    assert [each["event"] for each in logs] == ["state.folder_of_everybody"]


@needs_root
@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm"])
def test_a_log_of_the_owner_of_a_sqlite_file_is_read(shared: Path, ending: str) -> None:
    sqlite3.connect(shared / "rows.db").close()
    for name in ("rows.db", f"rows.db{ending}"):
        (shared / name).touch()
        give_away(shared / name)
    with (
        SqliteBackend(shared / "rows.db", "figures", Fields(word=str), Fields(n=int)).for_reading()._reading() as found
    ):
        assert found.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


@needs_root
def test_a_sqlite_file_that_another_user_has_made_is_refused(shared: Path) -> None:
    (shared / "rows.db").touch()
    give_away(shared / "rows.db")
    with pytest.raises(ConfigError, match="another user has made"):
        sqlite_at(shared / "rows.db").prepare("topology")


def test_tables_where_others_may_replace_them_are_warned_of(tmp_path: Path) -> None:
    for mode, warned in ((0o777, 1), (0o755, 0)):
        folder = tmp_path / f"mode-{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        for table in (table_at(folder / "a"), table_at(folder / "b", DeltaLakeTable), sqlite_at(folder / "rows.db")):
            with capture_logs() as logs:
                table.prepare("topology")
            table.close()
            said = [each["advice"] for each in logs if each["event"] == "state.folder_of_others"]
            assert len(said) == warned
            assert all(f"another user may replace what is in {folder}" in each for each in said)


@needs_root
@pytest.mark.parametrize("theirs", ["states", "states/topology-1", "states/topology-1/counts"])
def test_a_state_is_not_kept_in_a_folder_that_another_user_has_made(shared: Path, theirs: str) -> None:
    folder = shared / theirs
    folder.mkdir(parents=True)
    for each in (folder, *folder.parents):
        if each.is_relative_to(shared / "states"):
            each.chmod(0o1777)
    give_away(folder)
    store = shared / "states" / "topology-1" / "counts"
    with pytest.raises(ConfigError, match="another user has made"):
        LmdbKeyValueStateProvider().check_before_start(
            {"topology.state.provider.config": {"path": str(shared / "states")}}
        )
        LmdbStore(store, sync=True)
    assert not (store / "data.mdb").exists()
