"""What is particular to tables of MariaDB: statements that commit by themselves, other unique keys,
collations of keys, columns that fill themselves, and a server that is killed.
"""

from __future__ import annotations

import decimal
import uuid
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError, RetryableError
from framework.topology import Input
from framework.topology.groupings import ShuffleGrouping
from framework.transactions import MemoryStore
from integration import MariaDbServer
from sinks import UpsertCommitter
from sinks.rows.mysql import MySqlTable
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.file_tables import granted, opened
from tests.kit.row_tables import MySqlDatabase, append, bound
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.sinks.rows.test_upsert import Writer, change

pytestmark = [pytest.mark.rule("C41"), pytest.mark.integration]


@pytest.fixture
def database(mariadb: MariaDbServer) -> MySqlDatabase:
    return MySqlDatabase(mariadb.dsn, f"s_{uuid.uuid4().hex[:12]}")


def test_a_row_with_the_unique_value_of_another_row_is_refused_and_changes_neither(database: MySqlDatabase) -> None:
    database.run("CREATE TABLE events (id bigint PRIMARY KEY, name varchar(20) UNIQUE, n bigint, lsn bigint)")
    writer = Writer(database)
    writer.commit(1, [change(1, "a", 1), change(2, "b", 2)])
    with pytest.raises(BadRecordError, match="'a'"):
        writer.begin(2, [change(3, "a", 3)])
    assert database.rows() == [(1, "a", 1, 1), (2, "b", 2, 1)]


def test_the_longest_key_of_an_index_is_the_key_of_rows_from_before(database: MySqlDatabase) -> None:
    kind = "varchar(768) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
    database.run(f"CREATE TABLE events (id {kind} NOT NULL PRIMARY KEY, n bigint)")
    writer = UpsertCommitter(database.table(stamp=None), ["id"])
    writer.bind("rows", [Input("spout", "default", Fields(id=str, n=int), ShuffleGrouping())], 1)
    writer.table.prepare("topology")
    for txid in (1, 2):
        header = opened(writer.table, txid, 1)
        writer.prepare({}, None, None, granted(header))  # type: ignore[arg-type]
        writer.execute_arrow(pa.record_batch({"id": ["ä" * 768], "n": [txid]}, schema=writer.table.schema))
        writer.finish_batch()
        if txid == 1:
            writer.table.raise_header(header, header.finished(1))
    assert writer.table.roll_back(header) >= 1
    assert database.rows() == [("ä" * 768, 1)]


def test_a_key_whose_collation_takes_texts_for_one_is_refused_with_the_statement_that_changes_it(
    database: MySqlDatabase,
) -> None:
    fields = Fields(id=str, n=int)

    def committer() -> UpsertCommitter:
        made = UpsertCommitter(database.table(stamp=None), ["id"])
        made.bind("rows", [Input("spout", "default", fields, ShuffleGrouping())], 1)
        return made

    database.run("CREATE TABLE events (id varchar(40) NOT NULL PRIMARY KEY, n bigint)")
    with pytest.raises(ConfigError, match="upper and lower case") as refused:
        committer().table.prepare("topology")
    database.run("ALTER TABLE events MODIFY id varchar(40) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL")
    with pytest.raises(ConfigError, match="trailing blanks"):
        committer().table.prepare("topology")
    database.run(str(refused.value).partition("for one (upper and lower case): ")[2])
    writer = committer()
    writer.table.prepare("topology")
    header = opened(writer.table, 1, 1)
    writer.prepare({}, None, None, granted(header))  # type: ignore[arg-type]
    keys = ["a", "A", "a ", "ä", "😀"]
    writer.execute_arrow(pa.record_batch({"id": keys, "n": range(5)}, schema=fields.schema()))
    writer.finish_batch()
    assert database.rows() == sorted(zip(keys, range(5), strict=True), key=repr)


def test_a_table_without_transactions_is_refused(database: MySqlDatabase) -> None:
    database.run("CREATE TABLE events (word text, n bigint) ENGINE=MyISAM")
    table = database.table()
    table.bind(Fields(word=str, n=int))
    with pytest.raises(ConfigError, match="ENGINE = InnoDB"):
        table.prepare("topology")


