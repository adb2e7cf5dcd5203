"""Sinks whose keys and values name a schema of a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.transactions import MemoryStore
from integration import RegistryServer
from sinks import KafkaSink
from spouts import (
    CompressedCodec,
    MemoryTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
    RegistryAvroCodec,
    RegistryJsonCodec,
)
from tests.kit.oracle import read_topics
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.behaviour("2.9"), pytest.mark.integration]

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}, {"name": "n", "type": "long"}]}
FIELDS = Fields(id=str, n=int, gone=bool)
ROWS = [["a", 1, False], ["b", None, True], ["c", 3, None]]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "registry") as server:
        yield server


def topology(sink: KafkaSink, fields: Fields = FIELDS, rows: Any = ROWS) -> Any:
    spout = OpaqueMemoryTransactionalSpout({0: rows}, fields, 2)
    builder = TransactionalTopologyBuilder("schemas", "spout", spout)
    builder.set_bolt("out", sink).global_grouping("spout")
    return builder.build()


@pytest.mark.slow
def test_the_driver_registers_and_the_records_name_the_schema(
    registry: RegistryServer, topics: Topics, name: str
) -> None:
    target = topics.create(name)
    value = RegistryAvroCodec(registry.url, schema=ORDER, register=True)
    key = CompressedCodec(RegistryAvroCodec(registry.url, schema="string", register=True), "gzip")
    sink = KafkaSink(
        target,
        value=["id", "n"],
        value_codec=value,
        key="id",
        key_codec=key,
        tombstone="gone",
        bootstrap_servers=topics.bootstrap_servers,
        marker_topic=f"{name}-markers",
    )
    with submit(topology(sink), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [target], found.append)
    read = RegistryAvroCodec(registry.url, subject=f"{target}-value").decode([each.value() for each in found])
    assert read.to_pylist() == [{"id": "a", "n": 1}, {"id": None, "n": None}, {"id": "c", "n": 3}]
    assert key.decode([each.key() for each in found]).to_pydict() == {"value": ["a", "b", "c"]}
    asked = registry.requests
    assert [asked[f"/subjects/{target}-{part}/versions"] for part in ("key", "value")] == [1, 1]
    assert sum(asked.values()) < 20  # and not once per batch or row


@pytest.mark.parametrize("many", [False, True])
def test_a_refused_schema_ends_the_start(registry: RegistryServer, topics: Topics, name: str, many: bool) -> None:
    target = topics.create(name)
    registry.register(f"{target}-value", {**ORDER, "fields": ORDER["fields"][:1]})
    registry.check_compatibility(f"{target}-value")
    codec = RegistryAvroCodec(registry.url, schema=ORDER, register=True)
    where: dict[str, Any] = {"topic_from": "id", "topics": [target]} if many else {"topic": target}
    sink = KafkaSink(**where, value=["id", "n"], value_codec=codec, bootstrap_servers=topics.bootstrap_servers)
    with pytest.raises(ConfigError, match=f"refuses .*subject '{target}-value': .*'n' at path '/fields/1'"):
        submit(topology(sink), {}, MemoryStore(), "local")
    assert f"/subjects/{target}-value/versions/2" not in registry.requests


def test_a_subject_that_depends_on_the_rows_is_refused_by_the_builder() -> None:
    codec = RegistryAvroCodec("http://localhost:1", schema=ORDER)
    with pytest.raises(TopologyError, match="KafkaSink: value_codec: .* is not known before there are rows"):
        topology(KafkaSink(topic_from="id", value=["id", "n"], value_codec=codec))


def test_rows_are_checked_without_a_registry_where_nothing_is_written(tmp_path: Path) -> None:
    """As ``simulate`` does."""
    codec = RegistryJsonCodec(
        "http://localhost:1",
        schema={"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}},
        register=True,
    )
    sink = KafkaSink("t", value=["n"], value_codec=codec)
    fields = Fields(n=int)
    builder = TransactionalTopologyBuilder("schemas", "spout", MemoryTransactionalSpout({0: []}, fields, 1))
    builder.set_bolt("out", sink).global_grouping("spout")
    builder.build()
    table: Any = sink.substitute(tmp_path / "table")
    table._sink.check_encoding(pa.record_batch([pa.array([1])], names=["n"]))
    with pytest.raises(BadRecordError, match="n: -1 is less than the minimum"):
        table._sink.check_encoding(pa.record_batch([pa.array([-1])], names=["n"]))
