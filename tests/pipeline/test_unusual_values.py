"""Each sink writes an unusual value, or refuses it: then the record is left out, and the topology
goes on with all others (C51)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import ArrowBolt, Bolt, Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    KafkaSink,
    Max,
    MemoryBackend,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.oracle import read_topics
from tests.kit.refusing import refused
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.rule("C51"), pytest.mark.integration]

FIELDS = Fields.of(
    {
        "word": pa.string(),
        "n": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "x": pa.float64(),
        "day": pa.date32(),
        "raw": pa.binary(),
    }
)
ROWS, ODD = 8, 3
#: What the row ``ODD`` has in place of an ordinary value.
VALUES: dict[str, dict[str, Any]] = {
    "null key": {"word": None},
    "all null": dict.fromkeys(FIELDS),
    "NUL": {"word": "a\x00b"},
    "NUL in bytes": {"raw": b"a\x00\xff"},
    "long key": {"word": random.Random(1).randbytes(10_000).hex()},
    "empty": {"word": "", "raw": b""},
    "path": {"word": "../../x/%2F=\n"},
    "huge": {"n": 2**63 - 1},
    "later": {"at": 2_500_000_000_000_000_000},
    "earlier": {"at": -(2**62)},
    "later day": {"day": 2**31 - 1},
    "not a number": {"x": float("nan")},
    "infinite": {"x": float("inf")},
}


class Unusual(ArrowBolt):
    deterministic = True

    def __init__(self, which: str) -> None:
        self._changes = VALUES[which]

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        rows = [
            {"word": f"w{n % 2}", "n": n, "at": n, "x": 0.5, "day": n, "raw": b"r"}
            | (self._changes if n == ODD else {})
            for n in batch.column("n").to_pylist()
        ]
        counted = {"at": pa.int64(), "day": pa.int32()}
        columns = [
            pa.array([row[name] for row in rows], counted.get(name, FIELDS.type_of(name))).cast(FIELDS.type_of(name))
            for name in FIELDS
        ]
        yield pa.RecordBatch.from_arrays(columns, list(FIELDS))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def left_out(name: str, sink: Bolt, which: str, tasks: int = 1) -> bool:
    """Run all rows into the sink. Whether the unusual one is left out, and no other."""
    store = MemoryStore()
    spout = OpaqueMemoryTransactionalSpout({0: [[n] for n in range(ROWS)]}, Fields(n=int), 5, on_bad_record="skip")
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("unusual", Unusual(which)).shuffle_grouping("spout")
    out = builder.set_bolt("out", sink, tasks)
    out.fields_grouping("unusual", Fields("word")) if tasks > 1 else out.global_grouping("unusual")
    with submit(builder.build(), {"topology.max.attempts": 2}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found = set(refused(store, name))
    assert found <= {("0", ODD)}
    return bool(found)


@pytest.mark.each_value_once
@pytest.mark.parametrize("which", VALUES)
@pytest.mark.parametrize("key", ["word", "at", "day"])
@pytest.mark.parametrize("store", ["sqlite", "memory", "postgres", "redis"])
def test_a_state_takes_a_value_or_its_record_is_left_out(
    tmp_path: Path, name: str, postgres: Any, redis_server: Any, which: str, key: str, store: str
) -> None:
    table = name.replace("-", "_")
    backend = {
        "sqlite": lambda: SqliteBackend(tmp_path / "x.db", "t"),
        "memory": MemoryBackend,
        "postgres": lambda: PostgresBackend(postgres.dsn, table),
        "redis": lambda: RedisBackend(redis_server.url, table),
    }[store]()
    state = OpaqueMapState(backend)
    aggregates = {"count": Count(), "total": Sum("n"), "last": Max("at"), "most": Max("x"), "late": Max("day")}
    used = {each: made for each, made in aggregates.items() if made.field != key}
    odd = left_out(name, StateCommitter(state, [key], used), which, 2 if key == "word" else 1)
    rows = [row for _, row in backend.scan() if row.value is not None]
    assert sum(row.value[0] for row in rows) == ROWS - odd


@pytest.mark.each_value_once
@pytest.mark.parametrize("which", VALUES)
@pytest.mark.parametrize("partition_by", [None, ["word"], ["at"], ["day", "n"], ["x"]])
@pytest.mark.parametrize("kind", [ParquetTable, DeltaLakeTable])
def test_a_table_takes_a_value_or_its_record_is_left_out(
    tmp_path: Path, name: str, which: str, partition_by: list[str] | None, kind: type[ParquetTable | DeltaLakeTable]
) -> None:
    table = kind(tmp_path / "t", partition_by=partition_by)
    odd = left_out(name, AppendCommitter(table), which)
    assert table.to_table().num_rows == ROWS - odd


#: How a row becomes a record: ``KafkaSink``'s ``key`` and ``value``.
RECORDS: dict[str, dict[str, Any]] = {
    "JSON": {},
    "key and JSON": {"key": "word", "value": ["n", "x"]},
    "JSON as the key": {"key": ["word", "at"], "value": ["day", "raw"]},
    "fields": {"key": "raw", "value": "word"},
    "function": {"key": lambda row: row["raw"], "value": lambda row: str(row).encode()},
}


@pytest.mark.quick_for("JSON")
@pytest.mark.parametrize("which", VALUES)
@pytest.mark.parametrize("form", RECORDS)
def test_a_topic_takes_a_value_or_its_record_is_left_out(topics: Topics, name: str, which: str, form: str) -> None:
    topic = topics.create(f"{name}-out", max_message_bytes="10000")
    sink = KafkaSink(topic, bootstrap_servers=topics.bootstrap_servers, **RECORDS[form])
    odd = left_out(name, sink, which)
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [topic], found.append)
    assert len(found) == ROWS - odd
