"""Event time by columns that no user sees: a source reads them, and steps carry them along."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields
from framework.errors import TopologyError
from framework.streams.hidden_columns import is_hidden
from framework.topology import RECORD_FIELDS
from framework.topology.extra_partition_spout_wrapper import unwrapped
from framework.transactions import MemoryStore
from ratchet import (
    Entry,
    Json,
    Pipeline,
    Stream,
    Text,
    TimerCommitter,
    collect,
    count,
    hopping,
    parquet,
    session,
    sqlite,
    sum_,
    tumbling,
)
from spouts.kafka.consumer.record_chunk import ColumnChunk, Run
from spouts.kafka.decoding import RecordDecoder
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S
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
    """Event time by columns of the user. ``more``: those beside ``COLUMNS``, with their types."""

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
    return s.deduplicate(["k", "n"], within="1 min", name="op", **how.on).late()


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


class Sums(TimerCommitter):
    """Sums what a key has had, two minutes after each of its records."""

    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        assert not any(map(is_hidden, record))
        entry.value = (entry.value or 0) + (record["n"] or 0)
        entry.set_timer(at + datetime.timedelta(minutes=2))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        entry.emit(k=entry.key[0], n=entry.value, then=at)


def _timers(s: Stream, other: Stream, how: Shown) -> Stream:
    output = Fields(k=str, n=int, then=datetime.datetime)
    return s.group_by("k").process(Sums, output=output, late="1 min", name="op", **how.on)


def _kept(s: Stream, how: Shown, after: str) -> Stream:
    table = s.group_by("k").agg(n=sum_("n"), rows=count()).expire(after, **how.on)
    return table.upsert_into(sqlite("kept.db", "kept"), name="op")


def _expired(s: Stream, other: Stream, how: Shown) -> Stream:
    return _kept(s, how, "4 min").expired()


def _late_expired(s: Stream, other: Stream, how: Shown) -> Stream:
    return _kept(s, how, "1 s").late().select("k", "n")


OPERATORS = {each.__name__: each for each in (
    _windows, _changes, _late, _sessions, _first, _late_first, _windows_of_first, _pairs, _late_pairs, _as_of, _timers,
    _expired, _late_expired,
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


@pytest.mark.quick_for("_windows-column")
@pytest.mark.parametrize("timestamps", [False, True], ids=["column", "timestamp"])
@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_each_operator_by_hidden_columns_gives_what_it_gives_by_columns(operator: str, *, timestamps: bool) -> None:
    for steps in ([], ["flat_map"], ["merge", "explode"]):
        assert check(drawn=DRAWN, steps=steps, operator=operator, timestamps=timestamps, take=2, faults=[2, 0])


# --- nobody sees them -----------------------------------------------------------------------------


def test_functions_and_sinks_see_the_columns_of_the_user_only(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = read(shop)

    def noted(row: Row) -> Row:
        assert list(row) == list(COLUMNS)
        return row

    def noted_table(table: pa.Table) -> pa.Table:
        assert table.column_names == list(COLUMNS)
        return table

    same = rows.filter(lambda row: bool(noted(row))).map(noted, **COLUMNS).flat_map(lambda row: [noted(row)], **COLUMNS)
    assert same.schema.names == rows.schema.names == list(COLUMNS)
    same.map_batches(noted_table, **COLUMNS).append_into(parquet(tmp_path / "batches"), name="batches")
    first = same.deduplicate("k", within="1 h", name="first")
    assert first.schema.names == first.late().schema.names == list(COLUMNS)
    first.append_into(parquet(tmp_path / "first"), name="sink")
    first.late().append_into(parquet(tmp_path / "late"), name="late")
    rows.append_into(sqlite(tmp_path / "a.db", "raw"), name="raw")
    rows.latest_by("k").upsert_into(sqlite(tmp_path / "a.db", "newest"), name="newest")
    pairs = same.join(rows.rename(n="m"), on="k", within="1 h", name="pairs")
    assert pairs.schema.names == ["k", "n", "at", "m", "at_right"]
    assert pairs.late("left").schema.names == list(COLUMNS)
    pairs.append_into(parquet(tmp_path / "pairs"), name="joined")
    assert "ratchet:" not in shop.describe() and "ratchet:" not in shop._repr_html_()
    row = {"k": "a", "n": 1, "at": START}
    done = shop.test({"a": [{**row, "timestamp_ms": 0}, {**row, "timestamp_ms": 1, "partition": 1}]})
    assert done["raw"] == done["batches"] == [row, row] and done["first"] == done["sink"] == done["newest"] == [row]
    assert done["joined"] == done["pairs"] == [{**row, "m": 1, "at_right": START}] * 4


def test_they_are_read_where_a_step_needs_them(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    hours = read(shop).window(tumbling("1 h"), on="at").group_by("k").agg(n=sum_("n"))
    hours.upsert_into(sqlite(tmp_path / "a.db", "hours"), name="hours")
    read(shop, "b").append_into(parquet(tmp_path / "b"), name="b")
    assert spout_fields(shop, "a") == ["k", "n", "at"]
    read(shop, "c").deduplicate("k", within="1 h", on="at", name="first").append_into(parquet(tmp_path / "c"), name="c")
    read(shop, "d").window(tumbling("1 h")).group_by("k").agg(n=sum_("n")).upsert_into(sqlite("x.db", "d"), name="d")
    assert spout_fields(shop, "b") == list(COLUMNS)
    assert spout_fields(shop, "c") == [*COLUMNS, "ratchet:topic", "ratchet:partition"]
    assert spout_fields(shop, "d") == ["k", "n", "ratchet:timestamp_ms"]


def test_a_builder_that_was_taken_has_them_for_the_steps_that_need_them(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = read(shop)
    rows.append_into(parquet(tmp_path / "rows"), name="rows")
    rows.deduplicate("k", within="1 h", on="at", name="first").append_into(parquet(tmp_path / "a"), name="a")
    topology = shop.builder.build()
    assert [each.startswith("ratchet:") for each in topology.spout.streams["default"]] == [False] * 3 + [True] * 2
    streams = topology["a-steps"].streams
    assert list(map(list, streams.values())) == [list(COLUMNS)]


def test_columns_that_the_user_asked_for_are_the_partition(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = read(shop, metadata=["topic", "partition"])
    rows.deduplicate("k", within="1 h", on="at", name="first").append_into(parquet(tmp_path / "a"), name="a")
    assert spout_fields(shop) == [*COLUMNS, "topic", "partition"]
    assert [each.id for each in shop.build().components] == ["kafka", "first-watermark", "first", "a"]


def test_both_sides_of_a_join_have_them_where_one_side_has_columns(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    left, right = read(shop, metadata=["topic", "partition"]), read(shop, "b").rename(n="m")
    left.join(right, on="k", times="at", within="1 h", name="pairs").append_into(parquet(tmp_path / "a"), name="a")
    row = {"k": "a", "n": 1, "at": START}
    done = shop.test({"a": [{**row, "topic": "a", "partition": 2}], "b": [{**row, "partition": 1}]})
    assert [(each["n"], each["m"]) for each in done["a"]] == [(1, 1)]


def test_columns_of_a_value_with_the_names_of_metadata_stay(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    value = Json(k=str, topic=str, timestamp_ms=int)
    left = shop.read_kafka("a", value=value, bootstrap_servers="127.0.0.1:1")
    right = shop.read_kafka("b", value=Json(k=str, partition=str))
    left.join(right, on="k", within="1 h", name="pairs").append_into(parquet(tmp_path / "a"), name="a")
    left.join(right.latest_by("k"), on="k", name="now").append_into(parquet(tmp_path / "b"), name="b")
    row, other = {"k": "x", "topic": "of the value", "timestamp_ms": 7}, {"k": "x", "partition": "p"}
    done = shop.test({"a": [row], "b": [{**other, "timestamp_ms": 0}]})
    assert done["a"] == done["b"] == [row | other]


def test_a_tombstone_has_them_too(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read_kafka("a", key=Text("k"), value=Json(n=int), bootstrap_servers="127.0.0.1:1")
    same = rows.map(lambda row: row, k=str, n=int)
    same.latest_by("k").upsert_into(sqlite(tmp_path / "a.db", "newest"), name="newest")
    same.deduplicate("k", within="1 h", name="first").append_into(parquet(tmp_path / "a"), name="a")
    given = [{"k": "x", "n": 1}, {"k": "y", "n": 2}, {"k": "x", "tombstone": True}, {"k": "y", "n": 2}]
    done = shop.test({"a": [{**each, "timestamp_ms": 5} for each in given]})
    assert done["newest"] == [given[1]] and done["a"] == given[:2]


def test_first_rows_have_those_that_bolts_below_take_and_no_others(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    first = read(shop).deduplicate("k", within="1 h", name="first")
    first.append_into(parquet(tmp_path / "a"), name="a")
    built = {each.id: each for each in shop.build().components}
    assert list(built["first"].streams["default"]) == first.schema.names
    assert [each.component_id for each in built["a"].subscriptions] == ["first"]
    windows = first.window(tumbling("5 min")).group_by("k").agg(n=count()).when_closed(name="windows")
    windows.append_into(parquet(tmp_path / "b"), name="b")
    built = {each.id: each for each in shop.build().components}
    assert list(built["first"].streams["default"]) == [*first.schema.names, *RECORD_FIELDS]
    shown = [each.component_id for each in built["a"].subscriptions]
    assert [list(built[each].streams["default"]) for each in shown] == [first.schema.names]


def test_a_spout_reads_them_from_the_records(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    read(shop).deduplicate("k", within="1 h", name="first").append_into(parquet(tmp_path / "a"), name="a")
    spout: Any = shop.build().spout.instance
    decoder = RecordDecoder(unwrapped(spout)._streams)
    assert decoder.parts.timestamps
    chunk = ColumnChunk(
        [Run("a", 0, 1), Run("a", 3, 1)],
        pa.array([b'{"k": "x"}', b'{"k": "y"}']),
        pa.array([5, 6], pa.int64()),
        value_bytes=20,
        keys=None,
        headers=None,
        timestamps=pa.array([1_767_261_600_000, None], pa.int64()),
    )
    (found,) = decoder.decode(chunk, {})
    assert found.rows is not None
    rows = [tuple(row.values())[3:] for row in found.rows.to_pylist()]
    assert rows == [("a", 0, START), ("a", 3, None)]


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES: dict[str, Callable[[Stream], object]] = {
    r"begins with 'ratchet:', as those that pipelines add": lambda s: s.with_columns(**{"ratchet:topic": "k"}),
    r"select.*column 'ratchet:x' begins with": lambda s: s.select(pl.col("k").alias("ratchet:x")),
    r"rename.*column 'ratchet:x' begins with": lambda s: s.rename(k="ratchet:x"),
    r"map.*column 'ratchet:x' begins with": lambda s: s.map(lambda row: row, **{"ratchet:x": str}),
    r"agg.*column 'ratchet:x' begins with": lambda s: s.group_by("k").agg(**{"ratchet:x": count()}),
    r"there is no column 'ratchet:topic'": lambda s: s.filter(pl.col("ratchet:topic") == "a"),
    r"map_batches\(.*\) makes rows of several: read_kafka\(..., metadata=\['topic', 'partition'\]\), and keep": lambda s: (
        s.map_batches(lambda table: table, **COLUMNS).deduplicate("k", within="1 h", on="at", name="first")
    ),
    r"test_hidden_columns.py:\d+: deduplicate\('k', within='1 h', name='x'\): its rows have no timestamp of a record "
    r"of a topic: say which column is the time, as in on='at'": lambda s: s.map_batches(
        lambda table: table, **COLUMNS
    ).deduplicate("k", within="1 h", name="x"),
    r"the rows of when_closed\(\) are from several|the rows of .*when_closed\(\) are from several": lambda s: (
        closed(s).rename(window_end="e").deduplicate("k", within="1 h", on="e", name="x")
    ),
    r"window\(.*\): its rows have no timestamp": lambda s: closed(s).rename(window_end="e").window(tumbling("1 h")),
    r"join\(.*its rows have no timestamp .* times='at'": lambda s: closed(s).join(s, on="k", within="1 h", name="j"),
    r"name 'a-per-k' is that of .*when_closed\(\) already: give another name=": lambda s: (closed(s), closed(s, "2 h")),
    r"its state needs a name, and 'a-per-ü' is none: give name=": lambda s: (
        s.rename(k="ü").window(tumbling("1 h"), on="at").group_by("ü").agg(n=count()).when_closed()
    ),
    r"the newest by the record's timestamp, and the table goes by 'n': leave sequence_by out": lambda s: s.join(
        s.latest_by("k", sequence_by="n"), on="k", within="1 h", name="j"
    ),
    r"say how far apart the rows of a pair may be, as in within='1 h'": lambda s: s.join(
        s.filter("n > 1").rename(n="m"), on="k", name="j"
    ),
}


def closed(stream: Stream, length: str = "1 h") -> Stream:
    return stream.window(tumbling(length), on="at").group_by("k").agg(n=sum_("n")).when_closed()


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_says_what_to_write(said: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=said):
        MISTAKES[said](read(pipeline_in(tmp_path)))


def test_rows_without_timestamps_need_the_column_of_their_time(tmp_path: Path) -> None:
    rows = pipeline_in(tmp_path).read([{"k": "a", "at": START}])
    wanted: list[Callable[[], object]] = [
        lambda: rows.window(tumbling("1 h")),
        lambda: rows.deduplicate("k", within="1 h", name="x"),
        lambda: rows.join(rows.latest_by("k"), on="k", within="1 h", name="x"),
    ]
    for each in wanted:
        with pytest.raises(TopologyError, match=r"its rows have no timestamp of a record .* as in (on|times)='at'"):
            each()


def test_the_rows_of_a_test_need_the_timestamps_that_a_step_goes_by(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    read(shop).deduplicate("k", within="1 h", name="first").append_into(parquet(tmp_path / "a"), name="a")
    with pytest.raises(TopologyError, match="by the time of the record: give the rows of 'a' a 'timestamp_ms'"):
        shop.test({"a": [{"k": "a", "n": 1, "at": START}]})
    with pytest.raises(
        TopologyError, match=r"no column 'offset' \(there are: k, n, at, topic, partition, timestamp_ms\)"
    ):
        shop.test({"a": [{"k": "a", "n": 1, "at": START, "offset": 1}]})


def test_windows_and_tables_have_names_where_none_is_given(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = read(shop)
    windows = rows.window(tumbling("1 h"), on="at").group_by("k", even="n % 2 = 0").agg(n=sum_("n"))
    windows.when_closed().append_into(parquet(tmp_path / "a"), name="closed")
    windows.when_changed().append_into(parquet(tmp_path / "b"), name="changed")
    rows.latest_by("k", name="newest").upsert_into(sqlite(tmp_path / "a.db", "table"))
    rows.latest_by("n", name="newest").upsert_into(sqlite(tmp_path / "a.db", "other"), name="other")
    ids = {each.id for each in shop.build().components}
    assert {"a-per-k-even", "a-per-k-even-watermark", "newest", "other"} <= ids


# --- from Kafka -----------------------------------------------------------------------------------


@pytest.mark.integration
def test_windows_of_a_topic_wait_for_its_slowest_partition(topics: Topics, name: str, tmp_path: Path) -> None:
    topics.create(name, partitions=3, retention_ms="-1")
    producer = topics.producer()
    for partition, minutes in enumerate([[0, 1, 20], [3, 21], [2, 12]]):
        for minute in minutes:
            stamp = int(START.timestamp() * 1_000) + minute * 60_000
            producer.produce(name, b'{"k": "x"}', partition=partition, timestamp=stamp)
    producer.arrived()
    shop = Pipeline(name, state=lambda step: sqlite(tmp_path / "state.db", step))
    rows = shop.read_kafka(name, value=Json(k=str), bootstrap_servers=topics.bootstrap_servers)
    same = rows.flat_map(lambda row: [row, row], k=str)
    closed_windows = same.window(tumbling("5 min")).group_by("k").agg(n=count()).when_closed()
    closed_windows.append_into(parquet(tmp_path / "out"), name="out")
    with shop.submit({}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found = pl.read_parquet(tmp_path / "out" / "**" / "*.parquet").select("k", "window_start", "n").rows()
    assert found == [("x", START, 8)]
