"""Where servers run: as child processes of this one, or in containers.

Each kind of server (``kafka``, ``zookeeper``, ``postgres``, ``pgbouncer``, ``redis``, ``registry``,
``spark``) has a ``Host``. The host knows where the programs and jars are, runs tools, and launches
the server. Both kinds of hosts see the same files at the same paths, and the same network. So a
server is described once, and test results are valid for both.

``RATCHET_SERVERS`` chooses: ``embedded`` (child processes, the default) or ``containers``. With
``external`` nothing is started: see ``integration.external``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from integration.errors import ServerError
from integration.jars import Progress

VARIABLE = "RATCHET_SERVERS"
EMBEDDED, CONTAINERS, EXTERNAL = "embedded", "containers", "external"
CHOICES = (EMBEDDED, CONTAINERS, EXTERNAL)

STOP_TIMEOUT_S = 20.0
TOOL_TIMEOUT_S = 180.0
_SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class Launch:
    """The way to run a server.

    * ``folder``: its working directory, the only place to which it writes.
    * ``stop_signal``: the signal for an orderly end.
    * ``guarded``: it ends with this process, however this process ends.
    * ``held_files``: open files that the guardian holds while it lives.
    * ``reads``: files elsewhere that the server reads.
    * ``private``: no other user may open the files that it writes."""

    name: str
    command: Sequence[str]
    _: KW_ONLY
    folder: Path
    log_file: Path
    stop_signal: str = "TERM"
    guarded: bool = True
    held_files: tuple[int, ...] = ()
    reads: tuple[Path, ...] = ()
    private: bool = True


class Running(ABC):
    """A server that was launched."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The server's own pid, as this machine sees it; None if it has ended."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it still runs."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """The exit code of a server that has ended by itself; 128 + N if signal N ended it."""

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """Ask the server to end, wait up to ``timeout_s`` seconds, then kill it."""

    @abstractmethod
    def kill(self) -> None:
        """``kill -9``, and remove the process from the process table."""

    @abstractmethod
    def pause(self) -> None:
        """Freeze it. Connections stay open."""

    @abstractmethod
    def resume(self) -> None:
        """Continue it after ``pause``."""


class Host(ABC):
    """Programs and jars of one kind of server, and the means to run it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @abstractmethod
    def java(self) -> str:
        """The command that runs Java 17 or newer."""

    @abstractmethod
    def classpath(self, progress: Progress | None = None) -> str:
        """The classpath of Kafka or of ZooKeeper."""

    @abstractmethod
    def program(self, name: str) -> str:
        """The command for a program of this kind's package."""

    @abstractmethod
    def as_user(self, user: str) -> list[str]:
        """The prefix for a command that must not run as root; empty if this process is not root."""

    @abstractmethod
    def run(self, command: Sequence[str], folder: Path, reads: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        """Run a tool to its end. The tool may use files in ``folder`` and ``reads``. Returns stdout
        and stderr together. Raises ``ServerError`` if the tool cannot be run. A failure of the tool
        itself is its return code."""

    @abstractmethod
    def launch(self, launch: Launch) -> Running:
        """Start a server. Raises ``ServerError``."""

    def remove_left_behind(self, folder: Path) -> None:
        """Remove the servers in a folder that a killed process has left, and wait until they have
        ended. Only the owner of the folder may call this. Raises ``ServerError``. Nothing needs to
        be done where guardians hold ``held_files`` until their servers have ended."""


def ending_signal(exit_code: int | None) -> str | None:
    """The name of the signal that ended a program, such as "SIGSEGV"; None if no signal did. Takes
    the codes of Python (-N) and of shells and containers (128 + N)."""
    if exit_code is None or 0 <= exit_code <= _SIGNALLED:
        return None
    number = -exit_code if exit_code < 0 else exit_code - _SIGNALLED
    return signal.Signals(number).name if number in set(signal.Signals) else None


def chosen() -> str:
    """The value of ``RATCHET_SERVERS``. Raises ``ServerError`` for an unknown value."""
    value = os.environ.get(VARIABLE) or EMBEDDED
    if value not in CHOICES:
        raise ServerError(f"{VARIABLE} is {value!r}: it must be one of {', '.join(CHOICES)}")
    return value
