"""Core topologies have one leader, also those without state.

In this process, with a store in memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog

from framework import Config, CoreRun, CoreTopology, Fields, TopologyBuilder, submit
from framework.core import driver, leader_loop
from framework.core.leader_loop import read_record, store_for
from framework.errors import DataLossError
from framework.transactions import MemoryStore
from tests.kit.core_parts import ListSpout, Rich, ack, seen
from tests.kit.own_logs import own_logs
from tests.kit.state_parts import Log, Source, counting, journal, lmdb, steps_of
from tests.kit.waiting import PATIENCE_S, wait_for


def topology(key: str, instance: str) -> CoreTopology:
    """``instance``: the key under which this run's components record what they did."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", ListSpout(instance, [1, 2, 3]))
    builder.set_bolt("bolt", Rich(instance, ack)).fields_grouping("words", Fields("n"))
    return builder.build()


class Forgetful(Log):
    """Misses records when it first reads: another driver was elected, and this one's has not
    heard of it."""

    stores: ClassVar[dict[str, MemoryStore]] = {}  # key -> the store of a run that is to be deposed

    def next_tuple(self) -> None:
        store = self.stores.pop(self.key, None)
        if store is not None:
            store._epochs[self.key] += 1
            raise DataLossError("the source has forgotten what is read next")
        super().next_tuple()


def phase(run: CoreRun) -> str:
    return run.status().phase


@pytest.mark.dies("core 7")
@pytest.mark.rule("C40")
def test_of_two_drivers_of_a_topology_without_state_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_CONFIRM_S", 0.0)
    key, store = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    first, second = f"{key}-first", f"{key}-second"
    with submit(topology(key, first), {}, executor="local", store=store) as leading:
        leading.wait_until_idle(PATIENCE_S)
        with submit(topology(key, second), {}, executor="local", store=store) as waiting:
            wait_for(lambda: phase(waiting) == "standby")
            assert (seen(first).acked, seen(second).opened) == ([1, 2, 3], 0)
            store.depose(key)  # as if its session had ended
            wait_for(lambda: phase(leading) == "standby")
            waiting.wait_until_idle(PATIENCE_S)
            assert seen(second).acked == [1, 2, 3]
            assert seen(first).closed == seen(first).opened == 1  # its objects are not used again
            waiting.stop()
        wait_for(lambda: phase(leading) == "running")
        leading.wait_until_idle(PATIENCE_S)
        assert seen(first).opened == 2


@pytest.mark.rule("C40")
@pytest.mark.parametrize("stateful", [True, False])
def test_a_deposed_driver_that_misses_records_stands_by(stateful: bool) -> None:
    """What its spout still reads, its successor may have read and the source forgotten."""
    key, store = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    Forgetful.stores[key] = store
    built = counting(key, Forgetful(key, [["the", "cow"]])) if stateful else None
    if built is None:
        builder = TopologyBuilder(key)
        builder.set_spout("words", Forgetful(key, [["the", "cow"]]))
        builder.set_bolt("bolt", Rich(key, ack)).fields_grouping("words", Fields("word"))
        built = builder.build()
    with submit(built, {}, executor="local", store=store) as run:
        run.wait_until_idle(PATIENCE_S)
        assert store._epochs[key] == 3
    assert sorted(journal(key).acked) == [(0, 0), (0, 1)]
    assert not stateful or journal(key).results == {"the": 1, "cow": 1}


