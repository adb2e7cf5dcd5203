"""Topologies of event time that are killed, taken back and started with other numbers of tasks, by
chance, over real sinks; and what each transaction must have sent, by a reference that knows none of
this.

The drivers run in the calling thread, in virtual time. A driver dies before or after a step that
writes to a sink or to the coordination store, or between phases. Between runs, ``undo`` takes a
transaction back, and may die or stop on its way; records and partitions are added. Each start draws
the tasks of every component anew. The batches that were committed are known from their plans.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder
from framework.config import Config
from framework.coordination.election import leadership_of
from framework.coordination.step_generators import Steps
from framework.coordination.store import MemoryStore
from framework.errors import ConfigError, RetryableError
from framework.execution import LocalExecutor, plan_execution
from framework.execution.plan import ExecutionPlan
from framework.execution.ports import BatchExecutor
from framework.inspect.rebuild import rebuild
from framework.inspect.verify import verify
from framework.operators.event_window_assigner import EventWindows
from framework.testing.simulation.virtual_threads import DriverDied, NoProgress, VirtualThreads
from framework.topology import ArrowBolt, planning_time_stream
from framework.topology.spouts import LEFT_OUT
from framework.transactions import committed_txid
from framework.transactions.commit import CommitPhase
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import read_transaction
from framework.transactions.driver import Driver
from framework.transactions.undo import undoing
from sinks import (
    AppendCommitter,
    AsOfJoiningCommitter,
    Count,
    DeduplicatingCommitter,
    ExpiringCommitter,
    JoiningCommitter,
    MapBackend,
    OpaqueMapState,
    RedisBackend,
    SessionCommitter,
    SqliteBackend,
    SqliteTable,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
    external_row_sorter,
)
from sinks.event_time import join_buffer, sessions
from sinks.rows.transactional_table import RowTable
from sinks.sql.backend import SqlBackend
from sinks.sql.table_base import SqlTableBase
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.event_time_chains import (
    JOINS,
    KINDS,
    ONWARD,
    RECORDS,
    ROW,
    ChainReference,
    Clock,
    OfKind,
    Onward,
    Shape,
    Stage,
    one_clock,
    values_of,
)
from tests.kit.event_time_reference import Record, us
from tests.kit.stragglers import Straggler
from tests.kit.timed_parts import Summing
from tests.sinks.event_time.test_interval_join import Part

ID = "rescaled"
#: A time that no record can have, and how far ahead of its planning time a record may be.
ABSURD, MAX_AHEAD = 10**8, 10**6
#: The steps that write, of each kind of sink, before and after which a driver may die.
WRITES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((SqlBackend, RedisBackend), ("multi_put", "apply", "roll_back", "sweep", "purge", "raise_header")),
    SqlTableBase: ("raise_header",),
    RowTable: ("append", "roll_back"),
    MemoryStore: ("_apply_as",),
}


class Text(ArrowBolt):
    """Each row as JSON, with the name of its stream."""

    deterministic = True

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        rows = [json.dumps([self.stream, *row]) for row in values_of(batch)]
        yield pa.RecordBatch.from_arrays([pa.array(rows, pa.string())], names=["row"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(row=str))


class World:
    """``backend``: makes the table of a state; by default in SQLite."""

    #: The most runs, and the lives of a driver in which it may die, of one run.
    runs_max = 6
    lives = 8

    def __init__(
        self,
        seed: int,
        folder: Path,
        backend: Callable[[str], MapBackend] | None = None,
        shape: Callable[[random.Random], Shape] = one_clock,
    ) -> None:
        self.chance = chance = random.Random(f"rescaled {seed}")
        self.folder = folder
        self.backend = backend or (lambda name: SqliteBackend(folder / "states.db", name))
        self.shape = shape(chance)
        self.opaque = chance.random() < 0.6
        #: Whether no record is later than the lag allows.
        self.is_tame = chance.random() < 0.5
        self.has_absurd_times = chance.random() < 0.4
        self.store = MemoryStore()
        self.struck: Counter[str] = Counter()
        self.trace: list[str] = []
        self.now = 1_000  # the time of the next plan
        self.newest: dict[int, int] = {}
        self.moments: set[tuple[str, int]] = set()  # the keys and times of all records
        self.numbers = iter(range(1_000_000))
        self.rows = {each: self.more(each, chance.randint(1, 14)) for each in range(chance.randint(1, 3))}
        kind = OpaqueMemoryTransactionalSpout if self.opaque else MemoryTransactionalSpout
        self.spout = kind(self.rows, ROW, chance.randint(1, 6), on_bad_record="skip")
        self.rows = {each: list(its) for each, its in self.rows.items()}
        #: Module -> name -> value: limits of rows in memory.
        self.limits = {
            join_buffer.__name__: {"ROW_RECORDS": chance.choice([1, 2, 32])},
            external_row_sorter.__name__: {
                "PAGE_ROWS": chance.choice([1, 2, 3, 10_000]),
                "SORTED_ROWS": chance.choice([1, 2, 50_000]),
            },
            sessions.__name__: {"PANES_MAX": chance.choice([1, 2, 20_000])},
        }
        #: The commit of a dead driver whose tasks still run.
        self.straggler: Straggler | None = None
        #: After how many steps the driver dies; None: not at all.
        self.dies_in: int | None = None
        #: How often a sink does not answer.
        self.silent = 0.0

    def more(self, partition: int, count: int) -> list[list[Any]]:
        chance, shape = self.chance, self.shape
        start = max(self.newest.values()) if self.newest and chance.random() < 0.5 else 500
        at = self.newest.get(partition, start + chance.randint(-5, 5))
        made = []
        for _ in range(count):
            at += chance.choice([0, 1, 1, 2, 3, 8])
            kind = KINDS[partition % 2] if shape.is_apart else chance.choice(KINDS)
            back = chance.randint(0, shape.lags[kind])
            if not self.is_tame and chance.random() < 0.08:
                back += chance.randint(1, 30)
            key = chance.choice("abc") + (str(partition) if shape.is_ordered else "")
            if self.has_absurd_times and chance.random() < 0.04:
                number = next(self.numbers)
                made.append([kind, key, partition, ABSURD + number, number])
                continue
            its = at - back
            # Waiting records of one time are ordered by arrival, which tasks change (ADR 133).
            while not shape.can_tie and (key, its) in self.moments:
                its += 1
            self.moments.add((key, its))
            at = max(at, its)
            made.append([kind, key, partition, its, next(self.numbers)])
        self.newest[partition] = at
        return made

    def build(self) -> Topology:
        """The topology, with other numbers of tasks."""
        chance, shape = self.chance, self.shape

        def tasks() -> int:
            return chance.choice([1, 1, 2, 3])

        def state(name: str) -> OpaqueMapState:
            return OpaqueMapState(self.backend(name.replace("-", "_")))

        builder = TransactionalTopologyBuilder(ID, "records", self.spout, tasks())
        for kind in KINDS:
            its = 1 if shape.keeps_order else tasks()
            if any(kind in each.feeds and each.operator in JOINS for each in shape.stages):
                builder.set_bolt(f"{kind}s", Part(kind), its).shuffle_grouping(RECORDS)
            if any(kind in each.feeds and each.operator not in JOINS for each in shape.stages) or any(
                kind == each.feed for each in shape.clocks
            ):
                builder.set_bolt(kind, OfKind(kind), its).shuffle_grouping(RECORDS)

        def add_clock(clock: Clock) -> None:
            its = clock.options
            watermark = WatermarkCommitter(
                state(clock.name),
                "at",
                partition=["partition"] if clock.by_partition else [],
                out_of_orderness=its.lag,
                idle_after=its.idle_after,
                advance_when_idle=its.advance_when_idle,
                max_ahead=MAX_AHEAD,
            )
            source = self.source_of(builder, clock, clock.feed, None, tasks())
            builder.set_bolt(clock.name, watermark).global_grouping(source).global_grouping(RECORDS, CLOCK_STREAM)

        for clock in shape.clocks_of():
            add_clock(clock)
        for stage in shape.stages:
            sides = KINDS if stage.operator in JOINS else (None,)
            sources = [
                self.source_of(builder, stage, feed, side, tasks())
                for feed, side in zip(stage.feeds, sides, strict=True)
            ]
            subscribed = builder.set_bolt(stage.name, committer(stage, state(stage.name)), tasks())
            for source in sources:
                subscribed.fields_grouping(source, Fields("id"))
            for name in stage.clocks:
                subscribed.all_grouping(name)
            for clock in shape.clocks_of(stage):
                add_clock(clock)
        sent = [(stage.name, stream) for stage, stream in shape.streams()]
        for name, stream in sent:
            builder.set_bolt(f"{name}-{stream}", Text(f"{name}/{stream}")).shuffle_grouping(name, stream)
        out = builder.set_bolt("out", AppendCommitter(SqliteTable(self.folder / "sent.db", "sent")), tasks())
        for name, stream in sent:
            out.shuffle_grouping(f"{name}-{stream}")
        return builder.build()

    def source_of(
        self, builder: TransactionalTopologyBuilder, below: Stage | Clock, feed: str, side: str | None, tasks: int
    ) -> str:
        """The component that emits a feed. ``side``: of a join, for which it is. ``tasks``: of that
        component, where it is made for this."""
        if feed in KINDS:
            return f"{feed}s" if side is not None else feed
        if feed == RECORDS:
            return feed
        above = next(each for each in self.shape.stages if each.name == feed)
        made = builder.set_bolt(f"{feed}-{below.name}", Onward(above, below.earlier, side), tasks)
        made.fields_grouping(feed, Fields("id"), stream=ONWARD[above.operator])
        return f"{feed}-{below.name}"

    # --- faults -----------------------------------------------------------------------------------

    def step(self, what: str) -> None:
        """The driver dies here, if it is its turn. Before that, a commit of an earlier driver may
        go on."""
        if self.straggler is not None:
            if self.straggler.is_here():
                self.straggler.pause()
                return
            if self.chance.random() < 0.3:
                self.let_straggle(self.chance.randint(1, 3))
        if self.dies_in is None:
            return
        self.dies_in -= 1
        if self.dies_in == 0:
            self.dies_in = None
            self.struck["died"] += 1
            self.trace.append(f"  died {what}")
            raise DriverDied

    def let_straggle(self, steps: int) -> None:
        for _ in range(steps):
            if self.straggler is not None:
                self.straggler.advance()
                if self.straggler.is_over:
                    self.trace.append(f"  the straggler ended: {self.straggler.error}")
                    self.straggler = None

    def await_stragglers(self) -> None:
        while self.straggler is not None:
            self.let_straggle(1)

    def committing(self, commit: Any) -> Any:
        """A commit after some of whose steps the driver may die, while its tasks go on."""

        def committed(header: Any) -> Any:
            if self.straggler is not None or self.dies_in is None or self.chance.random() > 0.4:
                return commit(header)
            answers: list[Any] = []
            self.straggler = Straggler(lambda: answers.append(commit(header)))
            self.let_straggle(self.chance.randint(1, 8))
            if self.straggler is None and answers:
                return answers[0]
            raise self.died_during_commit()

        return committed

    def died_during_commit(self) -> DriverDied:
        self.dies_in = None
        self.struck["died"] += 1
        self.struck["straggled"] += 1
        self.trace.append("  died, and its commit goes on")
        return DriverDied()

    def striking(self, name: str, inner: Any, *, may_be_silent: bool) -> Any:
        def struck(*given: Any, **options: Any) -> Any:
            self.step(f"before {name}")
            if may_be_silent and self.chance.random() < self.silent:
                self.struck["no answer"] += 1
                raise RetryableError("no answer")
            answer = inner(*given, **options)
            self.step(f"after {name}")
            return answer

        return struck

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for kind, names in WRITES.items():
            for name in names:
                if name in vars(kind):
                    struck = self.striking(name, vars(kind)[name], may_be_silent=kind in (SqlBackend, RedisBackend))
                    patch.setattr(kind, name, struck)
        patch.setattr(planning_time_stream, "time", SimpleNamespace(time_ns=self.time_ns))
        for module, limits in self.limits.items():
            for name, value in limits.items():
                patch.setattr(import_module(module), name, value)

    def time_ns(self) -> int:
        self.now += self.chance.choice([0, 0, 1, 5, 20, 60])
        if self.chance.random() < 0.03:
            self.now -= 500
        return self.now * 1_000_000_000

    # --- runs -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raise ``AssertionError`` where a transaction has sent something else than it must."""
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            runs = self.chance.randint(2, self.runs_max)
            for number in range(runs):
                self.run_with_deaths(is_last=number == runs - 1)
            self.await_stragglers()
            built, self.silent = self.build(), 0
            self.lead(built, None)
            self.make_available()  # verify reads all partitions
            self.check(built)
            close(built)

    def run_with_deaths(self, *, is_last: bool) -> None:
        chance = self.chance
        built, is_closed = self.build(), False
        for life in range(self.lives):
            self.trace.append(f"life {life}: {[(each.id, each.parallelism) for each in built.components]}")
            is_calm = life == self.lives - 1
            self.silent = 0 if is_calm else chance.choice([0, 0, 0, 0.01, 0.03])
            self.dies_in = chance.randint(1, 120) if not is_calm and chance.random() < 0.7 else None
            upto = committed_txid(self.store, ID) + chance.randint(1, 5) if chance.random() < 0.4 else None
            upto = None if is_calm else upto
            is_done = self.lead(built, upto)
            is_closed = is_done and upto is None
            if is_done or (not is_last and chance.random() < 0.15):
                break
            if chance.random() < 0.2:
                close(built)
                built = self.build()
        self.make_available()
        if is_closed and chance.random() < 0.25 and committed_txid(self.store, ID):
            self.rebuild(built)
        if chance.random() < 0.5:
            is_closed = self.undo(built) or is_closed
        if is_closed and chance.random() < 0.3 and committed_txid(self.store, ID):
            self.verified(built)
        close(built)
        for partition, its in self.rows.items():
            if not is_last and chance.random() < 0.7:
                more = self.more(partition, chance.randint(1, 8))
                self.spout.append(partition, more)
                its += more
        if not is_last and chance.random() < 0.25:
            partition = len(self.rows)
            self.rows[partition] = self.more(partition, chance.randint(0, 8))
            self.spout.add_partition(partition, self.rows[partition])
            self.struck["partition added"] += 1

    def executor(self, plan: ExecutionPlan) -> BatchExecutor:
        """The executor of one life."""
        return LocalExecutor(plan, {})

    def make_available(self) -> None:
        for partition in self.rows:
            self.spout.make_available(partition)

    def lead(self, built: Topology, upto: int | None) -> bool:
        """The life of a driver: until it has committed all records (then the result is true),
        transaction ``upto``, or dies."""
        executor = self.executor(plan_execution(built))
        in_steps = self.chance.random() < 0.5
        if in_steps:
            executor.commits_in_one_step = lambda header: False  # type: ignore[method-assign]
        executor.process = self.processing(executor.process)  # type: ignore[method-assign]
        if in_steps:
            executor.commit = self.committing(executor.commit)  # type: ignore[method-assign]
        executor.commit = self.striking("commit", executor.commit, may_be_silent=False)  # type: ignore[method-assign]
        executor.start()
        threads = VirtualThreads(lambda name: None, 40_000)
        advances = any(each.options.advance_when_idle for each in self.shape.clocks)
        settings = {"topology.spout.emit.empty.batches": True} if advances else {}
        purge_every = self.chance.choice([1, 2, 1_000])
        driver = Driver(
            built,
            executor,
            self.store,
            Config.of(settings),
            accept_changed_topology=True,
            threads=threads,
            purge_every=purge_every,
        )
        threads.spawn("driver", driver.running())
        goal = {str(partition): {"first": 0, "next": len(its)} for partition, its in self.rows.items()}
        ended = ("failed", "stopped")

        def is_over() -> bool:
            reached = upto is not None and committed_txid(self.store, ID) >= upto
            return reached or driver.covers(goal) or driver.status().phase in ended

        try:
            threads.run(is_over)
            is_done = driver.covers(goal)
            if upto is None:
                driver.request_stop()
                threads.run(lambda: driver.status().phase in ended)
        except DriverDied:
            is_done = False
        except NoProgress:
            assert self.struck["partition away"] or self.silent, "the driver makes no progress"
            self.make_available()
            is_done = False
        finally:
            self.dies_in = None
            threads.kill()
            executor.close()
        assert driver.error is None and driver.failure is None, driver.error or driver.failure
        return is_done

    def processing(self, process: Any) -> Any:
        inner = self.striking("process", process, may_be_silent=False)

        def processed(job: Any) -> Any:
            if self.opaque and self.chance.random() < 0.1:
                self.spout.set_take(self.chance.randint(1, 6))
            if self.opaque and self.chance.random() < 0.05:
                self.spout.make_unavailable(self.chance.choice(sorted(self.rows)))
                self.struck["partition away"] += 1
            elif self.chance.random() < 0.3:
                self.make_available()
            return inner(job)

        return processed

    def verified(self, built: Topology) -> None:
        """Verify, with numbers of tasks that need not be those which have written."""
        self.silent = 0
        report = verify(built, self.store)
        assert report.right, report
        self.struck["verified"] += 1

    def rebuild(self, built: Topology) -> None:
        """Rebuild a state, which is right, and exchange it for the copy. The rebuild may die on its
        way, and be repeated."""
        self.silent = 0
        name = self.chance.choice([each.name for each in self.shape.stages])
        self.dies_in = self.chance.randint(1, 60) if self.chance.random() < 0.5 else None
        for _ in range(2):
            try:
                report = rebuild(built, self.store, state=name, take_over=True)
            except DriverDied:
                continue
            finally:
                self.dies_in = None
            its = [each for each in (report.difference, *report.above) if each is not None]
            assert not any(each.difference_count for each in its), f"{name} differs from its copy: {report}"
            self.struck["rebuilt"] += 1
            self.trace.append(f"  rebuilt {name}")
            break

    def undo(self, built: Topology) -> bool:
        """Take the newest transaction back, once or more often. It may stop or die on its way.
        Returns whether the last undo was performed to its end."""
        self.silent, is_whole = 0, False
        for _ in range(self.chance.randint(1, 3)):
            self.dies_in = self.chance.randint(1, 40) if self.chance.random() < 0.3 else None
            steps_max = self.chance.randint(1, 25) if self.chance.random() < 0.5 else None
            is_whole = False
            try:
                with suppress(DriverDied), leadership_of(ID, self.store, 1) as leadership:
                    documents = TopologyDocuments(self.store, leadership, built)
                    executor = LocalExecutor(plan_execution(built), {})
                    incarnation = documents.incarnation()
                    commit = CommitPhase(ID, built.states, executor, leadership.epoch, incarnation=incarnation)
                    if performed(undoing(built, self.store, documents, commit, epoch=leadership.epoch), steps_max):
                        self.struck["undone"] += 1
                        is_whole = True
            except ConfigError as error:
                self.trace.append(f"  undo refused: {error}")
                break
            finally:
                self.dies_in = None
        return is_whole

    # --- what must have been sent -----------------------------------------------------------------

    def check(self, built: Topology) -> None:
        reference, place, late = ChainReference(self.shape), Counter[str](), 0
        found: dict[int, dict[str, Counter[Any]]] = {}
        with closing(sqlite3.connect(self.folder / "sent.db")) as connection:
            for txid, row in connection.execute("SELECT _txid, row FROM sent"):
                stream, *values = json.loads(row)
                found.setdefault(txid, {}).setdefault(stream, Counter())[tuple(values)] += 1
        for txid in range(1, committed_txid(self.store, ID) + 1):
            record = read_transaction(self.store, ID, txid)
            assert record is not None
            plan = {each: meta for each, meta in record.plan.items() if each != planning_time_stream.CLOCK_PARTITION}
            clock = record.plan[planning_time_stream.CLOCK_PARTITION]
            records = []
            for partition, meta in sorted(plan.items()):
                assert meta["first"] == place[partition], f"transaction {txid}: {partition} has {meta}"
                place[partition] = meta["next"]
                left_out = meta.get(LEFT_OUT, ())
                its = [
                    self.rows[int(partition)][each]
                    for each in range(meta["first"], meta["next"])
                    if each not in left_out
                ]
                assert all(self.rows[int(partition)][each][3] >= ABSURD for each in left_out), (
                    f"transaction {txid}: {meta}"
                )
                self.struck["left out"] += meta["next"] - meta["first"] - len(its)
                records += [Record(source, key, kind, at, number) for kind, key, source, at, number in its]
            expected = reference.after(
                records,
                clock["planned_at"] // 1_000_000,
                behind=clock["behind"],
                begun=[int(each) for each in clock["begun"]],
                unread=clock["unread"],
            )
            ahead = [name for name, each in reference.clocks.items() if each.reached >= ABSURD // 2]
            assert not ahead, f"transaction {txid}: {ahead} had an absurd time"
            sent = found.pop(txid, {})
            for stage, name in self.shape.streams():
                stream = f"{stage.name}/{name}"
                had, wanted = sent.pop(stream, Counter()), expected.get(stream, Counter())
                assert had == wanted, f"transaction {txid}: {stream} has sent {had}, expected {wanted}"
                late += had.total() if "late" in name else 0
                if had and name == ONWARD[stage.operator]:
                    self.struck[f"{stage.operator} with {len(stage.clocks)} watermarks"] += 1
                    self.struck.update(
                        f"{stage.operator} below {each.operator}"
                        for each in self.shape.stages
                        if each.name in stage.feeds
                    )
            assert not sent
        assert not found, f"rows of unknown transactions: {found}"
        assert place == {
            str(partition): len(its) for partition, its in self.rows.items() if its or str(partition) in place
        }
        if self.is_tame and self.shape.never_late() and not self.struck["partition added"]:
            assert not late or self.struck["partition away"], f"{late} rows are late, and no record was"
        for name, count in reference.held().items():
            (state,) = built[name].states
            live = sum(row.value is not None for _, row in state.backend.scan())  # type: ignore[attr-defined]
            assert live <= count, f"{name} holds {live} rows, expected at most {count}"
        for stage in self.shape.stages:
            if stage.operator == "pairs":
                (state,) = built[stage.name].states
                due = [row.value[0] for _, row in state.backend.scan() if row.value is not None]  # type: ignore[attr-defined]
                assert not due or min(due) >= us(reference.reached(stage)), f"{stage.name} holds rows that are due"
        self.verified(built)


def committer(stage: Stage, state: OpaqueMapState) -> Any:
    options, second = stage.options, 1_000_000
    window = EventWindows(options.length * second, options.step * second, options.origin * second)
    totals = {"n": Count(), "total": Sum("number")}
    one: dict[str, Any] = {"on": "at", "key": ["id"]}
    both: dict[str, Any] = {"key": ["id"], "left": "order_at", "right": "payment_at"}
    match stage.operator:
        case "windows":
            lateness = options.lateness
            return WindowedCommitter(state, window, aggregates=totals, allowed_lateness=lateness, **one)
        case "sessions":
            return SessionCommitter(state, options.gap, aggregates=totals, **one)
        case "first":
            return DeduplicatingCommitter(state, within=options.gap, partition=["partition"], **one)
        case "pairs":
            return JoiningCommitter(state, within=options.within, how=options.how, **both)
        case "valued":
            return AsOfJoiningCommitter(state, within=options.valid, how="left", **both)
        case "expiring":
            return ExpiringCommitter(state, ttl=options.ttl, aggregates=totals, **one)
        case _:
            return Summing(state, options.remind, **one)


def performed(steps: Steps[int], steps_max: int | None) -> bool:
    """Perform steps to their end, or so many of them. Returns whether all were performed."""
    try:
        step, done = next(steps), 0
        while steps_max is None or done < steps_max:
            done += 1
            try:
                answer = step()
            except Exception as error:  # noqa: BLE001 - the generator decides what it means
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration:
        return True
    steps.close()
    return False


def close(built: Topology) -> None:
    for state in built.states:
        state.close()
