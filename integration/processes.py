"""Servers as child processes, with the programs that are installed on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from integration.errors import ServerError
from integration.guardian import guarded_by
from integration.jars import KAFKA_LOGGING_JARS, ZOOKEEPER_JARS, Progress, connect_jars, find_jars, kafka_jars
from integration.java import find_java
from integration.server_launcher import STOP_TIMEOUT_S, TOOL_TIMEOUT_S, Host, Launch, Running
from integration.server_programs import find_program

#: How long to wait for what must come on a busy host: the start of a guardian, the stop of all
#: threads, the end of a killed process.
_END_TIMEOUT_S = 240.0
#: No other user may open what servers and tools write, such as records and hashes of passwords.
_UMASK = 0o077
#: The Debian package of each kind's programs, and the folders outside the PATH to look in first.
PACKAGES = {
    "haproxy": "haproxy",
    "mariadb": "mariadb-server-core",
    "pgbouncer": "pgbouncer",
    "postgres": "postgresql",
    "prometheus": "prometheus",
    "redis": "redis-server",
}
FOLDERS = {
    **dict.fromkeys(("haproxy", "mariadb", "pgbouncer"), ("usr/sbin",)),
    "postgres": ("usr/lib/postgresql/*/bin",),
}


class ProcessHost(Host):
    """This machine, with the programs that are installed on it."""

    def java(self) -> str:
        return find_java()

    def classpath(self, progress: Progress | None = None) -> str:
        if self.kind == "zookeeper":
            return ":".join(map(str, find_jars(ZOOKEEPER_JARS)))
        # Kafka's jars contain SLF4J without a logging backend. PySpark's jars provide one.
        jars = connect_jars(progress) if self.kind == "connect" else kafka_jars(progress)
        return ":".join([*map(str, find_jars(KAFKA_LOGGING_JARS)), f"{jars}/*"])

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
                umask=_UMASK,
                timeout=TOOL_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"{Path(command[0]).name} cannot be run: {error}") from error

    def launch(self, launch: Launch) -> Running:
        return ChildProcess(launch)


class ChildProcess(Running):
    """A server as a child process. If guarded, ``self._process`` is the guardian, and the server is
    its only child."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        guard = guarded_by(launch.stop_signal) if launch.guarded else []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KAFKA_")}
        try:
            with open(launch.log_file, "ab", opener=_open_log) as log:
                self._process = subprocess.Popen(
                    [*guard, *launch.command],
                    stdin=subprocess.PIPE if launch.guarded else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=launch.folder,
                    env=environment,
                    pass_fds=launch.held_files if launch.guarded else (),
                    umask=_UMASK if launch.private else -1,
                    start_new_session=not launch.guarded,
                )
        except OSError as error:
            raise ServerError(f"{launch.name} does not start: {error}") from error

    @property
    def guardian_pid(self) -> int:
        """The pid of the guardian, which ends the server with this process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int | None:
        if self._launch.guarded:
            return _child_of(self._process)
        return self._process.pid if self.alive else None

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
        """SIGKILL to the server. Its own child processes end by themselves when they notice. Wait
        for that: until then PostgreSQL does not start again on the same data."""
        server = self.pid
        if server is not None:
            freeze(server)  # so that it starts no more of them
        started = _children_of(server) if server is not None else []
        self._send(signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(_END_TIMEOUT_S)
        _await_end(started)

    def pause(self) -> None:
        pid = self.pid
        if pid is not None:
            freeze(pid)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, which: signal.Signals) -> None:
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # the guardian has seen its end meanwhile
                os.kill(pid, which)


def _open_log(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def freeze(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until all its threads have stopped: a thread that has not
    may still answer. A process that has ended is no error. Raises ``ServerError`` when a thread
    does not stop."""
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + _END_TIMEOUT_S
    while not has_stopped(pid):
        if time.monotonic() > deadline:
            raise ServerError(f"process {pid} did not stop within {_END_TIMEOUT_S:g} s")
        time.sleep(0.005)


def has_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped (SIGSTOP) or ended."""
    try:
        files = [each / "stat" for each in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return True
    return all(_state_of(each) in "TtZX" for each in files)


def _state_of(stat: Path) -> str:
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended meanwhile
        return "X"


def _child_of(guardian: subprocess.Popen[bytes]) -> int | None:
    """The pid of the guardian's only child; None if it has none, or if the guardian has ended."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while guardian.poll() is None and time.monotonic() < deadline:
        children = _children_of(guardian.pid)
        if children:
            return int(children[0].pid)
        time.sleep(0.02)
    return None


def _children_of(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


def _await_end(processes: list[psutil.Process]) -> None:
    """Wait until processes have ended. Kill those that take too long."""
    _, late = psutil.wait_procs(processes, STOP_TIMEOUT_S)
    for each in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(late, _END_TIMEOUT_S)
