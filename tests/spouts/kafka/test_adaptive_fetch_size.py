"""Slow, throttled and aborted data is no silence; after a silence, less is fetched at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from framework.clients.kafka_settings import KafkaSettings
from framework.clients.kafka_stall_detection import RECORD_BYTES, Received, Traffic
from framework.errors import RetryableError
from spouts.kafka.consumer import range_consumer as limits
from spouts.kafka.consumer.adaptive_fetch_size import (
    BUSY_BYTES_PER_S,
    EXPANDED_BYTES,
    FETCHED_BYTES,
    FIRST_FETCH_BYTES,
    LARGE_BYTES,
    FetchPace,
)
from spouts.kafka.consumer.lookahead_reader import LookaheadReader
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.quotas import limit_client
from tests.kit.readers import needs_native
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

READERS = [pytest.param(NativeSession, marks=needs_native), KafkaSession]


class Cancelled(Exception):
    pass


def stop() -> None:
    raise Cancelled


@pytest.fixture(params=READERS)
def opened(request: pytest.FixtureRequest, topics: Topics) -> Iterator[Any]:
    """Makes sessions of one reader."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        named = {key.replace("_", "."): value for key, value in settings.items()}
        made.append(request.param(KafkaSettings(topics.bootstrap_servers, named), "g"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def values(session: Any, tp: tuple[str, int], wanted: Range, **options: Any) -> list[bytes]:
    found: list[bytes] = []
    for chunk in session.read({tp: wanted}, EVERYTHING, **options):
        raw = chunk.raw("value")
        found += raw if isinstance(raw, list) else raw.to_pylist()
    return found


CONF = {
    "max.partition.fetch.bytes": 256 << 10,
    "fetch.max.bytes": 1 << 20,
    "queued.max.messages.kbytes": 32 << 10,
}
FETCH = "max.partition.fetch.bytes"


def lasting(pace: FetchPace, size: int, expansion: float) -> None:
    """Report that so many bytes came twice during a read."""
    for count in (1, 2):
        pace.has_seen(piece=0, ahead=0, received=Received(count * size, int(count * size * expansion)))


def grown(clock: Callable[[], float] = time.monotonic) -> FetchPace:
    """A pace after a read that lasted, of a topic as most are."""
    pace = FetchPace(clock)
    pace.settings(CONF)
    lasting(pace, 1 << 20, 10)
    assert pace.is_stale and pace.settings(CONF) == CONF
    return pace


def test_a_pace_begins_with_small_fetches_until_a_read_lasts() -> None:
    now = [0.0]
    pace = FetchPace(lambda: now[0])
    first = pace.settings(CONF, queues=8)
    assert first[FETCH] == first["fetch.max.bytes"] == first["message.max.bytes"] == FIRST_FETCH_BYTES
    assert first["queued.max.messages.kbytes"] * 8 << 10 == FETCHED_BYTES
    for count in range(1, 5):  # reads that end soon, as of what has just arrived
        now[0] += 2
        pace.has_seen(piece=0, ahead=0, received=Received(count << 20, count << 21))
        pace.went_well()
    assert not pace.is_stale
    now[0] += 2
    for _ in range(2):  # the same report again
        pace.has_seen(piece=0, ahead=0, received=Received(5 << 20, 5 << 21))
    assert not pace.is_stale
    now[0] += 2
    pace.has_seen(piece=0, ahead=0, received=Received(6 << 20, 6 << 21))
    assert pace.is_stale and pace.settings(CONF, queues=8) == CONF


def test_fetches_grow_for_a_topic_that_brings_much() -> None:
    now = [0.0]
    pace = FetchPace(lambda: now[0])
    pace.settings(CONF)
    for count in range(1, 5):
        now[0] += 1
        pace.has_seen(piece=0, ahead=0, received=Received(count * BUSY_BYTES_PER_S, 2 * count * BUSY_BYTES_PER_S))
        pace.went_well()
    assert not pace.is_stale
    now[0] += 1
    pace.has_seen(piece=0, ahead=0, received=Received(6 * BUSY_BYTES_PER_S, 12 * BUSY_BYTES_PER_S))
    assert pace.is_stale and pace.settings(CONF) == CONF


@pytest.mark.parametrize("expansion", [250, 1_000, 30_000])
def test_fetches_grow_only_as_far_as_they_become_no_larger_than_they_may(expansion: int) -> None:
    pace = FetchPace(lambda: 0.0)
    pace.settings(CONF, queues=8)
    for _ in range(5):
        lasting(pace, FIRST_FETCH_BYTES, expansion)
        size = pace.settings(CONF, queues=8)[FETCH]
        assert size == 1 or size * expansion <= 4 * FETCHED_BYTES / 8
    assert size == 1 or size * expansion >= FETCHED_BYTES / 8 / 4


def test_a_pace_that_was_grown_is_small_after_a_report_of_much_larger_records() -> None:
    pace = grown(lambda: 0.0)
    pace.has_seen(piece=0, ahead=0, received=Received(1 << 20, 100 << 20))
    assert not pace.is_stale
    pace.has_seen(piece=0, ahead=0, received=Received((1 << 20) + (64 << 10), 500 << 20))
    assert pace.is_stale
    assert FIRST_FETCH_BYTES / 4 < pace.settings(CONF)[FETCH] < FIRST_FETCH_BYTES


def test_fetches_are_small_again_when_no_read_has_lasted_for_a_while() -> None:
    now = [0.0]
    pace = grown(lambda: now[0])
    now[0] = 50
    pace.went_well()
    assert not pace.is_stale
    lasting(pace, 1 << 20, 10)
    now[0] = 100
    pace.went_well()
    assert not pace.is_stale
    now[0] = 111
    pace.went_well()
    assert pace.is_stale and pace.settings(CONF)[FETCH] == FIRST_FETCH_BYTES


@pytest.mark.parametrize("given", [{"statistics.interval.ms": 0}, {"stats_cb": print}])
def test_without_reports_fetches_are_as_the_settings_say(given: dict[str, Any]) -> None:
    now = [0.0]
    pace = FetchPace(lambda: now[0])
    conf = {**CONF, **given}
    assert pace.settings(conf) == conf
    now[0] = 100
    pace.went_well()
    assert not pace.is_stale
    pace.was_silent()
    assert pace.settings(conf)[FETCH] == 16 << 10
    now[0] = 200
    pace.went_well()
    assert pace.is_stale and pace.settings(conf) == conf


def test_a_pace_is_slower_after_each_silence_and_may_grow_again_after_a_while() -> None:
    now = [0.0]
    pace = grown(lambda: now[0])
    assert pace.patience == 1
    sizes = []
    for _ in range(6):
        pace.was_silent()
        assert pace.is_stale
        sizes.append(pace.settings({**CONF, "fetch.message.max.bytes": 2 << 20})[FETCH])
        assert not pace.is_stale
        lasting(pace, 1 << 20, 10)
        assert not pace.is_stale
    assert sizes == [16_384, 1_024, 1, 1, 1, 1]
    assert pace.patience == 6
    now[0] = 50
    pace.went_well()
    assert not pace.is_stale
    now[0] = 70
    pace.went_well()
    assert pace.is_stale and pace.settings(CONF)[FETCH] == FIRST_FETCH_BYTES and pace.patience == 1
    lasting(pace, 1 << 20, 10)
    assert pace.settings(CONF) == CONF


def test_a_throttled_read_makes_fetches_smaller_once_and_not_more_patient() -> None:
    now = [0.0]
    pace = grown(lambda: now[0])
    for _ in range(3):
        pace.was_throttled()
        assert pace.is_stale
        assert pace.settings(CONF)[FETCH] == 16 << 10 and pace.patience == 1


@pytest.mark.integration
def test_a_read_that_ends_while_a_quota_throttles_it_is_followed_by_smaller_fetches(
    topics: Topics, name: str, opened: Any
) -> None:
    topics.send(topics.create(name), [b"x" * 100_000] * 20)
    limit_client(topics.bootstrap_servers, name, "consumer_byte_rate", 50_000)
    session = opened(client_id=name)

    def stop_when_throttled() -> None:
        if session._traffic.was_throttled_since(0.0):
            raise Cancelled

    with pytest.raises(Cancelled):
        values(session, (name, 0), Range(0, 20), check_alive=stop_when_throttled)
    assert session._pace.is_stale
    assert session._pace.settings(CONF)[FETCH] <= CONF[FETCH] // 16


def test_offsets_that_are_handed_to_nobody_are_progress() -> None:
    traffic = Traffic()

    def report(offset: int, throttle_ms: int = 0) -> None:
        partitions = {"orders": {"partitions": {"0": {"next_offset": offset}}}}
        traffic.report(json.dumps({"brokers": {"b": {"throttle": {"max": throttle_ms}}}, "topics": partitions}))

    assert not traffic.has_fetched("orders", 0)
    report(5)
    assert not traffic.has_fetched("orders", 0)  # where it stands
    report(9)
    assert traffic.has_fetched("orders", 0)
    assert not traffic.has_fetched("orders", 0)
    report(9)
    assert not traffic.has_fetched("orders", 0)
    report(3)
    assert not traffic.has_fetched("orders", 0)  # it was placed again
    report(6)
    assert traffic.has_fetched("orders", 0)
    report(6, throttle_ms=60_000)
    assert traffic.has_fetched("orders", 0) and traffic.has_fetched("orders", 0)


def test_one_report_tells_of_every_partition() -> None:
    traffic = Traffic()
    for offset in (5, 9):
        partitions = {"orders": {"partitions": {str(each): {"next_offset": offset} for each in range(3)}}}
        traffic.report(json.dumps({"brokers": {}, "topics": partitions}))
        found = [traffic.has_fetched("orders", each) for each in range(3)]
    assert found == [True] * 3


@pytest.mark.slow
@pytest.mark.integration
def test_aborted_data_that_takes_longer_than_a_silence(
    topics: Topics, name: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 MB that nobody gets, at 1 MB a second, and then one record."""
    topics.create(name, max_message_bytes="2000000")
    aborted = [b"%d" % each + b"x" * 900_000 for each in range(14)]
    for value in aborted:
        topics.send_in_kafka_txn(name, [value], end=lambda producer: producer.abort_transaction(60))
    topics.send(name, [b"the only one"])
    limit_client(topics.bootstrap_servers, name, "consumer_byte_rate", 1_000_000)
    monkeypatch.setattr(limits, "SILENCE_MAX_S", 3.0)
    session = opened(client_id=name, max_partition_fetch_bytes=2_000_000)
    assert values(session, (name, 0), Range(0, 29)) == [b"the only one"]


@pytest.mark.integration
def test_a_silence_is_followed_by_smaller_fetches(
    topics: Topics, name: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(name)
    session = opened()
    with monkeypatch.context() as patch, pytest.raises(RetryableError, match=f"{name}/0 delivered nothing"):
        patch.setattr(limits, "SILENCE_MAX_S", 0.2)
        values(session, (name, 0), Range(0, 2))
    before = session._consumer
    topics.send(name, [b"a", b"b"])
    assert values(session, (name, 0), Range(0, 2)) == [b"a", b"b"]
    assert session._consumer is not before
    assert session._pace.patience == 2


@pytest.mark.integration
def test_a_read_that_is_cancelled_before_a_record_came_keeps_its_place(topics: Topics, name: str, opened: Any) -> None:
    topics.create(name, 2)
    session = opened()
    topics.send(name, [b"a"], 1)
    with pytest.raises(Cancelled):
        values(session, (name, 0), Range(0, 1), check_alive=stop)
    placed = session._assigned[(name, 0)]
    topics.send(name, [b"b"])
    assert values(session, (name, 0), Range(0, 1), check_alive=lambda: None) == [b"b"]
    assert session._assigned[(name, 0)] is placed


@pytest.mark.integration
def test_a_read_that_is_cancelled_after_a_record_came_begins_again(topics: Topics, name: str, opened: Any) -> None:
    topics.create(name)
    topics.send(name, [b"a"])
    session = opened()
    assert values(session, (name, 0), Range(0, 1)) == [b"a"]
    with pytest.raises(Cancelled):
        values(session, (name, 0), Range(0, 2), check_alive=stop)
    topics.send(name, [b"b"])
    assert values(session, (name, 0), Range(0, 2)) == [b"a", b"b"]


def test_a_pace_is_narrow_after_a_large_record() -> None:
    now = [0.0]
    pace = grown(lambda: now[0])
    pace.has_seen(piece=LARGE_BYTES, ahead=(32 << 20) + EXPANDED_BYTES)
    assert not pace.is_stale and not pace.is_narrow
    pace.has_seen(piece=LARGE_BYTES + 1, ahead=0)
    assert pace.is_stale and pace.is_narrow and pace.patience == 6
    narrow = pace.settings(CONF, queues=2)
    assert narrow[FETCH] == narrow["queued.max.messages.kbytes"] == 1
    now[0] = 1.5
    pace.has_seen(piece=LARGE_BYTES + 1, ahead=0)
    assert not pace.is_stale  # it is narrow already
    now[0] = 3
    pace.went_well()
    assert not pace.is_stale
    now[0] = 4  # one large record does not make the other partitions slow for long
    pace.went_well()
    assert pace.is_stale and pace.settings(CONF, queues=2)[FETCH] == FIRST_FETCH_BYTES


def test_a_pace_stays_narrow_after_a_large_record_where_a_silence_or_the_lack_of_reports_asks_for_it() -> None:
    now = [0.0]
    silent, unreported = grown(lambda: now[0]), FetchPace(lambda: now[0])
    silent.was_silent()
    silent.settings(CONF)
    unreported.settings({**CONF, "statistics.interval.ms": 0})
    for pace in (silent, unreported):
        pace.has_seen(piece=LARGE_BYTES + 1, ahead=0)
        assert pace.is_narrow
    silent.settings(CONF)
    unreported.settings({**CONF, "statistics.interval.ms": 0})
    for now[0], is_stale in ((50.0, False), (61.0, True)):
        for pace in (silent, unreported):
            pace.went_well()
            assert pace.is_stale is is_stale


def test_a_pace_is_small_after_a_fetch_that_fills_the_queues_with_more_than_they_may_hold() -> None:
    pace = grown(lambda: 0.0)
    for _ in range(2):  # the consumer that is replaced says so again
        pace.has_seen(piece=0, ahead=(32 << 20) + EXPANDED_BYTES + 1)
        assert pace.is_stale and not pace.is_narrow
    assert FIRST_FETCH_BYTES < pace.settings(CONF)[FETCH] < (256 << 10) // 16


@pytest.mark.integration
def test_a_batch_that_becomes_larger_than_what_librdkafka_takes_by_default_is_read(
    topics: Topics, name: str, opened: Any
) -> None:
    """One batch of zstd of 4 kB on the broker. A producer could stop a topology by it."""
    size, count = 1_000_000, 110
    topics.create(name)
    producer = topics.producer(
        compression_type="zstd", linger_ms=1_000, batch_size=2 * size * count, message_max_bytes=2 * size * count
    )
    for _ in range(count):
        producer.produce(name, b"x" * size, partition=0)
    producer.arrived(PATIENCE_S)
    assert set(map(len, values(opened(), (name, 0), Range(0, count)))) == {size}


def test_what_waits_in_the_queues_is_reported_with_what_each_record_takes() -> None:
    traffic = Traffic()
    assert traffic.ahead_bytes(shared=False) == 0
    traffic.report('{"fetchq_cnt":3, "fetchq_size":100, "x":1}, {"fetchq_cnt":0, "fetchq_size":50}')
    assert traffic.ahead_bytes(shared=False) == 3 * RECORD_BYTES + 150
    assert traffic.ahead_bytes(shared=True) == 3 * RECORD_BYTES + 100


def test_a_report_tells_what_was_received_before_and_after_decompression() -> None:
    traffic = Traffic()
    broker = '"brokers":{"a":{"rxbytes":7}}, "topics":{"t":{"partitions":{"0":{"rxbytes":8}}}}'
    traffic.report("{" + broker + ', "tx_bytes":1, "rx":2, "rx_bytes":300, "txmsg_bytes":4, "rxmsg_bytes":5000}')
    assert traffic.received == Received(300, 5_000)


@pytest.mark.integration
def test_a_consumer_that_was_just_opened_holds_little_of_records_that_become_large(
    topics: Topics, name: str, opened: Any
) -> None:
    """400 records of about 100 bytes on the broker, and 500 kB in memory: a fetch, and what may be
    in the queues."""
    size = 500_000
    topics.create(name)
    producer = topics.producer(compression_type="zstd", batch_num_messages=1)
    for _ in range(400):
        producer.produce(name, b"x" * size, partition=0)
    producer.arrived(PATIENCE_S)
    session = opened()
    assert len(values(session, (name, 0), Range(0, 1))) == 1
    deadline = time.monotonic() + PATIENCE_S
    while not session._traffic.received.record_bytes and time.monotonic() < deadline:
        time.sleep(0.1)
        session._consumer.poll(0) if isinstance(session, KafkaSession) else session._consumer.poll()
    assert 0 < session._traffic.received.record_bytes < FETCHED_BYTES + 120 * size


@pytest.mark.integration
def test_a_reader_of_unplanned_records_holds_little_of_records_that_become_large(topics: Topics, name: str) -> None:
    """It reads on the driver, for ``keep_transactions``. Once it took 800 large records at once."""
    size, count = 500_000, 400
    partition = f"{topics.create(name)}/0"
    producer = topics.producer(compression_type="zstd", batch_num_messages=1)
    for _ in range(count):
        producer.produce(name, b"x" * size, partition=0)
    producer.arrived(PATIENCE_S)
    found: list[int] = []
    with closing(LookaheadReader(KafkaSettings(topics.bootstrap_servers, {}), "g")) as reader:
        reader.begin(partition, 0)
        while len(found) < count:
            records = [each for each in reader.read() if not each.is_end]
            assert sum(len(each.value or b"") for each in records) < FETCHED_BYTES + 120 * size
            found += [each.offset for each in records]
        reader.end(partition)
    assert found == [*range(count)]


@pytest.mark.integration
def test_what_waits_is_in_the_reports_of_a_client(opened: Any, topics: Topics, name: str) -> None:
    topics.send(topics.create(name), [b"x" * 1_000] * 1_000)
    session = opened()
    assert len(values(session, (name, 0), Range(0, 1))) == 1
    deadline = time.monotonic() + PATIENCE_S
    while not session._traffic.ahead_bytes(shared=False) and time.monotonic() < deadline:
        time.sleep(0.1)
        session._consumer.poll(0) if isinstance(session, KafkaSession) else session._consumer.poll()
    assert session._traffic.ahead_bytes(shared=False) > 900_000
