"""The documents: what is written in one step, and how large a step may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.coordination.store import Change
from framework.transactions import Delete, MemoryStore, Put
from framework.transactions.coordinator import Persist
from framework.transactions.documents import TopologyDocuments
from spouts import MemoryTransactionalSpout
from tests.kit.bolts import BatchCount

#: The largest request that ZooKeeper takes.
REQUEST_BYTES = 2**20 - 1


class Bounded(MemoryStore):
    """A store that refuses requests that are too large for ZooKeeper,
    which would close the connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, int]] = []

    def apply(self, changes: Sequence[Change]) -> None:
        sizes = {each.path: len(each.data) if isinstance(each, Put) else 0 for each in changes}
        assert sum(sizes.values()) < REQUEST_BYTES, sizes
        self.steps.append(sizes)
        super().apply(changes)


def topology(spout: str = "spout") -> Topology:
    builder = TransactionalTopologyBuilder("topology", spout, MemoryTransactionalSpout({0: []}, Fields(word=str), 1))
    builder.set_bolt("count", BatchCount()).shuffle_grouping(spout)
    return builder.build()


def wide_plan(first: int) -> dict[str, Any]:
    """A plan like that of a Kafka spout for 2,500 partitions of a topic with a long name."""
    position = {"first": first, "next": first + 10, "topic_id": "Xl5cPyuWQUGXXfJ0pLGXNA", "epoch": 3, "more": "x" * 60}
    return {f"a-topic-with-a-name-that-is-not-short/{each:04}": position for each in range(2_500)}


@pytest.fixture
def store() -> Bounded:
    return Bounded()


def documents(store: Bounded, built: Topology | None = None) -> TopologyDocuments:
    built = built or topology()
    leadership = store.lead(built.id, "test")
    assert leadership is not None
    made = TopologyDocuments(store, leadership, built)
    made.claim({}, accept_changed=True)
    return made


def emit(made: TopologyDocuments, plans: dict[int, dict[str, Any]], attempt: int = 1) -> None:
    attempts = dict.fromkeys(plans, attempt)
    made.save(Persist(attempts, {txid: (attempt, plan) for txid, plan in plans.items()}))


def test_plans_that_are_emitted_again_are_not_written_again(store: Bounded) -> None:
    """Three plans of 2,500 partitions are more than ZooKeeper takes in one step."""
    made = documents(store)
    plans = {txid: wide_plan(10 * txid) for txid in (1, 2, 3)}
    for txid, plan in plans.items():
        emit(made, {txid: plan})
    emit(made, plans, attempt=2)
    assert list(store.steps[-1]) == ["topology/coordinator/attempts"]
    store.depose("topology")
    again = documents(store)
    recovered, _ = again.recover()
    assert (recovered.plans, recovered.attempts) == (plans, {1: 2, 2: 2, 3: 2})
    emit(again, plans, attempt=3)
    assert list(store.steps[-1]) == ["topology/coordinator/attempts"]


def test_another_plan_of_a_txid_is_written(store: Bounded) -> None:
    made = documents(store)
    emit(made, {1: wide_plan(0)})
    emit(made, {1: wide_plan(5)}, attempt=2)
    store.depose("topology")
    assert documents(store).recover()[0].plans == {1: wide_plan(5)}


def test_the_plans_of_a_spout_that_was_renamed_are_taken_over_one_by_one(store: Bounded) -> None:
    """After a crash in between, the next start takes over the rest."""
    made = documents(store)
    plans = {txid: wide_plan(10 * txid) for txid in (1, 2, 3)}
    for txid, plan in plans.items():
        emit(made, {txid: plan})
    store.depose("topology")
    before, real = len(store.steps), store.apply

    def dies(changes: Sequence[Change]) -> None:
        if len(store.steps) > before + 1 and any(isinstance(each, Delete) for each in changes):
            raise ConnectionError("killed")
        real(changes)

    store.apply = dies  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        documents(store, topology("renamed"))
    store.apply = real  # type: ignore[method-assign]
    store.depose("topology")
    assert documents(store, topology("renamed")).recover()[0].plans == plans
    assert store.children("topology/user/spout") == []
