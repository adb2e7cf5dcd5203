"""Record batches as polars frames, and back into the Arrow types that are declared.

polars has fewer types than Arrow: a column that an expression leaves as it is keeps its declared
type, and the type of a computed column is the plain one: ``string``, not ``large_string``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import polars as pl
import pyarrow as pa

from framework.call_site import Call
from framework.errors import BadRecordError, panics

#: The errors by which polars and Arrow refuse a value, and those of a value that Python cannot
#: represent, such as a time after the year 9999.
_REFUSALS = (pl.exceptions.PolarsError, pa.ArrowInvalid, pa.lib.ArrowCapacityError)
UNREPRESENTABLE = (ValueError, OverflowError)
_LEVEL = pl.CompatLevel.oldest()


@contextmanager
def refusing(call: Call | None = None, *more: type[Exception]) -> Iterator[None]:
    """Raises ``BadRecordError`` if polars refuses a value or panics, and for the errors ``more``.
    Functions of the user must not run inside."""
    try:
        yield
    except BadRecordError:
        raise
    except (*_REFUSALS, *more, *panics()) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadRecordError(f"{call}: {said}" if call is not None else said) from error


def dicts_of(call: Call, frame: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows, for a function of the user. Raises ``BadRecordError`` for a value that Python
    cannot represent."""
    with refusing(call, *UNREPRESENTABLE):
        yield from frame.iter_rows(named=True)


def frame_of(batch: pa.RecordBatch) -> pl.DataFrame:
    """The batch as a frame."""
    return pl.DataFrame(pl.from_arrow(pa.Table.from_batches([batch])))


def arrow_of(column: pl.Series) -> pa.Array:
    """The column in types of Arrow that all functions of Arrow take."""
    return column.to_arrow(compat_level=_LEVEL)


@lru_cache(maxsize=256)
def empty_frame(schema: pa.Schema) -> pl.DataFrame:
    """A frame without rows. Raises a polars or Arrow error for a type that polars does not have."""
    return pl.DataFrame(pl.from_arrow(schema.empty_table()))


def batches_of(frame: pl.DataFrame, schema: pa.Schema) -> list[pa.RecordBatch]:
    """The columns of ``schema``, in its types."""
    if not frame.height:
        return []
    table = frame.select(schema.names).to_arrow(compat_level=_LEVEL)
    made: list[pa.RecordBatch] = (table if table.schema == schema else table.cast(schema)).combine_chunks().to_batches()
    return made


def schema_of(frame: pl.DataFrame) -> pa.Schema:
    """The declared types of computed columns."""
    found = frame.clear().to_arrow(compat_level=_LEVEL).schema
    return pa.schema([(each.name, plain(each.type)) for each in found])


def plain(declared: pa.DataType) -> pa.DataType:
    """A type without offsets of 64 bits, views and dictionaries.

    >>> plain(pa.large_list(pa.large_string()))
    ListType(list<item: string>)
    """
    types = pa.types
    if types.is_large_string(declared) or types.is_string_view(declared):
        return pa.string()
    if types.is_large_binary(declared) or types.is_binary_view(declared):
        return pa.binary()
    if types.is_dictionary(declared):
        return plain(declared.value_type)
    if types.is_large_list(declared) or types.is_list(declared):
        return pa.list_(plain(declared.value_type))
    if types.is_struct(declared):
        return pa.struct([(each.name, plain(each.type)) for each in declared])
    return declared
