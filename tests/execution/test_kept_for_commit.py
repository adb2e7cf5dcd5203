"""What travels from the processing to the commit phase: a committer as it is, or what it keeps."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, Topology, TopologyContext, TransactionalTopologyBuilder
from framework.config import Config
from framework.execution.messages import AttemptHeader, CommitterState, TaskReport
from framework.execution.plan import plan_execution
from framework.execution.ports import ProcessingJob, seeds
from framework.execution.single_task_phase import run_commit, run_processing
from framework.execution.tasks import PlannedTopology
from framework.topology.fencing import OpenCommit
from sinks import Count, Mean, OpaqueMapState, SqliteBackend, StateCommitter, Sum
from spouts import OpaqueKafkaTransactionalSpout, OpaqueMemoryTransactionalSpout

ROWS = {0: [["a", 1], ["b", 2], ["a", 3]], 1: [["b", 40], ["c", 5]]}
AGGREGATES = {"n": Count(), "total": Sum("v"), "mean": Mean("v")}
EXPECTED = [("a", 2, 4, 2.0), ("b", 2, 42, 21.0), ("c", 1, 5, 5.0)]


class Remembers(StateCommitter):
    """Has an attribute of its own, which is set in the processing phase and used when it
    commits."""

    seen = 0

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        self.seen += batch.num_rows
        super().execute_arrow(batch)

    def finish_batch(self) -> Any:
        if not self.seen:
            raise ValueError("it has forgotten what it saw")
        return super().finish_batch()


class KeepsOnly(StateCommitter):
    """Says what is kept of it, and cannot take it back."""

    def keep_for_commit(self) -> bytes | None:
        return b"something"

    def take_for_commit(self, kept: bytes) -> None:
        super(StateCommitter, self).take_for_commit(kept)


def counting(folder: Path, committer: type[StateCommitter], rows: Mapping[int, list[list[Any]]]) -> Topology:
    spout = OpaqueMemoryTransactionalSpout(dict(rows), Fields(word=str, v=int), 10)
    builder = TransactionalTopologyBuilder("kept", "spout", spout, 2)
    state = OpaqueMapState(SqliteBackend(folder / "kept.db", "words"))
    builder.set_bolt("count", committer(state, key=["word"], aggregates=AGGREGATES)).global_grouping("spout")
    return builder.build()


def run(
    folder: Path, committer: type[StateCommitter], rows: Mapping[int, list[list[Any]]] = ROWS
) -> tuple[Any, list[TaskReport]]:
    """Run one transaction in copies of the topology, as in two processes. Returns the
    ``CommitterState`` that travelled between them, or None, and the reports."""
    topology = counting(folder, committer, rows)
    conf = Config.of({}).for_components()
    plan = plan_execution(topology)
    header = AttemptHeader("kept", txid=1, attempt_id=1, epoch=1, plan_digest="d", incarnation="")
    planner = topology.spout.instance.planner(conf, TopologyContext("kept", "spout", 0, 2, conf))
    batch = planner.plan({}) or {}
    job = ProcessingJob(header, {each: planner.for_reading(each, meta) for each, meta in batch.items()})
    reports: list[TaskReport] = []
    result = run_processing(PlannedTopology(plan, conf), seeds(plan, job), reports.append)
    (state,) = topology.states
    found = state.prepare("kept")
    state.raise_header(found, found.opened(1, OpenCommit(1, 1, "d")))
    run_commit(PlannedTopology(plan, conf), header, result, reports.append)
    return next((each for each in result if isinstance(each, CommitterState)), None), reports


def written(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "kept.db") as connection:
        return connection.execute("SELECT word, n, total, mean FROM words_live ORDER BY word").fetchall()


def test_a_ready_made_committer_sends_its_folded_rows_and_commits_them(tmp_path: Path) -> None:
    travelled, reports = run(tmp_path, StateCommitter)
    assert [each.failure for each in reports if each.failure] == []
    assert not travelled.whole
    (folded,) = pickle.loads(travelled.kept)
    assert sorted(folded.column("word").to_pylist()) == ["a", "b", "c"]
    assert written(tmp_path) == EXPECTED


def test_a_ready_made_committer_that_took_no_rows_commits_none(tmp_path: Path) -> None:
    travelled, reports = run(tmp_path, StateCommitter, {0: [], 1: []})
    assert [each.failure for each in reports if each.failure] == []
    assert travelled == CommitterState("count", 0, b"", whole=False)
    assert written(tmp_path) == []


def test_a_committer_of_ones_own_travels_with_all_that_it_holds(tmp_path: Path) -> None:
    travelled, reports = run(tmp_path, Remembers)
    assert [each.failure for each in reports if each.failure] == []
    assert travelled.whole
    assert written(tmp_path) == EXPECTED


def test_a_committer_that_takes_nothing_back_fails_with_its_name(tmp_path: Path) -> None:
    _, reports = run(tmp_path, KeepsOnly)
    (failure,) = [each.failure for each in reports if each.failure]
    assert failure.component_id == "count"
    assert "KeepsOnly says what is kept of it, and does not take it back" in failure.message


class OutOfMemory(StateCommitter):
    """Is too large to be copied."""

    def __getstate__(self) -> dict[str, Any]:
        if self._fold is not None:
            raise MemoryError
        return vars(self)


def test_a_lack_of_memory_is_not_called_a_mistake_of_the_committer(tmp_path: Path) -> None:
    _, reports = run(tmp_path, OutOfMemory)
    (failure,) = [each.failure for each in reports if each.failure]
    assert (failure.component_id, failure.error) == ("count", "MemoryError")
    assert "pickled" not in failure.message


class Reads(OpaqueKafkaTransactionalSpout):
    def reader(self, conf: Any, context: Any) -> Any:
        return super().reader(conf, context)


@pytest.mark.parametrize(("kind", "shared"), [(OpaqueKafkaTransactionalSpout, True), (Reads, False)])
def test_a_task_has_one_copy_of_a_shared_spout_and_new_ones_of_others(
    tmp_path: Path, kind: type[OpaqueKafkaTransactionalSpout], shared: bool
) -> None:
    builder = TransactionalTopologyBuilder("shared", "spout", kind(["t"], bootstrap_servers="nowhere:1"), 2)
    state = OpaqueMapState(SqliteBackend(tmp_path / "s.db", "words"))
    committer = StateCommitter(state, key=["value"], aggregates={"n": Count()})
    builder.set_bolt("count", committer).global_grouping("spout")
    plan = plan_execution(builder.build())
    topology = PlannedTopology(plan, {})
    spout, count = plan.components["spout"], plan.components["count"]
    assert (topology.instance(spout) is topology.instance(spout)) is shared
    assert topology.instance(spout) is not spout.template
    assert topology.instance(count) is not topology.instance(count)
