"""Kafka and ZooKeeper together, in one work folder. A later run finds their data again."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from framework.local_paths import local_path, lock_opener
from integration.errors import ServerError
from integration.folder_permissions import check_owner
from integration.jars import Progress
from integration.kafka import KafkaBroker, KafkaCluster
from integration.server import START_TIMEOUT_S, Server, start_together, stop_all
from integration.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

STATE_FILE = "servers.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """How many servers of each kind. With three or more brokers, topics can have three copies, and
    any one broker may die."""

    brokers: int = 1
    zookeepers: int = 1


class EmbeddedServers:
    """Brokers and ZooKeeper servers that end with this process. Their data stays in ``folder``.

    ``shape``: how many of each; by default one. ``kafka_port``, ``zookeeper_port``: the port of the
    first server; further servers take the next ports. ``guarded`` False: they run until ``stop``.
    ``where``: "embedded" or "containers"; by default the value of ``RATCHET_SERVERS``.

    ::

        with EmbeddedServers(Path(".ratchet/servers")) as servers:
            servers.bootstrap_servers, servers.zookeeper
    """

    def __init__(
        self,
        folder: Path,
        *,
        kafka_port: int | None = None,
        zookeeper_port: int | None = None,
        guarded: bool = True,
        progress: Progress | None = None,
        kafka_settings: dict[str, str] | None = None,
        shape: Shape | None = None,
        where: str | None = None,
    ) -> None:
        self.folder = local_path(folder, "folder of servers").absolute()
        shape = shape or Shape()
        self._cluster = KafkaCluster(
            self.folder,
            shape.brokers,
            kafka_settings,
            ports=[kafka_port + number for number in range(shape.brokers)] if kafka_port else (),
            guarded=guarded,
            progress=progress,
            where=where,
        )
        self._ensemble = ZooKeeperEnsemble(
            self.folder,
            shape.zookeepers,
            ports=[zookeeper_port + number for number in range(shape.zookeepers)] if zookeeper_port else (),
            guarded=guarded,
            where=where,
        )
        self._lock: IO[str] | None = None

    @property
    def brokers(self) -> list[KafkaBroker]:
        return list(self._cluster.brokers)

    @property
    def zookeepers(self) -> list[ZooKeeperServer]:
        return list(self._ensemble.servers)

    @property
    def all(self) -> list[Server]:
        return [*self.zookeepers, *self.brokers]

    @property
    def kafka(self) -> KafkaBroker:
        """The first broker."""
        return self.brokers[0]

    @property
    def zookeeper_server(self) -> ZooKeeperServer:
        """The first ZooKeeper server."""
        return self.zookeepers[0]

    @property
    def bootstrap_servers(self) -> str:
        return self._cluster.bootstrap_servers

    @property
    def zookeeper(self) -> str:
        return self._ensemble.address

    def start(self) -> None:
        """Start all and wait until they serve. If it raises ``ServerError``, none is left
        running."""
        self._take_folder()
        try:
            start_together(self.all, self._renew_ports)
        except BaseException:
            self.stop()
            raise

    def _renew_ports(self) -> None:
        self._cluster.renew_ports()
        self._ensemble.renew_ports()

    def stop(self) -> None:
        """Stop all in order. Safe to call twice."""
        self._cluster.stop()
        stop_all(self.zookeepers)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> EmbeddedServers:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _take_folder(self) -> None:
        """Lock the folder, because two instances must not share it."""
        check_owner(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "a+", encoding="utf-8", opener=lock_opener)  # noqa: SIM115 - held as long as the servers run
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; give another folder") from error
        try:
            self._wait_for_lock(lock)
            running = read_state(self.folder)
            if running is not None:
                raise ServerError(
                    f"servers already run in {self.folder} (ratchet servers down --dir {self.folder} ends them)"
                )
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            self.kafka.host.remove_left_behind(self.folder)
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        for server in self.all:
            server.held_files = (lock.fileno(),)

    def _wait_for_lock(self, lock: IO[str]) -> None:
        """Take the lock. If a previous owner was killed, its servers may still be stopping, and
        their guardians hold the lock: wait for them. If the owner lives, fail immediately."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                lock.seek(0)
                owner = lock.read().strip()
                alive = not owner.isdigit() or Path(f"/proc/{owner}").exists()
                if alive or time.monotonic() > deadline:
                    raise ServerError(
                        f"servers already run in {self.folder}: use them, stop them, or give another folder"
                    ) from None
                time.sleep(0.1)


def read_state(folder: Path) -> dict[str, Any] | None:
    """The document that ``up`` wrote, if any of its servers still runs; otherwise None. Raises
    ``ServerError``."""
    check_owner(folder)
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ServerError(f"{folder / STATE_FILE} cannot be read ({error}): remove it if no servers run") from error
    return state if any(is_ours(pid, folder) for pid in state["pids"].values()) else None


#: The kernel's flag of a process that is ending (``PF_EXITING``).
_EXITING = 0x4


def is_ours(pid: int, folder: Path) -> bool:
    """Whether the process is a server of this folder, rather than a later process with the same
    pid, which may be another user's."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid not in (0, os.geteuid()):
            return False
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        state, flags = fields[0], int(fields[6])
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except (OSError, IndexError):
        return False
    # The first thread of a JVM may have ended while other threads still hold its ports. Then its
    # command line is empty, too. The same holds for a process that is ending: it frees its memory
    # first, and its ports later.
    if state == "Z":
        return threads > 1
    return bool(flags & _EXITING) or str(folder).encode() in command
