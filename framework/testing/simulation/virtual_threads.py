"""The threads of a simulated driver: all run in the calling thread, one step at a time, in virtual
time.

Invariants:

1. The steps and their order depend on the generators alone.
2. Time advances only when every thread waits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from framework.coordination.step_generators import Step, Steps, Threads
from framework.errors import InvariantViolation


class DriverDied(BaseException):
    """The driver dies inside a step: all of its threads end at once."""


class NoProgress(Exception):
    """The driver has taken more steps than it can need."""


@dataclass(slots=True)
class _Wait:
    """The result of a step that has to wait. ``take``: returns the waiting thread's value when it
    is ``ready``. ``late``: returns or raises when the timeout expires first."""

    ready: Callable[[], bool]
    take: Callable[[], Any]
    until_ms: int | None
    late: Any


@dataclass(eq=False, slots=True)
class _Thread:
    name: str
    steps: Steps[Any]
    step: Step | None = None
    wait: _Wait | None = None
    over: bool = field(default=False)

    def is_alive(self) -> bool:
        return not self.over

    def join(self, timeout_s: float | None = None) -> None:
        """Returns immediately: the caller is in the same thread, and all virtual threads end with
        it.
        """


class VirtualThreads(Threads):
    """The threads, queues, events and the clock of one driver. ``ended`` is called with the name of
    each thread that has ended."""

    def __init__(self, ended: Callable[[str], None], steps_max: int) -> None:
        self._ended = ended
        self._steps_max = steps_max
        self._now_ms = 0
        self._threads: deque[_Thread] = deque()
        self._steps = 0

    def now_ms(self) -> int:
        return self._now_ms

    def used_s(self) -> float:
        return 0.0

    def queue(self) -> queue.Queue[Any]:
        return _Queue(self)

    def event(self) -> threading.Event:
        return cast(threading.Event, _Event(self))

    def spawn(self, name: str, steps: Steps[None]) -> threading.Thread:
        thread = _Thread(name, steps)
        self._threads.append(thread)
        return cast(threading.Thread, thread)

    def run(self, until: Callable[[], bool]) -> None:
        """Perform steps until the condition is met. Raises ``DriverDied`` from a step, and
        ``NoProgress``."""
        while not until():
            self._steps += 1
            if self._steps > self._steps_max:
                raise NoProgress
            self._perform(self._next())

    def kill(self) -> None:
        """End all threads where they are."""
        threads, self._threads = self._threads, deque()
        for each in threads:
            each.over = True
            each.steps.close()

    def _next(self) -> _Thread:
        while True:
            for _ in range(len(self._threads)):
                thread = self._threads[0]
                self._threads.rotate(-1)
                wait = thread.wait
                if wait is None or wait.ready() or (wait.until_ms is not None and wait.until_ms <= self._now_ms):
                    return thread
            ends = [each.wait.until_ms for each in self._threads if each.wait and each.wait.until_ms is not None]
            if not ends:
                raise InvariantViolation("every simulated thread waits, and none for a time")
            self._now_ms = min(ends)

    def _perform(self, thread: _Thread) -> None:
        wait, thread.wait = thread.wait, None
        try:
            if wait is not None:
                if not wait.ready() and isinstance(wait.late, BaseException):
                    thread.step = thread.steps.throw(wait.late)
                else:
                    thread.step = thread.steps.send(wait.take() if wait.ready() else wait.late)
            elif thread.step is None:
                thread.step = next(thread.steps)
            else:
                try:
                    answer = thread.step()
                except Exception as error:  # noqa: BLE001 - the generator decides what it means
                    thread.step = thread.steps.throw(error)
                else:
                    if isinstance(answer, _Wait):
                        thread.wait = answer
                    else:
                        thread.step = thread.steps.send(answer)
        except StopIteration:
            thread.over = True
            self._threads.remove(thread)
            self._ended(thread.name)


class _Queue(queue.Queue[Any]):
    def __init__(self, threads: VirtualThreads) -> None:
        super().__init__()
        self._threads = threads
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until_ms = None if timeout is None else self._threads.now_ms() + max(int(timeout * 1000), 1)
        return _Wait(lambda: bool(self._items), self._items.popleft, until_ms, queue.Empty())


class _Event:
    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float | None = None) -> Any:
        if self._set:
            return True
        until_ms = None if timeout_s is None else self._threads.now_ms() + max(int(timeout_s * 1000), 1)
        return _Wait(self.is_set, self.is_set, until_ms, late=False)
