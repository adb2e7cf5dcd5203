"""The documents of a topology in the coordination store: their paths, their forms, and reads that
need no leadership.

::

    <topology id>/incarnation             drawn when the state is created, and by
                                          ``reset --everything``
    <topology id>/meta                    outline and digest of the topology, identity of the
                                          source, states that may still join
    <topology id>/origin                  where each partition was first read
    <topology id>/joined                  states that joined later, and their first txids
    <topology id>/coordinator/currtx      next txid to commit
    <topology id>/coordinator/attempts    txid -> last attempt id used, from the last closed txid on
    <topology id>/coordinator/open        the commit that was opened last: in place of a header, for
                                          committers that have none
    <topology id>/coordinator/opened_rows how many rows the commit that was opened last had, for
                                          committers that cannot undo
    <topology id>/user/<spout>/<txid>     the plan of that batch: every partition's metadata, packed
                                          when it is long
    <topology id>/history/<slot>          the record of a closed transaction; the slot is txid mod
                                          1000, so the last thousand are kept
    <topology id>/letters                 the dead letters that are to be replayed or dropped
    <topology id>/schemas                 the digests of the registries' schemas that records were
                                          decoded with
    <topology id>/undone                  the transaction that ``undo`` took back last, and its
                                          record
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from framework.coordination.store import CoordinationStore, Leadership
from framework.coordination.transactional_state import (
    PACKED,
    PLAIN,
    TransactionalState,
)
from framework.document_type_checks import check_fields, fits
from framework.errors import ConfigError, CorruptStateError, escaped
from framework.observe.journal import RECORDS_MAX, AttemptRecord, TransactionRecord
from framework.topology.builder import Topology
from framework.topology.dead_letter_replay import LetterRequest
from framework.transactions.commit_pace import changed_pace
from framework.transactions.plans import Plan, StoredPlan, plan_digest, plan_of
from framework.transactions.topology_change_messages import shape_changes, with_common_settings, without_steps

CURRTX = "coordinator/currtx"
ATTEMPTS = "coordinator/attempts"
OPEN = "coordinator/open"
#: ``{"txid": int, "plan_digest": str, "rows": {committer: rows}}``.
OPENED_ROWS = "coordinator/opened_rows"
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
#: The digests of the contents of schemas: ``[[schema, digest]]``.
SCHEMAS = "schemas"
#: Changes of ``ratchet set``: key -> value, None for a value that is off.
PACE = "pace"
#: The dead letters to replay or drop: ``{"id", "action", "letters": [[ref, bytes]],
#: "position"}``.
LETTERS = "letters"
#: The last transaction that ``undo`` took back: ``{"txid": int, "finished": bool, "attempts": of
#: its record}``.
UNDONE = "undone"


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
        for path in (META, CURRTX, ATTEMPTS, OPEN, OPENED_ROWS, ORIGIN, JOINED, UNDONE, PACE, LETTERS, SCHEMAS):
            state.delete(path)
        state.set_data(INCARNATION, incarnation or new_incarnation())
        for folder in (HISTORY, *(f"user/{spout}" for spout in state.children("user"))):
            for name in state.children(folder):
                state.delete(f"{folder}/{name}")


def read_undone(store: CoordinationStore, topology_id: str) -> Undone | None:
    """The last transaction that ``undo`` took back. Needs no leadership. Raises
    ``CorruptStateError``.
    """
    return undone_in(TransactionalState(store, topology_id), topology_id)


def read_plan(store: CoordinationStore, topology_id: str, spout_id: str, txid: int | None = None) -> tuple[int, Plan]:
    """Return a txid and its plan, by default of the next transaction to commit. Needs no
    leadership. Raises ``ConfigError`` when there is no plan, ``CorruptStateError`` when it does not
    parse."""
    state = TransactionalState(store, topology_id)
    wanted = txid if txid is not None else checked_currtx(topology_id, state.get_data(CURRTX))
    node = f"user/{spout_id}/{wanted}"
    document = state.get_data(node)
    if document is None:
        raise ConfigError(
            f"topology {topology_id!r} has no plan of transaction {wanted}: it has not been emitted yet, is long over, or "
            "its plan was too long to be recorded"
        )
    return wanted, plan_in(document, f"{topology_id}/{node}")


def committed_txid(store: CoordinationStore, topology_id: str) -> int:
    """The last transaction that every sink of a topology holds, 0 before the first. Needs no
    leadership. Raises ``CorruptStateError``."""
    currtx = TransactionalState(store, topology_id).get_data(CURRTX)
    return checked_currtx(topology_id, currtx) - 1


def read_incarnation(store: CoordinationStore, topology_id: str) -> str:
    """As ``TopologyDocuments.incarnation``. Needs no leadership. Raises ``CorruptStateError``."""
    return incarnation_in(TransactionalState(store, topology_id), topology_id)


def committed_or_refused(store: CoordinationStore, topology_id: str) -> int:
    """As ``committed_txid``. Raises ``ConfigError`` before the first transaction, when there is
    nothing to compare."""
    committed = committed_txid(store, topology_id)
    if committed == 0:
        raise ConfigError(f"topology {topology_id!r} has committed no transaction yet: there is nothing to look at")
    return committed


def read_origin(store: CoordinationStore, topology_id: str) -> Origin:
    """The start of a topology's input. Needs no leadership. Raises ``CorruptStateError``."""
    return origin_in(TransactionalState(store, topology_id), topology_id)


