"""A Redis server that refuses writes while a topology runs: for want of memory or disk, because it
follows another one, or because rights were taken away. Nothing is lost; what passes is waited for,
and the rest stops the topology in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, RetryableError
from framework.state import RedisKeyValueStateProvider
from framework.topology import Topology
from framework.transactions import MemoryStore
from framework.transactions.run import TopologyFailed
from integration import RedisServer
from sinks import Count, OpaqueMapState, RedisBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.faults.conftest import Disk
from tests.kit.state_parts import redis_pool
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
BEFORE, AFTER = ["dog", "cat", "dog"], ["dog", "bird"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as started:
        yield started


def as_user(server: RedisServer, keys: str = "~*") -> str:
    """The address for a user who may do everything with some keys, at first."""
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "user", "on", ">pass", keys, "+@all")
    return server.url.replace("//", "//user:pass@")


def counting(url: str) -> tuple[Any, Topology, OpaqueMapState]:
    spout = OpaqueMemoryTransactionalSpout({0: [[word] for word in BEFORE]}, Fields(word=str), 10)
    builder = TransactionalTopologyBuilder("refused", "spout", spout)
    state = OpaqueMapState(RedisBackend(url, "words"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    return spout, builder.build(), state


def found(state: OpaqueMapState) -> dict[str, int]:
    return {key[0]: row.value[0] for key, row in state.backend.scan() if row.value is not None}


REFUSALS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "no memory": (
        lambda admin: admin.config_set("maxmemory", 1),
        lambda admin: admin.config_set("maxmemory", 0),
    ),
    "too few replicas": (
        lambda admin: admin.config_set("min-replicas-to-write", 1),
        lambda admin: admin.config_set("min-replicas-to-write", 0),
    ),
    "a replica": (
        lambda admin: admin.replicaof("127.0.0.1", 1),
        lambda admin: admin.replicaof("NO", "ONE"),
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_that_passes_is_waited_for(server: RedisServer, refusal: str) -> None:
    refuse, allow = REFUSALS[refusal]
    spout, topology, state = counting(server.url)
    with (
        redis.Redis.from_url(server.url) as admin,
        submit(topology, {"topology.max.attempts": 2}, MemoryStore(), "local") as run,
    ):
        run.wait_until_caught_up(PATIENCE_S)
        refuse(admin)
        for word in AFTER:
            spout.append("0", [word])
        wait_for(lambda: run.status().attempts_failed >= 3)
        allow(admin)
        run.wait_until_caught_up(PATIENCE_S)
    assert found(state) == Counter([*BEFORE, *AFTER])


@pytest.mark.parametrize(
    "right", ["-rpush", "-hset", "-set", "-unlink", "-@write", "-@all", "-evalsha", "~none", "gone"]
)
def test_rights_that_are_taken_away_stop_the_topology_and_nothing_is_half_written(
    server: RedisServer, right: str
) -> None:
    """The batch is another one afterwards: rows that it does not have must be as before."""
    spout, topology, state = counting(as_user(server))
    store = MemoryStore()
    with redis.Redis.from_url(server.url) as admin:
        with submit(topology, {}, store, "local") as run:
            run.wait_until_caught_up(PATIENCE_S)
            if right == "gone":
                admin.execute_command("ACL", "DELUSER", "user")
            else:
                admin.execute_command(
                    "ACL", "SETUSER", "user", *(("resetkeys", right) if right[0] == "~" else (right,))
                )
            spout.append("0", ["dog"])
            with pytest.raises((TopologyFailed, ConfigError)) as stopped:
                run.wait_until_caught_up(PATIENCE_S)
            assert "hash '{words}'" in str(stopped.value) and "\n" not in str(stopped.value)
        with redis.Redis.from_url(server.url) as reading:
            state.backend.close()
            admin.execute_command("ACL", "SETUSER", "user", "on", ">pass", "~*", "+@all")
            assert b'"v":[2]' in reading.hget("{words}", "dog")
        spout.append("0", ["bird"])
        with submit(topology, {}, store, "local") as run:
            run.wait_until_caught_up(PATIENCE_S)
    assert found(state) == Counter([*BEFORE, *AFTER])


def test_a_user_may_have_the_keys_of_the_state_only(server: RedisServer) -> None:
    spout, topology, state = counting(as_user(server, "~{words}*"))
    with submit(topology, store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        spout.append("0", ["bird"])
        run.wait_until_caught_up(PATIENCE_S)
    assert found(state) == Counter([*BEFORE, "bird"])


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_state_waits_for_a_refusal_that_passes(server: RedisServer, refusal: str) -> None:
    refuse, allow = REFUSALS[refusal]
    conf = {"topology.state.provider.config": {"jedisPoolConfig": redis_pool(server)}}
    provider = RedisKeyValueStateProvider()
    state = provider.new_state("t/b/1/0", conf, None)
    with redis.Redis.from_url(server.url) as admin:
        state.put("dog", 1)
        state.prepare_commit(1)
        refuse(admin)
        with pytest.raises(RetryableError):
            state.commit(1)
        allow(admin)
        state.recover(1, prepared=True, upto=1)
    assert dict(state.items()) == {"dog": 1}
    provider.close()


@pytest.mark.slow
@pytest.mark.fault(27)
def test_a_full_disk_under_the_append_only_file_is_waited_for(small_disk: Disk) -> None:
    """Redis answers MISCONF then."""
    settings = {"appendonly": "yes", "appendfsync": "everysec", "save": ""}
    with RedisServer(small_disk.path / "redis", settings=settings) as server:
        spout, topology, state = counting(server.url)
        with submit(topology, {"topology.max.attempts": 2}, MemoryStore(), "local") as run:
            run.wait_until_caught_up(PATIENCE_S)
            small_disk.fill()
            for word in AFTER:
                spout.append("0", [word])
            for number in range(100):
                spout.append("0", [f"{number}-{'x' * 1_000}"])
            wait_for(lambda: run.status().attempts_failed >= 3)
            small_disk.empty()
            run.wait_until_caught_up(PATIENCE_S)
        held = found(state)
        assert {word: held[word] for word in ("dog", "cat", "bird")} == Counter([*BEFORE, *AFTER])
        assert len(held) == 103
