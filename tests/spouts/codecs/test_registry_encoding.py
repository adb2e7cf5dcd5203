"""Rows as values that name a schema of a registry: a real one, Apicurio's, and the stand-in.

Confluent's own serializers read what the codecs write, and write what the codecs read.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from framework import Fields
from framework.errors import BadRecordError, ConfigError, RetryableError, TopologyError
from integration import ApicurioServer, RegistryServer
from spouts import (
    AliasedCodec,
    AvroCodec,
    CompressedCodec,
    MessagePackCodec,
    RegistryAvroCodec,
    RegistryJsonCodec,
    RegistryProtobufCodec,
)
from spouts.codecs import writer_subjects
from spouts.codecs.encoding_codec import SchemaCodec
from tests.kit.protobuf import EVERYTHING, classes, field, file_of, message
from tests.kit.registry_answers import answering, send

pytestmark = [pytest.mark.behaviour("2.9"), pytest.mark.integration]

AnyServer = ApicurioServer | RegistryServer
WORD = {"type": "record", "name": "shop.Word", "fields": [{"name": "word", "type": "string"}]}
WIDER = {**WORD, "fields": [*WORD["fields"], {"name": "n", "type": "long"}]}
ORDER = {
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z]+$"},
        "n": {"type": "integer", "minimum": 0},
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}}},
    },
    "required": ["id"],
}
PLACE = file_of(message("Place", field("x", 1, "int64")), name="geo/place.proto", package="geo")
SHIPMENT = file_of(
    message("Other"),
    message("Shipment", field("to", 1, ".geo.Place"), nestedType=[message("Part", field("n", 1, "int32"))]),
    name="shipment.proto",
    package="shop",
    dependency=["geo/place.proto"],
)
CLASSES = classes(PLACE, SHIPMENT)
Shipment = CLASSES["shop.Shipment"]
Everything = classes(EVERYTHING)["t.Everything"]


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApicurioServer]:
    with ApicurioServer(tmp_path_factory.mktemp("apicurio")) as server:
        yield server


@pytest.fixture(params=["stand-in", pytest.param("apicurio", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> AnyServer:
    found: AnyServer = request.getfixturevalue("registry" if request.param == "stand-in" else "apicurio")
    return found


@pytest.fixture
def client(server: AnyServer) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": server.url}) as found:
        yield found


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    """A topic, and so subjects, of the test's own."""
    return request.node.name.partition("[")[0].removeprefix("test_")[:60]


def written(codec: Any, topic: str, rows: list[dict[str, Any]], part: str = "value") -> list[bytes]:
    """The values that a sink writes, in another process than the driver's."""
    batch = pa.RecordBatch.from_pylist(rows, codec.fields.schema())
    bound = codec.for_topics(part, [topic])
    bound.check_encodable(codec.fields)
    bound.check_schema()
    bound.register_schema()
    values: list[bytes] = pickle.loads(pickle.dumps(bound)).encode(batch).to_pylist()
    return values


