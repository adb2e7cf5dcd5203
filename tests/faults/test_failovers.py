"""Failovers in a run: a server that takes no writes for some seconds is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError
from framework.transactions import MemoryStore
from integration import PostgresServer, RedisServer, TcpProxy
from sinks import Count, MapBackend, OpaqueMapState, PostgresBackend, RedisBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.postgres_roles import dsn_of, login
from tests.kit.state_parts import Log, counting, journal, redis_pool
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]

KEY, VALUE = Fields(word=str), Fields(n=int)
WORDS = [f"w{number % 7}" for number in range(1_400)]
AWAY_S = 3.0


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def goes_on(name: str, backend: MapBackend, demote: Callable[[], None], promote: Callable[[], None]) -> None:
    """Run a topology through a failover, and compare its figures."""
    spout = OpaqueMemoryTransactionalSpout({0: [[word] for word in WORDS]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = OpaqueMapState(backend)
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_for_commit(20, 60)
        demote()
        try:
            wait_for(lambda: run.status().attempts_failed >= 3)
            held = run.status().committed_txid
            time.sleep(AWAY_S)
            assert run.status().committed_txid == held < len(WORDS)
        finally:
            promote()
        run.wait_until_caught_up(240)
    assert {key[0]: row.value[0] for key, row in state.backend.scan() if row.value} == dict(Counter(WORDS))


def settle(server: PostgresServer, setting: str) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"ALTER SYSTEM {setting}")
        connection.execute("SELECT pg_reload_conf()")


@pytest.mark.slow
@pytest.mark.rule("C30")
def test_postgres_that_is_read_only_for_seconds_is_waited_for(own_postgres: PostgresServer, name: str) -> None:
    goes_on(
        name,
        PostgresBackend(own_postgres.dsn, "words"),
        lambda: settle(own_postgres, "SET default_transaction_read_only = on"),
        lambda: settle(own_postgres, "RESET default_transaction_read_only"),
    )


@pytest.mark.rule("C30")
def test_a_connection_to_a_server_that_became_read_only_is_not_used_again(
    own_postgres: PostgresServer, postgres: PostgresServer, name: str
) -> None:
    """The address leads to the new primary, and open connections to the former one."""
    table = name.replace("-", "_")
    with psycopg.connect(own_postgres.dsn) as connection:
        connection.execute(f"CREATE ROLE moving SUPERUSER {login(postgres.dsn)}".encode())
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute(f"CREATE ROLE moving SUPERUSER {login(postgres.dsn)}".encode())
    with TcpProxy(own_postgres.address) as link:
        backend = PostgresBackend(dsn_of("moving", postgres.dsn, link.address), table, KEY, VALUE)
        header = backend.prepare("topology")
        settle(own_postgres, "SET default_transaction_read_only = on")
        wait_for(lambda: _read_only(own_postgres))
        promoted = PostgresBackend(postgres.dsn, table, KEY, VALUE)
        new = promoted.prepare("topology")
        link.retarget(postgres.address, resets=False)
        with pytest.raises(Exception, match="read-only"):
            backend.raise_header(header, header.finished(1))
        backend.raise_header(new, new.finished(1))
        assert promoted.read_header().done == 1
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute("REASSIGN OWNED BY moving TO ratchet")
        connection.execute("DROP ROLE moving")


def _read_only(server: PostgresServer) -> bool:
    with psycopg.connect(server.dsn) as connection:
        row = connection.execute("SHOW transaction_read_only").fetchone()
    return row == ("on",)


@pytest.mark.slow
@pytest.mark.rule("C30")
def test_redis_that_is_a_replica_for_seconds_is_waited_for(own_redis: RedisServer, name: str) -> None:
    with redis.Redis.from_url(own_redis.url) as admin:
        goes_on(
            name,
            RedisBackend(own_redis.url, name),
            lambda: admin.execute_command("REPLICAOF", "127.0.0.1", "1"),  # nothing answers there: its data stay
            lambda: admin.execute_command("REPLICAOF", "NO", "ONE"),
        )


def test_servers_that_take_no_writes_at_the_start_are_refused(
    own_postgres: PostgresServer, own_redis: RedisServer, name: str
) -> None:
    settle(own_postgres, "SET default_transaction_read_only = on")
    wait_for(lambda: _read_only(own_postgres))
    with pytest.raises(ConfigError, match="the server is read-only; give the address of the primary"):
        PostgresBackend(own_postgres.dsn, "words", KEY, VALUE).prepare("topology")
    with redis.Redis.from_url(own_redis.url) as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ConfigError, match="the server is a replica; give the address of the primary"):
        RedisBackend(own_redis.url, name, KEY, VALUE).prepare("topology")


@pytest.mark.slow
def test_state_of_stateful_bolts_waits_for_redis_that_is_a_replica_for_seconds(
    own_redis: RedisServer, name: str
) -> None:
    pool = {f"topology.state.provider.config.jedisPoolConfig.{k}": v for k, v in redis_pool(own_redis).items()}
    conf: dict[str, Any] = {
        "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
        "topology.state.checkpoint.interval.ms": 50,
        **pool,
    }
    key = name
    with redis.Redis.from_url(own_redis.url) as admin:
        topology = counting(key, Log(key, [WORDS], per_call=1))
        with submit(topology, conf, store=MemoryStore(), executor="local") as run:
            wait_for(lambda: len(journal(key).emitted) > 100)
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            try:
                recoveries = _recoveries(run)
                wait_for(lambda: _recoveries(run) > recoveries)
                time.sleep(AWAY_S)
            finally:
                admin.execute_command("REPLICAOF", "NO", "ONE")
            run.wait_until_idle(240)
    assert journal(key).results == dict(Counter(WORDS))


def _recoveries(run: Any) -> int:
    checkpoint = run.status().checkpoint
    return checkpoint.recoveries if checkpoint is not None else 0
