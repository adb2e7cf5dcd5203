"""The word count over Kafka, with one kill of each kind;
``python -m tests.kit.kafka_words`` does more.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kit.kafka_words import KINDS, run


@pytest.mark.dies("core 5", "core 6")
@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.kills
@pytest.mark.slow
@pytest.mark.behaviour("4.6", "4.9")
def test_every_word_is_counted_at_least_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    outcome = run(tmp_path, 1, seed, per_second=60)
    print(outcome.summary())
    assert outcome.seen.kills == Counter(KINDS)
    assert (outcome.missing, outcome.foreign) == (0, 0)
    assert outcome.words > 500
