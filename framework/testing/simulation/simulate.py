"""The simulator as a function for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from framework.config import Config
from framework.testing.simulation.findings import Report
from framework.testing.simulation.sample_records import sample_from_source, sample_of
from framework.testing.simulation.shrinker import run_schedules
from framework.topology import Topology

#: How many records are read from a source.
RECORDS = 20
SCHEDULES = 200


class SimulationFailed(AssertionError):
    """A simulation has found a fault that breaks exactly-once. The message is the report, which is
    in ``report``, too.
    """

    def __init__(self, report: Report) -> None:
        super().__init__("\n".join(report.lines()))
        self.report = report


def simulate(
    topology: Topology,
    records: Iterable[Any] | Mapping[Any, Iterable[Any]] | int = RECORDS,
    *,
    schedules: int = SCHEDULES,
    seed: int = 0,
    config: Mapping[str, Any] | Config | None = None,
    connect: bool = False,
) -> Report:
    """Run a topology over a few records in this process, under ``schedules`` schedules of faults,
    those of the seeds ``seed``, ``seed + 1`` and so on. Returns a report of the runs when nothing
    was found.

    * ``records``: the records that the spout emits on its default stream, each a mapping by field
      names or a sequence of values; or a mapping of partitions to such records; or how many to read
      from the topology's own source.
    * ``config``: the keys that the components get.
    * ``connect``: bolts may open connections, for look-ups.

    States are copies that start empty, and nothing outside is changed: components that try to are
    left out, and named in the report. A committer without a state takes part if an ``Outside``
    replaces its target.

    Raises ``SimulationFailed`` with the shortest schedule for each finding, ``ConfigError`` when no
    part of the topology can be simulated, and ``TopologyFailed`` when it fails without any fault.

    >>> from framework.testing import simulate
    >>> def test_counting() -> None:
    ...     simulate(topology(), [{"word": "dog"}, {"word": "cat"}, {"word": "dog"}])
    """
    checked = Config.of(config or {})
    if isinstance(records, int):
        sample = sample_from_source(topology, checked.for_components(), records)
    else:
        sample = sample_of(topology, records)
    report = run_schedules(topology, sample, checked, schedules=schedules, seed=seed, connect=connect)
    if report.findings:
        raise SimulationFailed(report)
    return report
