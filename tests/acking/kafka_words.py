"""The word count over Kafka on a Spark cluster, its processes killed again and again; and the oracle that looks at the outcome.

``python -m tests.acking.kafka_words --times 20`` kills an executor, the driver and the broker so often each, and prints what it
saw.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from framework import CoreTopology, Fields, TopologyBuilder
from integration import EmbeddedServers, SparkCluster
from spouts import KafkaSpout, TextCodec
from tests.acking.journaled import CountWords, Split, noted, sentence_of
from tests.conftest import Topics
from tests.pipeline.processes import RunProcess

PARTITIONS = 4
KINDS = ("executor", "driver", "broker")


class SplitNumbered(Split):
    """Records are ``number sentence``."""

    def execute(self, tup: Any) -> None:
        number, *words = tup["value"].split()
        for place, word in enumerate(words):
            self.collector.emit([word, int(number), place], anchors=tup)
        self.collector.ack(tup)


def topology(app: Mapping[str, Any]) -> CoreTopology:
    spout = KafkaSpout(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec(), group="words", commit_every_s=0.5
    )
    builder = TopologyBuilder("kafka-words")
    builder.set_spout("lines", spout, 2)
    builder.set_bolt("split", SplitNumbered(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", CountWords(Path(app["app.folder"])), 2).fields_grouping("split", Fields("word"))
    return builder.build()


@dataclass
class Outcome:
    """What was seen. ``recovery_s``: kind -> seconds from each kill until a word was counted again."""

    messages: int = 0
    words: int = 0
    missing: int = 0
    foreign: int = 0
    repeated: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def share_repeated(self) -> float:
        return self.repeated / max(self.words, 1)

    def summary(self) -> dict[str, Any]:
        shown = {kind: (statistics.median(each), max(each)) for kind, each in self.recovery_s.items()}
        return {
            **asdict(self),
            "kills": dict(self.kills),
            "recovery_s": shown,
            "share_repeated": round(self.share_repeated, 4),
        }


def run(folder: Path, times: int, seed: int, *, per_second: int = 200) -> Outcome:
    """Kill each kind ``times`` times, in an order from the seed, while records keep coming. Raises ``TimeoutError`` when nothing
    goes on after one."""
    outcome = Outcome()
    order = [kind for kind in KINDS for _ in range(times)]
    random.Random(seed).shuffle(order)
    with EmbeddedServers(folder / "servers") as servers, SparkCluster(folder / "spark", 2) as spark:
        topics = Topics(servers.bootstrap_servers)
        topics.create("lines", PARTITIONS)
        stop = threading.Event()
        feeder = threading.Thread(target=_feed, args=(topics, outcome, stop, per_second))
        settings = {
            "app.topic": "lines",
            "app.kafka": servers.bootstrap_servers,
            "app.folder": folder,
            "spark.master": spark.address,
            "spark.executor.memory": "512m",
            "topology.message.timeout.secs": 10,
            "topology.max.spout.pending": 500,
        }
        process = RunProcess(folder / "run.log", "tests.acking.kafka_words:topology", settings)
        feeder.start()
        try:
            process.start()
            _await_words(process, folder)
            for kind in order:
                killed_at = time.monotonic()
                _kill(kind, process, spark, servers)
                outcome.kills[kind] += 1
                _await_words(process, folder)
                outcome.recovery_s.setdefault(kind, []).append(time.monotonic() - killed_at)
                time.sleep(1.0)
            stop.set()
            feeder.join()
            process.signal(signal.SIGTERM)
            process.finish()
            process.start("--until-caught-up")
            if process.finish() != 0:
                raise RuntimeError(f"the last run failed; its log ends:\n{process.tail()}")
        finally:
            stop.set()
            process.end()
    _judge(folder, outcome)
    return outcome


def _feed(topics: Topics, outcome: Outcome, stop: threading.Event, per_second: int) -> None:
    producer = topics.producer()
    while not stop.wait(0.1):
        for _ in range(per_second // 10):
            number = outcome.messages
            producer.produce("lines", f"{number} {sentence_of(number)}", partition=number % PARTITIONS)
            outcome.messages += 1
        producer.poll(0)
    producer.flush(60)


def _kill(kind: str, process: RunProcess, spark: SparkCluster, servers: EmbeddedServers) -> None:
    if kind == "executor":
        os.kill(random.choice(spark.await_executors(2)), signal.SIGKILL)
    elif kind == "driver":
        process.kill()
        process.start()
    else:
        servers.kafka.kill()
        servers.kafka.start()


def _await_words(process: RunProcess, folder: Path) -> None:
    """Until a few words more have been counted."""
    file = folder / "seen"
    before = file.stat().st_size if file.exists() else 0
    if not process.wait_for(lambda: file.exists() and file.stat().st_size > before + 1_000, 120):
        raise RuntimeError(f"the driver ended by itself; its log ends:\n{process.tail()}")


def _judge(folder: Path, outcome: Outcome) -> None:
    found = Counter(noted(folder, "seen"))
    expected = {
        f"{number} {place} {word}"
        for number in range(outcome.messages)
        for place, word in enumerate(sentence_of(number).split())
    }
    outcome.words = len(expected)
    outcome.missing = len(expected - set(found))
    outcome.foreign = len(set(found) - expected)
    outcome.repeated = sum(times - 1 for times in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-kills-") as folder:
        outcome = run(Path(folder), arguments.times, arguments.seed)
    print(json.dumps(outcome.summary(), indent=1))
    return 1 if outcome.missing or outcome.foreign else 0


if __name__ == "__main__":
    sys.exit(main())
