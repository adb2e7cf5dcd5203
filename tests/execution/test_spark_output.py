"""What the JVM prints: hidden, shown, and never lost or in the way."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.execution.spark.jvm_output import SparkOutput
from tests.kit.waiting import wait_for


class Printed:
    """An output, and the JVM's end of its pipe."""

    def __init__(self) -> None:
        self.output = SparkOutput()
        self._jvm = os.dup(self.output.popen_arguments()["stdout"])

    def prints(self, text: str) -> None:
        os.write(self._jvm, text.encode())

    def ends(self) -> None:
        os.close(self._jvm)


@pytest.fixture
def printed() -> Iterator[Printed]:
    printed = Printed()
    yield printed
    printed.ends()
    Path(printed.output.log).unlink(missing_ok=True)


def test_what_spark_prints_is_in_the_log_and_what_the_user_prints_is_shown(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    for _ in range(200):  # each time it is shown whole, however late it is read
        printed.prints("about Spark\n")
        printed.output.show(True)
        printed.prints("a user's\n")
        printed.output.show(False)
    printed.prints("the end\n")
    wait_for(lambda: "the end" in printed.output.log.read_text())
    assert shown.getvalue() == "a user's\n" * 200
    assert printed.output.log.read_text() == "about Spark\n" * 200 + "the end\n"


def test_a_line_without_its_end_is_shown_too(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    printed.output.show(True)
    printed.prints("half a line")
    printed.output.show(False)
    wait_for(lambda: shown.getvalue() == "half a line\n")


def test_output_that_cannot_be_shown_does_not_stop_those_who_print(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Broken())
    printed.output.show(True)
    printed.prints("now\n")
    for _ in range(3):
        printed.prints("x" * 60_000 + "\n")  # more than a pipe holds
    printed.output.show(False)
    printed.prints("the end\n")
    wait_for(lambda: "the end" in printed.output.log.read_text())
