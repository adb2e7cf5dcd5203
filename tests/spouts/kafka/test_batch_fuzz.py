"""A broker whose record batches are changed on their way: an error, or right data."""

from __future__ import annotations

import collections
import random
import time

import pytest

from spouts.kafka.consumer import range_consumer as limits
from spouts.kafka.consumer.continuous_consumers import ColumnFeed, Event, Feed, MessageFeed
from tests.kit.batch_fuzz import RECORDS, SESSIONS, LyingBroker, expected, fill, fuzz
from tests.kit.fuzzing import Counts
from tests.kit.readers import needs_native
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for
from tests.spouts.kafka.test_continuous_consumers import START, opened, rows_of

READS, FEEDS = 24, 8


@pytest.mark.slow
@pytest.mark.integration
def test_changed_batches_are_never_data(topics: Topics, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENCE_MAX_S", 5.0)
    fill(topics, name)
    counts: Counts = collections.Counter()
    for each in range(READS):
        counts += fuzz(topics.bootstrap_servers, name, seed + each)
    for reader in SESSIONS:
        assert counts[f"{reader.__name__}: DataLossError after changes"], counts


@pytest.mark.slow_for("MessageFeed")
@pytest.mark.integration
@pytest.mark.parametrize("kind", [pytest.param(ColumnFeed, marks=needs_native), MessageFeed])
def test_behind_a_damaged_batch_nothing_comes_until_the_partition_begins_again(
    topics: Topics, name: str, seed: int, kind: type[Feed]
) -> None:
    """librdkafka goes on to read somewhere behind such a batch."""
    fill(topics, name)
    for each in range(FEEDS):
        broker = LyingBroker(topics.bootstrap_servers, random.Random(seed + each))
        with opened(kind, Topics(f"127.0.0.1:{broker.port}"), name) as feed:
            feed.begin({(name, 0): START})
            values: list[bytes] = []
            later = 0

            def take(feed: Feed = feed, values: list[bytes] = values) -> list[Event]:
                chunk, events = feed.take()
                values += [] if chunk is None else [row[-3] for row in rows_of(chunk)]
                return events

            wait_for(lambda take=take, values=values: bool(take()) or len(values) == RECORDS)
            for _ in range(20):
                later += len(take())
                time.sleep(0.005)
        broker.close()
        assert not later and values == expected()[: len(values)], seed + each
