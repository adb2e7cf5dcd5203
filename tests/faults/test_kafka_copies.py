"""Kafka sinks and dead letters under kills and cut links: rows 2, 5, 6, 9, 15, 29."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fault_plugin import Faults
from tests.kit.kafka_copies import KINDS, ON_CLUSTER, Copied, Outcome, run
from tests.kit.kills import Kills
from tests.kit.stores import server_of

#: How many kills in each test.
KILLS = int(os.environ.get("RATCHET_KILLS", "5"))


@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.behaviour("2.10", "3.4")
@pytest.mark.rule("C11", "C20", "C24", "C26")
@pytest.mark.fault(2, 5, 6, 9, 15, 29)
@pytest.mark.parametrize(
    ("workers", "store", "settings"),
    [
        pytest.param(0, "none", {"topology.collapse.records.max": 0}, id="local-alone"),
        pytest.param(0, "none", {}, id="collapsed-alone"),
        pytest.param(0, "sqlite", {"topology.collapse.records.max": 0}, id="local-beside-sqlite"),
        pytest.param(2, "none", {"topology.collapse.records.max": 0}, id="cluster-alone"),
        pytest.param(2, "postgres", {"topology.collapse.records.max": 0}, id="cluster-beside-postgres"),
    ],
)
def test_each_record_is_copied_once_and_each_bad_one_becomes_one_dead_letter_whatever_is_killed(
    tmp_path: Path, seed: int, faults: Faults, workers: int, store: str, settings: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    kinds = {**KINDS, **(ON_CLUSTER if workers else {})}
    order = chance.choices(list(kinds), list(kinds.values()), k=KILLS)
    with server_of(store, tmp_path) as (address, _):
        outcome = run(tmp_path, order, chance, store=store, address=address, workers=workers, **settings)
    faults.injected(KILLS)
    print(json.dumps(outcome.summary()))
    assert outcome.problems() == []
    assert outcome.expected.bad


def copied(*good: int, bad: int = 1, total: int = 3) -> Copied:
    return Copied(Counter(("k", n) for n in good), Counter({("t", 0, 7, b""): bad}), {"k": (2, total)})


def test_missing_doubled_and_foreign_records_are_named_as_problems() -> None:
    def problems(found: Copied) -> list[str]:
        return Outcome(Kills(), copied(1, 2), found).problems()

    assert problems(copied(1, 2)) == []
    assert problems(copied(1, 1, 2)) == ["good records too many: 1, such as [('k', 1)]"]
    assert problems(copied(1)) == ["good records missing: 1, such as [('k', 2)]"]
    assert problems(copied(1, 2, bad=2)) == ["bad records too many: 1, such as [('t', 0, 7, b'')]"]
    assert problems(copied(1, 2, bad=0)) == ["bad records missing: 1, such as [('t', 0, 7, b'')]"]
    assert problems(copied(1, 2, total=4)) == ["the state holds {'k': (2, 4)}, and the records say {'k': (2, 3)}"]
