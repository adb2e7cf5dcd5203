"""Topologies without a mistake: a simulation finds nothing in them."""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from framework import (
    ArrowBolt,
    Fields,
    OutputFieldsDeclarer,
    Topology,
    TransactionalSpout,
    TransactionalSpoutCoordinator,
    TransactionalSpoutEmitter,
    TransactionalTopologyBuilder,
)
from framework.testing import Outside
from sinks import (
    AppendCommitter,
    Count,
    Max,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.testing.mistakes import FIELDS, NOWHERE, Own, Words, Writes, committed_by, counting


@lru_cache
def _length(word: str) -> int:
    return len(word)


class Cached(Words):
    """Keeps what does not change its rows: a cache, and a count for a person to look at."""

    executed: ClassVar[Counter[str]] = Counter()

    def execute(self, tup: Any, collector: Any) -> None:
        self.executed[tup["word"]] += 1
        collector.emit([tup["word"], _length(tup["word"])])


class Guesses(Words):
    """Gives other rows each time, and does not promise otherwise."""

    deterministic = False

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], int(time.time()) + random.randrange(100) + tup["id"].attempt_id])


class Upper(ArrowBolt):
    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch.set_column(0, "word", pc.utf8_upper(batch.column(0)))

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(FIELDS)


class Emits(Own):
    """Emits the new totals of a batch, to committers below."""

    def finish_batch(self) -> None:
        self.state.begin_commit(self.attempt)
        words = list(dict.fromkeys(word for word, _ in self.rows))
        sums = Counter[str]()
        for word, n in self.rows:
            sums[word] += n
        adding = [lambda value, n=sums[word]: (value or 0) + n for word in words]
        for word, total in zip(words, self.state.multi_update(words, adding), strict=True):
            self.collector.emit([word, total])
        self.state.commit(self.attempt)

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        super().prepare(conf, context, collector, batch_id)
        self.collector = collector

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(FIELDS)


class PutsByTransaction(Writes):
    """Writes its batch under the number of its transaction."""

    def finish_batch(self) -> None:
        self.outside.put(self.attempt.txid, sorted(self.rows))


class RefusesOld(Writes):
    """Keeps the transaction beside each value, and leaves a newer one alone."""

    def finish_batch(self) -> None:
        for word, n in self.rows:
            if self.attempt.txid >= self.outside.get(word, (0, 0))[0]:
                self.outside.put(word, (self.attempt.txid, n))


class Numbers(TransactionalSpout):
    def coordinator(self, conf: Any, context: Any) -> Any:
        return Threes()

    def emitter(self, conf: Any, context: Any) -> Any:
        return Share(context)

    def output_fields(self) -> Fields:
        return FIELDS


class Threes(TransactionalSpoutCoordinator):
    def initialize_transaction(self, txid: int, previous_metadata: Any) -> Any:
        return {"first": txid * 3, "next": txid * 3 + 3}


class Share(TransactionalSpoutEmitter):
    def __init__(self, context: Any) -> None:
        self.context = context

    def emit_batch(self, attempt: Any, metadata: Any, collector: Any) -> None:
        for number in range(metadata["first"] + self.context.task_index, metadata["next"], self.context.task_count):
            collector.emit([f"w{number % 4}", number])


def chain(*, tasks: int) -> Topology:
    """A committer above a bolt above a committer."""
    spout = OpaqueMemoryTransactionalSpout({0: [["real", 0]]}, FIELDS, 1)
    builder = TransactionalTopologyBuilder("chain", "spout", spout, tasks)
    builder.set_bolt("upper", Upper, tasks).shuffle_grouping("spout")
    builder.set_bolt("totals", Emits(), tasks).fields_grouping("upper", Fields("word"))
    builder.set_bolt("words", Words(), tasks).fields_grouping("totals", Fields("word"))
    most = StateCommitter(OpaqueMapState(SqliteBackend(NOWHERE, "most")), ["word"], {"most": Max("n")})
    builder.set_bolt("most", most, tasks).fields_grouping("words", Fields("word"))
    return builder.build()


def several(*, opaque: bool) -> Topology:
    """Committers of several kinds, side by side, on tasks of other numbers."""
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [["real", 0]]}, FIELDS, 1)
    state = OpaqueMapState if opaque else TransactionalMapState
    builder = TransactionalTopologyBuilder("several", "spout", spout, 2)
    builder.set_bolt("words", Words(), 3).shuffle_grouping("spout")
    counts = StateCommitter(state(SqliteBackend(NOWHERE, "counts")), ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("counts", counts, 3).fields_grouping("words", Fields("word"))
    numbers = StateCommitter(state(SqliteBackend(NOWHERE, "numbers")), ["n"], {"count": Count()})
    builder.set_bolt("numbers", numbers).global_grouping("spout")
    builder.set_bolt("files", AppendCommitter(ParquetTable(Path("/nonexistent/files"))), 2).shuffle_grouping("words")
    return builder.build()


def numbered() -> Topology:
    """Over the general spout."""
    builder = TransactionalTopologyBuilder("numbered", "spout", Numbers(), 2)
    state = TransactionalMapState(SqliteBackend(NOWHERE, "numbered"))
    committer = StateCommitter(state, ["word"], {"total": Sum("n")})
    builder.set_bolt("totals", committer, 2).fields_grouping("spout", Fields("word"))
    return builder.build()


SOUND = {
    "idempotent": lambda: counting(Words()),
    "opaque": lambda: counting(Words(), opaque=True),
    "one task": lambda: counting(Words(), tasks=1),
    "a factory": lambda: counting(Words),
    "a cache that changes nothing": lambda: counting(Cached()),
    "a guess above an opaque state": lambda: counting(Guesses(), opaque=True),
    "a committer of one's own": lambda: committed_by(Own()),
    "a chain of committers": lambda: chain(tasks=2),
    "a chain in one task": lambda: chain(tasks=1),
    "several committers": lambda: several(opaque=False),
    "several committers, opaque": lambda: several(opaque=True),
    "a table by transaction": lambda: committed_by(PutsByTransaction(Outside("table"))),
    "a table that refuses what is old": lambda: committed_by(RefusesOld(Outside("table"))),
    "a general spout": numbered,
}
