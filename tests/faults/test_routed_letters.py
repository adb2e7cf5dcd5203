"""Records routed to several topics, and replays of dead letters, under kills: row 2."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.fault_plugin import Faults
from tests.kit.kills import Kills
from tests.kit.routed_letters import Outcome, order_of, run

#: How many kills in each long test.
KILLS = int(os.environ.get("RATCHET_KILLS", "12"))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.rule("C20", "C48", "C51")
@pytest.mark.fault(2)
@pytest.mark.parametrize("keeper", ["topic", "table"])
def test_each_record_is_routed_once_and_each_letter_replayed_once_whatever_is_killed(
    tmp_path: Path, seed: int, faults: Faults, keeper: str
) -> None:
    chance = random.Random(seed)
    order = order_of(KILLS, chance)
    outcome = run(tmp_path, order, chance, keeper)
    faults.injected(len(order))
    print(json.dumps(outcome.summary()))
    assert outcome.problems() == []
    assert outcome.letters and outcome.expected.total() > 100 and outcome.met > 0


def test_missing_and_doubled_records_and_letters_are_named_as_problems() -> None:
    expected, letters = Counter({("a", 1): 1, ("b", 2): 1}), Counter({3: 1})

    def problems(found: Counter[tuple[str, int]], left: Counter[int]) -> list[str]:
        return Outcome(Kills(), expected, found, letters, left).problems()

    assert problems(expected, letters) == []
    assert problems(Counter({("a", 1): 2, ("b", 2): 1}), letters) == ["records too many: 1, such as [('a', 1)]"]
    assert problems(Counter({("b", 1): 1, ("b", 2): 1}), Counter()) == [
        "records missing: 1, such as [('a', 1)]",
        "records too many: 1, such as [('b', 1)]",
        "letters missing: 1, such as [3]",
    ]
