"""The driver's side of a commit: raise headers, run tasks, sweep, set ``done``.

The order (C1, C2, C5), for each attempt whose turn it is:

1. Raise the header of every state to this attempt, by compare-and-set. From here on ``done`` is
   below its txid.
2. Run the commit tasks, which write under that header.
3. If the txid had been opened before, sweep the states that keep previous values. In states of
   files, publish what the tasks have written.
4. Set ``done`` in every state. Only then does the transaction close in ZooKeeper.

The first attempt at a txid does 1, 2 and 4 in one step, if there is one state and one task, in this
process, and the store supports it. The same atomic step compares the header with its value before
the raise, and writes. An attempt that was cancelled meanwhile is fenced as usual: the first to
raise the header wins, and the other is refused.

When the source has permanently lost the range of an opened plan (C7):

1. Raise the headers, still with the old digest.
2. Roll back everything of that txid.
3. Mark the headers ``ROLLED_BACK``. Only then may another plan be written. After a crash before
   this step, the next leader finds the old plan and starts over.

Each of these is a generator of steps (``step_generators.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from framework.coordination.step_generators import Step, Steps, perform
from framework.errors import ConfigError, InvariantViolation, RetryableError, StaleWriterError
from framework.execution.failures import TaskFailure, users_errors
from framework.execution.messages import AttemptHeader
from framework.execution.ports import BatchExecutor, PhaseResult
from framework.topology.fencing import PURGE_EVERY, ROLLED_BACK, FencedState, Header, OpenCommit, ValueType
from framework.transactions.plans import plan_digest

TAKE_OVER_TRIES = 1_000
#: The component of a failure before any task has begun to commit. No component has this id.
RAISING = "commit (raise)"
#: The digest of the empty plan. A document with it means that the positions were forgotten.
FORGOTTEN = plan_digest({})


def _check_plan(state: FencedState, opened: OpenCommit, txid: int, held: str | None) -> None:
    if opened.txid != txid or opened.plan_digest != held:
        raise ConfigError(
            f"{state.location} was opened for txid {opened.txid} with plan {opened.plan_digest}, and ZooKeeper holds plan "
            f"{held} for txid {txid}: one of the two was restored from a backup; restore the other one too"
        )


def _noted_nowhere(location: str, txid: int) -> None:
    """For callers that do not record which states joined."""


class CommitPhase:
    """The states of one topology under one leader. One attempt commits at a time. Another thread
    may call ``close_fence`` while an abandoned commit still hangs."""

    def __init__(
        self,
        topology_id: str,
        states: Sequence[FencedState],
        executor: BatchExecutor,
        epoch: int,
        *,
        incarnation: str = "",
        purge_every: int = PURGE_EVERY,
    ) -> None:
        self._topology_id = topology_id
        self._states = states
        self._executor = executor
        self._epoch = epoch
        self._incarnation = incarnation
        self._purge_every = purge_every
        self._headers: dict[int, Header] = {}
        # the last commit; attempt 0 if only its plan is known
        self._committed: OpenCommit | None = None
        # the last commit in one step, and the header from which it opens
        self._opening: tuple[AttemptHeader, Header] | None = None
        self._lock = threading.RLock()

    def headers(self) -> list[tuple[str, Header]]:
        """Each state's location, and its header as this leader knows it. For observers, from any
        thread."""
        return [(self._states[index].location, header) for index, header in sorted(self._headers.copy().items())]

    # --- start ------------------------------------------------------------------------------------

    def open(self, currtx: int, digests: Mapping[int, str], *, joining: Collection[str] = ()) -> bool:
        """Perform the steps of ``opening``."""
        return perform(self.opening(currtx, digests, joining=joining))

    def opening(
        self,
        currtx: int,
        digests: Mapping[int, str],
        *,
        joining: Collection[str] = (),
        note_joined: Callable[[str, int], None] = _noted_nowhere,
        committed_by: int = 0,
    ) -> Steps[bool]:
        """Prepare every state and compare its header with ZooKeeper's documents. Returns whether a
        header says that the commit of ``currtx`` was opened before; then its plan is binding.

        * ``joining``: locations of the states that join at ``currtx`` if they are empty.
        * ``note_joined``: called before a state joins, with its location and its first txid.
        * ``committed_by``: the attempt that committed the last closed transaction; 0 if unknown.

        Raises ``ConfigError`` when header and documents disagree, saying which is ahead (C2), and
        ``RetryableError`` when a header changes too fast to be taken over."""
        opened = False
        committed = digests.get(currtx - 1, FORGOTTEN)
        if committed != FORGOTTEN:
            self._committed = OpenCommit(currtx - 1, committed_by, committed)
        for index, state in enumerate(self._states):
            after = currtx - 1 if state.location in joining else 0
            header: Header = yield partial(self._take_over, state, after, note_joined)
            self._headers[index] = header
            opened = self._agrees(state, header, currtx, digests) or opened
            self._check_incarnation(state, header)
        return opened

    def _take_over(self, state: FencedState, joins_after: int, note_joined: Callable[[str, int], None]) -> Header:
        """Write this leader's epoch into the header before any decision that depends on the header.
        Otherwise a former leader that has not noticed its deposition could open a commit in between
        (ADR 5). A state that was never written to takes the topology's incarnation, and counts as
        done up to ``joins_after``."""
        for tried in range(TAKE_OVER_TRIES):
            header = state.prepare(self._topology_id)
            # This leader has written nothing yet: another leader wrote a header with this epoch,
            # and its tasks may still run.
            another = header.open is not None or (not tried and header.incarnation == self._incarnation)
            if header.epoch > self._epoch or (header.epoch == self._epoch and another):
                same = [self._states[index].location for index, each in self._headers.items() if each == header]
                if same:
                    raise ConfigError(
                        f"{state.location} has the header that this driver has just given to {same[0]}: they are one place by two "
                        "addresses, and a state has a place of its own; if they are two, ZooKeeper's state is older than the sink: "
                        "restore it"
                    )
                raise ConfigError(
                    f"{state.location} was written by epoch {header.epoch}, and ZooKeeper is at epoch {self._epoch}: "
                    "ZooKeeper's state is older than the sink; restore it, or give topology and sink new names"
                )
            unused = header.open is None and header.done == 0
            incarnation = self._incarnation if self._incarnation and unused else header.incarnation
            done = joins_after if unused else header.done
            taken = replace(header, epoch=self._epoch, incarnation=incarnation, done=done)
            if taken == header:
                return header
            if done != header.done:
                note_joined(state.location, done + 1)
            try:
                state.raise_header(header, taken)
            except StaleWriterError:
                continue  # a former leader has just written; read again and take over from it
            return taken
        raise RetryableError(f"{state.location}: its header changes faster than a new leader can take it over")

    def _check_incarnation(self, state: FencedState, header: Header) -> None:
        """Refuse a state of another incarnation (C25). State from a version without incarnations is
        accepted."""
        if self._incarnation and header.incarnation != self._incarnation:
            raise ConfigError(
                f"{state.location} is of incarnation {header.incarnation}, and the topology {self._topology_id!r} is of "
                f"{self._incarnation}: ZooKeeper's state was wiped and written anew, or the sink was; restore the one that was "
                "lost, or start anew with `ratchet reset --everything`"
            )

    def _agrees(self, state: FencedState, header: Header, currtx: int, digests: Mapping[int, str]) -> bool:
        """Whether this state says that the commit of ``currtx`` was opened. Raises ``ConfigError``
        when it contradicts ZooKeeper."""
        if header.done not in (currtx - 1, currtx):
            ahead = "ahead of" if header.done > currtx else "behind"
            raise ConfigError(
                f"{state.location} holds transactions up to {header.done}, and ZooKeeper says that {currtx} is next: "
                f"the sink is {ahead} the topology {self._topology_id!r}; restore the one that was lost, or give "
                "topology and sink new names"
            )
        if header.open is None or header.open.txid < currtx:
            if header.done == currtx:
                if header.open is None:
                    raise ConfigError(
                        f"{state.location} joined after transaction {header.done}, and ZooKeeper says that {currtx} is next: its "
                        "state is older than the sink; restore a later one, or start anew with `ratchet reset "
                        "--everything`"
                    )
                raise ConfigError(
                    f"{state.location} is done with transaction {currtx}, for which it was never opened: its header was written "
                    "by something else; restore the sink, or start anew with `ratchet reset --everything`"
                )
            committed = digests.get(currtx - 1, FORGOTTEN)
            if header.open is not None and header.open.txid == currtx - 1 and committed != FORGOTTEN:
                _check_plan(state, header.open, currtx - 1, committed)
                self._check_committed(state, header)
            return False
        if header.open.txid == currtx and header.open.plan_digest == ROLLED_BACK:
            return False
        _check_plan(state, header.open, currtx, digests.get(currtx))
        return True

    def pass_over(self, txid: int) -> None:
        """Mark every state as done up to ``txid``: the next batch of a copy covers several
        transactions, the last of which is its own."""
        with self._lock:
            for index in range(len(self._states)):
                current = self._current(index)
                if current.done < txid:
                    self._write(index, current, current.finished(txid))

    # --- attempts ---------------------------------------------------------------------------------

    def run(self, attempt: AttemptHeader, *, replay: bool) -> PhaseResult:
        """Commit. Failures are in the result; only a higher epoch raises ``StaleWriterError``."""
        return perform(self.committing(attempt, replay=replay))

    def roll_back(self, attempt: AttemptHeader) -> PhaseResult:
        """Undo all writes of the attempt's txid under the attempt's plan (C7). Reports failures as
        ``run`` does."""
        return perform(self.rolling_back(attempt))

    def committing(self, attempt: AttemptHeader, *, replay: bool) -> Steps[PhaseResult]:
        return self._guarded(self._commit_steps(attempt, replay=replay))

    def rolling_back(self, attempt: AttemptHeader) -> Steps[PhaseResult]:
        return self._guarded(self._roll_back_steps(attempt))

    def _commit_steps(self, attempt: AttemptHeader, *, replay: bool) -> Steps[PhaseResult]:
        if self._takes_one_step(attempt, replay=replay):
            return (yield from self._one_step(attempt))
        raised = yield from self._guarded(self._raise_steps(attempt), RAISING)
        if raised.failure is not None:
            return PhaseResult(replace(raised.failure, nothing_after=True))
        result: PhaseResult = yield partial(self._executor.commit, attempt)
        if result.failure is not None:
            return result
        for index, state in enumerate(self._states):
            if replay and state.value_type is ValueType.OPAQUE:
                yield partial(self._sweep, index, attempt)
            if state.publishes:
                yield partial(self._publish, index, attempt)
            if attempt.txid % self._purge_every == 0:
                yield partial(self._purge, index, attempt)
            yield partial(self._finish, index, attempt)
        self._committed = _open_commit(attempt)
        return result

    def _takes_one_step(self, attempt: AttemptHeader, *, replay: bool) -> bool:
        """Whether raising the header, writing and setting ``done`` may be one step of the store
        (ADR 58). Not in a replay: its sweep comes between the rows and ``done``, and reading
        resolves a lost reply."""
        if replay or len(self._states) != 1 or attempt.txid % self._purge_every == 0:
            return False
        return not self._states[0].publishes and self._executor.commits_in_one_step(attempt)

    def _one_step(self, attempt: AttemptHeader) -> Steps[PhaseResult]:
        opens_from: Header = yield partial(self._let_open, 0, attempt)
        result: PhaseResult = yield partial(self._executor.commit, replace(attempt, opens_from=opens_from))
        if result.failure is None:
            yield partial(self._note_done, 0, attempt, opens_from)
            self._committed = _open_commit(attempt)
        return result

    def _roll_back_steps(self, attempt: AttemptHeader) -> Steps[PhaseResult]:
        yield from self._raise_all(attempt)
        for index, state in enumerate(self._states):
            if state.can_undo:
                yield partial(self._undo, index, attempt)
        for index in range(len(self._states)):
            yield partial(self._mark_rolled_back, index, attempt)
        return PhaseResult()

    def _raise_steps(self, attempt: AttemptHeader) -> Steps[PhaseResult]:
        yield from self._raise_all(attempt)
        return PhaseResult()

    def _raise_all(self, attempt: AttemptHeader) -> Iterator[Step]:
        for index in range(len(self._states)):
            yield partial(self._raise, index, attempt)

    def _guarded(self, steps: Steps[PhaseResult], component_id: str = "commit") -> Steps[PhaseResult]:
        """``component_id``: of the failure."""
        try:
            return (yield from steps)
        except StaleWriterError as error:
            if error.epoch is not None and error.epoch > self._epoch:
                raise
            return PhaseResult(TaskFailure.of(error, component_id, 0))
        except users_errors() as error:  # the driver's boundary: the coordinator decides how to go on
            return PhaseResult(TaskFailure.of(error, component_id, 0))

    def close_fence(self, attempt: AttemptHeader) -> None:
        """Fence off a dead attempt, so that late writes of its tasks are refused: raise the headers
        to the next attempt. Raises the errors of the states; then the fence stays open until the
        next attempt raises the headers."""
        perform(self.closing_fence(attempt))

    def closing_fence(self, attempt: AttemptHeader) -> Steps[None]:
        for index in range(len(self._states)):
            yield partial(self._close_fence, index, attempt)

    def close(self) -> None:
        for state in self._states:
            state.close()

    # --- steps ------------------------------------------------------------------------------------

    def _raise(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            current = self._before(index, attempt)
            self._replace(index, current, current.opened(self._epoch, _open_commit(attempt)))

    def _let_open(self, index: int, attempt: AttemptHeader) -> Header:
        """Return the header from which the attempt opens in one step. Until that step is done, only
        the store knows the header."""
        with self._lock:
            current = self._before(index, attempt)
            del self._headers[index]
            self._opening = attempt, current
            return current

    def _note_done(self, index: int, attempt: AttemptHeader, opens_from: Header) -> None:
        """Note the header after the commit in one step, unless other code has written or read it
        since: then the attempt was cancelled. A late step of an earlier attempt may have read the
        header before the one step."""
        with self._lock:
            if self._opening == (attempt, opens_from) and self._headers.get(index, opens_from) == opens_from:
                opened = opens_from.opened(self._epoch, _open_commit(attempt))
                self._headers[index], self._opening = opened.done_as_open(), None

    def _before(self, index: int, attempt: AttemptHeader) -> Header:
        """The header before it is raised to an attempt. Raises when the raise is not allowed."""
        with self._lock:
            current = self._current(index)
            if current.done > attempt.txid:
                raise InvariantViolation(
                    f"{self._states[index].location} is done with {current.done}, {attempt} would follow"
                )
            if current.done < attempt.txid - 1:
                raise ConfigError(
                    f"{self._states[index].location} holds transactions up to {current.done} only, and {attempt.txid} was to be "
                    "committed: it was restored from a backup, or lost what was not yet on disk; restore all that it held, or "
                    "start anew with `ratchet reset --everything`"
                )
            if current.open is not None and (current.open.txid, current.open.attempt_id) > (
                attempt.txid,
                attempt.attempt_id,
            ):
                raise StaleWriterError(f"{self._states[index].location} is open for {current.open}, not for {attempt}")
            self._check_plan(index, current, attempt)
            if current.open is not None and current.open.txid == attempt.txid - 1:
                self._check_committed(self._states[index], current)
            return current

    def _check_plan(self, index: int, current: Header, attempt: AttemptHeader) -> None:
        """Refuse a second plan for an opened txid: rows of one plan must not count as rows of
        another (C28)."""
        opened = current.open
        if opened is None or opened.txid != attempt.txid:
            return
        if opened.plan_digest not in (attempt.plan_digest, ROLLED_BACK):
            raise ConfigError(
                f"{self._states[index].location} was opened for txid {opened.txid} with plan {opened.plan_digest}, and "
                f"{attempt.plan_digest} was to be committed: another topology called {self._topology_id!r} writes to it from "
                "a ZooKeeper state of its own; give one of them another name and another sink"
            )

    def _check_committed(self, state: FencedState, header: Header) -> None:
        """Refuse a state whose last transaction was done by another attempt than the committed one.
        That attempt was later rolled back or replayed, so the state was restored to an earlier time
        (C27)."""
        found, committed = header.open, self._committed
        if found is None or committed is None or found.txid != committed.txid:
            return
        if found.plan_digest != committed.plan_digest or committed.attempt_id not in (0, found.attempt_id):
            raise ConfigError(
                f"{state.location} holds transaction {found.txid} as attempt {found.attempt_id} made it, with plan "
                f"{found.plan_digest}; committed was another attempt, with plan {committed.plan_digest}: it was restored from a "
                "backup, or lost what was not yet on disk; restore all that it held, or start anew with "
                "`ratchet reset --everything`"
            )

    def _sweep(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            self._states[index].sweep(self._own(index, attempt))

    def _publish(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            self._states[index].publish(self._own(index, attempt))

    def _undo(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            self._states[index].roll_back(self._own(index, attempt))

    def _purge(self, index: int, attempt: AttemptHeader) -> None:
        """Remove the tombstones of transactions that no attempt can touch any more (C21)."""
        with self._lock:
            self._states[index].purge(self._own(index, attempt), attempt.txid)

    def _finish(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            current = self._own(index, attempt)
            self._write(index, current, current.finished(attempt.txid))  # also in a replay of a done txid (C27)

    def _mark_rolled_back(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            current = self._own(index, attempt)
            marked = OpenCommit(attempt.txid, attempt.attempt_id, ROLLED_BACK)
            self._replace(index, current, current.opened(self._epoch, marked))

    def _close_fence(self, index: int, attempt: AttemptHeader) -> None:
        with self._lock:
            current = self._current(index)
            opened = current.open == _open_commit(attempt) and current.epoch == self._epoch
            if opened or self._opening == (attempt, current):
                above = OpenCommit(attempt.txid, attempt.attempt_id + 1, attempt.plan_digest)
                self._replace(index, current, current.opened(self._epoch, above))

    def _own(self, index: int, attempt: AttemptHeader) -> Header:
        """The header, which must belong to this attempt. Raises ``StaleWriterError`` when a commit
        resumes late and finds another attempt's header."""
        current = self._current(index)
        if current.open != _open_commit(attempt) or current.epoch != self._epoch:
            raise StaleWriterError(
                f"{self._states[index].location} is open for {current.open}, not for {attempt}", current.epoch
            )
        return current

    def _current(self, index: int) -> Header:
        """The header as last written here; read from the state if the last outcome is unknown."""
        if index not in self._headers:
            found = self._states[index].read_header()
            if found.epoch > self._epoch:
                raise StaleWriterError(
                    f"{self._states[index].location}: epoch {found.epoch} writes there, this is epoch {self._epoch}",
                    found.epoch,
                )
            self._check_incarnation(self._states[index], found)
            self._headers[index] = found
        return self._headers[index]

    def _replace(self, index: int, current: Header, new: Header) -> None:
        if new != current:
            self._write(index, current, new)

    def _write(self, index: int, current: Header, new: Header) -> None:
        del self._headers[index]  # if the write raises, the next attempt reads the header again
        self._opening = None
        self._states[index].raise_header(current, new)
        self._headers[index] = new


def _open_commit(attempt: AttemptHeader) -> OpenCommit:
    return OpenCommit(attempt.txid, attempt.attempt_id, attempt.plan_digest)
