"""Which executor a run asks for."""

from __future__ import annotations

from framework.errors import ConfigError

SPARK, LOCAL = "spark", "local"


def checked_executor(name: object) -> str:
    """``spark`` or ``local``. None stands for ``spark``. Raises ``ConfigError`` for anything
    else."""
    if name is None:
        return SPARK
    if name not in (SPARK, LOCAL):
        raise ConfigError(f"executor {name!r} is not known: 'spark' or 'local'")
    return str(name)
