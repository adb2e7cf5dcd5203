"""Kept dead letters: their content, and their readers for tools and replays.

A letter keeps the coordinates of its original record, however often it is refused again (C48).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

#: The header of a letter that lacks a part of its record, and therefore cannot be replayed.
CUT_HEADER = "ratchet.cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RefusedRecord:
    """``error``: the last reason."""

    topic_id: str
    partition: int
    offset: int
    topic: str
    timestamp_ms: int | None
    error: str

    @property
    def id(self) -> tuple[str, int, int]:
        return self.topic_id, self.partition, self.offset

    @property
    def place(self) -> str:
        """The record's coordinates in the form for users: ``orders/3/17``."""
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter(_RefusedRecord):
    """A refused record.

    * ``attempts``: how often it was replayed and refused again.
    * ``ref``: the key by which its keeper finds it; JSON-able.
    * ``kept_in``: the partition of a topic that contains it."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    attempts: int
    ref: Sequence[Any]
    kept_in: int | None = None

    @property
    def size(self) -> int:
        """The bytes of key, value and headers."""
        return sum(len(each or b"") for each in (self.key, self.value, *(value for _, value in self.headers)))

    def row(self, **changed: Any) -> dict[str, Any]:
        """The fields as a row of the stream of dead letters, some of them changed or added."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | changed

    @property
    def is_cut(self) -> bool:
        return any(name == CUT_HEADER for name, _ in self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLetter(_RefusedRecord):
    """A letter without its content. All fields: as of the letter."""

    attempts: int
    ref: Sequence[Any]
    size: int
    is_cut: bool

    @classmethod
    def of(cls, letter: Letter) -> ListedLetter:
        return cls(**{each.name: getattr(letter, each.name) for each in fields(cls)})


class LetterReader(ABC):
    """Reads the stored letters of one topology. Used by one thread at a time."""

    @abstractmethod
    def letters(self, closed: Callable[[], int]) -> Iterator[ListedLetter]:
        """All letters of closed transactions that are neither replayed nor dropped, in any order,
        without their content, which ``fetched`` reads: all of them together may be larger than the
        memory. ``closed``: reads the last closed transaction. The keeper may hold the next one,
        which may still change. Raises ``RetryableError`` when the store does not answer."""

    @abstractmethod
    def fetched(self, refs: Sequence[Sequence[Any]], txid: int) -> list[Letter | None]:
        """The letters with these ``ref`` keys, in order, as they were before transaction ``txid``,
        which may have been attempted since. None for a letter that did not exist, or had ended.
        Raises as ``letters``, and ``DataLossError`` for a letter that was lost."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Safe to call twice."""


@runtime_checkable
class LetterKeeper(Protocol):
    """A committer of dead letters that can be read."""

    def letter_reader(self, conf: Mapping[str, Any], topology_id: str, incarnation: str) -> LetterReader:
        """Called in the process of a driver or a tool, on a copy of the bolt."""
