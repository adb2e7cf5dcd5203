"""Parts of a batch, which probes for refused records read one after the other (C51)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from framework import TopologyContext, TransactionAttempt
from framework.topology.spouts import LEFT_OUT, PART_OF
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.consumer import fetched_batch_cache
from tests.kit.readers import READERS
from tests.kit.topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.rule("C51")]

CONTEXT = TopologyContext("t", "spout", 0, 1)


@pytest.mark.parametrize("kept_bytes", [fetched_batch_cache.KEPT_BYTES_MAX, 100])
@pytest.mark.parametrize("kafka_reader", READERS)
def test_a_part_has_the_records_of_its_range_whether_the_batch_is_kept_or_fetched_again(
    topics: Topics, name: str, kafka_reader: str, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_batch_cache, "KEPT_BYTES_MAX", kept_bytes)
    topics.create(name, 2)
    for partition in (0, 1):
        topics.send(name, [f"{partition}-{number}".encode() for number in range(40)], partition)
    conf = {"kafka.reader": kafka_reader}
    spout: Any = OpaqueKafkaTransactionalSpout(
        bootstrap_servers=topics.bootstrap_servers, topics=[name], codec=TextCodec(), metadata=["offset"]
    )
    planner = spout.planner(conf, CONTEXT)
    plan = planner.plan({})
    planner.close()
    chance = random.Random(1)

    def read(ranges: Any) -> list[tuple[str, int]]:
        reader = spout.reader(conf, CONTEXT)
        rows = [row for batch in reader.read_all(TransactionAttempt(1, 1), ranges) for row in batch.to_pylist()]
        assert reader.counts.records == sum(each["next_offset"] - each["first_offset"] for each in ranges.values())
        reader.close()
        return sorted((row["value"], row["offset"]) for row in rows)

    for _ in range(12):
        parts = {}
        for partition in chance.sample(sorted(plan), chance.choice([1, 2])):
            first, end = sorted(chance.sample(range(41), 2))
            bounds = {"first_offset": first, "next_offset": end}
            parts[partition] = {**plan[partition], **bounds, PART_OF: plan[partition], LEFT_OUT: [first]}
        assert read(parts) == sorted(
            (f"{partition.rpartition('/')[2]}-{offset}", offset)
            for partition, meta in parts.items()
            for offset in range(meta["first_offset"] + 1, meta["next_offset"])
        )
    assert len(read(plan)) == 80
