"""Finds the dead letters of a topology, and counts them by what they have in common."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from framework.bounded_pages import pages_within
from framework.coordination.store import CoordinationStore
from framework.durations import micros_of
from framework.errors import ConfigError
from framework.topology import Reach, Topology
from framework.topology.dead_letters import Letter, LetterReader, ListedLetter
from framework.transactions.documents import committed_txid, read_incarnation
from framework.transactions.spout_dead_letter_reader import letter_component, letter_reader_of

#: About the bytes of letters that are in memory at a time, and the most letters.
BYTES_AT_A_TIME = 16 << 20
_LETTERS_AT_A_TIME = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters are meant; those for which all of it is true. ``places``: ``topic/partition/
    offset`` of single ones. ``topic``: of the record. ``component``: what refused it; the spout,
    where it could not be decoded. ``since_ms``: the least time of the record. ``reason``: a part of
    the reason, in letters of any case."""

    places: Sequence[str] = ()
    topic: str | None = None
    component: str | None = None
    since_ms: int | None = None
    reason: str | None = None

    def takes(self, letter: ListedLetter, component: str, reason: str) -> bool:
        return (
            (not self.places or letter.place in self.places)
            and self.topic in (None, letter.topic)
            and self.component in (None, component)
            and (self.since_ms is None or (letter.timestamp_ms is not None and letter.timestamp_ms >= self.since_ms))
            and (self.reason is None or self.reason.casefold() in reason.casefold())
        )


def since_ms_of(text: str) -> int:
    """Milliseconds since 1970 of ``2026-01-31T12:00``, in UTC where it has no zone, or of a length
    of time before now, such as ``2h``. Raises ``ConfigError``."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return (time.time_ns() // 1_000 - micros_of(text, "--since (a time such as 2026-01-31T12:00, or)")) // 1_000
    zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
    return int(zoned.timestamp() * 1_000)


@dataclass(slots=True, kw_only=True)
class LetterGroup:
    """Letters of one partition and one reason. ``first_offset``, ``last_offset``: of the records.
    ``attempts``: the most that one of them has."""

    topic: str
    partition: int
    component: str
    reason: str
    first_offset: int
    last_offset: int
    letters: int = 0
    attempts: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None

    def add(self, letter: ListedLetter) -> None:
        self.letters += 1
        self.first_offset = min(self.first_offset, letter.offset)
        self.last_offset = max(self.last_offset, letter.offset)
        self.attempts = max(self.attempts, letter.attempts)
        if letter.timestamp_ms is not None:
            self.oldest_ms = min(letter.timestamp_ms, self.oldest_ms or letter.timestamp_ms)
            self.newest_ms = max(letter.timestamp_ms, self.newest_ms or letter.timestamp_ms)


class Letters:
    """The letters of one topology. ``closed``: reads its last closed transaction."""

    def __init__(self, topology: Topology, reader: LetterReader, closed: Callable[[], int]) -> None:
        self._topology, self._reader, self._closed = topology, reader, closed
        self._ids = {each.id for each in topology.components}

    def found(self, wanted: LetterFilter) -> list[ListedLetter]:
        """Those that are meant, by topic, partition and offset. Raises as
        ``LetterReader.letters``."""
        taken = [each for each in self._reader.letters(self._closed) if wanted.takes(each, *self.cause(each))]
        return sorted(taken, key=lambda each: (each.topic, each.topic_id, each.partition, each.offset))

    def whole(self, listed: Sequence[ListedLetter]) -> Iterator[Letter]:
        """These letters with their content, of which about ``BYTES_AT_A_TIME`` are in memory.
        Without letters that have ended meanwhile."""
        for some, _ in pages_within(listed, _LETTERS_AT_A_TIME, BYTES_AT_A_TIME, attrgetter("size")):
            found = self._reader.fetched([each.ref for each in some], self._closed() + 1)
            yield from (each for each in found if each is not None)

    def groups(self, wanted: LetterFilter) -> list[LetterGroup]:
        """Those that are meant, counted; the most frequent first in each partition."""
        groups: dict[tuple[str, int, str, str], LetterGroup] = {}
        for each in self.found(wanted):
            component, reason = self.cause(each)
            key = each.topic, each.partition, component, reason
            if key not in groups:
                groups[key] = LetterGroup(
                    topic=each.topic,
                    partition=each.partition,
                    component=component,
                    reason=reason,
                    first_offset=each.offset,
                    last_offset=each.offset,
                )
            groups[key].add(each)
        return sorted(groups.values(), key=lambda each: (each.topic, each.partition, -each.letters, each.reason))

    def cause(self, letter: Letter | ListedLetter) -> tuple[str, str]:
        """The component that refused the record, and the reason."""
        component, colon, reason = letter.error.partition(": ")
        if colon and component in self._ids:
            return component, reason
        return self._topology.spout.id, letter.error


@contextmanager
def opened_letters(topology: Topology, store: CoordinationStore, conf: Mapping[str, Any]) -> Iterator[Letters]:
    """The letters of a topology. Raises ``ConfigError`` where it keeps none, or none that another
    process can read."""
    component = letter_component(topology)
    for state in component.states if component is not None else ():
        if state.reach is Reach.PROCESS:
            raise ConfigError(
                f"topology {topology.id!r} keeps its dead letters in {state.location}, which only its driver can read: give the "
                "DeadLetterTable a state in a database"
            )
    reader = letter_reader_of(topology, conf, read_incarnation(store, topology.id))
    if reader is None:
        raise ConfigError(
            f"topology {topology.id!r} keeps no dead letters: give its spout on_bad_record='dead_letter', and dead_letters= a "
            "DeadLetterTable or a DeadLetterTopic"
        )
    try:
        yield Letters(topology, reader, partial(committed_txid, store, topology.id))
    finally:
        reader.close()
