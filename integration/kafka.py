"""Apache Kafka brokers (KRaft): one broker that is its own controller, or a cluster."""

from __future__ import annotations

import shutil
import time
import uuid
from abc import ABC, abstractmethod
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from integration.errors import ServerError
from integration.jars import Progress, no_config_providers
from integration.processes import ProcessHost
from integration.server import Server, free_port, port_taken, start_together, stop_all

HEAP = "-Xmx512m"
#: The file in which the format tool writes the features and the users.
CHECKPOINT = "bootstrap.checkpoint"
#: From this many brokers on, the first three are controllers, and any one broker may die.
_CONTROLLERS = 3


def answer_of_live_brokers(ask: Callable[[], Future[None]], timeout_s: float = 240) -> None:
    """Request something of the controller, such as a topic, and wait for its answer.

    A controller that has not heard of the brokers for a while, because they or the machine stood
    still, refuses what needs a broker ("fenced"). Then this requests it again, for ``timeout_s``
    seconds. Raises ``KafkaException`` for any other refusal.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            ask().result(timeout_s)
        except KafkaException as error:
            if "fenced" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


class Listener(ABC):
    """A second listener of a broker, with another security protocol than the plain one. Its name in
    the broker's settings is ``SECURE``."""

    #: The security protocol.
    protocol = "SASL_SSL"
    #: 0 for any free port.
    port: int = 0
    #: The users to create at the first start: name -> password.
    users: Mapping[str, str] = MappingProxyType({})
    #: Options of the broker's Java.
    java_options: Sequence[str] = ()

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """The broker's settings of this listener, without the prefix ``listener.name.secure.``"""

    def reads(self) -> tuple[Path, ...]:
        """The files that the broker reads because of this listener."""
        return ()

    def properties(self, address: str) -> dict[str, str]:
        """The additions of this listener to the broker's settings."""
        return {
            "listeners": f",SECURE://{address}",
            "advertised.listeners": f",SECURE://{address}",
            "listener.security.protocol.map": f",SECURE:{self.protocol}",
            **{f"listener.name.secure.{key}": value for key, value in self.settings().items()},
        }


