"""Sessions that read into Arrow columns, by the compiled part of the spouts, with the invariants
and errors of ``spouts.kafka.consumer.range_consumer``.

The difference: every partition has a queue of its own in librdkafka. So a record beyond a range
stays in its queue for the next range (invariant 3), and partitions that are read one after the
other are all fetched meanwhile.

Memory: each queue has a limit for fetching ahead, which is smaller the more queues there are
(``KafkaSettings.consumer``), and there are at most ``QUEUES_MAX`` queues: more partitions are read
group by group. So the total does not grow with the number of partitions. A chunk has up to
``CHUNK_RECORDS`` records and ``CHUNK_BYTES`` bytes; a single larger record is a chunk of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from framework.clients.consumer_close_timeout import close_in_time
from framework.clients.kafka_errors import kafka_error
from framework.clients.kafka_settings import QUEUES_MAX, KafkaSettings
from framework.clients.kafka_stall_detection import Traffic
from framework.errors import ConfigError, InvariantViolation
from spouts.compiled import NotCompiledError, native
from spouts.kafka.consumer import range_consumer as limits
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.consumer.decompression_failures import unreadable_chunk
from spouts.kafka.consumer.range_consumer import silent
from spouts.kafka.consumer.range_consumer_base import Assigned, Range, RangeSession, fails, records_of, replaced
from spouts.kafka.consumer.record_chunk import ColumnChunk, Run
from spouts.kafka.partition_plan_entries import TopicPartition
from spouts.kafka.record_deserialization import METADATA_TYPES, Parts

#: The most bytes of values, keys and headers in one chunk.
CHUNK_BYTES = 32 << 20
#: The most partitions fetched concurrently when each has much to read, so that it can fetch far
#: ahead.
FETCHED_TOGETHER_MAX = 8
#: The least number of queues for which a consumer is made. For more partitions it is replaced.
QUEUES_MIN = 8
_WAIT_MS = 50
_SEEK_MS = 5_000
#: The required version of the compiled part: ``INTERFACE`` in ``spouts/native/src/reader.rs``.
_INTERFACE = 2
#: How long a new consumer may take to request its first token.
_TOKEN_S = 1.0
#: Settings that only confluent-kafka's own consumer supports.
_NOT_CARRIED = frozenset({"logger", "stats_cb", "throttle_cb", "plugin.library.paths", "default.topic.config"})


@cache
def why_not_native() -> str | None:
    """The reason why this process cannot read natively; None if it can."""
    try:
        compiled = native()
    except NotCompiledError as error:
        return str(error)
    if getattr(compiled, "INTERFACE", None) != _INTERFACE:
        return "the compiled part of the spouts is of another version"
    path = librdkafka()
    if path is None:
        return "the librdkafka of confluent-kafka was not found"
    try:
        compiled.load_librdkafka(path)
    except RuntimeError as error:
        return f"{path} cannot be used: {error}"
    return None


def not_carried(settings: KafkaSettings) -> str | None:
    """The first setting that only the Python reader supports; None if there is none."""
    for name, value in settings.consumer("").items():
        plain = value is None or isinstance(value, (str, int, float))
        if name in _NOT_CARRIED or not (plain or (name == "oauth_cb" and callable(value))):
            return name
    return None


def librdkafka() -> str | None:
    """The path of the librdkafka that confluent-kafka has loaded."""
    package = Path(confluent_kafka.__file__).parent
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/librdkafka" in line}
        own = sorted(loaded, key=lambda path: (not path.startswith(str(package.parent)), path))
        return own[0] if own else None
    found = sorted((package / ".dylibs").glob("librdkafka*"))
    return str(found[0]) if found else None


class NativeConsumer:
    """A librdkafka consumer with those methods of confluent-kafka's that ``Assignment`` needs.
    Raises ``KafkaException`` in the same cases."""

    def __init__(self, settings: Mapping[str, Any], heard: Callable[[KafkaError], None]) -> None:
        plain = {name: value for name, value in settings.items() if name not in ("oauth_cb", "stats_cb")}
        self._report = settings.get("stats_cb")
        self._oauth = settings.get("oauth_cb")
        self._heard = heard
        texts = [(name, None if value is None else str(value)) for name, value in plain.items()]
        self.raw = native().Consumer(texts, self._oauth is not None)
        deadline = time.monotonic() + _TOKEN_S
        while self._oauth is not None and not self.poll()[1] and time.monotonic() < deadline:
            time.sleep(0.001)

    def poll(self) -> tuple[list[tuple[KafkaError, str | None, int]], bool]:
        """Take librdkafka's reports: (events that belong to no read partition, as error, topic and
        partition; whether a token was requested)."""
        events, errors, wanted, *reports = self.raw.serve()
        if self._report is not None and reports and reports[0] is not None:
            self._report(reports[0])
        for error in errors:
            self._heard(error)
        if wanted is not None:
            self._give_token(wanted)
        return [(event_error(code, text), topic, number) for topic, number, _, code, text in events], wanted is not None

    def list_topics(self, topic: str | None = None, *, timeout: float) -> Any:
        self.poll()
        found = self.raw.partitions_of(topic, int(timeout * 1000))
        return SimpleNamespace(topics={name: SimpleNamespace(partitions=numbers) for name, numbers in found})

    def incremental_assign(self, positions: Sequence[ClientPartition]) -> None:
        self.raw.incremental_assign([_placed(each) for each in positions])

    def incremental_unassign(self, positions: Sequence[ClientPartition]) -> None:
        self.raw.incremental_unassign([_placed(each) for each in positions])

    def seek(self, position: ClientPartition) -> None:
        self.raw.seek(_placed(position), _SEEK_MS)

    def close(self) -> None:
        close_in_time(self.raw.close)

    def _give_token(self, config: str) -> None:
        """Call ``oauth_cb`` of the settings, as confluent-kafka does: with
        ``sasl.oauthbearer.config``, or None. It returns (token, its expiry in seconds since 1970),
        or these with the principal and a dict of extensions, all text."""
        try:
            token, expires_at_s, *more = self._oauth(config or None)  # type: ignore[misc]
            principal = more[0] if more else ""
            extensions = list((more[1] if len(more) > 1 else {}).items())
            self.raw.set_token(token, int(expires_at_s * 1000), principal, extensions)
        except KafkaException as error:
            self.raw.token_failed(error.args[0].str())
        except Exception as error:  # noqa: BLE001 - the user's own code; librdkafka reports it and asks again
            self.raw.token_failed(f"oauth_cb raised {type(error).__name__}: {error}")


def queues_for(partitions: int) -> int:
    """The number of queues for which a consumer of these partitions is made: a power of two, like
    ``QUEUES_MAX``."""
    return max(QUEUES_MIN, 1 << (partitions - 1).bit_length())


class NativeSession(RangeSession[Assigned]):
    """Reads into columns."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        reason = why_not_native()
        if reason is not None:
            raise ConfigError(f"Kafka cannot be read natively: {reason}")
        super().__init__(settings, group)
        self._open(QUEUES_MIN)

    def read(
        self,
        ranges: Mapping[TopicPartition, Range],
        parts: Parts,
        check_alive: Callable[[], None] = lambda: None,
        takes_out: Callable[[str], bool] = fails,
    ) -> Iterator[ColumnChunk]:
        """The records of all ranges, in chunks. A chunk may contain several partitions."""
        self._check_alive, self._takes_out = check_alive, takes_out
        yield from self._read_all(ranges, parts)
        self._pace.went_well()

    def _read_all(self, ranges: Mapping[TopicPartition, Range], parts: Parts) -> Iterator[ColumnChunk]:
        wanted = {tp: each for tp, each in ranges.items() if each.first < each.end}
        records = records_of(wanted)
        if records <= limits.SIDE_BY_SIDE_RECORDS_MAX:
            yield from self._read_groups(wanted, sorted(wanted), QUEUES_MAX, parts)
            return
        # by their mean, so that a kept consumer has the right number of queues for the next read
        as_many = limits.SIDE_BY_SIDE_RECORDS_MAX * len(wanted) // records
        together = min(QUEUES_MAX, max(FETCHED_TOGETHER_MAX, as_many))
        if len(wanted) > together and self._queues > max(QUEUES_MIN, queues_for(together)):
            self._open_anew(queues_for(together))
        yield from self._read_groups(wanted, list(wanted), together, parts)

    # --- inside -----------------------------------------------------------------------------------

    def _open(self, queues: int) -> None:
        conf = self._pace.settings(self._settings.consumer(self._group, queues=queues), queues)
        traffic = Traffic()
        made = {**traffic.settings(conf, self._pace.report_every_ms(queues)), **conf}
        self._consumer = self._errors.made(lambda: NativeConsumer(made, self._errors.on_error))
        self._traffic = traffic
        # set only now: if no new consumer can be made, the old one continues with its own
        self._queues = queues
        self._assignment = Assignment(self._consumer)

    def _begun(self, wanted: Range) -> Assigned:
        return Assigned(wanted.first, wanted)

    def _take_reports(self) -> None:
        self._consumer.poll()

    def _open_anew(self, queues: int) -> None:
        former = self._consumer
        self._open(queues)
        self._assigned.clear()
        former.close()

    def _read(
        self, ranges: Mapping[TopicPartition, Range], parts: Parts
    ) -> Generator[ColumnChunk, None, dict[TopicPartition, Range]]:
        """Read until the ranges are complete, or the consumer must be replaced. Returns the
        remaining ranges."""
        began_s = time.monotonic()
        try:
            self._serve()
            self._make_room(ranges)
            self._position(ranges)
            return (yield from self._until_complete(ranges, parts))
        except BaseException as error:
            self._unassign(list(self._assigned.keys() - self._kept))  # the next read must start clean
            self._kept.clear()
            if self._traffic.was_throttled_since(began_s):
                self._pace.was_throttled()
            if isinstance(error, KafkaException):
                raise kafka_error(error, f"Kafka at {self._where}") from error
            raise

    def _read_groups(
        self, wanted: Mapping[TopicPartition, Range], order: list[TopicPartition], together: int, parts: Parts
    ) -> Iterator[ColumnChunk]:
        left = dict(wanted)
        while order:
            if self._pace.is_stale:
                self._open_anew(self._queues)
            if self._pace.is_narrow:
                together = 1
            group = order[:together]
            if len(wanted) > together:
                self._unassign(list(self._assigned.keys() - set(group)))
            rest = yield from self._read({tp: left[tp] for tp in group}, parts)
            left.update(rest)
            order = [*rest, *order[together:]]

    def _make_room(self, ranges: Mapping[TopicPartition, Range]) -> None:
        """Provide queues for all ranges. Unassigns other partitions when they take too much room,
        and replaces the consumer when the ranges are too many."""
        others = [tp for tp in self._assigned if tp not in ranges]
        if len(ranges) + len(others) > self._queues:
            self._unassign(others)
        if len(ranges) > self._queues:
            self._open_anew(queues_for(len(ranges)))

    def _until_complete(
        self, ranges: Mapping[TopicPartition, Range], parts: Parts
    ) -> Generator[ColumnChunk, None, dict[TopicPartition, Range]]:
        left = sum(each.end - each.first for each in ranges.values())
        chunk = ChunkBuilder(self._consumer.raw, parts, left, limits.CHUNK_RECORDS)
        for tp, wanted in ranges.items():
            position, last_heard = wanted.first, time.monotonic()
            while not (self._is_complete(tp, position) and self._is_confirmed(tp, position)):
                continues = position == wanted.first and not self._assigned[tp].is_fresh
                end = wanted.first + 1 if continues else wanted.end  # the first record only, to confirm it
                rows, position, how, offset, number, text = chunk.fill(
                    tp, position, end=end, epoch_max=wanted.end_epoch, wait_ms=_WAIT_MS
                )
                if how == "complete" and self._is_confirmed(tp, position) and not continues:
                    break
                if how == "full" or (how == "waiting" and self._pace.is_stale and len(chunk)):
                    left -= len(chunk)
                    full = chunk.finish()
                    self._pace.has_seen(piece=full.value_bytes, ahead=0)
                    yield full
                    del full
                    chunk = ChunkBuilder(self._consumer.raw, parts, left, limits.CHUNK_RECORDS)
                    # the caller's decoding time is not the broker's silence
                    last_heard = time.monotonic()
                elif how == "event":
                    after = self._event(tp, position, event_error(number, text), offset)
                    if after is not None:
                        yield unreadable_chunk(tp, after.first, min(after.next, wanted.end))
                        position = after.next
                    last_heard = time.monotonic()
                elif how == "replaced":
                    raise replaced(tp, wanted, offset, number)
                elif rows or (time.monotonic() - last_heard > limits.QUIET_S and self._traffic.has_fetched(*tp)):
                    last_heard = time.monotonic()
                elif time.monotonic() - last_heard > limits.SILENCE_MAX_S * self._pace.patience:
                    self._pace.was_silent()
                    raise silent(tp, position, wanted, self._errors.reason())
                if not rows:
                    self._check(ranges, tp, position)
                self._serve()
                ahead = self._traffic.ahead_bytes(shared=False)
                self._pace.has_seen(piece=0, ahead=ahead, received=self._traffic.received)
                if self._pace.is_stale and not len(chunk):
                    later = list(ranges)[list(ranges).index(tp) + 1 :]
                    return {tp: wanted.rest(position), **{each: ranges[each] for each in later}}
            self._assigned[tp].resume = max(self._assigned[tp].resume, wanted.end)
        if len(chunk):
            last = chunk.finish()
            self._pace.has_seen(piece=last.value_bytes, ahead=0)
            yield last
        return {}

    def _check(self, ranges: Mapping[TopicPartition, Range], current: TopicPartition, position: int) -> None:
        """Let the caller end the read. Partitions without delivered records keep their position."""
        try:
            self._check_alive()
        except BaseException:
            later = list(ranges)[list(ranges).index(current) + 1 :]
            self._kept = {*later, *([current] if position == ranges[current].first else [])}
            raise

    def _is_complete(self, tp: TopicPartition, position: int) -> bool:
        assigned = self._assigned[tp]
        return position >= assigned.wanted.end or assigned.end_seen >= assigned.wanted.end

    def _serve(self) -> None:
        """Handle events that belong to no partition. Raises their error."""
        for error, topic, number in self._consumer.poll()[0]:
            if topic is None:
                self._errors.heard(error)
            elif error.code() != KafkaError._PARTITION_EOF:
                raise kafka_error(error, f"partition {topic}/{number}")


