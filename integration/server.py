"""A server of ours: started, waited for, stopped, killed, paused, with its log where a person finds it."""

from __future__ import annotations

import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from integration.choice import find_host
from integration.errors import ServerError
from integration.hosts import STOP_TIMEOUT_S, Launch, Running

START_TIMEOUT_S = 60.0
_START_TRIES = 3

#: JVMs that live for a run and serve one machine start in a third less CPU time with these.
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_LOG4J = """status = warn
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


#: Below the ports that systems give to outgoing connections: one of those may take a port between its choice and its use.
_PORTS = range(15_000, 32_000)
_CHANCE = random.SystemRandom()


def free_port() -> int:
    """A port of the loopback interface that is free now. Another server may take it first: starting retries."""
    while True:
        port = _CHANCE.choice(_PORTS)
        if not port_taken(port):
            return port


def port_taken(port: int) -> bool:
    """Whether something listens on that port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def exchange(port: int, words: bytes, size: int = 16, timeout_s: float = 1.0) -> bytes:
    """Send to a port of the loopback interface and return what comes first; nothing when nobody is there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(words)
            return connection.recv(size)
    except OSError:
        return b""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look until it is so. Raises ``ServerError`` naming ``what`` did not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.05)


class Server(ABC):
    """One server in one folder, on the loopback interface. ``port`` None: any free one, kept from then on.

    ``guarded``: it ends with this process, however this process ends. Otherwise it runs until ``stop``. ``settings``: of the
    server's own, over those that it is given here; a server that takes none ignores them. ``where``: "embedded" or "containers";
    by default what ``RATCHET_SERVERS`` says.
    """

    #: Also the name of its log file.
    name = "server"
    #: Which programs it needs: a key of ``integration.images.IMAGES``.
    kind = "server"
    #: What asks it to end in order.
    stop_signal = "TERM"

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        guarded: bool = True,
        settings: dict[str, str] | None = None,
        where: str | None = None,
    ) -> None:
        self.host = find_host(self.kind, where)
        self.folder = folder
        self._settings = settings or {}
        self._wanted_port = port
        self._guarded = guarded
        self._running: Running | None = None
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
        """The pid of the server itself, as this machine sees it."""
        return self._running.pid if self._running is not None else None

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
            if self._wanted_port is None and (self.port == 0 or port_taken(self.port)) and not self._await_own_port():
                self.port = free_port()
            try:
                self._running = self.host.launch(
                    Launch(
                        self.name,
                        self.prepare(),
                        self.folder,
                        self.log_file,
                        self.stop_signal,
                        self._guarded,
                        self.held_files,
                        self.reads(),
                    )
                )
                self._await_ready()
                return
            except ServerError:
                self.kill()
                if attempt == _START_TRIES or self._wanted_port is not None or not self._port_was_lost():
                    raise
                self.port = 0

    def _await_own_port(self) -> bool:
        """A server that was just killed may hold its port for a moment yet: true when it is free again."""
        deadline = time.monotonic() + (2.0 if self.port else 0.0)
        while time.monotonic() < deadline:
            if not port_taken(self.port):
                return True
            time.sleep(0.05)
        return False

    @abstractmethod
    def prepare(self) -> list[str]:
        """Write configuration; return the command."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server answers, by asking it."""

    def reads(self) -> tuple[Path, ...]:
        """Files outside of its folder that it reads."""
        return ()

    def write(self, name: str, text: str) -> Path:
        """A file in the server's folder. Raises ``ServerError``."""
        file = self.folder / name
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; make room or give another folder") from error
        return file

    def java_logging(self) -> str:
        """The JVM option that sends warnings, and nothing else, to the log file."""
        return f"-Dlog4j2.configurationFile={self.write('log4j2.properties', _LOG4J)}"

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it in order. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.stop(timeout_s)

    def kill(self) -> None:
        """kill -9, as a crash would. ``start`` brings it back on the same data. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open and nothing is answered."""
        if self._running is not None:
            self._running.pause()

    def resume(self) -> None:
        """Let a paused server go on."""
        if self._running is not None:
            self._running.resume()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.is_ready():
                return
            if self._running is None or not self._running.alive:
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


def start_together(servers: Sequence[Server]) -> None:
    """Start several side by side and wait for all. Raises the first failure, with none left running."""
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            for each in [pool.submit(server.start) for server in servers]:
                each.result()
    except BaseException:
        stop_all(servers)
        raise


def stop_all(servers: Sequence[Server]) -> None:
    """Stop several side by side."""
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: server.stop(), servers))
