"""Metrics of a run in Prometheus' format, read from its status when they are asked for.

Served on the loopback interface by default, read-only. Source: https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from framework.errors import ConfigError
from framework.observe.progress import Observed


class ObservedPartition(Protocol):
    """Where a partition stands, as a status has it."""

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


class ObservedRun(Observed, Protocol):
    """The part of a run's status that becomes metrics."""

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
        return []  # what there is depends on the partitions; nothing needs to be known before

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
            if value is not None:  # what is not known is left out
                family.add_metric([status.topology_id, partition], value)
    yield from families.values()


def serve_metrics(status: Callable[[], ObservedRun], host: str, port: int) -> Callable[[], None]:
    """Serve ``http://host:port/metrics`` from a thread; returns what ends it. Raises ``ConfigError`` when the port is
    taken."""
    registry = CollectorRegistry()
    registry.register(RunCollector(status))
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
