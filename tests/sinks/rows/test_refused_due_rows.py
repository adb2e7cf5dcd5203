"""A row that falls due by time, such as a closed window, and that a table refuses: only this row is
left out, whichever record closed the window (ADR 126)."""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import structlog

from framework import ArrowBolt, Fields, Topology, TopologyFailed, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError
from framework.inspect.verify import verify
from framework.operators.event_window_assigner import tumbling
from framework.topology.bolts import Bolt
from framework.topology.planning_time_stream import CLOCK_STREAM
from framework.transactions import MemoryStore
from sinks import AppendCommitter, Count, Last, MemoryBackend, OpaqueMapState, StateCommitter, Sum, UpsertCommitter
from sinks.count_windows import CountWindowCommitter
from sinks.event_time.deduplication import DeduplicatingCommitter
from sinks.event_time.expiry import ExpiringCommitter
from sinks.event_time.interval_join import JoiningCommitter
from sinks.event_time.sessions import SessionCommitter
from sinks.event_time.timers import TimerCommitter
from sinks.event_time.watermark import WatermarkCommitter
from sinks.event_time.windowed_committer import WindowedCommitter
from sinks.table_join import TableJoiningCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.refusing import refused
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C51")

ROW = Fields(shop=str, at=int)
MINUTE = 60
#: In the first minute, three shops that a table refuses, and others; then records that close it.
FIRST = [["a", 1], ["refused", 2], ["refused too", 3], ["b", 4], ["a", 5], ["refused again", 6], ["c", 7]]
CLOSING = [["z", MINUTE * number] for number in (10, 20, 30)]
KEPT = [("a", 2), ("b", 1), ("c", 1), ("z", 1), ("z", 1)]


class Short(ArrowBolt):
    """Refuses shops with a long name, below the windows."""

    deterministic = True
    takes_batches_whole = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        half = batch.num_rows // 2
        batch = batch.select(["shop", "orders"])
        yield batch.slice(0, half)
        if pc.any(pc.greater(pc.utf8_length(batch.column("shop")), 5)).as_py():
            raise BadRecordError("a shop has a name of more than 5 characters")
        yield batch.slice(half)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"shop": pa.string(), "orders": pa.int64()}))


def by_minute(name: str, spout: Any) -> TransactionalTopologyBuilder:
    """The orders of each shop and minute, sent by ``windows`` when the watermark passes."""
    builder = TransactionalTopologyBuilder(name, "orders", spout)
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    windows = WindowedCommitter(
        OpaqueMapState(MemoryBackend()), tumbling(MINUTE), on="at", key=["shop"], aggregates={"orders": Count()}
    )
    builder.set_bolt("windows", windows).global_grouping("orders").all_grouping("watermark")
    return builder


def topology(sink: Bolt, *between: tuple[str, Bolt], policy: Any = "skip", rows: Any = None, take: int = 1) -> Topology:
    given = {0: rows if rows is not None else [*FIRST, *CLOSING]}
    spout = OpaqueMemoryTransactionalSpout(given, ROW, take, on_bad_record=policy)
    builder = by_minute("due", spout)
    above = "windows"
    for name, bolt in between:
        builder.set_bolt(name, bolt).global_grouping(above)
        above = name
    builder.set_bolt("sink", sink).global_grouping(above)
    return builder.build()


