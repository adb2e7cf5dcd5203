"""Tools for testing your own topologies.

``run_on`` and ``run_core_on`` run a topology over lists, in one line, with the faults that the test
asks for. ``simulate`` searches for faults that break exactly-once in its bolts and committers.
"""

from framework.testing.core_test_driver import CoreDone, run_core_on
from framework.testing.simulation.external_effects import Outside
from framework.testing.simulation.findings import Broken, Finding, Report
from framework.testing.simulation.simulate import SimulationFailed, simulate
from framework.testing.test_driver import Done, Fault, crash, fail_attempt, replay, run_on

__all__ = [
    "Broken",
    "CoreDone",
    "Done",
    "Fault",
    "Finding",
    "Outside",
    "Report",
    "SimulationFailed",
    "crash",
    "fail_attempt",
    "replay",
    "run_core_on",
    "run_on",
    "simulate",
]
