"""A release goes on from the state that each release before it has left, which died in a commit."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from framework import submit
from framework.core.leader_loop import read_record
from framework.inspect.verify import verify
from framework.transactions.documents import committed_txid, read_history
from framework.transactions.undo import undo
from sinks import ParquetTable
from tests.kept import keep_core
from tests.kept.keep import DIED_IN, HERE, ROWS, opened, topology
from tests.kit.state_parts import checkpointed
from tests.kit.waiting import PATIENCE_S
from tests.pipeline.test_undo import held

VERSIONS = sorted(path.parent.name for path in HERE.glob("*/store.json"))


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_topology_goes_on_from_the_state_of_an_earlier_release(version: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    shutil.copytree(HERE / version, folder)
    built = topology(kind, folder)
    store = opened(folder, built)
    assert committed_txid(store, built.id) == DIED_IN - 1
    assert [each.txid for each in read_history(store, built.id)] == [*range(1, DIED_IN)]
    with submit(built, {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    values = {word: [number for other, number in ROWS if other == word] for word in dict(ROWS)}
    wanted = {word: (len(each), sum(each), max(each)) for word, each in values.items()}
    assert held(built) == wanted
    assert sorted(ParquetTable(folder / f"{kind}-rows").to_table().column("n").to_pylist()) == [*range(len(ROWS))]
    assert verify(built, store).right
    undo(built, store)
    with submit(built, {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert held(built) == wanted and verify(built, store).right


@pytest.mark.parametrize("version", VERSIONS)
def test_a_core_topology_goes_on_from_the_checkpoint_of_an_earlier_release(version: str, tmp_path: Path) -> None:
    """The driver died when a checkpoint was prepared and not committed: no word counts twice."""
    folder = tmp_path / "state"
    shutil.copytree(HERE / version, folder)
    store, conf = keep_core.opened(folder), keep_core.settings(folder)
    before = read_record(store, keep_core.NAME)
    assert before is not None and before.txid > 0 and before.prepared and before.pending == before.txid + 1
    words = [[*each, "later"] for each in keep_core.WORDS]
    with submit(keep_core.topology(words), conf, store, "local") as run:
        run.wait_until_idle(PATIENCE_S)
    assert checkpointed(conf, store, keep_core.NAME) == Counter(word for each in words for word in each)


def test_there_is_state_of_a_release() -> None:
    assert "0.1" in VERSIONS
