"""Kept consumers hand out what was planned, or an error, whatever becomes of the log (C26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.consumer import range_consumer as kafka_session
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from tests.kit.searching import first_seed
from tests.simulation.sessions import SessionsWorld, SimConsumer, SimMessage, SimQueues, instead_of_kafka, run_sessions

SCHEDULES = 1_500
#: Each mutation shows in about one schedule of ten.
SCHEDULES_PER_MUTATION = 1_000


@pytest.mark.slow
@pytest.mark.rule("C26")
@pytest.mark.parametrize("reader", ["python", "native"])
def test_every_batch_is_what_was_planned_while_logs_lose_their_ends_and_grow_again(seed: int, reader: str) -> None:
    truncations = losses = 0
    for number in range(seed, seed + SCHEDULES):
        wrong, world = run_sessions(number, reader)
        assert wrong is None, f"run_sessions({number}, {reader!r}): {wrong}"
        truncations, losses = truncations + world.truncations, losses + world.lost
    assert truncations > SCHEDULES and losses


@pytest.mark.rule("C26")
@pytest.mark.parametrize(
    ("reader", "target", "name", "replacement"),
    [
        ("python", Range, "of_same_log", lambda self, other: True),
        ("python", kafka_session, "_check_epochs", lambda *arguments: None),
        ("python", SimConsumer, "seek", lambda self, position: None),
        ("native", Range, "of_same_log", lambda self, other: True),
        ("native", SimQueues, "checks_epochs", False),
        ("native", SimConsumer, "seek", lambda self, position: None),
    ],
    ids=[
        "what was fetched for another epoch is kept",
        "records of a later epoch are taken",
        "the broker is not asked about the log",
        "what was fetched for another epoch is kept, native",
        "records of a later epoch are taken, native",
        "the broker is not asked about the log, native",
    ],
)
def test_the_simulator_notices_each_check_that_is_taken_out_of_the_sessions(
    reader: str, target: Any, name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(target, name, replacement)
    first_seed(range(seed, seed + SCHEDULES_PER_MUTATION), lambda each: run_sessions(each, reader)[0] is not None)


@pytest.mark.rule("C26")
def test_an_answer_with_records_of_an_unassigned_partition_adds_none_to_the_others() -> None:
    """A partition that is no longer read was fetched ahead, and lost its end:
    its record and the error come in one answer.
    """
    world = SessionsWorld(0)
    answers = [
        [SimMessage(0, 0, record=1), SimMessage(1, 0, record=2)],
        [SimMessage(0, 1, record=3), SimMessage(0, 2, failure=KafkaError._AUTO_OFFSET_RESET)],
        [SimMessage(1, 1, record=4)],
    ]

    class Scripted(SimConsumer):
        def consume(self, most: int, timeout_s: float) -> list[SimMessage]:
            return answers.pop(0)

    with instead_of_kafka(lambda conf: Scripted(world), world):
        session = KafkaSession(KafkaSettings("simulated:9092", None), "group")
        both = {("topic", 0): Range(0, 1), ("topic", 1): Range(0, 1)}
        assert records_of(session, both) == [1, 2]
        assert records_of(session, {("topic", 1): Range(1, 2)}) == [4]


def records_of(session: KafkaSession, ranges: dict[tuple[str, int], Range]) -> list[int]:
    found: list[Any] = [message for chunk in session.read(ranges) for message in chunk.messages]
    return [each.record for each in found]
