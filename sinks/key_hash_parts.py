"""Divides rows by their keys, so that the rows of a large transaction are grouped and written part
by part (ADR 124), and to search for refused rows (ADR 126)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from framework.arrow_spill import Payload, RowBuffer, Spill, decode_batch
from framework.topology.groupings import split_by_target
from framework.topology.hashing import hash_rows

#: About the bytes of a part.
PART_BYTES = 16 << 20


def halves_by_key(rows: pa.Table, key: Sequence[str]) -> tuple[pa.Table, pa.Table] | None:
    """The rows of one half of the keys, and of the other; None for a single key."""
    hashes = hash_rows([rows.column(name).combine_chunks() for name in key])
    different = np.unique(hashes)
    if len(different) < 2:
        return None
    is_first = hashes < different[len(different) // 2]
    return rows.filter(pa.array(is_first)), rows.filter(pa.array(~is_first))


class KeyParts:
    """Parts of rows: a key is in one part, whose rows keep their order. Can be read several
    times."""

    def __init__(self, rows: RowBuffer, key: Sequence[str]) -> None:
        count = rows.nbytes // PART_BYTES + 1
        spill = Spill(rows.what)
        self._parts: list[list[Payload]] = [[] for _ in range(count)]
        for batch in rows:
            # Other bits than those by which the rows were divided among tasks.
            hashes = hash_rows([batch.column(name) for name in key]) >> np.uint64(32)
            for part, its in split_by_target(batch, (hashes % np.uint64(count)).astype(np.int64), count):
                self._parts[part].append(spill.keep(its))

    def __iter__(self) -> Iterator[list[pa.RecordBatch]]:
        return (list(map(decode_batch, part)) for part in self._parts if part)
