"""Finds open sessions whose sums may leave their type.

The parts of a session are added when the session ends, in a later transaction than its records. An
error then could name no record. So a record is refused on arrival if the sum of its session leaves
the type. To avoid reading the parts of all sessions in each transaction:

1. A part is *large* if one of its sums is beyond ``1 / PARTS_MAX`` of the type. The sum of a
   session without a large part fits, up to ``PARTS_MAX`` parts.
2. A key with a large part in an open session has a row in the state, its *mark*. The mark is due
   when the last of these sessions is.
3. Only the sessions of keys with a mark, and of records that make a part large, are added before
   they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from framework.operators.sessions import Pane
from sinks.aggregates import Aggregate, Sum
from sinks.backend import Key

#: The most parts of a session whose sum certainly fits, if no part is large.
PARTS_MAX = 2**23
_DIGITS = len(str(PARTS_MAX))
#: The key of a mark has this number, which is before all times, in place of the start of a part.
_AT = -(2**63)


class LargeSums:
    """The sums of integers and decimals among ``aggregates``. ``types``: the types of the
    results."""

    def __init__(self, aggregates: Mapping[str, Aggregate], types: Mapping[str, Any]) -> None:
        self._limits: list[tuple[int, Any]] = []
        self._nothing = (None,) * len(aggregates)
        for place, (name, each) in enumerate(aggregates.items()):
            kind = types.get(name)
            if not isinstance(each, Sum) or kind is None:
                continue
            if pa.types.is_integer(kind):
                self._limits.append((place, 2**63 // PARTS_MAX))
            elif pa.types.is_decimal(kind):
                self._limits.append((place, Decimal(10) ** (kind.precision - kind.scale - _DIGITS)))

    def __bool__(self) -> bool:
        """Whether a sum can leave its type."""
        return bool(self._limits)

    def large(self, pane: Pane) -> bool:
        return any((value := pane.values[place]) is not None and abs(value) >= most for place, most in self._limits)

    def mark_of(self, key: Key) -> Key:
        """The key of the mark. ``key``: of a pane."""
        return (*key[:-1], _AT)

    def mark(self, due: int) -> Pane:
        return Pane(0, due, self._nothing)


def marks_in(keys: Iterable[Key]) -> set[Key]:
    """The keys of marks."""
    return {key for key in keys if key[-1] == _AT}
