"""Chains of committers of event time, some of them with two watermarks: which there are, drawn by
chance; their bolts; and what each transaction must send.

A *feed* is what a committer or a watermark takes: all records, those of one kind, or the rows of
another committer. The rows of a committer become records that are never late for a committer with
the same watermarks: each has a time that the watermark had not passed before the transaction.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from framework import Fields
from framework.topology import ArrowBolt
from tests.kit.event_time_reference import OPERATORS, ClockReference, Options, Record, Reference, Sent

ROW = Fields(kind=str, id=str, partition=int, at=int, number=int)
#: The feeds of the source: all records, and those of a kind.
RECORDS, KINDS = "records", ("order", "payment")
SIDES = ("default", "late_left", "late_right")
#: The streams of each committer.
STREAMS = {
    "windows": ("default", "late"),
    "sessions": ("default", "late"),
    "first": ("default", "late"),
    "pairs": SIDES,
    "valued": SIDES,
    "expiring": ("default", "late", "expired"),
    "timers": ("default", "late"),
}
#: The committers of two streams.
JOINS = ("pairs", "valued")
#: The stream of each committer that another one may take.
ONWARD = {name: "expired" if name == "expiring" else "default" for name in STREAMS}
#: Committers for which two records of one key and one time differ from one (ADR 133). The rows of
#: ``pairs`` may have such ties.
COUNTS_TIES = ("first", "valued", "timers")


@dataclass(frozen=True)
class Clock:
    """A watermark. ``feed``: of the source, or of a committer. ``by_partition``: whether it knows
    the partitions of its records."""

    name: str
    feed: str
    options: Options
    by_partition: bool = True
    earlier: int = 0


@dataclass(frozen=True)
class Stage:
    """A committer. ``feeds``: one, or the left and the right one of a join. ``earlier``: by how
    many seconds the rows of another committer come before the moment at which that one sends
    them."""

    name: str
    operator: str
    feeds: tuple[str, ...]
    clocks: tuple[str, ...]
    options: Options
    earlier: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of the records of each feed, where that is one of another committer."""
        return KINDS if self.operator in JOINS else ("order",)


@dataclass(frozen=True)
class Shape:
    """``is_ordered``: a key has one partition. ``is_apart``: a partition has one kind of records.
    ``can_tie``: a key may have several records of one time. ``lags``: of each kind of records."""

    clocks: tuple[Clock, ...]
    stages: tuple[Stage, ...]
    lags: Mapping[str, int]
    is_ordered: bool = False
    is_apart: bool = False
    can_tie: bool = False

    @property
    def keeps_order(self) -> bool:
        """Whether the records of a partition stay in their order on their way to a stage."""
        return any(each.operator in ("first", "valued") for each in self.stages)

    def clocks_of(self, stage: Stage | None = None) -> Iterator[Clock]:
        """The watermarks that a stage feeds, or the source."""
        for clock in self.clocks:
            if clock.feed == stage.name if stage is not None else clock.feed in (RECORDS, *KINDS):
                yield clock

    def streams(self) -> Iterator[tuple[Stage, str]]:
        """Each stage with each of its streams."""
        for stage in self.stages:
            for stream in STREAMS[stage.operator]:
                yield stage, stream

    def never_late(self) -> bool:
        """Whether no row is late if no record is: each watermark knows all partitions of its kind
        from the beginning, and each stage has the watermarks of its feeds."""
        if any(each.options.idle_after is not None or not each.by_partition for each in self.clocks):
            return False
        if any(each.feed != RECORDS for each in self.clocks) and not self.is_apart:
            return False
        if len(list(self.clocks_of())) < len(self.clocks):
            return False  # what a committer drops does not advance the watermark below it
        clocks = {each.name: each for each in self.clocks}
        of: dict[str, set[str]] = {}
        for stage in self.stages:
            of[stage.name] = set(stage.clocks)
            for feed in stage.feeds:
                if feed in of and not of[feed] <= of[stage.name]:
                    return False
                wanted = {*KINDS} if feed == RECORDS else {feed}
                seen = {clocks[each].feed for each in stage.clocks}
                if feed not in of and RECORDS not in seen and not wanted <= seen:
                    return False
        return not any(stage.options.lateness for stage in self.stages)  # a correction is late below


