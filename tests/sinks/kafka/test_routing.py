"""Rows that say themselves which topic, partition, headers and time their records get."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import BadRecordError, ConfigError, RatchetError, TopologyError
from framework.transactions import MemoryStore
from integration import EmbeddedServers
from sinks import Headers, KafkaSink
from sinks.kafka import topic_metadata_cache
from sinks.kafka.routing import timestamp_column
from sinks.kafka.topic_metadata_cache import TopicCatalog
from sinks.kafka.writer import writers
from spouts import (
    CloudEventsCodec,
    CompressedCodec,
    CsvCodec,
    JsonCodec,
    MemoryTransactionalSpout,
    MessagePackCodec,
    OpaqueKafkaTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
)
from tests.kit import routed_run
from tests.kit.oracle import read_topics
from tests.kit.processes import ROOT
from tests.kit.refusing import refused
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

ROUTED = Fields.of({"to": pa.string(), "n": pa.int64(), "at": pa.timestamp("ms", "UTC"), "part": pa.int32()})
NOON = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)


def messages(topics: Topics, *names: str) -> list[Any]:
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, names, found.append)
    return found


def ran(name: str, spout: Any, sink: KafkaSink) -> MemoryStore:
    """Run a topology until it has caught up or has failed."""
    store = MemoryStore()
    builder = TransactionalTopologyBuilder(name, "spout", spout, at_least_once=not sink.exactly_once)
    builder.set_bolt("out", sink).global_grouping("spout")
    with submit(builder.build(), {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return store


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.rule("C11")
@pytest.mark.parametrize("tasks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kills_between_write_and_commit_leave_each_record_in_its_topic_once(
    servers: EmbeddedServers, topics: Topics, name: str, tasks: int
) -> None:
    topics.create(name, 2)
    targets = [topics.create(f"{name}-{each}", 2) for each in "abc"]
    producer = topics.producer()
    count = 300
    for n in range(count):
        headers = [("n", b"%d" % n), ("twice", b"1"), ("twice", None), ("secret", b"x")]
        value = json.dumps({"to": targets[n % 3], "n": n}).encode()
        producer.produce(name, value, b"k%d" % (n % 10), n % 2, headers=headers, timestamp=1_700_000_000_000 + n)
    producer.arrived()
    app = {
        "app.id": name,
        "app.source": name,
        "app.kafka": topics.bootstrap_servers,
        "app.batch": 40,
        "app.tasks": tasks,
        "transactional.zookeeper.servers": servers.zookeeper,
        "transactional.zookeeper.root": f"/{name}",
        "transactional.zookeeper.session.timeout.secs": 2,
    }
    ends = []
    for moment, number in (("before", 2), ("after", 2), ("", 0)):
        command = [sys.executable, "-m", "tests.kit.routed_run"]
        done = subprocess.run(
            [*command, json.dumps({**app, "app.die": moment, "app.die.at": number})],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        ends.append(done.returncode)
        assert done.returncode in (0, routed_run.EXIT), done.stderr[-3_000:]
    assert ends == [routed_run.EXIT] * 2 + [0]
    found = [
        (each.topic(), each.partition(), each.key(), each.timestamp()[1], each.headers(), json.loads(each.value())["n"])
        for each in messages(topics, *targets)
    ]
    assert sorted(found, key=lambda each: int(each[-1])) == [
        (
            targets[n % 3],
            n % 2,
            b"k%d" % (n % 10),
            1_700_000_000_000 + n,
            [("n", b"%d" % n), ("twice", b"1"), ("twice", None), ("to", targets[n % 3].encode())],
            n,
        )
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.rule("C51")
def test_a_topic_that_must_not_be_written_makes_a_bad_record(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_metadata_cache, "_PATIENCE_S", 0.2)  # no topic is made here meanwhile
    topics.create(name)
    target, other = topics.create(f"{name}-out"), topics.create(f"{name}-other")
    named = [
        target,
        other,
        f"{name}-missing",
        "__consumer_offsets",
        f"ratchet-markers-{name}",
        "ratchet-markers-another",
        name,  # what the spout reads
        None,
        "a:b",
        "",
        target,
    ]
    values = [json.dumps({"to": to, "n": n}).encode() for n, to in enumerate(named)]
    topics.send(name, values)
    for options, written in (({}, {0, 1, 10}), ({"topics": [target]}, {0, 10}), ({"pattern": f"{name}-o.t"}, {0, 10})):
        spout = OpaqueKafkaTransactionalSpout(
            [name],
            bootstrap_servers=topics.bootstrap_servers.replace("127.0.0.1", "localhost"),  # the same cluster
            codec=JsonCodec(Fields(to=str, n=int)),
            on_bad_record="skip",
            bad_record_share_max=None,
        )
        sink = KafkaSink(topic_from="to", bootstrap_servers=topics.bootstrap_servers, **options)
        topology = f"{name}-{len(options)}{len(written)}{''.join(options)}"
        store = ran(topology, spout, sink)
        assert {offset for _, offset in refused(store, topology)} == set(range(len(named))) - written
    found = sorted((each.topic(), json.loads(each.value())["n"]) for each in messages(topics, target, other))
    assert found == sorted([(target, 0), (target, 10)] * 3 + [(other, 1)])
    assert all("to" not in json.loads(each.value()) for each in messages(topics, target))
    assert f"{name}-missing" not in topics.admin.list_topics(timeout=PATIENCE_S).topics
    assert messages(topics, name)[-1].value() == values[-1]


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.integration
def test_missing_topics_are_waited_for_together_and_once(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, bound = Clock(), topic_metadata_cache._PATIENCE_S + 2 * topic_metadata_cache._POLL_S
    monkeypatch.setattr(topic_metadata_cache, "time", clock)
    monkeypatch.setattr(topic_metadata_cache, "_MISSING_MAX", 3_000)
    topics.create(name, 2)
    catalog = TopicCatalog(KafkaSettings(topics.bootstrap_servers, None))
    wanted = [(name, 1), *((name, n) for n in range(3, 1_000)), *((f"{name}-{n}", 1) for n in range(1_000))]
    catalog.look_up([*wanted, *(("x" * n, 1) for n in range(250, 2_000)), ("a:b", 1)])
    waited = clock.now
    assert 0 < waited < bound and len(catalog._missing) == len(wanted) - 1
    for pause in (0, topic_metadata_cache._MISSING_S + 1):  # asked again, and not waited for
        clock.now += pause
        catalog.look_up(wanted)
        assert {catalog.partition_count(*each) for each in wanted} == {0, 2}
        assert clock.now == waited + pause
    catalog.look_up((f"{name}-more-{n}", 1) for n in range(2_000))
    assert len(catalog._missing) == 3_000


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.rule("C51")
def test_records_that_name_as_many_missing_topics_and_partitions_are_refused_together(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(name)
    target = topics.create(f"{name}-out", 2)
    missing = [{"to": f"{name}-{n}" if n % 5 else "x" * n * 1_000, "part": None} for n in range(1, 16)]
    beyond = [{"to": target, "part": n} for n in range(2, 17)]
    rows = [each for pair in zip(missing, beyond, strict=True) for each in pair]
    values = [json.dumps(each).encode() for each in [*rows[:15], {"to": target, "part": 1}, *rows[15:]]]
    topics.send(name, values)
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=JsonCodec(Fields(to=str, part=int)),
        on_bad_record="skip",
        bad_record_share_max=None,
    )
    sink = KafkaSink(topic_from="to", partition="part", value=["part"], bootstrap_servers=topics.bootstrap_servers)
    store = ran(name, spout, sink)
    assert {offset for _, offset in refused(store, name)} == set(range(31)) - {15}
    assert [each.value() for each in messages(topics, target)] == [b'{"part":1}']


@pytest.mark.integration
def test_without_a_policy_a_topic_that_is_not_allowed_ends_the_topology(topics: Topics, name: str) -> None:
    target = topics.create(name)
    sink = KafkaSink(topic_from="to", topics=[target], bootstrap_servers=topics.bootstrap_servers)
    spout = MemoryTransactionalSpout({0: [["elsewhere", 1, None, None]]}, ROUTED, 10)
    with pytest.raises(RatchetError, match=rf"field 'to' names topic 'elsewhere'.*writes only one of {target}"):
        ran(name, spout, sink)


@pytest.mark.integration
@pytest.mark.rule("C51")
@pytest.mark.parametrize("at_least_once", [False, True])
def test_partitions_and_times_that_a_topic_does_not_take_make_bad_records(
    topics: Topics, name: str, at_least_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_metadata_cache, "_PATIENCE_S", 0.2)
    target = topics.create(name, 3, message_timestamp_after_max_ms="60000", message_timestamp_before_max_ms=str(2**40))
    soon = datetime.datetime.fromtimestamp(int(time.time()) + 3_600, datetime.UTC)
    rows = [
        [target, 0, NOON, 2],
        [target, 1, NOON, None],
        [target, 2, None, 0],
        [target, 3, NOON, 3],
        [target, 4, NOON, -1],
        [target, 5, soon, 0],
        [target, 6, datetime.datetime.fromtimestamp(0, datetime.UTC), 0],
        [target, 7, datetime.datetime.fromtimestamp(86_400, datetime.UTC), 0],  # before.max.ms
    ]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, ROUTED, 100, on_bad_record="skip")
    sink = KafkaSink(
        topic_from="to",
        topics=[target],
        timestamp="at",
        partition="part",
        bootstrap_servers=topics.bootstrap_servers,
        at_least_once=at_least_once,
    )
    store = ran(name, spout, sink)
    assert {offset for _, offset in refused(store, name)} == {3, 4, 5, 6, 7}
    found = {json.loads(each.value())["n"]: each for each in messages(topics, target)}
    assert found.keys() == {0, 1, 2} and found[0].partition() == 2 and found[2].partition() == 0
    noon_ms = int(NOON.timestamp() * 1_000)
    assert found[0].timestamp()[1] == found[1].timestamp()[1] == noon_ms < found[2].timestamp()[1]


@pytest.mark.integration
def test_a_time_that_a_broker_whose_clock_is_behind_refuses_makes_a_bad_record(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = topics.create(name, message_timestamp_after_max_ms="3600000")
    now = time.time()
    soon = datetime.datetime.fromtimestamp(int(now) + 3_660, datetime.UTC)
    monkeypatch.setattr("sinks.kafka.sink.time", mock.Mock(time=lambda: now + 90))
    rows = [[target, 0, NOON, None], [target, 1, soon, None]]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, ROUTED, 100, on_bad_record="skip")
    sink = KafkaSink(target, timestamp="at", value=["n"], bootstrap_servers=topics.bootstrap_servers)
    store = ran(name, spout, sink)
    assert {offset for _, offset in refused(store, name)} == {1}
    assert [json.loads(each.value())["n"] for each in messages(topics, target)] == [0]


@pytest.mark.slow
@pytest.mark.integration
def test_a_tombstone_is_what_a_field_says_or_a_null_value(topics: Topics, name: str) -> None:
    fields = Fields(k=str, v=str, gone=bool)
    rows = [["a", "x", False], ["b", "y", True], ["c", "z", None], ["d", None, False]]
    spout = MemoryTransactionalSpout({0: rows}, fields, 10)
    for number, options in enumerate(({"tombstone": "gone"}, {"tombstone": "gone", "value": "v"}, {"value": "v"})):
        target = topics.create(f"{name}-{number}", cleanup_policy="compact")
        sink = KafkaSink(target, key="k", bootstrap_servers=topics.bootstrap_servers, at_least_once=True, **options)
        ran(target, spout, sink)
    found = [{each.key(): each.value() for each in messages(topics, f"{name}-{number}")} for number in range(3)]
    assert found[0] == {
        b"a": b'{"k":"a","v":"x"}',
        b"b": None,
        b"c": b'{"k":"c","v":"z"}',
        b"d": b'{"k":"d","v":null}',
    }
    assert found[1] == {b"a": b"x", b"b": None, b"c": b"z", b"d": None}
    assert found[2] == {b"a": b"x", b"b": b"y", b"c": b"z", b"d": None}


@pytest.mark.parametrize(
    "options",
    [
        {"value": ["n"], "value_codec": JsonCodec(pa.schema([pa.field("n", pa.int64(), nullable=False)]))},
        {"value": lambda row: b"%d" % row["n"]},
    ],
)
def test_a_tombstone_needs_no_value_that_could_be_written(options: dict[str, Any]) -> None:
    fields = Fields(n=int, gone=bool)
    sink = KafkaSink("t", tombstone="gone", **options)
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, fields, 1))
    builder.set_bolt("out", sink).global_grouping("spout")
    builder.build()
    rows = [{"n": None, "gone": True}, {"n": 1, "gone": False}, {"n": None, "gone": True}, {"n": 2, "gone": None}]
    batch = pa.RecordBatch.from_pylist(rows, fields.schema())
    values = [each and each.strip(b'{"n:}') for each in sink._parts(batch)["value"].to_pylist()]
    assert values == [None, b"1", None, b"2"]
    assert sink._parts(batch.slice(0, 1))["value"].to_pylist() == [None]


@pytest.mark.slow
@pytest.mark.integration
def test_a_topic_of_small_batches_that_a_kept_producer_meets_later_is_written(topics: Topics, name: str) -> None:
    """The producer's own batches would be larger than the topic takes."""
    large, small = topics.create(f"{name}-l"), topics.create(f"{name}-s", max_message_bytes="3000")
    rows = [[large, n, None, None] for n in range(50)] + [[small, n, None, None] for n in range(500)]
    spout = MemoryTransactionalSpout({0: rows}, ROUTED, 50)
    sink = KafkaSink(
        topic_from="to",
        pattern=f"{name}-.",
        value=lambda row: b'{"n":%d,"x":"%s"}' % (row["n"], b"x" * 200),
        bootstrap_servers=topics.bootstrap_servers,
        settings={"linger.ms": 200},
    )
    ran(name, spout, sink)
    assert sorted(json.loads(each.value())["n"] for each in messages(topics, small)) == list(range(500))
    assert len(messages(topics, large)) == 50
    writers.close()