class ChunkBuilder:
    """A chunk under construction. ``expected``: the number of records to allocate for."""

    def __init__(self, raw: Any, parts: Parts, expected: int, rows_max: int) -> None:
        self._raw = raw
        self._parts = parts
        self._rows_max = rows_max
        self._runs: list[Run] = []
        raw.begin(*parts, max(0, min(expected, rows_max)))

    def __len__(self) -> int:
        return sum(run.rows for run in self._runs)

    def fill(
        self, tp: TopicPartition, position: int, *, end: int | None, epoch_max: int | None, wait_ms: int
    ) -> tuple[int, int, str, int, int, str]:
        """``Consumer.fill`` of ``spouts/native/src/reader.rs``."""
        topic, number = tp
        filled: tuple[int, int, str, int, int, str] = self._raw.fill(
            topic=topic,
            partition=number,
            position=position,
            end=end,
            epoch_max=epoch_max,
            rows_max=self._rows_max,
            bytes_max=CHUNK_BYTES,
            wait_ms=wait_ms,
        )
        rows = filled[0]
        if rows and self._runs and self._runs[-1].tp == tp:
            rows += self._runs.pop().rows
        if rows:
            self._runs.append(Run(topic, number, rows))
        return filled

    def finish(self) -> ColumnChunk:
        columns = self._raw.finish()
        rows = columns["rows"]
        if rows != len(self):
            raise InvariantViolation(f"a chunk of {rows} rows has runs of {len(self)}")
        return ColumnChunk(
            self._runs,
            _binary(columns["values"], rows),
            pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(columns["offsets"])]),
            value_bytes=columns["value_bytes"],
            keys=_binary(columns["keys"], rows) if self._parts.keys else None,
            headers=_headers(columns["headers"], rows) if self._parts.headers else None,
            timestamps=_timestamps(columns["timestamps"], rows) if self._parts.timestamps else None,
            epochs=_epochs(columns["epochs"], rows) if self._parts.epochs else None,
            sampled_ms=columns.get("sampled_ms"),
        )


