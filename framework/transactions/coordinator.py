"""The coordinator: a pure state machine that decides which transaction may do what.

It takes events and returns commands. It has no thread, clock, I/O or randomness: the time comes
with each event, and the driver executes the commands in the given order.

States of a transaction::

               Planned              Processed             its turn             Committed
    (planning) ───────> PROCESSING ──────────> PROCESSED ──────────> COMMITTING ─────────> (gone)
                         ^   │                     │                     │
                 replay  │   └─────────────────────┴─────────────────────┘
                         │                         │ failure of this txid or of an earlier one
                        WAITING <──────────────────┘
                         │   ^
      its range is gone  v   │ failure
                     ROLLING_BACK ──RolledBack──> (dropped, planned again)

When the value of a record is refused, its batch waits with a narrower plan; if its commit was
opened, it is rolled back first (C51).

An opaque batch whose commit was never opened is not replayed: on a failure it is dropped and
planned again.

Invariants:

1. Commits are strictly in txid order, and at most one transaction is COMMITTING.
2. A failure of txid N fails every later txid in flight; each of them gets a new attempt id.
3. The attempt ids of a txid only rise, also across restarts. Each is persisted before its batch is
   emitted.
4. An idempotent plan never changes once persisted, unless a value in it is refused. An opaque plan
   never changes once its commit has opened, unless the source has permanently lost its range, or a
   value in it is refused. If the commit was opened, every state is rolled back before another plan
   is made (C7, C51). If a committer has no header to record the opening, the opening is persisted
   before the commit begins (C24).
5. A batch starts where the current plan of the batch before it ends (C9).
6. Documents below N are removed only together with ``currtx = N + 1``, and never those of N itself
   (C15).
7. If an attempt is no longer current, the coordinator ignores its answer.
8. The next write, whatever it is for, removes stored plans that were dropped, so no later leader
   reads them (C24).
9. A committed transaction is closed before the next one begins: by the write that emits the next
   one, if its plan comes within ``CLOSE_AFTER_MS``, or by a write of its own.

Source: ``org.apache.storm.transactional.TransactionalSpoutCoordinator``; there, planning and
emitting are one step.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import Union

from framework.errors import BatchTooLargeError, InvariantViolation
from framework.execution.failures import FailureKind, TaskFailure
from framework.topology.fencing import ROLLED_BACK, OpenCommit
from framework.transactions.narrowing import Narrowing, Searched
from framework.transactions.plans import Plan, plan_digest

#: After timeouts, a batch is planned at most this many times smaller than usual (C18).
DIVISOR_MAX = 1_024
#: Each timeout divides the next plan of a batch by this number: the five attempts of the default
#: reach a batch that is 256 times smaller.
DIVISOR_STEP = 4
#: An attempt that repeats a plan may take twice as long as the one before, up to this many times
#: ``topology.message.timeout.secs``.
PATIENCE_MAX = 16
#: How long a committed transaction waits for the next plan, so that one write can close the former
#: and store the latter.
CLOSE_AFTER_MS = 5
#: A longer plan has a write of its own, because ZooKeeper limits the size of a request.
JOINED_BYTES_MAX = 50_000
RETRY_DELAY_MS = 100
RETRY_DELAY_MAX_MS = 5_000


class SpoutKind(Enum):
    TRANSACTIONAL = "transactional"
    OPAQUE = "opaque"


class TransactionPhase(Enum):
    WAITING = "waiting"
    PROCESSING = "processing"
    PROCESSED = "processed"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"


_TRANSITIONS = {
    (TransactionPhase.WAITING, TransactionPhase.ROLLING_BACK),
    (TransactionPhase.ROLLING_BACK, TransactionPhase.WAITING),
    (TransactionPhase.WAITING, TransactionPhase.PROCESSING),
    (TransactionPhase.PROCESSING, TransactionPhase.PROCESSED),
    (TransactionPhase.PROCESSED, TransactionPhase.COMMITTING),
    (TransactionPhase.PROCESSING, TransactionPhase.WAITING),
    (TransactionPhase.PROCESSED, TransactionPhase.WAITING),
    (TransactionPhase.COMMITTING, TransactionPhase.WAITING),
    (TransactionPhase.WAITING, TransactionPhase.WAITING),
}


_PHASE_NAMES = {
    TransactionPhase.PROCESSING: "processing phase",
    TransactionPhase.COMMITTING: "commit phase",
    TransactionPhase.ROLLING_BACK: "roll-back",
}


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The first event."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to ``AskPlan``."""

    generation: int
    txid: int
    plan: Plan


