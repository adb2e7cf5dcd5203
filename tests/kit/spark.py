"""The one Spark context of a test process."""

from __future__ import annotations

from typing import Any

CLUSTER = "local-cluster[2,1,1024]"


class SparkMasters:
    """The one Spark context that a process can have. It lasts until another master is asked for."""

    def __init__(self) -> None:
        self._master = ""
        self._context: Any = None

    def use(self, master: str) -> str:
        from pyspark import SparkContext

        from framework.execution.spark.spark_context import start_context

        if self._master != master or SparkContext._active_spark_context is not self._context:
            self.stop()
            self._context = start_context("ratchet tests", {"spark.master": master})
            self._master = master
        return master

    def stop(self) -> None:
        if self._context is not None:
            self._context.stop()
        self._context, self._master = None, ""
