"""The output of a task's round leaves as a whole; work that does not fit in a round is not lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from framework import Fields, TopologyBuilder, Tuple
from framework.core.round_protocol import Addressed, Round, RoundRecord
from framework.core.segment_task import SegmentTask
from framework.core.spout_task import LOSSES_MAX
from framework.errors import RetryableError, TopologyError
from tests.kit.core_parts import Basic, ListSpout, Rich, Stepped, ack, hold, seen
from tests.kit.panics import PanicException


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3")
def test_a_tuple_is_acked_only_when_its_output_left_on_every_stream(key: str) -> None:
    """A value does not fit one stream: tuples on the other stream leave in the same round,
    or their root fails.
    """

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
def test_tuples_and_acks_of_cleanup_leave_in_the_same_round(key: str) -> None:
    """A bolt emits in ``cleanup`` what it holds: the spout gets no ack
    before those tuples have arrived.
    """

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


# --- work that does not fit in a round waits for the next one -------------------------------------


def given_up_after(stepped: Stepped, seconds: float) -> None:
    """Lose every round that takes longer, by the clock of the test."""
    run = stepped.rounds.run

    def limited(round_: Round) -> Any:
        began = stepped.clock.now
        records = run(round_)
        if stepped.clock.now - began > seconds:
            raise RetryableError(f"it did not answer for {seconds} s")
        return records

    stepped.rounds.run = limited  # type: ignore[method-assign]


@pytest.mark.rule("C38")
@pytest.mark.behaviour("4.7")
@pytest.mark.parametrize(("takes_s", "items"), [(0.015, 3_000), (2.0, 60), (9.0, 12)])
def test_a_slow_bolt_completes_every_tuple_at_its_own_pace(key: str, takes_s: float, items: int) -> None:
    """However much the spout has, no round is given up, no waiting tuple times out,
    and none is executed twice.
    """

    def slow(bolt: Any, tup: Tuple, collector: Any) -> None:
        seen(f"{key}clock").held[0][1].now += takes_s  # type: ignore[attr-defined]
        collector.emit([tup[0]], anchors=tup)
        collector.ack(tup)

    builder = TopologyBuilder("slow")
    builder.set_spout("spout", ListSpout(key, list(range(items))))
    builder.set_bolt("slow", Rich(key, slow, Fields(n=int))).shuffle_grouping("spout")
    builder.set_bolt("end", Rich(f"{key}end", ack), 2).shuffle_grouping("slow")
    stepped = Stepped(builder.build(), pending=10_000)
    seen(f"{key}clock").held[:] = [("clock", stepped.clock)]  # type: ignore[list-item]
    given_up_after(stepped, 10.0)
    rounds = 0
    while len(seen(key).acked) < items:
        stepped.step()
        rounds += 1
        assert rounds < 2 * items
    assert (sorted(seen(key).acked), seen(key).failed) == (list(range(items)), [])
    assert len(seen(key).executed) == items
    assert stepped.driver.status().rounds_lost == 0


@pytest.mark.rule("C38")
@pytest.mark.behaviour("4.7")
def test_spouts_emit_no_more_per_round_than_bolts_can_execute(key: str) -> None:
    """Once the first round has shown how slow the bolts are,
    each round's tuples are done in it or in the next one.
    """
    waited: list[int] = []

    def slow(bolt: Any, tup: Tuple, collector: Any) -> None:
        seen(f"{key}clock").held[0][1].now += 0.02  # type: ignore[attr-defined]
        collector.ack(tup)

    builder = TopologyBuilder("slow")
    builder.set_spout("spout", ListSpout(key, list(range(3_000))))
    builder.set_bolt("slow", Rich(key, slow), 2).shuffle_grouping("spout")
    stepped = Stepped(builder.build(), pending=1_000)
    seen(f"{key}clock").held[:] = [("clock", stepped.clock)]  # type: ignore[list-item]
    while len(seen(key).acked) < 3_000:
        stepped.step()
        waited.append(stepped.driver.status().components["slow"].waiting)
    assert max(waited) > 800  # the first round does not know the bolts' speed
    calm = waited[waited.index(0) :]
    assert max(calm) <= 30
    assert stepped.driver.status().held == {}


@pytest.mark.rule("C38")
@pytest.mark.behaviour("4.6")
def test_tuples_of_a_bolt_that_cannot_start_wait_for_it(key: str) -> None:
    """The tuples are not tracked, so a dropped one would be lost."""

    class Late(Basic):
        def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
            seen(f"{key}starts").opened += 1
            if seen(f"{key}starts").opened < 3:
                raise ConnectionRefusedError("nobody there yet")

    builder = TopologyBuilder("late")
    builder.set_spout("spout", ListSpout(key, list(range(40)), tracked=False))
    builder.set_bolt("late", Late(key)).shuffle_grouping("spout")
    stepped = Stepped(builder.build()).step(4)
    assert sorted(seen(key).executed) == list(range(40))
    assert stepped.driver.failure is None


# --- what user code may do ------------------------------------------------------------------------


@pytest.mark.behaviour("4.6")
@pytest.mark.parametrize("error", [SystemExit, PanicException])
@pytest.mark.parametrize("where", ["execute", "prepare", "next_tuple", "ack"])
def test_user_code_that_calls_exit_or_panics_ends_its_instance_and_nothing_else(
    key: str, where: str, error: type[BaseException]
) -> None:
    def once(here: str) -> None:
        if here == where and not seen(f"{key}ended").closed:
            seen(f"{key}ended").closed = 1
            raise error("enough")

    class Ending(ListSpout):
        def next_tuple(self) -> None:
            once("next_tuple")
            super().next_tuple()

        def ack(self, message_id: Any) -> None:
            once("ack")
            super().ack(message_id)

    class Exits(Rich):
        def prepare(self, conf: Any, context: Any, collector: Any) -> None:  # type: ignore[override]
            once("prepare")
            super().prepare(conf, context, collector)

    def leave(bolt: Any, tup: Tuple, collector: Any) -> None:
        once("execute")
        collector.ack(tup)

    builder = TopologyBuilder("exits")
    builder.set_spout("spout", Ending(key, [1, 2, 3]))
    builder.set_bolt("bolt", Exits(key, leave)).shuffle_grouping("spout")
    stepped = Stepped(builder.build()).step(6)
    assert set(seen(key).acked) == {1, 2, 3}
    assert f"{error.__name__}: enough" in str(stepped.driver.status().last_error)


def lose_from(stepped: Stepped, level: int) -> None:
    """Run a round that is lost from ``level`` on: the driver gets no report,
    and those levels get no records.
    """
    run_task = stepped.rounds._worker.run_task

    def lossy(round_: Round, at: int, partition: int, records: Sequence[RoundRecord]) -> Sequence[Addressed]:
        if at >= level:
            raise RetryableError("a task worker is gone")
        return run_task(round_, at, partition, records)

    stepped.rounds._worker.run_task = lossy  # type: ignore[method-assign]
    assert not stepped.driver.step()
    stepped.rounds._worker.run_task = run_task  # type: ignore[method-assign]


def holding(key: str, *, again: bool = True) -> Stepped:
    """Three tuples, and a bolt in a segment of its own that holds them."""
    builder = TopologyBuilder("lost")
    builder.set_spout("spout", ListSpout(key, [1, 2, 3], again=again))
    builder.set_bolt("bolt", Rich(key, hold), 2).global_grouping("spout")
    return Stepped(builder.build())


def until_held(stepped: Stepped, key: str, count: int) -> list[int]:
    """Run rounds, with time going by, until ``count`` tuples have come to the bolt.

    Returns their values.
    """
    for _ in range(20):
        if len(seen(key).held) >= count:
            break
        stepped.step(seconds=8)
    return sorted(tup[0] for _, tup in seen(key).held)


@pytest.mark.rule("C36")
@pytest.mark.dies("core 1", "core 5")
@pytest.mark.behaviour("4.6")
@pytest.mark.parametrize("before", [0, 1], ids=["the bolt has not had them", "the bolt holds them"])
def test_tuples_of_a_lost_round_come_again_without_a_fail(key: str, before: int) -> None:
    """A fail would count as a retry, and their spout may give them up."""
    stepped = holding(key).step(
        before, seconds=16
    )  # the acker hears of them before time goes on, so its timeout comes first
    lose_from(stepped, 1)
    tasks = stepped.rounds._worker._tasks
    for place in [place for place in tasks if place[0] == 1]:  # the bolt's task worker is gone
        del tasks[place]
    seen(key).held.clear()
    assert until_held(stepped, key, 3) == [1, 2, 3]
    for collector, tup in seen(key).held:
        collector.ack(tup)
    stepped.step(2)
    assert (sorted(seen(key).acked), seen(key).failed) == ([1, 2, 3], [])
    assert stepped.driver.status().pending == 0


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3", "4.6")
def test_an_ack_does_not_stand_for_output_that_was_lost_in_an_earlier_round(key: str) -> None:
    """A bolt emits, and acks the tuple later. The round between is lost, with what was emitted."""
    builder = TopologyBuilder("held")
    builder.set_spout("spout", ListSpout(key, [1, 2]))
    builder.set_bolt("holds", Rich(f"{key}holds", hold, Fields(n=int))).shuffle_grouping("spout")
    builder.set_bolt("end", Rich(f"{key}end", ack), 2).shuffle_grouping("holds")
    stepped = Stepped(builder.build()).step(1)
    held = seen(f"{key}holds").held
    (collector, first), (_, second) = held
    collector.emit([12], anchors=[first, second])
    lose_from(stepped, 1)
    for tup in (first, second):
        collector.ack(tup)
    del held[:]
    stepped.step(3)
    assert (seen(f"{key}end").executed, seen(key).acked) == ([], [])
    stepped.step(4, seconds=16)
    assert [tup.values for _, tup in held] == [(1,), (2,)]  # they have come again
    for _, tup in held:
        collector.emit([tup[0]], anchors=tup)
        stepped.step(1)
        collector.ack(tup)
    stepped.step(2)
    assert sorted(seen(f"{key}end").executed) == [(1,), (2,)]
    assert (sorted(seen(key).acked), seen(key).failed) == ([1, 2], [])


@pytest.mark.rule("C36")
@pytest.mark.behaviour("4.6")
def test_after_a_lost_round_a_failed_or_unacked_tuple_still_fails(key: str) -> None:
    stepped = holding(key, again=False).step()
    lose_from(stepped, 0)
    collector, tup = seen(key).held[0]
    collector.fail(tup)
    assert until_held(stepped, key, 5) == [1, 2, 2, 3, 3]
    assert seen(key).failed == [1]
    stepped.step(10, seconds=8)
    assert (seen(key).failed, len(seen(key).held)) == ([1, 2, 3], 5)


@pytest.mark.rule("C36")
@pytest.mark.behaviour("4.6")
def test_tuples_whose_round_is_lost_every_time_fail_in_the_end(key: str) -> None:
    stepped = holding(key)
    losses = 0
    while not seen(key).failed and losses < 20 * LOSSES_MAX:
        lose_from(stepped, 1)
        losses += 1
        stepped.step(seconds=16)
    assert sorted(seen(key).failed) == [1, 2, 3]
    assert losses > LOSSES_MAX


class Released(ListSpout):
    """Gives nothing before ``seen(key).opened`` is above 1."""

    def next_tuple(self) -> None:
        if seen(self.key).opened > 1:
            super().next_tuple()


def released(key: str, act: Any, items: Sequence[int]) -> Stepped:
    """After a round in which the spout gave nothing."""
    builder = TopologyBuilder("released")
    builder.set_spout("spout", Released(key, list(items), again=False))
    builder.set_bolt("bolt", Rich(key, act), 2).global_grouping("spout")
    stepped = Stepped(builder.build()).step(1)
    seen(key).opened += 1
    return stepped


def until_failed(stepped: Stepped, key: str) -> float:
    """How many seconds pass until the first tuple has failed."""
    before = stepped.clock.now
    while not seen(key).failed and stepped.clock.now - before < 200:
        stepped.step(1, seconds=0.5)
    return stepped.clock.now - before


@pytest.mark.rule("C36")
@pytest.mark.behaviour("4.6")
@pytest.mark.parametrize("pause_s", [29.5, 46.0, 500.0])
def test_a_tuple_that_is_given_after_a_pause_has_its_whole_timeout(key: str, pause_s: float) -> None:
    stepped = released(key, hold, [1]).step(1, seconds=pause_s)
    assert 30 <= until_failed(stepped, key) <= 47


@pytest.mark.rule("C36", "C38")
@pytest.mark.behaviour("4.6")
def test_tuples_that_wait_for_their_turn_after_a_pause_do_not_fail(key: str) -> None:
    clocks = f"{key}clock"

    def slow(bolt: Any, tup: Tuple, collector: Any) -> None:
        seen(clocks).held[0][0].now += 0.5
        collector.ack(tup)

    stepped = released(key, slow, range(10))
    seen(clocks).held.append((stepped.clock, Tuple(None, Fields(), (), "", "")))
    stepped.step(1, seconds=46).step(12)
    assert (sorted(seen(key).acked), seen(key).failed) == (list(range(10)), [])


@pytest.mark.behaviour("4.6")
def test_a_timeout_that_is_reset_in_a_round_in_which_time_goes_on_is_whole(key: str) -> None:
    stepped = released(key, hold, [1]).step(1)
    ((collector, tup),) = seen(key).held
    collector.reset_timeout(tup)
    stepped.step(1, seconds=29.5)
    assert 30 <= until_failed(stepped, key) <= 47


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3")
def test_a_bolt_that_seeds_the_random_generator_acks_nothing_that_was_lost(key: str) -> None:
    """Both tuples are of one tree: equal numbers would cancel each other."""

    def twice(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.emit([tup[0]], anchors=tup)
        collector.emit([tup[0]], anchors=tup)
        collector.ack(tup)

    builder = TopologyBuilder("seeded")
    builder.set_spout("spout", ListSpout(key, [1]))
    builder.set_bolt("twice", Rich(f"{key}twice", twice, Fields(n=int)), 2).shuffle_grouping("spout")
    builder.set_bolt("holds", Rich(f"{key}holds", hold, Fields(n=int))).shuffle_grouping("twice")
    builder.set_bolt("end", Rich(f"{key}end", ack), 2).shuffle_grouping("holds")
    stepped = Stepped(builder.build()).step(1)
    held = list(seen(f"{key}holds").held)
    assert len(held) == 2
    for collector, tup in held:
        random.seed(7)
        collector.emit([1], anchors=tup)
    lose_from(stepped, 3)
    for collector, tup in held:
        collector.ack(tup)
    stepped.step(3)
    assert (seen(f"{key}end").executed, seen(key).acked) == ([], [])


@pytest.mark.rule("C34")
@pytest.mark.behaviour("4.3")
def test_what_a_thread_of_a_bolt_emits_while_a_round_is_handed_over_is_not_lost(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the bolt emits when the last rows of a round have left, and acks in the next."""
    builder = TopologyBuilder("threads")
    builder.set_spout("spout", ListSpout(key, [1]))
    builder.set_bolt("holds", Rich(f"{key}holds", hold, Fields(n=int))).shuffle_grouping("spout")
    builder.set_bolt("end", Rich(f"{key}end", ack), 2).shuffle_grouping("holds")
    stepped = Stepped(builder.build()).step(1)
    ((collector, tup),) = seen(f"{key}holds").held
    thread = threading.Thread(target=collector.emit, args=([1], tup))
    hand_over = SegmentTask._hand_over

    def meanwhile(self: SegmentTask, round_: Round) -> Sequence[Addressed]:
        if "holds" in self._component_tasks and thread.ident is None:
            thread.start()
            thread.join(0.3)  # it waits for the end of the hand-over
        return hand_over(self, round_)

    monkeypatch.setattr(SegmentTask, "_hand_over", meanwhile)
    stepped.step(1)
    thread.join()
    collector.ack(tup)
    stepped.step(3)
    assert (seen(f"{key}end").executed, seen(key).acked) == ([(1,)], [1])


