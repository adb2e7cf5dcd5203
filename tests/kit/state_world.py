"""A topology with state in one process under random trouble, all of it from a seed.

The topology: words (two spout tasks), a bolt without state that passes each on, with its length on
a stream of its own, and two bolts with state in a chain, which count them.

Beside the troubles of any core topology (``tests.kit.trouble``): the store of the states fails
before or after a step; the write of the checkpoints' record fails, before or after it took place; a
source does not say where it stands; the driver dies, and another takes over while rounds of the
first are still under way; a driver that has lost its lead goes on until it notices.

Between two drivers the topology changes: it gets another spout, another bolt with state, or another
number of tasks; its state is forgotten by explicit wish, or put back to a snapshot that was taken
between two other drivers. Logs are deleted and made again at any time.

With windows, the words are gathered by processing time as well. A bolt without state holds some of
the results, and lets them go at its ticks, or fails them; a bolt with state keeps them. The clocks
of hosts differ, and jump forwards and backwards. Words are also gathered in windows by their offset
in their log, of which a bolt with state keeps all firings; in every second world they fire though
nothing comes any more.

Some words cannot be processed (``POISON``), each in a way of its own. A spout gives them up after
its retries, and a bolt with state keeps their dead letters.

The oracle. Exactly-once: the committed counts are a fold over the words of each log, from the first
position in the record to the last one; those of a bolt that was added are the same fold, from where
it was added. The windows by processing time together are the same fold, and each fired once, after
its end had passed. What windows by offset have fired, what was late for them, and what they still
hold is the same fold, too, and they hold nothing that was due. Words that cannot be processed are
in no state, and each has one dead letter; no other word has one. At-least-once: no word counts less
often than it came.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from framework import (
    BaseBasicBolt,
    BaseRichBolt,
    BaseRichSpout,
    BaseStatefulBolt,
    Config,
    CoreTopology,
    Fields,
    ReplayableSpout,
    TopologyBuilder,
    Tuple,
)
from framework.coordination import MemoryStore
from framework.coordination.transactional_state import TransactionalState
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.checkpoints import Checkpoints
from framework.core.committed_state_reader import TopologyState
from framework.core.leader_loop import (
    CHECKPOINT,
    forget_state,
    read_record,
    restore_state,
    retries_of,
    stateful_components,
)
from framework.core.rescaling import Entry, Namespaces, namespace_of, rescaled
from framework.durations import seconds_to_micros
from framework.errors import FailedException, RetryableError, StaleWriterError
from framework.operators.watermarks import NEVER
from framework.state import BaseWindowedBolt, MsgpackSerializer, TimeWindow, Window
from framework.state.checkpointed_key_value_state import Changes, LayeredState
from framework.state.memory import MemoryBytes
from framework.topology import DEAD_LETTER_STREAM, State, StateProvider
from tests.kit.core_parts import Clock, Stepped
from tests.kit.spans import Fired, KeepFired, Spans
from tests.kit.state_parts import Count, Impatient, Source, forget_journal
from tests.kit.trouble import SLOW_S, TROUBLES, Chances, TroubledRounds

STATE_TROUBLES = (
    "store fails before",
    "store fails after",
    "record fails before",
    "record fails after",
    "driver dies",
    "driver is deposed",
    "source is away",
)
ALL_TROUBLES = (*TROUBLES, *STATE_TROUBLES)
#: Troubles in which words time out though nothing is wrong with them.
LOSSES = ("lost output", "late records", "doubled ledger", "flipped bit")
#: A trouble for topologies with windows.
CLOCK_JUMPS = "clock jumps"
#: What may change, only where state is exactly-once.
CHANGES = ("spout added", "bolt added", "tasks changed", "state forgotten", "state restored", "log made again")
#: Words of a world, and how many rounds have trouble. Checkpoints come as often as rounds. What
#: goes wrong concerns one checkpoint, or a few: so most worlds are short.
SIZES = [*[(12, 15)] * 5, *[(24, 30)] * 4, (40, 60), (80, 120)]
ALPHABET = "abcdefg"
#: Words for each of which something fails: "A" and "B" in a bolt without state, which dies of "A";
#: the values made of "C" do not fit their stream; a bolt with state dies of "D" and of "E".
POISON = "ABCDE"
#: How often a spout tries one again.
RETRIES = 2
LENGTH_S = 3.0
#: Of the windows by offset.
SPAN, LAG, LATENESS = 3, 2, 2
#: In every second world time goes on for them when nothing has come for so many seconds.
IDLE_S = 4.0
#: How far a clock may be wrong.
SKEW_S = 20.0


@dataclass
class NamedLog:
    """A partition of a topic.

    ``visible``: how many of its words are written so far. ``life``: how often it was made again.
    """

    words: list[str]
    visible: int = 0
    life: int = 0

    @property
    def written(self) -> bool:
        return self.visible >= len(self.words)


COMPONENTS = ("count", "again", "added", "gather", "keeps", "spans", "fired", "letters")


@dataclass(frozen=True)
class Saved:
    """A snapshot. ``recorded``, ``added``: those of the world at that time."""

    document: Any
    entries: list[tuple[str, Entry]]
    recorded: dict[tuple[str, int, int], tuple[int, int]]
    added: Counter[str] | None


@dataclass
class StateWorld(Chances):
    """What is outside of the topology.

    ``stores``: namespace -> what survives every process. ``epoch``: of the leader. ``logs``: spout
    -> its partitions. ``lives``: (spout, partition, life) -> all its words. ``recorded``: (spout,
    partition, life) -> the first and the last position in the record. ``added``: the fold when the
    bolt that is added took part in its first checkpoint. ``group``: (spout, partition) -> the
    position that the spout published, as (life, offset). ``poison``: the share of words that cannot
    be processed. ``misfits``: the words of which a value did not fit.
    """

    stores: dict[str, MemoryBytes] = field(default_factory=dict)
    logs: dict[str, list[NamedLog]] = field(default_factory=dict)
    lives: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)
    recorded: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    added: Counter[str] | None = None
    group: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    record: CheckpointRecord = field(default_factory=CheckpointRecord)
    epoch: int = 0
    poison: float = 0.0
    steps: int = 0
    crash: tuple[int, str] | None = None
    crashed: str | None = None
    clock: Clock = field(default_factory=Clock)
    skews: dict[int, float] = field(default_factory=dict)
    misfits: set[tuple[str, int]] = field(default_factory=set)

    def wall(self, host: int) -> float:
        """What a host's clock says: far from 0, and different from other hosts' clocks."""
        if host not in self.skews or self.strikes(CLOCK_JUMPS, 0.002):
            self.skews[host] = self.chance.uniform(-SKEW_S, SKEW_S) if CLOCK_JUMPS in self.troubles else 0.0
        return 1_000 + self.clock.now + self.skews[host]

    @property
    def goes_on(self) -> bool:
        """Whether time goes on for windows by offset while nothing comes."""
        return self.seed % 2 == 1

    def slow(self) -> None:
        """Now and then, let a bolt take longer for a tuple than it has in a round."""
        if self.strikes("slow bolt", 0.5):
            self.clock.now += SLOW_S

    def does_not_fit(self, word: str, number: int) -> bool:
        """Whether a value of this word does not fit its stream now. Where a spout gives up words
        that fail too often, that happens to each word once: so it gives up no word by chance."""
        if (self.poison and (word, number) in self.misfits) or not self.strikes("value does not fit", 0.01):
            return False
        self.misfits.add((word, number))
        return True

    def add_log(self, spout: str, partition: int, log: NamedLog) -> None:
        its = self.logs.setdefault(spout, [])
        its[partition : partition + 1] = [log]
        self.lives[(spout, partition, log.life)] = log.words

    def note_positions(self, record: CheckpointRecord) -> None:
        """Note the positions of a prepared checkpoint: it will be committed,
        so the states hold the input up to there.
        """
        if record.prepared and self.added is None and "added" in record.pending_layouts:
            self.added = self.fold()
        for spout, told in (record.pending_positions or {}).items():
            for partition, (life, offset) in ((int(p), at) for each in told for p, at in each.items()):
                place = spout, partition, life
                # A log that was made again, and any log of "words", is read from its beginning,
                # whatever the group says.
                first = 0 if life or spout == "words" else offset
                self.recorded[place] = self.recorded.get(place, (first, 0))[0], offset

    def fold(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for place, (first, end) in self.recorded.items():
            found.update(each for each in self.lives[place][first:end] if each not in POISON)
        return found

    def poisoned(self) -> Counter[str]:
        """The words up to the positions in the record that cannot be processed, by their places."""
        return Counter(
            place_of(*place, offset)
            for place, (first, end) in self.recorded.items()
            for offset in range(first, end)
            if self.lives[place][offset] in POISON
        )

    def committed(self, topology_id: str) -> dict[str, dict[Any, Any]]:
        """The committed state of each component, all tasks together."""
        found: dict[str, dict[Any, Any]] = {each: {} for each in COMPONENTS}
        for component_id, layout in self.record.layouts.items():
            for task in range(layout.tasks):
                store = self.stores[namespace_of(topology_id, component_id, layout.number, task)]
                assert store.txid() == self.record.txid
                kept = dict(LayeredState(store, MsgpackSerializer(), MsgpackSerializer()).items())
                if component_id == "spans":
                    check_due(kept, (layout.tasks, task))
                if component_id in ("gather", "spans"):
                    kept = {key: value for key, value in kept.items() if key[0]}
                assert not set(kept) & set(found[component_id]), "two tasks have the same key"
                found[component_id].update(kept)
        return found

    def all_read(self) -> bool:
        return all(
            self.recorded.get((spout, partition, log.life), (0, 0))[1] == len(log.words)
            for spout, its in self.logs.items()
            for partition, log in enumerate(its)
        )

    def trouble(self, what: str, action: Callable[[], Any], probability: float) -> Any:
        """Run a step of the store or of the record.

        The step that ``crash`` names goes wrong as it says; others by chance.
        """
        self.steps += 1
        how = self.crash[1] if self.crash is not None and self.crash[0] == self.steps else None
        if how is not None:
            self.crashed = what
        if how == "fails before":
            raise RetryableError(f"the {what} is away")
        if how == "driver dies before":
            raise DriverDies
        if how is not None:
            action()
            raise DriverDies if how == "driver dies after" else RetryableError(f"the answer of the {what} is lost")
        if self.strikes(f"{what} fails before", probability):
            raise RetryableError(f"the {what} is away")
        result = action()
        if self.strikes(f"{what} fails after", probability):
            raise RetryableError(f"the answer of the {what} is lost")
        return result


def place_of(spout: str, partition: int, life: int, offset: int) -> str:
    return f"{spout}/{partition}/{life}/{offset}"


def check_due(kept: Mapping[Any, Any], place: tuple[int, int]) -> None:
    """Check that a task holds no window that was due and has not fired. ``kept``: its state."""
    reached = kept.get(((), "r", *place), NEVER)
    for key, what, *more in kept:
        if what == "p" and (key, "f", *more) not in kept:
            end = more[0] + seconds_to_micros(SPAN)
            assert end > reached, f"window {key, more} was due, and has not fired"


def open_spans(kept: Mapping[Any, Any]) -> Counter[str]:
    """The words in windows that have not fired yet."""
    found: Counter[str] = Counter()
    for (key, what, *more), value in kept.items():
        if what == "p" and (key, "f", *more) not in kept:
            found[key[0]] += value
    return found


class DriverDies(BaseException):
    """The driver dies, and its task workers with it, in the middle of a step."""


#: How a step may go wrong.
CRASHES = ("fails before", "fails after", "driver dies before", "driver dies after")
_worlds: dict[str, StateWorld] = {}


class FailingStore:
    """A ``CommittedStore`` of a world."""

    def __init__(self, world: StateWorld, store: MemoryBytes) -> None:
        self._world, self._store = world, store

    location = "a store of a world"

    def txid(self) -> int:
        return self._world.trouble("store", self._store.txid, 0.005)  # type: ignore[no-any-return]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._world.trouble("store", lambda: self._store.get(keys), 0.0005)  # type: ignore[no-any-return]

    def count(self) -> int:
        return self._world.trouble("store", self._store.count, 0.005)  # type: ignore[no-any-return]

    def scan(self) -> Any:
        return self._world.trouble("store", self._store.scan, 0.005)

    def part(self, cursor: Any, most: int) -> Any:
        return self._world.trouble("store", lambda: self._store.part(cursor, most), 0.005)

    frozen = True

    def snapshot(self) -> Any:
        return self._world.trouble("store", self._store.snapshot, 0.005)

    def prepare(self, txid: int, changes: Changes) -> None:
        self._world.trouble("store", lambda: self._store.prepare(txid, changes), 0.02)

    def commit(self, txid: int) -> None:
        self._world.trouble("store", lambda: self._store.commit(txid), 0.02)

    def discard(self, upto: int | None) -> None:
        self._world.trouble("store", lambda: self._store.discard(upto), 0.02)

    def write(self, changes: Changes, txid: int | None) -> None:
        """In two steps, as a store that is far away."""
        first = dict(itertools.islice(changes.items(), len(changes) // 2))
        self._world.trouble("store", lambda: self._store.write(first, None), 0.02)
        self._world.trouble("store", lambda: self._store.write(changes, txid), 0.02)

    def close(self) -> None: ...


class Splits(BaseBasicBolt):
    """Passes words on.

    Now and then a value does not fit one of its two streams. It emits a last word in ``cleanup``.
    """

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any, batch_id: Any) -> None:
        self.world, self.collector = _worlds[conf["world"]], collector

    def execute(self, tup: Tuple, collector: Any) -> None:
        self.world.slow()
        if tup["word"] == "A":
            raise ValueError("A")
        if tup["word"] == "B":
            raise FailedException("B")
        number = tup["number"] if "number" in tup.fields else 0
        wrong = tup["word"] == "C" or self.world.does_not_fit(tup["word"], number)
        collector.emit(["none" if wrong else len(tup["word"])], stream="lengths")
        collector.emit([tup["word"], number])

    def cleanup(self) -> None:
        self.collector.emit([ALPHABET[0], 0])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, number=int))
        declarer.declare(Fields(length=int), "lengths")


class Counts(Count):
    """Counts words. ``dies_of``: a word that cannot be counted."""

    def __init__(self, key: str, dies_of: str = "") -> None:
        super().__init__(key)
        self.dies_of = dies_of

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        super().prepare(conf, context, collector)
        self.world = _worlds[conf["world"]]

    def execute(self, tup: Tuple) -> None:
        self.world.slow()
        super().execute(tup)
        if tup["word"] == self.dies_of:
            raise ValueError(self.dies_of)


class Letters(Counts):
    """Counts the dead letters of each place."""

    def declare_output_fields(self, declarer: Any) -> None:
        """Nothing."""

    def execute(self, tup: Tuple) -> None:
        self.counts.put(tup["word"], (self.counts.get(tup["word"]) or 0) + 1)
        self.collector.ack(tup)


class Lengths(BaseBasicBolt):
    def execute(self, tup: Tuple, collector: Any) -> None:
        """Nothing."""


class IdleSpans(Spans):
    """Time goes on for it when nothing has come for a while."""

    def __init__(self, key: str) -> None:
        super().__init__(SPAN, LAG, LATENESS, idle_s=IDLE_S)
        self.world_key = key

    def elapsed(self) -> float:
        return _worlds[self.world_key].clock.now


WINDOW = Fields(word=str, start=float, end=float, at=float, count=int)


class Gathers(BaseWindowedBolt):
    """Counts words by processing time."""

    def __init__(self, key: str) -> None:
        super().__init__(TimeWindow(LENGTH_S), key=["word"])
        self.world_key = key

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        self.host = context.task_index

    def now(self) -> float:
        return _worlds[self.world_key].wall(self.host)

    def execute_window(self, window: Window, collector: Any) -> None:
        collector.emit([*window.key, window.start, window.end, window.watermark, len(window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(WINDOW)


class Holds(BaseRichBolt):
    """Passes windows on, some of them later, and fails some."""

    tick_s = 2.0

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.world, self.collector = _worlds[conf["world"]], collector
        self.held: list[Tuple] = []

    def execute(self, tup: Tuple) -> None:
        if not tup.is_tick:
            self.held.append(tup)
        if tup.is_tick or self.world.chance.random() < 0.5:
            held, self.held = self.held, []
            for each in held:
                self.let_go(each)

    def let_go(self, tup: Tuple) -> None:
        if self.world.strikes("failed tuple", 0.02):
            self.collector.fail(tup)
            return
        wrong = self.world.strikes("value does not fit", 0.01)
        self.collector.emit(["none" if wrong else each for each in tup.values], anchors=tup)
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(WINDOW)


class Keeps(BaseStatefulBolt):
    """Keeps every window that comes."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.state = state

    def execute(self, tup: Tuple) -> None:
        key = tup["word"], tup["start"]
        self.state.put(key, [*(self.state.get(key) or []), [tup["end"], tup["at"], tup["count"]]])
        self.collector.ack(tup)

    def grouping_key(self, key: Any) -> Sequence[Any]:
        return [key[0]]


