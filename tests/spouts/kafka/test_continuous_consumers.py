"""The two consumers of a core spout's task: what both do alike, and what each does by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

import spouts.kafka.consumer.continuous_consumers as feeds
from framework.clients.kafka_settings import ConnectionErrors, KafkaSettings
from framework.errors import ConfigError, RetryableError
from spouts import KafkaSpout
from spouts.kafka.consumer import native_range_consumer
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.consumer.continuous_consumers import ColumnFeed, Event, Feed, MessageFeed
from spouts.kafka.consumer.damaged_batches import NOT_IN_LOG
from spouts.kafka.consumer.native_range_consumer import QUEUES_MIN, NativeConsumer, why_not_native
from spouts.kafka.consumer.record_chunk import RecordChunk
from spouts.kafka.group_offsets import GroupOffsets
from spouts.kafka.partition_plan_entries import Position, TopicPartition
from spouts.kafka.record_deserialization import EVERYTHING, METADATA_TYPES
from tests.kit.kafka_runs import tail_of
from tests.kit.readers import READERS, needs_native
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("4.9")]
START = Position(0, None)


def made(kind: type[Feed], topics: Topics, name: str) -> Feed:
    settings = KafkaSettings(topics.bootstrap_servers, None)
    if kind is ColumnFeed:
        return ColumnFeed(settings, name, ConnectionErrors("the test"), EVERYTHING)
    return MessageFeed(GroupOffsets(settings, name).consumer())


@contextmanager
def opened(kind: type[Feed], topics: Topics, name: str) -> Iterator[Feed]:
    feed = made(kind, topics, name)
    try:
        yield feed
    finally:
        feed.close()


@pytest.fixture(params=[pytest.param(ColumnFeed, marks=needs_native), MessageFeed], ids=["native", "python"])
def feed(request: pytest.FixtureRequest, topics: Topics, name: str) -> Iterator[Feed]:
    with opened(request.param, topics, name) as each:
        yield each


def rows_of(chunk: RecordChunk) -> list[tuple[Any, ...]]:
    """Everything that a chunk shows of its records: their places, twice, and their parts."""
    columns = [chunk.metadata(name).to_pylist() for name in METADATA_TYPES]
    raw = chunk.raw("value")
    columns += [raw.to_pylist() if isinstance(raw, pa.Array) else list(raw), chunk.epochs.tolist()]
    columns.append([run.tp for run in chunk.runs() for _ in range(run.rows)])
    return list(zip(*columns, strict=True))


def taken(feed: Feed, enough: Callable[[list[tuple[Any, ...]]], bool]) -> list[tuple[Any, ...]]:
    """What a feed hands out until it is enough. There is no event."""
    rows: list[tuple[Any, ...]] = []

    def more() -> bool:
        chunk, events = feed.take()
        assert not events
        if chunk is not None:
            assert len(chunk) <= feeds.CHUNK_RECORDS or isinstance(feed, MessageFeed)
            rows.extend(rows_of(chunk))
        return enough(rows)

    wait_for(more)
    return rows


def places(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """(partition, offset) of rows."""
    return [row[1:3] for row in rows]


@needs_native
def test_both_show_the_same_of_the_same_records(topics: Topics, name: str) -> None:
    topics.create(name, 3)
    aborting = topics.producer(transactional_id=f"{name}-t")
    aborting.init_transactions(PATIENCE_S)
    plain = topics.producer()
    for number in range(600):
        value = [b"value %d" % number, None, b""][number % 7 % 3]
        more = {"headers": [("h", b"1"), ("h", None)]} if number % 5 == 0 else {}
        plain.produce(name, value, key=None if number % 3 else b"k", partition=number % 3, **more)
    plain.arrived()
    aborting.begin_transaction()
    aborting.produce(name, b"aborted", partition=1)
    aborting.arrived()
    aborting.abort_transaction(PATIENCE_S)
    topics.send(name, [b"last"], 1)
    shown = []
    for kind in (ColumnFeed, MessageFeed):
        with opened(kind, topics, name) as feed:
            feed.begin({(name, number): START for number in range(3)})
            rows = taken(feed, lambda rows: len(rows) == 601)
            wait_for(lambda feed=feed: feed.take() == (None, []) and len(feed.ended) == 3)  # type: ignore[misc]
            by_partition = [[row for row in rows if row[1] == number] for number in range(3)]
            assert all(offsets == sorted(offsets) for offsets in (places(each) for each in by_partition))
            shown.append(by_partition)
    assert shown[0] == shown[1]
    assert {row[-2] for row in shown[0][0]} != {-1}, "leader epochs are known"


def test_parts_of_a_chunk_have_their_own_partitions_and_epochs(feed: Feed, topics: Topics, name: str) -> None:
    topics.create(name, 3)
    for number in range(3):
        topics.send(name, [b"%d" % number] * 5, number)
    feed.begin({(name, number): START for number in range(3)})
    chunks: list[RecordChunk] = []

    def has_come() -> bool:
        chunk, _ = feed.take()
        chunks.extend([chunk] if chunk is not None else [])
        return sum(map(len, chunks)) == 15

    wait_for(has_come)
    for chunk in chunks:
        rows = rows_of(chunk)
        for tp in {run.tp for run in chunk.runs()}:
            assert rows_of(chunk.without(tp)) == [row for row in rows if row[-1] != tp]
        some = [at for at in range(len(rows)) if at % 3 != 1]
        part = chunk.take(some)
        assert rows_of(part) == [rows[at] for at in some]
        assert rows_of(part.take(range(len(some)))) == [rows[at] for at in some]
        assert not len(chunk.take([])) and chunk.take([]).runs() == []


def test_a_partition_that_begins_again_gives_nothing_that_was_fetched_before(
    feed: Feed, topics: Topics, name: str
) -> None:
    topics.create(name, 2)
    for number in range(2):
        topics.send(name, [b"x"] * 50, number)
    feed.begin({(name, 0): START, (name, 1): Position(45, None)})
    taken(feed, lambda rows: len(rows) == 55)
    feed.begin({(name, 0): START})
    if isinstance(feed, MessageFeed):
        wait_for(lambda: feed.hear() == [] and bool(feed._early))
    feed.begin({(name, 0): Position(30, None)})
    assert places(taken(feed, lambda rows: len(rows) == 20)) == [(0, offset) for offset in range(30, 50)]
    wait_for(lambda: feed.take() == (None, []) and feed.ended == {(name, 0), (name, 1)})
    topics.send(name, [b"x"], 1)
    assert places(taken(feed, lambda rows: len(rows) == 1)) == [(1, 50)]


def test_a_paused_partition_gives_nothing_and_loses_nothing(feed: Feed, topics: Topics, name: str) -> None:
    topics.create(name, 2)
    feed.begin({(name, 0): START, (name, 1): START})
    wait_for(lambda: feed.take() == (None, []) and len(feed.ended) == 2)
    feed.pause({(name, 0)})
    for number in range(2):
        topics.send(name, [b"x"] * 40, number)
    assert {row[0] for row in places(taken(feed, lambda rows: len(rows) == 40))} == {1}
    for _ in range(100):
        assert feed.take() == (None, [])
    feed.pause(set())
    assert places(taken(feed, lambda rows: len(rows) == 40)) == [(0, offset) for offset in range(40)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test can reach. Ask for it before the feed."""
    monkeypatch.setattr(feeds, "EARLY_MAX", 100)
    monkeypatch.setattr(feeds, "CHUNK_RECORDS", 60)