def _binary(column: Mapping[str, Any], rows: int, declared: pa.DataType | None = None) -> pa.Array:
    buffers = [_optional(column["validity"]), pa.py_buffer(column["offsets"]), pa.py_buffer(column["data"])]
    return pa.Array.from_buffers(declared or pa.binary(), rows, buffers, column["nulls"])


def _headers(column: Mapping[str, Any], rows: int) -> pa.ListArray:
    declared = METADATA_TYPES["headers"]
    names = _binary(column["names"], column["rows"], pa.string())
    each = pa.StructArray.from_arrays(
        [names, _binary(column["values"], column["rows"])], fields=list(declared.value_type)
    )
    return pa.Array.from_buffers(declared, rows, [None, pa.py_buffer(column["offsets"])], 0, children=[each])


def _timestamps(column: Mapping[str, Any], rows: int) -> pa.Int64Array:
    buffers = [_optional(column["validity"]), pa.py_buffer(column["data"])]
    return pa.Array.from_buffers(pa.int64(), rows, buffers, column["nulls"])


def _epochs(column: Any, rows: int) -> pa.Int32Array:
    return pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(column)])


def _optional(buffer: Any) -> pa.Buffer | None:
    return None if buffer is None else pa.py_buffer(buffer)


def event_error(code: int, text: str) -> KafkaError:
    return KafkaError(code, text or None)


def _placed(position: ClientPartition) -> tuple[str, int, int, int | None]:
    epoch = position.leader_epoch
    return position.topic, position.partition, position.offset, epoch if epoch is not None and epoch >= 0 else None
