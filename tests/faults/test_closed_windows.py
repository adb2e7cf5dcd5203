"""Windows on Spark that close into Kafka, PostgreSQL and Parquet, under kills: rows 2, 5, 6, 9, 15
and 21."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kit.closed_windows import Outcome, run
from tests.kit.fault_plugin import Faults
from tests.kit.kills import Kills

#: How many kills in each test.
KILLS = int(os.environ.get("RATCHET_KILLS", "6"))
KINDS = {"driver": 3, "worker": 3, "broker": 2, "postgres": 3, "zookeeper": 1}


@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.rule("C44")
@pytest.mark.fault(2, 5, 6, 9, 15, 21)
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        pytest.param(0, {}, id="collapsed"),
        pytest.param(0, {"topology.collapse.records.max": 0}, id="spread"),
        pytest.param(2, {"topology.collapse.records.max": 0}, id="cluster"),
    ],
)
def test_each_window_is_sent_once_to_every_store_whatever_is_killed(
    tmp_path: Path, seed: int, faults: Faults, workers: int, settings: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    kinds = {**KINDS, **({"executor": 3} if workers else {})}
    order = chance.choices(list(kinds), list(kinds.values()), k=KILLS)
    outcome = run(tmp_path, order, chance, workers=workers, **settings)
    faults.injected(KILLS)
    print(json.dumps(outcome.summary()))
    assert outcome.problems() == []
    assert len(outcome.expected) > 7


def test_missing_and_doubled_windows_are_named_as_problems() -> None:
    def problems(*rows: tuple[str, int, int]) -> list[str]:
        return Outcome(Kills(), Counter({("a", 60): 5, ("b", 60): 2}), {"topic": list(rows)}).problems()

    assert problems(("b", 60, 2), ("a", 60, 5)) == []
    assert problems(("a", 60, 5), ("a", 60, 5), ("b", 60, 2)) == ["topic: too many: 1, such as [('a', 60, 5)]"]
    assert problems(("a", 60, 4), ("b", 60, 2)) == [
        "topic: missing: 1, such as [('a', 60, 5)]",
        "topic: too many: 1, such as [('a', 60, 4)]",
    ]
