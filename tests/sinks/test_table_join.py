"""Joins with the row that a table has now, in topologies written by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from framework import ArrowBolt, Fields, Topology, TransactionalTopologyBuilder
from framework.errors import BadRecordError, TopologyError
from framework.testing import crash, fail_attempt, replay, run_on
from framework.topology import FieldsGrouping, Input
from framework.transactions.run import TopologyFailed
from sinks import MemoryBackend, OpaqueMapState, TableJoiningCommitter, TransactionalMapState
from sinks.external_row_sorter import PAGE_BYTES
from sinks.join_inputs import JoinInputs
from spouts import OpaqueMemoryTransactionalSpout

ROW = Fields(kind=str, id=str, n=int, version=int)
ORDERS = Fields(id=str, number=int)
SIDES = {"left": Fields(k=str, n=int), "right": Fields(k=str, text=str)}
CUSTOMERS = Fields(id=str, name=int, version=int, gone=bool)


class Part(ArrowBolt):
    """The records of orders, or those of customers. A row of kind "gone" is a customer, too."""

    deterministic = True

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        rows = [row for row in batch.to_pylist() if (row["kind"] == "order") == (self.fields == ORDERS)]
        made = [{**row, "number": row["n"], "name": row["n"], "gone": row["kind"] == "gone"} for row in rows]
        yield pa.RecordBatch.from_pylist(made, schema=self.fields.schema())

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(self.fields)


def topology(*, customers: Fields = CUSTOMERS, state: Any = OpaqueMapState, **options: Any) -> Topology:
    builder = TransactionalTopologyBuilder("known", "records", OpaqueMemoryTransactionalSpout({0: []}, ROW, 1))
    join = TableJoiningCommitter(state(MemoryBackend()), **{"key": ["id"], "table": "name", **options})
    known = builder.set_bolt("known", join, 2)
    for name, fields in (("orders", ORDERS), ("customers", customers)):
        builder.set_bolt(name, Part(fields)).shuffle_grouping("records")
        known.fields_grouping(name, Fields("id"))
    return builder.build()


def sent(rows: list[list[Any]], *, take: int = 1, faults: Any = (), **options: Any) -> list[tuple[Any, Any]]:
    done = run_on(topology(**options), {0: rows}, take=take, faults=list(faults))
    return [(row["number"], row["name"]) for row in done.rows("known")]


FAULTS = [replay(1), crash(2, when="written"), fail_attempt(3), crash(4)]
ROWS = [
    ["order", "a", 1, 0],
    ["customer", "a", 10, 1],
    ["order", "a", 2, 0],
    ["customer", "a", 11, 2],
    ["order", "a", 3, 0],
]


def test_a_record_gets_the_row_that_its_key_has_then() -> None:
    assert sent(ROWS, faults=FAULTS) == [(1, None), (2, 10), (3, 11)]
    assert sent(ROWS, faults=FAULTS, how="inner") == [(2, 10), (3, 11)]


def test_records_of_a_transaction_get_its_last_row_whichever_came_first() -> None:
    assert sent(ROWS, take=5, faults=[replay(1)]) == [(1, 11), (2, 11), (3, 11)]


def test_a_row_with_a_lower_sequence_is_left_out_also_after_a_deletion() -> None:
    options: dict[str, Any] = {"sequence_by": "version", "deleted": "gone"}
    rows = [
        ["customer", "a", 10, 5],
        ["customer", "a", 11, 4],
        ["order", "a", 1, 0],
        ["gone", "a", 0, 6],
        ["customer", "a", 12, 5],
        ["order", "a", 2, 0],
        ["customer", "a", 13, 6],
        ["order", "a", 3, 0],
    ]
    expected = [(1, 10), (2, None), (3, 13)]
    assert sent(rows, **options) == expected
    assert sent(rows, faults=[replay(4), crash(5, when="written"), fail_attempt(6)], **options) == expected


def test_the_sequence_of_a_deleted_row_is_kept_for_a_number_of_transactions() -> None:
    options: dict[str, Any] = {"sequence_by": "version", "deleted": "gone", "keep_deletes": 2}
    rows: list[list[Any]] = [["customer", "a", 10, 5], ["gone", "a", 0, 6], *[["order", "b", n, 0] for n in range(2)]]
    done = run_on(topology(**options), {0: rows[:3]}, take=1)
    assert [row["id"] for row in done.table("known")] == ["a"]
    done = run_on(topology(**options), {0: rows}, take=1, faults=[replay(4), crash(4, when="written")])
    assert done.table("known") == []
    assert sent([*rows, ["customer", "a", 11, 1], ["order", "a", 9, 0]], **options)[-1] == (9, 11)


@pytest.mark.parametrize("row", [["order", None, 1, 1], ["customer", None, 1, 1], ["customer", "a", 1, None]])
def test_a_null_in_the_key_or_the_sequence_is_a_bad_record(row: list[Any]) -> None:
    with pytest.raises((BadRecordError, TopologyFailed), match="'id' is null|sequence 'version' is null"):
        sent([row], sequence_by="version")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "number2"}, "needs two streams: one with the field 'number2', which is the table"),
        ({"table": "id"}, "needs two streams: one with the field 'id'"),
        ({"how": "outer"}, "how is 'outer': give 'inner' or 'left'"),
        ({"sequence_by": "at"}, "needs field 'at', which 'customers' does not emit"),
        ({"deleted": "version"}, "'version' is int64, and says whether a row is deleted: make it bool"),
        ({"customers": Fields(id=str, name=int, number=int)}, "needs two streams|both have 'number'"),
        ({"customers": Fields(id=int, name=int)}, "key field 'id' is string on the left and int64 on the right"),
        ({"key": []}, "needs at least one key field"),
        ({"state": TransactionalMapState}, "needs an OpaqueMapState"),
    ],
)
def test_what_cannot_be_joined_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        topology(**options)


def test_rows_that_share_a_large_value_are_sent_in_parts() -> None:
    grouping = FieldsGrouping(Fields(k=str))
    sides = [Input(name, "default", fields, grouping) for name, fields in SIDES.items()]
    inputs = JoinInputs("join", ("k",), *sides)
    large = "x" * 900_000
    sent = list(inputs.batches(("a", n, large) for n in range(100)))
    assert [n for each in sent for n in each["n"].to_pylist()] == list(range(100))
    assert max(each.nbytes for each in sent) < 1.5 * PAGE_BYTES
