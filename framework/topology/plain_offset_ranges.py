"""Ranges of a source that numbers the records of a partition, and knows nothing else about them."""

from __future__ import annotations

from framework.topology.range_operations import Meta, SourceRanges
from framework.topology.spouts import leaving_out_too


class OffsetRanges(SourceRanges):
    """Entries of plans with the offsets ``first`` and ``next``. ``takes_out``: whether a record may
    be left out because its value was refused."""

    def __init__(self, *, takes_out: bool) -> None:
        self._takes_out = takes_out

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta:
        return leaving_out_too({"first": first["next" if after else "first"], "next": last["next"]}, last)

    def beginning(self, meta: Meta) -> Meta:
        return {**meta, "next": meta["first"]}

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        first, end = int(meta["first"]), int(meta["next"])
        if end - first < 2:
            return None
        middle = (first + end) // 2
        return {**meta, "next": middle}, {**meta, "first": middle}

    def takes_out(self, partition: str) -> bool:
        return self._takes_out

    def offsets(self, meta: Meta) -> range:
        return range(int(meta["first"]), int(meta["next"]))
