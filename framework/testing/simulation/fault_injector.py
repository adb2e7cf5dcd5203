"""The faults of one schedule: which are still to strike, the events so far, and the clock that user
code sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from framework.execution.messages import AttemptHeader, Record
from framework.execution.plan import Phase
from framework.execution.ports import ProcessingJob
from framework.testing.simulation.clock import TurnCounter
from framework.testing.simulation.external_effects import guarded
from framework.testing.simulation.hash_seed_worker import SecondWorker
from framework.testing.simulation.sample_records import Source, shown
from framework.testing.simulation.schedule import Fault, Kind, Schedule
from framework.testing.simulation.tasks import CommitTask, CommitTasks, RowsSeen
from framework.testing.simulation.virtual_threads import DriverDied
from framework.testing.simulation.worker_globals import WorkerMemory

#: The most records of a batch that the story lists.
_RECORDS_SHOWN_MAX = 6
#: The moments at which a late task may run.
_LATE_MOMENTS = ("before the next attempt commits", "after its transaction", "after the next transaction")


@dataclass(frozen=True, slots=True)
class Execution:
    """The rows that a phase of an attempt has emitted."""

    header: AttemptHeader
    phase: Phase
    rows: RowsSeen


@dataclass(slots=True, kw_only=True)
class Kept:
    """The result of a processing phase, until its attempt ends.

    * ``turn``: of the processing.
    * ``commit_turns``: (level, task) -> of the last run of this commit task.
    * ``held``: edge -> rows for the commit."""

    header: AttemptHeader
    job: ProcessingJob
    records: Sequence[Record]
    held: Mapping[int, int]
    turn: int
    commit_turns: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Late:
    tasks: CommitTasks
    task: CommitTask
    moment: str


class FaultInjector:
    """Applies the faults of a schedule.

    * ``story``: the events so far, line by line.
    * ``attempts``: the rows that attempts emitted.
    * ``committed``: txid -> the committed result."""

    def __init__(
        self,
        schedule: Schedule,
        source: Source,
        memory: WorkerMemory,
        *,
        other: SecondWorker,
        folder: Path,
        connect: bool,
    ) -> None:
        self.schedule, self.source, self.memory, self.other = schedule, source, memory, other
        self.story: list[str] = []
        self.met: list[Kind] = []
        self.attempts: list[Execution] = []
        self.committed: dict[int, Kept] = {}
        self.turns = TurnCounter(schedule.seed, list(memory.namespaces.values()))
        self._folder, self._connect = folder, connect
        self._faults = list(schedule.faults)
        self._late: list[_Late] = []
        self._dies_after = ""  # the thread after whose end the driver dies
        self._told: set[tuple[int, str]] = set()

    def tell(self, line: str) -> None:
        self.story.append(line)

    def take(self, kind: Kind, txid: int) -> Fault | None:
        """The fault of this kind that strikes now, if there is one."""
        found = next((each for each in self._faults if each.kind is kind and each.txid == txid), None)
        if found is not None:
            self._faults.remove(found)
            self.met.append(kind)
        return found

    def was_processed(self, header: AttemptHeader) -> bool:
        """Whether an earlier attempt has processed the same batch."""
        batch = header.txid, header.plan_digest
        return any((each.header.txid, each.header.plan_digest) == batch for each in self.attempts)

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Runs user code within a turn. Only user code runs inside."""
        with self.turns.turn(number), guarded(self._folder, connect=self._connect):
            yield

    def tell_batch(self, header: AttemptHeader, job: ProcessingJob) -> None:
        """Describe a batch in the story, when it is planned."""
        if (header.txid, header.plan_digest) in self._told:
            return
        again = any(txid == header.txid for txid, _ in self._told)
        self._told.add((header.txid, header.plan_digest))
        records = [f"{shown(record)}" for _, meta in sorted(job.ranges.items()) for record in meta.get("records", ())]
        more = f" and {len(records) - _RECORDS_SHOWN_MAX:,} more" if len(records) > _RECORDS_SHOWN_MAX else ""
        self.tell(
            f"transaction {header.txid} is planned{' anew' if again else ''}: {len(records):,} "
            f"record{'s' if len(records) != 1 else ''}: {', '.join(records[:_RECORDS_SHOWN_MAX])}{more}"
        )

    # --- dying ------------------------------------------------------------------------------------

    def die(self, kind: Kind) -> None:
        """End the driver. Raises ``DriverDied``."""
        self.tell(f"FAULT: {kind.value}")
        raise DriverDied

    def die_after(self, thread: str) -> None:
        """End the driver when this thread has ended, before its result is delivered."""
        self._dies_after = thread

    def thread_ended(self, name: str) -> None:
        if name == self._dies_after:
            self._dies_after = ""
            self.die(Kind.DRIVER_DIES_DONE)

    # --- late tasks -------------------------------------------------------------------------------

    def postpone(self, tasks: CommitTasks, task: CommitTask, pick: int) -> None:
        """Let a task of an abandoned attempt run later."""
        self._late.append(_Late(tasks, task, _LATE_MOMENTS[pick % len(_LATE_MOMENTS)]))

    def next_attempt(self, txid: int) -> None:
        """Note that an attempt is about to commit."""
        self._run_late(
            [each for each in self._late if each.moment == _LATE_MOMENTS[0] and each.tasks.header.txid == txid]
        )

    def closed(self, header: AttemptHeader, kept: Kept) -> None:
        """Note that a transaction is closed."""
        self.committed[header.txid] = kept
        self.tell(f"transaction {header.txid} is closed")
        late = [each for each in self._late if each.tasks.header.txid == header.txid]
        self._run_late([each for each in late if each.moment == _LATE_MOMENTS[1]])
        self._run_late([each for each in self._late if each.tasks.header.txid < header.txid])

    def end(self) -> None:
        """All batches are committed: run late tasks now."""
        self._run_late(list(self._late))

    def _run_late(self, tasks: Sequence[_Late]) -> None:
        for each in tasks:
            self._late.remove(each)
            with self.turn(self.turns.next()):
                refused = each.tasks.run_late(each.task)
            header = each.tasks.header
            self.tell(
                f"the late commit task ({each.tasks.name(each.task)}) of attempt {header.attempt_id} at transaction "
                f"{header.txid} runs now: {'it is refused' if refused else 'nothing refuses it'}"
            )
