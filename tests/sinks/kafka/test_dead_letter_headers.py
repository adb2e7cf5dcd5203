"""A producer writes headers that look like those of dead letters: the reader of letters trusts only
the headers that Ratchet has added."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import DeadLetterTopic
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
    reader = letters.letter_reader({}, name, incarnation.decode())
    try:
        read = sorted(reader.letters(lambda: 99), key=lambda each: each.offset)
        assert [(each.offset, each.value, each.attempts, each.is_cut) for each in read] == [
            (0, b"no json", 0, False),
            (1, b"nor this", 0, False),
        ]
        assert [*read[0].headers] == [(key.decode(), value) for key, value in FORGED]
        assert [each and each.value for each in reader.fetched([each.ref for each in read], 1)] == [
            b"no json",
            b"nor this",
        ]
    finally:
        reader.close()
