"""Settings of Kafka clients, for spouts and sinks: which settings the user may give, which ones the
guarantees fix, how secrets stay hidden, and why a client cannot connect. This module neither
creates nor imports a client.

Settings come from two places: the ``kafka.*`` keys of the configuration (files, environment,
command line), and the ``settings=`` of a spout or sink. The latter win.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import cloudpickle

from framework.clients.kafka_errors import (
    DISTRUSTED,
    UNREACHABLE,
    KafkaError,
    error_text,
    inner_error,
    kafka_error,
    passes,
)
from framework.clients.kafka_setting_suggestions import unknown_setting
from framework.clients.kafka_token_errors import TokenFailure, token_failure
from framework.clients.msk_iam import REGION, wants_iam, with_tokens
from framework.config import KAFKA_PREFIX, is_secret, revealed
from framework.errors import ConfigError, RetryableError

#: Settings that would break a guarantee, with the reason that the error message gives.
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
    "metadata.broker.list": "give the brokers as bootstrap_servers=, or as kafka.bootstrap.servers in the configuration",
    "error_cb": "errors are listened to already",
    "on_commit": "nothing is committed to a consumer group by the reader",
    "on_delivery": "deliveries are listened to already",
    "enable.idempotence": "a producer that repeats a request must not write twice",
    "acks": "what is written must survive the loss of a broker",
    "transactional.id": "it names the topology, the component and the task, so that one writer fences another",
    "enable.gapless.guarantee": "a message that was not delivered fails the batch already",
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
#: Defaults that the user may override: fetch far ahead, and pause only briefly before a full local
#: queue is checked again.
_CONSUMER_DEFAULTS = {
    "queued.min.messages": 50000,
    "queued.max.messages.kbytes": 131_072,
    "fetch.queue.backoff.ms": 5,
    # librdkafka decompresses a whole fetch before it checks the size, so fetches are small. Larger
    # ones were not faster.
    "max.partition.fetch.bytes": 256 << 10,
    # The bytes of all partitions in a response, which may expand, too (ADR 129), unless the user
    # wants more of one partition.
    "fetch.max.bytes": 1 << 20,
    # A broker answers as soon as it has a record, so a batch's records have arrived before they are
    # requested; waiting for more bytes cost each small batch 3 ms. The price: 5,000 records a
    # second that arrive one by one took 0.49 of a broker's core instead of 0.36. Without records,
    # the broker holds the request only this long, because a consumer has one request at a time at
    # each broker, and a newly assigned partition waits for it.
    "fetch.min.bytes": 1,
    "fetch.wait.max.ms": 20,
    "fetch.error.backoff.ms": 100,
}
#: librdkafka reports a zstd batch that becomes larger than this (by default 100 MB) as damaged,
#: which would stop a topology. This is the largest value.
_ONLY_OF_CONSUMERS = {"receive.message.max.bytes": 2**31 - 1}
#: The number of queues among which a consumer's total fetch-ahead is divided, if each partition has
#: a queue of its own. librdkafka applies its limits to each queue. With ``QUEUES_MAX`` queues a
#: share is 195 records, 128 kB and fetches of 16 kB, which still saves requests.
QUEUES_MAX = 1_024
_AHEAD_RECORDS = 200_000
_AHEAD_KBYTES = 131_072
_AHEAD_FETCH_BYTES = 16 << 20
#: The two names of a setting.
_PARTITION_FETCH_BYTES = frozenset({"max.partition.fetch.bytes", "fetch.message.max.bytes"})
#: Ratchet's own settings below ``kafka.``, with their values; None: any. They are not passed to
#: librdkafka.
_OWN: dict[str, tuple[str, ...] | None] = {"reader": ("auto", "native", "python"), REGION: None}
#: The setting that is a function: it returns a token for OAUTHBEARER. In a file it is a text,
#: ``module:name``.
_TOKENS = "oauth_cb"
#: Records with a key go to the same partition as with Java's producer, so that topics of both can
#: be joined by partition; records without a key go to any partition. The user may override it.
_PRODUCER_DEFAULTS = {"partitioner": "murmur2_random"}
_PRODUCER = {"enable.idempotence": True, "acks": "all"}
#: The largest record of a producer. librdkafka refuses a consumer whose ``fetch.max.bytes`` is
#: lower, although a consumer can read larger records.
_SENT_MAX = "message.max.bytes"
_DEFAULTS = {"reconnect.backoff.max.ms": 1_000, "log_level": 2}
_FIXED = {**_CONSUMER, **_PRODUCER}

#: Kafka's limit for the length of a topic's name.
TOPIC_LENGTH_MAX = 249
_TOPIC = re.compile(rf"[A-Za-z0-9._\-]{{1,{TOPIC_LENGTH_MAX}}}")

_KEYTAB = "sasl.kerberos.keytab"
_NO_KERBEROS = (
    "Kafka settings: this confluent-kafka has no Kerberos (GSSAPI, also the default of 'sasl.mechanism'): name another "
    "mechanism, or build confluent-kafka with Kerberos on the driver and the executors, as docs/operating/kafka-security.md "
    "shows"
)

T = TypeVar("T")


def is_topic_name(name: str) -> bool:
    """Whether Kafka allows a topic of this name.

    >>> is_topic_name("orders"), is_topic_name("a:b")
    (True, False)
    """
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")


def checked_topic(topic: object, what: str = "") -> str:
    """Return a valid name for a topic. ``what``: the purpose of the topic, for the message of the
    ``ConfigError``."""
    if not isinstance(topic, str) or not is_topic_name(topic):
        raise ConfigError(
            f"{what}{topic!r} is not a Kafka topic name: 1 to {TOPIC_LENGTH_MAX} letters, digits, '.', '_' and '-'"
        )
    return topic


class KafkaSettings:
    """A checked set of client settings. Prints without secrets. Pickled with its secrets."""

    def __init__(self, bootstrap_servers: str | None, settings: Mapping[str, Any] | None) -> None:
        given: object = bootstrap_servers
        if given is not None and not isinstance(given, str):
            raise ConfigError(
                f"bootstrap_servers is a {type(given).__name__}: give one text, such as 'kafka1:9092,kafka2:9092'"
            )
        if bootstrap_servers is not None and not bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is missing: give host:port of one or more brokers")
        self._bootstrap_servers = bootstrap_servers
        self._settings = dict(settings or {})
        if "bootstrap.servers" in self._settings:
            raise ConfigError("Kafka setting 'bootstrap.servers': give it as bootstrap_servers=")
        for key, value in self._settings.items():
            if key in _REFUSED and not (key in _FIXED and _same(_FIXED[key], value)):
                raise ConfigError(f"Kafka setting {key!r} cannot be {value!r}: {_REFUSED[key]}")
            allowed = _OWN.get(key)
            if allowed is not None and value not in allowed:
                known = ", ".join(map(repr, allowed))
                raise ConfigError(f"Kafka setting {key!r} must be one of {known}, not {value!r}")

    def with_conf(self, conf: Mapping[str, Any]) -> KafkaSettings:
        """Add the configuration's ``kafka.*`` keys. The settings given here take precedence. Raises
        ``ConfigError`` when no brokers are named anywhere, and for a setting that would break a
        guarantee."""
        shared = {key.removeprefix(KAFKA_PREFIX): each for key, each in conf.items() if key.startswith(KAFKA_PREFIX)}
        servers = shared.pop("bootstrap.servers", None)
        if isinstance(servers, (list, tuple)):
            servers = ",".join(map(str, servers))
        merged = KafkaSettings(self._bootstrap_servers or servers, {**shared, **self._settings})
        if merged._bootstrap_servers is None:
            near = difflib.get_close_matches("bootstrap.servers", list(shared), n=1)
            raise ConfigError(
                f"unknown key 'kafka.{near[0]}': did you mean 'kafka.bootstrap.servers'?"
                if near
                else "no Kafka brokers are named: give bootstrap_servers=, or kafka.bootstrap.servers in the configuration"
            )
        _check_tokens(merged._settings)
        return merged

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers or "(unnamed)"

    def share_brokers(self, other: KafkaSettings) -> bool:
        """Whether both name a common broker in the same words. If not, they may still belong to one
        cluster."""
        return bool(_addresses(self) & _addresses(other))

    @property
    def reader(self) -> str:
        """The reader of spouts: "auto", "native" or "python"."""
        return str(self._settings.get("reader", "auto"))

    def consumer(self, group: str, *, queues: int | None = None) -> dict[str, Any]:
        """Settings of a consumer. The reader sets positions itself and commits nothing to the
        group. ``queues``: the number of partitions, if each has a queue of its own; by default they
        share one."""
        defaults = {**_CONSUMER_DEFAULTS, **_ONLY_OF_CONSUMERS, **(_share_of(queues) if queues is not None else {})}
        given = self._revealed({*_PRODUCER, _SENT_MAX})
        if not _PARTITION_FETCH_BYTES.isdisjoint(given):
            defaults["fetch.max.bytes"] = _AHEAD_FETCH_BYTES
        return {**_DEFAULTS, **defaults, **given, **_CONSUMER, "group.id": group}

    def admin(self) -> dict[str, Any]:
        """Settings of an admin client."""
        return {**_DEFAULTS, **self._revealed({*_FIXED, *_CONSUMER_DEFAULTS})}

    def producer(self) -> dict[str, Any]:
        """Settings of a producer. The caller adds the transactional id."""
        given = self._revealed({*_CONSUMER, *_CONSUMER_DEFAULTS})
        return {**_DEFAULTS, **_PRODUCER_DEFAULTS, **given, **_PRODUCER}

    def fingerprint(self) -> str:
        """A hash of all settings, including secrets. Clients with the same fingerprint have the
        same settings, even in copies that were sent to tasks."""
        known = [(name, _lasting(value)) for name, value in sorted(self._revealed(set()).items())]
        return hashlib.sha256(repr((self.reader, known)).encode()).hexdigest()[:16]

    def _revealed(self, but: set[str]) -> dict[str, Any]:
        plain = {key: revealed(value) for key, value in self._settings.items() if key not in but and key not in _OWN}
        _check_keytab(plain.get(_KEYTAB))
        if wants_iam(plain):
            plain = with_tokens(plain, self.bootstrap_servers, self._settings.get(REGION))
        elif isinstance(plain.get(_TOKENS), str):
            plain[_TOKENS] = _function(plain[_TOKENS])
        if plain.get(_TOKENS) is not None:
            plain[_TOKENS] = _TokenFunction(plain[_TOKENS])
        return {**plain, "bootstrap.servers": self.bootstrap_servers}

    def __repr__(self) -> str:
        shown = {key: "***" if is_secret(key) else value for key, value in self._settings.items()}
        return f"KafkaSettings({self._bootstrap_servers!r}, {shown})"


class _TokenFunction:
    """An ``oauth_cb`` that keeps the reason of its last failure, which confluent-kafka does not
    report."""

    failure: ClassVar[str] = ""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def __call__(self, config: str) -> Any:
        try:
            token = self._function(config)
        except Exception as error:
            _TokenFunction.failure = f"{type(error).__name__}: {error}"
            raise
        _TokenFunction.failure = ""
        return token


def _function(where: str) -> Callable[[str], Any]:
    """The function that ``module:name`` names. Raises ``ConfigError``."""
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Kafka setting {_TOKENS!r} is {where!r}, not module:function: {error}") from error
    if not callable(found):
        raise ConfigError(f"Kafka setting {_TOKENS!r}: {where} is no function")
    return found  # type: ignore[no-any-return]


def _check_tokens(settings: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for OAUTHBEARER without a source of tokens: librdkafka would wait for
    one, and no client would connect."""
    mechanism = settings.get("sasl.mechanism", settings.get("sasl.mechanisms"))
    has_method = settings.get("sasl.oauthbearer.method", "default") != "default"
    has_own = settings.get(_TOKENS) or settings.get("enable.sasl.oauthbearer.unsecure.jwt")
    if mechanism == "OAUTHBEARER" and not has_method and not has_own:
        raise ConfigError(
            f"Kafka settings: OAUTHBEARER needs tokens: set 'sasl.oauthbearer.method' to 'oidc', with the settings of your "
            f"identity provider, or {_TOKENS!r} to a function, as docs/operating/kafka-security.md shows"
        )


