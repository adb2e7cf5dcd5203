"""The limits of a topic and its client, checked before a record is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from framework.clients.kafka_errors import passes
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from sinks.kafka.compressed_size import codec_of, compressed_bytes_max

#: librdkafka's default for ``message.max.bytes``, and the overhead that it adds to key and value
#: before the comparison.
CLIENT_BYTES_MAX, _CLIENT_ADDS = 1_000_000, 36
#: The size of a record batch's header, and of the one-byte parts of a record.
_BATCH_ADDS, _RECORD_ADDS = 61, 4
#: The most bytes that the lengths of a header take.
_HEADER_ADDS = 10
#: The time that a record may be in transit before the broker checks its timestamp.
_ON_THE_WAY_MS = 60_000
#: How far the broker's clock may be behind, at most half of the distance that the topic allows.
_BEHIND_MS = 60_000
HeaderPairs = Sequence[tuple[str, "bytes | None"]]
_ANSWER_S = 10.0
_NO_BOUND = 2**62


@dataclass(frozen=True)
class TopicLimits:
    """The limits of a topic.

    * ``client_bytes``: ``message.max.bytes`` of the client.
    * ``topic_bytes``: ``max.message.bytes`` of the topic, which bounds its batches; None if
      unknown.
    * ``codec``, ``level``: the client's compression.
    * ``needs_key``: the topic is compacted.
    * ``before_ms``, ``after_ms``: the largest distance of a timestamp from the present; None if the
      topic has no limit."""

    client_bytes: int
    _: KW_ONLY
    topic_bytes: int | None = None
    codec: str | None = None
    level: int = -1
    needs_key: bool = False
    before_ms: int | None = None
    after_ms: int | None = None

    @property
    def record_bytes_max(self) -> int:
        """The size up to which a record is accepted, compressed or not."""
        return self.client_bytes if self.topic_bytes is None else min(self.client_bytes, self.topic_bytes)

    def refusal(self, key: bytes | None, value: bytes | None, headers: HeaderPairs = ()) -> str | None:
        """Why a record is refused; None if it is not.

        >>> TopicLimits(client_bytes=1_000, topic_bytes=200).refusal(None, bytes(130))
        >>> TopicLimits(client_bytes=1_000, topic_bytes=200).refusal(None, bytes(150)).split(":")[0]
        'a record of 150 bytes is larger than max.message.bytes of the topic (200)'
        >>> TopicLimits(client_bytes=1_000, topic_bytes=300, codec="gzip").refusal(None, bytes(900))
        """
        if key is None and self.needs_key:
            return "the topic is compacted, and takes no record without a key: give each a key, or change the topic"
        header_bytes = headers_bytes(headers)
        size = len(key or b"") + len(value or b"") + header_bytes
        if size + _CLIENT_ADDS > self.client_bytes:
            return (
                f"a record of {size:,} bytes is larger than message.max.bytes of the client ({self.client_bytes:,}): raise it, "
                "or write smaller records"
            )
        if self.fits(None if key is None else len(key), None if value is None else len(value), headers):
            return None
        compressed = ""
        if self.codec is not None:
            parts = b"".join(name.encode() + (each or b"") for name, each in headers)
            size_max = compressed_bytes_max(self.codec, self.level, (key or b"") + (value or b"") + parts)
            size_max += len(headers) * _HEADER_ADDS
            if self.topic_bytes is None or _BATCH_ADDS + size_max <= self.topic_bytes:
                return None
            compressed = f", compressed with {self.codec} up to {size_max:,},"
        return (
            f"a record of {size:,} bytes{compressed} is larger than max.message.bytes of the topic ({self.topic_bytes:,}): "
            "raise it, or write smaller records"
        )

    def fits(self, key_bytes: int | None, value_bytes: int | None, headers: HeaderPairs = ()) -> bool:
        """Whether a record is small enough, compressed or not. ``key_bytes``, ``value_bytes``: the
        sizes of its parts; None for null."""
        size = (key_bytes or 0) + (value_bytes or 0) + headers_bytes(headers)
        if (key_bytes is None and self.needs_key) or size + _CLIENT_ADDS > self.client_bytes:
            return False
        body = _RECORD_ADDS + size + _varint(len(headers)) - 1
        body += sum(_varint(-1 if each is None else each) for each in (key_bytes, value_bytes))
        return self.topic_bytes is None or _BATCH_ADDS + _varint(body) + body <= self.topic_bytes

    def timestamp_refusal(self, timestamp_ms: int, now_ms: int) -> str | None:
        """Why a record with this timestamp is refused; None if it is not.

        >>> TopicLimits(1_000, after_ms=60_000).timestamp_refusal(70_000, 3_000).split(" of ")[0]
        'a timestamp'
        >>> TopicLimits(1_000, after_ms=60_000).timestamp_refusal(33_000, 3_000)
        """
        if self.after_ms is not None and timestamp_ms > now_ms + self.after_ms - min(_BEHIND_MS, self.after_ms // 2):
            name, bound, side = "message.timestamp.after.max.ms", self.after_ms, "after"
        elif self.before_ms is not None and timestamp_ms < now_ms - self.before_ms + _ON_THE_WAY_MS:
            name, bound, side = "message.timestamp.before.max.ms", self.before_ms, "before"
        else:
            return None
        return (
            f"a timestamp of {timestamp_ms} ms is {side} what {name} of the topic ({bound:,}) allows: raise it, or set "
            "message.timestamp.type=LogAppendTime"
        )


def limits_of(settings: KafkaSettings, topic: str) -> TopicLimits:
    """Get the limits from the brokers. Raises ``RetryableError`` while they do not answer."""
    given = settings.producer()
    errors = ConnectionErrors(settings.bootstrap_servers)
    admin = errors.made(lambda: AdminClient({**settings.admin(), "error_cb": errors.on_error}))
    try:
        found = topic_configuration(admin, topic)
    except KafkaException as error:
        raise errors.explain(error, admin) from error
    return TopicLimits(
        int(given.get("message.max.bytes", CLIENT_BYTES_MAX)),
        topic_bytes=_bytes_max(found),
        codec=codec_of(given),
        level=int(given.get("compression.level", -1)),
        needs_key="compact" in found.get("cleanup.policy", ""),
        **_timestamp_bounds(found),
    )


def headers_bytes(headers: HeaderPairs) -> int:
    """The size of headers in a record, without their count.

    >>> headers_bytes([]), headers_bytes([("a", b"bc")]), headers_bytes([("a", None)])
    (0, 5, 3)
    """
    size = 0
    for name, value in headers:
        length = len(name.encode())
        size += _varint(length) + length + _varint(-1 if value is None else len(value)) + len(value or b"")
    return size


def _timestamp_bounds(found: Mapping[str, str]) -> dict[str, int]:
    if found.get("message.timestamp.type") == "LogAppendTime":
        return {}
    names = {"before_ms": "message.timestamp.before.max.ms", "after_ms": "message.timestamp.after.max.ms"}
    return {name: int(found[each]) for name, each in names.items() if int(found.get(each, _NO_BOUND)) < _NO_BOUND}


def topic_bytes_max(admin: AdminClient, topic: str) -> int | None:
    """``max.message.bytes`` of a topic, which bounds its batches. None if it cannot be read, for
    lack of the permission ``DescribeConfigs``. Raises ``KafkaException`` for transient errors."""
    return _bytes_max(topic_configuration(admin, topic))


def topic_configuration(admin: AdminClient, topic: str) -> dict[str, str]:
    """The configuration of a topic. Empty if it cannot be read. Raises as ``topic_bytes_max``."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        found = admin.describe_configs([resource], request_timeout=_ANSWER_S)[resource].result()
    except KafkaException as error:
        if passes(error):
            raise
        return {}
    return {name: each.value for name, each in found.items() if each.value is not None}


def _bytes_max(found: dict[str, str]) -> int | None:
    return int(found["max.message.bytes"]) if "max.message.bytes" in found else None


def _varint(number: int) -> int:
    """The encoded size of a number in a record, in bytes."""
    return (((number << 1) ^ (number >> 63)).bit_length() + 6) // 7 or 1
