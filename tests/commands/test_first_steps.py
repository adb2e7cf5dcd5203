"""The first commands of the README, as a new user types them."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from integration.server import free_port
from tests.kit.processes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.kills, pytest.mark.slow]


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## From nothing to a row\n.*?```sh\n(.*?)```", text, re.DOTALL)
    return block.splitlines()


def test_five_commands_lead_from_nothing_to_a_row(tmp_path: Path) -> None:
    """On other ports than the usual ones, which may be taken."""
    kafka, zookeeper = free_port(), free_port()
    first, *others = commands()
    assert len(others) == 4
    script = "\n".join(
        [first, f'sed -i \'s/:9092/:{kafka}/; s/"127.0.0.1"/"127.0.0.1:{zookeeper}"/\' ratchet.toml', *others]
    )
    script = script.replace("9092 ", f"{kafka} ").replace("2181", str(zookeeper))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARN" not in done.stderr  # Spark's own lines are in its log file
        with sqlite3.connect(tmp_path / "orders" / "orders.db") as connection:
            rows = connection.execute("SELECT customer, orders, cents FROM totals ORDER BY customer").fetchall()
        assert rows == [("ann", 2, 300), ("bob", 1, 100), ("cid", 1, 999)]
    finally:
        subprocess.run(
            ["bash", "-c", "cd orders && ratchet servers down"],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            check=False,
        )
