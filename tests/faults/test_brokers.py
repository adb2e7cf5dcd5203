"""Faults of brokers: rows 14 and 15."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaException

from integration import KafkaBroker, KafkaCluster
from tests.kit.fault_plugin import Faults
from tests.kit.jobs import Job
from tests.kit.stores import PARTITIONS, Feed
from tests.kit.striking import strike
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.kills]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("three"), 3) as cluster:
        yield cluster


def leader_of(cluster: KafkaCluster, topic: str, partition: int) -> KafkaBroker:
    metadata = Topics(cluster.bootstrap_servers).admin.list_topics(topic, timeout=PATIENCE_S)
    return cluster.brokers[metadata.topics[topic].partitions[partition].leader - 1]


def in_sync(cluster: KafkaCluster) -> bool:
    """Whether every replica of every partition is in sync."""
    metadata = Topics(cluster.bootstrap_servers).admin.list_topics(timeout=PATIENCE_S)
    partitions = [each for topic in metadata.topics.values() for each in topic.partitions.values()]
    return all(len(each.isrs) == len(each.replicas) for each in partitions)


def state_of(cluster: KafkaCluster) -> str:
    """What each broker answers about partitions that are not whole, and the end of its log."""
    told = []
    for broker in cluster.brokers:
        try:
            metadata = Topics(broker.address).admin.list_topics(timeout=PATIENCE_S)
        except KafkaException as error:
            told.append(f"{broker.address}: {error}")
            continue
        told.append(f"{broker.address}: sees brokers {sorted(metadata.brokers)}, controller {metadata.controller_id}")
        told += [
            f"  {topic.topic}/{number}: leader {each.leader}, in sync {each.isrs} of {each.replicas}"
            for topic in metadata.topics.values()
            for number, each in topic.partitions.items()
            if each.leader < 0 or len(each.isrs) < len(each.replicas)
        ]
    for broker in cluster.brokers:
        told += [f"{broker.address}: {line}" for line in broker.log_file.read_text(errors="replace").splitlines()[-60:]]
    return "\n".join(told)


@pytest.mark.fault(14)
@pytest.mark.slow
@pytest.mark.parametrize("values", ["opaque", "transactional"])
def test_commits_go_on_after_the_leader_of_a_partition_is_killed(
    make_job: Callable[..., Job], three: KafkaCluster, faults: Faults, values: str, seed: int
) -> None:
    job = make_job(values=values, of_topics=Topics(three.bootstrap_servers), replication=3)
    chance = random.Random(seed)
    run = job.process()
    with Feed(three.bootstrap_servers, job.name):
        run.start()
        wait_for(lambda: job.committed() >= 3)
        for _ in range(5):
            victim = leader_of(three, job.name, chance.randrange(PARTITIONS))
            try:
                faults.recovery("leader broker of three killed", job.committed, victim.kill)
            finally:
                victim.start()
            # Wait until the first broker is in sync before a second one dies: until then, some
            # partitions would have no replica that may lead.
            wait_for(lambda: in_sync(three))
            before = job.committed()
            wait_for(lambda before=before: job.committed() > before)  # type: ignore[misc]
    job.finish(run)


@pytest.mark.fault(15)
@pytest.mark.slow
def test_commits_go_on_after_all_brokers_are_bounced(
    make_job: Callable[..., Job], three: KafkaCluster, faults: Faults
) -> None:
    """SIGTERM to all at once, then start them again. All replicas are in sync before each bounce:
    otherwise some partitions may have no replica that may lead, and no client gets through.
    """

    def bounce() -> None:
        three.stop()
        three.start()

    job = make_job(of_topics=Topics(three.bootstrap_servers), replication=3)
    try:
        strike(job, faults, "all brokers bounced", bounce, times=2, ready=lambda: in_sync(three))
    except TimeoutError:
        print(state_of(three))
        raise


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("one")) as broker:
        yield broker


@pytest.mark.fault(15)
@pytest.mark.slow
@pytest.mark.parametrize("values", ["opaque", "transactional"])
def test_commits_go_on_after_a_broker_was_paused(
    make_job: Callable[..., Job], one: KafkaBroker, faults: Faults, values: str
) -> None:
    def pause() -> None:
        one.pause()
        time.sleep(3.0)
        one.resume()

    job = make_job(values=values, of_topics=Topics(one.address))
    strike(job, faults, "broker paused for 3 s", pause)
