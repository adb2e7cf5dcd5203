"""The configuration of a run: typed, checked completely before anything starts, with unknown keys
refused.

Keys have Storm's names if Storm has them. ``spark.*`` is passed to Spark unchanged, except for
settings that would break a guarantee. ``kafka.*`` is passed to Kafka's clients under librdkafka's
names. ``app.*`` is the user's own and reaches components through ``conf``.
"""

from framework.config.config import Config
from framework.config.environment_references import (
    check_address,
    is_reference,
    passwords_in,
    resolved,
    resolved_address,
    shown_host,
    with_password_variable,
)
from framework.config.kafka import KAFKA_PREFIX
from framework.config.secret_redaction import HIDDEN, SPARK_REDACTION, is_secret, is_spark_secret, revealed, shown_value
from framework.config.server_addresses import default_address, loading_with, variable_of
from framework.config.toml import flatten, read_override
from framework.config.zookeeper import ZooKeeperAddress, checked_zookeeper_root, zookeeper_address

__all__ = [
    "HIDDEN",
    "KAFKA_PREFIX",
    "SPARK_REDACTION",
    "Config",
    "ZooKeeperAddress",
    "check_address",
    "checked_zookeeper_root",
    "default_address",
    "flatten",
    "is_reference",
    "is_secret",
    "is_spark_secret",
    "loading_with",
    "passwords_in",
    "read_override",
    "resolved",
    "resolved_address",
    "revealed",
    "shown_host",
    "shown_value",
    "variable_of",
    "with_password_variable",
    "zookeeper_address",
]
