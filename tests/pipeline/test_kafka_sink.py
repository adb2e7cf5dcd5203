"""The Kafka sink: each row is written once, each task's part as a whole, whatever fails."""

from __future__ import annotations

import datetime
import json
import socket
from collections import Counter
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer

from framework import ArrowBolt, Fields, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.coordination.store import Delete, Put
from framework.errors import ConfigError, InvariantViolation, RetryableError, TopologyError
from framework.topology import TopologyContext
from framework.transactions import MemoryStore, reset
from framework.transactions.reset import reset_everything
from framework.transactions.run import TopologyFailed
from sinks import Count, KafkaSink, OpaqueMapState, SqliteBackend, StateCommitter
from sinks.kafka import markers as kafka_markers
from sinks.kafka.markers import Marker, read_markers
from sinks.kafka.writer import MarkedWriter, writers
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.oracle import read_topics
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.4")]
FIELDS = Fields(word=str, n=int)
ROWS = {part: [[f"{part}-{each % 7}", each] for each in range(60)] for part in range(3)}
ALL = sorted((word, n) for rows in ROWS.values() for word, n in rows)


class Pass(ArrowBolt):
    def __init__(self, deterministic: bool) -> None:
        self.deterministic = deterministic

    def execute_arrow(self, batch: Any) -> Any:
        yield batch

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def build(
    name: str, spout: Any, sink: KafkaSink, tasks: int, *, deterministic: bool = True, at_least_once: bool = False
) -> Any:
    builder = TransactionalTopologyBuilder(name, "spout", spout, 2, at_least_once=at_least_once)
    builder.set_bolt("pass", Pass(deterministic), 2).shuffle_grouping("spout")
    sinks = builder.set_bolt("sink", sink, tasks)
    sinks.fields_grouping("pass", Fields("word")) if tasks > 1 else sinks.global_grouping("pass")
    return builder.build()


def held(topics: Topics, topic: str) -> list[tuple[bytes | None, Any]]:
    """(key, value) of every record that a read_committed consumer sees."""
    found: list[tuple[bytes | None, Any]] = []
    read_topics(topics.bootstrap_servers, [topic], lambda message: found.append((message.key(), message.value())))
    return found


