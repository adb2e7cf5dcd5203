"""What a task makes in a round: all of it leaves together, all of it is done, and none of it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields, TopologyBuilder, Tuple
from tests.kit.core_parts import ListSpout, Rich, Stepped, ack, seen


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3")
def test_a_tuple_is_acked_only_when_every_stream_has_what_was_made_of_it(key: str) -> None:
    """A value that does not fit one stream: what was emitted on the other leaves in the same round, or its tuple fails."""

    def both(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.emit(["six" if tup[0] == 6 else tup[0]], anchors=tup, stream="a")
        collector.emit([tup[0]], anchors=tup, stream="b")
        collector.ack(tup)

    def note(bolt: Any, tup: Tuple, collector: Any) -> None:
        assert tup[0] not in seen(key).acked, "acked before it was here"
        ack(bolt, tup, collector)

    builder = TopologyBuilder("streams")
    builder.set_spout("spout", ListSpout(key, [5, 6], again=False))
    builder.set_bolt("both", Rich(key, both, a=Fields(n=int), b=Fields(n=int))).shuffle_grouping("spout")
    builder.set_bolt("a", Rich(f"{key}a", ack)).shuffle_grouping("both", "a")
    builder.set_bolt("b", Rich(f"{key}b", note), 2).shuffle_grouping("both", "b")
    stepped = Stepped(builder.build()).step(1)
    assert sorted(seen(f"{key}b").executed) == [(5,), (6,)]
    stepped.step(1)
    assert (seen(key).acked, sorted(seen(key).failed)) == ([], [5, 6])  # both were lost on the other stream


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3")
def test_what_a_bolt_emits_while_it_is_cleaned_up_leaves_with_its_acks(key: str) -> None:
    """A bolt that gives what it holds when it ends: the spout hears nothing before that has arrived."""

    def gather(bolt: Any, tup: Tuple, collector: Any) -> None:
        bolt.kept.append(tup)
        if tup[0] == 3:
            collector.emit(["three"])

    class Gathers(Rich):
        def cleanup(self) -> None:
            for tup in self.kept:
                self.collector.emit([tup[0]], anchors=tup, stream="rest")
                self.collector.ack(tup)

    def note(bolt: Any, tup: Tuple, collector: Any) -> None:
        assert seen(key).acked == []
        ack(bolt, tup, collector)

    builder = TopologyBuilder("cleanup")
    builder.set_spout("spout", ListSpout(key, [1, 2, 3], again=False))
    gathers = Gathers(key, gather, Fields(n=int), rest=Fields(n=int))
    builder.set_bolt("gather", gathers).shuffle_grouping("spout")
    builder.set_bolt("end", Rich(f"{key}end", note), 2).shuffle_grouping("gather", "rest")
    builder.set_bolt("default", Rich(f"{key}default", ack), 2).shuffle_grouping("gather")
    stepped = Stepped(builder.build()).step(1)
    assert sorted(seen(f"{key}end").executed) == [(1,), (2,), (3,)]
    stepped.step(2)
    assert sorted(seen(key).acked) == [1, 2, 3]
