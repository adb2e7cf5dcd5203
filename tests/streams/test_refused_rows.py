"""What becomes of a record whose row a sink of a pipeline refuses: as that sink says."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from framework.errors import BadRecordError, TopologyError
from framework.transactions import MemoryStore
from ratchet import (
    Fields,
    Json,
    OpaqueMemoryTransactionalSpout,
    Pipeline,
    Stream,
    count,
    dead_letters,
    parquet,
    sqlite,
)
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C51")

CREATE = "CREATE TABLE events (word text NOT NULL, n integer PRIMARY KEY CHECK (n <> 5))"
ROWS: list[list[Any]] = [["a", 1], ["b", 2], ["a", 5], ["c", 3], [None, 4], ["d", 6]]
TAKEN = [("a", 1), ("b", 2), ("c", 3), ("d", 6)]


def created(folder: Path) -> Path:
    path = folder / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute(CREATE)
    return path


def found(path: Path, query: str) -> list[Any]:
    with sqlite3.connect(path) as connection:
        return connection.execute(query).fetchall()


def written(stream: Stream, path: Path, kind: str, **options: Any) -> None:
    target = sqlite(path, "events")
    if kind == "append":
        stream.append_into(target, name="events", **options)
    else:
        stream.latest_by("n").upsert_into(target, name="events", **options)


@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_a_sink_leaves_out_what_it_refuses_and_others_agree(kind: str, tmp_path: Path) -> None:
    path = created(tmp_path)
    pipeline = Pipeline("events")
    stream = pipeline.spout(OpaqueMemoryTransactionalSpout({0: ROWS}, Fields(word=str, n=int), 4))
    written(stream, path, kind, on_bad_record="skip")
    stream.group_by("n").agg(rows=count()).upsert_into(sqlite(path, "counts"), name="counts")
    pipeline.run(executor="local", timeout_s=PATIENCE_S)
    assert found(path, "SELECT word, n FROM events ORDER BY n") == TAKEN
    assert found(path, "SELECT n FROM counts_live ORDER BY n") == [(n,) for _, n in TAKEN]


@pytest.mark.parametrize("of_source", ["skip", "fail"])
def test_a_sink_that_says_nothing_leaves_it_to_the_source(of_source: Any, tmp_path: Path) -> None:
    path = created(tmp_path)
    pipeline = Pipeline("events")
    spout = OpaqueMemoryTransactionalSpout({0: ROWS}, Fields(word=str, n=int), 4, on_bad_record=of_source)
    written(pipeline.spout(spout), path, "append")
    if of_source == "fail":
        with pytest.raises(BadRecordError, match="the table refuses this row"):
            pipeline.run(executor="local", timeout_s=PATIENCE_S)
    else:
        pipeline.run(executor="local", timeout_s=PATIENCE_S)
        assert found(path, "SELECT word, n FROM events ORDER BY n") == TAKEN


@pytest.mark.integration
def test_what_a_sink_refuses_becomes_a_dead_letter(topics: Topics, name: str, tmp_path: Path) -> None:
    path = created(tmp_path)
    topics.send(topics.create(name), [json.dumps(dict(zip(("word", "n"), row, strict=True))).encode() for row in ROWS])
    pipeline = Pipeline(name)
    read = pipeline.read_kafka(name, value=Json(word=str, n=int), bootstrap_servers=topics.bootstrap_servers)
    written(read, path, "upsert", on_bad_record=dead_letters(sqlite(tmp_path / "letters.db", "letters")))
    pipeline.run({}, MemoryStore(), "local", timeout_s=PATIENCE_S)
    assert found(path, "SELECT word, n FROM events ORDER BY n") == TAKEN
    letters = found(tmp_path / "letters.db", "SELECT offset, error FROM letters WHERE NOT _deleted ORDER BY offset")
    assert [offset for offset, _ in letters] == [2, 4] and all(error.startswith("events: ") for _, error in letters)


def test_policies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    letters = dead_letters(sqlite(tmp_path / "x.db", "letters"))
    rows = Pipeline("rows").read([], word=str)
    with pytest.raises(TopologyError, match="on_bad_record is 'drop': give 'fail', 'skip' or dead_letters"):
        rows.append_into(parquet(tmp_path / "out"), on_bad_record="drop")
    with pytest.raises(TopologyError, match="only the records of topics become dead letters: give 'fail' or 'skip'"):
        rows.append_into(parquet(tmp_path / "out"), on_bad_record=letters)
    shop = Pipeline("shop")
    read = shop.read_kafka("t", value=Json(word=str), bootstrap_servers="127.0.0.1:1", on_bad_record=letters)
    with pytest.raises(
        TopologyError, match="has dead_letters.* already, for all of its topics and sinks: give 'dead_let"
    ):
        read.append_into(parquet(tmp_path / "out"), on_bad_record=dead_letters(sqlite(tmp_path / "x.db", "more")))
    read.append_into(parquet(tmp_path / "out"), name="same", on_bad_record=letters)
    read.to_kafka("u", name="named", on_bad_record="dead_letter")
    assert "kafka-dead-letters" in shop.build().parallelisms()
