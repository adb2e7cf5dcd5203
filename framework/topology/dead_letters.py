"""Dead letters that are kept: what one is, and how tools and replays read them.

A letter keeps the coordinates of the record that it was made of, however often it comes back (C48).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

#: The header of a letter that has not all of its record, which therefore cannot be replayed.
CUT_HEADER = "ratchet.cut"


class Letter(NamedTuple):
    """A record that was taken out. ``error``: the last reason. ``attempts``: how often it was
    replayed and came back. ``ref``: by what its keeper finds it; JSON-able.
    ``kept_in``: the partition where a topic has it."""

    topic_id: str
    partition: int
    offset: int
    topic: str
    timestamp_ms: int | None
    error: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    attempts: int
    ref: Sequence[Any]
    kept_in: int | None = None

    @property
    def id(self) -> tuple[str, int, int]:
        return self.topic_id, self.partition, self.offset

    @property
    def place(self) -> str:
        """Where the record was, as people write it: ``orders/3/17``."""
        return f"{self.topic}/{self.partition}/{self.offset}"

    @property
    def size(self) -> int:
        """The bytes of key, value and headers."""
        return sum(len(each or b"") for each in (self.key, self.value, *(value for _, value in self.headers)))

    @property
    def is_cut(self) -> bool:
        return any(name == CUT_HEADER for name, _ in self.headers)


class LetterReader(ABC):
    """Reads the letters of one topology where they are kept. Used by one thread at a time."""

    @abstractmethod
    def letters(self) -> Iterator[Letter]:
        """All letters of closed transactions that are neither replayed nor dropped, in any order.
        Raises ``RetryableError`` when something does not answer."""

    @abstractmethod
    def fetched(self, refs: Sequence[Sequence[Any]], txid: int) -> list[Letter | None]:
        """The letters that ``ref`` says, in order, as they were before transaction ``txid``,
        which may have been attempted since. None for one that was not there, or had ended. Raises
        as ``letters``, and ``DataLossError`` for one that is gone."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice."""


@runtime_checkable
class LetterKeeper(Protocol):
    """A committer of dead letters that lets others read them."""

    def letter_reader(self, conf: Mapping[str, Any], topology_id: str, incarnation: str) -> LetterReader:
        """Called in the process of a driver or a tool, on a copy of the bolt."""
