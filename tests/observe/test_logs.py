"""A program that embeds the library hears nothing of it until it asks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from framework.observe.logs import INHERITED, get_logger
from tests.kit.own_logs import own_logs
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S

PROGRAM = """
from framework import *
from framework.observe import configure_logging
from sinks import *
from spouts import *

builder = TransactionalTopologyBuilder("t", "s", MemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1))
state = TransactionalMapState(MemoryBackend())
builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("s")
ASK
with submit(builder.build(), executor="local") as run:
    run.wait_until_caught_up(240)
"""


def printed(ask: str, **environment: str) -> tuple[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != INHERITED}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("ASK", ask)],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.slow
def test_nothing_is_printed_unless_it_is_asked_for() -> None:
    assert printed("") == ("", "")


@pytest.mark.quick_for("configured by us")
@pytest.mark.parametrize(
    ("ask", "environment"),
    [
        ("configure_logging()", {}),
        ("import structlog, sys; structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))", {}),
        ("", {INHERITED: "text:info"}),
    ],
    ids=["configured by us", "configured by the program", "as the parent process prints"],
)
def test_logs_are_printed_where_logging_is_configured(ask: str, environment: dict[str, str]) -> None:
    out, err = printed(ask, **environment)
    assert out == ""
    assert "driver.leads" in err


@pytest.mark.slow
def test_the_first_line_of_a_child_process_obeys_the_level_of_its_parent() -> None:
    ask = "from framework.observe.logs import get_logger; log = get_logger(); log.debug('low'); log.info('high')"
    _, err = printed(ask, **{INHERITED: "json:info"})
    first = err.splitlines()[0]
    assert "low" not in err and first.startswith("{") and "high" in first, err


@pytest.mark.quick_for("False")
@pytest.mark.parametrize("json_lines", [False, True])
def test_a_disk_that_is_full_ends_no_run(json_lines: bool) -> None:
    ask = f"configure_logging(json_lines={json_lines}); from framework.observe import ProgressLines"
    shown = f"\n    ProgressLines(json_lines={json_lines}).show(run.status(), force=True)"
    program = PROGRAM.replace("ASK", ask) + shown + "\n    assert run.status().committed_txid == 1\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=full, check=False)
    # 120: Python itself could not write what was left of standard output.
    assert done.returncode in (0, 120)


def test_what_a_thread_of_an_earlier_test_logs_is_not_taken_for_the_lines_of_this_one() -> None:
    log, said, says = get_logger(), threading.Event(), threading.Event()

    def speak() -> None:
        says.wait(PATIENCE_S)
        log.warning("left.behind")
        said.set()

    earlier = threading.Thread(target=speak)
    earlier.start()
    with own_logs() as lines:
        says.set()
        earlier.join(PATIENCE_S)
        log.warning("mine")
        mine = threading.Thread(target=log.warning, args=("mine.too",))
        mine.start()
        mine.join(PATIENCE_S)
    assert said.is_set()
    assert [each["event"] for each in lines] == ["mine", "mine.too"]
