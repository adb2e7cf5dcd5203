"""Queries of rows over a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from framework.errors import TopologyError
from ratchet import Pipeline, parquet

ROWS: list[dict[str, Any]] = [
    {"shop": "x", "cents": 5, "note": "a, 'b' FROM c"},
    {"shop": "y", "cents": 20, "note": None},
    {"shop": "x", "cents": None, "note": "("},
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT * FROM stream", ROWS),
        ("select shop, cents + 1 as more\nfrom stream\nwhere cents > 5", [{"shop": "y", "more": 21}]),
        ("SELECT *, cents * 2 AS twice FROM stream WHERE cents = 5", [{**ROWS[0], "twice": 10}]),
        ("SELECT CASE WHEN cents > 5 THEN 'large' ELSE 'small' END AS size FROM stream WHERE cents IS NOT NULL",
         [{"size": "small"}, {"size": "large"}]),
        ("SELECT shop FROM stream WHERE note = 'a, ''b'' FROM c'", [{"shop": "x"}]),
        ("SELECT COALESCE(cents, 0) AS cents FROM STREAM WHERE shop IN ('x', 'z')", [{"cents": 5}, {"cents": 0}]),
        ("SELECT shop AS order, cents AS offset FROM stream WHERE cents = 5", [{"order": "x", "offset": 5}]),
        ('SELECT "shop" AS "where" FROM stream WHERE cents IS DISTINCT FROM 5', [{"where": "y"}, {"where": "x"}]),
    ],
)  # fmt: skip
def test_a_query_gives_rows(query: str, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    shop = Pipeline("shop")
    shop.read(ROWS, shop=str, cents=int, note=str).sql(query).append_into(parquet(tmp_path / "out"), name="out")
    assert sorted(map(repr, shop.test()["out"])) == sorted(map(repr, expected))
    whole = pl.SQLContext(stream=pl.DataFrame(ROWS)).execute(query.replace("STREAM", "stream"), eager=True)
    assert sorted(map(repr, whole.to_dicts())) == sorted(map(repr, expected))


def test_the_types_of_a_query_are_known_before_it_runs() -> None:
    read = Pipeline("shop").read(ROWS, shop=str, cents=int, note=str)
    found = read.sql("SELECT CAST(cents AS DOUBLE) / 2 AS half, length(shop) > 1 AS long, shop FROM stream").schema
    assert found == pa.schema([("half", pa.float64()), ("long", pa.bool_()), ("shop", pa.string())])


def test_columns_may_be_called_as_clauses_are() -> None:
    shop = Pipeline("shop")
    read = shop.read([{"order": "a", "offset": 1, "limit": 2}], order=str, offset=int, limit=int)
    query = """SELECT order, offset FROM stream WHERE "offset" > 0 AND "order" = 'a'"""
    read.sql(query).append_into(parquet("out"), name="out")
    assert list(shop.test()["out"]) == [{"order": "a", "offset": 1}]


def test_columns_that_a_query_leaves_out_are_not_read() -> None:
    shop = Pipeline("shop")
    read = shop.read(ROWS, shop=str, cents=int, note=str)
    read.sql("SELECT shop FROM stream WHERE cents > 1").append_into(parquet("out"), name="out")
    assert shop.build().spout.streams["default"].names == ("shop", "cents")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT SUM(cents) AS n FROM stream", "needs several rows together.*use group_by"),
        ("SELECT COUNT(*) AS n FROM stream", "needs several rows together.*use group_by"),
        ("SELECT SUM(cents) OVER (PARTITION BY shop) AS n FROM stream", "needs several rows together"),
        ("SELECT shop FROM stream GROUP BY shop", r"GROUP BY needs several rows together: use group_by\(...\).agg"),
        ("SELECT DISTINCT shop FROM stream", r"use deduplicate\(...\)"),
        ("SELECT shop FROM stream ORDER BY shop", "ORDER BY needs the end of a stream"),
        ("WITH a AS (SELECT 1) SELECT shop FROM a", "a query inside a query"),
        ("SELECT * EXCLUDE (shop) FROM stream", r"use drop\(...\)"),
        ("SELECT shop FROM stream WHERE cents > 1 OFFSET 5", "OFFSET needs the end of a stream"),
        ("SELECT shop FROM stream LIMIT 5", "LIMIT needs the end of a stream"),
        ("SELECT shop FROM stream JOIN other ON a = b", r"use join\(...\)"),
        ("SELECT shop FROM stream, other", r"join two streams by join\(...\)"),
        ("SELECT shop FROM stream UNION SELECT shop FROM stream", r"a query inside a query|use merge"),
        ("SELECT shop FROM orders", "write FROM stream"),
        ("SELECT shop FROM stream s", "write FROM stream"),
        ("SELECT shop", "write FROM stream"),
        ("SELECT shop WHERE cents > 1", "is no query|write FROM stream"),
        ("UPDATE stream SET a = 1", "is no query: write SELECT"),
        ("SELECT (SELECT 1) AS one FROM stream", "a query inside a query"),
        ("SELECT shop, FROM stream", "something is missing"),
        ("SELECT shop FROM stream WHERE", "something is missing"),
        ("SELECT shp FROM stream", "there is no column 'shp'; is it 'shop'"),
        ("SELECT shop FROM stream WHERE cents", "a condition is true or false, and this is int64"),
        ("SELECT *, shop FROM stream", "there would be two columns 'shop'"),
        ("SELECT now() AS t FROM stream", "asks for the time"),
        ("SELECT shop FROM stream; DROP TABLE stream", "without a semicolon"),
        ("", "write FROM stream|is no query"),
        (5, "give SQL text"),
    ],
)
def test_what_is_no_query_of_rows_is_refused_with_the_operator(query: Any, said: str) -> None:
    read = Pipeline("shop").read(ROWS, shop=str, cents=int, note=str)
    with pytest.raises(TopologyError, match=rf"(?s)test_sql.py:\d+: sql\(.*(?:{said})"):
        read.sql(query)
