"""The documents of a topology in the coordination store: their paths, formats, reads and writes.

::

    <topology id>/incarnation             drawn when the state is created, and by
    ``reset --everything``
    <topology id>/meta                    outline and digest of the topology, identity of the
    source,
                                          states that may still join
    <topology id>/origin                  where each partition was first read
    <topology id>/joined                  states that joined later, and their first txids
    <topology id>/coordinator/currtx      next txid to commit
    <topology id>/coordinator/attempts    txid -> last attempt id used, from the last closed txid on
    <topology id>/coordinator/open        the commit that was opened last: in place of a header, for
                                          committers that have none
    <topology id>/user/<spout>/<txid>     the plan of that batch: every partition's metadata, packed
                                          when it is long
    <topology id>/history/<slot>          the record of a closed transaction; the slot is txid mod
    1000,
                                          so the last thousand are kept
    <topology id>/letters                 the dead letters that are to be replayed or dropped
    <topology id>/undone                  the transaction that ``undo`` took back last, and its
    record

Every ``save`` is one atomic step, conditional on the epoch. A plan is written together with the
attempt that first emits it; later attempts at the same plan do not write it. So a transaction costs
two writes: one to emit it, one to close it. A topology with a committer that has no header of its
own needs a third, before the commit begins (C24).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from framework.coordination.store import CoordinationStore, Leadership
from framework.coordination.transactional_state import (
    PACKED,
    PLAIN,
    RotatingTransactionalState,
    TransactionalState,
)
from framework.errors import READ_ANEW, ConfigError, CorruptStateError, DataLossError, InvariantViolation, escaped
from framework.observe.journal import RECORDS_MAX, AttemptRecord, TransactionRecord
from framework.observe.logs import get_logger
from framework.shapes import check_fields, fits
from framework.topology.builder import Topology
from framework.topology.clock_stream import CLOCK_STREAM
from framework.topology.dead_letter_replay import LetterRequest
from framework.topology.fencing import ROLLED_BACK, OpenCommit
from framework.transactions.commit_pace import changed_pace
from framework.transactions.coordinator import Persist, Recovered
from framework.transactions.plans import Plan, StoredPlan, plan_digest, plan_of, stored_plan
from framework.transactions.shape_changes import shape_changes

CURRTX = "coordinator/currtx"
ATTEMPTS = "coordinator/attempts"
OPEN = "coordinator/open"
META = "meta"
INCARNATION = "incarnation"
#: The longest incarnation, in characters.
_INCARNATION_MAX = 64
#: The start of the source: ``{"txid": of the first transaction, "positions": {partition: meta in
#: its first plan}}``.
ORIGIN = "origin"
#: States that were added after the first commit: location -> their first txid.
JOINED = "joined"
HISTORY = "history"
#: Changes of ``ratchet set``: key -> value, None for a value that is off.
PACE = "pace"
#: The dead letters to replay or drop: ``{"id", "action", "letters": [[ref, bytes]]}``.
LETTERS = "letters"
#: The last transaction that ``undo`` took back: ``{"txid": int, "finished": bool, "attempts": of
#: its record}``.
UNDONE = "undone"
_TXID = re.compile("[0-9]{1,18}")
#: A longer record of a transaction is stored without its plan, and with its last attempt only, so
#: that a thousand records do not burden ZooKeeper's memory.
HISTORY_BYTES_MAX = 64_000

_log = get_logger()


class Origin(NamedTuple):
    """The start of a topology's input.

    * ``txid``: of the first transaction; 0 without any; above 1 when the transactions before are
      unknown, or the positions were forgotten.
    * ``positions``: partition -> its entry in the first plan that has it."""

    txid: int
    positions: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Undone:
    """A transaction that was taken back. ``finished``: whether every state has been rolled back.
    ``attempts``: from its record."""

    txid: int
    finished: bool
    attempts: tuple[AttemptRecord, ...] = ()


class TopologyDocuments:
    """The documents of one topology, under one leadership."""

    def __init__(self, store: CoordinationStore, leadership: Leadership, topology: Topology) -> None:
        self._state = TransactionalState(store, topology.id, leadership.apply)
        self._topology = topology
        self._plans = RotatingTransactionalState(self._state, f"user/{topology.spout.id}")
        self._origin: Origin | None = None
        self._undone = self.undone()

    def claim(
        self, source: Mapping[str, Any], *, accept_changed: bool = False, accept_lost_data: bool = False
    ) -> Sequence[str]:
        """Write ``meta`` on the first start. On later starts, compare topology and source with it.

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
        self._origin = _origin_in(self._state, self._topology.id)
        outline = self._topology.outline()
        meta = {"digest": self._topology.digest(), "outline": outline, "source": dict(source)}
        found = self._state.get_data(META)
        if found is None:
            with self._state.atomically():
                if not self.incarnation():
                    self._state.set_data(INCARNATION, new_incarnation())
                self._state.set_data(META, meta)
            return ()
        found = _meta_in(found, self._topology.id)
        held = found["source"] or {}
        other = _other_source(self._topology.id, held, source)
        if other and not accept_lost_data:
            raise DataLossError(other)
        if other:
            _log.warning("source.changed", topology=self._topology.id, difference=other)
            held = {}
        joining = found.get("joining", [])
        if found.get("digest") != meta["digest"]:
            self._accept_change(found["outline"], outline, accept_changed=accept_changed)
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
        return _incarnation_in(self._state, self._topology.id)

    def recover(self) -> tuple[Recovered, dict[int, str]]:
        """Return the coordinator's start state as far as the documents know it, and the digest of
        every plan found. Here, ``opened`` covers only committers without a header. Raises
        ``CorruptStateError``."""
        currtx = _checked_currtx(self._topology.id, self._state.get_data(CURRTX))
        attempts = self._state.get_data(ATTEMPTS) or {}
        if not fits(attempts, Mapping[str, int]) or not all(map(_TXID.fullmatch, attempts)):
            raise CorruptStateError(f"{self._topology.id}/{ATTEMPTS}: not a map of txid to attempt; restore it")
        plans: dict[int, Plan] = {}
        for txid in self._plans.txids():
            document = self._plans.get_state(txid, _never)
            node = f"{self._topology.id}/user/{self._topology.spout.id}/{txid}"
            plans[txid] = _plan_in(document, node)
        if currtx > 1 and currtx - 1 not in plans:
            self._check_spout()
            raise CorruptStateError(
                f"{self._topology.id}: currtx is {currtx}, and the plan of txid {currtx - 1}, where the next batch would "
                "start, is missing; restore the state from a backup"
            )
        digests = {txid: plan_digest(plan) for txid, plan in plans.items()}
        opened = self._opened(currtx, digests)
        return Recovered(currtx, {int(txid): last for txid, last in attempts.items()}, plans, opened), digests

    def _check_spout(self) -> None:
        """Refuse a topology whose spout has another id than the plans: a command got a changed
        topology that no driver has run yet."""
        meta = self._state.get_data(META)
        former = _meta_in(meta, self._topology.id)["outline"].get("spout") if meta is not None else None
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
        self._state.set_data(f"{HISTORY}/{_slot(record.txid)}", document, form_of(document["plan"]))

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
            self._origin = _origin_in(self._state, self._topology.id)
        known = self._origin if self._origin.txid else Origin(record.txid, {})
        if known is not self._origin or not record.plan.keys() <= known.positions.keys():
            fresh = {each: meta for each, meta in record.plan.items() if each not in known.positions}
            self._origin = Origin(known.txid, {**known.positions, **fresh})
            stored = stored_plan(self._origin.positions)
            self._state.set_data(ORIGIN, {"txid": self._origin.txid, "positions": stored}, form_of(stored))

    def note_joined(self, location: str, txid: int) -> None:
        """Record that a state is empty before ``txid``. Call it before the state joins."""
        with self._state.atomically():
            self._state.set_data(JOINED, {**_joined_in(self._state, self._topology.id), location: txid})

    def undone(self) -> Undone | None:
        """As ``read_undone``."""
        return _undone_in(self._state, self._topology.id)

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
            currtx = _checked_currtx(self._topology.id, self._state.get_data(CURRTX))
            for txid in self._plans.txids():
                self._plans.remove_state(txid)
            if currtx > 1:
                self._plans.override_state(currtx - 1, {"digest": plan_digest({}), "plan": {}})
            meta = self._state.get_data(META)
            if isinstance(meta, dict):
                self._state.set_data(META, {**meta, "source": None})
            self._state.delete(OPEN)
            self._state.delete(LETTERS)
            self._state.set_data(ORIGIN, {"txid": currtx, "positions": {}})


