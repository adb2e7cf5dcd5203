"""The world of a simulated schedule: virtual time, one ZooKeeper, sinks, a source, and their
oracle.

Real: the coordinator, the documents and their rotation, the fence, the commit phase, states and
value logic, the planner of the memory spout. Simulated: time, processes, the network, the servers.

Every check quotes the invariant of ``RELIABILITY.md`` (or the rule of ``CORRECTNESS.md``) that it
holds.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from framework import Fields, OutputFieldsDeclarer
from framework.coordination.fenced import FencedLeadership, FenceMoved, ReplyLost, fence_of
from framework.coordination.transactional_state import decode_document, encode_document
from framework.errors import RetryableError, StaleWriterError
from framework.execution.messages import AttemptHeader
from framework.inspect.rebuild import EPOCH_OF_REBUILDS, with_closed_fence
from framework.topology import DEAD_LETTER_FIELDS, DEAD_LETTER_STREAM, Header, Stamp, ValueType
from framework.topology.fencing import ROLLED_BACK
from framework.topology.spouts import LEFT_OUT, REFUSED
from framework.transactions import CoordinationStore, Put
from framework.transactions.plans import plan_digest
from sinks import MapState, MemoryBackend, OpaqueMapState, OpaqueValue, Row, TransactionalMapState, TransactionalValue
from sinks.kafka.markers import Marker
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from spouts.memory import _MemoryPlanner, _MemorySpout
from tests.simulation.kafka import LETTERS, SimKafka, SimLetters

TOPOLOGY = "sim"
FENCE = f"{TOPOLOGY}/epoch"
INCARNATION = f"{TOPOLOGY}/incarnation"
SINKS = ("words", "sizes")
TOPIC = "topic"
#: Why a value is refused.
REASON = "its value is refused"
#: The ids of the spout, before and after the topology changes.
SPOUTS = ("spout", "renamed")
#: What large plans hold beside ranges. ``REQUEST_BYTES_MAX``: what ZooKeeper takes in one request
#: then: one such plan, and little else.
PADDING = "." * 2_000
REQUEST_BYTES_MAX = 3_600
#: Paths that do not count for a request's size: the record of a transaction, which has a bound of
#: its own, and where partitions were first read.
UNMEASURED = (f"{TOPOLOGY}/history/", f"{TOPOLOGY}/origin")
SESSION_MS = 400
#: A schedule that needs more steps than this after its last fault does not make progress (invariant
#: 13).
STEPS_MAX = 12_000
#: How many lines of a trace are kept.
TRACE_MAX = 100_000
#: The probability of a fault at rare steps: every fault must meet them.
PROBABILITIES = {
    "roll back: raise": 0.2,
    "roll back: undo": 0.3,
    "roll back: mark_rolled_back": 0.3,
    "answer: roll back": 0.4,
    "command: RollBack": 0.15,
    "commit: sweep": 0.6,
    "commit: purge": 0.25,
    "start: confirm": 0.4,
    "task: delete": 0.12,
    "task: merge": 0.25,
}


class Violation(AssertionError):
    """An invariant does not hold."""


class Crashed(BaseException):
    """A driver dies inside a call: all of it ends at once."""


@dataclass(frozen=True)
class Shape:
    """What a seed decides about a schedule."""

    opaque: bool
    opaque_state: bool
    moody: bool  # results depend on the attempt; allowed with opaque states only
    pending: int
    partitions: int
    records: int
    take: int
    keys: int
    deletes: bool
    faults: int
    changes: int
    back: str  # what goes back in time: "", "sink", "zookeeper"; or "another life", of ZooKeeper
    second_driver: bool
    states: int
    losses: int  # how many ranges whose commit is open are lost
    topic_tasks: int  # tasks of the committer to Kafka, which has no header; 0: there is none
    letters: bool  # some records are bad; their committer has no header either
    merges: str  # who adds a task's counts to rows, by a guessed header: "task", "store"; "": tasks update keys
    joins: str  # the committer that joins the topology between two runs; "": none
    renames: bool  # the spout has another id then, and the plans must move
    large: bool  # plans are so large that ZooKeeper takes one at a time
    one_step: bool  # the only task of a commit raises, writes and sets done in one step of its state
    refuses: str  # who refuses the values of some records: "bolt", "sink"; "": nobody
    interval_ms: int  # from one plan to the next; 0: none
    rate: int  # records per second; 0: no limit
    room: int  # the most records of a batch that a bolt takes; 0: no limit
    moves: bool  # a sink that refuses a value takes it now and then
    tries: bool  # the tries of a sink find the values that it refuses

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the states."""
        return SINKS[: self.states]

    @property
    def headerless(self) -> tuple[str, ...]:
        """The committers without a header."""
        return (*[TOPIC] * min(self.topic_tasks, 1), *[LETTERS] * self.letters)

    @classmethod
    def of(cls, chance: random.Random) -> Shape:
        opaque = chance.random() < 0.6
        opaque_state = opaque or chance.random() < 0.4
        states, topic_tasks = chance.choice(((2, 0), (2, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)))
        back = chance.choice(("",) * 7 + ("sink", "sink", "zookeeper", "zookeeper", "another life", "another life"))
        losses = (1, 2) if back == "sink" else (0, 0, 1, 2, 3)
        moody = opaque_state and chance.random() < 0.3
        committers = [*SINKS[:states], *[TOPIC] * min(topic_tasks, 1)]
        letters = chance.random() < 0.25
        merges = chance.choice(("", "", "task", "store"))
        joins = chance.choice(committers[1:]) if len(committers) > 1 and chance.random() < 0.25 else ""
        changes_topology = bool(joins) or chance.random() < 0.1
        renames = changes_topology and not letters and (not joins or chance.random() < 0.5)
        one_step = (states, topic_tasks) == (1, 0) and not letters and chance.random() < 0.7
        if one_step and not merges:
            merges = chance.choice(("task", "store"))
        return cls(
            opaque,
            opaque_state,
            moody and topic_tasks < 2,  # C11: each of several tasks must see the same rows again
            chance.choice((1, 1, 2, 3)),
            chance.choice((1, 2, 3)),
            chance.randint(3, 10),
            chance.choice((1, 2, 3, 5)),
            chance.choice((2, 3, 5)),
            chance.random() < 0.4 and not merges,
            chance.choice((0, 1, 2, 3, 4, 6, 9)),
            chance.choice((0, 0, 1, 2, 3)),
            back,
            chance.random() < 0.5,
            states,
            chance.choice((0, 0, 0, 1) if topic_tasks or letters else losses) if opaque else 0,
            topic_tasks,
            letters,
            merges if states else "",
            joins,
            renames,
            chance.random() < (0.7 if renames else 0.1),
            one_step,
            chance.choice(("", "", "", "bolt", "sink") if states else ("", "", "", "bolt")),
            chance.choice((0, 0, 0, 300)),
            chance.choice((0, 0, 0, 40)),
            # of its own: no other choice depends on it
            random.Random(f"room {chance.getstate()[1][:4]}").choice((0,) * 6 + (1, 2)),
            random.Random(f"moves {chance.getstate()[1][:4]}").random() < 0.3,
            random.Random(f"tries {chance.getstate()[1][:4]}").random() < 0.6,
        )


