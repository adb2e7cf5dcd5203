"""Garbage collection settings for processes that run tasks.

Python searches live objects for cycles. By default it starts whenever there are 700 new ones, which
is every few tuples, and sometimes it searches every object that was ever imported.
"""

from __future__ import annotations

import gc

#: New objects before a collection; collections before one of the next generation. Before a full
#: collection, up to half a million unused objects in cycles, some 100 MB, may accumulate.
_THRESHOLDS = (20_000, 5, 5)


def collect_rarely() -> None:
    """Exclude all present objects from later collections, and collect less often. Called in task
    workers, in Spark's workers and by ``ratchet run``, after they have loaded their long-lived
    objects; never in a process of the user's own."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
