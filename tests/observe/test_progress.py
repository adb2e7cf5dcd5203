"""The last line of a terminal, and what stands above it."""

from __future__ import annotations

import io

import pytest

from framework.observe.progress import TerminalStream

CLEAR = "\r\x1b[2K"


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


def test_without_progress_text_passes_as_it_is(screen: tuple[TerminalStream, io.StringIO]) -> None:
    terminal, written = screen
    terminal.write("no newline")
    terminal.leave()
    assert written.getvalue() == "no newline"