def context(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


class TestConfluentsSerializers:
    def test_avro(self, server: AnyServer, subject: str, client: SchemaRegistryClient) -> None:
        rows = [{"word": "dog"}, {"word": "naïve ☃"}]
        codec = RegistryAvroCodec(server.url, schema=WORD, register=True)
        values = written(codec, subject, rows)
        reads = AvroDeserializer(client)
        assert [reads(each, context(subject)) for each in values] == rows
        write = AvroSerializer(client, json.dumps(WORD), conf={"auto.register.schemas": False})
        theirs = [write(each, context(subject)) for each in rows]
        assert theirs == values
        assert RegistryAvroCodec(server.url, subject=f"{subject}-value").decode(theirs).to_pylist() == rows

    def test_protobuf(self, server: AnyServer, subject: str, client: SchemaRegistryClient) -> None:
        made = [Shipment(to={"x": n}) for n in (0, 7)] + [Shipment()]
        codec = RegistryProtobufCodec(server.url, message=Shipment, register=True)
        rows = [{"to": {"x": 0}}, {"to": {"x": 7}}, {"to": None}]
        values = written(codec, subject, rows)
        reads = ProtobufDeserializer(Shipment, {}, client)
        assert [reads(each, context(subject)) for each in values] == made
        write = ProtobufSerializer(Shipment, client, conf={"auto.register.schemas": False})
        theirs = [write(each, context(subject)) for each in made]
        assert theirs == values
        assert codec.decode(theirs).to_pylist() == rows
        latest = RegistryProtobufCodec(server.url, subject=f"{subject}-value", message="shop.Shipment")
        assert latest.decode(theirs).to_pylist() == rows
        assert written(latest, "any", rows) == theirs

    def test_protobuf_of_every_type_and_within_another(
        self, server: AnyServer, subject: str, client: SchemaRegistryClient
    ) -> None:
        codec = RegistryProtobufCodec(server.url, message=Everything, register=True)
        value = written(codec, subject, [row_of_everything(codec)])[0]
        made = ProtobufDeserializer(Everything, {}, client)(value, context(subject))
        assert made == Everything(a_int64=5, color=5, many_string=["a"])
        part = Shipment.Part
        inner = RegistryProtobufCodec(server.url, message=part, register=True)
        value = written(inner, f"{subject}-part", [{"n": 3}])[0]
        write = ProtobufSerializer(part, client, conf={"auto.register.schemas": False})
        assert value == write(part(n=3), context(f"{subject}-part"))
        assert inner.decode([value]).to_pylist() == [{"n": 3}]

    def test_json(self, server: AnyServer, subject: str, client: SchemaRegistryClient) -> None:
        rows = [{"id": "a", "n": 1, "place": {"x": 0.5, "y": None}}, {"id": "b", "n": None, "place": None}]
        objects = [{"id": "a", "n": 1, "place": {"x": 0.5}}, {"id": "b"}]
        codec = RegistryJsonCodec(server.url, schema=ORDER, register=True)
        values = written(codec, subject, rows)
        reads = JSONDeserializer(json.dumps(ORDER))
        assert [reads(each, context(subject)) for each in values] == objects
        write = JSONSerializer(json.dumps(ORDER), client, conf={"auto.register.schemas": False})
        theirs = [write(each, context(subject)) for each in objects]
        assert [each[:5] for each in theirs] == [each[:5] for each in values]
        assert [json.loads(each[5:]) for each in theirs] == [json.loads(each[5:]) for each in values]
        latest = RegistryJsonCodec(server.url, subject=f"{subject}-value")
        assert latest.decode(theirs).to_pylist() == rows
        assert written(latest, "any", rows) == values


def row_of_everything(codec: RegistryProtobufCodec) -> dict[str, Any]:
    batch, _ = codec.tombstones().decode_good([b""])
    return {**batch.to_pylist()[0], "a_int64": 5, "color": "BLUE", "many_string": ["a"]}


class TestCompatibility:
    def test_a_refusal_names_subject_field_and_reason_before_the_start(self, server: AnyServer, subject: str) -> None:
        written(RegistryAvroCodec(server.url, schema=WORD, register=True), subject, [{"word": "a"}])
        server.check_compatibility(f"{subject}-value")
        codec = RegistryAvroCodec(server.url, schema=WIDER, register=True).for_topics("value", [subject])
        for refused in (codec.check_schema, codec.register_schema):
            with pytest.raises(ConfigError, match=f"refuses .*subject '{subject}-value': .*") as error:
                refused()
            said = str(error.value)
            assert "\n" not in said
            assert "fields/1" in said
            assert "'n'" in said or "[n at" in said  # the stand-in says it as Confluent's does
            assert "a new field needs a default" in said
        default = {**WIDER["fields"][1], "default": 0}  # type: ignore[dict-item]
        mended = RegistryAvroCodec(server.url, schema={**WIDER, "fields": [WORD["fields"][0], default]}, register=True)
        assert len(written(mended, subject, [{"word": "a", "n": 1}])) == 1

    def test_a_schema_that_is_not_registered_is_missed_before_the_start(self, server: AnyServer, subject: str) -> None:
        codec = RegistryAvroCodec(server.url, schema=WORD)
        for name in (subject, f"{subject}-2"):
            bound = codec.for_topics("key", [name])
            for missed in (bound.check_schema, bound.register_schema):
                with pytest.raises(
                    ConfigError, match=f"under subject '{name}-key': register it, or give register=True"
                ):
                    missed()
            written(RegistryAvroCodec(server.url, schema="string", register=True), name, [{"value": "a"}], "key")

    def test_checking_registers_nothing(self, server: AnyServer, subject: str) -> None:
        RegistryAvroCodec(server.url, schema=WORD, register=True).for_topics("value", [subject]).check_schema()
        with pytest.raises(ConfigError, match="does not know subject"):
            RegistryAvroCodec(server.url, subject=f"{subject}-value")


class TestSubjects:
    @pytest.mark.parametrize(
        ("strategy", "name"),
        [("topic", "{topic}-value"), ("record", "shop.Word"), ("topic_record", "{topic}-shop.Word")],
    )
    def test_strategies_name_the_subject(self, registry: RegistryServer, strategy: Any, name: str) -> None:
        codec = RegistryAvroCodec(registry.url, schema=WORD, register=True, subject_name_strategy=strategy)
        values = written(codec, "words", [{"word": "a"}])
        latest = RegistryAvroCodec(registry.url, subject=name.format(topic="words"))
        assert latest.decode(values).to_pylist() == [{"word": "a"}]

    def test_subjects_of_several_topics_must_agree_on_the_id(self, registry: RegistryServer) -> None:
        codec = RegistryAvroCodec(registry.url, schema=WORD, register=True).for_topics("value", ["a", "b"])
        codec.register_schema()
        assert registry.requests["/subjects/a-value/versions"] == registry.requests["/subjects/b-value/versions"] == 1
        batch = pa.record_batch([pa.array(["dog"])], names=["word"])
        assert codec.encode(batch)[0].as_py()[:5] == b"\x00\x00\x00\x00\x64"

        def answer(request: Any, number: int) -> None:
            send(request, 200, json.dumps({"id": number, "version": 1, "subject": "s", "schema": "{}"}).encode())

        with answering(answer) as (url, _):
            codec = RegistryAvroCodec(url, schema=WORD).for_topics("value", ["a", "b"])
            with pytest.raises(ConfigError, match="several ids .*1 under 'a-value', 2 under 'b-value'"):
                codec.check_schema()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"schema": WORD}, "the subject of the topic, which is not known before there are rows: give subject="),
            ({"schema": WORD, "subject_name_strategy": "topic_record"}, "which is not known before there are rows"),
            ({"schema": WORD, "subject_name_strategy": "none"}, "must be one of 'topic', 'record', 'topic_record'"),
        ],
    )
    def test_a_subject_that_cannot_be_known_is_refused(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(TopologyError, match=words):
            RegistryAvroCodec("http://localhost:1", **options).for_topics("value", [])

    def test_a_json_schema_without_a_title_has_no_record_name(self) -> None:
        untitled = {key: value for key, value in ORDER.items() if key != "title"}
        codec = RegistryJsonCodec("http://localhost:1", schema=untitled, subject_name_strategy="record")
        with pytest.raises(TopologyError, match="needs a schema with a name: give subject="):
            codec.for_topics("value", ["t"])

    def test_to_register_a_schema_must_be_given(self, registry: RegistryServer) -> None:
        registry.register("words", WORD)
        with pytest.raises(TopologyError, match="register=True registers the schema that is given"):
            RegistryAvroCodec(registry.url, subject="words", register=True)
        with pytest.raises(TopologyError, match="register=True registers a JSON Schema: give schema="):
            RegistryJsonCodec(registry.url, fields=Fields(n=int), register=True)
        with pytest.raises(TopologyError, match="decodes only, because it was given no schema"):
            RegistryJsonCodec(registry.url, fields=Fields(n=int)).check_encodable(Fields(n=int))


def test_tasks_ask_once_per_process_and_never_register(registry: RegistryServer) -> None:
    bound = RegistryAvroCodec(registry.url, schema=WORD, register=True).for_topics("value", ["once"])
    pickled = pickle.dumps(bound)  # as it travels, if the driver has not asked yet
    bound.register_schema()
    batch = pa.record_batch([pa.array(["dog"])], names=["word"])
    before = registry.requests["/subjects/once-value"]
    values = {pickle.loads(pickled).encode(batch)[0].as_py() for _ in range(5)}
    assert values == {bound.encode(batch)[0].as_py()}
    assert registry.requests["/subjects/once-value"] <= before + 1
    assert registry.requests["/subjects/once-value/versions"] == 1


def test_a_row_that_does_not_fit_is_refused_before_the_registry_is_asked() -> None:
    codec = RegistryAvroCodec("http://localhost:1", schema=WORD, subject="s")
    with pytest.raises(BadRecordError, match="RegistryAvroCodec cannot encode the row: word is null"):
        codec.encode(pa.record_batch([pa.array([None], pa.string())], names=["word"]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "A"}, "id: 'A' does not match"),
        ({"id": "a", "n": -1}, "n: -1 is less than the minimum of 0"),
        ({"id": None}, "id: None is not of type 'string'"),
        ({"id": "a", "place": {"x": float("nan"), "y": None}}, "Out of range float values"),
    ],
)
def test_a_row_that_the_json_schema_does_not_validate_is_refused(row: dict[str, Any], words: str) -> None:
    codec = RegistryJsonCodec("http://localhost:1", schema=ORDER, subject="s").without_registry()
    batch = pa.RecordBatch.from_pylist([row], pa.schema([codec.fields.schema().field(name) for name in row]))
    with pytest.raises(BadRecordError, match=words):
        codec.encode(batch.cast(pa.schema([each.with_nullable(True) for each in batch.schema])))


