"""Where a Kafka spout of a core topology goes on: the record decides,
and it names the log by its id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

import spouts.kafka.consumer.core_spout_consumer
from framework import Config, CoreTopology, CoreTopologyFailed, Fields, TopologyBuilder, submit
from framework.core.leader_loop import forget_state, read_record
from framework.transactions import MemoryStore
from spouts import KafkaSpout, TextCodec
from spouts.kafka.consumer.continuous_consumers import Event
from spouts.kafka.consumer.core_spout_consumer import KafkaTail
from tests.kit.core_parts import Rich, Stepped, ack, seen
from tests.kit.state_parts import Count, checkpointed, journal, lmdb
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.behaviour("4.9", "5.5"),
    pytest.mark.usefixtures("reader"),
]


def spout(topics: Topics, topic: str, **more: Any) -> KafkaSpout:
    return KafkaSpout(
        [topic],
        bootstrap_servers=topics.bootstrap_servers,
        codec=TextCodec("word"),
        group=topic,
        commit_every_s=0.05,
        **more,
    )


def counting(key: str, **kafka: KafkaSpout) -> CoreTopology:
    """A topology that counts the words of Kafka spouts."""
    builder = TopologyBuilder(key)
    count = builder.set_bolt("count", Count(key), 2)
    for name, each in kafka.items():
        builder.set_spout(name, each)
        count.fields_grouping(name, Fields("word"))
    return builder.build()


def plain(key: str, kafka: KafkaSpout) -> CoreTopology:
    """A topology without state; ``seen(key).executed`` has its words."""
    builder = TopologyBuilder(key)
    builder.set_spout("words", kafka)
    builder.set_bolt("bolt", Rich(key, ack)).global_grouping("words")
    return builder.build()


def stored(topics: Topics, topic: str) -> TopicPartition:
    """The committed offset of partition 0 in the group with the topic's name."""
    consumer = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": topic})
    try:
        return consumer.committed([TopicPartition(topic, 0)], timeout=PATIENCE_S)[0]
    finally:
        consumer.close()


