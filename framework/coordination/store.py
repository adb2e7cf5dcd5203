"""The port that keeps a topology's transactional state, and an in-memory implementation.

Invariants:

1. ``apply`` is atomic: all changes or none.
2. A ``Leadership``'s changes are applied only if no later leader has been elected; the check is
   part of the same atomic step.
3. A reader never mistakes unreadable data for absent data.
"""

from __future__ import annotations

import posixpath
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from framework.errors import LeadershipLostError, StaleWriterError


@dataclass(frozen=True, slots=True)
class Put:
    """Create a node or replace its data."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a node. Does nothing when it does not exist."""

    path: str


Change = Union[Put, Delete]


class Leadership(ABC):
    """The right to write under one path, until a later leader is elected."""

    epoch: int

    @property
    @abstractmethod
    def lost(self) -> bool:
        """True once the session that held the leadership has ended."""

    @abstractmethod
    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes under this leadership. After a lost reply, this method reads whether they
        were applied. Raises ``StaleWriterError`` when a later leader has been elected, and
        ``LeadershipLostError`` when the session has ended."""

    def confirm(self) -> None:
        """Check that this leader still leads. Everything read since its election is then
        consistent. Raises as ``apply`` does."""
        self.apply(())

    @abstractmethod
    def resign(self) -> None:
        """Give up the leadership. Safe to call twice."""


class CoordinationStore(ABC):
    """A small tree of documents. Paths are relative to the store's root and use ``/``."""

    @abstractmethod
    def get(self, path: str) -> bytes | None:
        """The data of a node, or None when the node does not exist."""

    @abstractmethod
    def children(self, path: str) -> list[str]:
        """The names of the nodes directly below, sorted. Empty when the node does not exist."""

    @abstractmethod
    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes atomically, without a fence."""

    @abstractmethod
    def lead(self, path: str, identity: str, timeout_s: float | None = None) -> Leadership | None:
        """Stand for election for the subtree of ``path`` and wait. Returns None when ``timeout_s``
        ends first.

        When this returns a leadership, the new leader's epoch is durable, and greater than all
        earlier epochs.
        """

    @abstractmethod
    def is_led(self, path: str) -> bool:
        """Whether a process leads below ``path`` now, or is a candidate."""

    @abstractmethod
    def announce(self, path: str, data: bytes | None) -> None:
        """Create a node that ends with this process's session, or replace its data; None removes
        it. Needs no leadership. The protocol must not depend on such nodes: they are for observers.
        Raises ``RetryableError`` when the store does not answer."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice."""


class MemoryStore(CoordinationStore):
    """A store that ends with the process. Several runs may share one, as they can share
    ZooKeeper."""

    def __init__(self) -> None:
        self._nodes: dict[str, bytes] = {}
        self._epochs: dict[str, int] = {}
        self._leaders: dict[str, _MemoryLeadership] = {}
        self._changed = threading.Condition()

    def get(self, path: str) -> bytes | None:
        with self._changed:
            return self._nodes.get(_clean(path))

    def children(self, path: str) -> list[str]:
        prefix = _clean(path).rstrip("/") + "/"
        with self._changed:
            return sorted({node[len(prefix) :].split("/")[0] for node in self._nodes if node.startswith(prefix)})

    def apply(self, changes: Sequence[Change]) -> None:
        with self._changed:
            for change in changes:
                if isinstance(change, Put):
                    self._nodes[_clean(change.path)] = change.data
                else:
                    self._nodes.pop(_clean(change.path), None)

    def lead(self, path: str, identity: str, timeout_s: float | None = None) -> Leadership | None:
        with self._changed:
            if not self._changed.wait_for(lambda: path not in self._leaders, timeout_s):
                return None
            self._epochs[path] = self._epochs.get(path, 0) + 1
            leadership = _MemoryLeadership(self, path, self._epochs[path])
            self._leaders[path] = leadership
            return leadership

    def is_led(self, path: str) -> bool:
        with self._changed:
            return path in self._leaders

    def announce(self, path: str, data: bytes | None) -> None:
        self.apply([Delete(path) if data is None else Put(path, data)])

    def depose(self, path: str) -> None:
        """Take the leadership away, as an expired session would. For tests."""
        with self._changed:
            leader = self._leaders.pop(path, None)
            if leader is not None:
                leader._lost = True
            self._changed.notify_all()

    def close(self) -> None:
        """Does nothing. The nodes stay, because other runs may share this store."""

    def _apply_as(self, leadership: _MemoryLeadership, changes: Sequence[Change]) -> None:
        with self._changed:
            if self._epochs[leadership.path] != leadership.epoch:
                raise StaleWriterError(
                    f"{leadership.path}: epoch {self._epochs[leadership.path]} leads, this is epoch {leadership.epoch}",
                    self._epochs[leadership.path],
                )
            if leadership.lost:
                raise LeadershipLostError(f"{leadership.path}: epoch {leadership.epoch} no longer leads")
            self.apply(changes)

    def _resign(self, leadership: _MemoryLeadership) -> None:
        with self._changed:
            if self._leaders.get(leadership.path) is leadership:
                del self._leaders[leadership.path]
                self._changed.notify_all()


class _MemoryLeadership(Leadership):
    def __init__(self, store: MemoryStore, path: str, epoch: int) -> None:
        self._store = store
        self.path = path
        self.epoch = epoch
        self._lost = False

    @property
    def lost(self) -> bool:
        return self._lost

    def apply(self, changes: Sequence[Change]) -> None:
        self._store._apply_as(self, changes)

    def resign(self) -> None:
        self._store._resign(self)
        self._lost = True


def _clean(path: str) -> str:
    return posixpath.normpath("/" + path)
