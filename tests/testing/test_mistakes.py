"""Each mistake of a user is found, with a schedule that is as short as can be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from framework import Topology
from framework.testing import Broken, Outside, SimulationFailed, simulate
from framework.testing.simulation.findings import Finding
from framework.testing.simulation.schedule import Kind
from tests.testing import mistakes
from tests.testing.mistakes import RECORDS, committed_by, counting

SCHEDULES = 40

#: Topology -> what breaks, in which component, and the most records and faults that show it.
PLANTED: dict[str, tuple[Callable[[], Topology], Broken, str, int, int]] = {
    "a dictionary kept in the class": (lambda: counting(mistakes.RunningCount()), Broken.ROWS, "bolt", 1, 1),
    "a clock": (lambda: counting(mistakes.Stamped()), Broken.ROWS, "bolt", 1, 1),
    "a calendar": (lambda: counting(mistakes.Dated()), Broken.ROWS, "bolt", 1, 1),
    "a random number": (lambda: counting(mistakes.Sampled()), Broken.ROWS, "bolt", 2, 1),
    "an unordered set": (lambda: counting(mistakes.Letters()), Broken.ROWS, "bolt", 1, 1),
    "a lookup that changes": (lambda: counting(mistakes.LookedUp()), Broken.ROWS, "bolt", 6, 1),
    "a memory of the module": (lambda: counting(mistakes.Once(), opaque=True), Broken.ROWS, "bolt", 1, 1),
    "a cache that counts": (lambda: counting(mistakes.Numbered()), Broken.ROWS, "bolt", 2, 1),
    "the number of the attempt": (lambda: counting(mistakes.Tried()), Broken.ROWS, "bolt", 1, 1),
    "a committer that reads past its commit": (lambda: committed_by(mistakes.Reads()), Broken.STATE, "commit", 1, 1),
    "a committer that counts on its class": (lambda: committed_by(mistakes.Totals()), Broken.STATE, "commit", 1, 1),
    "a mail before the commit": (
        lambda: committed_by(mistakes.Mails(Outside("mailbox"))),
        Broken.OUTSIDE,
        "commit",
        1,
        1,
    ),
    "a committer that appends": (
        lambda: committed_by(mistakes.Appends(Outside("file"))),
        Broken.OUTSIDE,
        "commit",
        1,
        1,
    ),
    "a committer that inserts": (
        lambda: committed_by(mistakes.Inserts(Outside("table"))),
        Broken.STOPPED,
        "commit",
        1,
        1,
    ),
    "a committer that forgets who wrote": (
        lambda: committed_by(mistakes.Newest(Outside("table"))),
        Broken.OUTSIDE,
        "commit",
        2,
        1,
    ),
}
#: One for each kind of finding, in the bolt and in the committer.
QUICK = {
    "a dictionary kept in the class",
    "a lookup that changes",
    "a committer that reads past its commit",
    "a mail before the commit",
    "a committer that inserts",
}


def found_in(topology: Topology, schedules: int = SCHEDULES) -> list[Finding]:
    with pytest.raises(SimulationFailed) as caught:
        simulate(topology, RECORDS, schedules=schedules)
    print(caught.value)
    return caught.value.report.findings


@pytest.mark.quick_for("a committer that inserts")
@pytest.mark.parametrize(
    "mistake", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PLANTED]
)
def test_a_planted_mistake_is_found_with_its_shortest_schedule(mistake: str) -> None:
    make, broken, component, records_max, faults_max = PLANTED[mistake]
    findings = found_in(make())
    assert [(each.broken, each.component) for each in findings] == [(broken, component)]
    (finding,) = findings
    assert len(finding.schedule.kept) <= records_max
    assert len(finding.schedule.faults) <= faults_max
    told = [line for line in finding.story if line.startswith("FAULT")]
    assert len(told) == len(finding.schedule.faults)
    assert any(kind.value in told[0] for kind in Kind)
