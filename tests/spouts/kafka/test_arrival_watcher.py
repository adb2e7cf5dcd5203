"""A watch at the ends of logs says when a record has come, and never for nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.planning.arrival_watcher import KafkaWatch
from spouts.kafka.planning.batch_limits import KafkaLimits
from spouts.kafka.planning.planner import KafkaPlanner
from spouts.kafka.planning.source_settings import KafkaSource
from spouts.kafka.start_end_options import EARLIEST
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration

#: A watch that says something within this time, without a reason, is wrong.
QUIET_S = 0.5


@pytest.fixture
def watch(topics: Topics) -> Iterator[KafkaWatch]:
    made = KafkaWatch(KafkaSettings(topics.bootstrap_servers, {}), "ratchet-watch")
    yield made
    made.close()


@pytest.mark.slow
def test_a_record_in_any_partition_ends_a_watch_and_the_next_one_begins_behind_it(
    topics: Topics, name: str, watch: KafkaWatch
) -> None:
    topics.create(name, 2)
    topics.send(name, [b"before"] * 3, 0)
    ends = {f"{name}/0": 3, f"{name}/1": 0}
    for partition in (1, 0):
        arrived = threading.Event()
        assert watch.begin(ends, arrived.set)
        assert not arrived.wait(QUIET_S)
        topics.send(name, [b"new"], partition)
        assert arrived.wait(PATIENCE_S)
        watch.join()
        ends[f"{name}/{partition}"] += 1


def test_a_record_that_was_there_already_ends_a_watch_at_once(topics: Topics, name: str, watch: KafkaWatch) -> None:
    topics.create(name)
    topics.send(name, [b"missed"])
    arrived = threading.Event()
    assert watch.begin({f"{name}/0": 0}, arrived.set)
    assert arrived.wait(PATIENCE_S)


def test_a_record_of_an_open_kafka_txn_does_not_end_a_watch(topics: Topics, name: str, watch: KafkaWatch) -> None:
    topics.create(name)
    producer = topics.producer(**{"transactional.id": name})
    producer.init_transactions(PATIENCE_S)
    arrived = threading.Event()
    assert watch.begin({f"{name}/0": 0}, arrived.set)
    producer.begin_transaction()
    producer.produce(name, b"undecided", partition=0)
    producer.flush(PATIENCE_S)
    assert not arrived.wait(QUIET_S)
    producer.commit_transaction(PATIENCE_S)
    assert arrived.wait(PATIENCE_S)


def test_a_watch_that_was_closed_says_nothing_and_none_begins_after_it(
    topics: Topics, name: str, watch: KafkaWatch
) -> None:
    topics.create(name)
    arrived = threading.Event()
    assert watch.begin({f"{name}/0": 0}, arrived.set)
    assert watch.begin({f"{name}/0": 0}, arrived.set)  # it lasts
    watch.close()
    topics.send(name, [b"late"])
    assert not watch.begin({f"{name}/0": 0}, arrived.set)
    assert not arrived.wait(QUIET_S)


def test_a_planner_that_found_nothing_is_told_of_the_next_record(topics: Topics, name: str) -> None:
    topics.create(name)
    topics.send(name, [b"first"])
    source = KafkaSource((name,), None, EARLIEST, skips_lost_data=False, waits_for_leaders=False)
    planner = KafkaPlanner(source, KafkaSettings(topics.bootstrap_servers, {}), KafkaLimits(100))
    try:
        assert not planner.watch(lambda: None)  # where the logs end is not known yet
        first = planner.plan({})
        assert first is not None
        assert planner.plan(first) is None
        arrived = threading.Event()
        assert planner.watch(arrived.set)
        topics.send(name, [b"second"])
        assert arrived.wait(PATIENCE_S)
        second = planner.plan(first)
        assert second is not None
        assert planner.record_count(second) == 1
    finally:
        planner.close()
