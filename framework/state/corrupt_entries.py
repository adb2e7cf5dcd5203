"""The words for damaged data of a state."""

from __future__ import annotations

#: The most bytes of damaged data that an error shows.
_BYTES_MAX = 60
RESTORE = "restore the data of the store, or a snapshot (ratchet state restore)"


def shown(found: object) -> str:
    """The beginning of a damaged key or value.

    >>> len(shown(b"x" * 1_000)), shown([1, 2])
    (63, '[1, 2]')
    """
    return repr(found[:_BYTES_MAX]) if isinstance(found, bytes) else repr(found)[:_BYTES_MAX]
