"""Tombstones of a Kafka topic delete rows, and records without values do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import UpsertCommitter
from spouts import JsonCodec, KafkaTransactionalSpout
from tests.kit.row_tables import SqliteDatabase
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("delete_when", [None, "tombstone", "name = 'gone'"])
def test_a_tombstone_deletes_a_row_and_an_empty_record_empties_it(
    topics: Topics, name: str, tmp_path: Path, delete_when: str | None
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
        metadata=["tombstone"],
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
