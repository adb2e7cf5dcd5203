"""What a pipeline reads and writes, as the compiler sees it: spouts and sinks give the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from framework.durations import Duration
from framework.errors import BadRecordError, TopologyError
from framework.operators.count_windows import CountWindow
from framework.operators.event_window_assigner import EventWindows
from framework.streams.polars_frames import frame_of, refusing
from framework.streams.stateless_steps import Columns
from framework.streams.watermark_bounds import WatermarkBounds
from framework.topology import DEFAULT_STREAM, Bolt, Fields, Spout

JoinHow = Literal["inner", "left", "right", "outer"]


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of what a pipeline reads, with every column that it could have."""

    name: str
    schema: pa.Schema


class Reading(ABC):
    """Everything that a pipeline reads. It becomes the one spout of the topology."""

    spout_id: str
    parallelism: int
    #: The columns that name the partition of the source that a row is from.
    partition: tuple[str, ...] = ()

    @property
    def asked(self) -> Columns:
        """The metadata that the user asked for."""
        return frozenset()

    @abstractmethod
    def spout(self, used: Mapping[str, Sequence[str]]) -> Spout:
        """The spout. ``used``: source -> the columns that are used, in order; at least one."""

    def early(self, source: str) -> Columns:
        """The columns of a source that are known before the others are decoded."""
        return frozenset()

    def tombstones(self, source: str) -> Columns:
        """The columns in which a tombstone of a source has values, if the rows have the record's
        key, and tombstones have rows. The source then gives the column ``TOMBSTONE`` if it is among
        those used."""
        return frozenset()

    def filtered(self, spout: Spout, filters: Mapping[str, EarlyFilter]) -> Spout:
        """The spout without rows that no component takes. ``filters``: source -> what it needs of
        the columns that are known early."""
        return spout

    def hidden(self, source: str) -> Columns:
        """The hidden columns, of ``hidden_columns.CARRIED``, that the source can give beside its
        own. It gives those that are among the columns used."""
        return frozenset()

    @abstractmethod
    def streams(self) -> Mapping[str, str]:
        """Source -> the stream of the spout that its rows come on."""


@dataclass(frozen=True, slots=True)
class EarlyFilter:
    """A condition on some columns of a source. Every row that a component takes fulfils it."""

    fields: tuple[str, ...]
    condition: pl.Expr

    def kept(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
        """Whether any component takes each row; None: all may be taken. The steps find a value that
        the condition refuses again, and name its record."""
        try:
            with refusing():
                found = frame_of(batch).select(self.condition.alias("kept")).get_column("kept")
        except BadRecordError:
            return None
        kept: npt.NDArray[np.bool_] = found.to_numpy()
        return kept


class GivenSpout(Reading):
    """A spout of the user's own: all of its columns, and its default stream."""

    def __init__(self, spout: Spout, spout_id: str, parallelism: int) -> None:
        self._spout, self.spout_id, self.parallelism = spout, spout_id, parallelism

    def spout(self, used: Mapping[str, Sequence[str]]) -> Spout:
        return self._spout

    def streams(self) -> Mapping[str, str]:
        return {self.spout_id: DEFAULT_STREAM}


class StatefulSteps(ABC):
    """The committers that keep a state of their own, most of them by event time. ``name``: of the
    component, which its state follows."""

    @abstractmethod
    def watermark(self, name: str, on: str, partition: Sequence[str], bounds: WatermarkBounds) -> Bolt:
        """The committer that keeps the watermark."""

    @abstractmethod
    def windows(
        self,
        name: str,
        windows: EventWindows,
        *,
        on: str,
        key: Sequence[str],
        aggregates: Mapping[str, Any],
        allowed_lateness: Duration,
    ) -> Bolt:
        """The committer that sends each window when it closes, and its changes before on the stream
        ``changed``."""

    @abstractmethod
    def sessions(self, name: str, gap: Duration, on: str, key: Sequence[str], aggregates: Mapping[str, Any]) -> Bolt:
        """The committer that sends each session when it closes."""

    @abstractmethod
    def count_windows(self, name: str, windows: CountWindow, key: Sequence[str], aggregates: Mapping[str, Any]) -> Bolt:
        """The committer that sends each window of a number of rows, in the transaction of its last
        row."""

    @abstractmethod
    def timers(
        self, name: str, kind: type[Bolt], *, key: Sequence[str], on: str, output: Fields, partition: Sequence[str]
    ) -> Bolt:
        """The committer of a class of the user's, which keeps a value and timers per key.
        ``partition``: the columns that name the partition of a row, if there are any; rows of the
        same time are in their order."""

    @abstractmethod
    def first_rows(self, name: str, key: Sequence[str], on: str, within: Duration, *, partition: Sequence[str]) -> Bolt:
        """The committer that emits the first row of each key. ``partition``: as of ``timers``; the
        rows of a transaction are in their order."""

    @abstractmethod
    def pairs(self, name: str, key: Sequence[str], times: tuple[str, str], within: Duration, how: JoinHow) -> Bolt:
        """The committer that joins the rows of two sides, each with its time."""

    @abstractmethod
    def latest_rows(
        self,
        name: str,
        key: Sequence[str],
        times: tuple[str, str],
        within: Duration | None,
        how: JoinHow,
        *,
        partition: Sequence[str],
    ) -> Bolt:
        """The committer that joins each row with the newest one of the other side at its time.
        ``partition``: hidden columns, as of ``timers``."""

    @abstractmethod
    def current_rows(
        self, name: str, key: Sequence[str], table: str, sequence_by: str | None, *, deleted: str | None, how: JoinHow
    ) -> Bolt:
        """The committer that joins each row with the newest one of the other side, which has the
        column ``table``, in its transaction. ``deleted``: the column that is true if the row was
        deleted."""


class Target(ABC):
    """A place that rows are written to. What it cannot take exactly once, it refuses with the
    reason, by a ``TopologyError``."""

    #: A name for the sink where the user gives none.
    name: str
    #: The mistake of a place that can be tested, but not run.
    lacks: TopologyError | None = None

    def aggregates(self, key: Sequence[str], aggregates: Mapping[str, Any]) -> Bolt:
        """The committer that keeps aggregates per key."""
        raise TopologyError(
            f"{self} keeps no row per key, so it cannot take aggregates: use a database, such as sqlite(...) or postgres(...)"
        )

    def expiring(self, key: Sequence[str], aggregates: Mapping[str, Any], on: str, ttl: Duration) -> Bolt:
        """The committer that keeps aggregates per key, and deletes those of a key that has had no
        row for ``ttl`` of its time ``on``."""
        return self.aggregates(key, aggregates)  # refused, as it is overridden with the other

    def newest(self, key: Sequence[str], sequence_by: str | None) -> Bolt:
        """The committer that keeps the newest row of each key. Where the column ``tombstone`` is
        true, the row is deleted."""
        raise TopologyError(f"{self} cannot keep the newest row of a key: use sqlite(...) or postgres(...)")

    def append(self) -> Bolt:
        """The committer that adds every row."""
        raise TopologyError(
            f"{self} has one row per key, and cannot take every row of a stream: use sqlite(...) or parquet(...)"
        )

    @abstractmethod
    def __str__(self) -> str: ...
