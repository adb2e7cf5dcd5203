"""DataFrame bolts: a whole batch through Spark SQL, in both phases, on every executor."""

from __future__ import annotations

import contextlib
import datetime
import zoneinfo
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseBasicBolt,
    DataFrameBolt,
    FailedException,
    Fields,
    TopologyFailed,
    TransactionalTopologyBuilder,
)
from framework.errors import TopologyError
from framework.transactions import MemoryStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter, Sum
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.runners import DATA, SPREAD_ONLY, WORDS, start
from tests.kit.waiting import PATIENCE_S

# All in the process that runs Spark, in-process runs too: a DataFrame needs a session.
pytestmark = pytest.mark.spark


class TopWords(DataFrameBolt):
    """The words of a batch, their counts and their ranks, by a window function of SQL."""

    def __init__(self, failures: str | None = None) -> None:
        self.failures = failures

    def execute_dataframe(self, frame: Any) -> Any:
        if self.failures is not None:
            with contextlib.suppress(FileNotFoundError):  # two batches may be here at once; one fails
                Path(self.failures).unlink()
                raise FailedException("as asked")
        return frame.groupBy("word").count().selectExpr("word", "count AS n", "rank() OVER (ORDER BY count DESC) AS r")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, n=int, r=int))


class JoinLengths(DataFrameBolt):
    """Joins two streams of different shape."""

    def execute_dataframes(self, frames: Any) -> Any:
        joined = frames["top"].join(frames["lengths/long"], "word")
        return joined.selectExpr("word", "CAST(n * length AS BIGINT) AS letters")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, letters=int))


class Lengths(BaseBasicBolt):
    def execute(self, tup: Any, collector: Any) -> None:
        if tup["r"] == 1:
            collector.emit([tup["word"], len(tup["word"])], "long")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, length=int), "long")


def table(path: Path, name: str, key: str, value: str) -> dict[Any, Any]:
    import sqlite3

    with sqlite3.connect(path) as connection:
        return dict(connection.execute(f"SELECT {key}, {value} FROM {name}_live"))


@pytest.mark.slow
@pytest.mark.parametrize("runner", SPREAD_ONLY, indirect=True)
def test_frames_in_the_processing_phase_are_joined_and_replayed_exactly(runner: Any, tmp_path: Path) -> None:
    failures = tmp_path / "fail"
    failures.touch()
    path = tmp_path / "x.db"
    builder = TransactionalTopologyBuilder(
        "frames", "spout", OpaqueMemoryTransactionalSpout(DATA, Fields(word=str), 50), 2
    )
    builder.set_bolt("top", TopWords(str(failures)), 3).shuffle_grouping("spout")
    builder.set_bolt("lengths", Lengths(), 2).shuffle_grouping("top")
    builder.set_bolt("letters", JoinLengths(), 2).shuffle_grouping("top").shuffle_grouping("lengths", stream="long")
    counts = StateCommitter(OpaqueMapState(SqliteBackend(path, "counts")), ["word"], {"n": Sum("n")})
    builder.set_bolt("counts", counts, 2).fields_grouping("top", Fields("word"))
    letters = StateCommitter(OpaqueMapState(SqliteBackend(path, "letters")), ["word"], {"letters": Sum("letters")})
    builder.set_bolt("all-letters", letters, 2).fields_grouping("letters", Fields("word"))
    with start(builder.build(), runner, **{"topology.max.spout.pending": 2}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed == 1
        records = run.transactions()
    words = [row[0] for rows in DATA.values() for row in rows]
    assert table(path, "counts", "word", "n") == {word: words.count(word) for word in set(words)}
    expected: dict[str, int] = {}
    for batch in (WORDS[:50] + WORDS[:30], WORDS[50:]):
        most = max(batch.count(word) for word in batch)
        for word in {each for each in batch if batch.count(each) == most}:
            expected[word] = expected.get(word, 0) + most * len(word)
    assert table(path, "letters", "word", "letters") == expected
    assert records[0].attempts[-1].rows["spout->top"] == 80


@pytest.mark.quick_for("collapsed")
def test_a_frame_below_a_committer_runs_in_the_commit_phase(runner: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    builder = TransactionalTopologyBuilder(
        "below", "spout", OpaqueMemoryTransactionalSpout(DATA, Fields(word=str), 50), 2
    )
    counts = StateCommitter(OpaqueMapState(SqliteBackend(path, "counts")), ["word"], {"n": Count()})
    builder.set_bolt("counts", counts, 2).fields_grouping("spout", Fields("word"))
    builder.set_bolt("parity", Parity(), 2).shuffle_grouping("counts")
    sizes = StateCommitter(OpaqueMapState(SqliteBackend(path, "sizes")), ["even"], {"times": Sum("times")})
    builder.set_bolt("sizes", sizes).global_grouping("parity")
    with start(builder.build(), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
    words = [row[0] for rows in DATA.values() for row in rows]
    assert table(path, "counts", "word", "n") == {word: words.count(word) for word in set(words)}
    expected = {0: 0, 1: 0}
    seen: list[str] = []
    for batch in (WORDS[:50] + WORDS[:30], WORDS[50:]):
        seen += batch
        for word in set(batch):
            expected[int(seen.count(word) % 2 == 0)] += 1
    assert {int(key): value for key, value in table(path, "sizes", "even", "times").items()} == {
        key: value for key, value in expected.items() if value
    }


class Parity(DataFrameBolt):
    def execute_dataframe(self, frame: Any) -> Any:
        return frame.groupBy((frame.n % 2 == 0).alias("even")).count().withColumnRenamed("count", "times")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(even=bool, times=int))


class Odd(DataFrameBolt):
    def __init__(self, what: str) -> None:
        self.what = what

    def execute_dataframe(self, frame: Any) -> Any:
        return {
            "no such column": lambda: frame.select("nothing"),
            "other columns": lambda: frame.selectExpr("word AS other"),
            "no frame": lambda: [1],
            "query fails": lambda: frame.selectExpr("CAST(raise_error('broken row') AS STRING) AS word"),
        }[self.what]()

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no such column", r"odd\[0\]: AnalysisException: .*nothing"),
        ("other columns", "bolt 'odd' declares word, and its DataFrame has other"),
        ("no frame", "bolt 'odd' returned a list: execute_dataframe returns a DataFrame"),
        ("query fails", "broken row"),
    ],
)
def test_a_failing_query_names_its_component(runner: Any, tmp_path: Path, what: str, message: str) -> None:
    builder = TransactionalTopologyBuilder("odd", "spout", OpaqueMemoryTransactionalSpout(DATA, Fields(word=str), 50))
    builder.set_bolt("odd", Odd(what)).shuffle_grouping("spout")
    counts = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "n")), ["word"], {"n": Count()})
    builder.set_bolt("counts", counts).global_grouping("odd")
    run = start(builder.build(), runner, MemoryStore(), **{"topology.max.attempts": 1})
    with pytest.raises(TopologyFailed, match=message):
        run.wait_until_caught_up(PATIENCE_S)


