"""For the tests of your own topologies.

``run_on`` and ``run_core_on`` run a topology over lists, in one line, and let the test say what
goes wrong. ``simulate`` looks for trouble that breaks exactly-once in its bolts and committers.
"""

from framework.testing.asserting import SimulationFailed, simulate
from framework.testing.core_kit import CoreDone, run_core_on
from framework.testing.findings import Broken, Finding, Report
from framework.testing.kit import Done, Trouble, crash, fail_attempt, replay, run_on
from framework.testing.outside import Outside

__all__ = [
    "Broken",
    "CoreDone",
    "Done",
    "Finding",
    "Outside",
    "Report",
    "SimulationFailed",
    "Trouble",
    "crash",
    "fail_attempt",
    "replay",
    "run_core_on",
    "run_on",
    "simulate",
]
