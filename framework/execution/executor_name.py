"""The choice of a run's executor."""

from __future__ import annotations

from framework.errors import ConfigError

SPARK, LOCAL = "spark", "local"


def checked_executor(name: object) -> str:
    """Check an executor name: ``spark`` (also for None) or ``local``. Raises ``ConfigError`` for
    any other name."""
    if name is None:
        return SPARK
    if name not in (SPARK, LOCAL):
        raise ConfigError(f"executor {name!r} is not known: 'spark' or 'local'")
    return str(name)