#: The place of the number of records read, among numbers of rows. No component has this id.
READ = "@read"


@dataclass(frozen=True, slots=True)
class OpenedRows:
    """The ``Processed.rows`` of an opened commit."""

    txid: int
    plan_digest: str
    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Processed:
    """The end of a processing phase; ``failure`` is None when it succeeded. ``rows``: committer ->
    the number of its rows, for committers that must get the same number in every attempt at a plan;
    and ``READ`` -> the number of records read. ``searched``: the result of probes, if a value was
    refused."""

    txid: int
    attempt_id: int
    failure: TaskFailure | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    searched: Searched | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The end of a commit phase. When ``failure`` is None, ``done`` is set in every state."""

    txid: int
    attempt_id: int
    failure: TaskFailure | None = None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The end of a ``RollBack``. When ``failure`` is None, every state that can undo has undone all
    writes of the txid."""

    txid: int
    attempt_id: int
    failure: TaskFailure | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Finish the commit or roll-back under way, abandon the rest."""


Event = Union[Started, Planned, Processed, Committed, RolledBack, Tick, StopRequested]


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPlan:
    """Plan the batch of ``txid`` after ``previous``; ask the source repeatedly until it has one.
    ``divisor``: make the batch this many times smaller, because it timed out before (C18)."""

    generation: int
    txid: int
    previous: Plan | None
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class Persist:
    """One atomic write.

    * ``attempts``: txid -> last attempt id, the complete map, including the last closed
      transaction.
    * ``plans``: txid -> (attempt id, plan) to write.
    * ``currtx``: the new value, None to leave it.
    * ``opens``: the commit that is about to begin, or that was rolled back.
    * ``opened_rows``: the rows of the commit that is about to begin; None if no committer needs
      them.
    * ``dropped``: txids whose stored plans are removed."""

    attempts: Mapping[int, int]
    plans: Mapping[int, tuple[int, Plan]] = field(default_factory=dict)
    currtx: int | None = None
    opens: OpenCommit | None = None
    dropped: frozenset[int] = frozenset()
    _: KW_ONLY
    opened_rows: OpenedRows | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """Start the processing phase. ``pins_errors``: an error of the user's code counts as the
    refusal of a record. ``tries_writes``: these committers try in it what they would write;
    ``tries_in_order``: and refused records are searched in their order."""

    txid: int
    attempt_id: int
    plan: Plan
    _: KW_ONLY
    pins_errors: bool = False
    tries_writes: frozenset[str] = frozenset()
    tries_in_order: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """Start the commit phase. ``replay``: this txid's commit was opened before, so sweep the states
    (C5)."""

    txid: int
    attempt_id: int
    plan: Plan
    replay: bool


@dataclass(frozen=True, slots=True)
class RollBack:
    """Undo the writes of attempts at an opened txid under ``plan``, in every state that can undo:
    the source has lost the range of the plan (C7)."""

    txid: int
    attempt_id: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the work of an attempt and discard its result. ``committing``: the attempt may be
    writing, so close its fence by raising the headers above it."""

    txid: int
    attempt_id: int
    reason: str
    committing: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """The transaction is closed in the store: free the attempt's result."""

    txid: int
    attempt_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The run ends: on request, or because of ``failure``."""

    failure: TaskFailure | None = None


Command = Union[AskPlan, Persist, Process, Commit, RollBack, Cancel, Release, Stop]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state that a new leader found. ``opened``: a header, or the stored ``open`` document,
    says that the commit of ``currtx`` was opened with its plan. ``opened_rows``: from the document
    of that name."""

    currtx: int = 1
    attempts: Mapping[int, int] = field(default_factory=dict)
    plans: Mapping[int, Plan] = field(default_factory=dict)
    opened: bool = False
    opened_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def committed_by(self) -> int:
        """The attempt that committed the last closed transaction; 0 if unknown. A new leader
        compares it with the states when it takes them over (C27)."""
        return self.attempts.get(self.currtx - 1, 0)


