"""What the simulator must catch: each mutation takes one rule of the protocol out of the code.

A mutation patches one or two attributes; ``applied`` puts the patch in and takes it out again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from framework.coordination import transactional_state as state
from framework.coordination.fenced import FencedLeadership
from framework.coordination.transactional_state import RotatingTransactionalState
from framework.errors import BadRecordError, CorruptStateError, StaleWriterError
from framework.execution.failures import FailureKind
from framework.topology import Header, OpenCommit
from framework.topology.builder import Topology
from framework.topology.spouts import LEFT_OUT, REFUSED
from framework.transactions import narrowing, term_loop
from framework.transactions.commit import CommitPhase
from framework.transactions.commit_pace import Pacer
from framework.transactions.coordinator import Coordinator, SpoutKind, TransactionPhase
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.documents import forget_everything
from framework.transactions.plans import plan_digest
from sinks import MemoryBackend, Row, values
from sinks.kafka.markers import Marker
from sinks.kafka.writer import MarkedWriter
from sinks.map_commit import MapCommit
from sinks.states import MapState, OpaqueMapState, TransactionalMapState
from sinks.store_identity import StoreIdentity
from spouts import memory
from tests.simulation import drivers, world
from tests.simulation.drivers import SimExecutor
from tests.simulation.kafka import LETTERS
from tests.simulation.schedule import Outcome, run_schedule
from tests.simulation.world import FENCE, Shape, SimLeadership, SimStore


@dataclass(frozen=True)
class Mutation:
    """``patches``: (object, attribute, replacement).

    ``worlds``: those in which the mutation can show, where they are rare. ``run``: runs the
    schedule of a seed.
    """

    name: str
    patches: Sequence[tuple[Any, str, Any]]
    worlds: Callable[[Shape], bool] = lambda shape: True
    run: Callable[[int], Outcome] = run_schedule

    def is_noticed(self, seed: int) -> bool:
        return self.run(seed).violation is not None

    def seeds(self, first: int, count: int) -> Iterator[int]:
        """The first ``count`` seeds, from ``first`` on,
        of worlds in which the mutation can show.
        """
        fit = (each for each in itertools.count(first) if self.worlds(Shape.of(random.Random(each))))
        return itertools.islice(fit, count)

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [(target, name, target.__dict__[name]) for target, name, _ in self.patches]
        try:
            for target, name, replacement in self.patches:
                setattr(target, name, replacement)
            yield
        finally:
            for target, name, original in before:
                setattr(target, name, original)


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


# --- the pace -------------------------------------------------------------------------------------


def _fill_without_bound(self: Pacer, now_ms: int) -> None:
    rate = self.pace.records_per_second
    if rate is not None:
        earned = rate * (now_ms - self._filled_ms) / 1000
        self._tokens = max(self._tokens, rate) + earned  # a bucket that begins full
    self._filled_ms = now_ms


def _planned_on_schedule(self: Pacer, txid: int, records: int, now_ms: int) -> None:
    self._fill(now_ms)
    self._tokens -= records
    self._planned_ms += int((self.pace.interval_s or 0) * 1000)
    self._planned_txid = max(txid, self._planned_txid)


# --- the coordinator ------------------------------------------------------------------------------


def _any_attempt(self: Coordinator, txid: int, attempt_id: int, phase: TransactionPhase) -> Any:
    found = self._active.get(txid)
    return found if found is not None and found.phase is phase else None


def _replanned(real: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Coordinator, kind: SpoutKind, *arguments: Any, **options: Any) -> None:
        real(self, SpoutKind.OPAQUE, *arguments, **options)

    return init


def _forgets_opened(real: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Coordinator, kind: SpoutKind, recovered: Any, **options: Any) -> None:
        real(self, kind, replace(recovered, opened=False), **options)

    return init


def _fails_one_only(real: Callable[..., Any]) -> Callable[..., Any]:
    """A failure leaves the later transactions in flight."""

    def fail(self: Coordinator, txid: int, failure: Any, now_ms: int) -> Any:
        later = {number: each for number, each in self._active.items() if number > txid}
        for number in later:
            del self._active[number]
        commands = real(self, txid, failure, now_ms)
        if not self._stopped:
            self._active.update(later)
        return commands

    return fail


# --- the store ------------------------------------------------------------------------------------


def _save_then_cleanup_first(self: TopologyDocuments, change: Any, record: Any = None) -> None:
    if change.currtx is not None:
        self._plans.cleanup_before(change.currtx)
    _real_save(self, change, record)


_real_save = TopologyDocuments.save


def _save_by_partition(self: TopologyDocuments, change: Any, record: Any = None) -> None:
    """Write half of a batch's metadata first, then all of it."""
    for txid, (attempt_id, plan) in change.plans.items():
        half = {each: plan[each] for each in sorted(plan)[: (len(plan) + 1) // 2]}
        _real_save(self, replace(change, plans={txid: (attempt_id, half)}), None)
    _real_save(self, change, record)


def _save_plan_again(self: TopologyDocuments, txid: int, plan: Any) -> None:
    self._plans.override_state(txid, {"digest": plan_digest(plan), "plan": plan})


def _move_at_once(self: TopologyDocuments, before: Any, now: Any, *, accept_changed: bool) -> None:
    former = RotatingTransactionalState(self._state, f"user/{before['spout']}")
    with self._state.atomically():
        for txid in former.txids() if before["spout"] != now["spout"] else ():
            self._plans.override_state(txid, former.get_state(txid, _nothing))
            former.remove_state(txid)


def _note_then_move(self: TopologyDocuments, before: Any, now: Any, *, accept_changed: bool) -> None:
    self._state.set_data("meta", {"digest": self._topology.digest(), "outline": now, "source": {}})
    _real_accept_change(self, before, now, accept_changed=accept_changed)


_real_accept_change = TopologyDocuments._accept_change


def _forget_all(self: TopologyDocuments) -> None:
    access: Any = self._state._access
    forget_everything(access, access.holder, self._topology.id)


def _recover_without_attempts(self: TopologyDocuments) -> Any:
    recovered, digests = _real_recover(self)
    return replace(recovered, attempts={}), digests


_real_recover = TopologyDocuments.recover
_real_decode = state.decode_document


def _unparsable_is_null(raw: bytes, path: str) -> Any:
    try:
        return _real_decode(raw, path)
    except CorruptStateError:
        return None


def _lead_then_epoch(self: SimStore, path: str, identity: str, timeout_s: float | None = None) -> Any:
    """C3: the epoch rises with the leader's first write, after it has read everything."""
    if self.holder is not None:
        return None
    self.holder = SimLeadership(self._world, self, self.epoch + 1, self.version, identity)
    self.holder.late = True  # type: ignore[attr-defined]
    return self.holder


_real_send = SimLeadership._send


def _send_raising_epoch(self: SimLeadership, changes: Any, fence: bytes, version: int) -> None:
    if getattr(self, "late", False):
        self.late = False  # type: ignore[attr-defined]
        self._store.epoch = max(self._store.epoch, self.epoch)
        self._store.version += 1
        self._version = version = self._store.version
        self._store.nodes[FENCE] = fence
    _real_send(self, changes, fence, version)


# --- the sinks ------------------------------------------------------------------------------------


def _begin_without_header(self: MapState, attempt: Any) -> None:
    fence = attempt.fence
    header = self.backend.read_header()
    opened = header.opened(fence.epoch, OpenCommit(attempt.txid, attempt.attempt_id, fence.plan_digest))
    self._commit = MapCommit(attempt, opened, fence, self.backend)


def _put_under_any_header(self: MemoryBackend, header: Any, keys: Any, stamps: Any, rows: Any) -> None:
    shared = self._rows()
    found = [shared.rows[key].stamp if key in shared.rows else None for key in keys]
    if found != list(stamps):
        raise StaleWriterError("another row", shared.header.epoch if shared.header is not None else None)
    shared.rows.update(zip(keys, rows, strict=True))
    if self._opens_from is not None:
        shared.header = header.done_as_open()


def _put_from_any_header(self: MemoryBackend, header: Any, keys: Any, stamps: Any, rows: Any) -> None:
    named = self._opens_from
    if named is not None:
        self._opens_from = self.read_header()
    try:
        _real_put(self, header, keys, stamps, rows)
    finally:
        self._opens_from = named


_real_put = MemoryBackend.multi_put


def _any_attempt_in_one_step(self: CommitPhase, attempt: Any, *, replay: bool) -> bool:
    return _real_takes_one_step(self, attempt, replay=False)


_real_takes_one_step = CommitPhase._takes_one_step


def _close_what_is_open(self: CommitPhase, index: int, attempt: Any) -> None:
    self._opening = None
    _real_close_fence(self, index, attempt)


_real_close_fence = CommitPhase._close_fence


def _sweep_births_only(self: MemoryBackend, header: Any) -> int:
    """A sweep that deletes what it should put back."""
    shared = self._rows()
    stale = [key for key, row in shared.rows.items() if row.stamp.txid == header.open.txid]
    for key in [key for key in stale if shared.rows[key].stamp.attempt_id < header.open.attempt_id]:
        del shared.rows[key]
    return 0


def _delete_forgets(real: Callable[..., Row]) -> Callable[..., Row]:
    def replaced(self: Any, row: Row | None, commit: Any, value: Any) -> Row:
        made = real(self, row, commit, value)
        return made if value is not None else Row(None, made.stamp, None, made.writer)

    return replaced


def _delete_puts_zero(self: MapState, keys: Sequence[Any]) -> None:
    self.multi_put(keys, [0] * len(keys))


def _purge_too_much(self: CommitPhase, index: int, attempt: Any) -> None:
    self._states[index].purge(self._own(index, attempt), attempt.txid + 1)


def _take_nothing_over(self: CommitPhase, header_state: Any, joins_after: int, note_joined: Any) -> Any:
    found = header_state.prepare(self._topology_id)
    joined = replace(found, incarnation=self._incarnation)
    if joined != found:
        header_state.raise_header(found, joined)
    return joined


def _joins_as_done(self: CommitPhase, header_state: Any, joins_after: int, note_joined: Any) -> Any:
    return _real_take_over(self, header_state, joins_after + 1 if joins_after else 0, note_joined)


def _every_state_may_join(self: TopologyDocuments, *arguments: Any, **options: Any) -> Any:
    _real_claim(self, *arguments, **options)
    return [each.location for each in self._topology.states] if options["accept_changed"] else []


_real_claim = TopologyDocuments.claim


def _stays_done(self: Header, epoch: int, open_commit: OpenCommit) -> Header:
    return replace(self, epoch=epoch, open=open_commit)


# --- committers without a header ------------------------------------------------------------------


def _every_plan_is_opened(self: TopologyDocuments, currtx: int, digests: Any) -> bool:
    return bool(self._topology.headerless()) and currtx in digests


def _but_dead_letters(self: Topology) -> Any:
    return tuple(each for each in _real_headerless(self) if each.id != LETTERS)


_real_headerless = Topology.headerless


def _drops_stay(real: Callable[..., Any]) -> Callable[..., Any]:
    def persist(self: Coordinator, *arguments: Any, **options: Any) -> Any:
        return replace(real(self, *arguments, **options), dropped=frozenset())

    return persist


def _with_option(real: Callable[..., Any], **changed: Any) -> Callable[..., Any]:
    def init(self: Coordinator, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **{**options, **changed})

    return init


# --- refused values -------------------------------------------------------------------------------


def _whole(plan: Any) -> Any:
    """A plan that leaves nothing out."""
    return {
        each: {key: value for key, value in meta.items() if key not in (LEFT_OUT, REFUSED)}
        for each, meta in plan.items()
    }


def _save_whole_plan(self: TopologyDocuments, txid: int, plan: Any) -> None:
    _real_save_plan(self, txid, _whole(plan))


def _recover_whole_plans(self: TopologyDocuments) -> Any:
    recovered, digests = _real_recover(self)
    whole = {txid: _whole(plan) for txid, plan in recovered.plans.items()}
    return replace(recovered, plans=whole), digests


def _without_reason(meta: Any, reasons: Any, policy: Any) -> Any:
    return {key: value for key, value in _real_refusing(meta, reasons, policy).items() if key != REFUSED}


def _take_out_without_roll_back(self: Coordinator, transaction: Any, failure: Any) -> Any:
    transaction.opened = False
    return _real_take_out(self, transaction, failure)


def _narrows_one_only(real: Callable[..., Any]) -> Callable[..., Any]:
    """The plans after a narrower one stay as they were."""

    def fail(self: Coordinator, txid: int, failure: Any, now_ms: int) -> Any:
        later = {number: each for number, each in self._active.items() if number > txid}
        commands = real(self, txid, failure, now_ms)
        if failure.kind is FailureKind.BAD_RECORD and not self._stopped:
            self._active.update(later)
            self._dropped.difference_update(later)
        return commands

    return fail


def _letters_of_bad_only(self: SimExecutor, records: Any, gone: Any) -> Any:
    return [("", each) for each in records if self.world.is_bad(each)]


_real_save_plan = TopologyDocuments._save_plan
_real_refusing = narrowing._refusing
_real_take_out = Coordinator._take_out


# --- markers --------------------------------------------------------------------------------------


def _read_then_initialise(self: MarkedWriter, topics: Sequence[str], topology_id: str) -> None:
    self._last = self._last_marker(topology_id)
    self._producer = self._initialised()


def _check_or_reset(self: Marker, topology_id: str, standing: Any) -> None:
    if standing.epoch <= self.epoch:
        _real_check(self, topology_id, standing)


def _holds_or_reset(self: Marker, wanted: Marker) -> bool:
    return _real_holds(self, wanted) if wanted.epoch <= self.epoch or wanted.txid >= self.txid else False


_real_take_over = CommitPhase._take_over
_real_check, _real_holds = Marker.check, Marker.already_holds

# --- the source -----------------------------------------------------------------------------------


def _plan_of_the_available(self: Any, previous: Any, divisor: int) -> Any:
    plan = _real_plan(self, previous, divisor)
    away = self._source.unavailable
    left = {each: meta for each, meta in plan.items() if each not in away} if plan else None
    return left or None


_real_plan = memory._MemoryPlanner.plan_smaller


def _shared_at_random(self: SimExecutor, operations: Any, task: int, tasks: int) -> Any:
    return [each for position, each in enumerate(operations) if position % tasks == task]


def _read_what_came(partition: str, meta: Any) -> Any:
    return meta["rows"]


def _from_committed(self: Coordinator) -> Any:
    return self._committed_plan


def _always_stale(failure: Any, epoch: int) -> bool:
    return failure.kind is FailureKind.STALE


MUTATIONS: tuple[Mutation, ...] = (
    # RELIABILITY.md, "Prove the simulator by mutation"
    Mutation("a key of a failed opaque commit, absent from the replanned batch, keeps its update",
             [(CommitPhase, "_undo", _nothing)]),
    Mutation("success triggers cleanup before currtx is durable", [(TopologyDocuments, "save", _save_then_cleanup_first)]),
    Mutation("a stale fail removes the live attempt", [(Coordinator, "_current", _any_attempt)]),
    Mutation("attempt ids restart at 0 after a crash", [(TopologyDocuments, "recover", _recover_without_attempts)]),
    Mutation("an unparsable znode is read as null",
             [(state, "decode_document", _unparsable_is_null)]),
    Mutation("a short read truncates an idempotent batch", [(drivers, "complete", _read_what_came)]),
    Mutation("a transactional value accepts an older txid", [(values, "_refuse_older", _nothing)]),
    Mutation("a deposed leader's write lands after its successor's",
             [(SimStore, "fence_holds", lambda self, version: True)]),
    Mutation("metadata half written, per partition, then a crash", [(TopologyDocuments, "save", _save_by_partition)]),
    # rules of CORRECTNESS.md
    Mutation("C1: writes do not check the header",
             [(MapState, "begin_commit", _begin_without_header), (MemoryBackend, "_check", _nothing)]),
    Mutation("C1: a header that was guessed is not compared", [(MemoryBackend, "multi_put", _put_under_any_header)],
             lambda shape: bool(shape.merges)),
    Mutation("a transactional state repeats an update", [(TransactionalMapState, "_skips", lambda *row: False)],
             lambda shape: not shape.opaque_state and shape.states > 0),
    Mutation("C2: the transaction closes without done", [(CommitPhase, "_finish", _nothing)]),
    Mutation("C2: a joining state starts as done with the next transaction", [(CommitPhase, "_take_over", _joins_as_done)],
             lambda shape: shape.joins in shape.names),
    Mutation("C2: an emptied state joins like a new state", [(TopologyDocuments, "claim", _every_state_may_join)],
             lambda shape: shape.back == "sink" and bool(shape.joins or shape.renames)),
    Mutation("C2: a reopened transaction stays done", [(Header, "opened", _stays_done)], lambda shape: shape.states > 0),
    Mutation("C3: a new leader reads before it raises the epoch",
             [(SimStore, "lead", _lead_then_epoch), (SimLeadership, "_send", _send_raising_epoch)]),
    Mutation("C3: a lost reply counts as a refusal", [(FencedLeadership, "_was_applied", lambda self: False)]),
    Mutation("C3: a lost reply counts as success", [(FencedLeadership, "_was_applied", lambda self: True)]),
    Mutation("C5: no sweep", [(CommitPhase, "_sweep", _nothing)], lambda shape: shape.moody and shape.states > 0),
    Mutation("C5: a sweep deletes rows that it should restore", [(MemoryBackend, "sweep", _sweep_births_only)],
             lambda shape: shape.moody and shape.states > 0),
    Mutation("a plan is written again with each attempt, with all others of that moment",
             [(TopologyDocuments, "_save_plan", _save_plan_again)],
             lambda shape: shape.large and shape.pending > 1 and not shape.opaque),
    Mutation("plans move to the spout's new id in one request", [(TopologyDocuments, "_accept_change", _move_at_once)],
             lambda shape: shape.large and shape.renames),
    Mutation("a changed topology is recorded before its plans have moved",
             [(TopologyDocuments, "_accept_change", _note_then_move)], lambda shape: shape.renames),
    Mutation("C7: a new plan is pinned before the states are marked", [(CommitPhase, "_mark_rolled_back", _nothing)]),
    Mutation("C7: a new leader forgets that a plan was opened",
             [(Coordinator, "__init__", _forgets_opened(Coordinator.__init__))]),
    Mutation("C9: plans start from the last committed one", [(Coordinator, "planned_to", property(_from_committed))]),
    Mutation("C8: a batch that Kafka already holds is planned again",
             [(Coordinator, "__init__", _with_option(Coordinator.__init__, can_undo=True))]),
    Mutation("C11: markers are not compared", [(Marker, "already_holds", lambda self, wanted: False)]),
    Mutation("C11: markers are read before the transactional id is initialised",
             [(MarkedWriter, "_begin", _read_then_initialise)]),
    Mutation("C12: one key has two writers", [(SimExecutor, "share", _shared_at_random)]),
    Mutation("C14: any refusal ends the term", [(term_loop, "ends_term", _always_stale)]),
    Mutation("C15: an unavailable partition is missing from the plan",
             [(memory._MemoryPlanner, "plan_smaller", _plan_of_the_available)],
             lambda shape: shape.opaque and shape.partitions > 1 and shape.changes > 1),
    Mutation("C17: forgetting positions forgets txids too",
             [(TopologyDocuments, "forget_positions", _forget_all)]),
    Mutation("C20: opened dead letters are planned again, and their opening is not recorded",
             [(Topology, "headerless", _but_dead_letters)], lambda shape: shape.letters and shape.opaque),
    Mutation("C21: tombstones of the open transaction are purged", [(CommitPhase, "_purge", _purge_too_much)],
             lambda shape: shape.deletes and shape.states > 0 and shape.faults > 2 and (shape.moody or shape.losses > 0)),
    Mutation("C24: a stored plan counts as opened", [(TopologyDocuments, "_opened", _every_plan_is_opened)]),
    Mutation("C24: a stored plan counts as opened, and dropped plans stay",
             [(TopologyDocuments, "_opened", _every_plan_is_opened),
              (Coordinator, "_persist", _drops_stay(Coordinator._persist))]),
    Mutation("C24: an opened commit is not recorded",
             [(Coordinator, "__init__", _with_option(Coordinator.__init__, records_open=False))]),
    Mutation("C25: incarnations are not compared",
             [(Marker, "check_incarnation", _nothing), (CommitPhase, "_check_incarnation", _nothing)],
             lambda shape: shape.back == "another life" and shape.states == 0),
    Mutation("C25: a higher epoch with a lower txid was reset",
             [(Marker, "check", _check_or_reset), (Marker, "already_holds", _holds_or_reset)],
             lambda shape: shape.back == "zookeeper" and shape.topic_tasks > 0),
    Mutation("C27: done does not check the identity of the store", [(StoreIdentity, "_must_be", lambda self, expected, new: "")],
             lambda shape: shape.back == "sink" and shape.states > 0),
    Mutation("C27: the last transaction may have another attempt than the committed one",
             [(CommitPhase, "_check_committed", _nothing)],
             lambda shape: shape.back == "sink" and shape.moody and shape.states > 0),
    Mutation("the rows of a rebuild have epochs above those of drivers",
             [(world, "EPOCH_OF_REBUILDS", 1_000)], lambda shape: shape.back == "zookeeper" and shape.states > 0),
    Mutation("rows are exchanged under an open commit, whose fence stays open",
             [(world, "with_closed_fence", lambda header: header)], lambda shape: shape.states > 0),
    Mutation("C28: a raise does not compare plans", [(CommitPhase, "_check_plan", _nothing)],
             lambda shape: shape.back == "sink" and shape.losses > 0),
    Mutation("C51: what is left out of a batch is not in its document", [(TopologyDocuments, "_save_plan", _save_whole_plan)],
             lambda shape: bool(shape.refuses)),
    Mutation("C51: a record is left out without its reason", [(narrowing, "_refusing", _without_reason)],
             lambda shape: bool(shape.refuses)),
    Mutation("C51: a new leader forgets what its plans leave out", [(TopologyDocuments, "recover", _recover_whole_plans)],
             lambda shape: bool(shape.refuses)),
    Mutation("C51: a record is left out of an opened batch that is not rolled back",
             [(Coordinator, "_take_out", _take_out_without_roll_back)], lambda shape: shape.refuses == "sink"),
    Mutation("C51: a record is left out of a batch that Kafka may hold",
             [(Coordinator, "__init__", _with_option(Coordinator.__init__, can_undo=True))],
             lambda shape: shape.refuses == "sink" and bool(shape.headerless)),
    Mutation("C51: a record is left out of a batch that an earlier attempt may have written to Kafka",
             [(Coordinator, "_wrote_nothing_for_good", lambda self, failure: True)],
             lambda shape: shape.refuses == "sink" and bool(shape.headerless) and shape.moves),
    Mutation("C51: a probe that fails for another reason leaves a record out",
             [(narrowing, "_refuses", lambda failure, *, pins_errors=False: True)],
             lambda shape: shape.refuses == "bolt"),
    Mutation("C51: the plans after a narrower one stay", [(Coordinator, "_fail", _narrows_one_only(Coordinator._fail))],
             lambda shape: bool(shape.refuses) and shape.pending > 1 and not shape.opaque),
    Mutation("C51: a record that is left out is no dead letter", [(SimExecutor, "letters", _letters_of_bad_only)],
             lambda shape: bool(shape.refuses) and shape.letters),
    Mutation("C18: a batch that is too large is tried whole again", [(narrowing, "BatchTooLargeError", BadRecordError)],
             lambda shape: shape.room > 0 and not shape.refuses),
    Mutation("C45: a restart or an idle source fills the bucket", [(Pacer, "_fill", _fill_without_bound)],
             lambda shape: shape.rate > 0),
    Mutation("C45: an interval that was missed is made up for", [(Pacer, "planned", _planned_on_schedule)],
             lambda shape: shape.interval_ms > 0),
    # what else the protocol stands on
    Mutation("a deletion forgets prev",
             [(kind, "_replaced", _delete_forgets(kind._replaced)) for kind in (OpaqueMapState, TransactionalMapState)]),
    Mutation("a deleted value reads as 0", [(MapState, "delete", _delete_puts_zero)]),
    Mutation("an idempotent batch is planned again", [(Coordinator, "__init__", _replanned(Coordinator.__init__))]),
    Mutation("a failure fails its own transaction only", [(Coordinator, "_fail", _fails_one_only(Coordinator._fail))]),
    Mutation("a new leader decides before it raises the headers (ADR 5)",
             [(CommitPhase, "_take_over", _take_nothing_over)]),
    Mutation("one step does not compare the header that it opens from", [(MemoryBackend, "multi_put", _put_from_any_header)],
             lambda shape: shape.one_step),
    Mutation("C5: a replay is one step, without a sweep", [(CommitPhase, "_takes_one_step", _any_attempt_in_one_step)],
             lambda shape: shape.one_step and shape.moody),
    Mutation("one step without rows leaves the header as it is", [(MapState, "commit_unchanged", _nothing)],
             lambda shape: shape.one_step),
    Mutation("a cancelled step that has opened nothing yet keeps its fence open",
             [(CommitPhase, "_close_fence", _close_what_is_open)], lambda shape: shape.one_step and shape.faults > 3),
    Mutation("a cancelled commit keeps its fence open", [(CommitPhase, "_close_fence", _nothing)]),
)  # fmt: skip
