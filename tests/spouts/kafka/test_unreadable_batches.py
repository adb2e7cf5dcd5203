"""Batches that Kafka's own library can decompress and librdkafka cannot: their producer made them
so, so ``on_bad_record`` decides about them (ADR 136)."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from framework import BaseBasicBolt, TopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import DataLossError, RatchetError, RetryableError
from framework.inspect.verify import verify
from framework.topology import DEAD_LETTER_STREAM
from sinks import DeadLetterTable, MemoryBackend, OpaqueMapState
from spouts import KafkaSpout, TextCodec
from spouts.kafka.consumer import damaged_batches, native_range_consumer, range_consumer
from spouts.kafka.consumer.core_spout_consumer import KafkaTail
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.raw_batches import odd_streams, produce
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration
#: Of four records each.
ODD = [odd_streams()[name] for name in ("snappy-two", "lz4-trailed")]
GOOD = [b"one", b"two", b"three"]
#: The offsets of the three batches that a topic of ``filled`` has.
PLACES = [(1, 5), (5, 9), (10, 14)]


def filled(topics: Topics, name: str) -> Topics:
    """One record, two unreadable batches, one record, such a batch, one record."""
    topics.create(name)
    for value, batches in zip(GOOD, (ODD, ODD[:1], ()), strict=True):
        topics.send(name, [value])
        for batch in batches:
            assert produce(topics.bootstrap_servers, name, batch) == 0
    return topics


@pytest.mark.parametrize("opaque", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("most", [500_000, 3])
def test_on_bad_record_decides_about_them(
    topics: Topics, name: str, reader: str, opaque: bool, most: int, tmp_path: Path
) -> None:
    """With three offsets per transaction, ranges begin and end inside of these batches."""
    state = OpaqueMapState(MemoryBackend(f"{name}-bad"))
    options: dict[str, Any] = {
        "settings": {"reader": reader},
        "batch_records_max": most,
        "on_bad_record": "dead_letter",
        "dead_letters": DeadLetterTable(state),
        "bad_record_share_max": None,
    }
    runs = KafkaRuns(filled(topics, name), tmp_path, name, opaque=opaque, **options)
    run = runs.catch_up()
    assert runs.counts() == {value.decode(): 1 for value in GOOD}
    found = sorted((key[2], row.value) for key, row in state.backend.scan())
    assert run.status().lost_records == 0 and run.status().bad_records == len(found)
    told = [re.search(r"offsets (\d+) to (\d+) cannot be decompressed", str(letter)) for _, letter in found]
    places = [(int(each[1]), int(each[2]) + 1) for each in told if each]
    assert [offset for offset, _ in found] == [end - 1 for _, end in places]
    assert [at for first, end in places for at in range(first, end)] == [at for its in PLACES for at in range(*its)]
    assert most < 14 or places == PLACES
    assert not any(each for _, letter in found for each in letter if isinstance(each, bytes))
    assert verify(runs.topology(), runs.store, {}).right


@pytest.mark.parametrize("reader", READERS)
def test_they_are_left_out_where_bad_records_are_skipped(
    topics: Topics, name: str, reader: str, tmp_path: Path
) -> None:
    runs = KafkaRuns(
        filled(topics, name), tmp_path, name, opaque=False, settings={"reader": reader}, on_bad_record="skip"
    )
    status = runs.catch_up().status()
    assert runs.counts() == {value.decode(): 1 for value in GOOD} and status.bad_records == len(PLACES)


@pytest.mark.parametrize("reader", READERS)
def test_they_end_a_topology_that_may_leave_out_nothing(topics: Topics, name: str, reader: str, tmp_path: Path) -> None:
    runs = KafkaRuns(filled(topics, name), tmp_path, name, settings={"reader": reader})
    with pytest.raises(
        RatchetError,
        match=rf"{name}/0: the batch that holds offset 1 cannot be decompressed.*on_bad_record='dead_letter'",
    ):
        runs.catch_up()
    status = runs.catch_up(on_data_loss="skip").status()
    assert runs.counts() == {value.decode(): 1 for value in GOOD}
    assert (status.lost_records, status.bad_records) == (12, 0)


@pytest.mark.parametrize("reader", READERS)
def test_a_read_ends_before_one_that_follows_its_range(topics: Topics, name: str, reader: str) -> None:
    """The marker of a transaction is the last offset of the range, and no record."""
    topics.create(name)
    topics.send_in_kafka_txn(name, GOOD, end=Producer.commit_transaction)
    settings = KafkaSettings(topics.bootstrap_servers, None)
    consumer = Consumer(settings.consumer("ends"))
    wait_for(lambda: consumer.get_watermark_offsets(TopicPartition(name, 0), PATIENCE_S)[1] == 4, what="a marker")
    consumer.close()
    assert produce(topics.bootstrap_servers, name, ODD[0]) == 0
    topics.send(name, [b"four"])
    kind: Any = native_range_consumer.NativeSession if reader == "native" else range_consumer.KafkaSession
    session = kind(settings, "g")
    try:
        for _ in range(2):
            (chunk,) = session.read({(name, 0): Range(0, 4)}, EVERYTHING)
            assert chunk.metadata("offset").to_pylist() == [0, 1, 2]
        (chunk,) = session.read({(name, 0): Range(8, 9)}, EVERYTHING)
        assert chunk.metadata("offset").to_pylist() == [8]
        with pytest.raises(DataLossError, match="offset 4 cannot be decompressed"):
            list(session.read({(name, 0): Range(4, 9)}, EVERYTHING))
        chunks = list(session.read({(name, 0): Range(2, 9)}, EVERYTHING, takes_out=lambda topic: topic == name))
        assert sorted(offset for each in chunks for offset in each.metadata("offset").to_pylist()) == [2, 7, 8]
    finally:
        session.close()


@pytest.mark.parametrize("reader", READERS)
def test_a_core_spout_searches_for_a_few_at_a_time(
    topics: Topics, name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for 100,000 of them, of 100 bytes each, stopped all rounds for minutes."""
    monkeypatch.setattr(damaged_batches, "AT_ONCE_MAX", 3)
    topics.create(name)
    topics.send(name, [b"zero"])
    for _ in range(8):
        assert produce(topics.bootstrap_servers, name, ODD[0]) == 0
    topics.send(name, [b"one"])
    tail = KafkaTail(
        KafkaSettings(topics.bootstrap_servers, {"reader": reader}),
        name,
        topics=(name,),
        pattern=None,
        start="earliest",
        skip_lost=False,
        task=0,
        tasks=1,
        takes_out=lambda topic: topic == name,
    )
    found: list[int] = []
    try:

        def is_complete() -> bool:
            with contextlib.suppress(RetryableError):  # of a broker that has just started
                for hear in (tail.hear, lambda: None):
                    tail.look_up()
                    assert len(tail._unreadable) <= 3
                    hear()
                chunk = tail.poll()
                if chunk is not None:
                    found.extend(chunk.metadata("offset").to_pylist())
            return len(found) >= 10

        wait_for(is_complete, what="ten records")
    finally:
        tail.close()
    assert found == [0, *range(4, 33, 4), 33]


