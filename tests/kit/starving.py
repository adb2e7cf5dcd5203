"""The tests with the processor taken away: ``make test-starved``.

``stress-ng`` computes beside them, and every few seconds a process below pytest is stopped for ten
seconds, as a busy host would. A test that fails here waits too little, or counts on speed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import psutil

from integration.server_programs import find_program
from tests.kit.processes import ROOT

STOPPED_S = 10.0
#: Between two stops, at least and at most.
PAUSE_S = (2.0, 15.0)


@contextlib.contextmanager
def busy_processor(cpus: int) -> Iterator[None]:
    """Other programs compute. Installs the package where it is missing and this may. With 0 the
    host is busy already."""
    if not cpus:
        yield
        return
    command = [find_program("stress-ng", "stress-ng"), "--quiet", "--cpu", str(cpus)]
    hog = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(hog.pid, signal.SIGKILL)
        hog.wait()


class Stopping(threading.Thread):
    """Stops one process below ``parent`` after the other, each for ``STOPPED_S``."""

    def __init__(self, parent: int, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.stopped: list[str] = []
        self._parent = psutil.Process(parent)
        self._chance = chance
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._chance.uniform(*PAUSE_S)):
            with contextlib.suppress(psutil.Error):
                self._stop_one()

    def end(self) -> None:
        self._over.set()
        self.join()

    def _stop_one(self) -> None:
        # A process that is stopped already was stopped by a test: it is not ours to wake.
        below = [each for each in self._parent.children(recursive=True) if each.status() != psutil.STATUS_STOPPED]
        if not below:
            return
        victim = self._chance.choice(sorted(below, key=lambda each: each.pid))
        name = " ".join(victim.cmdline()[-2:])[-60:]
        victim.suspend()
        try:
            self.stopped.append(name)
            self._over.wait(STOPPED_S)
        finally:
            victim.resume()


def run_starved(arguments: Sequence[str], seed: int, cpus: int) -> int:
    """Run pytest once. Returns its exit status."""
    command = [sys.executable, "-m", "pytest", *arguments]
    with busy_processor(cpus):
        tests = subprocess.Popen(command, cwd=ROOT)
        stopping = Stopping(tests.pid, random.Random(seed))
        stopping.start()
        try:
            return tests.wait()
        finally:
            stopping.end()
            tests.terminate()
            print(f"seed {seed}: {len(stopping.stopped)} processes were stopped for {STOPPED_S:g} s each", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.starving", description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="run the tests so often")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next has the next one")
    parser.add_argument(
        "--cpu",
        type=int,
        default=2 * (os.cpu_count() or 1),
        help="processes that compute beside the tests; 0 where the host is busy",
    )
    parser.add_argument("pytest", nargs="*", help="what pytest is told")
    chosen = parser.parse_args(words)
    seeds = range(chosen.seed, chosen.seed + chosen.times)
    red = [seed for seed in seeds if run_starved(chosen.pytest, seed, chosen.cpu) != 0]
    print(f"{len(seeds) - len(red)} of {len(seeds)} runs were green" + (f"; red: seeds {red}" if red else ""))
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
