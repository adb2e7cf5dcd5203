"""A topology with state in one process under random trouble, all of it from a seed.

The topology: words (two spout tasks), a bolt without state that passes each on, with its length on a stream of its own, and two
bolts with state in a chain, which count them.

Beside the troubles of any core topology (``tests.kit.trouble``): the store of the states fails before or after it has done
what it was asked; the record of the checkpoints fails to be written, before or after; the driver dies, and another takes over
while rounds of the first are still under way; a driver that has lost its lead goes on until it notices.

The oracle: a fold over the words. Exactly-once: the committed counts are it. At-least-once: none is less.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework import BaseBasicBolt, BaseRichSpout, CoreTopology, Fields, TopologyBuilder, Tuple
from framework.errors import RetryableError, StaleWriterError
from framework.state import MsgpackSerializer
from framework.state.checkpoints import CheckpointRecord, Checkpoints
from framework.state.layers import Changes, LayeredState
from framework.state.memory import MemoryStore
from framework.topology import State, StateProvider
from tests.kit.core_parts import Clock, Stepped
from tests.kit.state_parts import Count, Log, Source
from tests.kit.trouble import SLOW_S, TROUBLES, Chances, TroubledRounds

STATE_TROUBLES = (
    "store fails before",
    "store fails after",
    "record fails before",
    "record fails after",
    "driver dies",
    "driver is deposed",
)
ALL_TROUBLES = (*TROUBLES, *STATE_TROUBLES)
ALPHABET = "abcdefg"


@dataclass
class StateWorld(Chances):
    """``stores``: what survives every process. ``epoch``: of who leads."""

    stores: dict[str, MemoryStore] = field(default_factory=dict)
    record: CheckpointRecord = field(default_factory=CheckpointRecord)
    epoch: int = 0
    steps: int = 0
    crash: tuple[int, str] | None = None
    crashed: str | None = None
    clock: Clock = field(default_factory=Clock)

    def slow(self) -> None:
        """What a bolt takes for a tuple."""
        if self.strikes("slow bolt", 0.5):
            self.clock.now += SLOW_S

    def trouble(self, what: str, action: Callable[[], Any], probability: float) -> Any:
        """A step of the store or of the record. ``crash``: which of them goes wrong, and how, beside what chance brings."""
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


class DriverDies(BaseException):
    """And its homes with it, in the middle of what they do."""


#: How a step may go wrong.
CRASHES = ("fails before", "fails after", "driver dies before", "driver dies after")
_worlds: dict[str, StateWorld] = {}


class FailingStore:
    """A ``CommittedStore`` of a world."""

    def __init__(self, world: StateWorld, store: MemoryStore) -> None:
        self._world, self._store = world, store

    def txid(self) -> int:
        return self._world.trouble("store", self._store.txid, 0.005)  # type: ignore[no-any-return]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._world.trouble("store", lambda: self._store.get(keys), 0.0005)  # type: ignore[no-any-return]

    def scan(self) -> Any:
        return self._store.scan()

    def part(self, cursor: Any, most: int) -> Any:
        return self._store.part(cursor, most)

    frozen = True

    def snapshot(self) -> Any:
        return self._store.snapshot()

    def prepare(self, txid: int, changes: Changes) -> None:
        self._world.trouble("store", lambda: self._store.prepare(txid, changes), 0.02)

    def commit(self, txid: int) -> None:
        self._world.trouble("store", lambda: self._store.commit(txid), 0.02)

    def discard(self, upto: int | None) -> None:
        self._world.trouble("store", lambda: self._store.discard(upto), 0.02)

    def write(self, changes: Changes, txid: int | None) -> None:
        self._store.write(changes, txid)

    def close(self) -> None: ...


class Splits(BaseBasicBolt):
    """Passes words on; now and then one of its two streams does not take a value, and it says a last word when it ends."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any, batch_id: Any) -> None:
        self.world, self.collector = _worlds[conf["world"]], collector

    def execute(self, tup: Tuple, collector: Any) -> None:
        self.world.slow()
        wrong = self.world.strikes("value does not fit", 0.01)
        collector.emit(["none" if wrong else len(tup["word"])], stream="lengths")
        collector.emit([tup["word"]])

    def cleanup(self) -> None:
        self.collector.emit([ALPHABET[0]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))
        declarer.declare(Fields(length=int), "lengths")


