"""Steps that go by event time, in this process."""

from __future__ import annotations

import contextlib
import datetime
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, TransactionalTopologyBuilder
from framework.durations import micros_of
from framework.errors import ConfigError, TopologyError
from framework.operators.event_window_assigner import EventWindows
from framework.streams.steps_bolt import StepsBolt
from framework.testing import crash, replay
from framework.transactions import MemoryStore
from framework.transactions.topology_change_messages import without_steps
from ratchet import Json, Pipeline, Stream, collect, count, max_, parquet, session, sliding, sqlite, sum_, tumbling
from sinks import (
    DeduplicatingCommitter,
    KafkaSink,
    OpaqueMapState,
    SqliteBackend,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for

BROKER = "127.0.0.1:1"
PLACE = ["topic", "partition"]


def at(minute: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, 10, minute, tzinfo=datetime.UTC)


ROWS = [{"shop": shop, "cents": cents, "at": at(minute)} for shop, cents, minute in (
    ("x", 1, 0), ("x", 2, 4), ("y", 3, 5), ("x", 4, 3), ("x", 5, 12), ("x", 6, 1), ("y", 7, 30),
)]  # fmt: skip


def pipeline_in(folder: Path) -> Pipeline:
    return Pipeline("shop", state=lambda name: sqlite(folder / "state.db", name))


@pytest.mark.each_value_once
@pytest.mark.parametrize("faults", [[], [replay()], [crash()]])
@pytest.mark.parametrize("take", [1, 1000])
def test_a_window_is_sent_once_when_it_closes(faults: Any, take: int, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    windows = shop.read(ROWS).window(tumbling("5 min"), on="at", late="5 min").filter("shop <> 'z'")
    closed = windows.group_by("shop").agg(cents=sum_("cents * 10")).when_closed(name="closed")
    closed.append_into(parquet(tmp_path / "out"), name="out")
    closed.to_kafka("closed-windows", key="shop", name="sent", bootstrap_servers=BROKER)
    tables = shop.test(faults=faults, take=take)
    found = {(row["shop"], row["window_start"], row["cents"]) for row in tables["out"]}
    # With one row at a time, the row of 10:01 comes after its window; in one batch, it does not.
    assert len(tables["out"]) == len(found) == 3
    assert found == {("x", at(0), 70 if take == 1 else 130), ("y", at(5), 30), ("x", at(10), 50)}
    assert list(tables["sent"]) == list(tables["closed"])
    assert "shop" not in tables and "closed-watermark" not in tables


@pytest.mark.parametrize(
    ("windows", "times", "bounds"),
    [
        (tumbling("1 day", zone="Europe/Berlin"), ["2026-03-28T23:00", "2026-03-29T21:59"], ("2026-03-28T23:00", 23)),
        (tumbling("1 day", zone="Europe/Berlin"), ["2026-10-24T22:00", "2026-10-25T22:59"], ("2026-10-24T22:00", 25)),
        (tumbling("1 h", origin="15 min"), ["2026-01-01T10:15", "2026-01-01T11:14"], ("2026-01-01T10:15", 1)),
    ],
    ids=["23 hours", "25 hours", "origin"],
)
def test_windows_have_the_bounds_of_their_zone_and_origin(
    windows: EventWindows, times: list[str], bounds: tuple[str, int], tmp_path: Path
) -> None:
    shop = pipeline_in(tmp_path)
    moments = [datetime.datetime.fromisoformat(f"{each}+00:00") for each in times]
    after = moments[-1] + datetime.timedelta(minutes=1)  # in the next window
    rows = [{"shop": "x", "at": moment} for moment in (*moments, after, after + datetime.timedelta(days=1))]
    counted = shop.read(rows).window(windows, on="at").group_by("shop").agg(n=count()).when_closed(name="closed")
    counted.append_into(parquet(tmp_path / "out"), name="out")
    first, _ = shop.test()["out"]
    start = datetime.datetime.fromisoformat(f"{bounds[0]}+00:00")
    end = start + datetime.timedelta(hours=bounds[1])
    assert (first["window_start"], first["window_end"], first["n"]) == (start, end, 2)


@pytest.mark.parametrize("faults", [[], [replay()], [crash()]])
def test_a_session_is_sent_once_when_it_closes(faults: Any, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    visits = shop.read(ROWS).window(session("5 min"), on="at", late="5 min").filter("cents < 7 or shop = 'y'")
    closed = visits.group_by("shop").agg(cents=sum_("cents * 10"), all=collect("cents")).when_closed(name="closed")
    closed.append_into(parquet(tmp_path / "out"), name="out")
    rows = shop.test(faults=faults, take=1000)["out"]
    found = {(row["shop"], row["session_start"], row["session_end"], row["cents"], row["all"]) for row in rows}
    assert found == {
        ("x", at(0), at(9), 130, "[1,2,4,6]"),
        ("x", at(12), at(17), 50, "[5]"),
        ("y", at(5), at(10), 30, "[3]"),
    }
    assert len(rows) == len(found)


def test_an_open_session_goes_nowhere(tmp_path: Path) -> None:
    visits = pipeline_in(tmp_path).read(ROWS).window(session("5 min"), on="at")
    per_shop = visits.group_by("shop").agg(cents=sum_("cents"))
    for take in (
        lambda: visits.append_into(parquet(tmp_path / "out"), name="out"),
        lambda: per_shop.upsert_into(sqlite(tmp_path / "x.db", "out"), name="out"),
        lambda: visits.join(visits.filter("cents > 1"), on="shop", times="at", within="1 h", name="j"),
        lambda: visits.merge(visits.filter("cents > 1")).append_into(parquet(tmp_path / "out"), name="out"),
    ):
        with pytest.raises(TopologyError, match="a session is known when it closes|rows of this stream twice"):
            take()
    with pytest.raises(ConfigError, match="the gap of a session"):
        session("0 s")


def orders_and_payments(shop: Pipeline) -> tuple[Stream, Stream]:
    orders, payments = (Json(order=str, at=datetime.datetime, **{name: int}) for name in ("cents", "paid"))
    return (
        shop.read_kafka("orders", value=orders, metadata=PLACE, bootstrap_servers=BROKER),
        shop.read_kafka("payments", value=payments, metadata=PLACE),
    )


@pytest.mark.each_value_once
@pytest.mark.parametrize("faults", [[], [replay()], [crash()]])
@pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
def test_pairs_within_a_bound_come_once(faults: Any, how: Any, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    orders, payments = orders_and_payments(shop)
    joined = orders.join(
        payments.filter("paid > 0"), on="order", times="at", within="5 min", name="matched", how=how, late="1 min"
    )
    joined.filter("cents is null or cents < 100").append_into(parquet(tmp_path / "out"), name="out")
    records = {
        "orders": [
            {"order": "a", "at": at(0), "cents": 1, "topic": "orders", "partition": 0},
            {"order": "b", "at": at(1), "cents": 2, "topic": "orders", "partition": 0},
            {"order": "z", "at": at(50), "cents": 3, "topic": "orders", "partition": 0},
        ],
        "payments": [
            {"order": "a", "at": at(4), "paid": 10, "topic": "payments", "partition": 0},
            {"order": "b", "at": at(9), "paid": 20, "topic": "payments", "partition": 0},
            {"order": "a", "at": at(5), "paid": 0, "topic": "payments", "partition": 0},
            {"order": "y", "at": at(50), "paid": 30, "topic": "payments", "partition": 0},
        ],
    }
    rows = shop.test(records, faults=faults, take=1)["out"]
    found = [(row["order"], row["at"], row["cents"], row["at_right"], row["paid"]) for row in rows]
    expected: list[Any] = [("a", at(0), 1, at(4), 10)]
    if how in ("left", "outer"):
        expected.append(("b", at(1), 2, None, None))
    if how in ("right", "outer"):
        expected.append(("b", None, None, at(9), 20))
    assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_two_branches_of_a_stream_are_joined(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(ROWS)
    cheap, dear = rows.filter("cents < 4"), rows.filter("cents >= 4").select("shop", "at", price="cents")
    cheap.join(dear, on="shop", times="at", within="1 min", name="near").append_into(
        parquet(tmp_path / "out"), name="out"
    )
    found = [(row["shop"], row["cents"], row["price"]) for row in shop.test(take=1000)["out"]]
    assert sorted(found) == [("x", 1, 6), ("x", 2, 4)]


def test_a_join_that_cannot_be_is_refused(tmp_path: Path) -> None:
    orders, payments = orders_and_payments(pipeline_in(tmp_path))
    other = pipeline_in(tmp_path).read(ROWS)
    renamed = payments.rename({"paid": "at_right"})
    for join, said in (
        (lambda: orders.join("x", on="order", times="at", within="1 h", name="j"), "'x' is a str: give a stream"),
        (lambda: orders.join(other, on="shop", times="at", within="1 h", name="j"), "of two pipelines"),
        (lambda: orders.join(payments, on="ordr", times="at", within="1 h", name="j"), "is it 'order'"),
        (lambda: orders.join(payments, on="order", times=("at", "paid"), within="1 h", name="j"), "the times differ"),
        (lambda: orders.join(renamed, on="order", times="at", within="1 h", name="j"), "two columns 'at_right'"),
        (lambda: orders.join(payments, on="order", times="at", within="x", name="j"), "within"),
        (lambda: orders.join(payments, on="order", times="at", within="1 h", name="j", how="x"), "how is 'x'"),
    ):
        with pytest.raises(TopologyError, match=said):
            join()


@pytest.mark.parametrize("faults", [[], [replay()]])
def test_repeats_are_dropped(faults: Any, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    seen = shop.read(ROWS).deduplicate("shop", within="10 min", on="at", name="seen", late="1 h")
    seen.append_into(parquet(tmp_path / "out"), name="out")
    found = [(row["shop"], row["cents"]) for row in shop.test(faults=faults, take=2)["out"]]
    assert sorted(found) == [("x", 1), ("x", 5), ("y", 3), ("y", 7)]


def closed_of(shop: Pipeline, *, short: bool = False, **bounds: Any) -> Stream:
    """``short``: the window of all rows ends 100 ms after them."""
    length, late = ("100 ms", 0) if short else ("5 min", "5 min")
    windows = shop.read(ROWS[: 1 if short else 3]).window(tumbling(length), on="at", late=late, **bounds)
    return windows.group_by("shop").agg(cents=sum_("cents")).when_closed(name="closed")


def first_of(shop: Pipeline, **bounds: Any) -> Stream:
    return shop.read(ROWS[:3]).deduplicate("shop", within="10 min", on="at", name="first", **bounds)


def pairs_of(shop: Pipeline, *, short: bool = False, **bounds: Any) -> Stream:
    """``short``: a row without a partner is known 100 ms after it."""
    rows = shop.read(ROWS[: 1 if short else 3])
    paid = rows.filter("cents > 2").rename(cents="paid")
    within = "100 ms" if short else "1 h"
    return rows.filter("cents < 3").join(paid, on="shop", times="at", within=within, name="pairs", how="left", **bounds)


def bounds_of(made: Stream) -> list[tuple[Any, ...]]:
    found = [each.bolt for each in made._pipeline._placed if isinstance(each.bolt, WatermarkCommitter)]
    return [(each._max_ahead, each._idle_after, each._advance_when_idle) for each in found]


@pytest.mark.parametrize("make", [closed_of, first_of, pairs_of])
def test_the_bounds_of_a_step_are_those_of_its_watermark(make: Any, tmp_path: Path) -> None:
    assert bounds_of(make(pipeline_in(tmp_path))) == [(micros_of("1 day", ""), None, False)]
    made = make(pipeline_in(tmp_path), max_ahead="1 h", idle_after="30 s", advance_when_idle=True)
    assert bounds_of(made) == [(micros_of("1 h", ""), micros_of("30 s", ""), True)]


@pytest.mark.rule("C43")
@pytest.mark.parametrize("advances", [True, False])
@pytest.mark.parametrize("make", [closed_of, pairs_of], ids=["windows", "join"])
def test_a_silent_pipeline_closes_its_windows_if_it_is_told_to(make: Any, advances: bool, tmp_path: Path) -> None:
    """The windows and the bounds of these rows end a moment after them."""
    shop = pipeline_in(tmp_path)
    made = make(shop, short=True, idle_after="100 ms", advance_when_idle=advances)
    made.append_into(sqlite(tmp_path / "out.db", "out"), name="out")
    empty = {} if advances else {"topology.spout.emit.empty.batches": True}
    config = {**empty, "topology.trident.batch.emit.interval.millis": 50}

    def sent() -> int:
        with contextlib.closing(sqlite3.connect(tmp_path / "out.db")) as connection:
            return int(connection.execute("SELECT count(*) FROM out").fetchone()[0])

    with shop.submit(config, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        if advances:
            wait_for(lambda: sent() > 0, what="a row of the step")
        run.wait_for_commit(run.status().committed_txid + 20, PATIENCE_S)
    assert sent() == (1 if advances else 0)


def test_a_row_further_ahead_than_a_step_allows_is_bad(tmp_path: Path) -> None:
    ahead = {**ROWS[0], "at": datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=12)}
    for max_ahead, found in (("1 day", 1), ("1 h", 0)):
        shop = pipeline_in(tmp_path)
        orders = shop.read_kafka(
            "orders", value=Json(shop=str, cents=int, at=datetime.datetime), metadata=PLACE, on_bad_record="skip"
        )
        first = orders.deduplicate("shop", within="1 h", on="at", name="first", max_ahead=max_ahead)
        first.append_into(parquet(tmp_path / "out"), name="out")
        row = {**ahead, "topic": "orders", "partition": 0}
        assert len(shop.test({"orders": [row]})["out"]) == found


@pytest.mark.rule("C43")
def test_a_row_far_ahead_is_bad_below_a_step_that_passes_rows_on(tmp_path: Path) -> None:
    """The watermark of the windows gets its rows in the commit phase."""
    shop = pipeline_in(tmp_path)
    value = Json(shop=str, at=datetime.datetime, due=datetime.datetime)
    orders = shop.read_kafka("orders", value=value, metadata=PLACE, on_bad_record="skip")
    first = orders.deduplicate("shop", within="1 h", on="at", name="first")
    counted = first.window(tumbling("1 min"), on="due").group_by("shop").agg(n=count())
    closed = counted.when_closed(name="closed")
    closed.append_into(parquet(tmp_path / "out"), name="out")
    closed.late().append_into(parquet(tmp_path / "late"), name="late")
    now = datetime.datetime.now(datetime.UTC)
    moments = [now - datetime.timedelta(minutes=each) for each in range(60, 50, -1)]
    place = {"topic": "orders", "partition": 0}
    rows = [{"shop": str(number), "at": at, "due": at, **place} for number, at in enumerate(moments)]
    rows[3]["due"] = now + datetime.timedelta(days=3_650)
    tables = shop.test({"orders": rows}, take=1)
    assert [row["shop"] for row in tables["late"]] == []
    assert {row["shop"] for row in tables["out"]} == {*map(str, range(9))} - {"3"}


def test_event_time_has_the_outline_of_its_committers(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    orders = shop.read_kafka(
        "orders",
        value=Json(shop=str, cents=int, at=datetime.datetime),
        metadata=PLACE,
        bootstrap_servers=BROKER,
    )
    windows = orders.window(tumbling("5 min"), on="at", late="10 min").group_by("shop").agg(cents=sum_("cents"))
    windows.when_closed(name="closed", parallelism=2).to_kafka("closed", key="shop", name="sent")
    orders.deduplicate("shop", within="1 day", on="at", late="10 min", name="seen").to_kafka("first", name="first")

    def state(name: str) -> OpaqueMapState:
        return OpaqueMapState(SqliteBackend(tmp_path / "state.db", f"shop_{name}"))

    codec = JsonCodec(Fields(shop=str, cents=int, at=datetime.datetime))
    spout = OpaqueKafkaTransactionalSpout(["orders"], codec=codec, metadata=PLACE, bootstrap_servers=BROKER)
    builder = TransactionalTopologyBuilder("shop", "kafka", spout)
    watermark = WatermarkCommitter(state("closed_watermark"), "at", partition=PLACE, out_of_orderness="10 min")
    builder.set_bolt("closed-watermark", watermark).global_grouping("kafka").global_grouping("kafka", CLOCK_STREAM)
    closing = WindowedCommitter(
        state("closed"), tumbling("5 min"), on="at", key=["shop"], aggregates={"cents": Sum("cents")}
    )
    builder.set_bolt("closed", closing, 2).fields_grouping("kafka", Fields("shop")).all_grouping("closed-watermark")
    builder.set_bolt("sent", KafkaSink("closed", key="shop")).global_grouping("closed")
    watermark = WatermarkCommitter(state("seen_watermark"), "at", partition=PLACE, out_of_orderness="10 min")
    builder.set_bolt("seen-watermark", watermark).global_grouping("kafka").global_grouping("kafka", CLOCK_STREAM)
    seen = DeduplicatingCommitter(state("seen"), key=["shop"], on="at", within="1 day")
    builder.set_bolt("seen", seen).fields_grouping("kafka", Fields("shop")).all_grouping("seen-watermark")
    builder.set_bolt("first", KafkaSink("first")).global_grouping("seen")
    assert shop.build().outline() == builder.build().outline()


def test_rows_of_several_partitions_have_no_event_time_of_their_own(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    order = Json(shop=str, cents=int, at=datetime.datetime)
    orders = shop.read_kafka("orders", value=order, metadata=PLACE, bootstrap_servers=BROKER)
    paid = shop.read_kafka("paid", value=Json(shop=str, paid_at=datetime.datetime), metadata=PLACE)
    windows = orders.window(tumbling("5 min"), on="at").group_by("shop").agg(cents=sum_("cents"))
    closed = windows.when_closed(name="closed").filter("cents > 1")
    said = r"the rows of .*when_closed\(name='closed'\) are from several: join them with a table without times="
    wrong: list[Callable[[], object]] = [
        lambda: closed.rename(window_end="end").join(
            paid, on="shop", times=("end", "paid_at"), within="1 h", name="joined"
        ),
        lambda: paid.join(closed, on="shop", times=("paid_at", "window_start"), within="1 h", name="joined"),
        lambda: closed.rename(window_end="end").deduplicate("shop", within="1 h", on="end", name="once"),
    ]
    for each in wrong:
        with pytest.raises(TopologyError, match=said):
            each()
    closed.join(paid.latest_by("shop"), on="shop", name="current").append_into(parquet(tmp_path / "joined"))
    assert shop.build().id == "shop"


def test_event_time_needs_a_store_and_windows_that_close(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    shop.read(ROWS).deduplicate("shop", within="1 h", on="at", name="seen")
    assert shop.test()["seen"]
    with pytest.raises(TopologyError, match=r"give the pipeline a store, Pipeline\('shop', state=.*set postgres.url"):
        shop.build()
    windows = pipeline_in(tmp_path).read(ROWS).window(tumbling("5 min"), on="at")
    for stream in (windows.filter("window_end is null"), windows.select("shop", "cents", "window_start")):
        with pytest.raises(TopologyError, match="only windows close"):
            stream.group_by("shop").agg(cents=sum_("cents")).when_closed(name="closed")


MORE = [
    {"shop": shop, "cents": cents, "at": at(minute), "partition": minute % 2}
    for shop, cents, minute in (
        ("x", 1, 1), ("x", 2, 2), ("y", 5, 3), ("x", 0, 8), ("x", 9, 9), ("x", 4, 21), ("z", 1, 50), ("z", 1, 51),
    )
]  # fmt: skip


def more_orders(shop: Pipeline) -> Stream:
    value = Json(shop=str, cents=int, at=datetime.datetime)
    return shop.read_kafka("orders", value=value, bootstrap_servers=BROKER)


def starts(rows: Iterable[Mapping[str, Any]], *columns: str) -> list[Any]:
    found = ((row["shop"], row["window_start"].minute, *(row[each] for each in columns)) for row in rows)
    return sorted(found, key=lambda each: each[:2])


@pytest.mark.slow_for("3", "1-none", "1000-replay")
@pytest.mark.parametrize("faults", [[], [replay(1)], [crash(1)]], ids=["none", "replay", "crash"])
@pytest.mark.parametrize("take", [1, 3, 1000])
def test_closed_windows_and_sessions_are_put_into_windows_by_their_watermark(
    faults: Any, take: int, tmp_path: Path
) -> None:
    shop = pipeline_in(tmp_path)
    orders = more_orders(shop)
    kinds = {"minutes": sliding("4 min", "2 min"), "visits": session("3 min")}
    for name, kind in kinds.items():
        first = orders.window(kind, on="at", late="1 min").group_by("shop").agg(cents=sum_("cents"))
        closed = first.when_closed(name=name, parallelism=2).filter("cents > 0")
        tens = closed.window(tumbling("10 min")).group_by("shop").agg(most=max_("cents"), n=count())
        tens.upsert_into(sqlite(tmp_path / "a.db", name), name=f"{name}-table")
        again = tens.when_closed(name=f"{name}-tens").window(tumbling("20 min")).group_by("shop").agg(n=sum_("n"))
        again.when_closed(name=f"{name}-twenties")
    tables = shop.test({"orders": MORE}, faults=faults, take=take)
    # The last moment of the window that ends at 10:10 is before 10:10.
    assert starts(tables["minutes-tens"], "most", "n") == [
        ("x", 0, 9, 4),
        ("x", 10, 9, 1),
        ("x", 20, 4, 2),
        ("y", 0, 5, 2),
    ]
    assert starts(tables["minutes-twenties"], "n") == [("x", 0, 5), ("x", 20, 2), ("y", 0, 2)]
    # A session ends three minutes after its last row.
    assert starts(tables["visits-tens"], "most", "n") == [
        ("x", 0, 3, 1),
        ("x", 10, 9, 1),
        ("x", 20, 4, 1),
        ("y", 0, 5, 1),
    ]
    assert starts(tables["visits-twenties"], "n") == [("x", 0, 2), ("x", 20, 1), ("y", 0, 1)]
    for name in kinds:
        assert starts(tables[f"{name}-table"], "most", "n") == starts(tables[f"{name}-tens"], "most", "n")
    ids = [each.id for each in shop.build().components]
    assert [each for each in ids if "watermark" in each] == ["minutes-watermark", "visits-watermark"]


@pytest.mark.parametrize("take", [1, 3, 1000])
def test_closed_windows_are_joined_by_their_ends(take: int, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    windows = (
        more_orders(shop).with_columns(large="cast(cents > 2 as int)").window(tumbling("10 min"), on="at", late="1 min")
    )
    sums = windows.group_by("shop").agg(cents=sum_("cents")).when_closed(name="sums")
    large = windows.group_by("shop").agg(n=sum_("large")).when_closed(name="large").filter("n > 0")
    joined = sums.join(
        large, on=["shop", "window_start"], times="window_end", within="1 s", how="left", name="both", parallelism=2
    )
    joined.append_into(parquet(tmp_path / "out"), name="out")
    tables = shop.test({"orders": MORE}, take=take, faults=[replay(1)])
    found = {(row["shop"], row["window_start"].minute): (row["cents"], row["n"]) for row in tables["out"]}
    assert found == {("x", 0): (12, 1), ("x", 20): (4, 1), ("y", 0): (5, 1)} and len(tables["out"]) == 3


@pytest.mark.parametrize(
    "keys", [("shop", "shop"), ("shop", "upper(shop)")], ids=["the-same-key", "a-key-of-an-expression"]
)
def test_aggregates_of_the_same_windows_are_joined_whatever_they_compute(keys: tuple[str, str], tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    windows = more_orders(shop).window(tumbling("10 min"), on="at", late="1 min").filter("cents > 0")
    sums, counts = (
        windows.group_by(shop=key).agg(total=aggregate).when_closed(name=name)
        for name, key, aggregate in zip(("sums", "counts"), keys, (sum_("cents * 2"), sum_("cents > 2")), strict=True)
    )
    joined = sums.join(counts, on=["shop", "window_start"], times="window_end", within=0, how="outer", name="both")
    joined.append_into(parquet(tmp_path / "out"), name="out")
    assert [each.id for each in shop.build().components if "watermark" in each.id] == [
        "sums-watermark",
        "counts-watermark",
    ]
    found = shop.test({"orders": MORE}, take=1)["out"]
    both = [("x", 0, 24, 1), ("x", 20, 8, 1), ("y", 0, 10, 1)]
    alone = [each for k, start, *n in both for each in ((k, start, n[0], None), (k.upper(), start, None, n[1]))]
    expected = both if keys[0] == keys[1] else alone
    assert starts(found, "total", "total_right") == sorted(expected, key=lambda each: each[:2])


#: Every kind of step with a state.
STEPS: Mapping[str, Callable[[Stream, Stream], object]] = {
    "windows": lambda orders, paid: closing(orders, tumbling("10 min"), "windows"),
    "same": lambda orders, paid: closing(orders, tumbling("10 min"), "same"),
    "large": lambda orders, paid: closing(orders.filter("cents > 2"), tumbling("10 min"), "large"),
    "visits": lambda orders, paid: closing(orders, session("3 min"), "visits"),
    "first": lambda orders, paid: orders.deduplicate("shop", within="1 h", on="at", name="first"),
    "pairs": lambda orders, paid: orders.join(paid, on="shop", times=("at", "paid_at"), within="1 h", name="pairs"),
    "valued": lambda orders, paid: orders.join(
        paid.latest_by("shop"), on="shop", times=("at", "paid_at"), name="valued"
    ),
    "now": lambda orders, paid: orders.join(paid.latest_by("shop"), on="shop", name="now"),
    "table": lambda orders, paid: (
        orders.group_by("shop").agg(n=count()).upsert_into(sqlite("shop.db", "per_shop"), name="table")
    ),
}


def closing(rows: Stream, kind: Any, name: str) -> Stream:
    return rows.window(kind, on="at", late="1 min").group_by("shop").agg(n=count()).when_closed(name=name)


def test_no_name_and_no_state_depends_on_the_order_of_steps(tmp_path: Path) -> None:
    """So steps come, go and change places, and the event time of the others goes on."""

    def built(names: Iterable[str]) -> Mapping[str, Any]:
        shop = pipeline_in(tmp_path)
        orders = more_orders(shop)
        paid = shop.read_kafka("paid", value=Json(shop=str, paid_at=datetime.datetime))
        for name in names:
            STEPS[name](orders, paid)
        topology = shop.build()
        steps = {each.id for each in topology.components if isinstance(each.instance, StepsBolt)}
        found: Mapping[str, Any] = without_steps(topology.outline(), steps)["components"]
        return {name: each for name, each in found.items() if name != topology.spout.id}

    every = built(STEPS)
    assert len([each for each in every if each.endswith("-watermark")]) == 7
    chance = random.Random(7)
    for _ in range(6):
        names = chance.sample(list(STEPS), len(STEPS))
        assert built(names) == every
        some = built(names[:4])
        assert some and all(every[name] == component for name, component in some.items())


def watermarks_of(shop: Pipeline, component: str) -> set[str]:
    found = shop.build().outline()["components"][component]["inputs"]
    return {each.split("/")[0] for each in found if "watermark" in each}


def closed_pairs(tables: Mapping[str, Any]) -> list[Any]:
    """The windows that have closed and end together."""
    return sorted(
        (one["shop"], one["window_end"], one["cents"], other["window_end"], other["n"])
        for one in tables["sums"]
        for other in tables["paid-closed"]
        if (one["shop"], one["window_end"]) == (other["shop"], other["window_end"])
    )


@pytest.mark.parametrize("faults", [[], [replay(1)], [crash(1)]], ids=["none", "replay", "crash"])
@pytest.mark.parametrize("take", [3, 1000])
@pytest.mark.parametrize("how", ["inner", "outer"])
@pytest.mark.slow_for("inner-1000", "3-replay", "outer-1000-none", "outer-1000-crash", "inner-3-crash", "outer-3-none")
def test_closed_windows_of_two_watermarks_are_joined(how: Any, take: int, faults: Any, tmp_path: Path) -> None:
    """Topics, lengths and lateness differ, so that each watermark is behind the other at times."""
    chance = random.Random(take)
    shop = pipeline_in(tmp_path)
    orders = more_orders(shop)
    paid = shop.read_kafka("paid", value=Json(shop=str, paid_at=datetime.datetime))
    sums = orders.window(tumbling("5 min"), on="at", late="7 min").group_by("shop").agg(cents=sum_("cents"))
    payments = paid.window(sliding("6 min", "3 min"), on="paid_at", late="1 min").group_by("shop").agg(n=count())
    closed, closed_paid = sums.when_closed(name="sums", parallelism=2), payments.when_closed(name="paid-closed")
    joined = closed.join(closed_paid, on="shop", times="window_end", within=0, name="both", how=how, parallelism=2)
    joined.append_into(parquet(tmp_path / "out"), name="out")
    joined.late("left").append_into(parquet(tmp_path / "late"), name="late")
    joined.late("right").append_into(parquet(tmp_path / "late-right"), name="late-right")
    assert watermarks_of(shop, "both") == {"sums-watermark", "paid-closed-watermark"}
    records: dict[str, list[dict[str, Any]]] = {"orders": [], "paid": []}
    for minute in range(58):
        for topic, time in (("orders", "at"), ("paid", "paid_at")):
            if chance.random() < 0.7:
                row = {"shop": chance.choice("xy"), time: at(max(0, minute - chance.randrange(4)))}
                records[topic].append(row | ({"cents": chance.randrange(9)} if topic == "orders" else {}))
    tables = shop.test(records, faults=faults, take=take)
    found = sorted(
        (row["shop"], row["window_end"], row["cents"], row["window_end_right"], row["n"])
        for row in tables["out"]
        if row["cents"] is not None and row["n"] is not None
    )
    assert found == closed_pairs(tables) and len(found) > 2
    assert not tables["late"] and not tables["late-right"]
    alone = Counter((row["shop"], row["window_end"]) for row in tables["out"] if row["n"] is None)
    paired = {(shop, end) for shop, end, *_ in found}
    lonely = {(row["shop"], row["window_end"]) for row in tables["sums"]} - paired
    # Those that nothing can join any more: the others still wait.
    assert set(alone) <= lonely and max(alone.values(), default=1) == 1
    assert bool(alone) == (how == "outer")


@pytest.mark.each_value_once
@pytest.mark.parametrize("take", [1, 2, 1000])
@pytest.mark.parametrize("faults", [[], [crash(1)]], ids=["none", "crash"])
def test_rows_are_joined_with_the_window_that_was_closed_at_their_time(take: int, faults: Any, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    orders = more_orders(shop)
    paid = shop.read_kafka("paid", value=Json(shop=str, paid_at=datetime.datetime))
    sums = orders.window(tumbling("5 min"), on="at", late="1 min").group_by("shop").agg(cents=sum_("cents"))
    closed = sums.when_closed(name="sums")
    joined = paid.join(
        closed.latest_by("shop"), on="shop", times=("paid_at", "window_end"), name="valued", how="left", late="2 min"
    )
    joined.append_into(parquet(tmp_path / "out"), name="out")
    assert watermarks_of(shop, "valued") == {"sums-watermark", "valued-watermark"}
    payments = [{"shop": "x", "paid_at": at(minute)} for minute in (4, 5, 9, 24, 26, 25, 55)]
    tables = shop.test({"orders": MORE, "paid": payments}, faults=faults, take=take)
    found = {row["paid_at"].minute: row["cents"] for row in tables["out"]}
    # The window that ends at 10:05 is closed at 10:05; what is paid at 10:55 waits for the orders.
    assert found == {4: None, 5: 3, 9: 3, 24: 9, 25: 4, 26: 4}, found
    assert len(tables["out"]) == len(found)


def test_a_python_filter_keeps_closed_windows_what_they_are(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    first = more_orders(shop).window(tumbling("2 min"), on="at").group_by("shop").agg(cents=sum_("cents"))
    large = first.when_closed(name="first").filter(lambda row: row["cents"] > 1, deterministic=True)
    large.window(tumbling("10 min")).group_by("shop").agg(n=count()).when_closed(name="tens")
    assert starts(shop.test({"orders": MORE})["tens"], "n") == [("x", 0, 2), ("x", 20, 1), ("y", 0, 1)]


@pytest.mark.parametrize("without", [["correction"], []], ids=["dropped", "kept"])
def test_windows_that_are_corrected_go_no_further_by_event_time(without: list[str], tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    windows = more_orders(shop).window(tumbling("5 min"), on="at")
    corrected = windows.group_by("shop").agg(cents=sum_("cents")).when_closed(name="corrected", allowed_lateness="1 h")
    rows = corrected.drop(*without) if without else corrected.filter("cents > 0")
    sums = windows.group_by("shop").agg(n=count()).when_closed(name="sums")
    by_end: dict[str, Any] = {"on": "shop", "times": "window_end", "within": "1 s", "name": "j"}
    wrong: list[Callable[[], Any]] = [
        lambda: rows.window(tumbling("1 h")),
        lambda: rows.join(sums, **by_end),
        lambda: sums.join(rows, **by_end),
        lambda: sums.join(rows.latest_by("shop"), **by_end),
        lambda: rows.deduplicate("shop", within="1 h", on="window_end", name="d"),
    ]
    for make in wrong:
        with pytest.raises(
            TopologyError, match=r"a window that is corrected would count twice: .*allowed_lateness out"
        ):
            make()


def test_what_is_no_closed_window_is_not_put_into_windows_by_itself(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    order = Json(shop=str, cents=int, at=datetime.datetime)
    windows = shop.read_kafka("orders", value=order, bootstrap_servers=BROKER).window(tumbling("5 min"), on="at")
    table = windows.group_by("shop").agg(cents=sum_("cents"))
    closed = table.when_closed(name="closed")
    hour = tumbling("1 h")
    corrected = windows.group_by("shop").agg(n=count()).when_closed(name="corrected", allowed_lateness="1 h")
    renamed = closed.rename(window_start="start", window_end="end")
    wrong: dict[str, Callable[[], Any]] = {
        "a window that is corrected would count twice": lambda: corrected.window(hour),
        "no timestamp of a record": lambda: table.when_changed(name="closed").window(hour),
        "its rows have no timestamp of a record": lambda: closed.late().window(hour),
        "say which column is the time": lambda: closed.with_columns(window_end="window_start").window(hour),
        "there is a column 'window_time' already": lambda: closed.with_columns(window_time="window_end").window(hour),
        "put them into windows without on=": lambda: (
            renamed.window(hour, on="end").group_by("shop").agg(n=count()).when_closed(name="a")
        ),
        r"closed windows are never late: .*when_closed\(name='closed'\) puts rows": lambda: (
            closed.window(hour, late="1 min").group_by("shop").agg(n=count()).when_closed(name="b")
        ),
    }
    for told, make in wrong.items():
        with pytest.raises(TopologyError, match=f"test_event_time.py:.*{told}"):
            make()


def of_minutes(*rows: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"shop": shop, "cents": cents, "at": at(minute)} for shop, cents, minute in rows]


#: Of two topics that are merged, and of a third one.
MERGED = {
    "sales": of_minutes(("x", 1, 0), ("x", 2, 3), ("y", 3, 8), ("y", 4, 40)),
    "refunds": of_minutes(("x", 10, 1), ("y", 20, 4), ("y", 30, 41)),
    "visits": of_minutes(("x", 100, 0), ("y", 200, 1), ("z", 300, 41)),
}
BY_TIME: dict[str, Any] = {"on": "shop", "times": "at", "within": "30 min", "name": "out"}


def windows_of(rows: Stream, kind: Any) -> Stream:
    return rows.window(kind, on="at").group_by("shop").agg(cents=sum_("cents")).when_closed(name="out", parallelism=2)


#: Step -> what it makes of the merged topics and the third one, and its shops and cents. The first
#: rows of a transaction are those of the topic that is first by name.
OF_MERGED: dict[str, tuple[Callable[[Stream, Stream], Stream], list[tuple[Any, ...]]]] = {
    "windows": (lambda both, _: windows_of(both, tumbling("10 min")), [("x", 13), ("y", 23)]),
    "sessions": (lambda both, _: windows_of(both, session("3 min")), [("x", 13), ("y", 20), ("y", 3)]),
    "first rows": (
        lambda both, _: both.deduplicate("shop", within="1 h", on="at", name="out"),
        [("x", 10), ("y", 20)],
    ),
    "left of a join": (
        lambda both, visits: both.join(visits, **BY_TIME).select("shop", cents="cents + cents_right"),
        [("x", 101), ("x", 102), ("x", 110), ("y", 203), ("y", 220)],
    ),
    "right of a join": (
        lambda both, visits: visits.join(both, **BY_TIME).select("shop", cents="cents + cents_right"),
        [("x", 101), ("x", 102), ("x", 110), ("y", 203), ("y", 220)],
    ),
    "table of a time": (
        lambda both, visits: visits.join(both.latest_by("shop"), **BY_TIME, how="left").select(
            "shop", cents="cents_right"
        ),
        [("x", 1), ("y", None)],
    ),
    "rows of a time": (
        lambda both, visits: both.join(visits.latest_by("shop"), **BY_TIME, how="left").select(
            "shop", cents="cents_right"
        ),
        [("x", 100)] * 3 + [("y", 200)] * 2,
    ),
    "table of now": (
        lambda both, visits: visits.join(both.latest_by("shop"), on="shop", name="out").select(
            "shop", cents="cents_right"
        ),
        [("x", 10), ("y", 20)],
    ),
    "rows of now": (
        lambda both, visits: both.join(visits.latest_by("shop"), on="shop", name="out").select(
            "shop", cents="cents_right"
        ),
        [("x", 100)] * 3 + [("y", 200)] * 4,
    ),
}


@pytest.mark.slow_for("filtered")
@pytest.mark.parametrize("steps", ["none", "filtered"])
@pytest.mark.parametrize("name", OF_MERGED)
def test_steps_that_keep_a_state_take_merged_topics(name: str, steps: str, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    value = Json(shop=str, cents=int, at=datetime.datetime)
    sales = shop.read_kafka("sales", value=value, bootstrap_servers=BROKER)
    refunds, visits = (shop.read_kafka(topic, value=value) for topic in ("refunds", "visits"))
    # The topics come with other columns: those of the file are not those of the step.
    sales.append_into(parquet(tmp_path / "sales"), name="all-sales")
    both = sales.merge(refunds if steps == "none" else refunds.filter("cents > 0"))
    make, expected = OF_MERGED[name]
    make(both, visits).append_into(parquet(tmp_path / "out"), name="rows")
    found = [(row["shop"], row["cents"]) for row in shop.test(MERGED, take=3, faults=[replay(2)])["rows"]]
    assert sorted(found, key=repr) == sorted(expected, key=repr)
