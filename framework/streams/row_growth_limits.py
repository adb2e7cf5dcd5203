"""Bounds for the bytes of a step that makes many rows of one row.

``explode`` repeats the other columns for each item of a list. So a record of 20 kB that is half a
list and half a text would become 50 MB, and a record of 1 MB more than the memory. Steps therefore
make rows in parts of about ``PART_BYTES``, and refuse a row that becomes more than
``ROW_BYTES_MAX``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
#: The number of rows of a frame, each made of one row by a function. Bytes are measured per frame,
#: because measuring values in Python takes as long as the function.
ROWS_AT_A_TIME = 256
#: The number of rows made of one row that are assumed to be as large as the first.
FEW = 16

Sizes = npt.NDArray[np.int64]
#: The bytes of lists and mappings, with references to them, so that no other value gets their
#: identity.
Known = dict[int, tuple[int, Any]]
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def parts_of(
    call: Call, repeated: pl.DataFrame, frame: pl.DataFrame, copies: npt.NDArray[Any], per: str
) -> Sequence[pl.DataFrame]:
    """The rows of ``frame`` in parts that become about ``PART_BYTES``, or have one row.
    ``repeated``: the columns that are copied ``copies`` times for each row. ``per``: the reason for
    one copy, for the message. Raises ``BadRecordError`` for a row that becomes too large."""
    if not frame.height or repeated.estimated_size() * int(copies.max()) <= PART_BYTES:
        return (frame,)
    sizes = sizes_of_rows(repeated)
    return divided(
        call,
        frame,
        sizes.astype(np.float64) * copies,
        lambda worst: f"{copies[worst]:,} rows would repeat {sizes[worst]:,} bytes of other columns, one per {per}",
    )


def divided(
    call: Call, frame: pl.DataFrame, becomes: npt.NDArray[np.float64], why: Callable[[int], str]
) -> Sequence[pl.DataFrame]:
    """The rows in parts of about ``PART_BYTES``, or of one row. ``becomes``: the bytes of each row.
    ``why``: the end of the message about the largest. Raises ``BadRecordError`` for a row that
    becomes too large."""
    worst = int(becomes.argmax())
    if becomes[worst] > ROW_BYTES_MAX:
        raise BadRecordError(f"{call}: {why(worst)}: a row may become {ROW_BYTES_MAX:,} bytes")
    part, large = np.cumsum(becomes.clip(0)) // PART_BYTES, becomes > PART_BYTES
    cuts = [0, *(np.flatnonzero((np.diff(part) > 0) | large[:-1] | large[1:]) + 1).tolist(), frame.height]
    return [frame.slice(first, end - first) for first, end in pairwise(cuts)]


def gathered(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The rows of small frames in frames of about ``PART_BYTES``."""
    held: list[pl.DataFrame] = []
    size = 0.0
    for each in frames:
        held.append(each)
        size += each.estimated_size()
        if size >= PART_BYTES:
            yield pl.concat(held)
            held, size = [], 0
    if held:
        yield pl.concat(held)


def copies_at_a_time(repeated: pl.DataFrame) -> int:
    """How many copies of one row a part may have."""
    return max(1, PART_BYTES // max(1, int(repeated.estimated_size())))


class Growth:
    """The bytes of the rows that a function makes of one row."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._bytes = 0
        self._known: Known = {}

    def by(self, row: Iterable[Any]) -> int:
        """The bytes of one more row. Raises ``BadRecordError`` if all rows together are too
        large."""
        found = bytes_in(row, self._known)
        self._bytes += found
        if self._bytes > ROW_BYTES_MAX:
            raise BadRecordError(
                f"{self._call}: it made more than {ROW_BYTES_MAX:,} bytes of one row, which is the most that a row may become"
            )
        return found


def bytes_in(values: Iterable[Any], known: Known) -> int:
    """The bytes of values. A list or mapping that several values share is measured once, and counts
    for each: ``known`` has its bytes. Raises ``BadRecordError`` for values that contain each other
    without end."""
    found = 0
    for each in values:
        if isinstance(each, (str, bytes)):
            found += len(each)
        elif isinstance(each, (list, tuple, Mapping)):
            inner = known.get(id(each))
            if inner is None:
                items = each.values() if isinstance(each, Mapping) else each
                try:
                    inner = known[id(each)] = (bytes_in(items, known), each)
                except RecursionError:
                    raise BadRecordError("what a function returned has lists or mappings at too many levels") from None
            found += inner[0]
        else:
            found += 8
    return found


def sizes_of_rows(frame: pl.DataFrame) -> Sizes:
    """The bytes of each row."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    found: Sizes = sum((sizes_of(each.combine_chunks()) for each in table.columns), np.zeros(frame.height, np.int64))
    return found


def sizes_of(column: pa.Array) -> Sizes:
    """The bytes of each value of a column."""
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        of_fields: Sizes = sum(map(sizes_of, column.flatten()), np.zeros(len(column), np.int64))
        return of_fields
    if types.is_list(kind) or types.is_large_list(kind):
        before = np.concatenate([[0], np.cumsum(sizes_of(column.values))])
        found: Sizes = np.diff(before[column.offsets.to_numpy()])
        return found
    if types.is_fixed_size_list(kind):
        items = sizes_of(column.values).reshape(-1, kind.list_size).sum(axis=1)
        its: Sizes = items[column.offset : column.offset + len(column)]
        return its
    if types.is_dictionary(kind):
        of_values = pa.array(sizes_of(column.dictionary))
        return _counted(of_values.take(column.indices))
    if types.is_null(kind):
        return np.zeros(len(column), np.int64)
    if any(is_text(kind) for is_text in _TEXTS):
        return _counted(pc.binary_length(column))
    return np.full(len(column), max(kind.bit_width // 8, 1), np.int64)


def _counted(numbers: pa.Array) -> Sizes:
    found: Sizes = numbers.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
