"""The two readers of Kafka: they hand out the same records, and the right one is chosen.

What each of them must do by itself is in ``test_reading.py``, which runs for both.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import cloudpickle
import psutil
import pyarrow as pa
import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given, settings
from hypothesis import strategies as st

import spouts
from framework import Fields, TopologyContext, TransactionAttempt
from framework.clients.kafka_settings import QUEUES_MAX, KafkaSettings
from framework.errors import ConfigError, DataLossError, RetryableError
from integration import KafkaBroker
from integration.kafka import Listener
from integration.server import free_port
from spouts import BytesCodec, Codec, JsonCodec, KafkaTransactionalSpout, TextCodec
from spouts.compiled import native
from spouts.kafka.consumer import native_range_consumer
from spouts.kafka.consumer import range_consumer as python_session
from spouts.kafka.consumer.adaptive_fetch_size import FetchPace
from spouts.kafka.consumer.consumer_pool import KafkaSessions, reader_of, say_reader
from spouts.kafka.consumer.native_range_consumer import FETCHED_TOGETHER_MAX, QUEUES_MIN, NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.consumer.record_chunk import ColumnChunk, RecordChunk
from spouts.kafka.partition_plan_entries import Position, TopicPartition
from spouts.kafka.record_deserialization import EVERYTHING, METADATA_TYPES, Parts
from tests.kit.kafka_runs import tail_of
from tests.kit.oracle import read_topics
from tests.kit.own_logs import own_logs
from tests.kit.readers import needs_native
from tests.kit.targets import examples
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

CONTEXT = TopologyContext("t", "spout", 0, 1)
PARTITIONS = 3


def rows_of(chunk: RecordChunk) -> list[tuple[Any, ...]]:
    """Everything that a chunk shows of its records."""
    columns = [chunk.metadata(name).to_pylist() for name in METADATA_TYPES]
    raw = [chunk.raw(what) for what in ("value", "key", "header h", "header \u00e9")]
    columns += [each.to_pylist() if isinstance(each, pa.Array) else each for each in raw]
    return list(zip(*columns, strict=True))


# --- the same records -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """A topic whose log has every kind of gap. ``offsets``: the records that a reader may see, by
    partition. ``ends``: where the partitions end."""

    name: str
    offsets: dict[int, list[int]]
    ends: dict[int, int]


@pytest.fixture(scope="module", params=[1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3))])
def log(cleaning: Topics, request: pytest.FixtureRequest) -> Log:
    """Plain records, committed and aborted kafka_txns, nulls and empty values; then compacted."""
    chance = random.Random(request.param)
    name = f"log-{request.param}"
    cleaning.create(name, PARTITIONS, cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0")
    plain = cleaning.producer()
    kept: set[tuple[int, str]] = set()  # partition and key of what a reader sees when all is compacted
    for _ in range(12):
        kind = chance.choice(["plain", "commit", "abort"])
        producer = plain if kind == "plain" else cleaning.producer(transactional_id=f"{name}-{chance.random()}")
        if kind != "plain":
            producer.init_transactions(PATIENCE_S)
            producer.begin_transaction()
        for _ in range(chance.randint(1, 60)):
            value = chance.choice([b"", b"v" * chance.randint(1, 300), b'{"n": 1}', "\u00e9".encode(), None])
            headers = [("h", b"1"), ("\u00e9", b""), ("h", chance.choice([None, b"2"]))][: chance.randint(0, 3)]
            key = "" if chance.random() < 0.02 else f"k{chance.randint(0, 150)}"
            partition = chance.randrange(PARTITIONS)
            if kind != "abort":
                kept.add((partition, key))
            producer.produce(
                name,
                value,
                key=key,
                partition=partition,
                headers=headers,
                timestamp=1_700_000_000_000 + chance.randint(0, 10_000),
            )
        producer.arrived()
        if kind == "commit":
            producer.commit_transaction(PATIENCE_S)
        elif kind == "abort":
            producer.abort_transaction(PATIENCE_S)
        time.sleep(0.12)  # the first record after a segment's time closes the segment
    for partition in range(PARTITIONS):
        plain.produce(name, b"last", key="last", partition=partition)
    plain.arrived()
    # from then on, it stays as it is
    wait_for(lambda: sum(map(len, seen(cleaning, name)[0].values())) == len(kept) + PARTITIONS, what="compaction")
    return Log(name, *seen(cleaning, name))


def seen(topics: Topics, name: str) -> tuple[dict[int, list[int]], dict[int, int]]:
    offsets: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    ends = read_topics(
        topics.bootstrap_servers, [name], lambda record: offsets[record.partition()].append(record.offset())
    )
    return offsets, {int(partition.rpartition("/")[2]): end for partition, end in ends.items()}


@contextmanager
def limits(chunk_records: int, chunk_bytes: int, side_by_side: int) -> Iterator[None]:
    with (
        patch.object(python_session, "CHUNK_RECORDS", chunk_records),
        patch.object(python_session, "SIDE_BY_SIDE_RECORDS_MAX", side_by_side),
        patch.object(native_range_consumer, "CHUNK_BYTES", chunk_bytes),
        patch.object(native_range_consumer, "FETCHED_TOGETHER_MAX", 2),
    ):
        yield


@pytest.fixture(scope="module")
def readers(cleaning: Topics) -> Iterator[list[Any]]:
    """Sessions that are kept over all examples, so that what one leaves behind reaches the next."""
    made = [kind(KafkaSettings(cleaning.bootstrap_servers, None), "readers") for kind in (NativeSession, KafkaSession)]
    yield made
    for each in made:
        each.close()


@pytest.mark.slow
@needs_native
@pytest.mark.integration
@pytest.mark.behaviour("2.5")
@pytest.mark.rule("C16")
@settings(max_examples=examples(60))
@given(
    cuts=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=PARTITIONS, max_size=PARTITIONS),
    goes_back=st.booleans(),
    read_by=st.sets(st.integers(0, PARTITIONS - 1), min_size=1),
    chunk_records=st.sampled_from([1, 7, 50_000]),
    chunk_bytes=st.sampled_from([1, 500, 1 << 20]),
    side_by_side=st.sampled_from([0, 20_000]),
    rests=st.booleans(),
)
def test_both_readers_hand_out_the_same_records_of_consecutive_ranges(
    log: Log,
    readers: list[Any],
    cuts: list[list[float]],
    goes_back: bool,
    read_by: set[int],
    chunk_records: int,
    chunk_bytes: int,
    side_by_side: int,
    rests: bool,
) -> None:
    """Each example cuts the partitions into ranges at random, and reads the ranges one after the
    other, all of them or those of some partitions.
    """
    rounds = max(len(each) for each in cuts)
    edges = {}
    for number, places in enumerate(cuts):
        inner = sorted(int(place * log.ends[number]) for place in places)
        edges[number] = [0 if goes_back else inner[0], *inner, *[log.ends[number]] * (rounds + 1 - len(inner))]
    with limits(chunk_records, chunk_bytes, side_by_side):
        for turn in range(rounds + 1):
            for each in readers if rests else ():
                each.rest()
            ranges = {
                (log.name, number): Range(edges[number][turn], edges[number][turn + 1], None, "id", None)
                for number in sorted(read_by)
            }
            native, python = (
                [row for chunk in each.read(ranges, EVERYTHING) for row in rows_of(chunk)] for each in readers
            )
            assert native == python
            expected = [
                (number, offset)
                for (_, number), its in ranges.items()
                for offset in log.offsets[number]
                if its.first <= offset < its.end
            ]
            assert [(row[1], row[2]) for row in native] == expected


@needs_native
@pytest.mark.slow_for("1-0")
@pytest.mark.integration
@pytest.mark.parametrize("side_by_side", [0, 20_000])
def test_the_sampled_times_have_the_first_and_the_last_record_of_each_partition(
    log: Log, readers: list[Any], side_by_side: int
) -> None:
    """Without asking for the column of times."""
    ranges = {(log.name, number): Range(0, log.ends[number]) for number in range(PARTITIONS)}
    with limits(50_000, 1 << 20, side_by_side):
        for reader in readers:
            stamps: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
            for chunk in reader.read(ranges, EVERYTHING):
                for number, stamp in zip(
                    chunk.metadata("partition").to_pylist(), chunk.metadata("timestamp_ms").to_pylist(), strict=True
                ):
                    stamps[number].append(stamp)
            ends = [stamp for its in stamps.values() for stamp in (its[0], its[-1])]
            every = [stamp for its in stamps.values() for stamp in its]
            sampled = [chunk.sampled_ms for chunk in reader.read(ranges, Parts(False, False, False))]
            assert min(every) <= min(each[0] for each in sampled) <= min(ends)
            assert max(ends) <= max(each[1] for each in sampled) <= max(every)


@needs_native
@pytest.mark.integration
def test_chunks_are_limited_by_records_and_by_bytes(log: Log, readers: list[Any]) -> None:
    ranges = {(log.name, 0): Range(0, log.ends[0])}
    native = readers[0]
    with limits(10, 1 << 20, 20_000):
        assert {len(chunk) for chunk in native.read(ranges, EVERYTHING)} <= set(range(1, 11))
    with limits(50_000, 400, 20_000):
        chunks = list(native.read(ranges, Parts(keys=False, headers=False, timestamps=False)))
    assert all(chunk.value_bytes <= 400 or len(chunk) == 1 for chunk in chunks)
    assert len(chunks) > 3


@needs_native
@pytest.mark.integration
def test_a_chunk_has_only_the_parts_that_were_asked_for(log: Log, readers: list[Any]) -> None:
    chunk = next(readers[0].read({(log.name, 0): Range(0, log.ends[0])}, Parts(False, False, True)))
    assert chunk.metadata("timestamp_ms").null_count == 0
    for name in ("key", "headers"):
        with pytest.raises(KeyError, match="was not asked for"):
            chunk.metadata(name)


@needs_native
@pytest.mark.integration
def test_rows_that_are_taken_from_chunks_are_the_same(log: Log, readers: list[Any]) -> None:
    ranges = {(log.name, number): Range(0, end) for number, end in log.ends.items()}
    native, python = (next(each.read(ranges, EVERYTHING)) for each in readers)
    assert len(native) == len(python) > 20
    for wanted in ([], [0], [3, 1, 11], [len(native) - 1]):
        assert rows_of(native.take(wanted)) == rows_of(python.take(wanted))
        assert native.take(wanted).value_bytes == python.take(wanted).value_bytes
        others = [row for row in range(len(native)) if row not in wanted]
        assert rows_of(native.take(others)) == rows_of(python.take(others))


@needs_native
@pytest.mark.integration
def test_columns_outlive_their_consumer(cleaning: Topics, log: Log, readers: list[Any]) -> None:
    ranges = {(log.name, number): Range(0, end) for number, end in log.ends.items()}
    session = NativeSession(KafkaSettings(cleaning.bootstrap_servers, None), "outlive")
    chunks = list(session.read(ranges, EVERYTHING))
    session.close()
    del session
    gc.collect()
    found = [row for chunk in chunks for row in rows_of(chunk)]
    assert found == [row for chunk in readers[1].read(ranges, EVERYTHING) for row in rows_of(chunk)]


@needs_native
@pytest.mark.integration
def test_a_read_that_is_abandoned_leaves_nothing_for_the_next_one(log: Log, readers: list[Any]) -> None:
    ranges = {(log.name, number): Range(0, end) for number, end in log.ends.items()}
    with limits(5, 1 << 20, 20_000):
        abandoned = readers[0].read(ranges, EVERYTHING)
        next(abandoned)
        abandoned.close()
    found = [(row[1], row[2]) for chunk in readers[0].read(ranges, EVERYTHING) for row in rows_of(chunk)]
    assert found == [(number, offset) for number in log.offsets for offset in log.offsets[number]]


@pytest.mark.slow
@needs_native
@pytest.mark.integration
def test_a_consumer_is_made_anew_for_more_partitions_than_it_has_queues_for(topics: Topics, name: str) -> None:
    """And again for much to read: then few partitions are fetched at once, with room for much."""
    topics.create(name, 9)
    for number in range(9):
        topics.send(name, [b"%d" % number] * 4, number)
    session = NativeSession(KafkaSettings(topics.bootstrap_servers, None), "queues")
    try:
        for first, partitions in ((0, [8]), (0, [1, 2, 3]), (0, [4, 5]), (1, list(range(9))), (2, [0, 8])):
            ranges = {(name, number): Range(first, first + 1) for number in partitions}
            found = [value for chunk in session.read(ranges, EVERYTHING) for value in chunk.raw("value").to_pylist()]
            assert found == [b"%d" % number for number in partitions]
        assert session._queues == 16
        with patch.object(python_session, "SIDE_BY_SIDE_RECORDS_MAX", 0):
            whole = {(name, number): Range(0, 4) for number in (8, *range(8))}
            found = [value for chunk in session.read(whole, EVERYTHING) for value in chunk.raw("value").to_pylist()]
        assert found == [b"%d" % number for number in (8, *range(8)) for _ in range(4)]
        assert session._queues == 8
    finally:
        session.close()


@pytest.mark.slow
@needs_native
@pytest.mark.integration
def test_small_ranges_of_a_backlog_open_no_connection_and_wait_for_nothing(topics: Topics, name: str) -> None:
    """A range takes its records from queues that are filled already, so it costs about as much as
    its own few records: not a 50 ms wait, and no sorting out of what was fetched ahead.
    """
    topics.create(name, 4)
    for number in range(4):
        topics.send(name, [b"x" * 80] * 5_000, number)
    session = NativeSession(KafkaSettings(topics.bootstrap_servers, None), "small")
    try:
        elapsed_s = []
        for first in range(0, 1_000, 5):
            ranges = {(name, number): Range(first, first + 5) for number in range(4)}
            begun = time.thread_time()
            assert sum(len(chunk) for chunk in session.read(ranges, EVERYTHING)) == 20
            elapsed_s.append(time.thread_time() - begun)
        consumer = session._consumer
        assert sorted(elapsed_s)[len(elapsed_s) // 2] < 0.005
        assert session._consumer is consumer and len(session._assigned) == 4
    finally:
        session.close()


@needs_native
def test_a_consumer_that_cannot_be_made_anew_leaves_the_former_one_with_its_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = NativeSession(KafkaSettings("127.0.0.1:1", None), "g")
    former = session._consumer

    def refused(*_: Any) -> Any:
        raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "no more threads"))

    with monkeypatch.context() as patch:
        patch.setattr(native_range_consumer, "NativeConsumer", refused)
        wanted = {("t", number): Range(0, 1) for number in range(QUEUES_MIN + 1)}
        with pytest.raises(RetryableError, match="127.0.0.1:1: no more threads; see the limits"):
            list(session.read(wanted, EVERYTHING))
    assert (session._consumer, session._queues) == (former, QUEUES_MIN)
    session.close()


@pytest.mark.parametrize("queues", [1 << power for power in range(11)])
def test_what_a_consumer_fetches_ahead_does_not_grow_with_its_queues(queues: int) -> None:
    assert queues <= QUEUES_MAX == 1_024
    conf = KafkaSettings("127.0.0.1:1", None).consumer("g", queues=queues)
    assert queues * conf["queued.min.messages"] <= 200_000
    assert queues * conf["queued.max.messages.kbytes"] <= 128 * 1_024
    assert queues * conf["max.partition.fetch.bytes"] <= 16 << 20
    assert min(conf["queued.min.messages"], conf["queued.max.messages.kbytes"]) > 100


@pytest.mark.parametrize(
    ("records", "together"), [(1, QUEUES_MAX), (9, QUEUES_MAX), (200, 100), (5_000, FETCHED_TOGETHER_MAX)]
)
def test_many_partitions_are_read_group_by_group(monkeypatch: pytest.MonkeyPatch, records: int, together: int) -> None:
    """So a consumer never has more queues than its memory was divided among."""
    session = object.__new__(NativeSession)
    session._assigned, session._queues, session._pace = {}, QUEUES_MIN, FetchPace()
    read: list[list[TopicPartition]] = []

    def reading(
        ranges: dict[TopicPartition, Range], parts: Parts
    ) -> Generator[ColumnChunk, None, dict[TopicPartition, Range]]:
        session._assigned.update(dict.fromkeys(ranges))  # type: ignore[arg-type]
        assert len(session._assigned) <= together
        read.append(list(ranges))
        yield from ()
        return {}

    monkeypatch.setattr(session, "_read", reading)
    monkeypatch.setattr(session, "_unassign", lambda gone: [session._assigned.pop(tp) for tp in gone])
    wanted = {("t", number): Range(0, records) for number in range(2_500)}
    assert list(session.read(wanted, EVERYTHING)) == []
    assert [tp for group in read for tp in group] == list(wanted)
    assert {len(group) for group in read[:-1]} == {together}


@needs_native
@pytest.mark.integration
def test_partitions_that_are_read_no_more_hold_no_records(topics: Topics, name: str) -> None:
    topics.create(name, 4)
    for number in range(4):
        topics.send(name, [os.urandom(10_000)] * 20, number)
    session = NativeSession(KafkaSettings(topics.bootstrap_servers, None), "ahead")

    def ahead_bytes() -> int:
        session._serve()
        return session._traffic.ahead_bytes(shared=False)

    try:
        ranges = {(name, number): Range(0, 1) for number in range(4)}
        assert sum(len(chunk) for chunk in session.read(ranges, EVERYTHING)) == 4
        wait_for(lambda: ahead_bytes() >= 10_000, PATIENCE_S)
        session.rest()
        wait_for(lambda: ahead_bytes() < 10_000, PATIENCE_S)  # no record; perhaps the event of an end
    finally:
        session.close()


@pytest.mark.integration
def test_the_python_reader_bounds_what_it_keeps_for_later_ranges(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(name, 8)
    for number in range(8):
        topics.send(name, [b"%d-%d" % (number, offset) + b"x" * 10_000 for offset in range(20)], number)
    monkeypatch.setattr(python_session, "AHEAD_BYTES_MAX", 300_000)
    session = KafkaSession(KafkaSettings(topics.bootstrap_servers, None), "ahead")
    most = 0
    try:
        for first in range(0, 20, 2):
            for number in range(8):
                chunks = list(session.read({(name, number): Range(first, first + 2)}))
                values = [value[:5].rstrip(b"x") for chunk in chunks for value in chunk.raw("value")]
                assert values == [b"%d-%d" % (number, offset) for offset in (first, first + 1)]
                most = max(most, sum(each.ahead_bytes for each in session._assigned.values()))
                held = sum(len(message) for each in session._assigned.values() for message in each.ahead)
                assert held == sum(each.ahead_bytes for each in session._assigned.values())
        assert 0 < most < 300_000 + 20 * 10_010  # the limit, and the partition that was read
    finally:
        session.close()


@pytest.mark.slow
@needs_native
@pytest.mark.integration
@pytest.mark.parametrize("size", [100, pytest.param(200_000, marks=pytest.mark.slow)])
def test_the_memory_of_a_reader_is_bounded_while_a_backlog_waits(topics: Topics, name: str, size: int) -> None:
    """Everything is far larger than the bounds, which are lowered here by the user's settings."""
    topics.create(name, 4)
    payload = os.urandom(size)
    count = 400_000_000 // size if size > 1_000 else 1_000_000
    producer = topics.producer(linger_ms=20, batch_size=1_000_000)
    for number in range(count):
        while True:
            try:
                producer.produce(name, payload, partition=number % 4)
                break
            except BufferError:
                producer.poll(0.05)
    producer.arrived(120)
    ahead = {"queued.max.messages.kbytes": 4_096, "queued.min.messages": 20_000}
    session = NativeSession(KafkaSettings(topics.bootstrap_servers, ahead), "memory")
    process = psutil.Process()
    try:
        before = process.memory_info().rss
        ranges = {(name, number): Range(0, count // 4) for number in range(4)}
        most = rows = 0
        for chunk in session.read(ranges, EVERYTHING):
            rows += len(chunk)
            most = max(most, process.memory_info().rss - before)
        assert rows == count // 4 * 4
        # 4 queues of 4 MB and a fetch of 2 MB each, or of 20,000 records with their own overhead;
        # two chunks of 32 MB: the one that is filled, and the one that was handed out.
        assert most < 250 << 20
    finally:
        session.close()


# --- which reader ---------------------------------------------------------------------------------


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    structlog.reset_defaults()
    monkeypatch.setattr("spouts.kafka.consumer.consumer_pool._said", set())


@needs_native
@pytest.mark.usefixtures("nothing_said")
def test_the_native_reader_is_the_first_choice_and_the_line_at_the_start_says_so() -> None:
    settings = KafkaSettings("127.0.0.1:1", None)
    assert reader_of(settings) == ("native", None)
    with own_logs() as logs:
        say_reader(settings)
        say_reader(settings)
    assert [(each["event"], each["reader"]) for each in logs] == [("source.reader", "native")]


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reader": "python"}, "kafka.reader says so"),
        pytest.param(
            {"stats_cb": print}, "the setting 'stats_cb' works with the Python reader only", marks=needs_native
        ),
        pytest.param({"logger": print}, "the setting 'logger' works with the Python reader only", marks=needs_native),
        pytest.param({"something_cb": print}, "'something_cb' works with the Python reader only", marks=needs_native),
    ],
)
def test_what_only_the_python_reader_can_do_goes_to_it_with_a_reason_and_what_it_costs(
    options: dict[str, Any], reason: str
) -> None:
    with own_logs() as logs:
        say_reader(KafkaSettings("127.0.0.1:1", options))
    assert len(logs) == 1
    assert logs[0]["reader"] == "python"
    assert reason in logs[0]["reason"]
    assert "processor time" in logs[0]["cost"]


