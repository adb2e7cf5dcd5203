"""The task that stays for small batches under kills: rows 2, 5 and 6, each commit one step of its
store.

``RATCHET_KILLS=50`` kills as often in each test.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.kit.fault_plugin import Faults
from tests.kit.staying import order_of, run
from tests.kit.stores import server_of

#: How many kills in each test.
KILLS = int(os.environ.get("RATCHET_KILLS", "2"))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.spark
@pytest.mark.fault(2, 5, 6)
@pytest.mark.rule("C1", "C2")
@pytest.mark.parametrize(
    ("workers", "store"),
    [
        pytest.param(0, "sqlite", id="local"),
        pytest.param(2, "postgres", id="cluster"),
        pytest.param(2, "redis", id="cluster-redis"),
    ],
)
def test_every_record_counts_once_whatever_is_killed_while_a_task_stays(
    tmp_path: Path, seed: int, faults: Faults, workers: int, store: str
) -> None:
    chance = random.Random(seed)
    order = order_of(KILLS, workers, chance)
    with server_of(store, tmp_path) as (address, _):
        outcome = run(tmp_path, order, chance, store=store, address=address, workers=workers)
    faults.injected(KILLS)
    print(json.dumps(outcome.summary()))
    assert outcome.seen.kills.total() == KILLS
    assert outcome.seen.messages > 100
    assert outcome.found == outcome.expected
