"""Garbage collection in processes that run tasks.

Python looks for cycles among the objects that live. By default it begins whenever there are 700 new
ones, which is every few tuples, and now and then it goes through everything that was ever imported.
"""

from __future__ import annotations

import gc

#: New objects before a collection; collections before one of the next generation. Half a million
#: objects, some 100 MB, may be in cycles that nobody uses before a full collection finds them.
_THRESHOLDS = (20_000, 5, 5)


def collect_rarely() -> None:
    """Leave all objects that live now out of later collections, and collect less often. Called in
    workers, in Spark's workers and by ``ratchet run``, whenever they have loaded what they will
    keep; never in a process that is the user's own."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
