"""A transaction whose attempts have several numbers of commit tasks: the store has the rows of the
last attempt."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from framework import Fields, Topology, TopologyContext, TransactionalTopologyBuilder
from framework.config import Config
from framework.execution.messages import AttemptHeader, TaskReport
from framework.execution.plan import Layout, plan_execution
from framework.execution.ports import ProcessingJob, seeds
from framework.execution.single_task_phase import run_commit, run_processing
from framework.execution.tasks import PlannedTopology
from framework.topology import Committer
from framework.topology.fencing import ValueType
from sinks import AppendCommitter, OpaqueMapState, SqliteBackend, StateCommitter, Sum, UpsertCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.file_tables import opened
from tests.kit.row_tables import Database

pytestmark = [pytest.mark.rule("C4"), pytest.mark.rule("C41")]
FIELDS = Fields(id=int, n=int)
TASKS = 3

Batch = Mapping[int, list[list[int]]]
EARLIER: Batch = {0: [[1, 10], [2, 20], [3, 30]], 1: [[4, 40], [5, 50]]}
#: What the attempts of the second transaction read, as an opaque spout may.
READ: list[Batch] = [
    {0: [[1, 11], [2, 21], [8, 81]], 1: [[4, 41], [6, 61], [9, 91]]},
    {0: [[1, 12], [7, 72]], 1: [[3, 32], [9, 92]]},
    {0: [[1, 13], [2, 23]], 1: [[5, 53], [7, 73]]},
]
ORDERS = pytest.mark.parametrize("order", [(True, False), (False, True), (True, False, True)], ids=str)


def test_the_layouts_have_one_task_and_several(tmp_path: Path) -> None:
    """Or the other tests would show nothing."""
    plan = plan_execution(topology(lambda: sums(tmp_path), EARLIER))
    assert [plan.for_batch(Layout.EVEN, collapsed=each).commit_tasks for each in (True, False)] == [1, TASKS]


@pytest.mark.each_value_once
@ORDERS
def test_a_table_of_the_newest_rows(database: Database, order: tuple[bool, ...]) -> None:
    commit(lambda: UpsertCommitter(database.table(), ["id"]), order)
    last = {key: n for rows in (EARLIER, READ[len(order) - 1]) for part in rows.values() for key, n in part}
    assert database.rows(columns="id, n") == sorted(last.items(), key=repr)


@pytest.mark.each_value_once
@ORDERS
def test_a_table_of_all_rows(database: Database, order: tuple[bool, ...]) -> None:
    commit(lambda: AppendCommitter(database.table(stamp="txid")), order)
    all_rows = [tuple(row) for rows in (EARLIER, READ[len(order) - 1]) for part in rows.values() for row in part]
    assert database.rows(columns="id, n") == sorted(all_rows, key=repr)


@ORDERS
def test_a_map_state(tmp_path: Path, order: tuple[bool, ...]) -> None:
    commit(lambda: sums(tmp_path), order)
    expected: dict[int, int] = {}
    for rows in (EARLIER, READ[len(order) - 1]):
        for key, n in (row for part in rows.values() for row in part):
            expected[key] = expected.get(key, 0) + n
    with closing(sqlite3.connect(tmp_path / "sums.db")) as connection:
        assert dict(connection.execute("SELECT id, n FROM sums_live")) == expected


def sums(folder: Path) -> StateCommitter:
    return StateCommitter(OpaqueMapState(SqliteBackend(folder / "sums.db", "sums")), ["id"], {"n": Sum("n")})


def topology(committer: Callable[[], Committer], batch: Batch) -> Topology:
    spout = OpaqueMemoryTransactionalSpout(dict(batch), FIELDS, 100)
    builder = TransactionalTopologyBuilder("layouts", "spout", spout, 2)
    builder.set_bolt("commit", committer(), TASKS).fields_grouping("spout", Fields("id"))
    return builder.build()


def commit(committer: Callable[[], Committer], order: tuple[bool, ...]) -> None:
    """Commit two transactions. ``order``: for each attempt of the second one, whether one task runs
    it as a whole."""
    (state,) = topology(committer, EARLIER).states
    state.prepare("layouts")
    for txid, attempts in ((1, [(True, EARLIER)]), (2, list(zip(order, READ, strict=False)))):
        for attempt_id, (collapsed, batch) in enumerate(attempts, start=1):
            header = opened(state, txid, attempt_id)
            run_attempt(topology(committer, batch), txid, attempt_id, collapsed=collapsed)
        if len(attempts) > 1 and state.value_type is ValueType.OPAQUE:
            state.sweep(header)
        state.raise_header(header, header.finished(txid))


def run_attempt(made: Topology, txid: int, attempt_id: int, *, collapsed: bool) -> None:
    conf = Config.of({}).for_components()
    plan = plan_execution(made)
    laid_out = PlannedTopology(plan, conf).for_batch(Layout.EVEN, collapsed=collapsed)
    planner = made.spout.instance.planner(conf, TopologyContext("layouts", "spout", 0, 2, conf))
    batch = planner.plan({}) or {}
    header = AttemptHeader("layouts", txid=txid, attempt_id=attempt_id, epoch=1, plan_digest="digest", incarnation="")
    job = ProcessingJob(header, {each: planner.for_reading(each, meta) for each, meta in batch.items()})
    reports: list[TaskReport] = []
    result = run_processing(laid_out, seeds(laid_out.plan, job), reports.append)
    run_commit(laid_out, header, result, reports.append)
    assert [each.failure for each in reports if each.failure] == []
