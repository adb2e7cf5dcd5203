"""What Kafka's wire can carry is read as it was written: by both readers, in every compression."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.readers import READERS
from tests.kit.topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("reader", READERS)]

COMPRESSIONS = ["none", "gzip", "snappy", "lz4", "zstd"]
#: Any time that a producer may write: -1 (no time), the first, one of today, the year 40,000, the
#: last.
TIMES = [-1, 1, 1_700_000_000_000, 1_200_079_000_000_000, 2**63 - 1]
FOR_EVER = "9223372036854775807"
DATA = [None, b"", b"\0", b"x", b"\xff\xfe", "é".encode(), b'{"n": 1}', b"y" * 10_000]
HEADERS: list[list[tuple[str, bytes | None]]] = [
    [],
    [("h", b"1")],
    [("h", b"1"), ("h", b"2"), ("é", None), ("h", b"")],
    [("", b"")],
]

Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int | None]


def rows(number: int) -> list[Row]:
    """All values, keys, headers and times, in an order of their own."""
    chance = random.Random(number)
    made = [(value, key, chance.choice(HEADERS), chance.choice(TIMES)) for value in DATA for key in DATA]
    made += [(b"v", b"k", headers, time_ms) for headers in HEADERS for time_ms in TIMES]
    chance.shuffle(made)
    return made


def write(topics: Topics, name: str, rows: list[Row], **settings: Any) -> None:
    producer = topics.producer(linger_ms=200, **settings)
    for value, key, headers, time_ms in rows:
        producer.produce(name, value, key, partition=0, headers=headers, timestamp=time_ms)
    producer.arrived()


def read(topics: Topics, name: str, reader: str, first: int, end: int) -> Iterator[Row]:
    kind = NativeSession if reader == "native" else KafkaSession
    session = kind(KafkaSettings(topics.bootstrap_servers, None), "wire")
    try:
        for chunk in session.read({(name, 0): Range(first, end)}, EVERYTHING):
            columns = [chunk.metadata(each).to_pylist() for each in ("value", "key", "headers", "timestamp_ms")]
            for value, key, headers, time_ms in zip(*columns, strict=True):
                yield value, key, [(each["key"], each["value"]) for each in headers or []], time_ms
    finally:
        session.close()


@pytest.mark.slow
def test_every_record_is_read_as_it_was_written_in_every_compression(topics: Topics, name: str, reader: str) -> None:
    topics.create(name, message_timestamp_after_max_ms=FOR_EVER, message_timestamp_before_max_ms=FOR_EVER)
    sent: list[Row] = []
    for number, compression in enumerate(COMPRESSIONS):
        made = rows(number)
        write(topics, name, made, compression_type=compression)
        sent += made
    assert list(read(topics, name, reader, 0, len(sent))) == sent


@pytest.mark.parametrize(
    "compression", ["none", *(pytest.param(each, marks=pytest.mark.slow) for each in COMPRESSIONS[1:])]
)
def test_committed_records_are_read_around_control_records_and_aborted_ones(
    topics: Topics, name: str, reader: str, compression: str
) -> None:
    """Ranges may begin and end at a control record, or consist of them."""
    topics.create(name)
    for number in range(3):
        for end in (Producer.commit_transaction, Producer.abort_transaction):
            producer = topics.producer(transactional_id=f"{name}-{number}-{end.__name__}", compression_type=compression)
            producer.init_transactions(60)
            producer.begin_transaction()
            for which in range(3):
                producer.produce(name, b"%s %d" % (end.__name__[:6].encode(), which), partition=0)
            producer.arrived()
            end(producer, 60)
    committed = [b"commit %d" % which for which in range(3)]
    whole = [value for value, *_ in read(topics, name, reader, 0, 24)]
    assert whole == committed * 3
    assert [value for value, *_ in read(topics, name, reader, 3, 8)] == []  # a marker, and what was aborted
    assert [value for value, *_ in read(topics, name, reader, 7, 12)] == committed
    assert [value for value, *_ in read(topics, name, reader, 23, 24)] == []


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_record_of_50_mb_is_read_among_small_ones(topics: Topics, name: str, reader: str, compression: str) -> None:
    topics.create(name, max_message_bytes="60000000")
    large = random.Random(compression).randbytes(1_000_000) * 50
    sent: list[Row] = [(each, each[:3], [], 1) for each in (b"small", large, b"other", large, b"last")]
    write(topics, name, sent, compression_type=compression, message_max_bytes=60_000_000)
    assert list(read(topics, name, reader, 0, 5)) == sent
    assert list(read(topics, name, reader, 1, 2)) == sent[1:2]
