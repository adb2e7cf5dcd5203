"""The Kafka spout of core topologies, against a real broker: what it emits, retries and commits."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

import spouts.kafka.consumer.core_spout_consumer
from framework import CoreTopologyFailed, Fields, TopologyBuilder, Tuple, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError, RetryableError, TopologyError
from framework.topology import DEAD_LETTER_STREAM
from framework.transactions import MemoryStore
from integration import KafkaBroker
from spouts import JsonCodec, KafkaSpout, RetryPolicy, TextCodec
from spouts.kafka import core_task
from spouts.kafka.cluster_metadata import KafkaMetadata
from spouts.kafka.consumer import continuous_consumers
from spouts.kafka.consumer.consumer_seek import Assignment
from spouts.kafka.consumer.core_spout_consumer import task_of
from spouts.kafka.consumer.record_chunk import ColumnChunk, Run
from spouts.kafka.core_task import CoreTask
from spouts.kafka.decoding import Decoded
from spouts.kafka.partition_plan_entries import Position
from tests.kit.core_parts import Rich, Stepped, ack, hold, seen
from tests.kit.kafka_runs import tail_of
from tests.kit.state_parts import checkpointed, counting, journal, lmdb
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("reader")]
#: How long a broker is away.
AWAY_S = 3.0


def stepped(spout: KafkaSpout, bolt: Any, *, tasks: int = 1, letters: Any = None, pending: int = 1_000) -> Stepped:
    builder = TopologyBuilder("core")
    builder.set_spout("kafka", spout, tasks)
    builder.set_bolt("bolt", bolt).global_grouping("kafka")
    if letters is not None:
        builder.set_bolt("letters", letters).global_grouping("kafka", DEAD_LETTER_STREAM)
    return Stepped(builder.build(), pending=pending)


def committed(topics: Topics, topic: str, group: str, partitions: int = 1) -> list[int]:
    consumer = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": group})
    try:
        asked = [TopicPartition(topic, number) for number in range(partitions)]
        return [each.offset for each in consumer.committed(asked, timeout=PATIENCE_S)]
    finally:
        consumer.close()


def until(run: Stepped, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, (run.driver.status(), run.driver.failure)
        run.step()
        time.sleep(0.002)


def topic_id(topics: Topics, topic: str) -> str:
    metadata = KafkaMetadata(KafkaSettings(topics.bootstrap_servers, None), (topic,), None)
    try:
        return metadata.topics().topic_ids[topic]
    finally:
        metadata.close()


def words(values: list[tuple[Any, ...]]) -> list[str]:
    return [value[0] for value in values]


@pytest.mark.slow
@pytest.mark.behaviour("4.9")
def test_every_partition_is_read_by_one_task_and_acked_offsets_are_committed(topics: Topics, name: str) -> None:
    topics.create(name, 4)
    for number in range(4):
        topics.send(name, [b"%d-%d" % (number, n) for n in range(50)], number)
    run = stepped(
        KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name),
        Rich(name, ack),
        tasks=3,
    )
    until(run, lambda: run.driver.status().components["kafka"].completed == 200)
    assert sorted(words(seen(name).executed)) == sorted(f"{p}-{n}" for p in range(4) for n in range(50))
    assert {task_of(name, number, 3) for number in range(4)} == {0, 1, 2}
    run.rounds.close()
    assert committed(topics, name, name, 4) == [50, 50, 50, 50]
    topics.send(name, [b"later"], 2)
    again = stepped(
        KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name),
        Rich(f"{name}2", ack),
    )
    until(again, lambda: again.driver.status().components["kafka"].completed == 1)
    assert words(seen(f"{name}2").executed) == ["later"]
    again.rounds.close()


@pytest.mark.behaviour("4.9")
def test_only_the_contiguous_prefix_is_committed_and_the_rest_comes_again(topics: Topics, name: str) -> None:
    topics.create(name)
    topics.send(name, [b"%d" % n for n in range(10)])
    run = stepped(
        KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name), Rich(name, hold)
    )
    until(run, lambda: len(seen(name).held) == 10)
    for collector, tup in seen(name).held:
        if tup[0] not in ("4", "8"):
            collector.ack(tup)
    run.step(2)
    run.rounds.close()
    assert committed(topics, name, name) == [4]
    again = stepped(
        KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name),
        Rich(f"{name}2", ack),
    )
    until(again, lambda: again.driver.status().components["kafka"].completed == 6)
    assert words(seen(f"{name}2").executed) == ["4", "5", "6", "7", "8", "9"]
    again.rounds.close()


@pytest.mark.behaviour("4.9")
def test_a_failed_record_is_emitted_again_until_it_succeeds(topics: Topics, name: str) -> None:
    topics.create(name)
    topics.send(name, [b"good", b"bad", b"fine"])

    def third_time(bolt: Any, tup: Tuple, collector: Any) -> None:
        tries = words(seen(bolt.key).executed).count(tup[0])
        (collector.fail if tup[0] == "bad" and tries < 3 else collector.ack)(tup)

    run = stepped(
        KafkaSpout(
            [name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name, commit_every_s=0.01
        ),
        Rich(name, third_time),
    )
    until(run, lambda: run.driver.status().components["kafka"].completed == 3)
    assert sorted(words(seen(name).executed)) == ["bad", "bad", "bad", "fine", "good"]
    until(run, lambda: committed(topics, name, name) == [3])
    run.rounds.close()


@pytest.mark.behaviour("4.9")
def test_a_topology_is_not_idle_while_a_failed_record_waits_for_its_next_try(topics: Topics, name: str) -> None:
    topics.create(name)
    topics.send(name, [b"good", b"bad"])

    def third_time(bolt: Any, tup: Tuple, collector: Any) -> None:
        tries = words(seen(bolt.key).executed).count(tup[0])
        (collector.fail if tup[0] == "bad" and tries < 3 else collector.ack)(tup)

    builder = TopologyBuilder("core")
    policy = RetryPolicy(delay_s=1.0)
    spout = KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name, retry=policy)
    builder.set_spout("kafka", spout)
    builder.set_bolt("bolt", Rich(name, third_time)).global_grouping("kafka")
    with submit(builder.build(), {}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert sorted(words(seen(name).executed)) == ["bad", "bad", "bad", "good"]


@pytest.mark.each_value_once
@pytest.mark.behaviour("4.9")
@pytest.mark.parametrize(
    ("exhausted", "pending"), [("dead_letter", 1_000), ("dead_letter", 1), ("drop", 1_000)], ids=str
)
def test_a_record_that_fails_too_often_becomes_a_dead_letter_or_is_dropped(
    topics: Topics, name: str, exhausted: Any, pending: int
) -> None:
    topics.create(name)
    topics.send(name, [b"good"])
    producer = topics.producer()
    at_ms = 1_700_000_000_123
    producer.produce(name, b"poison", key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=at_ms)
    producer.arrived()
    topics.send(name, [b"fine"])

    def refuse(bolt: Any, tup: Tuple, collector: Any) -> None:
        (collector.fail if tup[0] == "poison" else collector.ack)(tup)

    def refuse_once(bolt: Any, tup: Tuple, collector: Any) -> None:
        (collector.fail if len(seen(bolt.key).executed) == 1 else collector.ack)(tup)

    spout = KafkaSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=TextCodec(),
        group=name,
        retry=RetryPolicy(retries_max=2),
        on_exhausted=exhausted,
    )
    letters = Rich(f"{name}-letters", refuse_once) if exhausted == "dead_letter" else None
    run = stepped(spout, Rich(name, refuse), letters=letters, pending=pending)
    until(
        run,
        lambda: (
            run.driver.status().pending == 0
            and len(seen(name).executed) == 5
            and (letters is None or len(seen(letters.key).executed) == 2)
        ),
    )
    run.step(2)
    run.rounds.close()
    assert words(seen(name).executed).count("poison") == 3
    assert committed(topics, name, name) == [3]
    if letters is not None:
        fields = run.plan.plan.components["kafka"].streams[DEAD_LETTER_STREAM]
        letter = dict(zip(fields.names, seen(letters.key).executed[0], strict=True))
        assert (letter["topic"], letter["partition"], letter["offset"]) == (name, 0, 1)
        assert letter["topic_id"] == topic_id(topics, name)
        assert (letter["value"], letter["error"]) == (b"poison", "its tuple tree failed too often")
        # The codec needs the value alone; a dead letter has all of the record.
        assert (letter["key"], letter["timestamp_ms"]) == (b"k", at_ms)
        assert [(each["key"], each["value"]) for each in letter["headers"]] == [("h", b"1"), ("h", None)]
    else:
        assert f"{name}/0, offset 1: given up after its retries" in str(run.driver.status().last_error)


def read_beside_a_stuck_record(topics: Topics, name: str, behind: list[bytes], *, uncommitted_max: int) -> None:
    """A record of partition 0 always fails, with others ``behind`` it, until 300 of partition 1 are
    executed, and 20 rounds longer."""
    topics.create(name, 2)
    topics.send(name, [b"stuck", *behind], 0)
    topics.send(name, [b"other"] * 300, 1)

    def all_but_one(bolt: Any, tup: Tuple, collector: Any) -> None:
        (collector.fail if tup[0] == "stuck" else collector.ack)(tup)

    spout = KafkaSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=TextCodec(),
        group=name,
        uncommitted_max=uncommitted_max,
    )
    run = stepped(spout, Rich(name, all_but_one))
    until(run, lambda: words(seen(name).executed).count("other") == 300)
    run.step(20)
    run.rounds.close()


@pytest.mark.behaviour("4.9")
def test_a_record_that_always_fails_holds_back_only_its_own_partition(topics: Topics, name: str) -> None:
    behind = [b"%d" % n for n in range(500)]
    read_beside_a_stuck_record(topics, name, behind, uncommitted_max=100)
    assert len({word for word in words(seen(name).executed) if word.isdigit()}) == 99
    assert committed(topics, name, name, 2) == [0, 300]


def test_records_that_wait_for_a_record_that_fails_are_bounded_in_bytes(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the task are read and emitted meanwhile."""
    most, size = 50_000, 1_000
    monkeypatch.setattr(core_task, "BUFFERED_BYTES_MAX", most)
    monkeypatch.setattr(continuous_consumers, "CHUNK_RECORDS", 10)
    buffered: list[int] = []
    read = CoreTask._read

    def noting(task: CoreTask) -> None:
        read(task)
        buffered.append(sum(each.buffered_bytes for each in task._partitions.values()))

    monkeypatch.setattr(CoreTask, "_read", noting)
    behind = [b"%d" % (n % 10) * size for n in range(1_000)]
    read_beside_a_stuck_record(topics, name, behind, uncommitted_max=5)
    assert most <= max(buffered) < most + 2 * 10 * size


