"""Where servers run: as child processes of this one, or in containers.

Each kind of server (``kafka``, ``zookeeper``, ``postgres``, ``redis``, ``registry``) has a ``Host``, which knows where that kind's
programs and jars are, runs its tools, and launches it. Both hosts see the same files at the same paths and the same network,
so that a server is described once, and what a test finds out about it holds for both.

``RATCHET_SERVERS`` chooses: ``embedded`` (child processes; the default) or ``containers``. With ``external`` nothing is started:
see ``integration.external``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.errors import NotOursError, ServerError
from integration.jars import Progress, kafka_jars, spark_jars
from integration.java import find_java
from integration.packages import find_program

VARIABLE = "RATCHET_SERVERS"
EMBEDDED, CONTAINERS, EXTERNAL = "embedded", "containers", "external"
CHOICES = (EMBEDDED, CONTAINERS, EXTERNAL)

STOP_TIMEOUT_S = 20.0
TOOL_TIMEOUT_S = 180.0

#: The Debian package that each kind's programs come from, and where they are if they are not on the PATH.
PACKAGES = {"postgres": "postgresql", "redis": "redis-server"}
FOLDERS = {"postgres": ("usr/lib/postgresql/*/bin",)}

KAFKA_LOGGING_JARS = ("slf4j-api-2*", "log4j-slf4j2-impl-2*", "log4j-api-2*", "log4j-core-2*")
ZOOKEEPER_JARS = (
    "zookeeper-*",
    "netty-*",
    "slf4j-api-*",
    "log4j-*",
    "metrics-core-*",
    "snappy-java-*",
    "commons-*",
    "jackson-*",
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A server about to run. ``folder``: its working directory, the only place it writes to. ``reads``: files elsewhere
    that it reads. ``guarded``: it ends with this process, however this process ends."""

    name: str
    command: Sequence[str]
    folder: Path
    log_file: Path
    stop_signal: str = "TERM"
    guarded: bool = True
    held_files: tuple[int, ...] = ()
    reads: tuple[Path, ...] = ()


class Running(ABC):
    """A server that was launched."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The server's own pid as this machine sees it; None when it has ended."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it has not ended."""

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """Ask it to end, wait, then insist."""

    @abstractmethod
    def kill(self) -> None:
        """``kill -9``, and what it leaves in the process table is gone too."""

    @abstractmethod
    def pause(self) -> None:
        """Stop it in the middle of whatever it does; connections stay open."""

    @abstractmethod
    def resume(self) -> None:
        """Let it go on."""


class Host(ABC):
    """Programs and jars of one kind of server, and the means to run it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @abstractmethod
    def java(self) -> str:
        """The command that runs Java 17 or newer."""

    @abstractmethod
    def classpath(self, progress: Progress | None = None) -> str:
        """Of Kafka, or of ZooKeeper."""

    @abstractmethod
    def program(self, name: str) -> str:
        """The command for a program of this kind's package."""

    @abstractmethod
    def as_user(self, user: str) -> list[str]:
        """What to put before a command that must not run as root; nothing where this is another user anyway."""

    @abstractmethod
    def run(self, command: Sequence[str], folder: Path, reads: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        """Run a tool in ``folder`` to its end; stdout and stderr come back together. Raises ``ServerError`` when it
        cannot be run; a tool's own failure is its return code."""

    @abstractmethod
    def launch(self, launch: Launch) -> Running:
        """Start a server. Raises ``ServerError``."""


def chosen() -> str:
    """What ``RATCHET_SERVERS`` says. Raises ``ServerError`` when that is none of the choices."""
    value = os.environ.get(VARIABLE) or EMBEDDED
    if value not in CHOICES:
        raise ServerError(f"{VARIABLE} is {value!r}: it must be one of {', '.join(CHOICES)}")
    return value


def find_host(kind: str, where: str | None = None) -> Host:
    """The host of a kind of server: ``where`` it says, else where ``RATCHET_SERVERS`` says.

    Raises ``NotOursError`` where servers are external: they cannot be started, let alone killed.
    """
    where = where or chosen()
    if where == EXTERNAL:
        raise NotOursError(f"{VARIABLE} is {EXTERNAL}, and this wants a {kind} server of its own to start and stop")
    if where == CONTAINERS:
        from integration.containers import ContainerHost  # needs packages that only this choice needs

        return ContainerHost(kind)
    return ProcessHost(kind)


# --- child processes ----------------------------------------------------------------------------------------------


class ProcessHost(Host):
    """This machine, with the programs that are installed on it."""

    def java(self) -> str:
        return find_java()

    def classpath(self, progress: Progress | None = None) -> str:
        if self.kind == "zookeeper":
            return ":".join(map(str, find_jars(ZOOKEEPER_JARS)))
        # Kafka's own jars hold SLF4J without anything behind it; the ones that come with PySpark write the log.
        return ":".join([*map(str, find_jars(KAFKA_LOGGING_JARS)), f"{kafka_jars(progress)}/*"])

    def program(self, name: str) -> str:
        if name == "python3":
            return sys.executable
        return find_program(name, PACKAGES[self.kind], FOLDERS.get(self.kind, ()))

    def as_user(self, user: str) -> list[str]:
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]

    def run(self, command: Sequence[str], folder: Path, reads: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd="/",
                timeout=TOOL_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"{Path(command[0]).name} cannot be run: {error}") from error

    def launch(self, launch: Launch) -> Running:
        return ChildProcess(launch)


def find_jars(patterns: Sequence[str]) -> list[Path]:
    """Those of PySpark's jars that match."""
    return [jar for pattern in patterns for jar in sorted(spark_jars().glob(f"{pattern}.jar"))]


class ChildProcess(Running):
    """Guarded: ``self._process`` is the guardian, and the server its one child."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        guard = [sys.executable, "-m", "integration.guardian", launch.stop_signal] if launch.guarded else []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KAFKA_")}
        if launch.guarded:
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(Path(__file__).parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
            )
        try:
            with open(launch.log_file, "ab") as log:
                self._process = subprocess.Popen(
                    [*guard, *launch.command],
                    stdin=subprocess.PIPE if launch.guarded else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=launch.folder,
                    env=environment,
                    pass_fds=launch.held_files if launch.guarded else (),
                    start_new_session=not launch.guarded,
                )
        except OSError as error:
            raise ServerError(f"{launch.name} does not start: {error}") from error

    @property
    def guardian_pid(self) -> int:
        """Whoever keeps the server from outliving this process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int | None:
        if not self.alive:
            return None
        return _child_of(self._process.pid) if self._launch.guarded else self._process.pid

    def stop(self, timeout_s: float) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.send_signal(signal.Signals[f"SIG{self._launch.stop_signal}"])
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, which: signal.Signals) -> None:
        pid = self.pid
        if pid is not None:
            os.kill(pid, which)


def _child_of(pid: int) -> int | None:
    """The guardian's one child."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        except OSError:
            answer = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
            children = answer.stdout.split()
        if children:
            return int(children[0])
        time.sleep(0.02)
    return None