def test_untyped_input_and_types_that_sql_does_not_have_are_refused(spark: str) -> None:
    builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout({0: []}, Fields("word"), 1))
    builder.set_bolt("top", TopWords()).shuffle_grouping("spout")
    with pytest.raises(TopologyError, match="needs types: field 'word' of 'spout' has none"):
        builder.build()
    import pyarrow as pa

    fields = Fields(word=pa.uint64())
    builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout({0: []}, fields, 1))
    builder.set_bolt("top", TopWords()).shuffle_grouping("spout")
    with pytest.raises(TopologyError, match="Spark SQL has no type for a field of 'spout'"):
        start(builder.build(), ("spark", {}))


def test_values_pass_through_spark_sql_unchanged(runner: Any, tmp_path: Path) -> None:
    """Nulls, zoned and local timestamps, decimals, bytes, lists."""
    import pyarrow as pa

    moment = datetime.datetime(2026, 3, 29, 1, 30, 0, 123456)
    row = ["ß", None, 2.5, True, b"\x00\xff", moment, moment.replace(tzinfo=zoneinfo.ZoneInfo("UTC")), [1, None, 3]]
    fields = Fields(
        text=str,
        number=int,
        real=float,
        flag=bool,
        raw=bytes,
        local=pa.timestamp("us"),
        zoned=pa.timestamp("us", tz="UTC"),
        several=pa.list_(pa.int64()),
    )
    seen = tmp_path / "seen"
    builder = TransactionalTopologyBuilder("same", "spout", OpaqueMemoryTransactionalSpout({0: [row]}, fields, 5))
    builder.set_bolt("same", Same(fields)).shuffle_grouping("spout")
    builder.set_bolt("look", Look(str(seen))).shuffle_grouping("same")
    with start(builder.build(), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert seen.read_text(encoding="utf-8") == repr(tuple(row))


class Same(DataFrameBolt):
    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def execute_dataframe(self, frame: Any) -> Any:
        return frame

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(self.fields)


class Look(BaseBasicBolt):
    def __init__(self, file: str) -> None:
        self.file = file

    def execute(self, tup: Any, collector: Any) -> None:
        Path(self.file).write_text(repr(tup.values), encoding="utf-8")
