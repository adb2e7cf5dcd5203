"""A driver's published status, and the context that it passes to each of its terms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.config import Config
from framework.coordination.step_generators import Threads
from framework.coordination.store import CoordinationStore
from framework.execution.ports import BatchExecutor
from framework.observe.journal import Journal
from framework.topology.builder import Topology
from framework.transactions.plans import Plan

if TYPE_CHECKING:
    from framework.observe.tracing import TransactionTraces
    from framework.transactions.history_archive import HistoryKeeper


@dataclass(slots=True, kw_only=True)
class DriverStatus:
    """A snapshot of the driver.

    * ``phase``: starting, standby, running, finished, stopped, failed.
    * ``repeating``: the failure behind the present retries; None again after a commit.
    * ``history_waiting``: why the permanent record of transactions lags; None when it does not.
    * ``pace``: the keys of the pace that are set, including changes by ``ratchet set``.
    * ``planned_in_s``: how long the pace delays the next plan; None when it does not."""

    phase: str = "starting"
    epoch: int = 0
    committed_txid: int = 0
    in_flight: dict[int, str] = field(default_factory=dict)
    in_flight_rows: int | None = None
    lag: int | None = None
    last_error: str | None = None
    waiting_for: str | None = None
    repeating: str | None = None
    history_waiting: str | None = None
    pace: Mapping[str, Any] = field(default_factory=dict)
    planned_in_s: float | None = None


class Awaited:
    """The goals for which bounded runs wait. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.goals: tuple[Plan, ...] = ()

    def add(self, goal: Plan) -> None:
        with self._lock:
            self.goals = (*self.goals, goal)

    def remove(self, goal: Plan) -> None:
        with self._lock:
            self.goals = tuple(each for each in self.goals if each is not goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverContext:
    """The objects and settings that outlive a term.

    * ``conf``: the configuration as components see it.
    * ``accept_changed_topology``: the user allows the topology to continue from the state of
      another shape.
    * ``purge_every``: tombstones are removed once in this many transactions.
    * ``stop_requested``: set when the run has to end.
    * ``update``: changes fields of the driver's status.
    * ``traces``: of a run that traces its transactions; None in all others.
    * ``history``: of a run that keeps a permanent record of its transactions.
    * ``awaited``: results of the planner's ``end`` that a caller waits to see committed."""

    topology: Topology
    executor: BatchExecutor
    store: CoordinationStore
    config: Config
    conf: Mapping[str, Any]
    accept_changed_topology: bool
    purge_every: int
    journal: Journal
    threads: Threads
    stop_requested: threading.Event
    update: Callable[..., None]
    traces: TransactionTraces | None = None
    history: HistoryKeeper | None = None
    awaited: Awaited = field(default_factory=Awaited)
