"""Tombstones of a Kafka topic delete rows, and records without values do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import TopologyError
from framework.transactions import MemoryStore
from ratchet import Json, Pipeline, Text, sqlite
from sinks import AppendCommitter, SqliteTable, UpsertCommitter
from spouts import JsonCodec, KafkaTransactionalSpout, TextCodec, TopicStream
from tests.kit.row_tables import SqliteDatabase
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration


@pytest.mark.each_value_once
@pytest.mark.parametrize("metadata", [[], ["tombstone"]], ids=["by itself", "asked for"])
@pytest.mark.parametrize("delete_when", [None, "tombstone", "name = 'gone'"])
def test_a_tombstone_deletes_a_row_and_an_empty_record_empties_it(
    topics: Topics, name: str, tmp_path: Path, delete_when: str | None, metadata: list[str]
) -> None:
    topics.create(name, 1)
    producer = topics.producer()
    values = {1: b'{"name": "a", "n": 1}', 2: b'{"name": "b", "n": 2}', 3: b'{"name": "gone", "n": 3}'}
    for key, value in [*values.items(), (1, None), (2, b"{}"), (4, None)]:
        producer.produce(name, value, key=b'{"id": %d}' % key)
    producer.arrived()
    spout = KafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=JsonCodec(Fields(name=str, n=int)),
        key_codec=JsonCodec(Fields(id=int)),
        metadata=metadata,
        batch_records_max=2,
    )
    database = SqliteDatabase(tmp_path / "rows.db")
    committer = UpsertCommitter(database.table(stamp=None), ["id"], delete_when=delete_when)
    builder = TransactionalTopologyBuilder("rows", "spout", spout)
    builder.set_bolt("rows", committer).fields_grouping("spout", Fields("id"))
    run = submit(builder.build(), store=MemoryStore(), executor="local")
    run.wait_until_caught_up(timeout_s=PATIENCE_S)
    run.stop(timeout_s=PATIENCE_S)
    kept = [] if delete_when == "name = 'gone'" else [(3, "gone", 3)]
    assert database.rows(columns="id, name, n") == [(2, None, None), *kept]
    assert database.rows() == database.rows(columns="name, n, id")


def spout(**options: Any) -> KafkaTransactionalSpout:
    return KafkaTransactionalSpout(["orders"], bootstrap_servers="host:9092", codec=JsonCodec(Fields(n=int)), **options)


def upsert(folder: Path, key: str) -> UpsertCommitter:
    return UpsertCommitter(SqliteTable(folder / "rows.db", "rows"), [key])


@pytest.mark.parametrize(
    ("options", "key", "told"),
    [
        ({"key_codec": TextCodec("id")}, "id", ["n", "id", "tombstone"]),
        ({"metadata": ["key"]}, "key", ["n", "key", "tombstone"]),
        ({"key_codec": TextCodec("id"), "metadata": ["tombstone", "offset"]}, "id", ["n", "id", "tombstone", "offset"]),
        ({"metadata": ["offset"]}, "n", ["n", "offset"]),  # a tombstone has no key: a bad record
    ],
)
def test_the_rows_say_which_are_tombstones_where_they_have_the_records_key(
    options: Any, key: str, told: list[str], tmp_path: Path
) -> None:
    builder = TransactionalTopologyBuilder("orders", "spout", spout(**options))
    builder.set_bolt("rows", upsert(tmp_path, key)).global_grouping("spout")
    assert [*builder.build().spout.streams["default"].names] == told


def test_each_stream_is_told_apart_and_the_spout_of_the_user_is_left_alone(tmp_path: Path) -> None:
    streams = {"orders": TopicStream(JsonCodec(Fields(n=int)), key_codec=TextCodec("id")), "others": TextCodec("text")}
    given = KafkaTransactionalSpout(bootstrap_servers="host:9092", streams=streams)
    builder = TransactionalTopologyBuilder("orders", "spout", given)
    builder.set_bolt("rows", upsert(tmp_path, "id")).global_grouping("spout", "orders")
    builder.set_bolt("texts", AppendCommitter(SqliteTable(tmp_path / "rows.db", "texts"))).global_grouping(
        "spout", "others"
    )
    found = builder.build().spout.streams
    assert {name: [*fields.names] for name, fields in found.items()} == {
        "orders": ["n", "id", "tombstone"],
        "others": ["text"],
    }
    other = TransactionalTopologyBuilder("again", "spout", given)
    other.set_bolt("rows", AppendCommitter(SqliteTable(tmp_path / "a.db", "rows"))).global_grouping("spout", "orders")
    assert [*other.build().spout.streams["orders"].names] == ["n", "id"]


def test_another_bolt_does_not_get_a_field_that_it_did_not_ask_for(tmp_path: Path) -> None:
    builder = TransactionalTopologyBuilder("orders", "spout", spout(key_codec=TextCodec("id")))
    builder.set_bolt("rows", upsert(tmp_path, "id")).global_grouping("spout")
    builder.set_bolt("log", AppendCommitter(SqliteTable(tmp_path / "rows.db", "log"))).global_grouping("spout")
    with pytest.raises(TopologyError, match=r"bolt 'log' reads the same stream.*metadata=\['tombstone'\]"):
        builder.build()


def test_a_pipeline_that_upserts_what_it_reads_deletes_rows_too(tmp_path: Path) -> None:
    pipeline = Pipeline("orders")
    orders = pipeline.read_kafka("orders", bootstrap_servers="host:9092", key=Text("id"), value=Json(n=int))
    orders.latest_by("id").upsert_into(sqlite(tmp_path / "rows.db", "orders"), name="rows")
    assert "tombstone" in pipeline.build().spout.streams["default"]