class World:
    """What a schedule runs in: time, servers, faults, and the oracle."""

    def __init__(self, seed: int, coverage: Counter[tuple[str, str]], *, tells: bool = False) -> None:
        self.seed = seed
        self.tells = tells  # whether a trace is kept: to write down what happens takes a fifth of the time
        self.chance = random.Random(seed)
        self.shape = Shape.of(self.chance)
        self.names = self.shape.names  # of the states
        self.coverage = coverage
        self.now = 0
        self.steps = 0
        self.trace: list[str] = []
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = 0
        self.faults_left = self.shape.faults
        self.store = SimStore(self)
        kind = OpaqueSimSpout if self.shape.opaque else SimSpout
        options: dict[str, Any] = {"on_data_loss": "skip"} if self.shape.opaque else {}
        if self.shape.refuses:
            options["on_bad_record"] = "skip"
        self.next_id = 0
        rows = {each: [self.record() for _ in range(self.shape.records)] for each in range(self.shape.partitions)}
        self.spout = kind(rows, Fields(record=int), self.shape.take, **options)
        self.backends = [SimBackend(self, index, name) for index, name in enumerate(self.shape.names)]
        self.kafka = SimKafka(self)
        self.spout.large = self.shape.large
        self.spout.letters = SimLetters(self.kafka) if self.shape.letters else None
        self.for_good: set[int] = set()  # the transactions whose tasks may have written to Kafka
        self.unanswered: set[tuple[int, int]] = set()  # attempts whose driver does not know how the commit ended
        self.workers: list[dict[str, str]] = [{}, {}]  # what each remembers of the states it has written to
        self.oracle = Oracle(self)
        self.finished = False
        self.stopped: str | None = None  # why the topology had to stop before everything was committed
        self.corrupted = "nothing"
        self.failing_commits = 0
        self.restored: dict[int, int] = {}  # sink -> how often it went back in time
        self.zookeeper_restored = False
        self.joined = not (self.shape.joins or self.shape.renames)  # whether a driver with the changed topology has led
        self.restores: list[Any] = []
        self.closed_rows: dict[int, tuple[int, dict[tuple[Any, ...], Row]]] = {}  # sink -> last closed txid, rows then
        self.writes = 0  # to headers and to ZooKeeper: without one, nothing is opened or done
        self._met: set[str] = set()
        self._depth = 0

    # --- time -------------------------------------------------------------------------------------

    def at(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._tie += 1
        heapq.heappush(self._heap, (self.now + delay_ms, self._tie, action))

    def soon(self, action: Callable[[], None]) -> None:
        self.at(1 + int(self.chance.random() * 12), action)

    def run(self) -> None:
        """Run until everything is committed, or the topology had to stop. Raises ``Violation``."""
        quiet_from = 0
        while not self.finished:
            if not self._heap:
                raise Violation("13: nothing will ever happen again, and the source is not exhausted")
            self._next()
            if self.faults_left:
                quiet_from = self.steps
            if self.steps - quiet_from > STEPS_MAX or self.steps > 20 * STEPS_MAX:
                raise Violation(f"13: no end {STEPS_MAX} steps after the last fault, at {self.now} ms")

    def _next(self) -> None:
        self.now, _, action = heapq.heappop(self._heap)
        self.steps += 1
        action()

    def meanwhile(self) -> None:
        """Let other processes go on between two requests of one step."""
        if self._depth > 3 or self.chance.random() > 0.3:
            return
        self._depth += 1
        for _ in range(1 + int(self.chance.random() * 30)):
            if self._heap and not self.finished:
                self._next()
        self._depth -= 1

    def stop(self, reason: str) -> None:
        """End the schedule: the topology had to stop."""
        self.note(f"stops: {reason}")
        self.stopped, self.finished = reason, True

    # --- faults -----------------------------------------------------------------------------------

    def fault(self, step: str, kinds: Sequence[str], probability: float = 0.06) -> str | None:
        """How this step goes wrong; None: it does not."""
        if step not in self._met:  # so that a pair that never comes shows with 0
            self._met.add(step)
            for kind in kinds:
                self.coverage[(kind, step)] += 0
        if not self.faults_left:
            return None
        if self.chance.random() > PROBABILITIES.get(step, probability):
            return None
        self.faults_left -= 1
        kind = kinds[int(self.chance.random() * len(kinds))]
        self.coverage[(kind, step)] += 1
        self.note(lambda: f"FAULT {kind} at {step}")
        return kind

    def note(self, what: Callable[[], str] | str) -> None:
        """Write down what happens, if a trace is kept. ``what``: a text, or what makes it."""
        if self.tells and len(self.trace) < TRACE_MAX:
            self.trace.append(f"{self.now:6d} {what if isinstance(what, str) else what()}")

    # --- records ----------------------------------------------------------------------------------

    def record(self) -> list[int]:
        self.next_id += 1
        return [self.next_id]

    def is_bad(self, record: int) -> bool:
        return self.shape.letters and record * 2654435761 >> 7 & 3 == 0

    def is_refused(self, record: int) -> bool:
        """Whether a record's value is refused, so that its plan must leave it out (C51)."""
        return bool(self.shape.refuses) and not self.is_bad(record) and record * 2246822519 >> 9 & 3 == 0

    def left_out(self, plan: Any) -> list[int]:
        """The records that a plan leaves out, of those in its ranges."""
        return [
            row[0]
            for each, meta in plan.items()
            for offset, row in self.in_range(each, meta)
            if offset in meta.get(LEFT_OUT, ())
        ]

    def in_range(self, partition: str, meta: Any) -> list[tuple[int, list[int]]]:
        """The records of a range with their offsets, also those that are gone from the source."""
        source = self.spout._source
        assert source is not None
        return list(enumerate(source.partitions[partition]))[meta["first"] : meta["next"]]

    def operations(self, sink: int, record: int, attempt_id: int) -> tuple[str, int | None]:
        """What a record does to a sink, as (key, weight).

        Weight None deletes the key, 0 sets it to 0.
        """
        mixed = (record * 2654435761 + sink * 40503) & 0xFFFFFFFF
        shift = attempt_id if self.shape.moody and mixed % 3 == 0 else 0
        key = f"k{((mixed >> 8) + shift) % self.shape.keys}"
        kind = (mixed >> 16) % 7 if self.shape.deletes else 2
        return key, (None, 0)[kind] if kind < 2 else 1 << record

    def state(self, sink: int) -> MapState:
        kind = OpaqueMapState if self.shape.opaque_state else TransactionalMapState
        return kind(copy(self.backends[sink]))  # each process has its own, and they share the rows

    def is_open(self, txid: int) -> bool:
        """Whether some header says that the commit of a txid was opened."""
        return any(each == txid and digest != ROLLED_BACK for each, digest in self._opened())

    def is_rolled_back(self, txid: int) -> bool:
        """Whether some header says that a txid was rolled back."""
        return (txid, ROLLED_BACK) in self._opened()

    def _opened(self) -> list[tuple[int, str]]:
        written = self.store.opened()
        headers = [each.header() for each in self.backends]
        opened = [
            (each.open.txid, each.open.plan_digest) for each in headers if each is not None and each.open is not None
        ]
        if written is not None:
            opened.append((written["txid"], written["plan_digest"]))
        return opened

    def opened_range_is_lost(self) -> bool:
        """Whether the commit of the next transaction was opened,
        and records of its plan are gone from the source.
        """
        currtx = self.store.currtx()
        source, plan = self.spout._source, self.store.plan(currtx)
        assert source is not None
        # A sink that went back may have been open when the leader read its header.
        if not self.is_open(currtx) and not self.restored:
            return False
        return any(
            meta["first"] < min(meta["next"], source.earliest.get(each, 0)) for each, meta in (plan or {}).items()
        )

    def rows(self, plan: dict[str, Any], committer: str) -> list[Any]:
        """The records of a plan that go to a committer to Kafka;
        also those that are gone from the source.
        """
        records = [row[0] for each, meta in plan.items() for _, row in self.in_range(each, meta)]
        gone = self.left_out(plan)
        return [each for each in records if (self.is_bad(each) or each in gone) is (committer == LETTERS)]

    def done(self) -> bool:
        """Whether every record that the source holds is committed, or lost."""
        source = self.spout._source
        assert source is not None
        return all(self.oracle.positions.get(each, 0) >= len(rows) for each, rows in source.partitions.items())


class _LargePlanner(_MemoryPlanner):
    """Makes plans whose first entry has padding."""

    def plan_smaller(self, previous: Any, divisor: int) -> Any:
        plan = super().plan_smaller(previous, divisor)
        if plan is None:
            return None
        first = min(plan)
        return {**plan, first: {**plan[first], "padding": PADDING}}


class _SimSpout(_MemorySpout):
    """A spout with an optional committer for bad records; its plans may be large."""

    letters: SimLetters | None = None
    large = False

    def planner(self, conf: Any, context: Any) -> Any:
        made = super().planner(conf, context)
        if self.large:
            made.__class__ = _LargePlanner
        return made

    def dead_letters(self) -> SimLetters | None:
        return self.letters

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        super().declare_output_fields(declarer)
        if self.letters is not None:
            declarer.declare(DEAD_LETTER_FIELDS, DEAD_LETTER_STREAM)


class SimSpout(_SimSpout, MemoryTransactionalSpout):
    pass


class OpaqueSimSpout(_SimSpout, OpaqueMemoryTransactionalSpout):
    pass


class SimBackend(MemoryBackend):
    """A sink that may write only a part of what it is given, or lose its answer."""

    def __init__(self, world: World, index: int, name: str) -> None:
        super().__init__(name)
        self._world = world
        self._index = index

    def prepare(self, topology_id: str) -> Header:
        shared = self._rows()
        if shared.header is None:
            shared.header = Header(topology_id, f"first of {self._name}")  # nothing random: a seed is a schedule
        return super().prepare(topology_id)

    def raise_header(self, expected: Header, new: Header) -> None:
        must_be = self._must_be(expected, new)
        self._check(expected)
        if must_be not in ("", self._identity):
            raise self._another_store(expected)
        super().raise_header(expected, new)
        self._opened_in = self._identity
        self._world.writes += 1
        self._world.oracle.header_changed(self._index, expected, new)

    @property
    def _identity(self) -> str:
        """Tells this store from another one that takes its place (C27)."""
        return f"store {self._world.restored.get(self._index, 0)}"

    def forget_process(self) -> None:
        """The process that opened a commit here is gone."""
        self._opened_in = ""

    def snapshot(self) -> tuple[Header, dict[tuple[Any, ...], Row]]:
        return self.header() or Header(TOPOLOGY, f"first of {self._name}"), dict(self.rows())

    def restore(self, snapshot: tuple[Header, dict[tuple[Any, ...], Row]]) -> None:
        """Go back to a snapshot, as after a restart from a backup."""
        shared = self._rows()
        header, rows = snapshot
        shared.header = header
        self._world.writes += 1
        shared.rows.clear()
        shared.rows.update(rows)
        self._world.restored[self._index] = self._world.restored.get(self._index, 0) + 1
        self._world.oracle.sink_went_back(self._index, header)

    def take_rebuilt(self) -> bool:
        """Exchange the rows for those that a rebuild has made of the closed transactions, if
        nothing newer is done here.
        """
        world, header = self._world, self.header()
        txid, rows = world.closed_rows.get(self._index, (0, {}))
        if header is None or not txid or not txid == header.done == world.store.currtx() - 1:
            return False
        if world.oracle.is_behind(self._index):
            return False
        new, shared = with_closed_fence(header), self._rows()
        shared.header = new
        shared.rows.clear()
        stamp = Stamp(0, EPOCH_OF_REBUILDS, 0)
        shared.rows.update((key, row._replace(stamp=stamp._replace(txid=row.stamp.txid))) for key, row in rows.items())
        world.writes += 1
        world.note(f"the rows of {self._name} are exchanged, as of transaction {txid}")
        world.oracle.header_changed(self._index, header, new)
        return True

    def multi_put(self, header: Any, keys: Any, expected_stamps: Any, rows: Any) -> None:
        fault = self._fault("write rows", ("partial", "answer lost", "refused"))
        if fault == "partial" and len(keys) > 1:
            part = 1 + int(self._world.chance.random() * (len(keys) - 1))
            if self._opens_from is not None:  # as a script that fails half-way
                self.raise_header(self._opens_from, header)
                self._opens_from = None
            self._written(header, keys[:part], expected_stamps[:part], rows[:part])
            raise RetryableError("the sink went away half-way")
        self._written(header, keys, expected_stamps, rows)
        if fault == "answer lost":
            raise RetryableError("the sink's answer was lost")

    def _written(self, header: Any, keys: Any, stamps: Any, rows: Any) -> None:
        """Write, and tell the oracle; of one step, as of the steps that it consists of."""
        oracle = self._world.oracle
        super().multi_put(header, keys, stamps, rows)
        if self._opens_from is not None:
            self._world.writes += 1
            oracle.header_changed(self._index, self._opens_from, header)
        oracle.rows_written(self._index, keys, rows)
        if self._opens_from is not None:
            oracle.header_changed(self._index, header, self.read_header())

    def apply(self, header: Any, writer: str, value_type: ValueType, deltas: Any, *others: Any, **options: Any) -> None:
        """Merge deltas under the header, as a database does in one statement."""
        if self._world.shape.merges != "store":
            raise NotImplementedError
        fault = self._fault("merge rows", ("answer lost", "refused"))
        stamp, merged, before = header.stamp, {}, {}
        for each in deltas.to_pylist():
            key, delta = (each["key"],), each["total"]
            row = self.rows().get(key)
            if row is not None and row.stamp.txid == stamp.txid and value_type is ValueType.TRANSACTIONAL:
                continue
            if row is not None and row.stamp > stamp:
                raise StaleWriterError(f"{key} has stamp {row.stamp}, this writer {stamp}", row.stamp.epoch)
            base = None if row is None else row.prev if row.stamp.txid == stamp.txid else row.value
            merged[key] = Row(((base or (0,))[0] + delta,), stamp, base, writer)
            before[key] = row.stamp if row is not None else None
        self._written(header, list(merged), list(before.values()), list(merged.values()))
        if fault == "answer lost":
            raise RetryableError("the sink's answer was lost")

    def _fault(self, step: str, kinds: Sequence[str]) -> str | None:
        """The fault of a write. Raises ``RetryableError`` at once when the write is refused."""
        world = self._world
        fault = world.fault(step, kinds)
        if world.failing_commits:
            world.failing_commits -= 1
            fault = "refused"
        if fault == "refused":
            raise RetryableError("the sink did not take it")
        return fault

    def header(self) -> Header | None:
        return self._rows().header

    def rows(self) -> dict[tuple[Any, ...], Row]:
        return self._rows().rows


@lru_cache(4_096)
def _decoded(raw: bytes) -> Any:
    """What a document says, for those who only look: many ask for the same one."""
    return decode_document(raw, "a document")


class SimStore(CoordinationStore):
    """A ZooKeeper: versioned, atomic, with one session lock for the topology's leadership."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: dict[str, bytes] = {}
        self.written: dict[str, bytes] = {}  # like ``nodes``, but never corrupted: for the oracle
        self.version = 0
        self.epoch = 0
        self.life = 0  # rises with each restore: sessions from before it are unknown then
        self.incarnations = 0
        self.holder: SimLeadership | None = None
        self.waiting: list[Callable[[], None]] = []

    def get(self, path: str) -> bytes | None:
        return self.nodes.get(path)

    def children(self, path: str) -> list[str]:
        prefix = path + "/"
        return sorted({node[len(prefix) :].split("/", 1)[0] for node in self.nodes if node.startswith(prefix)})

    def is_led(self, path: str) -> bool:
        return self.holder is not None

    def apply(self, changes: Any) -> None:
        raise Violation("9: a write without a fence")

    def announce(self, path: str, data: bytes | None) -> None:
        raise Violation("9: a write without a fence")

    def lead(self, path: str, identity: str, timeout_s: float | None = None) -> SimLeadership | None:
        if self.holder is not None:
            return None
        self.epoch += 1
        self.version += 1
        self.nodes[FENCE] = encode_document({"epoch": self.epoch, "sequence": 0}, FENCE)
        self.holder = SimLeadership(self._world, self, self.epoch, self.version, identity)
        return self.holder

    def expire(self, leadership: SimLeadership) -> None:
        """End the session of a leader. The leader itself may learn of it last."""
        if self.holder is leadership:
            self.holder = None
            waiting, self.waiting = self.waiting, []
            for wake in waiting:
                self._world.soon(wake)

    def snapshot(self) -> Any:
        known = self._world.oracle
        nodes, written = dict(self.nodes), dict(self.written)
        return nodes, written, self.version, self.epoch, self._world.joined, dict(known.model), dict(known.positions)

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot. All sessions end; a client learns of it with its next request."""
        if snapshot[0] == self.nodes:
            return
        nodes, written, self.version, self.epoch, self._world.joined, model, positions = snapshot
        self.nodes, self.written = dict(nodes), dict(written)
        self.life += 1
        self._world.writes += 1
        self._world.zookeeper_restored = True
        self._world.oracle.zookeeper_went_back(model, positions)
        if self.holder is not None:
            self.expire(self.holder)

    def become_another(self) -> None:
        """Become the ZooKeeper of another topology of the same name,
        with as many transactions, of other records.
        """
        currtx = self.currtx()
        held = [each for each in SPOUTS if f"{TOPOLOGY}/user/{each}/{currtx - 1}" in self.written]
        before = self.plan(currtx - 1)
        if before is None or not any(meta["next"] for meta in before.values()):
            return
        if not self._world.backends and not self._world.kafka.markers:
            return  # no sink holds anything of the old life, so nothing could contradict the new one
        plan = {each: {"first": 0, "next": max(meta["next"] - 1, 0)} for each, meta in before.items()}
        documents = {
            INCARNATION: "another one",
            f"{TOPOLOGY}/meta": _decoded(self.written[f"{TOPOLOGY}/meta"]),
            f"{TOPOLOGY}/coordinator/currtx": currtx,
            f"{TOPOLOGY}/user/{held[-1]}/{currtx - 1}": {"digest": plan_digest(plan), "plan": plan},
        }
        self.epoch += 10
        fence = encode_document({"epoch": self.epoch, "sequence": 0}, FENCE)
        nodes = {FENCE: fence, **{path: encode_document(each, path) for path, each in documents.items()}}
        known = self._world.oracle
        self.restore((nodes, nodes, 0, self.epoch, self._world.joined, known.model, known.positions))
        self._world.oracle.must_stop = "ZooKeeper is that of another life"

    def close(self) -> None:
        pass

    def commit(self, changes: Sequence[Any], fence: bytes, version: int) -> None:
        """Apply a multi that checks the fence. There is no other way to write."""
        if not self.fence_holds(version):
            raise FenceMoved
        puts = [each for each in changes if isinstance(each, Put) and not each.path.startswith(UNMEASURED)]
        size = sum(len(each.path) + len(each.data) for each in puts)
        if self._world.shape.large and size > REQUEST_BYTES_MAX:
            raise Violation(f"a multi of {size} bytes, and ZooKeeper takes {REQUEST_BYTES_MAX}: {changes}"[:400])
        writer, _ = fence_of(fence, FENCE)
        before = self.currtx()
        for change in changes:
            for nodes in (self.nodes, self.written):
                if isinstance(change, Put) and change.path == INCARNATION:
                    self.incarnations += nodes is self.nodes  # nothing random: a seed is a schedule
                    nodes[change.path] = encode_document(f"incarnation {self.incarnations}", change.path)
                elif isinstance(change, Put):
                    nodes[change.path] = change.data
                else:
                    nodes.pop(change.path, None)
        self.nodes[FENCE] = fence
        self.version += 1
        self._world.writes += 1
        self._world.oracle.stored(writer, before)

    def fence_holds(self, version: int) -> bool:
        return version == self.version

    def currtx(self) -> int:
        raw = self.written.get(f"{TOPOLOGY}/coordinator/currtx")
        return 1 if raw is None else int(_decoded(raw))

    def incarnation(self) -> str:
        raw = self.written.get(INCARNATION)
        return "" if raw is None else str(_decoded(raw))

    def opened(self) -> dict[str, Any] | None:
        """What committers without a header were last opened for (C24)."""
        raw = self.written.get(f"{TOPOLOGY}/coordinator/open")
        return None if raw is None else _decoded(raw)

    def last_attempt(self, txid: int) -> int:
        """The last attempt at a transaction that is noted; 0 for none."""
        raw = self.written.get(f"{TOPOLOGY}/coordinator/attempts")
        return int((_decoded(raw) or {}).get(str(txid), 0)) if raw is not None else 0

    def plan(self, txid: int) -> dict[str, Any] | None:
        for spout in reversed(SPOUTS):
            raw = self.written.get(f"{TOPOLOGY}/user/{spout}/{txid}")
            if raw is not None:
                document = _decoded(raw)
                if not isinstance(document, dict):
                    raise Violation(f"7: {document!r} is stored as the plan of {txid}")
                return document["plan"]
        return None


class SimLeadership(FencedLeadership):
    """The real fence over the simulated store. The driver may die inside a call."""

    def __init__(self, world: World, store: SimStore, epoch: int, version: int, identity: str) -> None:
        super().__init__(TOPOLOGY, epoch, version)
        self._world = world
        self._store = store
        self.identity = identity
        self.noticed = False
        self._dead = False
        self._life = store.life

    @property
    def lost(self) -> bool:
        return self.noticed

    def _send(self, changes: Sequence[Any], fence: bytes, version: int) -> None:
        fault = self._world.fault("zookeeper multi", ("reply lost", "request lost", "crash before", "crash after"))
        if fault == "crash before":
            raise Crashed
        if self._store.life != self._life:
            self.noticed = True
        if fault == "request lost" or self.noticed:
            raise ReplyLost
        self._store.commit(changes, fence, version)
        if fault == "crash after":
            raise Crashed
        if fault == "reply lost":
            raise ReplyLost

    def _read_fence(self) -> bytes | None:
        return self._store.get(FENCE)

    def die(self) -> None:
        """The process is gone without a word: its session ends by itself."""
        self.noticed = self._dead = True

    def resign(self) -> None:
        self.noticed = True
        if not self._dead:
            self._store.expire(self)


@dataclass
class Oracle:
    """A short sequential fold over the records, and checks of what may never happen."""

    world: World
    model: dict[tuple[int, str], int | None] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    results: dict[tuple[int, int, int], list[list[tuple[str, int | None]]]] = field(default_factory=dict)
    #: The content of the first attempt of a txid; by plan, too, where it may change.
    firsts: dict[tuple[int, str], list[list[tuple[str, int | None]]]] = field(default_factory=dict)
    emitted: set[tuple[int, int]] = field(default_factory=set)
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    committed: int = 0
    reset_epoch: int = 0
    dead: set[tuple[str, int, int, int]] = field(default_factory=set)
    topics: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)
    committed_by: int | None = None  # the attempt that was committed last; None when it is not known
    must_stop: str = ""
    #: txid -> the epochs that opened its commit.
    opened_by: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    # --- what drivers do --------------------------------------------------------------------------

    def emitting(self, txid: int, attempt_id: int) -> None:
        if (txid, attempt_id) in self.emitted and not self.world.zookeeper_restored:
            raise Violation(f"8: attempt {txid}:{attempt_id} is emitted twice")
        self.emitted.add((txid, attempt_id))

    def processed(self, header: AttemptHeader, result: list[list[tuple[str, int | None]]]) -> None:
        if header.epoch < self.reset_epoch:
            return  # its leader does not know yet that the positions were reset, and will not commit
        txid, attempt_id = header.txid, header.attempt_id
        self.results[(header.epoch, txid, attempt_id)] = result
        self._check_document(header)
        if not self.world.shape.opaque and not self.world.shape.moody and not self.world.zookeeper_restored:
            # A batch with a refused value is planned again; it is checked when it is closed. When a
            # batch is too large, those after it are planned again, too, with other records.
            plan = header.plan_digest if self.world.shape.room else ""
            first = self.firsts.setdefault((txid, plan), result)
            if first != result and not self.world.shape.refuses:
                raise Violation(f"4: {txid}:{attempt_id} carries {result}, an attempt before it {first}")

    def _check_document(self, header: AttemptHeader) -> None:
        """C51: what an attempt reads, and leaves out, is in its document before it reads."""
        store = self.world.store
        if header.epoch != store.epoch or self.world.zookeeper_restored:
            return
        plan = store.plan(header.txid)
        if plan is None or plan_digest(plan) != header.plan_digest:
            raise Violation(f"C51: {header} reads another batch than {plan}, which is in its document")

    def _check_refused(self, txid: int, plan: dict[str, Any]) -> None:
        """C51: a batch leaves out the records whose values are refused, with reasons, and no
        other.
        """
        world = self.world
        for partition, meta in plan.items():
            for offset, (record,) in world.in_range(partition, meta):
                left_out = offset in meta.get(LEFT_OUT, ())
                may_stay = world.shape.moves and world.shape.refuses == "sink"
                if left_out is not world.is_refused(record) and (left_out or not may_stay):
                    raise Violation(f"C51: {txid} is closed with {partition}: {meta}, and {record} is the wrong one")
                if left_out and world.is_refused(record) and REASON not in meta.get(REFUSED, {}).get(str(offset), ""):
                    raise Violation(f"C51: {txid} leaves {record} out without its reason: {meta}")

    # --- what the store sees ----------------------------------------------------------------------

    def stored(self, writer: int, before: int) -> None:
        store = self.world.store
        if writer != store.epoch:
            raise Violation(f"9: epoch {writer} wrote, and {store.epoch} leads")
        currtx = store.currtx()
        if currtx not in (before, before + 1):
            raise Violation(f"2: currtx went from {before} to {currtx}")
        if (opened := store.opened()) is not None and opened["txid"] == currtx:
            self.opened_by[currtx].add(writer)
        if currtx > 1 and store.plan(currtx - 1) is None:
            raise Violation(f"7: currtx is {currtx}, and the plan of {currtx - 1} is gone")
        if currtx == before + 1:
            if self.must_stop:
                raise Violation(f"C2: {before} is closed, and {self.must_stop}")
            self._closed(before, writer)

    def sink_went_back(self, sink: int, header: Header) -> None:
        self.dead.clear()  # closed fences may be open again, until the next raise
        self.digests = {key: each for key, each in self.digests.items() if key[0] != sink}
        if header.open is not None:
            self.digests[(sink, header.open.txid)] = header.open.plan_digest

    def zookeeper_went_back(self, model: dict[tuple[int, str], int | None], positions: dict[str, int]) -> None:
        """Follow ZooKeeper back.

        Losing the close of one transaction is as if it had not been closed; losing more must stop
        the topology.
        """
        if not self.world.backends:
            # Trailing transactions of which every record was left out have written nothing
            # anywhere: losing them is as if they had not been.
            written = max((txid for (_, txid), records in self.topics.items() if records), default=0)
            self.committed = min(self.committed, max(written, self.world.store.currtx() - 1))
        lost = self.committed + 1 - self.world.store.currtx()
        self.reset_epoch = 0  # epochs begin below it again; leaders that did not know of the reset have no session
        if lost in (0, 1):
            self.model, self.positions = dict(model), dict(positions)
            self.committed -= lost
            self.committed_by = None
        else:
            self.must_stop = f"ZooKeeper has forgotten {lost} transactions"

    def _closed(self, txid: int, epoch: int) -> None:
        """A transaction was closed: apply its last attempt to the model, and compare."""
        world = self.world
        headers = {
            sink: backend.read_header()
            for sink, backend in enumerate(world.backends)
            if self.takes_part(world.names[sink])
        }
        for sink, header in headers.items():
            name = world.names[sink]
            if header.done == txid:
                continue
            if sink not in world.restored or sink in self.behind:
                raise Violation(f"6: {txid} is closed, and {name} is done with {header.done}")
            self.behind.add(sink)  # it went back after it was done; the next raise notices
        by_sink = {
            sink: each.open.attempt_id for sink, each in headers.items() if each.open is not None and each.done == txid
        }
        opened = world.store.opened()
        elsewhere = world.shape.headerless and opened is not None and opened["txid"] == txid
        last = max([*by_sink.values(), world.store.last_attempt(txid), *([opened["attempt_id"]] if elsewhere else [])])
        for sink, attempt_id in by_sink.items():
            if attempt_id < last and sink in world.restored:
                self.behind.add(sink)  # it went back to an attempt before that was done; the next raise notices
        attempts = {attempt_id for sink, attempt_id in by_sink.items() if sink not in self.behind}
        if elsewhere:
            attempts.add(opened["attempt_id"])
        if self.behind and not attempts:
            self.must_stop = "no sink holds the transaction before"  # nothing says which attempt it was
            self._tile(txid, world.store.plan(txid) or {})
            self.committed, self.committed_by = txid, None
            world.finished = world.finished or world.done()
            return
        if len(attempts) != 1:
            raise Violation(f"3: {txid} was committed by attempts {attempts}")
        plan = world.store.plan(txid)
        assert plan is not None
        self._tile(txid, plan)
        self._check_refused(txid, plan)
        (attempt_id,) = attempts
        result = self.results.get((epoch, txid, attempt_id))
        if result is None:
            raise Violation(f"3: {txid} is closed by attempt {attempt_id} of epoch {epoch}, which nobody has processed")
        self._apply((epoch, txid, attempt_id), plan, result)
        self.committed, self.committed_by = txid, attempt_id
        self.compare()
        for sink in headers.keys() - self.behind:
            world.closed_rows[sink] = (txid, dict(world.backends[sink].rows()))
        for committer in filter(self.takes_part, world.shape.headerless):
            held, wanted = sorted(self.topics.get((committer, txid), [])), sorted(world.rows(plan, committer))
            if held != wanted:
                raise Violation(f"1: {txid} is closed, and the topic of {committer} holds {held} of it, not {wanted}")
        if world.done():
            world.finished = True

    def _apply(self, attempt: tuple[int, int, int], plan: dict[str, Any], result: list[Any]) -> None:
        """Apply a closed transaction to the model. ``attempt``: its epoch, txid and attempt id.
        ``result``: the operations of each sink."""
        for sink, name in enumerate(self.world.names):
            for key, weight in result[sink] if self.takes_part(name) else ():
                self.model[(sink, key)] = applied(weight, self.model.get((sink, key)))

    def takes_part(self, committer: str) -> bool:
        """Whether transactions wait for a committer now; false before it has joined."""
        return self.world.joined or committer != self.world.shape.joins

    def _tile(self, txid: int, plan: dict[str, Any]) -> None:
        for partition, meta in plan.items():
            skipped = int(meta.get("skipped", 0))
            if meta["first"] - skipped != self.positions.get(partition, 0):
                raise Violation(
                    f"5: {txid} reads {partition} from {meta}, and it was at {self.positions.get(partition, 0)}"
                )
            self.positions[partition] = meta["next"]
        missing = [each for each in self.positions if each not in plan]
        if missing:
            raise Violation(f"C15: the plan of {txid} says nothing of {missing}")

    def positions_forgotten(self) -> None:
        self.positions = dict.fromkeys(self.positions, 0)
        self.reset_epoch = self.world.store.epoch
        self.results = {key: each for key, each in self.results.items() if key[1] <= self.committed}
        self.firsts = {key: each for key, each in self.firsts.items() if key[0] <= self.committed}

    # --- what the sinks see -----------------------------------------------------------------------

    def header_changed(self, sink: int, before: Header, after: Header) -> None:
        again = after.open is not None and after.open.txid == before.done
        if after.done < before.done - again or after.epoch < before.epoch:
            raise Violation(f"2: the header of {self.world.names[sink]} went from {before} to {after}")
        if after.open is not None and after.open != before.open and after.done >= after.open.txid:
            raise Violation(f"2: {self.world.names[sink]} is done with what {after.open} is about to write")
        currtx = self.world.store.currtx()
        taken_over = after == replace(before, epoch=after.epoch, incarnation=after.incarnation)
        # A leader that does not know yet that it was deposed still fences its own attempts, where a
        # sink went back to its epoch. The next raise of the one that leads notices.
        deposed = after.done == before.done and after.epoch < self.world.store.epoch
        if after.done > currtx and self.world.zookeeper_restored:
            self.must_stop = (
                self.must_stop or f"{self.world.names[sink]} is done with {after.done}, and {currtx} is next"
            )
        elif after.done not in (currtx - 1, currtx) and not (
            (taken_over or deposed) and (sink in self.world.restored or not self.takes_part(self.world.names[sink]))
        ):
            raise Violation(f"6: {self.world.names[sink]} is done with {after.done}, and {currtx} is next")
        if after.open is None:
            return
        if after.open.plan_digest != ROLLED_BACK:
            self.opened_by[after.open.txid].add(after.epoch)
        known = self.digests.get((sink, after.open.txid))
        if known not in (None, ROLLED_BACK, after.open.plan_digest) and after.open.plan_digest != ROLLED_BACK:
            raise Violation(
                f"3: {self.world.names[sink]} was opened for {after.open.txid} with plan {known}, now {after.open}"
            )
        self.digests[(sink, after.open.txid)] = after.open.plan_digest

    def is_behind(self, sink: int) -> bool:
        """Whether a sink has lost a closed transaction, or holds another attempt of it: the next
        raise of its header must stop the topology.
        """
        header = self.world.backends[sink].header()
        if sink not in self.world.restored or header is None:
            return False
        if header.done != self.committed or header.open is None or header.open.txid != self.committed:
            return header.done < self.committed
        if self.committed_by is None:  # it may be that no sink could tell
            return sink in self.behind
        return header.open.attempt_id != self.committed_by

    def may_stop(self, reason: str) -> bool:
        """Whether the reason of a stop names a store that went back and has lost something."""
        world = self.world
        if world.zookeeper_restored:
            known = (
                "ZooKeeper",
                "went back",
                "cannot be undone",
                "incarnation",
                "is not the one its state was written by",
            )
            return any(each in reason for each in known)
        plan = world.store.plan(world.store.currtx())
        for sink in world.restored:
            header = world.backends[sink].header()
            if header is None or world.backends[sink].location not in reason:
                continue
            opened = header.open is not None and header.open.txid == self.committed + 1
            other = header.incarnation != world.store.incarnation()
            if other or self.is_behind(sink) or (opened and header.open.plan_digest != plan_digest(plan or {})):  # type: ignore[union-attr]
                return True
        return False

    def rows_written(self, sink: int, keys: Sequence[tuple[Any, ...]], rows: Sequence[Row]) -> None:
        header = self.world.backends[sink].read_header()
        if header.open is None:
            raise Violation(f"C1: rows reached {self.world.names[sink]} before its header was raised")
        if (header.incarnation, header.epoch, header.open.txid, header.open.attempt_id) in self.dead:
            raise Violation(f"fence: {header.open} wrote to {self.world.names[sink]} after it was closed")
        for key, row in zip(keys, rows, strict=True):
            stamp = (row.stamp.txid, row.stamp.epoch, row.stamp.attempt_id)
            if stamp != (header.open.txid, header.epoch, header.open.attempt_id):
                raise Violation(f"9: {stamp} wrote {key} to {self.world.names[sink]}, which is open for {header.open}")
            if header.open.txid == self.committed + 1:
                before = self.value_before(sink, key)
                if row.prev != before:
                    raise Violation(f"10: {key} of {self.world.names[sink]} keeps prev {row.prev}, and it was {before}")
        if header.open.txid == self.committed:
            self.compare()

    # --- what Kafka sees --------------------------------------------------------------------------

    def sent(self, committer: str, marker: Marker, records: Sequence[Any]) -> None:
        """Check a kafka_txn that was committed, and note its records: it cannot be undone."""
        if marker.txid != self.committed + 1:
            raise Violation(f"C11: {marker} was written to Kafka, and {self.committed + 1} is next")
        held = self.topics.setdefault((committer, marker.txid), [])
        if twice := sorted({*held}.intersection(records)):
            raise Violation(
                f"1: records {twice} of txid {marker.txid} are in the topic twice ({committer}), now by {marker}"
            )
        held += records

    def probe_values(self) -> None:
        """Check the second line of defence behind the header:
        a row refuses a writer of an older txid.
        """
        for backend in self.world.backends:
            for key, row in backend.rows().items():
                for value in (TransactionalValue(row.stamp.txid, 0), OpaqueValue(row.stamp.txid, 0, 0)):
                    try:
                        value.update(row.stamp.txid - 1, 1)
                    except StaleWriterError:
                        continue
                    raise Violation(f"2: {key} of txid {row.stamp.txid} takes a value of the txid below")

    def compare(self) -> None:
        """Check invariant 1 for every key of every sink."""
        for sink, backend in enumerate(self.world.backends):
            if not self.is_behind(sink):
                self._compare_sink(sink, backend)

    def value_before(self, sink: int, key: tuple[Any, ...]) -> Any:
        """What a row of a sink held after the last closed transaction."""
        held = self.model.get((sink, key[0]))
        return None if held is None else (held,)

    def _compare_sink(self, sink: int, backend: SimBackend) -> None:
        rows = backend.rows()
        for key in {each for other, each in self.model if other == sink} | {key[0] for key in rows}:
            row = rows.get((key,))
            found = row.value[0] if row is not None and row.value is not None else None
            if found != self.model.get((sink, key)):
                raise Violation(
                    f"1: after txid {self.committed} {self.world.names[sink]}[{key}] is {_bits(found)}, not "
                    f"{_bits(self.model.get((sink, key)))}"
                )


def applied(weight: int | None, old: int | None) -> int | None:
    """The value after a record; None: there is none, or it was deleted."""
    return (old or 0) + weight if weight else weight


def _bits(value: int | None) -> list[int] | None:
    """The records that a value counts; a record that is counted twice shows as the next one."""
    return None if value is None else [each for each in range(value.bit_length()) if value >> each & 1]
