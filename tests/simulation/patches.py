"""Rules that a test takes out of the code for a while, and the simulator that must notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.kit.searching import first_seed

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class PatchMutation:
    """A rule that is taken out. ``run``: takes a seed, and returns what was wrong, and its world.
    ``about``: what the rule is about."""

    patch: Patch
    run: Callable[[int], tuple[Any, Any]]
    about: str = ""

    @property
    def name(self) -> str:
        return f"{self.about}: {self.patch.__name__.replace('_', ' ')}"

    def is_noticed(self, seed: int) -> bool:
        """Whether the schedule is wrong, or refused, without the rule."""
        try:
            return self.run(seed)[0] is not None
        except Exception:  # noqa: BLE001 - the code under test noticed it itself
            return True

    def seeds(self, first: int, count: int) -> Iterator[int]:
        return iter(range(first, first + count))

    @contextmanager
    def applied(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            yield


def check_noticed(patch: Patch, run: Callable[[int], tuple[Any, Any]], seeds: Iterable[int]) -> None:
    """Fail unless the schedule of one of these seeds notices the mutation."""
    mutation = PatchMutation(patch, run)
    with mutation.applied():
        first_seed(seeds, mutation.is_noticed)
