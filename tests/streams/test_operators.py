"""Each operator, over rows, in this process."""

from __future__ import annotations

import datetime
import decimal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from framework.call_site import Call
from framework.coordination import MemoryStore
from framework.streams.stateless_steps import Filter, applied
from framework.testing import crash, fail_attempt, replay
from framework.transactions.run import TopologyFailed
from ratchet import (
    Pipeline,
    Stream,
    count,
    first,
    hopping,
    last,
    max_,
    mean,
    min_,
    parquet,
    reduce,
    sliding,
    sqlite,
    sum_,
    tumbling,
)

ROWS = [
    {"word": "a b", "n": 1, "tags": ["x", "y"]},
    {"word": "c", "n": 2, "tags": []},
    {"word": "d", "n": 3, "tags": None},
    {"word": None, "n": None, "tags": ["z"]},
]
UTC = datetime.UTC


def rows_of(tmp_path: Path, make: Any, rows: Any = ROWS, **types: Any) -> list[Any]:
    """What arrives in a table of files."""
    pipeline = Pipeline("rows")
    stream = make(pipeline.read(rows, **types))
    stream.append_into(parquet(tmp_path / "out"), name="out")
    return list(pipeline.test()["out"])


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda s: s.filter("n > 1").select("n"), [{"n": 2}, {"n": 3}]),
        (lambda s: s.filter(pl.col("n") > 1).select("n"), [{"n": 2}, {"n": 3}]),
        (lambda s: s.filter(lambda row: row["n"] == 1).select("n"), [{"n": 1}]),
        (lambda s: s.filter("word is null").select("n"), [{"n": None}]),
        (lambda s: s.filter("n = 3").select("word", twice="n * 2"), [{"word": "d", "twice": 6}]),
        (lambda s: s.filter("n = 3").select("n + 1 AS m"), [{"m": 4}]),
        (lambda s: s.filter("n = 3").select(one="1", two="'x'"), [{"one": 1, "two": "x"}]),
        (lambda s: s.filter("n = 3").drop("tags").with_columns(n="n + 1"), [{"word": "d", "n": 4}]),
        (lambda s: s.filter("n = 3").drop("tags", "n").rename(word="text"), [{"text": "d"}]),
        (lambda s: s.filter("n = 3").select("n").cast(n=float), [{"n": 3.0}]),
        (lambda s: s.filter("n = 3").select("n").cast(n=str), [{"n": "3"}]),
        (
            lambda s: s.select("n", tag="tags").explode("tag"),
            [*({"n": 1, "tag": t} for t in "xy"), {"n": None, "tag": "z"}],
        ),
        (lambda s: s.filter("n = 1").flat_map(lambda r: r["word"].split(), word=str), [{"word": "a"}, {"word": "b"}]),
        (lambda s: s.filter("n = 1").map(lambda r: (r["n"], r["word"]), n=int, w=str), [{"n": 1, "w": "a b"}]),
        (lambda s: s.filter("n = 1").map(lambda r: {"n": r["n"]}, n=int, w=str), [{"n": 1, "w": None}]),
        (lambda s: s.filter("n > 1").map_batches(lambda t: t.select(["n"]), n=int), [{"n": 2}, {"n": 3}]),
        (lambda s: s.filter("n > 1").map_batches(lambda t: t[["n"]], kind="pandas", n=int), [{"n": 2}, {"n": 3}]),
        (lambda s: s.map_partitions(lambda ts: (t[t.n > 1] for t in ts), kind="pandas", n=int), [{"n": 2}, {"n": 3}]),
        (lambda s: s.filter("n > 1").map_batches(lambda t: t.select("n"), kind="polars", n=int), [{"n": 2}, {"n": 3}]),
        (
            lambda s: s.filter("n > 1").map_batches(
                lambda t, more: t.select((pl.col("n") + more).alias("n")), kind="polars", setup=lambda: 10, n=int
            ),
            [{"n": 12}, {"n": 13}],
        ),
        (lambda s: s.filter("n = 1").merge(s.filter("n = 3")).select("n"), [{"n": 1}, {"n": 3}]),
        (lambda s: s.filter("n = 1").merge(s).filter("n < 3").select("n"), [{"n": 1}, {"n": 1}, {"n": 2}]),
    ],
)
def test_an_operator_gives_the_rows_that_it_says(make: Any, found: Any, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, make)
    assert sorted(rows, key=repr) == sorted(found, key=repr)


