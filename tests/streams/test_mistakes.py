"""What people get wrong, and what they are told: the line, the operator, and what there is."""

from __future__ import annotations

import datetime
import inspect
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from framework import BaseBasicBolt, Fields
from framework.errors import ConfigError, TopologyError
from ratchet import (
    Json,
    Pipeline,
    RegistryAvro,
    Stream,
    Text,
    TopologyFailed,
    count,
    dead_letters,
    hopping,
    mean,
    mysql,
    parquet,
    postgres,
    quantile,
    redis,
    session,
    sliding,
    sqlite,
    sum_,
    top,
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
    "give the schema by name: postgres(..., 'orders', schema='sales')": lambda p, s: s.append_into(
        postgres("postgresql://db/shop", "sales.orders")
    ),
    "the address names the database: mysql('mysql://user:password@host:3306/sales', 'orders')": lambda p, s: (
        s.append_into(mysql("mysql://root@db/shop", "sales.orders"))
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
    # Names of other engines, operators of another kind, and columns.
    ".where: a stream has no 'where': use filter('cents > 0')": lambda p, s: s.where("cents > 5"),  # type: ignore[attr-defined]
    "a stream has no 'groupBy': use group_by('shop')": lambda p, s: s.groupBy("order"),  # type: ignore[attr-defined]
    "a stream has no 'agg': use group_by": lambda p, s: s.agg(n=count()),  # type: ignore[attr-defined]
    "a stream has no 'dedup': use deduplicate(...)": lambda p, s: s.dedup("order"),  # type: ignore[attr-defined]
    ".cents: a stream has no values to compute with": lambda p, s: s.filter(s.cents > 3),  # type: ignore[attr-defined]
    "['cents']: a stream has no values to compute with": lambda p, s: s.filter(s["cents"] > 3),
    "a grouped stream has no 'sum': use agg(": lambda p, s: s.group_by("order").sum("cents"),  # type: ignore[attr-defined]
    "a grouped stream has no 'append_into': it becomes a table": lambda p, s: s.group_by("order").append_into(DB),  # type: ignore[attr-defined]
    "a table has no 'filter': a table changes its rows": lambda p, s: s.latest_by("order").filter("cents > 1"),  # type: ignore[attr-defined]
    "a table has no 'to_kafka': use upsert_into(...)": lambda p, s: s.group_by("order").agg(n=count()).to_kafka("x"),  # type: ignore[attr-defined]
    # What would give other figures than it seems to.
    "'cents = null' compares with null, which is true for no row: write 'cents IS NULL'": lambda p, s: s.filter(
        "cents = null"
    ),
    "a column with the name of a clause is written '\"order\"'": lambda p, s: s.filter("order = 'a'"),
    "compares with null, which is true for no row": lambda p, s: s.with_columns(x="cents > 1 and order <> NULL"),
    "latest_by('order', delete_when='cents = NULL'): 'cents = NULL' compares with null": lambda p, s: s.latest_by(
        "order", delete_when="cents = NULL"
    ),
    "'at > 1700000000' compares a time with a number": lambda p, s: s.filter("at > 1700000000"),
    "'at between 1 and 2' compares a time with a number": lambda p, s: s.sql(
        "SELECT at FROM stream WHERE at between 1 and 2"
    ),
    "'cast(cents as timestamp)' makes a time of a number, which has no unit: write with_columns(cents=pl.from_epoch": (
        lambda p, s: s.select(at="cast(cents as timestamp)")
    ),
    "'cents' is int64, and a number of a time has no unit": lambda p, s: s.cast(cents=datetime.datetime),
    "shift([dyn int: 1]))]' needs several rows together": lambda p, s: s.select(
        change=pl.col("cents") - pl.col("cents").shift(1)
    ),
    "is_duplicated().not()' needs several rows together": lambda p, s: s.filter(~pl.col("order").is_duplicated()),
    "n would count the rows for which 'cents > 3' is false, too: write sum_(...)": lambda p, s: s.group_by("order").agg(
        n=count("cents > 3")
    ),
    "'cents / 100' has no name": lambda p, s: s.select("cents / 100"),
    "'cents * 2' has no name": lambda p, s: s.sql("SELECT cents * 2 FROM stream"),
    "every row is in 'all', which comes before 'large': put it last": lambda p, s: s.branch(
        all="true", large="cents > 9"
    ),
    "a stream is joined with itself": lambda p, s: _kept().join(
        _KEPT[-1], on="order", times="at", within="1 h", name="j"
    ),
    "column 'cents' is int64, and event time needs a timestamp": lambda p, s: _kept().deduplicate(
        "order", within="1 day", on="cents", name="d"
    ),
    "start is 1767225600, which is in 1970 as milliseconds": lambda p, s: Pipeline("x").read_kafka(
        "orders", start=1_767_225_600
    ),
    "'cents' is 5.7, which is no value of int64": lambda p, s: p.test({"rows": [{"cents": 5.7}]}),
    "'cents' is the text '5', which is no value of int64": lambda p, s: p.test({"rows": [{"cents": "5"}]}),
    "'at' is 1767225600, and a number of a time has no unit": lambda p, s: Pipeline("x").read(
        [{"order": "a", "cents": 1, "at": 1767225600}], **TYPES
    ),
    # Arguments.
    "True is a bool: give SQL text, or a polars expression such as pl.col('name'); the constant is 'true'": (
        lambda p, s: s.branch(large="cents > 5", other=True)  # type: ignore[arg-type]
    ),
    "there is no column 'web' (there are: order, cents, tags, at); a text is written": lambda p, s: s.with_columns(
        source="web"
    ),
    "['order', 'cents'] is a list: give SQL text": lambda p, s: s.select(["order", "cents"]),  # type: ignore[arg-type]
    "['order'] is a list: give the name of a column; give several one by one": lambda p, s: s.group_by(["order"]),  # type: ignore[arg-type]
    "Count(field=None) has no name: name each aggregate, as in agg(orders=count())": lambda p, s: s.group_by(
        "order"
    ).agg(count()),
    "window(tumbling('1 h'), on='cents'): column 'cents' is int64": lambda p, s: s.window(tumbling("1 h"), on="cents"),
    "late is '10': give a length of time": lambda p, s: _kept().window(tumbling("1 h"), on="at", late="10"),
    "max_ahead is 'far': give a length of time": lambda p, s: _kept().window(tumbling("1 h"), on="at", max_ahead="far"),
    "idle_after is -1: give a length of time": lambda p, s: _kept().deduplicate(
        "order", within="1 h", on="at", name="d", idle_after=-1
    ),
    "advance_when_idle needs idle_after: without it, no partition is idle": lambda p, s: _kept().window(
        tumbling("1 h"), on="at", advance_when_idle=True
    ),
    "advance_when_idle is '1 min': give True or False": lambda p, s: _kept().window(
        tumbling("1 h"),
        on="at",
        idle_after="1 min",
        advance_when_idle="1 min",  # type: ignore[arg-type]
    ),
    "give at least one other stream": lambda p, s: s.merge(),
    "this stream has a column 'order', and the one that it is joined with has not": lambda p, s: s.join(
        s.rename(order="id"), on="order", times="at", within="1 h", name="j"
    ),
    "Passes is a class: give an object, Passes(...)": lambda p, s: s.through(Passes, name="p"),  # type: ignore[arg-type]
    "give a bolt; map(...) and map_batches(...) take functions": lambda p, s: s.through(lambda row: row, name="p"),  # type: ignore[arg-type]
    "the name 'rows' is that of what is read already": lambda p, s: s.append_into(FILES, name="rows"),
    "bolt id '' is not usable": lambda p, s: s.append_into(FILES, name=""),
    "name='b'): bolts 'a' and 'b' both write to": lambda p, s: [
        *(s.append_into(sqlite("b", "b"), name=each) for each in ("a", "b")),
        p.build(),
    ],
    "value is Json: give a format with its columns": lambda p, s: Pipeline("x").read_kafka("orders", value=Json),  # type: ignore[arg-type]
    "value is {'a': <class 'int'>}, a dict: give a format": lambda p, s: Pipeline("x").read_kafka(
        "orders",
        value={"a": int},  # type: ignore[arg-type]
    ),
    "key is 'order', a str: give a format with its columns, such as Text('order')": lambda p, s: Pipeline(
        "x"
    ).read_kafka(
        "orders",
        key="order",  # type: ignore[arg-type]
    ),
    "on_bad_record is sqlite('shop.db', 'orders'): give 'fail', 'skip' or dead_letters(...)": lambda p, s: Pipeline(
        "x"
    ).read_kafka("orders", on_bad_record=DB),  # type: ignore[arg-type]
    "component 'kafka': parallelism must be 1 to 10000, not 0": lambda p, s: Pipeline("x").read_kafka(
        "orders", value=Json(a=str), bootstrap_servers="h:1", parallelism=0
    ),
    "there is no metadata 'topics'; is it 'topic'?": lambda p, s: Pipeline("x").read_kafka("orders", metadata="topics"),
    "key is the format Json: write key_codec=Json(...)": lambda p, s: s.to_kafka("large", key=Json),  # type: ignore[arg-type]
    "topic_from is a function: make a column by with_columns(...)": lambda p, s: s.to_kafka(topic_from=len),  # type: ignore[arg-type]
    "state is sqlite('shop.db', 'orders'): give a function from a name to a store": lambda p, s: Pipeline(
        "x", state=DB
    ),  # type: ignore[arg-type]
    "state= of the pipeline gives parquet('orders') for it, a Files: give a store": lambda p, s: (
        Pipeline("x", state=lambda name: FILES)  # type: ignore[arg-type, return-value]
        .read(ROWS)
        .deduplicate("order", within="1 h", on="at", name="d")
    ),
    "it is a DataFrame: give mappings, of polars frame.to_dicts()": lambda p, s: Pipeline("x").read(pl.DataFrame(ROWS)),  # type: ignore[arg-type]
    "the rows are a list: give them by source, as in test({'rows': [...]})": lambda p, s: p.test([ROWS[0]]),  # type: ignore[arg-type]
    "the rows of 'rows' are a dict: give a list of mappings": lambda p, s: p.test({"rows": ROWS[0]}),
    "'crash' is no fault: give crash(2)": lambda p, s: p.test({"rows": ROWS}, faults=["crash"]),  # type: ignore[list-item]
    "UNION needs two streams: use merge(...)": lambda p, s: s.sql(
        "SELECT at FROM stream UNION ALL SELECT at FROM stream"
    ),
    "a query only reads: write the rows by append_into(...)": lambda p, s: s.sql("INSERT INTO x SELECT * FROM stream"),
    "QUALIFY compares rows: use deduplicate(...)": lambda p, s: s.sql("SELECT at FROM stream QUALIFY at = 1"),
    "deduplicate('order', within='1 day'): name is missing: add name='seen', the id, which its state follows": (
        lambda p, s: s.deduplicate("order", within="1 day")  # type: ignore[call-arg]
    ),
    "join(Table(order -> the newest row), on='order'): name is missing: add name='seen'": lambda p, s: s.join(
        s.latest_by("order"),
        on="order",
    ),  # type: ignore[call-arg]
    "there is no argument 'whithin'; is it 'within'?": lambda p, s: s.deduplicate("order", whithin="1 d", name="d"),  # type: ignore[call-arg]
    "there is no argument 'sequnce_by'; is it 'sequence_by'?": lambda p, s: s.latest_by("order", sequnce_by="at"),  # type: ignore[call-arg]
    "window(tumbling('1 h'), 'at'): it takes windows by position, and 2 are given so: write the others as name=value": (
        lambda p, s: s.window(tumbling("1 h"), "at")  # type: ignore[misc]
    ),
    "it takes nothing by position, and 1 are given so": lambda p, s: (
        s.group_by("order").agg(n=count()).when_closed("per-order")  # type: ignore[misc]
    ),
    "filter('a', condition='b'): 'condition' is given twice": lambda p, s: s.filter("a", condition="b"),  # type: ignore[misc]
    "mirror('changes'): into is missing: add into=postgres(": lambda p, s: Pipeline("x").mirror("changes"),  # type: ignore[call-arg]
    "postgres('orders', 'sales'): 'orders' is no address, such as postgres://user@host/database": lambda p, s: postgres(
        "orders", "sales"
    ),
    "postgres(5): 5 is a int: give a name, or an address and a name": lambda p, s: postgres(5),  # type: ignore[arg-type]
    "redis(...): name what the keys begin with": lambda p, s: redis("redis://h"),
    "window(sliding, on='at'): sliding is no window: give": lambda p, s: s.window(sliding, on="at"),  # type: ignore[arg-type]
    "window(sliding('1 h', '5 min'), on='at'): column 'at' is": lambda p, s: s.window(sliding("1 h", "5 min"), on="at"),
    "a stream has no 'slidingWindow': use window(tumbling(": lambda p, s: s.slidingWindow("1 h"),
    # Functions.
    "map_partitions takes no async def: use map_batches(...)": lambda p, s: s.map_partitions(_awaits, n=int),
    "map_partitions(_forgets): the function has no return with a value": lambda p, s: s.map_partitions(_forgets, n=int),
    "a stream has no 'mapPartitions': use map_partitions(function, n=int)": lambda p, s: s.mapPartitions(len),
    "the function is called with an iterator of tables: too many positional": lambda p, s: s.map_partitions(
        lambda: [1], n=int
    ),
    "the function is called with the row: missing a required argument: 'cents'": lambda p, s: s.filter(
        lambda order, cents: cents > 3  # type: ignore[arg-type, misc]
    ),
    "the function is called with a key: too many positional arguments": lambda p, s: s.lookup(
        lambda: "Bern", on="order", city=str
    ),
    "the function is called with the row and what setup made: too many": lambda p, s: s.map(
        lambda row: 1, setup=dict, x=int
    ),
    "map(_forgets): the function has no return with a value": lambda p, s: s.map(_forgets, cents=int),
    "filter(_forgets): the function has no return with a value": lambda p, s: s.filter(_forgets),
    # Arguments of windows, aggregates and places.
    "tumbling(size='1 h'): there is no argument 'size' (there are: length, origin, zone)": lambda p, s: tumbling(
        size="1 h"  # type: ignore[call-arg]
    ),
    "hopping('5 min'): step is missing: add step='5 min'": lambda p, s: hopping("5 min"),  # type: ignore[call-arg]
    "session(): gap is missing: add gap='30 min'": lambda p, s: session(),  # type: ignore[call-arg]
    "tumbling('1'): the length of a window is '1': give a length of time": lambda p, s: tumbling("1"),
    "hopping('5 min', '10 min'): windows of '5 min' every '10 min' leave gaps": lambda p, s: hopping("5 min", "10 min"),
    "sliding('5 min', '10 min'): windows of '5 min' every '10 min' leave gaps": lambda p, s: sliding("5 min", "10 min"),
    "sum_(): field is missing: add field='cents'": lambda p, s: sum_(),  # type: ignore[call-arg]
    "top('cents', n=3): there is no argument 'n' (there are: field, most, bytes_max)": lambda p, s: top("cents", n=3),  # type: ignore[call-arg]
    "quantile('cents', 99): Quantile('cents'): share is 99: give a number between 0 and 1": lambda p, s: quantile(
        "cents", 99
    ),
    "postgres(...): there is no argument 'shema'; is it 'schema'? (there are: dsn, table, schema)": lambda p, s: (
        postgres("orders", shema="sales")  # type: ignore[call-arg]
    ),
    "postgres(...): there is no argument 'password' (there are: dsn, table, schema)": lambda p, s: postgres(
        "orders", password="ahem"
    ),  # type: ignore[call-arg]
    "parquet(...): there is no argument 'partition'; is it 'partition_by'?": lambda p, s: parquet(
        "orders",
        partition="order",  # type: ignore[call-arg]
    ),
    "sqlite(...): path is missing: add path='shop.db'": lambda p, s: sqlite(table="orders"),  # type: ignore[call-arg]
    "Text('order', 'utf-8'): it takes field by position, and 2 are given so": lambda p, s: Text("order", "utf-8"),  # type: ignore[call-arg]
    "there is no option 'regstry'; is it 'registry'?": lambda p, s: RegistryAvro("orders", regstry="http://r:8081"),
    "Pipeline(): name is missing: add name='seen', the id": lambda p, s: Pipeline(),  # type: ignore[call-arg]
    "Pipeline('my shop'): pipeline id 'my shop' is not usable": lambda p, s: Pipeline("my shop"),
    "there is no option 'on_bad_records'; is it 'on_bad_record'?": lambda p, s: Pipeline("x").read_kafka(
        "orders", on_bad_records="skip"
    ),
    "map(<lambda>, batch_size=5, word=str): there is no argument 'batch_size' (there are: function, setup": lambda p, s: (
        s.map(
            lambda row: row,
            batch_size=5,  # type: ignore[arg-type]
            word=str,
        )
    ),
    "batches(): give max_records=, max_bytes=, or both": lambda p, s: _of_kafka().batches(),
    # Operators in a wrong order, and what has no windows or no key.
    "when_closed(): only windows close: begin with window(tumbling('1 h'), on=...), and then group_by(...)": (
        lambda p, s: s.group_by("order").agg(n=count()).when_closed()
    ),
    "a stream has no 'upsert_into', which needs one row per key: use latest_by(...).upsert_into(...)": lambda p, s: (
        s.upsert_into(DB)  # type: ignore[attr-defined]
    ),
    "agg(order=Count(field=None)): there is a column 'order' in the key already": lambda p, s: s.group_by("order").agg(
        order=count()
    ),
    "agg(n=count()) goes after group_by(...)": lambda p, s: s.with_columns(n=count()),  # type: ignore[arg-type]
    "<lambda> is a function: use map(...)": lambda p, s: s.with_columns(n=lambda row: 1),  # type: ignore[arg-type]
    "branch(large='cents + 1'): a condition is true or false, and this is int64": lambda p, s: s.branch(
        all="cents > 3", large="cents + 1"
    ),
    "['larg']: there is no 'larg'; is it 'large'? (there are: large, other)": lambda p, s: s.branch(
        large="cents > 5", other="true"
    )["larg"],
    ".large: write ['large']": lambda p, s: s.branch(large="cents > 5").large,  # type: ignore[attr-defined]
    "['order']: there is no 'order'; is it 'orders'? (there are: orders)": lambda p, s: p.test({"rows": ROWS})["order"],
    "show(5): give rows, as in show(5, {'orders': [...]})": lambda p, s: _of_kafka().show(5),
    "append_into(): target is missing: add target=sqlite('shop.db', 'orders')": lambda p, s: s.append_into(),  # type: ignore[call-arg]
    "sqlite(...): 5 is a int: give the path of a file or a folder": lambda p, s: sqlite(5, "orders"),  # type: ignore[arg-type]
    "dead_letters(...): 5 is a int: give a database, or the name of a Kafka topic": lambda p, s: dead_letters(5),  # type: ignore[arg-type]
    "dead_letters('bad'): there is no option 'bootstrap'; is it 'bootstrap_servers'?": lambda p, s: dead_letters(
        "bad", bootstrap="h:1"
    ),
    "read_kafka(5): give the name of a topic": lambda p, s: Pipeline("x").read_kafka(5),  # type: ignore[arg-type]
    "headers is ['trace']: give a format for each": lambda p, s: Pipeline("x").read_kafka(
        "orders",
        headers=["trace"],  # type: ignore[arg-type]
    ),
    "read('...'): the values of 'b' have no type in common": lambda p, s: Pipeline("x").read(
        [{"a": 1, "b": 2}, {"a": 1, "b": "x"}]
    ),
    "'cents / 100' is no column: name what it gives, as in group_by(part=": lambda p, s: s.group_by("cents / 100"),
    "cast(at=bool): casting from Datetime": lambda p, s: s.cast(at=bool),
    ".read_kafak: a pipeline has no 'read_kafak': use read_kafka(...)": lambda p, s: p.read_kafak("o"),  # type: ignore[attr-defined]
    "a pipeline has no 'start': use run(config) or submit(config)": lambda p, s: p.start(),  # type: ignore[attr-defined]
    "a pipeline has no 'filter': a stream has it: begin with read_kafka(...).filter(...)": lambda p, s: p.filter("a"),  # type: ignore[attr-defined]
    "a pipeline has no 'windowing': it has read_kafka, read, spout": lambda p, s: p.windowing(),  # type: ignore[attr-defined]
    "rename(['order']): ['order'] is a list: give new names, as in rename(old='new')": lambda p, s: s.rename(
        ["order"]  # type: ignore[arg-type]
    ),
    "'*' is all columns: with_columns(...) keeps them": lambda p, s: s.select("*", euros="cents / 100"),
    "late('both'): give 'left' or 'right', the side of the join": lambda p, s: (
        _kept()
        .join(_KEPT[-1].filter("cents > 0").rename(cents="paid"), on="order", times="at", within="1 h", name="j")
        .late("both")  # type: ignore[arg-type]
    ),
    # SQL that is written as Python, or as another SQL.
    "'cents > 1 && cents < 9' is no SQL expression: write AND, not &&": lambda p, s: s.filter("cents > 1 && cents < 9"),
    "'cents is None' is no SQL expression: write IS NULL, not is None": lambda p, s: s.filter("cents is None"),
    "is no SQL expression: write IN (...), not in [": lambda p, s: s.filter("cents in [1, 2]"),
    r"'(cents + 1 > 2' is no SQL expression: it opens 1 brackets and closes 0": lambda p, s: s.filter("(cents + 1 > 2"),
    "'cents > 1)' is no SQL expression: it opens 0 brackets and closes 1": lambda p, s: s.filter("cents > 1)"),
    "a CASE ends with END": lambda p, s: s.with_columns(large="case when cents > 1 then 'a)' else 'b'"),
    r"bool(Stream(": lambda p, s: s.filter("cents > 0") or s,
    "a table has no rows while a pipeline is made": lambda p, s: not s.latest_by("order"),
    "'1 < cents < 5' compares a condition with a number: write 'a > 1 AND a < 5'": lambda p, s: s.filter(
        "1 < cents < 5"
    ),
    "'cents < 1 | cents > 5' compares a condition with a number": lambda p, s: s.filter("cents < 1 | cents > 5"),
    "there is no column 'web' (there are: order, cents, tags, at); a text is written \"'web'\"": lambda p, s: s.filter(
        '"order" = "web"'
    ),
}

_KEPT: list[Stream] = []


def _kept() -> Stream:
    """A stream with event time, of a pipeline that has a store."""
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    _KEPT.append(
        Pipeline("kept", state=lambda name: sqlite("state.db", name)).read([{"order": "a", "cents": 1, "at": at}])
    )
    return _KEPT[-1]


async def _awaits(tables: Any) -> Any:
    return tables


def _forgets(row: dict[str, Any]) -> None:
    row["cents"] += 1


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


#: Expressions of which a method that takes rows together may be a part.
WRAPPED: list[Callable[[pl.Expr], pl.Expr]] = [
    lambda inner: inner,
    lambda inner: inner.is_null(),
    lambda inner: inner == pl.col("cents"),
    lambda inner: pl.coalesce(inner, inner),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", WRAPPED)
def test_no_method_of_polars_takes_rows_together_unnoticed(wrap: Callable[[pl.Expr], pl.Expr]) -> None:
    """Each method that is taken gives the same for rows that come one by one."""
    stream = Pipeline("shop").read([{"cents": each, "order": str(each)} for each in (3, 1, 2, 2, None, 5, 1)])
    frame = pl.DataFrame(pl.from_arrow(stream.schema.empty_table())).clear()
    frame = pl.DataFrame({"cents": [3, 1, 2, 2, None, 5, 1], "order": list("baabcdx")}, schema=frame.schema)
    taken = 0
    for name in dir(pl.Expr):
        if name.startswith("_") or name in ("inspect", "sample", "shuffle", "map_batches", "map_elements", "pipe"):
            continue
        for column, arguments in itertools.product(("cents", "order"), ((), (1,))):
            try:
                expression = wrap(getattr(pl.col(column), name)(*arguments)).alias("x")
                together = frame.select(expression)
            except (pl.exceptions.PolarsError, TypeError, ValueError, AttributeError, ImportError):
                continue
            try:
                stream.select(expression)
            except TopologyError:
                continue
            taken += 1
            one_by_one = pl.concat([each.select(expression) for each in frame.iter_slices(1)])
            assert together.equals(one_by_one), name
    assert taken > 20


def test_streams_with_the_same_columns_in_another_order_are_merged(tmp_path: Any) -> None:
    pipeline = Pipeline("shop")
    stream = pipeline.read([{"a": 1, "b": 2}])
    stream.merge(stream.select(b="a", a="b")).append_into(parquet(tmp_path / "a"), name="a")
    assert sorted(row["a"] for row in pipeline.test()["a"]) == [1, 2]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda s: s.map(lambda row: 1767225600, x=datetime.datetime), "1767225600 for 'x', and a number of a time"),
        (lambda s: s.map(lambda row: (each for each in "ab"), x=str), "the function yields rows: use flat_map"),
        (lambda s: s.map(lambda row: (1, "a"), n=int, x=int), "it returned for 'x' is no int64"),
        (lambda s: s.flat_map(lambda row: "ab", x=str), "it returned 'ab', which is no list of rows"),
        (lambda s: s.flat_map(lambda row: None, x=str), "it returned None, which is no list of rows"),
    ],
)
def test_a_value_that_a_function_must_not_return_is_named(step: Any, said: str, tmp_path: Any) -> None:
    pipeline = Pipeline("shop")
    step(pipeline.read(ROWS)).append_into(parquet(tmp_path / "a"), name="a")
    with pytest.raises(TopologyFailed, match=rf"test_mistakes.py:\d+: .*{said}"):
        pipeline.test()