def pairs(topics: Topics, topic: str) -> list[tuple[str, int]]:
    return sorted(
        (document["word"], document["n"]) for document in (json.loads(value) for _, value in held(topics, topic))
    )


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "spout", [pytest.param(MemoryTransactionalSpout, marks=pytest.mark.slow), OpaqueMemoryTransactionalSpout]
)
@pytest.mark.rule("C11")
def test_each_row_is_one_record_whatever_fails(
    topics: Topics, name: str, tasks: int, spout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three kafka_txns of a writer, one fails before it is done and one after.

    So the parts of some tasks are in the topic and those of others are not.
    """
    topic = topics.create(name, 2)
    calls: Counter[str] = Counter()
    real = MarkedWriter._in_one_kafka_txn

    def faulty(self: MarkedWriter, topics: Any, records: Any, marker: Marker) -> None:
        calls[marker.writer] += 1
        turn = calls[marker.writer]
        if turn % 3 == 1:
            raise RetryableError("nothing done")
        real(self, topics, records, marker)
        if turn % 3 == 2:
            raise RetryableError("the answer was lost")

    monkeypatch.setattr(MarkedWriter, "_in_one_kafka_txn", faulty)
    sink = KafkaSink(topic, key="word", bootstrap_servers=topics.bootstrap_servers)
    run = submit(
        build(name, spout(ROWS, FIELDS, 15), sink, tasks),
        {"topology.max.attempts": 50},
        store=MemoryStore(),
        executor="local",
    )
    with run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed >= 4
    assert pairs(topics, topic) == ALL
    assert all(key == json.loads(value)["word"].encode() for key, value in held(topics, topic))
    writers.close()


@pytest.mark.slow
@pytest.mark.spark
def test_changes_of_a_state_written_to_kafka_from_spark_end_with_its_values(
    topics: Topics, name: str, spark: str, tmp_path: Path
) -> None:
    topic = topics.create(name, 2)
    builder = TransactionalTopologyBuilder(name, "spout", MemoryTransactionalSpout(ROWS, FIELDS, 20), 2)
    counts = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "counts")), ["word"], {"count": Count()})
    builder.set_bolt("counts", counts).global_grouping("spout")
    sink = KafkaSink(topic, value=["word", "count"], key="word", bootstrap_servers=topics.bootstrap_servers)
    builder.set_bolt("changes", sink, 2).fields_grouping("counts", Fields("word"))
    with submit(builder.build(), {"topology.collapse.records.max": 0}, store=MemoryStore()) as run:
        run.wait_until_caught_up(PATIENCE_S)
    last = {key: json.loads(value)["count"] for key, value in held(topics, topic)}
    assert last == {word.encode(): count for word, count in Counter(word for word, _ in ALL).items()}


@pytest.mark.rule("C4")
def test_at_least_once_writes_without_markers_and_must_be_asked_for(topics: Topics, name: str) -> None:
    topic = topics.create(name)
    sink = KafkaSink(topic, bootstrap_servers=topics.bootstrap_servers, at_least_once=True)
    spout = MemoryTransactionalSpout(ROWS, FIELDS, 30)
    with pytest.raises(TopologyError, match=r"bolt 'sink' may write a replayed batch again.*at_least_once=True"):
        build(name, spout, sink, 1)
    topology = build(name, spout, sink, 3, at_least_once=True, deterministic=False)
    with submit(topology, store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert pairs(topics, topic) == ALL
    assert f"ratchet-markers-{name}" not in topics.admin.list_topics(timeout=PATIENCE_S).topics


@pytest.mark.rule("C11")
def test_a_sink_of_several_tasks_is_refused_where_a_replay_could_send_a_row_to_another_task(name: str) -> None:
    spout = MemoryTransactionalSpout(ROWS, FIELDS, 30)
    with pytest.raises(TopologyError, match=r"component 'pass' is not declared deterministic.*'sink'.*parallelism 1"):
        build(name, spout, KafkaSink("t"), 2, deterministic=False)
    build(name, spout, KafkaSink("t"), 1, deterministic=False)
    builder = TransactionalTopologyBuilder(name, "spout", spout, 2)
    builder.set_bolt("sink", KafkaSink("t"), 2).shuffle_grouping("spout")
    with pytest.raises(TopologyError, match=r"ShuffleGrouping from 'spout' can bring a row to another task"):
        builder.build()


@pytest.mark.rule("C11")
def test_a_batch_half_written_by_three_tasks_is_not_finished_by_two(topics: Topics, name: str) -> None:
    """C11: the number of tasks is part of the marker."""
    marker = Marker(topology_id="t", writer="sink/0", epoch=1, txid=5, attempt_id=1, plan_digest="digest", tasks=3)
    assert marker.already_holds(
        Marker(topology_id="t", writer="sink/0", epoch=1, txid=5, attempt_id=2, plan_digest="digest", tasks=3)
    )
    with pytest.raises(InvariantViolation, match="one of 3 tasks, and there are 2 now"):
        marker.already_holds(
            Marker(topology_id="t", writer="sink/0", epoch=1, txid=5, attempt_id=2, plan_digest="digest", tasks=2)
        )


@pytest.mark.slow
def test_keys_and_values_of_every_type_are_written_as_documented(topics: Topics, name: str) -> None:
    moment = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
    fields = Fields(text=str, raw=bytes, at=datetime.datetime, price=Decimal, share=float)
    rows = [["ß", b"\x00\xff", moment, Decimal("1.5"), 0.25], ["", None, None, None, float("nan")]]
    cases: list[tuple[dict[str, Any], list[tuple[bytes | None, bytes | None]]]] = [
        ({"value": "raw", "key": "text"}, [("ß".encode(), b"\x00\xff"), (b"", None)]),
        (
            {"value": ["at", "price", "share", "raw"], "key": ["text"]},
            [
                (
                    '{"text":"ß"}'.encode(),
                    b'{"at":"2026-05-01T12:00:00.000000Z","price":"1.500000000000000000","share":0.25,"raw":"AP8="}',
                ),
                (b'{"text":""}', b'{"at":null,"price":null,"share":"NaN","raw":null}'),
            ],
        ),
        ({"value": lambda row: row["text"].encode() * 2}, [(None, "ßß".encode()), (None, b"")]),
    ]
    for number, (options, expected) in enumerate(cases):
        topic = topics.create(f"{name}-{number}")
        builder = TransactionalTopologyBuilder(topic, "spout", MemoryTransactionalSpout({0: rows}, fields, 2))
        sink = KafkaSink(topic, bootstrap_servers=topics.bootstrap_servers, **options)
        builder.set_bolt("sink", sink).global_grouping("spout")
        with submit(builder.build(), store=MemoryStore(), executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        assert held(topics, topic) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"value": "n"}, r"field 'n' is int64, and a record holds text or bytes: give a list, \['n'\]"),
        ({"key": "nothing"}, r"needs field 'nothing', which its input does not have \(it has: word, n\)"),
    ],
)
def test_fields_that_kafka_cannot_hold_are_refused_by_the_builder(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TopologyError, match=words):
        build(name, MemoryTransactionalSpout(ROWS, FIELDS, 30), KafkaSink("t", **options), 1)


def test_a_failing_write_names_the_topic(topics: Topics, name: str) -> None:
    topic = topics.create(name)
    for options, words in (
        ({"value": lambda row: 5}, "returned a int, not bytes"),
        ({"value": lambda row: b"x" * 2_000_000, "at_least_once": True}, "message.max.bytes|too large|larger"),
    ):
        sink = KafkaSink(topic, bootstrap_servers=topics.bootstrap_servers, **options)
        topology = build(name, MemoryTransactionalSpout({0: [["a", 1]]}, FIELDS, 1), sink, 1, at_least_once=True)
        run = submit(topology, {"topology.max.attempts": 1}, store=MemoryStore(), executor="local")
        with pytest.raises(TopologyFailed, match=words):
            run.wait_until_caught_up(PATIENCE_S)
        run.stop()
    assert held(topics, topic) == []


def test_a_topic_that_is_not_there_is_found_before_anything_starts(topics: Topics, name: str) -> None:
    for at_least_once in (False, True):
        sink = KafkaSink(name, bootstrap_servers=topics.bootstrap_servers, at_least_once=at_least_once)
        topology = build(name, MemoryTransactionalSpout(ROWS, FIELDS, 30), sink, 1, at_least_once=True)
        with pytest.raises(ConfigError, match=f"topic '{name}' does not exist at 127.0.0.1.*create it"):
            submit(topology, store=MemoryStore(), executor="local")
    unnamed = build(name, MemoryTransactionalSpout(ROWS, FIELDS, 30), KafkaSink(name), 1)
    with pytest.raises(ConfigError, match="bootstrap"):
        submit(unnamed, store=MemoryStore(), executor="local")


@pytest.mark.slow
def test_a_zombie_producer_is_fenced_and_its_open_kafka_txn_is_never_seen(topics: Topics, name: str) -> None:
    topic = topics.create(name)
    settings = {"bootstrap.servers": topics.bootstrap_servers, "transaction.timeout.ms": 60_000}
    zombie = Producer({**settings, "transactional.id": f"ratchet-{name}/sink/0"})
    zombie.init_transactions(PATIENCE_S)
    zombie.begin_transaction()
    zombie.produce(topic, b'{"word":"zombie","n":0}')
    zombie.flush(PATIENCE_S)
    sink = KafkaSink(topic, bootstrap_servers=topics.bootstrap_servers)
    topology = build(name, MemoryTransactionalSpout(ROWS, FIELDS, 30), sink, 1)
    with submit(topology, store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with pytest.raises(Exception, match=r"(?i)fenced|epoch"):
        zombie.commit_transaction(PATIENCE_S)
    assert pairs(topics, topic) == ALL


def left_open(topics: Topics, topic: str, topology: str, writer: str) -> Producer:
    """Leave a kafka_txn open, as a worker does that is killed between its marker and its commit.

    The broker would keep it open for a quarter of an hour.
    """
    dead = topics.producer(transactional_id=f"ratchet-{topology}/{writer}", transaction_timeout_ms=900_000)
    dead.init_transactions(PATIENCE_S)
    dead.begin_transaction()
    dead.produce(topic, b'{"word":"dead","n":0}')
    marker = Marker(
        topology_id=topology, writer=writer, epoch=1, txid=99, attempt_id=1, plan_digest="never committed", tasks=3
    )
    dead.produce(f"ratchet-markers-{topology}", marker.document, marker.key)
    dead.arrived()
    return dead


@pytest.mark.slow
@pytest.mark.rule("C11", "C26")
@pytest.mark.parametrize("writer", ["sink/0", pytest.param("sink/2", marks=pytest.mark.slow), "sink/7"])
def test_a_kafka_txn_that_a_dead_task_left_open_blocks_no_other_task(
    topics: Topics, name: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer of the id ends it; also when others must read the markers first,
    or when the task exists no more.
    """
    monkeypatch.setattr(kafka_markers, "OPEN_PATIENCE_S", 0.1)
    topic = topics.create(name, 2)
    spout = OpaqueMemoryTransactionalSpout(ROWS, FIELDS, 30)
    topology = build(name, spout, KafkaSink(topic, bootstrap_servers=topics.bootstrap_servers), 3)
    store = MemoryStore()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        writers.close()  # the next writers are new, as in other workers
        dead = left_open(topics, topic, name, writer)
        spout.append(0, ["late", 1])
        spout.append(1, ["later", 2])
        run.wait_until_caught_up(PATIENCE_S)
    writers.close()
    again = left_open(topics, topic, name, writer)
    with submit(topology, store=store, executor="local") as run:  # a new leader first reads all markers
        run.wait_until_caught_up(PATIENCE_S)
    assert pairs(topics, topic) == sorted([*ALL, ("late", 1), ("later", 2)])
    del dead, again
    writers.close()


@pytest.mark.slow
@pytest.mark.rule("C25")
def test_a_kafka_txn_of_another_topology_is_not_ended_but_waited_for(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    markers = topics.create(f"ratchet-markers-{name}")
    open_one = left_open(topics, topics.create(name), name, "sink/0")
    monkeypatch.setattr(kafka_markers, "STEP_TIMEOUT_S", 5.0)  # also a slow machine's broker answers in this time
    monkeypatch.setattr(kafka_markers, "OPEN_PATIENCE_S", 0.0)
    with pytest.raises(RetryableError, match=rf"the markers in '{markers}' could not be read to offset 1 yet"):
        read_markers(KafkaSettings(topics.bootstrap_servers, None), markers, "another")
    open_one.commit_transaction(PATIENCE_S)


@pytest.mark.rule("C25")
def test_a_kafka_txn_that_the_broker_keeps_open_is_named_and_ended_once(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that was killed may say that it has ended a kafka_txn, and may never write that to
    the topic: no producer can end it then."""
    markers = topics.create(f"ratchet-markers-{name}")
    open_one = left_open(topics, topics.create(name), name, "sink/0")
    ended: list[str] = []
    monkeypatch.setattr(kafka_markers, "initialised", lambda settings, errors, its_id: ended.append(its_id))
    monkeypatch.setattr(kafka_markers, "STEP_TIMEOUT_S", 5.0)  # also a slow machine's broker answers in this time
    monkeypatch.setattr(kafka_markers, "OPEN_PATIENCE_S", 0.0)
    with pytest.raises(
        RetryableError, match=r"offset 1 yet: the kafka_txn that began at offset 0 was ended, and .* open"
    ):
        read_markers(KafkaSettings(topics.bootstrap_servers, None), markers, name)
    assert len(ended) == 1
    open_one.commit_transaction(PATIENCE_S)


@pytest.mark.rule("C25")
def test_reading_markers_from_a_silent_broker_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_markers, "STEP_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RetryableError, match="127.0.0.1"):
        read_markers(KafkaSettings(f"127.0.0.1:{silent.getsockname()[1]}", None), "markers", "wordcount")


# --- whose markers, and of when (C25) -------------------------------------------------------------


class SinkRuns:
    """One topology that writes to one topic; it can be started many times."""

    def __init__(self, topics: Topics, name: str, *, marker_topic: str | None = None) -> None:
        self.topics, self.name = topics, name
        self.topic = topics.create(f"{name}-out")
        self.spout = MemoryTransactionalSpout({0: [["a", n] for n in range(30)]}, FIELDS, 10)
        options = {"bootstrap_servers": topics.bootstrap_servers, "marker_topic": marker_topic}
        self.topology = build(name, self.spout, KafkaSink(self.topic, **options), 1)
        self.store = MemoryStore()

    def catch_up(self) -> None:
        writers.close()  # as if each start were another process
        with submit(self.topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)

    def refused(self, words: str) -> None:
        """Check that every start is refused with ``words``, and writes nothing."""
        before = self.found()
        for _ in range(3):
            with pytest.raises(ConfigError, match=words):
                self.catch_up()
        assert self.found() == before

    def found(self) -> Counter[int]:
        return Counter(n for _, n in pairs(self.topics, self.topic))

    def kept(self) -> MemoryStore:
        """A backup of ZooKeeper as it is now."""
        copy = MemoryStore()
        copy._nodes, copy._epochs = dict(self.store._nodes), dict(self.store._epochs)
        return copy


@pytest.fixture
def runs(topics: Topics, name: str) -> SinkRuns:
    return SinkRuns(topics, name)


@pytest.mark.slow
@pytest.mark.rule("C25")
def test_a_zookeeper_that_was_wiped_behind_a_sink_stops_every_start(runs: SinkRuns) -> None:
    runs.catch_up()
    runs.store = MemoryStore()
    runs.refused("the marker of sink/0 is of topology .*incarnation.*reset --everything")


@pytest.mark.slow
@pytest.mark.rule("C25")
def test_a_zookeeper_restored_from_yesterday_behind_a_sink_stops_every_start(runs: SinkRuns) -> None:
    runs.catch_up()
    yesterday = runs.kept()
    for n in range(30, 60):
        runs.spout.append(0, ["a", n])
    runs.catch_up()
    runs.store = yesterday
    runs.refused("sink/0 has written transactions up to 6 to Kafka, and ZooKeeper says that 4 is next")


@pytest.mark.slow
@pytest.mark.rule("C25")
def test_a_txid_that_kafka_holds_and_zookeeper_never_opened_stops_every_start(runs: SinkRuns) -> None:
    yesterday = runs.kept()
    runs.spout.set_take(30)
    runs.catch_up()
    yesterday.apply([Put(f"{runs.name}/incarnation", runs.store.get(f"{runs.name}/incarnation") or b"")])
    yesterday._epochs[runs.name] = 5
    runs.store = yesterday
    runs.refused("sink/0 has written txid 1 to Kafka with plan .*ZooKeeper says that no plan was opened")


@pytest.mark.slow
@pytest.mark.rule("C25")
def test_two_topologies_with_one_topic_of_markers_are_refused(topics: Topics, name: str) -> None:
    first = SinkRuns(topics, name, marker_topic=f"{name}-markers")
    second = SinkRuns(topics, f"{name}-2", marker_topic=f"{name}-markers")
    first.catch_up()
    second.refused(f"topic '{name}-markers' has markers of topology '{name}': give topology '{name}-2' a marker_topic")
    first.spout.append(0, ["a", 30])
    first.catch_up()
    assert first.found() == Counter(range(31))


@pytest.mark.slow
def test_a_topic_of_markers_with_several_partitions_is_refused(topics: Topics, name: str) -> None:
    topics.create(f"{name}-markers", 3)
    SinkRuns(topics, name, marker_topic=f"{name}-markers").refused("has 3 partitions, and markers need an order")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_topic_of_markers_that_are_removed_after_a_time_is_refused(topics: Topics, name: str, policy: str) -> None:
    topics.create(f"{name}-markers", cleanup_policy=policy)
    runs = SinkRuns(topics, name, marker_topic=f"{name}-markers")
    runs.refused(f"has cleanup.policy={policy}, so that the broker removes old markers")
    topics.alter(f"{name}-markers", cleanup_policy="compact")
    runs.catch_up()
    topics.alter(f"{name}-markers", cleanup_policy=policy)
    runs.refused(f"has cleanup.policy={policy}, so that the broker removes old markers")


@pytest.mark.slow
def test_after_a_reset_of_everything_all_is_written_again_and_nothing_twice(runs: SinkRuns) -> None:
    runs.catch_up()
    reset_everything(runs.topology, runs.store)
    runs.catch_up()
    runs.catch_up()
    assert runs.found() == Counter(dict.fromkeys(range(30), 2))


@pytest.mark.slow
def test_a_reset_that_crashed_halfway_lets_no_driver_start_until_it_is_repeated(
    runs: SinkRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.catch_up()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(reset, "forget_everything", Mock(side_effect=KeyboardInterrupt))
        reset_everything(runs.topology, runs.store)
    runs.refused("the marker of sink/0 is of topology .*reset --everything")
    reset_everything(runs.topology, runs.store)
    runs.catch_up()
    assert runs.found() == Counter(dict.fromkeys(range(30), 2))


@pytest.mark.slow
def test_state_and_markers_of_the_previous_version_are_understood(runs: SinkRuns) -> None:
    """That version had no incarnation, and its markers did not have the topology in their keys."""
    runs.catch_up()
    runs.store.apply([Delete(f"{runs.name}/incarnation"), Delete(f"{runs.name}/coordinator/open")])
    markers = read_markers(
        KafkaSettings(runs.topics.bootstrap_servers, None), f"ratchet-markers-{runs.name}", runs.name
    )
    document = {**asdict(markers["sink/0"]), "format": 1}
    del document["incarnation"]
    producer = runs.topics.producer()
    producer.produce(f"ratchet-markers-{runs.name}", key=f"{runs.name}/sink/0".encode())
    producer.produce(f"ratchet-markers-{runs.name}", json.dumps(document), b"sink/0")
    producer.arrived()
    for n in range(30, 60):
        runs.spout.append(0, ["a", n])
    runs.catch_up()
    assert runs.found() == Counter(range(60))
    runs.store = MemoryStore()
    runs.refused(r"sink/0 is of topology .*, incarnation \(none\), and this is")


def test_transactional_ids_of_different_writers_are_different() -> None:
    settings = KafkaSettings("127.0.0.1:1", None)
    ids = {
        writers.marked(settings, TopologyContext(topology, component, task, 12))._transactional_id
        for topology, component in (("a", "b"), ("a-b", "c"), ("a", "b-c"), ("a-b-c", "d"), ("a", "b-c-1"))
        for task in range(12)
    }
    assert len(ids) == 5 * 12
    writers.close()
