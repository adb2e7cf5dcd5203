"""A server that Ratchet runs: it can be started, stopped, killed and paused, and writes a log
file."""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Self

from framework.local_paths import local_path
from integration.errors import KilledError, ServerError
from integration.folder_permissions import check_owner, check_reachable
from integration.process_or_container import find_host
from integration.server_launcher import STOP_TIMEOUT_S, Launch, Running, ending_signal

START_TIMEOUT_S = 240.0
_START_TRIES = 3

#: With these options, JVMs for short runs on one machine start with a third less CPU time.
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
#: The words of ``initdb`` for a signal that ended the server that it had started.
_CHILD_KILLED = re.compile(r"child process was terminated by signal \d+")
_REASON = re.compile(rf"Exception|Error|ERROR|got signal|{_CHILD_KILLED.pattern}")
_LOG4J = """status = warn
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""


#: Ports below the range for outgoing connections. One of those connections could take a port before
#: the server uses it.
_PORTS = range(15_000, 32_000)
#: How many of them one process chooses from. No other process does, as long as it lives: otherwise
#: it could take the port of a server that is about to start, or to start again.
_SHARE = 500
#: The abstract sockets of Linux whose owners have a share. They are as local as ports are.
_SHARES = "\0ratchet-ports"
_CHANCE = random.SystemRandom()
#: The ports that this process chose last. Two servers that have not started yet must not share one.
_CHOSEN: deque[int] = deque(maxlen=3 * _SHARE // 4)


class _Share(NamedTuple):
    """The ports of a process. ``held``: the open socket that keeps others from them."""

    process: int
    ports: range
    held: int | None


_share: _Share | None = None
_share_lock = threading.Lock()


def free_port() -> int:
    """A port of the loopback interface that is free now, and not one of the last 375 that this
    process chose. If another program takes it first, ``Server.start`` tries another one."""
    tries = 0
    while True:
        tries += 1
        port = _CHANCE.choice(_own_ports() if tries < _SHARE else _PORTS)  # other programs may have all of them
        if port not in _CHOSEN and not port_taken(port):
            _CHOSEN.append(port)
            return port


def _own_ports() -> range:
    """The ports that this process chooses from."""
    global _share
    with _share_lock:
        if _share is None or _share.process != os.getpid():
            _share = _take_share()
        return _share.ports


def _take_share() -> _Share:
    """A share that no process has; all ports where each has its owner, and on other systems."""
    starts = list(_PORTS[::_SHARE]) if sys.platform == "linux" else []
    _CHANCE.shuffle(starts)
    for start in starts:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"{_SHARES}-{start}")
        except OSError:
            held.close()
            continue
        return _Share(os.getpid(), range(start, start + _SHARE), held.detach())
    return _Share(os.getpid(), _PORTS, None)


def port_taken(port: int) -> bool:
    """Whether a program listens on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def exchange(port: int, words: bytes, size: int = 16, timeout_s: float = 10.0) -> bytes:
    """Send ``words`` to a port of the loopback interface. Returns the first up to ``size`` bytes of
    the answer, or nothing if no program listens or answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(words)
            return connection.recv(size)
    except OSError:
        return b""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until the condition is true. Raises ``ServerError``, which names ``what``, after
    ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.05)


class Server(ABC):
    """One server in one folder, on the loopback interface.

    ``port``: None for any free port, which the server then keeps. ``guarded``: the server ends with
    this process, however this process ends. Otherwise it runs until ``stop``. ``settings``:
    settings of the server, which override those given here; a server without settings ignores them.
    ``where``: "embedded" or "containers"; by default the value of ``RATCHET_SERVERS``.
    """

    #: The name in messages and of the log file.
    name = "server"
    #: The kind of its programs: a key of ``integration.images.IMAGES``, or "spark".
    kind = "server"
    #: The signal for an orderly end.
    stop_signal = "TERM"
    #: Whether no other user may open the files that it writes.
    private = True
    #: Options of the Java that it runs on, and of its tools'.
    java_options: Sequence[str] = QUICK

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
        self.folder = local_path(folder, "folder of a server")
        self._settings = settings or {}
        self._wanted_port = port
        self._guarded = guarded
        self._running: Running | None = None
        self._log_from = 0  # where the lines of the last start begin
        self.port = port or 0
        #: Open files that the guardian holds while it lives, such as the lock of the work folder.
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
        """Start the server and wait until it serves. Keeps its previous port if possible. Raises
        ``ServerError``."""
        check_owner(self.folder)
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
            self._log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
            try:
                self._running = self.host.launch(
                    Launch(
                        self.name,
                        self.prepare(),
                        folder=self.folder,
                        log_file=self.log_file,
                        stop_signal=self.stop_signal,
                        guarded=self._guarded,
                        held_files=self.held_files,
                        reads=self.reads(),
                        private=self.private,
                    )
                )
                self._await_ready()
                return
            except ServerError as error:
                crashed = isinstance(error, KilledError) and self._running is not None  # not a tool's end
                self.kill()
                lost = self._wanted_port is None and self.port_was_lost()
                if attempt == _START_TRIES or not (crashed or lost):
                    raise
                if lost:
                    self.port = 0

    def _await_own_port(self) -> bool:
        """Whether the previous port becomes free within 2 s. A server that was just killed may hold
        its port for a moment."""
        deadline = time.monotonic() + (2.0 if self.port else 0.0)
        while time.monotonic() < deadline:
            if not port_taken(self.port):
                return True
            time.sleep(0.05)
        return False

    @abstractmethod
    def prepare(self) -> list[str]:
        """Write the configuration, and return the command that runs the server."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Ask the server whether it serves."""

    def reads(self) -> tuple[Path, ...]:
        """The files outside its folder that it reads."""
        return ()

    def write(self, name: str, text: str, *, secret: bool = False) -> Path:
        """Write a file in the server's folder. ``secret``: only this user can ever open it. Raises
        ``ServerError``."""
        file = self.folder / name
        try:
            if secret:
                file.unlink(missing_ok=True)  # somebody may have opened it when others could
                file.touch(mode=0o600, exist_ok=False)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ServerError(f"{self.folder}: {error.strerror or error}; make room or give another folder") from error
        return file

    def write_for(self, user: str, name: str, text: str) -> Path:
        """Write a file in the server's folder that only ``user`` can open, as whom a program runs
        if this process is root. Raises ``ServerError``."""
        file = self.write(name, text, secret=True)
        if self.host.as_user(user):
            self.run_tool(["chown", f"{user}:{user}", str(file)], f"{file} cannot be given to the user {user!r}")
        return file

    def kept_secret(self, name: str) -> str:
        """A random secret of this server. It is in the file ``name`` in the folder, which only this
        user can open. Raises ``ServerError``."""
        file = self.folder / name
        if not file.exists():
            self.write(name, secrets.token_urlsafe(24), secret=True)
        return file.read_text(encoding="utf-8")

    def initialise(self, data: Path, fill: Callable[[Path], None]) -> None:
        """Create the data folder. ``fill`` writes it under another name, so that ``data`` is
        complete if it exists. If a signal ends a tool, start again in an empty folder, at most
        three times in all. Raises ``ServerError``."""
        incomplete = data.with_name(f"{data.name}.incomplete")
        for attempt in range(1, _START_TRIES + 1):
            shutil.rmtree(incomplete, ignore_errors=True)
            try:
                fill(incomplete)
                incomplete.rename(data)
                return
            except KilledError:
                if attempt == _START_TRIES:
                    raise
            except OSError as error:
                raise ServerError(f"{data}: {error.strerror or error}; give another folder") from error

    def make_folder(self, folder: Path, user: str, program: str) -> None:
        """Make an empty folder, or keep one that is there. If this process is root, ``user`` owns
        it, as whom ``program`` runs."""
        owner: list[str] = []
        if self.host.as_user(user):
            check_reachable(self.folder, user, program)
            owner = ["-o", user, "-g", user]
        self.run_tool(
            ["install", "-d", "-m", "700", *owner, str(folder)], f"{program}'s folder {folder} cannot be made"
        )

    def run_tool(self, command: Sequence[str], what: str) -> None:
        """Run a tool of the server to its end. Raises ``ServerError`` if it fails: the message
        begins with ``what`` and contains the tool's last error. Raises ``KilledError`` if a signal
        ended the tool or its child."""
        done = self.host.run(command, self.folder, self.reads())
        if done.returncode == 0:
            return
        lines = done.stdout.strip().splitlines() or [f"{self.name} said nothing"]
        reason = next((line for line in lines if _REASON.search(line)), lines[-1]).strip()[:300]
        name = ending_signal(done.returncode)
        if name is not None:
            raise KilledError(f"{what}: {name} ended its tool: {reason}")
        if _CHILD_KILLED.search(done.stdout) is not None:
            raise KilledError(f"{what}: {reason}")
        raise ServerError(f"{what}: {reason}")

    def java_files(self) -> tuple[str, str]:
        """The JVM options to log only warnings and errors, to the log file, and to unpack native
        libraries where no other user can replace them before they are loaded."""
        temporary = self.folder / "java"
        temporary.mkdir(mode=0o700, exist_ok=True)
        return (
            f"-Dlog4j2.configurationFile={self.write('log4j2.properties', _LOG4J)}",
            f"-Djava.io.tmpdir={temporary}",
        )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the server in order. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.stop(timeout_s)

    def kill(self) -> None:
        """``kill -9``, like a crash. ``start`` restarts it on the same data. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()

    def pause(self) -> None:
        """Freeze the server: connections stay open, and requests get no answer."""
        if self._running is not None:
            self._running.pause()

    def resume(self) -> None:
        """Continue a paused server."""
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
                name = ending_signal(self._running.exit_code) if self._running is not None else None
                words = f"{self._last_words()}; its log is {self.log_file}"
                if name is not None:
                    raise KilledError(f"{name} ended {self.name} while it started: {words}")
                raise ServerError(f"{self.name} ended while starting: {words}")
            if self.port_was_lost():  # some servers try the same port again for ever
                raise ServerError(f"{self.name} lost a port: {self._last_words()}; its log is {self.log_file}")
            time.sleep(0.05)
        raise ServerError(f"{self.name} did not answer within {START_TIMEOUT_S:g} s; its log is {self.log_file}")

    def _tail(self) -> list[str]:
        """The last lines that the server has logged since its last start."""
        try:
            with open(self.log_file, "rb") as log:
                log.seek(self._log_from)
                return log.read().decode(errors="replace").splitlines()[-60:]
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

    def port_was_lost(self) -> bool:
        """Whether the last start failed to take a port, according to the log."""
        return any("Address already in use" in line or "BindException" in line for line in self._tail())


def start_together(servers: Sequence[Server], renew_ports: Callable[[], None] = lambda: None) -> None:
    """Start several servers in parallel and wait for all. If one fails, stops all and raises its
    error. ``renew_ports`` replaces the ports between the servers that are taken: if one of them is
    lost while the servers start, they start again, at most three times in all."""
    for attempt in range(1, _START_TRIES + 1):
        renew_ports()
        try:
            _start_each(servers)
            return
        except BaseException as error:
            stop_all(servers)
            lost = isinstance(error, ServerError) and any(server.port_was_lost() for server in servers)
            if attempt == _START_TRIES or not lost:
                raise


def _start_each(servers: Sequence[Server]) -> None:
    with ThreadPoolExecutor(len(servers)) as pool:
        starts = [pool.submit(server.start) for server in servers]
        done: set[Future[None]] = set()
        left = set(starts)
        try:
            done, left = wait(starts, return_when=FIRST_EXCEPTION)
        finally:
            while left:  # the others would wait for the one that failed until their time is up
                for server in servers:
                    server.kill()
                left = wait(left, timeout=0.1).not_done
        for each in done:
            each.result()


def stop_all(servers: Sequence[Server]) -> None:
    """Stop several servers in parallel."""
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: server.stop(), servers))