@pytest.mark.behaviour("4.9")
def test_at_most_once_commits_before_it_emits(topics: Topics, name: str) -> None:
    topics.create(name)
    topics.send(name, [b"%d" % n for n in range(20)])
    at_emission: list[int] = []

    def look(bolt: Any, tup: Tuple, collector: Any) -> None:
        seen(bolt.key).acked.append(tup[0])
        collector.fail(tup)

    run = stepped(
        KafkaSpout(
            [name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name, guarantee="at_most_once"
        ),
        Rich(name, look),
    )
    until(run, lambda: bool(seen(name).executed))
    at_emission = committed(topics, name, name)
    assert at_emission[0] >= len(seen(name).executed)
    until(run, lambda: len(seen(name).executed) == 20)
    run.step(5, seconds=60)
    assert len(seen(name).executed) == 20  # failed records are not emitted again
    run.rounds.close()
    assert committed(topics, name, name) == [20]


class Asking(TextCodec):
    """A codec that depends on a service which does not answer at first, like a Schema Registry."""

    def __init__(self, key: str) -> None:
        super().__init__("word")
        self.key = key

    def decode_good(self, values: Sequence[bytes | None]) -> Any:
        asked = journal(f"{self.key}-asked").steps
        if values and len(asked) < 3:
            asked.append(("codec", 0, "asked"))
            raise RetryableError("the Schema Registry does not answer")
        return super().decode_good(values)


@pytest.mark.each_value_once
@pytest.mark.behaviour("4.9", "5.5")
@pytest.mark.parametrize("how", ["at_least_once", "at_most_once", "none", "stateful"])
def test_records_that_cannot_be_decoded_yet_wait_until_they_can(
    topics: Topics, name: str, tmp_path: Path, how: Any
) -> None:
    topics.create(name)
    topics.send(name, [b"%d" % n for n in range(20)])
    spout = KafkaSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=Asking(name),
        group=name,
        guarantee="at_least_once" if how == "stateful" else how,
    )
    if how == "stateful":
        store, conf = MemoryStore(), lmdb(tmp_path)
        with submit(counting(name, spout), conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
        found = list(checkpointed(conf, store, name))
    else:
        stepping = stepped(spout, Rich(name, ack))
        until(stepping, lambda: len(journal(f"{name}-asked").steps) == 3)
        topics.send(name, [b"last"])
        until(stepping, lambda: ("last",) in seen(name).executed)
        stepping.step(2).rounds.close()
        assert committed(topics, name, name) == [21]
        found = [word for word in words(seen(name).executed) if word != "last"]
    assert sorted(found, key=int) == [str(n) for n in range(20)]


def test_a_partition_that_could_not_be_assigned_is_assigned_later(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.send(topics.create(name), [b"a", b"b"])
    begin, refusals = Assignment.begin, 2

    def refusing(self: Assignment, positions: Sequence[TopicPartition]) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        begin(self, positions)

    monkeypatch.setattr(Assignment, "begin", refusing)
    tail = tail_of(topics.bootstrap_servers, name)

    def come() -> list[bytes | None]:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with contextlib.suppress(RetryableError):
                tail.look_up()
            assert not refusals or not tail.at_ends
            if records := tail.poll():
                values = records.raw("value")
                return values.to_pylist() if isinstance(values, pa.Array) else list(values)
            time.sleep(0.02)
        raise AssertionError("nothing came")

    try:
        tail.seek({(name, 0): Position(0, None)})
        assert come() == [b"a", b"b"]
        refusals = 1  # also when a partition that is read already must begin again
        with pytest.raises(RetryableError):
            tail._assign({(name, 0): Position(1, None)})
        tail._assign({(name, 0): Position(1, None)})
        assert come() == [b"b"]
    finally:
        tail.close()


@pytest.mark.behaviour("4.9")
def test_at_most_once_a_task_that_ends_late_does_not_move_the_group_back(topics: Topics, name: str) -> None:
    """Such a task is in a worker that outlived its driver, beside the worker that took its
    place."""
    topics.create(name)
    topics.send(name, [b"early"] * 20)
    spout = KafkaSpout(
        [name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name, guarantee="at_most_once"
    )
    first = stepped(spout, Rich(name, ack))
    until(first, lambda: len(seen(name).executed) == 20)
    topics.send(name, [b"late"] * 10)
    second = stepped(spout, Rich(f"{name}2", ack))
    until(second, lambda: len(seen(f"{name}2").executed) == 10)
    first.rounds.close()
    assert committed(topics, name, name) == [30]
    second.rounds.close()
    assert committed(topics, name, name) == [30]


@pytest.mark.each_value_once
@pytest.mark.parametrize("on_bad_record", ["skip", "dead_letter", "fail"])
def test_undecodable_records_follow_on_bad_record(topics: Topics, name: str, on_bad_record: Any) -> None:
    topics.create(name)
    topics.send(name, [b'{"n": 1}', b"{", b'{"n": 3}'])
    spout = KafkaSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=JsonCodec(Fields(n=int)),
        group=name,
        on_bad_record=on_bad_record,
    )
    if on_bad_record == "fail":
        builder = TopologyBuilder("core")
        builder.set_spout("kafka", spout)
        failing = submit(builder.build(), {}, executor="local")
        with pytest.raises(CoreTopologyFailed, match=f"topic '{name}', partition 0, offset 1"):
            failing.join(PATIENCE_S)
        return
    letters = Rich(f"{name}-letters", ack) if on_bad_record == "dead_letter" else None
    run = stepped(spout, Rich(name, ack), letters=letters)
    expected = 3 if letters is not None else 2
    until(run, lambda: run.driver.status().components["kafka"].completed == expected)
    run.rounds.close()
    assert words(seen(name).executed) == [1, 3]
    assert committed(topics, name, name) == [3]
    if letters is not None:
        assert [value[6:8] for value in seen(letters.key).executed] == [(None, b"{")]
        assert [value[0] for value in seen(letters.key).executed] == [topic_id(topics, name)]


def test_partitions_that_are_added_are_read(topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spouts.kafka.consumer.core_spout_consumer, "LOOK_UP_EVERY_S", 0.1)
    topics.create(name)
    topics.send(name, [b"first"])
    run = stepped(
        KafkaSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec(), group=name), Rich(name, ack)
    )
    until(run, lambda: len(seen(name).executed) == 1)
    topics.add_partitions(name, 3)
    topics.send(name, [b"second"], 2)
    until(run, lambda: len(seen(name).executed) == 2)
    run.rounds.close()


@pytest.mark.each_value_once
@pytest.mark.parametrize("skip", [False, True])
def test_offsets_that_are_gone_are_named_or_skipped(topics: Topics, name: str, skip: bool) -> None:
    topics.create(name)
    topics.send(name, [b"%d" % n for n in range(10)])
    consumer = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": name})
    consumer.commit(offsets=[TopicPartition(name, 0, 2)], asynchronous=False)
    consumer.close()
    topics.admin.delete_records([TopicPartition(name, 0, 5)])[TopicPartition(name, 0)].result(PATIENCE_S)
    builder = TopologyBuilder("core")
    spout = KafkaSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=TextCodec(),
        group=name,
        on_data_loss="skip" if skip else "fail",
    )
    builder.set_spout("kafka", spout)
    builder.set_bolt("bolt", Rich(name, ack)).global_grouping("kafka")
    if not skip:
        failing = submit(builder.build(), {}, executor="local")
        with pytest.raises(CoreTopologyFailed, match=f"partition {name}/0 no longer holds offset 2"):
            failing.join(PATIENCE_S)
        return
    run = Stepped(builder.build())
    until(run, lambda: len(seen(name).executed) == 5)
    assert words(seen(name).executed) == ["5", "6", "7", "8", "9"]
    run.rounds.close()


