"""Captures what a test logs itself, without the lines of threads that earlier tests have left."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog


@contextmanager
def own_logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """As ``structlog.testing.capture_logs``, but of this thread, and of those that begin within the
    block."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}

    def dropped(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if threading.current_thread() in earlier:
            raise structlog.DropEvent
        return event

    with structlog.testing.capture_logs([dropped]) as logs:
        yield logs
