"""Messages between the tasks of two levels, and the reports of tasks.

Invariants:

1. Every task of a level sends one ``Control`` to every task of the next level. It contains the
   number of rows that the sender sent there per edge. A task fails the attempt when a control is
   missing or the number of received rows differs (Storm's CoordinatedBolt).
2. A failure is a value, which travels in controls and reports. After a failure no user code runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Union

from framework.arrow_spill import Payload
from framework.execution.failures import TaskFailure
from framework.execution.plan import Phase
from framework.topology.attempt import TransactionAttempt
from framework.topology.bolts import LookupCounts
from framework.topology.fencing import CommitFence, Header
from framework.topology.spouts import ReadCounts


@dataclass(frozen=True, slots=True)
class AttemptHeader:
    """The attempt that a task works for. Every task of the attempt has the header, even a task
    without rows. ``opens_from``: as in ``CommitFence``, for a commit in one step. ``is_probe``: the
    tasks process a part of the batch to find refused records, and nothing is committed (ADR 128).
    ``tries_writes``: the committers that try their writes in a probe, and undo them.
    ``tries_in_order``: the accepted records before those in question precede them.
    ``watermarks``: the rows of ``Committer.watermark_before`` for them, by component."""

    topology_id: str
    _: KW_ONLY
    txid: int
    attempt_id: int
    epoch: int
    plan_digest: str
    incarnation: str = ""
    is_probe: bool = False
    tries_writes: frozenset[str] = frozenset()
    tries_in_order: bool = False
    watermarks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False, repr=False)
    opens_from: Header | None = field(default=None, compare=False, repr=False)

    def attempt(self, component_id: str, task: int) -> TransactionAttempt:
        """The attempt in the form for components, with the fence for writes of its states."""
        writer = f"{component_id}:{task}"
        fence = CommitFence(
            self.topology_id, self.epoch, self.plan_digest, writer, self.incarnation, opens_from=self.opens_from
        )
        return TransactionAttempt(self.txid, self.attempt_id, fence)

    def __str__(self) -> str:
        return f"{self.txid}:{self.attempt_id}"


class Seed(NamedTuple):
    """The input of a spout task."""

    header: AttemptHeader
    ranges: Mapping[str, Mapping[str, Any]]
    committed_txid: int = 0


class Control(NamedTuple):
    """Sent by every task to every task of the next level, after its pieces."""

    header: AttemptHeader
    upstream: int
    upstreams: int
    rows: Mapping[int, int]
    failure: TaskFailure | None


class Piece(NamedTuple):
    """Rows of one edge for one task: an Arrow batch, or a place in a file, inside a process; IPC
    bytes between processes."""

    edge: int
    target_task: int
    source_task: int
    sequence: int
    rows: int
    payload: Payload


class CommitterState(NamedTuple):
    """A committer after its last ``execute``: bolt and collector, pickled as a pair and encrypted
    (C13). If not ``whole``: only the result of ``keep_for_commit``, for a new copy of the bolt."""

    component_id: str
    task: int
    kept: bytes
    whole: bool = True


class FrameRows(NamedTuple):
    """Rows that a DataFrame bolt has received over one edge, on their way to Spark SQL."""

    component_id: str
    edge: int
    payload: Payload


class FrameOutput(NamedTuple):
    """Rows that Spark SQL produced, on their way to the tasks that emit them. ``order``: their
    position in the result, as (partition, sequence)."""

    component_id: str
    order: tuple[int, int]
    payload: Payload


Record = Union[Seed, Control, Piece, CommitterState, FrameRows, FrameOutput]


@dataclass(slots=True)
class TaskReport:
    """A task's report to the driver.

    * ``name``: its components and its number.
    * ``began``, ``ended``: seconds since the Unix epoch, by the clock of its host.
    * ``spent_s``: component -> seconds that the task was busy with it.
    * ``late``: component -> records that were late there.
    * ``left_out``: component -> rows due by time that it refused, and that were left out.
    * ``lookups``: ``component/function`` -> its lookups."""

    header: AttemptHeader
    phase: Phase
    _: KW_ONLY
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    committers: int = 0
    read: ReadCounts = field(default_factory=ReadCounts)
    failure: TaskFailure | None = None
    name: str = ""
    began: float = 0.0
    ended: float = 0.0
    spent_s: dict[str, float] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    lookups: dict[str, LookupCounts] = field(default_factory=dict)
