"""The ledger of tuple trees: one number per tree.

Sources: *Acking framework implementation*; *Guaranteed message processing*.

Every edge of a tree (a tuple on its way to one task) has a random 64-bit id. The id is XORed into
the tree's number when the edge is emitted, and again when it is acked. So the number is 0 when
every emitted edge has been acked. With XOR, messages may come in any order.

Invariants:

1. A tree completes only when its spout task is known and its number is 0. It fails only when its
   spout task is known. Either happens once: the record is removed before the callback.
2. Every message about a tree resets its timeout. A tree without a message for ``buckets`` ticks
   fails.
3. A message about an unknown tree opens a record without a spout task. Such a record causes no
   callback, and expires.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, cast

from framework.acking.rotating_map import RotatingMap

R = TypeVar("R", bound=Hashable)
T = TypeVar("T")


class _Tree(Generic[T]):
    """The record of one tree. Its size is fixed, however many tuples the tree has."""

    __slots__ = ("failed", "known", "spout_task", "value")

    def __init__(self) -> None:
        self.value = 0
        self.known = False
        self.spout_task: T | None = None
        self.failed = False


class Acker(Generic[R, T]):
    """Tracks trees by the messages about their roots. It calls ``on_complete(root_id,
    spout_task)``, ``on_fail(root_id, spout_task)`` and, for trees that time out,
    ``on_expire(root_id, spout_task)``, which is ``on_fail`` by default. Each callback runs inside
    the call that causes it. ``buckets``: a tree times out at the ``buckets``-th ``tick`` after the
    last message about it.

    >>> told = []
    >>> acker = Acker(on_complete=lambda root, task: told.append(("done", root, task)), on_fail=lambda root, task: None)
    >>> acker.init("root", "spout 1", 0b1010)
    >>> acker.ack("root", 0b1010 ^ 0b1100)     # a bolt acks its input and has emitted one tuple
    >>> acker.ack("root", 0b1100)
    >>> told
    [('done', 'root', 'spout 1')]
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(
        self,
        on_complete: Callable[[R, T], object],
        on_fail: Callable[[R, T], object],
        buckets: int = 3,
        on_expire: Callable[[R, T], object] | None = None,
    ) -> None:
        self._on_complete = on_complete
        self._on_fail = on_fail
        self._on_expire = on_expire or on_fail
        self._pending: RotatingMap[R, _Tree[T]] = RotatingMap(buckets, self._expire)
        self._expired = 0
        self._unknown = 0
        self._strangers = 0  # pending records without a spout task

    def init(self, root_id: R, spout_task: T, value: int) -> None:
        """A spout task has emitted a root. ``value``: the XOR of the ids of the edges on which the
        root was sent."""
        # complete before any other message, as most trees are
        if not value and root_id not in self._pending:
            self._on_complete(root_id, spout_task)
            return
        tree = self._tree(root_id)
        self._strangers -= not tree.known and root_id in self._pending
        tree.value ^= value
        tree.spout_task = spout_task
        tree.known = True
        self._settle(root_id, tree)

    def ack(self, root_id: R, value: int) -> None:
        """Apply an ack. ``value``: the XOR of acked edges and of edges emitted in between, for one
        tuple or for many."""
        tree = self._tree(root_id)
        tree.value ^= value
        self._settle(root_id, tree)

    def fail(self, root_id: R) -> None:
        """A task has failed a tuple of the tree. If ``init`` has not come yet, the tree fails when
        it comes."""
        tree = self._tree(root_id)
        tree.failed = True
        self._settle(root_id, tree)

    def reset_timeout(self, root_id: R) -> None:
        """Restart the tree's timeout; does nothing for an unknown tree."""
        tree = self._pending.get(root_id)
        if tree is not None:
            self._pending.put(root_id, tree)

    def tick(self) -> None:
        """Advance time by one tick: fail the trees without a message for ``buckets`` ticks."""
        self.age()
        self.expire()

    def age(self) -> None:
        """First half of a tick: age every tree by one tick. Messages between here and ``expire``
        count as after the tick, and are still in time."""
        self._pending.age()

    def expire(self) -> None:
        """Second half of a tick: fail the trees that are too old."""
        self._pending.expire()

    def value(self, root_id: R) -> int | None:
        """The present number of a tree; None for an unknown tree."""
        tree = self._pending.get(root_id)
        return tree.value if tree is not None else None

    @property
    def pending(self) -> int:
        """Trees that are neither complete nor failed, and records of late messages."""
        return len(self._pending)

    @property
    def trees(self) -> int:
        """Trees whose spout task is known, and that are neither complete nor failed."""
        return len(self._pending) - self._strangers

    @property
    def expired(self) -> int:
        """Trees that have timed out."""
        return self._expired

    @property
    def unknown(self) -> int:
        """Records that expired without a spout task: late or duplicate messages."""
        return self._unknown

    def _tree(self, root_id: R) -> _Tree[T]:
        tree = self._pending.get(root_id)
        return tree if tree is not None else _Tree()

    def _settle(self, root_id: R, tree: _Tree[T]) -> None:
        if not tree.known:
            self._strangers += root_id not in self._pending
        if not tree.known or (tree.value and not tree.failed):
            self._pending.put(root_id, tree)
            return
        self._pending.remove(root_id)
        tell = self._on_fail if tree.failed else self._on_complete
        tell(root_id, cast(T, tree.spout_task))

    def _expire(self, root_id: R, tree: _Tree[T]) -> None:
        if not tree.known:
            self._strangers -= 1
            self._unknown += 1
            return
        self._expired += 1
        self._on_expire(root_id, cast(T, tree.spout_task))
