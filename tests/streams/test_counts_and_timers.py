"""Windows by count, timers and expiry, as words of a pipeline."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, TransactionalTopologyBuilder
from framework.errors import TopologyError
from framework.testing import crash, replay
from ratchet import Entry, Json, Pipeline, Stream, TimerCommitter, by_count, collect, count, parquet, sqlite, sum_
from sinks import (
    Count,
    CountWindowCommitter,
    ExpiringCommitter,
    KafkaSink,
    OpaqueMapState,
    SqliteBackend,
    Sum,
    WatermarkCommitter,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout

pytestmark = pytest.mark.rule("C44")

BROKER = "127.0.0.1:1"
PLACE = ["topic", "partition"]
FAULTS = [[], [replay(1)], [crash(1)]]


def at(minute: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, 10, minute, tzinfo=datetime.UTC)


def orders_of(*rows: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"shop": shop, "cents": cents, "at": at(minute)} for shop, cents, minute in rows]


ROWS = orders_of(*(("x" if number % 3 else "y", number, number) for number in range(14)))


def pipeline_in(folder: Path) -> Pipeline:
    return Pipeline("shop", state=lambda name: sqlite(folder / "state.db", name))


def orders_from_kafka(shop: Pipeline) -> Stream:
    value = Json(shop=str, cents=int, at=datetime.datetime)
    return shop.read_kafka("orders", value=value, metadata=PLACE, bootstrap_servers=BROKER)


def state_in(folder: Path, name: str) -> OpaqueMapState:
    return OpaqueMapState(SqliteBackend(folder / "state.db", f"shop_{name}"))


@pytest.mark.parametrize("faults", FAULTS, ids=["none", "replay", "crash"])
@pytest.mark.parametrize("step", [None, 2])
def test_a_window_by_count_is_sent_once_with_its_last_row(faults: Any, step: int | None, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(ROWS).window(by_count(4, step)).filter("cents <> 7")
    table = rows.group_by("shop").agg(n=count(), twice=sum_("cents * 2"), all=collect("cents"))
    closed = table.when_closed(parallelism=2)
    closed.append_into(parquet(tmp_path / "out"), name="out")
    tables = shop.test(faults=faults, take=3)
    assert sorted(map(str, tables["out"])) == sorted(map(str, tables["rows-per-shop"]))
    found = {
        (row["shop"], row["window_start"], row["window_end"], row["n"], row["twice"], row["all"])
        for row in tables["out"]
    }
    x = {(0, 4): [1, 2, 4, 5], (2, 6): [4, 5, 8, 10], (4, 8): [8, 10, 11, 13]}
    y = {(0, 4): [0, 3, 6, 9]}
    windows = [(key, *bounds, its) for key, all_ in (("x", x), ("y", y)) for bounds, its in all_.items()]
    assert found == {
        (key, start, end, 4, 2 * sum(its), str(its).replace(" ", ""))
        for key, start, end, its in windows
        if step is not None or start % 4 == 0
    }


def test_windows_by_count_have_the_outline_of_their_committer(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    orders = shop.read_kafka("orders", value=Json(shop=str, cents=int), bootstrap_servers=BROKER)
    table = orders.window(by_count(100, 10)).group_by("shop").agg(n=count(), cents=sum_("cents"))
    table.when_closed(name="hundreds", parallelism=2).to_kafka("hundreds", key="shop", name="sent")

    codec = JsonCodec(Fields(shop=str, cents=int))
    spout = OpaqueKafkaTransactionalSpout(["orders"], codec=codec, bootstrap_servers=BROKER)
    builder = TransactionalTopologyBuilder("shop", "kafka", spout)
    aggregates = {"n": Count(), "cents": Sum("cents")}
    committer = CountWindowCommitter(state_in(tmp_path, "hundreds"), 100, step=10, key=["shop"], aggregates=aggregates)
    builder.set_bolt("hundreds", committer, 2).fields_grouping("kafka", Fields("shop"))
    builder.set_bolt("sent", KafkaSink("hundreds", key="shop")).global_grouping("hundreds")
    assert shop.build().outline() == builder.build().outline()


def test_what_a_window_by_count_cannot_do_is_refused_at_the_line(tmp_path: Path) -> None:
    rows = pipeline_in(tmp_path).read(ROWS)
    windows = rows.window(by_count(3))
    table = windows.group_by("shop").agg(n=count())
    wrong: dict[str, Callable[[], object]] = {
        r"by_count\(0\): CountWindow\(length=0.* makes no windows": lambda: by_count(0),
        r"by_count\(3, 4\): .* makes no windows": lambda: by_count(3, 4),
        "by_count\\('1 h'\\): '1 h' is a str: a window by count has a number": lambda: by_count("1 h"),  # type: ignore[arg-type]
        r"by_count\(\): count is missing: add count=100": lambda: by_count(),  # type: ignore[call-arg]
        "window.*on='at'.*: a window by count goes by no time": lambda: rows.window(by_count(3), on="at"),
        "leave on, late, max_ahead and idle_after out": lambda: rows.window(by_count(3), late="1 min"),
        r"a window by count is known when it closes: group_by": lambda: table.upsert_into(sqlite("a", "b")),
        "append_into.*: a window by count is known when": lambda: windows.append_into(parquet("a")),
        "a window by count is known when it closes: use when_closed": lambda: table.when_changed(),
        "a window by count that is over stays over": lambda: table.when_closed(allowed_lateness="1 h"),
        "only windows close": lambda: windows.filter("window_start > 1").group_by("shop").agg(n=count()).when_closed(),
        "there is a column 'window_start' already": lambda: windows.window(by_count(4)),
        "the columns differ": lambda: windows.merge(rows),
        r"a stream has no 'countWindow': use window\(by_count\(100\)\)": lambda: rows.countWindow(3),
        "use window\\(by_count\\(100\\)\\).group_by\\(...\\), the window first": lambda: rows.group_by(
            "shop"
        ).count_window(3),
        "only a step that goes by event time has late rows": lambda: table.when_closed(name="a").late(),
        "its rows have no timestamp of a record": lambda: (
            table.when_closed(name="b")
            .rename(window_start="a", window_end="b")
            .deduplicate("shop", within="1 h", name="c")
        ),
    }
    for said, call in wrong.items():
        with pytest.raises(TopologyError if "by_count(" in said else Exception, match=said) as raised:
            call()
        assert Path(__file__).name in str(raised.value), raised.value


class Unpaid(TimerCommitter):
    """Names an order that is not paid after ten minutes."""

    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None:
        assert sorted(record) in (["at", "cents", "shop"], ["cents", "shop"])
        entry.value = (entry.value or 0) + record["cents"]
        entry.set_timer(at + datetime.timedelta(minutes=10))

    def on_timer(self, entry: Entry, at: datetime.datetime) -> None:
        if entry.value is not None:
            entry.emit(shop=entry.key[0], cents=entry.value, then=at)
        entry.value = None


OUTPUT = Fields(shop=str, cents=int, then=datetime.datetime)


@pytest.mark.parametrize("faults", FAULTS, ids=["none", "replay", "crash"])
@pytest.mark.parametrize("take", [1, 1000])
def test_timers_come_once_in_a_pipeline(faults: Any, take: int, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(orders_of(("x", 1, 0), ("x", 2, 5), ("y", 3, 20), ("x", 4, 1), ("z", 5, 40)))
    unpaid = rows.group_by("shop").process(Unpaid, on="at", output=OUTPUT, name="unpaid", late="1 min", parallelism=2)
    unpaid.append_into(parquet(tmp_path / "out"), name="out")
    unpaid.late().append_into(parquet(tmp_path / "late"), name="late")
    tables = shop.test(faults=faults, take=take)
    found = sorted((row["shop"], row["cents"], row["then"].minute) for row in tables["out"])
    late = [row["cents"] for row in tables["late"]]
    if take == 1:
        assert (found, late) == ([("x", 3, 10), ("y", 3, 30)], [4])
    else:
        assert (found, late) == ([("x", 7, 10), ("y", 3, 30)], [])


def test_timers_go_by_the_timestamps_of_records_and_show_no_hidden_column(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    orders = shop.read_kafka("orders", value=Json(shop=str, cents=int), bootstrap_servers=BROKER)
    unpaid = orders.group_by("shop").process(Unpaid, output=OUTPUT, name="unpaid")
    unpaid.append_into(parquet(tmp_path / "out"), name="out")
    unpaid.late().append_into(parquet(tmp_path / "late"), name="late")
    moments = [int(at(minute).timestamp() * 1000) for minute in (0, 30, 2)]
    rows = [{"shop": "x", "cents": number, "timestamp_ms": each} for number, each in enumerate(moments)]
    tables = shop.test({"orders": rows}, take=1)
    assert [(row["shop"], row["cents"], row["then"].minute) for row in tables["out"]] == [("x", 0, 10)]
    assert [dict(row) for row in tables["late"]] == [{"shop": "x", "cents": 2}]


@pytest.mark.parametrize("metadata", [[], PLACE], ids=["hidden", "shown"])
def test_steps_that_order_records_of_one_time_get_topic_and_partition(metadata: list[str], tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    value = Json(shop=str, cents=int, at=datetime.datetime)
    orders = shop.read_kafka("orders", value=value, metadata=metadata, bootstrap_servers=BROKER)
    orders.group_by("shop").process(Unpaid, on="at", output=OUTPUT, name="unpaid")
    orders.deduplicate("shop", within="1 h", on="at", name="once").append_into(parquet(tmp_path / "once"), name="seen")
    prices = shop.read_kafka("prices", value=value, metadata=metadata).latest_by("shop")
    joined = orders.join(prices, on="shop", times="at", name="priced")
    assert joined.schema.names == ["shop", "cents", "at", "cents_right", "at_right"]
    built = {each.id: each for each in shop.build().components}
    places = {name: built[name].instance.partition for name in ("unpaid", "once", "priced")}
    hidden = ("ratchet:topic", "ratchet:partition")
    shown = tuple(metadata) or hidden
    assert places == {"unpaid": shown, "once": shown, "priced": hidden}
    for name, place in places.items():
        inputs = [each for each in built[name].subscriptions if "watermark" not in each.component_id]
        assert inputs and all(set(place) <= set(built[each.component_id].streams[each.stream]) for each in inputs)


def test_timers_have_the_outline_of_their_committer(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    unpaid = (
        orders_from_kafka(shop)
        .group_by("shop")
        .process(Unpaid, on="at", output=OUTPUT, name="unpaid", late="1 min", parallelism=2)
    )
    unpaid.to_kafka("unpaid", key="shop", name="sent")

    codec = JsonCodec(Fields(shop=str, cents=int, at=datetime.datetime))
    spout = OpaqueKafkaTransactionalSpout(["orders"], codec=codec, metadata=PLACE, bootstrap_servers=BROKER)
    builder = TransactionalTopologyBuilder("shop", "kafka", spout)
    watermark = WatermarkCommitter(
        state_in(tmp_path, "unpaid_watermark"), "at", partition=PLACE, out_of_orderness="1 min"
    )
    builder.set_bolt("unpaid-watermark", watermark).global_grouping("kafka").global_grouping("kafka", CLOCK_STREAM)
    committer = Unpaid(state_in(tmp_path, "unpaid"), key=["shop"], on="at", output=OUTPUT)
    builder.set_bolt("unpaid", committer, 2).fields_grouping("kafka", Fields("shop")).all_grouping("unpaid-watermark")
    builder.set_bolt("sent", KafkaSink("unpaid", key="shop")).global_grouping("unpaid")
    assert shop.build().outline() == builder.build().outline()


class Half(TimerCommitter):
    def on_record(self, entry: Entry, record: Mapping[str, Any], at: datetime.datetime) -> None: ...


def test_what_cannot_keep_timers_is_refused_at_the_line(tmp_path: Path) -> None:
    by_shop = pipeline_in(tmp_path).read(ROWS).group_by("shop")
    options: dict[str, Any] = {"on": "at", "output": OUTPUT, "name": "unpaid"}
    wrong: dict[str, Callable[[], object]] = {
        r"process\('Half', on='at', name='unpaid'\): Half has no on_timer: write it": lambda: by_shop.process(
            Half,  # type: ignore[type-abstract]
            **options,
        ),
        "is no subclass of TimerCommitter": lambda: by_shop.process(len, **options),  # type: ignore[arg-type]
        "say which columns it emits": lambda: by_shop.process(Unpaid, **options | {"output": Fields("shop")}),
        "there is no column 'att'": lambda: by_shop.process(Unpaid, **options | {"on": "att"}),
        "column 'cents' is int64, and event time needs": lambda: by_shop.process(Unpaid, **options | {"on": "cents"}),
        "its rows have no timestamp": lambda: by_shop.process(Unpaid, **options | {"on": None}),
        "late": lambda: by_shop.process(Unpaid, **options, late="soon"),
        "output is missing": lambda: by_shop.process(Unpaid, on="at", name="a"),  # type: ignore[call-arg]
        "a grouped stream has no 'on_timer': use process": lambda: by_shop.on_timer(Unpaid),
    }
    for said, call in wrong.items():
        with pytest.raises(TopologyError, match=said) as raised:
            call()
        assert Path(__file__).name in str(raised.value), raised.value


def test_an_expiring_table_has_the_outline_of_its_committer(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    table = orders_from_kafka(shop).group_by("shop").agg(n=count()).expire("1 day", on="at", late="1 min")
    kept = table.upsert_into(sqlite(tmp_path / "a.db", "kept"), name="kept", parallelism=2)
    kept.expired().to_kafka("expired", key="shop", name="sent")

    codec = JsonCodec(Fields(shop=str, at=datetime.datetime))
    spout = OpaqueKafkaTransactionalSpout(["orders"], codec=codec, metadata=PLACE, bootstrap_servers=BROKER)
    builder = TransactionalTopologyBuilder("shop", "kafka", spout)
    watermark = WatermarkCommitter(
        state_in(tmp_path, "kept_watermark"), "at", partition=PLACE, out_of_orderness="1 min"
    )
    builder.set_bolt("kept-watermark", watermark).global_grouping("kafka").global_grouping("kafka", CLOCK_STREAM)
    state = OpaqueMapState(SqliteBackend(tmp_path / "a.db", "kept"))
    committer = ExpiringCommitter(state, key=["shop"], aggregates={"n": Count()}, on="at", ttl="1 day")
    builder.set_bolt("kept", committer, 2).fields_grouping("kafka", Fields("shop")).all_grouping("kept-watermark")
    builder.set_bolt("sent", KafkaSink("expired", key="shop")).global_grouping("kept", "expired")
    assert shop.build().outline() == builder.build().outline()


@pytest.mark.parametrize("faults", FAULTS, ids=["none", "replay", "crash"])
@pytest.mark.parametrize("take", [1, 2, 1000])
def test_rows_of_a_table_expire_once(faults: Any, take: int, tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    rows = shop.read(orders_of(("x", 1, 0), ("y", 2, 1), ("x", 3, 9), ("y", 4, 21), ("z", 5, 30)))
    table = rows.filter("cents < 9").group_by("shop").agg(cents=sum_("cents * 2")).expire("10 min", on="at")
    kept = table.upsert_into(sqlite(tmp_path / "a.db", "kept"), name="kept", parallelism=2)
    kept.expired().append_into(parquet(tmp_path / "expired"), name="expired")
    kept.late().append_into(parquet(tmp_path / "late"), name="late")
    tables = shop.test(faults=faults, take=take)
    assert sorted((row["shop"], row["cents"]) for row in tables["kept"]) == [("y", 8), ("z", 10)]
    expired = sorted((row["shop"], row["expires_at"], row["cents"]) for row in tables["expired"])
    assert expired == [("x", at(19), 8), ("y", at(11), 4)]
    assert tables["late"] == []


def test_a_table_expires_by_the_timestamps_of_records(tmp_path: Path) -> None:
    shop = pipeline_in(tmp_path)
    orders = shop.read_kafka("orders", value=Json(shop=str, cents=int, more=str), bootstrap_servers=BROKER)
    kept = orders.group_by("shop").agg(n=count()).expire("10 min").upsert_into(sqlite(tmp_path / "a.db", "kept"))
    kept.expired().append_into(parquet(tmp_path / "expired"), name="expired")
    kept.late().append_into(parquet(tmp_path / "late"), name="late")
    moments = [int(at(minute).timestamp() * 1000) for minute in (0, 30, 2)]
    rows = [{"shop": f"{each}", "cents": 1, "more": "", "timestamp_ms": each} for each in moments]
    tables = shop.test({"orders": rows}, take=1)
    assert [row["expires_at"] for row in tables["expired"]] == [at(10)]
    assert [dict(row) for row in tables["late"]] == [{"shop": f"{moments[-1]}"}]
    assert len(tables["kept"]) == 1


def test_what_cannot_expire_is_refused_at_the_line(tmp_path: Path) -> None:
    rows = pipeline_in(tmp_path).read(ROWS)
    table = rows.group_by("shop").agg(n=count())
    wrong: dict[str, Callable[[], object]] = {
        r"expire\(0, on='at'\): the time after which a row expires": lambda: table.expire(0, on="at"),
        r"expire\(on='at'\): after is missing: add after='30 days'": lambda: table.expire(on="at"),  # type: ignore[call-arg]
        "its rows have no timestamp": lambda: table.expire("1 h"),
        "column 'cents' is int64, and event time needs": lambda: table.expire("1 h", on="cents"),
        "keeps no row per key, so it cannot take aggregates": lambda: table.expire("1 h", on="at").upsert_into(
            parquet(tmp_path / "a")
        ),
        "only the rows of a table expire": lambda: table.upsert_into(sqlite(tmp_path / "a.db", "a")).expired(),
        r"a table has no 'expire': use group_by\(...\).agg\(cents=last.*newest rows do not": lambda: rows.latest_by(
            "shop"
        ).expire("1 h", on="at"),  # type: ignore[attr-defined]
        "a table has no 'ttl': use agg": lambda: table.ttl("1 h"),
    }
    for said, call in wrong.items():
        with pytest.raises(TopologyError, match=said) as raised:
            call()
        assert Path(__file__).name in str(raised.value), raised.value
