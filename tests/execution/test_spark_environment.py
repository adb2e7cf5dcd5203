"""A start refuses or names variables that another installation of Spark has left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.execution.spark import spark_context


def program(folder: Path, script: str) -> str:
    made = folder / "python"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return str(made)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 2.7", "is Python 2.7, and the driver is Python 3."),
        ("exit 3", "is no Python that runs here: .* exit status 3"),
        (None, "is no Python that runs here: .*No such file"),
    ],
    ids=["another version", "fails", "missing"],
)
def test_another_python_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, problem: str
) -> None:
    named = program(tmp_path, script) if script is not None else str(tmp_path / "python")
    monkeypatch.setenv("PYSPARK_PYTHON", named)
    with pytest.raises(ConfigError, match=problem) as raised:
        spark_context._conf("x", {"spark.master": "local[2]"})
    assert f"PYSPARK_PYTHON={named!r}" in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).endswith(f"unset PYSPARK_PYTHON, or set it to {sys.executable}")


def test_a_python_of_the_same_version_and_those_of_a_cluster_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", program(tmp_path, f'exec {sys.executable} "$@"'))
    spark_context._conf("x", {"spark.master": "local[2]"})
    monkeypatch.setenv("PYSPARK_PYTHON", "./env/bin/python")
    spark_context._conf("x", {"spark.master": "spark://127.0.0.1:7077"})


def test_a_start_that_fails_names_the_variables_that_change_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in spark_context._INFLUENCES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # as Ratchet itself sets it
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))

    def fail(*_: object) -> None:
        raise FileNotFoundError("bin/spark-submit")

    monkeypatch.setattr(spark_context, "_gateway", fail)
    monkeypatch.setattr(spark_context.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(spark_context, "_output", None)  # a JVM that an earlier test started
    with pytest.raises(
        ConfigError, match="does not start .*: bin/spark-submit; .* the environment says by SPARK_HOME$"
    ):
        spark_context.start_context("x", {"spark.master": "local[2]"})
