"""A folder of a table that an intruder may write to: he spoils the table, and nothing else.

Documents of a table have sums, not signatures: he can make any that he likes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from framework import Fields
from framework.errors import CorruptStateError, RatchetError
from framework.topology import FORMER
from sinks import DeltaLakeTable, ParquetTable
from sinks.lake import folder_documents
from sinks.lake.file_table_base import FileTable
from sinks.lake.folder_documents import overwrite, read_document
from tests.kit.file_tables import append, opened

pytestmark = pytest.mark.behaviour("3.5")
FIELDS = Fields(word=str, n=int)
ELSEWHERE = [
    "../secret/x.parquet",
    "a/../../secret/x.parquet",
    "/etc/passwd",
    "file:///etc/passwd",
    "s3://bucket/x.parquet",
    "a\0b",
    "\ud800",
    "",
    7,
    None,
]


def made(kind: type[FileTable], path: Path) -> Any:
    """A table with three transactions, and beside it the folder ``secret`` of somebody else."""
    secret = path.parent / "secret"
    (secret / ".keys").mkdir(parents=True)
    (secret / ".keys" / "id").write_text("key")
    pq.write_table(pa.table({"word": ["secret"], "n": [1]}), secret / "x.parquet")
    table = kind(path)
    table.bind(FIELDS)
    table.prepare("topology")
    for txid in (1, 2, 3):
        append(table, txid, pa.record_batch({"word": [f"w{txid}"], "n": [txid]}))
    return table


@pytest.fixture
def table(tmp_path: Path) -> Any:
    return made(ParquetTable, tmp_path / "table")


@pytest.fixture
def delta(tmp_path: Path) -> Any:
    return made(DeltaLakeTable, tmp_path / "table")


@pytest.fixture(autouse=True)
def nothing_elsewhere_changes(tmp_path: Path) -> Any:
    yield
    assert {str(each.relative_to(tmp_path / "secret")) for each in (tmp_path / "secret").rglob("*")} == {
        ".keys",
        ".keys/id",
        "x.parquet",
    }
    assert (tmp_path / "secret" / ".keys" / "id").read_text() == "key"


def spoil(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a document, with the right sum."""
    document = read_document(path)
    found = change(document)
    overwrite(path, document if found is None else found)


def all_that_is_done_with(table: Any) -> list[Callable[[], object]]:
    def go_on() -> None:
        append(table, 4, pa.record_batch({"word": ["w4"], "n": [4]}))

    def take_back() -> None:
        table.roll_back(opened(table, 3, 2))

    return [
        table.to_table,
        lambda: table.prepare("topology"),
        table.compact,
        lambda: table.vacuum(older_than_s=0),
        go_on,
        *([take_back] if table.can_undo else []),
        table.to_table,
    ]


def refused(table: Any) -> str:
    """Do everything. Returns what was said first; each is done, or refused with what is damaged."""
    said = []
    for each in all_that_is_done_with(table):
        try:
            each()
        except RatchetError as error:
            assert str(table.path) in str(error) and "\n" not in str(error)
            said.append(f"{type(error).__name__} {error}")
    assert said
    return said[0]


@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_a_manifest_that_names_a_file_elsewhere_is_refused(table: Any, name: Any) -> None:
    manifest = table.path / "_manifest" / "000000000003-1-1.json"
    (table.path / "_ratchet" / "files" / "x").write_text("")  # with this name, links "x.parquet" were removed
    spoil(manifest, lambda document: {**document, "files": [[name, 1, 1, []]]})
    with pytest.raises(CorruptStateError, match=f"{manifest}: it names the file .* not in the table's folder"):
        table.to_table()
    refused(table)


@pytest.mark.parametrize("files", [7, "x", [7], [["a"]], [["a", "b", "c", []]], [["a", 1, 1, ["x"]]], [["a", 1, 1, 7]]])
def test_a_manifest_of_another_form_is_refused(table: Any, files: Any) -> None:
    manifest = table.path / "_manifest" / "000000000003-1-1.json"
    spoil(manifest, lambda document: {**document, "files": files})
    assert str(manifest) in refused(table)


