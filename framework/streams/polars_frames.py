"""Record batches as polars frames, and back into the Arrow types that are declared.

polars has fewer types than Arrow: a column that an expression leaves as it is keeps its declared
type, and the type of a computed column is the plain one: ``string``, not ``large_string``.
"""

from __future__ import annotations

from functools import lru_cache

import polars as pl
import pyarrow as pa

_LEVEL = pl.CompatLevel.oldest()


def frame_of(batch: pa.RecordBatch) -> pl.DataFrame:
    """The batch as a frame."""
    return pl.DataFrame(pl.from_arrow(pa.Table.from_batches([batch])))


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