def test_records_that_arrive_while_nobody_takes_them_come_later(
    small: None, feed: Feed, topics: Topics, name: str
) -> None:
    topics.send(topics.create(name), [b"x"] * 1_000)
    feed.begin({(name, 0): START})
    if isinstance(feed, MessageFeed):
        wait_for(lambda: feed.hear() == [] and len(feed._early) >= 100)
    for _ in range(100):
        assert feed.hear() == []
    if isinstance(feed, MessageFeed):
        assert len(feed._early) <= 160
    feed.pause(set())
    assert places(taken(feed, lambda rows: len(rows) == 1_000)) == [(0, offset) for offset in range(1_000)]


def test_a_partition_with_more_to_take_is_not_read_to_its_end(
    small: None, feed: Feed, topics: Topics, name: str
) -> None:
    topics.create(name)
    feed.begin({(name, 0): START})
    wait_for(lambda: feed.take() == (None, []) and feed.ended == {(name, 0)})
    topics.send(name, [b"x"] * 1_000)
    had = 0
    while had < 1_000 - 60:  # the next call could have taken the rest, and the end
        chunk, _ = feed.take()
        had += len(chunk) if chunk is not None else 0
        assert chunk is None or had == 1_000 or not feed.ended
    wait_for(lambda: feed.take()[0] is None and feed.ended == {(name, 0)})


