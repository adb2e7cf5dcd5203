"""Runs a transactional topology over lists, in one line, and returns the rows that it emits and the
final content of its sinks.

The driver, its transactions and its commits are those of a real run, in the calling thread and in
virtual time, so nothing waits. States are copies that start empty. The spout is replaced by one of
the same kind that emits the lists. The test chooses the faults and their times.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from framework.config import Config
from framework.coordination.store import MemoryStore
from framework.errors import ConfigError, InvariantViolation
from framework.execution import LocalExecutor, plan_execution
from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.messages import AttemptHeader
from framework.execution.plan import Edge, ExecutionPlan
from framework.execution.ports import PhaseResult, ProcessingJob
from framework.inspect.sandbox import shadow_of
from framework.inspect.state_snapshots import read
from framework.observe.logs import no_logs
from framework.testing.simulation.external_effects import outsides_of
from framework.testing.simulation.row_recording_bolts import probes_below, rows_of_stream
from framework.testing.simulation.sample_records import Sample, Source, sample_of, spout_over
from framework.testing.simulation.virtual_threads import DriverDied, NoProgress, VirtualThreads
from framework.topology import ArrowBolt, Bolt, Component, Topology
from framework.topology.bolts import DEFAULT_STREAM
from framework.topology.inspectable import SubstitutedBolt, WrittenRows, with_scratch_states
from framework.transactions.documents import committed_txid
from framework.transactions.driver import Driver
from framework.transactions.run import TopologyFailed

#: Records of each partition in a batch.
TAKE = 100
#: A driver that needs more steps makes no progress.
_STEPS_MAX = 100_000
#: The attempts of a transaction whose servers do not answer. A real run repeats them without limit.
_ATTEMPTS_MAX = 10


class Moment(Enum):
    """The moment and the kind of a fault in a transaction."""

    PROCESSED = "the attempt is lost when it has processed its batch"
    ANSWER_LOST = "everything is written, and the answer is lost"
    BETWEEN_PHASES = "the driver dies between the phases"
    WRITTEN = "the driver dies when everything is written, before the transaction is closed"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that strikes transaction ``txid`` once. Made by ``fail_attempt``, ``replay`` and
    ``crash``."""

    moment: Moment
    txid: int


def fail_attempt(txid: int = 1) -> Fault:
    """An attempt is lost after it has processed its batch, before anything is committed. The batch
    is processed again."""
    return Fault(Moment.PROCESSED, txid)


def replay(txid: int = 1) -> Fault:
    """A commit writes all rows, and its answer is lost. So the batch is processed and committed
    again, over the written rows."""
    return Fault(Moment.ANSWER_LOST, txid)


