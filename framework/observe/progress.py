"""Progress of a run: one line a second, for a terminal, for a log file, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import IO, Any, Protocol


class Observed(Protocol):
    """A status that can be shown."""

    def rows_done(self) -> int:
        """The number of rows done so far, from which the rate is computed."""

    def progress_line(self, rate: float) -> str:
        """One line for a person. ``rate``: rows done per second over the last lines."""

    def document(self) -> dict[str, Any]:
        """The whole status, JSON-able."""


class ProgressLines:
    """Prints a status at most every ``every_s`` seconds. On a terminal it rewrites the line in
    place; elsewhere it appends lines."""

    def __init__(self, *, json_lines: bool = False, every_s: float = 1.0, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._json = json_lines
        self._every_s = every_s
        self._in_place = not json_lines and self._stream.isatty()
        self._last = 0.0
        self._recent: list[tuple[float, int]] = []

    def show(self, status: Observed, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._last < self._every_s:
            return
        self._last = now
        self._recent = [*self._recent[-9:], (now, status.rows_done())]
        if self._json:
            self._stream.write(json.dumps(status.document()) + "\n")
        else:
            line = status.progress_line(self._rate())
            self._stream.write(f"\r\x1b[2K{line}" if self._in_place else f"{line}\n")
        self._stream.flush()

    def done(self) -> None:
        if self._in_place:
            self._stream.write("\n")
            self._stream.flush()

    def _rate(self) -> float:
        """Rows per second over the last lines."""
        (first_at, first_rows), (last_at, last_rows) = self._recent[0], self._recent[-1]
        return (last_rows - first_rows) / (last_at - first_at) if last_at > first_at else 0.0
