"""What people get wrong, and what they are told: the line, the operator, and what there is."""

from __future__ import annotations

import datetime
import inspect
import random
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from framework import BaseBasicBolt, Fields
from framework.errors import ConfigError, TopologyError
from ratchet import (
    Json,
    Pipeline,
    Stream,
    count,
    dead_letters,
    hopping,
    mean,
    parquet,
    redis,
    sqlite,
    sum_,
    tumbling,
)
from sinks import Count

ROWS = [{"order": "a", "cents": 5, "tags": ["x"], "at": datetime.datetime(2026, 1, 1)}]
TYPES = {"order": str, "cents": int, "at": datetime.datetime}
DB, FILES = sqlite("shop.db", "orders"), parquet("orders")


class Passes(BaseBasicBolt):
    def execute(self, tup: Any, collector: Any) -> None:
        return None

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


Mistake = Callable[[Pipeline, Stream], Any]
MISTAKES: dict[str, Mistake] = {
    "there is no column 'centz'; is it 'cents'? (there are: order, cents, tags, at)": lambda p, s: s.filter(
        "centz > 5"
    ),
    "there is no column 'oder'; is it 'order'?": lambda p, s: s.select("oder"),
    "there is no column 'Cents'; is it 'cents'?": lambda p, s: s.with_columns(euros=pl.col("Cents") / 100),
    "there is no column 'total' (there are: order, cents, tags, at)": lambda p, s: s.group_by("total"),
    "there is no column 'tag'; is it 'tags'?": lambda p, s: s.explode("tag"),
    "there is no column 'cent'; is it 'cents'?": lambda p, s: s.drop("cent"),
    "there is no column 'ordre'; is it 'order'?": lambda p, s: s.rename(ordre="id"),
    "there is no column 'a'; is it 'at'?": lambda p, s: s.window(tumbling("1 h"), on="a"),
    "agg(cents=Sum(field='cents2')): there is no column 'cents2'; is it 'cents'?": lambda p, s: s.group_by("order").agg(
        cents=sum_("cents2")
    ),
    "'cents >' is no SQL expression": lambda p, s: s.filter("cents >"),
    "'cents > 5 and' is no SQL expression": lambda p, s: s.filter("cents > 5 and"),
    "a condition is true or false, and this is int64": lambda p, s: s.filter("cents + 1"),
    "cannot compare string with numeric type": lambda p, s: s.filter(pl.col("order") > 5),
    "needs several rows together": lambda p, s: s.with_columns(total=pl.col("cents").sum()),
    "'count(*)' needs several rows together": lambda p, s: s.select(n="count(*)"),
    "depend on how records fall into batches: use group_by": lambda p, s: s.select(x=pl.col("cents").shift(1)),
    "makes another number of rows: use explode(...)": lambda p, s: s.select(x=pl.col("tags").explode()),
    "asks for the time, which is another one when a batch is replayed": lambda p, s: s.with_columns(t="now()"),
    "calls a Python function": lambda p, s: s.select(x=pl.col("cents").map_elements(lambda x: x)),
    "it makes several columns: name each column": lambda p, s: s.select(pl.all()),
    "5 is a int: give SQL text, or a polars expression": lambda p, s: s.with_columns(five=5),  # type: ignore[arg-type]
    "has no name: write name=... or ... AS name": lambda p, s: s.select("1 + 1"),
    "there would be two columns 'cents'": lambda p, s: s.rename(order="cents"),
    "column 'cents' is int64, and only a list has items": lambda p, s: s.explode("cents"),
    "no Arrow type is known for": lambda p, s: s.cast(cents=list),
    "say which columns the function returns": lambda p, s: s.map(lambda row: row),
    "'upper' is a str: give a function": lambda p, s: s.map("upper", word=str),  # type: ignore[arg-type]
    "kind is 'numpy': give 'arrow', 'polars' or 'pandas'": lambda p, s: s.map_batches(len, kind="numpy", n=int),  # type: ignore[arg-type]
    "give at least one aggregate, as in agg(orders=count())": lambda p, s: s.group_by("order").agg(),
    "n is a function: give an aggregate, such as count()": lambda p, s: s.group_by("order").agg(n=count),
    "n is a str: give an aggregate": lambda p, s: s.group_by("order").agg(n="count(*)"),
    "Sum('order') needs a number, and the field is string": lambda p, s: s.group_by("cents").agg(x=sum_("order")),
    "name at least one column": lambda p, s: s.group_by(),
    "column 'order' is named twice": lambda p, s: s.group_by("order", "order"),
    "needs a column 'm_sum', and there is one already": lambda p, s: (
        s.group_by("order").agg(m=mean("cents"), m_sum=Count()).upsert_into(DB)
    ),
    "column 'at' is timestamp[us], and windows need a timestamp with a zone": lambda p, s: s.window(
        hopping("1 h", "5 min"), on="at"
    ),
    "'1 h' is no window: give tumbling('1 h')": lambda p, s: s.window("1 h", on="at"),  # type: ignore[arg-type]
    "parquet('orders') keeps no row per key": lambda p, s: s.group_by("order").agg(n=count()).upsert_into(FILES),
    "has one row per key, and cannot take every row": lambda p, s: s.append_into(redis("redis://h", "orders")),
    "parquet('orders') cannot keep the newest row": lambda p, s: s.latest_by("order").upsert_into(FILES),
    "latest_by('ordr'): there is no column 'ordr'": lambda p, s: s.latest_by("ordr"),
    "latest_by('order', delete_when='cents'): a condition is true or false": lambda p, s: s.latest_by(
        "order", delete_when="cents"
    ),
    "there is no option 'keys'; is it 'key'?": lambda p, s: s.to_kafka("large", keys="order"),
    "field 'cents' is int64, and a record holds text": lambda p, s: s.drop("tags").to_kafka("large", key="cents"),
    "to_kafka(): KafkaSink: give a topic, or topic_from=": lambda p, s: s.to_kafka(),
    "to_kafka(topic_from='cents'): committer 'cents': field 'cents' is int64": lambda p, s: s.drop("tags").to_kafka(
        topic_from="cents"
    ),
    "a table changes its rows: use upsert_into(...)": lambda p, s: (
        s.group_by("order").agg(n=count()).append_into(FILES)
    ),
    "'orders.db' is a str: give a place such as sqlite": lambda p, s: s.append_into("orders.db"),  # type: ignore[arg-type]
    "sqlite('shop.db') names no table, which only mirror(into=...) can do without": lambda p, s: s.append_into(
        sqlite("shop.db")
    ),
    "into is 'shop.db': give a database, such as postgres(dsn, schema='copy')": lambda p, s: Pipeline("x").mirror(
        "changes",
        into="shop.db",  # type: ignore[arg-type]
    ),
    "the name 'a' is that of": lambda p, s: [s.append_into(parquet(x), name="a") for x in ("a", "b")],
    "bolt id 'per hour' is not usable": lambda p, s: s.append_into(FILES, name="per hour"),
    "parallelism must be 1 to 10000, not 0": lambda p, s: s.append_into(FILES, parallelism=0),
    "the name 'x;y' of a RedisBackend is not usable": lambda p, s: (
        s.group_by("order").agg(n=count()).upsert_into(redis("redis://h", "x;y"))
    ),
    "grouping is 'random': give local, shuffle, global, all": lambda p, s: s.through(
        Passes(), name="p", grouping="random"
    ),  # type: ignore[arg-type]
    "a Passes is no committer: use through(...)": lambda p, s: s.into(Passes(), name="p"),
    "each of its rows would count twice": lambda p, s: s.merge(s),
    "the columns differ": lambda p, s: s.merge(s.drop("cents")),
    "the streams are of two pipelines": lambda p, s: s.merge(Pipeline("other").read(ROWS)),
    "the pipeline reads something already": lambda p, s: p.read(ROWS, name="more"),
    "there is no column 'orders'; is it 'order'?": lambda p, s: Pipeline("x").read([{"orders": 1}], **TYPES),
    "name a topic, or give pattern=, one of the two": lambda p, s: Pipeline("x").read_kafka(),
    "there is no option 'bootstrap_server'; is it 'bootstrap_servers'?": lambda p, s: Pipeline("x").read_kafka(
        "orders", bootstrap_server="x"
    ),
    "there is no metadata 'ofset'; is it 'offset'?": lambda p, s: Pipeline("x").read_kafka("o", metadata=["ofset"]),
    "on_bad_record is 'ignore': give 'fail', 'skip' or dead_letters(...)": lambda p, s: Pipeline("x").read_kafka(
        "orders", on_bad_record="ignore"
    ),
    "there would be two columns 'key'": lambda p, s: Pipeline("x").read_kafka(
        "orders", value=Json(key=str), metadata=["key"]
    ),
    "start must be 'earliest', 'latest'": lambda p, s: Pipeline("x").read_kafka("orders", start="begin"),
    "give fields, as in Json(order=str, cents=int), or one schema": lambda p, s: Json(),
    "field 'order': no Arrow type is known for <class 'set'>": lambda p, s: Json(order=set),
    "the pipeline does not read 'rowz'; is it 'rows'?": lambda p, s: p.test({"rowz": []}),
    "give rows, as in test({'orders': [...]})": lambda p, s: _of_kafka().test(),
}


