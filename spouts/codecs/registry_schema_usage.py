"""The schemas of registries that a thread has decoded with, for the driver to compare."""

from __future__ import annotations

import threading

#: A schema, such as "http://registry:8081 id 7", and the digest of its content; "": the registry
#: does not have it.
UsedSchema = tuple[str, str]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.used: set[UsedSchema] = set()


_of_thread = _OfThread()


def note_used(schema: str, digest: str) -> None:
    """Call it whenever values of this schema are decoded."""
    _of_thread.used.add((schema, digest))


def take_used() -> set[UsedSchema]:
    """The schemas noted by this thread since the last call."""
    used, _of_thread.used = _of_thread.used, set()
    return used
