"""Garbage collection in processes that run tasks."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
import weakref
from framework.execution.gc_tuning import collect_rarely

class Knot:
    def __init__(self):
        self.itself = self

collect_rarely()
assert gc.get_freeze_count() > 1_000
before = gc.get_stats()[0]["collections"]
kept = [[number] for number in range(10_000)]
assert gc.get_stats()[0]["collections"] == before
knot = weakref.ref(Knot())
kept += [[number] for number in range(30_000)]
assert knot() is None
"""


def test_new_objects_alone_begin_no_collection_and_cycles_are_found() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