@pytest.mark.slow
@pytest.mark.integration
def test_what_a_codec_writes_a_spout_reads_with_it(topics: Topics, name: str) -> None:
    """Compressed MessagePack as the data of an event, whose attributes are headers."""
    topics.create(f"{name}-in")
    topics.create(f"{name}-out")
    fields = Fields.of({"n": pa.int64(), "at": pa.timestamp("us", "UTC"), "ce_id": pa.string(), "ce_type": pa.string()})
    rows = [{"n": n, "at": NOON if n else None, "ce_id": str(n), "ce_type": "sold"} for n in range(20)]
    data = MessagePackCodec(fields.select(["n", "at"]))
    codec = CloudEventsCodec(CompressedCodec(data, "zstd"), mode="binary", attributes=["id", "type"])
    key = CsvCodec(fields.select(["ce_id", "n"]))
    for source, target in (
        (MemoryTransactionalSpout({0: [[*row.values()] for row in rows]}, fields, 100), f"{name}-in"),
        (
            OpaqueKafkaTransactionalSpout(
                [f"{name}-in"],
                bootstrap_servers=topics.bootstrap_servers,
                codec=codec,
                header_codecs=codec.header_codecs(),
            ),
            f"{name}-out",
        ),
    ):
        sink = KafkaSink(
            target,
            value=["n", "at"],
            value_codec=codec,
            key=["ce_id", "n"],
            key_codec=key,
            headers=codec.headers(source="/shop"),
            bootstrap_servers=topics.bootstrap_servers,
            at_least_once=True,
        )
        ran(target, source, sink)
    found = messages(topics, f"{name}-out")
    assert sorted(each.key() for each in found) == sorted(b"%d,%d" % (n, n) for n in range(20))
    read = codec.decode([each.value() for each in found]).to_pylist()
    ids = [dict(each.headers())["ce_id"].decode() for each in found]
    assert sorted(zip(ids, (row["n"] for row in read), strict=True)) == sorted((str(n), n) for n in range(20))
    headers = dict(found[0].headers())
    assert (headers["ce_specversion"], headers["ce_source"]) == (b"1.0", b"/shop")


