"""Which line of a user's code an error is blamed on."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from framework.execution.failures import is_users_file
from framework.execution.spark.shipping import make_archive
from tests.kit.processes import ROOT

USERS = """
from framework import Fields


def execute():
    Fields("word", "word")  # refused, inside the framework
"""
WORKER = """
import mine
from framework.execution.failures import users_line
try:
    mine.execute()
except Exception as error:
    print(users_line(error))
"""


def test_in_an_archive_of_code_the_users_file_is_named_and_not_ours(tmp_path: Path) -> None:
    """An executor of a cluster imports everything from one archive, ours and the user's."""
    archive = make_archive(tmp_path)
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr("mine.py", USERS)
    environment = {**os.environ, "PYTHONPATH": f"./{archive.name}"}
    answer = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout == 'mine.py:6: Fields("word", "word")  # refused, inside the framework\n'


def test_files_beside_our_packages_are_the_users() -> None:
    assert is_users_file(str(ROOT / "examples" / "flights.py"))
    assert not is_users_file(str(ROOT / "framework" / "run.py"))
    assert not is_users_file(os.__file__)
