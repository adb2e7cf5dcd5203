"""The Redis backend: unsafe servers, keys of others, older snapshots,
documents that any client reads.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from framework import Fields, TransactionalTopologyBuilder, TransactionAttempt, submit
from framework.errors import (
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    MovedOnError,
    RetryableError,
    TopologyError,
)
from framework.inspect.rebuild import rebuild
from framework.testing.conformance.backend_test_helpers import transact
from framework.topology import OpenCommit, Stamp
from framework.transactions import MemoryStore
from framework.transactions.run import TopologyFailed
from integration import RedisServer
from sinks import Count, MapState, OpaqueMapState, RedisBackend, Row, StateCommitter, TransactionalMapState
from sinks.read_as_of import items_as_of
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
KEY, VALUE = Fields(word=str), Fields(n=int)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts Redis servers for one test."""
    started: list[RedisServer] = []

    def start(**settings: str) -> RedisServer:
        server = RedisServer(
            tmp_path / f"redis-{len(started)}", settings={k.replace("_", "-"): v for k, v in settings.items()}
        )
        server.start()
        started.append(server)
        return server

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(redis_server.url) as made:
        yield made


@pytest.fixture
def name() -> str:
    return f"s-{uuid.uuid4().hex[:10]}"


def put(state: OpaqueMapState, txid: int, **values: object) -> None:
    attempt = TransactionAttempt(txid, 1)
    state.begin_commit(attempt)
    state.multi_put(list(values), list(values.values()))
    state.commit(attempt)


def test_rows_are_documents_that_any_client_reads(redis_server: RedisServer, client: Any, name: str) -> None:
    state = OpaqueMapState(RedisBackend(redis_server.url, name, KEY, VALUE))
    put(state, 1, dog=2)
    put(state, 2, dog=5)
    assert json.loads(client.hget(f"{{{name}}}", "dog")) == {"s": [2, 0, 1], "w": "standalone", "v": [5], "p": [2]}


