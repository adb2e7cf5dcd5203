"""The driver's side of a commit, step by step, against a state in memory."""

from __future__ import annotations

from typing import Any

import pytest

from framework import TransactionAttempt
from framework.coordination.step_generators import perform
from framework.errors import ConfigError, RetryableError, StaleWriterError
from framework.execution import FailureKind
from framework.execution.messages import AttemptHeader
from framework.execution.ports import PhaseResult
from framework.topology import Header, OpenCommit
from framework.topology.fencing import ROLLED_BACK
from framework.transactions.commit import FORGOTTEN, CommitPhase
from sinks import MapState, MemoryBackend, OpaqueMapState
from tests.kit.panics import PanicException


class OneTask:
    """An executor whose commit phase is one task that puts one row."""

    def __init__(self, state: MapState, *, in_one_step: bool = False, **row: int) -> None:
        self.state = state
        self.row = row
        self.in_one_step = in_one_step
        self.opened_from: list[Header | None] = []

    def commits_in_one_step(self, header: AttemptHeader) -> bool:
        return self.in_one_step

    def commit(self, header: AttemptHeader) -> PhaseResult:
        self.opened_from.append(header.opens_from)
        attempt: TransactionAttempt = header.attempt("bolt", 0)
        self.state.begin_commit(attempt)
        self.state.multi_put(list(self.row), list(self.row.values()))
        self.state.commit(attempt)
        return PhaseResult()


def attempt(txid: int, attempt_id: int, digest: str = "plan", epoch: int = 1) -> AttemptHeader:
    return AttemptHeader("topology", txid=txid, attempt_id=attempt_id, epoch=epoch, plan_digest=digest)


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


def phase(backend: MemoryBackend, epoch: int = 1, currtx: int = 1, **row: int) -> CommitPhase:
    state = OpaqueMapState(backend)
    executor: Any = OneTask(state, **(row or {"dog": 1}))
    made = CommitPhase("topology", [state], executor, epoch)
    made.open(currtx, {})
    return made


def force(backend: MemoryBackend, *, done: int = 0, opened: OpenCommit | None = None, epoch: int = 1) -> None:
    """Write a header, as another driver might have left it."""
    found = backend.prepare("topology")
    backend.raise_header(found, Header("topology", found.incarnation, epoch=epoch, open=opened, done=done))


@pytest.mark.rule("C28")
def test_a_txid_that_is_open_with_another_plan_is_refused(backend: MemoryBackend) -> None:
    """C28: this happens when two topologies share an id and a sink,
    but not the coordination store.
    """
    first, second = phase(backend, dog=1), phase(backend, dog=2)
    assert first.run(attempt(1, 1, "first's"), replay=False).failure is None
    failures = [second.run(attempt(1, each, "second's"), replay=False).failure for each in (1, 2, 3)]
    assert failures[-1] is not None and failures[-1].kind.stops
    assert "opened for txid 1 with plan first's, and second's was to be committed" in failures[-1].message
    assert backend.multi_get([("dog",)])[0].value == (1,)  # type: ignore[union-attr]


def test_a_txid_that_was_rolled_back_may_be_opened_with_any_plan(backend: MemoryBackend) -> None:
    force(backend, opened=OpenCommit(1, 3, ROLLED_BACK))
    assert phase(backend, 2).run(attempt(1, 4, "another", 2), replay=False).failure is None


@pytest.mark.rule("C2")
def test_rolling_back_a_done_txid_makes_it_not_done(backend: MemoryBackend) -> None:
    """Otherwise a sink that went back to this moment would pass as done,
    though it lacks the transaction.
    """
    committing = phase(backend)
    committing.run(attempt(1, 1), replay=False)
    assert backend.read_header().done == 1
    assert committing.roll_back(attempt(1, 2)).failure is None
    assert (backend.read_header().done, backend.read_header().open) == (0, OpenCommit(1, 2, ROLLED_BACK))
    failure = committing.run(attempt(2, 1), replay=False).failure
    assert failure is not None and "holds transactions up to 0 only" in failure.message
    with pytest.raises(ConfigError, match="the sink is behind"):
        phase(backend, 2, currtx=2)


