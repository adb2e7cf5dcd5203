"""Slow, throttled and aborted data is no silence; after a silence, less is fetched at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from framework.clients.kafka_settings import KafkaSettings
from framework.clients.kafka_stall_detection import RECORD_BYTES, Traffic
from framework.errors import RetryableError
from spouts.kafka.consumer import range_consumer as limits
from spouts.kafka.consumer.adaptive_fetch_size import EXPANDED_BYTES, LARGE_BYTES, FetchPace
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession, Range
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


def test_a_pace_is_slower_after_each_silence_and_quick_again_after_a_while() -> None:
    now = [0.0]
    pace = FetchPace(lambda: now[0])
    conf = {"max.partition.fetch.bytes": 2 << 20}
    assert pace.settings(conf) == conf and pace.patience == 1
    sizes = []
    for _ in range(6):
        pace.was_silent()
        assert pace.is_stale
        sizes.append(pace.settings({**conf, "fetch.message.max.bytes": 4 << 20})["max.partition.fetch.bytes"])
        assert not pace.is_stale
    assert sizes == [262_144, 16_384, 1_024, 1, 1, 1]
    assert pace.patience == 6
    now[0] = 50
    pace.went_well()
    assert not pace.is_stale
    now[0] = 70
    pace.went_well()
    assert pace.is_stale and pace.settings(conf) == conf and pace.patience == 1


def test_a_throttled_read_makes_fetches_smaller_once_and_not_more_patient() -> None:
    now = [0.0]
    pace = FetchPace(lambda: now[0])
    conf = {"max.partition.fetch.bytes": 2 << 20}
    for _ in range(3):
        pace.was_throttled()
        assert pace.is_stale
        assert pace.settings(conf) == {"max.partition.fetch.bytes": 131_072} and pace.patience == 1
    now[0] = 70
    pace.went_well()
    assert pace.is_stale and pace.settings(conf) == conf


@pytest.mark.integration
def test_a_read_that_ends_while_a_quota_throttles_it_is_followed_by_smaller_fetches(
    topics: Topics, name: str, opened: Any
) -> None:
    topics.send(topics.create(name), [b"x" * 100_000] * 20)
    limit_client(topics.bootstrap_servers, name, "consumer_byte_rate", 50_000)
    session = opened(client_id=name)
    usual = session._pace.settings({"max.partition.fetch.bytes": 1 << 20})

    def stop_when_throttled() -> None:
        if session._traffic.was_throttled_since(0.0):
            raise Cancelled

    with pytest.raises(Cancelled):
        values(session, (name, 0), Range(0, 20), check_alive=stop_when_throttled)
    assert session._pace.is_stale
    small = session._pace.settings(usual)
    assert small["max.partition.fetch.bytes"] * 16 == usual["max.partition.fetch.bytes"]


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
    monkeypatch.setattr(limits, "SILENCE_MAX_S", 0.2)
    session = opened()
    with pytest.raises(RetryableError, match=f"{name}/0 delivered nothing"):
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


@pytest.mark.parametrize(("piece", "ahead"), [(LARGE_BYTES + 1, 0), (0, (64 << 20) + EXPANDED_BYTES + 1)])
def test_a_pace_is_narrow_after_a_batch_that_became_large(piece: int, ahead: int) -> None:
    now = [0.0]
    pace = FetchPace(lambda: now[0])
    conf = {"max.partition.fetch.bytes": 2 << 20, "queued.max.messages.kbytes": 32 << 10}
    assert pace.settings(conf, queues=2) == conf
    pace.has_seen(piece=LARGE_BYTES, ahead=(64 << 20) + EXPANDED_BYTES)
    assert not pace.is_stale and not pace.is_narrow
    pace.has_seen(piece=piece, ahead=ahead)
    assert pace.is_stale and pace.is_narrow and pace.patience == 6
    assert pace.settings(conf, queues=2) == {"max.partition.fetch.bytes": 1, "queued.max.messages.kbytes": 1}
    now[0] = 50
    pace.has_seen(piece=LARGE_BYTES + 1, ahead=0)
    assert not pace.is_stale  # it is narrow already
    now[0] = 100
    pace.went_well()
    assert not pace.is_stale
    now[0] = 111
    pace.went_well()
    assert pace.is_stale and not pace.is_narrow


def test_what_waits_in_the_queues_is_reported_with_what_each_record_takes() -> None:
    traffic = Traffic()
    assert traffic.ahead_bytes(shared=False) == 0
    traffic.report('{"fetchq_cnt":3, "fetchq_size":100, "x":1}, {"fetchq_cnt":0, "fetchq_size":50}')
    assert traffic.ahead_bytes(shared=False) == 3 * RECORD_BYTES + 150
    assert traffic.ahead_bytes(shared=True) == 3 * RECORD_BYTES + 100


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
