"""A topology on any of the executors, and the words that go through it."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Run, Topology, submit
from framework.transactions import MemoryStore

#: The values of the fixture ``runner`` where one way through Spark shows enough in ``make test``.
SPREAD_ONLY = [
    "local",
    "spread",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("collapsed", "cluster")),
]
WORDS = [f"w{number % 7}" for number in range(100)]
DATA = {0: [[word] for word in WORDS], 1: [[word] for word in WORDS[:30]], 2: []}


def start(
    topology: Topology, runner: tuple[str, dict[str, Any]], store: MemoryStore | None = None, **config: Any
) -> Run:
    """Submit with a timeout that a slow machine does not reach: a batch that times out is planned
    smaller, and no test here wants that.
    """
    executor, settings = runner
    whole = {"topology.message.timeout.secs": 300, **settings, **config}
    return submit(topology, whole, store=store or MemoryStore(), executor=executor)
