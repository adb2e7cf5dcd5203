"""Event time by columns that no user sees: the source reads them, and the steps carry them along."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import TopologyError
from ratchet import Json, Pipeline, Stream, Text, collect, count, hopping, parquet, session, sqlite, sum_, tumbling
from tests.streams.topic_programs import failures, sorted_rows

Row = dict[str, Any]
START = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)
PLACE = {"topic": str, "partition": pa.int32()}
COLUMNS = {"k": str, "n": int, "at": datetime.datetime}


def pipeline_in(folder: Path) -> Pipeline:
    return Pipeline("shop", state=lambda name: sqlite(folder / "state.db", name))


def read(pipeline: Pipeline, topic: str = "a", **options: Any) -> Stream:
    servers = {} if pipeline._reading else {"bootstrap_servers": "127.0.0.1:1"}
    return pipeline.read_kafka(topic, value=Json(**COLUMNS), **options, **servers)


def spout_fields(pipeline: Pipeline, stream: str = "default") -> list[str]:
    return list(pipeline.build().spout.streams[stream])


# --- the same as with columns ---------------------------------------------------------------------


class Shown:
    """Event time as users say it by columns. ``more``: those beside ``COLUMNS``, with their types."""

    def __init__(self, *, timestamps: bool) -> None:
        self.more: dict[str, Any] = PLACE | ({"stamp": pa.timestamp("us", "UTC")} if timestamps else {})
        self.on: dict[str, Any] = {"on": "stamp"} if timestamps else {"on": "at"}
        self.times: dict[str, Any] = {"times": self.on["on"]}
        self._timestamps = timestamps

    def read(self, pipeline: Pipeline, topic: str) -> Stream:
        metadata = [*PLACE, *(["timestamp_ms"] if self._timestamps else [])]
        rows = read(pipeline, topic, metadata=metadata)
        if not self._timestamps:
            return rows
        stamp = pl.from_epoch("timestamp_ms", time_unit="ms").dt.replace_time_zone("UTC").cast(pl.Datetime("us", "UTC"))
        return rows.with_columns(stamp=stamp).drop("timestamp_ms")


class Hidden(Shown):
    def __init__(self, *, timestamps: bool) -> None:
        super().__init__(timestamps=timestamps)
        self.more = {}
        if timestamps:
            self.on, self.times = {}, {}

    def read(self, pipeline: Pipeline, topic: str) -> Stream:
        return read(pipeline, topic)


def known(key: str) -> int | None:
    return len(key) if key < "b" else None


STEPS: dict[str, Callable[[Stream, dict[str, Any]], Stream]] = {
    "filter": lambda s, more: s.filter("n % 3 <> 0"),
    "function": lambda s, more: s.filter(lambda row: row["n"] != 4),
    "select": lambda s, more: s.select("k", *more, "at", n="n + 1"),
    "rename": lambda s, more: s.rename(k="key").rename(key="k"),
    "sql": lambda s, more: s.sql("SELECT * FROM stream WHERE n < 8"),
    "map": lambda s, more: s.map(lambda row: {**row, "n": row["n"] + 2}, **COLUMNS, **more),
    "flat_map": lambda s, more: s.flat_map(
        lambda row: [{**row, "n": row["n"] + each} for each in range(row["n"] % 3)], **COLUMNS, **more
    ),
    "explode": lambda s, more: s.map(
        lambda row: {**row, "n": [row["n"]] * (row["n"] % 3)}, **{**COLUMNS, "n": list[int]}, **more
    ).explode("n"),
    "lookup": lambda s, more: s.lookup(known, on="k", found=int).select("k", "at", *more, n="n + coalesce(found, 0)"),
    "branch": lambda s, more: s.branch(a="n > 6", b="k <> 'c'")["b"],
    "merge": lambda s, more: s.filter("n > 4").merge(s.filter("n <= 4").with_columns(n="-n")),
}


def _windows(s: Stream, other: Stream, how: Shown) -> Stream:
    windows = s.window(tumbling("5 min"), late="2 min", **how.on).group_by("k").agg(n=sum_("n"), rows=count())
    return windows.when_closed(name="op")


def _changes(s: Stream, other: Stream, how: Shown) -> Stream:
    return s.window(hopping("6 min", "3 min"), **how.on).group_by("k").agg(n=sum_("n")).when_changed(name="op")


def _late(s: Stream, other: Stream, how: Shown) -> Stream:
    return s.window(tumbling("5 min"), **how.on).group_by("k").agg(n=sum_("n")).when_closed(name="op").late()


def _sessions(s: Stream, other: Stream, how: Shown) -> Stream:
    return s.window(session("4 min"), **how.on).group_by("k").agg(all=collect("n")).when_closed(name="op")


def _first(s: Stream, other: Stream, how: Shown) -> Stream:
    return s.deduplicate("k", within="6 min", late="1 min", name="op", **how.on)


def _late_first(s: Stream, other: Stream, how: Shown) -> Stream:
    return _first(s, other, how).late()


def _windows_of_first(s: Stream, other: Stream, how: Shown) -> Stream:
    first = s.deduplicate(["k", "n"], within="6 min", late="1 min", name="first", **how.on)
    return _windows(STEPS["map"](first, how.more), other, how)


def _pairs(s: Stream, other: Stream, how: Shown) -> Stream:
    right = other.rename(n="m", at="at_m", **({"stamp": "stamp_m"} if "stamp" in how.more else {}))
    times = {} if not how.times else {"times": (how.times["times"], how.times["times"] + "_m")}
    return s.join(right, on="k", within="4 min", how="left", late="1 min", name="op", **times)


def _late_pairs(s: Stream, other: Stream, how: Shown) -> Stream:
    return _pairs(s, other, how).late("left")


def _as_of(s: Stream, other: Stream, how: Shown) -> Stream:
    table = other.rename(n="m").latest_by("k")
    return s.join(table, on="k", within="20 min", how="left", late="1 min", name="op", **how.times)


OPERATORS = {each.__name__: each for each in (
    _windows, _changes, _late, _sessions, _first, _late_first, _windows_of_first, _pairs, _late_pairs, _as_of,
)}  # fmt: skip

ROWS = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 9), st.integers(-5, 9),
        st.integers(-3, 3),
    ),
    min_size=1,
    max_size=16,
)  # fmt: skip


def records_of(drawn: list[Any]) -> dict[str, list[Row]]:
    """Rows of two topics with three partitions each, in which time goes on more or less."""
    found: dict[str, list[Row]] = {"a": [], "b": []}
    minute = 0
    for topic, partition, key, n, step, apart in drawn:
        minute += step
        at = START + datetime.timedelta(minutes=minute)
        stamp = int((at + datetime.timedelta(minutes=apart)).timestamp()) * 1_000
        row = {"k": key, "n": n, "at": at, "topic": topic, "partition": partition, "timestamp_ms": stamp}
        found[topic].append(row)
    return found


def rows_by(
    how: Shown, records: dict[str, list[Row]], steps: list[str], operator: str, take: int, faults: list[int]
) -> list[Row]:
    """The rows of a sink, without the columns that only ``Shown`` has."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_in(Path(folder))
        left, right = how.read(pipeline, "a"), how.read(pipeline, "b")
        for each in steps:
            left = STEPS[each](left, how.more)
        left.append_into(parquet(folder + "/all"), name="all")
        OPERATORS[operator](left, right, how).append_into(parquet(folder + "/out"), name="out")
        right.append_into(parquet(folder + "/right"), name="right")
        streams = pipeline.build().spout.streams
        stamped = any(name.endswith("timestamp_ms") for name in streams["a"])
        given = {
            topic: [{name: row[name] for name in row if stamped or name != "timestamp_ms"} for row in rows]
            for topic, rows in records.items()
        }
        given = {topic: rows if _reads_place(streams[topic]) else _without(rows) for topic, rows in given.items()}
        done = pipeline.test(given, take=take, faults=failures(faults, -(-max(map(len, given.values())) // take)))
    gone = {"topic", "partition", "timestamp_ms"} | {
        f"{name}{end}" for name in ("stamp", "topic", "partition") for end in ("", "_m", "_right")
    }
    assert isinstance(how, Hidden) is not any(gone & set(row) for name in done for row in done[name]) or not done["all"]
    return sorted_rows({name: value for name, value in row.items() if name not in gone} for row in done["out"])


def _reads_place(fields: Any) -> bool:
    return any(name.endswith("topic") for name in fields)


def _without(rows: list[Row]) -> list[Row]:
    return [{name: row[name] for name in COLUMNS} for row in rows]


CHECKED: dict[str, Any] = {
    "drawn": ROWS,
    "steps": st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    "operator": st.sampled_from(sorted(OPERATORS)),
    "timestamps": st.booleans(),
    "take": st.integers(1, 5),
    "faults": st.lists(st.integers(0, 3), max_size=2),
}


def check(
    *, drawn: list[Any], steps: list[str], operator: str, timestamps: bool, take: int, faults: list[int]
) -> list[Row]:
    """Raise ``AssertionError`` where hidden columns give other rows than those of the user."""
    records = records_of(drawn)
    shown = rows_by(Shown(timestamps=timestamps), records, steps, operator, take, faults)
    assert rows_by(Hidden(timestamps=timestamps), records, steps, operator, take, faults) == shown
    return shown


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(**CHECKED)
def test_hidden_columns_give_what_columns_give(**drawn: Any) -> None:
    check(**drawn)


DRAWN = [
    ("a", 0, "a", 1, 0, 0), ("a", 1, "b", 2, 9, 1), ("a", 0, "a", 5, -3, 0), ("b", 0, "a", 7, 1, -1),
    ("a", 2, "a", 8, -5, 2), ("b", 2, "b", 3, 9, 0), ("a", 1, "a", 2, 9, 0), ("a", 0, "b", 5, 2, 1),
    ("a", 2, "c", 1, 1, 0), ("a", 0, "a", 2, 9, 0), ("a", 1, "a", 1, 9, -3), ("a", 2, "b", 8, 8, 0),
    ("a", 1, "b", 2, -9, 0), ("b", 2, "a", 1, 9, 0), ("b", 0, "b", 1, 9, 0),
]  # fmt: skip


@pytest.mark.parametrize("timestamps", [False, True], ids=["column", "timestamp"])
@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_each_operator_by_hidden_columns_gives_what_it_gives_by_columns(operator: str, *, timestamps: bool) -> None:
    for steps in ([], ["flat_map"], ["merge", "explode"]):
        check(drawn=DRAWN, steps=steps, operator=operator, timestamps=timestamps, take=2, faults=[2, 0])
