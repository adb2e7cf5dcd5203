"""Errors of Kafka clients: permanent unless known to pass."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from framework.clients.kafka_errors import _ADVICE, _PASSING, DISTRUSTED, kafka_error, passes
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError, RetryableError
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from tests.kit.readers import READERS

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
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,  # "Leader epoch is newer than broker epoch": the broker lags behind
    KafkaError.OFFSET_NOT_AVAILABLE,
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
#: What librdkafka knows beside what passes and what has an advice: no repetition changes these, or
#: no request of ours ends with them, or they are no errors.
LASTING = [
    "_APPLICATION",
    "_ASSIGNMENT_LOST",
    "_ASSIGN_PARTITIONS",
    "_EXISTING_SUBSCRIPTION",
    "_FS",
    "_GAPLESS_GUARANTEE",
    "_INCONSISTENT",
    "_INVALID_DIFFERENT_RECORD",
    "_INVALID_TYPE",
    "_KEY_DESERIALIZATION",
    "_KEY_SERIALIZATION",
    "_NOOP",
    "_NOT_CONFIGURED",
    "_NOT_IMPLEMENTED",
    "_PARTITION_EOF",
    "_READ_ONLY",
    "_REVOKE_PARTITIONS",
    "_UNKNOWN_GROUP",
    "_UNKNOWN_PROTOCOL",
    "_VALUE_DESERIALIZATION",
    "_VALUE_SERIALIZATION",
    "DELEGATION_TOKEN_AUTHORIZATION_FAILED",
    "DELEGATION_TOKEN_AUTH_DISABLED",
    "DELEGATION_TOKEN_NOT_FOUND",
    "DELEGATION_TOKEN_OWNER_MISMATCH",
    "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED",
    "DUPLICATE_RESOURCE",
    "DUPLICATE_VOTER",
    "ELECTION_NOT_NEEDED",
    "FEATURE_UPDATE_FAILED",
    "FENCED_INSTANCE_ID",
    "FENCED_STATE_EPOCH",
    "GROUP_ID_NOT_FOUND",
    "GROUP_MAX_SIZE_REACHED",
    "GROUP_SUBSCRIBED_TO_TOPIC",
    "ILLEGAL_SASL_STATE",
    "INCONSISTENT_GROUP_PROTOCOL",
    "INCONSISTENT_VOTER_SET",
    "INVALID_COMMIT_OFFSET_SIZE",
    "INVALID_PRINCIPAL_TYPE",
    "INVALID_RECORD_STATE",
    "INVALID_REGISTRATION",
    "INVALID_REGULAR_EXPRESSION",
    "INVALID_REQUEST",
    "INVALID_REQUIRED_ACKS",
    "INVALID_SESSION_TIMEOUT",
    "INVALID_SHARE_SESSION_EPOCH",
    "INVALID_UPDATE_VERSION",
    "INVALID_VOTER_KEY",
    "LOG_DIR_NOT_FOUND",
    "MEMBER_ID_REQUIRED",
    "MISMATCHED_ENDPOINT_TYPE",
    "NON_EMPTY_GROUP",
    "NO_ERROR",
    "NO_REASSIGNMENT_IN_PROGRESS",
    "OFFSET_METADATA_TOO_LARGE",
    "OPERATION_NOT_ATTEMPTED",
    "PRINCIPAL_DESERIALIZATION_FAILURE",
    "RESOURCE_NOT_FOUND",
    "SECURITY_DISABLED",
    "SHARE_SESSION_LIMIT_REACHED",
    "SHARE_SESSION_NOT_FOUND",
    "STREAMS_INVALID_TOPOLOGY",
    "STREAMS_INVALID_TOPOLOGY_EPOCH",
    "STREAMS_TOPOLOGY_FENCED",
    "TELEMETRY_TOO_LARGE",
    "TOPIC_ALREADY_EXISTS",
    "TOPIC_DELETION_DISABLED",
    "UNACCEPTABLE_CREDENTIAL",
    "UNKNOWN_CONTROLLER_ID",
    "UNKNOWN_SUBSCRIPTION_ID",
    "UNRELEASED_INSTANCE_ID",
    "UNSUPPORTED_ASSIGNOR",
    "UNSUPPORTED_ENDPOINT_TYPE",
    "VOTER_NOT_FOUND",
]
#: Every error that librdkafka has a name for.
KNOWN = {name: code for code in range(-300, 300) if not (name := KafkaError(code).name()).startswith("ERR_")}


def test_every_error_that_librdkafka_knows_is_on_one_list() -> None:
    lists = [set(_PASSING), set(_ADVICE), set(LASTING)]
    on_lists = [name for each in lists for name in each]
    assert sorted(on_lists) == sorted(KNOWN)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_error_is_retried_if_it_passes_and_else_ends_the_topology(name: str) -> None:
    error = KafkaException(KafkaError(KNOWN[name]))
    for connected in (True, False):
        kind = RetryableError if name in _PASSING or (name in DISTRUSTED and connected) else ConfigError
        assert type(kafka_error(error, "topic 'x'", connected=connected)) is kind
    assert passes(error) is (name in _PASSING or name in DISTRUSTED)


@pytest.mark.parametrize("code", [134, 299, -300])
def test_an_error_that_librdkafka_does_not_know_ends_the_topology_with_its_number(code: int) -> None:
    found = kafka_error(KafkaError(code), "topic 'x'")
    assert isinstance(found, ConfigError) and str(code) in str(found)


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


class ClientMessage:
    """An error that a consumer returns like a record, and that belongs to no partition."""

    def __init__(self, error: KafkaError) -> None:
        self.error = lambda: error
        self.topic = self.partition = self.offset = lambda: None


@pytest.mark.parametrize("reader", READERS)
def test_an_error_of_a_client_alone_ends_no_read_that_may_succeed(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KafkaSettings("127.0.0.1:1", None)
    session = NativeSession(settings, "g") if reader == "native" else KafkaSession(settings, "g")

    def meet(error: KafkaError) -> None:
        if isinstance(session, NativeSession):
            monkeypatch.setattr(session._consumer, "poll", lambda: ([(error, None, -1)], False))
            session._serve()
        else:
            session._hear(ClientMessage(error), {})  # type: ignore[arg-type]

    meet(KafkaError(KafkaError._AUTHENTICATION, "FindCoordinator response error: Local: Authentication failure"))
    assert session._errors.reason() == " (FindCoordinator response error: Local: Authentication failure)"
    with pytest.raises(ConfigError, match=r"^Kafka at 127.0.0.1:1: .*permissions"):
        meet(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    session.close()
