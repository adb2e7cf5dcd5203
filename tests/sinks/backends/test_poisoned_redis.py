"""Keys of a state in Redis that an intruder may write to: a line that names the state, or the right
figures."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.redis_errors import VALUE_BYTES_MAX
from framework.errors import BadRecordError, RatchetError
from framework.topology import Stamp
from framework.transactions import MemoryStore
from integration import RedisServer
from sinks import Count, OpaqueMapState, RedisBackend, StateCommitter
from sinks.backend import Row
from sinks.redis import _TYPES
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.3")]
WORDS = [["a"], ["b"]] * 2
#: What makes a key of each type.
MADE: dict[str, Callable[[Any, str], object]] = {
    "string": lambda client, key: client.set(key, b"\xff\x1b]0;x\x07\r\nforged"),
    "hash": lambda client, key: client.hset(key, "a", "b"),
    "list": lambda client, key: client.rpush(key, "a"),
    "set": lambda client, key: client.sadd(key, "a"),
    "zset": lambda client, key: client.zadd(key, {"a": 1}),
    "stream": lambda client, key: client.xadd(key, {"a": "b"}),
}
STAMP = [1, 1, 1]
ROWS = {
    "no JSON": b"\xff\xfe",
    "brackets": b"[" * 200_000,
    "long": b'"' + b"x" * 5_000_000 + b'"',
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "no stamp": json.dumps({"w": "", "v": [2]}),
    "no writer": json.dumps({"s": STAMP, "v": [2]}),
    "two columns": json.dumps({"s": STAMP, "w": "", "v": [2, 3]}),
    "no column": json.dumps({"s": STAMP, "w": "", "v": []}),
    "text for a number": json.dumps({"s": STAMP, "w": "", "v": ["2"]}),
    "a text of characters": json.dumps({"s": STAMP, "w": "", "v": "2"}),
    "a float": json.dumps({"s": STAMP, "w": "", "v": [2.5]}),
    "true": json.dumps({"s": STAMP, "w": "", "v": [True]}),
    "beyond 64 bits": json.dumps({"s": STAMP, "w": "", "v": [2**64 - 1]}),
    "a nested value": json.dumps({"s": STAMP, "w": "", "v": [{"a": [1]}]}),
    "a stamp of texts": json.dumps({"s": ["1", "1", "1"], "w": "", "v": [2]}),
    "a stamp of two": json.dumps({"s": [1, 1], "w": "", "v": [2]}),
    "a negative stamp": json.dumps({"s": [-1, 1, 1], "w": "", "v": [2]}),
    "a later stamp": json.dumps({"s": [10**6, 1, 1], "w": "", "v": [2]}),
    "a former value": json.dumps({"s": STAMP, "w": "", "v": [2], "p": "x"}),
}


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(redis_server.url) as made:
        yield made


class Poisoned:
    """A topology that has counted ``WORDS``, and goes on after a change of its keys."""

    def __init__(self, server: RedisServer) -> None:
        self.name = f"s-{uuid.uuid4().hex[:10]}"
        self.key = f"{{{self.name}}}"
        self._url, self._store = server.url, MemoryStore()
        self._run(WORDS)

    def outcome(self) -> str:
        """What the run says after the change; nothing where it counts right."""
        try:
            self._run([*WORDS, ["a"], ["b"]])
        except RatchetError as error:
            said = str(error)
            assert not isinstance(error, BadRecordError) and self.name in said
            assert len(said) < 1_500 and said.isprintable()
            return said
        state = OpaqueMapState(RedisBackend(self._url, self.name, Fields(word=str), Fields(n=int)))
        assert [state.get("a"), state.get("b")] == [3, 3]
        return ""

    def _run(self, words: list[list[str]]) -> None:
        spout = OpaqueMemoryTransactionalSpout({0: words}, Fields(word=str), 3)
        builder = TransactionalTopologyBuilder("poisoned", "spout", spout)
        state = OpaqueMapState(RedisBackend(self._url, self.name))
        builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
        with submit(builder.build(), {"topology.max.attempts": 2}, self._store, "local") as running:
            running.wait_until_caught_up(PATIENCE_S)


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("part", _TYPES)
def test_a_key_of_another_type_is_named(redis_server: RedisServer, client: Any, part: str, kind: str) -> None:
    poisoned = Poisoned(redis_server)
    key = f"{poisoned.key}:{part}".rstrip(":")
    client.delete(key)
    MADE[kind](client, key)
    said = poisoned.outcome()
    if kind.encode() != _TYPES[part]:
        assert f"the key '{key}' is a {kind}" in said


@pytest.mark.parametrize("row", ROWS)
def test_a_damaged_row_is_named(redis_server: RedisServer, client: Any, row: str) -> None:
    poisoned = Poisoned(redis_server)
    client.hset(poisoned.key, "a", ROWS[row])
    said = poisoned.outcome()
    assert "key 'a'" in said or "key ('a',)" in said


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 200_000, b"{}", b"5", b"", b'{"format": 1}', b"null"], ids=repr)
@pytest.mark.parametrize("part", ["header", "columns"])
def test_a_damaged_document_is_named(redis_server: RedisServer, client: Any, part: str, text: bytes) -> None:
    poisoned = Poisoned(redis_server)
    client.set(f"{poisoned.key}:{part}", text)
    assert poisoned.outcome()


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "text", [b"\xff\r\n+OK\r\n", b"9" * 100_000, b"-1", b"x", b""], ids=lambda text: repr(text[:9])
)
@pytest.mark.parametrize("field", ["rows", "touched", "due", "order"])
def test_a_damaged_count_is_named_or_harmless(redis_server: RedisServer, client: Any, field: str, text: bytes) -> None:
    poisoned = Poisoned(redis_server)
    client.hset(f"{poisoned.key}:count", field, text)
    assert poisoned.outcome() or field in ("due", "order")


def test_rows_lists_and_counts_that_are_made_up_do_no_harm(redis_server: RedisServer, client: Any) -> None:
    """What fits together cannot be told from the topology's own."""
    poisoned = Poisoned(redis_server)
    client.hset(poisoned.key, b"\xff\x00", json.dumps({"s": STAMP, "w": "", "v": [7]}))
    client.rpush(f"{poisoned.key}:touched", b"\xfe", "b", "b")
    client.sadd(f"{poisoned.key}:deleted", b"\xfd", "a")
    counts = {"rows": client.hlen(poisoned.key), "touched": client.llen(f"{poisoned.key}:touched")}
    client.hset(f"{poisoned.key}:count", mapping=counts)
    assert poisoned.outcome() == ""


def test_a_row_that_is_too_long_is_named(
    redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.redis.VALUE_BYTES_MAX", 1_000_000)
    poisoned = Poisoned(redis_server)
    client.hset(poisoned.key, "a", b'{"s":[1,1,1],"w":"","v":[2],"x":"%s"}' % (b"x" * 1_000_000))
    assert "more than 1,000,000" in poisoned.outcome()


def test_a_row_that_is_too_long_is_not_written(redis_server: RedisServer) -> None:
    state = OpaqueMapState(RedisBackend(redis_server.url, f"s-{uuid.uuid4().hex[:10]}", Fields(k=int), Fields(v=str)))
    with pytest.raises(BadRecordError, match="more than 67,108,864"):
        state.backend._row_texts([Row(("x" * VALUE_BYTES_MAX,), Stamp(1, 1, 1))])
