"""The Avro codec and Apache Avro's own implementation read the same (2.9), and whatever bytes come,
a value is a row or a bad record.

``python -m tests.kit.avro_java`` and ``python -m tests.kit.avro_fuzz`` do it for longer."""

from __future__ import annotations

import collections

import pytest

from tests.kit.avro_fuzz import fuzz_values
from tests.kit.avro_java import Java, compare
from tests.kit.avro_pairs import Pairs
from tests.kit.fuzzing import MEMORY_MAX_MB, memory_mb

pytestmark = pytest.mark.behaviour("2.9")


@pytest.mark.slow
@pytest.mark.integration
def test_random_pairs_of_schemas_are_read_as_java_reads_them() -> None:
    counts: collections.Counter[str] = collections.Counter()
    with Java() as java:
        for seed in range(500):
            print(f"seed {seed}")
            compare(java, Pairs(seed), 20, counts)
    assert counts["schemas: not valid, says Java"] == 0, counts
    for each in (
        "schemas: of plain types",
        "schemas: refused, incompatible says Java",
        "values, whole: equal",
        "values, damaged: equal",
        "values, damaged: bad",
    ):
        assert counts[each] > 20, (each, counts)


@pytest.mark.slow
def test_any_bytes_are_a_row_or_a_bad_record_alone_and_together() -> None:
    counts: collections.Counter[str] = collections.Counter()
    before = memory_mb()
    for seed in range(1_500):
        print(f"seed {seed}")
        counts += fuzz_values(seed)
    assert min(counts[each] for each in ("good values", "bad values", "refused schemas")) > 100, counts
    assert memory_mb() - before < MEMORY_MAX_MB
