"""Topologies with a mistake each, as users write them."""

from __future__ import annotations

import datetime
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from framework import (
    BaseBasicBolt,
    BaseTransactionalBolt,
    Bolt,
    Committer,
    Fields,
    OutputFieldsDeclarer,
    Topology,
    TransactionalTopologyBuilder,
)
from framework.testing import Outside
from sinks import Count, MapState, OpaqueMapState, SqliteBackend, StateCommitter, Sum, TransactionalMapState
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout

FIELDS = Fields(word=str, n=int)
WORDS = ("ant", "bee", "ant", "cow", "bee", "ant", "dog", "emu", "ant", "bee")
RECORDS = [{"word": word, "n": n} for n, word in enumerate(WORDS, 1)]
#: Where the states would be: a simulation never goes there.
NOWHERE = Path("/nonexistent/real.db")


class Words(BaseBasicBolt):
    """The bolt without a mistake."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], tup["n"]])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(FIELDS)


class RunningCount(Words):
    """Counts in a dictionary on the class."""

    counts: ClassVar[Counter[str]] = Counter()

    def execute(self, tup: Any, collector: Any) -> None:
        self.counts[tup["word"]] += 1
        collector.emit([tup["word"], self.counts[tup["word"]]])


class Stamped(Words):
    """Looks at the clock."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], int(time.time())])


class Dated(Words):
    """Looks at the calendar."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([datetime.date.today().isoformat(), tup["n"]])


class Sampled(Words):
    """Throws dice."""

    def execute(self, tup: Any, collector: Any) -> None:
        if random.random() < 0.5:
            collector.emit([tup["word"], tup["n"]])


class Letters(Words):
    """Emits in the order of a set."""

    def execute(self, tup: Any, collector: Any) -> None:
        for letter in set(tup["word"]):
            collector.emit([letter, tup["n"]])


class Rates:
    """A service that somebody changes now and then: its answer depends on when it is asked."""

    asked = 0

    def of(self, word: str) -> int:
        self.asked += 1
        return len(word) + self.asked // 10


RATES = Rates()


class LookedUp(Words):
    """Asks a service whose answer changes."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], tup["n"] * RATES.of(tup["word"])])


_seen: set[int] = set()


class Once(Words):
    """Drops what the module has seen before. It does not even say that it is deterministic."""

    deterministic = False

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["n"] not in _seen:
            _seen.add(tup["n"])
            collector.emit([tup["word"], tup["n"]])


@lru_cache
def _number(word: str) -> int:
    return _number.cache_info().currsize


class Numbered(Words):
    """Numbers words in the order in which this process has met them."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], _number(tup["word"])])


class Tried(Words):
    """Emits the number of the attempt."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"], tup["id"].attempt_id])


class Own(BaseTransactionalBolt, Committer):
    """A committer of the user's own, over a state."""

    def __init__(self, outside: Outside | None = None) -> None:
        self.outside = outside
        self.state = OpaqueMapState(SqliteBackend(NOWHERE, "own", Fields(word=str), Fields(n=int)))

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt, self.rows = batch_id, list[tuple[str, int]]()

    def execute(self, tup: Any) -> None:
        self.rows.append((tup["word"], tup["n"]))

    def finish_batch(self) -> None:
        self.state.begin_commit(self.attempt)
        for word, n in self.rows:
            self.add(word, n)
        self.state.commit(self.attempt)

    def add(self, word: str, n: int) -> None:
        self.state.multi_update([word], [lambda value: (value or 0) + n])


class Reads(Own):
    """Reads what any reader sees, not what its transaction began with."""

    def add(self, word: str, n: int) -> None:
        self.state.multi_put([word], [(self.state.get(word) or 0) + n])


class Totals(Own):
    """Keeps the totals on the class, and writes them."""

    totals: ClassVar[Counter[str]] = Counter()

    def add(self, word: str, n: int) -> None:
        self.totals[word] += n
        self.state.multi_put([word], [self.totals[word]])


class Mails(Own):
    """Sends a mail before it commits."""

    def finish_batch(self) -> None:
        assert self.outside is not None
        for word, n in self.rows:
            self.outside.append(f"to {word}: {n}")
        super().finish_batch()


class Writes(BaseTransactionalBolt, Committer):
    """The base of committers without a state."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt, self.rows = batch_id, list[tuple[str, int]]()

    def execute(self, tup: Any) -> None:
        self.rows.append((tup["word"], tup["n"]))


class Appends(Writes):
    """Appends its rows."""

    def finish_batch(self) -> None:
        for row in self.rows:
            self.outside.append(row)


class Inserts(Writes):
    """Fails over what is there already, as an INSERT does."""

    def finish_batch(self) -> None:
        for word, n in self.rows:
            if self.outside.get(n) is not None:
                raise LookupError(f"duplicate key {n}")
            self.outside.put(n, word)


class Newest(Writes):
    """Writes the newest number of each word, without a look at the transaction that wrote it."""

    def finish_batch(self) -> None:
        for word, n in self.rows:
            self.outside.put(word, n)


def counting(
    bolt: Bolt | Callable[[], Bolt], *, opaque: bool = False, tasks: int = 2, committer: Bolt | None = None
) -> Topology:
    """A spout, a bolt, and a committer that counts its rows; or another committer."""
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)({0: [["real", 0]]}, FIELDS, 1)
    builder = TransactionalTopologyBuilder("mistaken", "spout", spout, tasks)
    builder.set_bolt("bolt", bolt, tasks).shuffle_grouping("spout")
    state: MapState = (OpaqueMapState if opaque else TransactionalMapState)(SqliteBackend(NOWHERE, "words"))
    counts = committer or StateCommitter(state, ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("commit", counts, tasks if committer is None else 1).fields_grouping("bolt", Fields("word"))
    return builder.build()


def committed_by(committer: Bolt) -> Topology:
    return counting(Words(), opaque=True, committer=committer)