def new_incarnation() -> str:
    return uuid.uuid4().hex[:16]


def forget_everything(
    store: CoordinationStore, leadership: Leadership, topology_id: str, incarnation: str | None = None
) -> None:
    """Remove all documents of a topology, readable or not, and begin another incarnation: the given
    one, or a new one. The epoch stays and continues to rise, so a former driver cannot write again.
    """
    state = TransactionalState(store, topology_id, leadership.apply)
    with state.atomically():
        for path in (META, CURRTX, ATTEMPTS, OPEN, ORIGIN, JOINED, UNDONE, PACE, LETTERS):
            state.delete(path)
        state.set_data(INCARNATION, incarnation or new_incarnation())
        for folder in (HISTORY, *(f"user/{spout}" for spout in state.children("user"))):
            for name in state.children(folder):
                state.delete(f"{folder}/{name}")


def read_undone(store: CoordinationStore, topology_id: str) -> Undone | None:
    """The last transaction that ``undo`` took back. Needs no leadership. Raises
    ``CorruptStateError``.
    """
    return _undone_in(TransactionalState(store, topology_id), topology_id)


def read_plan(store: CoordinationStore, topology_id: str, spout_id: str, txid: int | None = None) -> tuple[int, Plan]:
    """Return a txid and its plan, by default of the next transaction to commit. Needs no
    leadership. Raises ``ConfigError`` when there is no plan, ``CorruptStateError`` when it does not
    parse."""
    state = TransactionalState(store, topology_id)
    wanted = txid if txid is not None else _checked_currtx(topology_id, state.get_data(CURRTX))
    node = f"user/{spout_id}/{wanted}"
    document = state.get_data(node)
    if document is None:
        raise ConfigError(
            f"topology {topology_id!r} has no plan of transaction {wanted}: it has not been emitted yet, is long over, or "
            "its plan was too long to be recorded"
        )
    return wanted, _plan_in(document, f"{topology_id}/{node}")


