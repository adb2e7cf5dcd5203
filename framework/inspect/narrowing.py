"""Ranges of a batch, made smaller by halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from framework.topology.spouts import Meta, PartitionPlanner


def with_records(planner: PartitionPlanner, plan: Mapping[str, Meta]) -> dict[str, Meta]:
    """The ranges that may hold records."""
    return {each: meta for each, meta in plan.items() if planner.record_count({each: meta}) != 0}


def narrow(planner: PartitionPlanner, partition: str, meta: Meta, shows: Callable[[Meta], bool]) -> Iterator[Meta]:
    """The smallest parts of a range that show something, in order: a part none of whose halves
    shows it, or that cannot be split. The range itself is known to show it."""
    found = False
    for half in planner.ranges.split(partition, meta) or ():
        if shows(half):
            found = True
            yield from narrow(planner, partition, half, shows)
    if not found:
        yield meta


def cut(planner: PartitionPlanner, partition: str, meta: Meta, is_small: Callable[[Meta], bool]) -> Iterator[Meta]:
    """The range in pieces that are small, in order, as far as it can be split."""
    halves = None if is_small(meta) else planner.ranges.split(partition, meta)
    if halves is None:
        yield meta
        return
    for half in halves:
        yield from cut(planner, partition, half, is_small)
