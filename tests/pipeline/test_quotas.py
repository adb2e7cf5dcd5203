"""A topology whose clients the broker slows down by quotas: no record is lost or written twice."""

from __future__ import annotations

import os

import pytest

from framework import TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import KafkaSink
from spouts import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.oracle import read_topics
from tests.kit.quotas import limit_client
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.4")]
RECORD_BYTES = 10_000


@pytest.mark.slow
@pytest.mark.rule("C18")
@pytest.mark.parametrize("spout", [OpaqueKafkaTransactionalSpout, KafkaTransactionalSpout])
@pytest.mark.parametrize(("records", "bytes_per_s", "timeout_s"), [(500, 250_000, 12), (150, 50_000, 8)])
def test_quotas_lose_and_repeat_no_record(
    topics: Topics,
    name: str,
    spout: type[OpaqueKafkaTransactionalSpout | KafkaTransactionalSpout],
    records: int,
    bytes_per_s: int,
    timeout_s: int,
) -> None:
    """All records together take longer than the timeout of a batch at this rate, so that attempts
    time out, until the batches are smaller, or the attempts have more time."""
    out = f"{name}-out"
    topics.create(name)
    topics.create(out)
    sent = [f"{each} {os.urandom(RECORD_BYTES // 2).hex()}".encode() for each in range(records)]
    # With batches of 1 MB no attempt succeeds (ADR 111).
    producer = topics.producer(batch_size=100_000)
    for value in sent:
        producer.produce(name, value, partition=0)
    producer.arrived()
    for key in ("consumer_byte_rate", "producer_byte_rate"):
        limit_client(topics.bootstrap_servers, name, key, bytes_per_s)
    settings = {"client.id": name}
    builder = TransactionalTopologyBuilder(
        name,
        "spout",
        spout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), settings=settings),
    )
    sink = KafkaSink(out, value="value", bootstrap_servers=topics.bootstrap_servers, settings=settings)
    builder.set_bolt("sink", sink).global_grouping("spout")
    with submit(builder.build(), {"topology.message.timeout.secs": timeout_s}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[bytes | None] = []
    read_topics(topics.bootstrap_servers, [out], lambda message: found.append(message.value()))
    assert found == sent
