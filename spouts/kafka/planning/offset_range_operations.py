"""Ranges of offsets: split, joined, and looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from framework.topology import SourceRanges, SourceRecord
from framework.topology.spouts import END_OFFSET, LEFT_OUT, LEFT_OUT_FROM, Meta
from spouts.kafka.partition_plan_entries import (
    END_ASKED,
    READ_FIRST_UNTIL,
    SAME_LOG,
    position_after,
    position_of,
    split_at,
    stages_of,
    topic_and_number,
)
from spouts.kafka.record_viewer import RecordViewer
from spouts.kafka.topic_streams import Streams

#: What a joined range has of its last part.
_CARRIED = ("topic_id", "gaps", "lost_records", LEFT_OUT, LEFT_OUT_FROM, END_OFFSET, END_ASKED)


class KafkaRanges(SourceRanges):
    """``streams``: what is done with bad records of which topic; None: they end the run."""

    def __init__(self, viewer: RecordViewer, streams: Streams | None) -> None:
        self._viewer, self._streams = viewer, streams

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta | None:
        begin = position_after(first) if after else position_of(first)
        if int(last.get("gaps", 0)) != int(first.get("gaps", 0)):
            return None  # offsets in between were skipped, or are of other records by now
        whole = {"first_offset": begin.offset, "next_offset": int(last["next_offset"])}
        epochs = {"first_leader_epoch": begin.leader_epoch, "next_leader_epoch": last.get("next_leader_epoch")}
        known = {**epochs, **{each: last.get(each) for each in _CARRIED}}
        known[READ_FIRST_UNTIL] = last.get(READ_FIRST_UNTIL, first.get(READ_FIRST_UNTIL))
        return {**whole, **{name: value for name, value in known.items() if value is not None}}

    def beginning(self, meta: Meta) -> Meta:
        changed = {"next_offset": meta["first_offset"], "next_leader_epoch": meta.get("first_leader_epoch")}
        return {name: value for name, value in {**meta, **changed}.items() if value is not None and name != "gap"}

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        first, end = int(meta["first_offset"]), int(meta["next_offset"])
        if end - first < 2:
            return None
        return split_at(meta, (first + end) // 2)

    def stages(self, ranges: Mapping[str, Meta]) -> Sequence[Mapping[str, Meta]]:
        return stages_of(ranges)

    def offsets(self, meta: Meta) -> range | None:
        if (meta.get("gap") or {}).get("reason", "retention") not in SAME_LOG:
            return None  # the entry before is of another log
        return range(int(meta["first_offset"]), int(meta["next_offset"]))

    def takes_out(self, partition: str) -> bool:
        return self._streams is not None and self._streams.takes_out(topic_and_number(partition)[0])

    def peek(self, partition: str, meta: Meta) -> SourceRecord | None:
        return self._viewer.first(partition, int(meta["first_offset"]), int(meta["next_offset"]))
