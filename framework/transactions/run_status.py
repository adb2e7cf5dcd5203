"""The status of a run of a transactional topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from framework.topology import PartitionProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A snapshot of a run.

    * ``phase``: starting, standby (another driver leads), running, finished (a bounded source is
      read to its end), stopped, failed.
    * ``lag``: records in the source that are not committed yet, None when unknown.
    * ``partitions``: the progress of each partition.
    * ``read_rows``: source rows that this process has processed; a replayed batch counts again.
    * ``committed_rows``: source rows that it has committed.
    * ``rows_per_second``: committed rows, over the last minute.
    * ``bad_records``: committed rows that could not be decoded.
    * ``late_records``: rows that came after the watermark of a committer.
    * ``left_out_rows``: rows due by time that a sink refused.
    * ``lost_records``: offsets that the source lost before they were read, and that were skipped,
      since the positions began.
    * ``waiting_for``: the request that the source does not answer.
    * ``repeating``: the failure behind the present retries; None again after a commit.
    * ``history_waiting``: why the permanent record of transactions lags; None when it does not, or
      when there is none.
    * ``pace``: the keys of the pace that are set, by the configuration or by ``ratchet set``.
    * ``planned_in_s``: seconds for which the pace delays the next plan; None when it does not.
    """

    topology_id: str
    phase: str
    epoch: int
    committed_txid: int
    in_flight: Mapping[int, str]
    in_flight_rows: int | None
    lag: int | None
    partitions: Mapping[str, PartitionProgress]
    read_rows: int
    committed_rows: int
    bad_records: int
    late_records: int
    left_out_rows: int
    lost_records: int
    rows_per_second: float
    attempts_failed: int
    last_error: str | None
    waiting_for: str | None
    repeating: str | None
    history_waiting: str | None = None
    pace: Mapping[str, Any] = field(default_factory=dict)
    planned_in_s: float | None = None

    def summary(self) -> dict[str, Any]:
        """As ``document``, without the partitions: there may be thousands of them."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "partitions"}

    def rows_done(self) -> int:
        """The count from which the rate of progress is computed."""
        return self.committed_rows

    def progress_line(self, rate: float) -> str:
        """One line of text for display. ``rate``: rows committed per second, recently."""
        in_flight = "unknown" if self.in_flight_rows is None else f"{self.in_flight_rows:,}"
        lag = "unknown" if self.lag is None else f"{self.lag:,}"
        parts = [
            f"{self.phase}",
            f"read {self.read_rows:,}",
            f"in flight {in_flight}",
            f"committed {self.committed_rows:,} (txid {self.committed_txid})",
            f"lag {lag}",
            f"{rate:,.0f} rows/s",
        ]
        if self.lag and rate > 0:
            parts.append(f"{self.lag / rate:,.0f} s left")
        if self.attempts_failed:
            parts.append(f"{self.attempts_failed} attempts failed")
        if self.bad_records:
            parts.append(f"{self.bad_records:,} bad records")
        if self.late_records:
            parts.append(f"{self.late_records:,} late records")
        if self.left_out_rows:
            parts.append(f"{self.left_out_rows:,} refused rows")
        if self.lost_records:
            parts.append(f"{self.lost_records:,} records lost")
        if self.planned_in_s is not None and self.planned_in_s >= 1:
            parts.append(f"next plan in {self.planned_in_s:,.0f} s")
        if self.waiting_for:
            parts.append(f"waiting: {self.waiting_for}")
        if self.repeating:
            parts.append(f"repeated: {self.repeating}")
        if self.history_waiting:
            parts.append(f"history waits: {self.history_waiting}")
        return " | ".join(parts)

    def document(self) -> dict[str, Any]:
        """All fields as JSON-able values, with the lag of each partition."""
        document = asdict(self)
        for partition, progress in self.partitions.items():
            document["partitions"][partition]["lag"] = progress.lag
        return document
