"""Core topologies in this process, round by round: acks, fails, timeouts, groupings, errors."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from framework import (
    BaseBatchBolt,
    BaseRichSpout,
    CoreTopologyFailed,
    Fields,
    TopologyBuilder,
    TransactionalTopologyBuilder,
    Tuple,
    submit,
)
from framework.core.acker_task import AckerTask
from framework.core.outcome import ERRORS_MAX
from framework.core.round_protocol import Round, RoundReport
from framework.errors import BadRecordError, ConfigError, DataLossError, RetryableError, TopologyError
from framework.observe.metrics import CoreRunCollector
from framework.topology.groupings import Grouping
from spouts import MemoryTransactionalSpout
from tests.kit.core_parts import Basic, ListSpout, Rich, Stepped, ack, fail, hold, nothing, seen
from tests.kit.waiting import PATIENCE_S


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def built(key: str, items: list[Any], *bolts: Any, spout: Any = None, **options: Any) -> Any:
    """A chain: spout, then each bolt, grouped by shuffle."""
    builder = TopologyBuilder("chain")
    builder.set_spout("spout", spout or ListSpout(key, items, **options))
    before = "spout"
    for number, bolt in enumerate(bolts):
        builder.set_bolt(f"bolt{number}", bolt).shuffle_grouping(before)
        before = f"bolt{number}"
    return builder.build()


# --- spouts, and their acks and fails -------------------------------------------------------------


@pytest.mark.behaviour("4.1")
def test_a_spout_opens_once_gets_an_ack_for_every_tree_and_closes(key: str) -> None:
    stepped = Stepped(built(key, list(range(50)), Rich(key, ack)), pending=20)
    stepped.step(5)
    stepped.rounds.close()
    told = seen(key)
    assert (told.opened, told.closed, told.cleaned, len(told.objects)) == (1, 1, 1, 1)
    assert (sorted(told.acked), told.failed) == (list(range(50)), [])


@pytest.mark.behaviour("4.1")
def test_acks_reach_the_task_that_emitted_and_ids_may_be_of_any_type(key: str) -> None:
    class Owner(BaseRichSpout):
        def open(self, conf: Any, context: Any, collector: Any) -> None:
            self.task, self.left = context.task_index, 5
            self.collector = collector

        def next_tuple(self) -> None:
            if self.left:
                self.left -= 1
                self.collector.emit([self.left], message_id={"unhashable": [self.task, self.left]})

        def ack(self, message_id: Any) -> None:
            seen(key).acked.append((self.task, *message_id["unhashable"]))

        def declare_output_fields(self, declarer: Any) -> None:
            declarer.declare(Fields(n=int))

    builder = TopologyBuilder("owners")
    builder.set_spout("spout", lambda: Owner(), 3)
    builder.set_bolt("all", Rich(key, ack), 2).shuffle_grouping("spout")
    Stepped(builder.build(), ackers=2).step(2)
    assert sorted(seen(key).acked) == [(task, task, n) for task in range(3) for n in range(5)]


@pytest.mark.behaviour("4.4")
def test_without_ackers_a_tuple_is_acked_when_it_is_emitted(key: str) -> None:
    stepped = Stepped(built(key, [1, 2, 3], Rich(key, fail)), ackers=0).step(1)
    assert (seen(key).acked, seen(key).failed) == ([1, 2, 3], [])
    assert len(seen(key).executed) == 3
    assert stepped.driver.status().trees == 0


@pytest.mark.behaviour("4.4")
def test_a_tuple_without_a_message_id_is_not_tracked(key: str) -> None:
    stepped = Stepped(built(key, [1, 2, 3], Rich(key, fail), tracked=False)).step(3, seconds=100)
    assert (seen(key).acked, seen(key).failed, len(seen(key).executed)) == ([], [], 3)
    assert (stepped.driver.status().trees, stepped.driver.status().pending) == (0, 0)


@pytest.mark.behaviour("4.3")
def test_a_tuple_that_nobody_subscribes_to_is_complete(key: str) -> None:
    builder = TopologyBuilder("alone")
    builder.set_spout("spout", ListSpout(key, [1, 2]))
    Stepped(builder.build()).step(2)
    assert seen(key).acked == [1, 2]


@pytest.mark.behaviour("4.7")
def test_max_spout_pending_bounds_the_unacked_tuples_of_each_spout_task(key: str) -> None:
    stepped = Stepped(built(key, list(range(100)), Rich(key, nothing)), pending=10).step(5)
    assert len(seen(key).executed) == 10
    status = stepped.driver.status()
    assert (status.pending, status.trees, status.held) == (10, 10, {"bolt0": 10})


@pytest.mark.behaviour("4.7")
def test_a_bolt_that_never_acks_costs_no_memory_beyond_what_is_pending(key: str) -> None:
    items = list(range(5_000))
    stepped = Stepped(built(key, items, Rich(key, nothing), again=False), pending=50)
    stepped.step(10, seconds=16)
    gc.collect()
    before = sum(1 for each in gc.get_objects() if type(each).__name__ == "AnchoredTuple")
    stepped.step(30, seconds=16)
    gc.collect()
    after = sum(1 for each in gc.get_objects() if type(each).__name__ == "AnchoredTuple")
    assert after <= before  # other tests may hold some
    assert len(seen(key).failed) > 500
    assert stepped.driver.status().trees <= 200


# --- trees ----------------------------------------------------------------------------------------


def split(bolt: Any, tup: Tuple, collector: Any) -> None:
    for part in range(3):
        collector.emit([tup[0] * 10 + part], anchors=tup)
    collector.ack(tup)


@pytest.mark.behaviour("4.2")
@pytest.mark.parametrize("ackers", [1, 3])
def test_a_tree_is_complete_when_every_tuple_below_is_acked(key: str, ackers: int) -> None:
    held = seen(f"{key}2").held
    stepped = Stepped(built(key, [1, 2], Rich(key, split, Fields(n=int)), Rich(f"{key}2", hold)), ackers=ackers)
    stepped.step(2)
    assert [tup[0] for _, tup in held] == [10, 11, 12, 20, 21, 22]
    for collector, tup in held:
        if tup[0] != 11:
            collector.ack(tup)
    stepped.step(2)
    assert seen(key).acked == [2]
    collector, tup = next(each for each in held if each[1][0] == 11)
    collector.ack(tup)
    stepped.step(2)
    assert seen(key).acked == [2, 1]


@pytest.mark.behaviour("4.2")
def test_an_unanchored_tuple_that_fails_fails_no_tree(key: str) -> None:
    def unanchored(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.emit([tup[0]])
        collector.ack(tup)

    Stepped(built(key, [1, 2], Rich(key, unanchored, Fields(n=int)), Rich(f"{key}2", fail))).step(3)
    assert (seen(key).acked, seen(key).failed) == ([1, 2], [])
    assert len(seen(f"{key}2").executed) == 2


@pytest.mark.behaviour("4.2")
def test_a_failed_tuple_fails_every_tree_that_it_is_part_of_and_only_those(key: str) -> None:
    def pair(bolt: Any, tup: Tuple, collector: Any) -> None:
        bolt.kept.append(tup)
        if len(bolt.kept) == 2:
            collector.emit([bolt.kept[0][0] * 100 + bolt.kept[1][0]], anchors=bolt.kept)
            for each in bolt.kept:
                collector.ack(each)
            bolt.kept.clear()

    def refuse_second(bolt: Any, tup: Tuple, collector: Any) -> None:
        (collector.fail if tup[0] == 304 else collector.ack)(tup)

    chain = built(key, [1, 2, 3, 4], Rich(key, pair, Fields(n=int)), Rich(f"{key}2", refuse_second), again=False)
    Stepped(chain).step(3)
    assert (sorted(seen(key).acked), sorted(seen(key).failed)) == ([1, 2], [3, 4])


@pytest.mark.behaviour("4.2")
def test_a_tuple_anchored_to_several_completes_with_all_paths(key: str) -> None:
    """Both branches of one tuple meet again in a bolt, whose output is anchored to both."""
    builder = TopologyBuilder("diamond")
    builder.set_spout("spout", ListSpout(key, [1, 2, 3]))
    builder.set_bolt("left", Basic(f"{key}l"), 2).shuffle_grouping("spout")
    builder.set_bolt("right", Basic(f"{key}r"), 2).shuffle_grouping("spout")

    def join(bolt: Any, tup: Tuple, collector: Any) -> None:
        other = bolt.waiting.pop(tup[0], None)
        if other is None:
            bolt.waiting[tup[0]] = tup
            return
        collector.emit([tup[0]], anchors=[tup, other])
        collector.ack(tup)
        collector.ack(other)

    joiner = builder.set_bolt("join", lambda: Rich(key, join, Fields(n=int)))
    joiner.fields_grouping("left", Fields("n")).fields_grouping("right", Fields("n"))
    builder.set_bolt("end", Rich(f"{key}e", ack), 2).all_grouping("join")
    Stepped(builder.build(), ackers=2).step(4)
    assert sorted(seen(key).acked) == [1, 2, 3]
    assert sorted(seen(f"{key}e").executed) == [(n,) for n in (1, 1, 2, 2, 3, 3)]  # to each of two tasks


@pytest.mark.behaviour("4.2")
def test_a_basic_bolt_anchors_and_acks_by_itself_and_fails_a_tuple_when_it_raises(key: str) -> None:
    stepped = Stepped(built(key, [1, 2, 3], Basic(key, 2, refused=(2,)), Rich(f"{key}2", ack))).step(5)
    assert (sorted(seen(key).acked), seen(key).failed) == ([1, 2, 3], [2])
    counts = stepped.driver.status().components
    assert (counts["bolt0"].acked, counts["bolt0"].failed, counts["bolt0"].died) == (3, 1, 0)


@pytest.mark.behaviour("4.8")
def test_a_bolt_may_hold_tuples_over_many_rounds(key: str) -> None:
    def sum_of_ten(bolt: Any, tup: Tuple, collector: Any) -> None:
        bolt.kept.append(tup)
        if len(bolt.kept) == 10:
            collector.emit([sum(each[0] for each in bolt.kept)], anchors=bolt.kept)
            for each in bolt.kept:
                collector.ack(each)
            bolt.kept.clear()

    class OneByOne(ListSpout):
        """One tuple per round."""

        def next_tuple(self) -> None:
            self.given = not getattr(self, "given", False)
            if self.given:
                super().next_tuple()

    one_by_one = OneByOne(key, list(range(30)))
    stepped = Stepped(built(key, [], Rich(key, sum_of_ten, Fields(n=int)), Rich(f"{key}2", ack), spout=one_by_one))
    stepped.step(9)
    assert (len(seen(key).executed), seen(key).acked) == (9, [])
    stepped.step(30)
    assert seen(f"{key}2").executed == [(45,), (145,), (245,)]
    assert sorted(seen(key).acked) == list(range(30))


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.behaviour("4.5")
def test_a_tuple_that_takes_too_long_fails_once(key: str) -> None:
    stepped = Stepped(built(key, [7], Rich(key, nothing), again=False)).step(1)
    stepped.step(2, seconds=14)
    assert seen(key).failed == []  # 28 s
    stepped.step(2, seconds=16)
    assert seen(key).failed == [7]
    stepped.step(10, seconds=16)
    assert seen(key).failed == [7]
    assert (stepped.driver.status().pending, stepped.driver.status().trees) == (0, 0)


@pytest.mark.behaviour("4.5")
def test_a_late_ack_changes_nothing(key: str) -> None:
    held = seen(key).held
    stepped = Stepped(built(key, [7], Rich(key, hold), again=False))
    stepped.step(1).step(4, seconds=16)
    assert seen(key).failed == [7]
    collector, tup = held[0]
    collector.ack(tup)
    stepped.step(3)
    assert (seen(key).acked, seen(key).failed) == ([], [7])


@pytest.mark.behaviour("4.5")
def test_reset_timeout_restarts_the_whole_timeout(key: str) -> None:
    held = seen(key).held
    stepped = Stepped(built(key, [7, 8], Rich(key, hold), again=False))
    stepped.step(1)
    for _ in range(6):
        collector, tup = held[0]
        collector.reset_timeout(tup)
        stepped.step(2, seconds=8)
    assert seen(key).failed == [8]
    collector.ack(tup)
    stepped.step(2)
    assert seen(key).acked == [7]


def test_a_tuple_that_is_acked_twice_counts_once(key: str) -> None:
    def twice(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.ack(tup)
        collector.ack(tup)
        collector.fail(tup)

    stepped = Stepped(built(key, [1, 2], Rich(key, twice))).step(2)
    assert (seen(key).acked, seen(key).failed) == ([1, 2], [])
    assert stepped.driver.status().components["bolt0"].acked == 2


# --- trouble --------------------------------------------------------------------------------------


@pytest.mark.dies("core 1")
@pytest.mark.behaviour("4.6")
def test_a_bolt_that_dies_starts_afresh_and_the_tuples_it_held_come_again(key: str) -> None:
    def dies_at_three(bolt: Any, tup: Tuple, collector: Any) -> None:
        bolt.kept.append(tup)
        if tup[0] == 3 and len(seen(key).executed) == 3:
            raise ZeroDivisionError("three")
        if len(seen(key).executed) > 5:
            collector.ack(tup)

    stepped = Stepped(built(key, [1, 2, 3, 4, 5], Rich(key, dies_at_three))).step(1)
    stepped.step(1)
    assert seen(key).failed == [3]  # at once, not after the timeout
    stepped.step(6, seconds=16)
    assert sorted(seen(key).acked) == [1, 2, 3, 4, 5]
    assert sorted(seen(key).failed) == [1, 2, 3, 4, 5]
    status = stepped.driver.status()
    assert status.components["bolt0"].died == 1
    assert status.last_error == "bolt0[0]: ZeroDivisionError: three"


@pytest.mark.dies("core 2")
@pytest.mark.behaviour("4.6")
def test_trees_that_a_dead_acker_tracked_are_replayed(key: str) -> None:
    held = seen(key).held
    stepped = Stepped(built(key, [1, 2], Rich(key, hold))).step(1)
    tasks = stepped.rounds._worker._tasks
    del tasks[next(place for place, task in tasks.items() if isinstance(task, AckerTask))]
    for collector, tup in held:
        collector.ack(tup)
    stepped.step(2)
    assert seen(key).acked == []
    held.clear()
    stepped.step(4, seconds=16)
    assert sorted(seen(key).failed) == [1, 2]
    for collector, tup in held:
        collector.ack(tup)
    stepped.step(2)
    assert sorted(seen(key).acked) == [1, 2]


@pytest.mark.dies("core 3")
@pytest.mark.behaviour("4.6")
def test_a_spout_that_dies_is_opened_again_and_gets_no_acks_of_its_predecessor(key: str) -> None:
    class Dies(ListSpout):
        def next_tuple(self) -> None:
            if len(self.waiting) == 2 and seen(self.key).opened == 1:
                raise OSError("the connection is gone")
            super().next_tuple()

    held = seen(key).held
    spout = Dies(key, [1, 2, 3])
    stepped = Stepped(built(key, [], Rich(key, hold), spout=spout))
    stepped.step(2)
    assert (seen(key).opened, seen(key).closed) == (2, 1)
    assert [tup[0] for _, tup in held] == [1, 1, 2, 3]
    for collector, tup in held:
        collector.ack(tup)
    stepped.step(2)
    assert seen(key).acked == [1, 2, 3]  # the first 1 came from the object that died


def test_a_component_that_cannot_start_ends_the_topology(key: str) -> None:
    class Unreachable(ListSpout):
        def open(self, conf: Any, context: Any, collector: Any) -> None:
            raise ConnectionRefusedError("nobody at queue:22133")

    run = submit(
        built(key, [], Rich(key, ack), spout=Unreachable(key, [1])), {"topology.max.attempts": 3}, executor="local"
    )
    with pytest.raises(
        CoreTopologyFailed, match=r"spout\[0\]: ConnectionRefusedError: nobody at queue:22133(?s:.*)Traceback"
    ):
        run.wait_until_idle(PATIENCE_S)
    assert run.status().phase == "failed"


def test_a_round_with_thousands_of_errors_reports_only_a_few(key: str) -> None:
    def always(bolt: Any, tup: Tuple, collector: Any) -> None:
        raise ValueError(f"bad {tup[0]}")

    stepped = Stepped(built(key, list(range(2_000)), Rich(key, always), again=False), pending=5_000)
    told: list[int] = []
    run = stepped.rounds.run

    def spied(round_: Round) -> Any:
        records = run(round_)
        told.extend(len(each.errors) for each in records if isinstance(each, RoundReport))
        return records

    stepped.rounds.run = spied  # type: ignore[method-assign]
    stepped.step(2)
    assert told == [ERRORS_MAX, 0]
    assert len(seen(key).failed) == 2_000


def test_values_that_do_not_fit_end_the_task_that_emitted_them(key: str) -> None:
    def wrong(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.emit(["seven" if tup[0] == 7 else tup[0]], anchors=tup)
        collector.ack(tup)

    stepped = Stepped(built(key, [7], Rich(key, wrong, Fields(n=int)), Rich(f"{key}2", ack), again=False)).step(1)
    stepped.step(4, seconds=16)
    assert (seen(key).acked, seen(key).failed) == ([], [7])
    assert "component 'bolt0', stream 'default': field 'n' does not take" in str(stepped.driver.status().last_error)


def test_acks_that_a_lost_round_carried_reach_the_spout_in_the_next_one(key: str) -> None:
    stepped = Stepped(built(key, [1, 2, 3], Rich(key, ack))).step(1)
    run = stepped.rounds.run

    def lost(round_: Any) -> Any:
        raise RetryableError("the executor is gone")

    stepped.rounds.run = lost  # type: ignore[method-assign]
    assert not stepped.driver.step()
    assert not stepped.driver.step()
    stepped.rounds.run = run  # type: ignore[method-assign]
    stepped.step(1)
    assert seen(key).acked == [1, 2, 3]
    status = stepped.driver.status()
    assert (status.rounds, status.rounds_lost, status.last_error) == (4, 2, "the executor is gone")


# --- groupings and streams ------------------------------------------------------------------------


def test_streams_and_groupings_work_as_in_transactional_topologies(key: str) -> None:
    class Odd(Grouping):
        def split(self, batch: Any, task_count: int, turn: int) -> Any:
            values = batch.column("n").to_pylist()
            for task in range(2):
                rows = [index for index, value in enumerate(values) if value % 2 == task]
                if rows:
                    yield task, batch.take(rows)

    def route(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.emit([tup[0]], anchors=tup, stream="side")
        collector.emit_direct(1, [tup[0]], anchors=tup, stream="to_one")
        collector.ack(tup)

    class Router(Rich):
        def declare_output_fields(self, declarer: Any) -> None:
            declarer.declare(Fields(n=int), "side")
            declarer.declare(Fields(n=int), "to_one", direct=True)

    def note(bolt: Any, tup: Tuple, collector: Any) -> None:
        seen(f"{key}{bolt.context.component_id}").acked.append((bolt.context.task_index, tup[0]))
        collector.ack(tup)

    builder = TopologyBuilder("streams")
    builder.set_spout("spout", ListSpout(key, list(range(8))), 2)
    builder.set_bolt("route", Router(key, route), 2).local_or_shuffle_grouping("spout")
    builder.set_bolt("odd", Rich(f"{key}x", note), 2).custom_grouping("route", Odd(), "side")
    builder.set_bolt("direct", Rich(f"{key}x", note), 3).direct_grouping("route", "to_one")
    builder.set_bolt("global", Rich(f"{key}x", note), 3).global_grouping("route", "side")
    Stepped(builder.build(), ackers=2).step(3)
    assert sorted(seen(key).acked) == list(range(8))
    assert sorted(seen(f"{key}odd").acked) == [(0, n) for n in (0, 2, 4, 6)] + [(1, n) for n in (1, 3, 5, 7)]
    assert sorted(seen(f"{key}direct").acked) == [(1, n) for n in range(8)]
    assert sorted(seen(f"{key}global").acked) == [(0, n) for n in range(8)]


def test_a_core_tuple_has_its_values_from_index_0_and_no_attempt(key: str) -> None:
    def look(bolt: Any, tup: Tuple, collector: Any) -> None:
        seen(f"{key}look").acked.append((tup[0], tup["n"], list(tup), len(tup), tup.source_component, str(tup)))
        with pytest.raises(AttributeError, match="no transaction attempt"):
            _ = tup.attempt
        collector.ack(tup)

    Stepped(built(key, [5], Rich(key, look))).step(2)
    assert seen(f"{key}look").acked == [(5, 5, [5], 1, "spout", "Tuple(n=5)")]
    assert seen(key).acked == [5]


# --- what is refused ------------------------------------------------------------------------------


class Batch(BaseBatchBolt):
    def execute(self, tup: Tuple) -> None: ...
    def finish_batch(self) -> None: ...


def test_an_invalid_core_topology_is_refused_by_name(key: str) -> None:
    with pytest.raises(TopologyError, match="topology 'empty' has no spout"):
        TopologyBuilder("empty").build()
    builder = TopologyBuilder("wrong")
    with pytest.raises(TopologyError, match=r"spout 's' is a MemoryTransactionalSpout.*TransactionalTopologyBuilder"):
        builder.set_spout("s", MemoryTransactionalSpout({0: [[1]]}, Fields(n=int), 1))  # type: ignore[arg-type]
    builder.set_spout("s", ListSpout(key, []))
    with pytest.raises(TopologyError, match="component id 's' is used twice"):
        builder.set_spout("s", ListSpout(key, []))
    with pytest.raises(TopologyError, match="component id 's' is used twice"):
        builder.set_bolt("s", Rich(key, ack))
    builder.set_bolt("batch", Batch()).shuffle_grouping("s")
    with pytest.raises(TopologyError, match="bolt 'batch' is a Batch, which works on batches"):
        builder.build()
    with pytest.raises(TopologyError, match="5000 tasks together; 4096 is the most"):
        many = TopologyBuilder("many")
        many.set_spout("s", ListSpout(key, []), 5_000)
        many.build()


def test_a_rich_bolt_in_a_transactional_topology_is_refused(key: str) -> None:
    builder = TransactionalTopologyBuilder("t", "s", MemoryTransactionalSpout({0: [[1]]}, Fields(n=int), 1))
    builder.set_bolt("rich", Rich(key, ack)).shuffle_grouping("s")
    with pytest.raises(TopologyError, match="bolt 'rich' is a Rich, which acks tuples one by one"):
        builder.build()


def test_submit_refuses_what_a_core_topology_does_not_have(key: str) -> None:
    topology = built(key, [1], Rich(key, ack))
    with pytest.raises(ConfigError, match="'chain' is a core topology: it has no transactional state"):
        submit(topology, {}, executor="local", fresh=True)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="executor 'flink' is not known"):
        submit(topology, {}, executor="flink")
    with pytest.raises(ConfigError, match=r"topology\.max\.spout\.pending is 5000: of a transactional topology"):
        spout = MemoryTransactionalSpout({0: [[1]]}, Fields(n=int), 1)
        submit(
            TransactionalTopologyBuilder("t", "s", spout).build(),
            {"topology.max.spout.pending": 5_000},
            executor="local",
        )


def test_a_run_can_be_waited_for_until_idle_and_stopped(key: str) -> None:
    with submit(built(key, list(range(500)), Basic(key), Rich(f"{key}2", ack)), {}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().pending == 0
        assert sorted(seen(key).acked) == list(range(500))
    assert run.status().phase == "stopped"
    assert (seen(key).closed, seen(f"{key}2").cleaned) == (1, 1)
    assert run.join(0)
    with pytest.raises(TopologyError, match="was stopped while waiting"):
        run.wait_until_idle(PATIENCE_S)


def test_the_figures_of_a_run_are_metrics(key: str) -> None:
    stepped = Stepped(built(key, [1, 2, 3], Rich(key, ack))).step(2)
    collector = CoreRunCollector("chain", stepped.driver.status, stepped.driver.figures)
    found = {
        (sample.name, sample.labels.get("component")): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert found[("ratchet_rounds_total", None)] == 2
    assert found[("ratchet_tuples_completed_total", "spout")] == 3
    assert found[("ratchet_tuples_acked_total", "bolt0")] == 3
    assert found[("ratchet_tuples_pending", "spout")] == 0
    assert found[("ratchet_complete_latency_seconds_count", "spout")] == 3
    assert found[("ratchet_complete_latency_seconds_sum", "spout")] > 0


@pytest.mark.parametrize("kind", [DataLossError, ConfigError])
def test_a_core_topology_fails_with_the_kind_of_error_that_ended_it(key: str, kind: type[Exception]) -> None:
    """A transactional topology does the same, so that callers can catch by recovery."""

    def lost(bolt: Any, tup: Tuple, collector: Any) -> None:
        raise kind("it is gone")

    run = submit(built(key, [1], Rich(key, lost)), executor="local")
    with pytest.raises(kind, match=r"it is gone") as failed:
        run.wait_until_idle(PATIENCE_S)
    assert isinstance(failed.value, CoreTopologyFailed)


class WordlessError(Exception):
    """Raises another error when it is asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class RefusesTwo(Basic):
    """Raises ``kind`` for the value 2, each time."""

    kind: type[Exception] = BadRecordError

    def execute(self, tup: Tuple, collector: Any) -> None:
        if tup[0] == 2:
            raise self.kind("2 is bad")


