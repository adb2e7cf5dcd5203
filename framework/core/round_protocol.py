"""Rounds and their results.

A core topology runs as a sequence of rounds. In a round, the driver sends decisions about trees to
the spout tasks, and the spouts emit. The tuples pass through the bolts, level by level. The tasks
report changes of trees to the ackers, which are the last level. Only decisions about trees and
counters return to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, Union

from framework.acking.ack_reports import LedgerPart, Roots
from framework.core.checkpoint_messages import CheckpointAction, CheckpointMarker, CheckpointReport
from framework.core.event_times import Marks, Newest, Unread
from framework.errors import RetryableError, reason_of, text_of
from framework.execution.failures import FailureKind, kind_of, trace_of
from framework.execution.level_walk import walk
from framework.execution.messages import Piece
from framework.operators.watermarks import Source

#: The most tuples that a spout task emits in one round, so that rounds stay short.
ROUND_TUPLES_MAX = 10_000


class TreeOutcomes(NamedTuple):
    """Decisions for a spout task at the start of a round. ``failed``: a component failed the tree.
    ``reset``: its timeout restarts. ``expired``: it timed out."""

    completed: Roots = Roots()
    failed: Roots = Roots()
    reset: Roots = Roots()
    expired: Roots = Roots()


@dataclass(frozen=True, slots=True)
class Round:
    """The order for one round, as every task gets it.

    * ``rotates``: whether the maps of pending trees rotate; ``ROTATIONS_PER_TIMEOUT`` such rounds
      make a timeout.
    * ``outcomes``: number of a spout task -> decisions about its trees.
    * ``spout_wait_s``: how long the spouts may wait until one has something to emit.
    * ``drain``: spouts emit nothing, so that tuples under way can finish.
    * ``follows``: the round that was still under way when this one began, 0 for none; every task
      does that one first.
    * ``at_once``: the most rounds under way; a spout emits only its part in one, so that the next
      round gets tuples too.
    * ``checkpoint``: what every task has to do for a checkpoint.
    * ``share``: the most tuples that a spout task emits.
    * ``lost``: the last lost round, 0 for none.
    * ``marks``: the progress of the source partitions, for bolts that use event time; None when
      there is nothing new.
    * ``settles``: a checkpoint waits for all trees to end, or is prepared in this round, so no new
      tree should begin."""

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
        """Whether every tuple must be executed before the round ends: a checkpoint covers no
        waiting tuples."""
        return self.checkpoint is not None and self.checkpoint.action is CheckpointAction.PREPARE


class Decisions(NamedTuple):
    """The decisions of one acker in a round. ``trees``: how many trees it still tracks. ``shared``:
    in a round that rotates, the trees with an open tuple that is part of several trees."""

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
    """The counters of one component in one task.

    * ``completed``: tuple trees of a spout that were fully processed.
    * ``latency_s``: from emission until the spout got the completion, summed over ``completed``.
    * ``died``: instances that were ended by their own errors.
    * ``late``: tuples that came too late for a window or session of a stateful bolt.
    * ``busy_s``: how long the task was busy with the component.

    Four counters describe the present:

    * ``pending``: pending tuples of a spout.
    * ``behind``: spout tasks that expect more input.
    * ``waiting``: tuples that have arrived at a bolt and are not executed yet.
    * ``due``: tasks that use event time and have output due."""

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
        """Whether the component did any work."""
        return bool(self.emitted or self.executed or self.completed or self.failed)

    def add(self, other: Counts) -> None:
        """Add every counter. In most rounds most of them are 0."""
        for name in self.__slots__:
            more = getattr(other, name)
            if more:
                setattr(self, name, getattr(self, name) + more)


class WorkerLostError(RetryableError):
    """A process with tasks has ended, or does not answer. The message names its tasks."""


class ErrorKind(Enum):
    """The consequence of an error in user code."""

    AWAY = "away"  # an external system does not answer; the component is restarted until it does
    REPORTED = "reported"  # the component reported the error and went on
    DIED = "died"  # the instance ended; a new one takes its place
    CANNOT_START = "cannot start"  # a new instance could not be made, opened or prepared
    FATAL = "fatal"  # the instance ended, and a new one would fail in the same way


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
        name, message = type(error).__name__, reason_of(f"{type(error).__name__}: {text_of(error)}")
        return cls(
            kind, component_id, task=task, message=message, trace=trace_of(error), failure=kind_of(error), error=name
        )

    def __str__(self) -> str:
        return f"{self.component_id}[{self.task}]: {self.message}"


class RoundReport(NamedTuple):
    """A task's report to the driver after round ``round``.

    * ``checkpoint_reports``: of its components that take part in a checkpoint.
    * ``unrecovered``: the task is new, and waits for a recovery.
    * ``tick_in_s``: seconds until one of its components wants a tick.
    * ``sent``: edge -> rows that went over it.
    * ``blamed``: trees that failed because of a tuple that is part of no other tree.
    * ``timed_out``: trees of its spout tasks that were not complete in time.
    * ``unread``: the partitions that its spout tasks have not read to the end.
    * ``newest``: the newest times that its bolts have seen, by origin."""

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
#: Runs one task of one level in its process. Takes the round, level, partition and the records that
#: arrived, and returns the records for the next levels.
RunTask = Callable[[Round, int, int, Sequence[RoundRecord]], Sequence[Addressed]]


class RoundExecutor(Protocol):
    """Runs rounds."""

    @property
    def rounds_max(self) -> int:
        """How many rounds it can run concurrently now. The driver calls ``run`` from that many
        threads."""

    def start(self) -> None: ...

    def run(self, round_: Round) -> Sequence[RoundRecord]:
        """Run a round. Raises ``RetryableError`` when the round, or a part of it, was lost, so that
        its effects are unknown."""

    def wake(self) -> None:
        """End the wait of the round that waits in the spouts, if there is one."""

    def close(self) -> None:
        """Close every spout, clean up every bolt, and release what ``start`` made."""


def walk_round(round_: Round, widths: Sequence[int], run_task: RunTask) -> list[RoundRecord]:
    """Run all levels of a round, one task after the other."""

    def run_level(level: int, inboxes: Sequence[Sequence[RoundRecord]]) -> list[Addressed]:
        return [
            each for partition, records in enumerate(inboxes) for each in run_task(round_, level, partition, records)
        ]

    return walk(widths, run_level)
