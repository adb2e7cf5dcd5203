"""What a table lacks: the statements are shown, and make the table fit."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from framework.errors import ConfigError
from framework.topology.table_schema_diff import TableColumn
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.sinks.rows.test_upsert import Writer, change

pytestmark = pytest.mark.rule("C42")


def test_a_table_that_is_missing_is_created_by_the_statements_that_are_shown(database: Database) -> None:
    table = Writer(database, stamp="_txid", prepared=False).table
    shown = table.table_schema()
    assert [(each.name, each.held) for each in shown.columns] == [
        ("id", None), ("name", None), ("n", None), ("lsn", None), ("_txid", None)
    ]  # fmt: skip
    (statement,) = shown.statements
    assert statement.startswith("CREATE TABLE ") and "PRIMARY KEY" in statement
    for each in shown.statements:
        database.run(each)
    assert table.table_schema().statements == ()
    writer = Writer(database, stamp="_txid")
    writer.commit(1, [change(1, "a", 1)])
    assert database.rows(columns="id, name") == [(1, "a")]


def test_columns_the_stamp_and_the_key_are_added_and_others_are_left_alone(database: Database) -> None:
    long = "varchar(20)" if isinstance(database, MySqlDatabase) else "text"
    database.run(f"CREATE TABLE events (id bigint NOT NULL, name {long}, note {long})")
    database.run("INSERT INTO events (id, name, note) VALUES (7, 'seven', 'mine')")
    table = Writer(database, stamp="_txid", prepared=False).table
    before = table.table_schema()
    columns = {each.name: each for each in before.columns}
    assert columns["note"].declared is None and columns["note"].held is not None
    assert columns["n"] == TableColumn("n", columns["n"].declared, None)
    added, unique = before.statements[:-1], before.statements[-1]
    assert re.findall(r"ADD COLUMN ['\"`](\w+)", " ".join(added)) == ["n", "lsn", "_txid"]
    assert "PRIMARY KEY" in unique or "UNIQUE INDEX" in unique
    assert table.apply_schema("topology") == before
    assert table.table_schema().statements == () == table.apply_schema("topology").statements
    assert database.rows(columns="id, name, note, n") == [(7, "seven", "mine", None)]
    writer = Writer(database, stamp="_txid")
    writer.commit(1, [change(7, "new", 1), change(8)])
    assert database.rows(columns="id, name, note, n") == [(7, "new", "mine", 1), (8, None, None, None)]


def test_the_statements_that_a_start_advises_make_it_start(database: Database) -> None:
    long = "varchar(20)" if isinstance(database, MySqlDatabase) else "text"
    database.run(f"CREATE TABLE events (id bigint NOT NULL, name {long}, n bigint, lsn bigint)")
    with pytest.raises(ConfigError, match="has no primary key or unique index of id: ") as refused:
        Writer(database)
    database.run(str(refused.value).partition("unique index of id: ")[2])
    Writer(database).commit(1, [change(1, "a")])
    assert database.rows(columns="id, name") == [(1, "a")]


def test_a_table_with_rows_and_no_column_of_the_key_is_refused(database: Database) -> None:
    database.run("CREATE TABLE events (n bigint)")
    table = Writer(database, prepared=False).table
    for ask in (table.table_schema, lambda: table.apply_schema("topology")):
        with pytest.raises(ConfigError, match="has no column 'id' of the key"):
            ask()
    assert database.run("SELECT * FROM events") == []


def test_a_table_of_another_topology_is_refused(database: Database) -> None:
    table = Writer(database).table
    with pytest.raises(ConfigError, match="belongs to topology 'topology', not 'other'"):
        table.apply_schema("other")


def test_columns_that_are_left_out_on_purpose_are_not_added(database: Database) -> None:
    database.run("CREATE TABLE events (id bigint PRIMARY KEY, n bigint)")
    assert Writer(database, on_new_column="ignore", prepared=False).table.table_schema().statements == ()


def test_narrow_columns_are_widened_with_the_rows_from_before(database: Database) -> None:
    if not isinstance(database, PostgresDatabase):
        assert isinstance(database, (SqliteDatabase, MySqlDatabase))  # they have no type to widen, or keep theirs
        return
    database.run("CREATE TABLE events (id int PRIMARY KEY, name varchar(2), n int, lsn bigint)")
    writer = Writer(database)
    writer.commit(1, [change(1, "a", 1)])
    writer.commit(2, [change(1, "b", 1)])
    writer.table.apply_schema("topology")
    writer.commit(3, [change(1, "long", 2**40), change(2**40)])
    header = writer.begin(4, [change(1, "longer", 2**41)])
    assert writer.table.roll_back(header) == 1
    assert database.rows(columns="id, name, n") == [(1, "long", 2**40), (2**40, None, None)]


def test_names_with_signs_of_sql_are_quoted(database: Database) -> None:
    table = database.table(name='odd "100%" name')
    from framework import Fields

    table.bind(Fields.of({"a%s`b": pa.int64(), "select": pa.string()}))
    for each in table.table_schema().statements:
        database.run(each)
    assert table.table_schema().statements == ()
