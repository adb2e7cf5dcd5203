"""``spark.*``: settings that go to Spark, except for those that would break a guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.errors import ConfigError

#: Spark settings that the protocol depends on (C10), each with the reason.
_SPARK_FIXED = {
    "spark.task.maxFailures": "Spark must repeat nothing inside an attempt; Ratchet replays the batch",
    "spark.stage.maxConsecutiveAttempts": "Spark must repeat nothing inside an attempt; Ratchet replays the batch",
    "spark.speculation": "a speculative task would write twice",
    "spark.scheduler.mode": "commits need a pool of their own",
}


def spark_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """The Spark settings among others, as texts. Raises ``ConfigError``."""
    return {key: _spark_value(key, value) for key, value in values.items() if key.startswith("spark.")}


def _spark_value(key: str, value: Any) -> str:
    if key in _SPARK_FIXED:
        raise ConfigError(f"{key} cannot be set: {_SPARK_FIXED[key]}")
    if key == "spark.master" and isinstance(value, str) and value.startswith("local[") and "," in value:
        raise ConfigError(f"spark.master {value!r}: local[N,F] repeats failed tasks; use {value.split(',')[0]}]")
    return str(value).lower() if isinstance(value, bool) else str(value)