def test_where_the_compiled_part_is_missing_the_python_reader_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spouts.kafka.consumer.consumer_pool.why_not_native", lambda: "the compiled part was not built")
    plain = KafkaSettings("127.0.0.1:1", None)
    assert reader_of(plain) == ("python", "the compiled part was not built")
    with pytest.raises(ConfigError, match="kafka.reader is 'native', but the compiled part was not built"):
        KafkaTransactionalSpout(["a"], settings={"reader": "native"}).check_before_start(
            {"kafka.bootstrap.servers": "h:1"}
        )
    pool = KafkaSessions()
    with pool.lend(plain, "g", 0) as session:
        assert isinstance(session, KafkaSession)
    pool.close()


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("native_on_driver", [True, False])
def test_a_worker_that_cannot_read_natively_says_so_once_where_the_driver_can(
    monkeypatch: pytest.MonkeyPatch, native_on_driver: bool
) -> None:
    """Each process says what the other cannot know: the driver has said which reader it has."""
    absent = "the compiled part was not built"
    spout = KafkaTransactionalSpout(["a"], bootstrap_servers="127.0.0.1:1")
    by_choice = KafkaTransactionalSpout(["a"], bootstrap_servers="127.0.0.1:1", settings={"reader": "python"})
    where = "spouts.kafka.transactional.why_not_native"
    monkeypatch.setattr(where, lambda: None if native_on_driver else absent)
    sent, chosen = pickle.loads(pickle.dumps(spout)), pickle.loads(pickle.dumps(by_choice))
    for name in (where, "spouts.kafka.consumer.consumer_pool.why_not_native"):
        monkeypatch.setattr(name, lambda: absent)
    with own_logs() as logs:
        for each in (chosen, sent, sent):
            each.reader({}, TopologyContext("t", "spout", 0, 1))
        pickle.loads(pickle.dumps(sent)).reader({}, TopologyContext("t", "spout", 1, 2))
    warned = [(each["event"], each["log_level"], each["reason"]) for each in logs]
    assert warned == ([("source.reader_falls_back", "warning", absent)] if native_on_driver else [])


