"""librdkafka's settings: what the user may set, what the guarantees fix, and where secrets stay out of sight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from framework.errors import ConfigError, RetryableError

#: Settings that would break a guarantee, with the reason a person is told.
_REFUSED = {
    "enable.auto.commit": "positions are kept in the transactional state, never in the consumer group",
    "enable.auto.offset.store": "positions are kept in the transactional state, never in the consumer group",
    "auto.offset.reset": "a position that is gone must stop the topology, not move it; use the spout's start=",
    "isolation.level": "records of aborted kafka_txns must not be read; exactly-once needs read_committed",
    "enable.partition.eof": "the reader needs it to tell the end of a range from a gap",
    "group.id": "the spout assigns partitions itself; the group id names the topology",
    "bootstrap.servers": "give it as bootstrap_servers=",
    "topic.blacklist": "give the topics as topics= or pattern=",
}
#: Never shown. Whatever else could hold a secret matches one of the fragments.
_SECRET_FRAGMENTS = ("password", "secret", "key.pem", "jaas", "token", "credentials")

_CONSUMER = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
}
#: Defaults that the user may override: large fetches, and a full local queue looked at again soon.
_CONSUMER_DEFAULTS = {
    "queued.min.messages": 50000,
    "queued.max.messages.kbytes": 131_072,
    "fetch.queue.backoff.ms": 5,
    "max.partition.fetch.bytes": 2 << 20,
    # Under a trickle, a fetch per record would cost the broker more than the records: wait a little for more.
    "fetch.min.bytes": 65_536,
    "fetch.wait.max.ms": 10,
    "fetch.error.backoff.ms": 100,
    "reconnect.backoff.max.ms": 1_000,
    "log_level": 2,
}


class KafkaSettings:
    """A checked set of client settings. Prints without secrets."""

    def __init__(self, bootstrap_servers: str, settings: Mapping[str, Any] | None) -> None:
        if not isinstance(bootstrap_servers, str) or not bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is missing: give host:port of one or more brokers")
        self._bootstrap_servers = bootstrap_servers
        self._settings = dict(settings or {})
        for key, value in self._settings.items():
            if key in _REFUSED and _CONSUMER.get(key) != value:
                raise ConfigError(f"Kafka setting {key!r} cannot be {value!r}: {_REFUSED[key]}")

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers

    def consumer(self, group: str) -> dict[str, Any]:
        """For reading ranges in tasks."""
        return {
            **_CONSUMER_DEFAULTS,
            **self._settings,
            **_CONSUMER,
            "bootstrap.servers": self._bootstrap_servers,
            "group.id": group,
        }

    def admin(self) -> dict[str, Any]:
        """For planning on the driver."""
        consumer_only = {*_CONSUMER, *_CONSUMER_DEFAULTS} - {"log_level", "reconnect.backoff.max.ms"}
        own = {key: value for key, value in self._settings.items() if key not in consumer_only}
        return {
            "log_level": 2,
            "reconnect.backoff.max.ms": 1_000,
            **own,
            "bootstrap.servers": self._bootstrap_servers,
        }

    def __repr__(self) -> str:
        shown = {
            key: "***" if any(fragment in key for fragment in _SECRET_FRAGMENTS) else value
            for key, value in self._settings.items()
        }
        return f"KafkaSettings({self._bootstrap_servers!r}, {shown})"


def kafka_error(error: KafkaError | KafkaException, what: str) -> RetryableError | ConfigError:
    """librdkafka's error as ours, by what to do about it."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    code = inner.code() if isinstance(inner, KafkaError) else None
    text = inner.str() if isinstance(inner, KafkaError) else str(error)
    if code in (
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._SSL,
        KafkaError._INVALID_ARG,
    ):
        return ConfigError(f"{what}: {text}; check the security settings and the permissions of the user")
    return RetryableError(f"{what}: {text}")
