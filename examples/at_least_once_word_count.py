"""The streaming word count of *Guaranteed message processing*: sentences are split and counted.

The sentences come from Kafka, and are processed at least once. There are two forms of the bolt that
splits them. The rich bolt anchors each word to its sentence, and acks the sentence at the end, by
explicit calls. For the basic bolt, the framework does both.

The counts are kept in attributes of the bolts, and every change is emitted. A sentence whose words
were not all counted in time is emitted again. So after a failure a count can be too high, but never
too low. If counts must always be exact, see ``examples/exactly_once_word_count.py``.

    python -m examples.at_least_once_word_count [--basic] [--local] [FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.exactly_once_word_count import TEXT, send_lines, words_of
from framework.observe import configure_logging
from integration import EmbeddedServers
from ratchet import (
    BaseBasicBolt,
    BaseRichBolt,
    CoreTopology,
    Fields,
    KafkaSpout,
    OutputCollector,
    OutputFieldsDeclarer,
    RichOutputCollector,
    TextCodec,
    TopologyBuilder,
    TopologyContext,
    Tuple,
    submit,
)


class SplitSentence(BaseRichBolt):
    """Splits sentences; anchors and acks explicitly."""

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
    """Splits sentences. The framework anchors each emitted tuple to the input tuple, and acks the
    input when ``execute`` returns."""

    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        for word in words_of(tup["sentence"]):
            collector.emit([word])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str))


class WordCount(BaseBasicBolt):
    """Counts words in memory, as long as its task lives."""

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
    """Send the file, and run until every sentence is acked. Returns the last count of each word."""
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
