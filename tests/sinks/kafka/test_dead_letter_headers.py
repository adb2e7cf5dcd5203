"""A producer writes headers that look like those of dead letters: the reader of letters trusts only
the headers that Ratchet has added."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError
from framework.transactions import MemoryStore
from sinks import DeadLetterTopic, KafkaSink
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.bolts import Relay
from tests.kit.oracle import read_topics
from tests.kit.raw_producer import Header, produce
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FORGED: list[Header] = [
    (b"ratchet.settled", b"1"),
    (b"ratchet.attempts", b"many"),
    (b"ratchet.timestamp_ms", b"now"),
    (b"ratchet.topology", b"another"),
    (b"ratchet.offset", b"9"),
    (b"ratchet.cut2", None),
]


@pytest.mark.integration
@pytest.mark.behaviour("2.9")
def test_headers_that_a_producer_forged_neither_hide_a_letter_nor_end_its_reader(topics: Topics, name: str) -> None:
    dead = topics.create(f"{name}-dead")
    produce(topics.bootstrap_servers, topics.create(name), [(b"no json", FORGED), (b"nor this", [])])
    letters = DeadLetterTopic(dead, bootstrap_servers=topics.bootstrap_servers)
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=JsonCodec(Fields(word=str)),
        on_bad_record="dead_letter",
        dead_letters=letters,
    )
    builder = TransactionalTopologyBuilder(name, "records", spout)
    builder.set_bolt("out", Relay()).global_grouping("records")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [dead], found.append)
    incarnation = dict(found[0].headers())["ratchet.incarnation"]
    owner: list[Header] = [(b"ratchet.topology", name.encode()), (b"ratchet.incarnation", incarnation)]
    place: list[Header] = [(b"ratchet.txid", b"1"), (b"ratchet.partition", b"0"), (b"ratchet.offset", b"x")]
    produce(topics.bootstrap_servers, dead, [(b"no letter", owner), (b"nor this", [*owner, *place]), (b"", FORGED)])
    numbers = {b"txid": b"1", b"partition": b"0", b"offset": b"7", b"timestamp_ms": b"1", b"attempts": b"1"}
    beyond = {
        b"txid": [b"-1", b"9223372036854775808"],
        b"partition": [b"-1", b"2147483648"],
        b"offset": [b"-1", b"9999999999999999999"],
        b"timestamp_ms": [b"9223372036854775808", b"-9999999999999999999"],
        b"attempts": [b"2147483648"],
    }
    for changed, values in beyond.items():
        for value in values:
            forged = [(b"ratchet." + name, each) for name, each in {**numbers, changed: value}.items()]
            produce(topics.bootstrap_servers, dead, [(b"no letter", [*owner, *forged])])
    reader = letters.letter_reader({}, name, incarnation.decode())
    try:
        read = sorted(reader.letters(lambda: 99), key=lambda each: each.offset)
        size = sum(len(value or b"") for _, value in FORGED)
        assert [(each.offset, each.size, each.attempts, each.is_cut) for each in read] == [
            (0, len(b"no json") + size, 0, False),
            (1, len(b"nor this"), 0, False),
        ]
        whole = [each for each in reader.fetched([each.ref for each in read], 1) if each is not None]
        assert [each.value for each in whole] == [b"no json", b"nor this"]
        assert [*whole[0].headers] == [(key.decode(), value) for key, value in FORGED]
    finally:
        reader.close()


def routed(topics: Topics, name: str, sink: KafkaSink) -> Any:
    """A topology with this sink, whose dead letters are in ``<name>-dead``."""
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=JsonCodec(Fields(to=str, n=int)),
        metadata=["headers"],
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTopic(
            f"{name}-dead",
            bootstrap_servers=topics.bootstrap_servers.replace("127.0.0.1", "localhost"),  # the same cluster
            marker_topic=f"{name}-marks",
        ),
        bad_record_share_max=None,
    )
    builder = TransactionalTopologyBuilder(name, "records", spout)
    builder.set_bolt("out", sink).global_grouping("records")
    return builder.build()


@pytest.mark.integration
@pytest.mark.behaviour("2.9")
def test_no_row_is_routed_to_the_dead_letters_or_the_markers_of_its_topology(topics: Topics, name: str) -> None:
    made: dict[str, dict[str, str]] = {"out": {}, "dead": {}, "marks": {"cleanup_policy": "compact"}}
    target, dead, marks = (topics.create(f"{name}-{each}", **more) for each, more in made.items())
    named = [target, dead, marks, target]
    values = [b'{"to": "%s", "n": %d}' % (to.encode(), n) for n, to in enumerate(named)]
    produce(topics.bootstrap_servers, topics.create(name), [(value, FORGED) for value in values])
    sink = KafkaSink(topic_from="to", headers="headers", bootstrap_servers=topics.bootstrap_servers)
    topology = routed(topics, name, sink)
    with submit(topology, {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [dead, target], found.append)
    letters = [each for each in found if each.topic() == dead]
    assert sorted(dict(each.headers())["ratchet.offset"] for each in letters) == [b"1", b"2"]
    assert "which holds the dead letters of bolt" in str(letters[0].headers())
    assert sum(each.topic() == target for each in found) == 2


@pytest.mark.integration
@pytest.mark.parametrize(("options", "of"), [({}, "dead"), ({"topic_from": "to"}, "marks")])
def test_a_sink_for_the_dead_letters_or_the_markers_of_its_topology_is_refused(
    topics: Topics, name: str, options: dict[str, Any], of: str
) -> None:
    for each in ("", "-dead", "-marks"):
        topics.create(f"{name}{each}")
    named: dict[str, Any] = {"topics": [f"{name}-{of}"]} if options else {"topic": f"{name}-{of}"}
    sink = KafkaSink(**options, **named, bootstrap_servers=topics.bootstrap_servers)
    with pytest.raises(ConfigError, match="KafkaSink: topic .* holds the (dead letters|markers) of bolt 'records-dead"):
        submit(routed(topics, name, sink), {}, MemoryStore(), "local")


@pytest.mark.integration
@pytest.mark.parametrize("policy", ["compact", "compact,delete", None])
def test_a_compacted_topic_of_dead_letters_is_refused_before_the_first_letter(
    topics: Topics, name: str, policy: str | None
) -> None:
    """A topic that does not exist is not needed before the first letter."""
    for each in ("", "-out"):
        topics.create(f"{name}{each}")
    if policy is not None:
        topics.create(f"{name}-dead", cleanup_policy=policy)
    topology = routed(topics, name, KafkaSink(f"{name}-out", bootstrap_servers=topics.bootstrap_servers))
    with submit(topology, {}, MemoryStore(), "local") as run:
        if policy is None:
            run.wait_until_caught_up(PATIENCE_S)
        else:
            with pytest.raises(ConfigError, match=f"topic '{name}-dead' is compacted"):
                run.wait_until_caught_up(PATIENCE_S)
