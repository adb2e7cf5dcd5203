"""librdkafka's settings: what the user may set, what the guarantees fix, and where secrets stay out of sight.

Settings come from two places: ``kafka.*`` keys of the configuration (files, environment, command line), and the
``settings=`` of a spout or sink, which win.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from framework.config import KAFKA_PREFIX, is_secret, revealed
from framework.errors import ConfigError, RetryableError

#: Settings that would break a guarantee, with the reason a person is told.
_REFUSED = {
    "enable.auto.commit": "positions are kept in the transactional state, never in the consumer group",
    "enable.auto.offset.store": "positions are kept in the transactional state, never in the consumer group",
    "auto.commit.interval.ms": "nothing is committed to a consumer group by itself; consumer_group= publishes positions",
    "auto.offset.reset": "a position that is gone must stop the topology, not move it; use the spout's start=",
    "isolation.level": "records of aborted kafka_txns must not be read; exactly-once needs read_committed",
    "enable.partition.eof": "the reader needs it to tell the end of a range from a gap",
    "check.crcs": "a record that was damaged on its way must not be counted",
    "group.id": "the spout assigns partitions itself; consumer_group= publishes its positions to a group",
    "group.instance.id": "the spout assigns partitions itself and joins no group",
    "partition.assignment.strategy": "the spout assigns partitions itself and joins no group",
    "allow.auto.create.topics": "a misspelt topic must be an error, not an empty topic",
    "topic.blacklist": "give the topics as topics= or pattern=",
    "error_cb": "the spout listens to errors itself",
    "on_commit": "nothing is committed to a consumer group by the reader",
    "metadata.broker.list": "give the brokers as bootstrap_servers=, or as kafka.bootstrap.servers in the configuration",
}

_CONSUMER = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "allow.auto.create.topics": False,
    "check.crcs": True,
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
_ADMIN_TOO = {"log_level", "reconnect.backoff.max.ms"}
#: Errors that no waiting will mend.
_NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError._INVALID_ARG,
}
#: Errors of a connection that was refused or distrusted: a mistake at the start, an outage once it has worked.
_DISTRUSTED = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL}

T = TypeVar("T")


class KafkaSettings:
    """A checked set of client settings. Prints without secrets."""

    def __init__(self, bootstrap_servers: str | None, settings: Mapping[str, Any] | None) -> None:
        if bootstrap_servers is not None and (not isinstance(bootstrap_servers, str) or not bootstrap_servers.strip()):
            raise ConfigError("bootstrap_servers is missing: give host:port of one or more brokers")
        self._bootstrap_servers = bootstrap_servers
        self._settings = dict(settings or {})
        if "bootstrap.servers" in self._settings:
            raise ConfigError("Kafka setting 'bootstrap.servers': give it as bootstrap_servers=")
        for key, value in self._settings.items():
            if key in _REFUSED and not (key in _CONSUMER and _same(_CONSUMER[key], value)):
                raise ConfigError(f"Kafka setting {key!r} cannot be {value!r}: {_REFUSED[key]}")

    def with_conf(self, conf: Mapping[str, Any]) -> KafkaSettings:
        """With the configuration's ``kafka.*`` keys behind what was given here. Raises ``ConfigError`` when no brokers are
        named anywhere, and for what is refused."""
        shared = {key.removeprefix(KAFKA_PREFIX): each for key, each in conf.items() if key.startswith(KAFKA_PREFIX)}
        servers = shared.pop("bootstrap.servers", None)
        merged = KafkaSettings(self._bootstrap_servers or revealed(servers), {**shared, **self._settings})
        if merged._bootstrap_servers is None:
            raise ConfigError(
                "no Kafka brokers are named: give bootstrap_servers= to the spout, or kafka.bootstrap.servers in the configuration"
            )
        return merged

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers or "(unnamed)"

    def consumer(self, group: str) -> dict[str, Any]:
        """For reading ranges in tasks."""
        return {**_CONSUMER_DEFAULTS, **self._revealed(), **_CONSUMER, "group.id": group}

    def admin(self, errors: ConnectionErrors | None = None) -> dict[str, Any]:
        """For planning on the driver. ``errors`` hears what librdkafka only tells by its callback."""
        consumer_only = {*_CONSUMER, *_CONSUMER_DEFAULTS} - _ADMIN_TOO
        own = {key: value for key, value in self._revealed().items() if key not in consumer_only}
        heard = {"error_cb": errors.heard} if errors is not None else {}
        return {"log_level": 2, "reconnect.backoff.max.ms": 1_000, **own, **heard}

    def producer(self) -> dict[str, Any]:
        """For writing; the caller adds what its guarantee needs."""
        return self.admin()

    def fingerprint(self) -> str:
        """A hash of everything, secrets too: clients with the same one are alike."""
        return hashlib.sha256(repr(sorted(self._revealed().items())).encode()).hexdigest()[:16]

    def _revealed(self) -> dict[str, Any]:
        plain = {key: revealed(value) for key, value in self._settings.items()}
        return {**plain, "bootstrap.servers": self.bootstrap_servers}

    def __repr__(self) -> str:
        shown = {key: "***" if is_secret(key) else value for key, value in self._settings.items()}
        return f"KafkaSettings({self._bootstrap_servers!r}, {shown})"


class ConnectionErrors:
    """Why a client cannot connect. A request that fails only says that it timed out; the reason, such as a wrong
    password, comes by a callback before."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._heard: deque[KafkaError] = deque(maxlen=20)
        self.connected = False  # whether a request has ever been answered

    def heard(self, error: KafkaError) -> None:
        """librdkafka's ``error_cb``."""
        self._heard.append(error)

    def made(self, make: Callable[[], T]) -> T:
        """Make a client; what is wrong with its settings is a ``ConfigError``."""
        try:
            return make()
        except KafkaException as error:
            raise ConfigError(f"Kafka settings: {_text(error)}; correct them") from error

    def reason(self) -> str:
        """What was heard last, to be added to a message; empty when nothing was."""
        return f" ({_text(self._heard[-1])})" if self._heard else ""

    def explain(self, error: KafkaException, client: Any = None) -> RetryableError | ConfigError:
        """The error as ours, with the reason that was heard, if any."""
        if client is not None and hasattr(client, "poll"):
            client.poll(0)
        reasons = [each for each in self._heard if each.code() in _DISTRUSTED]
        self._heard.clear()
        if reasons:
            return kafka_error(reasons[-1], f"Kafka at {self._where}", connected=self.connected)
        return kafka_error(error, f"Kafka at {self._where}", connected=self.connected)


def kafka_error(
    error: KafkaError | KafkaException, what: str, *, connected: bool = True
) -> RetryableError | ConfigError:
    """librdkafka's error as ours, by what to do about it. ``connected``: the same client settings have worked before, so
    that being refused now is an outage and not a mistake."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    code = inner.code() if isinstance(inner, KafkaError) else None
    text = _text(error)
    if code in _NOT_ALLOWED or (code in _DISTRUSTED and not connected):
        return ConfigError(f"{what}: {text}; check the security settings and the permissions of the user")
    return RetryableError(f"{what}: {text}")


def _same(fixed: Any, given: Any) -> bool:
    """Settings from files and the environment may be text."""
    return str(fixed).lower() == str(given).strip().lower()


def _text(error: KafkaError | KafkaException) -> str:
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return str(inner.str()) if isinstance(inner, KafkaError) else str(error)
