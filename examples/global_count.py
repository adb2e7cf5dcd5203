"""The global count of Storm's transactional topologies.

A spout emits words in batches. ``BatchCount`` counts the words of a batch in five tasks.
``UpdateGlobalCount``, a committer, adds the partial counts to one number in the database, in the
order of the batches. The row carries the transaction that changed it last, so a batch that is
replayed is not counted twice.

    python -m examples.global_count [--spark] [--database FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.observe import configure_logging
from ratchet import (
    BaseBatchBolt,
    BaseTransactionalBolt,
    Committer,
    Fields,
    MemoryTransactionalSpout,
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

PARTITION_TAKE_PER_BATCH = 3
DATA = {
    0: [["cat"], ["dog"], ["chicken"], ["cat"], ["dog"], ["apple"]],
    1: [["cat"], ["dog"], ["apple"], ["banana"]],
    2: [["cat"], ["cat"], ["cat"], ["cat"], ["cat"], ["dog"], ["dog"], ["dog"], ["dog"]],
}
GLOBAL_COUNT_KEY = "GLOBAL-COUNT"


class BatchCount(BaseBatchBolt):
    """Counts the tuples of a batch in its task. Each batch has a new instance."""

    deterministic = True

    def prepare(
        self, conf: Mapping[str, Any], context: TopologyContext, collector: OutputCollector, batch_id: Any
    ) -> None:
        self.collector = collector
        self.count = 0

    def execute(self, tup: Tuple) -> None:
        self.count += 1

    def finish_batch(self) -> None:
        self.collector.emit([self.count])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(count=int))


class UpdateGlobalCount(BaseTransactionalBolt, Committer):
    """Adds the counts of each batch to the database once, in the order of the batches."""

    deterministic = True

    def __init__(self, database: Path) -> None:
        backend = SqliteBackend(database, "global_count", key=Fields(name=str), value=Fields(count=int))
        self.state = TransactionalMapState(backend)

    def prepare(
        self,
        conf: Mapping[str, Any],
        context: TopologyContext,
        collector: OutputCollector,
        batch_id: TransactionAttempt,
    ) -> None:
        self.collector = collector
        self.attempt = batch_id
        self.sum = 0

    def execute(self, tup: Tuple) -> None:
        self.sum += tup["count"]

    def finish_batch(self) -> None:
        self.state.begin_commit(self.attempt)
        (count,) = self.state.multi_update([GLOBAL_COUNT_KEY], [lambda count: (count or 0) + self.sum])
        self.state.commit(self.attempt)
        self.collector.emit([count])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(sum=int))


def topology(database: Path) -> Topology:
    """Three spout tasks, five counting tasks, and one committing task."""
    spout = MemoryTransactionalSpout(DATA, Fields(word=str), PARTITION_TAKE_PER_BATCH)
    builder = TransactionalTopologyBuilder("global-count", "spout", spout, 3)
    builder.set_bolt("partial-count", BatchCount(), 5).shuffle_grouping("spout")
    builder.set_bolt("sum", UpdateGlobalCount(database)).global_grouping("partial-count")
    return builder.build()


def count(database: Path, executor: str) -> int:
    """Run until every word is counted. Returns the number in the database."""
    built = topology(database)
    with submit(built, {"topology.max.spout.pending": 2}, executor=executor) as run:
        run.wait_until_caught_up(120)
    (state,) = built.states
    total: int = state.get(GLOBAL_COUNT_KEY)  # type: ignore[attr-defined]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.global_count")
    parser.add_argument("--spark", action="store_true", help="on Spark, instead of in this process")
    parser.add_argument("--database", type=Path, help="a SQLite file; a temporary one by default")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with tempfile.TemporaryDirectory() as folder:
        database = arguments.database or Path(folder) / "count.db"
        total = count(database, "spark" if arguments.spark else "local")
    words = sum(len(rows) for rows in DATA.values())
    print(f"the database counts {total} words; there are {words}")


if __name__ == "__main__":
    main()
