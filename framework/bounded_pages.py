"""Pages of items that are too many, or too large, for one step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TypeVar

import pyarrow as pa

#: Keys or rows in one page.
PAGE_KEYS = 5_000
T = TypeVar("T")


def pages_of(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of up to ``size`` items, in their order."""
    iterator = iter(items)
    while page := list(itertools.islice(iterator, size)):
        yield page


def pages_by_bytes(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[list[pa.RecordBatch]]:
    """Lists of record batches, in their order. A list has at most ``bytes_max``, or a single
    batch."""
    for page, _ in pages_within(batches, sys.maxsize, bytes_max, attrgetter("nbytes")):
        yield page


def slices_of(rows: pa.Table, bytes_max: int) -> Iterator[pa.Table]:
    """Slices of equal numbers of rows, in their order, of about ``bytes_max``, or of one row."""
    count = rows.num_rows * bytes_max // max(rows.nbytes, bytes_max) or 1
    for first in range(0, rows.num_rows, count):
        yield rows.slice(first, count)


def rows_that_fit(rows: int, size: int, bytes_max: int, most: int) -> int:
    """How many rows have about ``bytes_max``, from 1 to ``most``, if they are as large as these
    rows, which have ``size``.

    >>> rows_that_fit(16, 1_600, 5_000, 64), rows_that_fit(16, 1_600, 50, 64)
    (50, 1)
    """
    return max(min(rows * bytes_max // max(size, 1), most), 1)


def pages_within(
    items: Iterable[T], most: int, size_max: int, size_of: Callable[[T], int]
) -> Iterator[tuple[list[T], int]]:
    """Lists of up to ``most`` items, in their order, and the size of each list: at most
    ``size_max``, unless the list has a single item."""
    page: list[T] = []
    size = 0
    for item in items:
        its = size_of(item)
        if page and (len(page) == most or size + its > size_max):
            yield page, size
            page, size = [], 0
        page.append(item)
        size += its
    if page:
        yield page, size
