"""Count windows: which tuples each contains, and when each is due. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from framework.errors import ConfigError
from framework.user_call_argument_checks import checks_call


@dataclass(frozen=True, slots=True)
class CountWindow:
    """The last ``length`` tuples, every ``step`` tuples; without a step, one window after the
    other. ``early``: fire from the first step on, as in Storm, with as many tuples as there are;
    otherwise the first window is a full one.

    >>> [count for count in range(12) if CountWindow(5, 2).due(count)]
    [5, 7, 9, 11]
    >>> [count for count in range(1, 12) if CountWindow(5, 2, early=True).due(count)]
    [2, 4, 6, 8, 10]
    """

    length: int
    step: int | None = None
    early: bool = False

    def __post_init__(self) -> None:
        for each in (self.length, self.every):
            if isinstance(each, bool) or not isinstance(each, int):
                raise ConfigError(f"{each!r} is a {type(each).__name__}: a window by count has a number of tuples")
        if not 1 <= self.every <= self.length:
            raise ConfigError(f"{self!r} makes no windows: a length of 1 or more, and a step from 1 to the length")

    def __str__(self) -> str:
        return f"by_count({self.length}{f', {self.step}' if self.step is not None else ''})"

    def kind(self) -> list[Any]:
        """The settings that must not change while tuples are kept."""
        return ["early count" if self.early else "count", self.length, self.every]

    @property
    def every(self) -> int:
        return self.step if self.step is not None else self.length

    @property
    def pane(self) -> int:
        """The number of tuples that enter and leave windows together: it divides the length and the
        step."""
        return math.gcd(self.length, self.every)

    def due(self, count: int) -> bool:
        """Whether a window ends with the tuple number ``count``, counted from 1."""
        if self.early:
            return count % self.every == 0
        return count >= self.length and (count - self.length) % self.every == 0

    def start(self, count: int) -> int:
        """The number, from 0, of the first tuple of the window that ends with tuple ``count``."""
        return max(count - self.length, 0)

    def gone(self, count: int) -> range:
        """The numbers, from 0, of the tuples that no window needs after the one that ends with
        tuple ``count``."""
        return range(self.start(count), self.start(count + self.every))


@checks_call
def by_count(count: int, step: int | None = None) -> CountWindow:
    """Windows of the last ``count`` rows of a key, one every ``step`` rows; without a step,
    consecutive windows. Raises ``ConfigError``."""
    return CountWindow(count, step)
