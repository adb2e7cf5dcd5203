"""Tries of writes leave out no record that the commit would take (C51, ADR 135)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from framework import (
    ArrowBolt,
    Committer,
    Fields,
    OutputCollector,
    OutputFieldsDeclarer,
    Topology,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    submit,
)
from framework.errors import BadRecordError
from framework.inspect.verify import verify
from framework.operators.event_window_assigner import tumbling
from framework.transactions import MemoryStore
from framework.transactions.documents import read_history
from sinks import (
    CountWindowCommitter,
    ExpiringCommitter,
    Reduce,
    SessionCommitter,
    StateCommitter,
    Sum,
    WindowedCommitter,
)
from tests.kit.paying import KEYED, MOST, PAID, TIMED, add_sums, paying, payments, state
from tests.kit.refusing import ran, refused
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C51")


def expiring(rows: list[list[Any]], batch: int, out_of_orderness: int) -> Topology:
    return paying(rows, batch, ExpiringCommitter(state(), ttl=50, **TIMED), out_of_orderness=out_of_orderness)


def sessions(rows: list[list[Any]], batch: int, gap: int, paid: Any = None) -> Topology:
    aggregates = {"paid": paid or Sum("paid")}
    return paying(rows, batch, SessionCommitter(state(), gap, **{**TIMED, "aggregates": aggregates}))


def capped(a: int, b: int) -> int:
    if a + b > 1_000:
        raise BadRecordError(f"{a} and {b} are too much")
    return a + b


@pytest.mark.parametrize("batch", [1, 3])
def test_a_session_that_a_function_refuses_when_it_ends_is_left_out_without_a_record(batch: int) -> None:
    """Otherwise each record with which it would end were refused, and then a batch without
    records."""
    rows = [["a", 0, 600], ["a", 45, 0], ["b", 45, 1], ["a", 70, 600], ["b", 70, 1], ["b", 75, 2]]
    rows += [[user, at, 1] for at in range(1_000, 5_000, 1_000) for user in "bcd"]
    built = sessions(rows, batch, 50, Reduce("paid", capped))
    store = MemoryStore()
    with submit(built, {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert refused(store, built.id) == {}
    left_out = [each.left_out_rows for record in read_history(store, built.id) for each in record.attempts]
    assert sum(sum(each.values()) for each in left_out) == 1
    assert verify(built, store).right


def test_a_record_that_extends_a_row_is_not_tried_as_a_row_of_its_own() -> None:
    """The watermark is behind the row's end: so the row does not expire."""
    rows = [["a", 0, 0], ["b", 0, MOST], ["c", 0, 0], ["c", 0, 0]]
    rows += [["a", 40, -MOST], ["a", 100, MOST], ["a", 101, 5], ["b", 1, 7]]
    built = expiring(rows, 4, 1_000)
    assert {offset for _, offset in refused(ran(built), built.id)} == {7}


def test_a_late_record_does_not_change_the_sums_of_others_in_a_try() -> None:
    rows = [["a", 1_000, MOST - 3], ["b", 1_000, MOST], ["c", 1_000, 0], ["c", 1_000, 0]]
    rows += [["a", 5, 3], ["a", 1_001, 1], ["b", 1_001, 7], ["c", 1_001, 0]]
    built = expiring(rows, 4, 0)
    assert {offset for _, offset in refused(ran(built), built.id)} == {6}


@pytest.mark.parametrize("kind", ["expiring", "counted"])
def test_records_that_only_leave_the_type_without_the_state_are_not_left_out(kind: str) -> None:
    """The next batch begins with the second one."""
    rows = [["a", 0, -MOST], ["b", 0, MOST], ["c", 0, 0], ["c", 0, 0]]
    rows += [["a", 40, MOST], ["a", 41, 5], ["b", 1, 7], ["c", 0, 0]]
    if kind == "expiring":
        built = expiring(rows, 4, 1_000)
    else:
        built = paying(rows, 4, CountWindowCommitter(state(), 1_000, **KEYED))
    assert {offset for _, offset in refused(ran(built), built.id)} == {6}


def test_late_records_that_only_leave_the_type_together_are_not_left_out() -> None:
    """The sum of a late session is only sent to the stream ``late``."""
    rows = [["a", 1_000, 0], ["b", 1_000, MOST], ["a", 40, MOST], ["a", 60, 5], ["b", 1_001, 7], ["c", 1_000, 0]]
    rows = [*rows[:2], *rows[-1:] * 2, *rows[2:]]
    assert {offset for _, offset in refused(ran(sessions(rows, 4, gap=50)), "paying")} == {6}


