"""Kafka spouts with a stream per topic: each record is decoded as its topic's stream says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import structlog

from framework import Fields, TopologyBuilder, TopologyContext, TransactionAttempt
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.topology import DEAD_LETTER_STREAM, OnStream, OutputFieldsDeclarer, ReadCounts
from framework.topology.spouts import LEFT_OUT
from integration import RegistryServer
from sinks import DeadLetterTopic
from spouts import (
    AvroCodec,
    JsonCodec,
    KafkaSpout,
    KafkaTransactionalSpout,
    OpaqueKafkaTransactionalSpout,
    RegistryAvroCodec,
    TextCodec,
    TopicStream,
)
from spouts.codecs.bad_records import BadRecord, BadRecordShares
from spouts.codecs.codec import Values
from spouts.kafka.consumer import record_chunk
from spouts.kafka.decoding import RecordDecoder
from spouts.kafka.topic_streams import checked_streams
from tests.kit.avro import encoded, framed
from tests.kit.core_parts import Rich, Stepped, ack, seen
from tests.kit.own_logs import own_logs
from tests.kit.plans import Plan
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.spouts.kafka.test_core import until

CONTEXT = TopologyContext("t", "spout", 0, 1)
PAYMENT = {
    "type": "record",
    "name": "Payment",
    "fields": [{"name": "number", "type": "long"}, {"name": "paid", "type": "long"}],
}
ORDER = Fields(number=int, customer=str)


def order(number: int) -> bytes:
    return b'{"number": %d, "customer": "c%d"}' % (number, number % 3)


def payments(*numbers: int) -> list[bytes]:
    return encoded(PAYMENT, *({"number": number, "paid": number * 10} for number in numbers))


class Shop:
    """Two topics, of orders in JSON and of payments in Avro, with two partitions each."""

    def __init__(self, topics: Topics, name: str) -> None:
        self.topics, self.orders, self.payments = topics, f"{name}-orders", f"{name}-payments"
        for topic in (self.orders, self.payments):
            topics.create(topic, 2)
        for partition in range(2):
            topics.send(self.orders, [order(number) for number in range(partition, 20, 2)], partition)
            topics.send(self.payments, payments(*range(partition, 10, 2)), partition)

    def streams(self, *, on_bad_order: Any = None, on_bad_payment: Any = None) -> dict[str, TopicStream]:
        return {
            "orders": TopicStream(JsonCodec(ORDER), topic=self.orders, on_bad_record=on_bad_order),
            "payments": TopicStream(
                AvroCodec(PAYMENT), topic=self.payments, metadata=["offset"], on_bad_record=on_bad_payment
            ),
        }

    def spout(self, kind: Any = OpaqueKafkaTransactionalSpout, **options: Any) -> Any:
        options.setdefault("streams", self.streams())
        return kind(bootstrap_servers=self.topics.bootstrap_servers, **options)


@pytest.fixture
def shop(topics: Topics, name: str) -> Shop:
    return Shop(topics, name)


def plan(source: Any, previous: Plan | None = None) -> Plan:
    planner = source.planner({}, CONTEXT)
    try:
        made: Plan | None = planner.plan(previous or {})
    finally:
        planner.close()
    assert made is not None
    return made


def read(source: Any, ranges: Plan) -> tuple[dict[str, list[dict[str, Any]]], ReadCounts]:
    """The rows of each stream, and what was counted."""
    reader = source.reader({}, CONTEXT)
    found: dict[str, list[dict[str, Any]]] = {}
    for rows in reader.read_all(TransactionAttempt(1, 1), ranges):
        assert isinstance(rows, OnStream)  # there is no default stream
        found.setdefault(rows.stream, []).extend(rows.batch.to_pylist())
    reader.close()
    return found, reader.counts


# --- what a spout can be given --------------------------------------------------------------------

TEXT = TextCodec()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": {}}, "streams must be a mapping of streams to codecs, and not empty"),
        ({"streams": ["orders"]}, "streams must be a mapping"),
        (
            {"streams": {"a": TEXT}, "topics": ["a"]},
            r"streams=\{...\} names the topics: leave topics= and pattern= out",
        ),
        ({"streams": {"a": TEXT}, "pattern": "a.*"}, "leave topics= and pattern= out"),
        ({"streams": {"a": TEXT}, "codec": TEXT}, "has a codec for each topic: leave codec= out"),
        ({"streams": {"a": "json"}}, r"streams\['a'\]: give a Codec or a TopicStream.*not 'json'"),
        ({"streams": {"a": TopicStream("json")}}, r"streams\['a'\]: give a Codec"),  # type: ignore[arg-type]
        ({"streams": {"a/b": TEXT}}, "'a/b' is not a Kafka topic name"),
        ({"streams": {"a": TopicStream(TEXT, topic="b/c")}}, "'b/c' is not a Kafka topic name"),
        ({"streams": {"a": TEXT, "b": TopicStream(TEXT, topic="a")}}, "streams 'a' and 'b' are both of topic 'a'"),
        ({"streams": {DEAD_LETTER_STREAM: TEXT}}, "cannot be called 'dead_letters'"),
        (
            {"streams": {"a": TopicStream(TEXT, metadata=["size"])}},
            r"streams\['a'\]: metadata field 'size' is not known",
        ),
        ({"streams": {"a": TopicStream(TEXT, on_bad_record="drop")}}, r"streams\['a'\]: on_bad_record must be"),  # type: ignore[arg-type]
        ({"streams": {"a": TEXT}, "key_codec": TextCodec("value")}, r"streams\['a'\]: 'value' is both"),
    ],
)
@pytest.mark.parametrize("kind", [KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, KafkaSpout])
def test_streams_that_cannot_be_are_refused_by_name(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(bootstrap_servers="127.0.0.1:1", **options)


def test_dead_letters_are_wanted_as_soon_as_one_stream_has_them() -> None:
    streams = {"a": TEXT, "b": TopicStream(TEXT, on_bad_record="dead_letter")}
    with pytest.raises(ConfigError, match="needs dead_letters="):
        OpaqueKafkaTransactionalSpout(streams=streams, bootstrap_servers="127.0.0.1:1")
    spout = OpaqueKafkaTransactionalSpout(
        streams=streams, dead_letters=DeadLetterTopic("bad"), bootstrap_servers="127.0.0.1:1"
    )
    assert set(declared(spout)) == {"a", "b", DEAD_LETTER_STREAM}
    assert spout.has_dead_letters
    every = {name: TopicStream(TEXT, on_bad_record="skip") for name in "ab"}
    spout = OpaqueKafkaTransactionalSpout(
        streams=every,
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTopic("bad"),
        bootstrap_servers="127.0.0.1:1",
    )
    assert not spout.has_dead_letters  # only records that a bolt refuses


def declared(spout: Any) -> Mapping[str, Fields]:
    declarer = OutputFieldsDeclarer("spout")
    spout.declare_output_fields(declarer)
    return declarer.streams


@pytest.mark.parametrize("kind", [KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, KafkaSpout])
def test_each_stream_has_the_fields_of_its_codecs_and_there_is_no_other(kind: Any) -> None:
    spout = kind(
        streams={
            "orders": TopicStream(JsonCodec(ORDER), key_codec=TextCodec("who")),
            "payments": AvroCodec(PAYMENT),
        },
        metadata=["offset"],
        bootstrap_servers="127.0.0.1:1",
    )
    for copy in (spout, cloudpickle.loads(cloudpickle.dumps(spout))):
        assert {name: list(fields) for name, fields in declared(copy).items()} == {
            "orders": ["number", "customer", "who", "offset"],
            "payments": ["number", "paid", "offset"],
        }
    with pytest.raises(ConfigError, match="several streams: orders, payments; name one"):
        spout.output_fields()


def test_a_bolt_that_names_no_stream_is_told_which_there_are() -> None:
    builder = TopologyBuilder("t")
    builder.set_spout("spout", KafkaSpout(streams={"a": TEXT, "b": TEXT}, bootstrap_servers="127.0.0.1:1"))
    builder.set_bolt("bolt", Rich("unused", ack)).global_grouping("spout")
    with pytest.raises(
        TopologyError, match=r"stream 'default' of 'spout', which does not declare it \(declared: a, b\)"
    ):
        builder.build()


def test_a_quiet_stream_of_bad_records_is_not_hidden_by_a_busy_one() -> None:
    shares = BadRecordShares(0.1)
    shares.check(ReadCounts(streams={"busy": (1_000_000, 0), "quiet": (90, 90)}))
    with pytest.raises(BadRecordError, match="stream 'quiet': 110 of the last 110 records"):
        shares.check(ReadCounts(streams={"busy": (1_000_000, 0), "quiet": (20, 20)}))


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("kind", [KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout])
def test_each_topic_is_decoded_by_its_codec_and_a_replay_reads_the_same(shop: Shop, reader: str, kind: Any) -> None:
    source = shop.spout(kind)
    first = plan(source)
    found, counts = read(source, first)
    assert sorted(row["number"] for row in found["orders"]) == list(range(20))
    assert all(row["customer"] == f"c{row['number'] % 3}" for row in found["orders"])
    assert [row["number"] for row in found["payments"]] == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert all(row["paid"] == row["number"] * 10 for row in found["payments"])
    assert [row["offset"] for row in found["payments"]] == [0, 1, 2, 3, 4] * 2
    assert (counts.records, counts.streams) == (30, {"orders": (20, 0), "payments": (10, 0)})
    assert read(source, first)[0] == found
    assert read(cloudpickle.loads(cloudpickle.dumps(source)), first)[0] == found


@pytest.mark.slow
@pytest.mark.integration
def test_limits_are_those_of_the_batch_and_shared_by_all_topics(shop: Shop) -> None:
    source = shop.spout(batch_records_max=8)
    planned: Plan | None = {}
    sizes = []
    planner = source.planner({}, CONTEXT)
    while (planned := planner.plan(planned)) is not None:
        assert set(planned) == {f"{topic}/{number}" for topic in (shop.orders, shop.payments) for number in range(2)}
        sizes.append(planner.record_count(planned))
    planner.close()
    assert sizes == [8, 8, 8, 6]


@pytest.mark.slow
@pytest.mark.integration
def test_what_a_bad_record_does_is_said_for_each_stream(shop: Shop, reader: str) -> None:
    shop.topics.send(shop.orders, [b"no order", order(20)], 0)
    shop.topics.send(shop.payments, [b"\xff", *payments(10)], 0)

    skipping = shop.spout(streams=shop.streams(on_bad_order="skip", on_bad_payment="fail"))
    with pytest.raises(BadRecordError, match=f"topic '{shop.payments}', partition 0, offset 5"):
        read(skipping, plan(skipping))

    letters = DeadLetterTopic("bad")
    source = shop.spout(streams=shop.streams(on_bad_order="skip"), on_bad_record="dead_letter", dead_letters=letters)
    found, counts = read(source, plan(source))
    (letter,) = found[DEAD_LETTER_STREAM]
    assert (letter["topic"], letter["partition"], letter["offset"]) == (shop.payments, 0, 5)
    assert letter["value"] == b"\xff"
    assert (len(found["orders"]), len(found["payments"])) == (21, 11)
    assert counts.bad_records == 2
    assert counts.streams == {"orders": (22, 1), "payments": (12, 1)}


@pytest.mark.slow
@pytest.mark.integration
def test_records_left_out_are_dead_letters_where_their_stream_has_them(shop: Shop, reader: str) -> None:
    source = shop.spout(streams=shop.streams(on_bad_order="dead_letter"), dead_letters=DeadLetterTopic("bad"))
    ranges = {each: {**meta, LEFT_OUT: [1]} for each, meta in plan(source).items()}
    found, counts = read(source, ranges)
    assert {row["number"] for row in found["orders"]} == set(range(20)) - {2, 3}
    assert {row["number"] for row in found["payments"]} == set(range(10)) - {2, 3}
    letters = [(each["topic"], each["partition"], each["offset"]) for each in found[DEAD_LETTER_STREAM]]
    assert letters == [(shop.orders, 0, 1), (shop.orders, 1, 1)]
    assert counts.bad_records == 0


@pytest.mark.slow
@pytest.mark.integration
def test_a_range_of_a_topic_without_a_stream_is_refused(shop: Shop) -> None:
    ranges = plan(shop.spout())
    fewer = shop.spout(streams={"orders": shop.streams()["orders"]})
    with pytest.raises(ConfigError, match=f"topic '{shop.payments}' has no stream"):
        read(fewer, ranges)


@pytest.mark.slow
@pytest.mark.integration
def test_a_stream_may_get_its_schemas_from_a_registry(shop: Shop, name: str, tmp_path: Path) -> None:
    topic = shop.topics.create(f"{name}-returns")
    with RegistryServer(tmp_path / "registry") as registry:
        number = registry.register(f"{topic}-value", PAYMENT)
        shop.topics.send(topic, framed(number, *payments(1, 2)))
        codec = RegistryAvroCodec(registry.url, subject=f"{topic}-value")
        source = shop.spout(streams={"orders": shop.streams()["orders"], "returns": TopicStream(codec, topic=topic)})
        found, _ = read(source, plan(source))
    assert [row["number"] for row in found["returns"]] == [1, 2]
    assert len(found["orders"]) == 20


MISSPELT = JsonCodec(Fields(number=int, costumer=str))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_a_field_that_no_record_of_the_first_batch_has_is_told_of(shop: Shop, reader: str) -> None:
    streams = {"orders": TopicStream(MISSPELT, topic=shop.orders), "payments": shop.streams()["payments"]}
    source = shop.spout(streams=streams, settings={"reader": reader})
    planner = source.planner({}, CONTEXT)
    ranges = planner.plan({})
    _, counts = read(source, ranges)
    assert counts.absent == {"orders": {"costumer"}, "payments": frozenset()}
    with own_logs() as logs:
        planner.processed(ranges, counts, 1.0)
        planner.processed(ranges, counts, 1.0)
    planner.close()
    assert [(each["event"], each["stream"], each["fields"], each["records"]) for each in logs] == [
        ("source.field_absent", "orders", ["costumer"], 20)
    ]


@pytest.mark.slow
@pytest.mark.integration
def test_a_core_spout_tells_of_a_field_that_no_record_has(shop: Shop, name: str) -> None:
    spout = KafkaSpout([shop.orders], bootstrap_servers=shop.topics.bootstrap_servers, codec=MISSPELT, group=name)
    builder = TopologyBuilder("core")
    builder.set_spout("kafka", spout)
    builder.set_bolt("bolt", Rich(name, ack)).global_grouping("kafka")
    with structlog.testing.capture_logs() as logs:
        run = Stepped(builder.build())
        until(run, lambda: run.driver.status().components["kafka"].completed == 20)
    run.rounds.close()
    assert [each["fields"] for each in logs if each["event"] == "source.field_absent"] == [["costumer"]]


# --- record by record -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.integration
def test_a_core_spout_emits_each_topic_on_its_stream_and_its_dead_letters(shop: Shop, name: str) -> None:
    shop.topics.send(shop.payments, [b"\xff"], 1)
    shop.topics.send(shop.orders, [b"no order"], 1)
    spout = shop.spout(KafkaSpout, streams=shop.streams(on_bad_order="skip", on_bad_payment="dead_letter"), group=name)
    builder = TopologyBuilder("core")
    builder.set_spout("kafka", spout, 2)
    for stream in ("orders", "payments", DEAD_LETTER_STREAM):
        builder.set_bolt(f"bolt-{stream}", Rich(f"{name}-{stream}", ack)).global_grouping("kafka", stream)
    run = Stepped(builder.build())
    until(run, lambda: run.driver.status().components["kafka"].completed == 31)
    assert sorted(seen(f"{name}-orders").executed) == [(number, f"c{number % 3}") for number in range(20)]
    assert sorted(seen(f"{name}-payments").executed) == [(n, n * 10, n // 2) for n in range(10)]
    (letter,) = seen(f"{name}-{DEAD_LETTER_STREAM}").executed
    assert (letter[3], letter[1], letter[2]) == (shop.payments, 1, 5)
    run.rounds.close()


class _Message:
    """What a chunk asks of a message of confluent-kafka."""

    def __init__(self, offset: int, value: bytes | None, key: bytes | None = None) -> None:
        self._offset, self._value, self._key = offset, value, key

    def __len__(self) -> int:
        return len(self._value or b"")

    def value(self) -> bytes | None:
        return self._value

    def key(self) -> bytes | None:
        return self._key

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def headers(self) -> list[tuple[str, bytes | None]]:
        return [("trace", self._key)]


def test_messages_that_are_too_long_together_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_chunk, "PART_BYTES_MAX", 100)
    values = [order(number) for number in range(20)] + [None, b'{"customer": "%s"}' % (b"c" * 300), b"bad", order(20)]
    messages = [_Message(offset, value, b"key") for offset, value in enumerate(values)]
    whole = record_chunk.MessageChunk(messages)  # type: ignore[arg-type]
    parts = list(whole.parts())
    assert [each for part in parts for each in part.messages] == messages
    assert all(part.value_bytes <= 100 or len(part) == 1 for part in parts)
    assert next(record_chunk.MessageChunk(messages[:1]).parts()).messages == messages[:1]  # type: ignore[arg-type]
    assert [len(each) for each in record_chunk.MessageChunk([]).parts()] == [0]
    streams = checked_streams(
        None, codec=JsonCodec(ORDER), key_codec=None, header_codecs=None, metadata=(), on_bad_record="skip"
    )
    decoded = list(RecordDecoder(streams).decode(whole, {}))
    rows = [row for each in decoded if each.rows is not None for row in each.rows.to_pylist()]
    assert [row["number"] for row in rows] == [*range(20), None, None, 20]
    assert sum(len(each.chunk) for each in decoded if each.letters) == 1


class _Raising(TextCodec):
    """A codec with a mistake that few values show."""

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        known = {b"a": "A", b"b": "B"}
        return pa.record_batch([[known[each or b"a"] for each in values]], names=list(self.fields)), []


@pytest.mark.parametrize("part", ["value", "key", "header"])
@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_a_codec_that_raises_makes_bad_records_whichever_part_it_decodes(part: str, policy: str) -> None:
    raising, text = _Raising("raising"), TextCodec("text")
    streams = checked_streams(
        None,
        codec=raising if part == "value" else text,
        key_codec=raising if part == "key" else None,
        header_codecs={"trace": raising} if part == "header" else None,
        metadata=(),
        on_bad_record=policy,
    )
    sent = [b"a", b"z", b"b"] * 30
    chunk = record_chunk.MessageChunk([_Message(at, each, each) for at, each in enumerate(sent)])  # type: ignore[arg-type]
    if policy == "fail":
        with pytest.raises(BadRecordError, match="offset 1: .*_Raising raised KeyError: b'z'"):
            list(RecordDecoder(streams).decode(chunk, {}))
        return
    found = list(RecordDecoder(streams).decode(chunk, {}))
    rows = [row for each in found if each.rows is not None for row in each.rows.to_pylist()]
    assert [row["raising"] for row in rows] == ["A", "B"] * 30
    assert sum(len(each.chunk) for each in found if each.letters) == 30
