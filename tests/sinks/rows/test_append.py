"""Rows that are appended to a table of a database are there once, whatever fails."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError, StaleWriterError, TopologyError
from framework.topology import CommitFence, OpenCommit, TransactionAttempt
from framework.transactions import MemoryStore
from sinks import AppendCommitter
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.file_tables import granted, opened
from tests.kit.row_tables import Database, append, batch_of, bound
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C41")
FIELDS = Fields(word=str, n=int)


def words(database: Database, name: str = "events") -> list[str]:
    return [word for (word,) in database.rows(name, "word")]


def one(word: str) -> dict[str, Any]:
    return {"word": word, "n": len(word)}


def test_a_table_has_the_columns_of_the_fields_and_a_stamp(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    append(table, 1, one("a"), one("bb"))
    assert database.rows() == [("a", 1, 1), ("bb", 2, 1)]


def test_a_replay_takes_back_what_an_earlier_attempt_wrote(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    append(table, 1, one("a"))
    dead = opened(table, 2, 1)
    table.write(granted(dead, 0), [batch_of(table, [one("dead"), one("gone")])])
    append(table, 2, one("other"), attempt=2)
    assert words(database) == ["a", "other"]
    with pytest.raises(StaleWriterError):
        table.write(granted(dead, 1), [batch_of(table, [one("zombie")])])
    assert words(database) == ["a", "other"]


def test_a_replay_of_a_done_transaction_replaces_its_rows(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    append(table, 1, one("a"))
    append(table, 1, one("b"), attempt=2)
    assert words(database) == ["b"]


def test_a_new_leader_keeps_the_rows_of_a_done_transaction(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    done = append(table, 1, one("a")).finished(1)
    table.raise_header(done, replace(done, epoch=2))
    assert words(database) == ["a"]


def test_tasks_of_one_attempt_add_up_and_a_doubled_task_writes_once(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    header = opened(table, 1, 1)
    for task in (0, 1, 2, 1, 0):
        table.write(granted(header, task), [batch_of(table, [one(f"task{task}")])])
    assert words(database) == ["task0", "task1", "task2"]


def test_a_roll_back_leaves_nothing_of_the_transaction(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    append(table, 1, one("a"))
    header = opened(table, 2, 1)
    table.write(granted(header), [batch_of(table, [one("b"), one("c")])])
    assert table.roll_back(header) == 2
    assert words(database) == ["a"]


def test_one_step_writes_rows_and_the_header_together(database: Database) -> None:
    table = bound(database.table(), FIELDS)
    append(table, 1, one("a"))
    before = table.read_header()
    fence = CommitFence("topology", 1, "digest", "bolt:0", opens_from=before)
    attempt = TransactionAttempt(2, 1, fence)
    table.write(attempt, [batch_of(table, [one("b")])])
    assert table.read_header() == before.opened(1, OpenCommit(2, 1, "digest")).done_as_open()
    with pytest.raises(StaleWriterError):
        table.write(attempt, [batch_of(table, [one("b")])])
    assert words(database) == ["a", "b"]


def test_without_a_stamp_a_replay_skips_what_is_written(database: Database) -> None:
    table = bound(database.table(stamp=None), FIELDS)
    header = opened(table, 1, 1)
    table.write(granted(header), [batch_of(table, [one("a")])])
    append(table, 1, one("a"), attempt=2)
    append(table, 2, one("b"))
    assert database.rows() == [("a", 1), ("b", 1)]
    assert not table.can_undo


def test_a_table_made_by_hand_keeps_its_defaults_checks_and_generated_columns(database: Database) -> None:
    database.run(
        "CREATE TABLE events (id integer, word varchar(20) NOT NULL CHECK (word <> 'bad'), n bigint, "
        "twice bigint GENERATED ALWAYS AS (n * 2) STORED, place varchar(10) DEFAULT 'here')"
    )
    database.run("INSERT INTO events (id, word, n) VALUES (7, 'mine', 1)")
    table = bound(database.table(), FIELDS)
    append(table, 1, one("a"))
    with pytest.raises(BadRecordError, match="events"):
        append(table, 2, one("good"), one("bad"))
    append(table, 2, one("good"), attempt=2)
    assert database.rows(columns="word, n, twice, place, _txid") == [
        ("a", 1, 2, "here", 1),
        ("good", 4, 8, "here", 2),
        ("mine", 1, 2, "here", None),
    ]
    table.clear("topology")
    assert words(database) == ["mine"]


def test_a_missing_column_is_refused_with_the_statement_that_adds_it(database: Database) -> None:
    database.run("CREATE TABLE events (word varchar(20))")
    table = database.table()
    table.bind(FIELDS)
    with pytest.raises(ConfigError, match=r"ALTER TABLE .*events.? ADD COLUMN .n. "):
        table.prepare("topology")


def test_names_are_the_users_and_never_folded(database: Database) -> None:
    fields = Fields.of({"Order": pa.int64(), "select": pa.string(), 'a "b" %s': pa.int64(), "ä ö": pa.string()})
    table = bound(database.table("My Table"), fields)
    append(table, 1, {"Order": 1, "select": "x", 'a "b" %s': 2, "ä ö": None})
    append(table, 1, {"Order": 1, "select": "y", 'a "b" %s': 2, "ä ö": "z"}, attempt=2)
    assert database.rows("My Table", '"Order", "select", "a ""b"" %s", "ä ö"') == [(1, "y", 2, "z")]


@pytest.mark.parametrize("name", ["", "a\0b", "_txid", "_ratchet_txid"])
def test_a_name_that_cannot_be_a_column_is_refused(database: Database, name: str) -> None:
    with pytest.raises(TopologyError):
        database.table().bind(Fields.of({name: pa.int64(), "b": pa.int64()}))


def test_nested_values_are_json(database: Database) -> None:
    kinds = {
        "tags": pa.list_(pa.string()),
        "place": pa.struct([("x", pa.float64()), ("at", pa.timestamp("us", "UTC"))]),
        "counts": pa.map_(pa.string(), pa.int64()),
    }
    table = bound(database.table(), Fields.of(kinds))
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    append(table, 1, {"tags": ["a", None, 'ü"'], "place": {"x": 1.5, "at": moment}, "counts": [("k", 1)]}, {})
    casts = ", ".join(f"CAST({name} AS {database.text})" for name in kinds)
    found = database.run(f"SELECT {casts} FROM events")
    assert {tuple(None if each is None else each.replace(" ", "") for each in row) for row in found} == {
        ('["a",null,"ü\\""]', '{"x":1.5,"at":"2026-01-02T00:00:00.000000Z"}', '{"k":1}'),
        (None, None, None),
    }


def test_two_topologies_do_not_share_a_table(database: Database) -> None:
    bound(database.table(), FIELDS)
    other = database.table()
    other.bind(FIELDS)
    with pytest.raises(ConfigError, match="belongs to topology 'topology'"):
        other.prepare("another")


def test_a_check_changes_nothing(database: Database) -> None:
    table = database.table()
    table.bind(FIELDS)
    table.check("topology")
    bound(database.table("another"), FIELDS)
    table.check("topology")
    with pytest.raises(Exception, match="events"):
        database.rows()


@pytest.mark.each_value_once
@pytest.mark.parametrize("spout", [MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout])
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_topology_appends_every_record_once(database: Database, spout: Any, tasks: int) -> None:
    data = {part: [[f"{part}-{number}", number] for number in range(25)] for part in range(2)}
    builder = TransactionalTopologyBuilder("rows", "spout", spout(data, FIELDS, 4), 2)
    builder.set_bolt("rows", AppendCommitter(database.table()), tasks).shuffle_grouping("spout")
    run = submit(builder.build(), store=MemoryStore(), executor="local")
    run.wait_until_caught_up(timeout_s=PATIENCE_S)
    run.stop(timeout_s=PATIENCE_S)
    assert run.status().attempts_failed == 0
    assert database.rows(columns="word, n") == sorted((tuple(row) for rows in data.values() for row in rows), key=repr)


def test_several_tasks_need_a_stamp(database: Database) -> None:
    builder = TransactionalTopologyBuilder("rows", "spout", MemoryTransactionalSpout({0: []}, FIELDS, 4))
    builder.set_bolt("rows", AppendCommitter(database.table(stamp=None)), 2).shuffle_grouping("spout")
    with pytest.raises(TopologyError, match="parallelism 1"):
        builder.build()
