"""Steps: how the protocol is written down so that it can be run, and simulated.

A driver, a term, a phase, a planner is a generator of *steps*: calls that block, take time or may fail, performed one at a
time by somebody else, who hands back what each returned or raised. What stands between two steps is quick and touches
nothing outside. ``perform`` does each step here and now: that is all there is to it in a run. The simulator
(``tests/simulation``) performs the same steps, and may stop between any two, let one fail, or let others go on meanwhile
(ADR 30).

What steps wait for comes from ``Threads``, so that a simulation has threads, queues and a clock of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Step = Callable[[], Any]
Steps = Generator[Step, Any, T]


def perform(steps: Steps[T]) -> T:
    """Perform every step in order; what a step raises is raised in the generator, where it stands."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
            except BaseException as error:  # noqa: BLE001 - the generator decides what it means
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


class Threads:
    """The threads of this process, what they wait on, and the clock they go by."""

    def now_ms(self) -> int:
        """Only differences mean something."""
        return time.monotonic_ns() // 1_000_000

    def queue(self) -> queue.Queue[Any]:
        return queue.Queue()

    def event(self) -> threading.Event:
        return threading.Event()

    def spawn(self, name: str, steps: Steps[None]) -> threading.Thread:
        """Perform these steps in a thread of their own."""
        thread = threading.Thread(target=perform, args=(steps,), name=f"ratchet-{name}", daemon=True)
        thread.start()
        return thread
