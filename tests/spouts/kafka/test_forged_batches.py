"""Batches that no client library makes, and that a broker takes: with offsets of records that are
not theirs, and with compressed streams that librdkafka reads otherwise than Kafka's own library. In
a topic with a ``compression.type`` of ``zstd``, the broker checks offsets and compresses again.
``test_unreadable_batches`` has batches that librdkafka cannot decompress in other topics."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from framework import TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.raw_batches import forged, odd_streams, produce
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration

#: Offsets relative to that of the batch: of later records, far above the log, of earlier records,
#: all the same, and in descending order.
FORGED = [(0, 1, 2, 5), (0, 1, 2, 1_000), (0, 1, 2, 2**31 - 1), (-3, -2, -1, 0), (0, 0, 0, 0), (3, 2, 1, 0)]

GOOD = [f"good-{number}" for number in range(30)]


def counts(topics: Topics, topic: str, reader: str, kind: Any, batches: list[bytes]) -> dict[str, int]:
    """How often each value counts. A topology has read everything before each of the batches is
    sent, so it is the last that a fetch returns. One good record follows each."""
    state = OpaqueMapState(MemoryBackend(topic))
    servers = topics.bootstrap_servers
    spout = kind(
        [topic], bootstrap_servers=servers, codec=TextCodec(), on_bad_record="skip", settings={"reader": reader}
    )
    builder = TransactionalTopologyBuilder(topic, "spout", spout)
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        for number, value in enumerate(GOOD):
            topics.send(topic, [value.encode()])
            if number < len(batches):
                run.wait_until_caught_up(PATIENCE_S)
                assert produce(servers, topic, batches[number]) == 0
                run.wait_until_caught_up(PATIENCE_S)
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().lost_records == 0
    return {key[0]: row.value[0] for key, row in state.backend.scan()}


KINDS = [OpaqueKafkaTransactionalSpout, pytest.param(KafkaTransactionalSpout, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_no_batch_in_a_topic_that_the_broker_compresses_changes_records_of_others(
    topics: Topics, name: str, reader: str, kind: Any
) -> None:
    topics.create(name, compression_type="zstd")
    found = counts(topics, name, reader, kind, [*map(forged, FORGED), *odd_streams().values()])
    assert {value: found.get(value) for value in GOOD} == dict.fromkeys(GOOD, 1)
    assert found["forged-3"] == len(FORGED) and found["odd-3"] == len(odd_streams())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_forged_offset_hides_no_record_of_a_later_transaction(
    topics: Topics, name: str, reader: str, kind: Any
) -> None:
    """In other topics, it can hide records of its own transaction."""
    topics.create(name)
    found = counts(topics, name, reader, kind, [*map(forged, FORGED), *map(forged, FORGED)])
    assert {value: found.get(value) for value in GOOD} == dict.fromkeys(GOOD, 1)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("last", [4, 5, 6, 7, 8, 1_000])
def test_a_range_does_not_begin_behind_a_forged_offset(topics: Topics, name: str, reader: str, last: int) -> None:
    """The consumer has fetched the batch before there were records after it. One that claims the
    very next offset takes the place of that record."""
    topics.create(name)
    topics.send(name, [b"0"])
    assert produce(topics.bootstrap_servers, name, forged((0, 1, 2, last))) == 0
    kind: Any = NativeSession if reader == "native" else KafkaSession
    session = kind(KafkaSettings(topics.bootstrap_servers, None), "g")

    def read(first: int, end: int) -> list[tuple[int, bytes]]:
        chunks = list(session.read({(name, 0): Range(first, end)}, EVERYTHING))
        values = [chunk.raw("value") for chunk in chunks]
        listed = [each.to_pylist() if isinstance(each, pa.Array) else each for each in values]
        offsets = [chunk.metadata("offset").to_pylist() for chunk in chunks]
        return list(zip(chain(*offsets), chain(*listed), strict=True))

    try:
        assert [offset for offset, _ in read(0, 5)] == [0, 1, 2, 3]
        topics.send(name, [b"%d" % number for number in range(5, 10)])
        taken = [(5, b"forged-3")] if last == 4 else [(5, b"5")]
        assert read(5, 8) == [*taken, (6, b"6"), (7, b"7")]
        assert read(8, 10) == [(number, b"%d" % number) for number in range(8, 10)]
    finally:
        session.close()
