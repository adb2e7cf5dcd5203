"""A dead letter that does not fit is cut, and says so."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import BadRecordError
from framework.topology import Input, TopologyContext, TransactionAttempt
from framework.topology.groupings import GlobalGrouping
from framework.transactions import MemoryStore
from sinks import DeadLetterTopic, KafkaSink
from sinks.kafka import sink, writer
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.limits import TopicLimits, limits_of
from sinks.kafka.record_truncation import CUT_HEADER, fitted
from spouts import BytesCodec, JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.oracle import read_topics
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S


def size(record: KafkaRecord) -> int:
    headers = sum(len(name.encode()) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


@pytest.mark.parametrize("value", [None, b"", b"v" * 400, b"v" * 100_000])
@pytest.mark.parametrize("key", [None, b"k", b"k" * 50_000])
@pytest.mark.parametrize("error", [b"not JSON", b"e" * 600_000])
def test_every_record_fits(value: bytes | None, key: bytes | None, error: bytes) -> None:
    record = KafkaRecord(key, value, [("trace", None), ("ratchet.error", error)])
    found = fitted(record, 10_000)
    assert size(found) <= 10_000
    if size(record) <= 9_000:
        assert found == record
    else:
        assert found.headers[-1][0] == CUT_HEADER and found.headers[0] == ("trace", None)
    assert (found.value is None) == (value is None) and (found.key is None) == (key is None)


@pytest.mark.parametrize(
    "headers",
    [
        [("n" * 600_000, b"v" * 1_000)],
        [("é" * 9_000, b"v" * 5_000)],
        [("n" * 90, b"v" * 10)] * 10_000,
        [(f"h{each}", b"v" * 250) for each in range(4_000)],
    ],
)
def test_a_record_of_large_or_many_headers_fits(headers: list[tuple[str, bytes | None]]) -> None:
    own: list[tuple[str, bytes | None]] = [("ratchet.topic", b"t"), ("ratchet.error", b"not JSON")]
    found = fitted(KafkaRecord(b"k", b"v" * 400, [*headers, *own]), 10_000)
    assert size(found) + 10 * len(found.headers) <= 10_000
    assert found.headers[-3:-1] == own and found.headers[-1][0] == CUT_HEADER
    assert found.key == b"k" and found.value is not None


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("topic_bytes", ["5000", "20000000"])
def test_letters_near_the_limit_of_client_or_topic(topics: Topics, name: str, tmp_path: Path, topic_bytes: str) -> None:
    topics.create(name, max_message_bytes="2000000")
    bad = b"?" * 1_010_000
    producer = topics.producer(message_max_bytes=2_000_000)
    for value in (bad, b"? small", b'{"value": "a"}'):
        producer.produce(name, value, key=b"key", partition=0, headers=[("trace", b"7")])
    producer.arrived()
    dead = topics.create(f"{name}-dead", max_message_bytes=topic_bytes)
    runs = KafkaRuns(topics, tmp_path, name)
    letters = DeadLetterTopic(dead, bootstrap_servers=topics.bootstrap_servers)
    runs.catch_up(codec=JsonCodec(Fields(value=str)), dead_letters=letters, on_bad_record="dead_letter")
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [dead], found.append)
    large, small = sorted(found, key=lambda message: -len(message.value()))
    assert small.value() == b"? small" and CUT_HEADER not in dict(small.headers())
    assert large.key() == b"key" and bad.startswith(large.value()) and 1_000 < len(large.value()) < len(bad)
    headers = dict(large.headers())
    assert headers[CUT_HEADER] == b"value of 1010000 bytes"
    assert headers["trace"] == b"7" and headers["ratchet.offset"] == b"0"


def test_the_bound_of_a_producer_is_none_of_a_consumer() -> None:
    """librdkafka makes no consumer whose ``fetch.max.bytes`` is below it."""
    settings = KafkaSettings("127.0.0.1:1", {"message.max.bytes": 60_000_000})
    Consumer(settings.consumer("g")).close()
    assert settings.producer()["message.max.bytes"] == 60_000_000


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_record_of_50_mb_is_copied_where_client_and_topic_take_it(
    topics: Topics, name: str, compression: str
) -> None:
    source, target = (topics.create(f"{name}-{each}", max_message_bytes="60000000") for each in ("in", "out"))
    large = random.Random(compression).randbytes(1_000_000) * 50
    rows = [(b"k", large), (None, b"small"), (b"", None)]
    producer = topics.producer(message_max_bytes=60_000_000)
    for key, value in rows:
        producer.produce(source, value, key)
    producer.arrived()
    spout = OpaqueKafkaTransactionalSpout([source], codec=BytesCodec("value"), metadata=["key"])
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("out", KafkaSink(target, value="value", key="key")).global_grouping("spout")
    config = {
        "kafka.bootstrap.servers": topics.bootstrap_servers,
        "kafka.message.max.bytes": 60_000_000,
        "kafka.compression.type": compression,
    }
    with submit(builder.build(), config, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [target], found.append)
    assert [(each.key(), each.value()) for each in found] == rows


def test_the_limits_of_a_topic_are_read_once_per_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refused part of a batch asks whether they have changed."""
    reads: list[str] = []

    def limits(settings: KafkaSettings, topic: str) -> TopicLimits:
        reads.append(topic)
        return TopicLimits(1_000)

    monkeypatch.setattr(writer, "limits_of", limits)
    monkeypatch.setattr(sink, "writers", writer.Writers())
    made = KafkaSink("t", value="value", key=None, bootstrap_servers="127.0.0.1:1")
    source = Input("spout", "default", Fields.of({"value": pa.binary()}), GlobalGrouping())
    made.bind("sink", [source], 1)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"v" * 10_000], pa.binary())})
    context = TopologyContext("t", "sink", 0, 1, {}, parallelisms={})
    for attempt, expected in ((1, 2), (2, 3)):
        made.prepare({}, context, None, TransactionAttempt(1, attempt))  # type: ignore[arg-type]
        for _ in range(20):
            with pytest.raises(BadRecordError, match="larger than"):
                made.execute_arrow(batch)
        assert reads == ["t"] * expected


@pytest.mark.integration
def test_the_smaller_of_two_limits_counts(topics: Topics, name: str) -> None:
    topics.create(name, max_message_bytes="5000")
    settings = KafkaSettings(topics.bootstrap_servers, {"message.max.bytes": 4_000})
    assert limits_of(settings, name).record_bytes_max == 4_000
    assert limits_of(KafkaSettings(topics.bootstrap_servers, None), name).record_bytes_max == 5_000
