"""What a commit sends downstream waits in a file if it is much, and arrives all the same."""

from __future__ import annotations

import gc
import io
import os
import pickle
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from framework import (
    ArrowBolt,
    Committer,
    Fields,
    OutputFieldsDeclarer,
    Topology,
    TransactionalTopologyBuilder,
    arrow_spill,
    submit,
)
from framework.arrow_spill import RowBuffer, SpillFile
from framework.errors import RetryableError
from framework.transactions import MemoryStore
from sinks import (
    AppendCommitter,
    Count,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    SqliteTable,
    StateCommitter,
    UpsertCommitter,
    key_hash_parts,
    state_committer,
)
from sinks.rows import transactional_table
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.runners import SPREAD_ONLY, start
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C44")
ROW = Fields(id=int, text=str)
#: Batches that the first committer sends for each record.
PAGES = 20
PAGE_ROWS = 50


def page(first: int, text: str = "x") -> pa.RecordBatch:
    ids = pa.array(range(first, first + PAGE_ROWS), pa.int64())
    return pa.record_batch([ids, pa.array([text] * PAGE_ROWS)], names=["id", "text"])


def test_rows_come_out_in_order_and_again_and_through_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", 2 * page(0).nbytes)
    buffer = RowBuffer("rows: more come")
    batches = [page(number * PAGE_ROWS) for number in range(9)]
    for each in batches:
        buffer.append(each)
    assert buffer.is_large and len(buffer) == 9 and buffer.nbytes == sum(each.nbytes for each in batches)
    assert list(buffer) == list(buffer) == batches
    again = pickle.loads(pickle.dumps(buffer))
    assert list(again) == batches and (again.nbytes, again.is_large) == (buffer.nbytes, True)


def test_pickled_rows_are_compressed_as_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", 0)
    buffer = RowBuffer("rows: more come", [page(number, "x" * 10_000) for number in range(9)])
    pickled = pickle.dumps(buffer)
    assert len(pickled) < buffer.nbytes // 20
    assert list(pickle.loads(pickled)) == list(buffer)


def test_few_rows_make_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_spill.tempfile, "TemporaryFile", None)
    assert not RowBuffer("rows: more come", [page(0), page(1)]).is_large


