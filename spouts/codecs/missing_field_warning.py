"""Declared fields that no record has: most often a name is misspelt, and a column of nulls says
nothing about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from framework.observe.logs import get_logger
from framework.topology import DEFAULT_STREAM

_log = get_logger()


def absent_fields(names: Sequence[str], columns: Sequence[pa.Array]) -> frozenset[str]:
    """The fields that are null in all rows. A field of an object is ``address.street``, and counts
    where the object is there; one of the objects in a list is ``lines[].price``."""
    found: set[str] = set()
    for name, column in zip(names, columns, strict=True):
        _look_at(name, column, found)
    return frozenset(found)


def _look_at(name: str, column: pa.Array, found: set[str]) -> None:
    if column.null_count == len(column):
        if len(column):
            found.add(name)
    elif pa.types.is_struct(column.type):
        present = column.filter(column.is_valid()) if column.null_count else column
        for field, part in zip(column.type, present.flatten(), strict=True):
            _look_at(f"{name}.{field.name}", part, found)
    elif _is_list(column.type) and pa.types.is_nested(column.type.value_type):
        _look_at(f"{name}[]", column.flatten(), found)


def _is_list(declared: pa.DataType) -> bool:
    """Not a map, whose names are data."""
    return bool(pa.types.is_list(declared) or pa.types.is_large_list(declared))


class AbsentFields:
    """Logs the fields that no record of the first batch of a stream has; once for each stream."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, absent: Mapping[str, frozenset[str]], records: Mapping[str, int]) -> None:
        """``absent``: of a batch, stream -> such fields. ``records``: stream -> records that were
        read."""
        for stream, fields in absent.items():
            if stream not in self._known:
                self._known.add(stream)
                if fields:
                    _log.warning(
                        "source.field_absent",
                        fields=sorted(fields),
                        records=records.get(stream, 0),
                        **({} if stream == DEFAULT_STREAM else {"stream": stream}),
                        reason="no record of the first batch has a value there; are the names those of the records?",
                    )
