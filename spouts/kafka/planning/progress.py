"""How far reading has come: what is left to read, in all and in each partition."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from framework.topology import PartitionProgress
from framework.topology.spouts import Meta
from spouts.kafka.cluster_metadata import Offset
from spouts.kafka.partition_plan_entries import Position, topic_and_number
from spouts.kafka.planning.bounded_end import ReadingEnd
from spouts.kafka.planning.log_offsets_cache import LogOffsets
from spouts.kafka.planning.open_transactions import OpenTransactions


class KafkaProgress:
    """Measures plans by the ends of the logs, as the planner saw them last."""

    def __init__(self, logs: LogOffsets, end: ReadingEnd, open_transactions: OpenTransactions) -> None:
        self._logs, self._end, self._open_transactions = logs, end, open_transactions
        self._lag: tuple[object, object, object, int] | None = None
        self._partitions: tuple[tuple[object, ...], Mapping[str, PartitionProgress]] | None = None

    def unplanned_records(self, previous: Mapping[str, Meta | None]) -> int:
        """How many records may be read after this plan."""
        records = 0
        for partition, end in self._logs.ends.items():
            meta = previous.get(partition)
            if self._end.ignores(partition, previous):
                continue
            begin = int(meta["next_offset"]) if meta is not None else self._logs.beginnings.get(partition, 0)
            records += max(self._end.limit(meta, end.offset) - begin, 0)
        return records

    def lag(self, previous: Mapping[str, Meta | None]) -> int | None:
        """As ``PartitionPlanner.lag``."""
        ends, open_ends, known = self._logs.ends, self._open_transactions.ends, self._lag
        if not ends:
            return None
        if known is not None and known[0] is ends and known[1] is open_ends and known[2] is previous:
            return known[3]
        lag = 0
        for partition, end in ends.items():
            if (meta := previous.get(partition)) is None and self._end.ignores(partition, previous):
                continue
            readable, hidden = self._readable(partition, meta, end)
            lag += (max(readable - int(meta["next_offset"]), 0) if meta is not None else readable) + hidden
        self._lag = ends, open_ends, previous, lag
        return lag

    def partitions(
        self, committed: Mapping[str, Meta], in_flight: Sequence[Mapping[str, Meta]]
    ) -> Mapping[str, PartitionProgress]:
        """As ``PartitionPlanner.progress``."""
        ends, known = self._logs.ends, self._partitions
        of = (ends, self._open_transactions.ends, self._logs.beginnings, committed, *in_flight)
        if known is not None and len(known[0]) == len(of) and all(map(operator.is_, known[0], of)):
            return known[1]
        found: dict[str, PartitionProgress] = {}
        first_known = committed or (in_flight[0] if in_flight else {})
        for partition in sorted({*ends, *committed, *(each for plan in in_flight for each in plan)}):
            done, end = committed.get(partition), ends.get(partition)
            ranges = [plan[partition] for plan in in_flight if partition in plan]
            if not ranges and self._end.ignores(partition, first_known):
                continue
            entry = done if done is not None else ranges[0] if ranges else None
            readable, hidden = self._readable(partition, entry, end) if end is not None else (None, 0)
            first = ranges[0]["first_offset"] if ranges else self._logs.beginnings.get(partition, 0)
            found[partition] = PartitionProgress(
                readable,
                int(done["next_offset"] if done is not None else first),
                sum(int(meta["next_offset"]) - int(meta["first_offset"]) for meta in ranges),
                int(done.get("lost_records", 0)) if done is not None else 0,
                hidden,
            )
        self._partitions = of, found
        return found

    def hidden(self, plan: Mapping[str, Meta | None], topic_ids: Mapping[str, str]) -> Mapping[str, Meta]:
        """As ``PartitionPlanner.hidden``. ``plan``: the last one."""
        found = {}
        for each, end in self._logs.ends.items():
            readable, records = self._readable(each, plan.get(each), end)
            if records and not self._end.ignores(each, plan):
                found[each] = Position(readable, topic_ids.get(topic_and_number(each)[0])).meta(records, None)
        return found

    def _readable(self, partition: str, meta: Meta | None, end: Offset) -> tuple[int, int]:
        """How far the partition may be read now, and how many records behind an open kafka_txn are
        to be read later."""
        hidden = self._open_transactions.records(partition, end.offset)
        readable = self._end.limit(meta, end.offset)
        return readable, self._end.limit(meta, end.offset + hidden) - readable
