"""Kafka sinks and dead letters while drivers, workers, executors and servers are killed, and links cut: rows 2, 5, 6, 9, 15, 29."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fault_plugin import Faults
from tests.kit.kafka_copies import KINDS, ON_CLUSTER, run
from tests.kit.stores import server_of

#: How many kills in each test.
KILLS = int(os.environ.get("RATCHET_KILLS", "5"))


@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.behaviour("2.7", "3.4")
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
def test_each_record_is_copied_once_and_each_bad_one_is_one_letter_whatever_is_killed(
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
