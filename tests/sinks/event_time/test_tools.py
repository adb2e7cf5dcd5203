"""Verify, explain, replay, undo and read on windows that are sent once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, read, submit, tumbling
from framework.commands.explain import _document, _lines
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.inspect.explain import Explanation, explain
from framework.inspect.full_recomputation import Unverifiable
from framework.inspect.replay import plan_to_replay, replay
from framework.inspect.verify import verify
from framework.operators.watermarks import LATE_STREAM
from framework.transactions import MemoryStore, documents
from framework.transactions.documents import read_incarnation
from framework.transactions.history_archive import Copying
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter, Sum, WatermarkCommitter, WindowedCommitter
from sinks.transaction_history_table import history_table
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit import timed_parts
from tests.kit.waiting import PATIENCE_S
from tests.sinks.event_time.test_interval_join import ROW as EVENT

pytestmark = pytest.mark.rule("C43")

ROW = Fields(shop=str, source=int, at=int)
SECOND = 1_000_000


class Shop:
    def __init__(self, folder: Path) -> None:
        self.path, self.store = folder / "shop.db", MemoryStore()
        rows = {part: [[f"s{at % 3}", part, at * 7] for at in range(60)] for part in range(2)}
        self.spout = OpaqueMemoryTransactionalSpout(rows, ROW, 10)

    def topology(self, *, late: bool = False) -> Topology:
        """``late``: the sink has the late records, too."""
        builder = TransactionalTopologyBuilder("shop", "orders", self.spout, 2)
        watermark = WatermarkCommitter(
            OpaqueMapState(SqliteBackend(self.path, "clock")), "at", partition=["source"], idle_after="1 h"
        )
        builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
        windows = WindowedCommitter(
            OpaqueMapState(SqliteBackend(self.path, "open_windows")),
            tumbling("1 min"),
            on="at",
            key=["shop"],
            aggregates={"orders": Count()},
        )
        builder.set_bolt("windows", windows, 2).fields_grouping("orders", Fields("shop")).all_grouping("watermark")
        sent = StateCommitter(
            OpaqueMapState(SqliteBackend(self.path, "sent")),
            ["shop", "window_end"],
            {"times": Count(), "orders": Sum("orders")},
        )
        subscribed = builder.set_bolt("sent", sent, 2).fields_grouping("windows", Fields("shop"))
        if late:
            subscribed.fields_grouping("windows", Fields("shop"), LATE_STREAM)
        return builder.build()

    def run(self, *, late: bool = False) -> Topology:
        topology = self.topology(late=late)
        executor = LocalExecutor(plan_execution(topology), {})
        with submit(topology, {}, store=self.store, executor=executor) as run:
            run.wait_until_caught_up(PATIENCE_S)
        return topology


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_tools_work_on_windows_that_are_sent_once(shop: Shop) -> None:
    topology = shop.run()
    with read(topology, store=shop.store) as found:
        sent: Any = found["sent"].arrow().to_pylist()
    assert sum(row["orders"] for row in sent) == 104 and {row["times"] for row in sent} == {1}
    assert verify(topology, shop.store, {}).right
    again = replay(topology, shop.store, planned=plan_to_replay(shop.store, topology, 4))
    changes = [change for state in again.states for change in state.changes]
    assert changes and not any(change.agrees is False for change in changes)
    row = sent[-1]
    key = json.dumps([row["shop"], row["window_end"].isoformat()])
    found_causes = explain(topology, shop.store, state="sent", key=key)
    (step,) = found_causes.steps
    assert step.time_before is not None and step.time_after is not None
    end = int(row["window_end"].timestamp() * 1_000_000)
    assert (step.time_before.watermark or 0) < end <= (step.time_after.watermark or 0)
    assert step.time_after.held_up_by in ("0", "1")
    (told,) = [line for line in _lines(found_causes) if "the watermark went from" in line]
    assert f"held up by partition {step.time_after.held_up_by!r}" in told
    assert [step.txid for step in found_causes.steps] == [row["_txid"]] if "_txid" in row else found_causes.steps


def late_records(found: Explanation) -> list[tuple[int, str, int, int, list[Any]]]:
    """Of each late record: txid, partition, its time and the watermark in seconds, and its rows."""
    return [
        (late.txid, each.cause.partition, each.at // SECOND, late.watermark // SECOND, list(each.cause.rows))
        for late in found.late
        for each in late.records
        if each.at is not None and late.watermark is not None
    ]


def test_explain_names_the_records_that_were_late_for_a_window(shop: Shop) -> None:
    rows = [["s0", 0, 5], ["s1", 0, 6], ["s0", 0, 70], ["s0", 0, 130]]
    late = [["s0", 0, 7], ["s1", 0, 8], ["s0", 0, 75], ["s0", 0, 9]]
    shop.spout = OpaqueMemoryTransactionalSpout({0: rows + late}, ROW, 4)
    topology = shop.run()
    expected = [(2, "0", at, 130, [{"shop": "s0", "source": 0, "at": at}]) for at in (7, 9)]
    for state, bounds in (("sent", ["1970-01-01T00:01:00Z"]), ("windows", [0, 60 * SECOND])):
        found = explain(topology, shop.store, state=state, key=json.dumps(["s0", *bounds]))
        assert late_records(found) == expected
        (line,) = [line for line in _lines(found) if "late" in line]
        assert "transaction 2" in line and "1970-01-01T00:02:10.000+00:00" in line and "'windows'" in line
    none = explain(topology, shop.store, state="sent", key='["s1", "1970-01-01T00:02:00Z"]')
    assert not none.late and not none.steps
    document = _document(explain(topology, shop.store, state="windows", key=f'["s0", 0, {60 * SECOND}]', causes_max=1))
    (transaction,) = document["late"]
    (record,) = transaction.pop("records")
    assert transaction == {
        "component": "windows", "stream": "late", "txid": 2, "watermark": 130 * SECOND, "more": True
    }  # fmt: skip
    assert (record["time"], record["partition"]) == (7 * SECOND, "0")
    assert record["rows"] == [{"shop": "s0", "source": 0, "at": 7}]


def test_a_late_record_that_a_state_takes_is_a_change_of_it(shop: Shop) -> None:
    shop.spout = OpaqueMemoryTransactionalSpout({0: [["s0", 0, 5], ["s0", 0, 130], ["s0", 0, 7]]}, ROW, 2)
    topology = shop.run(late=True)
    found = explain(topology, shop.store, state="sent", key='["s0", "1970-01-01T00:01:00Z"]')
    assert [step.txid for step in found.steps] == [1, 2] and not found.late


@pytest.mark.parametrize("part", ["windows", "sessions", "first", "pairs", "valued", "timers"])
def test_explain_names_what_was_late_for_each_committer(part: str, tmp_path: Path) -> None:
    """A record is not late where its session is open, or where its key is known."""
    first = [("order", "k3", 10), ("order", "k2", 100), ("order", "k2", 200), ("order", "k1", 190)]
    second = [("order", "k3", 50), ("order", "k1", 175), ("payment", "k3", 55), ("order", "k2", 205)]
    rows = [[kind, key, 0, at, at] for kind, key, at in first + second]
    store, spout = MemoryStore(), OpaqueMemoryTransactionalSpout({0: rows}, EVENT, 4)
    built = timed_parts.topology(tmp_path, spout, part)
    timed_parts.run(built, store)
    late = {
        key: sorted(each[:4] for each in late_records(explain(built, store, state="sent", key=key)))
        for key in ("k1", "k2", "k3")
    }
    assert late["k3"] == [(2, "0", 50, 200), (2, "0", 55, 200)] and not late["k2"]
    assert late["k1"] == ([] if part in ("sessions", "first") else [(2, "0", 175, 200)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sent SET orders = orders + 1 WHERE shop = 's0' AND window_end LIKE '%00:01%'",
        "DELETE FROM sent WHERE shop = 's0' AND window_end LIKE '%00:01%'",
        "UPDATE open_windows SET orders = orders + 1 WHERE NOT _deleted AND shop = 's0'",
        "UPDATE clock SET watermark = watermark + 1000000",
    ],
    ids=["sent", "missing", "open", "clock"],
)
def test_verify_finds_wrong_windows_and_a_wrong_watermark(shop: Shop, damage: str) -> None:
    topology = shop.run()
    with sqlite3.connect(shop.path) as connection:
        assert connection.execute(damage).rowcount == 1
    report = verify(topology, shop.store, {})
    assert sorted(each.difference_count for each in report.states) == [0, 0, 1]


def test_what_cannot_be_recomputed_without_its_planning_times_is_named(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "RECORDS_MAX", 3)
    topology = shop.run()
    with pytest.raises(Unverifiable, match="it goes by event time, and when its first transactions were planned"):
        verify(topology, shop.store, {})


def test_a_table_of_records_tells_what_was_late_in_any_transaction(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = history_table(f"sqlite:{tmp_path / 'records.db'}", "shop")
    topology = shop.run()  # all records are in the store
    Copying(shop.store, "shop", archive, read_incarnation(shop.store, "shop"), 1).catch_up()
    monkeypatch.setattr(documents, "RECORDS_MAX", 3)
    with pytest.raises(Unverifiable):
        verify(topology, shop.store, {})
    report = verify(topology, shop.store, {}, archive=archive)
    assert report.right and report.recorded_batches and [each.compared for each in report.states] == [1, 3, 18]