def _of_kafka() -> Pipeline:
    pipeline = Pipeline("shop")
    letters = dead_letters(sqlite("shop.db", "bad"))
    stream = pipeline.read_kafka("orders", value=Json(a=str), bootstrap_servers="h:1", on_bad_record=letters)
    stream.append_into(FILES)
    return pipeline


@pytest.mark.parametrize("told", MISTAKES)
def test_a_mistake_names_the_line_and_what_there_is(told: str) -> None:
    pipeline = Pipeline("shop")
    stream = pipeline.read(ROWS)
    if "test(" in inspect.getsource(MISTAKES[told]):
        stream.append_into(FILES)
    with pytest.raises((TopologyError, ConfigError)) as raised:
        MISTAKES[told](pipeline, stream)
    message = str(raised.value)
    assert told in message
    assert message.startswith("tests/streams/test_mistakes.py:")
    assert "\n" not in message


def test_there_are_more_than_thirty_mistakes() -> None:
    assert len(MISTAKES) > 30


def test_the_line_of_a_mistake_is_that_of_the_operator() -> None:
    stream = Pipeline("shop").read(ROWS)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(TopologyError, match=f"test_mistakes.py:{line}: filter"):
        stream.filter("nothing = 1")


def test_a_function_that_returns_something_else_is_named(tmp_path: Any) -> None:
    pipeline = Pipeline("shop")
    pipeline.read(ROWS).map(lambda row: {"wrod": "a"}, word=str).append_into(parquet(tmp_path / "a"), name="a")
    with pytest.raises(Exception, match=r"test_mistakes.py:\d+: map\(<lambda>\): it returned a field 'wrod'"):
        pipeline.test()


def test_a_random_function_is_called_so() -> None:
    pipeline = Pipeline("shop")
    pipeline.read(ROWS).map(lambda row: random.random(), x=float).append_into(parquet("x"), name="x")
    assert "a replay may give other rows" in pipeline.describe()
