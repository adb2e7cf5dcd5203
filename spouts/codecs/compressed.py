"""Values that their producer has compressed, each by itself, around another codec.

What a client of Kafka compresses (``compression.type``) is something else: it is decompressed
before a codec sees it.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import pyarrow as pa

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import Codec, PerValueCodec, TooLargeTogetherError, Truths, Values, joined
from spouts.codecs.encoding_codec import WrappingCodec, encoder

Compression = Literal["gzip", "zstd", "lz4", "snappy", "bz2"]
#: A value that becomes larger is a bad record: compressed, it may be a few bytes.
VALUE_BYTES_MAX = 64 << 20
#: Values that together become larger are decoded in parts.
TOGETHER_BYTES_MAX = 64 << 20
#: Values are decoded after so many bytes, so that not all of them are there twice.
_CHUNK_BYTES = 16 << 20
#: What snappy-java's stream begins with; blocks with their lengths follow.
_SNAPPY_JAVA, _SNAPPY_JAVA_HEADER = b"\x82SNAPPY\x00", 16
_LENGTH_BYTES = 4
_VARINT_BYTES_MAX = 5


class CompressedCodec(PerValueCodec, WrappingCodec):
    """Values that are compressed one by one; ``codec`` decodes their content.

    ``compression``: "gzip", "zstd", "lz4" (frames), "snappy" (raw, or of snappy-java's stream) or
    "bz2". ``bytes_max``: a value that becomes larger is a bad record, and is not decompressed
    further. A value that is cut off, damaged, or of another compression is bad, too. Values that
    together become larger than 64 MiB raise ``TooLargeTogetherError``: the spouts then decode them
    in parts.

    >>> from spouts import TextCodec
    >>> codec = CompressedCodec(TextCodec("word"), "gzip")
    >>> codec.decode([codec.compressed(b"dog"), None]).to_pylist()
    [{'word': 'dog'}, {'word': None}]
    """

    def __init__(self, codec: Codec, compression: Compression, *, bytes_max: int = VALUE_BYTES_MAX) -> None:
        if not isinstance(codec, Codec):
            raise TopologyError(f"CompressedCodec: {codec!r} is no codec: give the one for what is inside")
        if compression not in get_args(Compression):
            known = ", ".join(map(repr, get_args(Compression)))
            raise TopologyError(f"CompressedCodec: compression must be one of {known}, not {compression!r}")
        if not isinstance(bytes_max, int) or bytes_max < 1:
            raise TopologyError(f"CompressedCodec: bytes_max must be 1 at least, not {bytes_max!r}")
        self._codec, self._compression, self._bytes_max = codec, compression, bytes_max
        self.fields = codec.fields

    def left_out(self, values: Values | pa.BinaryArray) -> Truths | None:
        if type(self._codec).left_out is Codec.left_out:
            return None
        given = values.to_pylist() if isinstance(values, pa.Array) else values
        left_out = np.zeros(len(given), np.bool_)
        for places, opened in self._chunks(given, []):
            found = self._codec.left_out(opened)
            if found is not None:
                left_out[places] = found
        return left_out if left_out.any() else None

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        bad: list[BadRecord] = []
        batches: list[pa.RecordBatch] = []
        size = 0
        for places, opened in self._chunks(values, bad):
            size += sum(len(each or b"") for each in opened)
            if batches and size > TOGETHER_BYTES_MAX:
                raise TooLargeTogetherError(places[0])
            batch, undecodable = self._codec.decode_good(opened)
            batches.append(batch)
            bad += [BadRecord(places[each.index], each.reason) for each in undecodable]
        if not batches:
            batches.append(self._codec.decode_good([])[0])
        return joined(batches), sorted(bad, key=lambda each: each.index)

    def check_encodable(self, fields: Fields) -> None:
        """Raises ``TopologyError`` for fields that the codec inside cannot encode."""
        encoder(self._codec).check_encodable(fields)

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One value for each row. Raises ``BadRecordError`` for a row that cannot be encoded."""
        values = encoder(self._codec).encode(batch).to_pylist()
        return pa.array([None if each is None else self.compressed(each) for each in values], pa.large_binary())

    def compressed(self, value: bytes) -> bytes:
        """The value as this codec reads it. The same bytes for the same value."""
        if self._compression == "gzip":
            return gzip.compress(value, mtime=0)
        if self._compression == "bz2":
            import bz2

            return bz2.compress(value)
        return bytes(pa.Codec(self._compression).compress(value, asbytes=True))

    def _chunks(self, values: Values, bad: list[BadRecord]) -> Iterator[tuple[list[int], list[bytes | None]]]:
        """Values that are decompressed, each with its place, some at a time. Adds to ``bad``."""
        places: list[int] = []
        opened: list[bytes | None] = []
        size = 0
        for place, value in enumerate(values):
            try:
                found = None if value is None else self._opened(value)
            except (ValueError, OSError) as error:
                bad.append(BadRecord(place, f"not {self._compression}, or damaged: {error}"))
                continue
            except _TooLargeError:
                bad.append(BadRecord(place, f"a value of more than {self._bytes_max:,} bytes, decompressed"))
                continue
            places.append(place)
            opened.append(found)
            size += len(found or b"")
            if size > _CHUNK_BYTES:
                yield places, opened
                places, opened, size = [], [], 0
        if places:
            yield places, opened

    def _opened(self, value: bytes) -> bytes:
        if self._compression == "snappy":
            if value.startswith(_SNAPPY_JAVA):
                return self._snappy_blocks(value)
            return self._snappy(value, self._bytes_max)
        if not value:
            raise ValueError("no bytes")
        with pa.CompressedInputStream(pa.BufferReader(value), self._compression) as stream:
            found = bytes(stream.read(self._bytes_max))
            if stream.read(1):
                raise _TooLargeError
        return found

    def _snappy(self, value: bytes, bytes_max: int) -> bytes:
        size, shift = 0, 0
        for at in range(_VARINT_BYTES_MAX):
            if at >= len(value):
                raise ValueError("the value ends early")
            size |= (value[at] & 0x7F) << shift
            shift += 7
            if not value[at] & 0x80:
                break
        else:
            raise ValueError("its size is no number of 32 bits")
        if size > bytes_max:
            raise _TooLargeError
        return bytes(pa.Codec("snappy").decompress(value, size, asbytes=True))

    def _snappy_blocks(self, value: bytes) -> bytes:
        found = bytearray()
        at = _SNAPPY_JAVA_HEADER
        while at < len(value):
            size = int.from_bytes(value[at : at + _LENGTH_BYTES], "big")
            block = value[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size]
            if len(block) < size or at + _LENGTH_BYTES > len(value):
                raise ValueError("the value ends early")
            found += self._snappy(block, self._bytes_max - len(found))
            at += _LENGTH_BYTES + size
        return bytes(found)


class _TooLargeError(Exception):
    """A value is larger than the bound."""
