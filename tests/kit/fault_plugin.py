"""``--fault-repeat N`` runs each test of a fault N times; ``--fault-report FILE`` says what
happened.

A test of a fault carries ``@pytest.mark.fault(ROW, ...)``. It tells the ``faults`` fixture what it
injects, and how long the pipeline took to make progress again.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fault_rows import ROWS

#: Progress means this many commits: batches that were already in flight do not prove recovery.
COMMITS_AFTER = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fault-repeat", type=int, default=1, metavar="N", help="each test of a fault so often")
    group.addoption("--fault-report", type=Path, default=None, metavar="FILE", help="write what happened, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows): which rows of the fault table the test is about")
    config.addinivalue_line("markers", "dies(*lines): which lines of the tables of what happens when something dies")
    if config.option.fault_report is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(config.option.fault_report), "fault-report")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    repeat = metafunc.config.getoption("--fault-repeat")
    if repeat > 1 and metafunc.definition.get_closest_marker("fault") is not None:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(1, repeat + 1), scope="function")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rows = sorted({row for mark in item.iter_markers("fault") for row in mark.args})
        if rows:
            item.user_properties.append(("fault-rows", rows))


class Faults:
    """Where a test reports the faults that it injects."""

    def __init__(self, properties: list[tuple[str, Any]]) -> None:
        self._properties = properties

    def injected(self, count: int = 1) -> None:
        """Count ``count`` more faults, whose recovery is not timed."""
        self._properties.append(("faults-injected", count))

    def recovery(
        self, kind: str, committed: Callable[[], int], cause: Callable[[], object], timeout_s: float = 300.0
    ) -> float:
        """Call ``cause``, and wait for ``COMMITS_AFTER`` more commits than there were when it
        returned.

        Returns the seconds since ``cause`` was called. Raises ``TimeoutError`` after ``timeout_s``
        (invariant 13).
        """
        start = time.monotonic()
        cause()
        before = committed()
        while committed() < before + COMMITS_AFTER:
            if time.monotonic() - start > timeout_s:
                raise TimeoutError(f"{kind}: no progress within {timeout_s:g} s")
            time.sleep(0.02)
        taken = time.monotonic() - start
        self._properties.append(("fault-recovery", (kind, taken)))
        return taken


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    return Faults(request.node.user_properties)


@dataclass
class _Row:
    tests: int = 0
    failed: list[str] = field(default_factory=list)
    injected: int = 0


class _Report:
    """Gathers what the tests reported, whatever process they ran in."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[int, _Row] = defaultdict(_Row)
        self._recoveries: dict[str, list[float]] = defaultdict(list)
        self._started = time.monotonic()
        self._total = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = list(report.user_properties)
        rows = next((value for key, value in properties if key == "fault-rows"), None)
        if rows is None or not (report.when == "call" or report.failed):
            return
        recoveries = [tuple(value) for key, value in properties if key == "fault-recovery"]
        counted = sum(value for key, value in properties if key == "faults-injected") + len(recoveries)
        injected = counted or 1  # a test that reports nothing is one fault
        self._total += injected
        for row in rows:
            each = self._rows[row]
            each.tests += 1
            each.injected += injected
            if report.failed:
                each.failed.append(report.nodeid)
        for kind, seconds in recoveries:
            self._recoveries[kind].append(seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._file.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        """The report, as Markdown."""
        failed = sum(len(row.failed) for row in self._rows.values())
        minutes = (time.monotonic() - self._started) / 60
        found = [
            f"{self._total} faults injected in {minutes:.0f} minutes; rows with a failure: {failed}; records lost or doubled: "
            + (
                "none: every test that passes compares all figures with an oracle."
                if not failed
                else "see the failures."
            ),
            "",
            "| # | fault | expected | tests | faults injected | outcome |",
            "|---|---|---|---|---|---|",
        ]
        for number, (fault, expected) in ROWS.items():
            row = self._rows.get(number)
            tests, injected, outcome = "0", "0", "not run"
            if row is not None:
                tests, injected = str(row.tests), str(row.injected)
                outcome = "as expected" if not row.failed else "FAILED: " + ", ".join(row.failed)
            found.append(f"| {number} | {fault} | {expected} | {tests} | {injected} | {outcome} |")
        found += [
            "",
            f"Time to progress again, from the beginning of the fault until {COMMITS_AFTER} more transactions were committed:",
            "",
            "| fault | times | median (s) | slowest (s) |",
            "|---|---|---|---|",
        ]
        for kind, seconds in sorted(self._recoveries.items()):
            found.append(f"| {kind} | {len(seconds)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
        return found
