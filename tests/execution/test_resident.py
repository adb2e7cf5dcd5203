"""The Spark task that stays for small batches: when it is used, when it leaves, what its loss
means.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, Fields, TransactionalTopologyBuilder
from framework.errors import RetryableError
from framework.execution import AttemptHeader, FailureKind, PhaseResult, ProcessingJob, plan_execution
from framework.execution.spark import resident_task
from framework.execution.spark.batch_executor import SparkExecutor
from framework.execution.spark.resident_task import ResidentTask
from framework.execution.spark.spark_context import Spark
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.execution.test_cancellation import counted, gone
from tests.kit.bolts import BatchCount
from tests.kit.own_logs import own_logs
from tests.kit.processes import ROOT
from tests.kit.runners import start
from tests.kit.spark import SparkMasters
from tests.kit.waiting import PATIENCE_S, wait_for


def nothing() -> None:
    """What a task of these tests does first."""


def echo(message: Any) -> Any:
    return os.getpid(), message


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(call)


def hang_in(folder: str) -> None:
    """Write down the process, and hang until there is a file called ``go on``."""
    (Path(folder) / str(os.getpid())).touch()
    while not (Path(folder) / "go on").exists():
        time.sleep(0.01)


def work_in(folder: str) -> Any:
    return hang_in(folder) if os.path.isdir(folder) else echo(folder)


def cancel(task: ResidentTask, attempt: int) -> None:
    task._dead.add(attempt)  # type: ignore[attr-defined]
    task.cancel(attempt)


@pytest.fixture
def made(spark: str) -> Iterator[Callable[..., ResidentTask]]:
    """Makes resident tasks over the Spark of this process, which has two slots. ``waits``: until
    there is one."""
    opened: list[tuple[Spark, ResidentTask]] = []

    def make(
        work: Callable[[Any], Any] = work_in,
        prepare: Callable[[], Any] = nothing,
        *,
        waits: bool = True,
        **options: Any,
    ) -> ResidentTask:
        session = Spark("t", {})
        session.start()
        opened.append((session, ResidentTask(session, "t", prepare=prepare, work=work, dead=set(), **options)))
        task = opened[-1][1]
        task.start()
        if waits:
            wait_for(lambda: task._stay is not None and task._stay.channel is not None, PATIENCE_S, what="the task")
        return task

    yield make
    context = opened[0][0].context
    for _, task in opened:
        task.close()
    left = active_jobs(context)
    for session, _ in opened:
        session.stop()
    assert left == []


def answered(task: ResidentTask, attempt: int, message: str) -> Any:
    """What the task answers, when one has begun: until then its messages are for jobs."""
    answers: list[Any] = []
    wait_for(lambda: answers.append(task.run(attempt, message)) or answers[-1], PATIENCE_S, what="a task that answers")
    return answers[-1][1]


def active_jobs(context: Any) -> list[int]:
    """Spark's jobs that run now; those that have just ended are given a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := list(context.statusTracker().getActiveJobsIds())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


# --- the task itself ------------------------------------------------------------------------------


def test_messages_go_to_one_task_that_stays(made: Any) -> None:
    task = made()
    answers = [task.run(number, f"message {number}") for number in range(20)]
    assert [said for _, said in answers] == [f"message {number}" for number in range(20)]
    assert len({pid for pid, _ in answers}) == 1
    assert task._stay is not None and task._stay.number == 1  # so it was one Spark job


def test_a_task_without_work_gives_its_slot_back_and_comes_back_with_work(made: Any) -> None:
    task = made(idle_s=0.0, waits=False)
    assert answered(task, 1, "a") == "a"
    wait_for(lambda: not task._living, PATIENCE_S, what="the task to leave")
    assert active_jobs(task._spark.context) == []
    assert answered(task, 2, "b") == "b"


def test_a_job_gets_the_slot_and_messages_are_for_jobs_meanwhile(made: Any) -> None:
    task = made()
    assert task.run(1, "a")[1] == "a"
    with task.given_back():
        wait_for(lambda: not task._living, PATIENCE_S, what="the task to leave")
        assert task.run(2, "b") is None
    assert answered(task, 3, "c") == "c"


def test_a_task_that_works_answers_before_it_leaves(made: Any, tmp_path: Path) -> None:
    task = made()
    under_way = in_thread(lambda: task.run(1, str(tmp_path)))
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to work")
    with task.given_back():
        (tmp_path / "go on").touch()
        assert under_way.result(PATIENCE_S) is None  # what hang_in returns, and no exception
        wait_for(lambda: not task._living, PATIENCE_S, what="the task to leave")


