"""Metrics of a run in Prometheus' format, read from its status and figures at each scrape.

Invariants:

1. A scrape reads counters in memory. It takes no lock for longer than a copy, and sends no request
   to the source or a store.
2. Only the leader serves the figures of a leadership (txid, lag, partitions).
3. The number of series is bounded: at most ``PARTITIONS_MAX`` partitions have figures of their own.
4. A counter never falls while the process lives.

Source:
https://prometheus.io/docs/practices/naming/ and
https://prometheus.io/docs/instrumenting/writing_exporters/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from framework.observe.run_statistics import CoreFigures, Distribution, TransactionFigures

#: The most partitions with figures of their own, those with the greatest lag first. Each has five
#: series, a number that Prometheus stores easily. ``ratchet_lag_records`` covers all partitions.
PARTITIONS_MAX = 1_000
#: The ways in which an attempt can end.
_OUTCOMES = ("committed", "failed", "cancelled", "rolled back")

_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily | SummaryMetricFamily
_FAMILIES: dict[str, Callable[..., _Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
}


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """A metric. ``kind``: gauge, counter, histogram or summary. ``topologies``: the kind of
    topology that serves it: "transactional", "core" or "both"."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ("topology",)
    topologies: str = "transactional"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, as queries use them."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        parts = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}.get(self.kind, ("",))
        return tuple(f"{self.name}{part}" for part in parts)

    def family(self) -> Any:
        return _FAMILIES[self.kind](self.name, self.text, labels=self.labels)


_BY_PARTITION = ("topology", "partition")
_BY_COMPONENT = ("topology", "component")
_BY_FUNCTION = ("topology", "component", "function")
_BY_KIND = ("topology", "kind")


def _of_components(name: str, text: str, kind: str = "counter", *more: str) -> MetricDescription:
    return MetricDescription(name, kind, text, (*_BY_COMPONENT, *more), "core")


def _of_core(name: str, kind: str, text: str) -> MetricDescription:
    return MetricDescription(name, kind, text, topologies="core")


