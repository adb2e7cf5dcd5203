"""Record batches that no client library makes, and requests that produce them."""

from __future__ import annotations

import gzip
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
_PRODUCE, _VERSION = 0, 7


def _crc_table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        yield value


_TABLE = tuple(_crc_table())


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _varint(number: int) -> bytes:
    number = ((number << 1) ^ (number >> 63)) & ((1 << 64) - 1)
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def record(value: bytes, delta: int) -> bytes:
    """A record whose offset is ``delta`` above that of its batch, without key and headers."""
    body = b"\0" + _varint(0) + _varint(delta) + _varint(-1) + _varint(len(value)) + value + b"\0"
    return _varint(len(body)) + body


def batch(records: bytes, count: int, codec: int = NONE, attributes: int = 0) -> bytes:
    """A batch of ``count`` records. ``records``: compressed by ``codec``."""
    at_ms = 1_700_000_000_000
    tail = struct.pack(">hiqqqhii", attributes | codec, count - 1, at_ms, at_ms, -1, -1, -1, count) + records
    inner = struct.pack(">ibI", 0, 2, _crc32c(tail)) + tail
    return struct.pack(">qi", 0, len(inner)) + inner


def forged(deltas: Sequence[int]) -> bytes:
    """An uncompressed batch whose records name these offsets, relative to its first."""
    return batch(b"".join(record(b"forged-%d" % number, delta) for number, delta in enumerate(deltas)), len(deltas))


def odd_streams() -> dict[str, bytes]:
    """Batches of four records each, compressed as no client does: in several streams, or with other
    bytes after the stream. A broker takes each of them."""
    records = [record(b"odd-%d" % number, number) for number in range(4)]
    first, second = b"".join(records[:2]), b"".join(records[2:])
    both, skipped = first + second, b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + bytes(8)
    made = {
        "gzip-two": (GZIP, gzip.compress(first) + gzip.compress(second)),
        "gzip-trailed": (GZIP, gzip.compress(both) + b"trailing"),
        "snappy-two": (SNAPPY, _snappy(first) + _snappy(second)),
        "lz4-trailed": (LZ4, _compressed("lz4", both) + b"trailing"),
        "lz4-skipped": (LZ4, _compressed("lz4", both) + skipped),
        "zstd-two": (ZSTD, _compressed("zstd", first) + _compressed("zstd", second)),
        "zstd-empty": (ZSTD, _compressed("zstd", b"") + _compressed("zstd", both)),
        "zstd-skipped": (ZSTD, skipped + _compressed("zstd", both) + skipped),
        "zstd-unsized": (ZSTD, _streamed(both)),
    }
    return {name: batch(stream, 4, codec) for name, (codec, stream) in made.items()}


def produce(bootstrap_servers: str, topic: str, data: bytes) -> int:
    """Produce a batch into partition 0. Returns the broker's error code: 0 if it took the batch."""
    host, port = bootstrap_servers.split(",")[0].rsplit(":", 1)
    named = struct.pack(">h", len(topic)) + topic.encode()
    begin = struct.pack(">hhihhhiii", _PRODUCE, _VERSION, 1, -1, -1, -1, 60_000, 1, 0)[:-4]
    request = begin + named + struct.pack(">iii", 1, 0, len(data)) + data
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        answer = connection.recv(size, socket.MSG_WAITALL)
    error: int = struct.unpack_from(">h", answer, 4 + 4 + len(named) + 4 + 4)[0]
    return error


def _compressed(codec: str, data: bytes) -> bytes:
    made: Any = pa.Codec(codec).compress(data, asbytes=True)
    return bytes(made)


def _snappy(data: bytes) -> bytes:
    """A stream of snappy-java."""
    block = _compressed("snappy", data)
    return b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, len(block)) + block


def _streamed(data: bytes) -> bytes:
    """A frame of zstd that does not say its size."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue().to_pybytes())