def test_while_the_task_works_another_message_is_for_a_job_in_another_slot(made: Any, tmp_path: Path) -> None:
    task = made()
    under_way = in_thread(lambda: task.run(1, str(tmp_path)))
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to work")
    assert task.run(2, "b") is None
    (tmp_path / "go on").touch()
    assert under_way.result(PATIENCE_S) is None
    assert task.run(3, "c")[1] == "c"


def test_a_task_that_died_while_it_had_nothing_to_do_fails_no_attempt(made: Any) -> None:
    task = made()
    pid, _ = task.run(1, "a")
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    answer = task.run(2, "b")  # a job, as long as the slot of the dead one is taken
    assert answer is None or answer[1] == "b"
    wait_for(lambda: task.run(3, "c") is not None, PATIENCE_S, what="another task")


def die(message: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_task_that_dies_at_work_says_what_spark_says(made: Any) -> None:
    task = made(die)
    with pytest.raises(Exception, match="exited unexpectedly|crashed"):
        task.run(1, "a")


def said_by(message: Any) -> Any:
    return os.getpid(), message.said


def test_a_message_may_be_of_a_class_that_only_the_drivers_program_has(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a Spark job: the class travels along."""
    theirs = type("Theirs", (), {"__module__": "__main__", "said": "a"})
    monkeypatch.setattr(sys.modules["__main__"], "Theirs", theirs, raising=False)
    task = made(said_by)
    assert task.run(1, theirs())[1] == "a"


def fail(message: Any) -> Any:
    raise ModuleNotFoundError("No module named 'theirs'")


def fail_as_a_channel_does(message: Any) -> Any:
    raise ConnectionResetError("theirs was reset")


def end_as_a_channel_does(message: Any) -> Any:
    raise EOFError("theirs is over")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (fail, "No module named 'theirs'"),
        (fail_as_a_channel_does, "theirs was reset"),
        (end_as_a_channel_does, "theirs is over"),
    ],
)
def test_an_error_outside_of_user_code_is_that_of_the_job(made: Any, work: Any, said: str) -> None:
    """Also one that looks like the end of the channel, which would be retried without limit."""
    task = made(work)
    with pytest.raises(Exception, match=said) as raised:
        task.run(1, "a")
    assert not isinstance(raised.value, RetryableError)


@pytest.mark.slow
def test_a_cancelled_task_is_killed_and_another_one_takes_over(made: Any, tmp_path: Path) -> None:
    task = made()
    under_way = in_thread(lambda: task.run(1, str(tmp_path)))
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to work")
    (pid,) = (int(each.name) for each in tmp_path.iterdir())
    cancel(task, 1)
    assert isinstance(under_way.exception(PATIENCE_S), RetryableError)
    assert gone(pid)
    wait_for(lambda: task.run(2, "b") is not None, PATIENCE_S, what="another task")


class HangsFirst:
    """The first task hangs before it connects."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self) -> None:
        if not os.listdir(self.folder):
            hang_in(self.folder)


def test_while_a_task_starts_messages_are_for_jobs_in_another_slot(made: Any, tmp_path: Path) -> None:
    """It may never connect, as where a firewall drops what it sends; the attempt would time out
    with it, again and again."""
    task = made(prepare=HangsFirst(tmp_path), waits=False)
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to start")
    assert in_thread(lambda: task.run(1, "a")).result(PATIENCE_S) is None
    (tmp_path / "go on").touch()
    assert answered(task, 2, "b") == "b"


def test_tasks_leave_when_there_are_fewer_slots(made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job may wait for the slot already: it was to have that of an executor that is lost now."""
    task = made()
    under_way = in_thread(lambda: task.run(1, str(tmp_path)))
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to work")
    monkeypatch.setattr(Spark, "local", False)
    monkeypatch.setattr(Spark, "slots", 1)
    wait_for(lambda: task._stay is None, PATIENCE_S, what="the task to be told")
    (tmp_path / "go on").touch()
    assert under_way.result(PATIENCE_S) is None  # what hang_in returns, and no exception
    wait_for(lambda: not task._living, PATIENCE_S, what="the task to leave")
    assert task.run(2, "b") is None
    monkeypatch.undo()


@pytest.mark.slow
def test_an_attempt_that_is_cancelled_while_its_task_starts_ends_that_task(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resident_task, "JOB_S", PATIENCE_S)
    task = made(prepare=HangsFirst(tmp_path), waits=False)
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to start")
    under_way = in_thread(lambda: task.run(1, "a"))
    wait_for(lambda: task._waiting, PATIENCE_S, what="the attempt to wait for it")
    cancel(task, 1)
    assert isinstance(under_way.exception(PATIENCE_S), RetryableError)
    (pid,) = (int(each.name) for each in tmp_path.iterdir())
    assert gone(pid)
    wait_for(lambda: task.run(2, "b") is not None, PATIENCE_S, what="another task")


def test_a_task_that_cannot_connect_leaves_everything_to_jobs(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ResidentTask, "_open", lambda self: str(tmp_path / "nobody listens"))
    with own_logs() as logs:
        task = made(waits=False)
        wait_for(lambda: not task._living, PATIENCE_S, what="the task to end")
    assert task.run(1, "a") is None
    assert not task._living
    assert [each["event"] for each in logs] == ["resident.unreachable"]


def test_a_run_that_shares_the_only_slot_has_no_task_that_stays(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spark, "slots", 1)
    task = made(waits=False)
    assert task.run(1, "a") is None


def test_over_all_runs_of_a_process_one_slot_stays_free(made: Any) -> None:
    first, second = made(), made(waits=False)
    assert first.run(1, "a")[1] == "a"
    assert second.run(1, "a") is None
    first.close()
    assert answered(second, 2, "b") == "b"


@pytest.mark.slow
def test_hosts_talk_in_tls(spark_masters: SparkMasters, cluster: str) -> None:
    session = Spark("t", {})
    context = session.start()
    task = ResidentTask(session, "t", prepare=nothing, work=echo, dead=set())
    task.start()
    try:
        wait_for(lambda: task.run(1, "a") is not None, PATIENCE_S, what="the task")
        assert task._server is not None and isinstance(task._server.place, tuple)
        assert task._server._context is not None
    finally:
        task.close()
    assert active_jobs(context) == []
    session.stop()


# --- in the executor ------------------------------------------------------------------------------


class Sums(BaseBasicBolt):
    """Passes words on, and does what they say. Leaves a file with its process id."""

    deterministic = True

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def execute(self, tup: Any, collector: Any) -> None:
        (Path(self.folder) / str(os.getpid())).touch()
        if tup["word"] == "raise":
            raise ValueError("their own error")
        if tup["word"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if tup["word"] == "hang":
            time.sleep(600)
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def executor_of(folder: Path, settings: dict[str, str] | None = None, **options: Any) -> SparkExecutor:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, Fields(word=str), 1), 1)
    builder.set_bolt("sums", Sums(folder), 2).shuffle_grouping("spout")
    builder.set_committer_bolt("committer", BatchCount(), 1).shuffle_grouping("sums")
    return SparkExecutor(plan_execution(builder.build()), {}, settings or {}, **{"collapse_records_max": 10, **options})


@pytest.fixture
def executor(spark: str, tmp_path: Path) -> Iterator[SparkExecutor]:
    yield from _started(executor_of(tmp_path))


def _started(executor: SparkExecutor) -> Iterator[SparkExecutor]:
    executor.start()
    yield executor
    executor.close()


def header(attempt: int) -> AttemptHeader:
    return AttemptHeader("t", txid=1, attempt_id=attempt, epoch=1, plan_digest="digest")


def process(executor: SparkExecutor, attempt: int, words: list[str]) -> PhaseResult:
    ranges = {"0": {"first": 0, "next": len(words), "rows": [[word] for word in words]}}
    return executor.process(ProcessingJob(header(attempt), ranges, len(words)))


def stays(executor: SparkExecutor) -> Any:
    """The executor's task, when it is there and has nothing to do."""
    assert executor._resident is not None
    task = executor._resident
    wait_for(lambda: task._stay is not None and task._stay.channel is not None, PATIENCE_S, what="a task that stays")
    return task._stay


@pytest.mark.slow
def test_both_phases_of_a_small_batch_go_to_the_task_that_stays(executor: SparkExecutor) -> None:
    before = stays(executor)
    for attempt in range(1, 5):
        assert process(executor, attempt, ["a", "b"]).failure is None
        assert executor.commit(header(attempt)).failure is None
    assert stays(executor) is before
    groups = executor._spark.context.statusTracker()
    assert [list(groups.getJobIdsForGroup(f"t {header(1)} epoch 1 {each}")) for each in ("processing", "commit")] == [
        [],
        [],
    ]


def test_an_error_of_the_user_reads_the_same_as_in_a_job(executor: SparkExecutor, tmp_path: Path) -> None:
    before = stays(executor)
    here = process(executor, 1, ["a", "raise"]).failure
    assert stays(executor) is before  # an error of the user's code costs no task
    jobs = executor_of(tmp_path, resident=False)
    jobs.start()
    there = process(jobs, 1, ["a", "raise"]).failure
    jobs.close()
    assert here is not None and there is not None
    assert here.lines() == there.lines()
    assert (here.kind, here.component_id) == (FailureKind.ERROR, "sums")
    assert "test_resident.py" in here.where and "their own error" in here.message


@pytest.mark.fault(6)
def test_a_worker_that_dies_fails_the_attempt_and_not_the_users_code(executor: SparkExecutor) -> None:
    stays(executor)
    failure = process(executor, 1, ["die"]).failure
    assert failure is not None
    assert (failure.kind, failure.component_id) == (FailureKind.ERROR, "spark")  # bounded, as that of any lost worker
    assert process(executor, 2, ["a"]).failure is None


@pytest.mark.slow
@pytest.mark.rule("C18")
def test_a_cancelled_attempt_ends_its_worker_and_leaves_no_result(executor: SparkExecutor, tmp_path: Path) -> None:
    stays(executor)
    under_way = in_thread(lambda: process(executor, 1, ["hang"]))
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to work")
    (pid,) = (int(each.name) for each in tmp_path.iterdir())
    executor.cancel(header(1))
    assert "cancelled" in under_way.result(PATIENCE_S).failure.message
    assert gone(pid)
    assert executor._results == {}
    assert process(executor, 2, ["a"]).failure is None


@pytest.mark.slow
def test_the_end_of_a_run_ends_a_task_that_hangs(executor: SparkExecutor, tmp_path: Path) -> None:
    stays(executor)
    under_way = in_thread(lambda: process(executor, 1, ["hang"]))
    wait_for(lambda: list(tmp_path.iterdir()), PATIENCE_S, what="the task to work")
    (pid,) = (int(each.name) for each in tmp_path.iterdir())
    context = executor._spark.context
    executor.cancel(header(1))  # a term that ends cancels what it has under way
    executor.close()
    assert under_way.result(PATIENCE_S).failure is not None
    assert gone(pid)
    assert active_jobs(context) == []


@pytest.mark.slow
def test_on_a_single_slot_large_batches_and_small_ones_take_turns(spark_masters: SparkMasters, tmp_path: Path) -> None:
    spark_masters.stop()
    for executor in _started(executor_of(tmp_path, {"spark.master": "local[1]"})):
        numbers = [stays(executor).number]
        for attempt, words in enumerate((["a"], ["b"] * 50, ["c"], ["d"] * 50, ["e"]), 1):
            assert process(executor, attempt, words).failure is None
            assert executor.commit(header(attempt)).failure is None
            task = executor._resident
            assert task is not None
            wait_for(lambda task=task: task._stay or not task._living, PATIENCE_S, what="the task to leave")  # type: ignore[misc]
            numbers.append(task._stay.number if task._stay is not None else 0)
        assert numbers == [1, 1, 0, 2, 0, 3]  # 0: none is there
        assert len(list(tmp_path.iterdir())) == 1  # a worker outlives its stay, with all that it keeps


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_of_small_batches_costs_no_record(spark: str, tmp_path: Path) -> None:
    """Whatever it was doing: the next attempt counts each record once."""
    words = [[f"w{number % 5}"] for number in range(200)]
    spout = OpaqueMemoryTransactionalSpout({0: words}, Fields(word=str), 5)
    builder = TransactionalTopologyBuilder("killed", "spout", spout, 1)
    builder.set_bolt("notes", Sums(tmp_path), 1).shuffle_grouping("spout")
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()}), 1).fields_grouping(
        "notes", Fields("word")
    )
    killed: set[int] = set()
    with start(builder.build(), ("spark", {"topology.collapse.records.max": 100})) as run:
        for committed in (3, 12):
            run.wait_for_commit(committed, PATIENCE_S)
            for each in tmp_path.iterdir():
                if each.name.isdigit() and int(each.name) not in killed and not gone(int(each.name), 0):
                    os.kill(int(each.name), signal.SIGKILL)
                    killed.add(int(each.name))
        run.wait_until_caught_up(PATIENCE_S)
    assert killed
    assert counted(tmp_path / "x.db") == {f"w{number}": 40 for number in range(5)}


PROGRAM = """
import sys, time
from pathlib import Path
from tests.execution.test_resident import executor_of, process, stays
executor = executor_of(Path(sys.argv[1]), {"spark.master": "local[2]"})
executor.start()
stays(executor)
process(executor, 1, ["a"])
print("ready", flush=True)
process(executor, 2, [sys.argv[2]])
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["a", "hang"])
def test_a_driver_that_is_killed_leaves_no_worker(tmp_path: Path, word: str) -> None:
    """Neither one that waits for a message, nor one that hangs in the user's code."""
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), word], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver.stdout:
        assert driver.stdout.readline() == "ready\n"
    (pid,) = (int(each.name) for each in tmp_path.iterdir())
    driver.kill()
    driver.wait()
    assert gone(pid)
