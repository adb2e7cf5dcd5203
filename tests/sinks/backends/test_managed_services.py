"""Servers that answer fewer questions about themselves than one's own, as managed services do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis
import structlog

from framework import Fields, TransactionalTopologyBuilder, TransactionAttempt, submit
from framework.errors import RetryableError
from framework.transactions import MemoryStore
from integration import PostgresServer, RedisServer
from sinks import Count, MapBackend, OpaqueMapState, PostgresBackend, RedisBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.postgres_roles import dsn_of, login
from tests.kit.state_parts import Log, journal, redis_pool
from tests.kit.state_parts import counting as stateful
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
KEY, VALUE = Fields(word=str), Fields(n=int)
WORDS = [f"w{number % 7}" for number in range(70)]
WAL = ("pg_control_system()", "pg_current_wal_lsn()", "pg_walfile_name(pg_lsn)")
START = "pg_postmaster_start_time()"


def counted(name: str, backend: MapBackend) -> list[dict[str, Any]]:
    """Run a topology, check its figures, and return what it warned of."""
    spout = OpaqueMemoryTransactionalSpout({0: [[word] for word in WORDS]}, Fields(word=str), 10)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = OpaqueMapState(backend)
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    with structlog.testing.capture_logs() as logs, submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(240)
    assert {key[0]: row.value[0] for key, row in backend.scan() if row.value} == dict(Counter(WORDS))
    return [dict(log) for log in logs if log["event"] == "store.may_lose_writes"]


@pytest.fixture
def limited(own_postgres: PostgresServer) -> str:
    """The dsn of a user that is no superuser."""
    with psycopg.connect(own_postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE limited {login(own_postgres.dsn)}")
        admin.execute("CREATE SCHEMA limited AUTHORIZATION limited")
        admin.execute("REVOKE SELECT ON pg_stat_replication FROM PUBLIC")
    return dsn_of("limited", own_postgres.dsn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "untold"),
    [
        ((), ""),
        (WAL, "does not tell its cluster and timeline:"),
        ((*WAL, "inet_server_addr()"), "does not tell its cluster, timeline and address:"),
        ((*WAL, START), "does not tell its cluster, timeline, address and start time:"),
    ],
)
def test_postgres_that_does_not_tell_its_identity_is_used_and_what_is_weaker_is_named(
    own_postgres: PostgresServer, limited: str, name: str, refused: tuple[str, ...], untold: str
) -> None:
    with psycopg.connect(own_postgres.dsn, autocommit=True) as admin:
        for each in refused:
            admin.execute(f"REVOKE EXECUTE ON FUNCTION {each} FROM PUBLIC")
    warned = counted(name, PostgresBackend(limited, "words", schema="limited"))
    assert [untold in log["reason"] for log in warned] == [True] * bool(untold)


@pytest.mark.slow
@pytest.mark.rule("C27")
def test_postgres_that_was_restarted_within_a_commit_is_noticed_by_its_start_time_alone(
    own_postgres: PostgresServer, limited: str, name: str
) -> None:
    with psycopg.connect(own_postgres.dsn, autocommit=True) as admin:
        for each in WAL:
            admin.execute(f"REVOKE EXECUTE ON FUNCTION {each} FROM PUBLIC")
    state = OpaqueMapState(PostgresBackend(limited, "words", KEY, VALUE, schema="limited"))
    attempt = TransactionAttempt(1, 1)
    state.begin_commit(attempt)
    state.multi_put(["dog"], [1])
    own_postgres.stop()
    own_postgres.start()
    state.close()
    with pytest.raises(RetryableError, match="the store is not the one in which 1:1 of epoch 0 was opened"):
        state.commit(attempt)


@pytest.fixture
def guest(redis_server: RedisServer, name: str) -> Iterator[str]:
    """The url of a user without the commands that ask a server about itself."""
    with redis.Redis.from_url(redis_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", name, "on", ">pass", "~*", "+@all", "-@dangerous", "-info", "-config")
        yield redis_server.url.replace("//", f"//{name}:pass@")
        admin.execute_command("ACL", "DELUSER", name)


def test_redis_that_may_not_be_asked_is_used_and_what_is_weaker_is_named(guest: str, name: str) -> None:
    warned = counted(name, RedisBackend(guest, name))
    assert ["may not ask the server whether it is a replica" in log["reason"] for log in warned] == [True]


def test_state_of_stateful_bolts_in_redis_that_may_not_be_asked(
    redis_server: RedisServer, guest: str, name: str
) -> None:
    pool = {**redis_pool(redis_server), "username": name, "password": "pass"}
    conf: dict[str, Any] = {
        "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
        "topology.state.checkpoint.interval.ms": 50,
        **{f"topology.state.provider.config.jedisPoolConfig.{key}": value for key, value in pool.items()},
    }
    topology = stateful(name, Log(name, [WORDS]))
    with structlog.testing.capture_logs() as logs, submit(topology, conf, store=MemoryStore(), executor="local") as run:
        run.wait_until_idle(240)
    wait_for(lambda: journal(name).results == dict(Counter(WORDS)))
    reasons = [log["reason"] for log in logs if log["event"] == "state.may_lose_writes"]
    assert len(reasons) == 1
    assert "may not ask whether it is a replica" in reasons[0]


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl"])
def test_redis_that_evicts_only_keys_that_expire_is_used(
    tmp_path: Any, redis_server: RedisServer, name: str, policy: str
) -> None:
    """As ElastiCache's own settings say."""
    with RedisServer(tmp_path / "redis", settings={"maxmemory": "100mb", "maxmemory-policy": policy}) as server:
        counted(name, RedisBackend(server.url, name))
