"""Limits the work of one round, so that rounds stay short however long a bolt takes for a tuple
(C38). Pure: the clock is passed in.

Invariants:

1. A tuple for which a round has no time stays in its task. The next rounds execute waiting tuples
   in order.
2. In every round each worker executes at least one of its waiting tuples: any bolt that returns
makes progress.
3. While tuples wait, spouts emit nothing. So the waiting tuples stem from one round's share at
   most, or from two when rounds overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from framework.core.round_protocol import ROUND_TUPLES_MAX, Counts

#: How long the tasks of one worker execute tuples on each level of a round, in seconds.
ROUND_EXECUTE_S = 1.0
#: The growth factor of the share from round to round.
_GROWTH = 1.25


class Budget:
    """The time that the tasks of a worker have on one level of a round. ``seconds``: None for no
    limit. ``until``: the end, by ``clock``."""

    def __init__(self, clock: Callable[[], float], seconds: float | None = ROUND_EXECUTE_S) -> None:
        self.clock = clock
        self.until = clock() + seconds if seconds is not None else math.inf
        self._begun = False

    def goes_on(self) -> bool:
        """Whether one more tuple may be executed. Always True for the first."""
        begun, self._begun = self._begun, True
        return not begun or self.clock() < self.until


class Share:
    """The share of each spout task in one round. ``tuples``: the most that it may emit, so that the
    bolts keep up.

    >>> share = Share()
    >>> share.adapt(1_000, [Counts(executed=60, waiting=940)])
    >>> share.tuples
    60
    >>> share.adapt(60, [Counts(executed=60)])
    >>> share.tuples
    76
    """

    def __init__(self) -> None:
        self.tuples = ROUND_TUPLES_MAX

    def adapt(self, given: int, counts: Iterable[Counts]) -> None:
        """Adapt the share to the result of a round. ``given``: the tuples of the spout task that
        emitted most. ``counts``: of all tasks."""
        done = [each.executed / (each.executed + each.waiting) for each in counts if each.waiting]
        if done:
            self.tuples = max(int(min(self.tuples, given) * min(done)), 1)
        elif given >= self.tuples:
            self.tuples = min(int(self.tuples * _GROWTH) + 1, ROUND_TUPLES_MAX)
