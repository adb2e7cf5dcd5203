"""The word count over Kafka, on a Spark cluster or in the driver, under many kills; and the oracle.

``python -m tests.kit.kafka_words --times 20`` kills an executor, the driver and the broker 20 times
each, and prints what came of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework import BaseBasicBolt, CoreTopology, Fields, TopologyBuilder
from integration import EmbeddedServers
from spouts import KafkaSpout, TextCodec
from tests.kit.journaled import CountWords, Split, noted, sentence_of
from tests.kit.kills import Kills, kill_often

#: Of each executor.
KINDS = {"spark": ("executor", "driver", "broker"), "local": ("driver", "broker")}


class SplitNumbered(Split):
    """Records are ``number sentence``."""

    def execute(self, tup: Any) -> None:
        number, *words = tup["value"].split()
        for place, word in enumerate(words):
            self.collector.emit([word, int(number), place], anchors=tup)
        self.collector.ack(tup)


class SplitInColumns(BaseBasicBolt):
    """The same, with the acks and anchors of a basic bolt."""

    def execute(self, tup: Any, collector: Any) -> None:
        number, *words = tup["value"].split()
        for place, word in enumerate(words):
            collector.emit([word, int(number), place])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, number=int, place=int))


def topology(app: Mapping[str, Any]) -> CoreTopology:
    spout = KafkaSpout(
        [app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec(), group="words", commit_every_s=0.5
    )
    builder = TopologyBuilder("kafka-words")
    builder.set_spout("lines", spout, 2)
    split = SplitInColumns() if app.get("app.split") == "columns" else SplitNumbered()
    builder.set_bolt("split", split, 2).shuffle_grouping("lines")
    builder.set_bolt("count", CountWords(Path(app["app.folder"])), 2).fields_grouping("split", Fields("word"))
    return builder.build()


@dataclass
class Outcome:
    """What was killed, and how many words are missing, foreign or repeated."""

    seen: Kills
    words: int = 0
    missing: int = 0
    foreign: int = 0
    repeated: int = 0

    def summary(self) -> dict[str, Any]:
        words = {name: getattr(self, name) for name in ("words", "missing", "foreign", "repeated")}
        return {**self.seen.summary(), **words, "share_repeated": round(self.repeated / max(self.words, 1), 4)}


def run(
    folder: Path, times: int, seed: int, *, per_second: int = 200, split: str = "columns", executor: str = "spark"
) -> Outcome:
    """Kill each kind ``times`` times, in an order from the seed. ``split``: "columns" for a basic
    bolt, "tuples" for one that acks by itself.
    """
    order = [kind for kind in KINDS[executor] for _ in range(times)]
    random.Random(seed).shuffle(order)
    words = folder / "seen"
    with EmbeddedServers(folder / "servers") as servers:
        seen = kill_often(
            folder,
            "tests.kit.kafka_words:topology",
            {"app.split": split},
            order,
            lambda: words.stat().st_size // 1_000 if words.exists() else 0,
            servers,
            per_second=per_second,
            executor=executor,
        )
    found = Counter(noted(folder, "seen"))
    expected = {
        f"{number} {place} {word}"
        for number in range(seen.messages)
        for place, word in enumerate(sentence_of(number).split())
    }
    return Outcome(
        seen,
        len(expected),
        len(expected - set(found)),
        len(set(found) - expected),
        sum(times - 1 for times in found.values()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", choices=["columns", "tuples"], default="columns")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-kills-") as folder:
        outcome = run(Path(folder), arguments.times, arguments.seed, split=arguments.split)
    print(json.dumps(outcome.summary(), indent=1))
    return 1 if outcome.missing or outcome.foreign else 0


if __name__ == "__main__":
    sys.exit(main())
