"""Metrics of a run in Prometheus' format, read from its status at each scrape.

Served on the loopback interface by default, read-only. Source:
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from framework.errors import ConfigError


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
        for name, text, value in (
            ("ratchet_leading", "Whether this process leads the topology.", float(status.phase == "running")),
            ("ratchet_epoch", "The epoch of the leadership.", status.epoch),
            ("ratchet_committed_txid", "The last committed transaction.", status.committed_txid),
            (
                "ratchet_transactions_in_flight",
                "Transactions that are planned and not committed.",
                len(status.in_flight),
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["topology"])
            gauge.add_metric(topology, value)
            yield gauge
        for name, text, value in (
            ("ratchet_rows_read", "Source rows processed; those of a replay count again.", status.read_rows),
            ("ratchet_rows_committed", "Source rows committed.", status.committed_rows),
            ("ratchet_bad_records", "Committed records that could not be decoded.", status.bad_records),
            ("ratchet_attempts_failed", "Attempts at transactions that failed.", status.attempts_failed),
        ):
            counter = CounterMetricFamily(name, text, labels=["topology"])
            counter.add_metric(topology, value)
            yield counter
        yield from _of_partitions(status)


def _of_partitions(status: ObservedRun) -> Iterable[Metric]:
    labels = ["topology", "partition"]
    families: dict[str, GaugeMetricFamily] = {
        "end_offset": GaugeMetricFamily("ratchet_source_end_offset", "Where the source ends.", labels=labels),
        "committed_offset": GaugeMetricFamily("ratchet_source_committed_offset", "The next to commit.", labels=labels),
        "in_flight": GaugeMetricFamily("ratchet_source_in_flight", "Offsets planned, not committed.", labels=labels),
        "lag": GaugeMetricFamily("ratchet_source_lag", "Offsets from what is committed to the end.", labels=labels),
        "lost_records": GaugeMetricFamily(
            "ratchet_source_lost_records", "Offsets gone before they were read, and skipped.", labels=labels
        ),
    }
    for partition, progress in status.partitions.items():
        for name, family in families.items():
            value = getattr(progress, name)
            if value is not None:  # unknown values are left out
                family.add_metric([status.topology_id, partition], value)
    yield from families.values()


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


_CORE_COUNTERS = {
    "emitted": "Tuples that a component emitted.",
    "executed": "Tuples that a bolt executed.",
    "acked": "Tuples that a bolt acked.",
    "failed": "Tuples that a bolt failed, or that a spout was told have failed.",
    "completed": "Tuples of a spout that were fully processed.",
    "timed_out": "Tuples of a spout that were not fully processed in time.",
    "died": "Instances that an error of theirs ended.",
    "latency_s": "Seconds from emission to completion, summed over what was completed.",
}


class CoreRunCollector(Collector):
    """Turns the status of a core topology into metrics at every scrape."""

    def __init__(self, topology_id: str, status: Callable[[], ObservedCoreRun]) -> None:
        self._topology_id = topology_id
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for name, text, value in (
            ("ratchet_rounds", "Rounds run.", status.rounds),
            ("ratchet_rounds_lost", "Rounds of which nothing came back.", status.rounds_lost),
        ):
            counter = CounterMetricFamily(name, text, labels=["topology"])
            counter.add_metric([self._topology_id], value)
            yield counter
        trees = GaugeMetricFamily("ratchet_trees", "Tuple trees that the ackers track.", labels=["topology"])
        trees.add_metric([self._topology_id], status.trees)
        yield trees
        if status.checkpoint is not None:
            last = GaugeMetricFamily("ratchet_checkpoint", "The last committed checkpoint.", labels=["topology"])
            last.add_metric([self._topology_id], status.checkpoint.txid)
            yield last
            recoveries = CounterMetricFamily(
                "ratchet_recoveries", "How often all states went back to the last checkpoint.", labels=["topology"]
            )
            recoveries.add_metric([self._topology_id], status.checkpoint.recoveries)
            yield recoveries
        labels = ["topology", "component"]
        pending = GaugeMetricFamily("ratchet_tuples_pending", "Tuples of a spout whose fate is open.", labels=labels)
        for component, counts in status.components.items():
            pending.add_metric([self._topology_id, component], counts.pending)
        yield pending
        for field, text in _CORE_COUNTERS.items():
            name = "ratchet_tuple_latency_seconds" if field == "latency_s" else f"ratchet_tuples_{field}"
            family = CounterMetricFamily(name, text, labels=labels)
            for component, counts in status.components.items():
                family.add_metric([self._topology_id, component], getattr(counts, field))
            yield family


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
