"""Random worlds: no message is acked early, and none is forgotten.

The long run is ``python -m tests.simulation --only trees``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from framework.acking.ack_reports import LedgerPart
from framework.core.acker_task import AckerTask
from framework.core.bolt_task import BoltTask
from framework.core.component_task import Outflow
from framework.errors import TopologyError
from tests.kit.searching import first_seed, keep
from tests.kit.targets import Often
from tests.kit.tree_world import simulate
from tests.kit.trouble import TROUBLES

#: The rarest trouble comes in one world of six; the mistakes below show in nearly every one.
WORLDS_MAX = 300


@pytest.mark.behaviour("4.3", "4.6", "4.8")
@pytest.mark.parametrize("trouble", [*TROUBLES, "all", "none"])
def test_no_message_is_acked_early_and_none_is_forgotten(trouble: str, seed: int, in_all: bool, often: Often) -> None:
    troubles = TROUBLES if trouble == "all" else () if trouble == "none" else (trouble,)
    expected = set(troubles) if in_all or trouble != "all" else set()  # each has a test case of its own
    struck: Counter[str] = Counter()
    worlds = often(1, 12)
    for number in itertools.count():
        if number >= worlds and expected <= set(+struck):
            break
        assert number < WORLDS_MAX, f"{+struck} came, of {troubles}"
        world = simulate(seed + number, troubles=troubles)
        assert world.wrong == []
        struck.update(world.struck)
        assert set(+struck) <= set(troubles)
        if expected <= set(+world.struck):
            keep(seed + number)


@pytest.mark.behaviour("4.3")
def test_a_ledger_that_forgets_what_was_emitted_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The oracle sees the mistake: the ackers hear of no edges, so trees seem complete at once."""
    monkeypatch.setattr("framework.acking.ack_reports.Ledger.emitted", lambda self, roots, edges: None)
    monkeypatch.setattr("framework.acking.ack_reports.Ledger.acked", lambda self, roots, edge: None)
    first_seed(range(seed, seed + 10), lambda each: simulate(each, troubles=()).wrong)


@pytest.mark.behaviour("4.6")
def test_an_acker_that_completes_trees_too_early_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here the acker takes the number of any tree for 0 that two tasks have told it of."""
    apply = AckerTask._apply

    def believing(self: AckerTask, parts: Sequence[LedgerPart]) -> set[int]:
        heard = Counter(root for part in parts for root in part.roots.tolist())
        once = [np.fromiter((heard[root] == 1 for root in part.roots.tolist()), bool) for part in parts]
        believed = [
            part._replace(roots=part.roots[kept], values=part.values[kept])
            for part, kept in zip(parts, once, strict=True)
        ]
        return apply(self, believed)

    monkeypatch.setattr(AckerTask, "_apply", believing)
    first_seed(range(seed, seed + 100), lambda each: simulate(each, troubles=("lost output",)).wrong)


@pytest.mark.rule("C34")
def test_a_stream_that_is_forgotten_when_another_fails_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here the rows of one stream never leave, but the acks of the tuples they were made of do."""

    def until_the_first_error(self: Outflow) -> None:
        rows = self._surroundings.outcome.of[self._component_id].rows
        for stream, task in list(rows):
            try:
                self._flush(stream, task)
            except TopologyError:
                rows.clear()
                raise

    monkeypatch.setattr(Outflow, "flush", until_the_first_error)
    first_seed(range(seed, seed + 100), lambda each: simulate(each, troubles=("value does not fit",)).wrong)


@pytest.mark.rule("C34")
def test_an_ack_that_stands_for_lost_output_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Here an ack says nothing of what was made of its tuple in an earlier, lost round."""
    monkeypatch.setattr(BoltTask, "bind", lambda self, tup: None)
    # It shows in one of 70.
    first_seed(range(seed, seed + 2000), lambda each: simulate(each, 40, TROUBLES, 8).wrong)
