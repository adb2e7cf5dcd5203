"""States of stateful bolts in stores that an intruder may write to, or that are damaged: a line
that names the store and the key, or the right values."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest
import redis

from framework import Fields, Tuple
from framework.clients.redis_errors import VALUE_BYTES_MAX
from framework.errors import BadRecordError, CorruptStateError, RatchetError, TopologyError
from framework.state import (
    BaseWindowedBolt,
    LmdbKeyValueStateProvider,
    MsgpackSerializer,
    RedisKeyValueStateProvider,
    TimeWindow,
)
from framework.state.checkpointed_key_value_state import LayeredState
from framework.state.expiry import ExpiringState
from framework.state.memory import MemoryBytes
from framework.state.redis import RedisStore
from framework.state.serialization import NESTING_MAX
from framework.state.window_entries import tuples_of
from framework.topology.bolts import Input
from framework.topology.context import TopologyContext
from framework.topology.groupings import ShuffleGrouping
from framework.topology.stateful import KeyValueState, StateProvider
from integration import RedisServer
from tests.kit.state_parts import redis_pool
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.behaviour("5.2")
CONFIG = "topology.state.provider.config"
PLAIN = MsgpackSerializer()
HUGE = b"9" * 18


def nested(depth: int) -> bytes:
    """Tuples in tuples."""
    data = b"\xc0"
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    return data


DAMAGED = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "cut off": PLAIN.dumps("a long text")[:-3],
    "more behind it": PLAIN.dumps(1) + b"x",
    "lists in lists": b"\x91" * 200_000,
    "long lists in lists": b"\xdd\x00\x10\x00\x00" * 300 + b"\xc0" * 1_000_000,
    "tuples in tuples": nested(5_000),
    "no date": msgpack.packb(msgpack.ExtType(6, b"x\x1b]0;title\x07\nforged")),
    "a number of 100,000 digits": msgpack.packb(msgpack.ExtType(3, b"9" * 100_000)),
    "an unknown extension": msgpack.packb(msgpack.ExtType(77, b"x")),
    "a pickle": b"cos\nsystem\n(S'touch /tmp/x'\ntR.",
}


def use(state: KeyValueState[Any, Any]) -> list[str]:
    """Do everything with a state. Returns what was said."""
    said = []

    def all_of_it() -> Iterator[Callable[[], object]]:
        yield lambda: state.recover(2, prepared=True, upto=9)
        yield lambda: state.get("dog")
        yield lambda: state.multi_get(["dog", "cat"])
        yield lambda: list(state.items())
        yield lambda: list(state.committed_items()[1])
        yield lambda: state.put("dog", 7)
        yield lambda: state.prepare_commit(10)
        yield lambda: state.commit(10)

    for each in all_of_it():
        try:
            each()
        except CorruptStateError as error:
            assert len(str(error)) < 1_000 and str(error).isprintable()
            said.append(str(error))
    return said


def made(provider: StateProvider, namespace: str, conf: Mapping[str, Any]) -> None:
    """Checkpoint 1 is committed, and 2 is prepared."""
    state = provider.new_state(namespace, conf, None)
    state.put("dog", 1)
    state.put("cat", 1)
    state.prepare_commit(1)
    state.commit(1)
    state.put("dog", 2)
    state.delete("cat")
    state.prepare_commit(2)


class InRedis:
    def __init__(self, server: RedisServer, client: Any) -> None:
        self.conf = {CONFIG: {"jedisPoolConfig": redis_pool(server)}}
        self.namespace = f"t{uuid.uuid4().hex[:8]}/b/1/0"
        self.values = f"ratchet:{{{self.namespace}}}"
        self.client = client
        made(RedisKeyValueStateProvider(), self.namespace, self.conf)

    def said(self) -> list[str]:
        return use(RedisKeyValueStateProvider().new_state(self.namespace, self.conf, None))


@pytest.fixture
def in_redis(redis_server: RedisServer) -> Iterator[InRedis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield InRedis(redis_server, client)


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_values_and_keys_are_named(what: str) -> None:
    for entry in ({PLAIN.dumps("dog"): DAMAGED[what]}, {DAMAGED[what]: PLAIN.dumps(1)}):
        store = MemoryBytes()
        store.write({PLAIN.dumps("cat"): PLAIN.dumps(1), **entry}, 1)
        state = LayeredState(store, PLAIN, PLAIN)
        with pytest.raises(CorruptStateError, match="a state in memory, key b.*ratchet state restore") as error:
            list(state.items())
        assert len(str(error.value)) < 1_000 and str(error.value).isprintable()


def test_nesting_is_bounded_before_it_ends_the_process() -> None:
    value: Any = ()
    for _ in range(NESTING_MAX - 1):
        value = (value, frozenset())
    assert PLAIN.loads(PLAIN.dumps(value)) == value
    for _ in range(3):
        value = (value,)
    with pytest.raises(BadRecordError, match="stand in each other more than 64 deep"):
        PLAIN.dumps(value)
    for _ in range(10_000):
        value = (value,)
    with pytest.raises(BadRecordError, match="a tuple, deeply nested"):
        PLAIN.dumps(value)


@pytest.mark.parametrize("kept", [1, "text", (1,), ("text", 1), (None, 1), (1.5, 1, 1), [True, 1]], ids=repr)
def test_a_value_without_its_time_is_named(kept: Any) -> None:
    store = MemoryBytes()
    store.write({PLAIN.dumps("dog"): PLAIN.dumps(kept)}, 1)
    state = ExpiringState(LayeredState(store, PLAIN, PLAIN), 60)
    uses: list[Callable[[], object]] = [
        lambda: state.get("dog"),
        lambda: list(state.items()),
        lambda: list(state.committed_entries()[1]),
        lambda: state.prepare_commit(2),
    ]
    for each in uses:
        with pytest.raises(CorruptStateError, match="which has no time"):
            each()


@pytest.mark.slow
@pytest.mark.integration
def test_a_value_of_redis_that_is_too_long_is_named(in_redis: InRedis) -> None:
    in_redis.conf[CONFIG]["jedisPoolConfig"]["timeout"] = 60_000
    for key in in_redis.client.hkeys(in_redis.values):
        in_redis.client.hset(in_redis.values, key, b"x" * (VALUE_BYTES_MAX + 1))
    state = RedisKeyValueStateProvider().new_state(in_redis.namespace, in_redis.conf, None)
    for read in (lambda: state.get("dog"), lambda: list(state.items())):
        with pytest.raises(CorruptStateError, match="has 67,108,865 bytes, more than 67,108,864"):
            read()
    state = RedisKeyValueStateProvider().new_state(f"{in_redis.namespace}-new", in_redis.conf, None)
    state.put("a", "x" * VALUE_BYTES_MAX)
    with pytest.raises(TopologyError, match="keep less in one key"):
        state.prepare_commit(1)


@pytest.mark.each_value_once
@pytest.mark.integration
@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream", "hash"])
@pytest.mark.parametrize("part", ["", ":meta", ":prepared", ":2:0"])
def test_a_key_of_redis_of_another_type_is_named(in_redis: InRedis, part: str, kind: str) -> None:
    key = in_redis.values + part
    if kind == ("set" if part == ":prepared" else "hash"):
        return
    in_redis.client.delete(key)
    put: dict[str, Callable[[], object]] = {
        "string": lambda: in_redis.client.set(key, b"\xff\x1b]0;x\x07\r\nforged"),
        "list": lambda: in_redis.client.rpush(key, "a"),
        "set": lambda: in_redis.client.sadd(key, "a"),
        "zset": lambda: in_redis.client.zadd(key, {"a": 1}),
        "stream": lambda: in_redis.client.xadd(key, {"a": "b"}),
        "hash": lambda: in_redis.client.hset(key, "a", "b"),
    }
    put[kind]()
    said = in_redis.said()
    assert said
    assert part == ":2:0" or f"{key} in Redis: it is a {kind}" in said[0]


@pytest.mark.each_value_once
@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [b"\xff\r\n+OK", b"x", b"-1", b"1.5", b"", b"9" * 100_000, b" 1", b"1_0", "²".encode()],
    ids=lambda text: repr(text[:9]),
)
@pytest.mark.parametrize("field", ["txid", "count", "ready:2"])
def test_damaged_meta_data_of_redis_are_named(in_redis: InRedis, field: str, text: bytes) -> None:
    in_redis.client.hset(f"{in_redis.values}:meta", field, text)
    said = in_redis.said()
    assert said
    assert in_redis.values in said[0]


@pytest.mark.integration
@pytest.mark.parametrize(
    "ready", [HUGE, b"1 " + HUGE + b" 3", b"1 5000 3", b"999999 1 2", b"1 2", b"0 5000 0", b"1 1 1 1 1"]
)
def test_a_made_up_number_of_parts_is_refused(in_redis: InRedis, ready: bytes) -> None:
    in_redis.client.hset(f"{in_redis.values}:meta", "ready:2", ready)
    with pytest.raises(CorruptStateError, match="ready:2|lacks changes"):
        RedisStore(in_redis.client, in_redis.namespace).commit(2)
    assert in_redis.client.hget(f"{in_redis.values}:meta", "txid") == b"1"


@pytest.mark.integration
def test_changes_that_are_gone_from_what_is_prepared_are_noticed(in_redis: InRedis) -> None:
    in_redis.client.hdel(f"{in_redis.values}:2:0", PLAIN.dumps("cat"))
    assert "lacks changes that were prepared as checkpoint 2" in in_redis.said()[0]


@pytest.mark.integration
def test_what_is_no_change_is_no_deletion(in_redis: InRedis) -> None:
    in_redis.client.hset(f"{in_redis.values}:2:0", PLAIN.dumps("dog"), "garbage")
    assert f"{in_redis.values}:2:0 in Redis: the value of" in in_redis.said()[0]


@pytest.mark.integration
@pytest.mark.parametrize("member", [b"x", b"\xff", b"-5", b"1" * 5_000], ids=lambda text: repr(text[:9]))
def test_a_made_up_checkpoint_of_redis_is_named(in_redis: InRedis, member: bytes) -> None:
    in_redis.client.sadd(f"{in_redis.values}:prepared", member)
    assert f"{in_redis.values}:prepared" in in_redis.said()[0]


@pytest.mark.integration
def test_an_earlier_version_s_checkpoint_is_committed(in_redis: InRedis) -> None:
    in_redis.client.hset(f"{in_redis.values}:meta", "ready:2", "1")
    store = RedisStore(in_redis.client, in_redis.namespace)
    store.commit(2)
    assert dict(store.scan()) == {PLAIN.dumps("dog"): PLAIN.dumps(2)}
    in_redis.client.hset(f"{in_redis.values}:meta", "ready:3", "0")
    store.commit(3)
    assert store.txid() == 3


class TestLmdb:
    NAMESPACE = "t/b/1/0"

    @pytest.fixture(autouse=True)
    def _made(self, tmp_path: Path) -> None:
        self.conf = {CONFIG: {"path": str(tmp_path)}}
        self.folder = tmp_path / self.NAMESPACE
        provider = LmdbKeyValueStateProvider()
        made(provider, self.NAMESPACE, self.conf)
        provider.close()

    def said(self) -> str:
        provider = LmdbKeyValueStateProvider()
        try:
            return " ".join(use(provider.new_state(self.NAMESPACE, self.conf, None)))
        except RatchetError as error:
            assert isinstance(error, CorruptStateError)
            return str(error)
        finally:
            provider.close()

    @pytest.mark.parametrize(
        ("database", "key", "value"),
        [
            ("meta", b"txid", b""),
            ("meta", b"txid", b"1"),
            ("meta", b"ready:", b""),
            ("meta", b"ready:x", b""),
            ("values", b"k" + PLAIN.dumps("bird"), b""),
            ("values", b"k" + PLAIN.dumps("bird"), b"\xff\xff\xff\xff" + PLAIN.dumps(1)),
            ("values", b"x", b"\x00\x00\x00\x09abc"),
            ("values", b"k\xc1", b"\x00\x00\x00\x00\x01"),
            ("prepared", (2).to_bytes(8, "big") + b"k" + PLAIN.dumps("dog"), b"x"),
            ("prepared", (2).to_bytes(8, "big") + b"k" + PLAIN.dumps("dog"), b"+\x00\x00"),
        ],
    )
    def test_damaged_entries_are_named(self, database: str, key: bytes, value: bytes) -> None:
        with lmdb.open(str(self.folder), max_dbs=3) as environment:
            opened = environment.open_db(database.encode())
            with environment.begin(write=True) as writing:
                writing.put(key, value, db=opened)
        assert str(self.folder) in self.said()

    @pytest.mark.parametrize("data", [b"hello" * 5_000, b"\x00" * 20_000, b"\xff" * 20_000])
    def test_a_file_of_another_kind_is_named(self, data: bytes) -> None:
        (self.folder / "data.mdb").write_bytes(data)
        assert str(self.folder) in self.said()

    @pytest.mark.slow
    def test_a_file_that_was_cut_off_does_not_end_the_process(self) -> None:
        """To read a page that is not there is a bus error."""
        file = self.folder / "data.mdb"
        file.write_bytes(file.read_bytes()[: 3 * 4_096])
        source = (
            "import sys\n"
            "from framework.state import LmdbKeyValueStateProvider\n"
            f"conf = {{{CONFIG!r}: {{'path': sys.argv[1]}}}}\n"
            f"print(list(LmdbKeyValueStateProvider().new_state({self.NAMESPACE!r}, conf, None).items()))\n"
        )
        command = [sys.executable, "-c", source, str(self.folder.parents[3])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, "the files are damaged" in done.stderr) == (1, True), done.stderr


class Spans(BaseWindowedBolt):
    def __init__(self) -> None:
        super().__init__(TimeWindow(60, "at"), key=["word"])

    def execute_window(self, window: Any, collector: Any) -> None:
        raise NotImplementedError

    def declare_output_fields(self, declarer: Any) -> None:
        """It emits nothing."""


TUPLE = ["spout", "default", ["word", "at"], ["dog", 1], 1]


@pytest.mark.parametrize(
    "entry",
    [
        (5, 1),
        ("text", 1),
        ((), 1),
        ((("dog",),), 1),
        (("dog", "p", 0), 1),
        ((("dog",), "p", 0), "text"),
        ((("dog",), "p"), 1),
        ((("dog",), "p", "pane"), 1),
        ((("dog",), "p", 0), 2**62),
        ((("dog",), "t", (0, 0)), 1),
        ((("dog",), "t", (0, 0)), TUPLE[:4]),
        ((("dog",), "t", (0, 0)), [*TUPLE[:4], "text"]),
        ((("dog",), "t", (0, 0)), [*TUPLE[:2], [1, 2], [1, 2], 1]),
        ((("dog",), "t", 0), TUPLE),
        ((("dog",), "t", (0, 0, 0)), TUPLE),
        (((), "r", 1, 0), "text"),
        (((), "r", 1, 0), True),
        (((), "o", 1, 0), None),
        (((), "m", ("spout", "default"), 1, 0), [1]),
        (((), "r", "one", 0), 1),
    ],
    ids=repr,
)
def test_what_no_window_has_put_is_named(entry: tuple[Any, Any]) -> None:
    store = MemoryBytes()
    store.write({PLAIN.dumps(entry[0]): PLAIN.dumps(entry[1])}, 1)
    bolt = Spans()
    fields = Fields(word=str, at=float)
    bolt.bind("spans", [Input("spout", "default", fields, ShuffleGrouping())], 1)
    bolt.prepare({}, TopologyContext("t", "spans", 0, 1), None)
    with pytest.raises(CorruptStateError, match="a state of windows holds .* which no window has put"):
        bolt.init_state(LayeredState(store, PLAIN, PLAIN))


def test_a_damaged_tuple_of_a_window_is_named() -> None:
    with pytest.raises(CorruptStateError, match="which no window has put"):
        tuples_of([TUPLE, [1]])
    assert [type(each) for each in tuples_of([TUPLE, None])] == [Tuple]