_seen: dict[str, Counter[Any]] = {}


class Seen(BaseBasicBolt):
    """Counts values, and offsets of letters."""

    def __init__(self, name: str) -> None:
        self._name = name

    def execute(self, tup: Any, collector: Any) -> None:
        _seen[self._name][tup["offset"] if "offset" in tup.fields else tup["value"]] += 1

    def declare_output_fields(self, declarer: Any) -> None:
        pass


@pytest.mark.parametrize(
    "policy", ["dead_letter", *(pytest.param(each, marks=pytest.mark.slow) for each in ("skip", "fail"))]
)
@pytest.mark.parametrize("guarantee", ["at_least_once", pytest.param("at_most_once", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", READERS)
def test_a_core_topology(topics: Topics, name: str, reader: str, policy: Any, guarantee: Any) -> None:
    spout = KafkaSpout(
        [name],
        bootstrap_servers=filled(topics, name).bootstrap_servers,
        codec=TextCodec(),
        group=name,
        guarantee=guarantee,
        on_bad_record=policy,
        settings={"reader": reader},
    )
    _seen[name] = Counter()
    builder = TopologyBuilder(name)
    builder.set_spout("spout", spout)
    seen = builder.set_bolt("seen", Seen(name)).global_grouping("spout")
    if policy == "dead_letter":
        seen.global_grouping("spout", DEAD_LETTER_STREAM)
    if policy == "fail":
        with (
            pytest.raises(RatchetError, match=rf"{name}/0: the batch that holds offset 1 cannot be decompressed"),
            submit(builder.build(), {}, None, "local") as run,
        ):
            run.wait_until_idle(PATIENCE_S)
        return
    with submit(builder.build(), {}, None, "local") as run:
        run.wait_until_idle(PATIENCE_S)
    good = dict.fromkeys([value.decode() for value in GOOD], 1)
    letters = {end - 1: 1 for _, end in PLACES} if policy == "dead_letter" else {}
    assert _seen[name] == {**good, **letters}