def test_a_part_of_a_session_that_ends_is_not_tried_as_one_that_stays() -> None:
    """Its sum leaves the type, and that of the session does not. It is never stored."""
    rows = [["a", 15, -MOST], ["a", 20, MOST], ["b", 15, MOST], ["c", 15, 0]]
    rows += [["a", 21, 5], ["b", 16, 7], ["c", 1_000, 0], ["c", 1_000, 0]]
    assert {offset for _, offset in refused(ran(sessions(rows, 4, gap=20)), "paying")} == {5}


@pytest.mark.parametrize("kind", ["windows", "sessions"])
def test_records_of_several_tasks_that_only_leave_the_type_without_the_state_are_not_left_out(kind: str) -> None:
    one = [["a", 0, -MOST], ["b", 0, MOST], ["a", 1, MOST], ["c", 0, 0]]
    other = [["c", 0, 0], ["c", 0, 0], ["a", 1, 5], ["b", 1, 7]]
    windows = WindowedCommitter(state(), tumbling(1_000), **TIMED)
    sums = windows if kind == "windows" else SessionCommitter(state(), 50, **TIMED)
    built = add_sums(payments({0: one, 1: other}, 2, readers=2), sums).build()
    store = ran(built)
    assert list(refused(store, built.id)) == [("1", 3)]
    assert max(len(each.attempts) for each in read_history(store, built.id)) <= 4
    assert len(list(read_history(store, built.id))) == 3


class Odd(ArrowBolt, Committer):
    """Refuses 7 in the commit. Its try fails."""

    can_undo = True

    tries_in_order = True

    def may_try_writes(self) -> bool:
        return True

    def prepare(self, conf: Any, context: Any, collector: OutputCollector, batch_id: TransactionAttempt) -> None:
        self.paid: list[int] = []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        self.paid += batch.column("paid").to_pylist()

    def try_writes(self, *, alone: bool) -> None:
        raise KeyError("a mistake of the try")

    def finish_batch(self) -> list[pa.RecordBatch]:
        if 7 in self.paid:
            raise BadRecordError("7")
        return []

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None: ...


def test_a_try_that_fails_does_not_stop_a_topology() -> None:
    """The batch is halved instead."""
    rows = [["a", 0, number] for number in range(16)]
    builder = payments(rows, 16)
    builder.set_bolt("odd", Odd()).global_grouping("orders")
    built = builder.build()
    assert {offset for _, offset in refused(ran(built), built.id)} == {7}


class Marked(ArrowBolt):
    """Sends the records of a transaction after its watermark, which changes them."""

    def prepare(self, conf: Any, context: Any, collector: OutputCollector, batch_id: TransactionAttempt) -> None:
        self.rows: list[pa.RecordBatch] = []
        self.told = False

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        if "watermark" in batch.schema.names:
            self.told = True
        else:
            self.rows.append(batch)

    def finish_batch(self) -> list[pa.RecordBatch]:
        paid = [
            pa.array([MOST if row["user"] == "c" and not self.told else row["paid"] for row in each.to_pylist()])
            for each in self.rows
        ]
        return [each.set_column(2, PAID.schema().field("paid"), its) for each, its in zip(self.rows, paid, strict=True)]

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(PAID)


def windows_beside() -> TransactionalTopologyBuilder:
    windows = WindowedCommitter(state(), tumbling(1_000), **TIMED)
    return add_sums(payments(ROWS, 4), windows, out_of_orderness=10)


ROWS = [["b", 0, MOST], ["c", 0, 1], ["d", 0, 0], ["d", 0, 0], ["b", 1, 1], ["c", 0, 1], ["d", 0, 0], ["d", 0, 0]]


def test_a_bolt_that_needs_watermarks_is_not_tried_without() -> None:
    builder = windows_beside()
    builder.set_bolt("marked", Marked()).global_grouping("orders").global_grouping("watermark")
    later = StateCommitter(state(), ["user"], {"paid": Sum("paid")})
    builder.set_bolt("later", later).fields_grouping("marked", Fields("user"))
    built = builder.build()
    assert {offset for _, offset in refused(ran(built), built.id)} == {4}


def test_a_bolt_that_takes_only_watermarks_does_not_matter() -> None:
    builder = windows_beside()
    last = StateCommitter(state(), ["watermark"], {"n": Sum("planned_at")})
    builder.set_bolt("clocks", last).fields_grouping("watermark", Fields("watermark"))
    built = builder.build()
    assert {offset for _, offset in refused(ran(built), built.id)} == {4}
