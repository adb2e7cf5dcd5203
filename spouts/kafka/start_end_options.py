"""The user's settings for where reading begins or ends: for all partitions, by topic, by
partition."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Union

from framework.errors import ConfigError
from spouts.kafka.partition_plan_entries import partition_id, topic_and_number


class Instant(NamedTuple):
    """The first record of this time or later, in milliseconds since 1970."""

    time_ms: int


#: A place that each of several partitions has.
CommonBound = Union[Literal["earliest", "latest"], Instant]
#: A place in a partition. An ``int`` is an offset.
Bound = Union[CommonBound, int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """A place in each partition. A partition's own has precedence over its topic's, and both over
    ``everywhere``."""

    everywhere: Bound | None = None
    topics: Mapping[str, Bound] = field(default_factory=dict)
    partitions: Mapping[str, Bound] = field(default_factory=dict)

    def of(self, partition: str) -> Bound | None:
        """The place for a partition; None if there is none.

        >>> Bounds("latest", {}, {"orders/3": 70}).of("orders/3")
        70
        """
        if partition in self.partitions:
            return self.partitions[partition]
        if self.topics:
            return self.topics.get(topic_and_number(partition)[0], self.everywhere)
        return self.everywhere


EARLIEST = Bounds("earliest")
#: The prefix of the text of an offset.
OFFSET = "offset "


def text_of_bound(bound: Bound) -> str:
    """A bound as text, to compare it with the bound for which a plan was made.

    >>> text_of_bound(Instant(1_000)), text_of_bound(70), text_of_bound("latest")
    ('time 1000', 'offset 70', 'latest')
    """
    if isinstance(bound, Instant):
        return f"time {bound.time_ms}"
    return bound if isinstance(bound, str) else f"{OFFSET}{bound}"


def checked_bounds(
    name: str, given: object, topics: Collection[str], *, without: Collection[str] = (), words: tuple[str, ...]
) -> Bounds:
    """Check and convert the argument ``name``. Raises ``ConfigError``.

    * ``topics``: those that the spout reads; none, if a pattern selects them.
    * ``without``: topics that may be missing.
    * ``words``: the accepted words."""
    if not isinstance(given, Mapping):
        return Bounds(checked_bound(name, given, words))
    by_topic: dict[str, Bound] = {}
    by_partition: dict[str, Bound] = {}
    for key, value in given.items():
        topic, number = _place(name, key, topics)
        if topics and topic not in topics:
            raise ConfigError(f"{name} names topic {topic!r}, and the spout reads {', '.join(sorted(topics))}")
        if number is not None:
            by_partition[partition_id(topic, number)] = _place_in(f"{name}[{key!r}]", value, words)
        elif isinstance(value, Mapping):
            for each, at in value.items():
                place = partition_id(topic, _number(name, each))
                by_partition[place] = _place_in(f"{name}[{topic!r}][{each!r}]", at, words)
        else:
            by_topic[topic] = checked_bound(f"{name}[{key!r}]", value, words)
    if not by_topic and not by_partition:
        raise ConfigError(f"{name} is an empty mapping: name topics or partitions")
    named = by_topic.keys() | {topic_and_number(each)[0] for each in by_partition}
    if left := sorted(set(topics) - named - set(without)):
        raise ConfigError(f"{name} says nothing of topic {left[0]!r}: name each topic, or give one value for all")
    return Bounds(None, by_topic, by_partition)


def check_order(start: Bounds, end: Bounds) -> None:
    """Raise ``ConfigError`` if reading would end before it starts, as far as that is known without
    the log."""
    shared = [("", start.everywhere, end.everywhere)]
    for these, those in ((start.topics, end.topics), (start.partitions, end.partitions)):
        shared += [(f" of {each}", these[each], those[each]) for each in sorted(these.keys() & those.keys())]
    for where, first, last in shared:
        if isinstance(first, (int, tuple)) and type(first) is type(last) and last < first:  # type: ignore[operator]
            raise ConfigError(
                f"end{where} is before start ({text_of_bound(last)}, {text_of_bound(first)}): exchange them"
            )


def _place(name: str, key: object, topics: Collection[str]) -> tuple[str, int | None]:
    if isinstance(key, int) and not isinstance(key, bool):
        if len(topics) != 1:
            raise ConfigError(f"{name} names partition {key}, and there are several topics: say 'topic/{key}'")
        return next(iter(topics)), _number(name, key)
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str):
        return key[0], _number(name, key[1])
    if isinstance(key, str) and "/" in key:
        topic, _, number = key.rpartition("/")
        return topic, _number(name, number)
    if isinstance(key, str) and key:
        return key, None
    raise ConfigError(f"{name} names {key!r}: give a topic, or a partition as 'topic/0'")


def _number(name: str, given: object) -> int:
    """The number of a partition; TOML and JSON have texts for keys."""
    if isinstance(given, str) and given.isascii() and given.isdigit():
        return int(given)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise ConfigError(f"{name} names partition {given!r}: give its number, as in 'topic/0'")


def _place_in(name: str, given: Any, words: tuple[str, ...]) -> Bound:
    """The place in one partition: an int is an offset."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 0:
            raise ConfigError(f"{name} is offset {given}: give one of 0 or more")
        return given
    return checked_bound(name, given, words, or_offset="an offset, ")


def checked_bound(name: str, given: Any, words: tuple[str, ...], or_offset: str = "") -> CommonBound:
    """What the argument ``name`` says for several partitions: an int is a time. Raises
    ``ConfigError``."""
    if isinstance(given, str) and given in words:
        return "latest" if given == "latest" else "earliest"
    if isinstance(given, str):
        with suppress(ValueError):
            given = datetime.datetime.fromisoformat(given)
    if isinstance(given, datetime.datetime) and given.tzinfo is not None:
        given = int(given.timestamp() * 1000)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return Instant(given)
    shown = ", ".join(repr(each) for each in words)
    raise ConfigError(
        f"{name} must be {shown}, {or_offset}milliseconds since 1970, or a datetime with a zone, not {given!r}"
    )
