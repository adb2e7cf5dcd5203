"""The health of a topology in one word, and its problem, from the statuses of its drivers.
``ratchet list`` and the page show the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Statuses = Sequence[Mapping[str, Any]]


def is_ready(phase: str) -> bool:
    """Whether a run in this phase leads, or stands by to take over."""
    return phase in ("running", "standby")


def waits(statuses: Statuses) -> bool:
    """Whether a driver retries an operation that fails."""
    return any(each.get("waiting_for") or each.get("repeating") for each in statuses)


def problem_in(statuses: Statuses) -> str | None:
    """The operation for which the drivers wait, or the last failure.

    >>> problem_in([{"repeating": None, "last_error": "count[0]: no such row"}])
    'count[0]: no such row'
    """
    for name in ("repeating", "waiting_for", "last_error"):
        found = [str(each[name]) for each in statuses if each.get(name)]
        if found:
            return found[0]
    return None
