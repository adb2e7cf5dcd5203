"""The values of a group as a list."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.errors import TopologyError
from framework.topology.json_values import json_encoder
from sinks.aggregates import Folded, typed


@dataclass(frozen=True)
class Collect(Folded):
    """The first ``most`` values that are not null, in the order of arrival: JSON text of a list.
    Within a partition this is the order of the offsets. The order between partitions is
    undefined."""

    most: int = 1_000

    def __post_init__(self) -> None:
        if self.field is None:
            raise TopologyError("Collect needs a field")
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise TopologyError(f"Collect({self.field!r}): most is {self.most!r}: give a number above 0")

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        if pa.types.is_nested(typed(self, input_type)):
            raise TopologyError(f"Collect({self.field!r}) takes single values, not {input_type}")
        return pa.string()

    def _combined(self, present: Sequence[Any], *, partial: bool) -> Any:
        if len(present) == 1 and partial:
            return present[0]
        every: Iterable[Any]
        if partial:
            every = itertools.chain.from_iterable(map(json.loads, present))
        else:
            every = (json_encoder(pa.scalar(each).type)(each) for each in present)
        return json.dumps(list(itertools.islice(every, self.most)), ensure_ascii=False, separators=(",", ":"))
