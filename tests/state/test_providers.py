"""Every provider passes the contract; serializers; refused settings."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest
import redis

from framework.errors import BadRecordError, ConfigError, CorruptStateError
from framework.state import (
    InMemoryKeyValueStateProvider,
    LmdbKeyValueStateProvider,
    MsgpackSerializer,
    RedisKeyValueStateProvider,
)
from framework.state.provider_settings import RedisSettings, provider_of, settings_of
from framework.state.redis import _APPLY
from framework.testing.conformance.state_provider import StateProviderContract
from framework.topology.stateful import StateProvider
from integration import RedisServer
from tests.kit.own_logs import own_logs
from tests.kit.state_parts import redis_pool
from tests.kit.waiting import PATIENCE_S

CONFIG = "topology.state.provider.config"


@pytest.mark.behaviour("5.2")
class TestInMemory(StateProviderContract):
    def provider(self) -> StateProvider:
        return InMemoryKeyValueStateProvider()


@pytest.mark.behaviour("5.2")
class TestLmdb(StateProviderContract):
    def begin(self, request: pytest.FixtureRequest) -> None:
        self.folder = request.getfixturevalue("tmp_path")

    def provider(self) -> StateProvider:
        return LmdbKeyValueStateProvider()

    def conf(self) -> Mapping[str, Any]:
        return {CONFIG: {"path": str(self.folder)}}


@pytest.mark.behaviour("5.2")
@pytest.mark.integration
class TestRedis(StateProviderContract):
    def begin(self, request: pytest.FixtureRequest) -> None:
        self.server = request.getfixturevalue("redis_server")

    def provider(self) -> StateProvider:
        return RedisKeyValueStateProvider()

    def conf(self) -> Mapping[str, Any]:
        return {CONFIG: {"jedisPoolConfig": redis_pool(self.server)}}


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Account:
    owner: str
    amount: int


class Upper:
    def dumps(self, value: Any) -> bytes:
        return str(value).upper().encode()

    def loads(self, data: bytes) -> Any:
        return data.decode()


def test_custom_classes_and_serializers_are_used(tmp_path: Path) -> None:
    here = __name__
    given = {"path": str(tmp_path), "keySerializerClass": f"{here}.Upper", "valueClass": f"{here}.Account"}
    state = LmdbKeyValueStateProvider().new_state("t/b/1/0", {CONFIG: json.dumps(given)}, None)
    state.put("ann", Account("ann", 3))
    assert (state.get("Ann"), list(state.items())) == (Account("ann", 3), [("ANN", Account("ann", 3))])
    with pytest.raises(BadRecordError, match="a state of Account cannot hold 7"):
        state.put("bob", 7)
    points = InMemoryKeyValueStateProvider().new_state("t/b/1/0", {CONFIG: {"keyClass": f"{here}.Point"}}, None)
    points.put(Point(1, 2), "here")
    assert list(points.items()) == [(Point(1, 2), "here")]


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({CONFIG: "{"}, "topology.state.provider.config is not JSON"),
        (
            {CONFIG: {"jedisPoolConfig": {"hots": "x"}}},
            r"config\.jedisPoolConfig\.hots: Extra inputs are not permitted",
        ),
        ({CONFIG: {"keyclass": "str"}}, "config.keyclass: .*; it knows keyClass, valueClass"),
        ({CONFIG: {"jedisPoolConfig": {"port": 70_000}}}, "config.jedisPoolConfig.port: Input should be less"),
        ({CONFIG: {"valueClass": "nowhere.Thing"}}, "config.valueClass: there is no 'nowhere.Thing'"),
        ({CONFIG: {"valueClass": "io.StringIO"}}, "io.StringIO is neither a dataclass nor a NamedTuple"),
    ],
)
def test_wrong_settings_are_named(conf: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(conf, RedisSettings).values()


@pytest.mark.parametrize(
    "name", ["framework.state.Nothing", "nothing", "json.dumps", "framework.state.MsgpackSerializer"]
)
def test_a_class_that_is_no_provider_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"topology.state.provider: .*{name}"):
        provider_of({"topology.state.provider": name})


@pytest.mark.slow
def test_redis_that_is_not_there_is_named() -> None:
    conf = {CONFIG: {"jedisPoolConfig": {"port": 1, "timeout": 50}}}
    with pytest.raises(ConfigError, match="Redis at localhost:1 does not answer"):
        RedisKeyValueStateProvider().check_before_start(conf)


@pytest.mark.integration
@pytest.mark.rule("C27")
def test_redis_that_may_evict_state_is_refused_and_what_it_may_lose_is_named(tmp_path: Path) -> None:
    evicting = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    for number, given in enumerate((evicting, {"appendonly": "no"})):
        server = RedisServer(tmp_path / f"redis-{number}", settings=given)
        server.start()
        conf = {CONFIG: {"jedisPoolConfig": redis_pool(server)}}
        provider = RedisKeyValueStateProvider()
        with own_logs() as logs:
            if given is evicting:
                with pytest.raises(
                    ConfigError, match=r"evicts keys \(allkeys-lru\) beyond 104857600 bytes; .* noeviction"
                ):
                    provider.check_before_start(conf)
            else:
                provider.check_before_start(conf)
                assert [log["event"] for log in logs] == ["state.may_lose_writes"]
        provider.close()
        server.stop()


def test_bytes_that_are_not_messagepack_are_corrupt() -> None:
    with pytest.raises(CorruptStateError, match="not MessagePack"):
        MsgpackSerializer().loads(b"\xc1")


def test_files_of_lmdb_are_accessible_to_their_user_only(tmp_path: Path) -> None:
    provider = LmdbKeyValueStateProvider()
    conf = {CONFIG: {"path": str(tmp_path / "state")}}
    (tmp_path / "state/t/b/1/0").mkdir(parents=True)  # as an earlier release left it: open to all
    provider.check_before_start(conf)
    provider.new_state("t/b/1/0", conf, None)
    files = sorted((tmp_path / "state/t/b/1/0").iterdir())
    assert [each.name for each in files] == ["data.mdb", "lock.mdb"]
    assert [each.stat().st_mode & 0o077 for each in (files[0].parent, *files)] == [0, 0, 0]
    provider.close()


def test_a_state_in_lmdb_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = LmdbKeyValueStateProvider()
    state = provider.new_state("t/b/1/0", {CONFIG: {"path": str(tmp_path), "sync": False}}, None)
    expected = dict.fromkeys(range(5000), "x" * 1000)
    for number, value in expected.items():
        state.put(number, value)
    state.prepare_commit(1)
    state.commit(1)
    reading = state.items()
    found = dict([next(reading)])
    outside = provider.new_state("t/b/1/0", {CONFIG: {"path": str(tmp_path), "sync": False}}, None)
    _, committed = outside.committed_items()
    seen = dict([next(committed)])
    for number in range(100):  # more than the map has room for
        state.put(f"more {number}", b"y" * 1_000_000)
    state.prepare_commit(2)
    state.commit(2)
    found.update(reading)
    seen.update(committed)
    assert {key: value for key, value in found.items() if key in expected} == expected
    assert seen == expected  # a consistent view
    provider.close()


@pytest.mark.slow
def test_lmdb_grows_as_needed_and_holds_keys_of_any_length(tmp_path: Path) -> None:
    provider = LmdbKeyValueStateProvider()
    conf = {CONFIG: {"path": str(tmp_path), "sync": False}}
    state = provider.new_state("t/b/1/0", conf, None)
    values = {f"{number}{'k' * number}": b"x" * 1_000_000 for number in range(0, 1_000, 10)}
    for key, value in values.items():
        state.put(key, value)
    state.prepare_commit(1)
    state.commit(1)
    assert dict(state.items()) == values
    assert all(state.get(key) == value for key, value in values.items())


@pytest.mark.slow
def test_lmdb_is_read_by_another_process_while_it_grows(tmp_path: Path) -> None:
    conf = {CONFIG: {"path": str(tmp_path), "sync": False}}
    state = LmdbKeyValueStateProvider().new_state("t/b/1/0", conf, None)
    state.load([(0, b"first")], 1)
    code = (
        "import sys; from framework.state import LmdbKeyValueStateProvider;"
        f"state = LmdbKeyValueStateProvider().new_state('t/b/1/0', {conf!r}, None);"
        "print(state.txid, len(list(state.committed_items()[1])), flush=True); sys.stdin.readline();"
        "txid, items = state.committed_items(); print(txid, len(list(items)), state.get(50) == b'x' * 1_000_000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "1 1\n"
        for number in range(100):
            state.put(number, b"x" * 1_000_000)
        state.prepare_commit(2)
        state.commit(2)
        assert reader.communicate("go on\n", timeout=PATIENCE_S)[0] == "2 100 True\n"


@pytest.mark.integration
def test_redis_shows_a_key_once_though_a_scan_gives_it_twice(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``HSCAN`` may do so while its table shrinks."""
    conf = {CONFIG: {"jedisPoolConfig": redis_pool(redis_server)}}
    provider = RedisKeyValueStateProvider()
    namespace = f"twice/{uuid.uuid4().hex}/1/0"
    state = provider.new_state(namespace, conf, None)
    expected = {"a": 1, "k" * 100: 2}
    state.load(expected.items(), 1)
    real = redis.Redis.hscan_iter

    def twice(self: Any, *arguments: Any, **more: Any) -> Any:
        for _ in range(2):
            yield from real(self, *arguments, **more)

    monkeypatch.setattr(redis.Redis, "hscan_iter", twice)
    assert sorted(state.items()) == sorted(expected.items())
    assert sorted(state.committed_items()[1]) == sorted(expected.items())
    provider.drop(namespace, conf)


