"""Pages of what is too much for one statement."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

#: Keys or rows in one page.
PAGE_KEYS = 5_000
T = TypeVar("T")


def pages_of(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of up to ``size`` items, in their order."""
    iterator = iter(items)
    while page := list(itertools.islice(iterator, size)):
        yield page
