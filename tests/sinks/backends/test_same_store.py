"""C27: a store that lost rows between ``open`` and ``done`` is not declared done."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from structlog.testing import capture_logs

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import RetryableError, StaleWriterError
from framework.topology import Header, OpenCommit, Stamp
from framework.transactions import MemoryStore
from integration import PostgresServer, RedisServer, TcpProxy
from integration.folder_permissions import open_folder
from sinks import Count, MapBackend, OpaqueMapState, PostgresBackend, RedisBackend, Row, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.rule("C27")

KEY, VALUE = Fields(word=str), Fields(n=int)
ROW = Row((5,), Stamp(1, 1, 1), None, "w")


@pytest.fixture
def redis_of(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts Redis servers for one test."""
    started: list[RedisServer] = []

    def start(**settings: str) -> RedisServer:
        named = {each.replace("_", "-"): value for each, value in settings.items()}
        server = RedisServer(tmp_path / f"redis-{len(started)}", settings=named)
        server.start()
        started.append(server)
        return server

    yield start
    for each in started:
        each.kill()  # a stop would wait for replicas


@pytest.fixture
def name() -> str:
    return f"s_{uuid.uuid4().hex[:10]}"


def opened(backend: MapBackend, attempt: int = 1) -> Header:
    """The backend's header, raised to an attempt at transaction 1."""
    header = backend.prepare("topology")
    raised = header.opened(1, OpenCommit(1, attempt, "digest"))
    backend.raise_header(header, raised)
    return raised


def go_back(server: RedisServer, copy: Path) -> None:
    """Kill the server, and start it with the data of a copy."""
    server.kill()
    shutil.rmtree(server.folder / "data")
    shutil.copytree(copy, server.folder / "data")
    server.start()


def refused_then_done_again(backend: MapBackend, header: Header) -> None:
    """Check that this attempt can never finish its header,
    and that another attempt at the transaction can.
    """
    for _ in range(2):
        with pytest.raises(RetryableError, match="is not the one in which 1:1 of epoch 1 was opened"):
            backend.raise_header(header, header.finished(1))
    assert backend.read_header() == header
    again = header.opened(1, OpenCommit(1, 2, "digest"))
    backend.raise_header(header, again)
    backend.multi_put(again, [("dog",)], [None], [ROW])
    backend.raise_header(again, again.finished(1))
    assert (backend.read_header().done, backend.multi_get([("dog",)])) == (1, [ROW])


@pytest.mark.integration
def test_redis_that_lost_rows_of_an_open_transaction_refuses_done(
    redis_of: Callable[..., RedisServer], tmp_path: Path, name: str
) -> None:
    server = redis_of()
    backend = RedisBackend(server.url, name, KEY, VALUE)
    header = opened(backend)
    shutil.copytree(server.folder / "data", tmp_path / "before the rows")
    backend.multi_put(header, [("dog",)], [None], [ROW])
    go_back(server, tmp_path / "before the rows")
    refused_then_done_again(backend, header)


@pytest.mark.integration
def test_redis_that_lost_a_roll_back_is_not_marked_as_rolled_back(
    redis_of: Callable[..., RedisServer], tmp_path: Path, name: str
) -> None:
    """C7: a plan whose rows came back must not be dropped."""
    server = redis_of()
    backend = RedisBackend(server.url, name, KEY, VALUE)
    header = opened(backend)
    backend.multi_put(header, [("dog",)], [None], [ROW])
    shutil.copytree(server.folder / "data", tmp_path / "before the roll-back")
    assert backend.roll_back(header) == 1
    go_back(server, tmp_path / "before the roll-back")
    with pytest.raises(RetryableError, match="is not the one"):
        backend.raise_header(header, header.opened(1, OpenCommit(1, 1, "")))


