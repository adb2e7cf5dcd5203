"""The pace of commits: when the next transaction may be planned, and how many records it may
contain. Settings and arithmetic. Pure: the time comes with each call (C45).

Invariants:

1. The pace decides when a plan is made and how many records it may have. It never changes a plan.
2. A missed interval is not made up for: the next interval begins with the late plan.
3. A bucket begins empty, so that a restart causes no burst. An idle source fills it for at most a
   second, or for one interval.
4. The first plan of a topology never waits for the interval, because it fixes where the topology
   begins. Nor does the plan of a txid that was planned before, or a plan for which a bounded run
   waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.config import Config
from framework.errors import ConfigError, CorruptStateError

#: The keys that ``ratchet set`` changes while a topology runs.
PACE_KEYS = (
    "topology.commit.interval",
    "topology.commit.records.min",
    "topology.commit.bytes.min",
    "topology.rate.records.per.second",
)
INTERVAL, _RECORDS, _BYTES, _RATE = PACE_KEYS
#: These have an effect only beside an interval.
ENDS_OF_INTERVALS = (_RECORDS, _BYTES)
#: A bucket holds the rate's records for this time, or for one interval, ...
_FULL_S = 1.0
#: ... or for the duration of the previous transaction, but not for longer than this.
_BUSY_MAX_S = 60.0
#: A plan is worth its cost if it contains the rate's records for this time.
_WORTH_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPace:
    """The settings of the pace.

    * ``interval_s``: seconds from one plan to the next; None: plan whenever there are records.
    * ``records_min``, ``bytes_min``: end the interval early when the source holds this much.
    * ``records_per_second``: the limit of the read rate; None: no limit."""

    interval_s: float | None = None
    records_min: int | None = None
    bytes_min: int | None = None
    records_per_second: float | None = None

    @classmethod
    def of(cls, config: Config, changed: Mapping[str, Any] | None = None) -> CommitPace:
        """The configured pace, with the changes of ``ratchet set``. A value set to None is off.
        Raises ``ConfigError`` for an invalid value."""
        changed = dict(changed or {})
        unknown = sorted(changed.keys() - set(PACE_KEYS))
        if unknown:
            raise ConfigError(f"{unknown[0]} cannot be changed while a topology runs: only {', '.join(PACE_KEYS)}")
        over = Config.of({key: value for key, value in changed.items() if value is not None})
        return cls(
            interval_s=(over if INTERVAL in changed else config).commit_interval_s,
            records_min=(over if _RECORDS in changed else config).commit_records_min,
            bytes_min=(over if _BYTES in changed else config).commit_bytes_min,
            records_per_second=(over if _RATE in changed else config).rate_records_per_second,
        )

    def document(self) -> dict[str, Any]:
        """The settings that are on, by key."""
        values = (self.interval_s, self.records_min, self.bytes_min, self.records_per_second)
        return {key: value for key, value in zip(PACE_KEYS, values, strict=True) if value is not None}


NO_PACE = CommitPace()


def changed_pace(document: object, node: str) -> Mapping[str, Any]:
    """The changes in the document at ``node``; none if there is no document. Raises
    ``CorruptStateError``."""
    if document is None:
        return {}
    try:
        if not isinstance(document, dict):
            raise ConfigError("not a table of settings")
        CommitPace.of(Config.of({}), document)
    except ConfigError as error:
        raise CorruptStateError(f"{node}: {error}; set the key again by `ratchet set`, or delete the node") from error
    return document


class Pacer:
    """Applies the pace for one planner. ``planned_ms_ago``: how long ago the last transaction was
    planned, according to the store.

    >>> pacer = Pacer(CommitPace(interval_s=60, records_per_second=100), now_ms=0)
    >>> pacer.planned(1, 0, now_ms=0)
    >>> pacer.asked(2, now_ms=0)
    >>> pacer.interval_held_s(now_ms=20_000), pacer.records_max(now_ms=60_000)
    (40.0, 6000)
    """

    def __init__(self, pace: CommitPace, now_ms: int, planned_ms_ago: int = 0) -> None:
        self.pace = pace
        self._planned_ms = now_ms - max(planned_ms_ago, 0)
        self._planned_txid = 0
        self._txid = 0
        self._tokens = 0.0
        self._filled_ms = now_ms
        self._busy_s = 0.0

    def change(self, pace: CommitPace, now_ms: int) -> None:
        """Continue at another pace. A new rate begins with an empty bucket."""
        self._fill(now_ms)
        if self.pace.records_per_second is None:
            self._tokens = 0.0
        self.pace = pace

    def asked(self, txid: int, now_ms: int) -> None:
        """Note that a plan is requested: the previous transaction leaves room for this one."""
        self._txid = txid
        self._busy_s = min((now_ms - self._planned_ms) / 1000, _BUSY_MAX_S)

    def planned(self, txid: int, records: int, now_ms: int) -> None:
        """Note that a plan with this many records was made. Records above ``records_max`` reduce
        later plans."""
        self._fill(now_ms)
        self._tokens -= records
        self._planned_ms, self._planned_txid = now_ms, max(txid, self._planned_txid)

    def interval_held_s(self, now_ms: int) -> float:
        """Remaining seconds of the interval; 0 for a txid that was planned before."""
        if self.pace.interval_s is None or self._txid <= self._planned_txid:
            return 0.0
        return max(self.pace.interval_s - (now_ms - self._planned_ms) / 1000, 0.0)

    def rate_held_s(self, now_ms: int) -> float:
        """Seconds until the bucket holds enough for a plan that is worth its cost."""
        rate = self.pace.records_per_second
        if rate is None:
            return 0.0
        self._fill(now_ms)
        return max((max(rate * _WORTH_S, 1.0) - self._tokens) / rate, 0.0)

    def records_max(self, now_ms: int) -> int | None:
        """The most records that the next plan may have; None: no limit."""
        if self.pace.records_per_second is None:
            return None
        self._fill(now_ms)
        return max(int(self._tokens), 1)

    def _fill(self, now_ms: int) -> None:
        rate = self.pace.records_per_second
        if rate is not None:
            full = rate * max(_FULL_S, self.pace.interval_s or 0.0, self._busy_s)
            earned = rate * (now_ms - self._filled_ms) / 1000
            self._tokens = min(self._tokens + earned, max(full, 1.0))
        self._filled_ms = now_ms
