"""A core topology in one process under random trouble, all of it from a seed, and the oracle that
watches it.

The topology: a queue of messages (two spout tasks), a bolt that makes up to three tuples of each,
and one on another stream, and acks some messages rounds later, one that joins tuples of different
messages in pairs (anchored to both, held over many rounds), and ones that ack or, sometimes, fail.
Two rounds are under way at once: tasks take their turns in any order that the rounds allow.
Trouble: a round that overtakes another; a task whose output is lost after it has run; a task that
dies with all that it held; a round that breaks off; records that arrive rounds later, in another
order, or twice; numbers of the ledger with a bit flipped; a value that one of two streams does not
take; bolts that take longer for a tuple than they have in a round; time that passes.

The oracle: when a message is acked, every tuple of one of its lives was acked by the bolt that got
it. A life begins each time the message enters the topology: what a spout emitted once may enter
several times, since it is emitted again after a lost round. At the end trouble stops, and every
message must come through.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework import BaseRichBolt, BaseRichSpout, Fields, TopologyBuilder, Tuple
from framework.core.acker_task import AckerTask
from framework.core.bolt_task import received
from tests.kit.core_parts import Clock, Stepped
from tests.kit.trouble import SLOW_S, TROUBLES, Chances, TroubledRounds
from tests.kit.waiting import PATIENCE_S

#: How many tasks the components have, in the order of ``simulate``.
TASKS = (2, 2, 2, 3, 2, 2)


@dataclass
class World(Chances):
    """What is outside of the topology: the queue, and what was seen."""

    messages: int = 0
    waiting: dict[int, list[int]] = field(default_factory=dict)
    times: Counter[int] = field(default_factory=Counter)
    lives: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    made: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    acked: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    done: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    nodes: int = 0
    clock: Clock = field(default_factory=Clock)

    def make(self, lives: Sequence[str]) -> int:
        """Number a new tuple that was made of these lives of messages."""
        self.nodes += 1
        for life in lives:
            self.made[life].add(self.nodes)
        return self.nodes

    def life_of(self, tup: Tuple) -> str:
        """The life of a tuple of a spout: one per emission,
        also where a round emitted it again without the spout.
        """
        life = f"{tup['emitted']}/{received(tup).roots[0]}"
        self.lives[tup["emitted"]].add(life)
        self.made[life].add(tup["node"])
        return life

    def completed(self, message: int, emitted: str) -> None:
        self.done.add(message)
        missing = min((len(self.made[life] - self.acked[life]) for life in self.lives[emitted]), default=1)
        if missing:
            self.wrong.append(f"seed {self.seed}: {emitted} was acked before {missing} of its tuples")


_worlds: dict[int, World] = {}


class Source(BaseRichSpout):
    """A queue: a message that was handed out and is not done is handed
    out again to who opens it next.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.world, self.collector = _worlds[self.seed], collector
        mine = range(context.task_index, self.world.messages, context.task_count)
        self.waiting = [message for message in mine if message not in self.world.done]

    def next_tuple(self) -> None:
        if self.waiting and self.world.chance.random() < 0.9:
            message = self.waiting.pop()
            self.world.times[message] += 1
            emitted = f"{message}:{self.world.times[message]}"
            self.collector.emit([emitted, self.world.make([])], message_id=(message, emitted))

    def ack(self, message_id: tuple[int, str]) -> None:
        self.world.completed(*message_id)

    def fail(self, message_id: tuple[int, str]) -> None:
        if message_id[0] not in self.world.done:
            self.waiting.append(message_id[0])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(emitted=str, node=int))


