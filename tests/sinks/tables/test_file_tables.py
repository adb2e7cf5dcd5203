"""Tables of files hold whole batches, once, whatever fails; compaction; refusals."""

from __future__ import annotations

import datetime
import errno
import json
import os
import random
import stat
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, CorruptStateError, RetryableError, StaleWriterError
from framework.topology import Header, OpenCommit
from framework.transactions import MemoryStore
from sinks import AppendCommitter, DeltaLakeTable, ParquetTable
from sinks.lake.file_table_base import FileTable
from sinks.lake.folder_documents import named_errors
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.file_tables import append, granted, opened
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.behaviour("3.5")
FIELDS = Fields(word=str, n=int)
KINDS = [ParquetTable, DeltaLakeTable]


@pytest.fixture(params=KINDS, ids=lambda each: each.__name__)
def kind(request: pytest.FixtureRequest) -> type[FileTable]:
    found: type[FileTable] = request.param
    return found


@pytest.fixture
def table(kind: type[FileTable], tmp_path: Path) -> FileTable:
    made = kind(tmp_path / "table")
    made.bind(FIELDS)
    made.prepare("topology")
    return made


def rows(*words: str) -> list[pa.RecordBatch]:
    return [pa.record_batch({"word": list(words), "n": [len(word) for word in words]})]


def words(table: FileTable) -> list[str]:
    found: list[str] = sorted(table.to_table().column("word").to_pylist())
    return found


def commit(
    table: FileTable, txid: int, *batch: str, attempt: int = 1, epoch: int = 1, digest: str = "digest"
) -> Header:
    return append(table, txid, *rows(*batch), attempt=attempt, epoch=epoch, digest=digest)


def test_files_that_tasks_write_appear_when_they_are_published_and_not_before(table: FileTable) -> None:
    header = opened(table, 1, 1)
    for task in range(3):
        table.write(granted(header, task), rows(f"task{task}", "x"))
    assert words(table) == []
    table.publish(header)
    assert words(table) == ["task0", "task1", "task2", "x", "x", "x"]


def test_a_replay_publishes_nothing_twice(table: FileTable) -> None:
    commit(table, 1, "a", "b")
    commit(table, 1, "a", "b", attempt=2)
    commit(table, 2, "c")
    assert words(table) == ["a", "b", "c"]