def committed_txid(store: CoordinationStore, topology_id: str) -> int:
    """The last transaction that every sink of a topology holds, 0 before the first. Needs no
    leadership. Raises ``CorruptStateError``."""
    currtx = TransactionalState(store, topology_id).get_data(CURRTX)
    return _checked_currtx(topology_id, currtx) - 1


def read_incarnation(store: CoordinationStore, topology_id: str) -> str:
    """As ``TopologyDocuments.incarnation``. Needs no leadership. Raises ``CorruptStateError``."""
    return _incarnation_in(TransactionalState(store, topology_id), topology_id)


def committed_or_refused(store: CoordinationStore, topology_id: str) -> int:
    """As ``committed_txid``. Raises ``ConfigError`` before the first transaction, when there is
    nothing to compare."""
    committed = committed_txid(store, topology_id)
    if committed == 0:
        raise ConfigError(f"topology {topology_id!r} has committed no transaction yet: there is nothing to look at")
    return committed


def read_origin(store: CoordinationStore, topology_id: str) -> Origin:
    """The start of a topology's input. Needs no leadership. Raises ``CorruptStateError``."""
    return _origin_in(TransactionalState(store, topology_id), topology_id)


def read_joined(store: CoordinationStore, topology_id: str) -> Mapping[str, int]:
    """The first txid of each state that joined later, by its location. Needs no leadership. Raises
    ``CorruptStateError``."""
    return _joined_in(TransactionalState(store, topology_id), topology_id)


