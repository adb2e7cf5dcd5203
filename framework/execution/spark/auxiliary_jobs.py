"""Runs Spark jobs other than batches: one task, one task per item, or a chain of levels with
shuffles between them.

The caller passes in the code to run. Only the workers persist between jobs. No task is repeated:
when Spark repeats one, the repetition fails, and its job counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark import RDD
from pyspark.errors import PySparkException

from framework.errors import InvariantViolation, RetryableError
from framework.execution.spark.batch_executor import by_partition, refuse_repetition
from framework.execution.spark.spark_context import PROCESSING_POOL, Spark
from framework.execution.spark.worker_errors import python_part

T = TypeVar("T")
Item = TypeVar("Item")
#: One task of a chain. Arguments: level, partition, and the records that arrived. Returns records,
#: each with its partition in the next level.
LevelTask = Callable[[int, int, Sequence[Any]], Iterable[tuple[int, Any]]]


class SparkJobs:
    """Runs jobs. Methods that run a job raise ``RetryableError``, with Python's message, when the
    job was lost, and ``InvariantViolation`` when a task found a bug."""

    def __init__(self, app_name: str, settings: Mapping[str, str]) -> None:
        self._spark = Spark(app_name, settings)

    def start(self) -> None:
        """Start Spark. Raises ``ConfigError`` when it does not start."""
        self._spark.start()

    @property
    def slots(self) -> int:
        """The number of tasks that can run concurrently."""
        return max(int(self._spark.context.defaultParallelism), 1)

    @property
    def local(self) -> bool:
        """Whether the only executor is in this process's own Spark."""
        return self._spark.local

    @property
    def executors_follow_jobs(self) -> bool:
        """Whether Spark ends executors that run no job."""
        return str(self._spark.context.getConf().get("spark.dynamicAllocation.enabled", "false")).lower() == "true"

    @property
    def driver_host(self) -> str:
        return self._spark.driver_host

    def one(self, function: Callable[[], list[T]]) -> list[T]:
        """Run a function in one task."""
        results: list[list[T]] = self.each([None], _Ignoring(function))
        return results[0]

    def each(self, items: Sequence[Item], function: Callable[[Item], T]) -> list[T]:
        """Run a function for each item, in a task of its own. Returns the results in the order of
        the items."""
        rdd = self._spark.context.parallelize(list(items), len(items))
        return self._collected(rdd.mapPartitions(_Each(function)))

    def chain(self, widths: Sequence[int], task: LevelTask) -> list[Any]:
        """Run ``widths[level]`` tasks of each level, with a shuffle between levels. Returns the
        records that leave the last level."""
        rdd: RDD[Any] = self._spark.context.parallelize(range(widths[0]), widths[0]).mapPartitions(_no_records)
        for level, width in enumerate(widths):
            if level:
                rdd = rdd.partitionBy(width, by_partition)
            rdd = rdd.mapPartitionsWithIndex(_Level(task, level))
        addressed: list[tuple[int, Any]] = self._collected(rdd)
        return [record for _, record in addressed]

    def close(self) -> None:
        self._spark.stop()

    def _collected(self, rdd: RDD[T]) -> list[T]:
        try:
            self._spark.context.setLocalProperty("spark.scheduler.pool", PROCESSING_POOL)
            collected: list[T] = rdd.collect()
        except (Py4JError, PySparkException, OSError, EOFError) as error:
            lines = python_part(error)
            reason = lines[-1] if lines else f"{type(error).__name__}: {error}"
            if InvariantViolation.__name__ in reason:
                raise InvariantViolation(reason) from error
            raise RetryableError(f"Spark: {reason}") from error
        return collected


class _Ignoring:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __call__(self, item: None) -> Any:
        return self.function()


class _Each:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        _only_once()
        for item in list(items):
            yield self.function(item)


class _Level:
    def __init__(self, task: LevelTask, level: int) -> None:
        self.task = task
        self.level = level

    def __call__(self, partition: int, records: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        _only_once()
        yield from self.task(self.level, partition, [record for _, record in records])


def _only_once() -> None:
    """Raise ``RetryableError`` in a task that Spark repeats. Its first execution lost its executor,
    so the job counts as lost too."""
    try:
        refuse_repetition()
    except InvariantViolation as error:
        raise RetryableError(str(error)) from None


def _no_records(items: Iterable[int]) -> Iterator[tuple[int, Any]]:
    for _ in items:
        pass
    return iter(())
