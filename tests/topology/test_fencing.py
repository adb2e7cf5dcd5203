"""Who may write: the whole header is compared, and it names the topology's incarnation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder
from framework.errors import ConfigError, StaleWriterError
from framework.execution import LocalExecutor, plan_execution
from framework.topology import CommitFence, Header, OpenCommit, TransactionAttempt, check_granted
from framework.transactions.commit import CommitPhase
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout

HEADER = Header("t", "x", epoch=4, open=OpenCommit(7, 2, "digest"), done=6)
FENCE = CommitFence("t", 4, "digest")


def test_the_attempt_that_the_header_is_open_for_may_write() -> None:
    check_granted(HEADER, TransactionAttempt(7, 2, FENCE), "table")


@pytest.mark.parametrize(
    "attempt",
    [
        TransactionAttempt(7, 2, replace(FENCE, epoch=3)),
        TransactionAttempt(7, 2, replace(FENCE, epoch=5)),
        TransactionAttempt(7, 2, replace(FENCE, plan_digest="other")),
        TransactionAttempt(7, 2, replace(FENCE, topology_id="u")),
        TransactionAttempt(7, 1, FENCE),
        TransactionAttempt(6, 2, FENCE),
    ],
    ids=["an epoch below", "an epoch above", "another plan", "another topology", "another attempt", "another txid"],
)
def test_any_other_attempt_is_refused_with_the_epoch(attempt: TransactionAttempt) -> None:
    with pytest.raises(StaleWriterError, match="table is open for .* of epoch 4, not for attempt") as refused:
        check_granted(HEADER, attempt, "table")
    assert refused.value.epoch == 4


# --- the incarnation of a state (C25) -------------------------------------------------------------


@pytest.fixture
def state(request: pytest.FixtureRequest) -> Iterator[OpaqueMapState]:
    made = OpaqueMapState(MemoryBackend(request.node.name))
    yield made
    made.close()


def commit_phase(state: OpaqueMapState, epoch: int, incarnation: str) -> CommitPhase:
    builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout({0: []}, Fields(n=int), 1))
    builder.set_bolt("counts", StateCommitter(state, ["n"], {"count": Count()})).global_grouping("spout")
    topology = builder.build()
    executor: Any = LocalExecutor(plan_execution(topology), {})
    return CommitPhase("t", topology.states, executor, epoch, incarnation=incarnation)


def written(state: OpaqueMapState) -> None:
    header = state.read_header()
    state.raise_header(header, header.opened(header.epoch, OpenCommit(1, 1, "d")).finished(1))


@pytest.mark.rule("C25")
def test_a_state_that_was_never_written_to_joins_the_incarnation_of_the_topology(state: OpaqueMapState) -> None:
    for epoch, incarnation in ((1, "first"), (1, "second")):
        commit_phase(state, epoch, incarnation).open(1, {})
        assert state.read_header().incarnation == incarnation


@pytest.mark.rule("C25")
def test_a_state_of_another_incarnation_stops_the_topology_at_every_start(state: OpaqueMapState) -> None:
    commit_phase(state, 1, "first").open(1, {})
    written(state)
    commit_phase(state, 2, "first").open(2, {})
    for epoch in (3, 4, 5):
        with pytest.raises(ConfigError, match="is of incarnation first, and the topology 't' is of second.*reset"):
            commit_phase(state, epoch, "second").open(2, {})


def test_a_state_of_a_topology_without_an_incarnation_is_taken_as_it_is(state: OpaqueMapState) -> None:
    commit_phase(state, 1, "").open(1, {})
    before = state.read_header().incarnation
    written(state)
    commit_phase(state, 2, "").open(2, {})
    assert state.read_header().incarnation == before
