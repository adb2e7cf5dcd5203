"""Messages in the formats 0 and 1, which a Kafka of today still has in old logs, are read by both
readers as records of format 2 are."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from framework.clients.kafka_settings import KafkaSettings
from framework.transactions import MemoryStore
from integration import EmbeddedServers
from spouts.kafka.consumer.native_range_consumer import NativeSession
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.record_deserialization import EVERYTHING
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.readers import READERS
from tests.kit.topics import Topics

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOPIC = "old"
#: A time of 2014, in milliseconds.
AT_MS = 1_400_000_000_000
COMPRESSIONS = {"gzip": 1, "snappy": 2, "lz4": 3}


class Old(NamedTuple):
    """A message of an old log. Format 0 has no times: those are read as null."""

    offset: int
    key: bytes | None
    value: bytes | None
    time_ms: int | None


def message(magic: int, offset: int, old: Old, attributes: int = 0) -> bytes:
    body = struct.pack(">bb", magic, attributes) + (struct.pack(">q", old.time_ms) if magic else b"")
    for part in (old.key, old.value):
        body += struct.pack(">i", -1 if part is None else len(part)) + (part or b"")
    body = struct.pack(">I", zlib.crc32(body)) + body
    return struct.pack(">qi", offset, len(body)) + body


def messages(magic: int, olds: Sequence[Old], compression: str | None = None) -> bytes:
    """Messages as they stand in a log. Inside of a compressed one, format 1 counts offsets from
    the first."""
    if compression is None:
        return b"".join(message(magic, each.offset, each) for each in olds)
    inside = b"".join(message(magic, each.offset - (olds[0].offset if magic else 0), each) for each in olds)
    packed = gzip.compress(inside) if compression == "gzip" else compressed(inside, compression)
    around = Old(olds[-1].offset, None, packed, olds[-1].time_ms)
    return message(magic, around.offset, around, COMPRESSIONS[compression])


def compressed(data: bytes, compression: str) -> bytes:
    return bytes(pa.compress(data, "lz4" if compression == "lz4" else compression, asbytes=True))


def log() -> tuple[bytes, list[Old]]:
    """A log of all formats, with gaps as compaction leaves them, and its messages."""
    parts, held, offset = [], [], 0
    for magic, compression in [(0, None), (0, "gzip"), (0, "snappy"), *((1, each) for each in (None, *COMPRESSIONS))]:
        time_ms = AT_MS + offset if magic else None
        olds = [
            Old(offset, b"k", b"%d %d" % (magic, offset), time_ms),
            Old(offset + 1, None, b"", time_ms),
            Old(offset + 2, b"", b"v" * 5_000, time_ms),
            Old(offset + 3, b"gone", b"", time_ms),
        ]
        parts.append(messages(magic, olds, compression))
        held += olds
        offset += 7
    return b"".join(parts), held


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    """A topic with an old log, and one record of today after it."""
    with EmbeddedServers(tmp_path_factory.mktemp("formats")) as servers:
        topics = Topics(servers.bootstrap_servers)
        topics.create(TOPIC, retention_ms="-1")
        kafka = servers.kafka
        kafka.stop()
        (path,) = (kafka.folder / "data").glob(f"{TOPIC}-0/*.log")
        path.write_bytes(log()[0])
        for each in path.parent.glob("*index"):
            each.unlink()
        kafka.start()
        topics.send(TOPIC, [b"new"])
        yield topics


@pytest.mark.parametrize("reader", READERS)
def test_old_messages_are_read_as_they_were_written(old: Topics, reader: str) -> None:
    held = log()[1]
    kind: Any = NativeSession if reader == "native" else KafkaSession
    session = kind(KafkaSettings(old.bootstrap_servers, None), "formats")
    end = held[-1].offset + 1
    try:
        for first, last in [(0, end), (2, 10), (8, 9), (4, 7), (end - 1, end)]:
            found = []
            for chunk in session.read({(TOPIC, 0): Range(first, last)}, EVERYTHING):
                columns = [chunk.metadata(each).to_pylist() for each in ("offset", "key", "value", "timestamp_ms")]
                found += map(Old, *columns)
            assert found == [each for each in held if first <= each.offset < last]
    finally:
        session.close()


@pytest.mark.parametrize("opaque", [True, False], ids=["opaque", "idempotent"])
def test_a_topology_reads_an_old_log_and_starts_by_its_times(old: Topics, tmp_path: Path, opaque: bool) -> None:
    runs = KafkaRuns(old, tmp_path, TOPIC, opaque=opaque, batch_records_max=5)
    runs.catch_up()
    held = log()[1]
    assert runs.counts() == {**Counter((each.value or b"").decode() for each in held), "new": 1}
    later = KafkaRuns(old, tmp_path / "later", TOPIC, opaque=opaque)
    later.path.parent.mkdir()
    later.store = MemoryStore()
    later.catch_up(start=AT_MS + 35)
    assert later.counts() == {"1 35": 1, "1 42": 1, "": 4, "v" * 5_000: 2, "new": 1}