def chained(
    name: str,
    spouts: Mapping[str, tuple[BaseRichSpout, int]],
    tasks: int,
    *,
    others: int = 2,
    windows: bool = False,
    added: bool = False,
) -> CoreTopology:
    """Words of ``spouts`` (id -> spout, parallelism), split, counted, counted again and,
    if asked, gathered in windows, or counted once more by the bolt that is ``added``. ``tasks``: of
    the bolts whose number of tasks may change; ``others``: of the others.
    """
    builder = TopologyBuilder(name)
    split = builder.set_bolt("split", Splits(), others)
    for spout_id, (spout, parallelism) in spouts.items():
        builder.set_spout(spout_id, spout, parallelism)
        split.shuffle_grouping(spout_id)
    named = [spout_id for spout_id, (spout, _) in spouts.items() if isinstance(spout, NamedSpout)]
    if named:
        letters = builder.set_bolt("letters", Letters(name), others)
        for spout_id in named:
            letters.fields_grouping(spout_id, Fields("word"), DEAD_LETTER_STREAM)
    builder.set_bolt("lengths", Lengths()).shuffle_grouping("split", "lengths")
    builder.set_bolt("count", Counts(name, "D"), tasks).fields_grouping("split", Fields("word"))
    builder.set_bolt("again", Counts(name, "E"), others).fields_grouping("count", Fields("word"))
    if added:
        builder.set_bolt("added", Counts(name), tasks).fields_grouping("again", Fields("word"))
    if windows:
        spans = IdleSpans(name) if _worlds[name].goes_on else Spans(SPAN, LAG, LATENESS)
        builder.set_bolt("spans", spans, tasks).fields_grouping("split", Fields("word"))
        fired = builder.set_bolt("fired", KeepFired(SPAN), others).fields_grouping("spans", Fields("word"))
        fired.fields_grouping("spans", Fields("word"), "late")
        builder.set_bolt("gather", Gathers(name), tasks).fields_grouping("split", Fields("word"))
        builder.set_bolt("holds", Holds(), others).shuffle_grouping("gather")
        builder.set_bolt("keeps", Keeps(), others).fields_grouping("holds", Fields("word"))
    return builder.build()


