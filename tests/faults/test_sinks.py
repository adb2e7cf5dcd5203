"""Faults of sinks and of the links to them: rows 21, 22, 25, 27 to 29."""

from __future__ import annotations

import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from framework.transactions.run import TopologyFailed
from integration import PostgresServer, TcpProxy, ZooKeeperServer
from sinks import Count, OpaqueMapState, PostgresBackend, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.faults.conftest import Disk
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.striking import lose_a_reply, strike
from tests.kit.targets import Often
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]


def proxied(server: PostgresServer, link: TcpProxy) -> str:
    return server.dsn.replace(server.address, link.address)


@pytest.mark.slow
@pytest.mark.fault(21)
@pytest.mark.parametrize("values", ["opaque", "transactional"])
def test_postgres_killed_while_it_is_written_to_ends_exact(
    make_job: Callable[..., Job],
    own_postgres: PostgresServer,
    faults: Faults,
    values: str,
    seed: int,
) -> None:
    def bounce() -> None:
        own_postgres.kill()
        own_postgres.start()

    job = make_job("postgres", values, address=own_postgres.dsn)
    kind = "PostgreSQL killed and restarted"
    strike(job, faults, kind, bounce, times=5, chance=random.Random(seed), pause_s=0.01)


@pytest.mark.fault(21)
@pytest.mark.slow
@pytest.mark.parametrize("values", ["opaque", "transactional"])
def test_a_lost_acknowledgement_of_postgres_is_reconciled(
    make_job: Callable[..., Job],
    own_postgres: PostgresServer,
    faults: Faults,
    values: str,
    often: Often,
) -> None:
    with TcpProxy(own_postgres.address) as link:
        job = make_job("postgres", values, address=proxied(own_postgres, link))
        strike(job, faults, "PostgreSQL's answer lost", lose_a_reply(link), times=often(3, 8), pause_s=0.01)


@pytest.mark.fault(22)
@pytest.mark.slow
def test_a_lock_on_the_sqlite_file_is_waited_for(make_job: Callable[..., Job], faults: Faults, often: Often) -> None:
    job = make_job()

    def lock() -> None:
        rival = sqlite3.connect(job.settings["app.address"], isolation_level=None, timeout=PATIENCE_S)
        rival.execute("BEGIN EXCLUSIVE")
        time.sleep(1.0)
        rival.execute("ROLLBACK")
        rival.close()

    strike(job, faults, "SQLite locked for 1 s", lock, times=often(1, 3))


WORDS = [f"w{number % 7}" for number in range(700)]


class Struck(PostgresBackend):
    """A backend that calls ``strike`` once, when a commit task is about to write."""

    strike: Callable[[], None] | None = None

    def apply(self, *arguments: Any, **options: Any) -> Any:
        strike, Struck.strike = Struck.strike, None
        if strike is not None:
            strike()
        return super().apply(*arguments, **options)


@pytest.mark.fault(25)
def test_a_batch_that_one_sink_committed_while_the_other_was_down_is_replayed_unchanged(
    own_postgres: PostgresServer, tmp_path: Path, name: str, faults: Faults
) -> None:
    """PostgreSQL goes down after SQLite has committed the batch.

    Further tries leave the rows in SQLite as they are.
    """
    path, table = tmp_path / "a.db", name.replace("-", "_")
    spout = OpaqueMemoryTransactionalSpout({0: [[word] for word in WORDS]}, Fields(word=str), 5)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    for id, backend in (("a", SqliteBackend(path, "a")), ("b", Struck(own_postgres.dsn, table))):
        builder.set_bolt(id, StateCommitter(OpaqueMapState(backend), ["word"], {"n": Count()})).global_grouping("spout")
    built = builder.build()

    def rows() -> list[object]:
        with sqlite3.connect(path) as connection:
            return connection.execute("SELECT word, n, _txid FROM a ORDER BY word").fetchall()

    store = MemoryStore()
    with submit(built, {"topology.max.attempts": 1000}, store, "local") as run:
        run.wait_for_commit(4, PATIENCE_S)
        Struck.strike = own_postgres.kill
        wait_for(lambda: run.status().attempts_failed >= 3)
        held, seen = run.status().committed_txid, rows()
        wait_for(lambda: run.status().attempts_failed >= 6)
        assert rows() == seen
        assert max(txid for _, _, txid in seen) == held + 1  # type: ignore[misc] - A has it, B does not
        own_postgres.start()
        faults.injected()
        run.wait_until_caught_up(PATIENCE_S)
    with sqlite3.connect(path) as connection:
        in_a = dict(connection.execute("SELECT word, n FROM a").fetchall())
    with psycopg.connect(own_postgres.dsn) as database:
        in_b = dict(database.execute(f"SELECT word, n FROM {table}").fetchall())
    assert in_a == in_b == dict(Counter(WORDS))