class Part(BaseRichBolt):
    """``what``: "split", "pair" or "end"."""

    def __init__(self, seed: int, what: str) -> None:
        self.seed, self.what = seed, what

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.world, self.collector = _worlds[self.seed], collector
        self.held: Tuple | None = None
        self.unacked: list[tuple[Tuple, list[str]]] = []

    def execute(self, tup: Tuple) -> None:
        chance = self.world.chance
        if self.world.strikes("slow bolt", 0.1):
            self.world.clock.now += SLOW_S
        if self.what == "split":
            lives = [self.world.life_of(tup)]
            wrong = self.world.strikes("value does not fit", 0.02)
            if wrong or chance.random() < 0.5:
                node: Any = self.world.make(lives)
                self.collector.emit([",".join(lives), "none" if wrong else node], anchors=tup, stream="aside")
            for _ in range(chance.randrange(4)):
                self.emit([tup], lives)
            self.unacked.append((tup, lives))
            while self.unacked and chance.random() < 0.8:  # the others later
                self.done(*self.unacked.pop())
        elif self.what == "pair":
            other, self.held = self.held, None
            if other is None and chance.random() < 0.7:
                self.held = tup
                return
            anchors = [tup] if other is None else [tup, other]
            self.emit(anchors, sorted({life for each in anchors for life in each["lives"].split(",")}))
            for each in anchors:
                self.done(each, each["lives"].split(","))
        elif self.world.strikes("failed tuple", 0.02):
            self.collector.fail(tup)
        else:
            self.done(tup, tup["lives"].split(","))

    def emit(self, anchors: list[Tuple], lives: list[str]) -> None:
        self.collector.emit([",".join(lives), self.world.make(lives)], anchors=anchors)

    def done(self, tup: Tuple, lives: list[str]) -> None:
        self.collector.ack(tup)
        for life in lives:
            self.world.acked[life].add(tup["node"])

    def declare_output_fields(self, declarer: Any) -> None:
        if self.what != "end":
            declarer.declare(Fields(lives=str, node=int))
        if self.what == "split":
            declarer.declare(Fields(lives=str, node=int), "aside")


def simulate(
    seed: int, messages: int = 60, troubles: Sequence[str] = TROUBLES, pending: int = 8, tasks: Sequence[int] = TASKS
) -> World:
    """Run one world to its end: trouble until half of the messages are done or for 200 rounds, then
    none. ``tasks``: of source, split, pair, end, aside, and the ackers. Where one is above another
    with one task, both are fused. Raises ``AssertionError`` when a message does not come through.
    """
    source, split, pair, end, aside, ackers = tasks
    world = _worlds[seed] = World(seed, frozenset(troubles), messages)
    builder = TopologyBuilder("simulated")
    builder.set_spout("source", Source(seed), source)
    builder.set_bolt("split", Part(seed, "split"), split).shuffle_grouping("source")
    builder.set_bolt("pair", Part(seed, "pair"), pair).fields_grouping("split", Fields("node"))
    builder.set_bolt("end", Part(seed, "end"), end).fields_grouping("pair", Fields("node"))
    builder.set_bolt("aside", Part(seed, "end"), aside).fields_grouping("split", Fields("node"), "aside")
    stepped = Stepped(builder.build(), ackers=ackers, pending=pending)
    world.clock = stepped.clock
    rounds = TroubledRounds(world, stepped)
    try:
        for number in range(2_000):
            if number == 200 or len(world.done) * 2 > messages:
                world.troubles = frozenset()
            if len(world.done) == messages:
                break
            rounds.pass_time(world.chance.choice([0.0, 0.0, 0.5, 5.0]))
            rounds.go_on()
        assert len(world.done) == messages, f"seed {seed}: {messages - len(world.done)} messages were forgotten"
        for _ in range(8):  # nothing stays behind; a round is one rotation at most
            if not _tracked(stepped):
                break
            stepped.clock.now += PATIENCE_S
            rounds.go_on()
        assert _tracked(stepped) == 0
        assert stepped.driver.failure is None
    finally:
        del _worlds[seed]
    return world


def _tracked(stepped: Stepped) -> int:
    """The trees that the ackers track."""
    tasks = stepped.rounds._worker._tasks.values()
    return sum(task._acker.pending for task in tasks if isinstance(task, AckerTask))
