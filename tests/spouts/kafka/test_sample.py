"""``ratchet check --sample``: the first records are read and decoded before anything starts."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from framework import CoreTopology, Fields, Topology, TopologyBuilder, TransactionalTopologyBuilder
from framework.config import Config
from framework.preflight import Finding, preflight
from sinks import Count, DeadLetterTopic, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import JsonCodec, KafkaSpout, MemoryTransactionalSpout, OpaqueKafkaTransactionalSpout, TopicStream
from tests.kit.core_parts import Rich, ack
from tests.kit.topics import Topics

RECORDS = [b'{"word": "w%d", "at": "2023-11-14T22:13:20Z"}' % number for number in range(50)]
GOOD = Fields(word=str, at=datetime.datetime)


def topology(spout: Any, stream: str = "default") -> Topology:
    builder = TransactionalTopologyBuilder("t", "spout", spout)
    state = OpaqueMapState(MemoryBackend("m"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout", stream)
    return builder.build()


def sampled(built: Topology | CoreTopology, count: int = 20) -> Finding:
    *_, last = preflight(built, Config.of({}), "local", sample=count)
    assert last.subject == "sample"
    return last


@pytest.fixture
def topic(topics: Topics, name: str) -> str:
    topics.create(name, 2)
    for partition in range(2):
        topics.send(name, RECORDS, partition)
    return name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("fields", "on_bad_record", "error"),
    [
        (GOOD, "fail", None),
        (Fields(word=str, seen_at=datetime.datetime), "fail", "none has a value for seen_at"),
        (
            Fields(word=int),
            "fail",
            "offset 0: word: text, and Fields declares int64; mend the record's source, or give",
        ),
        (
            Fields(word=int),
            "dead_letter",
            "cannot be decoded; the first: word: text, and Fields declares int64: is the",
        ),
        (Fields(word=int), "skip", "cannot be decoded: is the codec that of the records"),
    ],
)
def test_a_sample_finds_what_is_wrong_in_fields(
    topics: Topics, topic: str, fields: Fields, on_bad_record: Any, error: str | None
) -> None:
    letters = DeadLetterTopic(f"{topic}-bad") if on_bad_record == "dead_letter" else None
    spout = OpaqueKafkaTransactionalSpout(
        [topic],
        bootstrap_servers=topics.bootstrap_servers,
        codec=JsonCodec(fields),
        on_bad_record=on_bad_record,
        dead_letters=letters,
    )
    found = sampled(topology(spout))
    assert (found.error is None) == (error is None), found
    assert error is None or error in found.text
    assert all(each.subject != "sample" for each in preflight(topology(spout), Config.of({}), "local"))


@pytest.mark.slow
@pytest.mark.integration
def test_a_sample_has_records_of_every_topic(topics: Topics, topic: str) -> None:
    other = topics.create(f"{topic}-other")
    topics.send(other, [b'{"id": 1}', b"bad", b'{"id": 2}'])
    streams = {
        "words": TopicStream(JsonCodec(GOOD), topic=topic),
        "others": TopicStream(JsonCodec(Fields(no=int)), topic=other, on_bad_record="skip"),
    }
    spout = OpaqueKafkaTransactionalSpout(streams=streams, bootstrap_servers=topics.bootstrap_servers)
    found = sampled(topology(spout, "words"))
    assert "of which 1 cannot be decoded; none has a value for no of stream 'others'" in found.text


@pytest.mark.slow
@pytest.mark.integration
def test_a_topic_without_a_record_is_no_mistake(topics: Topics, name: str) -> None:
    topics.create(name)
    spout = OpaqueKafkaTransactionalSpout([name], bootstrap_servers=topics.bootstrap_servers, codec=JsonCodec(GOOD))
    found = sampled(topology(spout))
    assert (found.text, found.error) == ("the source has no record yet", None)


@pytest.mark.slow
def test_other_spouts_are_sampled_and_those_that_take_what_they_read_are_not() -> None:
    found = sampled(topology(MemoryTransactionalSpout({0: [["a"], ["b"]]}, Fields(word=str), 1)), 2)
    assert (found.text, found.error) == ("2 records", None)
    builder = TopologyBuilder("core")
    builder.set_spout("kafka", KafkaSpout(["t"], bootstrap_servers="127.0.0.1:1", codec=JsonCodec(GOOD), group="g"))
    builder.set_bolt("bolt", Rich("sampled", ack)).global_grouping("kafka")
    found = sampled(builder.build())
    assert found.error is None
    assert found.text.startswith("not read")
