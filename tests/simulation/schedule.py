"""One seeded schedule, from a world of a random shape to its last record."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from framework.errors import RatchetError
from framework.topology.dead_letter_replay import LETTERS_PARTITION
from framework.topology.extra_partition_spout_wrapper import without
from tests.simulation.drivers import ResetTool, SimDriver, build_topology
from tests.simulation.world import TOPIC, Shape, SimBackend, Violation, World

Coverage = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Outcome:
    """How a schedule ended. ``violation`` None: every invariant held."""

    seed: int
    shape: Shape
    violation: str | None
    steps: int
    trace: tuple[str, ...] = ()


def run_schedule(seed: int, coverage: Coverage | None = None, *, keep_trace: bool = False) -> Outcome:
    """Run the schedule of a seed. The same seed gives the same schedule, on any machine.

    With ``keep_trace`` the outcome has a trace.
    """
    world = World(seed, Counter() if coverage is None else coverage, tells=keep_trace)
    return run_world(world, SimDriver, _plan_all)


def run_world(
    world: World,
    driver_type: type[SimDriver],
    plan: Callable[[World, list[SimDriver]], None],
    check_end: Callable[[World], None] = lambda world: None,
) -> Outcome:
    """Run a schedule from its first driver to its last record. ``plan``: plans what happens besides
    the usual changes. ``check_end``: called when everything is committed."""
    violation: str | None = None
    try:
        names = ("A", "B") if world.shape.second_driver else ("A",)
        drivers = [driver_type(world, build_topology(world, whole=not _changes(world)), each) for each in names]
        for driver in drivers:
            driver.start_after(1 + int(world.chance.random() * 12))
        _plan_changes(world, drivers)
        _plan_losses(world, drivers)
        plan(world, drivers)
        world.run()
        if world.corrupted == "nothing" and world.stopped is None:
            world.oracle.compare()
            world.oracle.probe_values()
            check_end(world)
    except Violation as error:
        violation = str(error)
    except RatchetError as error:
        violation = f"unexpected {error!r}"
    return Outcome(world.seed, world.shape, violation, world.steps, tuple(world.trace))


def _plan_all(world: World, drivers: list[SimDriver]) -> None:
    _plan_restores(world, drivers)
    _plan_change_of_topology(world, drivers)
    _plan_rebuilds(world)


def _plan_changes(world: World, drivers: list[SimDriver]) -> None:
    """Plan what happens from outside, to the source, to sessions and to drivers."""
    chance, spout, shape = world.chance, world.spout, world.shape
    for _ in range(shape.changes):
        partition = chance.randrange(shape.partitions)
        when = int(chance.random() * 1_200)
        kind = chance.choice(
            ("grow", "new partition", "away", "shrink", "expire", "session", "reset", "corrupt", "stop", "stop")
        )
        world.coverage[
            (f"source: {kind}" if kind not in ("session", "reset", "corrupt", "stop") else kind, "any time")
        ] += 1
        if kind == "grow":
            world.at(when, lambda each=partition: spout.append(each, [world.record(), world.record()]))
        elif kind == "new partition":
            name = shape.partitions + world.next_id
            world.next_id += 1
            world.at(when, lambda each=name: spout.add_partition(each, [world.record()]))
        elif kind == "away":
            world.at(when, lambda each=partition: spout.make_unavailable(each))
            world.at(when + 500, lambda each=partition: spout.make_available(each))
        elif kind == "shrink":
            world.at(when, lambda: spout.set_take(1 + int(chance.random() * 4)))
        elif kind == "expire" and shape.opaque:
            world.at(when, lambda each=partition: _expire(world, each))
        elif kind == "session":
            world.at(when, drivers[0].expire)
        elif kind == "stop":
            world.at(when, drivers[int(chance.random() * len(drivers))].request_stop)
        elif kind == "corrupt":
            world.at(when, lambda: _corrupt(world, drivers))
        elif kind == "reset":
            world.at(when, lambda: (drivers[0].expire(), world.at(1, ResetTool(drivers[0]).run)))


def _changes(world: World) -> bool:
    return bool(world.shape.joins or world.shape.renames)


def _plan_change_of_topology(world: World, drivers: list[SimDriver]) -> None:
    """Plan that a committer joins or the spout gets another id, at any time or while a commit is
    open.

    At least one driver is started again with the new topology. Another driver may lead again with
    the old topology, as long as nobody has led with the new one.
    """
    chance = world.chance
    if world.shape.joins:
        world.coverage[("joins", world.shape.joins if world.shape.joins == TOPIC else "state")] += 1
    if world.shape.renames:
        world.coverage[("is renamed", "spout")] += 1
    if _changes(world):
        world.at(int(chance.random() * 1_000), partial(_change_topology, world, drivers, chance.random() < 0.5))


def _change_topology(world: World, drivers: list[SimDriver], while_open: bool, tries: int = 300) -> None:
    if while_open and tries and not world.is_open(world.store.currtx()):
        world.at(3, lambda: _change_topology(world, drivers, while_open, tries - 1))
        return
    world.note("the topology is changed")
    first = int(world.chance.random() * len(drivers))
    for number, driver in enumerate(drivers):
        driver.next_topology = build_topology(world, whole=True)
        if world.shape.renames or number == first or world.chance.random() < 0.5:
            stops = driver.leads and not world.shape.renames and world.chance.random() < 0.5
            driver.request_stop() if stops else driver.crash()


def _plan_losses(world: World, drivers: list[SimDriver]) -> None:
    """Plan the loss of ranges whose commit is open; the faults that follow strike the roll-back."""
    for _ in range(world.shape.losses):
        world.coverage[("source: lose", "any time")] += 1
        when = int(world.chance.random() * 1_200)
        world.at(when, partial(_lose_open_range, world, drivers, world.chance.random() < 0.6))


def _plan_restores(world: World, drivers: list[SimDriver]) -> None:
    """Plan that a store goes back to an earlier state, perhaps twice:
    in the middle of a commit, or at any time.
    """
    chance, shape = world.chance, world.shape
    if shape.back == "another life":
        world.coverage[("goes back", shape.back)] += 1
        world.at(int(chance.random() * 1_200), lambda: (_stop_all(world, drivers), world.store.become_another()))
        return
    if not shape.back or (shape.back == "sink" and not shape.states):
        return
    for _ in range(1 + int(chance.random() * 2)):
        store: Any = world.store if shape.back == "zookeeper" else world.backends[int(chance.random() * shape.states)]
        pause = int(chance.random() * chance.choice((20, 80, 400, 1_500)))
        world.coverage[("goes back", shape.back)] += 1
        done = () if store is world.store else ("done",) * 4
        moment = chance.choice(("any", *("open",) * 4, *done, *("rolled back",) * 8 * min(shape.losses, 1)))
        world.at(int(chance.random() * 1_200), partial(_take_snapshot, world, drivers, store, pause, moment))


def _plan_rebuilds(world: World) -> None:
    """Plan that a rebuilt copy takes the place of a state, in one of four schedules: at any time,
    or in the middle of a commit. More often where ZooKeeper may lose what a copy was made of.
    """
    chance = random.Random(f"rebuilds of {world.seed}")  # of its own: no other choice depends on it
    share, most = (0.5, 8) if world.shape.back == "zookeeper" else (0.25, 3)
    if not world.backends or chance.random() > share:
        return
    for _ in range(chance.randint(1, most)):
        backend, moment = chance.choice(world.backends), chance.choice(("any", "open", "open", "open"))
        world.coverage[("rebuilt", moment)] += 1
        world.at(int(chance.random() * 1_200), partial(_take_rebuilt, world, backend, moment))


def _take_rebuilt(world: World, backend: SimBackend, moment: str, tries: int = 300) -> None:
    if _has_come(world, backend, moment) and backend.take_rebuilt():
        world.coverage[("rows are exchanged", moment)] += 1
    elif tries and not world.finished:
        world.at(3, partial(_take_rebuilt, world, backend, moment, tries - 1))


def _stop_all(world: World, drivers: list[SimDriver]) -> None:
    """Stop all drivers and workers where a committer writes to Kafka, as who restores ZooKeeper
    must.

    Tasks that write to Kafka do not learn that ZooKeeper went back. Tasks that write under headers
    may go on, and are refused.
    """
    if world.shape.headerless:
        world.kafka.restart_workers()
        for driver in drivers:
            driver.crash()


def _has_come(world: World, store: Any, moment: str) -> bool:
    """Whether the next transaction is open, rolled back, or done in the store; or any moment."""
    currtx = world.store.currtx()
    if moment == "done":
        header = store.header()
        return header is not None and header.done == currtx
    return moment == "any" or (world.is_rolled_back(currtx) if moment == "rolled back" else world.is_open(currtx))


def _take_snapshot(
    world: World, drivers: list[SimDriver], store: Any, pause_ms: int, moment: str, tries: int = 300
) -> None:
    """Take a snapshot at a moment, and go back to it after a pause.

    What is done is mostly made again by another attempt, and the store goes back soon after that
    is committed (ADR 25).
    """
    if _has_come(world, store, moment):
        snapshot, times, txid = store.snapshot(), len(world.restores), world.store.currtx()
        if world.chance.random() < (0.5 if store is world.store else 0.8 if moment == "done" else 0.0):
            pause_ms += 1_000 if store is world.store else 0  # with an election in between
            for driver in drivers:
                if driver.leadership is not None:
                    driver.crash()

        def restore() -> None:
            if times < len(world.restores):
                return  # the snapshot is of a time that another restore has undone
            world.restores.append(store)
            world.note(f"{type(store).__name__} goes back by {pause_ms} ms")
            if store is world.store:
                _stop_all(world, drivers)
            store.restore(snapshot)

        def restore_when_closed(tries: int = 400) -> None:
            if world.oracle.committed < txid and tries and not world.finished:
                world.at(5, partial(restore_when_closed, tries - 1))
            else:
                world.at(int(world.chance.random() * 60), restore)

        if moment == "done":
            restore_when_closed()
        else:
            world.at(pause_ms, restore)
    elif tries and not world.finished:
        world.at(3, lambda: _take_snapshot(world, drivers, store, pause_ms, moment, tries - 1))


def _corrupt(world: World, drivers: list[SimDriver]) -> None:
    """Flip bits in a znode that the next leader reads, and crash the leader of now."""
    nodes = [each for each in world.store.nodes if not each.endswith("/epoch")]
    if nodes and world.corrupted == "nothing":
        world.corrupted = nodes[int(world.chance.random() * len(nodes))]
        world.store.nodes[world.corrupted] = b"\x00" + world.store.nodes[world.corrupted][1:]
        for driver in drivers:
            if driver.leadership is not None:
                driver.crash()


def _lose_open_range(world: World, drivers: list[SimDriver], when_done: bool, tries: int = 300, seen: int = -1) -> None:
    """As soon as the commit of a txid is open, or done in a state, remove the records of its plan.

    Then the driver dies, or the commit fails: the next leader must roll back (C7).
    """
    plan, done = None, False
    if seen != world.writes:  # otherwise nothing was opened or done since
        currtx = world.store.currtx()
        plan = world.store.plan(currtx) if world.is_open(currtx) else None
        done = any((header := each.header()) is not None and header.done == currtx for each in world.backends)
    if plan and (done or not when_done):
        for partition, meta in without(plan, LETTERS_PARTITION).items():
            world.spout.expire(int(partition), max(meta["next"], 0))
        world.faults_left = max(world.faults_left, 1 + int(world.chance.random() * 3))
        if world.chance.random() < 0.5:
            world.failing_commits = 1
        else:
            for driver in drivers:
                if driver.leadership is not None:
                    driver.crash()
    elif tries and not world.finished:
        pause_ms = 3 if when_done else 7
        world.at(pause_ms, partial(_lose_open_range, world, drivers, when_done, tries - 1, world.writes))


def _expire(world: World, partition: int) -> None:
    """Retention removes the oldest rows, read or not."""
    source = world.spout._source
    assert source is not None
    held = len(source.partitions[str(partition)])
    before = min(source.earliest.get(str(partition), 0) + 1 + int(world.chance.random() * 5), held)
    world.note(f"partition {partition} forgets everything below {before}")
    world.spout.expire(partition, before)