@pytest.mark.fault(27)
@pytest.mark.slow
def test_a_full_disk_under_sqlite_fails_attempts_until_there_is_room(
    make_job: Callable[..., Job], small_disk: Disk, faults: Faults
) -> None:
    job = make_job(address=str(small_disk.path / "x.db"))

    def fill() -> None:
        small_disk.fill()
        before = job.committed()
        time.sleep(1.0)
        assert job.committed() <= before + 1  # a transaction that was written before may still be closed
        small_disk.empty()

    strike(job, faults, "SQLite's disk full for 1 s", fill, times=3)


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE words SET _txid = NULL", "the row has no stamp"),
        ("UPDATE words SET _txid = _txid + (1 << 20)", "stamp"),
    ],
)
def test_a_damaged_row_stops_the_topology_and_is_named(tmp_path: Path, faults: Faults, damage: str, words: str) -> None:
    path = tmp_path / "x.db"
    spout = OpaqueMemoryTransactionalSpout({0: [[word] for word in WORDS]}, Fields(word=str), 50)
    builder = TransactionalTopologyBuilder("damaged", "spout", spout)
    count = StateCommitter(OpaqueMapState(SqliteBackend(path, "words")), ["word"], {"n": Count()})
    builder.set_bolt("count", count).global_grouping("spout")
    store = MemoryStore()
    spout.set_take(10)
    with submit(builder.build(), {}, store, "local") as run:
        run.wait_for_commit(2, PATIENCE_S)
    with sqlite3.connect(path) as connection:  # as in a damaged file, whose constraints no longer hold
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = replace(sql, ' NOT NULL', '') WHERE name = 'words'")
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    faults.injected()
    with pytest.raises(Exception, match=words) as stopped:
        run = submit(builder.build(), {"topology.max.attempts": 3}, store, "local")
        try:
            run.wait_until_caught_up(PATIENCE_S)
        finally:
            run.stop()
    assert str(path) in str(stopped.value) or "words" in str(stopped.value)
    assert isinstance(stopped.value, TopologyFailed) or "Corrupt" in type(stopped.value).__name__


@pytest.mark.fault(29)
@pytest.mark.parametrize("how", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("slow", "sliced")), "reset"])
def test_slow_sliced_and_reset_links_end_exact(
    make_job: Callable[..., Job],
    zookeeper: ZooKeeperServer,
    own_postgres: PostgresServer,
    faults: Faults,
    how: str,
    often: Often,
) -> None:
    with TcpProxy(zookeeper.address) as to_zookeeper, TcpProxy(own_postgres.address) as to_sink:
        links = (to_zookeeper, to_sink)
        address = proxied(own_postgres, to_sink)
        job = make_job("postgres", zookeeper=to_zookeeper.address, watched=zookeeper.address, address=address)

        def hurt() -> None:
            for link in links:
                if how == "slow":
                    link.delay(0.05)
                elif how == "sliced":
                    link.slice(13)
                else:
                    link.reset()

        strike(job, faults, f"links {how}", hurt, times=often(2, 4) if how == "reset" else 1)
