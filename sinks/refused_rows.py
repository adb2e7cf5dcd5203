"""Names the row and the column of a batch that a database refuses, and a row that somebody else has
written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.errors import BadRecordError, CorruptStateError
from framework.topology.canonical_form import python_values

#: The most characters of a key that an error shows.
_SHOWN = 60
#: The most characters of a problem with the content of a row.
_PROBLEM_SHOWN = 200
#: Errors over the content of a row that Ratchet has not written.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, pa.ArrowException)


def strange_row(location: str, key: object, problem: object) -> CorruptStateError:
    """The error for a row of a state that somebody else has written. ``problem``: with it."""
    shown = str(problem)[:_PROBLEM_SHOWN]
    return CorruptStateError(
        f"{location}, key {key!r}: {shown}: somebody else wrote it; put it right, or remove it, and run the topology again"
    )


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


def explained_in(error: BadRecordError, deltas: pa.Table, row: int, column: str, key: Sequence[str]) -> BadRecordError:
    """The error, extended by the key of a row of ``deltas`` and by its column that is refused."""
    own = {name: python_values(deltas.column(name).slice(row, 1))[0] for name in key}
    return _in_key(error, own, column) if column in own else _in(error, own, column)


def explained(
    error: BadRecordError, key: Mapping[str, Any], values: Mapping[str, Any], alone: Callable[[str], bool]
) -> BadRecordError:
    """The error, extended by the refused column. ``key``, ``values``: the columns of the row.
    ``alone``: whether the row is accepted with this one of its values, and nulls for the others."""
    if None in key.values():
        return error  # already in the error
    if not alone(""):
        name = next((each for each in key if "\0" in str(key[each])), max(key, key=lambda each: _size(key[each])))
        return _in_key(error, key, name)
    refused = [name for name, value in values.items() if value is not None and not alone(name)]
    if refused:
        return _in(error, key, refused[0])
    return BadRecordError(f"{error}; it refuses the values of the row together", _shown(key))


def _in_key(error: BadRecordError, key: Mapping[str, Any], name: str) -> BadRecordError:
    return BadRecordError(f"{error}; it is key column {name!r}, which has {_size(key[name]):,} bytes", _shown(key))


def _in(error: BadRecordError, key: Mapping[str, Any], name: str) -> BadRecordError:
    return BadRecordError(f"{error}; it is column {name!r}", _shown(key))


def _size(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    return len(str(value).encode(errors="surrogatepass"))


def _shown(key: Mapping[str, Any]) -> str:
    shown = (f"{name}={value!r}" for name, value in key.items())
    return "key " + ", ".join(each if len(each) <= _SHOWN else f"{each[:_SHOWN]}..." for each in shown)
