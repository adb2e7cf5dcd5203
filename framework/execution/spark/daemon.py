"""Spark's Python daemon, with Ratchet's packages imported before it forks a worker.

Spark runs this module with ``python -m`` when ``spark.python.daemon.module`` names it, on executors
that find Ratchet at the driver's path. A forked worker begins immediately. A worker that first has
to import every module takes seconds on a loaded machine. If an attempt's workers were killed at its
timeout, the next attempt would time out again before they had begun, and so on for ever.

Import errors are ignored here. The worker meets the same error, and Spark reports it to the driver.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from framework.execution.gc_tuning import collect_rarely
from framework.execution.spark.code_archive import OWN_PACKAGES

#: PySpark's own part of a worker is last: without it, each worker reads it again from an archive.
_NEEDED = ("framework.execution.spark.batch_executor", "framework.execution.spark.auxiliary_jobs", "pyspark.worker")

#: With this variable, Python does not import from the current folder. Ratchet sets it for the
#: daemon, to this value; a value of the user's stays.
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
SAFE_PATH = "ratchet"


def prefer_installed() -> None:
    """Remove those archives of PySpark from the import path that lie inside the installed PySpark.

    Spark puts them first. They contain the same code, but each new worker spends 0.1 s reading the
    archives' lists of files. Archives of another Spark stay.
    """
    archives = [entry for entry in sys.path if entry.endswith(".zip")]
    others = [entry for entry in sys.path if entry not in archives]
    pyspark, py4j = (PathFinder.find_spec(name, others) for name in ("pyspark", "py4j"))
    if pyspark is not None and pyspark.origin is not None and py4j is not None:
        inside = Path(pyspark.origin).resolve().parent
        sys.path[:] = [entry for entry in sys.path if entry in others or inside not in Path(entry).resolve().parents]


def preload() -> None:
    """Import the modules that tasks need. Print nothing to standard output, from which Spark reads
    the daemon's port."""
    with contextlib.redirect_stdout(sys.stderr):
        for name in (*OWN_PACKAGES, *_NEEDED):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    if os.environ.get(SAFE_PATH_VARIABLE) == SAFE_PATH:
        # it was for this process, and not for programs that user code starts
        del os.environ[SAFE_PATH_VARIABLE]
    prefer_installed()
    preload()
    from pyspark import daemon  # only after the import path is known

    collect_rarely()  # exclude the imported objects, which workers share, from garbage collection
    daemon.manager()


if __name__ == "__main__":
    main()
