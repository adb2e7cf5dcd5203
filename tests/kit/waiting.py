"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

#: How long a test waits for what must come. No test fails because the machine is slow.
PATIENCE_S = 240.0
#: How long a test watches for what must not come.
WATCH_S = 1.0


def wait_for(condition: Callable[[], bool], timeout_s: float = PATIENCE_S, *, what: str = "a condition") -> None:
    """Return when ``condition`` holds. Raises ``TimeoutError`` after ``timeout_s`` seconds."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.1)  # what takes seconds needs the processor for itself