#: All metrics, by name.
METRICS = {
    each.name: each
    for each in (
        MetricDescription(
            "ratchet_leading", "gauge", "Whether this process leads the topology: 1 or 0.", topologies="both"
        ),
        MetricDescription(
            "ratchet_standby", "gauge", "Whether this process waits to take over: 1 or 0.", topologies="both"
        ),
        MetricDescription(
            "ratchet_leaderships",
            "counter",
            "How often this process has begun to lead.",
            topologies="both",
        ),
        MetricDescription("ratchet_epoch", "gauge", "The epoch of the leadership; it rises with each new leader."),
        MetricDescription("ratchet_committed_txid", "gauge", "The last committed transaction."),
        MetricDescription(
            "ratchet_last_commit_timestamp_seconds",
            "gauge",
            "When this process last committed a transaction, in seconds since the Unix epoch.",
        ),
        MetricDescription(
            "ratchet_transactions_in_flight", "gauge", "Transactions that are planned and not committed."
        ),
        MetricDescription("ratchet_rows_read", "counter", "Source rows processed; those of a replay count again."),
        MetricDescription("ratchet_rows_committed", "counter", "Source rows committed."),
        MetricDescription("ratchet_bad_records", "counter", "Committed records that could not be decoded."),
        MetricDescription(
            "ratchet_attempts", "counter", "Attempts at transactions, by how they ended.", ("topology", "outcome")
        ),
        MetricDescription(
            "ratchet_attempts_failed", "counter", "Failures of attempts, by what follows from them.", _BY_KIND
        ),
        MetricDescription(
            "ratchet_retrying_since_timestamp_seconds",
            "gauge",
            "Since when a failure is being retried, in seconds since the Unix epoch; absent when none is.",
            ("topology", "component", "kind"),
        ),
        MetricDescription(
            "ratchet_processing_seconds",
            "histogram",
            "Duration of the processing phase of committed transactions.",
        ),
        MetricDescription(
            "ratchet_waiting_seconds",
            "histogram",
            "Time of committed transactions between their processing and their turn to commit.",
        ),
        MetricDescription(
            "ratchet_commit_seconds", "histogram", "Duration of the commit phase of committed transactions."
        ),
        MetricDescription("ratchet_batch_records", "histogram", "Records of committed transactions."),
        MetricDescription(
            "ratchet_batch_bytes",
            "histogram",
            "Bytes of committed transactions, keys and values as the source holds them.",
        ),
        MetricDescription(
            "ratchet_end_to_end_latency_seconds",
            "histogram",
            "Age of a batch's oldest and newest record, by their timestamps, when their transaction was closed.",
            ("topology", "record"),
        ),
        MetricDescription(
            "ratchet_component_busy_seconds",
            "counter",
            "Time that the tasks of a component were busy with it, added up; of transactions, committed ones.",
            _BY_COMPONENT,
            "both",
        ),
        MetricDescription(
            "ratchet_late_records",
            "counter",
            "Committed records that came behind the watermark of a component; once for each window that they are too late for.",
            _BY_COMPONENT,
        ),
        MetricDescription(
            "ratchet_left_out_rows",
            "counter",
            "Rows due by time, such as closed windows, that a component refused, and that were left out there by its policy.",
            _BY_COMPONENT,
        ),
        MetricDescription(
            "ratchet_lookup_keys",
            "counter",
            "Keys of lookups in committed transactions: asked for, cached, or missing, because the function had no answer.",
            ("topology", "component", "function", "answer"),
        ),
        MetricDescription(
            "ratchet_lookup_failures",
            "counter",
            "Calls of lookups that failed and were repeated, in committed transactions.",
            _BY_FUNCTION,
        ),
        MetricDescription(
            "ratchet_lookup_seconds",
            "counter",
            "Time that tasks waited for the function of a lookup, added up, in committed transactions.",
            _BY_FUNCTION,
        ),
        MetricDescription("ratchet_lag_records", "gauge", "Records of the source that are not committed."),
        MetricDescription("ratchet_source_waiting", "gauge", "Whether the source does not answer: 1 or 0."),
        MetricDescription("ratchet_source_partitions", "gauge", "Partitions of the source."),
        MetricDescription("ratchet_source_end_offset", "gauge", "Where the source ends.", _BY_PARTITION),
        MetricDescription("ratchet_source_committed_offset", "gauge", "The next to commit.", _BY_PARTITION),
        MetricDescription("ratchet_source_in_flight", "gauge", "Offsets planned, not committed.", _BY_PARTITION),
        MetricDescription("ratchet_source_lag", "gauge", "Offsets from what is committed to the end.", _BY_PARTITION),
        MetricDescription(
            "ratchet_source_lost_records", "gauge", "Offsets gone before they were read, and skipped.", _BY_PARTITION
        ),
        _of_core("ratchet_rounds", "counter", "Rounds of a core topology."),
        _of_core("ratchet_rounds_lost", "counter", "Rounds of which nothing came back."),
        _of_core("ratchet_trees", "gauge", "Pending tuple trees: those that the ackers track."),
        _of_core("ratchet_checkpoint", "gauge", "The last committed checkpoint."),
        _of_core(
            "ratchet_last_checkpoint_timestamp_seconds",
            "gauge",
            "When this process last committed a checkpoint, in seconds since the Unix epoch.",
        ),
        _of_core(
            "ratchet_checkpoint_seconds",
            "histogram",
            "Duration of committed checkpoints, from the first marker until all tasks have committed.",
        ),
        _of_components("ratchet_state_keys", "Keys in the state of a bolt, as of its last checkpoint.", "gauge"),
        _of_components("ratchet_checkpoint_keys", "Keys that the last checkpoint of a state has changed.", "gauge"),
        _of_components(
            "ratchet_checkpoint_bytes", "Bytes of the keys and values that the last checkpoint has changed.", "gauge"
        ),
        _of_core("ratchet_recoveries", "counter", "How often all states went back to the last checkpoint."),
        _of_components("ratchet_component_errors", "Errors in user code, by what they did.", "counter", "kind"),
        _of_components("ratchet_tuples_pending", "Tuples of a spout whose fate is open.", "gauge"),
        _of_components("ratchet_tuples_emitted", "Tuples that a component emitted."),
        _of_components("ratchet_tuples_executed", "Tuples that a bolt executed."),
        _of_components("ratchet_tuples_acked", "Tuples that a bolt acked."),
        _of_components("ratchet_tuples_failed", "Tuples that a bolt failed, or that a spout was told have failed."),
        _of_components("ratchet_tuples_completed", "Tuples of a spout that were fully processed."),
        _of_components("ratchet_tuples_timed_out", "Tuples of a spout that were not fully processed in time."),
        _of_components("ratchet_tuples_late", "Tuples that came too late for the windows of a bolt, or too far ahead."),
        _of_components("ratchet_tuples_died", "Instances that an error of theirs ended."),
        _of_components(
            "ratchet_complete_latency_seconds",
            "From the emission of a spout's tuple until the spout was told of its completion.",
            "summary",
        ),
    )
}


