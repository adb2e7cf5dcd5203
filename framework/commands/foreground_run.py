"""Runs a topology in the foreground: progress, signals, and its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from framework.commands.systemd_notify import ServiceManager
from framework.core.run import CoreRun
from framework.observe import ProgressLines
from framework.observe.topology_health import is_ready
from framework.transactions.run import Run

_POLL_S = 0.2
_STOPPING = "stopping, the commit under way is finished (Ctrl-C again to end now)\n"


def supervise(
    run: Run | CoreRun,
    stopped: threading.Event,
    *,
    until_caught_up: bool,
    timeout_s: float | None = None,
    json_stream: IO[str] | None = None,
) -> bool:
    """Show progress until the run ends, ``stopped`` is set, or it has caught up. Returns True,
    unless ``stopped`` ended it. ``json_stream``: gets the progress as JSON lines. Raises the error
    with which the topology failed, and ``TimeoutError`` when catching up takes longer than
    ``timeout_s``."""
    progress = ProgressLines(json_lines=json_stream is not None, stream=json_stream)
    manager = ServiceManager()
    waiting: _InThread | None = None
    if until_caught_up:
        wait = run.wait_until_caught_up if isinstance(run, Run) else run.wait_until_idle
        waiting = _InThread("ratchet-caught-up", lambda: wait(timeout_s))
    try:
        ended = False
        while not ended:
            # Show a status in the last turn too: a run may catch up before the first one.
            ended = stopped.is_set() or bool(waiting and waiting.ended.is_set()) or run.join(_POLL_S)
            status = run.status()
            progress.show(status)
            manager.tell(status.phase, ready=is_ready(status.phase))
    finally:
        manager.stopping()
        run.stop()
        progress.show(run.status(), force=True)
        progress.done()
    if waiting and not stopped.is_set():
        waiting.raise_problem()
    run.join(0)
    return not stopped.is_set()


def done_before(
    stopped: threading.Event, work: Callable[[], None], timeout_s: float | None = None, *, then_within_s: float = 0.0
) -> bool:
    """Whether ``work`` ended before ``stopped`` was set. It runs in a thread, because Python
    handles no signal while the main thread waits for a server inside a library. ``then_within_s``:
    how long to wait for it after ``stopped`` is set. Raises the errors of ``work``, and
    ``TimeoutError`` when it takes longer than ``timeout_s``."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    working = _InThread("ratchet-first-checks", work)
    while not working.ended.wait(_POLL_S):
        if stopped.is_set():
            working.ended.wait(then_within_s)
            return False
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for the first checks: a server does not answer")
    working.raise_problem()
    return not stopped.is_set()


class _InThread:
    """Work in a thread of its own, which does not delay the end of the process. ``ended``: set when
    the work has ended, with or without an error."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self._work = work
        self._problem: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._problem = error
        self.ended.set()

    def raise_problem(self) -> None:
        """Raise the error of the work, if it raised one."""
        if self._problem is not None:
            raise self._problem


class StopSignal(threading.Event):
    """Set when the process has to end. ``interrupted``: by Ctrl-C, rather than by SIGTERM."""

    interrupted = False


@contextmanager
def stop_on_signal(says: str = _STOPPING) -> Iterator[StopSignal]:
    """An event that SIGTERM or Ctrl-C sets, at any time, even while Spark starts. A second signal
    ends the process immediately; even that loses no data."""
    stopped = StopSignal()

    def on_signal(number: int, frame: Any) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.interrupted = number == signal.SIGINT
        stopped.set()
        with suppress(RuntimeError):  # the signal arrived during a write to the same stream
            sys.stderr.write(says)

    before = {name: signal.signal(name, on_signal) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
