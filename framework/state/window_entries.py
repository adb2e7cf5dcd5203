"""The entries that windows have in the state of their bolt.

The keys of entries begin with the window key, or with ``()`` for the task::

    (key, "n")            count windows: tuples so far
    (key, "t", number)    a tuple, by its number; in time windows, by (pane, number)
    (key, "p", pane)      time windows: number of tuples in a pane
    (key, "f", start)     time windows with lateness: how often a window has fired
    ((), "m", source, tasks, task)  the latest event time seen on each input of a task
    ((), "r", tasks, task)  the watermark of a task: windows due by then have fired
    ((), "o", tasks, task)  windows that end by then were over before the lateness was raised
    ((), "c")             processing time: when windows of this task last fired
    ((), "d")             the kind of these windows, as far as it affects these entries
    ((), "l")             the lateness of these windows

When the number of tasks changes, all entries of a window key move with the key, and every new task
gets the watermarks of all old tasks. A watermark applies only to the keys that its task had: a key
continues from the watermark of the task that it comes from, even when the state has no entries for
the key (C39). So no window fires twice. An input's latest time in a new task is that of the old
task that was furthest behind. A new task deletes the old watermarks once its own exceeds them all.
Processing time is common to all tasks: every task continues from the latest. Every task keeps the
kind of its windows.

Earlier versions had "m", "r" and "o" without the task's place, and an "o" and a watermark ("w")
with each key that has entries.

Entries of the task never expire, whatever ``state_ttl_s`` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import Any

from framework.document_type_checks import fits
from framework.errors import CorruptStateError
from framework.state.corrupt_entries import RESTORE, shown
from framework.topology.fields import Fields
from framework.topology.stateful import KeyValueState
from framework.topology.tuples import Tuple

CLOCK = ((), "c")
KIND = ((), "d")
LATENESS = ((), "l")
#: The entries of a task, under the key ``()``.
OF_THE_TASK = frozenset("mrcdlo")
#: The entries that end with a task's place, and the lengths of their keys.
_PLACED = {"m": 5, "r": 4, "o": 4}


@dataclass(frozen=True, slots=True)
class Window:
    """A window that is due.

    * ``key``: the values of the key fields.
    * ``start``, ``end``: seconds since 1970, half-open; for count windows, the numbers of the
      tuples.
    * ``tuples``: in the order of arrival.
    * ``firing``: 0 the first time, one more each time that the window fires again.
    * ``watermark``: in seconds; the current time for processing time; None for count windows."""

    key: tuple[Any, ...]
    _: KW_ONLY
    start: float
    end: float
    tuples: Sequence[Tuple]
    firing: int = 0
    watermark: float | None = None


def entries_of(state: KeyValueState[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of a windowed bolt's state. Raises ``CorruptStateError`` for an entry that no
    window has put."""
    for key, value in state.items():
        if not _is_entry(key, value):
            raise damaged(key, value)
        yield key, value


def _is_entry(key: Any, value: Any) -> bool:
    if not (isinstance(key, tuple) and len(key) > 1 and isinstance(key[0], tuple)):
        return False
    what, more = key[1], key[2:]
    if what == "t":
        place: Any = more[0] if len(more) == 1 else None
        return _is_kept(value) and (fits(place, int) or (fits(place, tuple[int, ...]) and len(place) == 2))
    if what in ("p", "f", "r", "o", "m", "w"):
        numbers = more[1:] if what == "m" else more
        return fits(value, float) and all(fits(each, int) for each in numbers) and (what not in "pfm" or len(more) > 0)
    return True


def _is_kept(value: Any) -> bool:
    """Whether this is a tuple in the form that ``kept_form`` makes."""
    if not (isinstance(value, list) and len(value) == 5):
        return False
    component, stream, names, values, arrival = value
    return (
        isinstance(component, str)
        and isinstance(stream, str)
        and fits(names, list[str])
        and isinstance(values, list)
        and len(names) == len(values)
        and fits(arrival, int)
    )


def damaged(key: Any, value: Any) -> CorruptStateError:
    return CorruptStateError(
        f"a state of windows holds {shown(value)} under the key {shown(key)}, which no window has put: {RESTORE}"
    )


def place_in(key: Any) -> tuple[int, int] | None:
    """The number of tasks, and the task, that an entry of a task names."""
    return key[-2:] if len(key) > 3 and key[0] == () and _PLACED.get(key[1]) == len(key) else None


def kept_form(tup: Tuple, arrival: int) -> list[Any]:
    """The stored form of a tuple. ``arrival``: rises from tuple to tuple of a key."""
    return [tup.source_component, tup.source_stream, list(tup.fields.names), list(tup.values), arrival]


def tuples_of(kept: Iterable[Any]) -> list[Tuple]:
    kept = list(filter(None, kept))
    for each in kept:
        if not _is_kept(each):
            raise damaged("of a tuple", each)
    found: dict[tuple[str, ...], Fields] = {}
    return [
        Tuple(None, found.setdefault(tuple(names), Fields(*names)), tuple(values), component, stream)
        for component, stream, names, values, _ in sorted(kept, key=itemgetter(4))
    ]
