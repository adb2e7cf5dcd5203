"""Debezium's connectors, and the records that they write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from integration import PostgresServer

Record = tuple[bytes | None, bytes | None]
#: Settings of a connector whose records a mirror reads.
JSON_WITH_SCHEMAS = {
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "true",
    "value.converter.replace.null.with.default": "false",
}


def change_source(database: PostgresServer, prefix: str, **settings: str) -> dict[str, str]:
    """The settings of a connector for a PostgreSQL database. Its topics begin with ``prefix``.
    ``settings``: more of them, with ``_`` for each dot."""
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1",
        "database.port": str(database.port),
        "database.user": "ratchet",
        "database.password": database.password,
        "database.dbname": "ratchet",
        "topic.prefix": prefix,
        "plugin.name": "pgoutput",
        "slot.name": "s_" + "".join(each if each.isalnum() else "_" for each in prefix.lower()),
        "publication.name": "p_" + "".join(each if each.isalnum() else "_" for each in prefix.lower()),
        "topic.creation.default.replication.factor": "1",
        "topic.creation.default.partitions": "1",
        **{key.replace("_", "."): value for key, value in settings.items()},
    }


def read_records(
    bootstrap_servers: str, topic: str, enough: int | Callable[[list[Record]], bool], timeout_s: float
) -> list[Record]:
    """Keys and values of partition 0 of a topic from its beginning, until there are enough."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "unused", "enable.auto.commit": False})
    found: list[Record] = []
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + timeout_s
        while len(found) < enough if isinstance(enough, int) else not (found and enough(found)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic}: {len(found)} records came, and no more")
            message = consumer.poll(0.2)
            if message is None:
                continue
            if (error := message.error()) is None:
                found.append((message.key(), message.value()))
            elif error.code() not in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                raise RuntimeError(str(error))
    finally:
        consumer.close()
    return found


def read_values(
    bootstrap_servers: str, topic: str, enough: int | Callable[[list[Any]], bool], timeout_s: float
) -> list[Any]:
    """The values of ``read_records``, from JSON."""

    def values(records: list[Record]) -> list[Any]:
        return [None if value is None else json.loads(value) for _, value in records]

    wanted = enough if isinstance(enough, int) else lambda records: enough(values(records))
    return values(read_records(bootstrap_servers, topic, wanted, timeout_s))