class ObservedPartition(Protocol):
    """The progress of a partition, as a status shows it."""

    @property
    def end_offset(self) -> int | None: ...
    @property
    def committed_offset(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def lost_records(self) -> int: ...
    @property
    def lag(self) -> int | None: ...


class ObservedRun(Protocol):
    """The part of the status of a transactional topology that becomes metrics."""

    @property
    def phase(self) -> str: ...
    @property
    def committed_txid(self) -> int: ...
    @property
    def in_flight(self) -> Mapping[int, str]: ...
    @property
    def read_rows(self) -> int: ...
    @property
    def committed_rows(self) -> int: ...
    @property
    def lag(self) -> int | None: ...
    @property
    def waiting_for(self) -> str | None: ...
    @property
    def bad_records(self) -> int: ...
    @property
    def topology_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def partitions(self) -> Mapping[str, ObservedPartition]: ...


class RunCollector(Collector):
    """Converts the status and the figures of a run into metrics at every scrape. ``kinds``: all
    kinds of failures, so that each has a series before its first failure."""

    def __init__(
        self, status: Callable[[], ObservedRun], figures: Callable[[], TransactionFigures], kinds: Sequence[str] = ()
    ) -> None:
        self._status = status
        self._figures = figures
        self._kinds = kinds

    def describe(self) -> Iterable[Metric]:
        return []  # the metrics depend on the partitions; Prometheus need not know them in advance

    def collect(self) -> Iterable[Metric]:
        status, figures = self._status(), self._figures()
        topology = status.topology_id
        yield from _leadership(topology, status.phase, figures.leaderships)
        yield from _measured(
            topology,
            ratchet_rows_read=status.read_rows,
            ratchet_rows_committed=status.committed_rows,
            ratchet_bad_records=status.bad_records,
        )
        yield _by_label(topology, "ratchet_attempts", figures.outcomes, _OUTCOMES)
        yield _by_label(topology, "ratchet_attempts_failed", figures.failures, self._kinds)
        yield from _distributions(
            topology,
            ratchet_processing_seconds=figures.processing_s,
            ratchet_waiting_seconds=figures.waiting_s,
            ratchet_commit_seconds=figures.commit_s,
            ratchet_batch_records=figures.batch_records,
            ratchet_batch_bytes=figures.batch_bytes,
        )
        yield _by_label(topology, "ratchet_component_busy_seconds", figures.component_s, ())
        yield _by_label(topology, "ratchet_late_records", figures.late_records, ())
        yield _by_label(topology, "ratchet_left_out_rows", figures.left_out_rows, ())
        yield from _lookups(topology, figures.lookups)
        latency = METRICS["ratchet_end_to_end_latency_seconds"].family()
        for record, seen in (("oldest", figures.oldest_s), ("newest", figures.newest_s)):
            _add_distribution(latency, [topology, record], seen)
        yield latency
        if status.phase == "running":
            yield from self._led(topology, status, figures)

    def _led(self, topology: str, status: ObservedRun, figures: TransactionFigures) -> Iterable[Metric]:
        """The metrics that only a leader has."""
        yield from _measured(
            topology,
            ratchet_epoch=status.epoch,
            ratchet_committed_txid=status.committed_txid or None,
            ratchet_last_commit_timestamp_seconds=figures.last_commit_at,
            ratchet_transactions_in_flight=len(status.in_flight),
            ratchet_lag_records=status.lag,
            ratchet_source_waiting=float(status.waiting_for is not None),
            ratchet_source_partitions=len(status.partitions),
        )
        retrying = METRICS["ratchet_retrying_since_timestamp_seconds"].family()
        if figures.retrying is not None:
            known = figures.retrying
            retrying.add_metric(_safe(topology, known.component, known.kind), known.since)
        yield retrying
        shown = nlargest(PARTITIONS_MAX, status.partitions.items(), key=lambda each: each[1].lag or 0)
        for field in ("end_offset", "committed_offset", "in_flight", "lag", "lost_records"):
            family = METRICS[f"ratchet_source_{field}"].family()
            for partition, progress in shown:
                value = getattr(progress, field)
                if value is not None:  # unknown values are left out
                    family.add_metric(_safe(topology, partition), value)
            yield family


def _safe(*labels: str) -> list[str]:
    """Labels in a form that can be encoded: a name may contain half of a surrogate pair."""
    return [each.encode("utf-8", "backslashreplace").decode() for each in labels]


def _leadership(topology: str, phase: str, leaderships: int) -> Iterable[Metric]:
    yield from _measured(
        topology,
        ratchet_leading=float(phase == "running"),
        ratchet_standby=float(phase == "standby"),
        ratchet_leaderships=leaderships,
    )


def _measured(topology: str, **values: float | None) -> Iterable[Metric]:
    """One figure for each name, without unknown ones."""
    for name, value in values.items():
        if value is not None:
            family = METRICS[name].family()
            family.add_metric(_safe(topology), value)
            yield family


def _by_label(topology: str, name: str, values: Mapping[str, float], known: Sequence[str]) -> Metric:
    """One figure for each value of the last label: all ``known`` values, and any others that
    occur."""
    family: Metric = METRICS[name].family()
    for label in dict.fromkeys((*known, *sorted(values))):
        family.add_metric(_safe(topology, label), values.get(label, 0))  # type: ignore[attr-defined]
    return family


def _lookups(topology: str, found: Mapping[str, Mapping[str, float]]) -> Iterable[Metric]:
    """The figures of lookups. ``found``: as in ``TransactionFigures``."""
    keys, failures, seconds = (METRICS[f"ratchet_lookup_{name}"].family() for name in ("keys", "failures", "seconds"))
    for name, counts in sorted(found.items()):
        labels = [topology, *name.split("/", 1)]
        for answer in ("asked", "cached", "missing"):
            keys.add_metric(_safe(*labels, answer), counts.get(answer, 0))
        failures.add_metric(_safe(*labels), counts.get("failed", 0))
        seconds.add_metric(_safe(*labels), counts.get("seconds", 0))
    yield from (keys, failures, seconds)


def _distributions(topology: str, **values: Distribution) -> Iterable[Metric]:
    for name, seen in values.items():
        family = METRICS[name].family()
        _add_distribution(family, [topology], seen)
        yield family


def _add_distribution(family: HistogramMetricFamily, labels: Sequence[str], seen: Distribution) -> None:
    bounds = [*map(floatToGoString, seen.bounds), "+Inf"]
    family.add_metric(_safe(*labels), list(zip(bounds, accumulate(seen.counts), strict=True)), seen.sum)


class ObservedCounts(Protocol):
    """The counts of one component of a core topology."""

    @property
    def emitted(self) -> int: ...
    @property
    def executed(self) -> int: ...
    @property
    def acked(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def timed_out(self) -> int: ...
    @property
    def died(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def busy_s(self) -> float: ...


class ObservedState(Protocol):
    """The size of a state."""

    @property
    def keys(self) -> int: ...
    @property
    def changed(self) -> int: ...
    @property
    def changed_bytes(self) -> int: ...


class ObservedCheckpoint(Protocol):
    """The part of the status of checkpoints that becomes metrics."""

    @property
    def txid(self) -> int: ...
    @property
    def states(self) -> Mapping[str, ObservedState]: ...


class ObservedCoreRun(Protocol):
    """The part of the status of a core topology that becomes metrics."""

    @property
    def phase(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def rounds_lost(self) -> int: ...
    @property
    def trees(self) -> int: ...
    @property
    def components(self) -> Mapping[str, ObservedCounts]: ...
    @property
    def checkpoint(self) -> ObservedCheckpoint | None: ...


class CoreRunCollector(Collector):
    """Converts the status and the figures of a core topology into metrics at every scrape."""

    def __init__(
        self, topology_id: str, status: Callable[[], ObservedCoreRun], figures: Callable[[], CoreFigures]
    ) -> None:
        self._topology_id = topology_id
        self._status = status
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status, figures = self._status(), self._figures()
        topology = self._topology_id
        yield from _leadership(topology, status.phase, figures.leaderships)
        yield from _measured(topology, ratchet_rounds=status.rounds, ratchet_rounds_lost=status.rounds_lost)
        if status.phase == "running":
            yield from _measured(topology, ratchet_trees=status.trees)
        if status.checkpoint is not None:
            yield from _measured(topology, ratchet_recoveries=figures.recoveries)
            yield from _distributions(topology, ratchet_checkpoint_seconds=figures.checkpoint_s)
        if status.checkpoint is not None and status.phase == "running":
            yield from _measured(
                topology,
                ratchet_checkpoint=status.checkpoint.txid or None,
                ratchet_last_checkpoint_timestamp_seconds=figures.last_checkpoint_at,
            )
            for name, field in _OF_STATES.items():
                sizes = METRICS[name].family()
                for component, size in status.checkpoint.states.items():
                    sizes.add_metric(_safe(topology, component), getattr(size, field))
                yield sizes
        errors = METRICS["ratchet_component_errors"].family()
        for (component, kind), count in sorted(figures.errors.items()):
            errors.add_metric(_safe(topology, component, kind), count)
        yield errors
        busy_s = {component: counts.busy_s for component, counts in status.components.items()}
        yield _by_label(topology, "ratchet_component_busy_seconds", busy_s, ())
        for name, field in _OF_COMPONENTS.items():
            family = METRICS[name].family()
            for component, counts in status.components.items():
                family.add_metric(_safe(topology, component), getattr(counts, field))
            yield family
        latency = METRICS["ratchet_complete_latency_seconds"].family()
        for component, counts in status.components.items():
            if counts.completed:
                latency.add_metric(_safe(topology, component), counts.completed, counts.latency_s)
        yield latency


_OF_STATES = {
    "ratchet_state_keys": "keys",
    "ratchet_checkpoint_keys": "changed",
    "ratchet_checkpoint_bytes": "changed_bytes",
}
_OF_COMPONENTS = {name: name.removeprefix("ratchet_tuples_") for name in METRICS if name.startswith("ratchet_tuples_")}
