"""Stateful bolts count words from Kafka on a Spark cluster, under many kills; and the oracle.

The words are counted, and gathered in windows of a second whose results are added up.
``python -m tests.kit.kafka_counts --kills 50`` kills executors, homes, the driver, the broker,
ZooKeeper and Redis at random, changes the number of tasks now and then, and compares both states
with a fold over the records.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework import BaseStatefulBolt, Config, CoreTopology, Fields, TopologyBuilder, Tuple
from framework.coordination import store_of
from framework.core.reader import TopologyState
from framework.state import BaseWindowedBolt, TimeWindow, Window
from integration import EmbeddedServers, RedisServer
from spouts import KafkaSpout, TextCodec
from tests.kit.journaled import note
from tests.kit.kafka_words import SplitNumbered
from tests.kit.kills import Kills, kill_often, numbered

KINDS = ("executor", "home", "driver", "broker", "zookeeper", "redis", "rescale")
#: The state has up to this many keys per word.
KEYS = 1_000


class CountWords(BaseStatefulBolt):
    """Counts words by the key (word, record number modulo ``KEYS``)."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.counts = state

    def execute(self, tup: Tuple) -> None:
        key = tup["word"], tup["number"] % KEYS
        self.counts.put(key, (self.counts.get(key) or 0) + 1)
        self.collector.emit([tup["word"]], anchors=tup)
        self.collector.ack(tup)

    def pre_commit(self, txid: int) -> None:
        note(self.folder, "commits", txid)

    def grouping_key(self, key: Any) -> tuple[Any, ...]:
        return key[:1]

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class EachSecond(BaseWindowedBolt):
    """How many of each word came in a second of processing time."""

    def __init__(self) -> None:
        super().__init__(TimeWindow(1), key=["word"])

    def execute_window(self, window: Window, collector: Any) -> None:
        collector.emit([*window.key, len(window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(word=str, count=int))


class AddUp(BaseStatefulBolt):
    """Adds up the counts of the windows. Each word is in one window, which fires once."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.totals = state

    def execute(self, tup: Tuple) -> None:
        self.totals.put(tup["word"], (self.totals.get(tup["word"]) or 0) + tup["count"])
        self.collector.ack(tup)


def topology(app: Mapping[str, Any]) -> CoreTopology:
    spout = KafkaSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec(), group="counts")
    tasks = int(app.get("app.tasks", 2))
    builder = TopologyBuilder("kafka-counts")
    builder.set_spout("lines", spout, 2)
    builder.set_bolt("split", SplitNumbered(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", CountWords(app["app.folder"]), tasks).fields_grouping("split", Fields("word"))
    builder.set_bolt("windows", EachSecond(), tasks).fields_grouping("count", Fields("word"))
    builder.set_bolt("totals", AddUp(), tasks).fields_grouping("windows", Fields("word"))
    return builder.build()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was killed, what the states hold at the end, and what they should hold.

    ``totals``: what the results of the windows add up to, by word.
    """

    seen: Kills
    counts: Counter[Any]
    totals: Counter[Any]
    expected: Counter[Any]

    @property
    def expected_totals(self) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for (word, _), count in self.expected.items():
            found[word] += count
        return found


def run(folder: Path, order: list[str], *, exact: bool, per_second: int, seed: int = 1) -> Outcome:
    """Kill what ``order`` says.

    With ``exact``, run on until all windows have fired; without, a result may be lost or come
    twice.
    """
    with EmbeddedServers(folder / "servers") as servers, RedisServer(folder / "redis") as redis:
        host, port = redis.url.removeprefix("redis://").split("/")[0].rsplit(":", 1)
        settings: dict[str, Any] = {
            "transactional.zookeeper.servers": servers.zookeeper,
            "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
            "topology.state.provider.config.jedisPoolConfig.host": host,
            "topology.state.provider.config.jedisPoolConfig.port": int(port),
            "topology.state.checkpoint.interval.ms": 300,
            "topology.state.exactly.once": str(exact).lower(),
            "topology.max.attempts": 100,
        }

        def restart_redis() -> None:
            redis.kill()
            redis.start()

        app = {"app.topic": "lines", "app.kafka": servers.bootstrap_servers, "app.folder": str(folder)}
        config = Config.of({**settings, **app, "topology.state.exactly.once": exact})

        def held(component_id: str) -> Counter[Any]:
            with closing(store_of(config)) as store, TopologyState(topology(config.app), config, store) as state:
                return Counter(dict(state.items(component_id)))

        commits = folder / "commits"
        seen = kill_often(
            folder,
            "tests.kit.kafka_counts:topology",
            settings,
            order,
            lambda: commits.stat().st_size if commits.exists() else 0,
            servers,
            per_second=per_second,
            more={"redis": restart_redis},
            chance=random.Random(seed),
            settled=(lambda messages: held("totals").total() >= _expected(messages).total()) if exact else None,
        )
        return Outcome(seen, held("count"), held("totals"), _expected(seen.messages))


def _expected(messages: int) -> Counter[Any]:
    words = (numbered(number).split() for number in range(messages))
    return Counter((word, int(number) % KEYS) for number, *each in words for word in each)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-least-once", action="store_true")
    parser.add_argument("--per-second", type=int, default=400)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    order = [chance.choice(KINDS) for _ in range(arguments.kills)]
    with tempfile.TemporaryDirectory(prefix="ratchet-kills-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        made = run(
            Path(folder),
            order,
            exact=not arguments.at_least_once,
            per_second=arguments.per_second,
            seed=arguments.seed,
        )
    words = {
        "expected": made.expected.total(),
        "counted": _compared(made.counts, made.expected),
        "added up from windows": _compared(made.totals, made.expected_totals),
    }
    print(json.dumps({**made.seen.summary(), "words": words}, indent=1))
    if arguments.at_least_once:
        return 1 if made.expected - made.counts else 0
    return 0 if (made.counts, made.totals) == (made.expected, made.expected_totals) else 1


def _compared(found: Counter[Any], expected: Counter[Any]) -> dict[str, int]:
    return {
        "found": found.total(),
        "missing": (expected - found).total(),
        "too many": (found - expected).total(),
    }


if __name__ == "__main__":
    sys.exit(main())
