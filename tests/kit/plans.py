"""Plans of a Kafka spout, as a test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Plan = Mapping[str, Mapping[str, Any]]


def offsets(made: Plan | None) -> dict[str, tuple[int, int]]:
    """Partition -> (first_offset, next_offset)."""
    assert made is not None
    return {partition: (meta["first_offset"], meta["next_offset"]) for partition, meta in made.items()}
