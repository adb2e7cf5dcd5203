"""Steps: the form in which the protocol is written, so that it can be both run and simulated.

Drivers, terms, phases and planners are generators of *steps*. A step is a call that blocks, takes
time or may fail. The caller of the generator performs one step at a time and passes its result or
exception back. Code between two steps is quick and touches nothing outside. In a run, ``perform``
simply calls each step. The simulator (``tests/simulation``) performs the same steps; between them
it may stop, let one fail, or let other generators continue (ADR 30).

Queues, events, threads and the clock come from ``Threads``, so that a simulation can replace them.
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
    """Perform every step in order and return the generator's result. An exception of a step is
    raised in the generator, at its ``yield``."""
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
    """The threads of this process, their queues and events, and their clock."""

    def now_ms(self) -> int:
        """Milliseconds of a monotonic clock. Only differences are meaningful."""
        return time.monotonic_ns() // 1_000_000

    def used_s(self) -> float:
        """Seconds of processor time that the calling thread has used so far."""
        return time.thread_time()

    def queue(self) -> queue.Queue[Any]:
        return queue.Queue()

    def event(self) -> threading.Event:
        return threading.Event()

    def spawn(self, name: str, steps: Steps[None]) -> threading.Thread:
        """Perform the steps in a new thread."""
        thread = threading.Thread(target=perform, args=(steps,), name=f"ratchet-{name}", daemon=True)
        thread.start()
        return thread
