"""A topology whose clients the broker slows down by quotas: no record is lost or written twice."""

from __future__ import annotations

import os

import pytest

from framework import TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import KafkaSink
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.oracle import read_topics
from tests.kit.quotas import limit_client
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.4")]
#: All records together take longer than the timeout of a batch at this rate.
RECORDS, RECORD_BYTES, BYTES_PER_S, TIMEOUT_S = 500, 10_000, 250_000, 12


def test_quotas_lose_and_repeat_no_record(topics: Topics, name: str) -> None:
    out = f"{name}-out"
    topics.create(name)
    topics.create(out)
    sent = [f"{each} {os.urandom(RECORD_BYTES // 2).hex()}".encode() for each in range(RECORDS)]
    topics.send(name, sent)
    for key in ("consumer_byte_rate", "producer_byte_rate"):
        limit_client(topics.bootstrap_servers, name, key, BYTES_PER_S)
    settings = {"client.id": name}
    builder = TransactionalTopologyBuilder(
        name,
        "spout",
        OpaqueKafkaTransactionalSpout(
            [name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), settings=settings
        ),
    )
    sink = KafkaSink(out, value="value", bootstrap_servers=topics.bootstrap_servers, settings=settings)
    builder.set_bolt("sink", sink).global_grouping("spout")
    with submit(builder.build(), {"topology.message.timeout.secs": TIMEOUT_S}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[bytes | None] = []
    read_topics(topics.bootstrap_servers, [out], lambda message: found.append(message.value()))
    assert found == sent
