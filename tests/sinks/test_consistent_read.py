"""Several sinks are read as of one transaction."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, MovedOnError
from framework.inspect.comparison import compare
from framework.testing.conformance.backend_test_helpers import KEY, VALUE, finish, open_attempt, transact
from framework.transactions import MemoryStore, committed_txid
from integration import PostgresServer, RedisServer
from sinks import (
    Count,
    NonTransactionalMapState,
    OpaqueMapState,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
    common_txid,
    read_together,
)
from sinks.memory import MemoryBackend
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

FIELDS = Fields(word=str, n=int)


def state() -> OpaqueMapState:
    backend = MemoryBackend()
    backend.bind(KEY, VALUE)
    made = OpaqueMapState(backend)
    made.prepare("topology")
    return made


def test_a_row_is_read_as_of_the_transaction_before_its_last_change() -> None:
    one = state()
    transact(one, 1, 1, {"dog": 1, "cat": 5})
    transact(one, 2, 1, {"dog": 2})
    assert one.read_as_of(["dog", "cat", "cow"], 1) == [1, 5, None]
    assert one.read_as_of(["dog", "cat"], 2) == [3, 5]
    transact(one, 3, 1, {"dog": 4})
    assert one.read_as_of(["dog"], 2) == [3]
    with pytest.raises(MovedOnError, match="key .'dog',.: changed after transaction 2"):
        one.read_as_of(["dog"], 1)


def test_a_key_without_a_row_is_known_to_have_had_none_only_since_tombstones_were_purged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a purge each fifth transaction, in place of each thousandth."""
    monkeypatch.setattr("framework.topology.fencing.PURGE_EVERY", 5)
    one, recomputed = state(), state()
    for each in (one, recomputed):
        transact(each, 1, 1, {"cat": 1})
    transact(one, 2, 1, {"dog": 1})
    one.begin_commit(attempt := open_attempt(one, 3, 1))
    one.delete(["cat"])
    one.commit(attempt)
    finish(one)
    assert one.read_as_of(["cat", "cow"], 2) == [1, None]
    transact(one, 4, 1, {"dog": 1})
    open_attempt(one, 5, 1)
    assert one.purge(one.read_header(), 5) == 1
    for key in ("cat", "cow"):
        with pytest.raises(MovedOnError, match=f"'{key}'.*may have been deleted after transaction 4"):
            one.read_as_of([key], 3)
        assert one.read_as_of([key], 4) == [None]
    moved: list[Any] = []
    differences: list[Any] = []
    compare(one, recomputed, 2, differences.append, moved.append)  # as of then, it had the cat
    assert ("cat",) in moved and not any(each.key == "cat" for each in differences)


def test_a_sink_that_is_ahead_is_read_as_of_the_one_that_is_behind() -> None:
    one, other = state(), state()
    for each in (one, other):
        transact(each, 1, 1, {"dog": 1})
    transact(one, 2, 1, {"dog": 10, "new": 1})
    assert common_txid([one, other]) == 1
    assert read_together([(one, ["dog", "new"]), (other, ["dog"])]) == (1, [[1, None], [1]])
    transact(other, 2, 1, {"dog": 10})
    assert read_together([(one, ["dog", "new"]), (other, ["dog"])]) == (2, [[11, 1], [11]])


def test_a_state_without_previous_values_says_so() -> None:
    plain = NonTransactionalMapState(MemoryBackend())
    plain.prepare("topology")
    with pytest.raises(ConfigError, match="may add a batch twice"):
        read_together([(plain, ["dog"])])


def feed(spout: OpaqueMemoryTransactionalSpout, number: int) -> None:
    for each in range(7):
        spout.append("0", ["ab"[each % 2], number])


@pytest.mark.slow
@pytest.mark.integration
def test_readers_of_three_stores_never_see_half_a_transaction(
    postgres: PostgresServer, redis_server: RedisServer, tmp_path: Path, name: str
) -> None:
    """Each transaction adds the same rows to all three; readers compare them while it runs."""
    table = name.replace("-", "_")
    spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 7)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    backends: list[Any] = [
        SqliteBackend(tmp_path / "x.db", table),
        PostgresBackend(postgres.dsn, table),
        RedisBackend(redis_server.url, name),
    ]
    states = [OpaqueMapState(backend) for backend in backends]
    for number, each in enumerate(states):
        committer = StateCommitter(each, ["word"], {"count": Count(), "total": Sum("n")})
        builder.set_bolt(f"words{number}", committer).global_grouping("spout")
    store = MemoryStore()
    done = threading.Event()
    seen: list[tuple[int, list[list[Any]]]] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                found = read_together([(each, ["a", "b"]) for each in states], lambda: committed_txid(store, name))
                assert found.values[0] == found.values[1] == found.values[2], found
                seen.append(found)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    feed(spout, 1)
    with submit(builder.build(), store=store, executor="local") as run:
        run.wait_for_commit(1, PATIENCE_S)
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(60):
            feed(spout, number)
            run.wait_until_caught_up(PATIENCE_S)
        done.set()
        reader.join(PATIENCE_S)
    assert not failures, failures
    assert len({txid for txid, _ in seen}) > 5
    assert read_together([(each, ["a", "b"]) for each in states]).txid == committed_txid(store, name)
