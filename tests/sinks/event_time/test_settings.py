"""What a topology of windows may change, and what is refused by name when it starts."""

from __future__ import annotations

from typing import Any

import pytest

from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, TopologyError
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.operators.event_window_assigner import hopping, tumbling
from framework.testing import run_on
from framework.transactions import MemoryStore
from sinks import (
    Count,
    DeduplicatingCommitter,
    JoiningCommitter,
    Max,
    MemoryBackend,
    OpaqueMapState,
    SessionCommitter,
    StateCommitter,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C44")

ROW = Fields(shop=str, source=int, at=int)
HOUR = 3_600


class Shop:
    """A topology whose options change from one start to the next."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout({0: [["a", 0, 10], ["a", 0, 70]]}, ROW, 10)
        self.kept: dict[str, MemoryBackend] = {}

    def state(self, name: str) -> OpaqueMapState:
        return OpaqueMapState(self.kept.setdefault(name, MemoryBackend()))

    def topology(self, window: Any, *, timed: bool = True, **options: Any) -> Topology:
        partition = options.pop("partition", ["source"])
        builder = TransactionalTopologyBuilder("shop", "orders", self.spout)
        if timed:
            watermark = WatermarkCommitter(self.state("clock"), "at", partition=partition, max_ahead="1000000 days")
            builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
            windows = WindowedCommitter(
                self.state("windows"), window, on="at", key=["shop"], aggregates={"orders": Count()}, **options
            )
            builder.set_bolt("windows", windows).global_grouping("orders").all_grouping("watermark")
        counted = StateCommitter(self.state("counted"), ["shop"], {"orders": Count()})
        builder.set_bolt("counted", counted).global_grouping("orders")
        return builder.build()

    def run(self, topology: Topology, **options: Any) -> None:
        executor = LocalExecutor(plan_execution(topology), {})
        with submit(topology, {}, store=self.store, executor=executor, **options) as run:
            run.wait_until_caught_up(PATIENCE_S)


@pytest.mark.parametrize(
    ("window", "options", "why"),
    [
        (tumbling("5 min"), {}, "'windows' has another option window: it was .*60000000.* and is .*300000000"),
        (hopping("1 min", "30 s"), {}, "'windows' has another option window: it was .* and is .*30000000"),
        (
            tumbling("1 min"),
            {"allowed_lateness": "1 min"},
            "'windows' has another option allowed_lateness: it was 0, and is 60000000",
        ),
        (
            tumbling("1 min"),
            {"partition": []},
            r"'watermark' has another option partition: it was \['source'\], and is \[\]",
        ),
    ],
)
def test_other_windows_over_open_ones_are_refused_by_name(window: Any, options: Any, why: str) -> None:
    shop = Shop()
    shop.run(shop.topology(tumbling("1 min")))
    with pytest.raises(ConfigError, match=why):
        shop.run(shop.topology(window, **options))
    shop.spout.append(0, ["a", 0, 80])
    shop.run(shop.topology(tumbling("1 min")))


def test_windows_of_a_former_length_close_as_they_were_opened() -> None:
    shop = Shop()
    shop.run(shop.topology(tumbling("1 min")))
    for at in (95, 200):
        shop.spout.append(0, ["a", 0, at])
    changed = shop.topology(tumbling("30 s"))
    shop.run(changed, accept_changed_topology=True)
    assert {(row[1], row[2]) for row, _ in shop.kept["windows"].scan()} >= {(180_000_000, 210_000_000)}


def test_a_topology_that_has_lost_its_clock_is_refused_by_name() -> None:
    shop = Shop()
    shop.run(shop.topology(tumbling("1 min")))
    with pytest.raises(ConfigError, match="keep a WatermarkCommitter"):
        shop.run(shop.topology(None, timed=False), accept_changed_topology=True)


def test_a_watermark_that_does_not_come_to_every_task_is_refused() -> None:
    builder = TransactionalTopologyBuilder("shop", "orders", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    windows = WindowedCommitter(
        OpaqueMapState(MemoryBackend()), tumbling(60), on="at", key=["shop"], aggregates={"orders": Count()}
    )
    builder.set_bolt("windows", windows, 2).fields_grouping("orders", Fields("shop")).global_grouping("watermark")
    with pytest.raises(TopologyError, match="subscribe it to 'watermark' with all_grouping"):
        builder.build()


def test_every_committer_of_event_time_names_its_settings() -> None:
    state, count = OpaqueMapState(MemoryBackend()), {"n": Count()}
    for one, other in (
        (SessionCommitter(state, 5, on="at", key=["k"], aggregates=count), {"gap": 5_000_000}),
        (DeduplicatingCommitter(state, key=["k"], on="at", within=5), {"within": 5_000_000}),
        (JoiningCommitter(state, key=["k"], left="a", right="b", within=5), {"within": 5_000_000, "how": "inner"}),
    ):
        assert one.state_settings().items() >= other.items()


@pytest.mark.slow
def test_windows_are_folded_into_larger_ones() -> None:
    """The rows of the minutes have fields of the names that the hours have, too."""
    builder = TransactionalTopologyBuilder("shop", "orders", OpaqueMemoryTransactionalSpout({0: []}, ROW, 10))
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", max_ahead="1000000 days")
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    source, on = "orders", "at"
    for name, length, aggregates in (
        ("minutes", "1 min", {"orders": Count()}),
        ("hours", "1 h", {"orders": Sum("orders"), "newest": Max("window_end")}),
    ):
        windows = WindowedCommitter(
            OpaqueMapState(MemoryBackend()), tumbling(length), on=on, key=["shop"], aggregates=aggregates
        )
        builder.set_bolt(name, windows, 2).fields_grouping(source, Fields("shop")).all_grouping("watermark")
        source, on = name, "window_start"
    for take in (7, 1_000):
        done = run_on(builder.build(), [["a", 0, at] for at in range(0, 3 * HOUR, 20)], take=take)
        found = [
            (row["window_end"].timestamp(), row["orders"], row["newest"].timestamp()) for row in done.rows("hours")
        ]
        assert found == [(HOUR, 180, HOUR), (2 * HOUR, 180, 2 * HOUR)]


def test_names_of_partitions_are_told_apart() -> None:
    fields = Fields(area=str, shop=str, at=int)
    builder = TransactionalTopologyBuilder("shop", "orders", OpaqueMemoryTransactionalSpout({0: []}, fields, 10))
    watermark = WatermarkCommitter(
        OpaqueMapState(MemoryBackend()), "at", partition=["area", "shop"], max_ahead="1000000 days"
    )
    builder.set_bolt("watermark", watermark).global_grouping("orders").global_grouping("orders", CLOCK_STREAM)
    done = run_on(builder.build(), [["a/b", "c", 100], ["a", "b/c", 20], ["a\\", "b", 90], ["a", "\\b", 95]])
    assert done.table("watermark")[0]["watermark"] == 20_000_000


@pytest.mark.parametrize(
    ("partition", "named"),
    [
        (["topic", "partition"], ["orders/3"]),
        (["ratchet:topic", "ratchet:partition"], ["orders/3"]),
        (["partition"], ["3", "7"]),
        (["source"], []),
        (["partition", "topic"], []),
        ([], []),
    ],
)
def test_the_watermark_knows_the_partitions_of_the_plan_by_their_usual_fields(
    partition: list[str], named: list[str]
) -> None:
    watermark = WatermarkCommitter(OpaqueMapState(MemoryBackend()), "at", partition=partition)
    assert watermark._named(["orders/3", "7"]) == named
