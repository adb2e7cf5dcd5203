"""Where servers run: as child processes of this one, or in containers.

Each kind of server (``kafka``, ``zookeeper``, ``postgres``, ``redis``, ``registry``) has a ``Host``, which knows where that kind's
programs and jars are, runs its tools, and launches it. Both hosts see the same files at the same paths and the same network,
so that a server is described once, and what a test finds out about it holds for both.

``RATCHET_SERVERS`` chooses: ``embedded`` (child processes; the default) or ``containers``. With ``external`` nothing is started:
see ``integration.external``.
"""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.errors import ServerError
from integration.jars import Progress

VARIABLE = "RATCHET_SERVERS"
EMBEDDED, CONTAINERS, EXTERNAL = "embedded", "containers", "external"
CHOICES = (EMBEDDED, CONTAINERS, EXTERNAL)

STOP_TIMEOUT_S = 20.0
TOOL_TIMEOUT_S = 180.0


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
