"""State of a core topology that a release has left behind: its record of checkpoints in
``core.json``, what its bolt holds in the folder ``core``, in LMDB.

``python -m tests.kept.keep_core VERSION``: as ``keep``, once for each release.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from framework import CoreTopology, submit
from framework.core.checkpoint_record import CheckpointRecord
from framework.core.leader_loop import _RecordLog
from framework.transactions import MemoryStore
from tests.kept.keep import HERE
from tests.kit.state_parts import Log, counting, lmdb
from tests.kit.waiting import PATIENCE_S

NAME = "kept-core"
WORDS = [[f"w{number % 7}" for number in range(part, part + 30)] for part in (0, 3)]


class Gone(BaseException):
    """The driver's process dies, and its task workers with it."""


def topology(words: list[list[str]] = WORDS) -> CoreTopology:
    return counting(NAME, Log(NAME, words))


def settings(folder: Path) -> dict[str, Any]:
    return lmdb(folder / "core")


def keep(folder: Path) -> None:
    """The half of the words is counted and committed, the other half prepared: there it dies."""
    store = MemoryStore()
    with submit(topology([each[: len(each) // 2] for each in WORDS]), settings(folder), store, "local") as run:
        run.wait_until_idle(PATIENCE_S)
    real = _RecordLog.save

    def save(log: _RecordLog, record: CheckpointRecord) -> None:
        real(log, record)
        if record.prepared:
            raise Gone

    with patch.object(_RecordLog, "save", save):
        run = submit(topology(), settings(folder), store, "local")
        try:
            run.join(PATIENCE_S)
        except Gone:
            print("the driver died")
    nodes = {path: data.decode() for path, data in sorted(store._nodes.items()) if "/drivers/" not in path}
    (folder / "core.json").write_text(json.dumps({"nodes": nodes, "epochs": store._epochs}, indent=1))
    for lock in (folder / "core").rglob("lock.mdb"):
        lock.unlink()


def opened(folder: Path) -> MemoryStore:
    """The coordination store that was kept."""
    found = json.loads((folder / "core.json").read_text())
    store = MemoryStore()
    store._nodes = {path: text.encode() for path, text in found["nodes"].items()}
    store._epochs = found["epochs"]
    return store


if __name__ == "__main__":
    target = HERE / sys.argv[1]
    shutil.rmtree(target / "core", ignore_errors=True)
    keep(target)
