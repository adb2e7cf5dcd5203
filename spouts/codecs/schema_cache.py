"""Keeps the results of reading schemas within a bound of memory, because producers, and other
clients of a registry, write schemas."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

_Result = TypeVar("_Result")

#: Bytes of schemas whose results are kept. A result takes about seven times as much.
KEPT_BYTES_MAX = 8 << 20
#: Bytes that an entry counts for besides its schema.
_ENTRY = 8 << 10
_MISSING = object()


class SchemaCache(Generic[_Result]):
    """Results by key: as many as were read from 8 MiB of schemas in total, and always the last
    result. Forgets the least recently used. Used by several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[_Result, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._size = 0

    def get(self, key: Hashable, otherwise: Any = None) -> Any:
        """The result of a key; ``otherwise`` if it is not kept."""
        with self._lock:
            if key not in self._kept:
                return otherwise
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, result: _Result, schema_bytes: int) -> None:
        """Keep a result. ``schema_bytes``: the size of the schemas it was read from."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = result, schema_bytes + _ENTRY
                self._size += schema_bytes + _ENTRY
            while self._size > KEPT_BYTES_MAX and len(self._kept) > 1:
                _, (_, size) = self._kept.popitem(last=False)
                self._size -= size

    def __len__(self) -> int:
        return len(self._kept)


def cached_by_schema(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function with a ``SchemaCache`` of its results. Its first argument is the schema, bytes
    or text."""
    kept: SchemaCache[_Result] = SchemaCache()

    @functools.wraps(function)
    def found(*arguments: Any) -> _Result:
        result = kept.get(arguments, _MISSING)
        if result is _MISSING:
            result = function(*arguments)
            kept.put(arguments, result, len(arguments[0]))
        return cast("_Result", result)

    return found
