"""Kafka and ZooKeeper together, in one work folder that a second run finds again."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from integration.errors import ServerError
from integration.jars import Progress
from integration.kafka import KafkaBroker
from integration.process import STOP_TIMEOUT_S
from integration.zookeeper import ZooKeeperServer

STATE_FILE = "servers.json"
DEFAULT_FOLDER = Path(".ratchet/servers")


class EmbeddedServers:
    """A broker and a ZooKeeper server as children of this process: they end with it, their data stays in ``folder``.

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
    ) -> None:
        self.folder = folder.absolute()
        self.kafka = KafkaBroker(
            self.folder / "kafka", kafka_port, guarded=guarded, progress=progress, settings=kafka_settings
        )
        self.zookeeper_server = ZooKeeperServer(self.folder / "zookeeper", zookeeper_port, guarded=guarded)
        self._lock: IO[str] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return self.kafka.address

    @property
    def zookeeper(self) -> str:
        return self.zookeeper_server.address

    def start(self) -> None:
        """Start both and wait until they serve. Raises ``ServerError``, with nothing left running."""
        self._take_folder()
        try:
            with ThreadPoolExecutor(2) as pool:
                started = [pool.submit(self.zookeeper_server.start), pool.submit(self.kafka.start)]
            for each in started:
                each.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop both in order. Safe to call twice."""
        self.kafka.stop()
        self.zookeeper_server.stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> EmbeddedServers:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _take_folder(self) -> None:
        """Two instances do not share a folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the servers run
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; give another folder") from error
        try:
            self._wait_for_lock(lock)
            running = read_state(self.folder)
            if running is not None:
                raise ServerError(
                    f"servers already run in {self.folder} (python -m integration down --dir {self.folder} ends them)"
                )
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        self.kafka.held_files = self.zookeeper_server.held_files = (lock.fileno(),)

    def _wait_for_lock(self, lock: IO[str]) -> None:
        """A parent that was killed leaves servers that are still stopping, and their guardians hold the lock: wait for
        them. While the parent lives there is nothing to wait for."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
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


# --- servers that outlive the command that started them -----------------------------------------------------------


def read_state(folder: Path) -> dict[str, Any] | None:
    """What ``up`` wrote, if those servers still run."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ServerError(f"{folder / STATE_FILE} cannot be read ({error}): remove it if no servers run") from error
    return state if any(_is_ours(pid, folder) for pid in state["pids"].values()) else None


def up(
    folder: Path, *, kafka_port: int | None, zookeeper_port: int | None, progress: Progress | None
) -> dict[str, Any]:
    """Start servers that run until ``down``; returns their addresses. Already running ones are only reported."""
    folder = folder.absolute()
    running = read_state(folder)
    if running is not None:
        return running
    servers = EmbeddedServers(
        folder, kafka_port=kafka_port, zookeeper_port=zookeeper_port, guarded=False, progress=progress
    )
    servers.start()
    state = {
        "kafka": servers.bootstrap_servers,
        "zookeeper": servers.zookeeper,
        "logs": [str(servers.kafka.log_file), str(servers.zookeeper_server.log_file)],
        "pids": {"kafka": servers.kafka.pid, "zookeeper": servers.zookeeper_server.pid},
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    return state


def down(folder: Path, timeout_s: float = 20.0) -> bool:
    """Stop what ``up`` started; False when nothing ran."""
    folder = folder.absolute()
    state = read_state(folder)
    if state is None:
        return False
    for name in ("kafka", "zookeeper"):
        _end(state["pids"][name], folder, timeout_s)
    (folder / STATE_FILE).unlink(missing_ok=True)
    return True


def _end(pid: int, folder: Path, timeout_s: float) -> None:
    if not _is_ours(pid, folder):
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while _is_ours(pid, folder):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether that process is a server of this folder, and not a later one with the same number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return str(folder).encode() in command and state != "Z"
