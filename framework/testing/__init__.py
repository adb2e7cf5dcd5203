"""Runs a topology in this process under seeded trouble, and finds what breaks exactly-once in its
bolts and committers. For tests, and for ``ratchet simulate``."""

from framework.testing.asserting import SimulationFailed, simulate
from framework.testing.findings import Broken, Finding, Report
from framework.testing.outside import Outside

__all__ = ["Broken", "Finding", "Outside", "Report", "SimulationFailed", "simulate"]
