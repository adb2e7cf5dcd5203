"""A producer that gets on is waited for, however slow it is; what it has written is not written
again by a repetition."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from framework.clients.kafka_settings import KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import ConfigError, RetryableError
from sinks.kafka import delivery, writer
from sinks.kafka.delivery import Delivery, KafkaRecord
from sinks.kafka.writer import PlainWriter

RECORDS = [KafkaRecord(b"k", b"%d" % each) for each in range(4)]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class SlowProducer:
    """Answers one record in each call of ``flush``, which takes ``step_s``. ``answers``: how many
    at most; ``on_flush``: called in each."""

    def __init__(self, clock: Clock, step_s: float, answers: int = 10**6, on_flush: Callable[[], None] = lambda: None):
        self.clock, self.step_s, self.answers, self.on_flush = clock, step_s, answers, on_flush
        self.waiting: list[tuple[Any, Any]] = []
        self.written: list[bytes] = []
        self.error: KafkaError | None = None

    def produce(self, topic: str, value: bytes, *_: Any, on_delivery: Any, **__: Any) -> None:
        self.waiting.append((value, on_delivery))

    def poll(self, timeout_s: float) -> int:
        return 0

    def flush(self, timeout_s: float) -> int:
        self.clock.now += self.step_s
        self.on_flush()
        if self.waiting and self.answers > 0:
            self.answers -= 1
            value, answered = self.waiting.pop(0)
            if self.error is None:
                self.written.append(value)
            answered(self.error, KeyedMessage() if self.error is not None else None)
        return len(self.waiting)


class KeyedMessage:
    def topic(self) -> str:
        return "out"

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"value"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(delivery, "time", found)
    return found


def sent(producer: SlowProducer, traffic: Traffic) -> Delivery:
    found = Delivery(producer, traffic, ["out"])  # type: ignore[arg-type]
    for record in RECORDS:
        found.send("out", record)
    return found


def test_a_slow_delivery_is_waited_for(clock: Clock) -> None:
    producer = SlowProducer(clock, step_s=delivery.SILENCE_MAX_S - 1)
    sent(producer, Traffic(clock.monotonic)).finish()
    assert len(producer.written) == len(RECORDS)


def test_a_producer_that_sends_bytes_is_waited_for(clock: Clock) -> None:
    """One large record on a slow link: nothing is delivered for long, and bytes leave."""
    traffic, bytes_sent = Traffic(clock.monotonic), 0

    def report() -> None:
        nonlocal bytes_sent
        bytes_sent += 20_000
        traffic.report(json.dumps({"brokers": {"b": {"txbytes": bytes_sent}}}))
        if bytes_sent >= 200_000:
            producer.answers = 10

    producer = SlowProducer(clock, step_s=10.0, answers=0, on_flush=report)
    sent(producer, traffic).finish()
    assert len(producer.written) == len(RECORDS)


def test_a_producer_that_is_throttled_is_waited_for(clock: Clock) -> None:
    traffic = Traffic(clock.monotonic)
    producer = SlowProducer(clock, step_s=10.0, answers=0)

    def report() -> None:
        if clock.now == 10:
            traffic.report(json.dumps({"brokers": {"b": {"throttle": {"max": 100_000}}}}))
        if clock.now > 90:
            producer.answers = 10

    producer.on_flush = report
    sent(producer, traffic).finish()


def test_a_producer_that_does_not_get_on_fails_the_batch(clock: Clock) -> None:
    producer = SlowProducer(clock, step_s=1.0, answers=2)
    with pytest.raises(RetryableError, match="topic 'out'.*did not get on for 15 s"):
        sent(producer, Traffic(clock.monotonic)).finish()


def test_a_repetition_leaves_out_what_is_written(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [SlowProducer(clock, 1.0, answers=3), SlowProducer(clock, 1.0, answers=0), SlowProducer(clock, 1.0)]
    written = made[:]
    monkeypatch.setattr(writer, "Producer", lambda _: made.pop(0))
    plain = PlainWriter(KafkaSettings("broker:9092", None))
    for _ in range(2):
        with pytest.raises(RetryableError):
            plain.write(["out"], RECORDS, "t/sink/0", "7 digest")
    plain.write(["out"], RECORDS, "t/sink/0", "7 digest")
    assert sorted(value for each in written for value in each.written) == [record.value for record in RECORDS]
    plain.write(["out"], RECORDS, "t/sink/0", "8 digest")  # another batch of the same records is written whole
    assert len(written[-1].written) == 1 + len(RECORDS)


def test_a_batch_that_is_refused_names_the_topic_and_the_missing_key(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = SlowProducer(clock, 1.0)
    producer.error = KafkaError(KafkaError.INVALID_RECORD, "Compacted topic cannot accept message without key")
    monkeypatch.setattr(writer, "Producer", lambda _: producer)
    with pytest.raises(ConfigError, match="topic 'out', a record of 5 bytes without a key: .*give every record a key"):
        PlainWriter(KafkaSettings("broker:9092", None)).write(["out"], RECORDS, "t/sink/0", "7 digest")