def crash(txid: int = 1, when: Literal["between_phases", "written"] = "between_phases") -> Fault:
    """The driver dies, and another one takes over: between the processing and the commit phase of a
    transaction, or after all rows are written and before the transaction is closed."""
    moments = {"between_phases": Moment.BETWEEN_PHASES, "written": Moment.WRITTEN}
    if when not in moments:
        raise ConfigError(f"crash(when=...) must be 'between_phases' or 'written', not {when!r}")
    return Fault(moments[when], txid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of a topology over lists.

    * ``transactions``: how many were committed.
    * ``attempts``: txid -> how many attempts it took.
    * ``left_out``: component -> why it did not run: it writes to a target that cannot be compared,
      or is downstream of such a component.
    * ``story``: the events, line by line.
    """

    transactions: int
    attempts: Mapping[int, int]
    left_out: Mapping[str, str]
    story: Sequence[str]
    _rows: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
    _tables: Mapping[tuple[str, int], Sequence[Mapping[str, Any]] | str]

    def rows(self, component_id: str, stream: str = DEFAULT_STREAM) -> list[Mapping[str, Any]]:
        """The rows that a component has emitted on a stream, in committed attempts, in the order of
        the transactions. Raises ``ConfigError`` for a stream that does not exist."""
        return rows_of_stream(self._rows, component_id, stream)

    def has_table(self, component_id: str) -> bool:
        """Whether a component has a state that ``table`` can return."""
        return not isinstance(self._tables.get((component_id, 0), ""), str)

    def table(self, component_id: str, number: int = 0) -> list[Mapping[str, Any]]:
        """The final rows of a component's state, sorted, each by column. ``number``: selects one of
        several states. Raises ``ConfigError`` if there is no such state, or it cannot be read."""
        found = self._tables.get((component_id, number))
        if found is None:
            known = ", ".join(f"{component!r} ({place})" for component, place in sorted(self._tables)) or "none"
            why = f"; it was left out: {self.left_out[component_id]}" if component_id in self.left_out else ""
            raise ConfigError(f"{component_id!r} has no state {number}{why}; there are: {known}")
        if isinstance(found, str):
            raise ConfigError(found)
        return list(found)


def run_on(
    topology: Topology,
    records: Iterable[Any] | Mapping[Any, Iterable[Any]],
    *,
    faults: Iterable[Fault] = (),
    take: int | Sequence[int] = TAKE,
    config: Mapping[str, Any] | Config | None = None,
) -> Done:
    """Run a transactional topology over lists to their end, in this process.

    * ``records``: the records that the spout emits, each a mapping by field names or a sequence of
      values; or a mapping of streams, or of partitions, to such records.
    * ``take``: how many of each partition are in a batch; or the numbers of the first batches, of
      which the last one is that of all further batches.
    * ``faults``: made by ``fail_attempt``, ``replay`` and ``crash``.
    * ``config``: the keys that the components get.

    States are copies that start empty; none of your stores is written to. Tables of databases and
    topics of Kafka are replaced by a table in a temporary file, which their committers write to
    exactly once, too. Another committer without a state takes part if an ``Outside`` replaces its
    target; otherwise it is left out, and named.

    Raises ``TopologyFailed`` when the topology ends before its input does, ``ConfigError`` for
    records that do not fit, and ``AssertionError`` for a fault that never struck, because there was
    no such transaction.

    >>> def test_counting() -> None:
    ...     done = run_on(topology(), [{"word": "dog"}, {"word": "cat"}, {"word": "dog"}], faults=[replay()])
    ...     assert done.table("counts") == [{"word": "cat", "n": 1}, {"word": "dog", "n": 2}]
    """  # noqa: W505 - doctest lines are not wrapped
    takes = [take] if isinstance(take, int) else list(take)
    if not takes or min(takes) < 1:
        raise ConfigError(f"take must be 1 or more, not {take!r}")
    checked = Config.of(config or {})
    with _running(topology, sample_of(topology, records), takes) as run, no_logs():
        run.drive(checked, list(faults))
        return run.done()


class _End(ArrowBolt):
    """Subscribes to a stream without subscribers, so that its rows are recorded."""

    deterministic = True
    commits_on_driver = True

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        return None


def _with_probes(topology: Topology) -> Topology:
    """The topology with a probe on each stream without subscribers."""
    taken = {(sub.component_id, sub.stream) for each in topology.components for sub in each.subscriptions}
    probes = probes_below(topology.components, _End, taken)
    return Topology(topology.id, (*topology.components, *probes), topology.at_least_once)


class _Seen:
    """The rows that tasks emit: the ``TaskWatcher`` of a run. One edge of each stream is
    watched."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.watched: dict[tuple[str, str], int] = {}
        for edge in plan.edges:
            self.watched.setdefault((edge.source, edge.stream), edge.index)
        self.rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}

    def emitted(self, edge: Edge, rows: pa.RecordBatch) -> None:
        stream = edge.source, edge.stream
        if self.watched[stream] == edge.index:
            self.rows.setdefault(stream, []).extend(rows.to_pylist())

    def failed(self, failure: TaskFailure, error: BaseException) -> None:
        return None

    def taken(self) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
        """The rows emitted since the last call."""
        rows, self.rows = self.rows, {}
        return rows


@dataclass(slots=True)
class _Life:
    """The data that outlives a driver: the remaining faults, and the recorded rows."""

    faults: list[Fault]
    story: list[str] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    committed: dict[int, list[dict[tuple[str, str], list[Mapping[str, Any]]]]] = field(default_factory=dict)

    def take(self, moment: Moment, txid: int) -> bool:
        """Whether this fault strikes now. Removes it."""
        found = Fault(moment, txid)
        if found not in self.faults:
            return False
        self.faults.remove(found)
        self.story.append(f"transaction {txid}: {moment.value}")
        return True


class _Executor:
    """The workers of one driver, which apply the faults."""

    def __init__(self, plan: ExecutionPlan, conf: Mapping[str, Any], life: _Life) -> None:
        self._life, self._seen = life, _Seen(plan)
        self._local = LocalExecutor(plan, conf, self._seen)
        self._rows: dict[AttemptHeader, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
        self.start, self.close = self._local.start, self._local.close
        self.cancel, self.release = self._local.cancel, self._local.release

    def process(self, job: ProcessingJob) -> PhaseResult:
        txid = job.header.txid
        self._life.attempts[txid] = self._life.attempts.get(txid, 0) + 1
        result = self._local.process(job)
        self._rows[job.header] = self._seen.taken()
        if result.failure is not None:
            if result.failure.kind is FailureKind.RETRYABLE and self._life.attempts[txid] >= _ATTEMPTS_MAX:
                return replace(result, failure=replace(result.failure, kind=FailureKind.FATAL))
            return result
        if self._life.take(Moment.PROCESSED, txid):
            return _lost("the attempt is lost, as the test says")
        if self._life.take(Moment.BETWEEN_PHASES, txid):
            raise DriverDied
        return result

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        """No: separate steps offer more places for faults."""
        return False

    def commit(self, header: AttemptHeader) -> PhaseResult:
        result = self._local.commit(header)
        rows = self._seen.taken()
        if result.failure is not None:
            return result
        self._life.committed[header.txid] = [self._rows.get(header, {}), rows]
        if self._life.take(Moment.ANSWER_LOST, header.txid):
            return _lost("the answer is lost, as the test says")
        if self._life.take(Moment.WRITTEN, header.txid):
            raise DriverDied
        return result


def _lost(why: str) -> PhaseResult:
    return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "test", 0, why))


