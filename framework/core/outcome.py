"""What one task makes in one round, in one object. When the round ends, it is handed over whole, or
thrown away (C34).

Invariants:

1. Rows and what is said about their trees are in the same outcome. An outcome is not handed over
   while it has rows that are not sent. So an ack leaves together with all rows that were made of
   the tuple, on all streams, or those rows have failed.
2. What is emitted, acked or reported between two rounds is in the outcome of the later one. What
   one call of a collector makes is in one outcome, in whichever thread it is called.
3. A task that has ended keeps its outcome: what its components still say goes nowhere.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import pyarrow as pa

from framework.acking.ledger import Ledger
from framework.core.checkpoints import CheckpointReport
from framework.core.event_times import Newest, Unread
from framework.core.roots_column import RowRoots
from framework.core.rounds import Addressed, ComponentError, Counts, ErrorKind
from framework.execution.plan import Edge
from framework.operators.watermarks import Source

#: How many errors of user code a task reports after one round; up to twice as many when they decide
#: about the topology.
ERRORS_MAX = 10


@dataclass(slots=True)
class UnsentRows:
    """Rows of one stream that are not sent yet, and the roots of the trees that each is part of.
    ``width``: how many values a row has. ``values``: of the first row, then of the next, and so on;
    it does not matter what becomes of the sequences that they came in."""

    width: int
    values: list[Any] = field(default_factory=list)
    roots: RowRoots = field(default_factory=RowRoots)

    def __len__(self) -> int:
        return len(self.values) // self.width


@dataclass(slots=True)
class Made:
    """What one component has made. ``rows``: by stream and, on direct streams, by the task that
    they are for."""

    counts: Counts = field(default_factory=Counts)
    rows: dict[tuple[str, int | None], UnsentRows] = field(default_factory=dict)


class Outcome:
    """``exits``: what goes on to the next level, each with its partition there. ``sent``: edge ->
    rows. ``serial``: a number above 0 that no other outcome of this process has. ``blamed``,
    ``timed_out``, ``unread``, ``newest``: as in ``RoundReport``."""

    _serials = count(1)

    def __init__(self, components: Iterable[str]) -> None:
        self.serial = next(self._serials)
        self.of = {each: Made() for each in components}
        self.exits: list[Addressed] = []
        self.sent: dict[int, int] = defaultdict(int)
        self.ledger = Ledger()
        self.errors: list[ComponentError] = []
        self.blamed: list[int] = []
        self.timed_out: list[int] = []
        self.checkpoint_reports: list[CheckpointReport] = []
        self.unread: dict[tuple[str, int], Unread | None] = {}
        self.newest: dict[str, Mapping[Source, Newest]] = {}

    def blame(self, roots: Sequence[int]) -> None:
        """A tuple has failed, and it was its own fault. Where it is part of several trees, nobody
        knows whose."""
        if len(roots) == 1:
            self.blamed.append(roots[0])

    def add_error(self, error: ComponentError) -> None:
        """Keep the first few errors, the first death, and errors that decide about the topology.
        One bad record may fail in thousands of copies."""
        decides = error.kind in (
            ErrorKind.AWAY,
            ErrorKind.CANNOT_START,
            ErrorKind.FATAL,
        ) or (error.kind is ErrorKind.DIED and all(each.kind is not ErrorKind.DIED for each in self.errors))
        if len(self.errors) < ERRORS_MAX or (decides and len(self.errors) < 2 * ERRORS_MAX):
            self.errors.append(error)


class Surroundings(Protocol):
    """The task that a component lives in, as the component sees it. ``outcome``: of the round that
    is under way, or of the next one. ``lock``: held while something is added to the outcome by user
    code that may run in a thread of its own, and while the outcome is handed over. ``thread``: the
    one that does the task's part of a round. ``clock``: seconds that only rise. ``blames``: whether
    anybody asks which tuples are to blame for a failure."""

    outcome: Outcome
    lock: threading.RLock
    thread: int
    clock: Callable[[], float]
    blames: bool

    def deliver(self, edge: Edge, target: int, batch: pa.RecordBatch) -> None:
        """Send rows of one edge to one task."""