class WorldProvider(StateProvider):
    def new_state(self, namespace: str, conf: Mapping[str, Any], context: Any) -> State:
        world = world_of(conf)
        store = world.stores.setdefault(namespace, MemoryBytes())
        return LayeredState(FailingStore(world, store), MsgpackSerializer(), MsgpackSerializer())

    def drop(self, namespace: str, conf: Mapping[str, Any]) -> None:
        world_of(conf).stores.pop(namespace, None)

    def exists(self, namespace: str, conf: Mapping[str, Any]) -> bool:
        return namespace in world_of(conf).stores


def world_of(conf: Mapping[str, Any]) -> StateWorld:
    """The world of a run, or of a command."""
    return _worlds[conf.get("world") or conf["app.world"]]


class NamedSpout(ReplayableSpout):
    """Reads the logs of a world by name, as a Kafka consumer does.

    After a log was made again, it goes on at the offset of the old one, until it notices. Its group
    is never ahead of what is committed. ``latest``: a first start is at the end.
    """

    def __init__(self, key: str, *, latest: bool = False) -> None:
        self.key, self.latest = key, latest

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.world, self.collector, self.name = _worlds[self.key], collector, context.component_id
        self.mine = range(context.task_index, len(self.world.logs[self.name]), context.task_count)
        self.at: dict[int, tuple[int, int]] = {}
        self.anew = False

    def begin_anew(self) -> None:
        self.anew = True

    def place(self) -> None:
        """Choose a position for each partition that nobody has given one."""
        for partition in self.mine:
            if partition not in self.at:
                log = self.world.logs[self.name][partition]
                start = log.life, log.visible if self.latest and not log.life else 0
                known = None if self.anew else self.world.group.get((self.name, partition))
                self.at[partition] = known if known is not None and known[0] == log.life else start

    @property
    def retries_max(self) -> int | None:
        return RETRIES if _worlds[self.key].poison else None

    def give_up(self, message_id: Any) -> None:
        self.collector.emit([place_of(self.name, *message_id)], stream=DEAD_LETTER_STREAM)

    def confirm(self) -> None:
        for partition, (life, _) in self.at.items():
            if self.world.logs[self.name][partition].life != life:
                raise FailedException(f"log {partition} of {self.name} was made again")

    def next_tuple(self) -> None:
        self.place()
        if self.world.chance.random() < 0.1:
            self.confirm()
        for partition, (life, offset) in self.at.items():
            log = self.world.logs[self.name][partition]
            if offset < log.visible:
                self.at[partition] = life, offset + 1
                self.collector.emit([log.words[offset], offset], message_id=(partition, life, offset))
                break

    def caught_up(self) -> bool:
        logs = self.world.logs[self.name]
        return len(self.at) == len(self.mine) and all(
            at == (logs[p].life, len(logs[p].words)) and logs[p].written for p, at in self.at.items()
        )

    def position(self) -> Any:
        if self.world.strikes("source is away", 0.05):
            raise RetryableError("the source does not answer")
        self.place()
        self.confirm()
        return {str(partition): list(at) for partition, at in self.at.items()}

    def seek(self, positions: Sequence[Any]) -> None:
        for partition, (life, offset) in ((int(p), at) for each in positions for p, at in each.items()):
            if partition in self.mine:
                current = self.world.logs[self.name][partition].life
                self.at[partition] = (life, offset) if life == current else (current, 0)

    def committed(self, position: Any) -> None:
        self.world.group.update({(self.name, int(partition)): tuple(at) for partition, at in position.items()})

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, number=int))
        declarer.declare(Fields(word=str), DEAD_LETTER_STREAM)