def test_an_error_in_a_function_shows_its_line(tmp_path: Any) -> None:
    pipeline = Pipeline("shop")
    pipeline.read(ROWS).map(lambda row: row["cents"] / 0, x=float).append_into(parquet(tmp_path / "a"), name="a")
    with pytest.raises(TopologyFailed, match="division by zero") as raised:
        pipeline.test()
    assert any("test_mistakes.py" in note and 'row["cents"] / 0' in note for note in raised.value.__notes__)


def test_what_a_function_takes_from_outside_and_cannot_be_sent_is_named(tmp_path: Any) -> None:
    lock = threading.Lock()
    pipeline = Pipeline("shop")
    pipeline.read(ROWS).map(lambda row: lock.locked(), x=bool).append_into(parquet(tmp_path / "a"), name="a")
    with pytest.raises(
        TopologyError, match=r"map\(<lambda>\): .* it takes 'lock', a lock, from outside: open it in setup="
    ):
        pipeline.test()


@pytest.mark.parametrize(
    ("condition", "fits"),
    [("n is not null", True), ("cents > 1 and n IS NOT NULL", True), ("n > 1", False), ("cents is not null", False)],
)
def test_a_filter_of_nulls_leaves_tombstones_out_of_a_sequence(condition: str, fits: bool, tmp_path: Any) -> None:
    pipeline = Pipeline("shop")
    stream = pipeline.read_kafka(
        "orders", value=Json(n=int, cents=int), key=Text("id"), bootstrap_servers="h:1"
    ).filter(condition)
    table = sqlite(tmp_path / "a.db", "a")
    if not fits:
        with pytest.raises(TopologyError, match="a tombstone deletes the row of its key, and has no 'n' to compare"):
            stream.latest_by("id", sequence_by="n").upsert_into(table, name="a")
        return
    stream.latest_by("id", sequence_by="n").upsert_into(table, name="a")
    rows = [{"id": "a", "n": 3, "cents": 5}, {"id": "a", "n": None}, {"id": "a", "n": 2, "cents": 7}]
    assert [(row["n"], row["cents"]) for row in pipeline.test({"orders": rows})["a"]] == [(3, 5)]


def test_a_random_function_is_called_so() -> None:
    pipeline = Pipeline("shop")
    pipeline.read(ROWS).map(lambda row: random.random(), x=float).append_into(parquet("x"), name="x")
    assert "a replay may give other rows" in pipeline.describe()
