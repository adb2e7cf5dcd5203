"""Logs a wait when it begins and when it ends, but not at each retry."""

from __future__ import annotations

import time
from typing import Any

from framework.observe.logs import get_logger

_log = get_logger()


class Waits:
    """The wait of one component: at most one cause at a time. ``fields`` are in every line."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._cause: str | None = None
        self._since = 0.0
        self._tries = 0

    def again(self, event: str, cause: str, **fields: Any) -> None:
        """An operation has failed: warn about a new cause, and log a known one at debug level
        only."""
        if cause == self._cause:
            self._tries += 1
            _log.debug(event, **self._fields, **fields, reason=cause, tries=self._tries)
            return
        if self._cause is None:
            self._since = time.monotonic()
        self._cause, self._tries = cause, 1
        _log.warning(event, **self._fields, **fields, reason=cause)

    def over(self) -> None:
        """The operation has succeeded. Logs that if it was tried more than twice."""
        cause, self._cause = self._cause, None
        if cause is not None and self._tries > 2:
            waited_s = round(time.monotonic() - self._since, 1)
            _log.warning("wait.over", **self._fields, reason=cause, tries=self._tries, waited_s=waited_s)
