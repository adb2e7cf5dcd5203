"""``framework.run`` without Spark: for tests that start a driver hundreds of times, and soaks."""

from __future__ import annotations

from typing import Any

import framework.run
from framework import submit


def local(*arguments: Any, **options: Any) -> Any:
    return submit(*arguments, executor="local", **options)


if __name__ == "__main__":
    framework.run.submit = local
    framework.run.app()
