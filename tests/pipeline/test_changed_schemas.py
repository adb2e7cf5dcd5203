"""A Schema Registry that gives an id another content than before: noticed before the commit, by any
process that reads the new content."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

from framework import Fields, TopologyFailed, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import (
    Codec,
    CompressedCodec,
    OpaqueKafkaTransactionalSpout,
    RegistryAvroCodec,
    RegistryJsonCodec,
    RegistryProtobufCodec,
)
from spouts.codecs import registry_client, registry_codec
from tests.kit.avro import encoded, framed
from tests.kit.protobuf import classes, field, file_of, message
from tests.kit.registry_answers import answering, send
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("2.9"), pytest.mark.rule("C42")]

ID = 7


def avro(*names: str) -> dict[str, Any]:
    return {"type": "record", "name": "Name", "fields": [{"name": each, "type": "string"} for each in names]}


def protobuf(*messages: str) -> dict[str, Any]:
    made = [message(each, field("first", 1, "string"), field("last", 2, "string")) for each in messages]
    text = base64.b64encode(file_of(*made, name="name.proto", package="t").SerializeToString()).decode()
    return {"schema": text, "schemaType": "PROTOBUF"}


Name = classes(file_of(message("Name", field("first", 1, "string"), field("last", 2, "string")), package="t"))["t.Name"]


class Kind(NamedTuple):
    """A codec of the registry, the content of its schema before and after, and a record."""

    codec: Any
    before: dict[str, Any]
    after: dict[str, Any]
    record: bytes


NAMES = avro("first", "last")
KINDS = {
    "avro": Kind(
        lambda url: RegistryAvroCodec(url, schema=NAMES),
        {"schema": json.dumps(NAMES)},
        {"schema": json.dumps(avro("last", "first"))},
        framed(ID, *encoded(NAMES, {"first": "Ada", "last": "Lovelace"}))[0],
    ),
    "protobuf": Kind(
        lambda url: RegistryProtobufCodec(url, message=Name),
        protobuf("Name", "Other"),
        protobuf("Other", "Name"),
        framed(ID, b"\0" + Name(first="Ada", last="Lovelace").SerializeToString())[0],
    ),
    "json": Kind(
        lambda url: RegistryJsonCodec(url, fields=Fields(first=str, last=str)),
        {"schema": '{"type": "object"}', "schemaType": "JSON"},
        {"schema": '{"type": "object", "required": ["x"]}', "schemaType": "JSON"},
        framed(ID, b'{"first": "Ada", "last": "Lovelace"}')[0],
    ),
}
KINDS["avro, compressed"] = KINDS["avro"]._replace(
    codec=lambda url: CompressedCodec(RegistryAvroCodec(url, schema=NAMES), "gzip"),
    record=gzip.compress(KINDS["avro"].record),
)
GONE = {"error_code": 40403, "message": "Schema not found"}


@pytest.fixture
def content() -> dict[str, Any]:
    """The registry's answer."""
    return {}


@pytest.fixture
def url(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(registry_codec, "_PAUSES_S", (0.001, 0.001))
    status = {True: 404, False: 200}
    with answering(lambda request, _: send(request, status["error_code" in content], json.dumps(content).encode())) as (
        url,
        _,
    ):
        yield url


def become(content: dict[str, Any], new: dict[str, Any]) -> None:
    """Change the registry's content. The next process remembers nothing of the former."""
    content.clear()
    content.update(new)
    registry_codec._Writers._all.clear()
    registry_client._clients.clear()


class Runs:
    """Runs of one topology over one topic, which counts what was decoded."""

    def __init__(self, topics: Topics, name: str, folder: Path) -> None:
        self.topics, self.name, self.folder = topics, name, folder
        self.store = MemoryStore()
        topics.create(name)

    def state(self, table: str) -> OpaqueMapState:
        return OpaqueMapState(SqliteBackend(self.folder / "x.db", table))

    def catch_up(self, codec: Codec, kind: Kind, **settings: Any) -> int:
        """Send one more record. Returns the last transaction that was committed."""
        self.topics.send(self.name, [kind.record])
        spout = OpaqueKafkaTransactionalSpout(
            [self.name],
            bootstrap_servers=self.topics.bootstrap_servers,
            codec=codec,
            on_bad_record="skip",
            bad_record_share_max=None,
        )
        builder = TransactionalTopologyBuilder(self.name, "names", spout)
        count = StateCommitter(self.state("counts"), ["first", "last"], {"n": Count()})
        builder.set_bolt("count", count).global_grouping("names")
        with submit(
            builder.build(), {k.replace("_", "."): v for k, v in settings.items()}, self.store, executor="local"
        ) as run:
            run.wait_until_caught_up(PATIENCE_S)
            return int(run.status().committed_txid)


@pytest.fixture
def runs(topics: Topics, name: str, tmp_path: Path) -> Runs:
    return Runs(topics, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_content_of_an_id_ends_the_topology_before_it_commits(
    runs: Runs, url: str, content: dict[str, Any], kind: str
) -> None:
    its = KINDS[kind]
    become(content, its.before)
    assert runs.catch_up(its.codec(url), its) == 1
    become(content, its.before)
    assert runs.catch_up(its.codec(url), its) == 2

    become(content, its.after)
    with pytest.raises(TopologyFailed, match=f"schema {url} id {ID} has another content .*topology.changed.schemas"):
        runs.catch_up(its.codec(url), its)

    with capture_logs() as logs:
        assert runs.catch_up(its.codec(url), its, topology_changed_schemas="accept") == 3
    assert [each["schema"] for each in logs if each["event"] == "schema.changed"] == [f"{url} id {ID}"]
    become(content, its.after)
    assert runs.catch_up(its.codec(url), its) == 4


@pytest.mark.slow
def test_an_id_that_the_registry_has_lost_ends_the_topology(runs: Runs, url: str, content: dict[str, Any]) -> None:
    """Its records would be bad ones in the replay, and were good ones before."""
    its = KINDS["avro"]
    become(content, its.before)
    assert runs.catch_up(its.codec(url), its) == 1
    become(content, GONE)
    with pytest.raises(TopologyFailed, match=f"schema {url} id {ID} is gone"):
        runs.catch_up(its.codec(url), its)
    become(content, its.before)
    assert runs.catch_up(its.codec(url), its) == 2


def test_an_id_that_was_never_known_is_about_its_records(runs: Runs, url: str, content: dict[str, Any]) -> None:
    its = KINDS["avro"]
    become(content, GONE)
    assert runs.catch_up(its.codec(url), its) == 1
    become(content, its.before)
    assert runs.catch_up(its.codec(url), its) == 2
