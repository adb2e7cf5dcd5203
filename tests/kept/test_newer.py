"""State of a later release is refused plainly, and stays as it is: one test for each kind of
document.

That of the ready-made backends: ``BackendContract``. Of a table's shape:
``tests/sinks/tables/test_partitions.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import CoreTopologyFailed, Topology, submit
from framework.commands.state import SNAPSHOT_FORMAT, _header
from framework.coordination.transactional_state import FORMAT
from framework.core.checkpoint_record import FORMAT as RECORD_FORMAT
from framework.core.leader_loop import CHECKPOINT, read_record
from framework.errors import ConfigError, CorruptStateError, RatchetError
from framework.topology.fencing import FORMAT as HEADER_FORMAT
from framework.transactions import MemoryStore
from framework.transactions.documents import read_history
from sinks import ParquetTable
from sinks.kafka.markers import MARKER_FORMAT, Marker, _parsed
from sinks.lake.folder_documents import FORMAT as TABLE_FORMAT
from sinks.lake.folder_documents import overwrite, read_document
from tests.kept import keep_core
from tests.kept.keep import DIED_IN, HERE, opened, topology
from tests.kit.waiting import PATIENCE_S

LATER = 99
#: What a driver reads before it goes on. The rest of a topology's documents has the same form.
NODES = ("currtx", "attempts", "incarnation", "meta", "origin", f"spout/{DIED_IN}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / "0.1", tmp_path / "state"))


def started(built: Topology, store: MemoryStore) -> None:
    with submit(built, {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", NODES)
def test_a_znode_is_refused_and_nothing_is_written(name: str, folder: Path) -> None:
    built = topology("opaque", folder)
    store = opened(folder, built)
    (node,) = [path for path in store._nodes if path.startswith(f"/{built.id}/") and path.endswith(f"/{name}")]
    store._nodes[node] = json.dumps({**json.loads(store._nodes[node]), "format": LATER}).encode()
    before = dict(store._nodes), contents(folder)
    with pytest.raises(CorruptStateError, match=f"{name}: format version 99, and this Ratchet knows up to {FORMAT}"):
        started(built, store)
    assert (dict(store._nodes), contents(folder)) == before


def test_a_record_of_the_history_is_refused(folder: Path) -> None:
    built = topology("opaque", folder)
    store = opened(folder, built)
    node = f"/{built.id}/history/001"
    store._nodes[node] = json.dumps({**json.loads(store._nodes[node]), "format": LATER}).encode()
    with pytest.raises(CorruptStateError, match="history/001: format version 99"):
        read_history(store, built.id)


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


DOCUMENTS = ("_ratchet/header-*", "_ratchet/schema.json", "_manifest/*")


@pytest.mark.parametrize("pattern", DOCUMENTS)
def test_a_document_of_a_table_of_files_is_refused(pattern: str, folder: Path) -> None:
    built = topology("opaque", folder)
    store = opened(folder, built)
    table = folder / "opaque-rows"
    newest = sorted(table.glob(pattern))[-1]
    changed(newest, lambda found: found.update(format=LATER))
    expected = f"{newest.name}: document format 99, and this Ratchet knows {TABLE_FORMAT}"
    with pytest.raises(RatchetError, match=expected):
        started(built, store)
        ParquetTable(table).to_table()


def test_a_header_in_a_table_of_files_is_refused(folder: Path) -> None:
    """Its own format, beside that of documents."""
    newest = sorted((folder / "opaque-rows" / "_ratchet").glob("header-*"))[-1]
    overwrite(newest, {**read_document(newest), "format": LATER})
    built = topology("opaque", folder)
    with pytest.raises(CorruptStateError, match=f"header format 99, and this Ratchet knows {HEADER_FORMAT}"):
        started(built, opened(folder, built))


def test_a_marker_in_kafka_is_refused() -> None:
    marker = Marker(topology_id="t", writer="sink/0", epoch=1, txid=1, attempt_id=1, plan_digest="digest")
    assert _parsed(marker.document, "markers") == marker
    later = json.dumps({**json.loads(marker.document), "format": LATER}).encode()
    with pytest.raises(CorruptStateError, match=f"markers: format 99, and this Ratchet knows up to {MARKER_FORMAT}"):
        _parsed(later, "markers")


@pytest.mark.parametrize("of_the_record", [False, True], ids=["its znode", "the record"])
def test_a_record_of_checkpoints_is_refused_and_the_state_stays(of_the_record: bool, folder: Path) -> None:
    store = keep_core.opened(folder)
    node = f"/{keep_core.NAME}/{CHECKPOINT}"
    found = json.loads(store._nodes[node])
    if of_the_record:
        found["value"]["format"] = LATER
    else:
        found["format"] = LATER
    store._nodes[node] = json.dumps(found).encode()
    before = dict(store._nodes), {path: path.read_bytes() for path in folder.rglob("data.mdb")}
    knows = f"this one reads {RECORD_FORMAT}" if of_the_record else f"this Ratchet knows up to {FORMAT}"
    with pytest.raises((CorruptStateError, CoreTopologyFailed), match=f"format.* 99.*{knows}"):
        submit(keep_core.topology(), keep_core.settings(folder), store, "local").join(PATIENCE_S)
    with pytest.raises(CorruptStateError, match="99"):
        read_record(store, keep_core.NAME)
    assert (dict(store._nodes), {path: path.read_bytes() for path in folder.rglob("data.mdb")}) == before


def test_a_snapshot_of_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"x is of format ratchet-state-99, and this Ratchet knows {SNAPSHOT_FORMAT}"):
        _header(iter([{"format": "ratchet-state-99"}]), Path("x"))