@pytest.mark.parametrize("basic", [False, True])
@pytest.mark.parametrize("kind", [BadRecordError, ValueError, WordlessError])
def test_a_bad_record_of_a_bolt_fails_its_tuple_only(key: str, kind: type[Exception], basic: bool) -> None:
    def refuse_two(bolt: Any, tup: Tuple, collector: Any) -> None:
        if tup[0] == 2:
            raise kind("2 is bad")
        collector.ack(tup)

    bolt: Any = RefusesTwo(key) if basic else Rich(key, refuse_two)
    bolt.kind = kind
    stepped = Stepped(built(key, [1, 2, 3], bolt, again=False)).step(4)
    assert (seen(key).acked, seen(key).failed) == ([1, 3], [2])
    text = "its text cannot be made (RuntimeError)" if kind is WordlessError else "2 is bad"
    assert f"{kind.__name__}: {text}" in str(stepped.driver.status().last_error)


def test_a_bad_record_of_a_spout_ends_the_topology(key: str) -> None:
    class Refuses(ListSpout):
        def next_tuple(self) -> None:
            raise BadRecordError("it is bad")

    run = submit(built(key, [], Rich(key, ack), spout=Refuses(key, [])), executor="local")
    with pytest.raises(BadRecordError, match=r"it is bad") as failed:
        run.wait_until_idle(PATIENCE_S)
    assert isinstance(failed.value, CoreTopologyFailed)
