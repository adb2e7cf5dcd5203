"""Values of a state that is far away are read batch by batch, before the tuples that need them."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import redis

from framework import BaseStatefulBolt, Fields, KeyValueState, Tuple, submit
from framework.errors import RetryableError
from framework.state import RedisKeyValueStateProvider, StateProvider
from framework.state.checkpointed_key_value_state import LayeredState
from framework.state.memory import MemoryBytes
from framework.state.serialization import MsgpackSerializer
from framework.topology import CoreTopology, TopologyBuilder
from framework.transactions import MemoryStore
from integration import RedisServer
from tests.kit.state_parts import Count, Log, journal, redis_pool
from tests.kit.waiting import PATIENCE_S, wait_for

#: Each word comes four times, in two batches or more.
WORDS = [f"word{number % 50}" for number in range(200)]
CONF = {"topology.state.checkpoint.interval.ms": 1, "topology.max.spout.pending": 100}


class FarBytes(MemoryBytes):
    """``asked``: how many keys each read has asked for. ``fails``: how many of the next reads get
    no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.fails = 0

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.asked.append(len(keys))
        if self.fails:
            self.fails -= 1
            raise RetryableError("the store is silent")
        return super().get(keys)


class Far(StateProvider):
    """Keeps what a remote server would keep: it outlives the topology."""

    stores: ClassVar[dict[str, FarBytes]] = defaultdict(FarBytes)
    durable = True

    def new_state(self, namespace: str, conf: Mapping[str, Any], context: Any) -> KeyValueState[Any, Any]:
        return LayeredState(self.stores[namespace], MsgpackSerializer(), MsgpackSerializer(), cached_max=1_000)

    def check_before_start(self, conf: Mapping[str, Any]) -> None:
        """It is always there."""

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        return self.stores[namespace].txid() > 0

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        del self.stores[namespace]


class CountPairs(Count):
    """Its keys are tuples: the word twice."""

    def execute(self, tup: Tuple) -> None:
        pair = (tup["word"], tup["again"])
        self.counts.put(pair, (self.counts.get(pair) or 0) + 1)  # type: ignore[arg-type]
        journal(self.key).results[tup["word"]] = self.counts.get(pair)  # type: ignore[arg-type]
        self.collector.ack(tup)


class CountUpper(Count):
    """Its keys are not what the words are grouped by, which ``grouping_key`` does not say."""

    def execute(self, tup: Tuple) -> None:
        key = tup["word"].upper()
        self.counts.put(key, (self.counts.get(key) or 0) + 1)
        journal(self.key).results[tup["word"]] = self.counts.get(key)
        self.collector.ack(tup)


class CountSaid(CountUpper):
    """The same, and it says so."""

    def grouping_key(self, key: Any) -> Sequence[Any]:
        return (key.lower(),)


class CountForAnHour(Count):
    state_ttl_s = 3_600.0


class Pairs(Log):
    def next_tuple(self) -> None:
        for offset in range(self.offsets[0], len(self.words[0])):
            word = self.words[0][offset]
            self.collector.emit([word, word], message_id=offset)
        self.offsets[0] = len(self.words[0])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields("word", "again"))


@pytest.fixture
def key() -> str:
    return f"a{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    Far.stores.clear()


def built(key: str, bolt: BaseStatefulBolt, spout: Log, *fields: str) -> CoreTopology:
    builder = TopologyBuilder(key)
    builder.set_spout("words", spout)
    builder.set_bolt("count", bolt).fields_grouping("words", Fields(*fields))
    return builder.build()


def counted(topology: CoreTopology, **conf: Any) -> tuple[int, list[int]]:
    """Run to the end. Returns the number of recoveries, and how many keys each read asked for."""
    far = {"topology.state.provider": f"{__name__}.Far"}
    with submit(topology, {**CONF, **far, **conf}, executor="local", store=MemoryStore()) as run:
        run.wait_until_idle(PATIENCE_S)
        status = run.status().checkpoint
    assert status is not None
    return status.recoveries, [each for store in Far.stores.values() for each in store.asked]


@pytest.mark.parametrize("bolt", [Count, CountForAnHour])
def test_no_tuple_waits_for_a_read_of_its_own(key: str, bolt: type[Count]) -> None:
    recoveries, asked = counted(built(key, bolt(key), Log(key, [WORDS], per_call=100), "word"))
    assert recoveries == 0
    assert journal(key).results == Counter(WORDS)
    assert sum(asked) == 50  # each key once, although it comes four times
    assert len(asked) < 10


def test_keys_of_several_fields_are_tuples(key: str) -> None:
    _, asked = counted(built(key, CountPairs(key), Pairs(key, [WORDS]), "word", "again"))
    assert journal(key).results == Counter(WORDS)
    assert sum(asked) == 50
    assert len(asked) < 10


@pytest.mark.parametrize(("bolt", "guessed"), [(CountUpper, 50), (CountSaid, 0)])
def test_other_keys_are_read_one_by_one_and_right(key: str, bolt: type[Count], guessed: int) -> None:
    _, asked = counted(built(key, bolt(key), Log(key, [WORDS], per_call=100), "word"))
    assert journal(key).results == Counter(WORDS)
    assert asked.count(1) == 50
    assert sum(asked) == 50 + guessed


def test_a_read_ahead_that_fails_costs_nothing_but_itself(key: str) -> None:
    journal(key).on["init_state"] = lambda txid: [setattr(each, "fails", 1) for each in Far.stores.values()]
    recoveries, asked = counted(built(key, Count(key), Log(key, [WORDS], per_call=100), "word"))
    assert recoveries == 0
    assert journal(key).results == Counter(WORDS)
    assert asked[0] > 1
    assert 1 in asked  # read again, by whoever needed it


@pytest.mark.integration
def test_redis_is_asked_batch_by_batch(key: str, redis_server: RedisServer) -> None:
    pool = redis_pool(redis_server)
    client = redis.Redis(host=pool["host"], port=pool["port"], db=pool["database"])
    conf = {
        **CONF,
        "topology.state.provider": f"{RedisKeyValueStateProvider.__module__}.{RedisKeyValueStateProvider.__name__}",
        "topology.state.provider.config": {"jedisPoolConfig": pool},
    }

    def calls(command: str) -> int:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))

    before = calls("hmget")
    topology = built(key, Count(key), Log(key, [WORDS], per_call=100), "word")
    with submit(topology, conf, executor="local", store=MemoryStore()) as run:
        run.wait_until_idle(PATIENCE_S)
        wait_for(lambda: journal(key).results == Counter(WORDS))
    assert 1 <= calls("hmget") - before < 10
