"""Two tables in one transaction: the count of each word, and the number of words per range of
counts.

``CountWords`` keeps a count per word. After it, ``Bucketize`` detects when the count of a word
moves from one bucket of ten to another. ``CountBuckets`` keeps the number of words in each bucket.
The second table is derived from changes of the first, so the two must always agree. Both are
written in the same commit phase, and they still agree after a crash and a replay.

    python -m examples.transactional_words [--spark] [--opaque]
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from framework.observe import configure_logging
from ratchet import (
    BaseBasicBolt,
    BaseTransactionalBolt,
    Committer,
    Fields,
    MapState,
    MemoryTransactionalSpout,
    OpaqueMapState,
    OpaqueMemoryTransactionalSpout,
    OutputCollector,
    OutputFieldsDeclarer,
    SqliteBackend,
    Topology,
    TopologyContext,
    TransactionalMapState,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    Tuple,
    submit,
)

BUCKET_SIZE = 10
TAKE_PER_PARTITION = 40
WORDS = ("cat", "dog", "apple", "banana", "chicken", "emu", "fig", "goat", "hen", "iris")


def data(rows: int = 300, partitions: int = 4) -> dict[int, list[list[str]]]:
    """Words with very different frequencies. Every call returns the same words."""
    chance = random.Random(7)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return {partition: [[word] for word in chance.choices(WORDS, weights, k=rows)] for partition in range(partitions)}


def plus(more: int) -> Callable[[int | None], int]:
    """A function that adds ``more`` to a stored value, or to 0 if there is none (None)."""
    return lambda stored: (stored or 0) + more


class CountWords(BaseTransactionalBolt, Committer):
    """Counts per word. Emits each word of the batch with its count before the batch and after
    it."""

    deterministic = True

    def __init__(self, state: MapState) -> None:
        self.state = state

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self.collector = collector
        self.attempt = batch_id
        self.counts: Counter[str] = Counter()

    def execute(self, tup: Tuple) -> None:
        self.counts[tup["word"]] += 1

    def finish_batch(self) -> None:
        words = sorted(self.counts)
        self.state.begin_commit(self.attempt)
        changes = self.state.multi_update_with_previous(words, [plus(self.counts[word]) for word in words])
        self.state.commit(self.attempt)
        for word, (before, after) in zip(words, changes, strict=True):
            self.collector.emit([word, before or 0, after])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str, before=int, after=int))


class Bucketize(BaseBasicBolt):
    """For a word that has moved to another bucket: emits +1 for the new bucket, -1 for the old."""

    deterministic = True

    def execute(self, tup: Tuple, collector: OutputCollector) -> None:
        was, now = tup["before"] // BUCKET_SIZE, tup["after"] // BUCKET_SIZE
        if tup["before"] == 0:
            collector.emit([now, 1])
        elif was != now:
            collector.emit([was, -1])
            collector.emit([now, 1])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(bucket=int, change=int))


class CountBuckets(BaseTransactionalBolt, Committer):
    """Counts the words in each bucket. It is a committer after a committer, and both write in the
    same commit phase."""

    deterministic = True

    def __init__(self, state: MapState) -> None:
        self.state = state

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self.attempt = batch_id
        self.changes: Counter[int] = Counter()

    def execute(self, tup: Tuple) -> None:
        self.changes[tup["bucket"]] += tup["change"]

    def finish_batch(self) -> None:
        buckets = sorted(self.changes)
        self.state.begin_commit(self.attempt)
        self.state.multi_update(buckets, [plus(self.changes[bucket]) for bucket in buckets])
        self.state.commit(self.attempt)


def topology(
    database: Path, *, opaque: bool = False, rows: int = 300, bucketize: BaseBasicBolt | None = None
) -> Topology:
    """``opaque``: use a spout whose replays may differ, and opaque states."""
    spout_class = OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout
    state_class = OpaqueMapState if opaque else TransactionalMapState
    words = state_class(SqliteBackend(database, "words", key=Fields(word=str), value=Fields(count=int)))
    buckets = state_class(SqliteBackend(database, "buckets", key=Fields(bucket=int), value=Fields(words=int)))
    spout = spout_class(data(rows), Fields(word=str), TAKE_PER_PARTITION)
    builder = TransactionalTopologyBuilder("transactional-words", "spout", spout, 4)
    builder.set_bolt("count-words", CountWords(words), 3).fields_grouping("spout", Fields("word"))
    builder.set_bolt("bucketize", bucketize or Bucketize(), 3).shuffle_grouping("count-words")
    builder.set_bolt("count-buckets", CountBuckets(buckets), 2).fields_grouping("bucketize", Fields("bucket"))
    return builder.build()


def tables(database: Path) -> tuple[dict[str, int], dict[int, int]]:
    """The two tables: word -> count, and bucket -> words; empty before the first commit."""
    try:
        with sqlite3.connect(database) as connection:
            words = dict(connection.execute("SELECT word, count FROM words_live"))
            buckets = dict(connection.execute("SELECT bucket, words FROM buckets_live WHERE words <> 0"))
    except sqlite3.OperationalError:
        return {}, {}
    return words, buckets


def histogram(words: Mapping[str, int]) -> dict[int, int]:
    """The content that the second table must have, given the first."""
    return dict(Counter(count // BUCKET_SIZE for count in words.values()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.transactional_words")
    parser.add_argument("--spark", action="store_true", help="on Spark, instead of in this process")
    parser.add_argument("--opaque", action="store_true", help="a spout whose replays may differ, with opaque states")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "words.db"
        config = {"topology.max.spout.pending": 3}
        executor = "spark" if arguments.spark else "local"
        with submit(topology(database, opaque=arguments.opaque), config, executor=executor) as run:
            run.wait_until_caught_up(120)
        words, buckets = tables(database)
    for word, count in sorted(words.items(), key=lambda each: -each[1]):
        print(f"{count:6,}  {word}")
    for bucket, number in sorted(buckets.items()):
        print(f"{number:6,}  words counted {bucket * BUCKET_SIZE} to {bucket * BUCKET_SIZE + BUCKET_SIZE - 1} times")
    print("the tables agree" if buckets == histogram(words) else "the tables DISAGREE")


if __name__ == "__main__":
    main()
