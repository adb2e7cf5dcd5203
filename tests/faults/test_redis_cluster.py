"""A node of a Redis Cluster that sends its clients to another node: a line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from framework import Fields
from framework.clients.redis_errors import redirects
from framework.errors import ConfigError
from framework.state import RedisKeyValueStateProvider
from integration import RedisServer
from sinks import RedisBackend
from spouts.redis_streams import RedisStreamSpout
from tests.kit.state_parts import redis_pool
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
SLOTS = 16_384


@pytest.fixture(scope="module")
def other_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A node that has no slot; the other node of its cluster has all of them."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(RedisServer(tmp_path_factory.mktemp("node"), settings={"cluster-enabled": "yes"}))
            for _ in range(2)
        ]
        full, empty = (stack.enter_context(redis.Redis.from_url(each.url)) for each in nodes)
        for start in range(0, SLOTS, 4_096):
            full.execute_command("CLUSTER", "ADDSLOTS", *range(start, start + 4_096))
        full.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port)
        wait_for(lambda: "cluster_state:ok" in str(empty.execute_command("CLUSTER", "INFO")))
        yield nodes[1]


@pytest.mark.slow
def test_a_redirection_is_a_line_with_advice(other_node: RedisServer) -> None:
    said = "node of a Redis Cluster, and another node has the key.*without cluster mode"
    backend = RedisBackend(other_node.url, "words", Fields(word=str), Fields(n=int))
    for each in (backend.prepare, backend.check):
        with pytest.raises(ConfigError, match=said):
            each("topology")
    backend.close()
    conf = {"topology.state.provider.config": {"jedisPoolConfig": redis_pool(other_node)}}
    with pytest.raises(ConfigError, match=said):
        RedisKeyValueStateProvider().new_state("t/b/1/0", conf, None).get("a")
    spout = RedisStreamSpout("stream", Fields(a=str), url=other_node.url, group="group")
    spout._prepared = False
    with redis.Redis.from_url(other_node.url) as spout._client, pytest.raises(ConfigError, match=said):
        spout._prepare()


def test_a_slot_that_moves_is_a_redirection() -> None:
    for error in (redis.exceptions.AskError("12 127.0.0.1:7000"), redis.exceptions.MovedError("12 127.0.0.1:7000")):
        assert "127.0.0.1:7000" in redirects(error)
    assert redirects(redis.exceptions.ReadOnlyError()) == ""
