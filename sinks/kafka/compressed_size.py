"""How large a record is that a client compresses.

librdkafka compresses the records of a batch together, and a record that is large is a batch of its
own. Its own code cannot be asked, so other implementations are: those of gzip, lz4 and zstd differ
from it by less than a thousandth. That of snappy may say a third more, or a fortieth less.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

#: What is added to an estimate, as a share and in bytes, so that it is no less than the truth.
MARGIN, MARGIN_BYTES = 0.02, 200
_SNAPPY_MARGIN = 0.05
#: librdkafka compresses with lz4 in blocks of so many bytes, each with its length.
_LZ4_BLOCK, _LZ4_ADDS = 64 << 10, 4
_GZIP = 31  # for zlib: with gzip's header
_ZSTD_LEVEL = 3


def codec_of(settings: Mapping[str, Any]) -> str | None:
    """What a producer of these settings compresses with; None if it does not."""
    names = (settings.get(each) for each in ("compression.type", "compression.codec"))
    return next((str(each) for each in names if each not in (None, "none")), None)


def compressed_bytes_max(codec: str, level: int, parts: bytes) -> int:
    """No less than the bytes that ``parts`` become. ``level``: as in the settings; -1 for the
    codec's own.

    >>> compressed_bytes_max("zstd", -1, bytes(100_000)) < 1_000
    True
    """
    if codec == "gzip":
        stream = zlib.compressobj(level if 0 <= level <= 9 else -1, zlib.DEFLATED, _GZIP)
        size = len(stream.compress(parts) + stream.flush())
    elif codec == "lz4":
        raw = pa.Codec("lz4_raw")
        blocks = (parts[at : at + _LZ4_BLOCK] for at in range(0, len(parts), _LZ4_BLOCK))
        size = sum(_LZ4_ADDS + min(len(each), len(raw.compress(each))) for each in blocks)
    elif codec == "zstd":
        size = len(pa.Codec("zstd", compression_level=level if level > 0 else _ZSTD_LEVEL).compress(parts))
    elif codec == "snappy":
        size = len(pa.Codec("snappy").compress(parts))
    else:
        size = len(parts)
    margin = _SNAPPY_MARGIN if codec == "snappy" else MARGIN
    return int(min(size, len(parts)) * (1 + margin)) + MARGIN_BYTES
