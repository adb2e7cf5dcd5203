"""Read several sinks consistently: as of a transaction that all of them hold.

Sinks finish a transaction one after the other, so a reader of two sinks may see it in one and not
yet in the other. But each row keeps its previous value. So the value as of the last common
transaction stays readable while the next transaction changes the row, and is lost only when a later
one changes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from framework.errors import ConfigError, MovedOnError
from sinks.states import MapState

#: How often a reader starts again because rows changed while it was reading.
TRIES = 100


class Together(NamedTuple):
    """``values``: for each request, one value per key, as transaction ``txid`` left it."""

    txid: int
    values: list[list[Any]]


def common_txid(states: Sequence[MapState]) -> int:
    """The last transaction that all these states hold completely, by their own headers.

    For all sinks of a topology, ZooKeeper has the same number:
    ``framework.transactions.committed_txid(store, topology_id)``."""
    if not states:
        raise ConfigError("common_txid needs at least one state")
    return min(state.read_header().done for state in states)


def read_together(
    requests: Sequence[tuple[MapState, Sequence[Any]]], txid: Callable[[], int] | None = None, *, tries: int = TRIES
) -> Together:
    """Read keys of several states, all as of the same transaction.

    ``requests``: (state, keys) pairs. The states are those of the topology, or copies with the same
    backends. ``txid``: a function that returns the last common transaction; by default it comes
    from the headers of the states. Raises ``MovedOnError`` when rows changed during each of
    ``tries`` tries, and ``ConfigError`` for non-transactional states.

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
