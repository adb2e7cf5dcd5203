"""A topology as a process of its own, for tests that kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from integration.processes import freeze
from tests.kit.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 300.0
#: How long an aborted driver may write where its threads were.
DUMP_S = 5.0


class RunProcess:
    """``python -m framework.run MODULE:TOPOLOGY`` with given settings; it can be started many
    times.

    ``module``: another program with the same arguments. A first start waits for a server that is
    away as long as a later one: tests take servers away at any moment.
    """

    def __init__(
        self,
        log: Path,
        topology: str,
        settings: Mapping[str, object],
        *,
        module: str = "framework.run",
        executor: str = "spark",
    ) -> None:
        self.log = log
        self._module = module
        self._executor = executor
        self._topology = topology
        self._settings = {"topology.start.timeout.secs": START_TIMEOUT_S, **settings}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        given, secrets = _without_passwords(self._settings)
        settings = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        with open(self.log, "ab") as log:
            self._from = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", self._module, self._topology, "--executor", self._executor, *settings, *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **secrets, "PYTHONFAULTHANDLER": "1"},  # for ``end``
            )

    def note(self, words: str) -> None:
        """Write a line of the test's own between those of the driver."""
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S', time.gmtime())} test: {words}\n")

    def said(self, words: str) -> bool:
        """Whether this start has printed ``words``."""
        with open(self.log, "rb") as log:
            log.seek(self._from)
            return words.encode() in log.read()

    def wait_for(
        self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S, *, pause_s: float = 0.01
    ) -> bool:
        """True when ``condition`` holds, False when the process ended first."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                return condition()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s} s in vain; the log ends:\n{self.tail()}")
            time.sleep(pause_s)
        return True

    @property
    def pid(self) -> int:
        """The driver's pid."""
        assert self.process is not None
        return self.process.pid

    def signal(self, which: signal.Signals) -> None:
        """Send a signal to the driver alone."""
        os.kill(self.pid, which)

    def freeze(self) -> None:
        """Stop the driver (SIGSTOP), and wait until all its threads have stopped."""
        freeze(self.pid)

    def kill(self) -> bool:
        """Send SIGKILL to the driver alone, and wait for its end.

        False when it had ended by itself.
        """
        assert self.process is not None
        alive = self.process.poll() is None
        if alive:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        return alive

    def end(self) -> None:
        """Kill the driver and its process group, whatever is left of them. Print the end of the
        log, which pytest shows if the test has failed: a driver that still ran adds where its
        threads were.
        """
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DUMP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        print(f"{self.log} ends:\n{self.tail(200)}")

    def finish(self, timeout_s: float = 600) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"waited {timeout_s} s in vain; the log ends:\n{self.tail()}") from None

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def commands_below(process: psutil.Process) -> list[str]:
    """What the processes below this one were started with, a line each."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found.append(" ".join(each.cmdline()))
    return found


def _without_passwords(settings: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Settings for a command line, which everybody can read: addresses with a password are
    references to environment variables. And these variables."""
    given, variables = dict(settings), dict[str, str]()
    for key, value in settings.items():
        if "://" in str(value) and urlsplit(str(value)).password:
            name = f"SETTING_{len(variables)}"
            given[key], variables[name] = f"${{{name}}}", str(value)
    return given, variables
