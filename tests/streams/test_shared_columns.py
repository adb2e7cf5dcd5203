"""Several aggregates of one column, and columns that functions return, with values at the limits of
their types."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework.errors import TopologyError
from ratchet import (
    Json,
    Pipeline,
    Stream,
    collect,
    count,
    count_distinct,
    first,
    last,
    max_,
    mean,
    min_,
    parquet,
    session,
    sliding,
    sqlite,
    sum_,
    top,
    tumbling,
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


TEXTS = ["1.5", "1e-50", "1e-100000000", "1e400", "-1e400", "x", "1.234", "25e-1", "Infinity", "inf"]
D = pa.decimal128(10, 2)
#: Declared types, and which of the texts they hold.
HELD: dict[str, tuple[Any, Any, list[str]]] = {
    "decimals": (pa.string(), D, ["1.5", "25e-1"]),
    "floats": (pa.string(), float, ["1.5", "1e-50", "1e-100000000", "1.234", "25e-1", "Infinity", "inf"]),
    "lists of decimals": (pa.list_(pa.string()), pa.list_(D), ["1.5", "25e-1"]),
    "objects of decimals": (pa.struct([("a", pa.string())]), pa.struct([("a", D)]), ["1.5", "25e-1"]),
    "lists of floats": (
        pa.list_(pa.string()),
        pa.list_(pa.float32()),
        ["1.5", "1e-50", "1e-100000000", "1.234", "25e-1", "Infinity", "inf"],
    ),
}


def numbers_in(folder: Path, take: int, was: Any, given: Sequence[Any], make: Callable[[Stream], Stream]) -> list[int]:
    """Which of the values a step does not refuse."""
    shop = Pipeline("shop")
    value = Json(n=int, v=was)
    make(shop.read_kafka("texts", value=value, bootstrap_servers=BROKER, on_bad_record="skip")).append_into(
        parquet(folder / "out"), name="out"
    )
    rows = [{"n": n, "v": each} for n, each in enumerate(given)]
    return sorted(row["n"] for row in shop.test({"texts": rows}, take=take)["out"])


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 1000])
@pytest.mark.parametrize("kind", ["arrow", "polars", "pandas"])
@pytest.mark.parametrize("case", HELD)
def test_texts_that_no_declared_type_holds_are_bad_records(case: str, kind: Any, take: int, tmp_path: Path) -> None:
    was, declared, held = HELD[case]
    given = [[each] if "lists" in case else {"a": each} if "objects" in case else each for each in TEXTS]
    found = numbers_in(
        tmp_path, take, was, given, lambda s: s.map_batches(lambda table: table, kind=kind, n=int, v=declared)
    )
    assert [TEXTS[n] for n in found] == held


@pytest.mark.parametrize("take", [1, 1000])
@pytest.mark.parametrize("kind", ["arrow", "polars", "pandas"])
def test_numbers_that_a_declared_type_would_cut_are_bad_records(kind: Any, take: int, tmp_path: Path) -> None:
    def kept(was: Any, declared: Any, given: Sequence[Any]) -> list[Any]:
        folder = tmp_path / str(declared)
        make = lambda s: s.map_batches(lambda table: table, kind=kind, n=int, v=declared)  # noqa: E731
        return [given[n] for n in numbers_in(folder, take, was, given, make)]

    assert kept(float, D, [0.1, 1.234, 1e-50, 12.0, -0.0]) == [0.1, 12.0, -0.0]
    assert kept(int, D, [1, 2**40, -7]) == [1, -7]
    assert kept(float, pa.float32(), [0.1, 1e300]) == [0.1]
    assert kept(float, int, [1.0, 1.5]) == [1.0]


@pytest.mark.parametrize("take", [1, 1000])
def test_a_cast_rounds_and_refuses_what_does_not_fit(take: int, tmp_path: Path) -> None:
    for number, (was, declared, given, kept) in enumerate(
        [
            (str, D, ["1.236", "1e-50", "1e-100000000", "1e9", "x"], [0, 1, 2]),
            (str, float, ["1", "1e400", "inf", "-1e999"], [0, 2]),
            (float, pa.float32(), [0.1, 1e300], [0]),
            (pa.list_(pa.string()), pa.list_(pa.float64()), [["1", "1e400"], ["1", None], None], [1, 2]),
            (float, int, [1.5, 1e300], [0]),
        ]
    ):
        make = lambda s, declared=declared: s.cast(v=declared)  # noqa: E731
        assert numbers_in(tmp_path / str(number), take, was, given, make) == kept


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


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 5, 1000])
@pytest.mark.parametrize(
    "windows",
    [tumbling("3 min"), sliding("4 min", "1 min"), session("30 s")],
    ids=["tumbling", "sliding", "session"],
)
def test_a_sum_of_a_window_beyond_its_type_leaves_others_as_they_are(take: int, windows: Any, tmp_path: Path) -> None:
    """The records of the window come in one transaction, or in several."""

    def closed(rows: Sequence[tuple[str, int, float]]) -> list[dict[str, Any]]:
        shop = Pipeline("shop", state=lambda name: sqlite(tmp_path / f"{len(rows)}.db", name))
        stream = shop.read_kafka(
            "numbers", value=Json(k=str, v=int, at=datetime.datetime), bootstrap_servers=BROKER, on_bad_record="skip"
        )
        sums = stream.window(windows, on="at", late="1 min").group_by("k").agg(s=sum_("v")).when_closed(name="sums")
        sums.append_into(sqlite(tmp_path / "out.db", "out"), name="out")
        start = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)
        records = [{"k": k, "v": v, "at": start + datetime.timedelta(minutes=after)} for k, v, after in rows]
        return [row for row in shop.test({"numbers": records}, take=take)["out"] if row["k"] == "x"]

    good = [("x", 1, float(minute)) for minute in range(20)]
    hostile = [*good[:10], *[("b", 2**63 - 1, 10 + part * 0.4) for part in range(3)], *good[10:]]
    assert closed(hostile) == closed(good) != []


def test_a_time_of_day_becomes_a_text_with_its_fraction() -> None:
    made = Pipeline("times")
    moments = [datetime.time(23, 59, 59, 999000), datetime.time(1, 2, 3, 4), datetime.time(0), None]
    rows = made.read([{"at": each} for each in moments], at=pa.time64("us"))
    rows.cast(at=str).append_into(parquet("texts"), name="texts")
    found = {each["at"] for each in made.test()["texts"]}
    assert found == {"23:59:59.999", "01:02:03.000004", "00:00:00", None}


def test_sql_that_cuts_the_fraction_of_a_time_of_day_is_refused() -> None:
    rows = Pipeline("times").read([{"at": datetime.time(1)}], at=pa.time64("us"))
    with pytest.raises(TopologyError, match=r"cuts the fraction .* write pl.col\('at'\).dt.to_string\('%T%.f'\)"):
        rows.select(x="CAST(at AS VARCHAR)")
