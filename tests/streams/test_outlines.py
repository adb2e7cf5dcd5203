"""A compiled pipeline is the topology that somebody would write by hand."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from framework import ArrowBolt, BaseBasicBolt, Fields, TransactionalTopologyBuilder
from framework.errors import TopologyError
from framework.execution import plan_execution
from framework.execution.plan import check_pickles
from ratchet import Json, Pipeline, Text, count, delta, parquet, sqlite, sum_, tumbling
from sinks import (
    AppendCommitter,
    Count,
    KafkaSink,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    SqliteTable,
    StateCommitter,
    Sum,
    UpsertCommitter,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout, TopicStream

BROKER = "127.0.0.1:1"
ORDER = {"order": str, "shop": str, "cents": int, "at": datetime.datetime}


class Emits(ArrowBolt):
    """Stands for the steps of a pipeline."""

    def __init__(self, **streams: Fields) -> None:
        self._streams = streams

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        return None

    def declare_output_fields(self, declarer: Any) -> None:
        for stream, fields in self._streams.items():
            declarer.declare(fields, stream)


class Loud(BaseBasicBolt):
    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["shop"].upper()])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(shop=str))


def orders(pipeline: Pipeline, **options: Any) -> Any:
    return pipeline.read_kafka("orders", value=Json(**ORDER), bootstrap_servers=BROKER, **options)


def spout(**types: Any) -> OpaqueKafkaTransactionalSpout:
    return OpaqueKafkaTransactionalSpout(["orders"], codec=JsonCodec(Fields(**types)), bootstrap_servers=BROKER)


def test_a_table_without_steps_has_the_outline_of_a_state_committer_below_the_spout(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    table = orders(shop, parallelism=3).group_by("shop").agg(orders=count(), cents=sum_("cents"))
    table.upsert_into(sqlite(tmp_path / "shop.db", "per_shop"), name="per-shop", parallelism=2)

    builder = TransactionalTopologyBuilder("shop", "kafka", spout(shop=str, cents=int), 3)
    state = OpaqueMapState(SqliteBackend(tmp_path / "shop.db", "per_shop"))
    committer = StateCommitter(state, ["shop"], {"orders": Count(), "cents": Sum("cents")})
    builder.set_bolt("per-shop", committer, 2).fields_grouping("kafka", Fields("shop"))
    assert shop.build().outline() == builder.build().outline()


def test_steps_are_one_bolt_with_a_stream_per_sink(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    large = orders(shop).filter("cents > 100").with_columns(euros="cents / 100")
    large.select("shop", "euros").append_into(parquet(tmp_path / "large"), name="large")
    per_hour = large.window(tumbling("1 h"), on="at").group_by("shop").agg(cents=sum_("cents"))
    per_hour.upsert_into(sqlite(tmp_path / "shop.db", "per_hour"), name="per-hour")

    builder = TransactionalTopologyBuilder("shop", "kafka", spout(shop=str, cents=int, at=ORDER["at"]))
    hour = Fields.of({"shop": pa.string(), "cents": pa.int64(), "window_start": pa.timestamp("us", "UTC")})
    steps = Emits(**{"default": Fields(shop=str, euros=float), "per-hour": hour})
    builder.set_bolt("orders-steps", steps).local_or_shuffle_grouping("kafka")
    builder.set_bolt("large", AppendCommitter(ParquetTable(tmp_path / "large"))).local_or_shuffle_grouping(
        "orders-steps"
    )
    state = OpaqueMapState(SqliteBackend(tmp_path / "shop.db", "per_hour"))
    committer = StateCommitter(state, ["window_start", "shop"], {"cents": Sum("cents")})
    committer.settings_above = {"window": tumbling("1 h").settings()}
    builder.set_bolt("per-hour", committer).fields_grouping("orders-steps", Fields("window_start", "shop"), "per-hour")
    assert shop.build().outline() == builder.build().outline()


def test_several_topics_are_streams_of_one_spout(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    orders(shop).append_into(parquet(tmp_path / "orders"), name="raw")
    shop.read_kafka("notes", value=Text("note")).append_into(parquet(tmp_path / "notes"))

    streams = {"orders": TopicStream(JsonCodec(Fields(**ORDER))), "notes": TopicStream(Text("note").codec(["note"]))}
    builder = TransactionalTopologyBuilder(
        "shop", "kafka", OpaqueKafkaTransactionalSpout(streams=streams, bootstrap_servers=BROKER)
    )
    for name, stream, folder in (("raw", "orders", "orders"), ("notes", "notes", "notes")):
        builder.set_bolt(name, AppendCommitter(ParquetTable(tmp_path / folder))).local_or_shuffle_grouping(
            "kafka", stream
        )
    assert shop.build().outline() == builder.build().outline()


def test_a_field_that_nothing_uses_is_not_decoded(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    stream = orders(shop).with_columns(unused="length(order)", used="upper(shop)").filter("cents > 0")
    stream.group_by("used").agg(n=count()).upsert_into(sqlite(tmp_path / "a.db", "a"))
    assert shop.build().spout.streams["default"] == Fields(shop=str, cents=int)
    assert shop.build()["orders-steps"].streams["default"] == Fields(used=str)


def test_the_names_of_sinks_do_not_depend_on_their_order(tmp_path: Path) -> None:
    outlines = []
    for names in (("a", "b"), ("b", "a")):
        shop = Pipeline("shop")
        stream = orders(shop)
        for name in names:
            stream.append_into(parquet(tmp_path / name), name=name)
        outlines.append(shop.build().outline())
    assert outlines[0] == outlines[1]


def test_a_bolt_of_ones_own_and_the_builder_stay_open(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    loud = orders(shop).filter("cents > 0").through(Loud(), name="loud", grouping=["shop"], parallelism=2)
    table = loud.group_by("shop").agg(n=count())
    assert loud.schema.names == ["shop"]
    changed = table.upsert_into(sqlite(tmp_path / "a.db", "a"), name="counts")
    changed.filter("n > 1").into(AppendCommitter(ParquetTable(tmp_path / "many")), name="many")
    topology = shop.build()
    assert [each.id for each in topology.components] == [
        *("kafka", "orders-steps", "loud", "counts", "counts-steps", "many"),
    ]
    assert topology["many"].committer and topology["loud"].parallelism == 2
    check_pickles(topology)
    plan_execution(topology)

    shop.builder.set_bolt("more", AppendCommitter(ParquetTable(tmp_path / "more"))).shuffle_grouping("kafka")
    assert shop.build()["more"].subscriptions[0].component_id == "kafka"
    assert shop.build().spout.streams["default"] == Fields(**ORDER)
    with pytest.raises(TopologyError, match="the pipeline is complete"):
        loud.filter("shop = 'x'")


def test_a_description_names_components_steps_and_guarantees(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    table = orders(shop).filter("cents > 100").group_by("shop").agg(n=count())
    table.upsert_into(sqlite(tmp_path / "a.db", "a"), name="per-shop")
    text = shop.describe()
    assert text.startswith("shop: exactly once\n")
    assert "does       filter('cents > 100')" in text
    assert "takes      orders-steps by FieldsGrouping(shop)" in text
    assert "<td>per-shop</td>" in shop._repr_html_()


def test_a_notebook_shows_the_graph_with_each_component_right_of_its_inputs(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    read = orders(shop)
    read.filter("cents > 0").append_into(parquet(tmp_path / "large"), name="large-1")
    read.group_by("shop").agg(n=count()).upsert_into(sqlite(tmp_path / "x.db", "n"), name="n", parallelism=2)
    shown = shop._repr_html_()
    graph = ElementTree.fromstring(shown[: shown.index("<table>")])
    space = "{http://www.w3.org/2000/svg}"
    boxes = {
        each.findtext(f"{space}text"): (each.get("class"), float(str(each.get("transform"))[10:].split()[0]))
        for each in graph.iter(f"{space}g")
        if each.get("class")
    }
    assert {name: kind for name, (kind, _) in boxes.items()} == {
        "kafka": "spout", "orders-steps": "bolt", "large-1": "committer", "n": "committer",
    }  # fmt: skip
    assert boxes["kafka"][1] < boxes["orders-steps"][1] < boxes["large-1"][1]
    assert boxes["n"][1] == boxes["orders-steps"][1]
    said = [each.text for each in graph.iter(f"{space}title")]
    assert "kafka->n: FieldsGrouping(shop)" in said and "n: committer StateCommitter" in said
    assert "committer \N{MULTIPLICATION SIGN} 2" in [each.text for each in graph.iter(f"{space}text")]


def test_a_pipeline_that_is_wrong_shows_why_in_a_notebook() -> None:
    assert "reads nothing" in Pipeline("shop")._repr_html_()


def test_delta_tables_take_rows(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    orders(shop).append_into(delta(tmp_path / "orders"), name="raw")
    assert shop.build()["raw"].states


def test_rows_of_databases_and_topics_have_the_outline_of_their_committers(tmp_path: Path) -> None:
    shop = Pipeline("shop")
    stream = orders(shop, parallelism=2)
    stream.append_into(sqlite(tmp_path / "a.db", "raw"), name="raw", parallelism=2)
    stream.latest_by("order", sequence_by="at").upsert_into(sqlite(tmp_path / "a.db", "orders"), name="newest")
    stream.to_kafka("copies", key="order", name="copies")

    builder = TransactionalTopologyBuilder("shop", "kafka", spout(**ORDER), 2)
    raw = AppendCommitter(SqliteTable(tmp_path / "a.db", "raw"))
    builder.set_bolt("raw", raw, 2).local_or_shuffle_grouping("kafka")
    newest = UpsertCommitter(SqliteTable(tmp_path / "a.db", "orders"), ["order"], sequence_by="at")
    builder.set_bolt("newest", newest).fields_grouping("kafka", Fields("order"))
    builder.set_bolt("copies", KafkaSink("copies", key="order")).global_grouping("kafka")
    assert shop.build().outline() == builder.build().outline()


def test_columns_that_route_a_row_are_no_part_of_its_value() -> None:
    """And what neither routes nor is written is not decoded."""
    shop = Pipeline("shop")
    stream = orders(shop, metadata=["headers", "timestamp_ms"]).drop("at")
    stream.to_kafka(topic_from="shop", headers="headers", timestamp="timestamp_ms", value=["cents"], name="routes")
    topology = shop.build()
    sink = topology["routes"].instance
    assert isinstance(sink, KafkaSink)
    assert topology.spout.streams["default"].names == ("order", "shop", "cents", "headers", "timestamp_ms")
    other = Pipeline("shop")
    orders(other, metadata=["headers"]).to_kafka(topic_from="shop", headers="headers", name="routes")
    assert other.build()["routes"].instance._value_part._content == ["order", "cents", "at"]  # type: ignore[union-attr]
