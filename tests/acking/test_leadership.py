"""Topologies without state have one leader, too. In this process, with a store in memory."""

from __future__ import annotations

import uuid

import pytest
import structlog

from framework import CoreRun, CoreTopology, Fields, TopologyBuilder, submit
from framework.acking import driver
from framework.transactions import MemoryStore
from tests.kit.core_parts import ListSpout, Rich, ack, seen
from tests.kit.stores import wait_for


def topology(key: str, instance: str) -> CoreTopology:
    """``instance``: whose tasks these are."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", ListSpout(instance, [1, 2, 3]))
    builder.set_bolt("bolt", Rich(instance, ack)).fields_grouping("words", Fields("n"))
    return builder.build()


def phase(run: CoreRun) -> str:
    return run.status().phase


@pytest.mark.dies("core 7")
@pytest.mark.rule("C40")
def test_of_two_drivers_of_a_topology_without_state_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_CONFIRM_S", 0.0)
    key, store = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    first, second = f"{key}-first", f"{key}-second"
    with submit(topology(key, first), {}, executor="local", store=store) as leading:
        leading.wait_until_idle(30)
        with submit(topology(key, second), {}, executor="local", store=store) as waiting:
            wait_for(lambda: phase(waiting) == "standby", 30)
            assert (seen(first).acked, seen(second).opened) == ([1, 2, 3], 0)
            store.depose(key)  # as when its session has ended
            wait_for(lambda: phase(leading) == "standby", 30)
            waiting.wait_until_idle(30)
            assert seen(second).acked == [1, 2, 3]
            assert seen(first).closed == seen(first).opened == 1  # nothing of what it knew is used again
            waiting.stop()
        wait_for(lambda: phase(leading) == "running", 30)
        leading.wait_until_idle(30)
        assert seen(first).opened == 2


@pytest.mark.dies("core 7")
def test_a_topology_without_state_and_without_zookeeper_runs_and_says_that_nothing_guards_it() -> None:
    key = f"l{uuid.uuid4().hex[:8]}"
    with structlog.testing.capture_logs() as logs, submit(topology(key, key), {}, executor="local") as run:
        run.wait_until_idle(30)
    said = [log["reason"] for log in logs if log["event"] == "driver.unguarded"]
    assert len(said) == 1
    assert said[0].startswith("transactional.zookeeper.servers is not set")
