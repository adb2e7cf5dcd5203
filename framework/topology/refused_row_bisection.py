"""Finds refused rows by halving, and continues with the other rows (ADR 126)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pyarrow as pa

from framework.errors import BadRecordError, BatchTooLargeError

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table, list[Any])
T = TypeVar("T")
#: Called with the reason why a row is left out.
OnRefused = Callable[[BadRecordError], None]


class RefusedTogether(BadRecordError):
    """Rows of one transaction are refused together, whatever the store contains: the store may
    accept them one after the other."""


def halves(rows: Rows) -> tuple[Rows, Rows] | None:
    """Both halves of rows, in order; None for a single row."""
    half = len(rows) // 2
    return (rows[:half], rows[half:]) if half else None


def accepted(
    rows: Rows,
    take: Callable[[Rows], T],
    on_refused: OnRefused | None,
    divide: Callable[[Rows], tuple[Rows, Rows] | None] = halves,
) -> Iterator[T]:
    """Give rows to ``take``, and yield its results for the rows that it does not refuse by a
    ``BadRecordError``, part by part, in order. ``take``: keeps no row of a part that it refuses.
    ``on_refused``: None if nothing may be left out; then the error is raised. ``divide``: makes two
    parts of one; None for a part that must be refused as a whole."""
    parts = [rows]
    while parts:
        part = parts.pop()
        try:
            taken = take(part)
        except BatchTooLargeError:
            raise
        except BadRecordError as error:
            if on_refused is None:
                raise
            smaller = divide(part)
            if smaller is None:
                on_refused(error)
            else:
                parts += reversed(smaller)
        else:
            yield taken
