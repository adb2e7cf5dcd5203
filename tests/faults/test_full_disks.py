"""A disk that is full under a sink or a state: nothing is lost, and the topology goes on when there
is room."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import RetryableError
from framework.state import LmdbKeyValueStateProvider
from framework.topology import Topology
from framework.transactions import MemoryStore
from integration import MariaDbServer, PostgresServer
from integration.folder_permissions import open_folder
from integration.mariadb import USER as MARIADB_USER
from integration.postgres import USER
from integration.server_launcher import EMBEDDED
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    MySqlTable,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    PostgresTable,
    SqliteBackend,
    SqliteTable,
    StateCommitter,
    UpsertCommitter,
)
from sinks.rows.transactional_table import RowTable
from spouts import OpaqueMemoryTransactionalSpout
from tests.faults.conftest import Disk
from tests.kit.mysql import client
from tests.kit.state_parts import Log, checkpointed, counting, forget_journal, journal, lmdb
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.fault(27), pytest.mark.slow]
BEFORE = ["dog", "cat", "dog"]
#: More than the rest of a page of a database has room for.
AFTER = [f"word-{number:04}-{'x' * 100}" for number in range(2_000)]


def goes_on_when_there_is_room(disk: Disk, spout: Any, topology: Topology) -> None:
    """Commits ``BEFORE``; then ``AFTER``, once there is room."""
    with submit(topology, {"topology.max.attempts": 2}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        disk.fill()
        for word in AFTER:
            spout.append("0", [word])
        wait_for(lambda: run.status().attempts_failed >= 3)
        held = run.status().committed_txid
        disk.empty()
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid > held


def words() -> OpaqueMemoryTransactionalSpout:
    return OpaqueMemoryTransactionalSpout({0: [[word] for word in BEFORE]}, Fields(word=str), len(AFTER))


def counted(state: OpaqueMapState) -> tuple[Any, Topology]:
    spout = words()
    builder = TransactionalTopologyBuilder("full", "spout", spout)
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    return spout, builder.build()


def test_sqlite_goes_on_when_there_is_room(small_disk: Disk) -> None:
    path = small_disk.path / "x.db"
    goes_on_when_there_is_room(small_disk, *counted(OpaqueMapState(SqliteBackend(path, "words"))))
    with sqlite3.connect(path) as reader:
        found = dict(reader.execute("SELECT word, n FROM words").fetchall())
    assert found == Counter([*BEFORE, *AFTER])


@pytest.mark.parametrize("kind", [ParquetTable, DeltaLakeTable])
def test_a_table_of_files_goes_on_when_there_is_room(small_disk: Disk, kind: Callable[[Path], Any]) -> None:
    spout, table = words(), kind(small_disk.path / "table")
    builder = TransactionalTopologyBuilder("full", "spout", spout)
    builder.set_committer_bolt("append", AppendCommitter(table)).shuffle_grouping("spout")
    goes_on_when_there_is_room(small_disk, spout, builder.build())
    assert Counter(table.to_table()["word"].to_pylist()) == Counter([*BEFORE, *AFTER])


def landed(table: RowTable) -> tuple[Any, Topology]:
    spout = words()
    builder = TransactionalTopologyBuilder("full", "spout", spout)
    builder.set_committer_bolt("land", AppendCommitter(table)).global_grouping("spout")
    return spout, builder.build()


def upserted(table: RowTable) -> tuple[Any, Topology]:
    spout = words()
    builder = TransactionalTopologyBuilder("full", "spout", spout)
    builder.set_committer_bolt("newest", UpsertCommitter(table, ["word"])).global_grouping("spout")
    return spout, builder.build()


def test_rows_of_sqlite_go_on_when_there_is_room(small_disk: Disk) -> None:
    path = small_disk.path / "x.db"
    goes_on_when_there_is_room(small_disk, *upserted(SqliteTable(path, "words")))
    with sqlite3.connect(path) as reader:
        found = [word for (word,) in reader.execute("SELECT word FROM words ORDER BY word").fetchall()]
    assert found == sorted({*BEFORE, *AFTER})


@pytest.fixture
def on_small_disk(small_disk: Disk) -> Iterator[str]:
    """The address of a server that keeps new tables in a tablespace on the small disk. A container
    would not see the disk."""
    place = small_disk.path / "tablespace"
    place.mkdir()
    shutil.chown(place, USER, USER)
    with open_folder() as folder, PostgresServer(folder / "postgres", where=EMBEDDED) as server:
        with psycopg.connect(server.dsn, autocommit=True) as database:
            database.execute(f"CREATE TABLESPACE small LOCATION '{place}'")  # type: ignore[call-overload]
            database.execute("ALTER ROLE ratchet SET default_tablespace = 'small'")
        yield server.dsn


@pytest.mark.integration
@pytest.mark.parametrize("kind", [landed, upserted])
def test_rows_of_postgresql_go_on_when_there_is_room(
    small_disk: Disk, on_small_disk: str, kind: Callable[[RowTable], tuple[Any, Topology]]
) -> None:
    goes_on_when_there_is_room(small_disk, *kind(PostgresTable(on_small_disk, "words")))
    with psycopg.connect(on_small_disk) as database:
        found = [word for (word,) in database.execute('SELECT word FROM words ORDER BY word COLLATE "C"').fetchall()]
    assert found == sorted({*BEFORE, *AFTER} if kind is upserted else [*BEFORE, *AFTER])


@pytest.mark.integration
def test_rows_of_mariadb_go_on_when_there_is_room(small_disk: Disk, own_mariadb: MariaDbServer) -> None:
    """The table was made by hand, with its data on the small disk."""
    place = small_disk.path / "data"
    place.mkdir()
    shutil.chown(place, MARIADB_USER, MARIADB_USER)
    with client(own_mariadb.dsn) as database:
        database.execute(f"CREATE TABLE words (word varchar(200)) DATA DIRECTORY = '{place}'")
    goes_on_when_there_is_room(small_disk, *landed(MySqlTable(own_mariadb.dsn, "words")))
    with client(own_mariadb.dsn) as database:
        found = [word for (word,) in database.execute("SELECT word FROM words")]
    assert sorted(found) == sorted([*BEFORE, *AFTER])


@pytest.mark.integration
def test_postgresql_goes_on_when_there_is_room(small_disk: Disk, on_small_disk: str) -> None:
    goes_on_when_there_is_room(small_disk, *counted(OpaqueMapState(PostgresBackend(on_small_disk, "words"))))
    with psycopg.connect(on_small_disk) as database:
        found = dict(database.execute("SELECT word, n FROM words").fetchall())
    assert found == Counter([*BEFORE, *AFTER])


def test_a_topology_with_state_goes_on_when_there_is_room(small_disk: Disk, name: str) -> None:
    conf, store, filled = lmdb(small_disk.path / "state"), MemoryStore(), []

    def fill(_: Any) -> None:
        if not filled:
            filled.append(small_disk.fill())

    journal(name).on["pre_prepare"] = fill
    with submit(counting(name, Log(name, [AFTER])), conf, store, "local") as run:
        wait_for(lambda: "No space left on device" in str(run.status().last_error))
        small_disk.empty()
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, name) == Counter(AFTER)
    forget_journal(name)


def test_a_state_in_lmdb_goes_on_when_there_is_room(small_disk: Disk) -> None:
    provider = LmdbKeyValueStateProvider()
    conf = {"topology.state.provider.config": {"path": str(small_disk.path)}}
    state = provider.new_state("t/b/1/0", conf, None)
    state.put("dog", 1)
    state.prepare_commit(1)
    state.commit(1)
    small_disk.fill()
    for word in AFTER:
        state.put(word, 1)
    with pytest.raises(RetryableError, match="No space left on device"):
        state.prepare_commit(2)
    small_disk.empty()
    state.recover(1, prepared=False, upto=2)
    for word in AFTER:
        state.put(word, 1)
    state.prepare_commit(3)
    small_disk.fill()
    try:
        state.commit(3)
    except RetryableError:
        small_disk.empty()
        state.recover(3, prepared=True, upto=3)
    assert dict(state.items()) == {"dog": 1, **dict.fromkeys(AFTER, 1)}
    provider.close()