@pytest.mark.integration
def test_redis_keeps_large_checkpoints_in_parts_and_leaves_nothing_behind(redis_server: RedisServer) -> None:
    namespace = f"large/{uuid.uuid4().hex}/1/0"
    conf = {CONFIG: {"jedisPoolConfig": redis_pool(redis_server)}}
    state = RedisKeyValueStateProvider().new_state(namespace, conf, None)
    for number in range(12_000):
        state.put(number, number)
    state.prepare_commit(1)
    with redis.Redis.from_url(redis_server.url) as client:
        assert len(client.keys(f"ratchet:{{{namespace}}}:1:*")) == 3
        # Without one of its parts, it is no checkpoint.
        kept = client.dump(part := f"ratchet:{{{namespace}}}:1:2")
        client.delete(part)
        with pytest.raises(CorruptStateError, match="lacks changes that were prepared as checkpoint 1"):
            RedisKeyValueStateProvider().new_state(namespace, conf, None).recover(1, prepared=True, upto=1)
        client.restore(part, 0, kept)
        # A commit that broke off after its first part is repeated.
        client.eval(_APPLY, 3, *(f"ratchet:{{{namespace}}}{each}" for each in (":meta", "", ":1:0")), 1, "0", -1)
        other = RedisKeyValueStateProvider().new_state(namespace, conf, None)
        other.recover(1, prepared=True, upto=1)
        assert len(dict(other.items())) == 12_000
        names = {each.decode().rpartition("}")[2] for each in client.keys(f"ratchet:{{{namespace}}}*")}
        assert names == {"", ":meta"}


