"""Fills topics with the examples' records."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import KafkaError, Message, Producer

from framework.errors import RetryableError


def send(
    bootstrap_servers: str,
    topic: str,
    records: Iterable[tuple[str | bytes, str | bytes | None, int]],
    seconds: float = 60,
) -> int:
    """Send records (value, key, partition). Returns their number when all have arrived. Raises
    ``RetryableError`` if some have not arrived within ``seconds``."""
    refused: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            refused.append(error)

    settings = {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 20}
    producer = Producer({**settings, "on_delivery": delivered})
    sent = 0
    for value, key, partition in records:
        while True:
            try:
                producer.produce(topic, value, key, partition)
                break
            except BufferError:
                producer.poll(0.1)
        sent += 1
    left = producer.flush(seconds)
    if refused or left:
        reason = refused[0].str() if refused else f"no answer for {seconds:g} s"
        raise RetryableError(
            f"{len(refused) + left} of {sent} records did not arrive in topic {topic!r} of Kafka at {bootstrap_servers}: {reason}"
        )
    return sent
