"""The Spark executor: results are materialised once, a lost one fails the attempt,
no block stays.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext, TaskContext

from framework import Fields, TransactionalTopologyBuilder
from framework.errors import InvariantViolation
from framework.execution import AttemptHeader, FailureKind, ProcessingJob, plan_execution
from framework.execution.spark.batch_executor import WARM_UP_TRIES, SparkExecutor, _CollapsedFunction, _LevelFunction
from spouts import MemoryTransactionalSpout
from tests.kit.bolts import BatchCount

HEADER = AttemptHeader("t", txid=1, attempt_id=1, epoch=1, plan_digest="digest")
RANGES = {str(each): {"first": 0, "next": 5, "rows": [[f"w{number}"] for number in range(5)]} for each in range(3)}


class Witness(BatchCount):
    """Writes a line into a file for each ``prepare`` and each ``finish_batch``."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        super().prepare(conf, context, collector, batch_id)
        self.task = context.task_index
        self.note("prepared")

    def finish_batch(self) -> None:
        super().finish_batch()
        self.note("finished")

    def note(self, what: str) -> None:
        descriptor = os.open(self.file, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, f"{what} {self.task}\n".encode())
        os.close(descriptor)


@pytest.fixture(params=["collapsed", "spread"])
def executor(request: pytest.FixtureRequest, spark: str, tmp_path: Path) -> Iterator[SparkExecutor]:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, Fields(word=str), 1), 2)
    builder.set_bolt("before", Witness(tmp_path / "before"), 3).shuffle_grouping("spout")
    builder.set_committer_bolt("committer", Witness(tmp_path / "committer"), 2).shuffle_grouping("before")
    builder.set_bolt("after", Witness(tmp_path / "after"), 2).all_grouping("committer")
    most = 1_000 if request.param == "collapsed" else 0
    made = SparkExecutor(plan_execution(builder.build()), {}, {}, collapse_records_max=most)
    made.start()
    yield made
    made.close()


def persisted(context: SparkContext) -> set[int]:
    """The ids of the persisted RDDs of a context, which tests share. Spark may drop at any moment
    those that nobody refers to."""
    return set(context._jsc.getPersistentRDDs())


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_the_processing_phase_runs_once_also_across_the_commit_job(executor: SparkExecutor, tmp_path: Path) -> None:
    result = executor.process(ProcessingJob(HEADER, RANGES, 15))
    assert result.failure is None
    assert result.rows["spout->before"] == (15, 15)
    assert result.read.records == 15
    assert lines(tmp_path / "committer") == ["prepared 0", "prepared 1"]
    committed = executor.commit(HEADER)
    assert committed.failure is None
    assert committed.rows["committer->after"] == (4, 4)
    assert lines(tmp_path / "before") == sorted(
        f"{what} {task}" for what in ("prepared", "finished") for task in range(3)
    )
    for name in ("committer", "after"):
        assert lines(tmp_path / name) == ["finished 0", "finished 1", "prepared 0", "prepared 1"]


@pytest.mark.rule("C10")
def test_a_lost_result_fails_the_attempt_and_is_not_computed_again(executor: SparkExecutor, tmp_path: Path) -> None:
    assert executor.process(ProcessingJob(HEADER, RANGES, 15)).failure is None
    kept = executor._results[HEADER].spread
    if kept is None:
        executor.release(HEADER)
    else:
        kept.unpersist(blocking=True)
    failure = executor.commit(HEADER).failure
    assert failure is not None
    assert failure.kind in (FailureKind.ERROR, FailureKind.RETRYABLE)
    assert "finished 0" not in lines(tmp_path / "committer")
    assert len(lines(tmp_path / "before")) == 6


def test_released_and_cancelled_results_leave_no_block(executor: SparkExecutor) -> None:
    context = executor._spark.context
    assert context is not None
    before = persisted(context)
    for attempt in range(1, 4):
        header = AttemptHeader("t", txid=1, attempt_id=attempt, epoch=1, plan_digest="digest")
        assert executor.process(ProcessingJob(header, RANGES, 15)).failure is None
        (executor.release if attempt % 2 else executor.cancel)(header)
    assert executor._results == {}
    assert persisted(context) <= before
    assert executor._reports is not None
    assert executor._reports.value == []


