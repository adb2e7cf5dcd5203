"""The bytes that a step makes of a row where it makes many rows of it.

``explode`` repeats the other columns for each item of a list, so a record of 20 kB with half a list
and half a text would become 50 MB, and one of 1 MB more than the memory. Steps therefore take rows
in parts that become about ``PART_BYTES``, and refuse a row that becomes more than
``ROW_BYTES_MAX``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from framework.call_site import Call
from framework.errors import BadRecordError

#: The bytes that rows become at a time.
PART_BYTES = 16 << 20
#: The most that one row may become.
ROW_BYTES_MAX = 256 << 20
#: So many rows may a function make of one, without that their bytes are counted.
FEW = 16

Sizes = npt.NDArray[np.int64]
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def parts_of(
    call: Call, repeated: pl.DataFrame, frame: pl.DataFrame, copies: npt.NDArray[Any], per: str
) -> Sequence[pl.DataFrame]:
    """The rows of ``frame`` in parts. ``repeated``: the columns that are copied, ``copies`` times
    each row, once ``per`` what the message says. Raises ``BadRecordError`` for a row that becomes
    too large."""
    if not frame.height or repeated.estimated_size() * int(copies.max()) <= PART_BYTES:
        return (frame,)
    table = repeated.to_arrow(compat_level=pl.CompatLevel.oldest())
    sizes: Sizes = sum((_sizes_of(each.combine_chunks()) for each in table.columns), np.zeros(frame.height, np.int64))
    becomes = sizes * copies.astype(np.int64)
    worst = int(becomes.argmax())
    if becomes[worst] > ROW_BYTES_MAX:
        raise BadRecordError(
            f"{call}: {copies[worst]:,} rows would repeat {sizes[worst]:,} bytes of other columns, one per {per}: a row may "
            f"become {ROW_BYTES_MAX:,} bytes"
        )
    part = np.cumsum(becomes) // PART_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), frame.height]
    return [frame.slice(first, end - first) for first, end in pairwise(cuts)]


def check_bytes(call: Call, rows: Iterable[tuple[Any, ...]]) -> None:
    """Raise ``BadRecordError`` for rows, made of one, that become too large. A value that several
    rows share is measured once, and counts for each."""
    known: dict[int, int] = {}
    made = sum(_bytes_in(row, known) for row in rows)
    if made > ROW_BYTES_MAX:
        raise BadRecordError(f"{call}: it made {made:,} bytes of one row, which may become {ROW_BYTES_MAX:,} bytes")


def _bytes_in(values: Iterable[Any], known: dict[int, int]) -> int:
    """``known``: the bytes in lists and mappings, by their identity."""
    found = 0
    for each in values:
        if isinstance(each, (str, bytes)):
            found += len(each)
        elif isinstance(each, (list, tuple, Mapping)):
            size = known.get(id(each))
            if size is None:
                size = known[id(each)] = _bytes_in(each.values() if isinstance(each, Mapping) else each, known)
            found += size
        else:
            found += 8
    return found


def _sizes_of(column: pa.Array) -> Sizes:
    """The bytes of each value of a column."""
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        of_fields: Sizes = sum(map(_sizes_of, column.flatten()), np.zeros(len(column), np.int64))
        return of_fields
    if types.is_list(kind) or types.is_large_list(kind):
        before = np.concatenate([[0], np.cumsum(_sizes_of(column.values))])
        found: Sizes = np.diff(before[column.offsets.to_numpy()])
        return found
    if types.is_fixed_size_list(kind):
        items = _sizes_of(column.values).reshape(-1, kind.list_size).sum(axis=1)
        its: Sizes = items[column.offset : column.offset + len(column)]
        return its
    if types.is_dictionary(kind):
        of_values = pa.array(_sizes_of(column.dictionary))
        return _counted(of_values.take(column.indices))
    if types.is_null(kind):
        return np.zeros(len(column), np.int64)
    if any(is_text(kind) for is_text in _TEXTS):
        return _counted(pc.binary_length(column))
    return np.full(len(column), max(kind.bit_width // 8, 1), np.int64)


def _counted(numbers: pa.Array) -> Sizes:
    found: Sizes = numbers.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