def options_of(chance: random.Random) -> Options:
    length, idle = chance.randint(2, 12), chance.choice([None, None, 15, 50])
    return Options(
        lag=chance.choice([0, 0, 3, 8]),
        idle_after=idle,
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
        advance_when_idle=idle is not None and chance.random() < 0.4,
    )


def one_clock(chance: random.Random) -> Shape:
    """One or two committers over the records, with one watermark."""
    options = options_of(chance)
    stages = tuple(
        Stage(name, name, KINDS if name in JOINS else (RECORDS,), ("watermark",), options)
        for name in chance.sample(sorted(STREAMS), chance.randint(1, 2))
    )
    is_ordered = any(each.operator == "valued" for each in stages)
    clocks = (Clock("watermark", RECORDS, options),)
    return Shape(clocks, stages, dict.fromkeys(KINDS, options.lag), is_ordered=is_ordered, can_tie=is_ordered)


def chains(chance: random.Random) -> Shape:
    """A watermark for each kind of records, and perhaps one for all; joins of the two, and chains
    of committers below them."""
    clocks = [Clock(f"{kind}-clock", kind, options_of(chance), by_partition=chance.random() < 0.9) for kind in KINDS]
    lags = {each.feed: each.options.lag for each in clocks}
    if chance.random() < 0.2:
        clocks.append(Clock("common-clock", RECORDS, replace(options_of(chance), lag=max(lags.values()))))
    stages: list[Stage] = []
    for number in range(chance.randint(1, 3)):
        stages.append(_stage(chance, f"stage{number}", stages, clocks))
    if all(len(stage.clocks) == 1 for stage in stages):
        stages.append(_stage(chance, "joined", stages, clocks, operators=JOINS))
    return Shape(tuple(clocks), tuple(stages), lags, is_apart=chance.random() < 0.6)


def _stage(
    chance: random.Random,
    name: str,
    above: Sequence[Stage],
    clocks: list[Clock],
    operators: Sequence[str] = OPERATORS,
) -> Stage:
    operator = chance.choice([*operators, *JOINS])

    def feed(own: Sequence[str], taken: str = "") -> str:
        fits = [
            each.name
            for each in above
            if each.name != taken and not (each.operator == "pairs" and operator in COUNTS_TIES)
        ]
        if operator == "first":  # rows of other committers come in the order in which tasks send them
            fits = [each.name for each in above if each.operator in ("valued", "timers")]
        return chance.choice(fits) if fits and chance.random() < 0.7 else chance.choice(own)

    if operator in JOINS:
        left = feed(KINDS[:1])
        feeds: tuple[str, ...] = left, feed(KINDS[1:], left)
    else:
        feeds = (feed((RECORDS, *KINDS)),)
    of = {each.name: set(each.clocks) for each in above}
    of |= {kind: {f"{kind}-clock"} for kind in KINDS} | {RECORDS: {f"{kind}-clock" for kind in KINDS}}
    names = set().union(*(of[each] for each in feeds))
    source = next((each for each in above if each.name == feeds[0]), None)
    if len(feeds) == 1 and source is not None and chance.random() < 0.3:
        clock = Clock(f"{name}-clock", source.name, options_of(chance), by_partition=source.operator == "first")
        clocks.append(clock)
        names = {clock.name}
    luck = chance.random()
    if luck < 0.1:
        names.add(chance.choice(clocks).name)
    elif luck < 0.15:
        names = {chance.choice(clocks).name}
    elif luck < 0.3 and not {*feeds} & {each.name for each in above} and clocks[2:] and clocks[2].feed == RECORDS:
        names = {clocks[2].name}
    return Stage(name, operator, feeds, tuple(sorted(names)), options_of(chance), earlier=chance.choice([0, 1]))


# --- what each transaction must send --------------------------------------------------------------