def test_the_choice_is_a_setting_that_librdkafka_never_sees() -> None:
    with pytest.raises(ConfigError, match="'reader' must be one of 'auto', 'native', 'python', not 'java'"):
        KafkaTransactionalSpout(["a"], bootstrap_servers="127.0.0.1:1", settings={"reader": "java"})
    chosen = KafkaSettings(None, None).with_conf({"kafka.bootstrap.servers": "h:1", "kafka.reader": "python"})
    assert chosen.reader == "python"
    for conf in (chosen.consumer("g"), chosen.admin(), chosen.producer()):
        assert "reader" not in conf
    assert chosen.fingerprint() != KafkaSettings("h:1", None).fingerprint()


def test_the_users_own_bounds_apply_to_each_queue() -> None:
    given_by_user = KafkaSettings("h:1", {"queued.max.messages.kbytes": 9}).consumer("g", queues=64)
    assert given_by_user["queued.max.messages.kbytes"] == 9


@pytest.mark.parametrize(
    ("is_built", "said"),
    [pytest.param(True, "Consumer", marks=needs_native), (False, "NotCompiledError: .*was not built")],
)
def test_the_compiled_part_is_found_in_the_archive_that_executors_get(
    tmp_path: Path, is_built: bool, said: str
) -> None:
    """Python itself loads no compiled module from an archive."""
    files = [Path(spouts.__path__[0], "compiled.py"), *([Path(native().__file__)] if is_built else [])]
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("spouts/__init__.py", "")
        for file in files:
            archive.write(file, f"spouts/{file.name}")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from spouts.compiled import native; print(native().Consumer.__name__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "code.zip")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(said, done.stdout + done.stderr)


