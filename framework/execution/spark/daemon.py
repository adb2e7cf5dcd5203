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

from pyspark import daemon

from framework.execution.spark.shipping import OWN_PACKAGES


def preload() -> None:
    """Import what tasks need. Print nothing to standard output, where Spark reads the daemon's
    port."""
    with contextlib.redirect_stdout(sys.stderr):
        for name in (*OWN_PACKAGES, "framework.execution.spark.batches", "framework.execution.spark.rounds"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


if __name__ == "__main__":
    preload()
    daemon.manager()
