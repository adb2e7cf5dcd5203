"""How a topology is laid out: phases, segments, levels."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    CLOCK_STREAM,
    ArrowBolt,
    BaseBasicBolt,
    Bolt,
    Fields,
    OutputFieldsDeclarer,
    TransactionalTopologyBuilder,
)
from framework.execution import Phase, plan_execution
from framework.execution.messages import AttemptHeader
from framework.execution.plan import Layout
from framework.execution.ports import GENERAL_PARTITION, ProcessingJob, layout_of, seeds
from framework.operators.event_window_assigner import tumbling
from framework.topology import Topology, TransactionalSpout
from framework.topology.groupings import FieldsGrouping, Grouping, LocalOrShuffleGrouping, ShuffleGrouping
from sinks import (
    Count,
    MemoryBackend,
    OpaqueMapState,
    SqliteTable,
    StateCommitter,
    UpsertCommitter,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import MemoryTransactionalSpout
from tests.kit.bolts import BatchCount, Relay


class Anything(BatchCount):
    """Takes anything, emits ``count``."""


def builder(parallelism: int = 2) -> TransactionalTopologyBuilder:
    return TransactionalTopologyBuilder(
        "t", "spout", MemoryTransactionalSpout({0: []}, Fields(word=str), 1), parallelism
    )


def header(**options: Any) -> AttemptHeader:
    return AttemptHeader("t", txid=1, attempt_id=1, epoch=1, plan_digest="", **options)


def test_plan_local_edges_are_fused_and_redistributions_are_not() -> None:
    b = builder()
    b.set_bolt("same", Relay(), 2).shuffle_grouping("spout")
    b.set_bolt("wider", Relay(), 3).shuffle_grouping("same")
    b.set_bolt("keyed", Relay(), 3).fields_grouping("wider", Fields("word"))
    plan = plan_execution(b.build())
    assert [[each.components for each in level.segments] for level in plan.processing] == [
        [("spout", "same")],
        [("wider",)],
        [("keyed",)],
    ]
    assert [edge.fused for edge in plan.edges] == [True, False, False]


def test_plan_a_shuffle_is_fused_only_where_rows_are_already_spread() -> None:
    b = builder()
    b.set_bolt("first", Relay(), 2).shuffle_grouping("spout")
    b.set_bolt("second", Relay(), 2).none_grouping("first")
    b.set_bolt("third", Relay(), 2).local_or_shuffle_grouping("second")
    plan = plan_execution(b.build())
    assert [edge.fused for edge in plan.for_batch(Layout.EVEN).edges] == [True, False, True]
    assert [edge.fused for edge in plan.for_batch(Layout.UNEVEN).edges] == [False, False, True]
    assert [len(level.segments) for level in plan.for_batch(Layout.UNEVEN).processing] == [1, 1, 1]


def test_plan_a_shuffle_below_a_committer_is_never_fused() -> None:
    b = builder()
    b.set_committer_bolt("commit", Anything(), 2).local_or_shuffle_grouping("spout")
    b.set_bolt("after", Anything(), 2).shuffle_grouping("commit")
    plan = plan_execution(b.build())
    assert [edge.fused for edge in plan.edges] == [True, False]
    assert plan.for_batch(Layout.UNEVEN) is plan


@pytest.mark.parametrize(
    ("records", "even"),
    [
        ({"0": 10, "1": 10}, True),
        ({"0": 10, "1": 0}, False),
        ({"0": 10}, False),
        ({"0": 10, "1": 4, "2": 0}, True),  # task 1 has more than half of an even share
        ({"0": 10, "1": 3, "2": 0}, False),
        ({"0": 0, "1": 5, "2": 5}, True),
        ({"0": 10, "1": None}, False),  # the number is not known
        ({}, False),
    ],
)
def test_a_batch_is_even_when_every_spout_task_reads_its_share(records: dict[str, int | None], even: bool) -> None:
    b = builder()
    b.set_bolt("a", Relay(), 2).shuffle_grouping("spout")
    job = ProcessingJob(header(), {}, partition_records=records)
    assert layout_of(plan_execution(b.build()), job) is (Layout.EVEN if even else Layout.UNEVEN)


def test_a_batch_of_a_general_spout_is_never_taken_for_even() -> None:
    b = TransactionalTopologyBuilder("t", "spout", AnySpout(), 2)
    b.set_bolt("a", Relay(), 2).shuffle_grouping("spout")
    job = ProcessingJob(header(), {}, partition_records={GENERAL_PARTITION: 100})
    assert layout_of(plan_execution(b.build()), job) is Layout.UNEVEN


def test_a_probe_that_tries_writes_leaves_watermarks_out() -> None:
    """And what is below other committers. Ids, tasks and the inputs of components stay."""
    spout = MemoryTransactionalSpout({0: []}, Fields(word=str, at=int), 1)
    b = TransactionalTopologyBuilder("t", "spout", spout, 2)
    clock = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at")
    b.set_bolt("clock", clock).global_grouping("spout").global_grouping("spout", CLOCK_STREAM)
    windows = WindowedCommitter(
        OpaqueMapState(MemoryBackend()), tumbling(5), on="at", key=["word"], aggregates={"n": Count()}
    )
    b.set_bolt("windows", windows, 3).fields_grouping("spout", Fields("word")).all_grouping("clock")
    b.set_bolt("sent", Relay()).global_grouping("windows")
    b.set_bolt("counts", counts(), 2).fields_grouping("spout", Fields("word"))
    plan = plan_execution(b.build())
    assert set(plan.commit_roots) == {"clock", "counts"}
    job = ProcessingJob(header(is_probe=True, tries_writes=frozenset({"windows"})), {})
    trial = plan.for_batch(layout_of(plan, job), collapsed=True)
    assert set(trial.components) == {"spout", "windows", "counts"}
    assert set(trial.commit_roots) == {"windows", "counts"}
    assert all(trial.components[each] is plan.components[each] for each in trial.components)
    for other in (header(is_probe=True), header(tries_writes=frozenset({"windows"}))):
        assert layout_of(plan, ProcessingJob(other, {})) is Layout.UNEVEN


def counts() -> StateCommitter:
    return StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"n": Count()})


class AnySpout(TransactionalSpout):
    def coordinator(self, conf: Any, context: Any) -> Any: ...

    def emitter(self, conf: Any, context: Any) -> Any: ...

    def output_fields(self) -> Fields:
        return Fields(word=str)


def test_plan_single_tasks_fuse_whatever_the_grouping() -> None:
    b = builder(1)
    b.set_bolt("a", Relay()).fields_grouping("spout", Fields("word"))
    b.set_bolt("b", Relay()).global_grouping("a")
    assert plan_execution(b.build()).processing[0].segments[0].components == ("spout", "a", "b")


def test_plan_of_the_a_b_c_d_example_splits_at_the_first_committer() -> None:
    """Seed 000: A feeds B and C, B is a committer and feeds C, C feeds the committer D."""
    b = builder(1)
    b.set_bolt("A", BatchCount(), 2).shuffle_grouping("spout")
    b.set_committer_bolt("B", Anything(), 2).shuffle_grouping("A")
    b.set_bolt("C", Anything(), 3).shuffle_grouping("A").shuffle_grouping("B")
    b.set_committer_bolt("D", Anything(), 1).global_grouping("C")
    plan = plan_execution(b.build())
    phase_of = {edge.label: edge.phase for edge in plan.edges}
    assert plan.commit_roots == ("B",)
    assert phase_of == {
        "spout->A": Phase.PROCESSING,
        "A->B": Phase.PROCESSING,
        "A->C": Phase.COMMIT,
        "B->C": Phase.COMMIT,
        "C->D": Phase.COMMIT,
    }
    assert [[each.components for each in level.segments] for level in plan.commit] == [[("B",)], [("C",)], [("D",)]]


@pytest.mark.rule("C8")
def test_what_writes_for_good_and_what_is_below_it_commits_on_the_last_levels() -> None:
    def state(key: str = "word") -> StateCommitter:
        return StateCommitter(OpaqueMapState(MemoryBackend()), [key], {"n": Count()})

    b = builder(2)
    b.set_committer_bolt("outside", Anything(), 2).shuffle_grouping("spout")
    b.set_bolt("first", state(), 2).fields_grouping("spout", Fields("word"))
    b.set_bolt("passes", Relay(), 2).local_or_shuffle_grouping("first")
    b.set_bolt("second", state(), 1).global_grouping("passes")
    b.set_committer_bolt("topic", Anything(), 2).local_or_shuffle_grouping("passes")
    b.set_bolt("third", state("count"), 1).global_grouping("topic")
    topology = b.build()
    plan = plan_execution(topology)
    levels = [[each.components for each in level.segments] for level in plan.commit]
    assert levels == [[("first", "passes")], [("second",)], [("outside",), ("topic",)], [("third",)]]
    assert plan.commit_roots == ("outside", "first") and plan.commit_tasks == 4
    assert topology.commits_first() == {"spout", "first", "passes", "second"}


@pytest.mark.rule("C8")
def test_topologies_in_which_all_committers_write_for_good_or_none_have_no_last_levels() -> None:
    for committer in (Anything, lambda: StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"n": Count()})):
        b = builder(2)
        for name in ("a", "b"):
            b.set_committer_bolt(name, committer(), 2).fields_grouping("spout", Fields("word"))
        assert [each.components for each in plan_execution(b.build()).commit[0].segments] == [("a",), ("b",)]


def test_plan_diamond_is_one_chain_of_levels() -> None:
    b = builder()
    b.set_bolt("left", Relay(), 3).shuffle_grouping("spout")
    b.set_bolt("right", Relay(), 4).shuffle_grouping("spout")
    b.set_bolt("join", Anything(), 2).fields_grouping("left", Fields("word")).fields_grouping("right", Fields("word"))
    plan = plan_execution(b.build())
    assert [level.partitions for level in plan.processing] == [2, 7, 2]
    assert isinstance(b.build()["left"].instance, BaseBasicBolt)


def test_plan_every_partition_is_one_task_of_one_segment() -> None:
    b = builder()
    b.set_bolt("left", Relay(), 3).shuffle_grouping("spout")
    b.set_bolt("right", Relay(), 4).shuffle_grouping("spout")
    level = plan_execution(b.build()).processing[1]
    slots = [level.slot(partition) for partition in range(level.partitions)]
    assert [(segment.components[0], task) for segment, task in slots] == [
        *(("left", task) for task in range(3)),
        *(("right", task) for task in range(4)),
    ]
    assert [level.partition_of(segment, task) for segment, task in slots] == list(range(7))


class Watched(StateCommitter):
    """May do more than its parent."""


class SeveralSteps(MemoryBackend):
    commits_in_one_step = False


class Divided(FieldsGrouping):
    """A user's grouping may mean more by its tasks than to share the work."""


