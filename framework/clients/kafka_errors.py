"""The meaning of Kafka client errors for a topology, for spouts and sinks (ADR 82).

An error is permanent unless its name is in the list of transient errors. A permanent error stops
the topology with its cause and an advice. A transient error is retried, and its cause is shown
meanwhile.
"""

from __future__ import annotations

from typing import Any, Protocol

from framework.clients.kafka_token_errors import token_failure
from framework.errors import ConfigError, RetryableError

#: Errors of a connection that was refused or distrusted. At the start they mean a mistake in the
#: settings; after a connection has worked, an outage.
DISTRUSTED = frozenset({"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"})
#: Errors of an unreachable server, the most informative first.
UNREACHABLE = ("_TIMED_OUT", "_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE")
#: Errors that pass by waiting, or with a new client: those that librdkafka or Kafka's protocol
#: calls retriable, those that a new producer or a new position ends, and the symptoms of an outage.
_PASSING = frozenset(
    {
        # connections and clients
        *UNREACHABLE,
        "_CRIT_SYS_RESOURCE",
        "_DESTROY",
        "_DESTROY_BROKER",
        "_FAIL",
        "_FATAL",
        "_IN_PROGRESS",
        "_INTR",
        "_ISR_INSUFF",
        "_MAX_POLL_EXCEEDED",
        "_MSG_TIMED_OUT",
        "_NODE_UPDATE",
        "_NOENT",  # the leader is not known yet
        "_OUTDATED",
        "_PREV_IN_PROGRESS",
        "_PURGE_INFLIGHT",
        "_PURGE_QUEUE",
        "_QUEUE_FULL",
        "_RETRY",
        "_STATE",
        "_TIMED_OUT_QUEUE",
        "_UNKNOWN_BROKER",
        "_WAIT_CACHE",
        "_WAIT_COORD",
        # answers that were truncated or damaged in transit; readers decide about damaged batches
        "_BAD_COMPRESSION",
        "_BAD_MSG",
        "_PARTIAL",
        "_UNDERFLOW",
        "INVALID_MSG",
        # brokers that start, stop, or hand over
        "BROKER_NOT_AVAILABLE",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "ELIGIBLE_LEADERS_NOT_AVAILABLE",
        "FENCED_LEADER_EPOCH",
        "FETCH_SESSION_ID_NOT_FOUND",
        "INCONSISTENT_TOPIC_ID",
        "INVALID_FETCH_SESSION_EPOCH",
        "KAFKA_STORAGE_ERROR",
        "LEADER_NOT_AVAILABLE",
        "LISTENER_NOT_FOUND",
        "NETWORK_EXCEPTION",
        "NOT_CONTROLLER",
        "NOT_COORDINATOR",
        "NOT_ENOUGH_REPLICAS",
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "NOT_LEADER_FOR_PARTITION",
        "OFFSET_NOT_AVAILABLE",
        "PREFERRED_LEADER_NOT_AVAILABLE",
        "REASSIGNMENT_IN_PROGRESS",
        "REBOOTSTRAP_REQUIRED",
        "REPLICA_NOT_AVAILABLE",
        "REQUEST_TIMED_OUT",
        "STALE_BROKER_EPOCH",
        "STALE_CTRL_EPOCH",
        "THROTTLING_QUOTA_EXCEEDED",
        "UNKNOWN",  # a broker's internal failure, also while it stops
        "UNKNOWN_LEADER_EPOCH",
        "UNKNOWN_TOPIC_ID",
        # a deleted topic may be created again; if it must exist, the start has checked it
        "UNKNOWN_TOPIC_OR_PART",
        "_UNKNOWN_PARTITION",
        "_UNKNOWN_TOPIC",
        # positions: the next attempt begins with another one
        "OFFSET_OUT_OF_RANGE",
        "_AUTO_OFFSET_RESET",
        "_LOG_TRUNCATION",
        "_NO_OFFSET",
        # producers and kafka_txns: the next attempt uses a new producer
        "CONCURRENT_TRANSACTIONS",
        "DUPLICATE_SEQUENCE_NUMBER",
        "INVALID_PRODUCER_EPOCH",
        "INVALID_PRODUCER_ID_MAPPING",
        "INVALID_TXN_STATE",
        "OUT_OF_ORDER_SEQUENCE_NUMBER",
        "PRODUCER_FENCED",
        "TRANSACTION_ABORTABLE",
        "TRANSACTION_COORDINATOR_FENCED",
        "UNKNOWN_PRODUCER_ID",
        "_CONFLICT",
        "_FENCED",
        # groups with other members
        "FENCED_MEMBER_EPOCH",
        "ILLEGAL_GENERATION",
        "REBALANCE_IN_PROGRESS",
        "STALE_MEMBER_EPOCH",
        "UNKNOWN_MEMBER_ID",
        "UNSTABLE_OFFSET_COMMIT",
    }
)
_SECURITY = "check the security settings and the permissions of the user"
_SIZE = (
    "raise message.max.bytes of the client (settings=) and max.message.bytes of the topic; a topic that takes less than "
    "a megabyte needs a smaller batch.size of the client, too"
)
_CREATION = "create the topic yourself, as the cluster wants it"
#: Advice for a permanent error, by its name.
_ADVICE = {
    "TOPIC_AUTHORIZATION_FAILED": _SECURITY,
    "CLUSTER_AUTHORIZATION_FAILED": _SECURITY,
    "GROUP_AUTHORIZATION_FAILED": _SECURITY,
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": _SECURITY,
    "DELEGATION_TOKEN_EXPIRED": _SECURITY,
    "UNSUPPORTED_SASL_MECHANISM": _SECURITY,
    "_INVALID_ARG": _SECURITY,
    **dict.fromkeys(DISTRUSTED, _SECURITY),
    "MSG_SIZE_TOO_LARGE": _SIZE,
    "INVALID_MSG_SIZE": _SIZE,
    "RECORD_LIST_TOO_LARGE": "lower batch.size of the client (settings=), or raise segment.bytes of the topic",
    "INVALID_RECORD": "a compacted topic takes no record without a key, and a schema check of the brokers no other value: "
    "give every record a key, or change the topic",
    "INVALID_TIMESTAMP": "the topic bounds the timestamps of its records: see message.timestamp.before.max.ms, "
    "message.timestamp.after.max.ms and message.timestamp.type of the topic",
    "TOPIC_EXCEPTION": "choose another name for the topic",
    "POLICY_VIOLATION": _CREATION,
    "INVALID_CONFIG": _CREATION,
    "INVALID_PARTITIONS": _CREATION,
    "INVALID_REPLICATION_FACTOR": _CREATION,
    "INVALID_REPLICA_ASSIGNMENT": _CREATION,
    "INVALID_TRANSACTION_TIMEOUT": "raise transaction.max.timeout.ms of the brokers to at least 60000",
    "INVALID_GROUP_ID": "choose another name for the consumer group",
    "UNSUPPORTED_COMPRESSION_TYPE": "choose another compression.type (settings=)",
    "UNSUPPORTED_FOR_MESSAGE_FORMAT": "raise message.format.version of the topic",
    "UNSUPPORTED_VERSION": "the brokers are too old for this",
    "_UNSUPPORTED_FEATURE": "the brokers are too old for this",
}
_GENERAL = "no repetition changes this: correct it, and start the topology again"


