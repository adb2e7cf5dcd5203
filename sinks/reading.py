"""Reading several sinks at one moment: as of a transaction that all of them hold.

Sinks finish a transaction one after the other, so a reader who looks at two of them may see it in one and not yet in the
other. The previous values in the rows make the state after the last common transaction readable until the one after the
next changes a row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from framework.errors import ConfigError, MovedOnError
from sinks.states import MapState

#: How often a reader begins again because rows have moved on meanwhile.
TRIES = 100


class Together(NamedTuple):
    """``values``: per request, one per key, as transaction ``txid`` left them."""

    txid: int
    values: list[list[Any]]


def common_txid(states: Sequence[MapState]) -> int:
    """The last transaction that every one of these states holds whole, by their own headers. Of all sinks of a topology,
    ZooKeeper says the same: ``framework.transactions.committed_txid(store, topology_id)``."""
    if not states:
        raise ConfigError("common_txid needs at least one state")
    return min(state.read_header().done for state in states)


def read_together(
    requests: Sequence[tuple[MapState, Sequence[Any]]], txid: Callable[[], int] | None = None, *, tries: int = TRIES
) -> Together:
    """Read keys of several states as one transaction left them all.

    ``requests``: (state, keys) pairs; the states are those of the topology, or copies with the same backends. ``txid``: says
    which transaction is the last common one; by default the states' own headers do. Raises ``MovedOnError`` when the rows
    change faster than they can be read, ``tries`` times over, and ``ConfigError`` for states without previous values.

    ::

        words, users = OpaqueMapState(words_backend), OpaqueMapState(users_backend)
        txid, [counts, totals] = read_together([(words, ["dog", "cat"]), (users, ["ann"])])
    """
    last: MovedOnError | None = None
    for _ in range(max(tries, 1)):
        wanted = txid() if txid is not None else common_txid([state for state, _ in requests])
        try:
            return Together(wanted, [state.read_as_of(keys, wanted) for state, keys in requests])
        except MovedOnError as error:
            last = error
    raise MovedOnError(f"{last}: tried {tries} times; read fewer keys at a time")
