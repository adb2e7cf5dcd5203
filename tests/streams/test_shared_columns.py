"""Several aggregates of one column, and columns that functions return, with values at the limits of
their types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ratchet import (
    Json,
    Pipeline,
    collect,
    count,
    count_distinct,
    first,
    last,
    max_,
    mean,
    min_,
    parquet,
    sqlite,
    sum_,
    top,
)

BROKER = "127.0.0.1:1"


@pytest.mark.parametrize("take", [1, 3, 1000])
@pytest.mark.parametrize("beside", [sum_("v"), mean("v")], ids=["sum", "mean"])
def test_a_large_integer_changes_no_aggregate_beside_a_sum(take: int, beside: Any, tmp_path: Path) -> None:
    shop = Pipeline("shop")
    rows = shop.read_kafka("numbers", value=Json(k=str, v=int), bootstrap_servers=BROKER)
    aggregates = {
        "d": count_distinct("v"),
        "l": collect("v"),
        "t": top("v", 2),
        "f": first("v"),
        "z": last("v"),
        "n": count(),
    }
    table = rows.group_by("k").agg(s=beside, low=min_("v"), high=max_("v"), **aggregates)
    table.upsert_into(sqlite(tmp_path / "a.db", "found"), name="found")
    values = [("x", 5), ("x", 6), ("b", 2**62), ("x", 7), ("x", 5), ("x", 6), ("y", 1), ("x", 7)]
    found = shop.test({"numbers": [{"k": k, "v": v} for k, v in values]}, take=take)["found"]
    (x,) = (row for row in found if row["k"] == "x")
    assert (x["s"], x["low"], x["high"]) == (36 if beside == sum_("v") else 6.0, 5, 7)
    assert (x["d"], x["l"], x["t"], x["f"], x["z"], x["n"]) == (3, "[5,6,7,5,6,7]", "[7,7]", 5, 7, 6)
    (b,) = (row for row in found if row["k"] == "b")
    assert (b["s"], b["l"], b["t"]) == (2**62, f"[{2**62}]", f"[{2**62}]")


@pytest.mark.parametrize("take", [1, 1000])
def test_lists_take_unsigned_integers(take: int, tmp_path: Path) -> None:
    shop = Pipeline("shop")
    rows = shop.read_kafka("numbers", value=Json(k=str, v=pa.uint64()), bootstrap_servers=BROKER)
    table = rows.group_by("k").agg(l=collect("v"), t=top("v", 2))
    table.upsert_into(sqlite(tmp_path / "a.db", "found"), name="found")
    given = [{"k": "x", "v": v} for v in (5, 2**64 - 1, 7)]
    (row,) = shop.test({"numbers": given}, take=take)["found"]
    assert (json.loads(row["l"]), json.loads(row["t"])) == ([5, 2**64 - 1, 7], [2**64 - 1, 7])


@pytest.mark.parametrize("take", [1, 1000])
@pytest.mark.parametrize("kind", ["arrow", "polars", "pandas"])
def test_far_decimals_that_a_function_passes_on_are_bad_records(kind: Any, take: int, tmp_path: Path) -> None:
    shop = Pipeline("shop")
    rows = shop.read_kafka("texts", value=Json(k=str, v=str), bootstrap_servers=BROKER, on_bad_record="skip")
    same = rows.map_batches(lambda table: table, kind=kind, k=str, v=pa.decimal128(10, 2))
    same.append_into(parquet(tmp_path / "out"), name="out")
    texts = ["1.5", "1e-100000000", "1e100000000", "nan", "2", "1.234"]
    found = shop.test({"texts": [{"k": "x", "v": each} for each in texts]}, take=take)["out"]
    assert [str(row["v"]) for row in found] == ["1.50", "2.00"]


@pytest.mark.parametrize("take", [1, 1000])
def test_values_of_pandas_that_arrow_refuses_are_bad_records(take: int, tmp_path: Path) -> None:
    def parsed(frame: Any) -> Any:
        return frame.assign(v=[json.loads(each) for each in frame["v"]])

    shop = Pipeline("shop")
    rows = shop.read_kafka("texts", value=Json(k=str, v=str), bootstrap_servers=BROKER, on_bad_record="skip")
    same = rows.map_batches(parsed, kind="pandas", k=str, v=int)
    same.append_into(parquet(tmp_path / "out"), name="out")
    texts = ["1", f"{2**70}", '"x"', "[1]", '{"a": 1}', '"\\ud800"', "2"]
    found = shop.test({"texts": [{"k": "x", "v": each} for each in texts]}, take=take)["out"]
    assert [row["v"] for row in found] == [1, 2]
