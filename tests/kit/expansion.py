"""The memory that records need which become much larger when they are decompressed: their batches
by the reader, or their values by ``CompressedCodec``.

``python -m tests.kit.expansion BROKERS TOPIC READER``: reads the whole topic, and prints the number
of records and the most bytes that this process had beyond what it had before. With ``codec`` as the
last argument, a topology decodes and counts the records.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, TopicPartition

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.topology import ArrowBolt
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import CompressedCodec, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

VALUE_BYTES = 50_000_000
CODEC = CompressedCodec(TextCodec(), "zstd")


def send_bombs(topics: Topics, topic: str, count: int, partitions: int) -> None:
    """Send values of 50 MB, which are 200 kB on the broker, to one partition after the other."""
    topics.create(topic, partitions, max_message_bytes="1000000")
    producer = topics.producer(compression_type="lz4", message_max_bytes=VALUE_BYTES + 1_000, linger_ms=0)
    for number in range(count):
        producer.produce(topic, b"x" * VALUE_BYTES, partition=number % partitions)
        producer.arrived(120)


def read_apart(servers: str, topic: str, reader: str, *how: str) -> tuple[int, int]:
    """Read the topic in a process of its own: (records, most bytes)."""
    command = [sys.executable, "-m", "tests.kit.expansion", servers, topic, reader, *how]
    records, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(records), int(size)


def _memory() -> int:
    """The most that this program has had. ``getrusage`` counts what its parent had, too."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


class Lengths(ArrowBolt):
    """The length of each value, as text."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield pa.record_batch({"length": pc.utf8_length(batch.column("value")).cast(pa.string())})

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"length": pa.string()}))


def counted(servers: str, topic: str, reader: str) -> int:
    """The number of whole values that a topology finds in one batch of compressed ones."""
    spout = OpaqueKafkaTransactionalSpout(
        [topic], bootstrap_servers=servers, codec=CODEC, settings={"reader": reader}, on_bad_record="skip"
    )
    builder = TransactionalTopologyBuilder(topic, "spout", spout)
    builder.set_bolt("lengths", Lengths()).shuffle_grouping("spout")
    state = OpaqueMapState(MemoryBackend(topic))
    builder.set_bolt("count", StateCommitter(state, ["length"], {"n": Count()})).global_grouping("lengths")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    ((key, row),) = state.backend.scan()
    assert key == (str(VALUE_BYTES),)
    return int(row.value[0])


def read(servers: str, topic: str, reader: str) -> int:
    """The number of records that a reader finds."""
    client = Consumer({"bootstrap.servers": servers, "group.id": "ends"})
    numbers = client.list_topics(topic).topics[topic].partitions
    ranges = {(topic, each): Range(*client.get_watermark_offsets(TopicPartition(topic, each))) for each in numbers}
    client.close()
    session = {"native": NativeSession, "python": KafkaSession}[reader](KafkaSettings(servers, {}), "g")
    records = sum(map(len, session.read(ranges, EVERYTHING)))
    session.close()
    return records


def main(servers: str, topic: str, reader: str, how: str = "") -> None:
    before = _memory()
    records = (counted if how == "codec" else read)(servers, topic, reader)
    print(records, _memory() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
