"""Spark's Python daemon, with Ratchet's packages imported before it forks a worker.

Spark runs ``python -m`` this module where ``spark.python.daemon.module`` names it, on executors that find Ratchet where the driver
does. A worker that is forked from it begins at once. One that has to import everything first takes seconds on a loaded machine:
an attempt whose workers were killed after its timeout would time out again before they had begun, and so on for ever.

What cannot be imported here is left to the worker, where the error reaches the driver.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from pyspark import daemon

from framework.execution.spark.shipping import OWN_PACKAGES


def preload() -> None:
    """Import what tasks need. Nothing is printed to standard output: Spark reads the daemon's port from there."""
    with contextlib.redirect_stdout(sys.stderr):
        for name in (*OWN_PACKAGES, "framework.execution.spark.batches", "framework.execution.spark.rounds"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


if __name__ == "__main__":
    preload()
    daemon.manager()
