"""How large a batch is, and how it is divided among partitions. Pure: no clock, no client.

A plan contains offsets and is made before a record is read. So limits of bytes and time are only
targets: ``BatchSizer`` learns the size and the processing time of a record from earlier batches.
Until it has learned them, batches are small. A batch that is much larger than its target is read in
halves (ADR 127).

The time of a batch is the cost of the job itself and the cost of its records. After a batch that
took too long, ``BatchSizer`` asks which of the two it was: fewer records do not cure a slow job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: The size of a batch while the time per record is unknown.
FIRST_BATCH_RECORDS = 100_000
#: The size of a batch while the size of a record is unknown, if there is a limit of bytes.
FIRST_SIZED_BATCH_RECORDS = 1_000
#: A batch may be at most this many times larger than the largest earlier batch with a known time.
GROWTH_MAX = 8
#: The most bytes of rows (in Arrow) that a task reads for one batch, because all of them may wait
#: for the commit, and each fold needs several times as much.
TASK_ROWS_BYTES_MAX = 128 << 20
#: The most bytes of values that a task reads, as a multiple of the target for a batch.
OVERSIZE_MAX = 4 / 3
#: The weight that earlier measurements keep with each new batch.
_MEMORY = 0.8
#: A batch smaller than this share of the allowed size does not tell the time per record, because
#: the cost of the job itself dominates.
_TELLING_SHARE = 0.1
#: Two batches whose sizes differ by less than this share say nothing about what a record costs.
_DIFFERENT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class KafkaLimits:
    """How much one batch takes: records in all, records per partition (None: no separate limit),
    bytes of values (None: no limit), seconds of processing (None: no limit)."""

    batch_records_max: int
    partition_records_max: int | None = None
    batch_bytes_max: int | None = None
    batch_time_max_s: float | None = None

    def with_time(self, batch_time_max_s: float) -> KafkaLimits:
        """The same limits, with this limit of time if there is none."""
        return self if self.batch_time_max_s is not None else replace(self, batch_time_max_s=batch_time_max_s)


class BatchSizer:
    """Turns limits of bytes and time into a number of records.

    >>> sizer = BatchSizer(KafkaLimits(500_000, batch_bytes_max=1_000_000))
    >>> sizer.limits().batch_records_max
    1000
    >>> sizer.learn(planned=1_000, records=1_000, size_bytes=250_000, elapsed_s=0.1)
    >>> sizer.limits().batch_records_max
    4000
    """

    def __init__(self, limits: KafkaLimits) -> None:
        self._limits = limits
        self._records = 0.0  # decaying sums
        self._bytes = 0.0
        self._row_bytes = 0.0  # of the task with the most
        self._last_each = 0.0, 0.0  # bytes and row bytes per record of the last batch
        self._largest = 0  # offsets in the largest batch so far with a known time
        self._per_second: float | None = None
        self._before: tuple[int, float] | None = None  # offsets and seconds of an earlier batch of another size

    def limits(self) -> KafkaLimits:
        """The limits of the next batch, all in records."""
        return replace(self._limits, batch_records_max=self._records_max())

    def _records_max(self) -> int:
        wanted = [self._limits.batch_records_max]
        last, last_row = self._last_each
        if self._limits.batch_bytes_max is not None:
            each = max(self._bytes / self._records, last) if self._records > 0 else 0
            wanted.append(int(self._limits.batch_bytes_max / each) if each > 0 else FIRST_SIZED_BATCH_RECORDS)
        if self._row_bytes > 0:
            wanted.append(int(TASK_ROWS_BYTES_MAX / OVERSIZE_MAX / max(self._row_bytes / self._records, last_row)))
        if self._limits.batch_time_max_s is not None:
            if self._per_second is None:
                wanted.append(FIRST_BATCH_RECORDS)
            else:
                by_time = self._per_second * self._limits.batch_time_max_s
                wanted.append(int(min(by_time, GROWTH_MAX * max(self._largest, FIRST_BATCH_RECORDS))))
        return max(min(wanted), 1)

    def bytes_of(self, records: int) -> int | None:
        """About how many bytes so many records have; None while nothing was read."""
        return int(records * self._bytes / self._records) if self._records > 0 else None

    def learn(self, planned: int, records: int, size_bytes: int, elapsed_s: float, *, row_bytes: int = 0) -> None:
        """Learn from a batch: ``planned`` offsets held ``records`` records with ``size_bytes``
        bytes in total, and took ``elapsed_s`` seconds. ``row_bytes``: as in ``ReadCounts``. Larger
        records than before count immediately, smaller records gradually."""
        if planned <= 0:
            return
        allowed = self._records_max()
        if records > 0 and size_bytes > 0:
            self._records = self._records * _MEMORY + planned
            self._bytes = self._bytes * _MEMORY + size_bytes
            self._row_bytes = self._row_bytes * _MEMORY + row_bytes
            self._last_each = size_bytes / planned, row_bytes / planned
        target_s = self._limits.batch_time_max_s
        if target_s is None or elapsed_s <= 0:
            return
        if elapsed_s > target_s:
            self._per_second = self._fitting(planned, elapsed_s, target_s) / target_s
            self._largest = planned
        elif planned >= allowed * _TELLING_SHARE:
            rate = planned / elapsed_s
            known = self._per_second
            self._per_second = rate if known is None else known * _MEMORY + rate * (1 - _MEMORY)
            self._largest = max(self._largest, planned)
        else:
            return
        if self._before is None or _differ(planned, self._before[0]):
            self._before = planned, elapsed_s

    def _fitting(self, planned: int, elapsed_s: float, target_s: float) -> float:
        """How many records fit into the time, after a batch that took longer.

        Without an earlier batch of another size, all the time is that of the records. With one, the
        straight line through both tells the time of the job from that of the records. If the job
        alone takes too long, no size fits, and the larger of the two sizes is kept.
        """
        if self._before is None or not _differ(planned, self._before[0]):
            return planned * target_s / elapsed_s
        earlier, earlier_s = self._before
        each_s = min(max((elapsed_s - earlier_s) / (planned - earlier), 0.0), elapsed_s / planned)
        job_s = elapsed_s - each_s * planned
        return max(planned, earlier) if job_s >= target_s else (target_s - job_s) / each_s


def _differ(size: int, other: int) -> bool:
    return abs(size - other) > _DIFFERENT_SHARE * max(size, other)


def fair_shares(available: Mapping[str, int], limits: KafkaLimits, turn: int = 0) -> dict[str, int]:
    """Divide a batch among partitions. A partition with few records gives all it has, and the
    others share the rest evenly. If there are more partitions than records to give, ``turn``
    decides which partition comes first. Increase it by the number of records given.

    >>> fair_shares({"a": 10, "b": 1000, "c": 1000}, KafkaLimits(batch_records_max=210))
    {'a': 10, 'b': 100, 'c': 100}
    >>> fair_shares({"a": 10, "b": 1000, "c": 1000}, KafkaLimits(batch_records_max=2), turn=2)
    {'a': 1, 'b': 0, 'c': 1}
    """
    bound = limits.partition_records_max
    wanted = {each: min(held, bound) if bound is not None else held for each, held in available.items()}
    names = sorted(each for each, most in wanted.items() if most > 0)
    shares = dict.fromkeys(sorted(available), 0)
    left = limits.batch_records_max
    if len(names) > left:
        first = turn % len(names)
        for name in (names[first:] + names[:first])[:left]:
            shares[name] = 1
        return shares
    waiting = sorted(names, key=lambda each: (wanted[each], each))
    for position, name in enumerate(waiting):
        even = -(-left // (len(waiting) - position))  # rounded up, so that nothing is left over
        shares[name] = min(wanted[name], even)
        left -= shares[name]
    return shares
