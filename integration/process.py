"""A server as a child process: started, waited for, stopped, killed, with its log where a person finds it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

from integration.errors import ServerError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_START_TRIES = 3

_LOG4J = """status = warn
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


def free_port() -> int:
    """A port of the loopback interface that is free now. Another process may take it first: starting retries."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class ServerProcess(ABC):
    """One server in one folder. ``port`` None: any free one.

    ``guarded``: it ends with this process, however this process ends. Otherwise it runs until ``stop``. ``settings``: of the
    server's own, over those that it is given here; a server that takes none ignores them.
    """

    name = "server"
    #: What asks it to end in order.
    stop_signal = "TERM"

    def __init__(
        self, folder: Path, port: int | None = None, *, guarded: bool = True, settings: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._settings = settings or {}
        self._wanted_port = port
        self._guarded = guarded
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port or 0
        #: Open files that the guardian holds as long as it lives, such as the lock of the work folder.
        self.held_files: tuple[int, ...] = ()

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The pid of the server itself (guarded: of the guardian's child)."""
        if self._process is None or self._process.poll() is not None:
            return None
        return _child_of(self._process.pid) if self._guarded else self._process.pid

    def start(self) -> None:
        """Start and wait until it serves. Keeps the port it had before, where it can. Raises ``ServerError``."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; give another folder") from error
        if self._wanted_port is not None and port_taken(self._wanted_port):
            raise ServerError(
                f"port {self._wanted_port} is taken: stop what listens there, or start {self.name} without a fixed port"
            )
        for attempt in range(1, _START_TRIES + 1):
            if self._wanted_port is None and (self.port == 0 or port_taken(self.port)):
                self.port = free_port()
            try:
                self._launch(self.prepare())
                self._await_ready()
                return
            except ServerError:
                self.kill()
                if attempt == _START_TRIES or self._wanted_port is not None or not self._port_was_lost():
                    raise
                self.port = 0

    @abstractmethod
    def prepare(self) -> list[str]:
        """Write configuration; return the command."""

    def java_logging(self) -> str:
        """The JVM option that sends warnings, and nothing else, to the log file."""
        config = self.folder / "log4j2.properties"
        config.write_text(_LOG4J, encoding="utf-8")
        return f"-Dlog4j2.configurationFile={config}"

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server answers, by asking it."""

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it in order. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._guarded and process.stdin is not None:
            process.stdin.close()
        else:
            process.send_signal(signal.Signals[f"SIG{self.stop_signal}"])
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process = process
            self.kill()

    def kill(self) -> None:
        """kill -9, as a crash would. ``start`` brings it back on the same data."""
        pid, process = self.pid, self._process
        self._process = None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(STOP_TIMEOUT_S)

    def _launch(self, command: list[str]) -> None:
        guard = [sys.executable, "-m", "integration.guardian", self.stop_signal] if self._guarded else []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KAFKA_")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
        )
        try:
            with open(self.log_file, "ab") as log:
                self._process = subprocess.Popen(
                    [*guard, *command],
                    stdin=subprocess.PIPE if self._guarded else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=environment,
                    pass_fds=self.held_files if self._guarded else (),
                    start_new_session=not self._guarded,
                )
        except OSError as error:
            raise ServerError(f"{self.name} does not start: {error}") from error

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.is_ready():
                return
            if self._process is None or self._process.poll() is not None:
                raise ServerError(f"{self.name} ended while starting: {self._last_words()}; its log is {self.log_file}")
            time.sleep(0.05)
        raise ServerError(f"{self.name} did not answer within {START_TIMEOUT_S:g} s; its log is {self.log_file}")

    def _tail(self) -> list[str]:
        try:
            return self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-60:]
        except OSError:
            return []

    def _last_words(self) -> str:
        signs = ("No space left", "Address already in use", "BindException", "Exception", "ERROR", "Error")
        lines = self._tail()
        for sign in signs:
            for line in reversed(lines):
                if sign in line:
                    return line.strip()[:300]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def _port_was_lost(self) -> bool:
        return any("Address already in use" in line or "BindException" in line for line in self._tail())


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
