"""The flights run as a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from examples import flights_data
from framework.transactions import TransactionalState, ZooKeeperStore

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 90.0


class FlightsRun:
    """``python -m framework.run examples.flights:topology`` against given servers, started as often as one likes."""

    def __init__(self, folder: Path, kafka: str, zookeeper: str, spout: str, batch: int, root: str) -> None:
        self.database = folder / "flights.db"
        self.zookeeper = zookeeper
        self.root = root
        self.topology_id = f"flights-{spout}"
        self.log = folder / "run.log"
        self._command = [
            *(sys.executable, "-m", "framework.run", "examples.flights:topology", "--until-caught-up"),
            *("--set", f"app.kafka={kafka}", "--set", f"app.database={self.database}"),
            *("--set", f"app.spout={spout}", "--set", f"app.batch={batch}"),
            *("--set", f"transactional.zookeeper.servers={zookeeper}"),
            *("--set", "transactional.zookeeper.session.timeout.secs=2"),
            *("--set", f"transactional.zookeeper.root={root}"),
            *("--set", "topology.max.spout.pending=2", "--set", "spark.master=local[2]"),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._from = log.tell()
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, words: str) -> bool:
        """Whether this start has printed ``words``."""
        with open(self.log, "rb") as log:
            log.seek(self._from)
            return words.encode() in log.read()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> bool:
        """True when the condition came, False when the process ended first."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                return condition()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s} s in vain; the log ends:\n{self.tail()}")
            time.sleep(0.01)
        return True

    def kill(self) -> bool:
        """kill -9 of the driver, and of nothing else; False when it had ended by itself."""
        assert self.process is not None
        alive = self.process.poll() is None
        if alive:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        return alive

    def end(self) -> None:
        """Whatever is left of it."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self.process.wait(30)

    def finish(self, timeout_s: float = 180) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def committed_txid(self) -> int:
        """The last finished txid, as the database has it; 0 before there is one."""
        if not self.database.exists():
            return 0
        try:
            with sqlite3.connect(self.database) as connection:
                row = connection.execute("SELECT min(done) FROM _ratchet_headers").fetchone()
        except sqlite3.OperationalError:
            return 0
        return row[0] or 0

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def check_exact(self) -> None:
        """The figures of the file, and the invariants that can be seen from outside."""
        carriers, routes = flights_data.committed(self.database)
        wanted_carriers, wanted_routes = flights_data.expected()
        assert carriers == wanted_carriers
        assert routes == wanted_routes
        store = ZooKeeperStore(self.zookeeper, self.root)
        state = TransactionalState(store, self.topology_id)
        currtx = state.get_data("coordinator/currtx")
        documents = state.children("user/flights")
        store.close()
        with sqlite3.connect(self.database) as connection:
            done = [row[0] for row in connection.execute("SELECT done FROM _ratchet_headers")]
            newest = connection.execute("SELECT max(_txid) FROM carriers").fetchone()[0]
        assert done == [currtx - 1, currtx - 1]  # invariant 6
        assert newest <= currtx - 1
        assert str(currtx - 1) in documents  # C15: never the last committed one itself
        assert all(int(document) >= currtx - 1 for document in documents)
