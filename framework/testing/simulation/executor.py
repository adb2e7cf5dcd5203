"""The executors of a simulation: one with faults, and one without."""

from __future__ import annotations

import itertools

import cloudpickle

from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.messages import AttemptHeader, CommitterState, Record, TaskReport
from framework.execution.payload_encryption import decrypt, encrypt
from framework.execution.plan import ExecutionPlan, Layout, Phase
from framework.execution.ports import DeadAttempts, PhaseResult, ProcessingJob, held_rows
from framework.execution.tasks import Addressed, PlannedTopology
from framework.testing.simulation.fault_injector import Execution, FaultInjector, Kept
from framework.testing.simulation.schedule import Kind
from framework.testing.simulation.tasks import CommitTask, CommitTasks, Processed, RowsTaken, process
from framework.topology import Topology

#: The change of size of the source's batches: a divisor, or minus a factor.
_SIZES = (2, -2, 3, -3)


class _Executor:
    """The common part of both."""

    def __init__(self, plan: ExecutionPlan, conf: dict[str, object], injector: FaultInjector) -> None:
        self._plan, self._injector = plan, injector
        self._rows = RowsTaken()
        self._planned = PlannedTopology(plan, conf, self._rows)

    def _laid_out(self, txid: int) -> PlannedTopology:
        """The layout for a batch. If the schedule's commits run as one task, one task runs every
        second batch as a whole. All attempts at a transaction have the same layout, because another
        layout has another order of rows."""
        whole = self._injector.schedule.collapsed and txid % 2 == 1
        return self._planned.for_batch(Layout.EVEN, collapsed=whole)

    def start(self) -> None: ...

    def close(self) -> None: ...

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        """No: separate steps offer more places for faults."""
        return False

    def release(self, header: AttemptHeader) -> None: ...

    def cancel(self, header: AttemptHeader) -> None: ...


