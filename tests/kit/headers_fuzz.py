"""A fuzzer of the headers of Kafka records.

``python -m tests.kit.headers_fuzz --minutes 60 --seed 1``: records with any headers (doubled, null,
invalid UTF-8, huge, thousands) pass through a topology: the spout shows them as metadata, codecs
decode some, among them the attributes of CloudEvents in binary mode, and ``KafkaSink`` keeps,
removes and adds headers. Each record arrives once: with the expected headers, or as a dead letter.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Sequence
from typing import Any

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from integration import EmbeddedServers
from integration.folder_permissions import open_folder
from sinks import DeadLetterTopic, Headers, KafkaSink
from sinks.kafka.dead_letter_reader import HEADER as PREFIX
from sinks.kafka.record_truncation import _HEADER_BYTES
from spouts import CloudEventsCodec, JsonCodec, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.kafka.consumer.native_range_consumer import why_not_native
from tests.kit.fuzzing import Counts, go_on
from tests.kit.oracle import read_topics
from tests.kit.raw_producer import Header, produce
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

RECORDS = 80
REMOVED = "trace"
_EVENTS = CloudEventsCodec(JsonCodec(Fields(n=int)), mode="binary", attributes=("id", "source", "time"))
_ADDED = {**_EVENTS.headers(type="order"), "trace": "seen", "by": b"\xff"}
#: Names of Ratchet's own headers, as a producer may write them, are among them.
_NAMES = [
    *(b"ce_id", b"ce_source", b"ce_time", b"ce_specversion", b"content-type", b"trace", b"seen", b"CE_ID", b"by"),
    *(
        b"",
        b"a",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xc3",
        "é".encode(),
        b"\x1b]0;x\x07",
        b"a\nb",
        b"ce_id ",
        b"h" * 30_000,
    ),
    *(f"{PREFIX}{each}".encode() for each in ("topic", "partition", "offset", "error", "attempts")),
]
_DATA = [None, b"", b"1", b"\xff", b"\0", "é".encode(), b"\xed\xa0\x80", b"{}", b"\x1b[2J", b"x" * 20_000]
_VALUES = [b'{"n": %d}'] * 8 + [b"no json %d", b'{"n": "%d"}']


def any_headers(chance: random.Random) -> list[Header]:
    """Headers of up to 1 MB together."""
    form = chance.random()
    if form < 0.04:
        return [(chance.choice(_NAMES[:9]), b"x" * chance.choice([500_000, 990_000, 999_800])), (b"ce_id", b"1")]
    if form < 0.08:
        short = [each for each in _NAMES if len(each) < 100]
        return [(chance.choice(short), chance.choice(_DATA[:9]))] * chance.choice([500, 10_000])
    return [
        (
            chance.randbytes(chance.randrange(6)).replace(b"\0", b"") if chance.random() < 0.1 else chance.choice(_NAMES),
            chance.randbytes(chance.randrange(30)) if chance.random() < 0.1 else chance.choice(_DATA),
        )
        for _ in range(chance.choice([0, 1, 2, 3, 7]))
    ]  # fmt: skip


def as_read(headers: Sequence[Header]) -> list[tuple[str, bytes | None]]:
    """Headers as the spout shows them: a name that is not UTF-8 becomes U+FFFD."""
    return [(_text(name) if _text(name) is not None else "\ufffd", data) for name, data in headers]  # type: ignore[misc]


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def expected(value: bytes, headers: Sequence[Header]) -> list[tuple[str, bytes | None]] | None:
    """The headers that the sink writes; None if a codec refuses the record."""
    if _text(value) is None or not value.startswith(b'{"n": ') or b'"n": "' in value:
        return None
    found = as_read(headers)
    last: dict[str, bytes | None] = dict(found)
    fields = {name: last.get(name) for name in (*_EVENTS.header_codecs(), "seen")}
    if any(each is not None and _text(each) is None for each in fields.values()):
        return None
    added: dict[str, bytes | None] = {
        name: fields[content] if isinstance(content, str) else content for name, content in _ADDED.items()
    }
    kept = [each for each in found if each[0] != REMOVED]
    return kept + [each for each in added.items() if each[1] is not None]


def fuzz(servers: str, seed: int) -> Counts:
    """One topology over records with random headers."""
    chance = random.Random(seed)
    topics = Topics(servers)
    source, target, dead = (topics.create(f"headers-{seed}-{each}") for each in ("in", "out", "dead"))
    records = [(chance.choice(_VALUES) % n, any_headers(chance)) for n in range(RECORDS)]
    produce(servers, source, records)
    spout = OpaqueKafkaTransactionalSpout(
        [source],
        bootstrap_servers=servers,
        codec=_EVENTS,
        header_codecs={**_EVENTS.header_codecs(), "seen": TextCodec("seen")},
        metadata=("headers",),
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTopic(dead, bootstrap_servers=servers),
    )
    sink = KafkaSink(
        target,
        value=["n"],
        value_codec=_EVENTS,
        headers=Headers("headers", add=_ADDED, remove=[REMOVED]),
        bootstrap_servers=servers,
        at_least_once=True,
    )
    builder = TransactionalTopologyBuilder(source, "events", spout, at_least_once=True)
    builder.set_bolt("out", sink).global_grouping("events")
    reader = chance.choice(["native", "python"] if why_not_native() is None else ["python"])
    with submit(builder.build(), {"kafka.reader": reader}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    counts = _compare(servers, (target, dead), records, seed)
    counts[f"reader {reader}"] += 1
    for future in topics.admin.delete_topics([source, target, dead]).values():
        future.result(PATIENCE_S)
    return counts


def _compare(servers: str, topics: tuple[str, str], records: Sequence[tuple[bytes, list[Header]]], seed: int) -> Counts:
    counts: Counts = collections.Counter()
    written: dict[int, Any] = {}
    letters: dict[int, Any] = {}

    def take(message: Any) -> None:
        headers = message.headers() or []
        if message.topic() == topics[0]:
            place = json.loads(message.value())["n"]
        else:
            place = int(dict(headers)[f"{PREFIX}offset"])
        into = written if message.topic() == topics[0] else letters
        assert place not in into, (seed, place, "is there twice")
        into[place] = headers

    read_topics(servers, topics, take)
    assert not written.keys() & letters.keys(), (seed, written.keys() & letters.keys())
    assert sorted([*written, *letters]) == list(range(len(records))), seed
    for place, (value, headers) in enumerate(records):
        wanted = expected(value, headers)
        if wanted is None:
            assert place in letters, (seed, place)
            counts["refused by a codec"] += 1
        elif place in written:
            assert written[place] == wanted, (seed, place, headers[:9])
            counts["written"] += 1
        else:
            reason = dict(letters[place])[f"{PREFIX}error"]
            size = sum(len(name.encode()) + len(data or b"") + _HEADER_BYTES for name, data in wanted)
            assert b"is larger than" in reason and size > 900_000, (seed, place, reason)
            counts["too large for the sink"] += 1
    return counts


if __name__ == "__main__":
    with open_folder() as folder, EmbeddedServers(folder) as servers:
        go_on(__doc__, lambda seed: fuzz(servers.bootstrap_servers, seed))
