"""Partitioned tables of files can be read from what they contain,
and every value comes back unchanged.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pytest

from framework import Fields
from framework.errors import BadRecordError, ConfigError, CorruptStateError, TopologyError
from sinks import DeltaLakeTable, ParquetTable
from sinks.lake.file_table_base import FileTable
from sinks.lake.folder_documents import overwrite, read_document
from sinks.lake.partitions import expression_of
from tests.kit.file_tables import append, old_partitioned_table
from tests.kit.processes import ROOT

pytestmark = [pytest.mark.behaviour("3.5"), pytest.mark.rule("C32")]
KINDS = [ParquetTable, DeltaLakeTable]
MOMENT = datetime.datetime(2026, 1, 1, 1, 2, 3, 456789, tzinfo=datetime.UTC)
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "text": (
        str,
        ["a", "a/b", "50%", "x=y", "a%2Fb", "é☃", "a\0b", "..", " ", "\n", None],
    ),
    "integers": (int, [1, -5, 2**62, None]),
    "booleans": (bool, [True, False, None]),
    "floats": (float, [1.5, 0.1, -1e10, float("inf"), None]),
    "dates": (datetime.date, [datetime.date(2026, 1, 1), datetime.date(1, 1, 1), None]),
    "moments": (datetime.datetime, [MOMENT, MOMENT.replace(microsecond=0), None]),
    "naive moments": (pa.timestamp("ms"), [datetime.datetime(2026, 1, 1, 1, 2, 3, 456000), None]),
    "decimals": (pa.decimal128(10, 8), [Decimal("1.50000000"), Decimal("0.00000001"), Decimal("-3.00000000"), None]),
}


@pytest.fixture(params=KINDS, ids=lambda each: each.__name__)
def kind(request: pytest.FixtureRequest) -> type[FileTable]:
    found: type[FileTable] = request.param
    return found


def partitioned(kind: type[FileTable], path: Path, declared: Any = str) -> FileTable:
    table = kind(path, partition_by=["p"])
    table.bind(Fields(p=declared, n=int))
    table.prepare("topology")
    return table


def batch_of(table: FileTable, values: list[Any]) -> pa.RecordBatch:
    kind = table.schema.field("p").type
    return pa.record_batch({"p": pa.array(values, kind), "n": pa.array(range(len(values)), pa.int64())})


def values_in(table: pa.Table) -> list[Any]:
    rows = sorted(table.to_pylist(), key=lambda row: row["n"])
    return [row["p"] for row in rows]


def compacted_by_command(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ratchet", "compact", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.each_value_once
@pytest.mark.parametrize("name", VALUES)
def test_every_partition_value_comes_back_as_it_was_also_after_compaction(
    kind: type[FileTable], tmp_path: Path, name: str
) -> None:
    declared, values = VALUES[name]
    writer = partitioned(kind, tmp_path / "table", declared)
    for txid in (1, 2, 3):
        append(writer, txid, batch_of(writer, values))
    expected = values_in(pa.Table.from_batches([batch_of(writer, values)] * 3))
    reader = kind(tmp_path / "table")
    for _ in range(2):
        found = reader.to_table()
        assert found.schema == writer.schema
        assert values_in(found) == expected
        reader.compact()
        reader.vacuum(older_than_s=0)


@pytest.mark.parametrize("name", VALUES)
def test_a_reader_of_delta_finds_every_partition_value(tmp_path: Path, name: str) -> None:
    declared, values = VALUES[name]
    table = partitioned(DeltaLakeTable, tmp_path / "table", declared)
    append(table, 1, batch_of(table, values))
    found = deltalake.DeltaTable(str(table.path)).to_pyarrow_table()
    assert list(map(repr, values_in(found))) == list(map(repr, batch_of(table, values).column("p").to_pylist()))


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_a_partition_by_a_moment_means_the_same_whatever_the_zone_of_the_reader(
    kind: type[FileTable], tmp_path: Path, zone: str
) -> None:
    """DuckDB reads the folder names, and the texts of Delta's log, in a session of another zone."""
    moments = [MOMENT, MOMENT.replace(microsecond=0), datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)]
    table = partitioned(kind, tmp_path / "table", datetime.datetime)
    append(table, 1, batch_of(table, moments))
    with duckdb.connect() as session:
        session.execute(f"SET TimeZone = '{zone}'")
        found = session.execute(
            "SELECT epoch_us(p) FROM read_parquet(?, hive_partitioning = true, hive_types = {'p': TIMESTAMPTZ}) ORDER BY n",
            [f"{table.path}/p=*/*.parquet"],
        ).fetchall()
        expected = session.execute("SELECT epoch_us(unnest(?::TIMESTAMPTZ[]))", [moments]).fetchall()
        assert found == expected
        if kind is DeltaLakeTable:
            log = (table.path / "_delta_log" / "00000000000000000001.json").read_text().splitlines()
            texts = [json.loads(line)["add"]["partitionValues"]["p"] for line in log if '"add"' in line]
            assert session.execute("SELECT epoch_us(unnest(?)::TIMESTAMPTZ)", [texts]).fetchall() == expected


