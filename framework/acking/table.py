"""The trees that one acker tracks, as arrays, so that the reports of a whole round are applied in
one call.

It decides as ``Acker`` does, tree by tree; a test compares the two. In one call, failures take
precedence over all other reports, and each tree is reported once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from framework.acking.ack_reports import NO_IDS, Ids, fold

_Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Decided(NamedTuple):
    """Trees that have ended."""

    completed: Ids
    failed: Ids


class TreeTable:
    """The trees of one acker. ``buckets``: a tree times out at the ``buckets``-th tick after the
    last message about it. A tick is ``age`` and then ``expire``; messages applied in between are
    still in time.

    Each tree is a row of some 26 bytes, however many tuples it has: its root, the XOR of the
    reports, the tick of the last message, whether its birth is known, and whether it has failed."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._ticks = 0
        self._roots: Ids = NO_IDS  # ascending
        self._values: Ids = NO_IDS
        self._heard = np.empty(0, np.int64)
        self._known: _Flags = np.empty(0, np.bool_)
        self._failed: _Flags = np.empty(0, np.bool_)
        self._expired = 0
        self._unknown = 0

    def apply(self, born: Ids, roots: Ids, values: Ids, failed: Ids) -> Decided:
        """Apply reports. ``born``: trees that spouts have begun. ``values``: the XOR of the emitted
        or acked edges of each of ``roots``. ``failed``: failed trees; other reports about them are
        ignored."""
        nothing = np.zeros(len(born) + len(failed), np.uint64)
        told, values = fold(np.concatenate((roots, born, failed)), np.concatenate((values, nothing)))
        known, fails = _marked(told, born), _marked(told, failed)
        values[fails] = 0
        at = np.searchsorted(self._roots, told)
        there = np.zeros(len(told), np.bool_)
        if len(self._roots):
            near = np.minimum(at, len(self._roots) - 1)
            there = self._roots[near] == told
            rows = at[there]
            values[there] ^= self._values[rows]
            known[there] |= self._known[rows]
            fails[there] |= self._failed[rows]
        over = known & (fails | (values == 0))
        stays = there & ~over
        rows = at[stays]
        self._values[rows], self._heard[rows] = values[stays], self._ticks
        self._known[rows], self._failed[rows] = known[stays], fails[stays]
        if (there & over).any():
            kept = np.ones(len(self._roots), np.bool_)
            kept[at[there & over]] = False
            self._keep(kept)
        new = ~there & ~over
        if new.any():
            self._insert(told[new], values[new], known[new], fails[new])
        return Decided(told[over & ~fails], told[over & fails])

    def reset(self, roots: Ids) -> None:
        """Restart the timeout of trees; unknown ones are ignored."""
        if len(self._roots) and len(roots):
            at = np.minimum(np.searchsorted(self._roots, roots), len(self._roots) - 1)
            self._heard[at[self._roots[at] == roots]] = self._ticks

    def age(self) -> None:
        self._ticks += 1

    def expire(self) -> Ids:
        """Remove the trees that are too old. Returns those whose birth is known."""
        old = self._heard <= self._ticks - self._buckets
        if not old.any():
            return NO_IDS
        expired = self._roots[old & self._known]
        self._expired += len(expired)
        self._unknown += int(old.sum()) - len(expired)
        self._keep(~old)
        return expired

    @property
    def pending(self) -> int:
        """Trees that are neither complete nor failed, and records of late messages."""
        return len(self._roots)

    @property
    def trees(self) -> int:
        """Trees whose spout task is known, and that are neither complete nor failed."""
        return int(self._known.sum())

    @property
    def expired(self) -> int:
        """Trees that have timed out."""
        return self._expired

    @property
    def unknown(self) -> int:
        """Records that expired without a spout task: late or duplicate messages."""
        return self._unknown

    def value(self, root: int) -> int | None:
        """The present number of a tree; None for an unknown tree."""
        at = int(np.searchsorted(self._roots, np.uint64(root)))
        return int(self._values[at]) if at < len(self._roots) and int(self._roots[at]) == root else None

    def _keep(self, kept: _Flags) -> None:
        self._roots, self._values, self._heard = self._roots[kept], self._values[kept], self._heard[kept]
        self._known, self._failed = self._known[kept], self._failed[kept]

    def _insert(self, roots: Ids, values: Ids, known: _Flags, failed: _Flags) -> None:
        at = np.searchsorted(self._roots, roots)
        self._roots = np.insert(self._roots, at, roots)
        self._values = np.insert(self._values, at, values)
        self._heard = np.insert(self._heard, at, self._ticks)
        self._known = np.insert(self._known, at, known)
        self._failed = np.insert(self._failed, at, failed)


def _marked(roots: Ids, which: Ids) -> _Flags:
    """Which of the sorted ``roots`` are in ``which``, a subset of them."""
    found = np.zeros(len(roots), np.bool_)
    if len(which):
        found[np.searchsorted(roots, which)] = True
    return found
