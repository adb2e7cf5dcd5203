"""A spout over Redis streams with consumer groups: a queue that locks delivered entries.

Redis records which consumer got which entry, until the entry is acknowledged. A reopened task gets
its unacknowledged entries again. While a task lives, a thread renews its claim on its entries,
however long they take. Entries of a task that has gone for good are taken over by other tasks after
a time.

Source: https://redis.io/docs/latest/develop/data-types/streams/, "Consumer groups".
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import pyarrow as pa

from framework.clients.redis_errors import redirects
from framework.config import resolved_address
from framework.errors import BadRecordError, ConfigError, DataLossError, RetryableError
from framework.topology import (
    DEAD_LETTER_STREAM,
    DEFAULT_STREAM,
    BaseRichSpout,
    Fields,
    OutputFieldsDeclarer,
    TopologyContext,
)
from spouts.codecs.bad_records import OnBadRecord
from spouts.failed_tuple_retries import Retries, RetryPolicy

try:
    import redis
except ImportError as error:  # redis is an optional extra
    raise ConfigError("RedisStreamSpout needs the package redis: pip install 'ratchet-pipelines[redis]'") from error

#: The most entries per request.
CHUNK_ENTRIES = 500
#: Bytes of entries per request, if they are about as large as those of the answer before.
CHUNK_BYTES = 8 << 20
#: A task that holds this many bytes of unacknowledged entries requests no further entries.
UNACKNOWLEDGED_BYTES_MAX = 256 << 20
#: The most unacknowledged entries per task, and so the most that others must take over if the task
#: dies.
UNACKNOWLEDGED_MAX = 10_000
TIMEOUT_S = 5.0
_TAKE_OVER_EVERY_S = 5.0
#: How often a task renews its claim in the time after which it counts as gone.
_RENEWALS = 4
_RENEW_MIN_S = 0.05

#: The id of an entry, and its fields. The fields are empty if the entry was deleted meanwhile.
StreamEntry = tuple[bytes, Mapping[bytes, bytes]]

#: The length of a bad value in an error.
_SHOWN_BYTES = 100
#: Entries of the first request; each further one requests at most twice as many.
_FIRST_ENTRIES = 16


def _int64(raw: bytes) -> int:
    return cast("int", pa.scalar(int(raw), pa.int64()).as_py())


_CONVERSIONS: dict[str, Callable[[bytes], Any]] = {
    "string": lambda raw: raw.decode(),
    "int64": _int64,
    "double": float,
    "binary": bytes,
}

#: A dead letter of a Redis stream: the stream, the id of the entry, the error, and the unchanged
#: fields.
ENTRY_LETTER_FIELDS = Fields.of(
    {
        "stream": pa.string(),
        "id": pa.string(),
        "error": pa.string(),
        "fields": pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())])),
    }
)


class _UnderWay(NamedTuple):
    """An emitted entry that is not acknowledged: its row, and its size in bytes."""

    values: list[Any]
    stream: str
    size: int


class RedisStreamSpout(BaseRichSpout):
    """Reads the entries of a stream, each entry in one of the tasks, and acknowledges them when
    their tuple trees are complete: at-least-once.

    * ``fields``: the fields of each entry, typed as ``str``, ``int``, ``float`` or ``bytes``.
    * ``url``: ``redis://...``; ``${NAME}`` in it stands for an environment variable.
    * ``group``: the consumer group, created if missing.
    * ``start``: where a new group begins, "earliest" or "latest".

    * ``on_bad_record``: an entry that lacks a field, or whose value is not of the declared type,
      fails the topology ("fail"), is reported, acknowledged and left out ("skip"), or is emitted on
      the stream ``dead_letters`` with ``ENTRY_LETTER_FIELDS`` ("dead_letter").
    * ``retry``: when to emit a failed entry again. After ``retry.retries_max`` retries the entry is
      reported and dropped. A dead letter is retried without a limit.
    * ``take_over_after_s``: a task takes over the entries of another task that has been gone for
      this time, for example after a change of the parallelism. It must be longer than a process may
      pause.
    * ``unacknowledged_max``: a task with this many unacknowledged entries, including those that
      wait for a retry, or with 256 MiB of them, requests no more.
    * ``delete``: remove acknowledged entries from the stream.

    Raises ``ConfigError`` for invalid arguments. If the group is deleted while the topology runs,
    raises ``DataLossError``, because the list of delivered entries is lost.
    """

    def __init__(
        self,
        stream: str,
        fields: Fields,
        *,
        url: str,
        group: str,
        start: str = "earliest",
        on_bad_record: Literal["fail", "skip", "dead_letter"] = "fail",
        retry: RetryPolicy | None = None,
        take_over_after_s: float = 120.0,
        unacknowledged_max: int = UNACKNOWLEDGED_MAX,
        delete: bool = False,
    ) -> None:
        if start not in ("earliest", "latest"):
            raise ConfigError(f"start must be 'earliest' or 'latest', not {start!r}")
        if not take_over_after_s > 0:
            raise ConfigError(f"take_over_after_s must be above 0, not {take_over_after_s!r}")
        for name in fields:
            if str(fields.type_of(name)) not in _CONVERSIONS:
                raise ConfigError(f"field {name!r} of a Redis stream must be str, int, float or bytes: declare it so")
        self._stream, self._fields, self._url, self._group = stream, fields, url, group
        self._on_bad_record = OnBadRecord.of(on_bad_record)
        self._start = "0" if start == "earliest" else "$"
        self._retry = retry if retry is not None else RetryPolicy()
        if isinstance(unacknowledged_max, bool) or not unacknowledged_max >= 1:
            raise ConfigError(f"unacknowledged_max must be 1 or more, not {unacknowledged_max!r}")
        self._unacknowledged_max = unacknowledged_max
        self._take_over_after_ms = int(take_over_after_s * 1000)
        self._delete = delete

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(self._fields)
        if self._on_bad_record is OnBadRecord.DEAD_LETTER:
            declarer.declare(ENTRY_LETTER_FIELDS, DEAD_LETTER_STREAM)

    def open(self, conf: Mapping[str, Any], context: TopologyContext, collector: Any) -> None:
        self._collector = collector
        self._consumer = f"{context.topology_id}-{context.component_id}-{context.task_index}"
        self._client: Any = redis.Redis.from_url(
            resolved_address("url of RedisStreamSpout", self._url, "/?#"),
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
        )
        self._buffer: deque[StreamEntry] = deque()
        self._under_way: dict[bytes, _UnderWay] = {}
        self._held_bytes = 0
        self._chunk_entries = _FIRST_ENTRIES
        self._retries: Retries[bytes] = Retries(self._retry)
        self._done: list[bytes] = []
        # where to continue reading this task's old entries; None: all read
        self._mine_from: bytes | None = b"0"
        self._taken_over_at = time.monotonic()
        self._others_from: bytes = b"0-0"
        self._prepared = False
        self._trouble = False
        self._closing = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="ratchet-redis-stream", daemon=True)
        self._renewal.start()

    def next_tuple(self) -> None:
        """Emit one entry: one that is due for a retry, or else the next one."""
        try:
            self._prepare()
            self._acknowledge()
            again = self._retries.due(time.monotonic())
            if again is not None:
                self._emit(again)
                return
            if not self._buffer:
                self._read()
            while self._buffer and not self._emit_next(*self._buffer.popleft()):
                pass
            self._trouble = False
        except redis.AuthenticationError as error:
            raise ConfigError(f"Redis: {error}; correct the user and the password in url=") from error
        except (redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError) as error:
            raise ConfigError(f"stream {self._stream!r}: {redirects(error)}") from error
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError) as error:
            if not self._trouble:  # report it once
                self._collector.report_error(RetryableError(f"Redis: {error}"))
            self._trouble = True
            self._mine_from = b"0"  # a lost answer may have assigned entries to this task

    def caught_up(self) -> bool:
        """Whether this task has read all entries that it can get now, and no entry waits for a
        retry."""
        waits = self._buffer or len(self._retries) or self._mine_from is not None
        return not (waits or self._trouble)

    def ack(self, message_id: bytes) -> None:
        acked = self._under_way.pop(message_id, None)
        if acked is not None:
            self._held_bytes -= acked.size
            self._retries.done(message_id)
            self._done.append(message_id)

    def fail(self, message_id: bytes) -> None:
        failed = self._under_way.get(message_id)
        if failed is None:
            return
        # A dead letter has no other destination.
        for_ever = failed.stream == DEAD_LETTER_STREAM
        if not self._retries.failed(message_id, time.monotonic(), for_ever=for_ever):
            self._collector.report_error(
                RuntimeError(
                    f"stream {self._stream!r}, entry {message_id.decode()}: given up after its retries; dropped"
                )
            )
            self.ack(message_id)

    def close(self) -> None:
        self._closing.set()
        self._renewal.join()
        try:
            self._acknowledge()
        except redis.RedisError as error:  # unacknowledged entries are delivered again
            self._collector.report_error(error)
        finally:
            self._client.close()

    def _emit_next(self, entry: bytes, raw: Mapping[bytes, bytes]) -> bool:
        """Emit an entry, or its dead letter. Returns False if it is left out. Raises
        ``BadRecordError`` for a bad entry that ends the topology."""
        size = _size_of(raw)
        try:
            row, stream = self._values(entry, raw), DEFAULT_STREAM
        except BadRecordError as error:
            if self._on_bad_record is OnBadRecord.FAIL:
                raise
            if self._on_bad_record is OnBadRecord.SKIP:
                self._collector.report_error(error)
                self._done.append(entry)
                self._held_bytes -= size
                return False
            fields = [{"key": key, "value": value} for key, value in raw.items()]
            row, stream = [self._stream, entry.decode(), str(error), fields], DEAD_LETTER_STREAM
        self._under_way[entry] = _UnderWay(row, stream, size)
        self._emit(entry)
        return True

    def _emit(self, entry: bytes) -> None:
        emitted = self._under_way[entry]
        self._collector.emit(emitted.values, message_id=entry, stream=emitted.stream)

    def _prepare(self) -> None:
        if self._prepared:
            return
        try:
            self._client.xgroup_create(self._stream, self._group, self._start, mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise ConfigError(f"stream {self._stream!r}: {redirects(error) or error}") from error
        self._prepared = True

    def _acknowledge(self) -> None:
        if self._done:
            with self._client.pipeline(transaction=False) as pipeline:
                pipeline.xack(self._stream, self._group, *self._done)
                if self._delete:
                    pipeline.xdel(self._stream, *self._done)
                pipeline.execute()
            self._done.clear()

    def _read(self) -> None:
        """Fill the buffer with entries that this task got before it was opened; at intervals, with
        idle entries of others; and with new entries. Call it only with an empty buffer."""
        room = min(self._chunk_entries, self._unacknowledged_max - len(self._under_way))
        if room <= 0 or self._held_bytes >= UNACKNOWLEDGED_BYTES_MAX:
            return
        try:
            while self._mine_from is not None and not self._buffer:
                entries = self._entries(self._mine_from, room)
                self._mine_from = entries[-1][0] if entries else None
                self._take(entries)
            if not self._buffer and time.monotonic() - self._taken_over_at > _TAKE_OVER_EVERY_S:
                self._taken_over_at = time.monotonic()
                self._others_from, entries, *_ = self._client.xautoclaim(
                    self._stream, self._group, self._consumer, self._take_over_after_ms, self._others_from, count=room
                )
                self._take(entries)
            if not self._buffer:
                self._take(self._entries(b">", room))
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            raise DataLossError(
                f"stream {self._stream!r} has no group {self._group!r} any more, and nobody knows what it had handed out: make it "
                f"again where it is to go on (XGROUP CREATE {self._stream} {self._group} ID), and start the topology"
            ) from error

    def _renew(self) -> None:
        """Keep this task's entries from becoming idle, until the task is closed. In a thread of its
        own, because the task may not be called for long."""
        idle_ms = self._take_over_after_ms // _RENEWALS
        while not self._closing.wait(max(idle_ms / 1000, _RENEW_MIN_S)):
            with contextlib.suppress(redis.RedisError):  # ``next_tuple`` reports such errors
                after = "-"
                while entries := self._idle(after, idle_ms):
                    # Entries that another task has taken meanwhile are not idle, and stay there.
                    self._client.xclaim(self._stream, self._group, self._consumer, idle_ms, entries, justid=True)
                    after = f"({entries[-1].decode()}"

    def _idle(self, after: str, idle_ms: int) -> list[bytes]:
        """Entries of this task whose claim was not renewed for a time."""
        found = self._client.xpending_range(
            self._stream, self._group, after, "+", CHUNK_ENTRIES, consumername=self._consumer, idle=idle_ms
        )
        return [each["message_id"] for each in found]

    def _take(self, entries: Sequence[StreamEntry]) -> None:
        """Buffer entries, except those without fields: they were deleted meanwhile. Adapts the
        number of entries of the next request to their size."""
        size = sum(_size_of(raw) for _, raw in entries)
        if size:
            fitting = CHUNK_BYTES * len(entries) // size
            self._chunk_entries = max(1, min(fitting, 2 * self._chunk_entries, CHUNK_ENTRIES))
        new = [each for each in entries if each[1] and each[0] not in self._under_way]
        self._held_bytes += sum(_size_of(raw) for _, raw in new)
        self._buffer.extend(new)

    def _entries(self, after: bytes, most: int) -> list[StreamEntry]:
        answer = self._client.xreadgroup(self._group, self._consumer, {self._stream: after}, count=most)
        streams = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer or ()]
        return cast("list[StreamEntry]", [entry for entries in streams for entry in entries])

    def _values(self, entry: bytes, raw: Mapping[bytes, bytes]) -> list[Any]:
        values = []
        for name in self._fields:
            declared: pa.DataType = self._fields.type_of(name)
            value = raw.get(name.encode())
            if value is None:
                raise self._bad(entry, name, "is not there")
            try:
                values.append(_CONVERSIONS[str(declared)](value))
            except (ValueError, OverflowError):
                raise self._bad(entry, name, f"is no {declared}: {value[:_SHOWN_BYTES]!r}") from None
        return values

    def _bad(self, entry: bytes, name: str, what: str) -> BadRecordError:
        return BadRecordError(f"stream {self._stream!r}, entry {entry.decode()}: field {name!r} {what}")


def _size_of(raw: Mapping[bytes, bytes]) -> int:
    """The bytes of the fields of an entry."""
    return sum(len(key) + len(value) for key, value in raw.items())
