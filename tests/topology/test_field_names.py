"""Fields may have the names that the attempt, the stamp and the words of other systems have."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from framework import (
    ArrowBolt,
    BaseBasicBolt,
    DataFrameBolt,
    Fields,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    submit,
)
from framework.topology.tuples import tuple_class
from framework.transactions import MemoryStore
from sinks import AppendCommitter, OpaqueMapState, ParquetTable, SqliteBackend, StateCommitter, Sum
from spouts import MemoryTransactionalSpout
from tests.kit.runners import start

#: Names that user data has, and that Ratchet uses in some place for something of its own.
FIELDS = Fields(id=int, txid=str, attempt=int, _id=str, __edge=str, key=str, row=int, place=int)
ROWS: list[list[Any]] = [[number % 3, "t", number, "x", "e", "k", 0, 1] for number in range(12)]


class Pass(BaseBasicBolt):
    """By name, a field is the field; by position 0, and as ``attempt``, there is the attempt."""

    def execute(self, tup: Any, collector: Any) -> None:
        if tup[0] != tup.attempt or tup[0].attempt_id != 1 or tup["id"] != tup[1] or tup["attempt"] != tup[3]:
            raise ValueError(f"{tup!r}")
        collector.emit(list(tup.values))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class ById(ArrowBolt):
    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch.filter(pc.greater_equal(batch.column("id"), 0))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class Positions(BaseBasicBolt):
    """The first value is at position 1, whatever its name."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup[1], tup["id"], tup[0].txid])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(id=int, same=int, batch=int))


def test_a_field_named_id_goes_through_every_kind_of_bolt_grouping_and_sink(tmp_path: Path) -> None:
    path, table = tmp_path / "x.db", ParquetTable(tmp_path / "rows", partition_by=["id"])
    b = TransactionalTopologyBuilder("ids", "spout", MemoryTransactionalSpout({0: ROWS}, FIELDS, 5))
    b.set_bolt("pass", Pass(), 2).shuffle_grouping("spout")
    b.set_bolt("arrow", ById(), 2).fields_grouping("pass", Fields("id"))
    state = OpaqueMapState(SqliteBackend(path, "sums"))
    b.set_bolt("sums", StateCommitter(state, ["id", "_id"], {"attempt": Sum("attempt")}), 2).fields_grouping(
        "arrow", Fields("id")
    )
    b.set_bolt("rows", AppendCommitter(table), 2).partial_key_grouping("arrow", Fields("id"))
    b.set_bolt("positions", Positions()).shuffle_grouping("spout")
    b.set_bolt("batches", AppendCommitter(ParquetTable(tmp_path / "batches"))).global_grouping("positions")
    run = submit(b.build(), store=MemoryStore(), executor="local")
    run.wait_until_caught_up(120)
    run.stop(60)
    with sqlite3.connect(path) as connection:
        sums = dict(connection.execute("SELECT id, attempt FROM sums_live"))
    assert sums == {key: sum(range(key, 12, 3)) for key in range(3)}
    rows = table.to_table()
    assert rows.column_names == list(FIELDS)
    assert sorted(tuple(each.values()) for each in rows.to_pylist()) == sorted(map(tuple, ROWS))
    batches = ParquetTable(tmp_path / "batches").to_table()
    assert batches.column("id").equals(batches.column("same"))
    assert set(batches.column("batch").to_pylist()) == {1, 2, 3}


def test_the_attempt_is_named_id_where_no_field_is() -> None:
    attempt = TransactionAttempt(3, 1)
    assert tuple_class(Fields(word=str), "spout", "default")(attempt, ("dog",))["id"] == attempt
    own = tuple_class(Fields(word=str, id=int), "spout", "default")(attempt, ("dog", 7))
    assert (own["id"], own[0], own.attempt, own[2]) == (7, attempt, attempt, 7)


class Largest(DataFrameBolt):
    def execute_dataframe(self, frame: Any) -> Any:
        return frame.groupBy("id", "_id").agg({"attempt": "max"}).withColumnRenamed("max(attempt)", "attempt")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(id=int, _id=str, attempt=int))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("runner", ["spread"], indirect=True)
def test_a_field_named_id_goes_through_spark(runner: Any, tmp_path: Path) -> None:
    b = TransactionalTopologyBuilder("ids", "spout", MemoryTransactionalSpout({0: ROWS}, FIELDS, 12))
    b.set_bolt("pass", Pass(), 2).fields_grouping("spout", Fields("id"))
    b.set_bolt("largest", Largest(), 2).shuffle_grouping("pass")
    table = ParquetTable(tmp_path / "largest")
    b.set_bolt("out", AppendCommitter(table), 2).fields_grouping("largest", Fields("id"))
    run = start(b.build(), runner)
    run.wait_until_caught_up(180)
    run.stop(60)
    assert sorted(table.to_table().to_pylist(), key=lambda row: row["id"]) == [
        {"id": key, "_id": "x", "attempt": 9 + key} for key in range(3)
    ]