class KafkaError(Protocol):
    """The part of confluent-kafka's ``KafkaError`` that this module needs."""

    def name(self) -> str: ...
    def str(self) -> str: ...
    def fatal(self) -> bool: ...


def kafka_error(error: KafkaError | Exception, what: str, *, connected: bool = True) -> RetryableError | ConfigError:
    """Convert librdkafka's error to Ratchet's error class by recovery. ``connected``: the same
    client settings have worked before, so that a refusal now is an outage rather than a mistake in
    the settings."""
    inner = inner_error(error)
    name = inner.name() if inner is not None else ""
    no_token = token_failure(error_text(error)) if name in DISTRUSTED else None
    if no_token is not None:
        return no_token.error(what, connected=connected)
    if name in _PASSING or (name in DISTRUSTED and connected):
        return RetryableError(f"{what}: {error_text(error)}")
    return ConfigError(f"{what}: {error_text(error)}; {_ADVICE.get(name, _GENERAL)}")


def passes(error: KafkaError | Exception) -> bool:
    """Whether an error passes by waiting, or with a new client."""
    inner = inner_error(error)
    return inner is not None and (inner.name() in _PASSING or inner.name() in DISTRUSTED)


def inner_error(error: Any) -> KafkaError | None:
    """The ``KafkaError``, alone or inside a ``KafkaException``. None for any other error."""
    candidate = error.args[0] if isinstance(error, Exception) and error.args else error
    return candidate if hasattr(candidate, "name") and hasattr(candidate, "str") else None


def error_text(error: KafkaError | Exception) -> str:
    inner = inner_error(error)
    return str(inner.str()) if inner is not None else str(error)
