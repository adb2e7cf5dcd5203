"""One Apache Kafka broker (KRaft, broker and controller in one) as a child process."""

from __future__ import annotations

import subprocess
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from integration.errors import ServerError
from integration.jars import Progress, kafka_jars, spark_jars
from integration.java import find_java
from integration.process import ServerProcess, free_port

HEAP = "-Xmx512m"
_LOGGING_JARS = ("slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core")


class KafkaBroker(ServerProcess):
    """A broker for plain connections on the loopback interface. Topics are created by whoever needs them."""

    name = "kafka"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        progress: Progress | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__(folder, port, guarded=guarded)
        self._progress = progress
        self._settings = settings or {}

    def prepare(self) -> list[str]:
        java = find_java()
        # Kafka's own jars hold SLF4J without anything behind it; the ones that come with PySpark write the log.
        logging_jars = [str(jar) for name in _LOGGING_JARS for jar in sorted(spark_jars().glob(f"{name}-2*.jar"))]
        classpath = ":".join([*logging_jars, f"{kafka_jars(self._progress)}/*"])
        config = self.folder / "server.properties"
        data = self.folder / "data"
        controller = free_port()
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
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
        try:
            config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()), encoding="utf-8")
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; make room or give another folder") from error
        logging = self.java_logging()
        if not (data / "meta.properties").exists():
            self._format([java, "-Xmx128m", logging, "-cp", classpath], config)
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

    def _format(self, java: list[str], config: Path) -> None:
        """Give the empty data folder a cluster id."""
        cluster_id = "-"
        while cluster_id.startswith("-"):  # the tool would take it for an option
            cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = [
            *java,
            "kafka.tools.StorageTool",
            "format",
            "-t",
            cluster_id,
            "-c",
            str(config),
            "--ignore-formatted",
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
