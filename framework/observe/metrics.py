"""Metrics of a run in Prometheus' format, read from its status at each scrape.

Served on the loopback interface by default, read-only. Source:
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from framework.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """What is measured. ``kind``: gauge, or counter, whose name ends in ``_total`` where it is
    served."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ("topology",)

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        kind = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        return kind(self.name, self.text, labels=self.labels)


_BY_PARTITION = ("topology", "partition")
_BY_COMPONENT = ("topology", "component")
#: Everything that is served, by name.
METRICS = {
    each.name: each
    for each in (
        MetricDescription("ratchet_leading", "gauge", "Whether this process leads the topology."),
        MetricDescription("ratchet_epoch", "gauge", "The epoch of the leadership."),
        MetricDescription("ratchet_committed_txid", "gauge", "The last committed transaction."),
        MetricDescription(
            "ratchet_transactions_in_flight", "gauge", "Transactions that are planned and not committed."
        ),
        MetricDescription("ratchet_rows_read", "counter", "Source rows processed; those of a replay count again."),
        MetricDescription("ratchet_rows_committed", "counter", "Source rows committed."),
        MetricDescription("ratchet_bad_records", "counter", "Committed records that could not be decoded."),
        MetricDescription("ratchet_attempts_failed", "counter", "Attempts at transactions that failed."),
        MetricDescription("ratchet_source_end_offset", "gauge", "Where the source ends.", _BY_PARTITION),
        MetricDescription("ratchet_source_committed_offset", "gauge", "The next to commit.", _BY_PARTITION),
        MetricDescription("ratchet_source_in_flight", "gauge", "Offsets planned, not committed.", _BY_PARTITION),
        MetricDescription("ratchet_source_lag", "gauge", "Offsets from what is committed to the end.", _BY_PARTITION),
        MetricDescription(
            "ratchet_source_lost_records", "gauge", "Offsets gone before they were read, and skipped.", _BY_PARTITION
        ),
        MetricDescription("ratchet_rounds", "counter", "Rounds of a core topology."),
        MetricDescription("ratchet_rounds_lost", "counter", "Rounds of which nothing came back."),
        MetricDescription("ratchet_trees", "gauge", "Tuple trees that the ackers track."),
        MetricDescription("ratchet_checkpoint", "gauge", "The last committed checkpoint."),
        MetricDescription("ratchet_recoveries", "counter", "How often all states went back to the last checkpoint."),
        MetricDescription("ratchet_tuples_pending", "gauge", "Tuples of a spout whose fate is open.", _BY_COMPONENT),
        MetricDescription("ratchet_tuples_emitted", "counter", "Tuples that a component emitted.", _BY_COMPONENT),
        MetricDescription("ratchet_tuples_executed", "counter", "Tuples that a bolt executed.", _BY_COMPONENT),
        MetricDescription("ratchet_tuples_acked", "counter", "Tuples that a bolt acked.", _BY_COMPONENT),
        MetricDescription(
            "ratchet_tuples_failed",
            "counter",
            "Tuples that a bolt failed, or that a spout was told have failed.",
            _BY_COMPONENT,
        ),
        MetricDescription(
            "ratchet_tuples_completed", "counter", "Tuples of a spout that were fully processed.", _BY_COMPONENT
        ),
        MetricDescription(
            "ratchet_tuples_timed_out",
            "counter",
            "Tuples of a spout that were not fully processed in time.",
            _BY_COMPONENT,
        ),
        MetricDescription("ratchet_tuples_died", "counter", "Instances that an error of theirs ended.", _BY_COMPONENT),
        MetricDescription(
            "ratchet_tuple_latency_seconds",
            "counter",
            "Seconds from emission to completion, summed over what was completed.",
            _BY_COMPONENT,
        ),
    )
}


class ObservedPartition(Protocol):
    """How far a partition has been processed, as a status shows it."""

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
    def attempts_failed(self) -> int: ...
    @property
    def bad_records(self) -> int: ...
    @property
    def topology_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def partitions(self) -> Mapping[str, ObservedPartition]: ...


class RunCollector(Collector):
    """Turns a status into metrics at every scrape."""

    def __init__(self, status: Callable[[], ObservedRun]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []  # the metrics depend on the partitions; Prometheus need not know them in advance

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        topology = [status.topology_id]
        yield from _measured(
            topology,
            ratchet_leading=float(status.phase == "running"),
            ratchet_epoch=status.epoch,
            ratchet_committed_txid=status.committed_txid,
            ratchet_transactions_in_flight=len(status.in_flight),
            ratchet_rows_read=status.read_rows,
            ratchet_rows_committed=status.committed_rows,
            ratchet_bad_records=status.bad_records,
            ratchet_attempts_failed=status.attempts_failed,
        )
        for field in ("end_offset", "committed_offset", "in_flight", "lag", "lost_records"):
            family = METRICS[f"ratchet_source_{field}"].family()
            for partition, progress in status.partitions.items():
                value = getattr(progress, field)
                if value is not None:  # what is not known is left out
                    family.add_metric([*topology, partition], value)
            yield family


def _measured(labels: Sequence[str], **values: float) -> Iterable[Metric]:
    """One figure of each name."""
    for name, value in values.items():
        family = METRICS[name].family()
        family.add_metric(labels, value)
        yield family


class ObservedCounts(Protocol):
    """What one component of a core topology did."""

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
    def pending(self) -> int: ...
    @property
    def latency_s(self) -> float: ...


class ObservedCheckpoint(Protocol):
    """The part of the status of checkpoints that becomes metrics."""

    @property
    def txid(self) -> int: ...
    @property
    def recoveries(self) -> int: ...


class ObservedCoreRun(Protocol):
    """The part of the status of a core topology that becomes metrics."""

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
    """Turns the status of a core topology into metrics at every scrape."""

    def __init__(self, topology_id: str, status: Callable[[], ObservedCoreRun]) -> None:
        self._topology_id = topology_id
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        topology = [self._topology_id]
        yield from _measured(
            topology,
            ratchet_rounds=status.rounds,
            ratchet_rounds_lost=status.rounds_lost,
            ratchet_trees=status.trees,
        )
        if status.checkpoint is not None:
            yield from _measured(
                topology,
                ratchet_checkpoint=status.checkpoint.txid,
                ratchet_recoveries=status.checkpoint.recoveries,
            )
        for name, field in _OF_COMPONENTS.items():
            family = METRICS[name].family()
            for component, counts in status.components.items():
                family.add_metric([*topology, component], getattr(counts, field))
            yield family


_OF_COMPONENTS = {
    "ratchet_tuple_latency_seconds": "latency_s",
    **{name: name.removeprefix("ratchet_tuples_") for name in METRICS if name.startswith("ratchet_tuples_")},
}


def serve_metrics(collector: Collector, host: str, port: int) -> Callable[[], None]:
    """Serve ``http://host:port/metrics`` from a thread. Returns a function that ends it. Raises
    ``ConfigError`` when the server cannot listen on the port, for instance because it is taken."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics.prometheus.port {port} on {host}: {error.strerror or error}; take another"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
