"""Failovers in a run: a server that takes no writes for some seconds is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from integration import RedisServer
from sinks import Count, MapBackend, OpaqueMapState, RedisBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.state_parts import Log, counting, journal, redis_pool
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]

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


@pytest.mark.rule("C30")
def test_redis_that_is_a_replica_for_seconds_is_waited_for(own_redis: RedisServer, name: str) -> None:
    with redis.Redis.from_url(own_redis.url) as admin:
        goes_on(
            name,
            RedisBackend(own_redis.url, name),
            lambda: admin.execute_command("REPLICAOF", "127.0.0.1", "1"),  # nothing answers there: its data stay
            lambda: admin.execute_command("REPLICAOF", "NO", "ONE"),
        )


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
