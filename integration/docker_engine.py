"""The Docker engine that answers. If none answers, root on Debian gets one from Debian's packages,
which runs as long as this process.

The engine started here gives containers only the machine's own network, so it needs no bridge and
no packet filter.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any, cast

import docker
from docker.errors import DockerException

from integration.errors import ServerError
from integration.guardian import guarded_by
from integration.jars import Progress
from integration.locks import locked, private_folder
from integration.server_programs import find_program

#: The label that names the process to which a container belongs.
OWNER_LABEL = "ratchet.owner"
_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 30.0

_client: Any = None
_lock = threading.Lock()


def engine(progress: Progress | None = None) -> Any:
    """A client of the engine (docker-py). Raises ``ServerError``, with a one-line message, if no
    engine answers and none can be started."""
    global _client
    with _lock:
        if _client is None:
            _client = _answering() or _start(progress or (lambda line: None))
        return _client


def _answering() -> Any:
    try:
        client = docker.from_env(timeout=120)
        client.ping()
        return client
    except DockerException:
        return None


def _start(say: Progress) -> Any:
    if "DOCKER_HOST" in os.environ:
        raise ServerError(
            f"no Docker engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}: start it, or unset that"
        )
    if os.geteuid() != 0:
        raise ServerError(
            "no Docker engine answers, and only root can start one: start Docker, or choose embedded servers"
        )
    with locked("engine"):
        client = _answering()  # another process may have started one just now
        if client is not None:
            return client
        dockerd = find_program("dockerd", "docker.io", ("usr/sbin",))
        say("starting a Docker engine")
        log = _folder() / "dockerd.log"
        process = _launch(dockerd, log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            client = _answering()
            if client is not None:
                atexit.register(_end, process, os.getpid())
                # containers of a killed run
                client.containers.prune(filters={"label": OWNER_LABEL})
                return client
            if process.poll() is not None:
                raise ServerError(
                    f"dockerd ended while starting: {_last_words(log)}; its log is {log}. Containers cannot run on this "
                    "machine: choose embedded servers"
                )
            time.sleep(0.1)
        process.kill()
        raise ServerError(f"dockerd did not answer within {_START_TIMEOUT_S:g} s; its log is {log}")


def _launch(dockerd: str, log: Path) -> subprocess.Popen[bytes]:
    command = [dockerd, "--iptables=false", "--ip6tables=false", "--bridge=none", "--data-root", "/var/lib/docker"]
    command += ["--pidfile", str(log.with_name("dockerd.pid")), "--exec-root", str(log.with_name("run"))]
    log.with_name("dockerd.pid").unlink(missing_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*guarded_by("TERM"), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the engine with this process. A process that was forked from it does nothing here."""
    if os.getpid() != owner:
        return
    cast(IO[bytes], process.stdin).close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    shutil.rmtree(_folder() / "run", ignore_errors=True)


def _folder() -> Path:
    found = private_folder() / "docker"
    found.mkdir(exist_ok=True)
    return found


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return lines[-1][-300:]
    return "it said nothing"
