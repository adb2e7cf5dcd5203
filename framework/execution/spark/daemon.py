"""Spark's Python daemon, with Ratchet's packages imported before it forks a worker.

Spark runs this module with ``python -m`` when ``spark.python.daemon.module`` names it, on executors
that find Ratchet where the driver does. A forked worker begins at once. A worker that must first
import everything takes seconds on a loaded machine: an attempt whose workers were killed at its
timeout would time out again before they had begun, and so on for ever.

Import errors are ignored here. The worker meets them again, and there the error reaches the driver.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from framework.execution.gc_tuning import collect_rarely
from framework.execution.spark.code_archive import OWN_PACKAGES

#: PySpark's own part of a worker is last: without it, each worker reads it again, from an archive.
_NEEDED = ("framework.execution.spark.batch_executor", "framework.execution.spark.jobs", "pyspark.worker")


def prefer_installed() -> None:
    """Take the archives of PySpark that lie inside the installed PySpark off the import path.

    Spark puts them first. They hold the same code, but Python reads the list of an archive's files
    anew, in 0.1 s, whenever a worker begins. Archives of another Spark stay.
    """
    archives = [entry for entry in sys.path if entry.endswith(".zip")]
    others = [entry for entry in sys.path if entry not in archives]
    pyspark, py4j = (PathFinder.find_spec(name, others) for name in ("pyspark", "py4j"))
    if pyspark is not None and pyspark.origin is not None and py4j is not None:
        inside = Path(pyspark.origin).resolve().parent
        sys.path[:] = [entry for entry in sys.path if entry in others or inside not in Path(entry).resolve().parents]


def preload() -> None:
    """Import what tasks need. Print nothing to standard output, where Spark reads the daemon's
    port."""
    with contextlib.redirect_stdout(sys.stderr):
        for name in (*OWN_PACKAGES, *_NEEDED):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    prefer_installed()
    preload()
    from pyspark import daemon  # not before it is known where from

    collect_rarely()  # workers share what was imported, and never search it for garbage
    daemon.manager()


if __name__ == "__main__":
    main()
