"""Brokers of a cluster of two die, pause and come back (2.7): that costs time, but no record."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import TopologyContext, TransactionAttempt
from framework.errors import RetryableError
from integration import KafkaCluster
from integration.processes import freeze
from spouts.kafka.consumer import consumer_pool as kafka_sessions
from tests.kit.kafka_runs import KafkaRuns, values_in
from tests.kit.plans import offsets
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("2.7")]


@pytest.fixture(scope="module")
def cluster_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("two"), 2) as cluster:
        yield cluster


@pytest.fixture
def split(cluster_of_two: KafkaCluster, name: str) -> Topics:
    """A topic with partition 0 on the first broker, which stays, and partition 1 on the second."""
    topics = Topics(cluster_of_two.bootstrap_servers)
    topics.create_placed(name, [[1], [2]])
    for partition in (0, 1):
        topics.send(name, [b"p%d" % partition] * 10, partition)
    return topics


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.05)


@pytest.mark.slow
def test_opaque_goes_on_without_a_dead_broker_and_returns_to_its_partition(
    cluster_of_two: KafkaCluster, split: Topics, name: str, tmp_path: Path
) -> None:
    runs = KafkaRuns(split, tmp_path, name)
    second = cluster_of_two.brokers[1]
    with runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        second.kill()
        for number in range(3):  # the first ones before the cluster notices that the broker is gone
            split.send(name, [b"meanwhile"] * 5, 0)
            until(
                lambda number=number: runs.counts().get("meanwhile") == 5 * (number + 1), "the partition that is left"
            )
        second.start()
        split.send(name, [b"back"] * 4, 1)
        until(lambda: runs.counts().get("back") == 4, "the partition that is back")
    assert runs.counts() == {"p0": 10, "p1": 10, "meanwhile": 15, "back": 4}
    assert runs.counts() == dict(values_in(split.bootstrap_servers, name))


@pytest.mark.slow
def test_transactional_waits_for_a_dead_broker_and_says_for_what(
    cluster_of_two: KafkaCluster, split: Topics, name: str, tmp_path: Path
) -> None:
    runs = KafkaRuns(split, tmp_path, name, opaque=False)
    second = cluster_of_two.brokers[1]
    with runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        committed = run.status().committed_txid
        second.kill()
        split.send(name, [b"meanwhile"] * 5, 0)
        until(lambda: "leader" in (run.status().waiting_for or ""), "the wait to be said")
        assert run.status().committed_txid == committed
        assert "meanwhile" not in runs.counts()
        second.start()
        until(lambda: runs.counts().get("meanwhile") == 5, "the batch that waited")
    assert runs.counts() == {"p0": 10, "p1": 10, "meanwhile": 5}


@pytest.mark.slow
def test_a_paused_broker_delays_the_plan_of_the_others_once_only(
    cluster_of_two: KafkaCluster, split: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the cluster the paused broker is still the leader; it just does not answer."""
    runs = KafkaRuns(split, tmp_path, name)
    planner = runs.spout().planner({}, TopologyContext("t", "spout", 0, 1))
    first = planner.plan({})
    assert offsets(first) == {f"{name}/0": (0, 10), f"{name}/1": (0, 10)}
    second = cluster_of_two.brokers[1]
    assert second.pid is not None
    monkeypatch.setattr("spouts.kafka.cluster_metadata.METADATA_AGE_MAX_S", 3600.0)
    waited_for: list[int] = []
    asked_twice: list[int] = []
    real = planner._metadata._wait

    def noted(asked: Any, *, patient: bool) -> None:
        late = planner._metadata._late
        waited_for.extend(leader for leader in asked if not late.get(leader))
        asked_twice.extend(leader for leader in asked if any(not answer.done() for answer in late.get(leader, ())))
        real(asked, patient=patient)

    monkeypatch.setattr(planner._metadata, "_wait", noted)
    freeze(second.pid)
    try:
        plan = first
        for number in range(1, 6):
            split.send(name, [b"x"] * 2, 0)
            plan = planner.plan(plan)
            assert offsets(plan) == {f"{name}/0": (8 + 2 * number, 10 + 2 * number), f"{name}/1": (10, 10)}
    finally:
        os.kill(second.pid, signal.SIGCONT)
    assert waited_for.count(2) == 1  # later it is asked, but not waited for
    assert asked_twice == []
    split.send(name, [b"y"] * 3, 1)
    until(lambda: offsets(planner.plan(plan) or plan)[f"{name}/1"] == (10, 13), "the broker to be counted in again")
    planner.close()


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_a_silent_leader_fails_the_read_and_says_where(
    cluster_of_two: KafkaCluster, split: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.kafka.consumer.range_consumer.SILENCE_MAX_S", 1.0)
    second = cluster_of_two.brokers[1]
    assert second.pid is not None
    reader = KafkaRuns(split, tmp_path, name).spout().reader({}, TopologyContext(name, "spout", 0, 1))
    ranges = {f"{name}/1": {"first_offset": 0, "next_offset": 10}}
    freeze(second.pid)
    try:
        with pytest.raises(
            RetryableError, match=f"{name}/1 delivered nothing for 1 s or more, at offset 0 of a range to 10"
        ):
            list(reader.read_all(TransactionAttempt(1, 1), ranges))
    finally:
        os.kill(second.pid, signal.SIGCONT)
    assert sum(batch.num_rows for batch in reader.read_all(TransactionAttempt(1, 2), ranges)) == 10  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_clients_are_kept_by_their_whole_configuration_and_closed(split: Topics, name: str, tmp_path: Path) -> None:
    pool = kafka_sessions.KafkaSessions()
    plain = KafkaRuns(split, tmp_path, name).spout()._settings
    other = KafkaRuns(split, tmp_path, name, settings={"client.id": "another"}).spout()._settings
    with pool.lend(plain, "g", 0) as first, pool.lend(other, "g", 0) as second, pool.lend(plain, "g", 1) as third:
        assert len({id(first), id(second), id(third)}) == 3
        with pool.lend(plain, "g", 0) as meanwhile:  # the first one is in use
            assert meanwhile is not first
    with pool.lend(plain, "g", 0) as again:
        assert again is first or again is meanwhile
    assert len(pool) == 3
    pool.close("g")
    assert len(pool) == 0
    with pytest.raises(RuntimeError, match="closed"):
        second._consumer.list_topics(timeout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [pytest.param(True, marks=pytest.mark.slow), False])
def test_leaders_that_change_under_a_run_cost_no_record(
    cluster_of_two: KafkaCluster, name: str, tmp_path: Path, opaque: bool
) -> None:
    """The topic has two replicas: the other broker takes over under a new leader epoch,
    without truncation.
    """
    topics = Topics(cluster_of_two.bootstrap_servers)
    topics.create_placed(name, [[2, 1], [1, 2]], min_insync_replicas="1")
    for partition in (0, 1):
        topics.send(name, [b"p%d" % partition] * 10, partition)
    runs = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    second = cluster_of_two.brokers[1]
    with runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        second.kill()
        topics.send(name, [b"after"] * 10, 0)  # waits for the new leader
        until(lambda: runs.counts().get("after") == 10, "what the new leader took")
        second.start()
        topics.send(name, [b"again"] * 10, 0)
        until(lambda: runs.counts().get("again") == 10, "what came after the broker was back")
        epochs = [record.plan[f"{name}/0"]["next_leader_epoch"] for record in run.transactions()]
    assert runs.counts() == {"p0": 10, "p1": 10, "after": 10, "again": 10}
    assert runs.counts() == dict(values_in(topics.bootstrap_servers, name))
    assert epochs[-1] > epochs[0]
    assert run.status().lost_records == 0