@pytest.mark.rule("C35")
def test_a_topology_that_was_forgotten_counts_everything_again_wherever_its_group_is(
    topics: Topics, name: str, tmp_path: Path
) -> None:
    topics.send(topics.create(name), [b"word"] * 100)
    store, conf = MemoryStore(), lmdb(tmp_path)
    topology = counting(name, words=spout(topics, name))
    with submit(topology, conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, name) == {"word": 100}
    assert stored(topics, name).offset == 100
    forget_state(topology, Config.of(conf), store)
    for _ in range(2):  # the second start goes on where the first ended
        with submit(topology, conf, store=store, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
        assert checkpointed(conf, store, name) == {"word": 100}


@pytest.mark.slow
@pytest.mark.rule("C35")
def test_a_spout_that_is_added_loses_nothing_when_something_fails_before_the_next_checkpoint(
    topics: Topics, name: str, tmp_path: Path
) -> None:
    other = f"{name}-added"
    topics.send(topics.create(name), [b"old"] * 10)
    topics.send(topics.create(other), [b"new"] * 300)
    store, conf = MemoryStore(), lmdb(tmp_path, **{"topology.max.spout.pending": 20})
    with submit(counting(name, words=spout(topics, name)), conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    failed: list[int] = []

    def once(txid: int) -> None:
        if journal(name).results.get("new") and not failed:
            failed.append(txid)
            raise RuntimeError("before the first checkpoint that has any of it")

    journal(name).on["pre_prepare"] = once
    both = counting(name, words=spout(topics, name), more=spout(topics, other))
    with submit(both, conf, store=store, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert failed
    assert checkpointed(conf, store, name) == {"old": 10, "new": 300}


@pytest.mark.rule("C35")
def test_the_group_is_never_ahead_of_the_last_committed_checkpoint(topics: Topics, name: str, tmp_path: Path) -> None:
    """Also while many records are done and no checkpoint has them yet."""
    topics.create(name)
    rarely = {"topology.state.checkpoint.interval.ms": 3_600_000, "topology.message.timeout.secs": 7_200}
    store, conf = MemoryStore(), lmdb(tmp_path, **rarely)
    with submit(counting(name, words=spout(topics, name)), conf, store=store, executor="local") as run:
        wait_for(lambda: (record := read_record(store, name)) is not None and record.positions is not None)
        topics.send(name, [b"word"] * 50)
        wait_for(lambda: journal(name).results.get("word") == 50)
        wait_for(lambda: stored(topics, name).offset != -1001)
        assert stored(topics, name).offset == 0
        run.wait_until_idle(PATIENCE_S)  # takes a checkpoint
        wait_for(lambda: stored(topics, name).offset == 50)


@pytest.mark.each_value_once
@pytest.mark.quick_for("stateful-running-fail", "stateful-restarted-skip", "stateless-running-skip")
@pytest.mark.dies("state 7")
@pytest.mark.rule("C37")
@pytest.mark.parametrize("skip", [False, True], ids=["fail", "skip"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
@pytest.mark.parametrize("stateful", [True, False], ids=["stateful", "stateless"])
def test_a_topic_that_was_made_again_is_lost_data_and_read_from_its_beginning(
    topics: Topics,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stateful: bool,
    running: bool,
    skip: bool,
) -> None:
    monkeypatch.setattr(spouts.kafka.consumer.core_spout_consumer, "LOOK_UP_EVERY_S", 0.3)
    topics.send(topics.create(name), [b"first"] * 50)
    kafka = spout(topics, name, on_data_loss="skip" if skip else "fail")
    topology = counting(name, words=kafka) if stateful else plain(name, kafka)
    store, conf = MemoryStore(), lmdb(tmp_path) if stateful else {}

    def found() -> Counter[str]:
        return Counter(checkpointed(conf, store, name) if stateful else [word for (word,) in seen(name).executed])

    run = submit(topology, conf, store=store if stateful else None, executor="local")
    try:
        run.wait_until_idle(PATIENCE_S)
        assert found() == {"first": 50}
        if not running:
            run.stop()
            at = stored(topics, name)
        topics.recreate(name)
        topics.send(name, [b"second"] * 100)
        if not running:
            if not stateful:  # Kafka forgets the offset with the topic, unless the coordinator was away
                group = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": name})
                group.commit(offsets=[at], asynchronous=False)
                group.close()
            run = submit(topology, conf, store=store if stateful else None, executor="local")
        if not skip:
            with pytest.raises(CoreTopologyFailed, match=f"topic '{name}' was deleted and created again"):
                run.join(PATIENCE_S)
            return
        if stateful:
            wait_for(lambda: found() == {"first": 50, "second": 100})
            status = run.status().checkpoint
            assert status is not None and status.recoveries >= running  # all states went back
        else:  # at-least-once: records that were read before the loss was noticed come again
            wait_for(lambda: found()["second"] >= 100 and run.status().pending == 0)
        run.wait_until_idle(PATIENCE_S)
        assert found()["first"] == 50
    finally:
        run.stop()


@pytest.mark.rule("C37")
def test_at_most_once_nothing_of_a_topic_that_was_made_again_comes_twice(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has grown past the position in the one before, and the consumer reads on there before
    anybody has looked the topic up.
    """
    topics.send(topics.create(name), [b"first"] * 50)
    run = Stepped(plain(name, spout(topics, name, guarantee="at_most_once", on_data_loss="skip")))
    pause, full = KafkaTail.pause, False
    monkeypatch.setattr(KafkaTail, "pause", lambda self, tps: pause(self, self._assigned if full else tps))

    def words() -> list[str]:
        return [word for (word,) in seen(name).executed]

    def stepped() -> Stepped:
        return run.step()

    try:
        wait_for(lambda: len(stepped() and words()) == 50)
        full = True  # as when bolts are slow: meanwhile nothing is fetched
        stepped()
        monkeypatch.setattr(spouts.kafka.consumer.core_spout_consumer, "LOOK_UP_EVERY_S", 1_000.0)
        topics.recreate(name)
        topics.send(name, [b"%d" % n for n in range(150)])
        full = False
        wait_for(lambda: len(stepped() and words()) >= 200)
        for _ in range(100):
            stepped()
        assert Counter(words()) == {"first": 50, **{str(n): 1 for n in range(150)}}
    finally:
        run.rounds.close()


@pytest.mark.rule("C37")
def test_a_late_answer_about_another_offset_loses_nothing(
    topics: Topics, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic was made again, and the answer to a request at the former position arrives when
    reading has begun at the beginning."""
    topics.send(topics.create(name), [b"%d" % n for n in range(100)])
    process, late = KafkaTail._process, [50]

    def processed(self: KafkaTail, events: Iterable[Event]) -> None:
        here = [tp for tp in self._assigned if self._feed.position(tp) == 0]
        if here and late:
            events = [*events, Event(here[0], KafkaError(KafkaError.OFFSET_OUT_OF_RANGE), late.pop())]
        process(self, events)

    monkeypatch.setattr(KafkaTail, "_process", processed)
    run = Stepped(plain(name, spout(topics, name, on_data_loss="skip")))
    try:
        wait_for(lambda: len(run.step() and seen(name).executed) >= 100)
        assert {word for (word,) in seen(name).executed} == {str(n) for n in range(100)}
        assert not late
    finally:
        run.rounds.close()


@pytest.mark.rule("C35")
def test_the_position_of_an_idle_partition_is_committed_periodically(topics: Topics, name: str) -> None:
    """Kafka forgets an offset that was not committed for long,
    even while a consumer reads there.
    """
    topics.send(topics.create(name), [b"before"])
    with submit(plain(name, spout(topics, name, start="latest")), {}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        wait_for(lambda: stored(topics, name).offset == 1)
        topics.admin.delete_consumer_groups([name])[name].result(PATIENCE_S)
        wait_for(lambda: stored(topics, name).offset == 1)
        assert json.loads(stored(topics, name).metadata)["topic_id"]
