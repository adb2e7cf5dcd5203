"""Finds the row and the column of a batch that a database refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError
from framework.topology.canonical_form import python_values

#: The most characters of a key that an error shows.
_SHOWN = 60


def refused_row(count: int, accepts: Callable[[int, int], bool]) -> int | None:
    """The first row that is refused by itself, found by bisection. None if there is none.

    ``accepts``: whether the rows from a first one to the one before an end are accepted.
    """
    first, end = 0, count
    while end - first > 1:
        half = (first + end) // 2
        first, end = (half, end) if accepts(first, half) else (first, half)
    return None if count == 0 or accepts(first, end) else first


def refused_delta(
    deltas: pa.Table, key: Sequence[str], accepts: Callable[[pa.Table], bool], error: BadRecordError
) -> BadRecordError:
    """The error, extended by the key and the column of the refused row of ``deltas``."""
    found = refused_row(deltas.num_rows, lambda first, end: accepts(deltas.slice(first, end - first)))
    if found is None:
        return error
    row = deltas.slice(found, 1)
    values = {name: python_values(row.column(name))[0] for name in row.column_names}

    def alone(name: str) -> bool:
        columns = [
            row.column(each.name) if each.name in (*key, name) else pa.chunked_array([pa.nulls(1, each.type)])
            for each in row.schema
        ]
        return accepts(pa.table(columns, schema=row.schema))

    own = {name: values.pop(name) for name in key}
    return explained(error, own, values, alone)


def explained(
    error: BadRecordError, key: Mapping[str, Any], values: Mapping[str, Any], alone: Callable[[str], bool]
) -> BadRecordError:
    """The error, extended by the refused column. ``key``, ``values``: the columns of the row.
    ``alone``: whether the row is accepted with this one of its values, and nulls for the others."""
    if None in key.values():
        return error  # already in the error
    if not alone(""):
        name = next((each for each in key if "\0" in str(key[each])), max(key, key=lambda each: _size(key[each])))
        return BadRecordError(f"{error}; it is key column {name!r}, which has {_size(key[name]):,} bytes", _shown(key))
    refused = [name for name, value in values.items() if value is not None and not alone(name)]
    where = f"it is column {refused[0]!r}" if refused else "it refuses the values of the row together"
    return BadRecordError(f"{error}; {where}", _shown(key))


def _size(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    return len(str(value).encode(errors="surrogatepass"))


def _shown(key: Mapping[str, Any]) -> str:
    shown = (f"{name}={value!r}" for name, value in key.items())
    return "key " + ", ".join(each if len(each) <= _SHOWN else f"{each[:_SHOWN]}..." for each in shown)
