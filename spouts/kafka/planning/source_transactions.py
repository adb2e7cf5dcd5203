"""Plans the changes of a source transaction together: each batch has all of them, or none.

Debezium writes the changes of a transaction into the topics of its tables, and the end of the
transaction into another topic, with the number of changes of each table. So the planner reads
ahead, and ends the ranges of a batch after the last changes of transactions whose ends it has read.

Invariants:

1. The ends are planned in their order in the topic of transactions, which is the order of the
   source's commits. The changes of a transaction are planned with its end.
2. A partition is planned in its order. A record without a transaction (a tombstone, a row of a
   snapshot) is planned with the preceding records, or alone.
3. A change whose transaction ended in an earlier batch is a repetition by a restarted connector,
   and is planned immediately. To recognise it, each leader reads the ends before the position of a
   batch again.
4. A batch keeps the limits of records and of bytes, but has at least one transaction, whatever its
   size.
5. The records that were read ahead are only a copy of the log. They are dropped if they do not
   match the positions, and when reading fails.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from framework.errors import ConfigError
from framework.observe.logs import get_logger
from spouts.codecs.debezium_transaction_metadata import (
    ChangeOrder,
    TransactionEnd,
    change_order,
    is_marker,
    transaction_end,
)
from spouts.kafka.consumer.lookahead_reader import Ahead
from spouts.kafka.partition_plan_entries import topic_and_number
from spouts.kafka.planning import batch_limits

_log = get_logger()

#: The end of the name of a connector's topic of transactions, after its prefix.
TRANSACTIONS = ".transaction"
#: How many records of the topic of transactions are read again, for invariant 3.
_READ_BACK = 10_000
#: The most ended transactions that are remembered.
_ENDED_MAX = 100_000
#: The least records of a partition that are read ahead, if a batch may have them.
_STEP_MIN = 1_000
#: The number of planned items that are kept before all of them are removed together.
_DROPPED_MAX = 10_000
#: The topic of messages of a connector, after its prefix.
_MESSAGES = ".message"
#: The seconds between two log lines about what batches wait for.
_SAY_AFTER_S = 60.0


class ReadsAhead(Protocol):
    """As ``LookaheadReader``."""

    def begin(self, partition: str, offset: int) -> None: ...
    def end(self, partition: str) -> None: ...
    def beginning(self, partition: str) -> int: ...
    def read(self) -> list[Ahead]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Run:
    """Adjacent records of one transaction, or of none, in a partition. ``next``: the offset after
    the last record. ``changes``: their number, without repetitions. ``highest``: the order of the
    last change so far. ``records``: their number, with repetitions. ``size``: the bytes of their
    values."""

    transaction: str | None
    next: int
    _: KW_ONLY
    changes: int = 0
    highest: int = 0
    records: int = 0
    size: int = 0


@dataclass(slots=True)
class _Log:
    """The records that were read ahead of a partition. ``runs[at:]`` is not planned. Everything
    before ``read_to`` was read. ``highest``: the order of the last change of each transaction that
    is not planned."""

    begin: int
    read_to: int
    runs: list[_Run] = field(default_factory=list)
    at: int = 0
    highest: dict[str, int] = field(default_factory=dict)

    def add(self, offset: int, order: ChangeOrder | None, size: int = 0) -> None:
        transaction = order.transaction if order is not None else None
        last = self.runs[-1] if len(self.runs) > self.at else None
        if last is None or last.transaction != transaction:
            last = _Run(transaction, offset + 1)
            self.runs.append(last)
        last.next = self.read_to = offset + 1
        last.records += 1
        last.size += size
        if order is not None and order.order > self.highest.get(order.transaction, 0):
            self.highest[order.transaction] = last.highest = order.order
            last.changes += 1

    def drop(self, offset: int) -> bool:
        """Drop the records before ``offset``. Returns whether the rest begins where a run begins,
        or in a run that may be divided."""
        start = self.begin
        while self.at < len(self.runs) and self.runs[self.at].next <= offset:
            run = self.runs[self.at]
            start = run.next
            if run.transaction is not None:
                self.highest.pop(run.transaction, None)
            self.at += 1
        if self.at > _DROPPED_MAX:
            del self.runs[: self.at]
            self.at = 0
        self.begin = offset
        return start == offset or self.at == len(self.runs) or self.runs[self.at].transaction is None


@dataclass(slots=True)
class _Ends:
    """The ends that were read from a topic of transactions. ``ended``: the transactions that end
    before ``begin``. ``ahead[at:]``: the others, with the offsets after their ends. ``begun``: the
    offset after the last record that is not an end."""

    begin: int
    read_to: int
    _: KW_ONLY
    ended: dict[str, None] = field(default_factory=dict)
    ahead: list[tuple[int, TransactionEnd]] = field(default_factory=list)
    at: int = 0
    begun: int = 0

    def add(self, offset: int, end: TransactionEnd | None) -> None:
        self.read_to = offset + 1
        if end is None:
            self.begun = offset + 1
        elif offset < self.begin:
            self.ended[end.transaction] = None
        else:
            self.ahead.append((offset + 1, end))

    def drop(self, offset: int) -> None:
        while self.at < len(self.ahead) and self.ahead[self.at][0] <= offset:
            self.ended[self.ahead[self.at][1].transaction] = None
            self.at += 1
        if self.at > _DROPPED_MAX:
            del self.ahead[: self.at]
            self.at = 0
        if len(self.ended) > _ENDED_MAX:
            for each in list(self.ended)[: _ENDED_MAX // 2]:  # no repetition is that late
                del self.ended[each]
        self.begin = offset


class _Walk(NamedTuple):
    """``changes``, and the ``highest`` order, of the sought transaction, in the runs before
    ``place``, whose last record is before ``offset``. ``follows``: the later transaction that
    follows, if any."""

    place: int
    offset: int
    changes: int = 0
    highest: int = 0
    follows: str | None = None


#: The partitions of the topics of the tables that a transaction has changed: topic, number of
#: changes, partitions.
_Changed = Callable[[str, TransactionEnd], Iterable[tuple[str, int, Sequence[str]]]]


class _Cut:
    """Finds where a batch can end, in the records that were read ahead. ``limits``: the most offset
    of each partition.

    After ``find``: ``taken``: the number of records. ``taken_bytes``: of their values. ``lacking``:
    the partitions that must be read further before more can be taken. ``waits_for``: a description
    of missing changes, for the log. ``unnamed``: the topics with changes of a transaction whose end
    does not name their tables. ``short``: the transactions that are taken without some of their
    changes."""

    def __init__(
        self,
        logs: Mapping[str, _Log],
        ends: Mapping[str, _Ends],
        offsets: Mapping[str, int],
        limits: Mapping[str, int],
        *,
        records_max: int,
        changed: _Changed,
    ) -> None:
        self._logs = {each: logs[each] for each in sorted(offsets) if each in logs}
        self._ends = {each: ends[each] for each in sorted(offsets) if each in ends}
        self._limits, self._records_max, self._changed = limits, records_max, changed
        self._cuts = dict(offsets)
        self._bytes_max = batch_limits.TASK_ROWS_BYTES_MAX / batch_limits.OVERSIZE_MAX
        self._places = {each: log.at for each, log in self._logs.items()}
        self._over: dict[str, dict[str, TransactionEnd]] = {each: {} for each in self._ends}
        self._owners = {each: _owner(each, self._ends) for each in self._logs}
        self.taken = self.taken_bytes = 0
        self._is_full = False  # the next transaction has too many bytes
        self.lacking: set[str] = set()
        self.waits_for = ""
        self.unnamed: set[str] = set()
        self.short: list[Mapping[str, Any]] = []

    def find(self) -> Mapping[str, int]:
        """The offset of each partition at which the batch ends."""
        self._take_free(max(self._records_max // 2, 1), self._bytes_max / 2)
        for partition, ends in self._ends.items():
            self._take_transactions(partition, ends)
        self._take_free(self._records_max, self._bytes_max)
        for partition, log in self._logs.items():
            limit = self._limits[partition]
            if self._places[partition] == len(log.runs):
                if log.read_to >= limit:
                    self._move(partition, limit)  # behind the last record are only control records
                else:
                    self.lacking.add(partition)
            elif not self.taken and not self.waits_for:
                transaction = log.runs[self._places[partition]].transaction
                self.waits_for = f"the end of transaction {transaction}, of topic {topic_and_number(partition)[0]}"
        return self._cuts

    @property
    def is_full(self) -> bool:
        """Whether the batch has as many records, or bytes, as it may have."""
        return self._is_full or self.taken >= self._records_max or self.taken_bytes >= self._bytes_max

    def _move(self, partition: str, offset: int) -> None:
        self.taken += max(offset - self._cuts[partition], 0)
        self._cuts[partition] = max(offset, self._cuts[partition])

    def _is_free(self, partition: str, run: _Run) -> bool:
        """Whether the records of a run may be planned by themselves."""
        if run.transaction is None:
            return True
        owner = self._owners[partition]
        return owner is not None and (
            run.transaction in self._over[owner] or run.transaction in self._ends[owner].ended
        )

    def _take_free(self, most: int, most_bytes: float) -> None:
        for partition, log in self._logs.items():
            limit = self._limits[partition]
            while self._places[partition] < len(log.runs) and self.taken < most and self.taken_bytes < most_bytes:
                run = log.runs[self._places[partition]]
                if not self._is_free(partition, run):
                    if self._owners[partition] is None:
                        topic, _ = topic_and_number(partition)
                        self.waits_for = (
                            f"topic {topic} has changes of transactions, but no topic <topic.prefix>{TRANSACTIONS} is read: "
                            "set provide.transaction.metadata=true in the connector, and read this topic too"
                        )
                    break
                self._note_unnamed(partition, run)
                each = run.size / run.records
                room = most - self.taken
                if self.taken_bytes + run.size > most_bytes:
                    room = min(room, max(int((most_bytes - self.taken_bytes) / each), 1))
                before = self._cuts[partition]
                self._move(partition, min(run.next, limit, before + room))
                self.taken_bytes += min(int(each * (self._cuts[partition] - before)), run.size)
                if self._cuts[partition] < run.next:
                    break
                self._places[partition] += 1

    def _note_unnamed(self, partition: str, run: _Run) -> None:
        owner = self._owners[partition]
        if owner is None or run.transaction is None or (end := self._over[owner].get(run.transaction)) is None:
            return
        topic, _ = topic_and_number(partition)
        if topic.removeprefix(f"{_prefix(owner)}.") not in end.changes:
            self.unnamed.add(topic)

    def _take_transactions(self, partition: str, ends: _Ends) -> None:
        limit, at, is_first = self._limits[partition], ends.at, True
        known = {each.transaction for _, each in ends.ahead[at:]}
        while at < len(ends.ahead) and ends.ahead[at][0] <= limit:
            if self.is_full and not is_first:
                return
            offset, end = ends.ahead[at]
            if end.transaction not in ends.ended and end.transaction not in self._over[partition]:
                if not self._take(partition, end, known):
                    return
                self._over[partition][end.transaction] = end
                is_first = False
            self._move(partition, offset)
            at += 1
        if ends.read_to < limit:
            self.lacking.add(partition)
        elif at == len(ends.ahead) and ends.begun <= self._cuts[partition]:
            self._move(partition, limit)

    def _take(self, owner: str, end: TransactionEnd, known: Collection[str]) -> bool:
        """Take the changes of a transaction, if all were read and there is room for their bytes.
        ``known``: the transactions whose ends were read."""
        found: dict[str, tuple[int, int]] = {}
        short: list[Mapping[str, Any]] = []
        for topic, count, partitions in self._changed(_prefix(owner), end):
            walks = {each: self._walk(each, end.transaction) for each in partitions}
            changes = _found_by(walks)
            if changes < count:
                walks = {each: self._walk(each, end.transaction, past_others=True) for each in partitions}
                changes = _found_by(walks)
            if changes < count:
                waiting = {each: walk for each, walk in walks.items() if walk.follows not in known}
                if waiting or not walks:
                    self.lacking.update(each if walk.follows is None else owner for each, walk in waiting.items())
                    self.waits_for = (
                        f"{count - changes:,} of {count:,} changes of transaction {end.transaction} in topic {topic}"
                    )
                    return False
                short.append({"transaction": end.transaction, "topic": topic, "changes": changes, "expected": count})
            found.update({each: (walk.place, walk.offset) for each, walk in walks.items() if walk.highest})
        size = sum(
            each.size for log, (place, _) in found.items() for each in self._logs[log].runs[self._places[log] : place]
        )
        if self.taken_bytes and self.taken_bytes + size > self._bytes_max:
            self._is_full = True
            return False
        self.taken_bytes += size
        for partition, (place, offset) in found.items():
            self._places[partition] = place
            self._move(partition, offset)
        self.short += short
        return True

    def _walk(self, partition: str, transaction: str, *, past_others: bool = False) -> _Walk:
        """Walk from the records that are not taken to the last record of a transaction. Records of
        other transactions before it are older, and their ends were lost. ``past_others``: pass also
        those between its changes, which no connector writes there: their transactions are
        forged."""
        log = self._logs.get(partition)
        if log is None:
            return _Walk(0, 0)
        walk = _Walk(self._places[partition], self._cuts[partition])
        for at in range(walk.place, len(log.runs)):
            run = log.runs[at]
            if run.next > self._limits[partition]:
                break
            if run.transaction == transaction:
                walk = _Walk(at + 1, run.next, walk.changes + run.changes, max(run.highest, walk.highest))
            elif not self._is_free(partition, run) and (walk.highest or transaction not in log.highest):
                if past_others and walk.highest < log.highest.get(transaction, 0):
                    continue
                return walk._replace(follows=run.transaction)
        return walk


def _found_by(walks: Mapping[str, _Walk]) -> int:
    """The number of changes. In one partition, the last change comes after all others, also after
    changes of an earlier batch, and changes that are not repeated."""
    return sum(each.highest if len(walks) == 1 else each.changes for each in walks.values())


def _prefix(partition: str) -> str:
    """The prefix of the connector that writes this topic of transactions."""
    return topic_and_number(partition)[0].removesuffix(TRANSACTIONS)


def _owner(partition: str, owners: Iterable[str]) -> str | None:
    """The topic of transactions of the connector that writes this topic."""
    topic, _ = topic_and_number(partition)
    found = [each for each in owners if topic.startswith(f"{_prefix(each)}.")]
    return max(found, key=len) if found else None


class SourceTransactions:
    """Divides a batch among partitions, without dividing a source transaction. Used by one thread.

    * ``partitions``: all partitions of the topics that are read, each as ``"topic/0"``.
    * ``is_new``: looks up whether a topic was created a moment ago and is read."""

    def __init__(
        self,
        reader: ReadsAhead,
        partitions: Callable[[], Iterable[str]],
        is_new: Callable[[str], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._partitions, self._is_new, self._now_s = reader, partitions, is_new, now_s
        self._logs: dict[str, _Log] = {}
        self._ends: dict[str, _Ends] = {}
        self._identities: dict[str, object] = {}
        self._has_markers: dict[str, bool] = {}  # topics with names as those of transactions have
        self._unnamed: set[str] = set()
        self._waits: tuple[str, float] = ("", 0.0)  # for what, and since when, or when it was logged

    def shares(
        self,
        offsets: Mapping[str, int],
        available: Mapping[str, int],
        records_max: int,
        identities: Mapping[str, object] = MappingProxyType({}),
    ) -> dict[str, int]:
        """The number of offsets of each partition in a batch that begins at ``offsets``.
        ``available``: the offsets that a partition has; 0 if it is missing. ``identities``: if the
        identity of a partition has changed, its log may have other records at the same offsets.
        Raises ``RetryableError`` when reading fails, and ``ConfigError`` when the ends of
        transactions have no order."""
        limits = {each: offset + available.get(each, 0) for each, offset in offsets.items()}
        step = max(records_max // max(sum(map(bool, available.values())), 1), min(records_max, _STEP_MIN))
        wanted = {each: min(limit, offsets[each] + step) for each, limit in limits.items()}
        try:
            for each, identity in identities.items():
                if self._identities.setdefault(each, identity) != identity:
                    self._identities[each] = identity
                    self._logs.pop(each, None)
                    self._ends.pop(each, None)
            self._continue_at(offsets, self._topics_of_transactions(offsets, available))
            while True:
                self._read_to(wanted)
                cut = _Cut(self._logs, self._ends, offsets, limits, records_max=records_max, changed=self._changed())
                ends = cut.find()
                more = {each for each in cut.lacking if wanted.get(each, 0) < limits.get(each, 0)}
                if cut.is_full or not more:
                    break
                for each in more:
                    wanted[each] = min(limits[each], wanted[each] + max(step, wanted[each] - offsets[each]))
        except BaseException:
            for each in (*self._logs, *self._ends):
                self._reader.end(each)
            self._logs, self._ends = {}, {}
            raise
        for short in cut.short:
            _log.warning("source.transaction_is_short", **short)
        for topic in cut.unnamed - self._unnamed:
            _log.warning(
                "source.transactions_of_another_topic",
                topic=topic,
                advice="the ends of its transactions do not name its table, so its changes are not kept together with others: "
                "take the transform that renames topics out of the connector",
            )
        self._unnamed |= cut.unnamed
        self._tell("" if cut.taken else cut.waits_for)
        return {each: ends[each] - offsets[each] for each in available}

    def close(self) -> None:
        self._reader.close()

    def _topics_of_transactions(self, offsets: Mapping[str, int], available: Mapping[str, int]) -> set[str]:
        """The partitions of the topics of transactions. A table may be named ``transaction``, too,
        but its topic has changes; an empty topic belongs to the connector with the shortest
        prefix."""
        named = sorted((each for each in offsets if topic_and_number(each)[0].endswith(TRANSACTIONS)), key=len)
        found: set[str] = set()
        for partition in named:
            topic, _ = topic_and_number(partition)
            if topic not in self._has_markers and available.get(partition):
                record = self._first(partition)
                if not record.is_end:
                    self._has_markers[topic] = is_marker(record.value)
            if self._has_markers.get(topic, _owner(partition, found) is None):
                if any(topic_and_number(each)[0] == topic for each in found):
                    raise ConfigError(
                        f"topic {topic!r} has several partitions, so the transactions in it have no order: keep_transactions "
                        "needs one partition; create the topic with one, or set topic.creation groups in the connector"
                    )
                found.add(partition)
        return found

    def _first(self, partition: str) -> Ahead:
        """The first record of a partition."""
        self._reader.begin(partition, self._reader.beginning(partition))
        try:
            while True:
                for record in self._reader.read():
                    if record.partition == partition:
                        return record
        finally:
            self._reader.end(partition)

    def _continue_at(self, offsets: Mapping[str, int], of_transactions: Collection[str]) -> None:
        for partition, offset in offsets.items():
            if partition in of_transactions:
                self._logs.pop(partition, None)
                ends = self._ends.get(partition)
                if ends is None or not ends.begin <= offset <= ends.read_to:
                    back = min(max(offset - _READ_BACK, self._reader.beginning(partition)), offset)
                    self._ends[partition] = _Ends(offset, back)
                else:
                    ends.drop(offset)
                continue
            self._ends.pop(partition, None)
            log = self._logs.get(partition)
            if log is None or not log.begin <= offset <= log.read_to or not log.drop(offset):
                self._logs[partition] = _Log(offset, offset)

    def _read_to(self, wanted: Mapping[str, int]) -> None:
        known: dict[str, _Log | _Ends] = {**self._logs, **self._ends}
        waiting = {each for each, until in wanted.items() if known[each].read_to < until}
        for each in waiting:
            self._reader.begin(each, known[each].read_to)
        while waiting:
            for record in self._reader.read():
                if record.partition not in waiting:
                    continue
                read = known[record.partition]
                if record.is_end:
                    read.read_to = max(read.read_to, record.offset)
                elif record.offset < read.read_to:
                    continue
                elif isinstance(read, _Ends):
                    read.add(record.offset, transaction_end(record.value))
                else:
                    read.add(record.offset, self._order(record), len(record.value or b""))
                if read.read_to >= wanted[record.partition]:
                    waiting.discard(record.partition)
                    self._reader.end(record.partition)

    def _order(self, record: Ahead) -> ChangeOrder | None:
        topic, _ = topic_and_number(record.partition)
        if topic.endswith(_MESSAGES) and any(topic == _prefix(each) + _MESSAGES for each in self._ends):
            return None  # messages of pg_logical_emit_message change no table
        return change_order(record.value)

    def _changed(self) -> _Changed:
        by_topic: dict[str, list[str]] = {}
        is_new = functools.cache(self._is_new)  # a look-up, for each transaction
        for each in self._partitions():
            by_topic.setdefault(topic_and_number(each)[0], []).append(each)

        def changed(prefix: str, end: TransactionEnd) -> Iterable[tuple[str, int, Sequence[str]]]:
            for table, changes in end.changes.items():
                topic = f"{prefix}.{table}"
                if topic in by_topic:
                    yield topic, changes, by_topic[topic]
                elif is_new(topic):
                    yield topic, changes, ()

        return changed

    def _tell(self, waits_for: str) -> None:
        """Log what the batches wait for, if the wait has lasted."""
        now_s = self._now_s()
        if not waits_for or waits_for != self._waits[0]:
            self._waits = waits_for, now_s
        elif now_s - self._waits[1] >= _SAY_AFTER_S:
            self._waits = waits_for, now_s
            _log.warning("source.waits_for_transaction", waits_for=waits_for)
