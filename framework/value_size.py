"""The approximate size of values in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

#: About the bytes of a value that is neither a text nor a container.
_VALUE_BYTES = 8


def size_of(value: Any) -> int:
    """About the bytes of a value, or of the values in a container.

    >>> size_of(("abc", 1, {"a": [b"abcd"]}))
    16
    """
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, dict):
        return size_of(tuple(value.items()))
    if not isinstance(value, (tuple, list)):
        return _VALUE_BYTES
    size = 0
    for each in value:  # without a call for what most rows are made of
        size += len(each) if type(each) is str else _VALUE_BYTES if type(each) is int else size_of(each)
    return size


def fixed_size(types: Iterable[pa.DataType | None]) -> int | None:
    """The bytes of a row of these types, as ``size_of`` counts them; None if they depend on the
    values, as those of texts do, and those of fields without a type.

    >>> fixed_size([pa.int64(), pa.decimal128(10, 2)])
    16
    >>> fixed_size([pa.string()]), fixed_size([None])
    (None, None)
    """
    size = 0
    for each in types:
        if each is None or not (pa.types.is_primitive(each) or pa.types.is_decimal(each)):
            return None
        size += _VALUE_BYTES
    return size
