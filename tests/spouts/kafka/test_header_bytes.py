"""Headers of any bytes, as producers in other languages write them: a record with them is read like
any other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from framework import ArrowBolt, Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import DeadLetterTopic
from spouts import BytesCodec, JsonCodec, OpaqueKafkaTransactionalSpout, TextCodec
from tests.kit.oracle import read_topics
from tests.kit.raw_producer import Header, produce
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("reader", READERS)]

SEEN: dict[str, list[dict[str, Any]]] = {}
NAMES = [b"", b"a", b"h", b"\xff\xfe", b"\xed\xa0\x80", "é".encode(), b"\x1b]0;x\x07", b"a\nb", b"\xc3", b"h" * 30_000]
DATA = [None, b"", b"1", b"\xff", b"\0", b"x" * 50_000]


class See(ArrowBolt):
    """Notes the rows that it gets."""

    def __init__(self, name: str) -> None:
        self.name = name

    def declare_output_fields(self, declarer: Any) -> None:
        pass

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        SEEN.setdefault(self.name, [])

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        SEEN[self.name] += batch.to_pylist()

    def finish_batch(self) -> None:
        pass


def read(topics: Topics, name: str, reader: str, **spout: Any) -> list[dict[str, Any]]:
    """The rows of a topic."""
    source = OpaqueKafkaTransactionalSpout([name], bootstrap_servers=topics.bootstrap_servers, **spout)
    builder = TransactionalTopologyBuilder(name, "records", source)
    builder.set_bolt("see", See(name)).global_grouping("records")
    with submit(builder.build(), {"kafka.reader": reader}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return SEEN.pop(name)


def shown(headers: Sequence[Header]) -> list[dict[str, Any]]:
    """Headers as a row has them."""
    return [{"key": text_of(name), "value": value} for name, value in headers]


def text_of(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "\ufffd"


def any_headers(chance: random.Random) -> list[Header]:
    count = chance.choice([0, 1, 1, 2, 3, 7, 200])
    return [
        (chance.randbytes(chance.randrange(6)).replace(b"\0", b"") if chance.random() < 0.3 else chance.choice(NAMES[:9]),
         chance.choice(DATA[:5]) if count > 3 else chance.choice(DATA))
        for _ in range(count)
    ]  # fmt: skip


def test_any_headers_are_read_as_they_are(topics: Topics, name: str, reader: str) -> None:
    chance = random.Random(7)
    records = [(f"v{number}".encode(), any_headers(chance)) for number in range(600)]
    records += [(b"long", [(NAMES[-1], b"1")]), (b"many", [(b"\xff", b"1")] * 3_000)]
    produce(topics.bootstrap_servers, topics.create(name), records)
    codecs = {"h": BytesCodec("h")}
    rows = read(topics, name, reader, codec=TextCodec("value"), metadata=("headers",), header_codecs=codecs)
    last = [[data for key, data in headers if key == b"h"][-1:] for _, headers in records]
    assert [(row["value"], row["headers"], row["h"]) for row in rows] == [
        (value.decode(), shown(headers), (found or [None])[0])
        for (value, headers), found in zip(records, last, strict=True)
    ]


def test_a_bad_record_with_such_a_header_becomes_a_dead_letter(topics: Topics, name: str, reader: str) -> None:
    dead = topics.create(f"{name}-dead")
    records = [(b'{"n": 1}', []), (b"no json", [(b"\xff", b"1"), (b"a", None)]), (b'{"n": 2}', [(b"\xff", b"2")])]
    produce(topics.bootstrap_servers, topics.create(name), records)
    letters = DeadLetterTopic(dead, bootstrap_servers=topics.bootstrap_servers)
    rows = read(
        topics, name, reader, codec=JsonCodec(Fields(n=int)), on_bad_record="dead_letter", dead_letters=letters
    )  # fmt: skip
    assert [row["n"] for row in rows] == [1, 2]
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [dead], found.append)
    assert [(each.value(), each.headers()[:2]) for each in found] == [(b"no json", [("\ufffd", b"1"), ("a", None)])]