def test_a_compaction_leaves_moments_of_delta_their_zone(tmp_path: Path) -> None:
    for name, declared, expected in (("moments", datetime.datetime, (4, 4)), ("clocks", pa.timestamp("us"), (4, 2))):
        table = partitioned(DeltaLakeTable, tmp_path / name, declared)
        values = [MOMENT if name == "moments" else MOMENT.replace(tzinfo=None), None]
        for txid in (1, 2):
            append(table, txid, batch_of(table, values))
        assert table.compact() == expected
        logged = "".join(each.read_text() for each in (table.path / "_delta_log").glob("*.json"))
        texts = set(re.findall(r'"partitionValues":\{"p":"([^"]*)"', logged))
        assert len(texts) == 1 and texts.pop().endswith("Z") == (name == "moments")


def test_a_partition_of_a_moment_as_an_earlier_version_wrote_it_is_read() -> None:
    schema = pa.schema([("p", pa.timestamp("us", "UTC"))])
    texts = ("2026-01-01 01:02:03.456789", "2026-01-01T01:02:03.456789Z")
    earlier, now = (expression_of(schema, ["p"], (text,)) for text in texts)
    assert earlier.equals(now)
    assert "01:02:03.456789Z" in str(now)


def test_texts_that_look_like_null_or_cannot_name_a_folder_come_back(tmp_path: Path) -> None:
    values = ["", "__HIVE_DEFAULT_PARTITION__", "x" * 300, None]
    table = partitioned(ParquetTable, tmp_path / "parquet")
    for txid in (1, 2, 3):
        append(table, txid, batch_of(table, values))
    table.compact()
    assert values_in(ParquetTable(tmp_path / "parquet").to_table()) == [each for each in values for _ in range(3)]


@pytest.mark.parametrize("value", ["", "__HIVE_DEFAULT_PARTITION__"])
def test_texts_that_delta_takes_for_null_are_refused(tmp_path: Path, value: str) -> None:
    delta = partitioned(DeltaLakeTable, tmp_path / "delta")
    with pytest.raises(BadRecordError, match=f"takes '{value}' in the partition column 'p' for null"):
        append(delta, 1, batch_of(delta, ["a", value]))


def test_a_table_that_delta_cannot_compact_is_reported_in_one_line(tmp_path: Path) -> None:
    table = partitioned(DeltaLakeTable, tmp_path / "table")
    for txid in (1, 2):
        append(table, txid, batch_of(table, ["x" * 300]))
    assert values_in(table.to_table()) == ["x" * 300] * 2
    with pytest.raises(ConfigError, match="File name too long .*does not pass by itself"):
        table.compact()


