"""Comparison of a state with a scratch copy that holds what the source gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framework.errors import MovedOnError
from framework.topology import Difference, FencedState, InspectableState

#: How often rows are read again that change while they are read.
HOLD_TRIES = 1_000


def compare(
    state: InspectableState,
    scratch: FencedState,
    txid: int,
    differs: Callable[[Difference], None],
    moved: Callable[[Any], None],
) -> int:
    """Compare what the state held after ``txid`` with ``scratch``. Calls ``differs`` for each
    difference, and ``moved`` with each key whose value after ``txid`` is no longer known. Returns
    the number of keys compared."""
    compared = 0
    for page in state.pages(scratch):
        held = state.held(page, txid)
        for key in page:
            if key not in held:
                moved(key)
        compared += state.compare(held, scratch, differs)
    return compared


def hold(state: InspectableState, keys: Sequence[Any]) -> tuple[int, Mapping[Any, Any]]:
    """What these keys, which had ``moved``, hold now: a txid, and the values as of then. Raises
    ``MovedOnError`` when the keys change faster than they can be read."""
    for _ in range(HOLD_TRIES):
        txid = state.read_header().done
        held = state.held(keys, txid)
        if len(held) == len(keys):
            return txid, held
    raise MovedOnError(f"{state.location}: its rows change faster than they can be read; stop the topology")
