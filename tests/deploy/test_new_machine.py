"""A new machine without this repository: what a user types, from nothing to the first row. The
times are printed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from integration.docker_engine import OWNER_LABEL, engine
from integration.server import free_port
from tests.commands.test_first_steps import commands
from tests.kit import shipped

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.kills, pytest.mark.slow]

#: What the README asks for, on a bare Debian; and SQLite's shell, to see the row.
PROGRAMS = [
    "apt-get -qq update",
    "apt-get -qq install -y --no-install-recommends python3-venv openjdk-17-jre-headless sqlite3 >/dev/null 2>&1",
]


def test_a_new_machine_has_its_first_row_after_these_commands() -> None:
    wheel = shipped.native_wheel()
    kafka, zookeeper = free_port(), free_port()
    install = ["python3 -m venv ~/venv", f"~/venv/bin/pip install -q /mnt/{wheel.name}"]
    first, *others = commands()
    ports = f'cd ~/orders && sed -i \'s/:9092/:{kafka}/; s/"127.0.0.1"/"127.0.0.1:{zookeeper}"/\' ratchet.toml'
    typed = [first.removesuffix(" && cd orders"), ports]
    typed += [each.replace("9092 ", f"{kafka} ").replace("2181", str(zookeeper)) for each in others]
    typed.append("sqlite3 orders.db 'SELECT customer, orders, cents FROM totals_live ORDER BY customer'")
    client: Any = engine()
    machine = client.containers.run(
        shipped.debian(),
        ["sleep", "infinity"],
        detach=True,
        init=True,
        network_mode="host",
        labels={OWNER_LABEL: "test"},
        environment={"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"},
        volumes={str(wheel): {"bind": f"/mnt/{wheel.name}", "mode": "ro"}},
    )
    try:
        assert machine.exec_run(["ls", "/mnt"])[1].decode().split() == [wheel.name]
        assert machine.exec_run(["update-ca-certificates"])[0] == 0  # Java takes them from there, when it is installed
        began = time.monotonic()
        for number, command in enumerate([*PROGRAMS, *install, *typed]):
            place = "~" if number <= len(PROGRAMS) + len(install) else "~/orders"
            at = time.monotonic()
            shell = ["bash", "-c", f"export PATH=~/venv/bin:$PATH; cd {place} && {command}"]
            status, said = machine.exec_run(shell)
            print(json.dumps({"typed": command, "s": round(time.monotonic() - at, 1)}))
            assert status == 0, said.decode()[-4_000:]
        print(json.dumps({"from nothing to a row, s": round(time.monotonic() - began, 1)}))
        assert said.decode().split() == ["ann|2|300", "bob|1|100", "cid|1|999"]
    finally:
        machine.exec_run(["bash", "-c", "cd ~/orders && ~/venv/bin/ratchet servers down"])
        machine.remove(force=True)
