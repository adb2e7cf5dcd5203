"""The results of one task in one round, in one object. At the end of the round the task hands the
object over whole, or discards it (C34).

Invariants:

1. Rows and the reports about their trees are in the same outcome, and an outcome with unsent rows
   is not handed over. So an ack leaves together with all rows that were emitted for its tuple, on
   all streams, or those rows have failed.
2. Rows, acks and reports between two rounds go into the outcome of the later round. The effects of
   one collector call are in one outcome, whichever thread makes the call.
3. A task that has ended keeps its outcome, so later reports of its components are discarded.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import pyarrow as pa

from framework.acking.ack_reports import Ledger
from framework.core.checkpoint_messages import CheckpointReport
from framework.core.event_times import Newest, Unread
from framework.core.roots_column import RowRoots
from framework.core.round_protocol import Addressed, ComponentError, Counts, ErrorKind
from framework.execution.plan import Edge
from framework.operators.watermarks import Source

#: The most errors of user code that a task reports after one round; twice as many for errors that
#: can end the topology.
ERRORS_MAX = 10


@dataclass(slots=True)
class UnsentRows:
    """Rows of one stream that are not sent yet.

    * ``width``: number of values per row.
    * ``values``: those of the first row, then of the next, and so on. They are copies: the emitted
      sequences may be changed or reused.
    * ``roots``: of the trees that each row is part of."""

    width: int
    values: list[Any] = field(default_factory=list)
    roots: RowRoots = field(default_factory=RowRoots)

    def __len__(self) -> int:
        return len(self.values) // self.width


@dataclass(slots=True)
class Made:
    """The output of one component. ``rows``: by stream and, on direct streams, by target task."""

    counts: Counts = field(default_factory=Counts)
    rows: dict[tuple[str, int | None], UnsentRows] = field(default_factory=dict)


class Outcome:
    """The results of one task in one round.

    * ``serial``: a number above 0, unique in this process.
    * ``exits``: records for the next level, each with its partition there.
    * ``sent``: edge -> rows.
    * ``blamed``, ``timed_out``, ``unread``, ``newest``: as in ``RoundReport``."""

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
        """Record that a tuple failed by its own fault. If it is part of several trees, the
        responsible record is unknown, so nothing is recorded."""
        if len(roots) == 1:
            self.blamed.append(roots[0])

    def add_error(self, error: ComponentError) -> None:
        """Keep the first few errors, the first death, and errors that can end the topology. One bad
        record may fail in thousands of copies."""
        decides = error.kind in (
            ErrorKind.AWAY,
            ErrorKind.CANNOT_START,
            ErrorKind.FATAL,
        ) or (error.kind is ErrorKind.DIED and all(each.kind is not ErrorKind.DIED for each in self.errors))
        if len(self.errors) < ERRORS_MAX or (decides and len(self.errors) < 2 * ERRORS_MAX):
            self.errors.append(error)


class Surroundings(Protocol):
    """The task around a component, as the component sees it.

    * ``outcome``: of the current round, or of the next one between rounds.
    * ``lock``: held while user code, possibly in its own thread, adds to the outcome, and while the
      outcome is handed over.
    * ``thread``: the thread that runs the task's part of a round.
    * ``clock``: a monotonic clock, in seconds.
    * ``blames``: whether the topology gives up records, so that failures need a culprit.
    * ``exact``: whether a failed tuple takes the whole topology back to a checkpoint."""

    outcome: Outcome
    lock: threading.RLock
    thread: int
    clock: Callable[[], float]
    blames: bool
    exact: bool

    def deliver(self, edge: Edge, target: int, batch: pa.RecordBatch) -> None:
        """Send rows of one edge to one task."""
