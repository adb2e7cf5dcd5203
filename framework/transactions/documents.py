"""A topology's documents in the coordination store: what is written where, and how a new leader reads it back.

::

    <topology id>/meta                     outline and digest of the topology, identity of the source
    <topology id>/coordinator/currtx       next txid to commit
    <topology id>/coordinator/attempts     txid -> last attempt id used
    <topology id>/user/<spout>/<txid>      the plan of that batch: every partition's metadata, one document

Every ``save`` is one atomic step, under the epoch. A plan is written together with the attempt that first emits it, so
a transaction costs two writes: one to emit it, one to close it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.errors import ConfigError, CorruptStateError
from framework.topology.builder import Topology
from framework.transactions.coordinator import Persist, Plan, Recovered, plan_digest
from framework.transactions.state import RotatingTransactionalState, TransactionalState
from framework.transactions.store import CoordinationStore, Leadership

CURRTX = "coordinator/currtx"
ATTEMPTS = "coordinator/attempts"
META = "meta"


class TopologyDocuments:
    """The documents of one topology, under one leadership."""

    def __init__(self, store: CoordinationStore, leadership: Leadership, topology: Topology) -> None:
        self._state = TransactionalState(store, topology.id, leadership.apply)
        self._topology = topology
        self._plans = RotatingTransactionalState(self._state, f"user/{topology.spout.id}")

    def claim(self, source: Mapping[str, Any]) -> None:
        """Write ``meta`` on the first start; later, check that topology and source are the ones of the state.

        Raises ``ConfigError`` naming the difference.
        """
        outline = self._topology.outline()
        meta = {"digest": self._topology.digest(), "outline": outline, "source": dict(source)}
        found = self._state.get_data(META)
        if found is None:
            self._state.set_data(META, meta)
            return
        if not isinstance(found, dict) or "outline" not in found or "source" not in found:
            raise CorruptStateError(f"{self._topology.id}/{META}: not a meta document; restore the node from a backup")
        _check_source(self._topology.id, found["source"], source)
        if found.get("digest") != meta["digest"]:
            raise ConfigError(
                f"the topology {self._topology.id!r} is not the one its state was written by: "
                f"{'; '.join(_differences(found['outline'], outline)) or 'its outline differs'}. Give the changed "
                "topology another id, or restore the former one"
            )
        known = found["source"].get("topics", {})
        if {**known, **source.get("topics", {})} != known:
            self._state.set_data(META, {**meta, "source": {**source, "topics": {**known, **source.get("topics", {})}}})

    def recover(self) -> tuple[Recovered, dict[int, str]]:
        """What the coordinator starts from, and the digest of every plan found. Raises ``CorruptStateError``."""
        currtx = self._state.get_data(CURRTX)
        currtx = 1 if currtx is None else currtx
        attempts = self._state.get_data(ATTEMPTS) or {}
        if not isinstance(currtx, int) or currtx < 1:
            raise CorruptStateError(f"{self._topology.id}/{CURRTX}: {currtx!r} is not a txid; restore it from a backup")
        if not isinstance(attempts, dict) or not all(
            txid.isdigit() and isinstance(last, int) for txid, last in attempts.items()
        ):
            raise CorruptStateError(f"{self._topology.id}/{ATTEMPTS}: not a map of txid to attempt; restore it")
        plans: dict[int, Plan] = {}
        for txid in self._plans.txids():
            document = self._plans.get_state(txid, lambda txid, previous: None)
            node = f"{self._topology.id}/user/{self._topology.spout.id}/{txid}"
            if not isinstance(document, dict) or not isinstance(document.get("plan"), dict):
                raise CorruptStateError(f"{node}: not a plan document; restore it from a backup")
            if document.get("digest") != plan_digest(document["plan"]):
                raise CorruptStateError(f"{node}: the plan does not match its digest; restore it from a backup")
            plans[txid] = document["plan"]
        if currtx > 1 and currtx - 1 not in plans:
            raise CorruptStateError(
                f"{self._topology.id}: currtx is {currtx}, and the plan of txid {currtx - 1}, where the next batch would "
                "start, is missing; restore the state from a backup"
            )
        recovered = Recovered(currtx, {int(txid): last for txid, last in attempts.items()}, plans)
        return recovered, {txid: plan_digest(plan) for txid, plan in plans.items()}

    def save(self, change: Persist) -> None:
        """Write what the coordinator wants persisted, atomically."""
        with self._state.atomically():
            self._state.set_data(ATTEMPTS, {str(txid): last for txid, last in change.attempts.items()})
            for txid, (attempt_id, plan) in change.plans.items():
                self._plans.override_state(txid, {"attempt": attempt_id, "digest": plan_digest(plan), "plan": plan})
            if change.currtx is not None:
                self._state.set_data(CURRTX, change.currtx)
                self._plans.cleanup_before(change.currtx - 1)


def _check_source(topology_id: str, found: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    if found.get("cluster") != source.get("cluster"):
        raise ConfigError(
            f"the state of topology {topology_id!r} was read from Kafka cluster {found.get('cluster')!r}, and the "
            f"configured one is {source.get('cluster')!r}: offsets mean nothing there; check bootstrap_servers, or give "
            "the topology another id"
        )
    topics = source.get("topics", {})
    for topic, topic_id in found.get("topics", {}).items():
        if topic in topics and topics[topic] != topic_id:
            raise ConfigError(
                f"topic {topic!r} is not the one that topology {topology_id!r} was reading: its id was {topic_id} and is "
                f"{topics[topic]}, so it was deleted and created again; give the topology another id to read it anew"
            )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    was, has = before.get("components", {}), now["components"]
    found = [f"component {name!r} is gone" for name in was if name not in has]
    found += [f"component {name!r} is new" for name in has if name not in was]
    for name in has:
        if name in was and was[name] != has[name]:
            keys = [key for key in has[name] if was[name].get(key) != has[name][key]]
            found += [f"{name!r}: {key} was {was[name].get(key)!r}, is {has[name][key]!r}" for key in keys]
    return found
