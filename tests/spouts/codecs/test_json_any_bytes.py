"""Whatever bytes come, a value is a row or a bad record.

``python -m tests.kit.json_fuzz`` does it for longer.
"""

from __future__ import annotations

import collections

import pytest

from tests.kit.fuzzing import MEMORY_MAX_MB, Counts, memory_mb
from tests.kit.json_fuzz import fuzz
from tests.kit.targets import Often

pytestmark = pytest.mark.behaviour("2.9")


def test_any_bytes_are_a_row_or_a_bad_record_alone_and_together(often: Often) -> None:
    counts: Counts = collections.Counter()
    before = memory_mb()
    for seed in range(often(8, 75)):
        print(f"seed {seed}")
        counts += fuzz(seed)
    assert min(counts[each] for each in ("good values", "bad values")) > often(25, 250), counts
    assert memory_mb() - before < MEMORY_MAX_MB