class FaultyExecutor(_Executor):
    """The workers of one driver. They end with it."""

    def __init__(self, plan: ExecutionPlan, conf: dict[str, object], injector: FaultInjector) -> None:
        super().__init__(plan, conf, injector)
        self._kept: dict[AttemptHeader, Kept] = {}
        self._dead = DeadAttempts()
        self._written: dict[int, Kept] = {}  # by txid, until the transaction is closed

    def process(self, job: ProcessingJob) -> PhaseResult:
        header, injector = job.header, self._injector
        txid = header.txid
        if header in self._dead:
            return PhaseResult(DeadAttempts.failure(header, Phase.PROCESSING))
        if header.is_probe:
            with injector.turn(injector.turns.next()):
                return process(self._laid_out(txid), job).result
        injector.tell_batch(header, job)
        if injector.take(Kind.WORKER_RESTARTS, txid) is not None:
            injector.memory.restore()
            injector.tell(f"FAULT: {Kind.WORKER_RESTARTS.value}")
        turn = injector.turns.next()
        done = self._processed(job, turn)
        if done.result.failure is not None:
            injector.tell(f"attempt {header.attempt_id} at transaction {txid} fails: {done.result.failure}")
            return done.result
        injector.attempts.append(Execution(header, Phase.PROCESSING, done.rows))
        self._resize(txid)
        if injector.take(Kind.PROCESSING_LOST, txid) is not None:
            injector.tell(f"FAULT: {Kind.PROCESSING_LOST.value}")
            injector.memory.restore()
            return _lost("the worker has died")
        if injector.take(Kind.DRIVER_DIES_PROCESSED, txid) is not None:
            injector.die(Kind.DRIVER_DIES_PROCESSED)
        self._kept[header] = Kept(
            header=header, job=job, records=done.records, held=held_rows(self._plan, done.reports), turn=turn
        )
        return done.result

    def _processed(self, job: ProcessingJob, turn: int) -> Processed:
        header, injector = job.header, self._injector
        backwards = injector.take(Kind.OTHER_ORDER, header.txid) is not None
        batch = "the same batch again, days later" if injector.was_processed(header) else "the batch"
        told = f"attempt {header.attempt_id} at transaction {header.txid} processes {batch}"
        if injector.take(Kind.OTHER_PROCESS, header.txid) is not None:
            plan = self._laid_out(header.txid).plan
            done = injector.other.process(plan, job, seed=injector.schedule.seed, turn=turn)
            if done is not None:
                injector.tell(f"FAULT: {Kind.OTHER_PROCESS.value}, where sets of texts have another order")
                injector.tell(told)
                return done
        if backwards:
            injector.tell(f"FAULT: {Kind.OTHER_ORDER.value}, the last one first")
        injector.tell(told)
        with injector.turn(turn):
            return process(self._laid_out(header.txid), job, backwards=backwards)

    def _resize(self, txid: int) -> None:
        injector = self._injector
        fault = injector.take(Kind.OTHER_SIZE, txid)
        if fault is not None:
            by, source = _SIZES[fault.pick % len(_SIZES)], injector.source
            source.take = max(source.take // by, 1) if by > 0 else source.take * -by
            injector.tell(f"FAULT: {Kind.OTHER_SIZE.value}: up to {source.take:,} records of each partition")

    def commit(self, header: AttemptHeader) -> PhaseResult:
        injector, txid, kept = self._injector, header.txid, self._kept.get(header)
        if kept is None:
            return _lost("the result is gone")
        injector.next_attempt(txid)
        if injector.take(Kind.DRIVER_DIES_OPENED, txid) is not None:
            injector.die(Kind.DRIVER_DIES_OPENED)
        planned = self._laid_out(txid)
        tasks = CommitTasks(planned, header, kept.records, collapsed=injector.schedule.collapsed)
        self._rows.rows = {}
        result = self._committed(tasks, kept)
        if result.failure is not None:
            return result
        injector.attempts.append(Execution(header, Phase.COMMIT, self._rows.rows))
        self._written[txid] = kept
        if injector.take(Kind.ANSWER_LOST, txid) is not None:
            injector.tell(f"FAULT: {Kind.ANSWER_LOST.value}")
            return _lost("the answer is lost")
        if injector.take(Kind.DRIVER_DIES_WRITTEN, txid) is not None:
            injector.die(Kind.DRIVER_DIES_WRITTEN)
        if injector.take(Kind.DRIVER_DIES_DONE, txid) is not None:
            injector.die_after(f"commit-{header}")
        return result

    def _committed(self, tasks: CommitTasks, kept: Kept) -> PhaseResult:
        injector, header = self._injector, tasks.header
        stops, late = injector.take(Kind.COMMIT_STOPS, header.txid), injector.take(Kind.TASK_LATE, header.txid)
        twice = injector.take(Kind.TASK_TWICE, header.txid)
        backwards = injector.take(Kind.OTHER_ORDER, header.txid) is not None
        if backwards:
            injector.tell(f"FAULT: {Kind.OTHER_ORDER.value}, the last one first")
        reports: list[TaskReport] = []
        told = f"attempt {header.attempt_id} at transaction {header.txid} commits"
        turns = itertools.count()

        def run(task: CommitTask) -> list[Addressed]:
            turn, name = next(turns), tasks.name(task)
            if stops is not None and turn == stops.pick % len(tasks):
                injector.tell(f"FAULT: {Kind.COMMIT_STOPS.value}, before {name} runs")
                injector.memory.restore()
                raise _Ends("a worker has died")
            if late is not None and turn == late.pick % len(tasks):
                injector.tell(f"FAULT: {Kind.TASK_LATE.value} ({name} of attempt {header.attempt_id})")
                injector.postpone(tasks, task, late.pick // len(tasks))
                raise _Ends("a task hangs")
            injector.tell(f"{told}: {name}")
            if twice is not None and turn == twice.pick % len(tasks):
                self._run_task(tasks, task, kept, [])
                self._rows.rows = {place: rows for place, rows in self._rows.rows.items() if place[1] != task.place}
                injector.tell(f"FAULT: {Kind.TASK_TWICE.value} ({name})")
            return self._run_task(tasks, task, kept, reports)

        try:
            tasks.run(run, backwards=backwards)
        except _Ends as ends:
            return _lost(str(ends))
        result = tasks.summary(reports, kept.held)
        if result.failure is not None:
            injector.tell(f"attempt {header.attempt_id} at transaction {header.txid} fails: {result.failure}")
        return result

    def _run_task(self, tasks: CommitTasks, task: CommitTask, kept: Kept, reports: list[TaskReport]) -> list[Addressed]:
        """Each run has a turn of its own: when a task runs twice, the last run's rows are kept."""
        kept.commit_turns[task.place] = self._injector.turns.next()
        with self._injector.turn(kept.commit_turns[task.place]):
            return tasks.run_task(task, reports)

    def cancel(self, header: AttemptHeader) -> None:
        self._dead.add(header)
        self._kept.pop(header, None)

    def release(self, header: AttemptHeader) -> None:
        self._kept.pop(header, None)
        if not header.is_probe:
            self.closed_to(header.txid)

    def closed_to(self, txid: int) -> None:
        """The store says that the transactions up to this one are closed. A driver that then dies
        releases none of them."""
        for each in sorted(each for each in self._written if each <= txid):
            kept = self._written.pop(each)
            self._injector.closed(kept.header, kept)


class OnceExecutor(_Executor):
    """Processes the committed batches once more, and commits them in the states of ``topology``.
    Call ``take`` for each batch."""

    def __init__(
        self, plan: ExecutionPlan, conf: dict[str, object], injector: FaultInjector, topology: Topology
    ) -> None:
        super().__init__(plan, conf, injector)
        self._topology = topology
        self._kept: Kept | None = None
        self.attempts: dict[tuple[Phase, int], Execution] = {}

    def take(self, kept: Kept) -> None:
        """Take the next batch. It is processed only for its rows: the commit uses the rows that
        were committed before."""
        self._kept, txid = kept, kept.header.txid
        with self._injector.turn(kept.turn):
            done = process(self._laid_out(txid), kept.job)
        self.attempts[Phase.PROCESSING, txid] = Execution(kept.header, Phase.PROCESSING, done.rows)

    def process(self, job: ProcessingJob) -> PhaseResult:
        return _lost("nothing is processed here")

    def commit(self, header: AttemptHeader) -> PhaseResult:
        kept, injector = self._kept, self._injector
        if kept is None:
            return _lost("nothing was taken")
        records = [self._elsewhere(each) for each in kept.records]
        tasks = CommitTasks(self._laid_out(header.txid), header, records, collapsed=injector.schedule.collapsed)
        reports: list[TaskReport] = []
        self._rows.rows = {}

        def run(task: CommitTask) -> list[Addressed]:
            with injector.turn(kept.commit_turns[task.place]):
                return tasks.run_task(task, reports)

        tasks.run(run)
        self.attempts[Phase.COMMIT, header.txid] = Execution(header, Phase.COMMIT, self._rows.rows)
        return tasks.summary(reports, kept.held)

    def _elsewhere(self, record: Record) -> Record:
        """A committer that was pickled whole, with its states replaced by those of this
        topology."""
        if not isinstance(record, CommitterState) or not record.whole:
            return record
        bolt, collector = cloudpickle.loads(decrypt(record.kept))
        copy = cloudpickle.loads(cloudpickle.dumps(self._topology[record.component_id].instance))
        for state, own in zip(bolt.states(), copy.states(), strict=True):
            vars(state).clear()
            vars(state).update(vars(own))
        return record._replace(kept=encrypt(cloudpickle.dumps((bolt, collector))))


class _Ends(Exception):
    """A fault ends the commit phase."""


def _lost(why: str) -> PhaseResult:
    return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "simulation", 0, why))