def _incarnation_in(state: TransactionalState, topology_id: str) -> str:
    found = state.get_data(INCARNATION)
    if found is None:
        return ""
    if not isinstance(found, str) or len(found) > _INCARNATION_MAX or escaped(found) != found:
        shown = repr(found)[:_INCARNATION_MAX]
        raise CorruptStateError(f"{topology_id}/{INCARNATION}: {shown} is no incarnation; restore it from a backup")
    return found


def _undone_in(state: TransactionalState, topology_id: str) -> Undone | None:
    document = state.get_data(UNDONE)
    if document is None:
        return None
    try:
        attempts = tuple(map(AttemptRecord.of_any_version, document["attempts"]))
        check_fields(Undone, {**document, "attempts": attempts})
        return Undone(document["txid"], document["finished"], attempts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStateError(f"{topology_id}/{UNDONE}: not what undo writes; delete the node") from error


def _meta_in(document: Any, topology_id: str) -> dict[str, Any]:
    """Parse a ``meta`` document. Raises ``CorruptStateError`` when it is none."""
    known: dict[str, Any] = document if isinstance(document, dict) else {}
    outline: Any = known.get("outline")
    source: Any = known.get("source", "")
    fit = fits(outline, Mapping[str, Any]) and fits(outline.get("components", {}), Mapping[str, Mapping[str, Any]])
    fit = fit and all(fits(each.get("states", ()), Sequence[str]) for each in outline.get("components", {}).values())
    fit = fit and fits(source, Mapping[str, Any] | None) and fits((source or {}).get("topics", {}), Mapping[str, Any])
    if not fit or not fits(known.get("joining", ()), Sequence[str]):
        raise CorruptStateError(f"{topology_id}/{META}: not a meta document; restore the node from a backup")
    return known


def _joined_in(state: TransactionalState, topology_id: str) -> Mapping[str, int]:
    document = state.get_data(JOINED)
    if document is None:
        return {}
    if not fits(document, Mapping[str, int]):
        raise CorruptStateError(f"{topology_id}/{JOINED}: not a map of states to txids; restore it from a backup")
    joined: Mapping[str, int] = document
    return joined


def _origin_in(state: TransactionalState, topology_id: str) -> Origin:
    document = state.get_data(ORIGIN)
    if document is None:
        return Origin(0, {})
    try:
        check_fields(Origin, {"txid": document["txid"]})
        return Origin(document["txid"], plan_of(document["positions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"{topology_id}/{ORIGIN}: not an origin document; restore it from a backup") from error


def _checked_currtx(topology_id: str, currtx: Any) -> int:
    if currtx is None:
        return 1
    if not fits(currtx, int) or currtx < 1:
        raise CorruptStateError(f"{topology_id}/{CURRTX}: {currtx!r} is not a txid; restore it from a backup")
    return int(currtx)


def _plan_in(document: Any, node: str) -> Plan:
    """Parse the plan of a document. Raises ``CorruptStateError`` naming the node when it is not a
    plan, or does not match its digest."""
    try:
        plan = plan_of(document["plan"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"{node}: not a plan document; restore it from a backup") from error
    if document.get("digest") != plan_digest(plan):
        raise CorruptStateError(f"{node}: the plan does not match its digest; restore it from a backup")
    return plan


def read_history(store: CoordinationStore, topology_id: str) -> list[TransactionRecord]:
    """The records of the last thousand closed transactions of a topology, oldest first. Needs no
    leadership. Raises ``CorruptStateError`` naming the record that does not parse."""
    state = TransactionalState(store, topology_id)
    found = (_record_in(state, topology_id, name) for name in state.children(HISTORY))
    return sorted((each for each in found if each is not None), key=lambda each: each.txid)


def read_transaction(store: CoordinationStore, topology_id: str, txid: int) -> TransactionRecord | None:
    """The record of one closed transaction, or None when it is not kept any more. Raises as
    ``read_history``."""
    found = _record_in(TransactionalState(store, topology_id), topology_id, _slot(txid))
    return found if found is not None and found.txid == txid else None


def read_pace(store: CoordinationStore, topology_id: str) -> Mapping[str, Any]:
    """The changes of ``ratchet set`` for a topology. Raises ``CorruptStateError``."""
    return changed_pace(TransactionalState(store, topology_id).get_data(PACE), f"{topology_id}/{PACE}")


def write_pace(store: CoordinationStore, topology_id: str, changed: Mapping[str, Any]) -> None:
    """Replace the result of ``read_pace``. Needs no leadership, because the protocol does not
    depend on it."""
    state = TransactionalState(store, topology_id)
    if changed:
        state.set_data(PACE, dict(changed))
    else:
        state.delete(PACE)


def read_letter_request(store: CoordinationStore, topology_id: str) -> LetterRequest | None:
    """The dead letters to replay or drop. Raises ``CorruptStateError``."""
    document = TransactionalState(store, topology_id).get_data(LETTERS)
    if document is None:
        return None
    try:
        letters = [(ref, int(size)) for ref, size in document["letters"]]
        return LetterRequest(str(document["id"]), str(document["action"]), letters)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"{topology_id}/{LETTERS}: not a request; delete the node, and ask again") from error


def write_letter_request(store: CoordinationStore, topology_id: str, request: LetterRequest | None) -> None:
    """Replace the result of ``read_letter_request``. Needs no leadership, because the plans show
    which letters were processed."""
    state = TransactionalState(store, topology_id)
    if request is None:
        state.delete(LETTERS)
    else:
        state.set_data(LETTERS, request._asdict())


def is_transactional(store: CoordinationStore, topology_id: str) -> bool:
    """Whether a driver of a transactional topology with this id has ever led."""
    return store.get(f"{topology_id}/{INCARNATION}") is not None or store.get(f"{topology_id}/{CURRTX}") is not None


def differences_to_state(store: CoordinationStore, topology: Topology) -> Sequence[str]:
    """The differences between a topology's shape and the shape that wrote the state of its id;
    empty if there are none. Needs no leadership. Raises ``CorruptStateError``."""
    meta = TransactionalState(store, topology.id).get_data(META)
    if meta is None or _meta_in(meta, topology.id).get("digest") == topology.digest():
        return ()
    return shape_changes(meta["outline"], topology.outline()) or ["its outline differs"]


def _record_in(state: TransactionalState, topology_id: str, name: str) -> TransactionRecord | None:
    document = state.get_data(f"{HISTORY}/{name}")
    if document is None:
        return None
    try:
        return TransactionRecord.from_document({**document, "plan": plan_of(document["plan"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStateError(f"{topology_id}/{HISTORY}/{name}: not a record ({error}); delete the node") from error


def _slot(txid: int) -> str:
    return f"{txid % RECORDS_MAX:03d}"


def _bounded(record: TransactionRecord) -> dict[str, Any]:
    document = {**record.document(), "plan": stored_plan(record.plan)}
    if len(json.dumps(document)) > HISTORY_BYTES_MAX:
        document["plan"] = {}
        document["attempts"] = document["attempts"][-1:]
    return document


def form_of(stored: StoredPlan | None) -> int:
    """The version of the format of a document with this plan."""
    return PACKED if isinstance(stored, str) else PLAIN


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
