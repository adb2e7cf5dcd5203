"""A value that a step cannot take: its record is bad, and the run goes on, in bounded memory."""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from framework.call_site import Call
from framework.errors import BadRecordError
from framework.streams.function_calls import calls_of
from framework.streams.function_steps import FunctionMap
from framework.streams.ports import EarlyFilter
from framework.streams.row_growth_limits import PART_BYTES
from framework.streams.stateless_steps import WINDOW_END, WINDOW_START, Compute, Explode, Step, Windows
from framework.streams.steps_bolt import Branch, StepsBolt
from framework.streams.watermark_bounds import WatermarkBounds
from framework.transactions import MemoryStore
from ratchet import Fields, OpaqueMemoryTransactionalSpout, Pipeline, Stream, hopping, sqlite
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C51")

#: In ms: after the last year that Python and polars can show.
FAR = 1 << 53
ENDED = 253_402_300_800_000
CALL = Call("explode('tags')", "shop.py:1")
#: 10,000 copies of its text are 400 MB.
LARGE, ITEMS = "x" * 40_000, 10_000


def kept(stream: Callable[[Stream], Stream], rows: list[list[Any]], fields: Fields, folder: Path) -> list[int]:
    """The values of ``n`` that the pipeline writes of these records."""
    pipeline = Pipeline("p")
    spout = OpaqueMemoryTransactionalSpout({0: rows}, fields, 100, on_bad_record="skip")
    stream(pipeline.spout(spout)).select("n").append_into(sqlite(folder / "p.db", "out"), name="out")
    pipeline.run({"topology.max.attempts": 1}, MemoryStore(), "local", timeout_s=PATIENCE_S)
    with sqlite3.connect(folder / "p.db") as connection:
        return [n for (n,) in connection.execute("SELECT n FROM out ORDER BY n")]


def _at(stream: Stream) -> Stream:
    return stream.with_columns(at=pl.from_epoch("ms", "ms").dt.replace_time_zone("UTC"))