@pytest.mark.slow
def test_the_command_compacts_a_partitioned_table_of_which_it_gets_only_the_path(
    kind: type[FileTable], tmp_path: Path
) -> None:
    table = partitioned(kind, tmp_path / "table")
    for txid in range(1, 6):
        append(table, txid, batch_of(table, ["a", None]))
    done = compacted_by_command(table.path, "--grace-s", "0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] < 10
    assert sorted(values_in(kind(table.path).to_table()), key=str) == [None] * 5 + ["a"] * 5


def test_compaction_ends_with_one_file_for_each_partition_and_then_leaves_them_alone(tmp_path: Path) -> None:
    table = partitioned(ParquetTable, tmp_path / "table")
    for txid in range(1, 6):
        append(table, txid, batch_of(table, ["a", "b", None]))
    append(table, 6, batch_of(table, []))
    assert table.compact() == (15, 3)
    files = table.files()
    append(table, 7, batch_of(table, ["a"]))
    append(table, 8, batch_of(table, []))
    assert table.compact() == (4, 3)
    assert len(set(table.files()) & set(files)) == 2


@pytest.mark.parametrize("text", ["", "__HIVE_DEFAULT_PARTITION__"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_a_text_that_delta_takes_for_null_is_refused_in_texts_of_any_size(
    tmp_path: Path, kind: pa.DataType, text: str
) -> None:
    table = partitioned(DeltaLakeTable, tmp_path / "table", kind)
    with pytest.raises(BadRecordError, match="in the partition column 'p' for null"):
        append(table, 1, batch_of(table, ["a", text]))


def test_a_reader_or_writer_that_assumes_another_partitioning_is_refused(kind: type[FileTable], tmp_path: Path) -> None:
    table = partitioned(kind, tmp_path / "table")
    append(table, 1, batch_of(table, ["a"]))
    for wrong in (["n"], [], ["p", "n"]):
        other = kind(table.path, partition_by=wrong)
        with pytest.raises(ConfigError, match=r"is partitioned by \['p'\], not by .*leave partition_by out"):
            other.to_table()
        with pytest.raises(ConfigError, match="leave partition_by out"):
            other.compact()
    writer = kind(table.path)
    writer.bind(Fields(p=str, n=int))
    with pytest.raises(ConfigError, match="other columns than this topology writes"):
        writer.prepare("topology")


def test_a_table_of_the_other_kind_is_refused(kind: type[FileTable], tmp_path: Path) -> None:
    table = partitioned(kind, tmp_path / "table")
    append(table, 1, batch_of(table, ["a"]))
    other = next(each for each in KINDS if each is not kind)(table.path)
    with pytest.raises(ConfigError, match=f"is a {kind.__name__}, not a {type(other).__name__}"):
        other.to_table()
    with pytest.raises(ConfigError, match=f"is a {kind.__name__}"):
        partitioned(type(other), table.path)


def test_a_table_of_a_later_format_is_refused(kind: type[FileTable], tmp_path: Path) -> None:
    table = partitioned(kind, tmp_path / "table")
    path = table.path / "_ratchet" / "schema.json"
    overwrite(path, {**read_document(path), "format": 99})
    with pytest.raises(CorruptStateError, match="format 99"):
        kind(table.path).to_table()


def test_columns_that_cannot_name_a_partition_are_refused_at_the_start(kind: type[FileTable], tmp_path: Path) -> None:
    for declared in (bytes, pa.list_(pa.int64()), pa.struct([("a", pa.int64())])):
        with pytest.raises(TopologyError, match="cannot be partitioned by 'p'"):
            kind(tmp_path / "t", partition_by=["p"]).bind(Fields(p=declared, n=int))
    for wrong in (["p", "n"], ["p", "p"], "p"):
        with pytest.raises((TopologyError, ConfigError)):
            kind(tmp_path / "t", partition_by=wrong).bind(Fields(p=str, n=int))


@pytest.mark.slow
def test_a_batch_may_have_thousands_of_partition_values(kind: type[FileTable], tmp_path: Path) -> None:
    table = partitioned(kind, tmp_path / "table", int)
    append(table, 1, batch_of(table, list(range(1_100))))
    assert values_in(kind(table.path).to_table()) == list(range(1_100))


def test_a_new_folder_is_durable_in_its_parent(
    kind: type[FileTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new folder survives a power cut when its parent was synced after it was made."""
    durable: set[Path] = set()
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if synced.is_dir():
            durable.update(synced.iterdir())

    monkeypatch.setattr(os, "fsync", fsync)
    table = partitioned(kind, tmp_path / "new" / "table")
    append(table, 1, batch_of(table, ["a", "b"]))
    folders = {each for each in (tmp_path / "new").rglob("*") if each.is_dir()} | {tmp_path / "new"}
    ours = {each for each in folders if each.name != "_delta_log"}
    assert ours - durable == set()


@pytest.mark.slow
@pytest.mark.parametrize("partition_by", [[], ["p"], ["p", "day"]])
def test_a_table_of_the_previous_version_is_read_and_compacted_correctly(
    tmp_path: Path, partition_by: list[str]
) -> None:
    expected = old_partitioned_table(tmp_path / "table", partition_by)
    table = ParquetTable(tmp_path / "table")
    assert table.to_table().schema == expected.schema
    assert sorted(map(repr, table.to_table().to_pylist())) == sorted(map(repr, expected.to_pylist()))
    done = compacted_by_command(tmp_path / "table", "--grace-s", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(map(repr, table.to_table().to_pylist())) == sorted(map(repr, expected.to_pylist()))


@pytest.mark.slow
def test_a_table_whose_partitions_the_previous_version_lost_is_refused(tmp_path: Path) -> None:
    """Its compaction wrote files outside the partitions' folders,
    with nulls for the values in the folders' names.
    """
    old_partitioned_table(tmp_path / "table", ["p"], compacted_by_old_command=True)
    with pytest.raises(CorruptStateError, match=r"compacted-1-0.parquet has no values of \['p'\]"):
        ParquetTable(tmp_path / "table").to_table()
    done = compacted_by_command(tmp_path / "table")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
