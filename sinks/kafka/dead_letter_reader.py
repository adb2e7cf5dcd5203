"""Dead letters as records of a Kafka topic, and their reader.

The topic is a log: a letter is written once, and a later record of the same coordinates says that
it has ended, or was refused again. The record of the highest txid applies. All records of a letter
are in one partition: retention, which removes the oldest, keeps the last. Records of another
topology, and of an incarnation before a ``reset --everything``, are ignored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from framework.clients.consumer_close_timeout import Consumer
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError, DataLossError, RetryableError
from framework.topology.dead_letters import Letter, LetterReader, ListedLetter

#: The prefix of added headers.
HEADER = "ratchet."
_ANSWER_S = 15.0
_POLL_S = 0.05
#: Gaps of up to this many records are read instead of skipped by a seek.
_JUMP = 1_000
#: A topic without a record for this long counts as not answering.
_SILENCE_S = 30.0


class TopicLetters(LetterReader):
    """The letters of one incarnation of a topology. The broker addresses are needed only when the
    first letter is read, so a topology that is only inspected may lack them."""

    def __init__(self, settings: Callable[[], KafkaSettings], topic: str, topology_id: str, incarnation: str) -> None:
        self._settings_of, self._topic = settings, topic
        self._owner = (topology_id, incarnation)
        self._client: Consumer | None = None

    def letters(self, closed: Callable[[], int]) -> Iterator[ListedLetter]:
        last = closed()
        newest: dict[tuple[str, str, str], tuple[int, ListedLetter | None]] = {}
        for message in self._messages():
            added = _added(message)
            if (added.get("topology"), added.get("incarnation")) != self._owner or not added:
                continue
            place = added.get("topic_id", ""), added["partition"], added["offset"]
            txid = int(added["txid"])
            if txid <= last and (place not in newest or newest[place][0] < txid):
                newest[place] = txid, None if "settled" in added else ListedLetter.of(_letter(message, added))
        for _, letter in newest.values():
            if letter is not None:
                yield letter

    def fetched(self, refs: Sequence[Sequence[Any]], txid: int) -> list[Letter | None]:
        """Records of a topic never change, so they are still the same as when they were found."""
        wanted: dict[int, set[int]] = {}
        for *_, number, offset in refs:
            wanted.setdefault(number, set()).add(offset)
        messages = {(number, each.offset()): each for number in wanted for each in self._at(number, wanted[number])}
        found: list[Letter | None] = []
        for *place, number, offset in refs:
            message = messages.get((number, offset))
            added = _added(message) if message is not None else {}
            letter = _letter(message, added) if added else None
            if letter is None or [*letter.id] != place:
                raise DataLossError(
                    f"topic {self._topic!r}, partition {number}, offset {offset}: the dead letter of partition {place[1]}, offset "
                    f"{place[2]} is gone; give up the replay by `ratchet dead-letters replay ... --cancel`"
                )
            found.append(letter)
        return found

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @cached_property
    def _settings(self) -> KafkaSettings:
        return self._settings_of()

    @cached_property
    def _errors(self) -> ConnectionErrors:
        return ConnectionErrors(self._settings.bootstrap_servers)

    # --- inside -----------------------------------------------------------------------------------

    def _messages(self) -> Iterator[Any]:
        """Every committed record up to the present end of the topic."""
        try:
            consumer = self._consumer()
            left = self._bounds()
            consumer.assign([TopicPartition(self._topic, number, first) for number, (first, _) in left.items()])
            heard_s = time.monotonic()
            while any(first < end for first, end in left.values()):
                for message in consumer.consume(1_000, _POLL_S):
                    heard_s = time.monotonic()
                    number, error = message.partition(), message.error()
                    if error is None:
                        if message.offset() < left[number][1]:
                            yield message
                        left[number] = message.offset() + 1, left[number][1]
                    elif error.code() == KafkaError._PARTITION_EOF:
                        left[number] = left[number][1], left[number][1]
                    else:
                        raise KafkaException(error)
                if time.monotonic() - heard_s > _SILENCE_S:
                    raise RetryableError(
                        f"topic {self._topic!r} gave nothing for {_SILENCE_S:g} s{self._errors.reason()}"
                    )
        except KafkaException as error:
            raise self._errors.explain(error) from error

    def _at(self, number: int, offsets: set[int]) -> Iterator[Any]:
        """The existing records of one partition at these offsets."""
        left = sorted(offsets, reverse=True)
        position: int | None = None
        try:
            consumer = self._consumer()
            heard_s = time.monotonic()
            while left:
                if position is None or left[-1] - position > _JUMP:
                    position = left[-1]
                    consumer.assign([TopicPartition(self._topic, number, position)])
                for message in consumer.consume(1_000, _POLL_S):
                    heard_s, error = time.monotonic(), message.error()
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    if error is None and message.offset() in offsets:
                        yield message
                    position = message.offset() + (error is None)
                    while left and left[-1] < position:
                        left.pop()
                    if error is not None:
                        left.clear()  # the topic ends before the other offsets
                if time.monotonic() - heard_s > _SILENCE_S:
                    raise RetryableError(
                        f"topic {self._topic!r} gave nothing for {_SILENCE_S:g} s{self._errors.reason()}"
                    )
        except KafkaException as error:
            raise self._errors.explain(error) from error

    def _consumer(self) -> Consumer:
        if self._client is None:
            settings = {
                **self._settings.consumer(f"ratchet-letters-{self._owner[0]}"),
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "error_cb": self._errors.on_error,
            }
            self._client = self._errors.made(lambda: Consumer(settings))
        return self._client

    def _bounds(self) -> dict[int, tuple[int, int]]:
        """The beginning and the last stable offset of each partition."""
        admin = self._errors.made(lambda: AdminClient({**self._settings.admin(), "error_cb": self._errors.on_error}))
        known = admin.list_topics(timeout=_ANSWER_S).topics.get(self._topic)
        if known is None:
            raise ConfigError(f"topic {self._topic!r} does not exist at {self._settings.bootstrap_servers}: create it")
        where = [TopicPartition(self._topic, number) for number in known.partitions]

        def asked(spec: OffsetSpec) -> dict[int, int]:
            answers = admin.list_offsets(
                dict.fromkeys(where, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_ANSWER_S
            )
            return {each.partition: int(answer.result().offset) for each, answer in answers.items()}

        firsts, ends = asked(OffsetSpec.earliest()), asked(OffsetSpec.latest())
        return {number: (firsts[number], ends[number]) for number in ends}


def _headers(message: Any) -> Sequence[tuple[str, bytes | None]]:
    return message.headers() or ()


def _parts(message: Any) -> tuple[list[tuple[str, bytes | None]], list[tuple[str, bytes | None]]]:
    """The record's own headers, and those that follow: Ratchet's, the first of which names the
    topology. A producer may have written headers of the same names into the record."""
    headers = list(_headers(message))
    first = max((at for at, (name, _) in enumerate(headers) if name == _FIRST), default=len(headers))
    return headers[:first], headers[first:]


def _added(message: Any) -> dict[str, str]:
    """The headers that Ratchet has added; none if the message is no letter, because another program
    has written it."""
    added = {
        name.removeprefix(HEADER): (value or b"").decode(errors="replace")
        for name, value in _parts(message)[1]
        if name.startswith(HEADER)
    }
    return added if all(_fits(added.get(name), *each) for name, each in _NUMBERS.items()) else {}


def _fits(text: str | None, least: int | None, end: int) -> bool:
    """Whether an added header is a number from ``least`` to before ``end``. ``least``: None if the
    header may be absent, or negative."""
    if text is None:
        return least is None
    return bool(_NUMBER.fullmatch(text)) and (-end if least is None else least) <= int(text) < end


#: The first of the added headers.
_FIRST = f"{HEADER}topology"
_NUMBER = re.compile(r"-?[0-9]{1,19}")
#: The least value of each number, and the end of its range.
_NUMBERS = {
    "txid": (0, 2**63),
    "partition": (0, 2**31),
    "offset": (0, 2**63),
    "attempts": (None, 2**31),
    "timestamp_ms": (None, 2**63),
}
#: The headers that are removed again.
_OURS = {
    f"{HEADER}{name}"
    for name in (
        *("topology", "incarnation", "txid", "topic", "topic_id", "partition", "offset", "timestamp_ms", "error"),
        *("attempts", "settled"),
    )
}


def _own(message: Any) -> list[tuple[str, bytes | None]]:
    """The record's own headers, and the one that tells that the letter lacks a part."""
    own, added = _parts(message)
    return [*own, *((name, value) for name, value in added if name not in _OURS)]


def _letter(message: Any, added: dict[str, str]) -> Letter:
    stamp = added.get("timestamp_ms")
    return Letter(
        topic_id=added.get("topic_id", ""),
        partition=int(added["partition"]),
        offset=int(added["offset"]),
        topic=added.get("topic", ""),
        timestamp_ms=int(stamp) if stamp is not None else None,
        error=added.get("error", ""),
        key=message.key(),
        value=message.value(),
        headers=_own(message),
        attempts=int(added.get("attempts", "0")),
        ref=[
            added.get("topic_id", ""),
            int(added["partition"]),
            int(added["offset"]),
            message.partition(),
            message.offset(),
        ],
        kept_in=message.partition(),
    )