@pytest.mark.slow
@pytest.mark.integration
def test_a_lagging_replica_of_redis_that_was_promoted_refuses_done(
    redis_of: Callable[..., RedisServer], name: str
) -> None:
    first = redis_of()
    second = redis_of(replicaof=f"127.0.0.1 {first.port}")
    with TcpProxy(f"127.0.0.1:{first.port}") as proxy:
        backend = RedisBackend(f"redis://{proxy.address}/0", name, KEY, VALUE)
        header = opened(backend)
        with redis.Redis.from_url(second.url) as replica:
            wait_for(lambda: replica.get(f"{{{name}}}:header") is not None)
            wait_for(lambda: b'"txid":1' in (replica.get(f"{{{name}}}:header") or b""))
            replica.execute_command("REPLICAOF", "NO", "ONE")
        backend.multi_put(header, [("dog",)], [None], [ROW])
        first.kill()
        proxy.retarget(f"127.0.0.1:{second.port}")
        refused_then_done_again(backend, header)


@pytest.mark.slow
@pytest.mark.integration
def test_a_redis_that_copied_another_servers_data_and_leads_again_refuses_done(
    redis_of: Callable[..., RedisServer], name: str
) -> None:
    """The server's process is the same, but its data are not."""
    first, second = redis_of(), redis_of()
    backend = RedisBackend(first.url, name, KEY, VALUE)
    header = opened(backend)
    with redis.Redis.from_url(first.url) as one, redis.Redis.from_url(second.url) as other:
        other.execute_command("REPLICAOF", "127.0.0.1", str(first.port))
        wait_for(lambda: other.get(f"{{{name}}}:header") == one.get(f"{{{name}}}:header"))
        other.execute_command("REPLICAOF", "NO", "ONE")
        backend.multi_put(header, [("dog",)], [None], [ROW])
        one.execute_command("REPLICAOF", "127.0.0.1", str(second.port))
        wait_for(lambda: one.info("replication").get("master_link_status") == "up")
        wait_for(lambda: not one.hexists(f"{{{name}}}", "dog"))
        one.execute_command("REPLICAOF", "NO", "ONE")
    refused_then_done_again(backend, header)


class InSteps(StateCommitter):
    """A subclass commits in several steps of the store, so a server can go back between them."""


class LosingState(OpaqueMapState):
    """Its server dies just before ``done`` of transaction ``txid``,
    and comes back as it was when that was opened.
    """

    server: Any = None
    copy: Any = None
    txid = 3

    def raise_header(self, expected: Header, new: Header) -> None:
        cls = LosingState
        if cls.copy is not None and not cls.copy.exists() and new.open and (new.open.txid, new.done) == (cls.txid, 2):
            super().raise_header(expected, new)
            shutil.copytree(cls.server.folder / "data", cls.copy)
            return
        if cls.copy is not None and new.done == cls.txid:
            copy, cls.copy = cls.copy, None
            go_back(cls.server, copy)
        super().raise_header(expected, new)