STEPS: dict[str, Callable[[Stream], Stream]] = {
    "a panic in a column": lambda s: s.with_columns(day=pl.from_epoch("ms", "ms").dt.strftime("%Y")).filter(
        "day <> 'x'"
    ),
    "a panic in a filter": lambda s: s.filter(pl.from_epoch("ms", "ms").dt.strftime("%Y") != "x"),
    "a time for a filter": lambda s: _at(s).filter(lambda row: row["at"].year > 1),
    "a time for map": lambda s: _at(s).map(lambda row: row["n"], n=int),
    "a time for flat_map": lambda s: _at(s).flat_map(lambda row: [row["n"]], n=int),
    "a time for lookup": lambda s: _at(s).lookup(lambda at: at.year, on="at", year=int).filter("year > 1"),
    "a time for windows": lambda s: _at(s).window(hopping("2 h", "1 h"), on="at").filter("window_start < window_end"),
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("value", [FAR, ENDED])
@pytest.mark.parametrize("name", STEPS)
def test_a_record_whose_time_no_step_can_show_is_left_out(name: str, value: int, tmp_path: Path) -> None:
    if name.startswith("a panic"):
        value = FAR
    rows = [[1, 1], [2, 2], [3, value], [4, 4]]
    found = kept(STEPS[name], rows, Fields(n=int, ms=int), tmp_path)
    assert sorted(set(found)) == [1, 2, 4]


def test_an_early_filter_that_panics_leaves_out_nothing() -> None:
    condition = pl.from_epoch("ms", "ms").dt.strftime("%Y") == "1970"
    batch = pa.RecordBatch.from_pydict({"ms": [1, FAR]})
    assert EarlyFilter(("ms",), condition).kept(batch) is None
    assert EarlyFilter(("ms",), condition).kept(batch.slice(0, 1)) == np.array([True])


# --- rows that become many ------------------------------------------------------------------------

TAGS = Fields(n=int, text=str, tags=pa.list_(pa.int64()), at=pa.timestamp("us", "UTC"))
MANY: dict[str, Callable[[Stream], Stream]] = {
    "explode": lambda s: s.explode("tags").filter("text <> ''"),
    "flat_map": lambda s: s.flat_map(lambda row: [{**row, "tags": None} for _ in row["tags"]], **dict(_types())),
    "window": lambda s: s.window(hopping("1 d", "5 s"), on="at").filter("text <> ''"),
}


def _types() -> list[tuple[str, Any]]:
    return [("n", int), ("text", str), ("tags", pa.list_(pa.int64())), ("at", pa.timestamp("us", "UTC"))]


@pytest.mark.parametrize("name", MANY)
def test_a_record_that_would_become_too_large_is_left_out(name: str, tmp_path: Path) -> None:
    few, many = [1, 2], list(range(ITEMS))
    rows = [[1, "a", few, 0], [2, LARGE, many, 0], [3, "b", few, 0]]
    assert sorted(set(kept(MANY[name], rows, TAGS, tmp_path))) == [1, 3]


def emitted(step: Step, frame: pl.DataFrame, tables: Iterable[str] = ()) -> list[pa.RecordBatch]:
    """The batches that a step emits of a frame."""
    found: list[pa.RecordBatch] = []

    class Collector:
        def emit_arrow(self, batch: pa.RecordBatch, stream: str) -> None:
            found.append(batch)

    root = Branch(None, [], [Branch(step, ["default"], [], to_tables=bool(tables), to_others=not tables)])
    bolt = StepsBolt(root, {"default": step.schema}, tables)
    bolt.prepare({}, None, Collector(), None)  # type: ignore[arg-type]
    bolt.execute_arrow(frame.to_arrow(compat_level=pl.CompatLevel.oldest()).combine_chunks().to_batches()[0])
    return found


def pairs(batches: list[pa.RecordBatch], column: str) -> list[tuple[Any, Any]]:
    return [pair for each in batches for pair in zip(each["n"].to_pylist(), each[column].to_pylist(), strict=True)]


#: Some of 10 kB and up to 300 items, and one of which 1,000 copies are 100 MB.
GROWING = [
    (n, "x" * (100_000 if n == 50 else 10_000), list(range(1_000 if n == 50 else n % 7 * 50))) for n in range(100)
]
TAGGED = pa.schema([("n", pa.int64()), ("text", pa.string()), ("tags", pa.int64())])
AT = pa.timestamp("us", "UTC")


def each_tag(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return ({**row, "tags": tag} for tag in row["tags"])


async def each_tag_awaited(row: dict[str, Any]) -> list[dict[str, Any]]:
    return list(each_tag(row))


GROWING_STEPS: dict[str, Step] = {
    "explode": Explode(call=CALL, schema=TAGGED, column="tags"),
    **{
        name: FunctionMap(
            call=CALL,
            schema=TAGGED,
            calls=calls_of(CALL, function, name, setup=None, concurrency=None, timeout=None, retries=0),
            is_deterministic=True,
            before=frozenset(TAGGED.names),
            many=True,
        )
        for name, function in {"flat_map": each_tag, "flat_map, async": each_tag_awaited}.items()
    },
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("tables", [(), ("default",)], ids=["others", "tables"])
@pytest.mark.parametrize("name", GROWING_STEPS)
def test_rows_that_grow_are_emitted_in_parts_and_in_order(name: str, tables: tuple[str, ...]) -> None:
    frame = pl.DataFrame(GROWING, schema=["n", "text", "tags"], orient="row")
    found = emitted(GROWING_STEPS[name], frame, tables)
    assert len(found) > 10
    assert max(each.nbytes for each in found) < 1.5 * PART_BYTES
    assert pairs(found, "tags") == [(n, tag) for n, _, tags in GROWING for tag in tags]


def test_the_windows_of_a_large_row_are_emitted_in_parts() -> None:
    assigned = [(WINDOW_START, AT), (WINDOW_END, AT)]
    schema = pa.schema([("n", pa.int64()), ("text", pa.string()), ("at", AT), *assigned])
    step = Windows(call=CALL, schema=schema, windows=hopping("1 h", "1 s"), on="at", bounds=WatermarkBounds())
    rows = [(n, "x" * (50_000 if n == 5 else 10), 7_200_000_000) for n in range(10)]
    frame = pl.DataFrame(rows, schema={"n": pl.Int64, "text": pl.String, "at": pl.Datetime("us", "UTC")}, orient="row")
    found = emitted(step, frame)
    assert max(each.nbytes for each in found) < 1.5 * PART_BYTES
    ends = [datetime.datetime.fromtimestamp(second, datetime.UTC) for second in range(10_800, 7_200, -1)]
    assert pairs(found, WINDOW_END) == [(n, end) for n in range(10) for end in ends]


@pytest.mark.parametrize("nested", ["list", "struct", "struct of lists", "bytes", "array"])
def test_the_bytes_of_every_type_count(nested: str) -> None:
    value: Any = {
        "list": list(range(5_000)),
        "struct": {"a": LARGE, "b": 1},
        "struct of lists": {"a": [LARGE, None], "b": None},
        "bytes": LARGE.encode(),
        "array": [0] * 5_000,
    }[nested]
    of = pl.Array(pl.Int64, 5_000) if nested == "array" else None
    column = pl.Series([value, None, value], dtype=of)
    frame = pl.DataFrame({"text": column, "tags": [[1], [1, 2], list(range(ITEMS))]})
    step = Explode(call=CALL, schema=pa.schema([]), column="tags")
    with pytest.raises(BadRecordError, match=r"explode\('tags'\): 10,000 rows .* 'tags'"):
        list(step.parts(frame))
    assert [each.height for each in step.parts(frame[:2])] == [2]


# --- values whose size another value says ---------------------------------------------------------

SIZED = Fields(n=int, s=str, t=str, w=int, xs=pa.list_(pa.int64()), texts=pa.list_(pa.string()), at=pa.timestamp("us"))
C = pl.col
#: The first record is small. Of the second, each of these makes more than 256 MiB.
SMALL = [1, "ab", "b", 2, [0, 1], ["a", "b"], 100]
HUGE = [2, "b" * 20_000, "c" * 20_000, 1 << 31, [0] * 20_000, ["x" * 20_000] * 20, 1 << 40]
LENGTHS: dict[str, Any] = {
    "LPAD": "LPAD(s, w, 'x')",
    "RPAD": "RPAD(s, w, '\u00e9')",
    "pad_start": C("s").str.pad_start(C("w")),
    "zfill": C("s").str.zfill(C("w") + 1),
    "nested": C("s").str.pad_end(C("w")).str.pad_start(C("w").cast(pl.String).str.len_bytes()),
    "branch": "CASE WHEN w < 10 THEN s ELSE LPAD(s, w, 'x') END",
    "repeat_by": C("s").repeat_by(C("w") // 100_000),
    "repeat_by of lists": C("xs").repeat_by(C("w") // 100_000),
    "int_ranges": pl.int_ranges(0, C("w")),
    "GENERATE_SERIES": "GENERATE_SERIES(1, w)",
    "negative step": pl.int_ranges(C("w"), 0, -1),
    "linear_spaces": pl.linear_spaces(0, 1, C("w")),
    "datetime_ranges": pl.datetime_ranges(pl.lit(datetime.datetime(1970, 1, 1)), "at", "1us"),
    "date_ranges": pl.date_ranges(pl.date(1970, 1, 1), pl.date(1970, 1, 1) + pl.duration(days=C("w") // 40), "1d"),
    "replace_all": C("s").str.replace_all("b", C("t")),
    "REPLACE": "REPLACE(s, 'b', t)",
    "replace with groups": C("s").str.replace("b+", C("t").str.replace_all("c", "$0", literal=True)),
    "replace_all with groups": C("s").str.replace_all("(b+)", C("t").str.replace_all("c", "${1}", literal=True)),
    "join": C("xs").cast(pl.List(pl.String)).list.join(C("t")),
    "ARRAY_TO_STRING": "ARRAY_TO_STRING(xs, t)",
    "sample": C("texts").list.sample(C("w") // 100_000, with_replacement=True, seed=1),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_record_that_says_how_large_a_value_becomes_is_left_out(name: str, tmp_path: Path) -> None:
    def stream(rows: Stream) -> Stream:
        return rows.with_columns(made=LENGTHS[name]).filter("made IS NOT NULL")

    rows = [SMALL, HUGE, [3, *SMALL[1:]], [4, "a", "b", None, [], [], None]]
    assert [n for n in kept(stream, rows, SIZED, tmp_path) if n < 4] == [1, 3]


@pytest.mark.parametrize("width", [-1, -(1 << 62), 1 << 62, None])
@pytest.mark.parametrize("text", ["LPAD(s, w, 'x')", "RPAD(s, w, 'x')"])
def test_lengths_beyond_all_texts_are_refused(width: int | None, text: str, tmp_path: Path) -> None:
    rows = [SMALL, [2, "a", "b", width, [], [], 0], [3, *SMALL[1:]]]
    found = kept(lambda s: s.filter(f"{text} <> 'a' OR w IS NULL"), rows, SIZED, tmp_path)
    assert found == ([1, 2, 3] if width is None else [1, 3])


def test_values_that_records_make_large_are_made_in_parts() -> None:
    columns = {"s": pl.col("s").str.pad_start(pl.col("w"))}
    step = Compute(call=CALL, schema=SIZED.select(["n", "s", "w"]).schema(), columns=columns, keeps=True)
    frame = pl.DataFrame({"n": range(100), "s": ["a"] * 100, "w": [1 << 20] * 100})
    parts = list(step.parts(frame))
    assert pl.concat(parts).equals(frame)
    assert max(each["w"].sum() for each in parts) <= PART_BYTES
    assert step.narrowed(frozenset(["n"])).growing == ()