def read_joined(store: CoordinationStore, topology_id: str) -> Mapping[str, int]:
    """The first txid of each state that joined later, by its location. Needs no leadership. Raises
    ``CorruptStateError``."""
    return joined_in(TransactionalState(store, topology_id), topology_id)


def incarnation_in(state: TransactionalState, topology_id: str) -> str:
    """As ``TopologyDocuments.incarnation``."""
    found = state.get_data(INCARNATION)
    if found is None:
        return ""
    if not isinstance(found, str) or len(found) > _INCARNATION_MAX or escaped(found) != found:
        shown = repr(found)[:_INCARNATION_MAX]
        raise CorruptStateError(f"{topology_id}/{INCARNATION}: {shown} is no incarnation; restore it from a backup")
    return found


def undone_in(state: TransactionalState, topology_id: str) -> Undone | None:
    """As ``read_undone``."""
    document = state.get_data(UNDONE)
    if document is None:
        return None
    try:
        attempts = tuple(map(AttemptRecord.of_any_version, document["attempts"]))
        check_fields(Undone, {**document, "attempts": attempts})
        return Undone(document["txid"], document["finished"], attempts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStateError(f"{topology_id}/{UNDONE}: not what undo writes; delete the node") from error


def meta_in(document: Any, topology_id: str) -> dict[str, Any]:
    """Parse a ``meta`` document. Raises ``CorruptStateError`` when it is none."""
    known: dict[str, Any] = document if isinstance(document, dict) else {}
    outline: Any = known.get("outline")
    source: Any = known.get("source", "")
    fit = fits(outline, Mapping[str, Any]) and fits(outline.get("components", {}), Mapping[str, Mapping[str, Any]])
    fit = fit and all(fits(each.get("states", ()), Sequence[str]) for each in outline.get("components", {}).values())
    fit = fit and fits(source, Mapping[str, Any] | None) and fits((source or {}).get("topics", {}), Mapping[str, Any])
    if not fit or not all(fits(known.get(each, ()), Sequence[str]) for each in ("joining", "steps")):
        raise CorruptStateError(f"{topology_id}/{META}: not a meta document; restore the node from a backup")
    return known


def joined_in(state: TransactionalState, topology_id: str) -> Mapping[str, int]:
    """As ``read_joined``."""
    document = state.get_data(JOINED)
    if document is None:
        return {}
    if not fits(document, Mapping[str, int]):
        raise CorruptStateError(f"{topology_id}/{JOINED}: not a map of states to txids; restore it from a backup")
    joined: Mapping[str, int] = document
    return joined


def schemas_in(state: TransactionalState, topology_id: str) -> dict[str, str]:
    """Schema -> the digest of its content, in the order in which they were met first."""
    document = state.get_data(SCHEMAS)
    if document is None:
        return {}
    if not fits(document, Sequence[Sequence[str]]) or any(len(each) != 2 for each in document):
        raise CorruptStateError(f"{topology_id}/{SCHEMAS}: not a list of schemas and digests; restore it from a backup")
    return dict(document)


def origin_in(state: TransactionalState, topology_id: str) -> Origin:
    """As ``read_origin``."""
    document = state.get_data(ORIGIN)
    if document is None:
        return Origin(0, {})
    try:
        check_fields(Origin, {"txid": document["txid"]})
        return Origin(document["txid"], plan_of(document["positions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"{topology_id}/{ORIGIN}: not an origin document; restore it from a backup") from error


def checked_currtx(topology_id: str, currtx: Any) -> int:
    """The next txid to commit, as a document holds it. Raises ``CorruptStateError``."""
    if currtx is None:
        return 1
    if not fits(currtx, int) or currtx < 1:
        raise CorruptStateError(f"{topology_id}/{CURRTX}: {currtx!r} is not a txid; restore it from a backup")
    return int(currtx)


def plan_in(document: Any, node: str) -> Plan:
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
    found = _record_in(TransactionalState(store, topology_id), topology_id, slot(txid))
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
        position = document.get("position")
        return LetterRequest(
            str(document["id"]), str(document["action"]), letters, None if position is None else int(position)
        )
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


def compared_outlines(meta: Mapping[str, Any], topology: Topology) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The outline in ``META`` and that of the topology, without the stateless steps of either, and
    without the settings of a component that only one of them has."""
    steps = {*meta.get("steps", ()), *topology.steps()}
    return with_common_settings(without_steps(meta["outline"], steps), without_steps(topology.outline(), steps))


def differences_to_state(store: CoordinationStore, topology: Topology) -> Sequence[str]:
    """The differences between a topology's shape and the shape that wrote the state of its id;
    empty if there are none. Needs no leadership. Raises ``CorruptStateError``."""
    meta = TransactionalState(store, topology.id).get_data(META)
    if meta is None or meta_in(meta, topology.id).get("digest") == topology.digest():
        return ()
    before, now = compared_outlines(meta, topology)
    return shape_changes(before, now) or (["its outline differs"] if before != now else [])


def _record_in(state: TransactionalState, topology_id: str, name: str) -> TransactionRecord | None:
    document = state.get_data(f"{HISTORY}/{name}")
    if document is None:
        return None
    try:
        return TransactionRecord.from_document({**document, "plan": plan_of(document["plan"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStateError(f"{topology_id}/{HISTORY}/{name}: not a record ({error}); delete the node") from error


def slot(txid: int) -> str:
    """The name of a record in the history."""
    return f"{txid % RECORDS_MAX:03d}"


def form_of(stored: StoredPlan | None) -> int:
    """The version of the format of a document with this plan."""
    return PACKED if isinstance(stored, str) else PLAIN
