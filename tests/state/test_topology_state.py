"""The committed state of a topology, read from outside:
it is that of the checkpoint that it names.
"""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis.commands.core import Script

from framework import Config, submit
from framework.core.committed_state_reader import TopologyState
from framework.core.leader_loop import read_record
from framework.errors import CorruptStateError
from framework.state import redis as state_in_redis
from framework.transactions import MemoryStore
from integration import RedisServer
from tests.kit.state_parts import Log, counting, lmdb, redis_pool
from tests.kit.waiting import PATIENCE_S

WORDS = ["the", "cow", "jumped", "over", "the", "moon"]


@pytest.fixture
def key() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


def in_redis(server: RedisServer) -> dict[str, Any]:
    return {
        "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
        "topology.state.provider.config": {"jedisPoolConfig": redis_pool(server)},
        "topology.state.checkpoint.interval.ms": 50,
    }


def run(key: str, words: list[str], conf: dict[str, Any], store: MemoryStore) -> None:
    with submit(counting(key, Log(key, [words]), counters=1), conf, store=store, executor="local") as started:
        started.wait_until_idle(PATIENCE_S)


class Gone(BaseException):
    """The process of the driver dies, and those of all tasks."""


@pytest.mark.integration
@pytest.mark.behaviour("5.2")
def test_a_reader_of_redis_sees_each_checkpoint_that_follows(key: str, redis_server: RedisServer) -> None:
    conf, store = in_redis(redis_server), MemoryStore()
    run(key, WORDS, conf, store)
    with TopologyState(counting(key, Log(key, []), counters=1), Config.of(conf), store) as state:
        assert (state.get("count", "the"), state.get("count", "sun")) == (2, None)
        run(key, [*WORDS, "the", "sun"], conf, store)
        assert (state.get("count", "the"), state.get("count", "sun")) == (3, 1)


@pytest.mark.integration
@pytest.mark.behaviour("5.2", "5.4")
def test_a_half_committed_checkpoint_in_redis_is_not_taken_for_the_previous_one(
    key: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes die in the middle of a commit.

    A snapshot that called this the checkpoint before would count the committed part twice.
    """
    conf, store = in_redis(redis_server), MemoryStore()
    run(key, WORDS, conf, store)
    before = read_record(store, key)
    monkeypatch.setattr(state_in_redis, "PART_CHANGES", 1)
    real = Script.__call__

    def die_after(script: Script, *arguments: Any, **named: Any) -> Any:
        answer = real(script, *arguments, **named)
        if script.script == state_in_redis._APPLY:
            raise Gone
        return answer

    monkeypatch.setattr(Script, "__call__", die_after)
    with pytest.raises(Gone):
        run(key, [*WORDS, *WORDS], conf, store)
    monkeypatch.undo()
    with TopologyState(counting(key, Log(key, []), counters=1), Config.of(conf), store) as state:
        shown = dict(state.items("count"))
        assert before is not None and state.record.txid == before.txid
        assert shown != Counter(WORDS)  # a part of the new checkpoint is there
        assert (state.txid_before, state.txid_after) == (before.txid, before.txid + 1)


@pytest.mark.behaviour("5.2")
def test_reading_a_store_that_was_replaced_names_it(key: str, tmp_path: Path) -> None:
    store = MemoryStore()
    run(key, WORDS, lmdb(tmp_path / "a"), store)
    elsewhere = Config.of(lmdb(tmp_path / "b"))
    with (
        TopologyState(counting(key, Log(key, []), counters=1), elsewhere, store) as state,
        pytest.raises(
            CorruptStateError, match=r"the state of count\[0\] holds checkpoint 0, and the record .* says \d"
        ),
    ):
        state.get("count", "the")
    with (
        TopologyState(counting(key, Log(key, []), counters=1), elsewhere, store) as state,
        pytest.raises(
            CorruptStateError, match=r"the state of count\[0\] holds checkpoint 0, and the record .* says \d"
        ),
    ):
        list(state.items("count"))
