"""Tombstones of topics, carried through stateless steps to the tables whose rows they delete.

A tombstone has the columns of the record's key, its headers and its metadata. In a stream it is a
row that has nulls in the columns of the value. A table deletes the row of its key.

Invariants:

1. A tombstone passes each filter that needs a column of the value, because the row that it deletes
   may have passed it.
2. A function is not called for a tombstone on its way to a table.
3. Streams that lead to no such table get the row of nulls, as without a table.
4. Rows and tombstones stay in order.

The steps see a column ``MARK``: null for a row; true for a tombstone on its way to a table; false
for its row of nulls on the way to other streams.
"""

from __future__ import annotations

import polars as pl

from framework.streams.hidden_columns import MARK
from framework.topology import TOMBSTONE


def marked(frame: pl.DataFrame, *, tables: bool, others: bool) -> pl.DataFrame:
    """The rows of a source with marks, for steps that lead to ``tables``, to ``others``, or to
    both."""
    if TOMBSTONE not in frame.columns:
        return frame.with_columns(pl.lit(None, pl.Boolean).alias(MARK))
    marks = [*([False] if others else []), *([True] if tables else [])]
    is_tombstone = pl.col(TOMBSTONE).fill_null(False)
    if not frame.select(is_tombstone.any()).item():
        return frame.drop(TOMBSTONE).with_columns(pl.lit(None, pl.Boolean).alias(MARK))
    each = (
        pl.when(is_tombstone)
        .then(pl.lit(pl.Series([marks])))
        .otherwise(pl.lit(pl.Series([[None]], dtype=pl.List(pl.Boolean))))
    )
    return frame.with_columns(each.alias(MARK)).drop(TOMBSTONE).explode(MARK)


def chosen(frame: pl.DataFrame, *, tables: bool, others: bool) -> pl.DataFrame:
    """The rows that steps take which lead to ``tables``, to ``others``, or to both."""
    if tables and others:
        return frame
    return frame.filter(pl.col(MARK).is_null() | (pl.col(MARK) == tables))


def for_table(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows for a table, with the column ``TOMBSTONE``. One that the rows have says, too, whose
    row is deleted."""
    told = pl.col(MARK).fill_null(False)
    if TOMBSTONE in frame.columns:
        told = told | pl.col(TOMBSTONE).fill_null(False)
    return chosen(frame, tables=True, others=False).with_columns(told.alias(TOMBSTONE))
