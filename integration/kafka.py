"""Apache Kafka brokers (KRaft) as child processes: one that is its own controller, or several."""

from __future__ import annotations

import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from integration.errors import ServerError
from integration.jars import Progress, kafka_jars, spark_jars
from integration.java import find_java
from integration.process import ServerProcess, free_port

HEAP = "-Xmx512m"
_LOGGING_JARS = ("slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core")


@dataclass(frozen=True, slots=True)
class SecureListener:
    """A second listener, for TLS with SASL/SCRAM. ``certificate``: a PEM file of the private key and the chain. ``users``:
    name -> password; they exist from the first start on."""

    certificate: Path
    users: Mapping[str, str] = field(repr=False)
    port: int = 0

    def properties(self, address: str) -> dict[str, str]:
        name = "listener.name.secure"
        return {
            "listeners": f",SECURE://{address}",
            "advertised.listeners": f",SECURE://{address}",
            "listener.security.protocol.map": ",SECURE:SASL_SSL",
            f"{name}.ssl.keystore.type": "PEM",
            f"{name}.ssl.keystore.location": str(self.certificate),
            f"{name}.sasl.enabled.mechanisms": "SCRAM-SHA-256",
            f"{name}.scram-sha-256.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }


@dataclass(frozen=True, slots=True)
class Quorum:
    """Where a cluster's only controller listens, and the id of the cluster."""

    cluster_id: str
    controller_port: int


class KafkaBroker(ServerProcess):
    """A broker for plain connections on the loopback interface; ``secure`` adds a listener for others. Topics are created
    by whoever needs them. ``quorum``: the cluster that it joins; node 1 is the controller too."""

    name = "kafka"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        progress: Progress | None = None,
        settings: dict[str, str] | None = None,
        secure: SecureListener | None = None,
        quorum: Quorum | None = None,
        node_id: int = 1,
    ) -> None:
        super().__init__(folder, port, guarded=guarded, settings=settings)
        self._progress = progress
        self._secure = secure
        self._secure_port = (secure.port or free_port()) if secure is not None else 0
        self._quorum = quorum
        self._node_id = node_id

    @property
    def secure_address(self) -> str:
        """Where the secure listener is."""
        return f"127.0.0.1:{self._secure_port}"

    def prepare(self) -> list[str]:
        java = find_java()
        # Kafka's own jars hold SLF4J without anything behind it; the ones that come with PySpark write the log.
        logging_jars = [str(jar) for name in _LOGGING_JARS for jar in sorted(spark_jars().glob(f"{name}-2*.jar"))]
        classpath = ":".join([*logging_jars, f"{kafka_jars(self._progress)}/*"])
        config = self.folder / "server.properties"
        data = self.folder / "data"
        quorum = self._quorum if self._quorum is not None else Quorum(_new_cluster_id(), free_port())
        controls = self._node_id == 1
        controller = f"127.0.0.1:{quorum.controller_port}"
        properties = {
            "process.roles": "broker,controller" if controls else "broker",
            "node.id": str(self._node_id),
            "listeners": f"PLAINTEXT://{self.address}" + (f",CONTROLLER://{controller}" if controls else ""),
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.voters": f"1@{controller}",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(data),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            "log.retention.ms": "-1",
            **self._settings,
        }
        for key, value in self._secure.properties(self.secure_address).items() if self._secure is not None else ():
            properties[key] = properties.get(key, "") + value
        try:
            config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()), encoding="utf-8")
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; make room or give another folder") from error
        logging = self.java_logging()
        if not (data / "meta.properties").exists():
            self._format([java, "-Xmx128m", logging, "-cp", classpath], config, quorum.cluster_id)
        return [
            java,
            HEAP,
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            logging,
            "-cp",
            classpath,
            "kafka.Kafka",
            str(config),
        ]

    def _format(self, java: list[str], config: Path, cluster_id: str) -> None:
        """Give the empty data folder a cluster id, and the cluster its users."""
        users = self._secure.users if self._secure is not None else {}
        command = [
            *java,
            "kafka.tools.StorageTool",
            "format",
            "-t",
            cluster_id,
            "-c",
            str(config),
            "--ignore-formatted",
            *(part for name, password in users.items() for part in ("--add-scram", _scram(name, password))),
        ]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if answer.returncode != 0:
            lines = (answer.stdout + answer.stderr).strip().splitlines() or ["it said nothing"]
            reason = next((line for line in lines if "Exception" in line or "Error" in line), lines[-1])
            raise ServerError(f"Kafka's data folder {config.parent / 'data'} cannot be formatted: {reason[:300]}")

    def is_ready(self) -> bool:
        try:
            client = AdminClient({"bootstrap.servers": self.address, "log_level": 0, "socket.timeout.ms": 2000})
            return bool(client.list_topics(timeout=1).brokers)
        except KafkaException:
            return False


class KafkaCluster:
    """Several brokers, the first of which is the controller too: kill any other."""

    def __init__(self, folder: Path, brokers: int, settings: Mapping[str, str] | None = None) -> None:
        quorum = Quorum(_new_cluster_id(), free_port())
        shared = {
            "broker.session.timeout.ms": "2000",  # how soon the partitions of a dead broker are without a leader
            "broker.heartbeat.interval.ms": "500",
            **(settings or {}),
        }
        self.brokers: Sequence[KafkaBroker] = [
            KafkaBroker(folder / f"kafka-{number}", settings=shared, quorum=quorum, node_id=number)
            for number in range(1, brokers + 1)
        ]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def __enter__(self) -> KafkaCluster:
        try:
            for broker in self.brokers:
                broker.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all, the controller last."""
        for broker in reversed(self.brokers):
            broker.stop()


def _new_cluster_id() -> str:
    cluster_id = "-"
    while cluster_id.startswith("-"):  # the tool that formats would take it for an option
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return cluster_id


def _scram(name: str, password: str) -> str:
    return f"SCRAM-SHA-256=[name={name},password={password}]"