@pytest.mark.each_value_once
@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_a_new_group_begins_at_start_and_keeps_that_position_over_a_restart(
    topics: Topics, name: str, start: Any
) -> None:
    topics.create(name)
    topics.send(name, [b"before"])
    made = {"bootstrap_servers": topics.bootstrap_servers, "codec": TextCodec(), "group": name, "start": start}
    run = stepped(KafkaSpout([name], **made), Rich(name, hold))
    until(run, lambda: committed(topics, name, name) != [-1001])
    run.rounds.close()
    topics.send(name, [b"after"])
    again = stepped(KafkaSpout([name], **made), Rich(f"{name}2", ack))
    expected = ["after"] if start == "latest" else ["before", "after"]
    until(again, lambda: words(seen(f"{name}2").executed) == expected)
    again.rounds.close()


@pytest.mark.slow
@pytest.mark.kills
def test_a_broker_that_is_away_delays_new_records_and_loses_none(tmp_path: Path, name: str) -> None:
    with KafkaBroker(tmp_path / "kafka") as broker:
        topics = Topics(broker.address)
        topics.create(name)
        topics.send(name, [b"%d" % n for n in range(100)])
        run = stepped(
            KafkaSpout([name], bootstrap_servers=broker.address, codec=TextCodec(), group=name, commit_every_s=0.2),
            Rich(name, ack),
        )
        until(run, lambda: len(seen(name).executed) == 100)
        broker.kill()
        end = time.monotonic() + AWAY_S
        while time.monotonic() < end:
            run.step()
            time.sleep(0.05)
        broker.start()
        topics.send(name, [b"%d" % n for n in range(100, 200)])
        until(run, lambda: len(set(words(seen(name).executed))) == 200)
        until(run, lambda: run.driver.status().pending == 0)
        run.rounds.close()
        assert committed(topics, name, name) == [200]
        assert run.driver.status().components["kafka"].died == 0