@pytest.mark.integration
@pytest.mark.rule("C51")
def test_a_row_that_a_codec_cannot_write_is_a_bad_record(topics: Topics, name: str) -> None:
    topics.create(name)
    spout = OpaqueMemoryTransactionalSpout({0: [["a"], [""], ["b"]]}, Fields(word=str), 10, on_bad_record="skip")
    sink = KafkaSink(
        name, value_codec=CsvCodec(Fields(word=str)), bootstrap_servers=topics.bootstrap_servers, at_least_once=True
    )
    store = ran(name, spout, sink)
    assert {offset for _, offset in refused(store, name)} == {1}
    assert [each.value() for each in messages(topics, name)] == [b"a", b"b"]


# --- without brokers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give a topic, or topic_from="),
        ({"topic": "a", "topic_from": "to"}, "one of the two"),
        ({"topic": "a", "topics": ["b"]}, "give the field, too"),
        ({"topic_from": "to", "topics": []}, "give a list of topics"),
        ({"topic_from": "to", "topics": "abc"}, "give a list of topics"),
        ({"topic_from": "to", "topics": ["a"], "pattern": "a"}, "one of the two"),
        ({"topic_from": "to", "topics": ["a:b"]}, "not a Kafka topic name"),
        ({"topic_from": "to", "pattern": "("}, "no regular expression"),
        ({"topic": "m", "marker_topic": "m"}, "also a topic of records"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KafkaSink(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic_from": "n"}, "field 'n' is int64, and a topic is text"),
        ({"topic_from": "where"}, "needs field 'where'"),
        ({"topic": "t", "partition": "to"}, "a partition is an integer"),
        ({"topic": "t", "timestamp": "to"}, "the time of a record is a timestamp"),
        ({"topic": "t", "tombstone": "n"}, "no field of truths"),
        ({"topic": "t", "headers": "to"}, "headers are a list of structs"),
        ({"topic": "t", "headers": {"h": "n"}}, "a header holds text or bytes"),
        ({"topic": "t", "headers": {"h": 5}}, "give names of headers"),
        ({"topic": "t", "headers": ["to"]}, "a mapping of those to add"),
        ({"topic": "t", "value_codec": 5}, "value_codec= cannot be 5"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_the_builder(options: dict[str, Any], words: str) -> None:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, ROUTED, 1))
    with pytest.raises(TopologyError, match=words):
        builder.set_bolt("out", KafkaSink(**options)).global_grouping("spout")
        builder.build()


def test_a_row_that_is_only_routing_needs_a_value() -> None:
    spout = MemoryTransactionalSpout({0: []}, Fields(to=str), 1)
    builder = TransactionalTopologyBuilder("t", "spout", spout)
    builder.set_bolt("out", KafkaSink(topic_from="to")).global_grouping("spout")
    with pytest.raises(TopologyError, match="no field is left for the value"):
        builder.build()


def test_headers_are_kept_removed_and_added_in_order() -> None:
    kept = pa.array(
        [[("a", b"1"), ("b", None), ("a", b"2")], None, []],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    by_name = pa.array([[("a", "ä"), ("c", None)], None, []], pa.map_(pa.string(), pa.string()))
    batch = pa.record_batch({"headers": kept, "by_name": by_name, "region": pa.array(["eu", None, "us"])})
    made = {"region": "region", "by": b"r", "f": lambda row: row["region"] and row["region"].upper().encode()}
    found = Headers("headers", remove=["b", "x"], add=made).column(batch, "topic 't'")
    assert [[(each["key"], each["value"]) for each in row] for row in found.to_pylist()] == [
        [("a", b"1"), ("a", b"2"), ("region", b"eu"), ("by", b"r"), ("f", b"EU")],
        [("by", b"r")],
        [("region", b"us"), ("by", b"r"), ("f", b"US")],
    ]
    mapped = Headers("by_name").column(batch, "topic 't'").to_pylist()
    assert mapped == [[{"key": "a", "value": "ä".encode()}, {"key": "c", "value": None}], [], []]
    with pytest.raises(BadRecordError, match="header 'f'.* returned a str, not bytes"):
        Headers(add={"f": lambda row: "text"}).column(batch, "topic 't'")  # type: ignore[dict-item,return-value]


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array([1_500, None, -1], pa.int64()), [1_500, None, None]),
        (pa.array([1_999_999], pa.timestamp("us", "UTC")), [1_999]),
        (pa.array([2_000_000_000], pa.timestamp("ns")), [2_000]),
        (pa.array([1_200_000_000_000], pa.timestamp("s")), [1_200_000_000_000_000]),  # the year 40,000
    ],
)
def test_times_are_milliseconds(column: pa.Array, found: list[int | None]) -> None:
    assert timestamp_column("at", pa.record_batch({"at": column})).to_pylist() == found


@pytest.mark.parametrize(
    "column",
    [
        pa.array([5, 0], pa.int64()),
        pa.array([-2], pa.int64()),
        pa.array([-5_000], pa.timestamp("us")),
        pa.array([2**63], pa.uint64()),
        pa.array([2**62], pa.timestamp("s")),
    ],
)
def test_times_that_kafka_does_not_hold_make_bad_records(column: pa.Array) -> None:
    with pytest.raises(BadRecordError, match="field 'at'"):
        timestamp_column("at", pa.record_batch({"at": column}))
