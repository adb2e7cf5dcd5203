"""State that a release has left behind, so that later ones can be tried on it.

``python -m tests.kept.keep VERSION`` makes the folder of the version that is checked out. Do it
once, when the version is released, and never again: the folder is what users have.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore, TransactionalState
from framework.transactions.documents import differences_to_state
from sinks import (
    AppendCommitter,
    Count,
    Max,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.replays import FIELDS, Same
from tests.kit.waiting import PATIENCE_S

HERE = Path(__file__).parent
ROWS = [[f"w{number % 5}", number] for number in range(40)]
FOLDER = "@FOLDER@"
TAKEN = 3  # rows per partition and batch
DIED_IN = 5  # the transaction in whose commit the driver died


def topology(kind: str, folder: Path, committer: type[StateCommitter] = StateCommitter) -> Topology:
    """``kind``: opaque or transactional. Counts per word in SQLite, and the rows in Parquet."""
    opaque = kind == "opaque"
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)(
        {0: ROWS[:25], 1: ROWS[25:]}, FIELDS, TAKEN
    )
    builder = TransactionalTopologyBuilder(f"kept-{kind}", "spout", spout, 2)
    builder.set_bolt("same", Same(), 2).shuffle_grouping("spout")
    state = (OpaqueMapState if opaque else TransactionalMapState)(SqliteBackend(folder / f"{kind}.db", "words"))
    words = committer(state, ["word"], {"count": Count(), "total": Sum("n"), "most": Max("n")})
    builder.set_bolt("words", words, 2).fields_grouping("same", Fields("word"))
    rows = AppendCommitter(ParquetTable(folder / f"{kind}-rows", partition_by=["word"]))
    builder.set_bolt("rows", rows).global_grouping("same")
    return builder.build()


class Dies(StateCommitter):
    """Its second task never writes in one transaction, so the commit stays open."""

    def finish_batch(self) -> Any:
        if self._attempt is not None and self._attempt.txid == DIED_IN and self._task == 1:
            raise SystemExit("the driver dies")
        return super().finish_batch()

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        super().prepare(conf, context, collector, batch_id)
        self._task = context.task_index


def keep(folder: Path) -> None:
    store = MemoryStore()
    for kind in ("opaque", "transactional"):
        with submit(topology(kind, folder, Dies), {"topology.max.attempts": 1}, store, "local") as run:
            run.wait_for_commit(DIED_IN - 1, PATIENCE_S)
            try:
                run.wait_until_caught_up(PATIENCE_S)
            except Exception as error:  # noqa: BLE001 - it must fail, whatever the reason
                print(f"{kind}: {error}")
    nodes = {path: data.decode().replace(str(folder), FOLDER) for path, data in sorted(store._nodes.items())}
    (folder / "store.json").write_text(json.dumps({"nodes": nodes, "epochs": store._epochs}, indent=1))


def opened(folder: Path, built: Topology) -> MemoryStore:
    """The coordination store that was kept, as if the state had been in this folder: that it is
    somewhere else now is the only change of the topology.
    """
    found = json.loads((folder / "store.json").read_text())
    store = MemoryStore()
    store._nodes = {path: text.replace(FOLDER, str(folder)).encode() for path, text in found["nodes"].items()}
    store._epochs = found["epochs"]
    assert not differences_to_state(store, built)
    state = TransactionalState(store, built.id)
    state.set_data("meta", {**state.get_data("meta"), "outline": built.outline(), "digest": built.digest()})
    return store


if __name__ == "__main__":
    target = HERE / sys.argv[1]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    keep(target)
