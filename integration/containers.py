"""Servers in containers, by testcontainers.

A container shares this machine's network, and the server's folder at the same path. So addresses,
ports, configuration and data are the same as for the embedded server. A container is removed when
its server ends. ``start`` creates another container on the same folder, like a restarted process.
All containers of this process are removed when it ends, however it ends: see ``_Reaper``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from docker.errors import APIError, DockerException, NotFound

from integration.docker_engine import OWNER_LABEL, engine
from integration.errors import ServerError
from integration.images import IMAGES, PATH, find_image
from integration.jars import Progress
from integration.server_launcher import TOOL_TIMEOUT_S, Host, Launch, Running

# it would need another image; see _Reaper
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

from testcontainers.core.container import DockerContainer

_FOLDER_LABEL = "ratchet.folder"
_REMOVE_TIMEOUT_S = 240.0
_ENVIRONMENT = {"PATH": PATH, "LANG": "C.UTF-8"}
#: A part of the engine's answer when processes did not stop in time, and how often to try again.
_NOT_FROZEN, _FREEZE_TRIES, _AGAIN_S = "unable to freeze", 20, 0.2


class ContainerHost(Host):
    """Runs one kind of server in containers, from the image with its programs."""

    def java(self) -> str:
        return "java"

    def classpath(self, progress: Progress | None = None) -> str:
        return f"{IMAGES[self.kind].jars}/*"

    def program(self, name: str) -> str:
        return name

    def as_user(self, user: str) -> list[str]:
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]

    def run(self, command: Sequence[str], folder: Path, reads: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        try:
            container = engine().containers.run(
                find_image(self.kind),
                list(command),
                entrypoint=[],
                detach=True,
                network_mode="host",
                user="root",
                environment=_ENVIRONMENT,
                volumes=_volumes(folder, reads),
                labels=_labels(folder),
            )
            try:
                code = container.wait(timeout=TOOL_TIMEOUT_S)["StatusCode"]
                output = container.logs().decode(errors="replace")
            finally:
                container.remove(force=True)
        except (DockerException, OSError) as error:
            raise ServerError(
                f"{command[0]} cannot be run in a container: {str(error).splitlines()[0][:300]}"
            ) from error
        return subprocess.CompletedProcess(list(command), code, output)

    def launch(self, launch: Launch) -> Running:
        return _Container(find_image(self.kind), launch)

    def remove_left_behind(self, folder: Path) -> None:
        """The reaper of the killed process may be slow, or may be killed, too."""
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        try:
            while left := _left_in(folder.absolute()):
                if time.monotonic() > deadline:
                    raise ServerError(f"{folder}: {left[0].name} cannot be removed: remove it by `docker rm -f`")
                for each in left:
                    with contextlib.suppress(APIError):  # the reaper may be removing it
                        each.remove(force=True, v=True)
                time.sleep(_AGAIN_S)
        except (DockerException, OSError) as error:
            raise ServerError(f"{folder}: {str(error).splitlines()[0][:300]}") from error


def _left_in(folder: Path) -> list[Any]:
    """The containers with a server or a tool in a folder."""
    found = engine().containers.list(all=True, ignore_removed=True, filters={"label": _FOLDER_LABEL})
    return [each for each in found if Path(each.labels[_FOLDER_LABEL]).is_relative_to(folder)]


def _labels(folder: Path) -> dict[str, str]:
    """Those of a container that ends with this process."""
    return {OWNER_LABEL: _reaper().owner, _FOLDER_LABEL: str(folder.absolute())}


def _volumes(folder: Path, reads: Sequence[Path]) -> dict[str, dict[str, str]]:
    return {
        str(folder): {"bind": str(folder), "mode": "rw"},
        **{str(file): {"bind": str(file), "mode": "ro"} for file in reads},
    }


class _Container(Running):
    def __init__(self, image: str, launch: Launch) -> None:
        self._stop_signal = launch.stop_signal
        # The server's output goes to its log file, as for the embedded server.
        script = f'exec "$@" >> "{launch.log_file}" 2>&1'
        container = DockerContainer(image)
        container.with_command(["sh", "-c", script, "sh", *launch.command])
        container.with_name(f"ratchet-{launch.name}-{uuid.uuid4().hex[:8]}")
        for key, value in _ENVIRONMENT.items():
            container.with_env(key, value)
        for path, how in _volumes(launch.folder, launch.reads).items():
            container.with_volume_mapping(path, how["bind"], how["mode"])
        labels = _labels(launch.folder) if launch.guarded else {}
        container.with_kwargs(
            entrypoint=[], network_mode="host", user="root", working_dir=str(launch.folder), labels=labels
        )
        try:
            container.start()
        except (DockerException, OSError) as error:
            raise ServerError(f"{launch.name} does not start: {str(error).splitlines()[0][:300]}") from error
        self._container: Any = container.get_wrapped_container()

    def _state(self) -> dict[str, Any]:
        try:
            self._container.reload()
        except NotFound:
            return {"Running": False, "Pid": 0}
        state: dict[str, Any] = self._container.attrs["State"]
        return state

    @property
    def alive(self) -> bool:
        return bool(self._state()["Running"])

    @property
    def exit_code(self) -> int | None:
        state = self._state()
        return None if state["Running"] else state.get("ExitCode")

    @property
    def pid(self) -> int | None:
        state = self._state()
        return int(state["Pid"]) if state["Running"] else None

    def stop(self, timeout_s: float) -> None:
        with contextlib.suppress(APIError):
            self._container.unpause()
        try:
            self._container.kill(signal=f"SIG{self._stop_signal}")
            self._container.wait(timeout=timeout_s)
        except (DockerException, OSError):  # it has already ended, or does not respond
            pass
        self._remove()

    def kill(self) -> None:
        self._remove()

    def _remove(self) -> None:
        """Kill the remaining server processes (SIGKILL), and remove the container."""
        with contextlib.suppress(NotFound):
            self._container.remove(force=True, v=True)

    def pause(self) -> None:
        """The runtime sometimes cannot freeze processes that are busy; then try again."""
        for left in reversed(range(_FREEZE_TRIES)):
            try:
                self._container.pause()
                return
            except APIError as error:
                if _NOT_FROZEN not in str(error) or not left:
                    raise
                time.sleep(_AGAIN_S)

    def resume(self) -> None:
        self._container.unpause()


class _Reaper:
    """Removes this process's containers after it has ended, as Ryuk does, but needs no image of its
    own. It is a child process that waits until its standard input closes."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.owner = uuid.uuid4().hex
        command = [sys.executable, "-P", "-m", "integration.reaper", self.owner]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        engine()  # registers its exit handler first, so that the engine ends after the reaper
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        atexit.register(self._end)

    def _end(self) -> None:
        if os.getpid() == self.pid:
            cast(IO[bytes], self._process.stdin).close()
            self._process.wait(60)


_reaper_lock = threading.Lock()
_current: _Reaper | None = None


def _reaper() -> _Reaper:
    global _current
    with _reaper_lock:
        if _current is None or _current.pid != os.getpid():
            _current = _Reaper()
        return _current