class Drives:
    """One driver, and the task worker of its tasks.

    The constructor raises what the driver's first steps raise.
    """

    def __init__(self, name: str, world: StateWorld, topology: CoreTopology, exact: bool) -> None:
        self.world = world
        world.epoch += 1
        self.epoch = world.epoch
        self.dead = False
        conf = {"world": name, "topology.state.provider": f"{__name__}.WorldProvider"}
        components = stateful_components(topology)
        record = rescaled(Namespaces(name, WorldProvider(), conf), components, world.record, self.save)
        self.stepped = Stepped(topology, ackers=2, pending=8, attempts=10**6, conf=conf)
        self.stepped.clock.now = world.clock.now
        world.clock = self.stepped.clock
        self.checkpoints = self.stepped.driver._checkpoints = Checkpoints(
            record,
            {each.id: each.parallelism for each in components.values()},
            {each.id: each.parallelism for each in topology.spouts},
            exact=exact,
            durable=True,
            interval_s=1.0,
            attempts_max=10**6,
            save=self.save,
            retries=retries_of(topology),
        )
        self.stepped.driver._stopping = Impatient()
        self.rounds = TroubledRounds(world, self.stepped)

    def save(self, record: CheckpointRecord) -> None:
        if self.epoch != self.world.epoch:
            raise StaleWriterError("another driver leads", self.world.epoch)

        def write() -> None:
            self.world.record = CheckpointRecord.of(record.document(), "the record")
            self.world.note_positions(record)

        self.world.trouble("record", write, 0.02)

    def go_on(self) -> bool:
        """Run a round.

        False when the driver has stepped down or died; after a step-down, rounds under way go on
        without it.
        """
        self.rounds.pass_time(self.world.chance.choice([0.0, 0.3, 0.7, 5.0]))
        try:
            self.rounds.go_on()
        except (StaleWriterError, RetryableError):
            self.dead = True
        except DriverDies:
            self.dead, self.rounds._walks = True, []
        return not self.dead

    def haunts(self) -> bool:
        """Go on after another driver has begun. False when nothing is left to do."""
        return self.rounds.wander() if self.dead else self.go_on() or True


