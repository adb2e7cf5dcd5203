"""``python -m integration.reaper OWNER``: waits until its standard input closes, and then removes
the containers with the owner's label. The input closes when the parent ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import docker
from docker.errors import DockerException


def main(owner: str) -> None:
    """Wait, then remove the containers. A container that is already gone is not an error."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the parent decides, by closing this standard input
    while os.read(0, 4096):
        pass
    with contextlib.suppress(DockerException):
        for container in docker.from_env().containers.list(all=True, filters={"label": f"ratchet.owner={owner}"}):
            with contextlib.suppress(DockerException):
                container.remove(force=True, v=True)


if __name__ == "__main__":
    main(sys.argv[1])
