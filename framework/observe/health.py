"""What a topology does, in one word, and what is wrong with it: from the statuses that its drivers
tell. ``ratchet list`` and the page say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Statuses = Sequence[Mapping[str, Any]]


def is_ready(phase: str) -> bool:
    """Whether a run in this phase leads, or stands by to take over."""
    return phase in ("running", "standby")


def waits(statuses: Statuses) -> bool:
    """Whether what one of the drivers does fails and is tried again."""
    return any(each.get("waiting_for") or each.get("repeating") for each in statuses)


def problem_in(statuses: Statuses) -> str | None:
    """What the drivers wait for, or what failed last.

    >>> problem_in([{"repeating": None, "last_error": "count[0]: no such row"}])
    'count[0]: no such row'
    """
    for name in ("repeating", "waiting_for", "last_error"):
        found = [str(each[name]) for each in statuses if each.get(name)]
        if found:
            return found[0]
    return None