@pytest.mark.parametrize("name", [each for each in ELSEWHERE if isinstance(each, str) and each.isprintable()], ids=repr)
def test_a_delta_log_that_names_a_file_elsewhere_is_refused(delta: Any, name: str) -> None:
    log = delta.path / "_delta_log" / "00000000000000000003.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for each in lines:
        if "add" in each:
            each["add"]["path"] = name
    log.write_text("\n".join(map(json.dumps, lines)))
    refused(delta)
    with pytest.raises(RatchetError):
        delta.files()


def test_a_data_file_that_is_a_link_is_not_read(table: Any) -> None:
    for each in (table.path / "_ratchet" / "files").iterdir():
        each.unlink()
        each.symlink_to(table.path.parent / "secret" / "x.parquet")
    assert "a link leads out of the table's folder" in refused(table)
    with pytest.raises(CorruptStateError, match="a link leads out"):
        table.to_table()


@pytest.mark.parametrize("name", ["_ratchet/pending", "_ratchet/files", "_manifest", "_ratchet/compact.lock"])
def test_own_folders_are_no_links(table: Any, name: str) -> None:
    """Otherwise what is in the folder that a link leads to was removed as the table's own."""
    own = table.path / name
    if own.exists():
        own.rename(own.with_name("gone"))
    own.symlink_to(table.path.parent / "secret" / (".keys/id" if name.endswith("lock") else ""))
    assert f"{own}: it is a link" in refused(table)


def test_a_folder_that_is_a_link_is_not_vacuumed(delta: Any) -> None:
    (delta.path / "n=1").symlink_to(delta.path.parent / "secret")
    with pytest.raises(CorruptStateError, match="a link leads out"):
        delta.vacuum(older_than_s=0)


def test_a_generation_is_no_path(table: Any) -> None:
    own = table.path / "_ratchet"
    (table.path / "_manifest.x").mkdir()
    header = read_document(own / f"header-{table._chain._numbers()[-1]:012d}.json")
    overwrite(own / "former-.json", {"header": header, "generation": "x/../../secret"})
    former = ParquetTable(table.path)
    former.become_beside(FORMER)
    with pytest.raises(CorruptStateError, match="is no generation"):
        former.remove("topology")
    with pytest.raises(CorruptStateError, match="is no generation"):
        former.to_table()


@pytest.mark.parametrize(
    "name", ["_ratchet/schema.json", "_ratchet/header-999999999999.json", "_manifest/000000000003-1-1.json"]
)
@pytest.mark.parametrize("form", ["pipe", "device", "huge", "brackets"])
def test_a_document_that_is_no_plain_file_or_huge_is_refused(
    table: Any, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_documents, "DOCUMENT_BYTES_MAX", 1 << 20)
    path = table.path / name
    path.unlink(missing_ok=True)
    if form == "pipe":
        os.mkfifo(path)
    elif form == "device":
        path.symlink_to("/dev/zero")
    elif form == "brackets":
        path.write_text("[" * 200_000)
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 21)
    assert str(path) in refused(ParquetTable(table.path))


def test_a_data_file_that_is_a_pipe_is_not_waited_for(table: Any) -> None:
    each = next((table.path / "_ratchet" / "files").iterdir())
    each.unlink()
    os.mkfifo(each)
    with pytest.raises(CorruptStateError, match="not a plain file"):
        table.to_table()


@pytest.mark.parametrize(
    "name", ["header-²²²²²²²²²²²².json", "header-5.json", f"header-{'9' * 30}.json", "header-x.json"]
)
def test_what_is_not_named_as_a_header_is_none(table: Any, name: str) -> None:
    (table.path / "_ratchet" / name).write_text("{}")
    append(table, 4, pa.record_batch({"word": ["w4"], "n": [4]}))
    assert table.to_table().num_rows == 4


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "zz"},
        {"schema": 7},
        {"schema": "80049529"},
        {"partition_by": 7},
        {"partition_by": ["nosuch"]},
        {"partition_by": [[]]},
        {"format": "x"},
        {"format": -1},
        {"kind": [7]},
    ],
    ids=str,
)
def test_a_shape_of_another_form_is_refused(table: Any, change: dict[str, Any]) -> None:
    path = table.path / "_ratchet" / "schema.json"
    spoil(path, lambda document: {**document, **change})
    refused(ParquetTable(table.path))
