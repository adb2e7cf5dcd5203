"""The streaming word count of *Guaranteed message processing*: sentences from Kafka, split, counted; at least once.

Two forms of the bolt that splits. The rich one says by itself what belongs together: it anchors each word to its sentence and
acks the sentence at the end. The basic one does the same without saying so.

The counts are kept in the bolts' own attributes, and every change of one is emitted. A sentence whose words were not all counted in
time is emitted again, so a count can be too high after a failure, never too low. For numbers that must be right whatever
happens, there is ``examples/word_count.py``.

    python -m examples.streaming_word_count [--basic] [--local] [FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.word_count import TEXT, send_lines, words_of
from framework import (
    BaseBasicBolt,
    BaseRichBolt,
    CoreTopology,
    Fields,
    OutputCollector,
    OutputFieldsDeclarer,
    RichOutputCollector,
    TopologyBuilder,
    TopologyContext,
    Tuple,
    submit,
)
from framework.observe import configure_logging
from integration import EmbeddedServers
from spouts import KafkaSpout, TextCodec


class SplitSentence(BaseRichBolt):
    """Anchors and acks by itself."""

    def prepare(  # type: ignore[override]
        self, conf: Mapping[str, Any], context: TopologyContext, collector: RichOutputCollector
    ) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        for word in words_of(tup["sentence"]):
            self.collector.emit([word], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str))


class SplitSentenceBasic(BaseBasicBolt):
    """What is emitted is anchored to the tuple at hand, which is acked when ``execute`` returns."""

    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        for word in words_of(tup["sentence"]):
            collector.emit([word])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str))


class WordCount(BaseBasicBolt):
    """Counts from round to round, for as long as its task lives."""

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: OutputCollector, batch_id: Any
    ) -> None:
        self.counts: Counter[str] = Counter()

    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        self.counts[tup["word"]] += 1
        collector.emit([tup["word"], self.counts[tup["word"]]])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str, count=int))


class Show(BaseBasicBolt):
    """Appends every change to a file, one line each."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: OutputCollector, batch_id: Any
    ) -> None:
        self.lines = open(self.file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - for as long as the task lives

    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        self.lines.write(f"{tup['word']} {tup['count']}\n")

    def cleanup(self) -> None:
        self.lines.close()


def topology(bootstrap_servers: str, topic: str, changes: Path, *, basic: bool = False) -> CoreTopology:
    spout = KafkaSpout([topic], bootstrap_servers=bootstrap_servers, codec=TextCodec("sentence"))
    builder = TopologyBuilder(f"streaming-word-count-{topic}")
    builder.set_spout("sentences", spout, 2)
    builder.set_bolt("split", SplitSentenceBasic() if basic else SplitSentence(), 2).shuffle_grouping("sentences")
    builder.set_bolt("count", WordCount(), 3).fields_grouping("split", Fields("word"))
    builder.set_bolt("show", Show(changes)).global_grouping("count")
    return builder.build()


def count_words(
    servers: EmbeddedServers, text: Path, changes: Path, *, basic: bool = False, executor: str = "spark"
) -> dict[str, int]:
    """Send the file, run until every sentence is acked, and return the last count of each word."""
    topic = f"sentences-{uuid.uuid4().hex[:8]}"
    send_lines(servers.bootstrap_servers, topic, text)
    with submit(topology(servers.bootstrap_servers, topic, changes, basic=basic), {}, executor=executor) as run:
        run.wait_until_idle(120)
    return {word: int(count) for word, count in map(str.split, changes.read_text(encoding="utf-8").splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--basic", action="store_true", help="split by the basic bolt")
    parser.add_argument("--local", action="store_true", help="in this process instead of on Spark")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with (
        tempfile.TemporaryDirectory(prefix="ratchet-words-") as made,
        EmbeddedServers(Path(made) / "servers") as servers,
    ):
        executor = "local" if arguments.local else "spark"
        changes = Path(made) / "changes"
        counts = count_words(servers, arguments.file, changes, basic=arguments.basic, executor=executor)
    for word, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:20]:
        print(f"{count:6} {word}")


if __name__ == "__main__":
    main()