@pytest.mark.dies("core 7")
def test_a_topology_without_state_and_zookeeper_runs_and_warns_that_it_is_unguarded() -> None:
    key = f"l{uuid.uuid4().hex[:8]}"
    with structlog.testing.capture_logs() as logs, submit(topology(key, key), {}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    said = [log["reason"] for log in logs if log["event"] == "driver.unguarded"]
    assert len(said) == 1
    assert said[0].startswith("transactional.zookeeper.servers is not set")


@pytest.mark.rule("C40")
@pytest.mark.parametrize("stateful", [True, False], ids=["state in memory", "no state"])
def test_a_topology_whose_state_does_not_survive_is_elected_where_zookeeper_is_named(
    monkeypatch: pytest.MonkeyPatch, stateful: bool
) -> None:
    key, named = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    monkeypatch.setattr(leader_loop, "store_of", lambda _: named)
    built = counting(key, Log(key, [])) if stateful else topology(key, key)
    assert store_for(built, Config.of({"transactional.zookeeper.servers": "zk1"}), None) is named
    with own_logs() as logs:
        alone = store_for(built, Config.of({}), None)
    assert (alone is not None) == stateful
    assert alone is not named
    assert [log["event"] for log in logs] == ["driver.unguarded"]


@pytest.mark.rule("C40")
@pytest.mark.parametrize("exact", [True, False])
def test_of_two_drivers_with_state_in_memory_one_runs_and_the_next_leader_begins_anew(exact: bool) -> None:
    key, store = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    conf = {"topology.state.checkpoint.interval.ms": 20, "topology.state.exactly.once": exact}
    words = ["the", "cow", "the", "moon"]
    counts = {"the": 2, "cow": 1, "moon": 1}
    with submit(counting(key, Log(key, [words])), conf, executor="local", store=store) as leading:
        leading.wait_until_idle(PATIENCE_S)
        assert journal(key).results == counts
        with submit(counting(key, Log(f"{key}-second", [[]])), conf, executor="local", store=store) as waiting:
            wait_for(lambda: phase(waiting) == "standby")
            store.depose(key)
            leading._terms._driver._checkpoints.worked()  # type: ignore[union-attr]
            wait_for(lambda: phase(leading) == "standby")
            waiting.wait_until_idle(PATIENCE_S)
            journal(key).results.clear()  # before the lead is free
            waiting.stop()
        leading.wait_until_idle(PATIENCE_S)
        assert journal(key).results == counts


def test_a_run_with_state_in_memory_does_not_change_the_record_of_another_provider(tmp_path: Path) -> None:
    key, store = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    with submit(counting(key, Log(key, [["the"]])), lmdb(tmp_path), executor="local", store=store) as run:
        run.wait_until_idle(PATIENCE_S)
    before = read_record(store, key)
    with submit(counting(key, Log(key, [["the", "cow"]])), {}, executor="local", store=store) as run:
        run.wait_until_idle(PATIENCE_S)
    assert before is not None and read_record(store, key) == before


class Grouped(Source):
    """Begins where its group stands, and commits to it what is acked."""

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        super().open(conf, context, collector)
        journal(self.key).steps.append(("words", 0, "open"))
        self.waiting = list(range(journal(self.key).results["group"], len(self.words)))

    def next_tuple(self) -> None:
        if self.waiting and self.waiting[0] < journal(self.key).results["end"]:
            super().next_tuple()


@pytest.mark.rule("C40")
@pytest.mark.dies("core 7")
@pytest.mark.parametrize("durable", [True, False])
def test_a_driver_that_leads_again_opens_spouts_anew_where_state_is_at_least_once(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver has led meanwhile: what the old spouts know belongs to it."""
    monkeypatch.setattr(driver, "_CONFIRM_S", 0.0)
    key, store = f"l{uuid.uuid4().hex[:8]}", MemoryStore()
    journal(key).results |= {"group": 0, "end": 3}
    conf = lmdb(tmp_path) if durable else {"topology.state.checkpoint.interval.ms": 20}
    with submit(counting(key, Grouped(key, list("abcdef"))), conf, executor="local", store=store) as run:
        wait_for(lambda: run.wait_until_idle(PATIENCE_S) is None and journal(key).emitted == [0, 1, 2])
        journal(key).results["group"] = 6  # the other driver
        store.depose(key)
        run._terms._driver._checkpoints.worked()  # type: ignore[union-attr]
        wait_for(lambda: len(steps_of(key, "words")) == 2)  # opened again
        journal(key).results["end"] = 6
        run.wait_until_idle(PATIENCE_S)
    assert journal(key).emitted == [0, 1, 2]
