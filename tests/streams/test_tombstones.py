"""Tombstones on their way through steps to the tables whose rows they delete."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TopologyFailed
from framework.errors import TopologyError
from framework.transactions import MemoryStore
from ratchet import Debezium, Json, Pipeline, Stream, Text, parquet, postgres, sqlite
from sinks import SqliteTable, UpsertCommitter
from tests.kit.row_tables import SqliteDatabase
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

Make = Callable[[Stream], Stream]


def shop(folder: Path, servers: str = "127.0.0.1:1", **options: Any) -> tuple[Pipeline, Stream]:
    pipeline = Pipeline("shop", state=lambda name: sqlite(folder / "state.db", name))
    orders = pipeline.read_kafka(
        "orders", key=Text("id"), value=Json(n=int, items=pa.list_(pa.int64())), bootstrap_servers=servers, **options
    )
    return pipeline, orders


def put(key: str, n: int, *items: int) -> dict[str, Any]:
    return {"id": key, "n": n, "items": list(items) or [n]}


def gone(key: str) -> dict[str, Any]:
    return {"id": key, "tombstone": True}


ROWS = [put("a", 1), put("b", 2), gone("a"), put("c", 3), gone("c"), put("c", 4), gone("never")]


def negative(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "n": -row["n"]}


STEPS: dict[str, tuple[Make, list[dict[str, Any]]]] = {
    "filter": (lambda s: s.filter("n > 0").select("id", "n"), [{"id": "b", "n": 2}, {"id": "c", "n": 4}]),
    "filter by absence": (
        lambda s: s.filter("n IS NOT NULL").select("id", "n"),
        [{"id": "b", "n": 2}, {"id": "c", "n": 4}],
    ),
    "filter by function": (
        lambda s: s.filter(lambda row: row["n"] < 4).select("id", "n"),
        [{"id": "b", "n": 2}],
    ),
    "with_columns": (
        lambda s: s.with_columns(m="n * 2").drop("items"),
        [{"id": "b", "n": 2, "m": 4}, {"id": "c", "n": 4, "m": 8}],
    ),
    "a key that is computed of the key": (
        lambda s: s.select("n", id="upper(id)"),
        [{"id": "B", "n": 2}, {"id": "C", "n": 4}],
    ),
    "map": (lambda s: s.map(negative, id=str, n=int), [{"id": "b", "n": -2}, {"id": "c", "n": -4}]),
    "flat_map": (
        lambda s: s.flat_map(lambda row: [negative(row), {"id": row["id"], "n": 7}], id=str, n=int),
        [{"id": "b", "n": 7}, {"id": "c", "n": 7}],
    ),
    "map_batches": (
        lambda s: s.map_batches(lambda table: table.select(["id", "n"]), id=str, n=int),
        [{"id": "b", "n": 2}, {"id": "c", "n": 4}],
    ),
    "map_batches of a column called run": (
        lambda s: s.select("id", run="n").map_batches(lambda t: t, id=str, run=int).select("id", n="run"),
        [{"id": "b", "n": 2}, {"id": "c", "n": 4}],
    ),
    "explode": (lambda s: s.explode("items").select("id", n="items"), [{"id": "b", "n": 2}, {"id": "c", "n": 4}]),
    "lookup": (
        lambda s: s.select("id", "n").lookup(lambda key: key * 2, on="id", found=str),
        [{"id": "b", "n": 2, "found": "bb"}, {"id": "c", "n": 4, "found": "cc"}],
    ),
    "branch": (
        lambda s: s.select("id", "n").branch(large="n > 3", small="n <= 3")["small"],
        [{"id": "b", "n": 2}],
    ),
    "merge": (
        lambda s: s.select("id", "n").filter("n < 4").merge(s.select("id", "n").filter("n >= 4")),
        [{"id": "b", "n": 2}, {"id": "c", "n": 4}],
    ),
    "many": (
        lambda s: s.filter("n < 9").map(negative, id=str, n=int).filter("n < 0").with_columns(n="n + 1"),
        [{"id": "b", "n": -1}, {"id": "c", "n": -3}],
    ),
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 2, 100])
@pytest.mark.parametrize("also_appended", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_tombstone_deletes_the_row_of_its_key_after_steps(
    name: str, take: int, also_appended: bool, tmp_path: Path
) -> None:
    make, expected = STEPS[name]
    pipeline, orders = shop(tmp_path)
    made = make(orders)
    made.latest_by(next(each for each in made.schema.names if each == "id")).upsert_into(
        sqlite(tmp_path / "a.db", "t"), name="t"
    )
    if also_appended:
        orders.append_into(sqlite(tmp_path / "a.db", "raw"), name="raw")
    found = pipeline.test({"orders": ROWS}, take=take)
    assert sorted(map(dict, found["t"]), key=repr) == sorted(expected, key=repr)
    if also_appended:
        assert [row["n"] for row in found["raw"]] == [1, 2, None, 3, None, 4, None]
        assert all("tombstone" not in row for row in found["raw"])


def test_steps_that_a_stream_and_a_table_share_give_the_stream_what_it_gets_alone(tmp_path: Path) -> None:
    def expected(with_table: bool) -> list[Any]:
        pipeline, orders = shop(tmp_path)
        made = (
            orders.filter("coalesce(n, 5) > 1")
            .map(lambda row: {"id": row["id"], "n": row["n"] or 0}, id=str, n=int)
            .with_columns(m="n + 1")
        )
        made.append_into(parquet(tmp_path / "files"), name="files")
        if with_table:
            made.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
        rows = ROWS if with_table else [{**row, "tombstone": None} for row in ROWS]
        given = rows if with_table else [{k: v for k, v in row.items() if k != "tombstone"} for row in rows]
        return [dict(row) for row in pipeline.test({"orders": given}, take=3)["files"]]

    assert expected(True) == expected(False)
    assert len(expected(True)) == 6


def test_an_expression_filter_by_the_key_keeps_the_tombstones_of_other_keys_out(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path)
    kept = orders.filter("id <> 'a'").select("id", "n")
    kept.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    topology = pipeline.build()
    assert [*topology.spout.streams["default"].names] == ["n", "id", "tombstone"]
    found = pipeline.test({"orders": [put("a", 1), gone("a"), put("b", 1), gone("b")]})
    assert list(found["t"]) == []


def test_a_step_that_makes_the_key_anew_is_refused(tmp_path: Path) -> None:
    _, orders = shop(tmp_path)
    made = orders.with_columns(id="cast(n as text)")
    with pytest.raises(TopologyError, match=r"with_columns.*'id' a value that a tombstone does not have.*tombstone"):
        made.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.with_columns(id="cast(n as text)").filter("n > 0"),
        lambda s: s.drop("id").with_columns(id="cast(n as text)").filter("n > 0"),
        lambda s: s.with_columns(id="cast(n as text)").with_columns(id="upper(id)").filter("id <> 'a'"),
    ],
)
def test_the_step_is_named_that_makes_the_key_anew(make: Make, tmp_path: Path) -> None:
    _, orders = shop(tmp_path)
    with pytest.raises(TopologyError, match=r"upsert_into\(.*\): \S+test_tombstones.py:\d+: with_columns\(id='cast"):
        make(orders).latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")


def test_a_user_who_asks_for_tombstones_decides(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=["tombstone"])
    made = orders.filter("not tombstone").with_columns(id="cast(n as text)").drop("tombstone")
    made.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    assert [row["id"] for row in pipeline.test({"orders": ROWS})["t"]] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "changing",
    [
        lambda s: s.map(lambda row: {"id": row["id"].upper(), "n": row["n"]}, id=str, n=int),
        lambda s: s.flat_map(lambda row: [(row["id"], 1), (row["id"] + "x", 2)], id=str, n=int),
        lambda s: s.map_batches(lambda t: t.with_columns(id=t["id"] + "x"), kind="polars", id=str, n=int),
    ],
)
def test_a_function_that_changes_the_key_is_told_apart(changing: Make, tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path)
    changing(orders).latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    with pytest.raises(TopologyFailed, match=r"the function changes 'id'.*tombstone"):
        pipeline.test({"orders": ROWS})


@pytest.mark.rule("C29")
@pytest.mark.parametrize("take", [1, 1000])
@pytest.mark.parametrize("kind", ["dict", "arrow", "polars", "pandas"])
def test_nan_is_a_key_that_a_function_leaves_as_it_is(kind: Any, take: int) -> None:
    """In pandas it is null, and the record is a bad one. SQLite has no NaN."""
    pipeline = Pipeline("shop")
    key, value = Json(k=float, non_finite=True), Json(n=int)
    orders = pipeline.read_kafka("orders", key=key, value=value, bootstrap_servers="127.0.0.1:1", on_bad_record="skip")
    if kind == "dict":
        same = orders.map(lambda row: {"k": float(str(row["k"])), "n": row["n"]}, k=float, n=int)
    else:
        same = orders.map_batches(lambda table: table, kind=kind, k=float, n=int)
    same.latest_by("k").upsert_into(postgres("postgresql://127.0.0.1:1/none", "t"), name="t")
    rows = [*({"k": math.nan, "n": n} for n in (1, 2)), {"k": -0.0, "n": 3}, {"k": 0.0, "tombstone": True}]
    found = [(str(row["k"]), row["n"]) for row in pipeline.test({"orders": rows}, take=take)["t"]]
    assert found == ([] if kind == "pandas" else [("nan", 2)])


def test_a_tombstone_and_a_condition_both_delete(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path)
    made = orders.select("id", "n").latest_by("id", delete_when="n = 2")
    made.upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    assert list(map(dict, pipeline.test({"orders": ROWS})["t"])) == [{"id": "c", "n": 4}]


@pytest.mark.parametrize("make", [lambda s: s, lambda s: s.filter("n > 0"), lambda s: s.filter("n > 0").drop("items")])
@pytest.mark.parametrize("end", ["table", "join", "committer"])
def test_a_sequence_that_a_tombstone_does_not_have_is_refused_at_its_line(make: Make, end: str, tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path)
    rows = make(orders)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    table = rows.latest_by("id", sequence_by="n")
    with pytest.raises(TopologyError) as raised:
        if end == "table":
            table.upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
        elif end == "join":
            sales = pipeline.read_kafka("sales", value=Json(id=str, sale=int))
            sales.join(table, on="id", name="joined")
        else:
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            rows.into(UpsertCommitter(SqliteTable(tmp_path / "a.db", "t"), ["id"], sequence_by="n"), name="t")
    call = "into(" if end == "committer" else "latest_by('id', sequence_by='n'): "
    assert str(raised.value).startswith(f"tests/streams/test_tombstones.py:{line}: {call}")
    assert "a tombstone deletes the row of its key, and has no 'n' to compare" in str(raised.value)
    assert "sequence_by='offset', or leave tombstones out" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tombstones_go_by_a_sequence_that_they_have(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=["offset"])
    made = orders.filter("n > 0").select("id", "n", "offset")
    made.latest_by("id", sequence_by="offset").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    found = pipeline.test({"orders": [{**row, "offset": offset} for offset, row in enumerate(ROWS)]}, take=2)
    assert sorted((row["id"], row["n"]) for row in found["t"]) == [("b", 2), ("c", 4)]


def test_tombstones_that_the_user_leaves_out_need_no_sequence(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=["tombstone"])
    made = orders.filter("not tombstone").select("id", "n")
    made.latest_by("id", sequence_by="n").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    found = pipeline.test({"orders": ROWS})
    assert sorted((row["id"], row["n"]) for row in found["t"]) == [("a", 1), ("b", 2), ("c", 4)]


def test_a_tombstone_that_the_user_keeps_and_that_has_no_sequence_is_a_bad_record(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=["tombstone"])
    made = orders.drop("items").latest_by("id", sequence_by="n")
    made.upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    with pytest.raises(TopologyFailed, match="a tombstone has no sequence 'n': use fields that tombstones have"):
        pipeline.test({"orders": ROWS})


def test_a_tombstone_that_the_user_keeps_and_that_has_no_key_of_the_table_is_a_bad_record(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=["tombstone"])
    made = orders.drop("items").latest_by("n")
    made.upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    with pytest.raises(TopologyFailed, match="a tombstone has no key field 'n': use as the key fields that tombstones"):
        pipeline.test({"orders": ROWS})


@pytest.mark.parametrize("tombstones", [False, True])
def test_a_format_that_leaves_out_tombstones_takes_any_sequence(tombstones: bool, tmp_path: Path) -> None:
    pipeline = Pipeline("shop")
    value = Debezium(Fields(n=int), metadata=["op", "lsn"], tombstones=tombstones)
    rows = pipeline.read_kafka("orders", key=Text("id"), value=value, bootstrap_servers="127.0.0.1:1")
    table = rows.latest_by("id", sequence_by="lsn", delete_when="op = 'd'")
    if tombstones:
        with pytest.raises(TopologyError, match="has no 'lsn'"):
            table.upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
        return
    table.upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    given = [{"id": "a", "n": 1, "op": "c", "lsn": 5}, {"id": "a", "n": 2, "op": "u", "lsn": 4}]
    assert [row["n"] for row in pipeline.test({"orders": given})["t"]] == [1]


def test_a_condition_goes_with_the_tombstones_that_the_user_asked_for(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=["tombstone"])
    orders.drop("items").latest_by("id", delete_when="n = 2").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    assert list(map(dict, pipeline.test({"orders": ROWS})["t"])) == [{"id": "c", "n": 4}]


@pytest.mark.parametrize("metadata", [[], ["tombstone"]])
def test_a_join_with_a_table_sees_what_its_tombstones_leave(metadata: list[str], tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path, metadata=metadata)
    sales = pipeline.read_kafka("sales", value=Json(id=str, sale=int))
    joined = sales.join(orders.drop("items").latest_by("id"), on="id", name="joined")
    joined.append_into(parquet(tmp_path / "files"), name="out")
    found = pipeline.test({"orders": ROWS, "sales": [{"id": key, "sale": 1} for key in "abc"]})
    assert sorted(map(dict, found["out"]), key=repr) == [
        {"id": "b", "sale": 1, "n": 2},
        {"id": "c", "sale": 1, "n": 4},
    ]


def test_a_committer_of_the_users_own_gets_the_tombstones_too(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path)
    committer = UpsertCommitter(SqliteTable(tmp_path / "a.db", "t"), ["id"])
    orders.filter("n < 9").select("id", "n").into(committer, name="t")
    found = pipeline.test({"orders": ROWS})["t"]
    assert sorted(row["id"] for row in found) == ["b", "c"]


def test_a_table_without_steps_has_no_bolt_between(tmp_path: Path) -> None:
    pipeline, orders = shop(tmp_path)
    orders.drop("items").latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    assert [each.id for each in pipeline.build().components] == ["kafka", "orders-steps", "t"]
    pipeline, orders = shop(tmp_path)
    orders.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    assert [each.id for each in pipeline.build().components] == ["kafka", "t"]


@pytest.mark.integration
def test_tombstones_of_a_topic_delete_rows_after_steps(topics: Topics, name: str, tmp_path: Path) -> None:
    topics.create(name, 1)
    producer = topics.producer()
    for key, value in [(b"a", b'{"n": 1}'), (b"b", b'{"n": 2}'), (b"a", None), (b"b", b"{}"), (b"c", None)]:
        producer.produce(name, value, key=key)
    producer.arrived()
    pipeline = Pipeline(name)
    orders = pipeline.read_kafka(
        name, key=Text("id"), value=Json(n=int), bootstrap_servers=topics.bootstrap_servers, batch_records_max=2
    )
    orders.with_columns(m="n + 1").filter("coalesce(n, 0) < 9").latest_by("id").upsert_into(
        sqlite(tmp_path / "rows.db", "rows"), name="rows"
    )
    orders.append_into(sqlite(tmp_path / "rows.db", "log"), name="log")
    with pipeline.submit({}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert SqliteDatabase(tmp_path / "rows.db").rows(name="rows", columns="id, n, m") == [("b", None, None)]
