"""Replays dead letters as batches of a spout (C48).

A request names letters. The planner puts some of them into a separate plan, as an entry of a
pseudo-partition; the source contributes nothing to that batch. The reader decodes the letters like
records of the source, and emits the result of each letter on the stream of dead letters: settled,
or refused again. So one transaction applies a record and ends its letter, or does neither, and a
repeated attempt reads the same letters.

Invariants:

1. A request is planned in its order, each letter once: the entry contains the progress, and each
   plan continues where the previous one ends. A request begins only at the position at which its
   letters were listed: otherwise other plans may have ended them meanwhile.
2. A letter is read as its keeper held it before the transaction, whatever attempts at the
   transaction have written since.
3. A letter that its keeper did not have at that time contributes nothing.
4. A letter with only a part of its record is refused again.

The fields of an entry:

* ``request``: the id of the last planned request.
* ``action``: how its letters have to end.
* ``begin``: the position of its first letter.
* ``first``, ``next``: the positions of this batch; positions continue to rise from request to
  request.
* ``letters``: the keys by which their keeper finds them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa

from framework.errors import DataLossError, RetryableError
from framework.topology.attempt import TransactionAttempt
from framework.topology.context import TopologyContext
from framework.topology.dead_letters import Letter, LetterReader
from framework.topology.extra_partition_spout_wrapper import (
    Plan,
    PlannerWrapper,
    RangesWrapper,
    ReaderWrapper,
    SpoutWrapper,
    without,
)
from framework.topology.range_operations import SourceRanges
from framework.topology.spouts import (
    DEAD_LETTER_FIELDS,
    DEAD_LETTER_STREAM,
    DROPPED,
    LEFT_OUT,
    REFUSED,
    REPLAYED,
    Meta,
    OnStream,
    OpaquePartitionedTransactionalSpout,
    PartitionedSpout,
    PartitionedTransactionalSpout,
    PartitionPlanner,
    PartitionReader,
    ReadCounts,
    Rows,
    on_stream,
)

#: The pseudo-partition in plans.
LETTERS_PARTITION = "@letters"
#: The most letters in a batch, and the most bytes of them.
BATCH_LETTERS_MAX = 500
BATCH_BYTES_MAX = 16 << 20
#: How often a running topology checks for a request.
LOOK_S = 1.0
CUT_REASON = "the letter has only a part of its record: replay the record itself"


class LetterRequest(NamedTuple):
    """Letters to replay or drop.

    * ``letters``: for each, the key by which its keeper finds it, and its bytes.
    * ``position``: the end of the letters in the last closed plan before they were listed. None, in
      a request of an earlier version: it begins anywhere."""

    id: str
    action: str
    letters: Sequence[tuple[Sequence[Any], int]]
    position: int | None = None


def with_letters(spout: PartitionedSpout) -> PartitionedSpout:
    """Wrap the spout, so that its plans may contain letters."""
    if isinstance(spout, OpaquePartitionedTransactionalSpout):
        return _OpaqueLettersSpout(spout)
    return _LettersSpout(spout)


def takes_letters(spout: object) -> bool:
    """Whether the plans of a topology's spout may contain letters."""
    return isinstance(spout, _Letters)


class _Letters(SpoutWrapper):
    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return LettersPlanner(self.spout.planner(conf, context))

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return _LettersReader(self.spout.reader(conf, context))


class _LettersSpout(_Letters, PartitionedTransactionalSpout):
    pass


class _OpaqueLettersSpout(_Letters, OpaquePartitionedTransactionalSpout):
    pass


