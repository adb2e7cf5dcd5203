"""The word count over Kafka, while the driver, the broker and, on a Spark cluster, an executor are
killed.

``RATCHET_KILLS=20`` kills each 20 times; ``python -m tests.kit.kafka_words`` does the same alone.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.kafka_words import KINDS, run

#: How often each kind is killed.
KILLS = int(os.environ.get("RATCHET_KILLS", "5"))
ON_A_CLUSTER = [pytest.mark.slow, pytest.mark.spark, pytest.mark.dies("core 5")]


@pytest.mark.slow
@pytest.mark.dies("core 6")
@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.behaviour("4.6", "4.9")
@pytest.mark.parametrize(
    ("executor", "split", "times"),
    [
        ("local", "columns", 1),
        pytest.param("spark", "columns", KILLS, marks=ON_A_CLUSTER),
        pytest.param("spark", "tuples", KILLS, marks=ON_A_CLUSTER),
    ],
)
def test_every_word_is_counted_at_least_once_whatever_is_killed(
    tmp_path: Path, seed: int, executor: str, split: str, times: int
) -> None:
    outcome = run(tmp_path, times, seed, per_second=60, split=split, executor=executor)
    print(outcome.summary())
    assert outcome.seen.kills == Counter(dict.fromkeys(KINDS[executor], times))
    assert (outcome.missing, outcome.foreign) == (0, 0)
    assert outcome.words > 500 * times
