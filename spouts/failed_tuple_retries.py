"""When to retry what has failed. Pure: the caller gives the time.

Source: ``org.apache.storm.kafka.spout.KafkaSpoutRetryExponentialBackoff``.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from framework.errors import ConfigError

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff. The first retry is immediate, the second after ``delay_s`` seconds, and
    each further retry after twice the previous delay, up to ``delay_max_s`` seconds.

    ``retries_max``: None retries for ever. Raises ``ConfigError`` for invalid values.

    >>> policy = RetryPolicy()
    >>> [policy.delay_after(failures) for failures in (1, 2, 3, 4, 20)]
    [0.0, 0.002, 0.004, 0.008, 10.0]
    """

    retries_max: int | None = None
    delay_s: float = 0.002
    delay_max_s: float = 10.0

    def __post_init__(self) -> None:
        if self.retries_max is not None and (isinstance(self.retries_max, bool) or self.retries_max < 0):
            raise ConfigError(f"retries_max must be 0 or more, or None for ever, not {self.retries_max!r}")
        if not 0 < self.delay_s <= self.delay_max_s:
            raise ConfigError(
                f"delay_s must be above 0 and at most delay_max_s, not {self.delay_s!r} and {self.delay_max_s!r}"
            )

    def delay_after(self, failures: int) -> float:
        """Seconds to wait after this many failures."""
        if failures <= 1:
            return 0.0
        return min(self.delay_s * 2.0 ** min(failures - 2, 60), self.delay_max_s)


class Retries(Generic[K]):
    """The keys that wait for a retry, and their numbers of failures. Holds only keys that have
    failed and are not done."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures: dict[K, int] = {}
        self._due: list[tuple[float, int, K]] = []
        self._count = 0

    def failed(self, key: K, now: float, *, for_ever: bool = False) -> bool:
        """Schedule a retry. Returns False, and forgets the key, if it has used all its retries.
        ``for_ever``: retry without a limit."""
        failures = self._failures.get(key, 0) + 1
        if not for_ever and self._policy.retries_max is not None and failures > self._policy.retries_max:
            self.done(key)
            return False
        self._failures[key] = failures
        self._count += 1  # keys that are due at the same time come in the order of their failures
        heapq.heappush(self._due, (now + self._policy.delay_after(failures), self._count, key))
        return True

    def done(self, key: K) -> None:
        """Forget a key that has succeeded or is given up."""
        self._failures.pop(key, None)

    def due(self, now: float) -> K | None:
        """Remove and return a key that is due now; None if there is none."""
        while self._due and self._due[0][0] <= now:
            key = heapq.heappop(self._due)[2]
            if key in self._failures:
                return key
        return None

    @property
    def limited(self) -> bool:
        """Whether a key may use up its retries."""
        return self._policy.retries_max is not None

    @property
    def any_failed(self) -> bool:
        """Whether any key has failed and is not done."""
        return bool(self._failures)

    def keys(self) -> list[K]:
        """The keys that have failed and are not done."""
        return list(self._failures)

    def __len__(self) -> int:
        """How many keys wait for a retry."""
        return len(self._due)
