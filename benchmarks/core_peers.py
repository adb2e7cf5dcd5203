"""The word count of ``benchmarks.core`` in other systems, at the same broker and topic.

Storm is built by Maven when it is asked for (``mvn`` and a JDK are needed). Bytewax is installed
into a virtual environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from integration.java import find_java

_HERE = Path(__file__).parent / "peers"
_BYTEWAX = ("bytewax==0.21.1", "confluent-kafka")
_RUN_S, _BUILD_S = 600, 900
#: What Storm's serialization reaches into, by reflection.
_OPENED = ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "text", "time", "util", "util.concurrent")


def _figures(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command whose last line of output is a JSON object."""
    log = folder / "peer.log"
    with log.open("w") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, timeout=_RUN_S, cwd=folder, env=environment, check=False
        )
    lines = done.stdout.decode().strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {log.read_text()[-2_000:]}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def storm(bootstrap_servers: str, topic: str, messages: int, folder: Path) -> dict[str, Any]:
    """Storm in local mode: one JVM, two executors of each component, one acker."""
    project = _HERE / "storm"
    subprocess.run(["mvn", "-q", "package"], cwd=project, check=True, timeout=_BUILD_S, stdout=sys.stderr)
    opened = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED]
    classes = f"{project / 'target/classes'}:{project / 'target/lib'}/*"
    command = [find_java(), "-Xmx2g", "-XX:+UseParallelGC", *opened, "-cp", classes, "words.StormWords"]
    return _figures([*command, bootstrap_servers, topic, str(messages), "1"], folder)


def bytewax(bootstrap_servers: str, topic: str, messages: int, folder: Path) -> dict[str, Any]:
    """Bytewax with one worker."""
    place = folder / "bytewax"
    if not place.exists():
        venv.create(place, with_pip=True)
        install = [str(place / "bin/pip"), "install", "--quiet", *_BYTEWAX]
        subprocess.run(install, check=True, timeout=_BUILD_S, stdout=sys.stderr)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(place / "bin/python"), str(_HERE / "bytewax_words.py"), bootstrap_servers, topic, str(messages)]
    return _figures(command, folder, environment)


PEERS: dict[str, Callable[[str, str, int, Path], dict[str, Any]]] = {"storm": storm, "bytewax": bytewax}
