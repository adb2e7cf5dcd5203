"""``python -m benchmarks.checkpoints``: what keeping state costs, as one JSON line.

For each provider and size of the state: seconds to prepare and to commit a checkpoint in which 1 %
of the keys have changed, and one in which a tenth of that has changed; stored bytes per key;
seconds until a restarted task has its state and has read a key; the rate of a full scan. Then what
checkpoints cost a topology: words per second through a stateful bolt, by checkpoint interval. With
``--reads``, instead: reads per second of all keys of a state in turn, one by one and read ahead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from framework import BaseStatefulBolt, Fields, ReplayableSpout, TopologyBuilder, Tuple, submit
from framework.observe import configure_logging
from framework.state.checkpointed_key_value_state import CommittedStore, LayeredState
from framework.state.lmdb import LmdbStore
from framework.state.memory import MemoryBytes
from framework.state.provider_settings import provider_of
from framework.state.redis import CACHED_MAX, RedisStore
from framework.state.serialization import MsgpackSerializer
from framework.topology import KeyValueState, StateProvider
from framework.transactions import MemoryStore
from integration import RedisServer

CHECKPOINTS = 5
NAMESPACE = "cost/count/1/0"
WORDS = 400_000
DIFFERENT_WORDS = 100_003
#: About as many as a task has of one round.
READ_AHEAD = 1_000


def conf_of(provider: str, folder: Path, server: RedisServer) -> dict[str, Any]:
    if provider == "memory":
        return {"topology.state.provider": "framework.state.InMemoryKeyValueStateProvider"}
    if provider == "lmdb":
        return {
            "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
            "topology.state.provider.config": {"path": str(folder / "state")},
        }
    host, port = server.url.removeprefix("redis://").split("/")[0].rsplit(":", 1)
    pool = {"host": host, "port": int(port), "timeout": 60_000}
    return {
        "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
        "topology.state.provider.config": {"jedisPoolConfig": pool},
    }


def cost(provider: str, keys: int, folder: Path) -> dict[str, Any]:
    """The costs for one provider and one size."""
    with RedisServer(folder / "redis") as server:
        conf = conf_of(provider, folder, server)
        made = provider_of(conf)
        state = _state(made, conf)
        state.load(((f"key-{number}", number) for number in range(keys)), 1)
        chance = random.Random(1)
        found: dict[str, Any] = {"provider": provider, "keys": keys}
        for name, changed in (("one_percent", max(keys // 100, 1)), ("a_tenth_of_that", max(keys // 1000, 1))):
            prepare, commit = [], []
            for _ in range(CHECKPOINTS):
                for number in chance.sample(range(keys), changed):
                    state.put(f"key-{number}", chance.random())
                txid = (state.txid or 0) + 1
                start = time.monotonic()
                state.prepare_commit(txid)
                prepared = time.monotonic()
                state.commit(txid)
                prepare.append(prepared - start)
                commit.append(time.monotonic() - prepared)
            found[name] = {
                "changed": changed,
                "prepare_s": round(statistics.median(prepare), 4),
                "commit_s": round(statistics.median(commit), 4),
            }
        found["bytes_per_key"] = round(_bytes(provider, folder, server) / keys) if provider != "memory" else None
        if made.durable:
            made.close()
            start = time.monotonic()
            again = _state(provider_of(conf), conf)
            again.recover(again.txid or 0, prepared=False, upto=1 << 40)
            again.get("key-0")
            found["restart_s"] = round(time.monotonic() - start, 4)
            state = again
        start = time.monotonic()
        count = sum(1 for _ in state.committed_items()[1])
        found["scan_keys_per_s"] = round(count / (time.monotonic() - start))
        if count != keys:
            raise RuntimeError(f"{provider} holds {count} keys instead of {keys}")
    return found


def _state(provider: StateProvider, conf: Mapping[str, Any]) -> KeyValueState[Any, Any]:
    state = provider.new_state(NAMESPACE, conf, None)
    assert isinstance(state, KeyValueState)
    return state


def _bytes(provider: str, folder: Path, server: RedisServer) -> int:
    if provider == "lmdb":
        return sum(each.stat().st_blocks * 512 for each in (folder / "state").rglob("*.mdb"))
    with redis.Redis.from_url(server.url) as client:
        return int(client.memory_usage(f"ratchet:{{{NAMESPACE}}}", samples=1_000) or 0)


def _word(number: int) -> str:
    return f"word-{number * 7919 % DIFFERENT_WORDS}"


class Words(ReplayableSpout):
    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.next = collector, 0

    def next_tuple(self) -> None:
        for number in range(self.next + 1, min(self.next + 50, WORDS) + 1):
            self.collector.emit([_word(number)], message_id=number)
            self.next = number

    def position(self) -> int:
        return self.next

    def seek(self, positions: Sequence[int]) -> None:
        (self.next,) = positions

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Count(BaseStatefulBolt):
    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: KeyValueState[str, int]) -> None:
        self.counts = state

    def execute(self, tup: Tuple) -> None:
        self.counts.put(tup["word"], (self.counts.get(tup["word"]) or 0) + 1)
        self.collector.ack(tup)


def rates(provider: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Words per second in one process, by checkpoint interval."""
    for interval_ms in (29_000, 5_000, 1_000, 200):
        with RedisServer(folder / f"redis-{interval_ms}") as server:
            builder = TopologyBuilder(f"cost-{interval_ms}")
            builder.set_spout("words", Words())
            builder.set_bolt("count", Count()).fields_grouping("words", Fields("word"))
            conf = {
                **conf_of(provider, folder, server),
                "topology.state.checkpoint.interval.ms": interval_ms,
            }
            start = time.monotonic()
            with submit(builder.build(), conf, store=MemoryStore(), executor="local") as run:
                run.wait_until_idle(600)
                status = run.status().checkpoint
            yield {
                "provider": provider,
                "interval_ms": interval_ms,
                "words_per_s": round(WORDS / (time.monotonic() - start)),
                "checkpoints": status.txid if status is not None else 0,
            }


