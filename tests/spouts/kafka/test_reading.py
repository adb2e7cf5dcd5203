"""The Kafka spouts against a real broker: they read exactly the planned range,
whatever the log holds.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import time
from typing import Any

import pytest
from confluent_kafka import Uuid

from framework import Fields, TopologyContext, TransactionAttempt
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import BadRecordError, ConfigError, DataLossError, RetryableError
from integration.server import free_port
from spouts import BytesCodec, JsonCodec, KafkaTransactionalSpout, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.cluster_metadata import KafkaMetadata
from tests.kit.plans import Plan, offsets
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

CONTEXT = TopologyContext("t", "spout", 0, 1)


def spout(topics: Topics, topic: str, opaque: bool = True, **options: Any) -> Any:
    spout_class = OpaqueKafkaTransactionalSpout if opaque else KafkaTransactionalSpout
    options.setdefault("codec", TextCodec())
    if "pattern" not in options:
        options["topics"] = [topic]
    return spout_class(bootstrap_servers=topics.bootstrap_servers, **options)


def plan(source: Any, previous: Plan | None = None) -> Plan:
    planner = source.planner({}, CONTEXT)
    made = planner.plan(previous or {})
    planner.close()
    assert made is not None
    result: Plan = made
    return result


def read(source: Any, ranges: Plan) -> list[Any]:
    # a broker may stand still for longer than a third of the usual time
    reader = source.reader({"topology.message.timeout.secs": 3 * PATIENCE_S}, CONTEXT)
    batches = list(reader.read_all(TransactionAttempt(1, 1), ranges))
    reader.close()
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def values(source: Any, ranges: Plan) -> list[str]:
    return [row[0] for row in read(source, ranges)]


# --- settings: bad input gets one clear line ------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"enable.auto.commit": True}}, "'enable.auto.commit' cannot be True: positions are kept"),
        ({"settings": {"auto.offset.reset": "latest"}}, "'auto.offset.reset' cannot be 'latest'"),
        ({"settings": {"isolation.level": "read_uncommitted"}}, "'isolation.level' cannot be 'read_uncommitted'"),
        ({"settings": {"group.id": "mine"}}, "'group.id' cannot be 'mine'"),
        ({"bootstrap_servers": " "}, "bootstrap_servers is missing"),
        ({"bootstrap_servers": ["a:9092", "b:9092"]}, "bootstrap_servers is a list: give one text"),
        ({"topics": []}, "needs topics=.* or pattern="),
        ({"pattern": "x"}, "needs topics=.* or pattern=.*one of them"),
        ({"topics": ["a/b"]}, "'a/b' is not a Kafka topic name"),
        ({"topics": [], "pattern": "("}, "is not a regular expression"),
        ({"start": "yesterday"}, "start must be"),
        ({"start": -1}, "start must be"),
        ({"start": datetime.datetime(2024, 1, 1)}, "datetime with a zone"),
        ({"batch_bytes_max": 0}, "batch_bytes_max must be 1 or more"),
        ({"batch_time_max_s": 0}, "batch_time_max_s must be above 0"),
        ({"on_data_loss": "ignore"}, "on_data_loss must be 'fail' or 'skip'"),
        ({"on_bad_record": "ignore"}, "on_bad_record must be one of 'fail', 'skip', 'dead_letter'"),
        ({"bad_record_share_max": 2}, "bad_record_share_max must be between 0 and 1"),
        ({"consumer_group": ""}, "consumer_group must be a name"),
        ({"key_codec": "text"}, "key_codec must be a Codec"),
        ({"header_codecs": {"h": None}}, "header_codecs\\['h'\\] must be a Codec"),
        ({"metadata": ["topic", "topic"]}, "metadata field 'topic' is named twice"),
        ({"key_codec": TextCodec("value")}, "'value' is both a field of the key"),
        ({"settings": {"acks": "1"}}, "'acks' cannot be '1'"),
        ({"settings": {"enable.idempotence": "false"}}, "'enable.idempotence' cannot be 'false'"),
        ({"settings": {"bootstrap.servers": "x:1"}}, "give it as bootstrap_servers="),
        ({"start": True}, "start must be"),
        ({"batch_records_max": 0}, "batch_records_max must be 1 or more"),
        ({"partition_records_max": "many"}, "partition_records_max must be 1 or more"),
        ({"metadata": ["offset", "shoe size"]}, "metadata field 'shoe size' is not known"),
        ({"codec": BytesCodec("key"), "metadata": ["key"]}, "'key' is both"),
    ],
)
def test_bad_kafka_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KafkaTransactionalSpout(**{"topics": ["words"], "bootstrap_servers": "127.0.0.1:1", **options})


@pytest.mark.slow
def test_a_broker_that_is_away_is_waited_for_and_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    source = KafkaTransactionalSpout(["words"], bootstrap_servers=address)
    with pytest.raises(RetryableError, match=f"nothing answers at {address}"):
        source.planner({}, CONTEXT).plan({})


# --- planning -------------------------------------------------------------------------------------


@pytest.mark.integration
class TestPlanning:
    def test_a_missing_topic_is_named(self, topics: Topics, name: str) -> None:
        with pytest.raises(RetryableError, match=f"topic '{name}' does not exist"):
            plan(spout(topics, name))

    def test_batches_tile_the_offsets(self, topics: Topics, name: str) -> None:
        topics.create(name, 2)
        topics.send(name, [b"x"] * 25, 0)
        topics.send(name, [b"x"] * 3, 1)
        source = spout(topics, name, batch_records_max=10)
        planner = source.planner({}, CONTEXT)
        previous: Plan = {}
        ranges: dict[str, list[tuple[int, int]]] = {}
        while (made := planner.plan(previous)) is not None:
            assert planner.record_count(made) <= 10
            for partition, meta in made.items():
                ranges.setdefault(partition, []).append((meta["first_offset"], meta["next_offset"]))
            previous = made
        for partition, end in ((f"{name}/0", 25), (f"{name}/1", 3)):
            assert ranges[partition][0][0] == 0
            assert ranges[partition][-1][1] == end
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges[partition]))
        assert planner.lag(previous) == 0

    def test_start_latest_and_timestamp_count_for_the_first_batch_only(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        topics.send(name, [b"old"] * 5)
        first = plan(spout(topics, name, start="latest"))
        assert offsets(first) == {f"{name}/0": (5, 5)}
        topics.send(name, [b"new"])
        assert offsets(plan(spout(topics, name, start="latest"), first)) == {f"{name}/0": (5, 6)}
        assert plan(spout(topics, name, start=0))[f"{name}/0"]["first_offset"] == 0
        assert plan(spout(topics, name, start=4_000_000_000_000))[f"{name}/0"]["first_offset"] == 6

    def test_new_partitions_start_at_their_beginning(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        topics.send(name, [b"a"] * 3)
        first = plan(spout(topics, name, start="latest"))
        topics.add_partitions(name, 2)
        topics.send(name, [b"b"] * 4, 1)
        second = plan(spout(topics, name, start="latest"), first)
        assert offsets(second)[f"{name}/1"] == (0, 4)

    def test_a_pattern_finds_topics_and_leaves_others(self, topics: Topics, name: str) -> None:
        for topic in (f"{name}-a", f"{name}-b", f"x{name}-c"):
            topics.create(topic)
            topics.send(topic, [b"x"])
        assert set(plan(spout(topics, name, pattern=f"{name}-.*"))) == {f"{name}-a/0", f"{name}-b/0"}

    @pytest.mark.rule("C15")
    def test_every_partition_ever_planned_is_in_every_plan(self, topics: Topics, name: str) -> None:
        """Also a partition that is missing from the metadata."""
        topics.create(name, 1)
        topics.send(name, [b"x"])
        before = {f"{name}-gone/0": {"first_offset": 3, "next_offset": 7}}
        assert plan(spout(topics, name), before)[f"{name}-gone/0"] == {"first_offset": 7, "next_offset": 7}

    def test_a_log_that_ends_before_what_was_read_is_data_loss(
        self, topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topics.create(name, 1)
        topics.send(name, [b"x"])
        planner = spout(topics, name).planner({}, CONTEXT)
        assert planner.plan({f"{name}/0": {"first_offset": 0, "next_offset": 9}}) is None  # the log may come back
        monkeypatch.setattr("spouts.kafka.planning.lost_records.BELIEVED_AFTER_S", 0.0)
        with pytest.raises(DataLossError, match=rf"{name}/0 ends at offset 1, and offsets up to 9"):
            plan(spout(topics, name), {f"{name}/0": {"first_offset": 0, "next_offset": 9}})

    def test_an_open_kafka_txn_bounds_the_plan(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        topics.send(name, [b"a", b"b"])
        producer = topics.send_in_kafka_txn(name, [b"open"], end=None)
        topics.send(name, [b"c"])
        bounded = plan(spout(topics, name))
        assert bounded[f"{name}/0"]["next_offset"] == 2
        producer.commit_transaction(PATIENCE_S)
        planner = spout(topics, name).planner({}, CONTEXT)
        end = time.monotonic() + PATIENCE_S
        while (
            later := planner.plan(bounded)
        ) is None:  # the broker answers before the transaction's markers are written
            assert time.monotonic() < end
        planner.close()
        assert later[f"{name}/0"]["next_offset"] == 5

    def test_an_invalid_offset_from_the_broker_is_asked_for_again(
        self, topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """librdkafka answers -1001, without an error, when the broker dies during the request."""
        from concurrent.futures import Future
        from types import SimpleNamespace

        topics.create(name, 1)
        topics.send(name, [b"x"])
        planner = spout(topics, name).planner({}, CONTEXT)
        client = planner._metadata._admin()

        class Broken:
            def offsets_at(self, wanted: Any, level: Any) -> Any:
                answer: Future[Any] = Future()
                answer.set_result(dict.fromkeys(wanted, SimpleNamespace(offset=-1001, leader_epoch=None)))
                return answer

            def __getattr__(self, attribute: str) -> Any:
                return getattr(client, attribute)

        planner._metadata._client = Broken()
        with pytest.raises(RetryableError, match="cut off"):
            planner.plan({f"{name}/0": {"first_offset": 0, "next_offset": 1}})
        planner._metadata._client = client
        assert planner.plan({}) is not None

    def test_a_pattern_never_finds_kafkas_own_topics(self, topics: Topics, name: str) -> None:
        from confluent_kafka import Consumer, TopicPartition

        topics.send(topics.create(name), [b"x"])
        consumer = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": name})
        consumer.commit(offsets=[TopicPartition(name, 0, 1)], asynchronous=False)  # creates __consumer_offsets
        consumer.close()
        found = spout(topics, name, pattern=".*").planner({}, CONTEXT).partitions()
        assert f"{name}/0" in found
        assert not [partition for partition in found if partition.startswith("__")]

    def test_identity_names_cluster_and_topic_ids(self, topics: Topics, name: str) -> None:
        topics.create(name)
        identity = spout(topics, name).planner({}, CONTEXT).source_identity()
        assert identity["cluster"]
        assert list(identity["topics"]) == [name]


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.usefixtures("reader")
class TestReading:
    @pytest.mark.each_value_once
    @pytest.mark.parametrize("count", [100, 30_000])
    def test_a_range_is_read_in_order_and_a_replay_reads_the_same(self, topics: Topics, name: str, count: int) -> None:
        topics.create(name, 2)
        topics.send(name, [b"%d" % number for number in range(count)], 0)
        topics.send(name, [b"other"] * 10, 1)
        source = spout(topics, name)
        middle = {
            f"{name}/0": {"first_offset": 7, "next_offset": count - 9},
            f"{name}/1": {"first_offset": 2, "next_offset": 4},
        }
        expected = sorted([*map(str, range(7, count - 9)), "other", "other"])
        for _ in range(2):
            found = values(source, middle)
            assert sorted(found) == expected
            assert [value for value in found if value != "other"] == [str(number) for number in range(7, count - 9)]

    def test_a_kept_consumer_reads_earlier_and_later_ranges_alike(self, topics: Topics, name: str) -> None:
        """The consumer keeps its position between reads; records that it has
        fetched ahead are not lost or doubled.
        """
        topics.create(name, 1)
        topics.send(name, [b"%d" % number for number in range(1_000)])
        source = spout(topics, name)
        for first, end in [
            (0, 10),
            (10, 20),
            (20, 500),
            (510, 520),
            (100, 101),
            (101, 101),
            (101, 300),
            (990, 1000),
            (0, 3),
        ]:
            found = values(source, {f"{name}/0": {"first_offset": first, "next_offset": end}})
            assert found == [str(number) for number in range(first, end)]

    def test_reads_side_by_side_in_one_process_do_not_take_each_others_records(self, topics: Topics, name: str) -> None:
        """Like two attempts in the in-process executor: the same task reads different ranges,
        interleaved.
        """
        topics.send(topics.create(name, 1), [str(number).encode() for number in range(30_000)])
        source = spout(topics, name)
        reader = source.reader({}, CONTEXT)
        attempt = TransactionAttempt(1, 1)
        first = reader.read_all(attempt, {f"{name}/0": {"first_offset": 0, "next_offset": 25_000}})
        second = reader.read_all(attempt, {f"{name}/0": {"first_offset": 25_000, "next_offset": 30_000}})
        seen: dict[int, list[str]] = {0: [], 1: []}
        streams = {0: first, 1: second}
        while streams:
            for number, stream in list(streams.items()):
                batch = next(stream, None)
                if batch is None:
                    del streams[number]
                else:
                    seen[number] += batch.column(0).to_pylist()
        assert seen[0] == [str(number) for number in range(25_000)]
        assert seen[1] == [str(number) for number in range(25_000, 30_000)]

    @pytest.mark.rule("C18")
    def test_a_batch_that_timed_out_is_planned_smaller_and_an_idle_source_gives_empty_ones(
        self, topics: Topics, name: str
    ) -> None:
        topics.send(topics.create(name, 1), [str(number).encode() for number in range(100)])
        source = spout(topics, name, batch_records_max=80)
        planner = source.planner({}, CONTEXT)
        assert offsets(planner.plan_smaller({}, 8)) == {f"{name}/0": (0, 10)}
        far_below_the_limit = spout(topics, name).planner({}, CONTEXT)
        assert offsets(far_below_the_limit.plan_smaller({}, 4)) == {f"{name}/0": (0, 25)}
        far_below_the_limit.close()
        whole = planner.plan({f"{name}/0": {"first_offset": 0, "next_offset": 80}})
        assert planner.plan(whole) is None
        assert offsets(planner.empty_plan(whole)) == {f"{name}/0": (100, 100)}
        planner.close()

    @pytest.mark.rule("C16")
    def test_aborted_records_and_markers_are_gaps_also_at_the_end(self, topics: Topics, name: str) -> None:
        """Markers at the end of a range must not make the read hang (2.5)."""
        topics.create(name, 1)
        topics.send(name, [b"a"])
        topics.send_in_kafka_txn(name, [b"kept"], end=lambda producer: producer.commit_transaction(PATIENCE_S))
        topics.send_in_kafka_txn(name, [b"aborted"] * 3, end=lambda producer: producer.abort_transaction(PATIENCE_S))
        source = spout(topics, name)
        whole = plan(source)
        assert offsets(whole) == {f"{name}/0": (0, 7)}
        assert values(source, whole) == ["a", "kept"]
        topics.send(name, [b"b"])
        assert values(source, plan(source, whole)) == ["b"]
        assert values(source, whole) == ["a", "kept"]

    @pytest.mark.rule("C16")
    def test_a_range_of_nothing_but_gaps_is_empty(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        topics.send_in_kafka_txn(name, [b"aborted"] * 3, end=lambda producer: producer.abort_transaction(PATIENCE_S))
        source = spout(topics, name)
        assert values(source, plan(source)) == []

    def test_offsets_that_retention_removed_are_data_loss(self, topics: Topics, name: str) -> None:
        from confluent_kafka import TopicPartition

        topics.create(name, 1)
        topics.send(name, [b"%d" % number for number in range(10)])
        topics.admin.delete_records([TopicPartition(name, 0, 5)])[TopicPartition(name, 0)].result(PATIENCE_S)
        with pytest.raises(DataLossError, match=rf"{name}/0 no longer holds offset 2"):
            values(spout(topics, name), {f"{name}/0": {"first_offset": 2, "next_offset": 8}})
        assert values(spout(topics, name), {f"{name}/0": {"first_offset": 5, "next_offset": 7}}) == ["5", "6"]

    def test_a_bad_record_is_named_by_topic_partition_and_offset(self, topics: Topics, name: str) -> None:
        topics.create(name, 2)
        topics.send(name, [b'{"n":1}', b'{"n":2}', b'{"n":"three"}', b'{"n":4}'], 1)
        source = spout(topics, name, codec=JsonCodec(Fields(n=int)))
        with pytest.raises(
            BadRecordError, match=f"topic '{name}', partition 1, offset 2: n: text, and Fields declares int64"
        ):
            values(source, plan(source))

    def test_a_record_of_10_mb_is_read(self, topics: Topics, name: str) -> None:
        topics.create(name, 1, max_message_bytes="20000000")
        producer = topics.producer(message_max_bytes=20_000_000)
        for value in (b"small", b"x" * 10_000_000, b"", None):
            producer.produce(name, value)
        producer.arrived(60)
        source = spout(topics, name)
        assert values(source, plan(source)) == ["small", "x" * 10_000_000, "", None]

    @pytest.mark.behaviour("2.8", "2.9")
    def test_keys_and_headers_are_decoded_into_fields_of_their_own(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        producer = topics.producer()
        headers = [("trace", b"first"), ("trace", b"last"), ("n", b'{"n": 7}')]
        producer.produce(name, b"v", key=b'{"customer": "c1"}', headers=headers)
        producer.produce(name, b"w")
        producer.arrived()
        source = spout(
            topics,
            name,
            key_codec=JsonCodec(Fields(customer=str)),
            header_codecs={"trace": TextCodec("trace"), "n": JsonCodec(Fields(n=int))},
            metadata=["offset"],
        )
        assert source.output_fields().names == ("value", "customer", "trace", "n", "offset")
        assert read(source, plan(source)) == [("v", "c1", "last", 7, 0), ("w", None, None, None, 1)]

    @pytest.mark.behaviour("2.8")
    def test_metadata_fields_come_after_the_codecs(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        producer = topics.producer()
        producer.produce(name, b"v", key=b"k", timestamp=1_700_000_000_123, headers=[("h", b"x"), ("h", None)])
        producer.produce(name, None, key=None)
        producer.arrived()
        names = ["topic", "partition", "offset", "timestamp_ms", "key", "headers"]
        source = spout(topics, name, metadata=names)
        assert source.output_fields().names == ("value", *names)
        first, second = read(source, plan(source))
        headers = [{"key": "h", "value": b"x"}, {"key": "h", "value": None}]
        assert first == ("v", name, 0, 0, 1_700_000_000_123, b"k", headers)
        assert (second[0], second[3], second[5], second[6]) == (None, 1, None, [])

    def test_the_value_as_it_is_comes_beside_its_fields(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        raw = [b'{"n": 1, "kept": [1.50, null]}', None, b" {} "]
        producer = topics.producer()
        for each in raw:
            producer.produce(name, each)
        producer.arrived()
        source = spout(topics, name, codec=JsonCodec(Fields(n=int)), metadata=["value"])
        assert read(source, plan(source)) == [(1, raw[0]), (None, None), (None, raw[2])]

    def test_a_tombstone_is_told_apart_from_an_empty_record(self, topics: Topics, name: str) -> None:
        topics.create(name, 1)
        topics.send(name, [b'{"n": 1}', None, b"{}"])
        source = spout(topics, name, codec=JsonCodec(Fields(n=int)), metadata=["tombstone", "offset"])
        assert read(source, plan(source)) == [(1, False, 0), (None, True, 1), (None, False, 2)]


@pytest.mark.integration
def test_asking_about_topics_leaves_nothing_behind(topics: Topics, name: str) -> None:
    """There is one such request per transaction, so anything that it left behind would add up."""
    topics.create(name)
    metadata = KafkaMetadata(KafkaSettings(topics.bootstrap_servers, None), (name,), None)
    topic_ids = metadata.topics().topic_ids

    def kept() -> int:
        gc.collect()
        return sum(1 for each in gc.get_objects() if isinstance(each, Uuid))

    metadata.confirm_topics(topic_ids)
    before = kept()
    for _ in range(50):
        metadata.confirm_topics(topic_ids)
    assert kept() - before < 5
    metadata.close()