@dataclass(slots=True)
class _Transaction:
    """A transaction in flight. ``is_short``: whether its plan may share a write. ``rows`` and
    ``opened_rows``: ``Processed.rows`` of the present attempt, and of the one that opened the
    commit. ``searched``: ``Processed.searched`` of the present attempt."""

    txid: int
    plan: Plan
    phase: TransactionPhase
    _: KW_ONLY
    attempt_id: int = 0
    since_ms: int = 0
    opened: bool = False
    may_be_written: bool = False  # what cannot be undone may be written
    was_written: bool = False  # the same, before the present commit began
    rows: Mapping[str, int] = field(default_factory=dict)
    opened_rows: Mapping[str, int] = field(default_factory=dict)
    searched: Searched | None = None
    lost: bool = False  # its range is lost, or contains a refused value: roll back, then plan again
    narrower: Plan | None = None  # the plan after the roll-back; None: ask the source
    # the committers that try their writes before the commit, because a store has refused a value
    tries_writes: frozenset[str] = frozenset()
    tries_in_order: bool = False
    timeouts: int = 0  # attempts with this plan that took too long
    is_short: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_short = _is_short(self.plan)

    def turn_to(self, plan: Plan) -> None:
        """Replace the plan by another one whose commit is not opened."""
        self.plan, self.is_short = plan, _is_short(plan)
        self.opened = self.lost = False
        self.opened_rows = {}
        self.narrower = None
        self.timeouts = 0


