"""Threads that get the identifier of a thread that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.kit.waiting import PATIENCE_S

#: So many threads, one after the other, that Python gives an identifier again.
NEW_THREADS = 20


@contextmanager
def another_thread() -> Iterator[None]:
    """A thread lives within the block, and ends with it."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(PATIENCE_S)


def run_in_new_threads(target: Callable[[], object]) -> None:
    """Run ``target`` in ``NEW_THREADS`` threads, one after the other."""
    for _ in range(NEW_THREADS):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join(PATIENCE_S)
