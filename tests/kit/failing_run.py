"""A driver without Spark that dies, by ``os._exit``, where it is told.

``app.die.at=N``: at the N-th boundary. A boundary is the moment before or after a write to
ZooKeeper or to a sink; the moment after the first write to ZooKeeper is boundary 1.
``app.die.in.commit.task=N``: in task N of a state's commit, once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import framework
import framework.commands.run
from framework.coordination import zookeeper
from sinks import StateCommitter
from sinks.backend import MapBackend

EXIT = 9


def die(words: str) -> None:
    print(f"dies {words}", flush=True)
    os._exit(EXIT)


class Boundaries:
    """Counts the boundaries that the driver passes, and dies at number ``last``."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.seen = 0
        self.armed = False

    def pass_by(self, words: str) -> None:
        if not self.armed:
            return
        self.seen += 1
        if self.seen >= self.last:
            die(f"at {words} ({self.seen})")

    def around(self, owner: Any, method: str, words: str, arms: bool = False) -> None:
        real: Callable[..., Any] = getattr(owner, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.pass_by(f"before {words}")
            result = real(*arguments, **options)
            self.armed = self.armed or arms
            self.pass_by(f"after {words}")
            return result

        setattr(owner, method, wrapped)


def fail_at(number: int) -> None:
    boundaries = Boundaries(number)
    boundaries.around(zookeeper._ZooKeeperLeadership, "_send", "ZooKeeper", arms=True)
    for kind in subclasses(MapBackend):
        for method in ("multi_put", "apply", "raise_header", "sweep", "roll_back"):
            if method in vars(kind) and not getattr(vars(kind)[method], "__isabstractmethod__", False):
                boundaries.around(kind, method, "the sink")


def subclasses(kind: type) -> list[type]:
    found = (each for direct in kind.__subclasses__() for each in (direct, *subclasses(direct)))
    return list(dict.fromkeys(found))  # a backend may have several optional bases


def fail_in_commit_task(number: int, folder: Path) -> None:
    """Die when task ``number`` is about to write: tasks 0 to ``number - 1`` have written."""
    prepare, finish_batch = StateCommitter.prepare, StateCommitter.finish_batch
    marker = folder / "died"

    def prepared(self: StateCommitter, conf: Any, context: Any, *others: Any) -> None:
        self._task_of_this = context.task_index  # type: ignore[attr-defined] - it travels between the phases
        prepare(self, conf, context, *others)

    def finish(self: StateCommitter) -> Any:
        if self._task_of_this == number and not marker.exists():
            marker.touch()
            die(f"in commit task {number}")
        return finish_batch(self)

    StateCommitter.prepare = prepared  # type: ignore[method-assign]
    StateCommitter.finish_batch = finish  # type: ignore[method-assign]


def submit(topology: Any, config: Any, *arguments: Any, **options: Any) -> Any:
    app = config.app
    if "app.die.at" in app:
        fail_at(int(app["app.die.at"]))
    if "app.die.in.commit.task" in app:
        fail_in_commit_task(int(app["app.die.in.commit.task"]), Path(app["app.die.folder"]))
    return framework.submit(topology, config, *arguments, **options)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    framework.commands.run.submit = submit
    framework.commands.run.app()
