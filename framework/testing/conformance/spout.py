"""The contract suite of partitioned spouts: the behaviour of plans and readers. Needs pytest.

::

    class TestMySpout(PartitionedSpoutContract):
        def spout(self):
            return MySpout(ADDRESS, "some-queue-with-five-records")

The source must hold three records or more, and must not change while a test runs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle

from framework.topology import PartitionPlanner, TopologyContext, TransactionAttempt
from framework.topology.spouts import Meta, PartitionedSpout, on_stream

Plan = Mapping[str, Meta]
#: The most batches that a test's source may need.
_BATCHES_MAX = 10_000


class PartitionedSpoutContract:
    """Subclass it and write ``spout``."""

    def spout(self) -> PartitionedSpout:
        """A spout over a source with three records or more. Each call gives another object over
        the same source."""
        raise NotImplementedError

    def conf(self) -> Mapping[str, Any]:
        """The configuration that the spout gets."""
        return {}

    # --- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _planner(self, spout: PartitionedSpout | None = None) -> Iterator[PartitionPlanner]:
        planner = (spout or self.spout()).planner(self.conf(), TopologyContext("contract", "spout", 0, 1))
        try:
            yield planner
        finally:
            planner.close()

    def _plans(self, planner: PartitionPlanner, previous: Plan | None = None) -> list[Plan]:
        """Every batch from ``previous`` to the end of the source, in the form in which the store
        returns plans."""
        plans: list[Plan] = []
        while (made := planner.plan(plans[-1] if plans else previous or {})) is not None:
            plans.append(_kept(made))
            assert len(plans) < _BATCHES_MAX, "plan() never returns None, so the source has no end"
        return plans

    def _read(self, spout: PartitionedSpout, planner: PartitionPlanner, plan: Plan) -> list[tuple[str, Any]]:
        """The rows that a task reads, with their streams: by a copy of the spout, and a reader of
        its own.
        """
        copy = cloudpickle.loads(cloudpickle.dumps(spout))
        reader = copy.reader(self.conf(), TopologyContext("contract", "spout", 0, 1))
        ranges = {partition: planner.for_reading(partition, meta) for partition, meta in plan.items()}
        found: list[tuple[str, Any]] = []
        try:
            for rows in reader.read_all(TransactionAttempt(1, 1), ranges):
                stream, batch = on_stream(rows)
                found += [(stream, row) for row in batch.to_pylist()]
        finally:
            reader.close()
        return found

    # --- the suite --------------------------------------------------------------------------------

    def test_a_plan_says_json_and_names_every_partition_of_the_one_before(self) -> None:
        with self._planner() as planner:
            plans = self._plans(planner)
            assert plans, "the source of the suite holds three records or more"
            for before, after in itertools.pairwise(plans):
                assert set(before) <= set(after)
            assert set(plans[-1]) <= set(planner.partitions())

    def test_all_batches_together_hold_every_record_once(self) -> None:
        spout = self.spout()
        with self._planner(spout) as planner:
            plans = self._plans(planner)
            rows = [row for plan in plans for row in self._read(spout, planner, plan)]
            assert len(rows) >= 3
            counts = [planner.record_count(plan) for plan in plans]
            for count, plan in zip(counts, plans, strict=True):
                read = len(self._read(spout, planner, plan))
                assert count is None or count >= read, f"record_count is {count}, and {read} records were read"

    def test_a_replay_reads_the_same_rows_in_the_same_order_of_each_partition(self) -> None:
        spout = self.spout()
        with self._planner(spout) as planner:
            for plan in self._plans(planner):
                once = self._read(spout, planner, plan)
                assert self._read(spout, planner, plan) == once
                with self._planner() as other:  # a planner of another driver
                    assert self._read(self.spout(), other, plan) == once
                alone = [row for each, meta in plan.items() for row in self._read(spout, planner, {each: meta})]
                assert sorted(map(repr, alone)) == sorted(map(repr, once))

    def test_another_planner_goes_on_where_the_last_plan_ended(self) -> None:
        spout = self.spout()
        with self._planner(spout) as planner:
            plans = self._plans(planner)
            every = [row for plan in plans for row in self._read(spout, planner, plan)]
        with self._planner(spout) as planner:
            first = planner.plan({})
            assert first is not None
            rest = []
        with self._planner(spout) as other:
            rest = self._plans(other, _kept(first))
            rows = [row for plan in (first, *rest) for row in self._read(spout, other, plan)]
        assert sorted(map(repr, rows)) == sorted(map(repr, every))

    def test_a_source_without_anything_new_gives_no_plan(self) -> None:
        with self._planner() as planner:
            last = self._plans(planner)[-1]
            assert planner.plan(last) is None
            empty = planner.empty_plan(last)
            if empty is not None:
                assert set(empty) >= set(last)
                assert self._read(self.spout(), planner, _kept(empty)) == []

    def test_the_end_of_the_source_is_covered_when_all_is_planned_and_not_before(self) -> None:
        with self._planner() as planner:
            goal = planner.end()
            if goal is None:
                return  # this source does not know its end
            plans = self._plans(planner)
            assert planner.covers(plans[-1], goal)
            assert len(plans) == 1 or not planner.covers(plans[0], goal)

    def test_closing_twice_is_safe(self) -> None:
        with self._planner() as planner:
            planner.close()


def _kept(plan: Plan) -> Plan:
    """A plan in the form in which the store returns it."""
    kept: Plan = json.loads(json.dumps(plan))
    assert kept == dict(plan), "an entry of a plan must be the same after a journey through JSON"
    return kept
