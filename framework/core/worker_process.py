"""Task workers as separate processes next to Spark's executors.

Spark gives a task to any free worker process, and ends those as it likes. A spout with a connection
and pending tuples needs a process that stays. So a Spark task starts each task worker as a process
of its own on the executor's host. The tasks of the rounds carry rows to and from it
(``worker_client.py``).

A worker ends when it is told to, when its executor is gone, and when no request has come for too
long. The client tells it to end when its part of a round takes too long, because a component may
hang.

A worker answers the messages of a channel one after the other, and a task does one round after the
other. A connection without the run's key is refused (``process_channels.py``).
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any, cast

from framework.core.task_worker import TaskWorker
from framework.core.worker_client import CONNECT_S, Address, WorkerClient, WorkerSettings
from framework.errors import RetryableError
from framework.execution.gc_tuning import collect_rarely
from framework.execution.payload_encryption import decrypt
from framework.execution.process_channels import Channel, ChannelServer, Place

_WATCH_S = 1.0


def ensure_worker(settings: WorkerSettings, number: int, known: Address | None) -> Address:
    """Return the worker's address if it answers; otherwise start a new one on this host and return
    its address. Called in a Spark task."""
    if known is not None:
        try:
            WorkerClient([known], settings.credentials, {}, CONNECT_S).ask(number, "ping")
            return known
        except RetryableError:
            pass
    return start_worker(settings, number)


def start_worker(settings: WorkerSettings, number: int) -> Address:
    """Start a process for a task worker. Raises ``RetryableError`` when it does not start."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
    process = subprocess.Popen(
        # -P: another user may own the current folder, and PYTHONPATH has it if this process imports
        # from it
        [sys.executable, "-P", "-m", "framework.core.worker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # so that signals to the worker's process group do not reach it
    )
    try:
        with cast(IO[bytes], process.stdin) as out:
            pickle.dump((settings, number, _executor_pid()), out)
        with cast(IO[bytes], process.stdout) as answer:
            return pickle.load(answer)  # type: ignore[no-any-return]
    except (OSError, EOFError) as error:
        process.kill()
        raise RetryableError(f"task worker {number} did not start: see the executor's stderr") from error


def _executor_pid() -> int:
    """The pid of the JVM that is an ancestor of this worker, or else of this process's parent."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        if name == "java":
            return pid
        pid = int(fields[1])
    return os.getppid()


class WorkerServer:
    """Serves one task worker. ``serve`` returns when the task worker has to end."""

    def __init__(self, settings: WorkerSettings, number: int, executor_pid: int) -> None:
        self._worker = TaskWorker(pickle.loads(decrypt(settings.plan)), encode=True)
        self._settings = settings
        self._executor_pid = executor_pid
        self._folder = tempfile.TemporaryDirectory(prefix="ratchet-worker-")
        place: Place = f"{self._folder.name}/worker"
        if settings.driver_host is not None:
            place = (_own_host(settings.driver_host), 0)
        self._server = ChannelServer(place, settings.credentials, self._answer, CONNECT_S)
        self.address = Address(number, self._server.place, os.getpid())
        self._working = 0
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def serve(self) -> None:
        """Answer requests until told to end, until the executor is gone, or until no request has
        come for ``lease_s``."""
        self._server.start()
        while not self._ended.wait(_WATCH_S):
            with self._lock:
                silent = not self._working and time.monotonic() - self._heard_at > self._settings.lease_s
            if silent or not _alive(self._executor_pid):
                self._worker.close()
                break
        self._server.close()
        self._folder.cleanup()

    def _answer(self, channel: Channel) -> None:
        try:
            while True:
                number, *message = channel.receive(None)
                with self._lock:
                    self._working += 1
                try:
                    outcome = number, "ok", self._do(*message)
                except RetryableError as error:
                    outcome = number, "lost", str(error)
                except BaseException:  # noqa: BLE001 - a bug (user errors are handled inside): the client waits
                    outcome = number, "bug", traceback.format_exc()
                finally:
                    with self._lock:
                        self._working -= 1
                        self._heard_at = time.monotonic()
                channel.send(outcome, self._settings.answer_s)
                if message[0] == "close":
                    self._ended.set()
        except (OSError, EOFError):
            channel.close()  # the worker is gone, or the client was given another one

    def _do(self, what: str, *arguments: Any) -> Any:
        if what == "run":
            return self._worker.run_tasks(*arguments)
        if what == "wake":
            self._worker.wake(*arguments)
        elif what == "close":
            self._worker.close()
        elif what == "die":
            os._exit(1)
        return None


def _own_host(driver_host: str) -> str:
    """The address of this host as the driver's host sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((driver_host, 9))  # nothing is sent: this only chooses the interface
        return str(probe.getsockname()[0])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def main() -> None:
    settings, number, executor_pid = pickle.load(sys.stdin.buffer)
    server = WorkerServer(settings, number, executor_pid)
    collect_rarely()
    pickle.dump(server.address, sys.stdout.buffer)
    sys.stdout.flush()
    os.dup2(2, 1)  # output of components goes where the executor's errors go
    server.serve()
    os._exit(0)  # threads of user code must not keep the process alive


if __name__ == "__main__":
    # Classes that are pickled here must have the module's real name, not ``__main__``.
    from framework.core import worker_process

    worker_process.main()
