"""The memory that a reader needs for batches that become much larger when they are decompressed.

``python -m tests.kit.expansion BROKERS TOPIC READER``: reads the whole topic, and prints the number
of records and the most bytes that this process had beyond what it had before.
"""

from __future__ import annotations

import subprocess
import sys

from confluent_kafka import Consumer, TopicPartition

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession, Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.topics import Topics

VALUE_BYTES = 50_000_000


def send_bombs(topics: Topics, topic: str, count: int, partitions: int) -> None:
    """Send values of 50 MB, which are 200 kB on the broker, to one partition after the other."""
    topics.create(topic, partitions, max_message_bytes="1000000")
    producer = topics.producer(compression_type="lz4", message_max_bytes=VALUE_BYTES + 1_000, linger_ms=0)
    for number in range(count):
        producer.produce(topic, b"x" * VALUE_BYTES, partition=number % partitions)
        producer.arrived(120)


def read_apart(servers: str, topic: str, reader: str) -> tuple[int, int]:
    """Read the topic in a process of its own: (records, most bytes)."""
    command = [sys.executable, "-m", "tests.kit.expansion", servers, topic, reader]
    records, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(records), int(size)


def _memory() -> int:
    """The most that this program has had. ``getrusage`` counts what its parent had, too."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main(servers: str, topic: str, reader: str) -> None:
    client = Consumer({"bootstrap.servers": servers, "group.id": "ends"})
    numbers = client.list_topics(topic).topics[topic].partitions
    ranges = {(topic, each): Range(*client.get_watermark_offsets(TopicPartition(topic, each))) for each in numbers}
    client.close()
    made = {"native": NativeSession, "python": KafkaSession}[reader]
    before, records = _memory(), 0
    session = made(KafkaSettings(servers, {}), "g")
    for chunk in session.read(ranges, EVERYTHING):
        records += len(chunk)
    session.close()
    print(records, _memory() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
