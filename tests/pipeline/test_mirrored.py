"""A table that is mirrored by Debezium, Kafka and a topology, while all of them are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.mirrored import order_of, run

pytestmark = [pytest.mark.integration, pytest.mark.kills]


@pytest.mark.slow
def test_a_mirror_has_the_rows_of_its_source_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    kills = 50
    seen = run(tmp_path, order_of(kills, seed), seed)
    print(seen)
    assert sum(seen["kills"].values()) == kills
    assert seen["rows"] > 0