class ChainReference:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clocks = {each.name: ClockReference(each.options) for each in shape.clocks}
        self.stages = {each.name: Reference(each.options) for each in shape.stages}

    def after(
        self, records: Sequence[Record], planned_at: int, *, behind: bool, begun: Collection[int], unread: bool
    ) -> Sent:
        """The rows that the next transaction sends: as ``Reference.after``."""
        before = {name: each.reached for name, each in self.clocks.items()}
        sent: Sent = {}

        def advance(clock: Clock) -> None:
            its = self._fed(clock.feed, "order", clock.earlier, records, sent)
            known = begun if clock.by_partition else ()
            its = its if clock.by_partition else [each._replace(source=0) for each in its]
            self.clocks[clock.name].after(its, planned_at, behind=behind, begun=known, unread=unread)

        for clock in self.shape.clocks_of():
            advance(clock)
        for stage in self.shape.stages:
            its = []
            for feed, kind in zip(stage.feeds, stage.kinds, strict=True):
                its += self._fed(feed, kind, stage.earlier, records, sent)
            found = self.stages[stage.name].sent_by(
                stage.operator, its, min(before[each] for each in stage.clocks), self.reached(stage)
            )
            sent |= {f"{stage.name}/{name.split('/')[1]}": rows for name, rows in found.items()}
            for clock in self.shape.clocks_of(stage):
                advance(clock)
        return sent

    def reached(self, stage: Stage) -> int:
        return min(self.clocks[each].reached for each in stage.clocks)

    def held(self) -> dict[str, int]:
        """How many rows the state of each stage may have at most, as far as that is known."""
        found = {stage.name: self.stages[stage.name].held().get(stage.operator) for stage in self.shape.stages}
        return {name: count for name, count in found.items() if count is not None}

    def _fed(self, feed: str, kind: str, earlier: int, records: Sequence[Record], sent: Sent) -> list[Record]:
        if feed in (RECORDS, *KINDS):
            return [each for each in records if feed in (RECORDS, each.kind)]
        above = next(each for each in self.shape.stages if each.name == feed)
        rows = sent.get(f"{feed}/{ONWARD[above.operator]}", Counter()).elements()
        onward = onward_of(above, earlier)
        return sorted((onward(row)._replace(kind=kind) for row in rows), key=lambda each: each.at)


def onward_of(stage: Stage, earlier: int) -> Callable[[Sequence[Any]], Record]:
    """The record that a row of a committer is for another one. Times of rows in microseconds become
    seconds."""
    within = stage.options.within

    def record(key: str, at: int, number: int, source: int = 0) -> Record:
        return Record(source, key, "order", at, number)

    def ended(row: Sequence[Any]) -> Record:
        return record(row[0], row[2] // 1_000_000 - earlier, row[4])

    def passed(row: Sequence[Any]) -> Record:
        return record(row[0], row[1] // 1_000_000 - earlier, row[-1])

    def paired(row: Sequence[Any]) -> Record:
        key, left, number, right, other = row
        alone = left is None or right is None
        at = (left if right is None else right) + within if alone else max(left, right)
        return record(key, at, (number or 0) + (other or 0))

    def valued(row: Sequence[Any]) -> Record:
        return record(row[0], row[1], row[2] + (row[4] or 0))

    def first(row: Sequence[Any]) -> Record:
        return record(row[1], row[3], row[4], row[2])

    return {
        "windows": ended,
        "sessions": ended,
        "expiring": passed,
        "timers": passed,
        "pairs": paired,
        "valued": valued,
        "first": first,
    }[stage.operator]


# --- bolts ----------------------------------------------------------------------------------------


def values_of(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The rows, with times as microseconds."""
    columns = [
        column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(column.type) else column.to_pylist()
        for column in batch.columns
    ]
    return list(zip(*columns, strict=True))


class OfKind(ArrowBolt):
    """The records of one kind, unchanged."""

    deterministic = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch.filter(pc.equal(batch.column("kind"), self.kind))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(ROW)


class Onward(ArrowBolt):
    """The rows of a committer as records. ``kind``: None, or the side of a join for which they
    are."""

    deterministic = True

    def __init__(self, above: Stage, earlier: int, kind: str | None) -> None:
        self.above, self.earlier, self.kind = above, earlier, kind

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        onward = onward_of(self.above, self.earlier)
        made = [onward(row) for row in values_of(batch)]
        rows = [
            (each.key, each.at, each.number)
            if self.kind is not None
            else (each.kind, each.key, each.source, each.at, each.number)
            for each in made
        ]
        yield pa.RecordBatch.from_pylist(
            [dict(zip(self._fields(), row, strict=True)) for row in rows], self._fields().schema()
        )

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(self._fields())

    def _fields(self) -> Fields:
        if self.kind is None:
            return ROW
        return Fields.of({"id": str, f"{self.kind}_at": int, f"{self.kind}_number": int})