@dataclass(frozen=True)
class SecureListener(Listener):
    """A listener for TLS with SASL/SCRAM. ``certificate``: a PEM file with the private key and the
    chain."""

    certificate: Path
    users: Mapping[str, str] = field(repr=False)
    port: int = 0

    def settings(self) -> dict[str, str]:
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificate),
            "sasl.enabled.mechanisms": "SCRAM-SHA-256",
            "scram-sha-256.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
        }

    def reads(self) -> tuple[Path, ...]:
        return (self.certificate,)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The id of a cluster, and where its controllers listen: node id -> port."""

    cluster_id: str
    controllers: dict[int, int]

    def renew_ports(self) -> None:
        """Replace ports that another program took before the cluster started."""
        self.controllers.update({node: free_port() for node, port in self.controllers.items() if port_taken(port)})

    @classmethod
    def of(cls, controllers: int, cluster_id: str | None = None) -> Quorum:
        """A cluster whose first ``controllers`` nodes vote. Without an id, it is a new cluster."""
        return cls(cluster_id or _new_cluster_id(), {node: free_port() for node in range(1, controllers + 1)})


class KafkaBroker(Server):
    """A broker on the loopback interface. It accepts plain connections; ``secure`` adds a secure
    listener. It does not create topics automatically. ``quorum``: the cluster to join; by default
    the broker is a cluster of its own."""

    name = "kafka"
    kind = "kafka"
    #: Settings of every broker; the settings of a single broker override them.
    common_settings: Mapping[str, str] = MappingProxyType({})
    #: A ``CHECKPOINT`` that the format tool of the same Kafka wrote, without users: child
    #: processes without users start from a copy of it, and run no tool.
    checkpoint: Path | None = None

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        progress: Progress | None = None,
        settings: dict[str, str] | None = None,
        secure: Listener | None = None,
        quorum: Quorum | None = None,
        node_id: int = 1,
        where: str | None = None,
    ) -> None:
        super().__init__(
            folder, port, guarded=guarded, settings={**self.common_settings, **(settings or {})}, where=where
        )
        self._progress = progress
        self._secure = secure
        self._secure_port = (secure.port or free_port()) if secure is not None else 0
        self.quorum = quorum or Quorum.of(1)
        self._alone = quorum is None
        self._node_id = node_id

    @property
    def secure_address(self) -> str:
        """The address of the secure listener."""
        return f"127.0.0.1:{self._secure_port}"

    def prepare(self) -> list[str]:
        java, files = self.host.java(), self.java_files()
        classpath = f"{no_config_providers()}:{self.host.classpath(self._progress)}"
        options = (*self.java_options, *(self._secure.java_options if self._secure is not None else ()))
        data = self.folder / "data"
        if list(self.quorum.controllers) == [self._node_id] and self._alone:
            self.quorum.renew_ports()
        controllers = {node: f"127.0.0.1:{port}" for node, port in self.quorum.controllers.items()}
        own = controllers.get(self._node_id)
        properties = {
            "process.roles": "broker,controller" if own else "broker",
            "node.id": str(self._node_id),
            "listeners": f"PLAINTEXT://{self.address}" + (f",CONTROLLER://{own}" if own else ""),
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.voters": ",".join(f"{node}@{address}" for node, address in controllers.items()),
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
        config = self._write_properties("server.properties", properties)
        if not (data / "meta.properties").exists():
            java_tool = [java, "-Xmx128m", *options, *files, "-cp", classpath]
            self.initialise(data, lambda folder: self._format(java_tool, {**properties, "log.dirs": str(folder)}))
        return [
            java,
            HEAP,
            *options,
            *files,
            "-cp",
            classpath,
            "kafka.Kafka",
            str(config),
        ]

    def reads(self) -> tuple[Path, ...]:
        return (no_config_providers(), *(self._secure.reads() if self._secure is not None else ()))

    def _write_properties(self, name: str, properties: Mapping[str, object]) -> Path:
        return self.write(name, "".join(f"{key}={value}\n" for key, value in properties.items()), secret=True)

    def _format(self, java: list[str], properties: Mapping[str, str]) -> None:
        """Format the empty data folder with a cluster id and the users."""
        users = self._secure.users if self._secure is not None else {}
        if not users and self.checkpoint is not None and isinstance(self.host, ProcessHost):
            folder = Path(properties["log.dirs"])
            folder.mkdir()
            shutil.copyfile(self.checkpoint, folder / CHECKPOINT)
            meta = {"version": 1, "node.id": self._node_id, "cluster.id": self.quorum.cluster_id}
            self._write_properties(f"{folder.name}/meta.properties", meta)
            return
        config = self._write_properties("format.properties", properties)
        arguments = ["format", "-t", self.quorum.cluster_id, "-c", str(config), "--ignore-formatted"]
        for name, password in users.items():
            arguments += ["--add-scram", _scram(name, password)]
        # Every user can read a command line, so the tool takes its arguments from a file, one per
        # line.
        file = self.write("format.arguments", "".join(f"{each}\n" for each in arguments), secret=True)
        command = [*java, "kafka.tools.StorageTool", f"@{file}"]
        self.run_tool(command, f"Kafka's data folder {self.folder / 'data'} cannot be formatted")
        file.unlink()

    def is_ready(self) -> bool:
        try:
            client = AdminClient({"bootstrap.servers": self.address, "log_level": 0, "socket.timeout.ms": 10_000})
            return bool(client.list_topics(timeout=10).brokers)
        except KafkaException:
            return False


class KafkaCluster:
    """Several brokers. With fewer than three, the first is the only controller: kill only others.
    From three on, any one broker may die, and internal topics have three copies."""

    def __init__(
        self,
        folder: Path,
        brokers: int,
        settings: Mapping[str, str] | None = None,
        *,
        ports: Sequence[int] = (),
        guarded: bool = True,
        progress: Progress | None = None,
        where: str | None = None,
    ) -> None:
        known = _cluster_id_in(folder / "kafka-1")  # existing data belongs to this cluster
        quorum = Quorum.of(_CONTROLLERS if brokers >= _CONTROLLERS else 1, known)
        copies = min(brokers, 3) if brokers >= _CONTROLLERS else 1
        shared = {
            "broker.session.timeout.ms": "2000",  # after this time a dead broker loses its leaderships
            "broker.heartbeat.interval.ms": "500",
            "default.replication.factor": str(copies),
            "offsets.topic.replication.factor": str(copies),
            "transaction.state.log.replication.factor": str(copies),
            "transaction.state.log.min.isr": str(max(1, copies - 1)),
            "min.insync.replicas": str(max(1, copies - 1)),
            **(settings or {}),
        }
        self.brokers: Sequence[KafkaBroker] = [
            KafkaBroker(
                folder / f"kafka-{number}",
                ports[number - 1] if ports else None,
                settings=shared,
                quorum=quorum,
                node_id=number,
                guarded=guarded,
                progress=progress,
                where=where,
            )
            for number in range(1, brokers + 1)
        ]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def start(self) -> None:
        """Start all concurrently and wait until each serves. They must start together, because a
        controller answers only when a majority of controllers runs."""
        start_together(self.brokers, self.renew_ports)

    def renew_ports(self) -> None:
        """Replace the controllers' ports that another program took before the cluster started."""
        self.brokers[0].quorum.renew_ports()

    def stop(self) -> None:
        """Stop all, the controllers last."""
        voters = len(self.brokers[0].quorum.controllers)
        if len(self.brokers) > voters:
            stop_all(self.brokers[voters:])
        stop_all(self.brokers[:voters])

    def __enter__(self) -> KafkaCluster:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _cluster_id_in(folder: Path) -> str | None:
    """The cluster id with which the data of a broker was formatted; None if there is no data."""
    try:
        lines = (folder / "data" / "meta.properties").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServerError(f"{folder}: {error.strerror or error}; give another folder") from error
    return next((line.partition("=")[2] for line in lines if line.startswith("cluster.id=")), None)


def _new_cluster_id() -> str:
    cluster_id = "-"
    while cluster_id.startswith("-"):  # the format tool would read it as an option
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return cluster_id


def _scram(name: str, password: str) -> str:
    return f"SCRAM-SHA-256=[name={name},password={password}]"
