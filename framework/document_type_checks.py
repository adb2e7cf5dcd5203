"""Checks the types of a document's fields when it is read, because any client of the store may have
written it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

#: The upper bound of numbers in documents.
_NUMBER_MAX = 1 << 63


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` naming the first value that is not of the type that the class declares
    for its field.

    >>> from dataclasses import make_dataclass
    >>> check_fields(make_dataclass("Point", [("x", int)]), {"x": "left"})
    Traceback (most recent call last):
    TypeError: x is of type str
    """
    for name, declared in _declared(kind).items():
        if name in values and not fits(values[name], declared):
            raise TypeError(f"{name} is of type {type(values[name]).__name__}")


def fits(value: Any, declared: Any) -> bool:
    """Whether a value is of a declared type. A float must be finite, and a bool is no number."""
    origin, inner = get_origin(declared), get_args(declared)
    if declared is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if declared is float:
        return type(value) in (int, float) and abs(value) < _NUMBER_MAX and math.isfinite(value)
    if declared is int:
        return type(value) is int and abs(value) < _NUMBER_MAX
    if origin is not None and issubclass(origin, Mapping):
        key, item = inner
        return isinstance(value, Mapping) and all(fits(each, key) and fits(value[each], item) for each in value)
    if origin is not None and issubclass(origin, Sequence):
        return isinstance(value, (list, tuple)) and all(fits(each, inner[0]) for each in value)
    return isinstance(value, NoneType if declared is None else origin or declared)


@functools.cache
def _declared(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)