class Closed(ListSpout):
    """Can be opened once."""

    def open(self, conf: Any, context: Any, collector: Any) -> None:
        super().open(conf, context, collector)
        if seen(self.key).opened > 1:
            raise OSError("not yet")

    def next_tuple(self) -> None:
        if not self.waiting:
            raise OSError("the connection is gone")
        super().next_tuple()


@pytest.mark.behaviour("4.2")
def test_a_spout_that_cannot_be_opened_ends_the_wait_and_counts_once_per_round(key: str) -> None:
    builder = TopologyBuilder("closed")
    builder.set_spout("spout", Closed(key, [1]))
    builder.set_bolt("bolt", Rich(f"{key}bolt", ack)).shuffle_grouping("spout")
    stepped = Stepped(builder.build(), attempts=4).step(1)
    for failures in (2, 3):
        before = seen(key).opened
        stepped.driver._spout_wait_s = 5.0
        stepped.step(1)
        assert seen(key).opened - before <= 3  # when it is told, asked and asked again
        assert stepped.driver._failures.stuck == {("spout", 0): failures}
    assert stepped.driver.failure is None


class Threaded(ListSpout):
    """Emits in a thread of its own."""

    def next_tuple(self) -> None:
        def emit() -> None:
            try:
                self.collector.emit([1], message_id=("id", 1))
            except TopologyError as error:
                seen(self.key).held.append((str(error), Tuple(None, Fields(), (), "", "")))

        thread = threading.Thread(target=emit)
        thread.start()
        thread.join()


@pytest.mark.behaviour("4.1")
def test_a_spout_that_emits_in_a_thread_of_its_own_is_refused(key: str) -> None:
    builder = TopologyBuilder("threaded")
    builder.set_spout("spout", Threaded(key, []))
    builder.set_bolt("bolt", Rich(f"{key}bolt", ack), 2).shuffle_grouping("spout")
    Stepped(builder.build()).step(2)
    assert seen(f"{key}bolt").executed == []
    assert seen(key).held[0][0] == (
        "spout 'spout' emits in a thread of its own: put what comes into a queue, and emit it in next_tuple"
    )
