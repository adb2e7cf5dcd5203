"""The documents: what is written in one step, and how large a step may be."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.coordination.store import Change
from framework.coordination.transactional_state import TransactionalState
from framework.errors import ConfigError, CorruptStateError
from framework.observe.journal import TransactionRecord
from framework.transactions import Delete, MemoryStore, Put
from framework.transactions.coordinator import Persist
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import read_history, read_origin, schemas_in
from framework.transactions.plans import plan_digest, stored_plan
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


class TestWidePlans:
    """Plans with thousands of partitions are stored packed (ADR 44)."""

    def kafka_plan(self, partitions: int, first: int = 1_000_000) -> dict[str, Any]:
        position = {"topic_id": "Xl5cPyuWQUGXXfJ0pLGXNA", "first_leader_epoch": 3, "next_leader_epoch": 3}
        return {
            f"orders/{each}": {"first_offset": first + 7 * each, "next_offset": first + 9 * each, **position}
            for each in range(partitions)
        }

    def test_the_plan_and_the_origin_of_ten_thousand_partitions_fit_into_one_step(self, store: Bounded) -> None:
        made = documents(store)
        plan = self.kafka_plan(10_000)
        emit(made, {1: plan})
        closing = TransactionRecord(1, plan, plan_digest(plan), (), 1)
        made.save(Persist({1: 1}, {2: (1, self.kafka_plan(10_000, 2_000_000))}, currtx=2), closing)
        store.depose("topology")
        assert documents(store).recover()[0].plans == {1: plan, 2: self.kafka_plan(10_000, 2_000_000)}
        assert read_origin(store, "topology").positions == plan
        assert read_history(store, "topology")[0].plan == {}  # too long for a thousand of them

    def test_the_history_keeps_the_plan_of_a_thousand_partitions(self, store: Bounded) -> None:
        made = documents(store)
        plan = self.kafka_plan(1_000)
        made.save(Persist({1: 1}, currtx=2), TransactionRecord(1, plan, plan_digest(plan), (), 1))
        assert read_history(store, "topology")[0].plan == plan

    def test_an_earlier_release_refuses_packed_plans_and_says_why(self, store: Bounded) -> None:
        made = documents(store)
        emit(made, {1: self.kafka_plan(3), 2: self.kafka_plan(1_000)})
        formats = [json.loads(store.get(f"topology/user/spout/{txid}") or b"")["format"] for txid in (1, 2)]
        assert formats == [1, 2]

    @pytest.mark.parametrize("partitions", [3, 1_000])
    def test_plans_of_earlier_releases_are_read(self, store: Bounded, partitions: int) -> None:
        """Their documents: the plan as it is, with the digest of its JSON."""
        plan = self.kafka_plan(partitions)
        text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        history = {"txid": 1, "plan": plan, "plan_digest": digest, "attempts": [], "attempts_total": 1}
        written = {
            "user/spout/1": {"digest": digest, "plan": plan},
            "coordinator/currtx": 2,
            "history/001": history,
            "origin": {"txid": 1, "positions": plan},
        }
        made = documents(store)
        for path, value in written.items():
            store.apply([Put(f"topology/{path}", json.dumps({"format": 1, "value": value}).encode())])
        store.depose("topology")
        made = documents(store)
        recovered, digests = made.recover()
        assert (recovered.plans, digests) == ({1: plan}, {1: digest})
        assert read_history(store, "topology")[0].plan == plan
        assert read_origin(store, "topology").positions == plan

    @pytest.mark.parametrize("damage", ["cut off", "garbage", "not text", "a list", "another plan"])
    def test_a_damaged_packed_plan_is_refused(self, store: Bounded, damage: str) -> None:
        emit(documents(store), {1: self.kafka_plan(1_000)})
        document = json.loads(store.get("topology/user/spout/1") or b"")
        plan = document["value"]["plan"]
        document["value"]["plan"] = {
            "cut off": plan[: len(plan) // 8 * 4],
            "garbage": "?" * 100,
            "not text": 7,
            "a list": base64.b64encode(zlib.compress(b"[1]")).decode(),
            "another plan": stored_plan(self.kafka_plan(1_001)),
        }[damage]
        store.apply([Put("topology/user/spout/1", json.dumps(document).encode())])
        store.depose("topology")
        with pytest.raises(CorruptStateError, match=r"topology/user/spout/1: .*restore it from a backup"):
            documents(store).recover()


def test_a_digest_is_of_the_ranges_alone() -> None:
    plan = {f"t/{each}": {"first_offset": each, "next_offset": each + 1} for each in range(200)}
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    wanted = hashlib.sha256(text.encode()).hexdigest()[:16]
    moved = {**plan, "t/7": {"first_offset": 8, "next_offset": 9}}
    backwards = dict(reversed([*plan.items()]))
    assert [plan_digest(each) for each in (plan, backwards, plan, dict(plan))] == [wanted] * 4
    assert plan_digest(moved) == plan_digest(json.loads(json.dumps(moved))) != wanted


def next_leader(store: Bounded) -> TopologyDocuments:
    store.depose(topology().id)
    return documents(store)


def test_the_digest_of_a_schema_is_remembered_by_the_next_leader(store: Bounded) -> None:
    documents(store).note_schemas({("r id 7", "aa"), ("r id 8", "")})
    made = next_leader(store)
    made.note_schemas({("r id 7", "aa"), ("r id 8", "bb")})
    for changed in (("r id 7", "cc"), ("r id 7", ""), ("r id 8", "aa")):
        with pytest.raises(ConfigError, match="topology.changed.schemas"):
            made.note_schemas({changed})
    with pytest.raises(ConfigError, match="r id 9"):
        made.note_schemas({("r id 9", "aa"), ("r id 9", "bb")})  # two tasks of one attempt
    made.note_schemas({("r id 7", "cc")}, accept_changed=True)
    next_leader(store).note_schemas({("r id 7", "cc")})


def test_the_digests_of_schemas_are_bounded_and_forgotten_with_the_positions(store: Bounded) -> None:
    made = documents(store)
    made.note_schemas({(f"https://a-registry-with-a-name-that-is-not-short id {n}", "a" * 16) for n in range(2_000)})
    made.note_schemas({("r id 7", "aa")})
    assert len(schemas_in(TransactionalState(store, topology().id), "")) == 2_000
    made.forget_positions()
    next_leader(store).note_schemas({("r id 7", "bb")})


def test_a_damaged_document_of_schemas_is_named(store: Bounded) -> None:
    made = documents(store)
    for damaged in ({"r": "a"}, [["r"]], [["r", 1]], "r", [["r", "a", "b"]]):
        TransactionalState(store, topology().id).set_data("schemas", damaged)
        with pytest.raises(CorruptStateError, match="/schemas: not a list"):
            made.note_schemas({("r", "a")})
