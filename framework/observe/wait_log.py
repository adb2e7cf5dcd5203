"""Logs a wait when it begins and when it ends, and not each time that something is tried again."""

from __future__ import annotations

import time
from typing import Any

from framework.observe.logs import get_logger

_log = get_logger()


class Waits:
    """What one party waits for: at most one cause at a time. ``fields`` are in every line."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._cause: str | None = None
        self._since = 0.0
        self._tries = 0

    def again(self, event: str, cause: str, **fields: Any) -> None:
        """It has failed: warn of a cause that is new, and leave one that is known to the debug
        log."""
        if cause == self._cause:
            self._tries += 1
            _log.debug(event, **self._fields, **fields, reason=cause, tries=self._tries)
            return
        if self._cause is None:
            self._since = time.monotonic()
        self._cause, self._tries = cause, 1
        _log.warning(event, **self._fields, **fields, reason=cause)

    def over(self) -> None:
        """It has succeeded. Says so if it was tried more than twice."""
        cause, self._cause = self._cause, None
        if cause is not None and self._tries > 2:
            waited_s = round(time.monotonic() - self._since, 1)
            _log.warning("wait.over", **self._fields, reason=cause, tries=self._tries, waited_s=waited_s)