@pytest.mark.parametrize(
    ("shape", "alone"),
    [
        ({}, True),
        ({"tasks": 2}, False),
        ({"kind": Watched}, False),
        ({"backend": SeveralSteps}, False),
        ({"second": True}, False),
        ({"below": True}, False),
    ],
)
def test_a_commit_is_one_step_where_one_task_writes_one_state_and_nothing_follows(
    shape: dict[str, Any], alone: bool
) -> None:
    assert plan_execution(committing(shape)).commits_in_one_step is alone


@pytest.mark.parametrize(
    ("shape", "merged"),
    [
        ({"tasks": 3}, True),
        ({"tasks": 3, "kind": Watched}, False),
        ({"tasks": 3, "backend": SeveralSteps}, False),
        ({"tasks": 3, "second": True}, False),
        ({"tasks": 3, "below": True}, False),
        ({"tasks": 3, "grouping": Divided(Fields("word"))}, False),
    ],
)
def test_the_tasks_of_a_committer_are_one_in_a_batch_that_one_task_runs(shape: dict[str, Any], merged: bool) -> None:
    plan = plan_execution(committing(shape))
    for layout in Layout:
        collapsed = plan.for_batch(layout, collapsed=True)
        assert collapsed.commits_in_one_step is merged
        assert collapsed.components["counts"].parallelism == (1 if merged else 3)
    assert plan.for_batch(Layout.EVEN).components["counts"].parallelism == 3


