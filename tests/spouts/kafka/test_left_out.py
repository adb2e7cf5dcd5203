"""Records that the codec leaves out are read, and are no rows and no bad records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from framework import Fields, TopologyContext, TransactionAttempt
from spouts import DebeziumCodec, OpaqueKafkaTransactionalSpout
from tests.kit.topics import Topics

pytestmark = pytest.mark.integration

CONTEXT = TopologyContext("t", "spout", 0, 1)


def change(number: int, op: str = "c") -> bytes:
    row = {"id": number}
    sides = {"before": row, "after": None} if op == "d" else {"before": None, "after": row}
    return json.dumps({**sides, "source": {"lsn": number}, "op": op}).encode()


@pytest.mark.parametrize("on_bad_record", ["fail", "skip"])
def test_tombstones_and_heartbeats_are_read_and_have_no_row(topics: Topics, name: str, on_bad_record: str) -> None:
    topics.create(name)
    topics.send(name, [change(1), None, b'{"ts_ms": 1}', change(1, "d"), None, change(2), None])
    spout: Any = OpaqueKafkaTransactionalSpout(
        bootstrap_servers=topics.bootstrap_servers,
        topics=[name],
        codec=DebeziumCodec(Fields(id=int), metadata=["op"]),
        metadata=["offset"],
        on_bad_record=on_bad_record,
    )
    planner = spout.planner({}, CONTEXT)
    ranges = planner.plan({})
    planner.close()
    reader = spout.reader({}, CONTEXT)
    rows = [
        tuple(row.values()) for batch in reader.read_all(TransactionAttempt(1, 1), ranges) for row in batch.to_pylist()
    ]
    reader.close()
    assert rows == [(1, "c", 0), (1, "d", 3), (2, "c", 5)]
    assert (reader.counts.records, reader.counts.bad_records) == (7, 0)


def test_a_batch_of_tombstones_alone_has_no_rows(topics: Topics, name: str) -> None:
    topics.create(name)
    topics.send(name, [None, None])
    codec = DebeziumCodec(Fields(id=int))
    spout: Any = OpaqueKafkaTransactionalSpout(bootstrap_servers=topics.bootstrap_servers, topics=[name], codec=codec)
    planner = spout.planner({}, CONTEXT)
    ranges = planner.plan({})
    planner.close()
    reader = spout.reader({}, CONTEXT)
    assert list(reader.read_all(TransactionAttempt(1, 1), ranges)) == []
    assert (reader.counts.records, reader.counts.bad_records) == (2, 0)
    reader.close()
