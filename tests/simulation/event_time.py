"""Simulated transactions under the real committers of event time (C43, C44).

A schedule draws records that are out of order, late and absurd, partitions that fall silent, come
back and are added, and tasks that change in number. Attempts die between any two commits of their
tasks, and between two pages that a task writes; the next one has the same batch, or another one, or
is made after a roll-back. What each transaction sends is compared with a reference that knows no
state, no attempt and no task.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder
from framework.errors import BadRecordError
from framework.operators.event_window_assigner import EventWindows
from framework.topology import CommitFence, OpenCommit, TopologyContext, TransactionAttempt
from framework.topology.planning_time_stream import CLOCK_FIELDS
from sinks import (
    AsOfJoiningCommitter,
    Count,
    DeduplicatingCommitter,
    ExpiringCommitter,
    JoiningCommitter,
    MemoryBackend,
    OpaqueMapState,
    SessionCommitter,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
    external_row_sorter,
)
from sinks.event_time import join_buffer, sessions
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.event_time_reference import Options, Record, Reference, Sent, us
from tests.kit.timed_parts import Summing
from tests.sinks.event_time.test_interval_join import ROW, Part

DIGEST = "digest"
KEYS = "abc"
TRANSACTIONS = 9
#: A time that no record can have.
ABSURD = 10**8
COMMITTERS = ("windows", "sessions", "first", "pairs", "valued", "expiring", "timers")


class Violation(Exception):
    pass


class Died(Exception):
    pass


class Rows(MemoryBackend):
    """Rows whose task may die before one of the steps that write them. ``steps``: how many are left
    to it; None: any number."""

    steps: int | None = None

    def multi_put(self, *given: Any) -> None:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise Died
        super().multi_put(*given)


@dataclass
class World:
    chance: random.Random
    options: Options
    opaque: bool
    steps: random.Random
    struck: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    epoch: int = 1

    def __post_init__(self) -> None:
        self.names = self.chance.sample(COMMITTERS, self.chance.randint(1, 2))
        self.states = {name: OpaqueMapState(Rows()) for name in ("watermark", *self.names)}
        self.newest: dict[int, int] = {}
        self.begun: frozenset[int] = frozenset()
        self.planned_at = 1_000
        self.numbers = iter(range(1_000_000))
        self.reference = Reference(self.options)
        self.tasks = self.chance.choice([1, 1, 2, 3])
        self.topology = self.build()

    def strike(self, what: str, share: float) -> bool:
        if self.chance.random() >= share:
            return False
        self.struck[what] += 1
        return True

    def build(self) -> Topology:
        options, seconds = self.options, 1_000_000
        builder = TransactionalTopologyBuilder("timed", "records", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
        watermark = WatermarkCommitter(
            self.states["watermark"],
            "at",
            partition=["source"],
            out_of_orderness=options.lag,
            idle_after=options.idle_after,
            max_ahead=ABSURD // 2,
        )
        watermark._place = 1  # of the one part of a partition's id
        builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
        for kind in ("order", "payment"):
            builder.set_bolt(f"{kind}s", Part(kind)).shuffle_grouping("records")
        window = EventWindows(options.length * seconds, options.step * seconds, options.origin * seconds)
        totals = {"n": Count(), "total": Sum("number")}
        one: dict[str, Any] = {"on": "at", "key": ["id"]}
        both: dict[str, Any] = {"key": ["id"], "left": "order_at", "right": "payment_at"}
        makers: dict[str, Callable[[Any], Any]] = {
            "windows": lambda state: WindowedCommitter(
                state, window, aggregates=totals, allowed_lateness=options.lateness, **one
            ),
            "sessions": lambda state: SessionCommitter(state, options.gap, aggregates=totals, **one),
            "first": lambda state: DeduplicatingCommitter(state, within=options.gap, **one),
            "pairs": lambda state: JoiningCommitter(state, within=options.within, how=options.how, **both),
            "valued": lambda state: AsOfJoiningCommitter(state, within=options.valid, how="left", **both),
            "expiring": lambda state: ExpiringCommitter(state, ttl=options.ttl, aggregates=totals, **one),
            "timers": lambda state: Summing(state, options.remind, **one),
        }
        for name in self.names:
            subscribed = builder.set_bolt(name, makers[name](self.states[name]), self.tasks).all_grouping("watermark")
            for source in ("orders", "payments") if name in ("pairs", "valued") else ("records",):
                subscribed.fields_grouping(source, Fields("id"))
        return builder.build()

    def run(self) -> None:
        for state in self.states.values():
            state.prepare("timed")
        for txid in range(1, self.chance.randint(2, TRANSACTIONS) + 1):
            if self.strike("other tasks", 0.2):
                self.tasks = self.chance.choice([1, 2, 3])
                self.topology = self.build()
            if self.strike("another leader", 0.1):
                self.epoch += 1
            self.transaction(txid)

    # --- one transaction --------------------------------------------------------------------------

    def transaction(self, txid: int) -> None:
        batch, attempt = self.batch(), 0
        while True:
            attempt += 1
            fatal = self.chance.random() < 0.35 and attempt < 5
            try:
                sent = self.attempt(txid, attempt, batch, dies=fatal)
            except BadRecordError as error:
                self.trace.append(f"{txid}:{attempt} refused: {error}")
                self.struck["absurd time"] += 1
                batch = self.taken_out(batch)
                continue
            if sent is not None:
                break
            self.trace.append(f"{txid}:{attempt} died with {batch}")
            self.struck["attempt died"] += 1
            if self.strike("another leader", 0.2):
                self.epoch += 1
            if self.strike("roll-back", 0.2):
                attempt += 1
                for state in self.states.values():
                    header = state.read_header()
                    opened = header.opened(self.epoch, OpenCommit(txid, attempt, DIGEST))
                    state.raise_header(header, opened)
                    state.roll_back(opened)
                batch = self.batch(batch)
            elif self.opaque and self.strike("another batch", 0.4):
                batch = self.batch(batch)
        for partition, its in batch.rows.items():
            for record in its:
                self.newest[partition] = max(record.at, self.newest.get(partition, record.at))
        self.planned_at, self.begun = batch.planned_at, batch.begun
        for state in self.states.values():
            header = state.read_header()
            if attempt > 1:
                state.sweep(header)
            state.raise_header(header, header.finished(txid))
            if self.strike("purge", 0.1):
                state.purge(state.read_header(), txid)
        self.trace.append(f"{txid}:{attempt} sent {sent}")
        if any(record.at == ABSURD for record in batch.records()):
            raise Violation(f"transaction {txid}: a record of an absurd time was committed")
        everything = self.reference.after(batch.records(), batch.planned_at, behind=batch.behind, begun=batch.begun)
        expected = {name: its for name, its in everything.items() if name.split("/")[0] in self.states}
        if sent != expected:
            differs = [name for name in expected if sent.get(name) != expected[name]]
            raise Violation(
                f"transaction {txid}: "
                + "; ".join(f"{name}: sent {sent.get(name)}, expected {expected[name]}" for name in differs)
            )
        self.compare_states(txid)

    def compare_states(self, txid: int) -> None:
        for name, count in self.reference.held().items():
            if name not in self.names:
                continue
            live = sum(row.value is not None for _, row in self.states[name].backend.scan())
            if live > count:
                raise Violation(f"transaction {txid}: {name} holds {live} rows, expected at most {count}")

    def batch(self, former: Batch | None = None) -> Batch:
        """``former``: what an attempt that died has read: the next one may read less of it."""
        planned_at = max(self.planned_at + self.chance.choice([0, 1, 5, 20, 60]), 0)
        if self.strike("clock goes back", 0.05):
            planned_at -= 500
        if former is not None:
            rows = {part: its[: self.chance.randint(0, len(its))] for part, its in former.rows.items()}
            return Batch(rows, planned_at, former.behind, former.begun)
        rows = {}
        for partition in range(self.chance.randint(1, 3)):
            if self.strike("silent partition", 0.3):
                continue
            at = self.newest.get(partition, self.reference_time() - self.chance.randint(0, 10))
            its = []
            for _ in range(self.chance.randint(1, 6)):
                at += self.chance.choice([0, 1, 1, 2, 3, 8])
                back = self.chance.randint(0, self.options.lag) if self.options.lag else 0
                if self.strike("late record", 0.06):
                    back += self.chance.randint(1, 30)
                when = ABSURD if self.strike("absurd record", 0.01) else at - back
                kind = self.chance.choice(["order", "payment"])
                its.append(Record(partition, self.chance.choice(KEYS), kind, when, next(self.numbers)))
            rows[partition] = its
        begun = frozenset(
            each
            for each in range(4)
            if (each in self.begun and not self.strike("partition read to its end", 0.3))
            or self.strike("partition without event time", 0.03)
        )
        return Batch(rows, planned_at, self.strike("records left", 0.1), begun)

    def reference_time(self) -> int:
        return max(self.newest.values(), default=500)

    def taken_out(self, batch: Batch) -> Batch:
        rows = {part: [each for each in its if each.at != ABSURD] for part, its in batch.rows.items()}
        return Batch(rows, batch.planned_at, batch.behind, batch.begun)

    # --- one attempt ------------------------------------------------------------------------------

    def attempt(self, txid: int, number: int, batch: Batch, *, dies: bool) -> Sent | None:
        """Process and commit; None where it died."""
        records = batch.records()
        clock = self.task(txid, number, "watermark", 0, 1)
        for part in self.split(records):
            self.fold(clock, [rows(part)])
        told = {
            "planned_at": us(batch.planned_at),
            "unread": False,
            "behind": batch.behind,
            "begun": [*map(str, batch.begun)],
        }
        clock.execute_arrow(pa.RecordBatch.from_pylist([told], CLOCK_FIELDS.schema()))
        kept = clock.keep_for_commit()
        tasks = [
            (name, self.task(txid, number, name, task, self.tasks)) for name in self.names for task in range(self.tasks)
        ]
        for name in self.names:
            streams = [rows] if name not in ("pairs", "valued") else [of_kind("order"), of_kind("payment")]
            its = [task for each, task in tasks if each == name]
            for part in self.split(records) if name != "first" else [records]:
                for make in streams:
                    self.shuffle(its, make(part))
        if dies and self.chance.random() < 0.3:
            return None  # in processing
        for state in self.states.values():
            header = state.read_header()
            state.raise_header(header, header.opened(self.epoch, OpenCommit(txid, number, DIGEST)))
        again = self.task(txid, number, "watermark", 0, 1)
        again.take_for_commit(kept)
        (mark,) = again.finish_batch()
        sent: Sent = {"watermark": Counter([mark.column("watermark")[0].as_py()])}
        self.chance.shuffle(tasks)
        survives = self.chance.randint(0, len(tasks) - 1) if dies else len(tasks)
        for name, task in tasks[:survives]:
            self.commit(task, mark)
            for stream, found in task._collector.rows.items():
                if stream != "changed":
                    sent.setdefault(f"{name}/{stream}", Counter()).update(found)
        if dies:
            _, task = tasks[survives]
            held = task.state.backend = copy.copy(task.state.backend)
            held.steps = steps = self.steps.randint(0, 3)
            with suppress(Died):
                self.commit(task, mark)
            self.struck["died between pages"] += held.steps < 0 < steps
            return None
        return {name: found for name, found in sent.items() if found}

    def commit(self, task: Any, mark: pa.RecordBatch) -> None:
        task.execute_arrow(mark)
        for each in task.finish_batch():
            task._collector.emit_arrow(each, "default")

    def task(self, txid: int, number: int, name: str, task: int, tasks: int) -> Any:
        (component,) = (each for each in self.topology.components if each.id == name)
        made: Any = copy.copy(component.instance)
        made.state = copy.copy(self.states[name])
        made._batches, made._came = [], ([], [])
        fence = CommitFence("timed", self.epoch, DIGEST, f"{name}:{task}")
        context = TopologyContext("timed", name, task, tasks, {}, parallelisms={})
        made.prepare({}, context, Collector(), TransactionAttempt(txid, number, fence))
        return made

    def shuffle(self, tasks: Sequence[Any], batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        for target, part in tasks[0]._grouping.split(batch, len(tasks), 0):
            self.fold(tasks[target], [part])

    def fold(self, task: Any, batches: Iterable[pa.RecordBatch]) -> None:
        combiner = task.combiner()
        for each in batches:
            if combiner is None:
                task.execute_arrow(each)
            else:
                combiner.add(each)
        folded = combiner.finish() if combiner is not None else None
        if folded is not None:
            task.execute_arrow(folded)

    def split(self, records: Sequence[Record]) -> list[Sequence[Record]]:
        """What different tasks upstream have."""
        cut = self.chance.randint(0, len(records))
        return [part for part in (records[:cut], records[cut:]) if part]


class Collector:
    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {}

    def emit_arrow(self, batch: pa.RecordBatch, stream: str) -> None:
        columns = [
            column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(column.type) else column.to_pylist()
            for column in batch.columns
        ]
        self.rows.setdefault(stream, []).extend(zip(*columns, strict=True))


@dataclass
class Batch:
    rows: dict[int, list[Record]]
    planned_at: int
    behind: bool
    begun: frozenset[int]

    def records(self) -> list[Record]:
        return [record for _, its in sorted(self.rows.items()) for record in its]


def rows(records: Sequence[Record]) -> pa.RecordBatch:
    made = [(each.kind, each.key, each.source, each.at, each.number) for each in records]
    columns = zip(*made, strict=True) if made else [()] * len(ROW)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, ROW.type_of(name)) for name, column in zip(ROW, columns, strict=True)], names=list(ROW)
    )


def of_kind(kind: str) -> Callable[[Sequence[Record]], pa.RecordBatch]:
    def made(records: Sequence[Record]) -> pa.RecordBatch:
        return next(iter(Part(kind).execute_arrow(rows(records))))

    return made


def run_event_time(seed: int) -> tuple[str | None, World]:
    """Run the schedule of a seed. Returns what was wrong, and the world."""
    chance = random.Random(f"event time {seed}")
    length = chance.randint(2, 12)
    options = Options(
        lag=chance.choice([0, 0, 3, 8]),
        idle_after=chance.choice([None, 15, 50]),
        length=length,
        step=chance.randint(1, length) if chance.random() < 0.4 else length,
        origin=chance.choice([0, 0, 1]),
        lateness=chance.choice([0, 0, 6]),
        gap=chance.randint(1, 9),
        within=chance.randint(0, 9),
        valid=chance.choice([None, 5]),
        how=chance.choice(["inner", "left", "right", "outer"]),
        ttl=chance.randint(1, 12),
        remind=chance.randint(1, 9),
    )
    steps = random.Random(f"steps {seed}")
    world = World(chance, options, opaque=chance.random() < 0.6, steps=steps)
    with pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(join_buffer, "ROW_RECORDS", chance.choice([1, 2, 32]))
        sizes.setattr(external_row_sorter, "PAGE_ROWS", steps.choice([1, 2, 3, 10_000]))
        sizes.setattr(external_row_sorter, "SORTED_ROWS", steps.choice([1, 2, 50_000]))
        sizes.setattr(sessions, "PANES_MAX", steps.choice([1, 2, 20_000]))
        try:
            world.run()
        except Violation as violation:
            return str(violation), world
    return None, world
