"""Backends whose process is killed before or after one of the steps that write, in a task on
Spark.

A file holds how many more steps there are until then. All tasks count it down, whatever their
processes are. The process that made the backends is not killed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sinks import MapBackend, PostgresBackend, RedisBackend, SqliteBackend

#: The steps that write.
STEPS = ("multi_put", "apply", "roll_back", "sweep", "purge", "raise_header")


class Deadline:
    """The steps until a death. ``sizes``: module -> name -> value: limits that tasks have, too."""

    def __init__(self, file: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
        self.file, self.sizes, self.spared = str(file), sizes, os.getpid()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        for module, its in self.sizes.items():
            for name, value in its.items():
                setattr(importlib.import_module(module), name, value)

    def set(self, steps: int | None) -> None:
        """None: no death."""
        Path(self.file).write_text(str(steps or 0))

    def is_passed(self) -> bool:
        """Whether a process died since ``set``."""
        return Path(self.file).read_text() == "died"

    def step(self) -> None:
        if os.getpid() == self.spared:
            return
        with open(self.file, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            if text in ("died", "0"):
                return
            left = int(text) - 1
            file.seek(0)
            file.truncate()
            file.write(str(left) if left else "died")
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)


def _struck(name: str) -> Callable[..., Any]:
    def step(self: Any, *given: Any, **options: Any) -> Any:
        self.deadline.step()
        answer = getattr(super(self.dying, self), name)(*given, **options)
        self.deadline.step()
        return answer

    return step


class DyingPostgres(PostgresBackend):
    pass


class DyingRedis(RedisBackend):
    pass


class DyingSqlite(SqliteBackend):
    pass


KINDS: dict[type, type] = {PostgresBackend: DyingPostgres, RedisBackend: DyingRedis, SqliteBackend: DyingSqlite}
for _kind in KINDS.values():
    _kind.dying = _kind  # type: ignore[attr-defined]
    for _name in STEPS:
        if hasattr(_kind, _name):
            setattr(_kind, _name, _struck(_name))


def dying(backend: MapBackend, deadline: Deadline) -> MapBackend:
    """The backend, with a deadline for the processes of its tasks."""
    backend.__class__ = KINDS[type(backend)]
    backend.deadline = deadline  # type: ignore[attr-defined]
    return backend