def test_a_record_that_waits_does_not_hold_the_memory_of_other_partitions() -> None:
    values = pa.array([b"x" * 1_000] * 1_000, pa.binary())
    offsets = pa.array([7, *range(999)], pa.int64())
    epochs = pa.array([3] * 1_000, pa.int32())
    chunk = ColumnChunk([Run("t", 0, 1), Run("t", 1, 999)], values, offsets, value_bytes=10**6, epochs=epochs)
    decoded = Decoded(chunk, pa.record_batch([values], names=["value"]), "default")
    task: Any = SimpleNamespace(_keeps_records=True)
    found = dict(CoreTask._by_partition(task, decoded))
    assert [len(records) for records in found.values()] == [1, 999]
    one = found[("t", 0)]
    assert (one.offsets.tolist(), one.epochs.tolist(), one.first) == ([7], [3], 0)
    assert one.rows is not None and one.rows.to_pydict() == {"value": [b"x" * 1_000]}
    assert one.chunk is not None and len(one.chunk) == 1
    held = one.rows.get_total_buffer_size() + one.chunk.raw("value").get_total_buffer_size()  # type: ignore[union-attr]
    assert held < 10_000
    assert one.offsets.base is None


@pytest.mark.parametrize("how", ["on_exhausted", "on_bad_record"])
def test_dead_letters_that_no_bolt_takes_are_refused(how: str) -> None:
    builder = TopologyBuilder("letters")
    builder.set_spout("kafka", KafkaSpout(["t"], codec=TextCodec(), **{how: "dead_letter"}))  # type: ignore[arg-type]
    builder.set_bolt("bolt", Rich("letters", ack)).shuffle_grouping("kafka")
    with pytest.raises(
        TopologyError, match="spout 'kafka' emits what it gives up on the stream 'dead_letters', and no bolt"
    ):
        builder.build()
    builder.set_bolt("kept", Rich("letters", ack)).shuffle_grouping("kafka", DEAD_LETTER_STREAM)
    builder.build()


