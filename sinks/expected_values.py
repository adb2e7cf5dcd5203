"""The values that ``verify`` expects in a sink."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from framework.topology.canonical_form import equal
from sinks.backend import Value


class Expected(ABC):
    """The row that ``verify`` expects in a sink."""

    @property
    @abstractmethod
    def value(self) -> Value: ...

    @abstractmethod
    def agrees(self, found: Value) -> bool: ...


class Recomputed(Expected):
    """A value that a copy of the same committer has recomputed. It must be equal, except that
    floats may have been added in another order."""

    def __init__(self, value: Value) -> None:
        self._value = value

    @property
    def value(self) -> Value:
        return self._value

    def agrees(self, found: Value) -> bool:
        return all(map(_same, found, self._value))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12):
        return True
    return equal(one, other)