class Plans:
    """The topology of a world, as it is now. ``changes``: what may change."""

    def __init__(
        self,
        name: str,
        world: StateWorld,
        *,
        words: int,
        exact: bool,
        changes: Sequence[str],
        windows: bool,
        tasks: int,
    ) -> None:
        self.name, self.world, self.words, self.exact, self.changes = name, world, words, exact, changes
        self.windows, self.added = windows, False
        self.before: Counter[str] = Counter()  # the fold when the bolt was added
        self.saved: Saved | None = None
        self.spouts, self.tasks, self.others = {"words": tasks}, tasks, tasks
        self.source: list[str] = []
        logs = [self.some_words() for _ in range(2)]
        if exact:
            for partition, each in enumerate(logs):
                world.add_log("words", partition, NamedLog(each, 0 if changes or windows else len(each)))
        else:
            self.source = list(itertools.chain(*logs))

    def some_words(self) -> list[str]:
        chance = self.world.chance
        return [
            chance.choice(POISON if self.world.poison and chance.random() < self.world.poison else ALPHABET)
            for _ in range(self.words // 2)
        ]

    def topology(self) -> CoreTopology:
        named: dict[str, tuple[BaseRichSpout, int]] = {"words": (Source(self.name, self.source), self.others)}
        if self.exact:
            named = {
                each: (NamedSpout(self.name, latest=each != "words"), tasks) for each, tasks in self.spouts.items()
            }
        return chained(self.name, named, self.tasks, others=self.others, windows=self.windows, added=self.added)

    def next_driver(self) -> Drives | None:
        """Change what may change, and start a driver. None when it dies in its first steps."""
        if self.happens("spout added", 0.5) and len(self.spouts) < 3:
            added = f"more{len(self.spouts)}"
            self.spouts[added] = 1
            log = NamedLog(self.some_words())
            self.world.add_log(added, 0, log)
        if self.happens("tasks changed", 0.5):
            self.tasks = self.world.chance.choice([1, 2, 3])
        if not self.added and self.happens("bolt added", 0.5):
            self.added, self.before = True, self.world.fold()
        self.world.skews.clear()
        try:
            if self.happens("state forgotten", 0.1):
                self.forget()
            if "state restored" in self.changes:
                if self.saved is not None and self.happens("state restored", 0.4):
                    self.restore(self.saved)
                elif self.world.chance.random() < 0.5:
                    self.saved = self.save() or self.saved
            return Drives(self.name, self.world, self.topology(), self.exact)
        except (RetryableError, DriverDies):
            return None

    @contextmanager
    def command(self) -> Iterator[tuple[Config, MemoryStore]]:
        """What a command has while nothing runs: the configuration, and the record in a store.
        The world has the record again when the command ends, or dies.
        """
        config = Config.of({"app.world": self.name, "topology.state.provider": f"{__name__}.WorldProvider"})
        store = MemoryStore()
        state = TransactionalState(store, self.name)
        state.set_data(CHECKPOINT, self.world.record.document())
        self.world.epoch += 1
        try:
            yield config, store
        finally:
            record = read_record(store, self.name)
            assert record is not None
            self.world.record = record

    def forget(self) -> None:
        with self.command() as (config, store):
            forget_state(self.topology(), config, store)
            self.world.recorded.clear()
            self.world.added = None

    def save(self) -> Saved | None:
        """Take a snapshot; None when there is no checkpoint, or one is being committed."""
        record = self.world.record
        if record.prepared or not record.txid:
            return None
        with self.command() as (config, store), TopologyState(self.topology(), config, store) as state:
            entries = [(name, entry) for name in state.components for entry in state.entries(name)]
        return Saved(record.document(), entries, dict(self.world.recorded), self.world.added)

    def restore(self, saved: Saved) -> None:
        with self.command() as (config, store):
            restore_state(
                self.topology(),
                config,
                store,
                document=saved.document,
                entries=lambda: saved.entries,
                where="the snapshot",
            )
            self.world.recorded = dict(saved.recorded)
            self.world.added = saved.added

    def go_on(self) -> None:
        """What happens to the logs while time goes by."""
        for spout, its in self.world.logs.items():
            for partition, log in enumerate(its):
                log.visible = min(log.visible + self.world.chance.randrange(3), len(log.words))
                if self.happens("log made again", 0.005):
                    words = self.some_words()
                    self.world.add_log(spout, partition, NamedLog(words, log.visible // 2, log.life + 1))

    def happens(self, change: str, probability: float) -> bool:
        return change in self.changes and self.world.strikes(change, probability)


def simulate(
    seed: int,
    *,
    exact: bool,
    words: int = 120,
    troubles: Sequence[str] = ALL_TROUBLES,
    changes: Sequence[str] = (),
    crash: tuple[int, str] | None = None,
    windows: bool = False,
    rounds: int = 400,
    tasks: int = 2,
    poison: float = 0.0,
) -> StateWorld:
    """Run one world to its end: trouble for ``rounds`` rounds, then none.

    ``changes``: only where state is exactly-once. ``tasks``: of each component; where it is one,
    components are fused. ``poison``: the share of words that cannot be processed. Raises
    ``AssertionError`` when the counts are wrong, or when the world does not come to an end.
    """
    name = uuid.uuid4().hex
    world = _worlds[name] = StateWorld(seed, frozenset((*troubles, *changes)), crash=crash, poison=poison)
    plans = Plans(name, world, words=words, exact=exact, changes=changes, windows=windows, tasks=tasks)
    drives: Drives | None = plans.next_driver()
    zombies: list[Drives] = []
    try:
        for number in itertools.count():
            assert number < 2_000, f"seed {seed}: it does not come to an end: {world.recorded} of {world.logs}"
            if number == rounds:
                world.troubles = frozenset()
            plans.go_on()
            zombies = [each for each in zombies if world.chance.random() < 0.8 and each.haunts()]
            if drives is None:
                drives = plans.next_driver()
                continue
            succeeded = world.strikes("driver is deposed", 0.02)
            if world.strikes("driver dies", 0.06 if changes else 0.02):  # changes come with another driver
                succeeded = drives.dead = True
            elif not succeeded:
                succeeded = not drives.go_on()
            if succeeded:
                zombies.append(drives)
                drives = plans.next_driver()
                continue
            driver = drives.stepped.driver
            assert driver.failure is None, driver.failure
            if not drives.rounds._walks and driver._idle and not zombies and not drives.checkpoints.recovering:
                found = world.committed(name)
                opened = found["gather"] or (world.goes_on and open_spans(found["spans"]))
                if not exact or (world.all_read() and not opened):  # all is read, and no window will fire
                    break
        expected = world.fold() if exact else Counter(plans.source)
        letters = Counter(found["letters"])
        assert letters == world.poisoned(), f"seed {seed}: dead letters {letters} instead of {world.poisoned()}"
        if plans.added and "added" not in world.record.layouts:  # nothing has come since: there was no checkpoint
            assert expected == plans.before, f"seed {seed}: no checkpoint has the bolt that was added"
        elif plans.added:
            since, found_since = expected - (world.added or Counter()), Counter(found["added"])
            assert found_since == since, f"seed {seed}: the bolt that was added has {found_since} instead of {since}"
        for component_id in ("count", "again"):
            counted = Counter(found[component_id])
            if exact:
                assert counted == expected, f"seed {seed}, {component_id}: {counted} instead of {expected}"
            else:
                lost = [word for word, count in expected.items() if counted[word] < count]
                assert not lost, f"seed {seed}, {component_id}: words were lost"
        if windows and exact:
            fired: Counter[str] = Counter()
            for (word, start), told in found["keeps"].items():
                assert len(told) == 1, f"seed {seed}: window {word, start} has fired {len(told)} times"
                ((end, at, count),) = told
                assert start + LENGTH_S == end <= at, f"seed {seed}: window {word, start} has fired at {at}"
                fired[word] += count
            assert fired == expected, f"seed {seed}: {fired} in windows instead of {expected}"
            spans = open_spans(found["spans"])
            for (word, start), values in found["fired"].items():
                assert not Fired(*values).wrong, f"seed {seed}: span {word, start} has fired out of turn: {values}"
                spans[word] += Fired(*values).tuples
            assert spans == expected, f"seed {seed}: {spans} in spans instead of {expected}"
        if set(troubles) <= {"slow bolt"} and crash is None and not (changes or poison):  # slowness is no failure
            status = driver.status()
            assert status.checkpoint is not None
            assert (status.components["words"].timed_out, status.checkpoint.recoveries) == (0, 0), f"seed {seed}"
    finally:
        del _worlds[name]
        forget_journal(name)
    return world