def ended(built: Topology, store: MemoryStore | None = None) -> Any:
    with submit(built, {}, store or MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return run.status()


def sinks(database: Database, policy: Any = "fail") -> list[tuple[str, Bolt]]:
    appended = AppendCommitter(database.table("appended"), ["shop", "orders"], on_bad_record=policy)
    upserted = UpsertCommitter(
        database.table("upserted"), ["shop", "window_end"], columns=["orders"], on_bad_record=policy
    )
    return [("appended", appended), ("upserted", upserted)]


@pytest.fixture
def made(database: Database) -> Database:
    moment = "timestamptz" if isinstance(database, PostgresDatabase) else "datetime(6)"
    text = "varchar(200)" + (" COLLATE utf8mb4_nopad_bin" if isinstance(database, MySqlDatabase) else "")
    columns = "orders bigint, _txid bigint, CHECK (left(shop, 7) <> 'refused')"
    if isinstance(database, SqliteDatabase):
        columns = columns.replace("left(shop,", "substr(shop, 1,")
    database.run(f'CREATE TABLE "appended" (shop {text}, {columns})')
    database.run(
        f'CREATE TABLE "upserted" (shop {text}, window_end {moment}, {columns}, PRIMARY KEY (shop, window_end))'
    )
    return database


@pytest.mark.each_value_once
@pytest.mark.parametrize("which", ["appended", "upserted"])
@pytest.mark.parametrize("own", [True, False], ids=["policy of the sink", "policy of the spout"])
def test_a_constraint_of_the_table_refuses_windows(made: Database, which: str, own: bool) -> None:
    sink = dict(sinks(made, "skip" if own else "fail"))[which]
    with structlog.testing.capture_logs() as logs:
        status = ended(topology(sink, policy="fail" if own else "skip"))
    assert made.rows(which, "shop, orders") == KEPT
    assert (status.left_out_rows, status.bad_records) == (3, 0)
    (told,) = [each for each in logs if each["event"] == "commit.row_left_out"]
    assert (told["component"], told["txid"]) == ("sink", len(FIRST) + 1)


@pytest.mark.parametrize("which", ["appended", "upserted"])
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_many_refused_windows_take_few_statements(made: Database, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 600 windows, each beside one that the table takes."""
    rows = [[("refused", "shop")[number % 2] + f" {number:03d}", number % 50] for number in range(600)]
    statements = []
    execute = psycopg.Connection.execute

    def counted(self: Any, statement: Any, *given: Any, **options: Any) -> Any:
        statements.append(statement)
        return execute(self, statement, *given, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    built = topology(dict(sinks(made))[which], rows=[*rows, *CLOSING], take=1_000)
    status = ended(built)
    assert status.left_out_rows == 300
    assert sum(shop.startswith("shop") for shop, _ in made.rows(which, "shop, orders")) == 300
    assert len(statements) < 300, statements


@pytest.mark.slow_for("mysql")
def test_with_the_policy_fail_the_topology_stops(made: Database) -> None:
    with pytest.raises(TopologyFailed, match="appended"):
        ended(topology(dict(sinks(made))["appended"], policy="fail"))


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_what_is_known_to_be_refused_is_left_out_and_verified(database: Database) -> None:
    rows = [["a", 1], ["with \0", 2], ["b", 3], *CLOSING]
    built, store = topology(dict(sinks(database))["upserted"], rows=rows), MemoryStore()
    assert ended(built, store).left_out_rows == 1
    assert database.rows("upserted", "shop, orders") == [("a", 1), ("b", 1), ("z", 1), ("z", 1)]
    report = verify(built, store)
    assert report.right, report.lines()


@pytest.mark.slow_for("mysql")
def test_a_bolt_between_loses_the_rows_that_it_refuses(database: Database) -> None:
    status = ended(topology(AppendCommitter(database.table()), ("short", Short())))
    assert database.rows(columns="shop, orders") == KEPT
    assert status.left_out_rows == 3


@pytest.mark.slow_for("mysql")
def test_rows_that_a_record_of_the_transaction_changes_have_a_record_to_blame(made: Database) -> None:
    builder = TransactionalTopologyBuilder(
        "counting", "orders", OpaqueMemoryTransactionalSpout({0: FIRST}, ROW, 1, on_bad_record="skip")
    )
    counted = StateCommitter(OpaqueMapState(MemoryBackend()), ["shop"], {"orders": Count()})
    builder.set_bolt("counted", counted).global_grouping("orders")
    builder.set_bolt("sink", dict(sinks(made))["appended"]).global_grouping("counted")
    built = builder.build()
    assert ended(built).left_out_rows == 0
    assert made.rows("appended", "shop, orders") == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    (state,) = built["counted"].states
    assert state.get(("refused",)) is None  # type: ignore[attr-defined]


def test_sums_of_windows_beyond_their_type_lose_their_key() -> None:
    """Each sum is in its type; that of two windows is not, whether they close together or not."""
    huge, far = 2**63 - 1, [10_000, 20_000, 30_000]
    rows = [["a", 1, huge], ["b", 2, 1], ["a", 61, huge], ["b", 62, 2]]
    later = [["late", 10_001, huge], ["b", 10_002, 3], ["late", 20_001, huge], ["b", 20_002, 4]]
    given = [*rows, ["z", far[0], 1], *later[:2], ["z", far[1], 1], *later[2:], ["z", far[2], 1]]
    spout = OpaqueMemoryTransactionalSpout({0: given}, Fields(shop=str, at=int, n=int), 1, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("sums", "orders", spout)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", out_of_orderness="2 min", max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    minutes = WindowedCommitter(
        OpaqueMapState(MemoryBackend()), tumbling(MINUTE), on="at", key=["shop"], aggregates={"n": Sum("n")}
    )
    builder.set_bolt("minutes", minutes).global_grouping("orders").all_grouping("watermark")
    totals = StateCommitter(OpaqueMapState(MemoryBackend()), ["shop"], {"n": Sum("n")})
    builder.set_bolt("totals", totals, 2).fields_grouping("minutes", Fields("shop"))
    days = WindowedCommitter(
        OpaqueMapState(MemoryBackend()), tumbling(86_400), on="window_end", key=["shop"], aggregates={"n": Sum("n")}
    )
    builder.set_bolt("days", days).global_grouping("minutes").all_grouping("watermark")
    built, store = builder.build(), MemoryStore()
    status = ended(built, store)
    held = {key: built["totals"].states[0].get(key) for key in ("a", "b", "late", "z")}  # type: ignore[attr-defined]
    assert held == {"a": None, "b": 10, "late": huge, "z": 2}
    assert status.left_out_rows == 4  # of "a" and "late", in totals and in days
    report = verify(built, store)
    assert report.right, report.lines()


HUGE = 2**63 - 1


def sums_below_windows(rows: Any, make: Any, *, late: str = "2 min") -> Topology:
    """The sums of minutes, and below them a committer of their sums."""
    spout = OpaqueMemoryTransactionalSpout({0: rows}, Fields(shop=str, at=int, n=int), 1, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("sums", "orders", spout)
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", out_of_orderness=late, max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    own: dict[str, Any] = {"key": ["shop"], "aggregates": {"n": Sum("n")}}
    minutes = WindowedCommitter(OpaqueMapState(MemoryBackend()), tumbling(MINUTE), on="at", **own)
    builder.set_bolt("minutes", minutes).global_grouping("orders").all_grouping("watermark")
    bolt = make(OpaqueMapState(MemoryBackend()), own)
    below = builder.set_bolt("below", bolt, 2).fields_grouping("minutes", Fields("shop"))
    if not isinstance(bolt, CountWindowCommitter):
        below.all_grouping("watermark")
    sums = StateCommitter(OpaqueMapState(MemoryBackend()), ["shop"], {"n": Last("n"), "windows": Count()})
    builder.set_bolt("sums", sums).global_grouping("below")
    return builder.build()


def sums_of(built: Topology, store: MemoryStore) -> dict[str, Any]:
    """Shop -> the newest sum, and how many there were."""
    report = verify(built, store)
    assert report.right, report.lines()
    held = {each: built["sums"].states[0].get(each) for each in ("a", "b", "late", "z")}  # type: ignore[attr-defined]
    return {each: value for each, value in held.items() if value is not None}


@pytest.mark.parametrize("step", [2, 1])
def test_sums_of_count_windows_beyond_their_type_lose_their_key(step: int) -> None:
    """Those of one part, of a part with records from before, and of the parts of a window."""
    rows = [["a", 1, HUGE], ["b", 2, 1], ["a", 61, HUGE], ["b", 62, 2], ["z", 10_000, 1], ["late", 10_001, HUGE]]
    rows += [["b", 10_002, 3], ["z", 20_000, 1], ["late", 20_001, HUGE], ["b", 20_002, 4], ["z", 30_000, 1]]
    built = sums_below_windows(rows, lambda state, own: CountWindowCommitter(state, 2, step=step, **own))
    store = MemoryStore()
    status = ended(built, store)
    assert (status.left_out_rows, status.bad_records, status.attempts_failed) == (2, 0, 0)
    assert sums_of(built, store) == {"b": (7, 4 // step - step % 2), "z": (2, 1)}


@pytest.mark.parametrize(("late", "kept"), [("0 s", {"a": (HUGE, 1), "late": (HUGE, 1)}), ("10 min", {})])
def test_sums_of_sessions_of_windows_beyond_their_type_lose_their_key(late: str, kept: Any) -> None:
    """Whether the windows of a session close together or not. Windows from before stay."""
    rows = [["a", 1, HUGE], ["b", 2, 1], ["a", 61, HUGE], ["b", 62, 2], ["z", 1_000, 1], ["late", 1_001, HUGE]]
    rows += [["z", 1_080, 1], ["late", 1_085, HUGE], ["b", 1_086, 3], ["z", 1_300, 1], ["z", 9_000, 1]]
    rows += [["z", 20_000, 1], ["z", 40_000, 1]]
    built = sums_below_windows(rows, lambda state, own: SessionCommitter(state, 150, on="window_end", **own), late=late)
    store = MemoryStore()
    status = ended(built, store)
    assert (status.left_out_rows, status.bad_records, status.attempts_failed) == (2, 0, 0)
    assert sums_of(built, store) == {"b": (3, 2), "z": (1, 4), **kept}


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_windows_beside_records_are_left_out_of_a_bolt(policy: Any) -> None:
    """A component that takes both, as below a merge, still leaves out records that it refuses."""
    rows = [*FIRST, *CLOSING]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, ROW, 1, on_bad_record=policy)
    builder = by_minute("merged", spout)
    builder.set_bolt("plain", OnlyShort()).global_grouping("orders")
    builder.set_bolt("short", Short()).global_grouping("windows").global_grouping("plain")
    totals = StateCommitter(OpaqueMapState(MemoryBackend()), ["shop"], {"orders": Sum("orders")})
    builder.set_bolt("totals", totals).global_grouping("short")
    built, store = builder.build(), MemoryStore()
    if policy == "fail":
        with pytest.raises(TopologyFailed, match="more than 5 characters"):
            ended(built, store)
        return
    status = ended(built, store)
    assert (status.left_out_rows, status.bad_records) == (3, 0)
    held = {each: built["totals"].states[0].get(each) for each in "abcz"}  # type: ignore[attr-defined]
    assert held == {"a": 4, "b": 2, "c": 2, "z": 5}
    report = verify(built, store)
    assert report.right, report.lines()


@pytest.mark.slow_for("mysql")
def test_windows_beside_records_are_left_out_of_a_table(made: Database) -> None:
    """Only the database refuses them. A record that it refuses is a bad record as ever."""
    spout = OpaqueMemoryTransactionalSpout({0: [*FIRST, *CLOSING]}, ROW, 1, on_bad_record="skip")
    builder = by_minute("merged", spout)
    builder.set_bolt("closed", Counted()).global_grouping("windows")
    builder.set_bolt("plain", OnlyShort("refused too")).global_grouping("orders")
    sink = builder.set_bolt("sink", AppendCommitter(made.table("appended"), ["shop", "orders"]))
    sink.global_grouping("closed").global_grouping("plain")
    store = MemoryStore()
    status = ended(builder.build(), store)
    assert [*refused(store, "merged")] == [("0", 2)], "which no window has then"
    assert status.left_out_rows == 2
    records = [(shop, 1) for shop, _ in [*FIRST, *CLOSING] if not shop.startswith("refused")]
    assert made.rows("appended", "shop, orders") == sorted([*records, *((shop, 1) for shop, _ in KEPT)])


@pytest.mark.slow_for("mysql")
@pytest.mark.parametrize("closing", ["a", "bad"])
def test_windows_beside_records_are_left_out_of_an_upserted_table(made: Database, closing: str) -> None:
    """Whether the record that closes them has the key of one of them, or is refused itself."""
    given = [["a", 1], ["a", 2], ["b", 3], ["only", 4], ["only", 5], [closing, 600], ["z", 601]]
    spout = OpaqueMemoryTransactionalSpout({0: given}, ROW, 1, on_bad_record="skip")
    builder = by_minute("merged", spout)
    builder.set_bolt("closed", OfWindows()).global_grouping("windows")
    builder.set_bolt("plain", Sevens()).global_grouping("orders")
    text = "varchar(200)" + (" COLLATE utf8mb4_nopad_bin" if isinstance(made, MySqlDatabase) else "")
    made.run(f'CREATE TABLE "keyed" (shop {text} PRIMARY KEY, orders bigint, _txid bigint, CHECK (orders IN (1, 7)))')
    sink = builder.set_bolt("sink", UpsertCommitter(made.table("keyed"), ["shop"]))
    sink.global_grouping("plain").global_grouping("closed")  # the windows come last
    store = MemoryStore()
    status = ended(builder.build(), store)
    assert [*refused(store, "merged")] == ([("0", 5)] if closing == "bad" else [])
    assert status.left_out_rows == 2
    assert made.rows("keyed", "shop, orders") == [("a", 7), ("b", 1), ("only", 7), ("z", 7)]


class OfWindows(ArrowBolt):
    """The shops of windows, with their numbers of orders."""

    deterministic = True
    takes_batches_whole = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch.select(["shop", "orders"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"shop": pa.string(), "orders": pa.int64()}))


class Sevens(OfWindows):
    """The shops of records, with seven orders, or eight if they are bad."""

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        shops = batch.column("shop")
        orders = pc.if_else(pc.equal(shops, "bad"), pa.scalar(8, pa.int64()), pa.scalar(7, pa.int64()))
        yield pa.RecordBatch.from_arrays([shops, orders], names=["shop", "orders"])


class OnlyShort(ArrowBolt):
    """Shops with a short name, or of this name, with one order each."""

    deterministic = True

    def __init__(self, name: str = "") -> None:
        self._name = name

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        shops = batch.column("shop")
        batch = batch.filter(pc.or_(pc.less_equal(pc.utf8_length(shops), 5), pc.equal(shops, self._name)))
        orders = pa.array([1] * batch.num_rows, pa.int64())
        yield pa.RecordBatch.from_arrays([batch.column("shop"), orders], names=["shop", "orders"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"shop": pa.string(), "orders": pa.int64()}))


class Unnamed(ArrowBolt):
    """Below the windows: a record each, of which some shops have no ``field``."""

    deterministic = True
    takes_batches_whole = True

    def __init__(self, field: str) -> None:
        self._field = field

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        moments = pc.divide(batch.column("window_end").cast(pa.int64()), 1_000_000)
        columns = {"shop": batch.column("shop"), "at": moments, "orders": batch.column("orders")}
        of = pc.starts_with(batch.column("shop"), "refused")
        columns[self._field] = pc.if_else(of, pa.scalar(None, columns[self._field].type), columns[self._field])
        yield pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"shop": pa.string(), "at": pa.int64(), "orders": pa.int64()}))


def committer(name: str) -> Bolt:
    state: Any = OpaqueMapState(MemoryBackend())
    own: dict[str, Any] = {"key": ["shop"], "aggregates": {"orders": Sum("orders")}}
    makers: dict[str, Any] = {
        "windows of windows": lambda: WindowedCommitter(state, tumbling(3600), on="at", **own),
        "sessions": lambda: SessionCommitter(state, 10, on="at", **own),
        "count windows": lambda: CountWindowCommitter(state, 2, **own),
        "totals": lambda: StateCommitter(state, **own),
        "expiring": lambda: ExpiringCommitter(state, ttl=10, on="at", **own),
        "first": lambda: DeduplicatingCommitter(state, key=["shop"], on="at", within=10),
        "alarms": lambda: _Alarms(state, on="at", key=["shop"], output=Fields(shop=str)),
    }
    return makers[name]()


class _Alarms(TimerCommitter):
    def on_record(self, entry: Any, record: Any, at: Any) -> None:
        entry.emit(shop=record["shop"])

    def on_timer(self, entry: Any, at: Any) -> None:
        """Sets none."""


@pytest.mark.each_value_once
@pytest.mark.parametrize("field", ["shop", "at"])
@pytest.mark.parametrize(
    "name", ["windows of windows", "sessions", "count windows", "totals", "expiring", "first", "alarms"]
)
def test_rows_without_a_key_or_a_time_are_left_out_of_a_committer_below(name: str, field: str) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [*FIRST, *CLOSING]}, ROW, 1, on_bad_record="skip")
    builder = by_minute("due", spout)
    builder.set_bolt("unnamed", Unnamed(field)).global_grouping("windows")
    below = builder.set_bolt("below", committer(name)).global_grouping("unnamed")
    takes_times = name not in ("count windows", "totals")
    if takes_times:
        below.all_grouping("watermark")
    built, store = builder.build(), MemoryStore()
    status = ended(built, store)
    assert (status.left_out_rows, status.bad_records) == (3 if takes_times or field == "shop" else 0, 0)
    assert status.attempts_failed == 0
    report = verify(built, store)
    assert report.right, report.lines()


@pytest.mark.each_value_once
@pytest.mark.parametrize("name", ["first", "pairs"])
def test_a_row_that_is_a_record_of_its_transaction_has_a_record_to_blame(made: Database, name: str) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: FIRST}, ROW, 1, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("pairs", "orders", spout)
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    state: Any = OpaqueMapState(MemoryBackend())
    if name == "first":
        emits: Any = DeduplicatingCommitter(state, key=["shop"], on="at", within=1)
        builder.set_bolt(name, emits).global_grouping("orders").all_grouping("watermark")
    else:
        builder.set_bolt("paid", Renamed("paid_at")).global_grouping("orders")
        emits = JoiningCommitter(state, key=["shop"], left="at", right="paid_at", within=0)
        builder.set_bolt(name, emits).global_grouping("orders").global_grouping("paid").all_grouping("watermark")
    builder.set_bolt("counted", Counted()).global_grouping(name)
    builder.set_bolt("sink", dict(sinks(made))["appended"]).global_grouping("counted")
    with structlog.testing.capture_logs() as logs:
        status = ended(builder.build())
    assert status.left_out_rows == 0
    assert [each["offset"] for each in logs if each["event"] == "record.refused"] == [1, 2, 5]
    assert made.rows("appended", "shop, orders") == [("a", 1), ("a", 1), ("b", 1), ("c", 1)]


class Renamed(ArrowBolt):
    """Gives ``at`` another name."""

    deterministic = True

    def __init__(self, name: str) -> None:
        self._name = name

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch.rename_columns(["shop", self._name])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"shop": pa.string(), self._name: pa.int64()}))


class Counted(ArrowBolt):
    """Shops, with one order each."""

    deterministic = True
    takes_batches_whole = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        orders = pa.array([1] * batch.num_rows, pa.int64())
        yield pa.RecordBatch.from_arrays([batch.column("shop"), orders], names=["shop", "orders"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"shop": pa.string(), "orders": pa.int64()}))


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_constraints_that_are_checked_at_the_end_refuse_single_rows(database: Database) -> None:
    """SQLite cannot check them earlier, and MariaDB has none."""
    database.run("CREATE TABLE shops (shop text PRIMARY KEY)")
    database.run("INSERT INTO shops VALUES ('a'), ('b'), ('c'), ('z')")
    database.run(
        'CREATE TABLE "appended" (shop text REFERENCES shops DEFERRABLE INITIALLY DEFERRED, orders bigint, _txid bigint)'
    )
    status = ended(topology(AppendCommitter(database.table("appended"), ["shop", "orders"])))
    assert database.rows("appended", "shop, orders") == KEPT
    assert (status.left_out_rows, status.bad_records) == (3, 0)


@pytest.mark.slow_for("mysql")
def test_windows_that_are_joined_with_a_table_are_left_out(made: Database) -> None:
    """The records of the table are in no row of their own."""
    given = {0: [*FIRST, *CLOSING]}
    spout = OpaqueMemoryTransactionalSpout(given, ROW, 1, on_bad_record="skip")
    builder = by_minute("enriched", spout)
    builder.set_bolt("shops", Renamed("opened_at")).global_grouping("orders")
    joined = TableJoiningCommitter(OpaqueMapState(MemoryBackend()), key=["shop"], table="opened_at")
    builder.set_bolt("joined", joined).global_grouping("windows").global_grouping("shops")
    builder.set_bolt("sink", dict(sinks(made))["appended"]).global_grouping("joined")
    status = ended(builder.build())
    assert made.rows("appended", "shop, orders") == KEPT
    assert (status.left_out_rows, status.attempts_failed) == (3, 0)
