"""The last line of a terminal, and what stands above it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import termios
from typing import Any

import pytest
import structlog

from framework.commands.exit_status import own_output
from framework.observe import configure_logging
from framework.observe.progress_lines import ProgressLines, TerminalStream

CLEAR = "\r\x1b[2K"


class Shown:
    """A status of one line."""

    def __init__(self, line: str) -> None:
        self._line = line

    def rows_done(self) -> int:
        return 0

    def progress_line(self, rate: float) -> str:
        return self._line

    def document(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> tuple[TerminalStream, io.StringIO]:
    monkeypatch.setenv("COLUMNS", "20")
    written = io.StringIO()
    return TerminalStream(written), written


def test_a_log_line_stands_above_the_progress(screen: tuple[TerminalStream, io.StringIO]) -> None:
    terminal, written = screen
    terminal.show("running")
    print("a log line", file=terminal)
    assert written.getvalue().endswith(f"{CLEAR}a log line\nrunning")
    terminal.leave()
    print("the end", file=terminal)
    assert written.getvalue().endswith("running\nthe end\n")


def test_progress_is_cut_to_the_width_of_the_terminal(screen: tuple[TerminalStream, io.StringIO]) -> None:
    terminal, written = screen
    terminal.show("x" * 50)
    assert written.getvalue() == CLEAR + "x" * 18 + "…"


@pytest.mark.parametrize(
    ("line", "shown"), [("世" * 50, "世" * 9 + "…"), ("e\u0301" * 19, "e\u0301" * 19), ("x" * 19, "x" * 19)]
)
def test_signs_are_as_wide_as_the_terminal_shows_them(
    screen: tuple[TerminalStream, io.StringIO], line: str, shown: str
) -> None:
    terminal, written = screen
    terminal.show(line)
    assert written.getvalue() == CLEAR + shown


def test_the_width_is_that_of_the_terminal_that_is_written_to() -> None:
    """Standard output may be a file."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    with os.fdopen(its, "w") as stream:
        TerminalStream(stream).show("x" * 100)
        assert os.read(ours, 1_000).decode() == CLEAR + "x" * 28 + "…"
        assert TerminalStream(stream).fileno() == stream.fileno()  # what a subprocess writes to
    os.close(ours)


def test_an_error_of_several_lines_is_shown_on_one(screen: tuple[TerminalStream, io.StringIO]) -> None:
    terminal, written = screen
    ProgressLines(stream=terminal).show(Shown("a\n\tb"))
    assert written.getvalue() == CLEAR + "a  b"
    plain = io.StringIO()
    ProgressLines(stream=plain).show(Shown("a\n\tb"))
    assert plain.getvalue() == "a  b\n"


def test_without_progress_text_passes_as_it_is(screen: tuple[TerminalStream, io.StringIO]) -> None:
    terminal, written = screen
    terminal.write("no newline")
    terminal.leave()
    assert written.getvalue() == "no newline"


def test_what_user_code_prints_to_a_terminal_stands_above_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", TerminalStream(screen))
    with own_output() as out:
        ProgressLines().show(Shown("running"))
        print("a user's line")
        assert out is screen
    assert screen.getvalue().endswith(f"{CLEAR}a user's line\nrunning")
    plain = io.StringIO()
    monkeypatch.setattr("sys.stdout", plain)
    with own_output():
        print("a user's line")  # to a file, where the user sent it
    assert plain.getvalue() == "a user's line\n"


def test_the_trace_of_an_error_is_in_the_json_logs_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = structlog.get_config()
    try:
        configure_logging(json_lines=True)
        try:
            raise ValueError("not today")
        except ValueError:
            structlog.get_logger().error("driver.crashed", exc_info=True)
    finally:
        structlog.configure(**before)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "driver.crashed" in each]
    assert "ValueError: not today" in json.loads(line)["exception"]
