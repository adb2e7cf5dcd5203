"""Chunks of records, as returned by the Kafka readers: as Arrow columns, or as the messages of
confluent-kafka.

Invariant: both kinds represent the same records in the same way. A null is a null and not empty,
headers are in order, and rows are in the order of their partitions.
"""

from __future__ import annotations

import gc
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from spouts.codecs.codec import Values
from spouts.kafka.partition_plan_entries import TopicPartition
from spouts.kafka.record_deserialization import METADATA_TYPES

#: The values and keys of this many bytes are decoded together: Arrow's offsets have 32 bits.
PART_BYTES_MAX = 512 << 20
#: Replaces the name of a header that is not UTF-8.
_NO_TEXT = "\ufffd"
#: A plain method call in Python might miss an error that comes together with a return value.
_HEADERS = operator.methodcaller("headers")

Epochs = np.ndarray[Any, np.dtype[np.int32]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Run(NamedTuple):
    """Consecutive rows of a chunk from one partition."""

    topic: str
    partition: int
    rows: int

    @property
    def tp(self) -> TopicPartition:
        return self.topic, self.partition


class RecordChunk(ABC):
    """Some records of one or more partitions.

    ``unreadable``: why a record stands for those of a batch that cannot be read; "" for records
    that were read."""

    unreadable = ""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def value_bytes(self) -> int:
        """The total bytes of all values."""

    @abstractmethod
    def larger_than(self, size: int) -> list[int]:
        """The rows whose values have more bytes than this."""

    @property
    @abstractmethod
    def sampled_ms(self) -> tuple[int, int] | None:
        """The times of the oldest and the newest of a sample of the records, which includes the
        first and the last of each partition. In milliseconds since the Unix epoch; None if they
        have no time."""

    @abstractmethod
    def raw(self, what: str) -> Values | pa.BinaryArray:
        """The bytes for a codec: of "value", of "key", or of "header NAME" (the last header of this
        name)."""

    @abstractmethod
    def metadata(self, name: str) -> pa.Array:
        """A column of ``METADATA_TYPES``."""

    @property
    @abstractmethod
    def epochs(self) -> Epochs:
        """The leader epoch of each record; negative if unknown."""

    @abstractmethod
    def runs(self) -> list[Run]:
        """The rows in order, by partition."""

    def places(self) -> Iterator[tuple[TopicPartition, range]]:
        """The partition of each run, and the rows of the run."""
        end = 0
        for run in self.runs():
            begin, end = end, end + run.rows
            yield run.tp, range(begin, end)

    @abstractmethod
    def take(self, rows: Sequence[int] | Rows) -> Self:
        """A copy of these rows."""

    def without(self, tp: TopicPartition) -> Self:
        """The records of the other partitions."""
        runs = self.runs()
        return self.take(np.flatnonzero(np.repeat([run.tp != tp for run in runs], [run.rows for run in runs])))

    def parts(self) -> Iterator[Self]:
        """The records, in order, in chunks whose columns fit into Arrow's offsets."""
        yield self

    def by_topic(self) -> Iterator[tuple[str, Self]]:
        """The records of each topic, in their order."""
        named, of = self._topics()
        if len(named) == 1:
            yield named[0], self
        else:
            for number, topic in enumerate(named):
                rows = np.flatnonzero(of == number)
                if len(rows):
                    yield topic, self.take(rows.tolist())

    @abstractmethod
    def _topics(self) -> tuple[list[str], Any]:
        """The topics, and for each row the index of its topic, as an array."""


class MessageChunk(RecordChunk):
    """The messages of confluent-kafka."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def value_bytes(self) -> int:
        return sum(map(len, self.messages))

    def parts(self) -> Iterator[MessageChunk]:
        first = size = 0
        for row, message in enumerate(self.messages):
            its = len(message) + len(message.key() or b"")
            if size + its > PART_BYTES_MAX and row > first:
                yield MessageChunk(self.messages[first:row])
                first, size = row, 0
            size += its
        yield self if first == 0 else MessageChunk(self.messages[first:])

    def larger_than(self, size: int) -> list[int]:
        return [row for row, message in enumerate(self.messages) if len(message) > size]

    @property
    def sampled_ms(self) -> tuple[int, int] | None:
        """The sample is the first and the last record of each partition, whose messages are
        consecutive."""
        stamps, at = [], 0
        while at < len(self.messages):
            last = bisect_right(self.messages, partition_of(self.messages[at]), lo=at, key=partition_of) - 1
            stamps += [self.messages[at].timestamp(), self.messages[last].timestamp()]
            at = last + 1
        known = [stamp for kind, stamp in stamps if kind != TIMESTAMP_NOT_AVAILABLE]
        return (min(known), max(known)) if known else None

    def raw(self, what: str) -> Values:
        if what == "value":
            return [message.value() for message in self.messages]
        if what == "key":
            return [message.key() for message in self.messages]
        name = what.removeprefix("header ")
        found: list[bytes | None] = []
        for message in self.messages:
            values = [value for key, value in _headers_of(message) if key == name]
            found.append(_bytes(values[-1]) if values else None)
        return found

    def metadata(self, name: str) -> pa.Array:
        return pa.array(self._metadata(name), METADATA_TYPES[name])

    @property
    def epochs(self) -> Epochs:
        found = (message.leader_epoch() for message in self.messages)
        return np.fromiter((-1 if epoch is None else epoch for epoch in found), np.int32, len(self))

    def runs(self) -> list[Run]:
        return [Run(*tp, sum(1 for _ in its)) for tp, its in groupby(self.messages, key=partition_of)]

    def take(self, rows: Sequence[int] | Rows) -> MessageChunk:
        return MessageChunk([self.messages[row] for row in rows])

    def _topics(self) -> tuple[list[str], Any]:
        numbers: dict[str, int] = {}
        of = [numbers.setdefault(message.topic() or "", len(numbers)) for message in self.messages]
        return list(numbers), np.array(of)

    def _metadata(self, name: str) -> list[Any]:
        messages = self.messages
        if name == "topic":
            return [message.topic() for message in messages]
        if name == "partition":
            return [message.partition() for message in messages]
        if name == "offset":
            return [message.offset() for message in messages]
        if name == "key":
            return [message.key() for message in messages]
        if name == "value":
            return [message.value() for message in messages]
        if name == "tombstone":
            return [message.value() is None for message in messages]
        if name == "timestamp_ms":
            stamps = (message.timestamp() for message in messages)
            return [None if kind == TIMESTAMP_NOT_AVAILABLE else stamp for kind, stamp in stamps]
        return [[{"key": key, "value": _bytes(value)} for key, value in _headers_of(message)] for message in messages]


def _headers_of(message: Message) -> Sequence[tuple[str, Any]]:
    """The headers of a message. A name that is not UTF-8 becomes U+FFFD.

    confluent-kafka raises ``SystemError`` for such a name, once, and then returns tuples without
    the name. Reading one would end the process, so their contents are read through the garbage
    collector."""
    try:
        return _HEADERS(message) or ()
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):  # one error for each name
            cause = cause.__cause__
        if not isinstance(cause, UnicodeDecodeError):
            raise
    found = [_whole(gc.get_referents(each)) for each in _HEADERS(message)]
    message.set_headers(found)
    return found


def _whole(parts: Sequence[Any]) -> tuple[str, Any]:
    """A header from its parts, in any order."""
    name = next((each for each in parts if isinstance(each, str)), _NO_TEXT)
    return name, next((each for each in parts if not isinstance(each, str)), None)


class ColumnChunk(RecordChunk):
    """Records as Arrow columns. ``keys``, ``headers``, ``timestamps`` and ``epochs`` are None if
    they were not requested."""

    def __init__(
        self,
        runs: Sequence[Run],
        values: pa.BinaryArray,
        offsets: pa.Int64Array,
        *,
        value_bytes: int,
        keys: pa.BinaryArray | None = None,
        headers: pa.ListArray | None = None,
        timestamps: pa.Int64Array | None = None,
        epochs: pa.Int32Array | None = None,
        run_of: Any = None,
        sampled_ms: tuple[int, int] | None = None,
        unreadable: str = "",
    ) -> None:
        self.unreadable = unreadable
        self._runs = runs
        self._values = values
        self._offsets = offsets
        self._value_bytes = value_bytes
        self._keys = keys
        self._headers = headers
        self._timestamps = timestamps
        self._epochs = epochs
        self._sampled_ms = sampled_ms
        self._run_of = run_of  # the run of each row; None while rows are in the order of the runs

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def value_bytes(self) -> int:
        return self._value_bytes

    def larger_than(self, size: int) -> list[int]:
        sizes = pc.fill_null(pc.binary_length(self._values), 0).to_numpy(zero_copy_only=False)
        found: list[int] = np.flatnonzero(sizes > size).tolist()
        return found

    @property
    def sampled_ms(self) -> tuple[int, int] | None:
        return self._sampled_ms

    def raw(self, what: str) -> pa.BinaryArray:
        if what == "value":
            return self._values
        if what == "key":
            return _asked_for(self._keys, what)
        return self._last_headers(what.removeprefix("header "))

    def metadata(self, name: str) -> pa.Array:
        if name == "topic":
            return pa.array([run.topic for run in self._runs], pa.string()).take(self._rows_of())
        if name == "partition":
            return pa.array([run.partition for run in self._runs], pa.int32()).take(self._rows_of())
        if name == "offset":
            return self._offsets
        if name == "tombstone":
            return self._values.is_null()
        columns = {"key": self._keys, "value": self._values, "timestamp_ms": self._timestamps, "headers": self._headers}
        return _asked_for(columns[name], name)

    @property
    def epochs(self) -> Epochs:
        found: Epochs = _asked_for(self._epochs, "leader epoch").to_numpy()
        return found

    def runs(self) -> list[Run]:
        if self._run_of is None:
            return list(self._runs)
        of = self._run_of.to_numpy()
        begins = np.flatnonzero(np.diff(of, prepend=-1))
        rows = np.diff(begins, append=len(of)).tolist()
        return [self._runs[run]._replace(rows=count) for run, count in zip(of[begins].tolist(), rows, strict=True)]

    def take(self, rows: Sequence[int] | Rows) -> ColumnChunk:
        wanted = pa.array(np.asarray(rows, np.int64))

        def taken(column: pa.Array | None) -> pa.Array | None:
            return None if column is None else column.take(wanted)

        values = self._values.take(wanted)
        return ColumnChunk(
            self._runs,
            values,
            self._offsets.take(wanted),
            value_bytes=pc.sum(pc.binary_length(values), min_count=0).as_py(),
            keys=taken(self._keys),
            headers=taken(self._headers),
            timestamps=taken(self._timestamps),
            epochs=taken(self._epochs),
            run_of=self._rows_of().take(wanted),
            sampled_ms=self._sampled_ms,
            unreadable=self.unreadable,
        )

    def _topics(self) -> tuple[list[str], Any]:
        numbers: dict[str, int] = {}
        of_run = np.array([numbers.setdefault(run.topic, len(numbers)) for run in self._runs])
        return list(numbers), of_run[self._rows_of().to_numpy()] if len(numbers) > 1 else of_run

    def _rows_of(self) -> pa.Int64Array:
        if self._run_of is None:
            runs = np.repeat(np.arange(len(self._runs), dtype=np.int64), [run.rows for run in self._runs])
            self._run_of = pa.array(runs)
        return self._run_of

    def _last_headers(self, name: str) -> pa.BinaryArray:
        headers = _asked_for(self._headers, "headers")
        each = headers.flatten()
        found = np.flatnonzero(pc.equal(each.field("key"), name).to_numpy(zero_copy_only=False))
        rows = pc.list_parent_indices(headers).to_numpy()[found]
        last = np.full(len(self), -1, np.int64)
        np.maximum.at(last, rows, found)
        return each.field("value").take(pa.array(last, pa.int64(), mask=last < 0))


def partition_of(message: Message) -> TopicPartition:
    return message.topic() or "", message.partition() or 0


def known_epoch(epoch: int) -> int | None:
    """A record's leader epoch; None if unknown."""
    return epoch if epoch >= 0 else None


def _asked_for(column: pa.Array | None, what: str) -> pa.Array:
    if column is None:
        raise KeyError(f"the {what} of records was not asked for")
    return column


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
