"""The end of a bounded spout: fixed once, when the first plan is made, and carried by every plan
after it.

An end holds for what the spout's ``end`` said when it was fixed. When ``end`` says something else
at a later start, the topology goes on from where it is to the other end.
"""

from __future__ import annotations

from collections.abc import Mapping

from framework.errors import RetryableError
from framework.topology.spouts import END_OFFSET, Meta, is_read_to_end
from spouts.kafka.cluster_metadata import KafkaMetadata, KafkaTopics, Offset
from spouts.kafka.partition_plan_entries import END_ASKED, SAME_LOG, Position, topic_and_number
from spouts.kafka.planning.bound_offsets import (
    check_exist,
    check_is_after_start,
    check_is_past,
    named_bound,
    offsets_at,
)
from spouts.kafka.planning.open_transactions import OpenTransactions
from spouts.kafka.start_end_options import OFFSET, Bounds, text_of_bound

Plan = Mapping[str, Meta | None]


class ReadingEnd:
    """``asked``: what the spout's ``end`` says; None: reading does not end. ``waits_for_open``: the
    end of a log includes what is behind an open kafka_txn."""

    def __init__(self, asked: Bounds | None, open_transactions: OpenTransactions, *, waits_for_open: bool) -> None:
        self._asked = asked
        self._open_transactions = open_transactions
        self._waits_for_open = waits_for_open
        self._fixed: Plan | None = None  # the last plan that was found to be fixed; a plan never changes
        #: The last plan that was made after nothing: another one may replace it.
        self.first_plan: Mapping[str, Meta] = {}
        self._known: Plan = {}  # the last plan, also if another one is to replace it

    @property
    def is_bounded(self) -> bool:
        return self._asked is not None

    def resume(self, plan: Mapping[str, Meta]) -> None:
        """Go on after a plan of an earlier run, which the next one may replace."""
        self.note_plan(plan, first=True)

    def note_plan(self, plan: Mapping[str, Meta], *, first: bool) -> None:
        """``first``: nothing was planned before it."""
        self._known = plan
        if first:
            self.first_plan = plan

    def says(self, partition: str) -> bool:
        """Whether ``end`` says anything of this partition."""
        return self._asked is not None and self._asked.of(partition) is not None

    def asked_of(self, partition: str) -> str | None:
        """The requested end, in the form of plans."""
        bound = self._asked.of(partition) if self._asked is not None else None
        return text_of_bound(bound) if bound is not None else None

    def holds(self, partition: str, meta: Meta | None) -> bool:
        """Whether this entry of a plan has the end that is asked for."""
        return meta is not None and END_OFFSET in meta and meta.get(END_ASKED) == self.asked_of(partition)

    def is_fixed(self, plan: Plan) -> bool:
        """Whether each entry has the end that is asked for; True where none is."""
        if self._asked is None:
            return True
        if plan is not self._fixed and bool(plan) and all(self.holds(each, meta) for each, meta in plan.items()):
            self._fixed = plan
        return plan is self._fixed

    def ignores(self, partition: str, plan: Mapping[str, Meta | None]) -> bool:
        """Whether a partition came after the ends were fixed."""
        if not self.is_bounded or partition in plan:
            return False
        if not plan and self.is_fixed(self.first_plan):
            return partition not in self.first_plan
        return bool(plan) and (self.is_fixed(plan) or not self.says(partition))

    def unreached(self, plan: Plan) -> Plan:
        """The entries after which more is to be read."""
        if self._asked is None:
            return plan
        return {each: meta for each, meta in plan.items() if not self.is_reached(each, meta)}

    def is_reached(self, partition: str, meta: Meta | None) -> bool:
        """Whether nothing is read of this partition after this entry, whatever becomes of its
        log."""
        return self._asked is not None and meta is not None and self.holds(partition, meta) and is_read_to_end(meta)

    def is_over(self, plan: Plan) -> bool:
        """Whether nothing at all is read after this plan."""
        return bool(plan) and self._asked is not None and all(self.is_reached(each, at) for each, at in plan.items())

    def limit(self, meta: Meta | None, end: int) -> int:
        """How far is read, of a log that ends at ``end``."""
        if self._asked is None or meta is None or END_OFFSET not in meta:
            return end
        return min(end, int(meta[END_OFFSET]))

    @staticmethod
    def is_cut(end: tuple[int, str] | None, log_end: int) -> bool:
        """Whether a log ends before the end of reading though it once ended there, or later. An end
        that is an offset may be ahead of the log."""
        return end is not None and log_end < end[0] and not end[1].startswith(OFFSET)

    def note_log_changes(
        self, positions: Mapping[str, Position], topics: KafkaTopics, ends: Mapping[str, Offset]
    ) -> None:
        """Where a log is another one than the end was fixed in, reading ends where that log ended
        when this was seen. Raises ``RetryableError`` when it has no
        leader."""
        for partition, position in positions.items():
            if position.end is None or position.gap is None or position.gap["reason"] in SAME_LOG:
                continue
            if partition not in ends and topic_and_number(partition)[0] in topics.topic_ids:
                raise RetryableError(f"partition {partition} is another log, and has no leader; the batch waits for it")
            end, asked = position.end
            log_end = ends[partition].offset if partition in ends else position.offset
            if (known := self._known_end(partition, position)) is not None:
                end = known
            elif position.gap["reason"] == "recreated":
                end = log_end
            position.end = min(end, log_end), asked

    def _known_end(self, partition: str, position: Position) -> int | None:
        """Where reading ends by a plan of the same log."""
        known = self._known.get(partition)
        if known is None or not self.holds(partition, known) or known.get("topic_id") != position.topic_id:
            return None
        return int(known[END_OFFSET])

    def fix(
        self,
        positions: Mapping[str, Position],
        ends: Mapping[str, Offset],
        metadata: KafkaMetadata,
        *,
        first: bool,
    ) -> None:
        """Note where reading ends, in the partitions where that is not fixed yet. When the
        next plan may replace another one, the ends are those of that plan. Raises ``ConfigError``
        where nothing is said of a partition, a time is in the future, or an offset is one of a
        partition that does not exist or, in the ``first`` plan, before the start."""
        bounds = {
            each: named_bound("end", self._asked, each)
            for each, position in positions.items()
            if position.end is None or position.end[1] != self.asked_of(each)
        }
        if self._asked is not None:
            check_exist("end", self._asked, {*positions, *ends, *self._known})
        for partition in list(bounds):
            if (known := self._known_end(partition, positions[partition])) is not None:
                positions[partition].end = known, text_of_bound(bounds.pop(partition))
        if not bounds:
            return
        check_is_past(bounds)
        if first:
            check_is_after_start(bounds, {each: at.offset for each, at in positions.items() if at.gap is None})
        self._open_transactions.look(metadata, ends, now=True)
        last = {**ends, **(self._open_transactions.ends if self._waits_for_open else {})}
        found = offsets_at(metadata, {each: at for each, at in bounds.items() if each in ends}, last, patient=True)
        for partition, bound in bounds.items():
            position = positions[partition]
            if partition in ends and partition not in found:
                metadata.refresh()
                raise RetryableError("a partition's leader has moved; looking it up again")
            position.end = (
                found.get(partition, position.offset),
                text_of_bound(bound),
            )  # of a topic that is gone: here
            if bound == "latest" and not self._waits_for_open and partition in ends:
                self._open_transactions.tell(partition, ends[partition].offset)