def test_an_offset_that_is_not_in_the_log_is_an_event_after_the_records_before_it(
    feed: Feed, topics: Topics, name: str
) -> None:
    topics.create(name, 2)
    topics.send(name, [b"x"] * 10, 1)
    feed.begin({(name, 0): Position(500, None), (name, 1): START})
    records, events = 0, list[Event]()

    def both() -> bool:
        nonlocal records
        chunk, more = feed.take()
        records += len(chunk) if chunk is not None else 0
        events.extend(more)
        return records == 10 and bool(events)

    wait_for(both)
    assert [(each.tp, each.offset) for each in events] == [((name, 0), 500)]
    assert events[0].error.code() in NOT_IN_LOG


@pytest.mark.slow
def test_after_any_steps_each_partition_goes_on_where_it_was(
    small: None, feed: Feed, topics: Topics, name: str, seed: int
) -> None:
    """Random sends, beginnings, pauses and takes; more partitions than a consumer is made for at
    first."""
    chance, count = random.Random(seed), QUEUES_MIN + 4
    topics.create(name, count)
    ends = dict.fromkeys(range(count), 0)
    expected: dict[int, int] = {}  # the next offset of each partition that has begun
    paused: set[int] = set()

    def send() -> None:
        number, many = chance.randrange(count), chance.randint(1, 150)
        topics.send(name, [b"x"] * many, number)
        ends[number] += many

    def begin() -> None:
        begun = chance.sample(range(count), chance.randint(1, 3))
        expected.update({number: chance.randint(0, ends[number]) for number in begun})
        paused.difference_update(begun)
        feed.begin({(name, number): Position(expected[number], None) for number in begun})

    def pause() -> None:
        paused.clear()
        paused.update(chance.sample(sorted(expected), chance.randint(0, min(3, len(expected)))))
        feed.pause({(name, number) for number in paused})

    def take() -> None:
        chunk, events = feed.take()
        assert not events
        for number, offset in places(rows_of(chunk)) if chunk is not None else ():
            assert offset == expected[number]
            # What was kept before the pause may still come from the consumer with one queue.
            assert number not in paused or isinstance(feed, MessageFeed)
            expected[number] += 1

    for _ in range(150):
        chance.choices([send, begin, pause, take, feed.hear], [2, 1, 1, 5, 1])[0]()
    feed.pause(set())
    paused.clear()

    def all_is_read() -> bool:
        take()
        return all(at == ends[number] for number, at in expected.items())

    wait_for(all_is_read)
    wait_for(lambda: take() is None and feed.ended == {(name, number) for number in expected})


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_native
def test_a_consumer_is_made_anew_for_more_partitions_and_goes_on_where_it_was(topics: Topics, name: str) -> None:
    count = 2 * QUEUES_MIN + 1
    topics.create(name, count)
    for number in range(count):
        topics.send(name, [b"x"] * 20, number)
    with opened(ColumnFeed, topics, name) as feed:
        assert isinstance(feed, ColumnFeed)
        feed.begin({(name, number): START for number in range(QUEUES_MIN)})
        first = taken(feed, lambda rows: len(rows) >= 30)
        former = feed._consumer
        feed.begin({(name, number): Position(5, None) for number in range(QUEUES_MIN, count)})
        assert feed._consumer is not former
        with pytest.raises(RuntimeError, match="Consumer closed"):
            former.poll()
        wanted = QUEUES_MIN * 20 + (count - QUEUES_MIN) * 15
        rest = taken(feed, lambda rows: len(first) + len(rows) == wanted)
        found = Counter(places(first + rest))
        assert set(found.values()) == {1}
        assert {offset for number, offset in found if number >= QUEUES_MIN} == set(range(5, 20))
        wait_for(lambda: feed.take() == (None, []) and len(feed.ended) == count)


@pytest.mark.slow
@needs_native
def test_where_no_wider_consumer_can_be_had_the_former_goes_on(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(name, QUEUES_MIN + 1)
    more = {(name, QUEUES_MIN): START}
    with opened(ColumnFeed, topics, name) as feed:
        feed.begin({(name, number): START for number in range(QUEUES_MIN)})

        def no_thread(*_: Any) -> NativeConsumer:
            raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE))

        def no_answer(*_: Any) -> None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

        with monkeypatch.context() as patch:
            patch.setattr(feeds, "NativeConsumer", no_thread)
            with pytest.raises(RetryableError, match="see the limits of this process"):
                feed.begin(more)
        with monkeypatch.context() as patch:
            patch.setattr(Assignment, "begin", no_answer)
            with pytest.raises(KafkaException):
                feed.begin(more)
        for number in range(QUEUES_MIN + 1):
            topics.send(name, [b"x"] * 3, number)
        assert {row[0] for row in places(taken(feed, lambda rows: len(rows) == QUEUES_MIN * 3))} == set(
            range(QUEUES_MIN)
        )
        feed.begin(more)
        assert places(taken(feed, lambda rows: len(rows) == 3)) == [(QUEUES_MIN, offset) for offset in range(3)]