class Counts(Count):
    """Counts words."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        super().prepare(conf, context, collector)
        self.world = _worlds[conf["world"]]

    def execute(self, tup: Tuple) -> None:
        self.world.slow()
        super().execute(tup)


class Lengths(BaseBasicBolt):
    def execute(self, tup: Tuple, collector: Any) -> None:
        """Nothing."""


def chained(name: str, spout: BaseRichSpout) -> CoreTopology:
    builder = TopologyBuilder(name)
    builder.set_spout("words", spout, 2)
    builder.set_bolt("split", Splits(), 2).shuffle_grouping("words")
    builder.set_bolt("lengths", Lengths()).shuffle_grouping("split", "lengths")
    builder.set_bolt("count", Counts(name), 2).fields_grouping("split", Fields("word"))
    builder.set_bolt("again", Counts(name), 2).fields_grouping("count", Fields("word"))
    return builder.build()


class WorldProvider(StateProvider):
    def new_state(self, namespace: str, conf: Mapping[str, Any], context: Any) -> State:
        world = _worlds[conf["world"]]
        store = world.stores.setdefault(namespace, MemoryStore())
        return LayeredState(FailingStore(world, store), MsgpackSerializer(), MsgpackSerializer())


class Impatient(threading.Event):
    """Nobody waits between two tries."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Drives:
    """One driver, and where its tasks live."""

    def __init__(self, name: str, world: StateWorld, topology: Any, exact: bool) -> None:
        self.world = world
        world.epoch += 1
        self.epoch = world.epoch
        self.dead = False
        conf = {"world": name, "topology.state.provider": f"{__name__}.WorldProvider"}
        self.stepped = Stepped(topology, ackers=2, pending=8, attempts=10**6, conf=conf)
        self.stepped.clock.now = world.clock.now
        world.clock = self.stepped.clock
        self.checkpoints = self.stepped.driver._checkpoints = Checkpoints(
            world.record,
            {"count": 2, "again": 2},
            {"words": 2},
            exact=exact,
            durable=True,
            interval_s=1.0,
            attempts_max=10**6,
            save=self.save,
        )
        self.stepped.driver._stopping = Impatient()
        self.rounds = TroubledRounds(world, self.stepped)

    def save(self, record: CheckpointRecord) -> None:
        if self.epoch != self.world.epoch:
            raise StaleWriterError("another driver leads", self.world.epoch)

        def write() -> None:
            self.world.record = CheckpointRecord.of(record.document(), "the record")

        self.world.trouble("record", write, 0.02)

    def go_on(self) -> bool:
        """A round. False when the driver has stepped down: what is under way goes on without it."""
        self.stepped.clock.now += self.world.chance.choice([0.0, 0.3, 0.7, 5.0])
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


def simulate(
    seed: int,
    *,
    exact: bool,
    words: int = 120,
    troubles: Sequence[str] = ALL_TROUBLES,
    crash: tuple[int, str] | None = None,
) -> StateWorld:
    """Run one world to its end: trouble for 400 rounds or until most is read, then none. Raises ``AssertionError`` when the counts
    are wrong."""
    name = uuid.uuid4().hex
    world = _worlds[name] = StateWorld(seed, frozenset(troubles), crash=crash)
    logs = [[world.chance.choice(ALPHABET) for _ in range(words // 2)] for _ in range(2)]
    expected = Counter(itertools.chain(*logs))
    spout = Log(name, logs) if exact else Source(name, list(itertools.chain(*logs)))
    topology = chained(name, spout)
    drives = Drives(name, world, topology, exact)
    zombies: list[Drives] = []
    try:
        for number in itertools.count():
            assert number < 5_000, f"seed {seed}: it does not come to an end"
            if number == 400:
                world.troubles = frozenset()
            zombies = [each for each in zombies if world.chance.random() < 0.8 and each.haunts()]
            succeeded = world.strikes("driver is deposed", 0.01)
            if world.strikes("driver dies", 0.01):
                succeeded = drives.dead = True
            elif not succeeded:
                succeeded = not drives.go_on()
            if succeeded:
                zombies.append(drives)
                drives = Drives(name, world, topology, exact)
            driver = drives.stepped.driver
            assert driver.failure is None, driver.failure
            if not drives.rounds._walks and driver._idle and not zombies and not drives.checkpoints.recovering:
                break
        found: dict[str, Counter[str]] = {"count": Counter(), "again": Counter()}
        for namespace, store in world.stores.items():
            assert store.txid() == world.record.txid
            counts = dict(LayeredState(store, MsgpackSerializer(), MsgpackSerializer()).items())
            its = found[namespace.split("/")[1]]
            assert not set(counts) & set(its), "two tasks have the same key"
            its.update(counts)
        for component_id, counted in found.items():
            if exact:
                assert counted == expected, f"seed {seed}, {component_id}: {counted} instead of {expected}"
            else:
                lost = [word for word, count in expected.items() if counted[word] < count]
                assert not lost, f"seed {seed}, {component_id}: words were lost"
        if set(troubles) <= {"slow bolt"} and crash is None:  # nobody fails for being slow
            status = driver.status()
            assert status.checkpoint is not None
            assert (status.components["words"].timed_out, status.checkpoint.recoveries) == (0, 0), f"seed {seed}"
    finally:
        del _worlds[name]
    return world