def test_a_branch_has_the_rows_of_the_first_condition_that_is_true(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    branches = pipeline.read(ROWS).select("n").branch(large="n > 2", some="n > 1", odd="n % 2 = 1")
    for name, stream in branches.items():
        stream.append_into(parquet(tmp_path / name), name=name)
    assert pipeline.test() == {"large": [{"n": 3}], "some": [{"n": 2}], "odd": [{"n": 1}]}


def test_every_aggregate_that_is_offered_works(tmp_path: Path) -> None:
    rows = [{"k": "a", "n": n, "p": decimal.Decimal("1.5")} for n in (3, 1, 2)]
    pipeline = Pipeline("rows")
    table = (
        pipeline.read(rows, k=str, n=int, p=decimal.Decimal)
        .group_by("k")
        .agg(
            rows=count(),
            sum=sum_("n"),
            least=min_("n"),
            most=max_("n"),
            mean=mean("n"),
            first=first("n"),
            last=last("n"),
            product=reduce("n", lambda a, b: a * b),
            squares=sum_("n * n"),
            price=sum_(pl.col("p") * 2),
        )
    )
    table.upsert_into(sqlite(tmp_path / "a.db", "a"))
    (row,) = pipeline.test()["a"]
    assert (row["rows"], row["sum"], row["least"], row["most"], row["mean"]) == (3, 6, 1, 3, 2.0)
    assert (row["first"], row["last"], row["product"], row["squares"]) == (3, 2, 6, 14)
    assert row["price"] == 9


def test_distinct_values_are_counted(tmp_path: Path) -> None:
    from ratchet import count_distinct

    pipeline = Pipeline("rows")
    stream = pipeline.read([{"k": "a", "n": n % 3} for n in range(10)])
    stream.group_by("k").agg(n=count_distinct("n")).upsert_into(sqlite(tmp_path / "a.db", "a"))
    assert pipeline.test()["a"][0]["n"] == 3


def test_windows_are_part_of_the_key(tmp_path: Path) -> None:
    times = [datetime.datetime(2026, 1, 1, 10, minute, tzinfo=UTC) for minute in (1, 29, 31)]
    pipeline = Pipeline("rows")
    stream = pipeline.read([{"k": "a", "at": at} for at in times], k=str, at=datetime.datetime)
    per = {"half": tumbling("30 min"), "hop": hopping("1 h", "30 min"), "slide": sliding("1 h", "30 min")}
    for name, windows in per.items():
        table = stream.window(windows, on="at").filter("k = 'a'").group_by("k").agg(n=count())
        table.upsert_into(sqlite(tmp_path / "a.db", name), name=name)
    found = pipeline.test(faults=[replay()])
    assert [(row["window_start"].strftime("%H:%M"), row["n"]) for row in found["half"]] == [("10:00", 2), ("10:30", 1)]
    assert [(row["window_start"].strftime("%H:%M"), row["n"]) for row in found["hop"]] == [
        *(("09:30", 2), ("10:00", 3), ("10:30", 1)),
    ]
    assert list(found["slide"]) == list(found["hop"])


def test_the_key_may_be_an_expression(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    table = pipeline.read(ROWS).filter("n > 0").group_by(odd="n % 2 = 1").agg(n=count())
    table.upsert_into(sqlite(tmp_path / "a.db", "a"))
    assert pipeline.test()["a"] == [{"odd": False, "n": 1}, {"odd": True, "n": 2}]


def test_several_sources_are_tested_by_name(tmp_path: Path) -> None:
    from ratchet import Json

    pipeline = Pipeline("shop")
    orders = pipeline.read_kafka("orders", value=Json(shop=str, cents=int), bootstrap_servers="127.0.0.1:1")
    refunds = pipeline.read_kafka("refunds", value=Json(shop=str, cents=int))
    both = orders.merge(refunds.with_columns(cents="-cents"))
    both.group_by("shop").agg(cents=sum_("cents")).upsert_into(sqlite(tmp_path / "a.db", "a"), name="balance")
    given = {"orders": [{"shop": "x", "cents": 5}, {"shop": "y", "cents": 7}], "refunds": [{"shop": "x", "cents": 2}]}
    assert pipeline.test(given)["balance"] == [{"shop": "x", "cents": 3}, {"shop": "y", "cents": 7}]


def test_a_test_survives_what_goes_wrong(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    stream = pipeline.read([{"k": str(n % 3), "n": n} for n in range(50)])
    stream.group_by("k").agg(n=sum_("n")).upsert_into(sqlite(tmp_path / "a.db", "a"))
    expected = pipeline.test()
    faults = [replay(1), fail_attempt(2), crash(3), crash(4, when="written")]
    assert pipeline.test(take=7, faults=faults) == expected


def test_no_rows_leave_the_sinks_empty(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    pipeline.read([], k=str).group_by("k").agg(n=count()).upsert_into(sqlite(tmp_path / "a.db", "a"))
    assert pipeline.test() == {"a": []}


def test_a_step_that_guesses_gives_all_of_its_sinks_the_same_rows(tmp_path: Path) -> None:
    import uuid

    pipeline = Pipeline("rows")
    marked = pipeline.read(ROWS).map(lambda row: uuid.uuid4().hex, mark=str)
    marked.append_into(parquet(tmp_path / "a"), name="a")
    marked.filter("mark is not null").append_into(parquet(tmp_path / "b"), name="b")
    found = pipeline.test()
    assert found["a"] == found["b"]
    assert not pipeline.build()["rows-steps"].instance.deterministic


def test_a_value_that_an_expression_refuses_is_a_bad_record(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    pipeline.read([{"s": "1"}, {"s": "x"}]).cast(s=int).append_into(parquet(tmp_path / "a"), name="a")
    with pytest.raises(TopologyFailed, match=r"test_operators.py:\d+: cast\(s=int\)"):
        pipeline.test()


def test_types_that_polars_has_not_pass_through_unchanged(tmp_path: Path) -> None:
    types = {"t": pa.time64("us"), "s": pa.timestamp("s"), "f": pa.binary(2), "d": pa.decimal128(12, 3), "n": pa.int8()}
    row = {
        "t": datetime.time(1, 2),
        "s": datetime.datetime(2026, 1, 1),
        "f": b"ab",
        "d": decimal.Decimal("1.500"),
        "n": 3,
    }
    pipeline = Pipeline("rows")
    stream = pipeline.read([row], **types).filter("n = 3").with_columns(m="n + 1")
    assert [stream.schema.field(name).type for name in types] == list(types.values())
    stream.append_into(parquet(tmp_path / "a"), name="a")
    assert pipeline.test()["a"] == [{**row, "m": 4}]


def test_a_stream_says_its_columns() -> None:
    stream = Pipeline("rows").read(ROWS).select("n")
    assert isinstance(stream, Stream)
    assert repr(stream) == "Stream(n: int64)"


def test_show_gives_the_first_rows_as_a_table(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    pipeline.read([{"n": n, "s": "<b>"} for n in range(9)]).append_into(parquet(tmp_path / "a"), name="a")
    shown = pipeline.show(2)
    assert len(shown["a"]) == 2
    assert "&lt;b&gt;" in shown._repr_html_()


def test_steps_take_any_number_of_rows() -> None:
    schema = pa.schema([("n", pa.int64())])
    step = Filter(call=Call("filter", "x.py:1"), schema=schema, condition=pl.col("n") > 1)
    for size in (0, 1, 1_000):
        batch = pa.record_batch({"n": pa.array(range(size), pa.int64())})
        assert applied([step], batch).height == max(size - 2, 0)


@pytest.mark.parametrize("faults", [[], [replay()]])
def test_every_row_is_appended_to_a_table_of_a_database(faults: Any, tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    rows = pipeline.read([{"k": "a", "n": 1}, {"k": "a", "n": 1}, {"k": "b", "n": 2}])
    rows.filter("n > 0").append_into(sqlite(tmp_path / "a.db", "raw"), name="raw")
    found = [{"k": row["k"], "n": row["n"]} for row in pipeline.test(faults=faults)["raw"]]
    assert found == [{"k": "a", "n": 1}, {"k": "a", "n": 1}, {"k": "b", "n": 2}]


@pytest.mark.parametrize("faults", [[], [replay()]])
def test_the_newest_row_of_a_key_is_kept(faults: Any, tmp_path: Path) -> None:
    rows = [("a", 2, "u"), ("a", 1, "u"), ("b", 1, "u"), ("b", 2, "d"), ("c", 1, None), ("c", 1, "u")]
    pipeline = Pipeline("rows")
    stream = pipeline.read([dict(zip(("k", "v", "op"), row, strict=True)) for row in rows])
    table = stream.latest_by("k", sequence_by="v", delete_when="op = 'd'")
    table.upsert_into(sqlite(tmp_path / "a.db", "newest"), name="newest")
    found = sorted((row["k"], row["v"], row["op"]) for row in pipeline.test(take=4, faults=faults)["newest"])
    assert found == [("a", 2, "u"), ("c", 1, "u")]


def test_rows_for_a_topic_are_those_of_the_stream() -> None:
    pipeline = Pipeline("rows")
    rows = pipeline.read([{"k": "a", "n": 1}, {"k": "b", "n": 2}])
    rows.filter("n > 1").to_kafka("large", key="k", name="large", bootstrap_servers="127.0.0.1:1")
    assert pipeline.test()["large"] == [{"k": "b", "n": 2}]


def test_newest_rows_and_appended_rows_are_in_the_file_after_a_run(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    stream = pipeline.read(
        [{"k": "a", "v": 2, "gone": False}, {"k": "a", "v": 1, "gone": False}, {"k": "b", "v": 1, "gone": True}]
    )
    stream.latest_by("k", sequence_by="v", delete_when="gone").upsert_into(sqlite(tmp_path / "a.db", "newest"))
    stream.drop("gone").append_into(sqlite(tmp_path / "a.db", "raw"))
    pipeline.run({}, MemoryStore(), "local", timeout_s=60)
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        assert connection.execute("SELECT k, v FROM newest").fetchall() == [("a", 2)]
        assert connection.execute("SELECT k, v FROM raw ORDER BY k, v").fetchall() == [("a", 1), ("a", 2), ("b", 1)]
