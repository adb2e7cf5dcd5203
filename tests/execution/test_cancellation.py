"""Dead attempts: their tasks end, their slots become free,
and later writes of theirs are refused.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, BaseBatchBolt, Fields, TransactionalTopologyBuilder
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.bolts import UpdateGlobalCount
from tests.kit.runners import SPREAD_ONLY, start
from tests.kit.waiting import PATIENCE_S

ROWS = {each: [[f"w{number % 4}"] for number in range(20)] for each in range(2)}
EXACT = {f"w{number}": 10 for number in range(4)}


class Stalls(BaseBasicBolt):
    """Hangs (or does what ``how`` says) in every task of 1:1,
    after it has written down its process id.
    """

    deterministic = True

    def __init__(self, folder: Path, how: Callable[[], None]) -> None:
        self.folder = str(folder)
        self.how = how

    def execute(self, tup: Any, collector: Any) -> None:
        if (tup.attempt.txid, tup.attempt.attempt_id) == (1, 1):
            (Path(self.folder) / str(os.getpid())).touch()
            self.how()
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def hang() -> None:
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stalling(tmp_path: Path, how: Callable[[], None]) -> Any:
    (tmp_path / "pids").mkdir()
    spout = OpaqueMemoryTransactionalSpout(ROWS, Fields(word=str), 20)
    builder = TransactionalTopologyBuilder("stalls", "spout", spout, 2)
    builder.set_bolt("stalls", Stalls(tmp_path / "pids", how), 2).shuffle_grouping("spout")
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    committer = StateCommitter(state, ["word"], {"n": Count()})
    builder.set_bolt("count", committer, 2).fields_grouping("stalls", Fields("word"))
    return builder.build()


def counted(path: Path) -> dict[str, int]:
    with sqlite3.connect(path) as connection:
        return dict(connection.execute("SELECT word, n FROM words_live"))


def gone(pid: int, within_s: float = PATIENCE_S) -> bool:
    """Whether a process ends (or is a zombie that nobody has waited for yet). A zombie whose other
    threads are ending has its files open still."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return True
        state, threads = fields[0], int(fields[17])
        if state == "Z" and threads == 1:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.behaviour("1.12")
@pytest.mark.rule("C18")
@pytest.mark.parametrize("runner", SPREAD_ONLY, indirect=True)
def test_a_task_that_hangs_is_timed_out_and_its_slot_is_free_again(runner: Any, tmp_path: Path) -> None:
    """The hanging tasks fill every slot, so the replay needs those slots back."""
    topology = stalling(tmp_path, hang)
    # A new worker may take longer than one timeout to begin, so many attempts are allowed.
    with start(topology, runner, **{"topology.message.timeout.secs": 5, "topology.max.attempts": 100}) as run:
        run.wait_until_caught_up(300)
        failed = [event for event in run.events() if event.kind == "cancelled"]
        assert "processing phase of 1:1 took longer than topology.message.timeout.secs (5 s)" in failed[0].detail
        plans = [each.plan for each in run.transactions()]
    assert counted(tmp_path / "x.db") == EXACT
    assert 1 <= plans[0]["0"]["next"] <= 10  # C18: after each timeout the batch is halved
    pids = {int(each.name) for each in (tmp_path / "pids").iterdir()}
    if runner[0] == "spark":
        assert os.getpid() not in pids
        assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.fault(6)
@pytest.mark.parametrize("runner", SPREAD_ONLY[1:], indirect=True)
def test_a_worker_that_is_killed_costs_an_attempt(runner: Any, tmp_path: Path) -> None:
    """Another worker does the batch again."""
    with start(stalling(tmp_path, die), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed >= 1
    assert counted(tmp_path / "x.db") == EXACT


def kill_executor() -> None:
    """Kill the executor of this worker: the parent of the daemon that forked the worker."""
    daemon = os.getppid()
    executor = int(Path(f"/proc/{daemon}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(executor, signal.SIGKILL)
    hang()


@pytest.mark.slow
@pytest.mark.fault(5)
def test_an_executor_that_is_killed_costs_an_attempt(cluster: str, tmp_path: Path) -> None:
    """What the executor held is lost; the other executor, or its successor,
    does the batch again.
    """
    config = {"topology.message.timeout.secs": 60, "topology.collapse.records.max": 0}
    with start(stalling(tmp_path, kill_executor), ("spark", config)) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed >= 1
    assert counted(tmp_path / "x.db") == EXACT


class LateCommit(UpdateGlobalCount):
    """Stalls in the first commit phase, past the timeout of its attempt, and writes then, like a
    zombie.
    """

    commits_on_driver = True

    def __init__(self, state: OpaqueMapState, folder: Path) -> None:
        super().__init__(state)
        self.folder = str(folder)

    def finish_batch(self) -> None:
        folder = Path(self.folder)
        stalled = folder / "stalled"
        if not stalled.exists():  # an attempt before it may have timed out earlier
            stalled.write_text(str(self.attempt.attempt_id))
            self.state.begin_commit(self.attempt)
            self.state.multi_update(["zombie"], [lambda old: 1_000_000])
            deadline = time.monotonic() + PATIENCE_S
            while not (folder / "go on").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            try:
                self.state.commit(self.attempt)
                (folder / "wrote").touch()
            except BaseException as error:
                (folder / "refused").write_text(str(error))
                raise
        super().finish_batch()


@pytest.mark.fault(7)
@pytest.mark.rule("C1")
def test_a_commit_that_wakes_up_after_its_fence_closed_writes_nothing(tmp_path: Path) -> None:
    """In this process, where no Spark ends the thread.

    The fence is closed before the replay commits. The zombie writes a key that its successor never
    touches.
    """
    spout = OpaqueMemoryTransactionalSpout({0: [[1], [2]]}, Fields(count=int), 10)
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words", Fields(word=str), Fields(n=int)))
    builder = TransactionalTopologyBuilder("zombie", "spout", spout, 1)
    builder.set_bolt("sum", LateCommit(state, tmp_path)).global_grouping("spout")
    builder.set_bolt("hold", Holds(tmp_path)).global_grouping("sum")
    config = {"topology.message.timeout.secs": 2}
    with start(builder.build(), ("local", {}), **config) as run:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "stalled").exists() or not (tmp_path / "stalled").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        zombie = int((tmp_path / "stalled").read_text())
        # open for the next attempt: the fence is closed
        while (state_open(tmp_path / "x.db") or (0, 0)) < (1, zombie + 1):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (tmp_path / "go on").touch()
        while not (tmp_path / "refused").exists():
            assert time.monotonic() < deadline
            assert not (tmp_path / "wrote").exists()
            time.sleep(0.02)
        (tmp_path / "finish").touch()
        run.wait_until_caught_up(PATIENCE_S)
    assert counted(tmp_path / "x.db") == {"total": 3}
    assert "open for" in (tmp_path / "refused").read_text()


HOLD_S = 1.5


class Holds(BaseBatchBolt):
    """A bolt below the committer that holds the commit phase."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def execute(self, tup: Any) -> None:
        pass

    def finish_batch(self) -> None:
        deadline = time.monotonic() + HOLD_S
        while not (Path(self.folder) / "finish").exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def state_open(path: Path) -> tuple[int, int] | None:
    try:
        with sqlite3.connect(path) as connection:
            row = connection.execute("SELECT open_txid, open_attempt FROM _ratchet_headers").fetchone()
    except sqlite3.OperationalError:
        return None
    return (row[0], row[1]) if row is not None and row[0] is not None else None