def test_impossible_kafka_spout_settings_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="guarantee must be one of 'at_least_once', 'at_most_once', 'none', not 'exactly'"
    ):
        KafkaSpout(["t"], guarantee="exactly")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="retry= needs guarantee='at_least_once'"):
        KafkaSpout(["t"], guarantee="at_most_once", retry=RetryPolicy())
    with pytest.raises(ConfigError, match="on_exhausted must be 'dead_letter' or 'drop', not 'ignore'"):
        KafkaSpout(["t"], on_exhausted="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no Kafka brokers are named"):
        builder = TopologyBuilder("core")
        builder.set_spout("kafka", KafkaSpout(["t"]))
        submit(builder.build(), {}, executor="local")


@pytest.mark.slow
@pytest.mark.behaviour("5.5")
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_checkpoint_holds_the_offsets_and_the_spout_goes_back_to_them(
    topics: Topics, name: str, tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record counts once though bolts die, the spout's parallelism
    changes and a partition appears.
    """
    topics.create(name, 3)
    before = [b"before"] * 10
    for number in range(3):
        topics.send(name, before, number)
    spout = KafkaSpout(
        [name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec("word"), group=name, start=start
    )
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.max.spout.pending": 20})
    expected: Counter[str] = Counter({"before": 30} if start == "earliest" else {})
    happened = 0

    def sometimes(value: Any) -> None:
        nonlocal happened
        happened += 1
        if happened % 100 == 50:
            raise RuntimeError("now and then")

    journal(name).on["execute"] = sometimes
    for tasks in (1, 2, 2):
        with submit(counting(name, spout, spouts=tasks), conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
            for number in range(3):
                words = [f"{number}-{n % 7}" for n in range(80)]
                topics.send(name, [each.encode() for each in words], number)
                expected.update(words)
            wait_for(lambda: Counter(checkpointed(conf, store, name)) == expected)
    assert journal(name).steps.count(("count", 0, "pre_rollback")) >= 2
    if start == "latest":
        return
    monkeypatch.setattr(spouts.kafka.consumer.core_spout_consumer, "LOOK_UP_EVERY_S", 0.2)
    with submit(counting(name, spout), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        topics.add_partitions(name, 4)
        topics.send(name, [b"new"] * 250, 3)
        expected["new"] = 250
        wait_for(lambda: Counter(checkpointed(conf, store, name)) == expected)
