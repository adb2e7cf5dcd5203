"""Records that cannot be decoded: what to do with one, and how many are too many."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from enum import Enum

from framework.errors import BadRecordError, ConfigError, reason_of
from framework.topology import DEFAULT_STREAM, ReadCounts

#: The share of bad records is computed over the latest batches that together hold at least this
#: many records.
WINDOW_RECORDS = 1_000


class OnBadRecord(Enum):
    """What the reader does with a record that cannot be decoded."""

    FAIL = "fail"
    SKIP = "skip"
    DEAD_LETTER = "dead_letter"

    @classmethod
    def of(cls, value: str) -> OnBadRecord:
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(each.value) for each in cls)
            raise ConfigError(f"on_bad_record must be one of {known}, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be decoded: its index in the chunk, and the reason, as of
    ``reason_of``."""

    index: int
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", reason_of(self.reason))


class BadRecordShare:
    """Stops a topology when too many records are bad: then the codec or the topic is probably
    wrong.

    ``share_max``: at most this share of the latest batches, which together hold ``WINDOW_RECORDS``
    records or more, may be bad. While fewer records have been read: at most this share of
    ``WINDOW_RECORDS``. None: no limit.

    >>> share = BadRecordShare(0.01)
    >>> share.check(500, bad_records=10)
    >>> share.check(5, bad_records=1)
    Traceback (most recent call last):
    ...
    framework.errors.BadRecordError: 11 of the last 505 records could not be decoded: more than bad_record_share_max = \
0.01 allows (of 1,000 at least); correct the codec, or raise the limit
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(self, share_max: float | None) -> None:
        valid = isinstance(share_max, (int, float)) and not isinstance(share_max, bool) and 0 <= share_max <= 1
        if share_max is not None and not valid:
            raise ConfigError(f"bad_record_share_max must be between 0 and 1, or None, not {share_max!r}")
        self._share_max = share_max
        self._batches: deque[tuple[int, int]] = deque()
        self._records = 0
        self._bad = 0

    def check(self, records: int, bad_records: int, where: str = "") -> None:
        """Count a batch. Raises ``BadRecordError`` when too many records are bad. ``where``: begins
        the message."""
        if self._share_max is None or not records:
            return
        self._batches.append((records, bad_records))
        self._records += records
        self._bad += bad_records
        while self._records - self._batches[0][0] >= WINDOW_RECORDS:
            records, bad = self._batches.popleft()
            self._records -= records
            self._bad -= bad
        if self._bad > self._share_max * max(self._records, WINDOW_RECORDS):
            raise BadRecordError(
                f"{where}{self._bad:,} of the last {self._records:,} records could not be decoded: more than "
                f"bad_record_share_max = {self._share_max:g} allows (of {WINDOW_RECORDS:,} at least); correct the codec, or "
                "raise the limit"
            )


class BadRecordShares:
    """A ``BadRecordShare`` for each stream: a busy topic does not hide that all records of a quiet
    one are bad."""

    def __init__(self, share_max: float | None) -> None:
        self._of: dict[str, BadRecordShare] = defaultdict(lambda: BadRecordShare(share_max))

    def check(self, read: ReadCounts) -> None:
        """Count a batch. Raises ``BadRecordError`` when too many records of a stream are bad."""
        for stream, (records, bad_records) in read.streams.items():
            where = "" if stream == DEFAULT_STREAM else f"stream {stream!r}: "
            self._of[stream].check(records, bad_records, where)
