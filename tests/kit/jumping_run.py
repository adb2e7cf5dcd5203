"""A driver without Spark whose wall clock jumps an hour ahead, and back, every 50 ms."""

from __future__ import annotations

import time

import framework.commands.run

_real = time.time
_start = time.monotonic()
_said = False


def jumping() -> float:
    global _said
    jumps = int((time.monotonic() - _start) / 0.05)
    if jumps % 2 and not _said:
        _said = True
        print("the clock has jumped", flush=True)
    return _real() + (3600 if jumps % 2 else 0)


if __name__ == "__main__":
    time.time = jumping
    framework.commands.run.app()
