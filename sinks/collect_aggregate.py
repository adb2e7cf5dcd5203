"""The first or the greatest values of a group as a list."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.json_values import json_encoder
from sinks.aggregates import Folded, typed


@dataclass(frozen=True)
class _Listed(Folded):
    """At most ``most`` values that are not null: JSON text of a list."""

    most: int = 1_000

    _TAKEN = "single values"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.field is None:
            raise TopologyError(f"{name} needs a field")
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise TopologyError(f"{name}({self.field!r}): most is {self.most!r}: give a number above 0")

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        if not self._takes(typed(self, input_type)):
            raise TopologyError(f"{type(self).__name__}({self.field!r}) takes {self._TAKEN}, not {input_type}")
        return pa.string()

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        if len(present) == 1 and partial:
            return present[0]
        every: Iterable[Any]
        if partial:
            every = itertools.chain.from_iterable(map(json.loads, present))
        else:
            every = (json_encoder(pa.scalar(each).type)(each) for each in present)
        return json.dumps(self._chosen(every), ensure_ascii=False, separators=(",", ":"))

    def _takes(self, input_type: pa.DataType) -> bool:
        return not pa.types.is_nested(input_type)

    @abstractmethod
    def _chosen(self, every: Iterable[Any]) -> list[Any]:
        """``most`` of these values in their JSON form."""


@dataclass(frozen=True)
class Collect(_Listed):
    """The first ``most`` values that are not null, in the order of arrival: JSON text of a list.
    Within a partition this is the order of the offsets. The order between partitions is
    undefined."""

    def _chosen(self, every: Iterable[Any]) -> list[Any]:
        return list(itertools.islice(every, self.most))


@dataclass(frozen=True)
class Top(_Listed):
    """The ``most`` greatest values that are not null or NaN, the greatest first: JSON text of a
    list, which does not depend on the order of arrival. Text is in the order of code points."""

    most: int = 10

    _TAKEN = "integers, floats, text, dates and timestamps"

    def _takes(self, input_type: pa.DataType) -> bool:
        of = pa.types
        kinds = (of.is_integer, of.is_floating, of.is_string, of.is_large_string, of.is_date, of.is_timestamp)
        return any(is_it(input_type) for is_it in kinds)

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        # NaN has no place among the others, and 0.0 + 0 is that of -0.0, too.
        numbers = [each + 0 if isinstance(each, float) else each for each in present if each == each]
        return super()._combined(numbers, partial=partial)

    def _chosen(self, every: Iterable[Any]) -> list[Any]:
        values = list(every)
        if all(isinstance(each, str) for each in values):
            return heapq.nlargest(self.most, values)
        return heapq.nlargest(self.most, values, key=_number_of)


def _number_of(value: Any) -> Any:
    """The number of its JSON form."""
    return math.inf if value == "Infinity" else -math.inf if value == "-Infinity" else value
