"""Random worlds: no message is acked early, none is forgotten."""

from __future__ import annotations

import logging
import time
from collections import Counter

import pytest
import structlog

from framework.acking import home
from framework.acking.roots import LedgerPart
from tests.kit.tree_world import simulate
from tests.kit.trouble import TROUBLES


@pytest.mark.behaviour("4.3", "4.6", "4.8")
@pytest.mark.parametrize("trouble", [*TROUBLES, "all", "none"])
def test_no_message_is_acked_early_and_none_is_forgotten(trouble: str) -> None:
    troubles = TROUBLES if trouble == "all" else () if trouble == "none" else (trouble,)
    struck: Counter[str] = Counter()
    for seed in range(12):
        world = simulate(seed, troubles=troubles)
        assert world.wrong == []
        struck.update(world.struck)
    assert set(+struck) == set(troubles)  # each of them came, and no other


@pytest.mark.behaviour("4.3")
def test_a_ledger_that_forgets_what_was_emitted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle sees a mistake: here only acks reach the ackers, as a tree without its newest edges."""
    monkeypatch.setattr("framework.acking.roots.Ledger.emitted", lambda self, roots, edges: None)
    monkeypatch.setattr("framework.acking.roots.Ledger.acked", lambda self, roots, edge: None)
    assert simulate(1, troubles=()).wrong


@pytest.mark.behaviour("4.6")
def test_an_acker_that_completes_trees_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """And here an acker takes any number for 0 once it has heard twice of a tree."""
    heard: Counter[int] = Counter()
    apply = home.AckerTask._apply

    def believing(self: home.AckerTask, part: LedgerPart) -> object:
        for root in part.roots.tolist():
            heard[root] += 1
            tree = self._acker._pending.get(root)
            if heard[root] > 1 and tree is not None:
                part = part._replace(values=part.values.copy())
                part.values[part.roots == root] = tree.value
        return apply(self, part)

    monkeypatch.setattr(home.AckerTask, "_apply", believing)
    assert any(simulate(seed, troubles=("lost output",)).wrong for seed in range(5))


def main() -> None:
    """``python -m tests.acking.test_simulation``: trees per minute, with all troubles."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    start, trees, seed = time.monotonic(), 0, 0
    while time.monotonic() - start < 60:
        world = simulate(seed, messages=400, pending=100)
        assert world.wrong == []
        trees += sum(world.lives.values())
        seed += 1
    print(f"{trees:,} trees of {seed:,} worlds in a minute")


if __name__ == "__main__":
    main()