@needs_native
def test_what_was_read_before_a_queue_failed_is_handed_out(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(name, 2)
    for number in range(2):
        topics.send(name, [b"x"] * 5, number)
    with opened(ColumnFeed, topics, name) as feed:
        feed.begin({(name, 0): START, (name, 1): START})
        fill, fails = native_range_consumer.ChunkBuilder.fill, True

        def failing(self: Any, tp: TopicPartition, *args: Any, **kwargs: Any) -> Any:
            if fails and tp == (name, 1):
                raise KafkaException(KafkaError(KafkaError._STATE))
            return fill(self, tp, *args, **kwargs)

        monkeypatch.setattr(native_range_consumer.ChunkBuilder, "fill", failing)
        rows: list[tuple[Any, ...]] = []
        events: list[Event] = []

        def came() -> bool:
            chunk, more = feed.take()
            rows.extend(rows_of(chunk) if chunk is not None else ())
            events.extend(more)
            return len(rows) == 5

        wait_for(came)
        assert {(each.tp, each.error.code()) for each in events} == {((name, 1), KafkaError._STATE)}
        fails = False
        assert places(taken(feed, lambda rows: len(rows) == 5)) == [(1, offset) for offset in range(5)]


@needs_native
def test_a_partition_with_a_backlog_does_not_keep_others_waiting(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "CHUNK_RECORDS", 50)
    topics.create(name, 2)
    topics.send(name, [b"x"] * 1_000, 0)
    topics.send(name, [b"x"] * 10, 1)
    with opened(ColumnFeed, topics, name) as feed:
        feed.begin({(name, 0): START, (name, 1): START})
        rows = taken(feed, lambda rows: {row[0] for row in places(rows)} == {0, 1})
        assert len(rows) < 1_000
        assert len(rows) + len(taken(feed, lambda more: len(rows) + len(more) == 1_010)) == 1_010


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({}, ColumnFeed, marks=needs_native),
        pytest.param({"reader": "native"}, ColumnFeed, marks=needs_native),
        ({"reader": "python"}, MessageFeed),
        ({"stats_cb": lambda _: None}, MessageFeed),
    ],
)
def test_the_reader_of_a_task_is_chosen_as_that_of_transactional_spouts(
    topics: Topics, name: str, options: dict[str, Any], kind: type[Feed]
) -> None:
    tail = tail_of(topics.bootstrap_servers, name, settings=options)
    try:
        assert type(tail._feed) is kind
    finally:
        tail.close()


@pytest.mark.each_value_once
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("at", [0, 5])
def test_an_offset_that_nobody_asked_for_is_no_loss(topics: Topics, name: str, reader: str, at: int) -> None:
    """What librdkafka says of a damaged batch may begin with such an offset, before the damage."""
    topics.create(name)
    topics.send(name, [b"%d" % number for number in range(5)])
    tail = tail_of(topics.bootstrap_servers, name, settings={"reader": reader})
    try:
        seen: list[int] = []

        def has_read(count: int) -> bool:
            with suppress(RetryableError):  # a broker that has just started has no coordinator yet
                tail.look_up()
            if (chunk := tail.poll()) is not None:
                seen.extend(row[2] for row in rows_of(chunk))
            return len(seen) >= count and tail.complete

        wait_for(lambda: has_read(at))
        wrong = Event((name, 0), KafkaError(KafkaError._AUTO_OFFSET_RESET), 1_442_559_255_642_389)
        tail._process([wrong])
        topics.send(name, [b"later"])
        wait_for(lambda: has_read(6))
        assert seen == [*range(6)]
    finally:
        tail.close()


def test_a_spout_that_must_read_natively_and_cannot_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spouts.kafka.consumer.consumer_pool.why_not_native", lambda: "the compiled part was not built")
    spout = KafkaSpout(["a"], bootstrap_servers="h:1", settings={"reader": "native"})
    with pytest.raises(ConfigError, match="kafka.reader is 'native', but the compiled part was not built"):
        spout.check_before_start({})


def test_a_compiled_part_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (SimpleNamespace(Consumer=None), SimpleNamespace(Consumer=None, INTERFACE=1)):
        monkeypatch.setattr(native_range_consumer, "native", lambda other=other: other)
        assert why_not_native.__wrapped__() == "the compiled part of the spouts is of another version"
