"""``ratchet topic``: creates, fills and shows topics, for first steps and inspection; records of a
pipeline are written by your own producers."""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.commands.exit_status import exit_codes
from framework.commands.options import AsJson, ConfigFile, Overrides
from framework.commands.value_format import text_of
from framework.config import Config
from framework.errors import ConfigError, RetryableError

_TIMEOUT_S = 30.0

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Create a topic, write to it, look into it."
)

Name = Annotated[str, typer.Argument(metavar="TOPIC")]
Brokers = Annotated[
    str | None, typer.Option("--kafka", help="host:port of a broker; by default kafka.bootstrap.servers.")
]


@app.command()
def create(
    topic: Name,
    partitions: Annotated[int, typer.Option("--partitions", min=1, max=10_000)] = 1,
    replication: Annotated[
        int | None,
        typer.Option("--replication", min=1, help="Copies of each partition; by default the broker's choice."),
    ] = None,
    kafka: Brokers = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Create a topic."""
    with _connected(kafka, config, overrides) as (settings, _):
        admin = AdminClient(settings.admin())
        wanted = NewTopic(topic, num_partitions=partitions, replication_factor=replication or -1)
        admin.create_topics([wanted], request_timeout=_TIMEOUT_S)[topic].result()
    typer.echo(f"topic {topic} has {partitions} partition{'s' if partitions > 1 else ''}")


@app.command()
def produce(
    topic: Name,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="One record a line; by default standard input.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="The field of the JSON on each line that is the record's key.")
    ] = None,
    kafka: Brokers = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Write the lines of a file, or of standard input, to a topic. Empty lines are skipped."""
    with _connected(kafka, config, overrides) as (settings, errors):
        if file is not None and (not file.exists() or file.is_dir()):  # a pipe works like a file
            raise ConfigError(f"{file}: {'is a folder' if file.is_dir() else 'the file does not exist'}")
        _partitions(AdminClient(settings.admin()), topic)
        producer = Producer({**settings.producer(), "error_cb": errors.on_error})
        failed: list[str] = []
        written = 0
        with file.open("rb") if file is not None else sys.stdin.buffer as lines:
            for number, line in enumerate(lines, 1):
                value = line.rstrip(b"\r\n")
                if not value:
                    continue
                _send(producer, topic, value, _key_in(value, key, number), failed)
                written += 1
        left = producer.flush(_TIMEOUT_S)
        if left or failed:
            reasons = "; ".join(dict.fromkeys(failed)) or f"no answer for {_TIMEOUT_S:g} s{errors.reason()}"
            raise RetryableError(f"{left + len(failed)} of {written} records were not written: {reasons}")
    typer.echo(f"{written} records written to {topic}")


@app.command()
def peek(
    topic: Name,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Show so many, the last of each partition.")] = 10,
    kafka: Brokers = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the last committed records of a topic."""
    with _connected(kafka, config, overrides) as (settings, errors):
        begins, ends = _bounds(errors.made(lambda: AdminClient(settings.admin())), topic)
        share = max(limit // max(len(ends), 1), 1)
        consumer = errors.made(lambda: Consumer(settings.consumer("ratchet-peek")))
        try:
            found = (
                each
                for number, end in ends.items()
                for each in _last(consumer, topic, number, offsets=(begins[number], end), wanted=share)
            )
            for message in itertools.islice(found, limit):
                typer.echo(json.dumps(_document(message)) if as_json else _line(message))
        finally:
            consumer.close()


# --- inside ---


@contextmanager
def _connected(
    kafka: str | None, config: Path | None, overrides: list[str] | None
) -> Iterator[tuple[KafkaSettings, ConnectionErrors]]:
    """The settings of a client, and its error callback; converts errors to one line."""
    with exit_codes():
        settings = KafkaSettings(kafka, {}).with_conf(Config.load(config, overrides or ()).for_components())
        errors = ConnectionErrors(settings.bootstrap_servers)
        try:
            yield settings, errors
        except KafkaException as error:
            raise errors.explain(error) from error


def _key_in(value: bytes, field: str | None, number: int) -> bytes | None:
    if field is None:
        return None
    try:
        found = json.loads(value)[field]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"line {number} is not a JSON object with a field {field!r}: {value[:80]!r}") from None
    return (found if isinstance(found, str) else json.dumps(found)).encode()


def _send(producer: Producer, topic: str, value: bytes, key: bytes | None, failed: list[str]) -> None:
    def on_delivery(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(str(error))

    while True:
        try:
            producer.produce(topic, value, key, on_delivery=on_delivery)
            break
        except BufferError:  # the client's queue is full
            producer.poll(0.1)
    producer.poll(0)


def _partitions(admin: AdminClient, topic: str) -> list[TopicPartition]:
    """The partitions of a topic. Raises ``ConfigError`` naming the existing topics: a misspelt
    topic is not created.
    """
    found = admin.list_topics(timeout=_TIMEOUT_S).topics
    if topic not in found:
        there = ", ".join(sorted(each for each in found if not each.startswith("__")))
        raise ConfigError(f"topic {topic!r} does not exist; there are: {there or 'none'}")
    return [TopicPartition(topic, each) for each in sorted(found[topic].partitions)]


def _bounds(admin: AdminClient, topic: str) -> tuple[dict[int, int], dict[int, int]]:
    partitions = _partitions(admin, topic)

    def offsets(spec: OffsetSpec) -> dict[int, int]:
        answers = admin.list_offsets(dict.fromkeys(partitions, spec), request_timeout=_TIMEOUT_S)
        found = {each.partition: answer.result().offset for each, answer in answers.items()}
        return dict(sorted(found.items()))

    return offsets(OffsetSpec.earliest()), offsets(OffsetSpec.latest())


def _last(consumer: Consumer, topic: str, partition: int, *, offsets: tuple[int, int], wanted: int) -> Iterator[Any]:
    """The last records of a partition whose log has ``offsets``: the first, and the end. Not every
    offset holds a record: if a topic is written in transactions, or compacted, it looks further
    back until there are enough."""
    begin, end = offsets
    back = wanted
    while begin < end:
        first = max(begin, end - back)
        consumer.assign([TopicPartition(topic, partition, first)])
        found = deque(_to_the_end(consumer, partition), wanted)
        if len(found) == wanted or first == begin:
            yield from found
            return
        back *= 8


def _to_the_end(consumer: Consumer, partition: int) -> Iterator[Any]:
    while True:
        message = consumer.poll(_TIMEOUT_S)
        if message is None:
            raise RetryableError(f"partition {partition} did not answer for {_TIMEOUT_S:g} s")
        error = message.error()
        if error is None:
            yield message
        elif error.name() == "_PARTITION_EOF":
            return
        else:
            raise KafkaException(error)


def _line(message: Any) -> str:
    key = f"{text_of(message.key())}  " if message.key() is not None else ""
    return f"{message.partition()}/{message.offset()}  {key}{text_of(message.value())}"


def _document(message: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp_ms": message.timestamp()[1],
        "key": text_of(message.key()),
        "value": text_of(message.value()),
    }
