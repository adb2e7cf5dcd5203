"""Core topologies on Spark: components live in task workers, whatever worker Spark uses;
dead ones are replaced.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework import BaseBasicBolt, TopologyBuilder, Tuple, submit
from framework.core import spark as core_spark
from framework.core import worker_client
from framework.core.spark import SparkRounds
from framework.errors import InvariantViolation, RetryableError
from framework.execution.spark import auxiliary_jobs as spark_rounds
from framework.execution.spark.auxiliary_jobs import SparkJobs
from framework.execution.spark.worker_errors import python_part
from tests.kit.journaled import Queue, alive, check_every_word_was_seen, note, noted, sentence_of, word_count
from tests.kit.processes import RunProcess
from tests.kit.task_workers import workers_of
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.spark


@pytest.mark.slow
@pytest.mark.behaviour("4.1", "4.3", "4.4")
@pytest.mark.parametrize(
    "ackers", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)]
)
def test_words_are_counted_by_objects_that_stay(tmp_path: Path, spark: str, ackers: int) -> None:
    """Messages come in many rounds.

    The counts are in attributes, so they are right only if the objects stay.
    """
    conf = {"spark.master": spark, "topology.acker.executors": ackers, "topology.max.spout.pending": 20}
    with submit(word_count(tmp_path, 300), conf) as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().rounds >= (5 if ackers else 1)
        pids = workers_of(run)
        assert len(pids) == 2
    wait_for(lambda: not any(map(alive, pids)))
    assert check_every_word_was_seen(tmp_path, 300) == 0
    words = Counter(word for number in range(300) for word in sentence_of(number).split())
    assert {(word, int(n)) for word, n in map(str.split, noted(tmp_path, "counts"))} == set(words.items())
    assert len(noted(tmp_path, "opened")) == 2
    assert sorted(noted(tmp_path, "closed")) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.behaviour("4.1")
def test_small_rounds_go_from_the_driver_to_the_workers_without_a_spark_job(
    tmp_path: Path, spark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: SparkJobs, *_: object) -> Any:
        raise AssertionError("a round was a Spark job")

    monkeypatch.setattr(SparkJobs, "one", refused)
    with submit(word_count(tmp_path, 100), {"spark.master": spark, "topology.max.spout.pending": 20}) as run:
        run.wait_until_idle(PATIENCE_S)
        assert (run.status().rounds > 3, run.status().rounds_lost) == (True, 0)
    assert check_every_word_was_seen(tmp_path, 100) == 0


@pytest.mark.slow
@pytest.mark.behaviour("4.1")
@pytest.mark.parametrize("why", ["unreachable", "executors come and go"])
def test_where_the_driver_cannot_carry_rounds_they_are_spark_jobs(
    tmp_path: Path, spark: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    one = SparkJobs.one

    def counted(self: SparkJobs, function: Any) -> Any:
        jobs.append(function)
        return one(self, function)

    monkeypatch.setattr(SparkJobs, "one", counted)
    if why == "unreachable":
        monkeypatch.setattr(
            core_spark, "unreachable", lambda address, credentials: f"task worker {address.number} is far away"
        )
    else:
        monkeypatch.setattr(SparkJobs, "executors_follow_jobs", True)
    with submit(word_count(tmp_path, 60), {"spark.master": spark, "topology.max.spout.pending": 20}) as run:
        run.wait_until_idle(PATIENCE_S)
        assert run.status().rounds_lost == 0
    assert len(jobs) > 3
    assert check_every_word_was_seen(tmp_path, 60) == 0
    assert sorted(noted(tmp_path, "closed")) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.dies("core 1", "core 3")
@pytest.mark.behaviour("4.6")
@pytest.mark.kills
def test_tuples_that_a_killed_worker_held_are_replayed(tmp_path: Path, spark: str, seed: int) -> None:
    which = seed % 2
    conf = {"spark.master": spark, "topology.max.spout.pending": 20, "topology.message.timeout.secs": 2}
    with submit(word_count(tmp_path, 2_000), conf) as run:
        wait_for(lambda: len(noted(tmp_path, "acked")) > 200)
        first = workers_of(run)
        os.kill(first[which], signal.SIGKILL)
        wait_for(lambda: workers_of(run) != first)
        run.wait_until_idle(PATIENCE_S)
        status = run.status()
        assert status.rounds_lost >= 1
        assert workers_of(run)[1 - which] == first[1 - which]
        assert status.components["queue"].died == 0
    check_every_word_was_seen(tmp_path, 2_000)
    assert len(noted(tmp_path, "opened")) == 3  # each task worker has one of the two spout tasks


@pytest.mark.slow
@pytest.mark.behaviour("4.1")
def test_a_large_round_on_a_cluster_goes_level_by_level(tmp_path: Path, cluster: str) -> None:
    words = 300
    conf = {"spark.master": cluster, "topology.collapse.records.max": 0, "topology.max.spout.pending": 100}
    with submit(word_count(tmp_path, words), {**conf, "topology.acker.executors": 2}) as run:
        run.wait_until_idle(PATIENCE_S)
        executor = run._executor
        assert isinstance(executor, SparkRounds)
        assert all(isinstance(each.place, tuple) for each in executor._addresses)
    assert check_every_word_was_seen(tmp_path, words) == 0


@pytest.mark.dies("core 1", "core 5")
@pytest.mark.behaviour("4.6")
@pytest.mark.kills
@pytest.mark.slow
def test_a_killed_executor_takes_its_workers_with_it_and_the_next_round_finds_new_ones(
    tmp_path: Path, cluster: str
) -> None:
    """There are two executors, with one task worker each."""
    conf = {"spark.master": cluster, "topology.max.spout.pending": 20, "topology.message.timeout.secs": 5}
    with submit(word_count(tmp_path, 600), conf) as run:
        wait_for(lambda: len(noted(tmp_path, "acked")) > 100)
        first = workers_of(run)
        executor = next(
            each.pid
            for each in psutil.Process(first[0]).parents()
            if "CoarseGrainedExecutor" in " ".join(each.cmdline())
        )
        os.kill(executor, signal.SIGKILL)
        wait_for(lambda: not alive(first[0]))
        wait_for(lambda: workers_of(run)[0] != first[0])
        run.wait_until_idle(PATIENCE_S)
        assert run.status().rounds_lost >= 1
        assert workers_of(run)[1] == first[1]
    check_every_word_was_seen(tmp_path, 600)


@pytest.mark.slow
@pytest.mark.dies("core 6")
@pytest.mark.behaviour("4.6")
@pytest.mark.kills
def test_workers_end_with_the_driver_and_the_next_one_goes_on(tmp_path: Path) -> None:
    settings = {
        "app.folder": tmp_path,
        "app.count": 300,
        "spark.master": "local[2]",
        "topology.max.spout.pending": 10,
    }
    process = RunProcess(tmp_path / "run.log", "tests.kit.journaled:topology", settings)
    try:
        process.start("--until-caught-up")
        assert process.wait_for(lambda: len(noted(tmp_path, "acked")) > 100)
        pids = {int(line.split()[1]) for line in noted(tmp_path, "opened")}
        assert process.kill()
        wait_for(lambda: not any(map(alive, pids)))
        assert len(noted(tmp_path, "acked")) < 300
        process.start("--until-caught-up")
        assert process.finish() == 0, process.tail()
    finally:
        process.end()
    check_every_word_was_seen(tmp_path, 300)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (
            "An error occurred.\n: PythonException:\nTraceback:\n  File ...\nWorkerLostError: task worker 0 is gone: reset\n"
            " SQLSTATE: 38000\n\tat org.apache.spark.api.python(PythonRunner.scala:1)\n",
            "WorkerLostError: task worker 0 is gone: reset",
        ),
        (
            "Job aborted due to stage failure: ExecutorLostFailure (executor 1 exited) Reason: exit code 137\n"
            "Driver stacktrace:\n\tat org.apache.spark.scheduler.DAGScheduler(DAGScheduler.scala:1)",
            "Job aborted due to stage failure: ExecutorLostFailure (executor 1 exited) Reason: exit code 137",
        ),
        (
            "An error occurred.\n: SparkException: [CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND] Checkpoint block rdd_2_0 not found!\n"
            "Either the executor that originally checkpointed this partition is no longer alive, or the original RDD is "
            "unpersisted.\nIf this problem persists, you may consider using `rdd.checkpoint()` instead, which is slower.\n"
            "\tat org.apache.spark.errors.SparkCoreErrors(SparkCoreErrors.scala:1)",
            "Either the executor that originally checkpointed this partition is no longer alive, or the original RDD is "
            "unpersisted.",
        ),
    ],
)
def test_the_python_error_is_taken_out_of_sparks_stack_trace(text: str, last: str) -> None:
    assert python_part(RuntimeError(text))[-1] == last


@pytest.mark.rule("C10")
def test_a_round_whose_task_spark_repeats_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated() -> None:
        raise InvariantViolation("Spark repeated a task")

    monkeypatch.setattr(spark_rounds, "refuse_repetition", repeated)
    with pytest.raises(RetryableError, match="Spark repeated a task"):
        list(spark_rounds._Each(str)([1]))
    with pytest.raises(RetryableError, match="Spark repeated a task"):
        list(spark_rounds._Level(lambda level, partition, records: [], 0)(0, []))


class Hangs(BaseBasicBolt):
    """Never returns from the first tuple that its topology ever sees."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def execute(self, tup: Tuple, collector: Any) -> None:
        note(self.folder, "hung", tup["number"])
        if len(noted(Path(self.folder), "hung")) == 1:
            threading.Event().wait()


@pytest.mark.slow
@pytest.mark.dies("core 4")
@pytest.mark.behaviour("4.6")
def test_a_component_that_hangs_is_ended_with_its_worker(
    tmp_path: Path, spark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "ANSWER_MIN_S", 8.0)
    builder = TopologyBuilder("hangs")
    builder.set_spout("queue", Queue(tmp_path, 20))
    builder.set_bolt("hangs", Hangs(tmp_path)).shuffle_grouping("queue")
    with submit(builder.build(), {"spark.master": spark, "topology.message.timeout.secs": 0.5}) as run:
        wait_for(lambda: "did not answer for 8 s" in str(run.status().last_error))
        run.wait_until_idle(PATIENCE_S)
    assert len(set(noted(tmp_path, "acked"))) == 20