def test_a_required_property_that_the_rows_do_not_have_is_missed_before_the_start() -> None:
    codec = RegistryJsonCodec("http://localhost:1", schema=ORDER, subject="s")
    with pytest.raises(TopologyError, match="the JSON Schema requires 'id', and the rows do not have it"):
        codec.check_encodable(Fields(n=int))


def test_a_codec_around_a_registry_codec_finds_its_schema(registry: RegistryServer) -> None:
    inner = RegistryAvroCodec(registry.url, schema=WORD, register=True)
    codec = CompressedCodec(AliasedCodec(inner, {"text": "word"}), "gzip")
    assert written(codec, "around", [{"text": "dog"}])
    assert codec.decode(written(codec, "around", [{"text": "dog"}])).to_pylist() == [{"text": "dog"}]
    plain: Any = CompressedCodec(MessagePackCodec(Fields(n=int)), "gzip")
    assert plain.for_topics("value", []) is plain.without_registry() is plain
    assert not isinstance(AvroCodec(WORD), SchemaCodec)


def test_a_registry_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_subjects, "_PAUSES_S", (0.001, 0.001))
    codec = RegistryAvroCodec({"url": "http://127.0.0.1:1", "max.retries": 0}, schema=WORD, subject="s")
    for ask in (codec.check_schema, codec.register_schema):
        with pytest.raises(RetryableError, match="does not answer"):
            ask()


@pytest.mark.parametrize(("status", "code"), [(409, 409), (422, 42201), (422, 42205)])
def test_a_refusal_is_one_short_line_whatever_the_registry_says(status: int, code: int, tmp_path: Path) -> None:
    def answer(request: Any, _: int) -> None:
        if request.path.startswith("/subjects/s?"):
            send(request, 404, b'{"error_code": 40403, "message": "no"}')
        else:
            send(request, status, json.dumps({"error_code": code, "message": "no:\n" + "x" * 10_000}).encode())

    with answering(answer) as (url, asked):
        codec = RegistryAvroCodec(url, schema=WORD, subject="s", register=True)
        for ask in (codec.check_schema, codec.register_schema):
            with pytest.raises(ConfigError, match=f"{url} refuses .*subject 's': no: x") as error:
                ask()
            assert len(str(error.value)) < 1_000
            assert "\n" not in str(error.value)
        assert len(asked) == 4  # nothing is repeated
