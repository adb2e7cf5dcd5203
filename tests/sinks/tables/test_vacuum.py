"""Vacuum removes only files that nobody needs: not those of a reader that has begun,
or of a live attempt.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from framework import Fields
from sinks import DeltaLakeTable, ParquetTable
from sinks.lake.file_table_base import FileTable
from tests.kit.file_tables import append, granted, opened

pytestmark = pytest.mark.behaviour("3.5")
FIELDS = Fields(n=int)


@pytest.fixture(params=[ParquetTable, DeltaLakeTable], ids=lambda each: each.__name__)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> FileTable:
    made: FileTable = request.param(tmp_path / "table")
    made.bind(FIELDS)
    made.prepare("topology")
    return made


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": list(numbers)})


def numbers_in(table: pa.Table) -> list[int]:
    return sorted(table.column("n").to_pylist())


def data_files(table: FileTable) -> list[Path]:
    return sorted(
        (table.path / "_ratchet" / "files").glob("*")
        if isinstance(table, ParquetTable)
        else table.path.glob("*.parquet")
    )


@pytest.mark.parametrize("grace_s", [1.0, 3_599.0])
def test_a_reader_that_began_before_a_compaction_reads_to_its_end(table: FileTable, grace_s: float) -> None:
    for txid in range(1, 6):
        append(table, txid, batch(txid))
    for each in data_files(table):
        os.utime(each, (0, 0))  # written long ago, but needed until now
    reader = table.dataset()
    assert table.compact() != (5, 5)
    table.vacuum(older_than_s=grace_s)
    assert numbers_in(reader.to_table()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("finished", [False, True])
def test_vacuum_keeps_the_files_that_an_attempt_is_writing(table: FileTable, finished: bool) -> None:
    """Also files of an attempt that repeats a finished transaction,
    since the driver died before ZooKeeper knew of it.
    """
    append(table, 1, batch(1))
    if finished:
        header = opened(table, 2, 1)
        table.raise_header(header, header.finished(2))
    header = opened(table, 2, 2)
    table.write(granted(header), [batch(2)])
    for each in data_files(table):
        os.utime(each, (0, 0))
    table.vacuum(older_than_s=0)
    table.publish(header)
    assert numbers_in(table.to_table()) == [1, 2]


def test_vacuum_removes_files_that_were_not_needed_for_the_given_time(
    table: FileTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = opened(table, 1, 1)
    table.write(granted(dead), [batch(0)])
    for txid in range(1, 6):
        append(table, txid, batch(txid), attempt=2)
    table.compact()
    append(table, 6, batch(6))
    needed = len(table.files())
    table.vacuum(older_than_s=3_600)
    assert len(data_files(table)) > needed
    if isinstance(table, ParquetTable):
        later = time.time() + 3_601
        monkeypatch.setattr(time, "time", lambda: later)
        assert table.vacuum(older_than_s=3_600) > 0
    else:
        table.vacuum(older_than_s=0)
    assert len(data_files(table)) == needed
    assert numbers_in(table.to_table()) == [1, 2, 3, 4, 5, 6]