@contextmanager
def _running(topology: Topology, sample: Sample, takes: Sequence[int]) -> Iterator[_Kit]:
    with tempfile.TemporaryDirectory(prefix="ratchet-test-", ignore_cleanup_errors=True) as folder:
        run = _Kit(topology, sample, takes, Path(folder))
        try:
            yield run
        finally:
            for state in run.shadow.states:
                state.close()


class _Kit:
    def __init__(self, topology: Topology, sample: Sample, takes: Sequence[int], folder: Path) -> None:
        source = Source({partition: list(records) for partition, records in sample.items()}, takes[-1], takes[:-1])
        self._records = sum(map(len, sample.values()))
        spout = replace(topology.spout, instance=spout_over(topology, source), factory=None)
        over_lists = Topology(topology.id, (spout, *topology.components[1:]), topology.at_least_once)
        for each in topology.components:
            for outside in outsides_of(each.instance):
                outside.clear()
        self.shadow, self._left_out = shadow_of(over_lists, folder, _substituted, strict=False, unseen=_why_not)
        self._plan = plan_execution(_with_probes(self.shadow))
        self._store = MemoryStore()
        self._life = _Life([])

    def drive(self, config: Config, faults: list[Fault]) -> None:
        self._life = _Life(list(faults))
        while True:
            executor = _Executor(self._plan, config.for_components(), self._life)
            executor.start()
            threads = VirtualThreads(lambda name: None, _STEPS_MAX + _STEPS_MAX // 100 * self._records)
            driver = Driver(self.shadow, executor, self._store, config, threads=threads)
            threads.spawn("driver", driver.running())
            try:
                threads.run(lambda leads=driver: leads.covers({}) or leads.status().phase in ("failed", "stopped"))  # type: ignore[misc]
            except DriverDied:
                self._life.story.append("another driver takes over")
                continue
            except NoProgress:
                raise InvariantViolation("the run goes on and on, and does not come to its end") from None
            finally:
                threads.kill()
                executor.close()
            break
        if driver.error is not None:
            raise driver.error
        if driver.failure is not None:
            raise TopologyFailed.of(driver.failure)
        last = committed_txid(self._store, self.shadow.id)
        if self._life.faults:
            missed = ", ".join(f"transaction {each.txid}: {each.moment.value}" for each in self._life.faults)
            raise AssertionError(
                f"this did not happen: {missed}; there were {last} transactions, so give a smaller take"
            )

    def done(self) -> Done:
        rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {
            (each.id, stream): [] for each in self.shadow.components for stream in each.streams
        }
        for _, phases in sorted(self._life.committed.items()):
            for phase in phases:
                for stream, its in phase.items():
                    rows[stream] += its
        return Done(
            transactions=committed_txid(self._store, self.shadow.id),
            attempts=self._life.attempts,
            left_out={each.component.id: each.why for each in self._left_out},
            story=self._life.story,
            _rows=rows,
            _tables=self._tables(),
        )

    def _tables(self) -> dict[tuple[str, int], Sequence[Mapping[str, Any]] | str]:
        tables: dict[tuple[str, int], Sequence[Mapping[str, Any]] | str] = {}
        for component in self.shadow.components:
            for number, state in enumerate(component.states):
                if isinstance(state, WrittenRows):
                    tables[component.id, number] = state.rows_written().to_pylist()
                    continue
                try:
                    with read(state, store=self._store) as found:
                        (only,) = found
                        tables[component.id, number] = _sorted(only.arrow().to_pylist())
                except ConfigError as error:
                    tables[component.id, number] = str(error)
        return tables


def _sorted(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    try:
        return sorted(rows, key=lambda row: [(value is not None, value) for value in row.values()])
    except TypeError:  # a value without an order, such as a struct
        return sorted(rows, key=repr)


def _substituted(bolt: Bolt, folder: Path) -> Bolt:
    return bolt.substitute(folder) if isinstance(bolt, SubstitutedBolt) else with_scratch_states(bolt, folder)


def _why_not(component: Component) -> str:
    bolt = component.instance
    if component.committer and not component.states and not outsides_of(bolt) and not isinstance(bolt, SubstitutedBolt):
        return "it writes outside: give it an Outside of framework.testing in place of what it writes to"
    return ""
