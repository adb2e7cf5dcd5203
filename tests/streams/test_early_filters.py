"""Filters by key, header or metadata, before the value is decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import BadRecordError
from framework.streams.ports import EarlyFilter
from framework.transactions import MemoryStore
from ratchet import Json, Pipeline, Stream, Text, dead_letters, parquet, sqlite
from spouts import JsonCodec, TextCodec
from spouts.kafka.consumer.record_chunk import ColumnChunk, Run
from spouts.kafka.decoding import RecordDecoder
from spouts.kafka.topic_streams import Streams, checked_streams
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FIELDS = {"order": str, "cents": int}
LATE = pl.col("timestamp_ms") >= 5


def compiled(make: Any, **options: Any) -> EarlyFilter | None:
    """The filter of the spout of a pipeline over one topic with a key."""
    shop = Pipeline("shop")
    read = shop.read_kafka(
        "orders",
        value=Json(**FIELDS),
        key=Text("region"),
        metadata=["timestamp_ms", "value"],
        bootstrap_servers="127.0.0.1:1",
        **options,
    )
    make(read)
    spout: Any = shop.build().spout.instance
    found: EarlyFilter | None = spout._streams.one.records.where
    return found


def written(stream: Stream, name: str = "out") -> None:
    stream.append_into(parquet(f"never/{name}"), name=name)


def test_a_filter_whose_texts_a_record_makes_large_does_not_run_early() -> None:
    assert compiled(lambda rows: written(rows.filter("LPAD(region, timestamp_ms, 'x') <> 'a'"))) is None
    assert compiled(lambda rows: written(rows.filter("LPAD(region, 8, 'x') <> 'a'"))) is not None


BATCH = pl.DataFrame({"region": ["eu", "us", None, "as"], "timestamp_ms": [1, 9, 5, 2]})


def kept(found: EarlyFilter | None) -> list[bool]:
    assert found is not None
    batch = BATCH.select(found.fields).to_arrow(compat_level=pl.CompatLevel.oldest()).to_batches()[0]
    rows = found.kept(batch)
    assert rows is not None
    return list(rows)


def test_filters_at_the_beginning_are_known_to_the_spout() -> None:
    assert kept(compiled(lambda s: written(s.filter("region = 'eu'")))) == [True, False, False, False]
    assert kept(compiled(lambda s: written(s.filter("region <> 'eu'").filter(LATE)))) == [False, True, False, False]
    assert kept(compiled(lambda s: written(s.filter(LATE).filter("cents > 5")))) == [False, True, True, False]
    assert kept(compiled(lambda s: written(s.sql("SELECT cents FROM stream WHERE region = 'as'")))) == [False] * 3 + [
        True
    ]


def test_a_row_is_read_that_any_component_takes() -> None:
    def two(read: Stream) -> None:
        written(read.filter("region = 'eu'").select("cents"), "a")
        written(read.filter(LATE).select("order"), "b")

    assert kept(compiled(two)) == [True, True, True, False]

    def branches(read: Stream) -> None:
        for name, stream in read.branch(eu="region = 'eu'", us="region = 'us'").items():
            written(stream, name)

    assert kept(compiled(branches)) == [True, True, False, False]


@pytest.mark.parametrize(
    "make",
    [
        written,
        lambda s: written(s.filter("cents > 5")),
        lambda s: written(s.filter("cents > 5 or region = 'eu'")),
        lambda s: written(s.filter("value is not null")),
        lambda s: written(s.filter(lambda row: row["region"] == "eu")),
        lambda s: written(s.filter("true")),
        lambda s: written(s.with_columns(region=pl.col("order")).filter("region = 'eu'")),
        lambda s: [written(s.filter("region = 'eu'"), "a"), written(s, "b")],
        lambda s: [written(s.filter("region = 'eu'"), "a"), written(s.filter("cents > 5"), "b")],
        lambda s: [written(s.filter("region = 'eu'")), s._pipeline.builder],
    ],
)
def test_the_spout_gives_all_rows_where_one_may_be_taken(make: Any) -> None:
    assert compiled(make) is None


def decoded(streams: Streams, records: list[tuple[bytes | None, bytes | None, int]]) -> tuple[list[Any], int, int]:
    """The rows, and the number of records that were left out, and of those that are bad."""
    chunk = ColumnChunk(
        [Run("t", 0, len(records))],
        pa.array([value for _, value, _ in records], pa.binary()),
        pa.array(range(len(records)), pa.int64()),
        value_bytes=sum(len(value or b"") for _, value, _ in records),
        keys=pa.array([key for key, _, _ in records], pa.binary()),
        headers=None,
        timestamps=pa.array([at for _, _, at in records], pa.int64()),
    )
    parts = list(RecordDecoder(streams).decode(chunk, {}))
    rows = [row for each in parts if each.rows is not None for row in each.rows.to_pylist()]
    out = sum(each.passed_over for each in parts)
    return rows, out, sum(len(each.chunk) for each in parts if each.letters)


def streams(condition: pl.Expr | None, on_bad_record: Any = "skip") -> Streams:
    made = checked_streams(
        None,
        codec=JsonCodec(pa.schema({"n": pa.int64()})),
        key_codec=TextCodec("region"),
        header_codecs=None,
        metadata=("timestamp_ms",),
        on_bad_record=on_bad_record,
        record_bytes_max=1 << 20,
    )
    return made if condition is None else made.where({"default": EarlyFilter(("region", "timestamp_ms"), condition)})


RECORDS = st.lists(
    st.tuples(
        st.sampled_from([b"eu", b"us", b"\xff", None]),
        st.sampled_from([b'{"n": 1}', b'{"n": 2}', b"not JSON", None]),
        st.integers(0, 9),
    ),
    max_size=12,
)


@given(records=RECORDS)
def test_the_rows_are_those_that_a_filter_after_decoding_leaves(records: Any) -> None:
    condition = (pl.col("region") == "eu").fill_null(False) & LATE
    early, _, _ = decoded(streams(condition), records)
    late, _, _ = decoded(streams(None), records)
    chosen = [row for row in early if row["region"] == "eu" and row["timestamp_ms"] >= 5]
    assert chosen == [row for row in late if row["region"] == "eu" and row["timestamp_ms"] >= 5]


def test_the_value_of_a_record_that_is_left_out_is_not_decoded() -> None:
    records: Any = [(b"eu", b'{"n": 1}', 9), (b"us", b"not JSON", 9), (b"eu", b'{"n": 3}', 1)]
    condition = (pl.col("region") == "eu").fill_null(False) & LATE
    rows, out, bad = decoded(streams(condition, "fail"), records)
    assert ([row["n"] for row in rows], out, bad) == ([1], 2, 0)
    with pytest.raises(BadRecordError):
        decoded(streams(None, "fail"), records)


def test_a_condition_that_cannot_be_computed_leaves_the_row_to_the_steps() -> None:
    records: Any = [(b"eu", b'{"n": 1}', 9)]
    rows, _, _ = decoded(streams(pl.col("region").cast(pl.Int64) == 1), records)
    assert [row["n"] for row in rows] == [1]


@pytest.mark.integration
def test_records_of_other_keys_are_left_out_of_a_topic(topics: Topics, name: str, tmp_path: Path) -> None:
    keys = [(b"eu", b"us")[n % 2] for n in range(10)]
    values = [json.dumps({"order": f"o{n}", "cents": n}).encode() if n % 2 == 0 else b"not JSON" for n in range(10)]
    topics.create(name)
    producer = topics.producer()
    for key, value in zip(keys, values, strict=True):
        producer.produce(name, value, key)
    producer.arrived()
    shop = Pipeline(name)
    read = shop.read_kafka(
        name,
        value=Json(**FIELDS),
        key=Text("region"),
        bootstrap_servers=topics.bootstrap_servers,
        on_bad_record=dead_letters(sqlite(tmp_path / "letters.db", "letters")),
    )
    read.filter("region = 'eu'").select("cents").append_into(parquet(tmp_path / "out"), name="out")
    with shop.submit({}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().bad_records == 0
    assert sorted(pl.read_parquet(tmp_path / "out" / "**" / "*.parquet")["cents"]) == [0, 2, 4, 6, 8]
