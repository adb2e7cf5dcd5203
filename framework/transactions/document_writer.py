"""The documents of a topology, as its leader writes them.

Every ``save`` is one atomic step, conditional on the epoch. A plan is written together with the
attempt that first emits it; later attempts at the same plan do not write it. So a transaction costs
two writes: one to emit it, one to close it. A topology with a committer that has no header of its
own needs a third, before the commit begins (C24).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from typing import Any

from framework.coordination.store import CoordinationStore, Leadership
from framework.coordination.transactional_state import (
    RotatingTransactionalState,
    TransactionalState,
)
from framework.document_type_checks import check_fields, fits
from framework.errors import READ_ANEW, ConfigError, CorruptStateError, DataLossError, InvariantViolation
from framework.observe.journal import TransactionRecord
from framework.observe.logs import get_logger
from framework.topology.builder import Topology
from framework.topology.fencing import ROLLED_BACK, OpenCommit
from framework.topology.planning_time_stream import CLOCK_STREAM
from framework.transactions.coordinator import OpenedRows, Persist, Recovered
from framework.transactions.documents import (
    ATTEMPTS,
    CURRTX,
    HISTORY,
    INCARNATION,
    JOINED,
    LETTERS,
    META,
    OPEN,
    OPENED_ROWS,
    ORIGIN,
    SCHEMAS,
    UNDONE,
    Origin,
    Undone,
    checked_currtx,
    compared_outlines,
    form_of,
    incarnation_in,
    joined_in,
    meta_in,
    new_incarnation,
    origin_in,
    plan_in,
    schemas_in,
    slot,
    undone_in,
)
from framework.transactions.plans import Plan, plan_digest, stored_plan
from framework.transactions.topology_change_messages import shape_changes

_TXID = re.compile("[0-9]{1,18}")
#: A longer record of a transaction is stored without its plan, and with its last attempt only, so
#: that a thousand records do not burden ZooKeeper's memory.
HISTORY_BYTES_MAX = 64_000
#: Schemas whose digests are kept; the first ones are forgotten.
SCHEMAS_MAX = 2_000

_log = get_logger()


class TopologyDocuments:
    """The documents of one topology, under one leadership."""

    def __init__(self, store: CoordinationStore, leadership: Leadership, topology: Topology) -> None:
        self._state = TransactionalState(store, topology.id, leadership.apply)
        self._topology = topology
        self._plans = RotatingTransactionalState(self._state, f"user/{topology.spout.id}")
        self._origin: Origin | None = None
        self._schemas: dict[str, str] | None = None  # once they are needed
        self._undone = self.undone()

    def claim(
        self, source: Mapping[str, Any], *, accept_changed: bool = False, accept_lost_data: bool = False
    ) -> Sequence[str]:
        """Write ``meta`` on the first start. On later starts, compare topology and source with it.
        Stateless steps may come and go.

        Raises ``ConfigError`` naming the difference when the topology has changed. With
        ``accept_changed`` the changed topology is accepted; if its spout has another id, it takes
        over the plans of the former one. Raises ``DataLossError`` for another source, unless
        ``accept_lost_data`` says that the planner continues after lost data. Raises
        ``CorruptStateError`` when ``meta`` or ``origin`` does not parse; ``origin`` is needed at a
        close, and an unreadable one should be reported before anything is written.

        Returns the locations of the states that a change has added and that may still join. Every
        start with ``accept_changed`` returns them, because a crash may have come before they
        joined. A state from before the change may not join, even if it is empty.
        """
        self._origin = origin_in(self._state, self._topology.id)
        outline = self._topology.outline()
        meta = {"digest": self._topology.digest(), "outline": outline, "source": dict(source)}
        if steps := self._topology.steps():
            meta["steps"] = steps
        found = self._state.get_data(META)
        if found is None:
            with self._state.atomically():
                if not self.incarnation():
                    self._state.set_data(INCARNATION, new_incarnation())
                self._state.set_data(META, meta)
            return ()
        found = meta_in(found, self._topology.id)
        held = found["source"] or {}
        other = _other_source(self._topology.id, held, source)
        if other and not accept_lost_data:
            raise DataLossError(other)
        if other:
            _log.warning("source.changed", topology=self._topology.id, difference=other)
            held = {}
        joining = found.get("joining", [])
        if found.get("digest") != meta["digest"]:
            before, now = compared_outlines(found, self._topology)
            if before != now:
                self._accept_change(before, now, accept_changed=accept_changed)
            joining = sorted(_locations(outline) - (_locations(found["outline"]) - set(joining)))
        known = held.get("topics", {})
        meta["source"] = {**source, "topics": {**known, **source["topics"]}} if "topics" in source else dict(source)
        if joining:
            meta["joining"] = joining
        if found != meta:
            self._state.set_data(META, meta)
        return joining if accept_changed else ()

    def _accept_change(self, before: Mapping[str, Any], now: Mapping[str, Any], *, accept_changed: bool) -> None:
        differences = "; ".join(shape_changes(before, now)) or "its outline differs"
        if not accept_changed:
            raise ConfigError(
                f"the topology {self._topology.id!r} is not the one its state was written by: {differences}. Run it once "
                "with --accept-changed-topology if it may go on from that state; or give another name to the step whose "
                "state no longer fits, another id to the topology, or restore the former one"
            )
        if _has_clock(before) and not _has_clock(now):
            raise ConfigError(
                f"the topology {self._topology.id!r} had planning times in its plans, and nothing subscribes to the clock of "
                "its spout any more: keep a WatermarkCommitter, or give the topology another id"
            )
        _log.warning("topology.changed", topology=self._topology.id, difference=differences)
        former = before.get("spout")
        if isinstance(former, str) and former != self._topology.spout.id:
            plans = RotatingTransactionalState(self._state, f"user/{former}")
            # one by one: several large plans can exceed the size of a step
            for txid in plans.txids():
                with self._state.atomically():
                    document = plans.get_state(txid, _never)
                    self._plans.override_state(txid, document, form_of(document.get("plan")))
                    plans.remove_state(txid)

    def incarnation(self) -> str:
        """The topology's incarnation; empty for state of a version without incarnations. Raises
        ``CorruptStateError``.
        """
        return incarnation_in(self._state, self._topology.id)

    def recover(self) -> tuple[Recovered, dict[int, str]]:
        """Return the coordinator's start state as far as the documents know it, and the digest of
        every plan found. Here, ``opened`` covers only committers without a header. Raises
        ``CorruptStateError``."""
        currtx = checked_currtx(self._topology.id, self._state.get_data(CURRTX))
        attempts = self._state.get_data(ATTEMPTS) or {}
        if not fits(attempts, Mapping[str, int]) or not all(map(_TXID.fullmatch, attempts)):
            raise CorruptStateError(f"{self._topology.id}/{ATTEMPTS}: not a map of txid to attempt; restore it")
        plans: dict[int, Plan] = {}
        for txid in self._plans.txids():
            document = self._plans.get_state(txid, _never)
            node = f"{self._topology.id}/user/{self._topology.spout.id}/{txid}"
            plans[txid] = plan_in(document, node)
        if currtx > 1 and currtx - 1 not in plans:
            self._check_spout()
            raise CorruptStateError(
                f"{self._topology.id}: currtx is {currtx}, and the plan of txid {currtx - 1}, where the next batch would "
                "start, is missing; restore the state from a backup"
            )
        digests = {txid: plan_digest(plan) for txid, plan in plans.items()}
        opened, rows = self._opened(currtx, digests), self._opened_rows(currtx, digests)
        return Recovered(currtx, {int(txid): last for txid, last in attempts.items()}, plans, opened, rows), digests

    def _check_spout(self) -> None:
        """Refuse a topology whose spout has another id than the plans: a command got a changed
        topology that no driver has run yet."""
        meta = self._state.get_data(META)
        former = meta_in(meta, self._topology.id)["outline"].get("spout") if meta is not None else None
        if former not in (None, self._topology.spout.id):
            raise ConfigError(
                f"the topology {self._topology.id!r} is not the one its state was written by: its spout was {former!r}, is "
                f"{self._topology.spout.id!r}. Run it once with --accept-changed-topology, or name the former one"
            )

    def _opened(self, currtx: int, digests: Mapping[int, str]) -> bool:
        """Whether committers without a header may have begun to commit ``currtx`` (C24)."""
        if not self._topology.headerless():
            return False
        node = f"{self._topology.id}/{OPEN}"
        document = self._state.get_data(OPEN)
        if document is None:
            return not self._topology.states and self._opened_before_headers(currtx, digests)
        try:
            check_fields(OpenCommit, document)
            opened = OpenCommit(**document)
        except TypeError as error:
            raise CorruptStateError(f"{node}: not the header of a commit; restore it from a backup") from error
        if opened.txid < currtx or opened.plan_digest == ROLLED_BACK:
            return False
        if opened.txid > currtx or opened.plan_digest != digests.get(currtx):
            raise CorruptStateError(
                f"{node}: txid {opened.txid} was opened with plan {opened.plan_digest}, and the stored plan of {currtx}, "
                f"which is next, is {digests.get(currtx)}; restore the state of topology {self._topology.id!r} from one backup"
            )
        return True

    def _opened_rows(self, currtx: int, digests: Mapping[int, str]) -> Mapping[str, int]:
        """The rows that the commit of ``currtx`` was opened with under its stored plan; empty if
        they are unknown."""
        document = self._state.get_data(OPENED_ROWS)
        if document is None:
            return {}
        try:
            check_fields(OpenedRows, document)
            opened = OpenedRows(**document)
        except TypeError as error:
            node = f"{self._topology.id}/{OPENED_ROWS}"
            raise CorruptStateError(f"{node}: not the rows of a commit; restore it from a backup") from error
        same = (opened.txid, opened.plan_digest) == (currtx, digests.get(currtx))
        return opened.rows if same else {}

    def _opened_before_headers(self, currtx: int, digests: Mapping[int, str]) -> bool:
        """Evaluate state of a version without ``open`` documents: a stored plan counts as
        opened."""
        if self.incarnation() or currtx not in digests:
            return False
        _log.warning(
            "plan.taken_as_opened",
            topology=self._topology.id,
            txid=currtx,
            reason="the version before did not record which commits it opened",
        )
        return True

    def save(self, change: Persist, record: TransactionRecord | None = None) -> None:
        """Write ``change`` in one atomic step, with the record of the transaction that it
        closes."""
        try:
            self._save(change, record)
        except BaseException:
            self._origin = None  # it is unknown whether the origin was written: read it again
            raise

    def _save(self, change: Persist, record: TransactionRecord | None) -> None:
        with self._state.atomically():
            self._state.set_data(ATTEMPTS, {str(txid): last for txid, last in change.attempts.items()})
            for txid, (_, plan) in change.plans.items():
                self._save_plan(txid, plan)
            for txid in change.dropped:
                self._plans.remove_state(txid)
            if change.opens is not None:
                self._state.set_data(OPEN, asdict(change.opens))
            if change.opened_rows is not None:
                self._state.set_data(OPENED_ROWS, asdict(change.opened_rows))
            if change.currtx is not None:
                self._state.set_data(CURRTX, change.currtx)
                self._plans.cleanup_before(change.currtx - 1)
            if record is not None:
                if self._undone is not None and self._undone.txid == record.txid:
                    record = record.after(self._undone.attempts)
                self._save_record(record)
                self._note_origin(record)

    def _save_record(self, record: TransactionRecord) -> None:
        document = _bounded(record)
        self._state.set_data(f"{HISTORY}/{slot(record.txid)}", document, form_of(document["plan"]))

    def _save_plan(self, txid: int, plan: Plan) -> None:
        """Write a plan, unless it is stored already. One plan per step, because several large plans
        can exceed the size of a step."""
        digest = plan_digest(plan)
        held = self._plans.get_state(txid, _never) if self._plans.has_cache(txid) else None
        if held is None or held.get("digest") != digest:
            stored = stored_plan(plan)
            self._plans.override_state(txid, {"digest": digest, "plan": stored}, form_of(stored))

    def _note_origin(self, record: TransactionRecord) -> None:
        """Record the start of each new partition, in the step that closes the first transaction
        with it."""
        if self._origin is None:
            self._origin = origin_in(self._state, self._topology.id)
        known = self._origin if self._origin.txid else Origin(record.txid, {})
        if known is not self._origin or not record.plan.keys() <= known.positions.keys():
            fresh = {each: meta for each, meta in record.plan.items() if each not in known.positions}
            self._origin = Origin(known.txid, {**known.positions, **fresh})
            stored = stored_plan(self._origin.positions)
            self._state.set_data(ORIGIN, {"txid": self._origin.txid, "positions": stored}, form_of(stored))

    def note_joined(self, location: str, txid: int) -> None:
        """Record that a state is empty before ``txid``. Call it before the state joins."""
        with self._state.atomically():
            self._state.set_data(JOINED, {**joined_in(self._state, self._topology.id), location: txid})

    def note_schemas(self, used: Set[tuple[str, str]], *, accept_changed: bool = False) -> None:
        """Remember the digest of each schema that records were decoded with. Call it before the
        commit of these records begins. Raises ``ConfigError`` for a schema whose digest differs
        from the one remembered, unless ``accept_changed``. An empty digest, of a schema that the
        registry does not have, is not remembered."""
        if not used:
            return
        if self._schemas is None:
            self._schemas = schemas_in(self._state, self._topology.id)
        if self._schemas.items() >= used:  # as in almost every transaction
            return
        known = dict(self._schemas)
        for name, digest in sorted(used):
            before = known.get(name, digest)
            if before != digest and not accept_changed:
                raise ConfigError(_changed_schema(name, before, digest))
            if before != digest:
                _log.warning("schema.changed", topology=self._topology.id, schema=name, before=before, now=digest)
            if digest:
                known[name] = digest
        if known != self._schemas:
            kept = list(known.items())[-SCHEMAS_MAX:]
            self._state.set_data(SCHEMAS, kept)
            self._schemas = dict(kept)

    def undone(self) -> Undone | None:
        """As ``read_undone``."""
        return undone_in(self._state, self._topology.id)

    def pending_undo(self, currtx: int) -> Undone | None:
        """The transaction that an interrupted ``undo`` was taking back, if it is still the next to
        commit."""
        undone = self._undone
        return undone if undone is not None and not undone.finished and undone.txid == currtx else None

    def take_back(self, record: TransactionRecord, before: Plan, attempts: Mapping[int, int]) -> None:
        """Make the last closed transaction the next to commit again, in one atomic step: the
        documents then look as if its commit had been opened and not closed. Later plans stay,
        because those of an idempotent spout never change.

        * ``record``: of that transaction, as it will be shown.
        * ``before``: the plan of the previous transaction.
        * ``attempts``: as in ``Persist``."""
        with self._state.atomically():
            self._save_plan(record.txid - 1, before)
            last = record.attempts[-1].attempt_id if record.attempts else 1
            self._state.set_data(
                ATTEMPTS, {str(record.txid): last, **{str(txid): each for txid, each in attempts.items()}}
            )
            self._state.set_data(CURRTX, record.txid)
            self._note_undone(Undone(record.txid, False, record.attempts))
            self._save_record(record)

    def finish_undo(self, undone: Undone) -> None:
        """Record that the states have undone all writes of the transaction."""
        with self._state.atomically():
            self._note_undone(replace(undone, finished=True))

    def _note_undone(self, undone: Undone) -> None:
        attempts = [each.document() for each in undone.attempts]
        self._state.set_data(UNDONE, {"txid": undone.txid, "finished": undone.finished, "attempts": attempts})
        self._undone = undone

    def forget_positions(self) -> None:
        """Let the next batch start at the position that the source's policy for a first start
        gives. Txids, attempts and the epoch continue to rise (C17). Call it only when no commit is
        opened: ``reset`` rolls back first."""
        with self._state.atomically():
            currtx = checked_currtx(self._topology.id, self._state.get_data(CURRTX))
            for txid in self._plans.txids():
                self._plans.remove_state(txid)
            if currtx > 1:
                self._plans.override_state(currtx - 1, {"digest": plan_digest({}), "plan": {}})
            meta = self._state.get_data(META)
            if isinstance(meta, dict):
                self._state.set_data(META, {**meta, "source": None})
            self._state.delete(OPEN)
            self._state.delete(OPENED_ROWS)
            self._state.delete(LETTERS)
            self._state.delete(SCHEMAS)
            self._state.set_data(ORIGIN, {"txid": currtx, "positions": {}})


def _changed_schema(name: str, before: str, now: str) -> str:
    what = f"has another content (digest {now})" if now else "is gone"
    return (
        f"schema {name} {what}, and earlier records were decoded with the content of digest {before}: the registry was "
        "restored, or another one took its address; restore the former content. If the records really have the new one, "
        "start once with topology.changed.schemas=accept"
    )


def _bounded(record: TransactionRecord) -> dict[str, Any]:
    document = {**record.document(), "plan": stored_plan(record.plan)}
    if len(json.dumps(document)) > HISTORY_BYTES_MAX:
        document["plan"] = {}
        document["attempts"] = document["attempts"][-1:]
    return document


def _never(txid: int, previous: Any) -> Any:
    raise InvariantViolation(f"a plan of txid {txid} was to be made up")


def _other_source(topology_id: str, found: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """How the source differs from the source of the state; empty when they are the same."""
    if not found:
        return ""  # the positions were reset: any source is accepted
    if found.get("cluster") != source.get("cluster"):
        return (
            f"the state of topology {topology_id!r} was read from Kafka cluster {found.get('cluster')!r}, and the "
            f"configured one is {source.get('cluster')!r}: offsets mean nothing there; check bootstrap_servers, or give "
            "the topology another id"
        )
    topics = source.get("topics", {})
    for topic, topic_id in found.get("topics", {}).items():
        if topic in topics and topics[topic] != topic_id:
            return (
                f"topic {topic!r} is not the one that topology {topology_id!r} was reading: its id was {topic_id} and is "
                f"{topics[topic]}, so it was deleted and created again; {READ_ANEW}"
            )
    return ""


def _locations(outline: Mapping[str, Any]) -> set[str]:
    """The locations of a topology's states."""
    return {each for component in outline.get("components", {}).values() for each in component.get("states", ())}


def _has_clock(outline: Mapping[str, Any]) -> bool:
    spout = outline.get("components", {}).get(outline.get("spout"), {})
    return CLOCK_STREAM in spout.get("streams", {})
