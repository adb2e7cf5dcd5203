"""Walks the levels of a plan: passes the output of one level's tasks to the tasks of the next.

Used for small batches, batches in this process, and rounds. In a chain of Spark jobs, Spark's
shuffle does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

R = TypeVar("R")


def walk(
    widths: Sequence[int],
    run_level: Callable[[int, Sequence[list[R]]], Iterable[tuple[int, R]]],
    inboxes: Mapping[int, list[R]] | None = None,
) -> list[R]:
    """Run all levels, and return the records that leave the last one, by partition.

    * ``widths``: tasks per level.
    * ``run_level``: takes the number of a level and the records for each of its tasks; returns
      records, each with its partition in the next level.
    * ``inboxes``: partition of the first level -> its records.
    """
    arrived = inboxes or {}
    for level, width in enumerate(widths):
        arrived = delivered(run_level(level, [arrived.get(partition, []) for partition in range(width)]))
    return [record for partition in sorted(arrived) for record in arrived[partition]]


def delivered(addressed: Iterable[tuple[int, R]]) -> dict[int, list[R]]:
    """The records of each partition, in the order in which they were sent."""
    inboxes: dict[int, list[R]] = {}
    for partition, record in addressed:
        inboxes.setdefault(partition, []).append(record)
    return inboxes
