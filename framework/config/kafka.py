"""``kafka.*``: settings of Kafka's clients, under librdkafka's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from framework.config.secret_redaction import is_secret

#: The prefix of keys that are passed to Kafka clients unchanged, under librdkafka's names.
KAFKA_PREFIX = "kafka."
#: Prefix of environment variables that set ``kafka.*``: RATCHET_KAFKA_SASL_PASSWORD sets
#: kafka.sasl.password.
KAFKA_ENVIRONMENT = "RATCHET_KAFKA_"


def kafka_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The Kafka settings among others, with their secrets wrapped."""
    return {
        key: SecretStr(str(value)) if is_secret(key) and not isinstance(value, SecretStr) else value
        for key, value in values.items()
        if key.startswith(KAFKA_PREFIX)
    }


def kafka_environment() -> dict[str, str]:
    """The Kafka settings in environment variables."""
    return {
        KAFKA_PREFIX + name.removeprefix(KAFKA_ENVIRONMENT).lower().replace("_", "."): value
        for name, value in os.environ.items()
        if name.startswith(KAFKA_ENVIRONMENT)
    }
