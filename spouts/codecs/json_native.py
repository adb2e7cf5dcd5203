"""JSON objects as Arrow columns, by the compiled reader: straight from the buffers of an array.

Where the compiled part of the spouts was not built, or does not load, there is no such reader.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from spouts.codecs.json_arrow import nullable
from spouts.compiled import NotCompiledError, native

#: A field's name, its type, whether it may be null, and its child fields in the same form.
_Described = tuple[str, str, bool, list[Any]]

_NO_BYTES = pa.py_buffer(b"")
#: The types that the compiled reader knows, apart from structs and lists.
_TYPES = {str(each) for each in (pa.float32(), pa.float64(), pa.bool_(), pa.string())} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


class NativeJson:
    """The rows of the values that are as usual. What the others mean, Arrow's reader must say."""

    def __init__(self, reader: Any, schema: pa.Schema) -> None:
        self._reader = reader
        self._schema = schema

    def read(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the usual values, in order, and the indices of the unusual ones, which have
        no row. A null is a row of nulls. The GIL is released."""
        validity, offsets, data = values.buffers()
        rows, columns, unusual = self._reader.read(
            data or _NO_BYTES, offsets or _NO_BYTES, validity, values.offset, len(values)
        )
        arrays = [_array(field.type, column) for field, column in zip(self._schema, columns, strict=True)]
        indices = pa.Array.from_buffers(pa.int64(), len(values) - rows, [None, pa.py_buffer(unusual)])
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), indices


@functools.lru_cache(maxsize=64)
def native_json(declared: pa.Schema) -> NativeJson | None:
    """The reader for a schema, where null is unusual in a field that is not nullable; None if there
    is none. A process keeps it, so codecs travel without it."""
    try:
        reader = native().JsonReader
    except NotCompiledError:
        return None
    fields = _all_described(list(declared))
    return None if fields is None else NativeJson(reader(fields), nullable(declared))


def _all_described(fields: Sequence[pa.Field]) -> list[_Described] | None:
    """As ``JsonReader`` wants them; None if a type is not known, or a name comes twice."""
    described = [each for each in map(_described, fields) if each is not None]
    is_whole = len(described) == len({field.name for field in fields}) == len(fields)
    return described if is_whole else None


def _described(field: pa.Field) -> _Described | None:
    children: Sequence[pa.Field] = []
    kind = str(field.type)
    if pa.types.is_struct(field.type):
        kind, children = "struct", list(field.type)
    elif pa.types.is_list(field.type):
        kind, children = "list", [field.type.value_field]
    elif kind not in _TYPES:
        return None
    described = _all_described(children)
    return None if described is None else (field.name, kind, field.nullable, described)


def _array(
    declared: pa.DataType, column: tuple[int, int, bytes | None, tuple[bytes, ...], tuple[Any, ...]]
) -> pa.Array:
    length, nulls, bitmap, buffers, children = column
    validity = None if bitmap is None else pa.py_buffer(bitmap)
    types = [declared.field(number).type for number in range(declared.num_fields)]
    return pa.Array.from_buffers(
        declared,
        length,
        [validity, *map(pa.py_buffer, buffers)],
        null_count=nulls,
        children=[_array(child, its) for child, its in zip(types, children, strict=True)],
    )
