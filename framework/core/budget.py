"""How much is done in one round, so that rounds stay short whatever a bolt takes for a tuple (C38). Pure: clocks are given.

Invariants:

1. What the time of a round is not enough for waits in the task that it came to, and is done in the next rounds, in its order.
2. In every round at least one of the tuples that wait in a home is executed: any bolt that ends makes progress.
3. While tuples wait, spouts give nothing: what waits is never more than what was made of one round's share, or of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from framework.core.rounds import ROUND_TUPLES_MAX, Counts

#: How long the tasks of a home execute tuples, on one level of one round.
ROUND_EXECUTE_S = 1.0
#: How fast spouts give more again, from round to round.
_GROWTH = 1.25


class Budget:
    """The time that the tasks of a home have on one level of a round. ``seconds``: None without a limit."""

    def __init__(self, clock: Callable[[], float], seconds: float | None = ROUND_EXECUTE_S) -> None:
        self._clock = clock
        self._until = clock() + seconds if seconds is not None else None
        self._begun = False

    def goes_on(self) -> bool:
        """Whether one more tuple may be executed; the first always may."""
        begun, self._begun = self._begun, True
        return not begun or self._until is None or self._clock() < self._until


class Share:
    """``tuples``: how many a spout task gives in one round, at most. As many as the bolts come to.

    >>> share = Share()
    >>> share.heard(1_000, [Counts(executed=60, waiting=940)])
    >>> share.tuples
    60
    >>> share.heard(60, [Counts(executed=60)])
    >>> share.tuples
    76
    """

    def __init__(self) -> None:
        self.tuples = ROUND_TUPLES_MAX

    def heard(self, given: int, counts: Iterable[Counts]) -> None:
        """What the tasks did in a round in which a spout task has ``given`` so many tuples, the one that gave most."""
        done = [each.executed / (each.executed + each.waiting) for each in counts if each.waiting]
        if done:
            self.tuples = max(int(min(self.tuples, given) * min(done)), 1)
        elif given >= self.tuples:
            self.tuples = min(int(self.tuples * _GROWTH) + 1, ROUND_TUPLES_MAX)
