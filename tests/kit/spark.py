"""The one Spark context of a test process."""

from __future__ import annotations

CLUSTER = "local-cluster[2,1,1024]"


class SparkMasters:
    """The one Spark context that a process can have. It lasts until another master is asked for; a
    test may stop it or start another one."""

    def __init__(self) -> None:
        self._master = ""

    def use(self, master: str) -> str:
        from pyspark import SparkContext

        from framework.execution.spark.spark_context import start_context

        if self._master != master or SparkContext._active_spark_context is None:
            self.stop()
            start_context("ratchet tests", {"spark.master": master})
            self._master = master
        return master

    def stop(self) -> None:
        if self._master:
            from pyspark import SparkContext

            if SparkContext._active_spark_context is not None:
                SparkContext._active_spark_context.stop()
        self._master = ""
