"""What a driver is given, what it shows of itself, and what it passes to each of its terms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from framework.coordination.steps import Threads
from framework.coordination.store import CoordinationStore
from framework.execution.ports import BatchExecutor
from framework.observe.journal import Journal
from framework.topology.builder import Topology
from framework.transactions.commit import PURGE_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """What a driver needs of the configuration. ``empty_batch_every_s``: how often an idle source
    makes an empty batch; None for never. ``accept_changed_topology``: the user allows the topology
    to go on from the state of another shape. ``standby``: leave the lead to another driver first.
    ``purge_every``: tombstones are removed once in this many transactions."""

    max_pending: int = 1
    message_timeout_ms: int = 30_000
    max_attempts: int = 5
    idle_poll_max_s: float = 0.1
    empty_batch_every_s: float | None = None
    accept_changed_topology: bool = False
    standby: bool = False
    conf: Mapping[str, Any] = field(default_factory=dict)
    purge_every: int = PURGE_EVERY


@dataclass(slots=True, kw_only=True)
class DriverStatus:
    """A snapshot of the driver. ``phase``: starting, standby, running, stopped, failed.
    ``repeating``: the failure behind the present retries; None again when a transaction is
    committed."""

    phase: str = "starting"
    epoch: int = 0
    committed_txid: int = 0
    in_flight: dict[int, str] = field(default_factory=dict)
    in_flight_rows: int | None = None
    lag: int | None = None
    last_error: str | None = None
    waiting_for: str | None = None
    repeating: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverContext:
    """What outlives a term. ``stop_requested``: set when the run is to end. ``update``: changes
    fields of the driver's status."""

    topology: Topology
    executor: BatchExecutor
    store: CoordinationStore
    settings: DriverSettings
    journal: Journal
    threads: Threads
    stop_requested: threading.Event
    update: Callable[..., None]
