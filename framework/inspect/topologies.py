"""The topologies under a ZooKeeper root, as any process sees them: running or not, of both
kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from framework.coordination import CoordinationStore
from framework.coordination.presence import LiveDriver, read_drivers
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.leader_loop import read_record
from framework.errors import CorruptStateError
from framework.observe import TransactionRecord
from framework.observe.status_document import status_document
from framework.observe.topology_health import problem_in, waits
from framework.topology.planning_time_stream import CLOCK_PARTITION
from framework.topology.spouts import is_read_to_end
from framework.transactions.documents import committed_txid, is_transactional, read_transaction


@dataclass(frozen=True, slots=True)
class TopologyOverview:
    """One topology.

    ``kind``: transactional, core, or unknown: of a topology that has stopped and left nothing but
    the number of its leaders. ``drivers``: those that live, the leader first. ``led``: whether
    somebody holds the leadership, a driver or a command. ``txid``: the last committed transaction,
    of a core topology the last checkpoint; None when there is none. ``last``: the record of that
    transaction, while it is kept. ``unreadable``: why its documents cannot be read, else None.
    """

    id: str
    _: KW_ONLY
    kind: str
    drivers: list[LiveDriver]
    led: bool
    txid: int | None
    last: TransactionRecord | None
    unreadable: str | None = None

    @property
    def leader(self) -> LiveDriver | None:
        return self.drivers[0] if self.drivers and self.drivers[0].phase != "standby" else None

    @property
    def standbys(self) -> list[LiveDriver]:
        return self.drivers[1:] if self.leader is not None else self.drivers

    @property
    def state(self) -> str:
        """One word: running, waiting (what it does fails and is tried again), starting, standby,
        led, finished (a bounded source is read to its end), stopped, or unreadable."""
        if self.unreadable is not None:
            return "unreadable"
        if waits([each.status for each in self.drivers]):
            return "waiting"
        if self.leader is not None:
            return self.leader.phase
        if self.drivers or self.led:
            return "standby" if self.drivers else "led"
        return "finished" if self.is_finished else "stopped"

    @property
    def is_finished(self) -> bool:
        """Whether its source is bounded, and everything up to its end is committed, as far as the
        record of the last transaction is kept."""
        plan = self.last.plan if self.last is not None else {}
        ranges = [meta for partition, meta in plan.items() if partition != CLOCK_PARTITION]
        return bool(ranges) and all(map(is_read_to_end, ranges))

    @property
    def problem(self) -> str | None:
        """Why it cannot be read, what it waits for, or what failed last."""
        if self.unreadable is not None:
            return self.unreadable
        return problem_in([each.status for each in self.drivers])

    def document(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        told = self.leader.status if self.leader is not None else None
        status = None if told is None else {key: value for key, value in told.items() if key != "graph"}
        return status_document(
            self.id,
            self.kind,
            state=self.state,
            txid=self.txid,
            committed_at=self.last.closed_at if self.last is not None else None,
            trouble=self.problem,
            drivers=[
                {"host": each.host, "pid": each.pid, "phase": each.phase, "started_at": each.started_at}
                for each in self.drivers
            ],
            status=status,
        )


def read_topologies(store: CoordinationStore) -> list[TopologyOverview]:
    """All topologies that the store knows, by name; those that cannot be read among them, with the
    reason."""
    found = (_read_surely(store, name) for name in store.children(""))
    return [each for each in found if each is not None]


def _read_surely(store: CoordinationStore, topology_id: str) -> TopologyOverview | None:
    try:
        return read_topology(store, topology_id)
    except CorruptStateError as error:
        reason = str(error)
    return TopologyOverview(topology_id, kind="unknown", drivers=[], led=False, txid=None, last=None, unreadable=reason)


def read_topology(store: CoordinationStore, topology_id: str) -> TopologyOverview | None:
    """One topology; None when the store does not know it. Raises ``CorruptStateError``."""
    with named_damage(topology_id):
        found = _read(store, topology_id)
        if found is not None:
            found.document()  # with what it is shown by
    return found


@contextmanager
def named_damage(topology_id: str) -> Iterator[None]:
    """Raise ``CorruptStateError``, naming the topology, where a document of the right form has
    values that no Ratchet writes."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptStateError(
            f"{topology_id}: its documents are damaged ({type(error).__name__}: {error}); restore them from a backup"
        ) from error


def _read(store: CoordinationStore, topology_id: str) -> TopologyOverview | None:
    drivers = read_drivers(store, topology_id)
    led = store.is_led(topology_id)
    if drivers[0].kind == "transactional" if drivers else is_transactional(store, topology_id):
        txid = committed_txid(store, topology_id)
        last = read_transaction(store, topology_id, txid) if txid else None
        return TopologyOverview(
            topology_id, kind="transactional", drivers=drivers, led=led, txid=txid or None, last=last
        )
    record: CheckpointRecord | None = read_record(store, topology_id)
    if record is None and not drivers and store.get(f"{topology_id}/epoch") is None:
        return None
    txid = record.txid if record is not None else 0
    kind = "core" if drivers or record is not None else "unknown"
    return TopologyOverview(topology_id, kind=kind, drivers=drivers, led=led, txid=txid or None, last=None)