# --- the native consumer --------------------------------------------------------------------------


@needs_native
def test_an_unknown_setting_is_named_as_the_python_reader_names_it() -> None:
    wrong = KafkaSettings("127.0.0.1:1", {"sasl.pasword": "x"})
    said = []
    for kind in (NativeSession, KafkaSession):
        with pytest.raises(
            ConfigError, match="unknown Kafka setting 'sasl.pasword': did you mean 'sasl.password'\\?"
        ) as error:
            kind(wrong, "g")  # type: ignore[operator]
        said.append(str(error.value))
    assert said[0] == said[1]


@needs_native
def test_settings_that_contradict_each_other_are_named_as_the_python_reader_names_them() -> None:
    wrong = KafkaSettings("127.0.0.1:1", {"security.protocol": "ssl", "ssl.ca.location": "/not/there.pem"})
    said = []
    for kind in (NativeSession, KafkaSession):
        with pytest.raises(ConfigError, match="ssl.ca.location failed") as error:
            kind(wrong, "g")  # type: ignore[operator]
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.slow
@needs_native
def test_brokers_that_are_away_are_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spouts.kafka.consumer.range_consumer.SILENCE_MAX_S", 0.5)
    address = f"127.0.0.1:{free_port()}"
    session = NativeSession(KafkaSettings(address, None), "g")
    with pytest.raises(RetryableError, match=f"nothing answers at {address}"):
        session.connect()
    with pytest.raises(RetryableError, match=f"t/0 delivered nothing for 0.5 s.*range to 5.*{address}"):
        list(session.read({("t", 0): Range(0, 5)}, EVERYTHING))
    session.close()