class LettersPlanner(PlannerWrapper):
    """Adds letters to the plans of another planner. The creator sets both attributes.

    * ``request``: reads the current request.
    * ``keeper``: reads the stored letters; None: they cannot be read."""

    def __init__(self, planner: PartitionPlanner) -> None:
        super().__init__(planner, LETTERS_PARTITION)
        self.request: Callable[[], LetterRequest | None] = lambda: None
        self.keeper: LetterReader | None = None
        self._keeper_lock = threading.Lock()  # phases use it, each in a thread of its own
        self._known: LetterRequest | None = None
        self._looked_s: float | None = None

    def look(self) -> None:
        """Read the request. Raises ``RetryableError``."""
        self._known, self._looked_s = self.request(), time.monotonic()

    def finished(self, plan: Plan) -> bool:
        request = self._known
        return super().finished(plan) and (request is None or not self._left(plan, request))

    def plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._letters(previous, 1) or self._carried(previous, super().plan(previous))

    def plan_smaller(self, previous: Mapping[str, Meta | None], divisor: int) -> Plan | None:
        return self._letters(previous, divisor) or self._carried(previous, super().plan_smaller(previous, divisor))

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Plan | None:
        return self._carried(previous, super().empty_plan(previous))

    def processed(self, plan: Plan, read: ReadCounts, elapsed_s: float) -> None:
        # otherwise the plan contains nothing about the source
        if not _count(plan.get(LETTERS_PARTITION)):
            super().processed(plan, read, elapsed_s)

    def record_count(self, plan: Plan) -> int | None:
        count = super().record_count(plan)
        return None if count is None else count + _count(plan.get(LETTERS_PARTITION))

    def record_counts(self, plan: Plan) -> Mapping[str, int | None]:
        counts = super().record_counts(plan)
        return {**counts, LETTERS_PARTITION: _count(plan[LETTERS_PARTITION])} if LETTERS_PARTITION in plan else counts

    @property
    def ranges(self) -> SourceRanges:
        return _LetterRanges(self._planner.ranges)

    def for_transaction(self, txid: int, partition: str, meta: Meta) -> Meta:
        if partition != LETTERS_PARTITION or not _count(meta):
            return super().for_transaction(txid, partition, meta)
        if self.keeper is None:
            raise DataLossError(
                f"transaction {txid} has replayed or dropped dead letters, and those that there were then are not kept here"
            )
        with self._keeper_lock:
            found = self.keeper.fetched(meta["letters"], txid)
        return {**meta, "rows": found}

    def close(self) -> None:
        super().close()
        if self.keeper is not None:
            self.keeper.close()

    # --- inside -----------------------------------------------------------------------------------

    def _letters(self, previous: Mapping[str, Meta | None], divisor: int) -> Plan | None:
        """A batch of letters; None if there are none to plan. The first plan of a topology has
        none, because it fixes where the source begins."""
        request = self._asked() if previous else None
        if request is None:
            return None
        first, begin = _first(previous), _begin(previous, request)
        letters_max = min(max(BATCH_LETTERS_MAX // divisor, 1), self.records_max or BATCH_LETTERS_MAX)
        taken: list[Sequence[Any]] = []
        size = 0
        for ref, its in self._left(previous, request)[:letters_max]:
            size += its
            if taken and size > BATCH_BYTES_MAX:
                break
            taken.append(ref)
        rest = super().empty_plan(previous) if taken else None
        if rest is None:
            return None
        entry = {"request": request.id, "action": request.action, "begin": begin, "first": first}
        return {**rest, LETTERS_PARTITION: {**entry, "next": first + len(taken), "letters": taken}}

    def _asked(self) -> LetterRequest | None:
        if self._looked_s is None or time.monotonic() - self._looked_s >= LOOK_S:
            with suppress(RetryableError):  # the store does not answer: the term notices
                self.look()
        return self._known

    def _left(self, plan: Mapping[str, Meta | None], request: LetterRequest) -> Sequence[tuple[Sequence[Any], int]]:
        """The letters that are not planned yet; none if the request is outdated."""
        if is_outdated(request, plan.get(LETTERS_PARTITION)):
            return ()
        return request.letters[_first(plan) - _begin(plan, request) :]

    def _carried(self, previous: Mapping[str, Meta | None], plan: Plan | None) -> Plan | None:
        """A plan of the source, extended by the progress of the letters."""
        before = previous.get(LETTERS_PARTITION)
        return plan if plan is None or before is None else {**plan, LETTERS_PARTITION: _nothing_at(before, "next")}


class _LetterRanges(RangesWrapper):
    """Positions of letters behave like offsets: a range can be halved, and a letter with a refused
    value stays a letter."""

    def __init__(self, ranges: SourceRanges) -> None:
        super().__init__(ranges, LETTERS_PARTITION, mark="request")

    def split(self, partition: str, meta: Meta) -> tuple[Meta, Meta] | None:
        if partition != LETTERS_PARTITION:
            return super().split(partition, meta)
        first, count = int(meta["first"]), _count(meta)
        if count < 2:
            return None
        middle = first + count // 2
        return _between(meta, first, middle), _between(meta, middle, int(meta["next"]))

    def joined(self, first: Meta, last: Meta, *, after: bool) -> Meta | None:
        if "request" not in last:
            return super().joined(first, last, after=after)
        begin, end = int(first["next" if after else "first"]), int(last["next"])
        if begin == end:
            return _nothing_at(last, "next")
        # others are not in ``last``
        return _between(last, begin, end) if int(last["first"]) <= begin < end else None

    def beginning(self, meta: Meta) -> Meta | None:
        return _nothing_at(meta, "first") if "request" in meta else super().beginning(meta)

    def offsets(self, meta: Meta) -> range | None:
        return range(int(meta["first"]), int(meta["next"])) if "request" in meta else super().offsets(meta)

    def takes_out(self, partition: str) -> bool:
        return partition == LETTERS_PARTITION or super().takes_out(partition)

    def stages(self, ranges: Plan) -> Sequence[Plan]:
        """The letters are read last, because they stem from earlier records."""
        rest = super().stages(without(ranges, LETTERS_PARTITION))
        if not _count(ranges.get(LETTERS_PARTITION)):
            return rest
        return [*rest, {LETTERS_PARTITION: ranges[LETTERS_PARTITION]}]


class _LettersReader(ReaderWrapper):
    """Reads letters, and passes the rest to another reader."""

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[Rows]:
        yield from self.read_all(attempt, {partition: meta})

    def read_all(self, attempt: TransactionAttempt, ranges: Plan) -> Iterator[Rows]:
        self._reader.check_alive = self.check_alive  # type: ignore[method-assign]
        entry = ranges.get(LETTERS_PARTITION)
        if entry is not None:
            yield from self._letters(entry)
        rest = without(ranges, LETTERS_PARTITION)
        if rest:
            yield from self._reader.read_all(attempt, rest)

    def _letters(self, entry: Meta) -> Iterator[Rows]:
        found: list[tuple[int, Letter]] = [
            (position, letter) for position, letter in enumerate(entry.get("rows", ()), int(entry["first"])) if letter
        ]
        if not found:
            return
        back: dict[tuple[str, int, int], str] = {}
        if entry["action"] == REPLAYED:
            left_out, refused = set(entry.get(LEFT_OUT, ())), entry.get(REFUSED, {})
            whole: list[Letter] = []
            for position, letter in found:
                if position in left_out:
                    back[letter.id] = refused.get(str(position), letter.error)
                elif letter.is_cut:
                    back[letter.id] = CUT_REASON
                else:
                    whole.append(letter)
            for stream, batch in map(on_stream, self._reader.read_letters(whole) if whole else ()):
                if stream == DEAD_LETTER_STREAM:
                    columns = (batch.column(name).to_pylist() for name in ("topic_id", "partition", "offset", "error"))
                    back.update({(topic, *place): error for topic, *place, error in zip(*columns, strict=True)})
                else:
                    yield OnStream(stream, batch)
        ended = [_returned(each, back[each.id]) if each.id in back else _settled(each, entry) for _, each in found]
        yield OnStream(DEAD_LETTER_STREAM, pa.RecordBatch.from_pylist(ended, DEAD_LETTER_FIELDS.schema()))


def _returned(letter: Letter, error: str) -> dict[str, Any]:
    headers = [{"key": name, "value": value} for name, value in letter.headers]
    return letter.row(error=error, attempts=letter.attempts + 1, headers=headers, settled=None)


def _settled(letter: Letter, entry: Meta) -> dict[str, Any]:
    """The row that ends a letter: its coordinates and its key."""
    settled = DROPPED if entry["action"] == DROPPED else REPLAYED
    return letter.row(value=None, headers=[], settled=settled)


def is_outdated(request: LetterRequest, entry: Meta | None) -> bool:
    """Whether other letters were planned since those of the request were listed, by the entry of
    the last plan. An outdated request is never planned."""
    if request.position is None or (entry is not None and entry["request"] == request.id):
        return False
    return request.position != position_of(entry)


def position_of(entry: Meta | None) -> int:
    """The position after all letters that are planned, by the entry of the last plan."""
    return int(entry["next"]) if entry is not None else 0


def _first(previous: Mapping[str, Meta | None]) -> int:
    return position_of(previous.get(LETTERS_PARTITION))


def _begin(previous: Mapping[str, Meta | None], request: LetterRequest) -> int:
    before = previous.get(LETTERS_PARTITION)
    if before is not None and before["request"] == request.id:
        return int(before["begin"])
    return _first(previous)


def _count(meta: Meta | None) -> int:
    return 0 if meta is None else int(meta["next"]) - int(meta["first"])


def _between(meta: Meta, first: int, end: int) -> Meta:
    letters = meta["letters"][first - int(meta["first"]) : end - int(meta["first"])]
    return {**meta, "first": first, "next": end, "letters": letters}


def _nothing_at(meta: Meta, where: str) -> Meta:
    """The entry without letters, before or after those of ``meta``."""
    at = int(meta[where])
    return {"request": meta["request"], "begin": int(meta["begin"]), "first": at, "next": at}