@pytest.mark.rule("C27")
def test_a_done_txid_is_not_done_while_it_is_replayed() -> None:
    """The answer to ``done`` was lost, so the batch is replayed.

    A sink that goes back to the middle of the replay lacks a part of it, and its header says so.
    """
    backend = MemoryBackend()
    middle: list[Header] = []

    class Watching(OneTask):
        def commit(self, header: AttemptHeader) -> PhaseResult:
            middle.append(backend.read_header())
            return super().commit(header)

    state = OpaqueMapState(backend)
    executor: Any = Watching(state, dog=1)
    committing = CommitPhase("topology", [state], executor, 1)
    committing.open(1, {})
    for each in (1, 2):
        assert committing.run(attempt(1, each), replay=each > 1).failure is None
        assert backend.read_header().done == 1
    assert [(each.open, each.done) for each in middle] == [(OpenCommit(1, each, "plan"), 0) for each in (1, 2)]
    backend.raise_header(backend.read_header(), middle[1])
    failures = [committing.run(attempt(2, each), replay=False).failure for each in (1, 2)]
    assert failures[-1] is not None and "holds transactions up to 0 only" in failures[-1].message
    assert failures[-1].kind.stops


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, PanicException])
def test_a_store_that_raises_anything_on_the_driver_fails_the_attempt(error: type[BaseException]) -> None:
    class Broken(MemoryBackend):
        works = True

        def raise_header(self, expected: Header, new: Header) -> None:
            if not self.works:
                raise error("enough")
            super().raise_header(expected, new)

    backend = Broken()
    committing = phase(backend)
    backend.works = False
    failure = committing.run(attempt(1, 1), replay=False).failure
    assert failure is not None and failure.message == f"{error.__name__}: enough"


@pytest.mark.rule("C27")
def test_closing_the_fence_of_a_done_txid_opens_it_again(backend: MemoryBackend) -> None:
    committing = phase(backend)
    committing.run(attempt(1, 1), replay=False)
    committing.close_fence(attempt(1, 1))
    assert (backend.read_header().open, backend.read_header().done) == (OpenCommit(1, 2, "plan"), 0)


@pytest.mark.rule("C2")
def test_a_sink_that_holds_the_last_transaction_with_another_plan_is_refused(backend: MemoryBackend) -> None:
    """The sink went back to before the transaction was rolled back and planned anew."""
    force(backend, done=1, opened=OpenCommit(1, 1, "gone for good"))
    state = OpaqueMapState(backend)

    def opened_by(epoch: int, held: str) -> bool:
        executor: Any = OneTask(state)
        return CommitPhase("topology", [state], executor, epoch).open(2, {1: held})

    with pytest.raises(
        ConfigError, match="was opened for txid 1 with plan gone for good, and ZooKeeper holds plan another"
    ):
        opened_by(2, "another")
    assert not opened_by(3, "gone for good")
    assert not opened_by(4, FORGOTTEN)


@pytest.mark.rule("C14")
def test_a_state_that_joins_gets_epoch_and_done_in_one_step() -> None:
    """A changed header is no sign of another leader unless its epoch is higher,
    so the driver does not step down.
    """
    raised: list[Header] = []

    class Restored(MemoryBackend):
        def raise_header(self, expected: Header, new: Header) -> None:
            raised.append(new)
            if new.done and len(raised) < 3:
                raise StaleWriterError("the header is as it was before", 0)
            super().raise_header(expected, new)

    state = OpaqueMapState(Restored())
    executor: Any = OneTask(state)
    CommitPhase("topology", [state], executor, 2).open(8, {}, joining=[state.location])
    assert [(each.epoch, each.done) for each in raised] == [(2, 7)] * 3
    assert state.read_header().done == 7


def test_a_commit_opened_in_the_leaders_own_epoch_stops_the_start(backend: MemoryBackend) -> None:
    """ZooKeeper went back to before the last election, so epochs and
    attempt ids would be used again.
    """
    force(backend, opened=OpenCommit(1, 1, "plan"), epoch=2)
    with pytest.raises(ConfigError, match="was written by epoch 2, and ZooKeeper is at epoch 2"):
        phase(backend, 2)


def test_a_raise_that_finds_a_header_of_another_incarnation_stops(backend: MemoryBackend) -> None:
    """The table was dropped and made again while the topology ran."""
    executor: Any = OneTask(OpaqueMapState(backend), dog=1)
    committing = CommitPhase("topology", [executor.state], executor, 1, incarnation="first")
    committing.open(1, {})
    backend.raise_header(backend.read_header(), Header("topology", "somebody's", epoch=1))
    failures = [committing.run(attempt(1, each), replay=False).failure for each in (1, 2)]
    assert failures[-1] is not None and failures[-1].kind.stops
    assert "and the topology 'topology' is of first" in failures[-1].message
    assert backend.items() == {}