@pytest.mark.parametrize("crash", ["after the column", "after both"])
def test_a_crash_between_a_new_column_and_the_transaction_that_needs_it_is_repaired(
    database: MySqlDatabase, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    database.run("CREATE TABLE events (id bigint PRIMARY KEY, name varchar(10))")
    writer = Writer(database, on_new_column="add")
    assert isinstance(writer.table, MySqlTable)
    with monkeypatch.context() as patched:
        if crash == "after the column":
            patched.setattr(MySqlTable, "_create_before", lambda *_: (_ for _ in ()).throw(RetryableError("died")))
            with pytest.raises(RetryableError):
                writer.begin(1, [change(1, "a", 7)])
        else:
            writer.table._add_columns()
    assert database.rows() == []
    writer.commit(1, [change(1, "a", 7)], attempt=2)
    writer.begin(2, [change(1, "b", 8)])
    opened(writer.table, 2, 2)
    assert database.rows(columns="id, name, n, lsn") == [(1, "a", 7, 1)]


def test_a_column_that_is_dropped_meanwhile_does_not_commit_the_transaction(database: MySqlDatabase) -> None:
    writer = Writer(database, on_new_column="add")
    writer.commit(1, [change(1, "a", 1)])
    table = writer.table
    assert isinstance(table, MySqlTable)
    database.run("ALTER TABLE events DROP COLUMN n")
    with pytest.raises(RetryableError, match="columns have changed"), table._writing() as connection:
        table._run(connection, "DELETE FROM events")
        table._fit(connection)
    assert database.rows(columns="id, name") == [(1, "a")]


def test_columns_that_fill_themselves_are_put_back_as_they_were(database: MySqlDatabase) -> None:
    database.run(
        "CREATE TABLE events (id bigint PRIMARY KEY, name varchar(20), n bigint, lsn bigint, "
        "at timestamp NULL, changed timestamp NOT NULL DEFAULT current_timestamp ON UPDATE current_timestamp, "
        "kind enum('x', 'it''s %') DEFAULT 'x', place point, number bigint NOT NULL AUTO_INCREMENT UNIQUE)"
    )
    database.run(
        "INSERT INTO events (id, name, at, changed, kind, place) VALUES (1, 'a', NULL, '2020-01-02', 'it''s %', point(1, 2)), "
        "(2, 'b', '2020-01-03', '2020-01-04', NULL, NULL)"
    )
    before = database.rows()
    writer = Writer(database)
    writer.begin(1, [change(1, "x"), change(2, dead=True), change(3, "y")])
    assert database.rows() != before and len(database.rows()) == 2
    opened(writer.table, 1, 2)
    assert database.rows() == before


def test_a_row_that_a_trigger_or_the_strict_mode_refuses_is_a_bad_record(database: MySqlDatabase) -> None:
    database.run("CREATE TABLE events (word varchar(5), n tinyint)")
    database.run(
        "CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW BEGIN IF NEW.word = 'bad' THEN "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF; END"
    )
    table = bound(database.table(), Fields(word=str, n=int))
    for attempt, (word, n, named) in enumerate(
        [("bad", 1, "not this one.*a trigger refuses"), ("too long", 1, "'word'"), ("a", 200, "'n'")], 1
    ):
        with pytest.raises(BadRecordError, match=named):
            append(table, 1, {"word": "good", "n": 1}, {"word": word, "n": n}, attempt=attempt)
    append(table, 1, {"word": "good", "n": 1}, attempt=9)
    assert database.rows(columns="word, n") == [("good", 1)]


def test_values_that_a_literal_could_change_are_stored_exactly(database: MySqlDatabase) -> None:
    kinds = {"text": pa.string(), "d": pa.decimal128(38, 20), "x": pa.float64(), "raw": pa.binary()}
    rows: list[dict[str, Any]] = [
        {"text": "%s \\' \0\n", "d": decimal.Decimal("0.00000001234567890123"), "x": 5e-324, "raw": b"\0\xff'\\"},
        {"text": "😀 ", "d": decimal.Decimal("-999999999999999999.00000000000000000001"), "x": 1e308, "raw": b""},
    ]
    table = bound(database.table(stamp=None), Fields.of(kinds))
    append(table, 1, *rows)
    assert database.rows() == sorted((tuple(each.values()) for each in rows), key=repr)
    with pytest.raises(BadRecordError, match="'x' is NaN or infinite"):
        table.check_rows(pa.RecordBatch.from_pylist([{"x": float("inf")}], schema=table.schema))


def test_a_topology_leaves_out_the_record_that_the_table_refuses(database: MySqlDatabase) -> None:
    database.run("CREATE TABLE events (id bigint PRIMARY KEY, name varchar(20) CHECK (name <> 'bad'))")
    rows = [[number, "bad" if number == 13 else "good"] for number in range(40)]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, Fields(id=int, name=str), 20, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("rows", "spout", spout)
    builder.set_bolt("rows", UpsertCommitter(database.table(), ["id"])).global_grouping("spout")
    with submit(builder.build(), store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert {key for key, _ in database.rows(columns="id, name")} == set(range(40)) - {13}


@pytest.mark.slow
@pytest.mark.fault(21)
def test_a_server_that_is_killed_while_a_topology_changes_rows_ends_exact(own_mariadb: MariaDbServer) -> None:
    database = MySqlDatabase(own_mariadb.dsn, "killed")
    data = [[number % 11, f"{number}", number % 5 == 4] for number in range(300)]
    spout = OpaqueMemoryTransactionalSpout({0: data}, Fields(id=int, name=str, tombstone=bool), 5)
    builder = TransactionalTopologyBuilder("rows", "spout", spout)
    builder.set_bolt("rows", UpsertCommitter(database.table(), ["id"]), 2).fields_grouping("spout", Fields("id"))
    with submit(builder.build(), {"topology.max.attempts": 1_000}, MemoryStore(), "local") as run:
        for _ in range(5):
            run.wait_for_commit(run.status().committed_txid + 3, PATIENCE_S)
            failed = run.status().attempts_failed
            own_mariadb.kill()
            wait_for(lambda failed=failed: run.status().attempts_failed > failed)  # type: ignore[misc]
            own_mariadb.start()
        run.wait_until_caught_up(PATIENCE_S)
    newest = {key: (key, name, dead) for key, name, dead in data}
    assert database.rows(columns="id, name") == sorted(
        ((key, name) for key, name, dead in newest.values() if not dead), key=repr
    )
