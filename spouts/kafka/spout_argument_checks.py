"""Checks of the arguments of a Kafka spout. Each function raises ``ConfigError`` with one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from framework.clients.kafka_settings import checked_topic
from framework.errors import ConfigError
from framework.topology import Fields
from spouts.codecs.codec import BytesCodec, Codec
from spouts.kafka.record_deserialization import RecordFormat

_GROUP = re.compile(r"\S.{0,254}")


def checked_group(name: str, value: object) -> str:
    if not isinstance(value, str) or not _GROUP.fullmatch(value):
        raise ConfigError(f"{name} must be a name, not {value!r}")
    return value


def checked_topics(topics: Sequence[str], pattern: str | None) -> tuple[str, ...]:
    if isinstance(topics, str):
        topics = [topics]
    if bool(topics) == (pattern is not None):
        raise ConfigError("a Kafka spout needs topics=[...] or pattern=..., one of them")
    for topic in topics:
        checked_topic(topic)
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    return tuple(dict.fromkeys(topics))


def checked_format(
    codec: Codec | None, key_codec: Codec | None, headers: Mapping[str, Codec] | None, metadata: Sequence[str]
) -> RecordFormat:
    named: dict[str, Any] = {"codec": codec if codec is not None else BytesCodec()}
    if key_codec is not None:
        named["key_codec"] = key_codec
    named.update({f"header_codecs[{name!r}]": each for name, each in (headers or {}).items()})
    for name, each in named.items():
        if not isinstance(each, Codec):
            raise ConfigError(f"{name} must be a Codec, such as TextCodec(), not {each!r}")
    twice = next((name for name in metadata if list(metadata).count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"metadata field {twice!r} is named twice")
    return RecordFormat(named["codec"], key_codec, dict(headers or {}), tuple(metadata))


def fields_of(record_format: RecordFormat) -> Fields:
    try:
        return record_format.fields()
    except KeyError as error:
        raise ConfigError(
            f"metadata field {error.args[0]!r} is not known: topic, partition, offset, timestamp_ms, key, value or headers"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def at_least_1(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r}")
    return value


def above_0(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be above 0, not {value!r}")
    return float(value)
