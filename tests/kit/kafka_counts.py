"""Words counted by a stateful bolt over Kafka on a Spark cluster, its processes killed again and again; and the oracle.

``python -m tests.kit.kafka_counts --kills 50`` kills executors, homes, the driver, the broker, ZooKeeper and Redis, at random,
and compares the state with a fold over the records.
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
from pathlib import Path
from typing import Any

from framework import BaseStatefulBolt, Config, CoreTopology, Fields, TopologyBuilder, Tuple
from framework.submission import store_of
from framework.topology_state import TopologyState
from integration import EmbeddedServers, RedisServer
from spouts import KafkaSpout, TextCodec
from tests.kit.journaled import note
from tests.kit.kafka_words import SplitNumbered
from tests.kit.kills import Kills, kill_often, numbered

KINDS = ("executor", "home", "driver", "broker", "zookeeper", "redis")
#: Of the words of every sentence, so many kinds: keys of the state.
KEYS = 1_000


class CountWords(BaseStatefulBolt):
    """Counts words, each of them with a number below ``KEYS`` that its record's is mapped to."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.counts = state

    def execute(self, tup: Tuple) -> None:
        key = tup["word"], tup["number"] % KEYS
        self.counts.put(key, (self.counts.get(key) or 0) + 1)
        self.collector.ack(tup)

    def pre_commit(self, txid: int) -> None:
        note(self.folder, "commits", txid)

    def grouping_key(self, key: Any) -> tuple[Any, ...]:
        return key[:1]


def topology(app: Mapping[str, Any]) -> CoreTopology:
    spout = KafkaSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec(), group="counts")
    builder = TopologyBuilder("kafka-counts")
    builder.set_spout("lines", spout, 2)
    builder.set_bolt("split", SplitNumbered(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", CountWords(app["app.folder"]), 2).fields_grouping("split", Fields("word"))
    return builder.build()


def run(folder: Path, order: list[str], *, exact: bool, per_second: int) -> tuple[Kills, Counter[Any], Counter[Any]]:
    """Returns what was done, what the state holds in the end, and what it should hold."""
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
        )
        app = {"app.topic": "lines", "app.kafka": servers.bootstrap_servers, "app.folder": str(folder)}
        config = Config.of({**settings, **app, "topology.state.exactly.once": exact})
        store = store_of(config)
        try:
            with TopologyState(topology(config.app), config, store) as state:
                found = Counter(dict(state.items("count")))
        finally:
            store.close()
    words = (numbered(number).split() for number in range(seen.messages))
    return seen, found, Counter((word, int(number) % KEYS) for number, *each in words for word in each)


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
        seen, found, expected = run(
            Path(folder), order, exact=not arguments.at_least_once, per_second=arguments.per_second
        )
    missing, more = expected - found, found - expected
    words = {
        "counted": found.total(),
        "expected": expected.total(),
        "missing": missing.total(),
        "too many": more.total(),
    }
    print(json.dumps({**seen.summary(), "words": words}, indent=1))
    return 1 if missing or (more and not arguments.at_least_once) else 0


if __name__ == "__main__":
    sys.exit(main())