def reads(folder: Path, repeat: int) -> Iterator[dict[str, Any]]:
    """Reads per second of 100,003 keys in turn, each by a state that has read none of them: one by
    one, and read ahead in batches. The stores and ways take turns, and the best of each counts."""
    words = [_word(number) for number in range(DIFFERENT_WORDS)]
    batches = [words[start : start + READ_AHEAD] for start in range(0, len(words), READ_AHEAD)]

    def one_by_one(state: KeyValueState[Any, Any]) -> None:
        for word in words:
            state.get(word)

    def read_ahead(state: KeyValueState[Any, Any]) -> None:
        for batch in batches:
            state.read_ahead(batch)
            for word in batch:
                state.get(word)

    best: dict[tuple[str, str], float] = {}
    with RedisServer(folder / "redis") as server, redis.Redis.from_url(server.url) as client:
        stores: dict[str, CommittedStore] = {
            "memory": MemoryBytes(),
            "lmdb": LmdbStore(folder / "lmdb", sync=True),
            "redis": RedisStore(client, NAMESPACE),
        }
        for store in stores.values():
            _layered(store, 0).load(((word, number) for number, word in enumerate(words)), 1)
        for _ in range(repeat):
            for name, store in stores.items():
                for way, cached_max in ((one_by_one, 0), (read_ahead, CACHED_MAX)):
                    state = _layered(store, cached_max)
                    start = time.perf_counter()
                    way(state)
                    rate = len(words) / (time.perf_counter() - start)
                    best[name, way.__name__] = max(rate, best.get((name, way.__name__), 0.0))
    for name in stores:
        one, ahead = best[name, "one_by_one"], best[name, "read_ahead"]
        yield {
            "store": name,
            "one_by_one_per_s": round(one),
            "read_ahead_per_s": round(ahead),
            "ratio": round(ahead / one, 2),
        }


def _layered(store: CommittedStore, cached_max: int) -> LayeredState:
    return LayeredState(store, MsgpackSerializer(), MsgpackSerializer(), cached_max=cached_max)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="*", default=[1_000, 1_000_000, 10_000_000])
    parser.add_argument("--providers", nargs="*", default=["memory", "lmdb", "redis"])
    parser.add_argument("--reads", action="store_true", help="measure reads alone")
    parser.add_argument("--repeat", type=int, default=5, help="reads: runs of each kind; the best counts")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    if arguments.reads:
        with tempfile.TemporaryDirectory(prefix="ratchet-state-") as folder:
            measured = list(reads(Path(folder), arguments.repeat))
        print(json.dumps({"workload": "reads", "rates": measured}))
        return 0
    costs, measured = [], []
    for provider in arguments.providers:
        for keys in arguments.keys:
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-state-"))
                costs.append(cost(provider, keys, Path(folder)))
                print(costs[-1], file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="ratchet-state-") as folder:
            measured += list(rates(provider, Path(folder)))
            print(measured[-4:], file=sys.stderr, flush=True)
    print(json.dumps({"workload": "checkpoints", "costs": costs, "rates": measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