@pytest.mark.integration
@pytest.mark.parametrize("loss", ["all keys", "one key", "all keys by expiry"])
@pytest.mark.parametrize("by", ["a read", "a scan", "a checkpoint", "a write"])
def test_keys_that_redis_lost_do_not_begin_again_from_nothing(redis_server: RedisServer, loss: str, by: str) -> None:
    conf = {CONFIG: {"jedisPoolConfig": redis_pool(redis_server)}}
    namespace = f"t{uuid.uuid4().hex[:8]}/b/1/0"
    provider = RedisKeyValueStateProvider()
    first = provider.new_state(namespace, conf, None)
    for word in ("dog", "cat"):
        first.put(word, 1)
    first.prepare_commit(1)
    first.commit(1)
    state = provider.new_state(namespace, conf, None)
    assert state.multi_get(["dog", "cat"]) == [1, 1]
    with redis.Redis.from_url(redis_server.url) as client:
        values = f"ratchet:{{{namespace}}}"
        if loss == "all keys":
            client.delete(values)
        elif loss == "one key":
            client.hdel(values, next(iter(client.hkeys(values))))
        else:
            client.pexpire(values, 1)
            while client.exists(values):
                pass
    fresh = provider.new_state(namespace, conf, None)
    with pytest.raises(
        CorruptStateError, match=r"has [01] keys, and 2 were committed: another program has removed some"
    ):
        if by == "a read":
            fresh.get("dog")
        elif by == "a scan":
            list(fresh.items())
        else:
            state.put("dog", 2)  # its value was read before the loss
            if by == "a write":
                state.commit()
            state.prepare_commit(2)
            state.commit(2)
    provider.close()
