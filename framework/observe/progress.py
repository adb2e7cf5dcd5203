"""Progress of a run: one line a second, for a terminal, for a log file, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any, Protocol


class Observed(Protocol):
    """A status as ``Run.status`` gives it."""

    @property
    def phase(self) -> str: ...
    @property
    def committed_txid(self) -> int: ...
    @property
    def in_flight(self) -> Mapping[int, str]: ...
    @property
    def lag(self) -> int | None: ...
    @property
    def in_flight_rows(self) -> int | None: ...
    @property
    def read_rows(self) -> int: ...
    @property
    def committed_rows(self) -> int: ...
    @property
    def attempts_failed(self) -> int: ...
    @property
    def bad_records(self) -> int: ...
    @property
    def lost_records(self) -> int: ...
    @property
    def waiting_for(self) -> str | None: ...


def _document(status: Observed) -> dict[str, Any]:
    """The whole status, with the lag of each partition."""
    document: dict[str, Any] = asdict(status)  # type: ignore[call-overload]
    for partition, progress in getattr(status, "partitions", {}).items():
        document["partitions"][partition]["lag"] = progress.lag
    return document


class ProgressLines:
    """Prints a status at most every ``every_s``. On a terminal the line is rewritten in place; elsewhere each one stays."""

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
        self._recent = [*self._recent[-9:], (now, status.committed_rows)]
        if self._json:
            self._stream.write(json.dumps(_document(status)) + "\n")
        else:
            line = self._line(status)
            self._stream.write(f"\r\x1b[2K{line}" if self._in_place else f"{line}\n")
        self._stream.flush()

    def done(self) -> None:
        if self._in_place:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, status: Observed) -> str:
        rate = self._rate()
        in_flight = "unknown" if status.in_flight_rows is None else f"{status.in_flight_rows:,}"
        lag = "unknown" if status.lag is None else f"{status.lag:,}"
        parts = [
            f"{status.phase}",
            f"read {status.read_rows:,}",
            f"in flight {in_flight}",
            f"committed {status.committed_rows:,} (txid {status.committed_txid})",
            f"lag {lag}",
            f"{rate:,.0f} rows/s",
        ]
        if status.lag and rate > 0:
            parts.append(f"{status.lag / rate:,.0f} s left")
        if status.attempts_failed:
            parts.append(f"{status.attempts_failed} attempts failed")
        if status.bad_records:
            parts.append(f"{status.bad_records:,} bad records")
        if status.lost_records:
            parts.append(f"{status.lost_records:,} records lost")
        if status.waiting_for:
            parts.append(f"waiting: {status.waiting_for}")
        return " | ".join(parts)

    def _rate(self) -> float:
        """Rows per second over the last lines."""
        (first_at, first_rows), (last_at, last_rows) = self._recent[0], self._recent[-1]
        return (last_rows - first_rows) / (last_at - first_at) if last_at > first_at else 0.0