class Coordinator:
    """Call ``handle`` with each event, always from the same thread.

    * ``skips_lost_data``: the source can continue after lost data. Then an opaque batch whose range
      is lost is planned again; otherwise lost data ends the run.
    * ``records_open``: a committer has no header, so the opening of each commit is persisted (C24).
    * ``narrowing``: removes records whose values are refused from plans; None: such a value ends
      the run.
    * ``can_undo``: every state can undo. Then a batch that was opened is rolled back first, and
      narrowed or planned again, too (C7, C8).
    * ``commits_first``: if one of these components fails in the commit, the attempt has written
      nothing that cannot be undone. ``refuses_whole``: the same if one of these refuses a value.
      As long as no attempt may have written such things, a batch counts as one that can be undone.
    * ``tries_writes``: the committers that try their writes in the processing phase after the store
      of one of them has refused a value in the commit. The values that are refused alone are found.
    * ``tries_in_order``: the same, if the records before a record may decide whether it is refused.
      Those that are in ``tries_writes``, too, do this if the first try has found nothing. Others
      also do it after a refusal in the processing phase for which no single record is to blame,
      such as a sum of several records.
    * ``pins_errors``: when an error of the user's code has used up the attempts, treat it as a
      refused value.
    """

    def __init__(
        self,
        kind: SpoutKind,
        recovered: Recovered,
        *,
        max_pending: int = 1,
        timeout_ms: int = 30_000,
        max_attempts: int = 5,
        skips_lost_data: bool = True,
        records_open: bool = False,
        narrowing: Narrowing | None = None,
        can_undo: bool = False,
        commits_first: Collection[str] = (),
        refuses_whole: Collection[str] = (),
        pins_errors: bool = False,
        tries_writes: frozenset[str] = frozenset(),
        tries_in_order: frozenset[str] = frozenset(),
    ) -> None:
        self.currtx = recovered.currtx
        self._kind = kind
        self._max_pending = max_pending
        self._timeout_ms = timeout_ms
        self._max_attempts = max_attempts
        self._skips_lost_data = skips_lost_data
        self._records_open = records_open
        self._narrowing = narrowing
        self._can_undo, self._commits_first, self._refuses_whole = can_undo, commits_first, refuses_whole
        self._pins_errors = pins_errors
        self._tries_writes, self._tries_in_order = tries_writes, tries_in_order
        # a batch with a refused value; the next batches are parts of it
        self._suspects: Plan | None = None
        self._unclosed: tuple[int, int, int] | None = None  # txid, attempt, since when
        self._attempts = {txid: last for txid, last in recovered.attempts.items() if txid >= self.currtx - 1}
        self._committed_plan = self._closed_plan = recovered.plans.get(self.currtx - 1)
        self._active: dict[int, _Transaction] = {}
        self._dropped: set[int] = set()  # txids whose stored plans the next write removes
        self._failures: dict[int, int] = {}  # failures of any kind, per txid: determine the delay
        self._errors: dict[int, int] = {}  # failures that count towards max_attempts
        self._timeouts: dict[int, int] = {}  # determine how much smaller a batch is planned
        self._not_before_ms = 0
        self._generation = 0
        self._planning: int | None = None
        self._stopping = False
        self._stopped = False
        self._recover(recovered)

    def _recover(self, recovered: Recovered) -> None:
        """Keep the plans that must be replayed unchanged: all of an idempotent spout's, and an
        opaque one that was opened. Mark the others as dropped."""
        txid = self.currtx
        while txid in recovered.plans:
            opened = recovered.opened and txid == self.currtx
            if self._kind is SpoutKind.OPAQUE and not opened:
                self._dropped = {each for each in recovered.plans if each >= txid}
                return
            rows = recovered.opened_rows if opened else {}
            self._active[txid] = _Transaction(
                txid,
                recovered.plans[txid],
                TransactionPhase.WAITING,
                opened=opened,
                may_be_written=opened,
                opened_rows=rows,
            )
            txid += 1

    # --- queries of the driver --------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def committed_plan(self) -> Plan | None:
        """The plan of the last committed transaction."""
        return self._committed_plan

    @property
    def closed_plan(self) -> Plan | None:
        """The plan of the last transaction that the writes so far have closed."""
        return self._closed_plan

    @property
    def planned_to(self) -> Plan | None:
        """The plan of the last transaction in flight, or else of the last committed one."""
        return self._active[max(self._active)].plan if self._active else self._committed_plan

    @property
    def next_tick_ms(self) -> int | None:
        """Milliseconds until a ``Tick`` is due at the latest, if nothing else happens; None: not
        soon."""
        return CLOSE_AFTER_MS if self._unclosed is not None else None

    def plan_of(self, txid: int) -> Plan | None:
        """The plan of a transaction in flight."""
        transaction = self._active.get(txid)
        return transaction.plan if transaction is not None else None

    def plans_in_flight(self) -> list[Plan]:
        """The plans of the transactions that are not committed yet."""
        return [each.plan for each in self._active.values()]

    def in_flight(self) -> dict[int, tuple[int, TransactionPhase]]:
        """txid -> (attempt id, phase), ascending."""
        return {txid: (each.attempt_id, each.phase) for txid, each in sorted(self._active.items())}

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: int) -> list[Command]:
        """Take one event; return the commands to execute, in order: none once stopped."""
        if self._stopped:
            return []
        commands: list[Command] = []
        match event:
            case Planned():
                commands += self._planned(event, now_ms)
            case Processed():
                commands += self._processed(event, now_ms)
            case Committed():
                commands += self._committed(event, now_ms)
            case RolledBack():
                commands += self._rolled_back(event, now_ms)
            case Tick():
                commands += self._overdue_close(now_ms) + self._timed_out(now_ms)
            case StopRequested():
                commands += self._stop_requested()
        if not self._stopped and not self._stopping:
            commands += self._advance(now_ms)
        return commands

    def _planned(self, event: Planned, now_ms: int) -> list[Command]:
        if event.generation != self._generation or event.txid != self._planning:
            return []  # invariant 7
        self._planning = None
        if self._stopping:
            return []
        self._active[event.txid] = _Transaction(event.txid, event.plan, TransactionPhase.WAITING, since_ms=now_ms)
        return []

    def _processed(self, event: Processed, now_ms: int) -> list[Command]:
        transaction = self._current(event.txid, event.attempt_id, TransactionPhase.PROCESSING)
        if transaction is None:
            return []
        if event.failure is not None:
            transaction.searched = event.searched
            return self._fail(event.txid, event.failure, now_ms)
        transaction.rows = event.rows
        self._move(transaction, TransactionPhase.PROCESSED, now_ms)
        return []

    def _committed(self, event: Committed, now_ms: int) -> list[Command]:
        transaction = self._current(event.txid, event.attempt_id, TransactionPhase.COMMITTING)
        if transaction is None:
            return []
        if event.failure is not None:
            if self._wrote_nothing_for_good(event.failure):
                transaction.may_be_written = transaction.was_written
            return self._fail(event.txid, event.failure, now_ms)
        if event.txid != self.currtx:
            raise InvariantViolation(f"invariant 1: txid {event.txid} committed while {self.currtx} was due")
        del self._active[event.txid]
        self._committed_plan = transaction.plan
        self.currtx = event.txid + 1
        for counts in (self._failures, self._errors, self._timeouts):
            counts.pop(event.txid, None)
        # The last committed attempt stays in the map: a restored sink may hold another one.
        self._attempts = {txid: last for txid, last in self._attempts.items() if txid >= event.txid}
        self._unclosed = event.txid, event.attempt_id, now_ms
        if self._stopping:
            return self._stop_now(None)
        return self._close() if self._active or not transaction.is_short else []

    def _wrote_nothing_for_good(self, failure: TaskFailure) -> bool:
        """Whether a commit that failed so has written nothing that cannot be undone."""
        refused_whole = failure.kind is FailureKind.BAD_RECORD and failure.component_id in self._refuses_whole
        return failure.nothing_after and (refused_whole or failure.component_id in self._commits_first)

    def _close(self) -> list[Command]:
        """Close the committed transaction by a write of its own."""
        return self._write() if self._unclosed is not None else []

    def _overdue_close(self, now_ms: int) -> list[Command]:
        late = self._unclosed is not None and now_ms - self._unclosed[2] >= CLOSE_AFTER_MS
        return self._close() if late else []

    def _rolled_back(self, event: RolledBack, now_ms: int) -> list[Command]:
        transaction = self._current(event.txid, event.attempt_id, TransactionPhase.ROLLING_BACK)
        if transaction is None:
            return []
        if event.failure is not None:
            return self._fail(event.txid, event.failure, now_ms)
        if transaction.narrower is not None:
            transaction.turn_to(transaction.narrower)
            self._move(transaction, TransactionPhase.WAITING, now_ms)
        else:
            self._drop(transaction)
        commands: list[Command] = []
        if self._records_open:
            commands += self._write(opens=OpenCommit(event.txid, event.attempt_id, ROLLED_BACK))
        if self._stopping:
            commands += self._stop_now(None)
        return commands

    def _timed_out(self, now_ms: int) -> list[Command]:
        busy = (TransactionPhase.PROCESSING, TransactionPhase.COMMITTING, TransactionPhase.ROLLING_BACK)
        for transaction in sorted(self._active.values(), key=lambda each: each.txid):
            patience = min(2**transaction.timeouts, PATIENCE_MAX)
            if transaction.phase in busy and now_ms - transaction.since_ms > self._timeout_ms * patience:
                self._timeouts[transaction.txid] = self._timeouts.get(transaction.txid, 0) + 1
                transaction.timeouts += 1
                times = f"{patience} times " if patience > 1 else ""
                failure = TaskFailure(
                    FailureKind.ERROR,
                    "coordinator",
                    0,
                    f"the {_PHASE_NAMES[transaction.phase]} of {transaction.txid}:{transaction.attempt_id} took longer "
                    f"than {times}topology.message.timeout.secs ({self._timeout_ms / 1000:g} s); raise it or make batches smaller",
                )
                return self._fail(transaction.txid, failure, now_ms)
        return []

    def _stop_requested(self) -> list[Command]:
        self._stopping = True
        undoing = (TransactionPhase.COMMITTING, TransactionPhase.ROLLING_BACK)
        if any(each.phase in undoing for each in self._active.values()):
            return []
        return self._stop_now(None)

    # --- consequences -----------------------------------------------------------------------------

    def _fail(self, txid: int, failure: TaskFailure, now_ms: int) -> list[Command]:
        """Fail this txid and every later one in flight (invariant 2)."""
        refused = self._is_refused(txid, failure)
        if refused:
            stop = self._take_out(self._active[txid], failure)
            if stop is not None:
                return self._stop_now(stop)
        else:
            self._suspects = None
            self._failures[txid] = self._failures.get(txid, 0) + 1
        # A stale stamp counts too. If it recurs at the next try, no dying attempt left it: in the
        # end an operator has to look.
        if failure.kind in (FailureKind.ERROR, FailureKind.DATA_LOSS, FailureKind.STALE):
            self._errors[txid] = self._errors.get(txid, 0) + 1
        if failure.kind.stops or (self._errors.get(txid, 0) >= self._max_attempts > 0 and not refused):
            return self._stop_now(failure)
        if failure.kind is FailureKind.DATA_LOSS:
            stop = self._lost(self._active[txid], failure)
            if stop is not None:
                return self._stop_now(stop)
        repeats = 0 if refused else self._failures[txid] - 1
        self._not_before_ms = now_ms + (
            min(RETRY_DELAY_MS * 2 ** min(repeats - 1, 10), RETRY_DELAY_MAX_MS) if repeats else 0
        )
        # An idempotent spout's plans stay unchanged, so the plan that is being made after them
        # stays valid, unless this one is narrowed.
        if self._kind is SpoutKind.OPAQUE or refused:
            self._generation += 1
            self._planning = None
        commands: list[Command] = []
        for each in [self._active[number] for number in sorted(self._active) if number >= txid]:
            if each.phase is not TransactionPhase.WAITING:
                reason = str(failure) if each.txid == txid else f"txid {txid} failed"
                commands.append(self._cancel(each, reason))
            narrowed = refused and each.txid == txid
            if not narrowed and not each.opened and (self._kind is SpoutKind.OPAQUE or refused):
                self._drop(each)
            else:
                self._move(each, TransactionPhase.WAITING, now_ms)
        if self._stopping and refused and self._active[txid].lost and not self._can_undo:
            # A new leader could not know that nothing is written for good.
            commands += self._emit([self._active[txid]], now_ms)
        elif self._stopping:
            commands += self._stop_now(None)
        return commands

    def _is_refused(self, txid: int, failure: TaskFailure) -> bool:
        """Whether an attempt failed because of a record's value."""
        if failure.kind is FailureKind.BAD_RECORD:
            return True
        transaction = self._active[txid]
        return (
            self._pins(txid)
            and self._narrowing is not None
            and failure.kind is FailureKind.ERROR
            and bool(failure.where)  # the user's own code
            and transaction.phase is TransactionPhase.PROCESSING
            and self._narrowing.applies(transaction.plan, failure)
        )

    def _pins(self, txid: int) -> bool:
        """Whether an error of the user's code in the present attempt counts as a refusal."""
        return self._pins_errors and self._errors.get(txid, 0) + 1 >= self._max_attempts > 0

    def _take_out(self, transaction: _Transaction, failure: TaskFailure) -> TaskFailure | None:
        """Narrow the plan of a batch with a refused value (C51). Returns the failure that ends the
        run, or None when the batch continues with another plan."""
        rolling_back = transaction.phase is TransactionPhase.ROLLING_BACK
        if self._narrowing is None or rolling_back or not self._narrowing.applies(transaction.plan, failure):
            return failure
        if transaction.opened and not self._undoes(transaction):
            return replace(
                failure,
                message=f"{failure.message}; the commit of txid {transaction.txid} was opened with this record, and may have "
                "written to a sink that cannot undo",
            )
        searched, transaction.searched = transaction.searched, None
        if searched is None and self._will_try(transaction, failure):
            if transaction.opened:
                transaction.lost, transaction.narrower = True, transaction.plan
            return None
        found = self._narrowing.narrowed(transaction.plan, failure, searched)
        if isinstance(found, TaskFailure):
            return found
        plan, is_part = found
        if is_part:
            # A batch that is too large is not searched for a record. When the source plans the next
            # batch, it has learned from the half what fits.
            is_too_large = failure.error == BatchTooLargeError.__name__
            is_cut = searched is not None and searched.is_cut
            self._suspects = {} if is_too_large or is_cut else transaction.plan
        if transaction.opened:
            transaction.lost, transaction.narrower = True, plan
        else:
            transaction.turn_to(plan)
        return None

    def _undoes(self, transaction: _Transaction) -> bool:
        """Whether a roll-back undoes all that attempts at the transaction may have written."""
        return self._can_undo or not transaction.may_be_written

    def _will_try(self, transaction: _Transaction, failure: TaskFailure) -> bool:
        """Let the next attempts try writes if they may so find the values that this attempt has
        refused. All earlier transactions must be committed. False: they find nothing more."""
        if self._narrowing is None or not self._narrowing.may_search(transaction.plan, failure):
            return False
        component, tried = failure.component_id, transaction.tries_writes
        if transaction.opened and component in self._tries_writes and component not in tried:
            transaction.tries_writes |= self._tries_writes
            return True
        may_try = transaction.opened or (transaction.txid == self.currtx and component not in self._tries_writes)
        if not may_try or component not in self._tries_in_order or (transaction.tries_in_order and component in tried):
            return False
        transaction.tries_writes |= self._tries_in_order
        transaction.tries_in_order = True
        return True

    def _lost(self, transaction: _Transaction, failure: TaskFailure) -> TaskFailure | None:
        """Decide how to go on when the source has lost a planned range. Returns the failure that
        ends the run, or None when the batch is planned again."""
        if self._kind is SpoutKind.TRANSACTIONAL:
            return replace(failure, message=f"{failure.message}; an idempotent batch can only be replayed as it was")
        if not transaction.opened:
            return None if self._skips_lost_data else failure
        if not self._skips_lost_data or not self._undoes(transaction):
            return replace(
                failure,
                message=f"{failure.message}; the commit of txid {transaction.txid} was opened with this plan, and it may be "
                "rolled back and planned anew only if the spout has on_data_loss='skip' and no sink that cannot undo may have "
                "written",
            )
        transaction.lost = True
        return None

    def _cancel(self, transaction: _Transaction, reason: str) -> Cancel:
        writing = transaction.phase in (TransactionPhase.COMMITTING, TransactionPhase.ROLLING_BACK)
        return Cancel(transaction.txid, transaction.attempt_id, reason, committing=writing)

    def _advance(self, now_ms: int) -> list[Command]:
        """Do every possible step now: open the commit that is due, emit waiting batches, request a
        plan."""
        commands: list[Command] = []
        self._plan_suspects(now_ms)
        first = self._active.get(self.currtx)
        if first is not None and first.phase is TransactionPhase.PROCESSED:
            differs = _differing_rows(first) if first.may_be_written else None
            if differs is not None:
                return self._stop_now(differs)
            replay = first.opened
            first.opened, first.opened_rows = True, first.rows
            first.was_written, first.may_be_written = first.may_be_written, True
            self._move(first, TransactionPhase.COMMITTING, now_ms)
            opens = OpenCommit(first.txid, first.attempt_id, plan_digest(first.plan))
            rows = OpenedRows(opens.txid, opens.plan_digest, first.rows) if first.rows else None
            if self._records_open or rows is not None:
                commands += self._write(opens=opens if self._records_open else None, opened_rows=rows)
            commands.append(Commit(first.txid, first.attempt_id, first.plan, replay))
        if now_ms < self._not_before_ms:
            return commands
        emitted = [each for _, each in sorted(self._active.items()) if each.phase is TransactionPhase.WAITING]
        if emitted:
            commands += self._emit(emitted, now_ms)
        idle = self._planning is None and self._suspects is None
        if idle and len(self._active) < self._max_pending and not self._rolling_back():
            self._planning = max(self._active, default=self.currtx - 1) + 1
            divisor = min(DIVISOR_STEP ** self._timeouts.get(self._planning, 0), DIVISOR_MAX)
            commands.append(AskPlan(self._generation, self._planning, self.planned_to, divisor))
        return commands

    def _emit(self, transactions: Sequence[_Transaction], now_ms: int) -> list[Command]:
        """Begin an attempt at each of these transactions: its processing, or its roll-back."""
        for each in transactions:
            each.attempt_id = self._attempts[each.txid] = self._attempts.get(each.txid, 0) + 1
            phase = TransactionPhase.ROLLING_BACK if each.lost else TransactionPhase.PROCESSING
            self._move(each, phase, now_ms)
        closes = [] if all(each.is_short for each in transactions) else self._close()
        writes = self._write({each.txid: (each.attempt_id, each.plan) for each in transactions})
        return [*closes, *writes, *map(self._started, transactions)]

    def _started(self, transaction: _Transaction) -> Command:
        txid, attempt_id, plan = transaction.txid, transaction.attempt_id, transaction.plan
        if transaction.lost:
            return RollBack(txid, attempt_id, plan)
        return Process(
            txid,
            attempt_id,
            plan,
            pins_errors=self._pins(txid),
            tries_writes=transaction.tries_writes,
            tries_in_order=transaction.tries_in_order,
        )

    def _plan_suspects(self, now_ms: int) -> None:
        """During the search for a refused value, plan the next batch as a part of the batch that
        contained it.
        """
        if self._suspects is None or self._narrowing is None or self._active:
            return
        plan = self._narrowing.rest(self._suspects, self._committed_plan)
        if plan is None:
            self._suspects = None
        else:
            self._active[self.currtx] = _Transaction(self.currtx, plan, TransactionPhase.WAITING, since_ms=now_ms)

    def _drop(self, transaction: _Transaction) -> None:
        del self._active[transaction.txid]
        self._dropped.add(transaction.txid)

    def _write(
        self,
        plans: Mapping[int, tuple[int, Plan]] | None = None,
        *,
        opens: OpenCommit | None = None,
        opened_rows: OpenedRows | None = None,
    ) -> list[Command]:
        """Build a write that also closes the committed transaction (invariant 9); closed
        transactions are then released."""
        closed, self._unclosed = self._unclosed, None
        self._closed_plan = self._committed_plan
        persist = self._persist(plans, currtx=self.currtx if closed else None, opens=opens, opened_rows=opened_rows)
        commands: list[Command] = [persist]
        return [*commands, Release(closed[0], closed[1])] if closed else commands

    def _persist(
        self,
        plans: Mapping[int, tuple[int, Plan]] | None = None,
        *,
        currtx: int | None = None,
        opens: OpenCommit | None = None,
        opened_rows: OpenedRows | None = None,
    ) -> Persist:
        """Build a write. It also removes the plans dropped since the last write (invariant 8)."""
        dropped = frozenset(self._dropped.difference(plans or ()))
        self._dropped.clear()
        return Persist(dict(self._attempts), plans or {}, currtx, opens, dropped, opened_rows=opened_rows)

    def _rolling_back(self) -> bool:
        """Whether a plan in flight is about to be dropped. If so, plan no batch after it."""
        return any(each.lost for each in self._active.values())

    def _stop_now(self, failure: TaskFailure | None) -> list[Command]:
        self._stopped = True
        closes = self._close()
        cancels: list[Command] = [
            self._cancel(each, "the run stops")
            for each in self._active.values()
            if each.phase is not TransactionPhase.WAITING
        ]
        return [*closes, *cancels, Stop(failure)]

    def _current(self, txid: int, attempt_id: int, phase: TransactionPhase) -> _Transaction | None:
        """The transaction, if this attempt is its current one and is in ``phase``; else None
        (invariant 7)."""
        transaction = self._active.get(txid)
        if transaction is None or transaction.attempt_id != attempt_id or transaction.phase is not phase:
            return None
        return transaction

    def _move(self, transaction: _Transaction, phase: TransactionPhase, now_ms: int) -> None:
        if (transaction.phase, phase) not in _TRANSITIONS:
            raise InvariantViolation(f"txid {transaction.txid} cannot go from {transaction.phase} to {phase}")
        if phase is TransactionPhase.COMMITTING and (
            transaction.txid != self.currtx
            or any(each.phase is TransactionPhase.COMMITTING for each in self._active.values())
        ):
            raise InvariantViolation(f"invariant 1: txid {transaction.txid} may not commit, {self.currtx} is due")
        transaction.phase = phase
        transaction.since_ms = now_ms


def _differing_rows(transaction: _Transaction) -> TaskFailure | None:
    """The failure of an attempt at an opened commit, if a committer has another number of rows than
    in the attempt that opened the commit (C11). None if the numbers agree, or if the source has
    other records, because it may have lost some, as a compacted topic does."""
    opened, rows = transaction.opened_rows, transaction.rows
    if opened.get(READ) != rows.get(READ):
        return None
    for component_id, before in opened.items():
        now = rows.get(component_id, before)
        if now != before:
            return TaskFailure(
                FailureKind.FATAL,
                component_id,
                0,
                f"the commit of txid {transaction.txid} was opened with {before:,} rows for {component_id!r}, and a repetition has "
                f"{now:,}: the code, its settings or a schema has changed since, and what {component_id!r} has written cannot be "
                "undone",
                advice="run the topology as it was until this transaction is committed, stop it, and start the changed one",
            )
    return None


def _is_short(plan: Plan) -> bool:
    return len(plan) <= JOINED_BYTES_MAX // 50 and len(json.dumps(plan, default=str)) <= JOINED_BYTES_MAX