def test_an_attempt_that_died_leaves_orphans_only(table: FileTable) -> None:
    dead = opened(table, 1, 1)
    table.write(granted(dead), rows("dead"))
    commit(table, 1, "alive", attempt=2)
    with pytest.raises(StaleWriterError):
        table.write(granted(dead), rows("zombie"))
    with pytest.raises(StaleWriterError):
        table.publish(dead)
    assert words(table) == ["alive"]
    assert len(list(table.path.glob("part-1-1-1-*.parquet"))) == (1 if isinstance(table, DeltaLakeTable) else 0)
    assert table.vacuum(older_than_s=0) >= 0
    assert words(table) == ["alive"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_try_of_a_task_changes_no_published_file(
    table: FileTable, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may start a task again while its first try still writes; the driver publishes what the
    first one that ended has written."""
    header = opened(table, 1, 1)
    table.write(granted(header), rows("a", "b"))
    write = pq.write_table

    def late(data: pa.Table, path: Path) -> None:
        table.publish(header)
        if killed:
            Path(path).write_bytes(b"PAR1")
            raise OSError(errno.EIO, "killed")
        write(data, path)

    with monkeypatch.context() as patched, suppress(RetryableError):
        patched.setattr(pq, "write_table", late)
        table.write(granted(header), rows("b", "a"))
    held = [(each.size, (table.path / each.path).stat().st_size) for each in table.files()]
    assert held == [(held[0][0], held[0][0])]
    table.publish(header)
    assert words(table) == ["a", "b"]
    if isinstance(table, ParquetTable):
        found = duckdb.sql(f"SELECT word FROM '{table.path}/**/*.parquet' ORDER BY word").fetchall()
        assert found == [("a",), ("b",)]


def test_a_leader_that_was_paused_while_it_published_changes_nothing(kind: type[FileTable], tmp_path: Path) -> None:
    """It has read the header already; since then its successor has finished the transaction."""
    table = kind(tmp_path / "table")
    table.bind(FIELDS)
    table.prepare("topology")
    old = opened(table, 1, 1, epoch=1)
    table.write(granted(old), rows("old"))

    class Paused(kind):  # type: ignore[misc,valid-type]
        def read_header(self) -> Header:
            found: Header = super().read_header()
            calls.append(1)
            if len(calls) == kinds_last_look:
                looked.set()
                woken.wait(PATIENCE_S)
            return found

    looked, woken = threading.Event(), threading.Event()
    calls: list[int] = []
    kinds_last_look = 2 if kind is DeltaLakeTable else 1
    zombie = Paused(tmp_path / "table")
    zombie.bind(FIELDS)
    failed: list[Exception] = []

    def publish() -> None:
        try:
            zombie.publish(old)
        except StaleWriterError as error:
            failed.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    looked.wait(PATIENCE_S)
    commit(table, 1, "new", attempt=2, epoch=2)
    commit(table, 2, "next", epoch=2)
    woken.set()
    thread.join(PATIENCE_S)
    assert words(table) == ["new", "next"]
    if kind is DeltaLakeTable:
        assert failed


def test_a_batch_without_rows_leaves_nothing_unless_it_replaces_something(table: FileTable) -> None:
    header = opened(table, 1, 1)
    table.publish(header)
    table.raise_header(header, header.finished(1))
    log = table.path / ("_delta_log" if isinstance(table, DeltaLakeTable) else "_manifest")
    before = len(list(log.glob("*.json")))
    dead = opened(table, 2, 1)
    table.write(granted(dead), rows("dead"))
    table.publish(opened(table, 2, 2))
    assert len(list(log.glob("*.json"))) == before + 1
    assert words(table) == []


@pytest.mark.rule("C1")
def test_a_header_is_written_by_compare_and_set(table: FileTable) -> None:
    first = table.read_header()
    opened(table, 1, 1, epoch=4)
    with pytest.raises(StaleWriterError) as refused:
        table.raise_header(first, first.finished(1))
    assert refused.value.epoch == 4


def test_one_of_many_writers_of_a_header_wins(table: FileTable) -> None:
    """Threads that all hold the same header write; also when names of
    versions were used and removed before.
    """
    for _ in range(15):
        before = table.read_header()
        won: list[int] = []

        def raise_it(epoch: int, before: Header = before, won: list[int] = won) -> None:
            try:
                table.raise_header(before, before.opened(before.epoch + 1, OpenCommit(1, epoch, "d")))
                won.append(epoch)
            except StaleWriterError:
                pass

        threads = [threading.Thread(target=raise_it, args=(each,)) for each in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(won) == 1
        found = table.read_header().open
        assert found is not None and found.attempt_id == won[0]


def test_another_owner_other_columns_and_foreign_files_are_refused(kind: type[FileTable], tmp_path: Path) -> None:
    table = kind(tmp_path / "table")
    table.bind(FIELDS)
    table.prepare("topology")
    with pytest.raises(ConfigError, match="belongs to topology 'topology', not 'other'"):
        table.prepare("other")
    wider = kind(tmp_path / "table")
    wider.bind(Fields(word=str, n=float))
    with pytest.raises(ConfigError, match="it has word string, n int64.* writes word string, n double"):
        wider.prepare("topology")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    foreign = kind(tmp_path / "mine")
    foreign.bind(FIELDS)
    with pytest.raises(ConfigError, match="'notes.txt'"):
        foreign.prepare("topology")


@pytest.mark.parametrize(
    "wanting",
    [
        pa.uint8(),
        pa.list_(pa.uint8()),
        pa.struct([("a", pa.uint32())]),
        pa.map_(pa.string(), pa.uint16()),
        pa.dictionary(pa.int32(), pa.uint32()),
        pa.list_(pa.duration("s")),
        pa.timestamp("ns"),
        pa.list_(pa.timestamp("ns", tz="UTC")),
        pa.timestamp("s"),
        pa.timestamp("us", tz="Europe/Berlin"),
        pa.float16(),
        pa.decimal256(70, 2),
        pa.decimal128(5, -2),
        pa.month_day_nano_interval(),
    ],
    ids=str,
)
def test_types_that_readers_of_delta_do_not_have_are_refused_in_one_line(tmp_path: Path, wanting: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="Delta Lake has no type for 'v'") as refused:
        DeltaLakeTable(tmp_path / "table").bind(Fields(n=int, v=wanting))
    assert "\n" not in str(refused.value)


def test_a_table_inside_of_another_one_is_refused_and_not_vacuumed(kind: type[FileTable], table: FileTable) -> None:
    """The outer table's vacuum does not remove an inner table that
    an earlier version has put there.
    """
    commit(table, 1, "dog")
    inner = kind(table.path / "inner")
    inner.bind(FIELDS)
    with pytest.raises(ConfigError, match=f"inside of the table {table.path}"):
        inner.prepare("topology")
    held = (table.path / "_ratchet").rename(table.path / "away")
    inner.prepare("topology")
    held.rename(table.path / "_ratchet")
    for txid in (1, 2, 3):
        commit(inner, txid, "cat")
    table.compact()
    table.vacuum(older_than_s=0)
    assert words(inner) == ["cat"] * 3


@pytest.mark.fault(28)
def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "table")
    table.bind(FIELDS)
    table.prepare("topology")
    commit(table, 1, "a")
    for path in (
        next((tmp_path / "table" / "_manifest").glob("*.json")),
        max((tmp_path / "table" / "_ratchet").glob("header-*")),
    ):
        good = path.read_bytes()
        for place in range(0, len(good), 7):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(CorruptStateError, match=path.name):
                table.files() if "manifest" in str(path) else table.read_header()
        path.write_bytes(good)
    assert words(table) == ["a"]


@pytest.mark.slow
def test_compaction_keeps_every_row_and_few_files(kind: type[FileTable], tmp_path: Path) -> None:
    table = kind(tmp_path / "table", target_bytes=10_000)
    table.bind(FIELDS)
    table.prepare("topology")
    expected: list[str] = []
    for txid in range(1, 31):
        batch = [f"w{txid}-{each}" for each in range(40)]
        commit(table, txid, *batch)
        expected += batch
    before, after = table.compact()
    assert before == 30
    assert after < 15
    assert words(table) == sorted(expected)
    commit(table, 31, "later")
    commit(table, 31, "later", attempt=2)
    table.compact()
    table.vacuum(older_than_s=0)
    assert words(table) == sorted([*expected, "later"])
    command = [sys.executable, "-m", "ratchet", "compact", str(table.path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == len(expected) + 1
    command[-1] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_another_user_cannot_hold_up_a_compaction(tmp_path: Path) -> None:
    """A user who may read a file may lock it."""
    table = ParquetTable(tmp_path / "table")
    table.bind(FIELDS)
    table.prepare("topology")
    table.compact()
    (lock,) = (tmp_path / "table").rglob("compact.lock")
    assert not stat.S_IMODE(lock.stat().st_mode) & 0o007


def test_the_last_transaction_may_be_replayed_and_is_not_compacted(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "table")
    with pytest.raises(ConfigError, match="keep_last must be 1 or more, and is 0"):
        table.compact(keep_last=0)


def test_files_published_late_of_a_compacted_transaction_are_not_read(tmp_path: Path) -> None:
    """A driver was paused before it linked the manifest;
    or a compaction was killed before it had removed what it merged.
    """
    table = ParquetTable(tmp_path / "table")
    table.bind(FIELDS)
    table.prepare("topology")
    headers = [commit(table, txid, f"w{txid}") for txid in range(1, 8)]
    files = table.files_of(3)
    manifests = {path: path.read_bytes() for path in (table.path / "_manifest").iterdir()}
    table.compact()
    with pytest.raises(StaleWriterError, match="a later attempt has removed"):
        table.publish_files(headers[2], files)
    assert words(table) == [f"w{txid}" for txid in range(1, 8)]
    for path, text in manifests.items():
        path.write_bytes(text)
    assert words(table) == [f"w{txid}" for txid in range(1, 8)]
    commit(table, 8, "w8")
    table.compact()
    assert words(table) == [f"w{txid}" for txid in range(1, 9)]


def test_readers_beside_a_writer_and_a_compaction_see_whole_transactions(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "table", target_bytes=5_000)
    table.bind(FIELDS)
    table.prepare("topology")
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            found = sorted(Counter(table.to_table().column("word").to_pylist()).items())
            assert [name for name, _ in found] == [f"w{each:03}" for each in range(1, len(found) + 1)]
            assert {count for _, count in found} <= {1}
            seen.append(len(found))

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            read()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    reader = threading.Thread(target=guarded)
    reader.start()
    for txid in range(1, 61):
        commit(table, txid, f"w{txid:03}")
        if txid % 7 == 0:
            table.compact()
    done.set()
    reader.join(PATIENCE_S)
    assert not failures, failures
    assert seen == sorted(seen)
    assert len(words(table)) == 60


def test_files_are_no_larger_than_wanted_and_partitions_are_folders(kind: type[FileTable], tmp_path: Path) -> None:
    table = kind(tmp_path / "table", partition_by=["day", "word"], target_bytes=20_000)
    table.bind(Fields(day=datetime.date, word=str, n=int))
    table.prepare("topology")
    days = [datetime.date(2026, 1, 1 + each % 2) for each in range(8_000)]
    names = [None if each % 4 == 3 else f"a/b={each % 4}" for each in range(8_000)]
    batch = pa.record_batch({"day": days, "word": names, "n": list(range(8_000))})
    header = opened(table, 1, 1)
    table.write(granted(header), [batch])
    table.publish(header)
    found = table.to_table()
    key = lambda row: row["n"]  # noqa: E731
    assert sorted(found.to_pylist(), key=key) == batch.to_pylist()
    assert len(table.files()) > 4
    assert all(each.size < 40_000 for each in table.files())


@pytest.mark.rule("C7")
def test_a_roll_back_takes_a_parquet_transaction_out_and_a_late_writer_cannot_bring_it_back(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "table")
    table.bind(FIELDS)
    table.prepare("topology")
    commit(table, 1, "a")
    lost = opened(table, 2, 1, digest="lost")
    table.write(granted(lost), rows("lost"))
    table.publish(lost)
    assert words(table) == ["a", "lost"]
    undone = opened(table, 2, 2, digest="lost")
    assert table.roll_back(undone) == 1
    assert words(table) == ["a"]
    with pytest.raises(StaleWriterError, match="a later attempt has removed"):
        table.publish_files(lost, table.files_of(1))  # as if the writer had been paused after it had read the header
    assert words(table) == ["a"]
    commit(table, 2, "b", attempt=3, digest="planned anew")
    assert words(table) == ["a", "b"]


def topology(spout: Any, table: FileTable, parallelism: int = 2) -> Any:
    builder = TransactionalTopologyBuilder("files", "spout", spout, 2)
    builder.set_bolt("append", AppendCommitter(table), parallelism).shuffle_grouping("spout")
    return builder.build()


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [False, True])
def test_a_topology_appends_every_row_once_after_failures(
    kind: type[FileTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opaque: bool
) -> None:
    """Writes, publishing and raises of headers fail one time in five,
    before or after they were done.
    """
    data = {part: [[f"{part}-{each}", each] for each in range(100)] for part in range(3)}
    spout = (OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout)(data, FIELDS, 25)
    table = kind(tmp_path / "table")
    chance = random.Random(5)
    for name in ("publish_files", "raise_header", "write"):
        real = getattr(kind, name)

        def faulty(self: Any, *arguments: Any, real: Any = real) -> Any:
            fault = chance.random()
            if fault < 0.1:
                raise RetryableError("nothing done")
            real(self, *arguments)
            if fault > 0.9:
                raise RetryableError("answer lost")

        monkeypatch.setattr(kind, name, faulty)
    config = {"topology.max.attempts": 1000, "topology.max.spout.pending": 3}
    with submit(topology(spout, table), config, store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed > 3
    assert words(table) == sorted(word for part in data.values() for word, _ in part)


@pytest.mark.rule("C8")
def test_a_delta_table_counts_as_irreversible_and_a_parquet_table_does_not(tmp_path: Path) -> None:
    """C8: this matters when the source loses the range of a batch whose commit was opened."""
    spout = OpaqueMemoryTransactionalSpout({0: [["a", 1], ["b", 2]]}, FIELDS, 2, on_data_loss="skip")
    assert topology(spout, DeltaLakeTable(tmp_path / "delta")).irreversible() == [f"table {tmp_path / 'delta'}"]
    assert topology(spout, ParquetTable(tmp_path / "parquet")).irreversible() == []


def test_a_read_only_folder_is_reported_in_one_line_before_the_first_batch(
    kind: type[FileTable], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    table = kind(tmp_path / "file" / "table")
    spout = MemoryTransactionalSpout({0: [["a", 1]]}, FIELDS, 1)
    run = submit(topology(spout, table), store=MemoryStore(), executor="local")
    with pytest.raises(ConfigError, match="check the path"):
        run.wait_until_caught_up(PATIENCE_S)
    run.stop()
    assert os.path.getsize(tmp_path / "file") == 1


@pytest.mark.parametrize(
    ("kind_of_error", "number"),
    [
        (RetryableError, errno.ENOSPC),
        (RetryableError, errno.ESTALE),
        (ConfigError, errno.EROFS),
        (ConfigError, errno.ELOOP),
    ],
)
def test_errors_of_a_file_system_are_permanent_unless_they_are_known_to_pass(
    kind_of_error: type[Exception], number: int, tmp_path: Path
) -> None:
    with pytest.raises(kind_of_error) as named, named_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert type(named.value) is kind_of_error


@pytest.mark.parametrize(("interval", "warned"), [({}, True), ({"topology.commit.interval": "5 min"}, False)])
def test_a_table_of_files_warns_at_the_start_of_a_missing_interval(
    tmp_path: Path, interval: dict[str, Any], warned: bool
) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder("files", "lines", spout)
    builder.set_committer_bolt("append", AppendCommitter(ParquetTable(tmp_path / "table"))).shuffle_grouping("lines")
    with capture_logs() as lines, submit(builder.build(), interval, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert [each["state"] for each in lines if each["event"] == "commit.interval_not_set"] == (
        [f"table {tmp_path / 'table'}"] if warned else []
    )
