"""Clusters of three brokers, three ZooKeeper servers, and Spark: any one server may die."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException
from kazoo.client import KazooClient

from integration import KafkaCluster, ZooKeeperEnsemble
from integration.kafka import answer_of_live_brokers
from integration.server import free_port, port_taken
from integration.spark_cluster import SparkMaster, SparkWorker
from tests.kit.targets import Often
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.integration


def read_all(bootstrap_servers: str, topic: str, count: int) -> list[int]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "x",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    found: list[int] = []
    while len(found) < count:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, f"only {len(found)} of {count} arrived"
        if message.error() is None:
            found.append(int(message.value()))
    consumer.close()
    return found


FENCED = [
    "All brokers are currently fenced, or have all their log directories cordoned.",
    "All brokers specified in the manual partition assignment for partition 0 are fenced or in controlled shutdown.",
]


def test_a_controller_whose_brokers_stood_still_is_asked_again() -> None:
    left = [KafkaException(each) for each in FENCED]

    def ask() -> Future[None]:
        answer: Future[None] = Future()
        if left:
            answer.set_exception(left.pop())
        else:
            answer.set_result(None)
        return answer

    answer_of_live_brokers(ask)
    assert not left
    left.append(KafkaException("Topic 't' already exists."))
    with pytest.raises(KafkaException, match="already exists"):
        answer_of_live_brokers(ask)


def test_three_brokers_survive_the_death_of_any_one(tmp_path: Path, often: Often) -> None:
    with KafkaCluster(tmp_path, 3) as cluster:
        topics = Topics(cluster.bootstrap_servers)
        topics.create("t", replication=3, min_insync_replicas="2")
        producer = topics.producer(acks="all")
        sent = 0
        for broker in cluster.brokers[: often(1, 3)]:
            broker.kill()
            for _ in range(20):
                producer.produce("t", str(sent))
                sent += 1
            producer.arrived(60)
            broker.start()
        assert read_all(cluster.bootstrap_servers, "t", sent) == list(range(sent))


@pytest.mark.slow
def test_three_zookeeper_servers_survive_the_death_of_any_one(tmp_path: Path) -> None:
    with ZooKeeperEnsemble(tmp_path, 3) as ensemble:
        client = KazooClient(
            ensemble.address, timeout=10, connection_retry={"max_tries": -1}, command_retry={"max_tries": -1}
        )
        client.start(PATIENCE_S)
        for number, server in enumerate(ensemble.servers):
            server.kill()
            client.retry(client.create, f"/x-{number}")
            server.start()
        assert sorted(client.get_children("/")) == ["x-0", "x-1", "x-2", "zookeeper"]
        client.stop()
        client.close()


class Overtaken(ZooKeeperEnsemble):
    """Another program takes the ports for data after the ensemble has looked at them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 3)
        self.others: list[socket.socket] = []

    def renew_ports(self) -> None:
        if self.others:
            super().renew_ports()
        else:
            self.others = [socket.create_server(("127.0.0.1", data)) for data, _ in self._members.values()]

    def stop(self) -> None:
        super().stop()
        for other in self.others:
            other.close()


@pytest.mark.slow
def test_an_ensemble_that_loses_its_ports_starts_with_others(tmp_path: Path) -> None:
    """Only the leader takes the port for data, and it tries again for ever."""
    with Overtaken(tmp_path) as ensemble:
        assert len({server.port for server in ensemble.servers}) == 3


def test_a_spark_master_that_loses_its_ports_starts_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would take the next port, where no worker and no driver looks for it."""
    with socket.create_server(("127.0.0.1", 0)) as page, socket.create_server(("127.0.0.1", 0)) as other:
        master = SparkMaster(tmp_path, secret="")
        master.page_port = page.getsockname()[1]
        ports = iter([other.getsockname()[1]])
        monkeypatch.setattr("integration.server.free_port", lambda: next(ports, None) or free_port())
        with master:
            assert master.page() is not None
            assert port_taken(master.port)
            assert master.port != other.getsockname()[1]


def test_a_spark_master_takes_no_programs_without_its_secret(tmp_path: Path) -> None:
    """Its REST interface, on a port of its own, would ask for none."""
    with SparkMaster(tmp_path, secret="s" * 32) as master:
        listening = {
            each.laddr.port for each in psutil.Process(master.pid).net_connections("inet") if each.status == "LISTEN"
        }
        assert listening == {master.port, master.page_port}


def test_other_users_read_neither_the_output_nor_the_code_of_executors(tmp_path: Path) -> None:
    """Spark gives the files in this folder the mode that the umask says."""
    worker = SparkWorker(tmp_path, SparkMaster(tmp_path, secret="s" * 32), cores=1, memory="512m")
    worker.prepare()
    assert stat.S_IMODE((tmp_path / "work").stat().st_mode) == 0o700


@pytest.mark.slow
def test_up_makes_clusters_and_down_ends_them(tmp_path: Path) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet", "servers", *words, "--dir", str(tmp_path / "w")]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=1800)

    up = call("up", "--brokers", "3", "--zookeepers", "3", "--spark-workers", "2", "--json")
    assert up.returncode == 0, up.stderr
    try:
        state = json.loads(up.stdout)
        addresses = [
            *state["kafka"].split(","),
            *state["zookeeper"].split(","),
            state["spark"].removeprefix("spark://"),
        ]
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        assert len(ports) == 7
        assert all(port_taken(port) for port in ports)
        assert len(state["pids"]) == 9
        assert json.loads(call("status", "--json").stdout) == state
    finally:
        assert call("down").stdout.strip() == "stopped"
    assert not any(port_taken(port) for port in ports)
    assert call("status").returncode == 1
