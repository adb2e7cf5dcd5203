"""The word count of *Storm State Management*: a bolt whose counts the framework keeps.

The bolt reads and writes its state freely. The framework saves the state at every checkpoint,
together with the offsets of the spout. After a failure it restores both, so each word counts once.
The configuration chooses the provider that keeps the state; the bolt does not know it.

    python -m examples.stateful_word_count [--provider memory|redis|lmdb] [--local] [FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from examples.at_least_once_word_count import SplitSentence
from examples.exactly_once_word_count import TEXT, send_lines
from framework.observe import configure_logging
from integration import EmbeddedServers, RedisServer
from ratchet import (
    BaseBasicBolt,
    BaseStatefulBolt,
    CoreTopology,
    Fields,
    KafkaSpout,
    KeyValueState,
    OutputCollector,
    OutputFieldsDeclarer,
    RichOutputCollector,
    TextCodec,
    TopologyBuilder,
    TopologyContext,
    Tuple,
    submit,
)

PROVIDERS = ("memory", "redis", "lmdb")


class WordCount(BaseStatefulBolt):
    """Counts words. Like every stateful bolt, it anchors and acks explicitly."""

    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: RichOutputCollector
    ) -> None:
        self.collector = collector

    def init_state(self, state: KeyValueState[str, int]) -> None:
        self.counts = state

    def execute(self, tup: Tuple) -> None:
        count = (self.counts.get(tup["word"]) or 0) + 1
        self.counts.put(tup["word"], count)
        self.collector.emit([tup["word"], count], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str, count=int))


class Highest(BaseBasicBolt):
    """Writes the last count of each word to a file when the topology stops. A tuple may come twice,
    with the same count, so the highest count is right."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: OutputCollector, batch_id: Any
    ) -> None:
        self.counts: dict[str, int] = {}

    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        self.counts[tup["word"]] = max(tup["count"], self.counts.get(tup["word"], 0))

    def cleanup(self) -> None:
        lines = (f"{word} {count}\n" for word, count in self.counts.items())
        Path(self.file).write_text("".join(lines), encoding="utf-8")


def topology(bootstrap_servers: str, topic: str, counts: Path) -> CoreTopology:
    spout = KafkaSpout([topic], bootstrap_servers=bootstrap_servers, codec=TextCodec("sentence"))
    builder = TopologyBuilder(f"stateful-word-count-{topic}")
    builder.set_spout("sentences", spout, 2)
    builder.set_bolt("split", SplitSentence(), 2).shuffle_grouping("sentences")
    builder.set_bolt("count", WordCount(), 3).fields_grouping("split", Fields("word"))
    builder.set_bolt("highest", Highest(counts)).global_grouping("count")
    return builder.build()


def state_settings(provider: str, folder: Path, redis: RedisServer | None) -> dict[str, Any]:
    """The settings that choose this provider for the state."""
    if provider == "lmdb":
        return {
            "topology.state.provider": "framework.state.LmdbKeyValueStateProvider",
            "topology.state.provider.config": {"path": str(folder / "state")},
        }
    if provider == "redis" and redis is not None:
        url = urlsplit(redis.url)
        return {
            "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
            "topology.state.provider.config": {"jedisPoolConfig": {"host": url.hostname, "port": url.port}},
        }
    return {"topology.state.provider": "framework.state.InMemoryKeyValueStateProvider"}


def count_words(
    servers: EmbeddedServers, text: Path, settings: Mapping[str, Any], folder: Path, *, executor: str = "spark"
) -> dict[str, int]:
    """Send the file, and run until every sentence is acked and in a checkpoint. Returns the count
    of each word."""
    topic, counts = f"sentences-{uuid.uuid4().hex[:8]}", folder / "counts"
    send_lines(servers.bootstrap_servers, topic, text)
    config = {"transactional.zookeeper.servers": servers.zookeeper, **settings}
    with submit(topology(servers.bootstrap_servers, topic, counts), config, executor=executor) as run:
        run.wait_until_idle(120)
    return {word: int(count) for word, count in map(str.split, counts.read_text(encoding="utf-8").splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--provider", choices=PROVIDERS, default="lmdb")
    parser.add_argument("--local", action="store_true", help="in this process instead of on Spark")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-words-")))
        servers = stack.enter_context(EmbeddedServers(made / "servers"))
        redis = stack.enter_context(RedisServer(made / "redis")) if arguments.provider == "redis" else None
        settings = state_settings(arguments.provider, made, redis)
        executor = "local" if arguments.local else "spark"
        counts = count_words(servers, arguments.file, settings, made, executor=executor)
    for word, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:20]:
        print(f"{count:6} {word}")


if __name__ == "__main__":
    main()