def test_few_rows_of_large_batches_do_not_keep_these_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 20
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", 5 * size // 2)
    before = pa.total_allocated_bytes()
    buffer = RowBuffer("rows: more come")
    for _ in range(20):
        whole = pa.record_batch([pa.array(list(range(size // 8)), pa.int64())], names=["id"])
        buffer.append(whole.slice(10))  # most rows of a batch go to one task, and few to another
        buffer.append(whole.slice(0, 10))
    del whole
    assert pa.total_allocated_bytes() - before < 4 * size
    assert [each.num_rows for each in buffer] == [size // 8 - 10, 10] * 20


def test_an_interrupted_write_leaves_what_is_written_later_right(monkeypatch: pytest.MonkeyPatch) -> None:
    file, write, calls = SpillFile("rows: more come"), os.pwrite, []

    def full_at_third(number: int, content: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(number, content[:3], at)

    monkeypatch.setattr(os, "pwrite", full_at_third)
    first = file.append(b"abc")
    with pytest.raises(RetryableError, match="No space left on device"):
        file.append(b"defghi")
    later = file.append(b"jklmno")
    assert file.read(first, 3) + file.read(later, 6) == b"abcjklmno" and file.end == 9


def test_without_a_folder_for_files_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere/at/all"])
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", 0)
    with pytest.raises(
        RetryableError, match=r"^rows: more come than fit in memory, and no folder .*set TMPDIR to another"
    ):
        RowBuffer("rows: more come").append(page(0))


class Falling(ArrowBolt, Committer):
    """Sends ``PAGES`` pages for each record in the commit phase, as rows that fall due together.
    ``memory``: the most bytes that buffers of its process have in memory."""

    deterministic = True

    def __init__(self, memory: int, text: str = "x") -> None:
        self.memory, self.text = memory, text

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        arrow_spill.MEMORY_BYTES = self.memory
        self.firsts: list[int] = []

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        self.firsts += batch.column("id").to_pylist()

    def finish_batch(self) -> Iterator[pa.RecordBatch]:
        for first in self.firsts:
            for number in range(PAGES):
                yield page((first * PAGES + number) * PAGE_ROWS, self.text)

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(ROW)


class Halved(ArrowBolt):
    """Makes the ids of two pages equal: the later one of an id counts."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch.set_column(0, "id", pa.array([each // 2 for each in batch.column("id").to_pylist()], pa.int64()))

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(ROW)


RECORDS = 6
SENT = [*range(RECORDS * PAGES * PAGE_ROWS)]


def falling(folder: Path, memory: int) -> Topology:
    """Rows that pass a level on their way (``files``), and rows that a bolt makes (``newest``)."""
    spout = OpaqueMemoryTransactionalSpout({0: [[each] for each in range(RECORDS)]}, Fields(id=int), 3)
    builder = TransactionalTopologyBuilder("falling", "spout", spout)
    builder.set_bolt("falling", Falling(memory), 2).fields_grouping("spout", Fields("id"))
    builder.set_bolt("halved", Halved(), 3).fields_grouping("falling", Fields("id"))
    newest = UpsertCommitter(SqliteTable(folder / "rows.db", "newest"), ["id"])
    builder.set_bolt("newest", newest, 2).fields_grouping("halved", Fields("id"))
    rows = AppendCommitter(SqliteTable(folder / "rows.db", "appended"))
    builder.set_bolt("rows", rows).global_grouping("falling")
    counts = StateCommitter(OpaqueMapState(SqliteBackend(folder / "rows.db", "counts")), ["id"], {"n": Count()})
    builder.set_bolt("counts", counts, 2).fields_grouping("halved", Fields("id"))
    values = AppendCommitter(SqliteTable(folder / "rows.db", "counted"))
    builder.set_bolt("values", values).global_grouping("counts")
    files = AppendCommitter(ParquetTable(folder / "files", target_bytes=4_000))
    builder.set_bolt("files", files, 2).fields_grouping("falling", Fields("id")).fields_grouping("halved", Fields("id"))
    return builder.build()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows are written by small parts, in this process."""
    monkeypatch.setattr(key_hash_parts, "PART_BYTES", 1_000)
    monkeypatch.setattr(transactional_table, "LOADED_BYTES", 1_000)
    monkeypatch.setattr(state_committer, "GROUPED_AT_ROWS", 70)
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", arrow_spill.MEMORY_BYTES)
    yield


def check(folder: Path) -> None:
    with sqlite3.connect(folder / "rows.db") as connection:
        assert [each for (each,) in connection.execute("SELECT id FROM appended ORDER BY id")] == SENT
        newest = [each for (each,) in connection.execute("SELECT id FROM newest ORDER BY id")]
        counted = connection.execute("SELECT id, n FROM counted ORDER BY id").fetchall()
        assert counted == connection.execute("SELECT id, n FROM counts_live ORDER BY id").fetchall()
    assert newest == SENT[: len(SENT) // 2]
    assert counted == [(each, 2) for each in newest]
    in_files = sorted(pq.read_table(folder / "files").column("id").to_pylist())
    assert in_files == sorted([*SENT, *(each // 2 for each in SENT)])


@pytest.mark.slow_for("local")
@pytest.mark.parametrize("runner", SPREAD_ONLY, indirect=True)
@pytest.mark.usefixtures("small")
def test_rows_from_files_reach_every_committer_below(runner: Any, tmp_path: Path) -> None:
    with start(falling(tmp_path, 2_000), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed == 0
    check(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_full_disk_fails_the_attempt_and_the_next_one_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full_at_first(*given: Any, **named: Any) -> io.RawIOBase:
        calls.append(1)
        if len(calls) in (1, 3, 4, 9):
            raise OSError(28, "No space left on device")
        return real(*given, **named)

    real = tempfile.TemporaryFile
    monkeypatch.setattr(arrow_spill.tempfile, "TemporaryFile", full_at_first)
    with submit(falling(tmp_path, 2_000), store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        failed = [str(each) for each in run.events() if "No space left" in str(each)]
    assert failed and all("set TMPDIR" in each for each in failed)
    check(tmp_path)


class Noting(ArrowBolt):
    """Notes the Arrow memory of the process while it gets its rows."""

    deterministic = True
    most = 0

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        Noting.most = max(Noting.most, pa.total_allocated_bytes())


@pytest.mark.usefixtures("small")
def test_the_memory_does_not_grow_with_the_rows_that_wait() -> None:
    text, memory = "x" * 20_000, 4 << 20
    spout = OpaqueMemoryTransactionalSpout({0: [[each] for each in range(4)]}, Fields(id=int), 10)
    builder = TransactionalTopologyBuilder("falling", "spout", spout)
    builder.set_bolt("falling", Falling(memory, text)).global_grouping("spout")
    builder.set_bolt("noting", Noting(), 2).fields_grouping("falling", Fields("id"))
    gc.collect()  # otherwise what earlier tests have left may be freed meanwhile
    before = pa.total_allocated_bytes()
    with submit(builder.build(), store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    sent = 4 * PAGES * PAGE_ROWS * len(text)
    assert sent > 15 * memory
    assert 0 < Noting.most - before < 3 * memory
