"""A table that is mirrored by Debezium, Kafka and a topology, while all of them are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.mirrored import KINDS, order_of, run
from tests.kit.targets import Often

pytestmark = [pytest.mark.integration, pytest.mark.kills]


def test_a_mirror_has_the_rows_of_its_source_whatever_is_killed(tmp_path: Path, often: Often, seed: int) -> None:
    kills = often(len(KINDS), 50)
    seen = run(tmp_path, order_of(kills, seed), seed)
    print(seen)
    assert sum(seen["kills"].values()) == kills
    assert seen["rows"] > 0
