"""The JVM of Spark that is started while other things are done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S

CODE = """
import psutil
from framework.execution.spark.spark_context import launch_ahead, start_context
from tests.kit.processes import commands_below

ahead = {"spark.master": "local[1]", "spark.driver.memory": "600m"}
launch_ahead(ahead)
context = start_context("test", {**ahead, **OTHERS})
assert context.parallelize([1, 2], 1).sum() == 3
jvms = sum("SparkSubmit" in each for each in commands_below(psutil.Process()))
print(jvms, context.getConf().get("spark.driver.memory"), context.appName)
context.stop()
"""


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("others", "said"),
    [
        ("{}", "1 600m test"),
        # The memory of a JVM is settled when it starts: one with other settings does not serve.
        pytest.param("{'spark.driver.memory': '700m'}", "2 700m test", marks=pytest.mark.slow),
    ],
)
def test_a_jvm_that_was_started_ahead_is_the_one_that_is_used(others: str, said: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", CODE.replace("OTHERS", others)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert answer.stdout.strip() == said