@pytest.mark.integration
@pytest.mark.fault(23)
def test_no_batch_is_lost_when_redis_goes_back_within_a_commit(
    redis_of: Callable[..., RedisServer], tmp_path: Path, name: str
) -> None:
    server = redis_of()
    LosingState.server, LosingState.copy = server, tmp_path / "as opened"
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 50}, Fields(word=str), 10)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = LosingState(RedisBackend(server.url, name))
    words = InSteps(state, ["word"], {"count": Count()})
    builder.set_bolt("words", words, 2).fields_grouping("spout", Fields("word"))
    with submit(builder.build(), store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert LosingState.copy is None
        assert run.status().attempts_failed == 1
    assert state.get("a") == 50


@pytest.mark.slow
@pytest.mark.integration
def test_postgres_that_was_restored_within_a_transaction_refuses_done(name: str) -> None:
    with open_folder() as folder:
        server = PostgresServer(folder)
        server.start()
        try:
            backend = PostgresBackend(server.dsn, name, KEY, VALUE)
            header = opened(backend)
            server.stop()
            shutil.copytree(folder / "data", folder / "copy", copy_function=_with_owner)
            _own(folder / "data", folder / "copy")
            server.start()
            backend.close()
            again = header.opened(1, OpenCommit(1, 2, "digest"))
            backend.raise_header(header, again)
            backend.raise_header(again, header)  # the same header as in the copy, under the server that runs now
            backend.multi_put(header, [("dog",)], [None], [ROW])
            server.kill()
            shutil.rmtree(folder / "data")
            (folder / "copy").rename(folder / "data")
            server.start()
            backend.close()
            refused_then_done_again(backend, header)
            backend.close()
        finally:
            server.stop()


def _with_owner(source: str, target: str) -> None:
    shutil.copy2(source, target)
    _own(Path(source), Path(target))


def _own(source: Path, target: Path) -> None:
    for one, other in ((source, target), *zip(sorted(source.rglob("*")), sorted(target.rglob("*")), strict=True)):
        found = one.stat()
        os.chown(other, found.st_uid, found.st_gid)


def test_a_file_that_replaced_the_sqlite_file_refuses_done(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    header = opened(backend)
    backend.close()
    shutil.copy(path, tmp_path / "copy.db")
    backend.multi_put(header, [("dog",)], [None], [ROW])
    replace_file(tmp_path / "copy.db", path)
    refused_then_done_again(backend, header)
    backend.close()


def test_a_connection_to_a_replaced_sqlite_file_uses_the_new_file(tmp_path: Path) -> None:
    """It does not write into the replaced file, which has no name any more."""
    path = tmp_path / "rows.db"
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    backend.prepare("topology")
    backend.close()
    shutil.copy(path, tmp_path / "copy.db")
    header = opened(backend)
    replace_file(tmp_path / "copy.db", path)
    with pytest.raises(StaleWriterError):
        backend.multi_put(header, [("dog",)], [None], [ROW])
    assert backend.read_header().open is None
    backend.close()


def replace_file(source: Path, target: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{target}{suffix}").unlink(missing_ok=True)
    source.rename(target)


# --- named at the start ---------------------------------------------------------------------------


def reasons(backend: MapBackend) -> list[str]:
    with capture_logs() as lines:
        backend.prepare("topology")
    return [line["reason"] for line in lines if line["event"] == "store.may_lose_writes"]


@pytest.mark.integration
def test_redis_that_may_lose_acknowledged_writes_is_named_at_the_start(
    redis_of: Callable[..., RedisServer], name: str
) -> None:
    server = redis_of()
    backend = RedisBackend(server.url, name, KEY, VALUE)
    assert reasons(backend) == []
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "everysec")
        assert [reason for reason in reasons(backend) if "appendfsync is everysec" in reason]
        client.config_set("appendonly", "no")
        assert [reason for reason in reasons(backend) if "no append-only file" in reason]
        client.config_set("appendonly", "yes")
        client.config_set("appendfsync", "always")
        redis_of(replicaof=f"127.0.0.1 {server.port}")
        wait_for(lambda: client.info("replication")["connected_slaves"] == 1)
        assert [reason for reason in reasons(backend) if "1 replica that follows later" in reason]


@pytest.mark.integration
def test_postgres_that_may_lose_acknowledged_writes_is_named_at_the_start(name: str) -> None:
    with open_folder() as folder:
        server = PostgresServer(folder, settings={"fsync": "off"})
        server.start()
        try:
            backend = PostgresBackend(server.dsn, name, KEY, VALUE)
            assert [reason for reason in reasons(backend) if "fsync is off" in reason]
            with closing(psycopg.connect(server.dsn, autocommit=True)) as admin:
                admin.execute(f"ALTER TABLE {name} SET UNLOGGED")
            assert [reason for reason in reasons(backend) if f"table {name} is unlogged" in reason]
            backend.close()
        finally:
            server.stop()
