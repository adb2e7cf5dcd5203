"""Errors of Kafka clients: permanent unless known to pass."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from framework.clients.kafka import ConnectionErrors
from framework.clients.kafka_errors import kafka_error
from framework.errors import ConfigError, RetryableError

PERMANENT = {
    KafkaError.INVALID_RECORD: "key",
    KafkaError.INVALID_TIMESTAMP: "message.timestamp.before.max.ms",
    KafkaError.MSG_SIZE_TOO_LARGE: "max.message.bytes",
    KafkaError.TOPIC_EXCEPTION: "name",
    KafkaError.POLICY_VIOLATION: "create the topic",
    KafkaError.INVALID_REPLICATION_FACTOR: "create the topic",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "transaction.max.timeout.ms",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "permissions",
    KafkaError.UNSUPPORTED_VERSION: "too old",
    KafkaError.SECURITY_DISABLED: "no repetition",  # on no list
    KafkaError._NOT_IMPLEMENTED: "no repetition",
}
PASSING = [
    KafkaError._TRANSPORT,
    KafkaError._NOENT,  # "No leaders found", of list_offsets while a broker is away
    KafkaError._MSG_TIMED_OUT,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_PRODUCER_ID,
]


@pytest.mark.parametrize("code", PERMANENT)
def test_a_permanent_error_ends_the_topology_with_an_advice(code: int) -> None:
    found = kafka_error(KafkaException(KafkaError(code, "the broker's words")), "topic 'x'")
    assert isinstance(found, ConfigError)
    assert "topic 'x'" in str(found) and "the broker's words" in str(found) and PERMANENT[code] in str(found)


@pytest.mark.parametrize("code", PASSING)
def test_an_error_that_passes_is_retried(code: int) -> None:
    assert isinstance(kafka_error(KafkaError(code), "topic 'x'"), RetryableError)


@pytest.mark.parametrize(("connected", "kind"), [(True, RetryableError), (False, ConfigError)])
def test_a_refused_password_is_an_outage_only_after_it_has_worked(connected: bool, kind: type[Exception]) -> None:
    assert isinstance(kafka_error(KafkaError(KafkaError._AUTHENTICATION), "x", connected=connected), kind)


def test_a_lost_connection_before_it_does_not_hide_a_permanent_error() -> None:
    errors = ConnectionErrors("broker:9092")
    errors.on_error(KafkaError(KafkaError._TRANSPORT, "Connect to broker failed"))
    found = errors.explain(KafkaException(KafkaError(KafkaError.TOPIC_EXCEPTION, "collides")))
    assert isinstance(found, ConfigError) and "collides" in str(found)