def test_a_header_that_is_open_for_a_later_attempt_is_not_taken(backend: MemoryBackend) -> None:
    """The fence was closed above a dead attempt; its commit comes too late."""
    committing = phase(backend)
    force(backend, opened=OpenCommit(1, 2, "plan"))
    committing._headers.clear()  # so it reads the header, as after an unknown outcome
    failure = committing.run(attempt(1, 1), replay=False).failure
    assert failure is not None and failure.kind is FailureKind.STALE
    assert backend.read_header().open == OpenCommit(1, 2, "plan")
    assert backend.items() == {}


def test_a_header_that_is_open_for_a_later_transaction_is_not_taken(backend: MemoryBackend) -> None:
    committing = phase(backend)
    force(backend, opened=OpenCommit(2, 1, "plan"), done=1)
    committing._headers.clear()
    failure = committing.run(attempt(1, 5), replay=False).failure
    assert failure is not None and failure.kind is FailureKind.STALE
    assert backend.items() == {}


def test_a_replay_of_a_done_txid_is_finished_like_any_other(backend: MemoryBackend) -> None:
    """The replay writes rows too, so the store must still be the
    one in which it was opened (C27).
    """
    finished: list[tuple[int, int]] = []

    class Watched(MemoryBackend):
        def raise_header(self, expected: Header, new: Header) -> None:
            if expected.same_attempt(new):
                assert new.open is not None
                finished.append((new.open.txid, new.open.attempt_id))
            super().raise_header(expected, new)

    committing = phase(Watched())
    for each in (1, 2):
        assert committing.run(attempt(1, each), replay=each > 1).failure is None
    assert finished == [(1, 1), (1, 2)]


@pytest.mark.rule("C27")
@pytest.mark.parametrize(
    "held", [OpenCommit(1, 1, "plan"), OpenCommit(1, 2, "another plan")], ids=["another attempt", "another plan"]
)
def test_a_state_that_went_back_to_an_attempt_that_was_not_committed_is_refused(
    backend: MemoryBackend, held: OpenCommit
) -> None:
    """An attempt had done its part when its driver died; it was replayed, or rolled back and
    planned anew, and that was committed. A state that goes back to the time before says that it is
    done.
    """
    driver = phase(backend)
    assert driver.run(attempt(1, 2), replay=True).failure is None
    force(backend, opened=held, done=1)
    failures = [driver.run(attempt(2, each), replay=False).failure for each in (1, 2)]  # the first finds another header
    assert failures[-1] is not None and failures[-1].kind.stops
    assert f"holds transaction 1 as attempt {held.attempt_id} made it" in failures[-1].message


@pytest.mark.rule("C27")
def test_of_a_transaction_before_its_term_a_driver_knows_the_plan(backend: MemoryBackend) -> None:
    force(backend, opened=OpenCommit(1, 7, "plan"), done=1)
    state = OpaqueMapState(backend)
    executor: Any = OneTask(state, dog=1)
    driver = CommitPhase("topology", [state], executor, 2)
    driver.open(2, {1: "plan"})
    assert driver.run(attempt(2, 1, epoch=2), replay=False).failure is None
    force(backend, opened=OpenCommit(1, 7, "another plan"), done=1, epoch=2)
    driver = CommitPhase("topology", [state], executor, 3)
    with pytest.raises(ConfigError, match="ZooKeeper holds plan plan for txid 1"):
        driver.open(2, {1: "plan"})


@pytest.mark.rule("C27")
def test_of_a_transaction_before_its_term_a_driver_knows_the_attempt_too(backend: MemoryBackend) -> None:
    """The same plan may have given other results at another attempt."""
    force(backend, opened=OpenCommit(1, 7, "plan"), done=1)
    state = OpaqueMapState(backend)
    executor: Any = OneTask(state, dog=1)
    perform(CommitPhase("topology", [state], executor, 2).opening(2, {1: "plan"}, committed_by=7))
    with pytest.raises(ConfigError, match="holds transaction 1 as attempt 7 made it"):
        perform(CommitPhase("topology", [state], executor, 3).opening(2, {1: "plan"}, committed_by=8))


# --- one step -------------------------------------------------------------------------------------


def one_step(backend: MemoryBackend, executor: Any = None, **options: Any) -> tuple[CommitPhase, Any]:
    state = OpaqueMapState(backend)
    executor = executor or OneTask(state, in_one_step=True, dog=1)
    made = CommitPhase("topology", [state], executor, 1, **options)
    made.open(1, {})
    return made, executor


def test_a_first_attempt_is_one_step_and_a_replay_is_not(backend: MemoryBackend) -> None:
    """C5: the sweep of a replay comes between the rows and ``done``."""
    committing, executor = one_step(backend)
    before = backend.read_header()
    assert committing.run(attempt(1, 1), replay=False).failure is None
    assert committing.run(attempt(2, 1), replay=False).failure is None
    assert committing.run(attempt(3, 2), replay=True).failure is None
    after_first = before.opened(1, OpenCommit(1, 1, "plan")).finished(1)
    assert executor.opened_from == [before, after_first, None]
    assert (backend.read_header().open, backend.read_header().done) == (OpenCommit(3, 2, "plan"), 3)