class Marked(ArrowBolt):
    rows_are_independent = True

    def execute_arrow(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        return [batch]

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.parametrize(
    ("between", "tasks"),
    [
        ([], {"spout": 1, "rows": 1}),
        ([Marked], {"spout": 1, "0": 1, "rows": 1}),
        ([Marked, Marked], {"spout": 1, "0": 1, "1": 1, "rows": 1}),
        ([Marked, Relay], {"spout": 2, "0": 2, "1": 2, "rows": 1}),
    ],
)
def test_one_task_does_all_of_a_small_batch_where_the_tasks_only_share_the_work(
    between: list[type[Bolt]], tasks: dict[str, int], tmp_path: Path
) -> None:
    plan = plan_execution(upserting(tmp_path, between, LocalOrShuffleGrouping()))
    collapsed = plan.for_batch(Layout.UNEVEN, collapsed=True)
    assert {name: each.parallelism for name, each in collapsed.components.items()} == tasks
    assert len(collapsed.processing) == (1 if tasks["spout"] == 1 else 2)
    assert plan.for_batch(Layout.EVEN).components["rows"].parallelism == 3
    job = ProcessingJob(header(), {f"{n}": {} for n in range(5)})
    apart, together = seeds(plan, job), seeds(collapsed, job)
    order = ["0", "2", "4", "1", "3"]  # of rows that come together in a task, whatever the layout
    assert [each for seed in apart for each in seed.ranges] == order
    assert [each for seed in together for each in seed.ranges] == order


def test_tasks_are_not_merged_where_the_order_of_rows_or_partial_results_would_be_other_ones(tmp_path: Path) -> None:
    shuffled = plan_execution(upserting(tmp_path, [Marked], ShuffleGrouping()))
    folded = plan_execution(committing({"tasks": 3}))
    for plan, tasks in ((shuffled, 2), (folded, 1)):
        assert plan.for_batch(Layout.UNEVEN, collapsed=True).components["spout"].parallelism == tasks
        assert plan.for_batch(Layout.UNEVEN, collapsed=True).components["spout"].merged_tasks == 1


def upserting(folder: Path, between: list[type[Bolt]], grouping: Grouping) -> Topology:
    spout = MemoryTransactionalSpout({0: [], 1: []}, Fields(word=str), 1)
    builder, above = TransactionalTopologyBuilder("t", "spout", spout, 2), "spout"
    for number, kind in enumerate(between):
        builder.set_bolt(str(number), kind(), 2).grouping(above, grouping)
        above = str(number)
    rows = UpsertCommitter(SqliteTable(folder / "t.db", "words"), ["word"])
    builder.set_bolt("rows", rows, 3).fields_grouping(above, Fields("word"))
    return builder.build()


def committing(shape: dict[str, Any]) -> Topology:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, Fields(word=str), 1))

    def committer() -> StateCommitter:
        kind, backend = shape.get("kind", StateCommitter), shape.get("backend", MemoryBackend)
        made: StateCommitter = kind(OpaqueMapState(backend()), ["word"], {"n": Count()})
        return made

    grouping = shape.get("grouping", FieldsGrouping(Fields("word")))
    builder.set_bolt("counts", committer(), shape.get("tasks", 1)).grouping("spout", grouping)
    if shape.get("second"):
        builder.set_bolt("others", committer()).fields_grouping("spout", Fields("word"))
    if shape.get("below"):
        builder.set_bolt("below", Relay()).shuffle_grouping("counts")
    return builder.build()