def test_an_attempt_that_was_cancelled_does_not_start(executor: SparkExecutor, tmp_path: Path) -> None:
    executor.cancel(HEADER)
    failure = executor.process(ProcessingJob(HEADER, RANGES, 15)).failure
    assert failure is not None
    assert "cancelled" in failure.message
    assert lines(tmp_path / "before") == []


@pytest.mark.rule("C10")
def test_a_task_that_spark_repeats_fails_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the task of one level and that of a whole phase."""

    class Second:
        def attemptNumber(self) -> int:
            return 1

    monkeypatch.setattr(TaskContext, "get", staticmethod(Second))
    nothing: Any = None
    for task in (
        lambda: _LevelFunction(payload=nothing, phase=nothing, level=0, width=1, reports=nothing, header=nothing)(
            0, []
        ),
        lambda: _CollapsedFunction(nothing)([]),
    ):
        with pytest.raises(InvariantViolation, match="repeated a task inside an attempt"):
            next(task())


@pytest.mark.rule("C10")
def test_spark_is_configured_to_repeat_no_task(executor: SparkExecutor) -> None:
    assert executor._spark.active is not None
    told = executor._spark.context.getConf()
    names = ("spark.task.maxFailures", "spark.stage.maxConsecutiveAttempts", "spark.speculation")
    assert [told.get(name) for name in names] == ["1", "1", "false"]


class Breaks(BatchCount):
    def execute(self, tup: Any) -> None:
        os._exit(3)


def test_a_phase_that_breaks_leaves_no_block(spark: str) -> None:
    builder = TransactionalTopologyBuilder("t", "spout", MemoryTransactionalSpout({0: []}, Fields(word=str), 1), 2)
    builder.set_bolt("breaks", Breaks(), 3).shuffle_grouping("spout")
    made = SparkExecutor(plan_execution(builder.build()), {}, {}, collapse_records_max=0)
    made.start()
    before = persisted(made._spark.context)
    assert made.process(ProcessingJob(HEADER, RANGES, 15)).failure is not None
    assert persisted(made._spark.context) <= before
    made.close()


class Dying(MemoryTransactionalSpout):
    """Ends the first workers that warm up, so many times."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__({0: []}, Fields(word=str), 1)
        self.folder, self.times = str(folder), times

    def reader(self, conf: Any, context: Any) -> Any:
        reader = super().reader(conf, context)
        folder, times = Path(self.folder), self.times

        def warm_up() -> None:
            died = len(list(folder.iterdir()))
            if died < times:
                (folder / str(died)).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        reader.warm_up = warm_up  # type: ignore[method-assign]
        return reader


@pytest.mark.slow
@pytest.mark.parametrize(("times", "starts"), [(1, True), (10, False)])
def test_a_start_survives_the_loss_of_a_worker_that_warms_up(
    spark: str, tmp_path: Path, times: int, starts: bool
) -> None:
    folder = tmp_path / "died"
    folder.mkdir()
    builder = TransactionalTopologyBuilder("t", "spout", Dying(folder, times))
    builder.set_committer_bolt("count", BatchCount()).global_grouping("spout")
    made = SparkExecutor(plan_execution(builder.build()), {}, {}, collapse_records_max=0)
    try:
        if starts:
            made.start()
            assert made.process(ProcessingJob(HEADER, RANGES, 15)).failure is None
        else:
            with pytest.raises(Exception, match="exited unexpectedly|crashed|EOFException"):
                made.start()
            assert len(list(folder.iterdir())) == WARM_UP_TRIES
    finally:
        made.close()


def test_a_worker_that_replaces_a_killed_one_begins_with_ratchet_imported(spark: str) -> None:
    """Otherwise an attempt may time out again and again while its workers are still importing."""
    context = SparkContext._active_spark_context
    assert context is not None
    # Pickled by value: by reference, a worker would import this module, and with it all of Ratchet.
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import os, signal, sys\n"
        "def die(records): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def imported(records): return [(os.getpid(), all(each in sys.modules for each in ('framework', 'spouts', 'sinks')))]\n",
        made,
    )
    with pytest.raises(Exception, match="exited unexpectedly|crashed"):
        context.parallelize([0], 1).mapPartitions(made["die"]).collect()
    found = context.parallelize([0, 1], 2).mapPartitions(made["imported"]).collect()
    assert [each for _, each in found] == [True, True]