@needs_native
def test_a_closed_consumer_says_so_and_may_be_closed_again() -> None:
    session = NativeSession(KafkaSettings("127.0.0.1:1", None), "g")
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="Consumer closed"):
        session._consumer.list_topics(timeout=0.1)


@needs_native
def test_a_child_process_forgets_the_consumers_of_its_parent() -> None:
    pool = KafkaSessions()
    settings = KafkaSettings("127.0.0.1:1", {"reader": "native"})
    with pool.lend(settings, "g", 0) as parents:
        pass
    child = os.fork()
    if child == 0:  # no pytest here, and nothing of the parent's is ended
        code = 1
        try:
            try:
                parents._consumer.poll()  # type: ignore[attr-defined]
            except RuntimeError as error:
                code = 0 if "child process" in str(error) else 2
            del parents
            with pool.lend(settings, "g", 0):
                code += 10 * (len(pool._idle) != 0)
            pool.close()
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert done, "the child waits for threads that it does not have"
    assert os.waitstatus_to_exitcode(status) == 0
    with pool.lend(settings, "g", 0) as again:
        assert again is parents
    pool.close()


@needs_native
def test_a_partition_that_is_not_assigned_is_no_crash() -> None:
    session = NativeSession(KafkaSettings("127.0.0.1:1", None), "g")
    raw = session._consumer.raw
    where = {"topic": "t", "partition": 0, "position": 0, "end": 1, "epoch_max": None}
    raw.begin(*EVERYTHING, 10)
    with pytest.raises(RuntimeError, match="not assigned"):
        raw.fill(**where, rows_max=1, bytes_max=1, wait_ms=0)
    raw.finish()
    with pytest.raises(RuntimeError, match="no chunk was begun"):
        raw.finish()
    session.close()