@pytest.mark.fault(24)
def test_a_server_that_may_evict_is_refused_at_start(own: Callable[..., RedisServer], name: str) -> None:
    """Eviction would lose rows."""
    server = own(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    with pytest.raises(ConfigError, match=r"evicts keys \(allkeys-lru\) beyond 104857600 bytes.*noeviction"):
        RedisBackend(server.url, name, KEY, VALUE).prepare("topology")


def test_a_replica_is_refused(own: Callable[..., RedisServer], redis_server: RedisServer, name: str) -> None:
    server = own(replicaof=f"127.0.0.1 {redis_server.port}")
    with pytest.raises(ConfigError, match="is a replica; give the address of the primary"):
        RedisBackend(server.url, name, KEY, VALUE).prepare("topology")


def test_users_and_their_rights_are_probed_before_the_first_batch(
    redis_server: RedisServer, client: Any, name: str
) -> None:
    client.execute_command("ACL", "SETUSER", name, "on", ">pass", "~*", "+@all", "-rpush")
    try:
        address = redis_server.url.replace("//", f"//{name}:{{}}@")
        with pytest.raises(ConfigError) as wrong:
            RedisBackend(address.format("s3cret-canary"), name, KEY, VALUE).prepare("topology")
        assert "canary" not in str(wrong.value)
        with pytest.raises(ConfigError, match="can.t run this command.*check the user.s rights"):
            RedisBackend(address.format("pass"), name, KEY, VALUE).prepare("topology")
        client.execute_command("ACL", "SETUSER", name, "+rpush")
        RedisBackend(address.format("pass"), name, KEY, VALUE).prepare("topology")
    finally:
        client.execute_command("ACL", "DELUSER", name)


def test_keys_of_others_and_other_columns_are_refused(redis_server: RedisServer, client: Any, name: str) -> None:
    client.set(f"{{{name}}}", "mine")
    with pytest.raises(ConfigError, match="is a string, not a hash: somebody else's"):
        RedisBackend(redis_server.url, name, KEY, VALUE).prepare("topology")
    client.delete(f"{{{name}}}")
    client.hset(f"{{{name}}}", "dog", "5")
    with pytest.raises(ConfigError, match="has rows and no header"):
        RedisBackend(redis_server.url, name, KEY, VALUE).prepare("topology")
    client.delete(f"{{{name}}}")
    RedisBackend(redis_server.url, name, KEY, VALUE).prepare("topology")
    with pytest.raises(ConfigError, match=r"other columns.*n.*int64.*n.*double"):
        RedisBackend(redis_server.url, name, KEY, Fields(n=float)).prepare("topology")


def test_a_row_that_was_overwritten_by_hand_is_named_as_corrupt(
    redis_server: RedisServer, client: Any, name: str
) -> None:
    state = OpaqueMapState(RedisBackend(redis_server.url, name, KEY, VALUE))
    put(state, 1, dog=2)
    client.hset(f"{{{name}}}", "dog", "5")
    with pytest.raises(CorruptStateError, match="key 'dog': not a row"):
        state.get("dog")
    client.set(f"{{{name}}}:header", "5")
    with pytest.raises(CorruptStateError, match="is not a header"):
        state.read_header()


def test_names_are_allow_listed_and_addresses_checked(redis_server: RedisServer) -> None:
    for bad in ("", "a b", "{x}", "x" * 200, "a\0"):
        with pytest.raises(TopologyError, match="is not usable"):
            RedisBackend(redis_server.url, bad)
    with pytest.raises(ConfigError, match="does not parse"):
        RedisBackend("http://localhost", "x")


@pytest.mark.parametrize(
    "address",
    [
        "redis://:s3cr/et@host:6379/0",
        "redis://u:12/s3cret@host/0",
        "redis://:s3cr#et@host/0",
        "redis://:s3cr?et@host/0",
        "redis://u@s3cret:x@host/0",
    ],
)
def test_no_part_of_a_password_is_taken_for_a_port_and_shown(address: str) -> None:
    with pytest.raises(ConfigError, match="does not parse: .* %2F for /") as refused:
        RedisBackend(address, "x")
    assert "s3cr" not in str(refused.value)


def test_only_keys_of_the_open_transaction_are_listed(redis_server: RedisServer, client: Any, name: str) -> None:
    """So the cost of a sweep depends on the size of the batch, not on that of the state."""
    state = OpaqueMapState(RedisBackend(redis_server.url, name, KEY, VALUE))
    for txid in range(1, 6):
        put(state, txid, **{f"w{txid}": 1, "dog": txid})
        assert set(client.lrange(f"{{{name}}}:touched", 0, -1)) == {f"w{txid}".encode(), b"dog"}


class Proxy:
    """A proxy to a server; when ``swallow`` is set, it drops the next answer and its connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.swallow = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink, source is server), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if answers and self.swallow.is_set():
                    self.swallow.clear()
                    break
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_a_write_whose_answer_is_lost_is_not_sent_again(redis_server: RedisServer, client: Any, name: str) -> None:
    proxy = Proxy(redis_server.port)
    backend = RedisBackend(f"redis://127.0.0.1:{proxy.port}/0", name, KEY, VALUE)
    header = backend.prepare("topology")
    opened = header.opened(1, OpenCommit(1, 1, "d"))
    backend.raise_header(header, header)  # the server knows the script
    proxy.swallow.set()
    with pytest.raises(CommitOutcomeUnknown):
        backend.raise_header(header, opened)
    assert backend.read_header() == opened
    row = Row((5,), Stamp(1, 1, 1), None, "w")
    backend.multi_put(opened, [("cat",)], [None], [row])
    proxy.swallow.set()
    with pytest.raises(CommitOutcomeUnknown):
        backend.multi_put(opened, [("dog",)], [None], [row])
    assert backend.multi_get([("dog",), ("cat",)]) == [row, row]


def test_a_server_that_is_away_is_retried(name: str) -> None:
    with pytest.raises(RetryableError):
        RedisBackend("redis://127.0.0.1:1/0", name, KEY, VALUE).prepare("topology")


@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        (RetryableError, ["MISCONF Redis is configured to save RDB snapshots", "NOREPLICAS Not enough good replicas"]),
        (
            RetryableError,
            ["BUSY Redis is busy running a script", "ERR Error running script: @user_script: 3: OOM command"],
        ),
        (RetryableError, [redis.exceptions.OutOfMemoryError("used memory"), redis.exceptions.TryAgainError("slot")]),
        (
            ConfigError,
            ["ERR Error running script: @user_script: 3: Script attempted to access nonexistent global", "ERR"],
        ),
        (RetryableError, [redis.exceptions.ReadOnlyError("You can't write against a read only replica.")]),
        (ConfigError, ["NOPERM this user has no permissions"]),
        (CorruptStateError, ["WRONGTYPE Operation against a key"]),
    ],
)
def test_errors_are_permanent_unless_they_are_known_to_pass(kind: type[Exception], errors: list[Any]) -> None:
    """C30: only errors that are known to pass are retried."""
    backend = RedisBackend("redis://localhost", "rows", KEY, VALUE)
    for each in errors:
        with pytest.raises(kind) as named, backend._named():
            raise each if isinstance(each, Exception) else redis.exceptions.ResponseError(each)
        assert type(named.value) is kind


@pytest.mark.fault(23)
def test_a_server_restored_to_an_older_snapshot_stops_the_topology(
    own: Callable[..., RedisServer], tmp_path: Path, name: str
) -> None:
    """Both in mid-run and at the next start."""
    server = own()
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 5}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = OpaqueMapState(RedisBackend(server.url, name))
    builder.set_bolt("words", StateCommitter(state, ["word"], {"count": Count()})).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    run = submit(topology, store=store, executor="local")
    run.wait_until_caught_up(PATIENCE_S)
    server.stop()
    shutil.copytree(server.folder / "data", tmp_path / "older")
    server.start()
    for _ in range(5):
        spout.append("0", ["a"])
    run.wait_until_caught_up(PATIENCE_S)
    server.stop()
    shutil.rmtree(server.folder / "data")
    shutil.copytree(tmp_path / "older", server.folder / "data")
    server.start()
    spout.append("0", ["a"])
    with pytest.raises(TopologyFailed, match="holds transactions up to 5 only, and 11 was to be committed"):
        run.wait_until_caught_up(PATIENCE_S)
    run.stop()
    assert state.get("a") == 5
    again = submit(topology, store=store, executor="local")
    with pytest.raises(ConfigError, match=r"holds transactions up to 5.*11 is next.*the sink is behind"):
        again.wait_until_caught_up(PATIENCE_S)
    again.stop()


def test_a_scan_that_gives_a_row_twice_is_no_answer(
    redis_server: RedisServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may do that when it makes a hash smaller meanwhile."""
    backend = RedisBackend(redis_server.url, name, KEY, VALUE)
    state = OpaqueMapState(backend)
    transact(state, 1, 1, {"dog": 1, "cat": 2})
    assert len(list(items_as_of(backend, 1))) == 2
    once = backend.scan
    monkeypatch.setattr(backend, "scan", lambda: [*once(), next(iter(once()))])
    with pytest.raises(MovedOnError, match="may have given a row twice"):
        list(items_as_of(backend, 1))


LOSSES: dict[str, Callable[[Any, str], None]] = {
    "all rows deleted": lambda client, name: client.delete(f"{{{name}}}"),
    "one row deleted": lambda client, name: client.hdel(f"{{{name}}}", "a"),
    "all rows expired": lambda client, name: client.pexpire(f"{{{name}}}", 1),
    "the count deleted": lambda client, name: client.delete(f"{{{name}}}:count"),
    "the list of touched keys deleted": lambda client, name: client.delete(f"{{{name}}}:touched"),
}


def counting(url: str, name: str, state: type[MapState], words: list[str]) -> tuple[Any, Any]:
    spout = OpaqueMemoryTransactionalSpout({0: [[word] for word in words]}, Fields(word=str), 3)
    if state is TransactionalMapState:
        spout = MemoryTransactionalSpout({0: [[word] for word in words]}, Fields(word=str), 3)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    committer = StateCommitter(state(RedisBackend(url, name)), ["word"], {"count": Count()})
    builder.set_bolt("words", committer).global_grouping("spout")
    return builder.build(), spout


@pytest.mark.each_value_once
@pytest.mark.rule("C30")
@pytest.mark.parametrize("state", [OpaqueMapState, TransactionalMapState])
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_were_lost_do_not_begin_again_from_nothing(
    redis_server: RedisServer, client: Any, name: str, loss: str, state: type[MapState]
) -> None:
    """In a run, and at the next start."""
    topology, spout = counting(redis_server.url, name, state, ["a", "b", "c"] * 5)
    store = MemoryStore()
    run = submit(topology, store=store, executor="local")
    run.wait_until_caught_up(60)
    LOSSES[loss](client, name)
    wait_for(lambda: loss != "all rows expired" or not client.exists(f"{{{name}}}"))
    left = client.hgetall(f"{{{name}}}")
    for _ in range(5):
        spout.append("0", ["a"])
    with pytest.raises(
        TopologyFailed, match=r"were written: another program has removed some .DEL, HDEL., or they expired"
    ):
        run.wait_until_caught_up(60)
    run.stop()
    again = submit(topology, store=store, executor="local")
    with pytest.raises(CorruptStateError, match="another program has removed some"):
        again.wait_until_caught_up(60)
    again.stop()
    assert client.hgetall(f"{{{name}}}") == left


@pytest.mark.slow
def test_a_server_that_evicts_in_a_run_is_noticed(own: Callable[..., RedisServer], name: str) -> None:
    server = own()
    topology, spout = counting(server.url, name, OpaqueMapState, [f"word-{number % 500}" for number in range(1_000)])
    with redis.Redis.from_url(server.url) as client:
        run = submit(topology, store=MemoryStore(), executor="local")
        run.wait_until_caught_up(60)
        client.config_set("maxmemory-policy", "allkeys-lfu")
        client.config_set("maxmemory", 1)  # everything must go
        wait_for(lambda: not _filled(client, name))
        client.config_set("maxmemory", 0)
        spout.append("0", ["word-1"])
        with pytest.raises(TopologyFailed, match="another program has removed some|its header is gone"):
            run.wait_until_caught_up(60)
        run.stop()


def _filled(client: Any, name: str) -> bool:
    with contextlib.suppress(redis.exceptions.OutOfMemoryError):
        client.set("other", b"x" * 1_000)  # a write makes the server evict
    return bool(client.exists(f"{{{name}}}"))


def test_a_state_that_lost_rows_can_be_rebuilt(redis_server: RedisServer, client: Any, name: str) -> None:
    topology, spout = counting(redis_server.url, name, OpaqueMapState, ["a", "b", "c"] * 5)
    store = MemoryStore()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(60)
    client.hdel(f"{{{name}}}", "a")
    rebuild(topology, store, state="words", take_over=True)
    spout.append("0", ["a"])
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(60)
    assert {key[0]: row.value for key, row in topology.states[0].backend.scan()} == {"a": (6,), "b": (5,), "c": (5,)}


def test_a_state_that_lost_rows_can_be_cleared(redis_server: RedisServer, client: Any, name: str) -> None:
    state = OpaqueMapState(RedisBackend(redis_server.url, name, KEY, VALUE))
    put(state, 1, dog=2, cat=3)
    client.hdel(f"{{{name}}}", "cat")
    with pytest.raises(CorruptStateError, match="has 1 rows, and 2 were written"):
        state.prepare("standalone")
    state.clear("standalone")
    put(state, 1, dog=1)
    assert state.get("dog") == 1


@pytest.fixture
def ordered(redis_server: RedisServer, name: str) -> OpaqueMapState:
    state = OpaqueMapState(RedisBackend(redis_server.url, name, KEY, VALUE))
    state.backend.order_by("n")
    state.prepare("topology")
    return state


def test_what_is_due_is_read_in_proportion_to_it(
    ordered: OpaqueMapState, client: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact(ordered, 1, 1, {f"word-{number}": number for number in range(12_000)})
    assert client.zcard(f"{{{name}}}:due") == 12_000
    read: list[int] = []
    texts = RedisBackend._texts
    monkeypatch.setattr(RedisBackend, "scan", None)
    monkeypatch.setattr(RedisBackend, "_texts", lambda self, names: read.append(len(names)) or texts(self, names))
    found = ordered.backend.due("n", 99, 109, txid=None)
    assert sorted(row.value for _, row in found if row.value is not None) == [(n,) for n in range(100, 110)]
    assert sum(read) <= 11


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
def test_what_is_due_is_read_by_pages_while_another_task_removes_and_moves_names(
    ordered: OpaqueMapState, client: Any, name: str, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setattr("sinks.redis.DUE_NAMES", 3)
    monkeypatch.setattr("sinks.redis._ANCHORS", 2)
    transact(ordered, 1, 1, {**{f"word-{number}": 5 for number in range(8)}, "a": 4, "b": 6, "late": 9})
    found, due = [], ordered.backend.due("n", 3, 8, txid=None)
    for number, (key, _) in enumerate(due):
        found.append(key[0])
        if number == 4:  # in the middle of the second page
            for word in ("word-4", "word-3", "word-2")[:gone]:
                client.zrem(f"{{{name}}}:due", word)
                if word == "word-3":
                    client.zadd(f"{{{name}}}:due", {word: 100})
    kept = ["a", *(f"word-{number}" for number in range(8)), "b"]
    assert list(dict.fromkeys(found)) == kept


def test_a_sorted_set_that_lost_entries_is_noticed(ordered: OpaqueMapState, client: Any, name: str) -> None:
    """Without them a window would never close."""
    transact(ordered, 1, 1, {"dog": 5, "cat": 7})
    client.zrem(f"{{{name}}}:due", "dog")
    with pytest.raises(CorruptStateError, match="has 1 entries of the sorted set of what is due, and 2 were written"):
        transact(ordered, 2, 1, {"emu": 1})
    ordered.clear("topology")
    transact(ordered, 1, 1, {"emu": 1})
    assert client.zrange(f"{{{name}}}:due", 0, -1) == [b"emu"]


def test_rows_that_were_written_without_an_order_are_found_by_a_scan(redis_server: RedisServer, name: str) -> None:
    state = OpaqueMapState(RedisBackend(redis_server.url, name, KEY, VALUE))
    transact(state, 1, 1, {"dog": 5, "cat": 7})
    state.backend.order_by("n")
    transact(state, 2, 1, {"emu": 6})
    found = state.backend.due("n", 5, 7, txid=None)
    assert sorted(key for key, _ in found) == [("cat",), ("emu",)]


def test_what_is_due_goes_with_rows_that_are_exchanged(ordered: OpaqueMapState, client: Any, name: str) -> None:
    transact(ordered, 1, 1, {"dog": 5, "cat": 7})
    rebuilt = OpaqueMapState(ordered.backend.beside("rebuilt"))
    transact(rebuilt, 1, 1, {"dog": 8})
    expected = ordered.read_header()
    ordered.exchange(expected, expected, rebuilt.read_header())
    assert [key for key, _ in ordered.backend.due("n", 0, 9, txid=None)] == [("dog",)]
    transact(ordered, 2, 1, {"emu": 1})
    assert client.zrange(f"{{{name}}}:due", 0, -1) == [b"emu", b"dog"]
    assert client.zcard(f"{{{name}}}:former:due") == 2


#: Prints how many megabytes a process needs in addition to read the rows of many keys.
_READS_MANY = """
import resource, sys
from framework import Fields
from sinks import RedisBackend
backend = RedisBackend(sys.argv[1], "many")
backend.bind(Fields(n=int, word=str), Fields(n=int))
keys = [(n, "word") for n in range(100_000)]
backend.multi_get(keys[:1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
backend.multi_get(keys)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_many_keys_take_memory_of_their_size(redis_server: RedisServer) -> None:
    """Not 4 KiB each, the size of the JSON encoder's buffer, which was 400 MB."""
    command = [sys.executable, "-c", _READS_MANY, redis_server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
