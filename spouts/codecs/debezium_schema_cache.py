"""Keeps the results of reading schemas of records within a bound of memory: producers write these
schemas."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

#: Bytes of schemas whose results a function keeps. A result takes about seven times as much.
KEPT_BYTES_MAX = 8 << 20
#: Bytes that an entry counts for besides its schema.
_ENTRY = 8 << 10


def cached_by_schema(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function, which keeps its results like ``functools.lru_cache``: as many as have schemas
    of 8 MiB together, and always the last one. Its first argument is the schema, bytes or text."""
    kept: OrderedDict[tuple[Any, ...], _Result] = OrderedDict()
    lock = threading.Lock()
    size = 0

    @functools.wraps(function)
    def found(*arguments: Any) -> _Result:
        nonlocal size
        with lock:
            if arguments in kept:
                kept.move_to_end(arguments)
                return kept[arguments]
        result = function(*arguments)
        with lock:
            if arguments not in kept:
                kept[arguments] = result
                size += len(arguments[0]) + _ENTRY
            while size > KEPT_BYTES_MAX and len(kept) > 1:
                oldest, _ = kept.popitem(last=False)
                size -= len(oldest[0]) + _ENTRY
        return result

    return found