# --- events that wait in a queue ------------------------------------------------------------------


@needs_native
@pytest.mark.integration
@pytest.mark.rule("C26")
def test_an_error_that_waited_since_an_earlier_read_is_asked_for_again(topics: Topics, name: str) -> None:
    """The event says what was so then; the broker is asked what is so now."""
    topics.send(topics.create(name), [b"a", b"b"])
    session = NativeSession(KafkaSettings(topics.bootstrap_servers, None), "stale")
    try:
        assert sum(len(chunk) for chunk in session.read({(name, 0): Range(0, 1)}, EVERYTHING)) == 1
        session._assigned[(name, 0)].is_fresh = False
        error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "was so")
        session._event((name, 0), 1, error, 1)
        assert session._assigned[(name, 0)].is_fresh
        with pytest.raises(DataLossError, match=f"{name}/0 no longer holds offset 1 as it was: was so"):
            session._event((name, 0), 1, error, 1)
        session._event((name, 0), 1, error, 7)  # ahead of what is read: no loss
        assert sum(len(chunk) for chunk in session.read({(name, 0): Range(1, 2)}, EVERYTHING)) == 1
    finally:
        session.close()


# --- codecs of one's own --------------------------------------------------------------------------


class Shout(TextCodec):
    """A user's codec, which changes one method of ours."""

    def decode(self, values: Any) -> pa.RecordBatch:
        return super().decode([value.upper() if value is not None else None for value in values])


