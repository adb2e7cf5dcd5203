"""Random worlds of topologies with state: exactly-once is exactly once, at-least-once loses nothing."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter

import pytest
import structlog

from framework.acking.driver import RoundDriver
from framework.acking.living_bolt import LivingBolt
from framework.acking.stateful import LivingStatefulBolt
from framework.errors import CorruptStateError, InvariantViolation
from framework.state.checkpoints import Checkpoints
from tests.kit.state_parts import Log
from tests.kit.state_world import ALL_TROUBLES, CRASHES, simulate


@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.parametrize("exact", [True, False], ids=["exactly-once", "at-least-once"])
@pytest.mark.parametrize("trouble", [*ALL_TROUBLES, "all", "none"])
def test_the_committed_state_is_the_fold_of_the_input_under_each_trouble(trouble: str, exact: bool) -> None:
    troubles = ALL_TROUBLES if trouble == "all" else () if trouble == "none" else (trouble,)
    struck: Counter[str] = Counter()
    for seed in range(8):
        struck.update(simulate(seed, exact=exact, troubles=troubles).struck)
    assert not set(+struck) - set(troubles)
    if trouble not in ("failed tuple", "all"):  # no bolt here fails tuples of its own accord
        assert set(+struck) == set(troubles)


@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.parametrize("exact", [True, False], ids=["exactly-once", "at-least-once"])
@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_at_any_step_of_prepare_commit_and_recovery_ends_exact(how: str, exact: bool) -> None:
    """Every single step, one after the other: the record, and each task's discard, prepare, commit and read."""
    met: Counter[str] = Counter()
    for step in itertools.count(1):
        world = simulate(3, exact=exact, words=24, troubles=(), crash=(step, how))
        if world.crashed is None:
            break
        met[world.crashed] += 1
    assert met["record"] > 5
    assert met["store"] > 20


def _wrong(exact: bool, troubles: tuple[str, ...], seeds: int = 40) -> bool:
    """Whether a world comes out wrong."""
    for seed in range(seeds):
        try:
            simulate(seed, exact=exact, troubles=troubles)
        except (AssertionError, CorruptStateError, InvariantViolation):
            return True
    return False


def test_a_checkpoint_that_does_not_wait_for_the_trees_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundDriver, "_quiet", lambda self: not self._under_way)
    monkeypatch.setattr(Checkpoints, "lost", lambda self, why: None)
    assert _wrong(True, ("lost output", "late records"))


def test_acks_that_do_not_wait_for_the_checkpoint_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LivingStatefulBolt, "ack", LivingBolt.ack)
    assert _wrong(False, ("task dies", "round breaks off", "driver dies"))


def test_a_spout_that_does_not_go_back_with_the_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "seek", lambda self, positions: None)
    assert _wrong(True, ("driver dies", "task dies"))


def main() -> None:
    """``python -m tests.state.test_simulation``: worlds per minute, with all troubles."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    start, seed, committed = time.monotonic(), 0, 0
    while time.monotonic() - start < 60:
        for exact in (True, False):
            committed += simulate(seed, exact=exact).record.txid
        seed += 1
    print(f"{2 * seed:,} worlds in a minute, with checkpoints up to {committed:,}, all right")


if __name__ == "__main__":
    main()
