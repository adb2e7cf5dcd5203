"""Windows over a backlog of several Kafka partitions: as when all of it is read in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import submit
from framework.state import TimeWindow
from framework.topology import TopologyContext
from framework.transactions import MemoryStore
from spouts import JsonCodec, KafkaSpout
from tests.kit.backlogs import EVENT, Event, backlog, check, topology
from tests.kit.state_parts import journal, lmdb
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("reader")]


def sent(topics: Topics, name: str, partitions: Sequence[Sequence[Event]]) -> None:
    topics.create(name, len(partitions))
    for number, events in enumerate(partitions):
        rows = [dict(zip(EVENT.names, each, strict=True)) for each in events]
        topics.send(name, [json.dumps(each).encode() for each in rows], number)


def spout_of(topics: Topics, name: str) -> KafkaSpout:
    return KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=JsonCodec(EVENT), group=name)


@pytest.mark.slow
@pytest.mark.behaviour("5.2")
@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("spouts", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3)), 4])
def test_a_backlog_gives_the_windows_of_in_order_reading(topics: Topics, name: str, spouts: int, between: int) -> None:
    partitions = backlog(seed=spouts, count=3_000)
    sent(topics, name, partitions)
    built = topology(name, spout_of(topics, name), TimeWindow(10, "at"), spouts=spouts, between=between, tasks=2)
    conf = {"topology.state.checkpoint.interval.ms": 50, "topology.max.spout.pending": 200}
    with submit(built, conf, executor="local") as run:
        run.wait_until_idle(120)
        assert run.status().components["gather"].late == 0
        assert run.status().components["gather"].executed >= 2_000
    check(journal(name).results, partitions, 10)


@pytest.mark.slow
def test_restarts_in_a_backlog_with_other_numbers_of_tasks(topics: Topics, name: str, tmp_path: Path) -> None:
    partitions = backlog(seed=7, count=3_000)
    sent(topics, name, partitions)
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.max.spout.pending": 100})
    for spouts, tasks, ends in ((2, 1, False), (4, 3, False), (1, 2, True)):
        built = topology(name, spout_of(topics, name), TimeWindow(10, "at"), spouts=spouts, between=1, tasks=tasks)
        with submit(built, conf, store=store, executor="local") as run:
            if ends:
                run.wait_until_idle(120)
            else:
                wait_for(lambda: run.status().components["gather"].executed >= 500)
            assert run.status().components["gather"].late == 0
    check({each: [told[-1]] for each, told in journal(name).results.items()}, partitions, 10)


@pytest.mark.slow
def test_windows_that_do_not_wait_for_the_partitions_are_caught(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaSpout, "unread", lambda self: {})
    sent(topics, name, backlog(count=3_000))
    built = topology(name, spout_of(topics, name), TimeWindow(10, "at"), spouts=2, between=0, tasks=2)
    with submit(built, {"topology.max.spout.pending": 200}, executor="local") as run:
        run.wait_until_idle(120)
        assert run.status().components["gather"].late > 100


class Ignoring:
    """A collector that keeps nothing."""

    def emit_arrow(self, batch: Any, message_ids: Any = None, stream: str = "default", *, partition: str = "") -> None:
        assert partition

    def report_error(self, error: BaseException) -> None:
        raise error


def test_a_spout_knows_which_of_its_partitions_are_not_read_to_their_ends(topics: Topics, name: str) -> None:
    sent(topics, name, [[("a", 1.0, 1)] * 3, [], [("b", 2.0, 2)] * 5])
    spout = spout_of(topics, name)
    spout.open({}, TopologyContext(name, "events", 0, 1), Ignoring())
    try:
        assert spout.unread() is None
        seen: list[Any] = []

        def all_read() -> bool:
            spout.next_tuples(1)
            seen.append(spout.unread())
            return seen[-1] == {}

        wait_for(all_read)
        known = [each for each in seen if each is not None]
        assert set(known[0]) >= {f"{name}/0", f"{name}/2"}
        assert set(known[0].values()) == {"default"}
        topics.send(name, [json.dumps({"user": "c", "at": 3.0, "n": 3}).encode()], 1)
        wait_for(lambda: (spout.next_tuples(1), spout.unread())[1] == {})
    finally:
        spout.close()
