"""Programs that know no manifests and list a table's folder: DuckDB and pandas never find a torn
file, a row that no transaction has published, or a row twice, wherever a driver, a task, a
compaction or a rebuild was killed or paused.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace as replace_header
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from framework import Fields
from framework.errors import StaleWriterError
from framework.topology import REBUILT
from sinks import ParquetTable
from tests.kit.file_tables import append, granted, opened
from tests.kit.targets import Often

pytestmark = pytest.mark.behaviour("3.5")
FIELDS = Fields(day=str, n=int)
DAYS = ("mon", "tue")
#: What every step of a commit, a compaction or a rebuild goes through.
CALLS = ("link", "unlink", "rename", "replace", "mkdir", "rmdir")


class Killed(BaseException):
    """The process ends here; what it would still do is not done."""


def made(path: Path, *partition_by: str) -> ParquetTable:
    table = ParquetTable(path, partition_by=partition_by, target_bytes=100_000)
    table.bind(FIELDS)
    table.prepare("topology")
    return table


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"day": [DAYS[each % 2] for each in numbers], "n": list(numbers)})


def listed(table: ParquetTable) -> Counter[int]:
    """What DuckDB finds, and pandas as well."""
    if not any(table.path.rglob("*.parquet")):
        return Counter()
    found = duckdb.sql(f"SELECT n FROM read_parquet('{table.path}/**/*.parquet', union_by_name = true)").fetchall()
    numbers = Counter(each for (each,) in found)
    assert Counter(pd.read_parquet(table.path)["n"].tolist()) == numbers
    return numbers


def published(table: ParquetTable) -> Counter[int]:
    return Counter(table.to_table().column("n").to_pylist())


def check_listed(table: ParquetTable) -> None:
    """Every row that is found was published, and is found once."""
    assert listed(table) <= published(table)


def replayed(table: ParquetTable, txid: int, attempt: int, *numbers: int, epoch: int = 1) -> None:
    append(table, txid, rows(*numbers), attempt=attempt, epoch=epoch, digest=f"attempt {attempt}")


@contextmanager
def at_call(
    monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None], names: Sequence[str] = CALLS
) -> Iterator[list[str]]:
    """Call ``act`` before the call of this number that writes a file, or that is one of ``names``
    of ``os``. The list has the calls."""
    calls: list[str] = []
    inside: list[None] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not inside:
                calls.append(name)
                if len(calls) == number:
                    inside.append(None)
                    try:
                        act()
                    finally:
                        inside.clear()
                if len(calls) >= number and act is die:
                    raise Killed
            return real(*arguments, **options)

        return call

    def torn(table: pa.Table, path: Path) -> None:
        Path(path).write_bytes(b"PAR1")  # what a killed task leaves
        write(table, path)

    write = noting("write", pq.write_table)
    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(os, name, noting(name, getattr(os, name)))
        patched.setattr(pq, "write_table", torn)
        yield calls


def die() -> None:
    raise Killed


def begun(path: Path, partition_by: tuple[str, ...]) -> ParquetTable:
    table = made(path, *partition_by)
    for txid in range(1, 5):
        append(table, txid, rows(txid * 10, txid * 10 + 1))
    return table


def commit(table: ParquetTable) -> None:
    append(table, 5, rows(50, 51))


def replace(table: ParquetTable) -> None:
    header = opened(table, 5, 1)
    table.write(granted(header), [rows(50, 51)])
    table.publish(header)
    replayed(table, 5, 2, 51, 52)


def roll_back(table: ParquetTable) -> None:
    header = opened(table, 5, 1)
    table.write(granted(header), [rows(50, 51)])
    table.publish(header)
    table.roll_back(opened(table, 5, 2))


def compact(table: ParquetTable) -> None:
    table.compact()


def compact_and_vacuum(table: ParquetTable) -> None:
    table.compact()
    table.vacuum(older_than_s=0)


def rebuild(table: ParquetTable) -> None:
    """The rebuilt table has other rows."""
    other = table._beside(REBUILT)
    other.prepare("topology")
    for txid in range(1, 5):
        if other.read_header().done < txid:
            append(other, txid, rows(txid * 10, txid * 10 + 5))
    expected = table.read_header()
    table.exchange(
        expected,
        replace_header(expected, incarnation=other.read_header().incarnation, epoch=9),
        other.read_header(),
    )


STEPS: list[Callable[[ParquetTable], None]] = [commit, replace, roll_back, compact, compact_and_vacuum, rebuild]


@pytest.mark.slow_for("partitioned", "replace", "rebuild")
@pytest.mark.parametrize("partition_by", [(), ("day",)], ids=["plain", "partitioned"])
@pytest.mark.parametrize("step", STEPS, ids=lambda each: each.__name__)
def test_a_kill_at_any_step_leaves_a_folder_that_can_be_listed(
    step: Callable[[ParquetTable], None],
    partition_by: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    often: Often,
    seed: int,
) -> None:
    """``make test-all`` kills before every call; ``make test`` before a part of them, which depends
    on the seed.
    """
    every = often(7 if step is rebuild else 5, 1)
    for number in itertools.count(1 + seed % every, every):
        table = begun(tmp_path / str(number), partition_by)
        before = listed(table)
        assert before == published(table)
        with at_call(monkeypatch, number, die) as calls, suppress(Killed):
            step(table)
        again = ParquetTable(table.path)
        assert listed(again) <= published(again) or (step is rebuild and listed(again) <= before)
        again = made(table.path, *partition_by)  # the next driver
        check_listed(again)
        replayed(again, max(again.read_header().done, 5), 3, 77, epoch=20)
        again.compact()
        assert listed(again) == published(again)
        again.vacuum(older_than_s=0)
        assert listed(again) == published(again)
        if len(calls) < number:
            return


@pytest.mark.slow
@pytest.mark.parametrize("partition_by", [(), ("day",)], ids=["plain", "partitioned"])
def test_a_driver_that_is_paused_at_any_step_shows_nothing_after_its_successor(
    partition_by: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0
    while True:
        number += 1
        table = begun(tmp_path / str(number), partition_by)
        header = opened(table, 5, 1)
        table.write(granted(header), [rows(50, 51)])
        after: list[Counter[int]] = []

        def succeed(table: ParquetTable = table, after: list[Counter[int]] = after) -> None:
            other = made(table.path, *partition_by)
            replayed(other, 5, 2, 51, 52, epoch=2)
            append(other, 6, rows(60), epoch=2)
            after.append(listed(other))

        with at_call(monkeypatch, number, succeed) as calls, suppress(StaleWriterError):
            table.publish(header)
        check_listed(table)
        if not after:
            assert len(calls) < number
            return
        assert listed(table) == published(table) == after[0]


@pytest.mark.slow
def test_a_compaction_beside_a_driver_keeps_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver commits, or replays what it has committed, between any two steps of a compaction."""
    number = 0
    while True:
        number += 1
        table = begun(tmp_path / str(number), ())
        acted: list[None] = []

        def act(table: ParquetTable = table, acted: list[None] = acted) -> None:
            acted.append(None)
            driver = ParquetTable(table.path)
            replayed(driver, 4, 2, 41, 42)
            append(driver, 5, rows(50))

        with at_call(monkeypatch, number, act, (*CALLS, "scandir", "listdir")):
            table.compact()
            table.vacuum(older_than_s=0)
        assert listed(table) == published(table)
        if not acted:
            return
        assert published(table)[42] == published(table)[50] == 1


def test_a_task_that_is_killed_while_it_writes_leaves_no_torn_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = begun(tmp_path / "table", ())
    header = opened(table, 5, 1)

    def torn(_: pa.Table, path: Path) -> None:
        Path(path).write_bytes(b"PAR1\0\0")
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", torn)
        with pytest.raises(Killed):
            table.write(granted(header), [rows(50)])
    assert (
        listed(table)
        == published(table)
        == Counter({each: 1 for txid in range(1, 5) for each in (txid * 10, txid * 10 + 1)})
    )


def test_a_program_that_removes_a_link_removes_no_row(tmp_path: Path) -> None:
    """The next vacuum makes it again, except that of the newest transaction."""
    table = begun(tmp_path / "table", ())
    before = published(table)
    for each in sorted(table.path.glob("*.parquet"))[:3]:
        each.unlink()
    assert published(table) == before
    table.vacuum(older_than_s=3_600)
    assert listed(table) == before
