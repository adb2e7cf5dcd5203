"""Batches that no client library makes, and that a broker takes: with offsets of records that are
not theirs, and with compressed streams that librdkafka reads otherwise than Kafka's own library. In
a topic with a ``compression.type`` of ``zstd``, the broker checks offsets and compresses again.
``test_unreadable_batches`` has batches that librdkafka cannot decompress in other topics."""

from __future__ import annotations

from typing import Any

import pytest

from framework import TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.raw_batches import forged, odd_streams, produce
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration

#: Offsets relative to that of the batch: of later records, far above the log, of earlier records,
#: all the same, and in descending order.
FORGED = [(0, 1, 2, 5), (0, 1, 2, 1_000), (0, 1, 2, 2**31 - 1), (-3, -2, -1, 0), (0, 0, 0, 0), (3, 2, 1, 0)]


@pytest.mark.parametrize(
    "kind", [OpaqueKafkaTransactionalSpout, pytest.param(KafkaTransactionalSpout, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("reader", READERS)
def test_no_batch_in_a_topic_that_the_broker_compresses_changes_records_of_others(
    topics: Topics, name: str, reader: str, kind: Any
) -> None:
    """Each batch comes while the topology has read everything before, so it is the last that a
    fetch returns."""
    topic = topics.create(name, compression_type="zstd")
    state = OpaqueMapState(MemoryBackend(name))
    servers = topics.bootstrap_servers
    spout = kind(
        [topic], bootstrap_servers=servers, codec=TextCodec(), on_bad_record="skip", settings={"reader": reader}
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
    good = [f"good-{number}" for number in range(30)]
    batches = [*map(forged, FORGED), *odd_streams().values()]
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        for number, value in enumerate(good):
            topics.send(topic, [value.encode()])
            if number < len(batches):
                run.wait_until_caught_up(PATIENCE_S)
                assert produce(servers, topic, batches[number]) == 0
                run.wait_until_caught_up(PATIENCE_S)
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().lost_records == 0
    found = {key[0]: row.value[0] for key, row in state.backend.scan()}
    assert {value: found.get(value) for value in good} == dict.fromkeys(good, 1)
    assert found["forged-3"] == len(FORGED) and found["odd-3"] == len(odd_streams())
