"""A consumer that is not where it was placed is placed anew, but not for ever (2.6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from framework.clients.kafka_stall_detection import Traffic
from framework.errors import DataLossError, RetryableError
from spouts.kafka.consumer.adaptive_fetch_size import FetchPace
from spouts.kafka.consumer.damaged_batches import PLACED_AGAIN_MAX
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range

TP = ("orders", 3)
OUT_OF_RANGE = KafkaError._AUTO_OFFSET_RESET


class Placed:
    """A session of either reader over a consumer that only notes where it is placed."""

    def __init__(self, session: type[Any]) -> None:
        self.offsets: list[int] = []
        self.session = object.__new__(session)
        self.session._where = "nowhere"
        self.session._assigned = {}
        self.session._consumer = SimpleNamespace(incremental_unassign=lambda partitions: None)
        self.session._assignment = SimpleNamespace(begin=lambda at: self.offsets.extend(each.offset for each in at))
        self.begin(Range(10, 20))

    def begin(self, wanted: Range) -> None:
        self.session._position({TP: wanted})

    def hear(self, position: int, offset: int) -> None:
        """An event: ``offset`` is not in the log; the read is at ``position``."""
        self.session._event(TP, position, KafkaError(OUT_OF_RANGE), offset)


@pytest.fixture(params=[NativeSession, KafkaSession], ids=["native", "python"])
def placed(request: pytest.FixtureRequest) -> Placed:
    return Placed(request.param)


def test_an_event_about_another_offset_places_the_partition_anew_a_few_times_in_a_read(placed: Placed) -> None:
    for _ in range(PLACED_AGAIN_MAX):
        placed.hear(12, 99)
    assert placed.offsets == [10] + [12] * PLACED_AGAIN_MAX
    with pytest.raises(RetryableError, match="orders/3: the consumer was placed at offset 12 5 times.* offset 99"):
        placed.hear(12, 99)
    assert len(placed.offsets) == 1 + PLACED_AGAIN_MAX


def test_the_next_range_is_placed_anew_as_often(placed: Placed) -> None:
    for _ in range(PLACED_AGAIN_MAX):
        placed.hear(12, 99)
    placed.session._assigned[TP].resume = 20
    placed.begin(Range(20, 30))
    before = len(placed.offsets)
    placed.hear(20, 99)
    assert placed.offsets[before:] == [20]


def test_an_event_about_the_wanted_offset_is_lost_data(placed: Placed) -> None:
    with pytest.raises(DataLossError, match="orders/3 no longer holds offset 10"):
        placed.hear(10, 10)


def heard(topic: str, offset: int, error: KafkaError | None = None) -> Message:
    """A record, or an event, as confluent-kafka gives it."""
    return Message(topic=topic, partition=0, offset=offset, error=error)


def test_records_that_came_with_an_event_are_not_kept_beside_those_that_come_again() -> None:
    """The log was cut behind what the consumer had fetched ahead. It is placed anew at the range
    that it reads, and gets the records after that range once more, while another partition is still
    open."""
    came: list[list[Message]] = [
        [*(heard("orders", each) for each in range(6)), heard("orders", 8, KafkaError(OUT_OF_RANGE))],
        [heard("orders", each) for each in range(6)],
        [heard("payments", 0)],
    ]
    session = object.__new__(KafkaSession)
    session._where, session._assigned, session._pace = "nowhere", {}, FetchPace()
    session._traffic, session._record_bytes, session._passed = Traffic(), 100, {}
    session._consumer = SimpleNamespace(
        incremental_unassign=lambda partitions: None, consume=lambda most, wait_s: came.pop(0)
    )
    session._assignment = SimpleNamespace(begin=lambda at: None)  # type: ignore[assignment]
    orders, payments = ("orders", 0), ("payments", 0)
    (first,) = session.read({orders: Range(0, 4), payments: Range(0, 1)})
    came.append([heard("orders", 4), heard("orders", 5)])
    (second,) = session.read({orders: Range(4, 6)})
    assert [(each.topic(), each.offset()) for each in first.messages] == [
        *(("orders", offset) for offset in range(4)),
        ("payments", 0),
    ]
    assert [each.offset() for each in second.messages] == [4, 5]
