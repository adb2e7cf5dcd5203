"""The daemon that forks Spark's Python workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from framework.execution.spark import daemon

INSTALLED = Path(pyspark.__file__).parent


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    own = [entry for entry in sys.path if not entry.endswith(".zip")]
    monkeypatch.setattr(sys, "path", [*own])
    return sys.path


def test_archives_inside_the_installed_pyspark_leave_the_import_path(path: list[str]) -> None:
    own = list(path)
    path[:0] = [str(INSTALLED / "python/lib/pyspark.zip"), str(INSTALLED / "python/lib/py4j-0.10-src.zip")]
    daemon.prefer_installed()
    assert path == own


def test_archives_of_another_spark_stay(path: list[str], tmp_path: Path) -> None:
    path.insert(0, str(tmp_path / "pyspark.zip"))
    expected = list(path)
    daemon.prefer_installed()
    assert path == expected


def test_without_an_installed_pyspark_the_archives_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = str(INSTALLED / "python/lib/pyspark.zip")
    monkeypatch.setattr(sys, "path", [archive, str(tmp_path)])
    daemon.prefer_installed()
    assert sys.path == [archive, str(tmp_path)]


@pytest.mark.slow
def test_what_workers_need_is_there_before_they_are_forked() -> None:
    program = """
import sys
from framework.execution.spark import daemon
assert "pyspark" not in sys.modules  # else it would be too late to choose where from
daemon.prefer_installed()
daemon.preload()
assert {"pyspark.worker", "spouts", "framework.execution.spark.batch_executor"} <= sys.modules.keys()
assert "pandas" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
