"""A chain of states and windows over Kafka, in a process that is killed: exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kit.kafka_counts import run

pytestmark = [pytest.mark.integration, pytest.mark.kills]


@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.slow
def test_states_and_windows_are_the_fold_of_the_records_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    """On Spark: ``tests/state/test_on_spark.py``, and with more kills
    ``python -m tests.kit.kafka_counts``.
    """
    order = ["driver", "redis paused", "rescale"]
    made = run(tmp_path, order, exact=True, per_second=200, seed=seed, executor="local")
    print(made.summary())
    assert made.seen.kills == Counter(order)
    assert made.expected_spans.total() > 500
    assert made.exact