class ShoutJson(JsonCodec):
    """The same of a codec that decodes where values lie."""

    def decode(self, values: Any) -> pa.RecordBatch:
        return super().decode([value.upper() if value is not None else None for value in values])

    def decode_good(self, values: Any) -> Any:
        return super().decode_good([value.upper() if value is not None else None for value in values])


@pytest.mark.parametrize("values", [[b'{"s": "ab"}', None], [b'{"s": "ab"}', b' {"s": "cd"}']])
def test_a_subclass_that_changes_how_values_are_decoded_does_so_in_every_call(values: list[bytes | None]) -> None:
    codec = ShoutJson(Fields(S=str))
    expected = codec.decode(values)
    assert expected.column(0)[0].as_py() == "AB"
    array = pa.array(values, pa.binary())
    assert codec.decode_array(array).equals(expected)
    assert codec.decode_good_array(array)[0].equals(codec.decode_good(values)[0]) and codec.decode_good(values)[1] == []


class Reversed(Codec):
    def __init__(self) -> None:
        self.fields = Fields.of({"value": pa.binary()})

    def decode(self, values: Any) -> pa.RecordBatch:
        assert isinstance(values, list) and all(value is None or type(value) is bytes for value in values)
        return pa.record_batch([pa.array([value and value[::-1] for value in values], pa.binary())], names=["value"])


@pytest.mark.parametrize(
    ("codec", "expected"), [(Shout(), ["AB", None]), (Reversed(), [b"ba", None]), (BytesCodec(), [b"ab", None])]
)
@pytest.mark.integration
def test_codecs_of_ones_own_get_bytes_whichever_reader_reads(
    topics: Topics, name: str, reader: str, codec: Codec, expected: list[Any]
) -> None:
    topics.send(topics.create(name), [b"ab", None])
    spout = KafkaTransactionalSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=codec)
    ranges = {f"{name}/0": {"first_offset": 0, "next_offset": 2}}
    batches = list(spout.reader({}, CONTEXT).read_all(TransactionAttempt(1, 1), ranges))
    assert [value for batch in batches for value in batch.column(0).to_pylist()] == expected


JSONS = st.one_of(
    st.none(),
    st.sampled_from(
        [b"{}", b' {"n": 1}', b'{"n": 1}\n', b'{"n":\n2}', b'{"n": "x"}', b"[]", b"", b'{"n": 1}{"n": 2}', b"{"]
    ),
    st.builds(lambda n: b'{"n": %d, "s": "a\\nb", "more": [{"n": 3}]}' % n, st.integers(-(2**63), 2**63 - 1)),
)


@settings(max_examples=examples(300))
@given(values=st.lists(JSONS, max_size=25), skipped=st.integers(0, 3))
def test_json_is_decoded_from_an_array_as_from_a_list(values: list[bytes | None], skipped: int) -> None:
    codec = JsonCodec(Fields(n=int, s=str))
    array = pa.array([b"skipped"] * skipped + values, pa.binary())[skipped:]
    listed, lying = codec.decode_good(values), codec.decode_good_array(array)
    assert lying[1] == listed[1]
    assert lying[0].equals(listed[0])


# --- security -------------------------------------------------------------------------------------


class OauthListener(Listener):
    """A listener that takes unsigned tokens, as Kafka does for tests."""

    protocol = "SASL_PLAINTEXT"

    def settings(self) -> dict[str, str]:
        return {
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "oauthbearer.sasl.jaas.config": (
                "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
            ),
        }


@pytest.fixture(scope="module")
def oauth_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    server = KafkaBroker(tmp_path_factory.mktemp("oauth"), secure=OauthListener())
    server.start()
    topics = Topics(server.address)
    topics.send(topics.create("tokens"), [b"%d" % number for number in range(10)])
    yield server
    server.stop()


def unsigned_token(lifetime_s: float) -> tuple[str, float]:
    now = time.time()
    parts = ({"alg": "none"}, {"sub": "alice", "iat": now, "exp": now + lifetime_s})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return f"{'.'.join(encoded)}.", now + lifetime_s