def test_a_commit_that_purges_is_no_single_step(backend: MemoryBackend) -> None:
    committing, executor = one_step(backend, purge_every=2)
    for txid in (1, 2, 3):
        assert committing.run(attempt(txid, 1), replay=False).failure is None
    assert [each is not None for each in executor.opened_from] == [True, False, True]


def test_several_states_are_no_single_step(backend: MemoryBackend) -> None:
    states = [OpaqueMapState(backend), OpaqueMapState(MemoryBackend())]
    executor: Any = OneTask(states[0], in_one_step=True, dog=1)
    committing = CommitPhase("topology", states, executor, 1)
    committing.open(1, {})
    assert committing.run(attempt(1, 1), replay=False).failure is None
    assert executor.opened_from == [None]
    assert [each.read_header().done for each in states] == [1, 1]


@pytest.mark.parametrize("done", [False, True])
def test_a_step_without_an_answer_is_replayed_from_what_the_store_says(backend: MemoryBackend, done: bool) -> None:
    class Lost(OneTask):
        def commit(self, header: AttemptHeader) -> PhaseResult:
            lost = (header.txid, header.attempt_id) == (1, 1)
            if not lost or done:
                super().commit(header)
            if lost:
                raise RetryableError("the answer was lost")
            return PhaseResult()

    committing, _ = one_step(backend, Lost(OpaqueMapState(backend), in_one_step=True, dog=1))
    assert committing.run(attempt(1, 1), replay=False).failure is not None
    assert backend.read_header().done == done
    assert committing.run(attempt(1, 2), replay=True).failure is None
    assert (backend.read_header().open, backend.read_header().done) == (OpenCommit(1, 2, "plan"), 1)
    (row,) = backend.multi_get([("dog",)])
    assert row is not None and (row.value, row.prev) == ((1,), None)
    assert committing.run(attempt(2, 1), replay=False).failure is None


def test_a_step_that_hangs_and_was_cancelled_opens_nothing_any_more(backend: MemoryBackend) -> None:
    """The fence is closed before the header has ever been raised."""
    hung: list[AttemptHeader] = []

    class Hangs(OneTask):
        def commit(self, header: AttemptHeader) -> PhaseResult:
            hung.append(header)
            raise RetryableError("no answer yet")

    executor = Hangs(OpaqueMapState(backend), in_one_step=True, dog=1)
    committing, _ = one_step(backend, executor)
    committing.run(attempt(1, 1), replay=False)
    committing.close_fence(attempt(1, 1))
    assert (backend.read_header().open, backend.read_header().done) == (OpenCommit(1, 2, "plan"), 0)
    with pytest.raises(StaleWriterError):
        OneTask.commit(executor, hung[0])
    assert backend.multi_get([("dog",)]) == [None]


def test_a_late_answer_of_a_cancelled_step_is_not_taken_for_the_header(backend: MemoryBackend) -> None:
    """The step was done, its answer is late, and its fence is closed before that answer comes."""

    class Late(OneTask):
        def commit(self, header: AttemptHeader) -> PhaseResult:
            result = super().commit(header)
            if header.attempt_id == 1:
                committing.close_fence(attempt(1, 1))
            return result

    committing, _ = one_step(backend, Late(OpaqueMapState(backend), in_one_step=True, dog=1))
    assert committing.run(attempt(1, 1), replay=False).failure is None  # nobody waits for it any more
    assert [header for _, header in committing.headers()] == [backend.read_header()]
    assert committing.run(attempt(1, 2), replay=True).failure is None
    assert backend.read_header().done == 1


def test_a_late_step_of_a_dead_attempt_that_reads_the_header_during_a_step_does_no_harm(
    backend: MemoryBackend,
) -> None:
    """It reads the header from before that step, which must not be taken for the one after."""

    class Interrupted(OneTask):
        def commit(self, header: AttemptHeader) -> PhaseResult:
            if header.txid == 2:
                assert committing._current(0).done == 1  # as ``_own`` of the dead attempt's purge does
            return super().commit(header)

    committing, _ = one_step(backend, Interrupted(OpaqueMapState(backend), in_one_step=True, dog=1))
    for txid in (1, 2, 3):
        assert committing.run(attempt(txid, 1), replay=False).failure is None
    assert backend.read_header().done == 3
