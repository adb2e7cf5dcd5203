"""The first or the greatest values of a group as a list.

Two bounds end a list: the number of its values, and their bytes. The value with which the values
reach ``bytes_max`` is the last. So a list within its bounds has all values. Parts can be merged in
any grouping, because a part leaves out only values after those that reach a bound. To leave out the
first value that does not fit would not be associative, because a later part could have a smaller
value.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.errors import CorruptStateError, TopologyError
from framework.topology.json_values import json_encoder
from sinks.aggregates import Folded, typed

#: A list ends with the value by which it reaches this size, because producers choose the sizes of
#: values.
LIST_BYTES_MAX = 1 << 20
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class _Listed(Folded):
    """Values that are not null, until there are ``most``, or until their JSON texts have
    ``bytes_max`` bytes together: JSON text of a list."""

    most: int = 1_000
    bytes_max: int = LIST_BYTES_MAX

    _TAKEN = "single values"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.field is None:
            raise TopologyError(f"{name} needs a field")
        for option, given in (("most", self.most), ("bytes_max", self.bytes_max)):
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise TopologyError(f"{name}({self.field!r}): {option} is {given!r}: give a number above 0")

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        if not self._takes(typed(self, input_type)):
            raise TopologyError(f"{type(self).__name__}({self.field!r}) takes {self._TAKEN}, not {input_type}")
        return pa.string()

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        if len(present) == 1 and partial:
            return present[0]
        every: Iterable[Any]
        if partial:
            every = itertools.chain.from_iterable(map(self._restored, present))
        else:
            every = map(_in_json, present)
        return f"[{','.join(self._bounded(self._chosen(every)))}]"

    def _restored(self, text: str) -> list[Any]:
        """Raises ``CorruptStateError`` for a text that no aggregate of this kind has made."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list):
            raise CorruptStateError(f"{type(self).__name__}({self.field!r}): {text[:60]!r} is no list that it has made")
        return found

    def _bounded(self, chosen: Iterable[Any]) -> Iterator[str]:
        size = 0
        for each in itertools.islice(chosen, self.most):
            yield (text := _JSON.encode(each))
            size += len(text.encode())
            if size >= self.bytes_max:
                return

    def _takes(self, input_type: pa.DataType) -> bool:
        return not pa.types.is_nested(input_type)

    @abstractmethod
    def _chosen(self, every: Iterable[Any]) -> Iterable[Any]:
        """The first ``most`` of these values, or more, in their JSON form."""


@dataclass(frozen=True)
class Collect(_Listed):
    """The first ``most`` values that are not null, in the order of arrival: JSON text of a list.
    Within a partition this is the order of the offsets. The order between partitions is undefined.
    ``bytes_max``: the value by which the list reaches this size is the last."""

    def _chosen(self, every: Iterable[Any]) -> Iterable[Any]:
        return every


@dataclass(frozen=True)
class Top(_Listed):
    """The ``most`` greatest values that are not null or NaN, the greatest first: JSON text of a
    list, which does not depend on the order of arrival. Text is in the order of code points.
    ``bytes_max``: the value by which the list reaches this size is the last."""

    most: int = 10

    _TAKEN = "integers, floats, text, dates and timestamps"

    def _takes(self, input_type: pa.DataType) -> bool:
        of = pa.types
        kinds = (of.is_integer, of.is_floating, of.is_string, of.is_large_string, of.is_date, of.is_timestamp)
        return any(is_it(input_type) for is_it in kinds)

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        # NaN is not ordered, and -0.0 + 0 is 0.0.
        numbers = [each + 0 if isinstance(each, float) else each for each in present if each == each]
        return super()._combined(numbers, partial=partial)

    def _chosen(self, every: Iterable[Any]) -> Iterable[Any]:
        values = list(every)
        if all(isinstance(each, str) for each in values):
            return heapq.nlargest(self.most, values)
        return heapq.nlargest(self.most, values, key=_number_of)


def _in_json(value: Any) -> Any:
    """The JSON form of a value. Integers are unchanged, because Arrow would convert them to
    ``int64``."""
    return value if type(value) is int else json_encoder(pa.scalar(value).type)(value)


def _number_of(value: Any) -> Any:
    """The number that a JSON form stands for."""
    return math.inf if value == "Infinity" else -math.inf if value == "-Infinity" else value
