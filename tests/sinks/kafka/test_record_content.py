"""The JSON that a sink writes without a codec."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pyarrow as pa
import pytest

from framework.errors import TopologyError
from framework.topology import Fields
from ratchet import Json, Pipeline
from sinks.kafka.record_content import Part

MOMENT = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)
PLACE = pa.struct([("at", pa.timestamp("us", "UTC")), ("raw", pa.list_(pa.binary()))])


def test_lists_and_structs_are_written_as_they_are_in_json() -> None:
    rows: list[dict[str, Any]] = [
        {"items": [1, None, 2], "place": {"at": MOMENT, "raw": [b"a"]}},
        {"items": [], "place": {"at": None, "raw": None}},
        {"items": None, "place": None},
    ]
    schema = pa.schema([("items", pa.list_(pa.int64())), ("place", PLACE)])
    value, fields = Part("value", ["items", "place"], None), Fields.of_schema(schema)
    value.check("out", fields)
    written = value.column(fields, pa.RecordBatch.from_pylist(rows, schema), "topic 't'")
    assert [json.loads(each) for each in written.to_pylist()] == [
        {"items": [1, None, 2], "place": {"at": "2026-01-02T03:00:00.000000Z", "raw": ["YQ=="]}},
        {"items": [], "place": {"at": None, "raw": None}},
        {"items": None, "place": None},
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (pa.list_(pa.timestamp("ns")), r"column 'x': timestamp\[ns\] is finer than JSON keeps"),
        (pa.struct([("y", pa.month_day_nano_interval())]), r"column 'x\.y': JSON cannot hold month_day_nano_interval"),
        (pa.map_(pa.string(), pa.int64()), "column 'x': JSON cannot hold map"),
    ],
)
def test_what_json_cannot_hold_inside_them_is_refused(kind: pa.DataType, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        Part("value", ["x"], None).check("out", Fields.of({"x": kind}))


def test_a_pipeline_writes_the_lists_that_it_reads() -> None:
    shop = Pipeline("shop")
    orders = shop.read_kafka("orders", value=Json(order=str, items=list[int]), bootstrap_servers="127.0.0.1:1")
    orders.to_kafka("copies", key="order")
    rows = [{"order": "a", "items": [1, 2]}]
    assert list(shop.test({"orders": rows})["copies"]) == rows
