"""What a round is, and what its result is.

A core topology runs as a sequence of rounds. In a round, the spout tasks hear what became of their
trees, and give what they have. That goes through the bolts, level by level. What the tasks say
about trees goes to the ackers, which are the last level. Little returns to the driver: decisions
about trees, and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, Union

from framework.acking.ledger import LedgerPart, Roots
from framework.core.checkpoints import CheckpointAction, CheckpointMarker, CheckpointReport
from framework.core.event_times import Marks, Newest, Unread
from framework.errors import RetryableError, reason_of
from framework.execution.failures import FailureKind, kind_of, trace_of
from framework.execution.messages import Piece
from framework.execution.stages import walk
from framework.operators.watermarks import Source

#: The most tuples that a spout task gives in one round, so that rounds stay short.
ROUND_TUPLES_MAX = 10_000


class TreeOutcomes(NamedTuple):
    """What a spout task is told at the start of a round. ``failed``: somebody failed the tree.
    ``reset``: its timeout starts anew. ``expired``: it timed out."""

    completed: Roots = Roots()
    failed: Roots = Roots()
    reset: Roots = Roots()
    expired: Roots = Roots()


@dataclass(frozen=True, slots=True)
class Round:
    """``rotates``: whether the maps of pending trees rotate, since time has gone on;
    ``ROTATIONS_PER_TIMEOUT`` such rounds make a timeout. ``outcomes``: number of a spout task ->
    what it is told. ``spout_wait_s``: how long the spouts may wait until one has something to give.
    ``drain``: spouts give nothing, so that what is under way can end. ``follows``: the round that
    was still under way when this one began, 0 for none; every task does that one first.
    ``at_once``: how many rounds may be under way; a spout gives only its part in one, so that the
    next one has something too. ``checkpoint``: what every task has to do for a checkpoint.
    ``share``: the most tuples that a spout task gives. ``lost``: the last lost round, 0 for none.
    ``marks``: how far the source partitions have come, where bolts go by the time of their tuples;
    None where nothing new is told. ``settles``: a checkpoint waits until every tree is over, or is
    prepared now, so no new tree should begin."""

    number: int
    _: KW_ONLY
    rotates: bool = False
    outcomes: Mapping[int, TreeOutcomes] = field(default_factory=dict)
    spout_wait_s: float = 0.0
    drain: bool = False
    follows: int = 0
    at_once: int = 1
    checkpoint: CheckpointMarker | None = None
    share: int = ROUND_TUPLES_MAX
    lost: int = 0
    settles: bool = False
    marks: Marks | None = None

    @property
    def prepares(self) -> bool:
        """Whether everything that comes must be done before the round ends: a checkpoint covers
        nothing that waits."""
        return self.checkpoint is not None and self.checkpoint.action is CheckpointAction.PREPARE


class Decisions(NamedTuple):
    """What one acker has decided in a round. ``trees``: how many it still tracks. ``shared``: when
    time has gone on, the trees with an open tuple that is part of several trees."""

    round: int
    acker: int
    completed: Roots
    failed: Roots
    reset: Roots
    expired: Roots
    trees: int = 0
    shared: Roots = Roots()


@dataclass(slots=True, kw_only=True)
class Counts:
    """What one component did in one task. ``latency_s``: from emission until the spout was told of
    completion, summed over ``completed``. ``died``: instances that their own errors ended.
    ``late``: tuples that came too late for what a stateful bolt gathers.
    ``busy_s``: how long the task was busy with the component. Four counts describe the present
    moment. ``pending``: tuples of a spout whose fate is open. ``behind``: spout tasks that expect
    more input. ``waiting``: tuples that have come to a bolt and are not executed yet. ``due``:
    tasks that go by the time of their tuples, and in which something is due."""

    emitted: int = 0
    executed: int = 0
    acked: int = 0
    failed: int = 0
    completed: int = 0
    timed_out: int = 0
    latency_s: float = 0.0
    died: int = 0
    late: int = 0
    pending: int = 0
    behind: int = 0
    waiting: int = 0
    due: int = 0
    busy_s: float = field(default=0.0, compare=False)

    @property
    def worked(self) -> bool:
        """Whether the component did something."""
        return bool(self.emitted or self.executed or self.completed or self.failed)

    def add(self, other: Counts) -> None:
        """Add every count. Most are 0 in most rounds."""
        for name in self.__slots__:
            more = getattr(other, name)
            if more:
                setattr(self, name, getattr(self, name) + more)


class WorkerLostError(RetryableError):
    """A process with tasks has ended, or does not answer. The message says what it ran."""


class ErrorKind(Enum):
    """What an error in user code did."""

    AWAY = "away"  # what the component needs does not answer; it is started again as often as it takes
    REPORTED = "reported"  # nothing: the component reported it and went on
    DIED = "died"  # it ended the instance; a new one takes its place
    CANNOT_START = "cannot start"  # the new one could not be made, opened or prepared
    FATAL = "fatal"  # it ended the instance, and a new one would do no better


class ComponentError(NamedTuple):
    """An error in user code."""

    kind: ErrorKind
    component_id: str
    task: int
    message: str
    trace: str = ""
    failure: FailureKind = FailureKind.ERROR
    error: str = ""  # the class of the error

    @classmethod
    def of(cls, error: BaseException, kind: ErrorKind, component_id: str, task: int) -> ComponentError:
        name, message = type(error).__name__, reason_of(f"{type(error).__name__}: {error}")
        return cls(
            kind, component_id, task=task, message=message, trace=trace_of(error), failure=kind_of(error), error=name
        )

    def __str__(self) -> str:
        return f"{self.component_id}[{self.task}]: {self.message}"


class RoundReport(NamedTuple):
    """What a task tells the driver after round ``round``. ``checkpoint_reports``: of its components
    that a checkpoint concerns. ``unrecovered``: the task is new, and waits for a recovery.
    ``tick_in_s``: seconds until one of its components wants a tick. ``sent``: edge -> rows that
    went over it. ``blamed``: trees that failed because of a tuple that is part of no other tree.
    ``timed_out``: trees of its spout tasks that were not complete in time.
    ``unread``: what its spout tasks have not read to the end. ``newest``: the newest times that its
    bolts have seen, by origin."""

    round: int
    counts: Mapping[tuple[str, int], Counts]
    errors: Sequence[ComponentError] = ()
    checkpoint_reports: Sequence[CheckpointReport] = ()
    unrecovered: bool = False
    tick_in_s: float | None = None
    sent: Mapping[int, int] = {}
    blamed: Roots = Roots()
    timed_out: Roots = Roots()
    unread: Mapping[tuple[str, int], Unread | None] = {}
    newest: Mapping[str, Mapping[Source, Newest]] = {}


RoundRecord = Union[Piece, LedgerPart, RoundReport, Decisions]
Addressed = tuple[int, RoundRecord]
#: Runs one task of one level where it lives. Gets the round, level, partition and the records that
#: came for it, and returns the records that go on.
RunTask = Callable[[Round, int, int, Sequence[RoundRecord]], Sequence[Addressed]]


class RoundExecutor(Protocol):
    """Runs rounds."""

    @property
    def rounds_max(self) -> int:
        """How many rounds it can run at once now. ``run`` is called from as many threads."""

    def start(self) -> None: ...

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        """Raises ``RetryableError`` when the round, or a part of it, was lost: what it did is
        unknown."""

    def wake(self) -> None:
        """End the wait of a round that waits in the spouts, if there is one."""

    def close(self) -> None:
        """Close every spout, clean up every bolt, and release what ``start`` made."""


def walk_round(round_: Round, widths: Sequence[int], run_task: RunTask) -> list[RoundRecord]:
    """Run all levels of a round, one task after the other."""

    def run_level(level: int, inboxes: Sequence[Sequence[RoundRecord]]) -> list[Addressed]:
        return [
            each for partition, records in enumerate(inboxes) for each in run_task(round_, level, partition, records)
        ]

    return walk(widths, run_level)
