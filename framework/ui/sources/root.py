"""The page's view of all topologies under a ZooKeeper root, for ``ratchet ui``."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from framework.coordination import CoordinationStore
from framework.coordination.presence import EVERY_S
from framework.coordination.transactional_state import TransactionalState
from framework.inspect.topologies import TopologyOverview, named_damage, read_topologies, read_topology
from framework.observe import TransactionRecord
from framework.transactions.documents import META, read_transaction
from framework.transactions.history_reader import HistoryReader
from framework.ui import documents
from framework.ui.sources.topology_drivers import document_of

#: The form in which ``Topology.outline`` writes an input.
_INPUT = re.compile(r"([^/]+)/(.*?) by (.*)", re.DOTALL)
#: The most topologies with cached data; a root may hold more.
KEPT_MAX = 50
T = TypeVar("T")


class RootSource:
    """The store's data about every topology, running or not. It has neither the lag of single
    partitions nor configurations: the drivers' own pages, which are linked, show those."""

    every_s = EVERY_S

    def __init__(self, store: CoordinationStore, root: str) -> None:
        self._store = store
        self._root = root
        self._readers: dict[str, HistoryReader] = {}
        self._flows: dict[str, documents.Flow] = {}
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        return self._root

    def topologies(self) -> list[documents.Document]:
        return [_document(each) for each in read_topologies(self._store)]

    def topology(self, topology_id: str) -> documents.View | None:
        with named_damage(topology_id):
            return self._topology(topology_id)

    def _topology(self, topology_id: str) -> documents.View | None:
        found = read_topology(self._store, topology_id)
        if found is None:
            return None
        status = found.leader.status if found.leader is not None else {}
        live: dict[str, Any] = {**_document(found), "at": documents.now()}
        parts: dict[str, Any] = {"live": live}
        closed: list[TransactionRecord] = []
        if found.kind == "transactional":
            reader = self._kept(self._readers, topology_id, lambda: HistoryReader(self._store, topology_id))
            closed = reader.read()
            live["in_flight"] = documents.in_flight(_mapping(status.get("in_flight")))
            live["edges"] = documents.edges(closed)
            live["trouble"] = live["trouble"] or reader.unreadable
            parts["failures"] = documents.failures(closed)
            meta = TransactionalState(self._store, topology_id).get_data(META)
            parts["about"] = {"graph": shape_in(meta.get("outline") if isinstance(meta, dict) else None)}
        elif found.kind == "core":
            live["edges"] = self._kept(self._flows, topology_id, documents.Flow).look(status)
            parts["about"] = {"graph": told_shape(status.get("graph"))}
        return documents.View(parts, closed)

    def transaction(self, topology_id: str, txid: int) -> documents.Document | None:
        found = read_transaction(self._store, topology_id, txid)
        return None if found is None else documents.transaction_document(found)

    def _kept(self, kept: dict[str, T], topology_id: str, make: Callable[[], T]) -> T:
        """Return the cached object, or make a new one. The least recently used is evicted."""
        with self._lock:
            found = kept.pop(topology_id, None) or make()
            kept[topology_id] = found
            if len(kept) > KEPT_MAX:
                kept.pop(next(iter(kept)))
            return found


def shape_in(outline: Any) -> dict[str, list[dict[str, Any]]]:
    """The graph in a topology's outline, in the form of ``Graph.shape``.

    >>> shape_in({"spout": "a", "components": {"b": {"inputs": ["a/default by X()"]}}})["edges"]
    [{'source': 'a', 'stream': 'default', 'target': 'b', 'grouping': 'X()'}]
    """
    outline = _mapping(outline)
    known = _mapping(outline.get("components"))
    components, edges = [], []
    for name, each in known.items():
        each = _mapping(each)
        spout = name == outline.get("spout")
        components.append(
            {
                "id": name,
                "kind": "spout" if spout else "committer" if each.get("committer") else "bolt",
                "class": None,
                "parallelism": each.get("parallelism"),
                "states": list(each.get("states", ())),
            }
        )
        for text in each.get("inputs", ()):
            match = _INPUT.fullmatch(text)
            if match is not None:
                source, stream, grouping = match.groups()
                edges.append({"source": source, "stream": stream, "target": name, "grouping": grouping})
    return {"components": components, "edges": edges}


def told_shape(graph: Any) -> dict[str, list[dict[str, Any]]]:
    """The graph of a core topology from its driver's status, in the form of ``Graph.shape``,
    without parts that cannot be drawn."""
    graph = _mapping(graph)
    names = {"components": ("id", "kind"), "edges": ("source", "stream", "target")}
    return {
        part: [
            dict(each)
            for each in (graph[part] if isinstance(graph.get(part), list) else ())
            if all(isinstance(_mapping(each).get(name), str) for name in needed)
        ]
        for part, needed in names.items()
    }


def _document(found: TopologyOverview) -> documents.Document:
    return {**found.document(), "drivers": [document_of(each) for each in found.drivers]}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Documents of other versions may hold anything."""
    return value if isinstance(value, Mapping) else {}
