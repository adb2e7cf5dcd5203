"""What the JVM prints: hidden, shown, and never lost or in the way."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.execution.spark.jvm_output import SparkOutput
from tests.kit.command import CommandErrors
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S, wait_for


class Printed:
    """An output, the JVM's end of its pipe, and what of it is ``shown``: without that of a Spark
    which other tests share."""

    def __init__(self) -> None:
        self.shown = CommandErrors(sys.stderr)
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
    monkeypatch.setattr("sys.stderr", printed.shown)
    for _ in range(200):  # each time it is shown whole, however late it is read
        printed.prints("about Spark\n")
        printed.output.show(True)
        printed.prints("a user's\n")
        printed.output.show(False)
    printed.prints("the end\n")
    wait_for(lambda: "the end" in printed.output.log.read_text())
    assert printed.shown.getvalue() == "a user's\n" * 200
    assert printed.output.log.read_text() == "about Spark\n" * 200 + "the end\n"


def test_a_line_without_its_end_is_shown_too(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", printed.shown)
    printed.output.show(True)
    printed.prints("half a line")
    printed.output.show(False)
    wait_for(lambda: printed.shown.getvalue() == "half a line\n")


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


PY4J = """
import socket, threading
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError
{quiet}

gone = socket.create_server(("127.0.0.1", 0))
gateway = JavaGateway(gateway_parameters=GatewayParameters(port=gone.getsockname()[1]))


def end():
    connection, _ = gone.accept()
    gone.close()
    connection.close()


threading.Thread(target=end, daemon=True).start()
try:
    gateway.entry_point.anything()
except Py4JError as error:
    print(type(error).__name__)
"""
QUIET = "from framework.observe.logs import without_py4j; without_py4j()"


@pytest.mark.parametrize("quiet", [False, True])
def test_py4j_prints_no_stack_trace_when_the_jvm_is_gone(quiet: bool) -> None:
    """Its error is raised, too. Without the filter, Py4J prints one, which shows that the test is
    right."""
    program = PY4J.format(quiet=QUIET if quiet else "")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() in ("Py4JError", "Py4JNetworkError")
    assert ("Traceback" in done.stderr) is not quiet, done.stderr