@pytest.mark.slow
@needs_native
@pytest.mark.integration
@pytest.mark.behaviour("2.11")
def test_tokens_of_oauth_cb_open_the_connection_and_are_renewed(oauth_broker: KafkaBroker) -> None:
    asked: list[str] = []

    def oauth(config: str) -> tuple[str, float, str, dict[str, str]]:
        asked.append(config)
        return (*unsigned_token(3.0), "alice", {"traceId": "7"})

    conf = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.config": "scope=a",
        "oauth_cb": oauth,
        "reader": "native",
    }
    session = NativeSession(KafkaSettings(oauth_broker.secure_address, conf), "oauth")
    try:
        deadline = time.monotonic() + PATIENCE_S
        read = 0
        while len(asked) < 3 or not read:  # each read lets librdkafka ask; a token is renewed after 80 % of its time
            assert time.monotonic() < deadline
            # After half a second without the processor a token has expired: then one tries again.
            with suppress(RetryableError):
                read = sum(len(chunk) for chunk in session.read({("tokens", 0): Range(0, 10)}, EVERYTHING))
                assert read == 10
            time.sleep(0.2)
    finally:
        session.close()
    assert set(asked) == {"scope=a"}


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.behaviour("2.11", "4.9")
@pytest.mark.parametrize("reader", [pytest.param("native", marks=needs_native), "python"])
def test_all_clients_of_a_core_spout_get_new_tokens(
    oauth_broker: KafkaBroker, name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that asks for the group's offsets, which it does seldom."""
    monkeypatch.setattr("spouts.kafka.consumer.core_spout_consumer.LOOK_UP_EVERY_S", 0.5)
    lifetime_s = 3.0
    expired = time.monotonic() + lifetime_s + 1.0  # then the first tokens have expired

    def oauth(_: object) -> tuple[str, float, str, dict[str, str]]:
        return (*unsigned_token(lifetime_s), "alice", {})

    conf = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER", "oauth_cb": oauth}
    topics = Topics(oauth_broker.address)
    topics.send(topics.create(name), [b"a"] * 5)
    tail = tail_of(oauth_broker.secure_address, name, settings={**conf, "reader": reader})
    at: dict[TopicPartition, Position] = {}

    def stepped() -> None:
        with suppress(RetryableError):
            tail.look_up()
            tail.advance()
            if records := tail.poll():
                offsets = records.metadata("offset").to_pylist()
                for row, number in enumerate(records.metadata("partition").to_pylist()):
                    at[(name, number)] = Position(offsets[row] + 1, tail.topic_id((name, number)))
            tail.publish(at)

    def read(wanted: dict[TopicPartition, int]) -> bool:
        stepped()
        return {tp: each.offset for tp, each in at.items()} == wanted and tail.published(at)

    try:
        wait_for(lambda: read({(name, 0): 5}))
        wait_for(lambda: stepped() is None and time.monotonic() > expired)
        topics.add_partitions(name, 2)
        topics.send(name, [b"b"] * 5, 1)
        wait_for(lambda: read({(name, 0): 5, (name, 1): 5}))
    finally:
        tail.close()


@pytest.mark.slow
@needs_native
def test_an_oauth_cb_that_fails_is_the_reason_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spouts.kafka.consumer.range_consumer.SILENCE_MAX_S", 0.5)

    def oauth(config: str) -> tuple[str, float]:
        raise OSError("the identity provider is away")

    conf = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER", "oauth_cb": oauth}
    session = NativeSession(KafkaSettings(f"127.0.0.1:{free_port()}", conf), "oauth")
    with pytest.raises((RetryableError, ConfigError), match="the identity provider is away"):
        session.connect()
    session.close()


@needs_native
def test_an_oauth_cb_is_called_the_same_way_by_both_readers() -> None:
    """It serves the planner's clients, too. Without a configuration it gets None."""
    asked: dict[str, list[object]] = {"native": [], "python": []}
    for name, kind in (("native", NativeSession), ("python", KafkaSession)):

        def oauth(config: object, name: str = name) -> tuple[str, float]:
            asked[name].append(config)
            return unsigned_token(600.0)

        conf = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER", "oauth_cb": oauth}
        kind(KafkaSettings(f"127.0.0.1:{free_port()}", conf), "oauth").close()
    assert asked == {"native": [None], "python": [None]}


@pytest.mark.slow
@needs_native
def test_an_extension_of_a_token_that_is_not_text_is_an_error() -> None:
    def oauth(config: object) -> tuple[str, float, str, dict[str, Any]]:
        return (*unsigned_token(600.0), "alice", {"traceId": b"7"})

    conf = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER", "oauth_cb": oauth}
    session = NativeSession(KafkaSettings(f"127.0.0.1:{free_port()}", conf), "oauth")
    with pytest.raises((RetryableError, ConfigError), match="oauth_cb raised TypeError"):
        session.connect()
    session.close()


class Provider:
    """A user's ``oauth_cb`` that is an object. ``lock``: it cannot be pickled."""

    def __init__(self, secret: str, lock: Any = None) -> None:
        self.secret = secret
        self.lock = lock

    def __call__(self, config: object) -> tuple[str, float]:
        return unsigned_token(600.0)


def settings_of(oauth_cb: Any) -> KafkaSettings:
    return KafkaSettings("127.0.0.1:1", {"oauth_cb": oauth_cb, "reader": "python"})


@pytest.mark.parametrize(
    "oauth_cb",
    [
        unsigned_token,
        Provider("a"),
        Provider("a").__call__,
        partial(unsigned_token, 5.0),
        lambda config: ("token", 1e12),
    ],
    ids=["function", "object", "method", "partial", "lambda"],
)
def test_every_copy_of_settings_finds_the_same_session(oauth_cb: Any) -> None:
    """Each attempt unpickles a copy. A consumer for each would cost time, and stay in memory."""
    pickled = cloudpickle.dumps(settings_of(oauth_cb))
    first, second = pickle.loads(pickled), pickle.loads(pickled)
    assert first.fingerprint() == second.fingerprint()


def test_settings_with_another_callback_find_another_session() -> None:
    settings = [settings_of(each) for each in (unsigned_token, Provider("a"), Provider("b"), Provider("a", Lock()))]
    assert len({each.fingerprint() for each in settings}) == len(settings)
