"""The demo behind ``make run``, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.demo.flights_data import FLIGHTS
from tests.kit.processes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.kills, pytest.mark.slow]


@pytest.mark.behaviour("6.1", "6.3")
def test_the_demo_starts_its_servers_commits_every_flight_and_compares(tmp_path: Path) -> None:
    def demo() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "framework.run", "--json", "--set", f"app.folder={tmp_path}"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "COLUMNS": "200"}, check=False
        )
        assert done.returncode == 0, done.stderr[-4_000:]
        assert "exactly the figures of the CSV file" in done.stderr
        return done

    first = demo()
    assert f"sent {FLIGHTS:,} flights to the Kafka topic" in first.stderr
    shown = [json.loads(line) for line in first.stdout.splitlines()]
    assert (shown[-1]["phase"], shown[-1]["committed_rows"], shown[-1]["lag"]) == ("stopped", FLIGHTS, 0)
    assert f"all {FLIGHTS:,} flights are in the Kafka topic" in demo().stderr  # it goes on where it ended
