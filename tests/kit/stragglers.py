"""Work that goes on after its driver has died, one step at a time, whenever others let it.

The work runs in a thread of its own. Only one of the two threads ever runs, so a seed determines
the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.kit.waiting import PATIENCE_S


class Straggler:
    """``work``: calls ``pause`` of this straggler at each of its steps."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._turn, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="straggler", daemon=True)
        self.is_over = False
        self.error: BaseException | None = None
        self._thread.start()

    def is_here(self) -> bool:
        """Whether this is the thread of the work."""
        return threading.current_thread() is self._thread

    def pause(self) -> None:
        """Let the others go on, until they call ``advance``."""
        self._rest.release()
        self._turn.acquire()

    def advance(self) -> None:
        """Let the work perform one step."""
        if self.is_over:
            return
        self._turn.release()
        if not self._rest.acquire(timeout=PATIENCE_S):
            raise TimeoutError("a straggler waits for what it cannot get")

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - nobody waits for the work any more
            self.error = error
        finally:
            self.is_over = True
            self._rest.release()