def _check_keytab(path: str | None) -> None:
    """Raises ``ConfigError`` if the keytab cannot be read: ``kinit`` reports that only to stderr,
    and librdkafka only that there is no ticket."""
    if path is None:
        return
    try:
        open(path, "rb").close()
    except OSError as error:
        raise ConfigError(
            f"Kafka setting {_KEYTAB!r}: {path}: {error.strerror}; it must be readable on the driver and the executors"
        ) from error


def _lasting(value: Any) -> Any:
    """The part of a value that all its copies share. A copy of a function or an object, as each
    attempt makes one, prints with an address of its own."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        return cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - user code may raise anything: an object that cannot be pickled has no copies
        return value


def _share_of(queues: int) -> dict[str, int]:
    """The limits of one queue out of this many."""
    return {
        "queued.min.messages": min(50_000, _AHEAD_RECORDS // queues),
        "queued.max.messages.kbytes": _AHEAD_KBYTES // queues,
        "max.partition.fetch.bytes": min(256 << 10, _AHEAD_FETCH_BYTES // queues),
    }


class ConnectionErrors:
    """Finds out why a client cannot connect. A failed request only reports a timeout. The reason,
    such as a wrong password, comes earlier, through a callback. Give ``on_error`` to the client as
    its ``error_cb``."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._errors: deque[KafkaError] = deque(maxlen=20)
        self.connected = False  # whether a request has ever been answered
        # the time and the reason of a missing token; librdkafka reports a reason once, and again
        # when it changes
        self._no_token: tuple[float, TokenFailure] | None = None

    def on_error(self, error: KafkaError) -> None:
        self._errors.append(error)
        no_token = token_failure(error.str())
        if no_token is not None:
            self._no_token = time.monotonic(), no_token

    def heard(self, error: KafkaError) -> None:
        """Handle an error that a consumer returns like a record, and that belongs to no partition.
        Raises an error that does not pass; any other is a reason for ``explain``, because the read
        itself may succeed."""
        if error.fatal() or not passes(error):
            raise kafka_error(error, f"Kafka at {self._where}")
        self.on_error(error)

    def made(self, make: Callable[[], T]) -> T:
        """Make a client. Raises ``ConfigError`` when its settings are wrong, and ``RetryableError``
        when no token is issued, or when the system refuses more threads or files."""
        try:
            return make()
        except Exception as error:
            # confluent-kafka raises SystemError if its wait for a token ends after a callback
            inner = inner_error(error) or inner_error(error.__cause__)
            if inner is None:
                raise
            if "OAuth token not set" in inner.str():
                reason = _TokenFunction.failure or "see the settings of the token endpoint"
                raise RetryableError(f"Kafka at {self._where}: no token for OAUTHBEARER ({reason})") from error
            if inner.name() == "_CRIT_SYS_RESOURCE":
                raise RetryableError(
                    f"Kafka at {self._where}: {error_text(error)}; see the limits of this process"
                ) from error
            text = inner.str()
            if "No provider for SASL mechanism GSSAPI" in text:
                raise ConfigError(_NO_KERBEROS) from error
            raise ConfigError(unknown_setting(text) or f"Kafka settings: {text}; correct them") from error

    def reason(self) -> str:
        """The last reason that the callback received, to be added to a message. Empty when there is
        none."""
        return f" ({error_text(self._errors[-1])})" if self._errors else ""

    def explain(self, error: Exception, client: Any = None) -> RetryableError | ConfigError:
        """Turn an error into one of Ratchet's, with the reason that the callback received, if any.
        ``client``: a client that delivers its callbacks only when it is polled."""
        if client is not None and hasattr(client, "poll"):
            try:
                client.poll(0)
            except Exception as fatal:
                if inner_error(fatal) is None:
                    raise
                error = fatal  # the client has ended, for this reason
        what = f"Kafka at {self._where}"
        if inner_error(error) is not None and not passes(error):
            self._errors.clear()
            return kafka_error(error, what, connected=self.connected)
        reasons = [each for each in self._errors if each.name() in DISTRUSTED]
        found = [
            each for each in (*self._errors, inner_error(error)) if each is not None and each.name() in UNREACHABLE
        ]
        self._errors.clear()
        if self._no_token is not None and not self.connected and not reasons:
            return self._no_token[1].error(what, connected=False)
        if found and not reasons and not self.connected:
            why = error_text(max(found, key=lambda each: UNREACHABLE.index(each.name())))
            if "Connect to" in why or "resolve" in why:
                return RetryableError(
                    f"nothing answers at {self._where}: {why}; check the address, and that Kafka runs"
                )
            return RetryableError(f"{what}: {why}; check the address and the security settings")
        told = kafka_error(reasons[-1] if reasons else error, what, connected=self.connected)
        if self._no_token is None or not reasons or token_failure(reasons[-1].str()):
            return told
        seconds = time.monotonic() - self._no_token[0]
        return type(told)(f"{told}; {seconds:.0f} s before: {self._no_token[1]}")


def _addresses(settings: KafkaSettings) -> set[str]:
    return {each.strip().lower().rpartition("://")[2] for each in settings.bootstrap_servers.split(",")}


def _same(fixed: Any, given: Any) -> bool:
    """Whether two values of a setting are the same. Settings from files and the environment may be
    text."""
    return str(fixed).lower() == str(given).strip().lower()
