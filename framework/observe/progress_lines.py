"""Progress of a run: one line a second, for a terminal, for a log file, or as JSON."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
import time
import unicodedata
from typing import IO, Any, Protocol

_CLEAR = "\r\x1b[2K"
#: When lines are appended, the same status is not repeated within this time.
_REPEAT_S = 60.0


class Observed(Protocol):
    """A status that can be shown."""

    @property
    def phase(self) -> str:
        """starting, standby, running, stopped or failed."""

    def rows_done(self) -> int:
        """The number of rows done so far, from which the rate is computed."""

    def progress_line(self, rate: float) -> str:
        """One line of text for display. ``rate``: rows done per second, over the last lines."""

    def document(self) -> dict[str, Any]:
        """The whole status, JSON-able."""


class TerminalStream(io.TextIOBase):
    """A terminal whose last line is rewritten in place. Other output appears above that line."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._line = ""
        self._pending = ""
        self._lock = threading.RLock()  # a signal handler may write while its own thread is writing

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._pending += text
            whole, newline, rest = self._pending.rpartition("\n")
            if not self._line:
                self._stream.write(self._pending)
                self._pending = ""
            elif newline:  # a line is complete: ``print`` writes its end separately
                self._stream.write(_CLEAR + whole + newline + self._line)
                self._pending = rest
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def buffer(self) -> IO[bytes]:
        """The stream for bytes, which bypass the progress line."""
        return self._stream.buffer  # type: ignore[attr-defined,no-any-return]

    def _width(self) -> int:
        """The width of this terminal; standard output may be another terminal, or a file."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or shutil.get_terminal_size().columns
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns

    def show(self, line: str) -> None:
        """Replace the last line, cut to the width of the terminal."""
        with self._lock:
            self._line = _cut(line, max(self._width() - 1, 1))
            self._stream.write(_CLEAR + self._line)
            self._stream.flush()

    def leave(self) -> None:
        """Keep the last line; later output appears below it."""
        with self._lock:
            if self._line:
                self._stream.write("\n" + self._pending)
                self._stream.flush()
                self._line = self._pending = ""


def _cut(line: str, width: int) -> str:
    """Cut a line to this many columns. A Chinese or Japanese character takes two columns, an accent
    none."""
    taken = fits = 0
    for number, sign in enumerate(line, 1):
        taken += 0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        if taken < width:  # there is room for a mark that the line was cut
            fits = number
        if taken > width:
            return f"{line[:fits]}…"
    return line


def _on_one_line(text: str) -> str:
    """Put a text on one line: the messages of some errors have several lines, or colours."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


class ProgressLines:
    """Prints a status at most every ``every_s`` seconds. On a terminal it rewrites the line in
    place. Elsewhere it appends a line when more than the rate has changed, and once a minute.
    ``json_lines``: print lines of type ``status`` on standard output, even without a change."""

    def __init__(self, *, json_lines: bool = False, every_s: float = 1.0, stream: IO[str] | None = None) -> None:
        chosen = stream or (sys.stdout if json_lines else sys.stderr)
        if not json_lines and chosen.isatty() and not isinstance(chosen, TerminalStream):
            chosen = TerminalStream(chosen)
        self._stream = chosen
        self._json = json_lines
        self._every_s = every_s
        self._last = 0.0
        self._recent: list[tuple[float, int]] = []
        self._appended = ("", 0.0)  # the last line without its rate, and its time

    def show(self, status: Observed, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._last < self._every_s:
            return
        self._last = now
        self._recent = [*self._recent[-9:], (now, status.rows_done())]
        if self._json:
            self._print(json.dumps({"type": "status", **status.document()}))
        elif isinstance(self._stream, TerminalStream):
            self._stream.show(_on_one_line(status.progress_line(self._rate())))
        else:
            known, at = self._appended
            told = status.progress_line(0.0)
            if told != known or now - at >= _REPEAT_S:
                self._appended = told, now
                self._print(_on_one_line(status.progress_line(self._rate())))

    def done(self) -> None:
        if isinstance(self._stream, TerminalStream):
            self._stream.leave()

    def _print(self, line: str) -> None:
        """Print a line. A full disk does not end a run. A reader of JSON lines that is gone
        does."""
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except OSError as error:
            if self._json and isinstance(error, BrokenPipeError):
                raise

    def _rate(self) -> float:
        """Rows per second, over the last lines."""
        (first_at, first_rows), (last_at, last_rows) = self._recent[0], self._recent[-1]
        return (last_rows - first_rows) / (last_at - first_at) if last_at > first_at else 0.0
