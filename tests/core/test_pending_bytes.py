"""The bytes of a spout's pending tuples are bounded, and the bound never stops a topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TopologyBuilder
from framework.core import spout_task
from tests.kit.core_parts import ListSpout, Rich, Stepped, ack, hold, seen

TUPLE_BYTES = 1_000


@pytest.fixture
def key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(spout_task, "PENDING_BYTES_MAX", 10 * TUPLE_BYTES)
    return str(request.node.name)


class Texts(ListSpout):
    """Emits each number as a text of ``size`` bytes."""

    size = TUPLE_BYTES

    def next_tuple(self) -> None:
        if self.waiting:
            item = self.waiting.pop(0)
            self.collector.emit([f"{item:0{self.size}d}"], message_id=("id", item) if self.tracked else None)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(text=str))


class Batches(Texts):
    """Emits three of them in one call."""

    def next_tuple(self) -> None:
        items, self.waiting = self.waiting[:3], self.waiting[3:]
        texts = pa.array([f"{item:0{self.size}d}" for item in items], pa.string())
        if items:
            self.collector.emit_arrow(pa.record_batch({"text": texts}), [("id", item) for item in items])


def stepped(key: str, spout: ListSpout, act: Callable[..., None], *, ackers: int = 1) -> Stepped:
    builder = TopologyBuilder("bytes")
    builder.set_spout("spout", spout)
    builder.set_bolt("bolt", Rich(key, act)).global_grouping("spout")
    return Stepped(builder.build(), ackers=ackers)


@pytest.mark.parametrize(("kind", "most"), [(Texts, 10), (Batches, 12)])
def test_no_more_bytes_are_pending_than_the_bound_and_one_call(key: str, kind: type[Texts], most: int) -> None:
    run = stepped(key, kind(key, list(range(60))), hold).step(3)
    assert len(seen(key).executed) == most
    for collector, tup in seen(key).held[:6]:
        collector.ack(tup)
    run.step(3)
    assert len(seen(key).executed) == most + 6
    assert not seen(key).failed


@pytest.mark.parametrize("kind", [Texts, Batches])
def test_all_arrive_and_are_acked_once(key: str, kind: type[Texts]) -> None:
    stepped(key, kind(key, list(range(100))), ack).step(40)
    assert sorted(seen(key).acked) == list(range(100)) and len(seen(key).executed) == 100
    assert not seen(key).failed


def test_a_tuple_above_the_bound_goes_alone(key: str) -> None:
    spout = Texts(key, list(range(5)))
    spout.size = 50 * TUPLE_BYTES
    run = stepped(key, spout, hold).step(3)
    for count in range(1, 6):
        assert len(seen(key).executed) == count
        collector, tup = seen(key).held[-1]
        collector.ack(tup)
        run.step(3)
    assert sorted(seen(key).acked) == list(range(5))


def test_tuples_without_trees_are_bounded_in_each_round(key: str) -> None:
    run = stepped(key, Texts(key, list(range(60)), tracked=False), ack)
    for count in (10, 20, 30):
        run.step(1)
        assert len(seen(key).executed) == count


def test_a_bolt_that_waits_for_more_tuples_gets_them(key: str) -> None:
    """It acks 35 together. No tuple fails."""

    def gather(bolt: Any, tup: Any, collector: Any) -> None:
        bolt.kept.append(tup)
        if len(bolt.kept) == 35:
            for each in bolt.kept:
                collector.ack(each)

    run = stepped(key, Texts(key, list(range(35))), gather)
    run.step(20, seconds=4)
    run.step(3)
    assert sorted(seen(key).acked) == list(range(35))
    assert not seen(key).failed


def test_a_bolt_that_is_slow_does_not_raise_the_bound(key: str) -> None:
    """One tuple ends now and then."""
    run = stepped(key, Texts(key, list(range(60))), hold).step(2)
    for at in range(6):
        collector, tup = seen(key).held[at]
        collector.ack(tup)
        run.step(2, seconds=3)
        assert len(seen(key).executed) == 10 + at + 1
    assert not seen(key).failed
