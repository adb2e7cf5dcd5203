"""Rows that a database refuses because of other rows, in the commit: the next attempts try their
writes in the order of the records, and find all of them (C51, ADR 135)."""

from __future__ import annotations

from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.inspect.verify import verify
from framework.transactions.documents import read_history
from sinks import AppendCommitter, MemoryBackend, OpaqueMapState, StateCommitter, Sum, UpsertCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.refusing import attempts, ran, refused
from tests.kit.row_tables import Database, MySqlDatabase, SqliteDatabase

pytestmark = pytest.mark.rule("C51")

ROW = Fields(id=int, parent=int, word=str)


def rows_of(count: int) -> list[list[Any]]:
    return [[number, None, f"w{number}"] for number in range(count)]


def of_a_table(committer: Any, rows: list[list[Any]], tasks: int = 1, **others: Any) -> Topology:
    spout = OpaqueMemoryTransactionalSpout({0: rows}, ROW, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    builder.set_bolt("rows", committer, tasks).fields_grouping("spout", Fields("id"))
    for name, each in others.items():
        builder.set_bolt(name, each).global_grouping("spout")
    return builder.build()


def create(database: Database, name: str, *constraints: str) -> None:
    columns = ["id bigint NOT NULL", "parent bigint", "word varchar(50)", "_txid bigint", *constraints]
    database.run(f"CREATE TABLE {name} ({', '.join(columns)})")


def ids(database: Database, name: str) -> list[int]:
    return sorted(row[0] for row in database.rows(name, "id"))


@pytest.mark.parametrize("beside", [False, True])
def test_rows_with_a_value_that_is_taken_are_found_before_the_next_commit(database: Database, beside: bool) -> None:
    """The first row of a value stays. A state beside the table does not matter."""
    create(database, "appended", "UNIQUE (word)")
    rows = rows_of(200)
    for number in range(5, 200, 10):
        rows[number][2] = f"w{number % 40}"
    taken: dict[str, int] = {}
    for number, _, word in rows:
        taken.setdefault(word, number)
    sums = StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"n": Sum("id")})
    others = {"sums": sums} if beside else {}
    built = of_a_table(AppendCommitter(database.table("appended")), rows, **others)
    store = ran(built)
    assert ids(database, "appended") == sorted(taken.values())
    assert {offset for _, offset in refused(store)} == set(range(200)) - set(taken.values())
    assert max(attempts(store, built)) <= 6 and verify(built, store).right


@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_rows_without_a_parent_are_found_before_the_next_commit(database: Database, kind: str) -> None:
    """A parent may be in another table, or precede its child in the batch."""
    create(database, "nodes", "PRIMARY KEY (id)", "FOREIGN KEY (parent) REFERENCES nodes (id)")
    rows = rows_of(100)
    for number in range(10, 100):
        rows[number][1] = 1_000 + number if number % 9 == 0 else number - 1 if number % 9 == 5 else 3
    table = database.table("nodes")
    built = of_a_table(AppendCommitter(table) if kind == "append" else UpsertCommitter(table, ["id"]), rows)
    store = ran(built)
    wrong = {number for number in range(10, 100) if number % 9 == 0}
    assert set(ids(database, "nodes")) == set(range(100)) - wrong
    assert {offset for _, offset in refused(store)} == wrong
    assert max(attempts(store, built)) <= 6 and verify(built, store).right


def test_rows_that_a_trigger_refuses_are_found_before_the_next_commit(database: Database) -> None:
    create(database, "watched")
    refuse_by_trigger(database)
    rows = rows_of(100)
    wrong = set(range(7, 100, 10))
    for number in wrong:
        rows[number][2] = "bad"
    built = of_a_table(AppendCommitter(database.table("watched")), rows)
    store = ran(built)
    assert set(ids(database, "watched")) == set(range(100)) - wrong
    assert {offset for _, offset in refused(store)} == wrong
    assert max(attempts(store, built)) <= 6


@pytest.mark.parametrize("other", ["table", "task"])
def test_no_row_is_left_out_that_a_row_of_another_task_makes_right(database: Database, other: str) -> None:
    """The tries of one task do not see this row. So the batch is halved."""
    create(database, "parents", "PRIMARY KEY (id)")
    of = "parents" if other == "table" else "children"
    create(database, "children", "PRIMARY KEY (id)", f"FOREIGN KEY (parent) REFERENCES {of} (id)")
    rows = [[number, number - 1 if number % 4 == 3 else None, "x"] for number in range(32)]
    rows[20][1] = 7_777
    children = AppendCommitter(database.table("children"))
    if other == "table":
        built = of_a_table(children, rows, parents=AppendCommitter(database.table("parents")))
    else:
        built = of_a_table(children, rows, tasks=2)
    assert built.only_writer() is None
    store = ran(built)
    left_out = {offset for _, offset in refused(store)}
    assert set(ids(database, "children")) == set(range(32)) - left_out
    assert 20 in left_out and left_out <= {20, *range(3, 32, 4)}  # a child may commit before its parent
    tried = [each for each in read_history(store, built.id) if each.plan["0"].get("refused")]
    assert all(len(each.plan["0"]["refused"]) == 1 for each in tried)


def refuse_by_trigger(database: Database) -> None:
    """Let a trigger refuse the word ``bad`` in the table ``watched``."""
    if isinstance(database, SqliteDatabase):
        database.run(
            "CREATE TRIGGER refuse BEFORE INSERT ON watched WHEN NEW.word = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'no bad words'); END"
        )
    elif isinstance(database, MySqlDatabase):
        database.run(
            "CREATE TRIGGER refuse BEFORE INSERT ON watched FOR EACH ROW BEGIN IF NEW.word = 'bad' THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no bad words'; END IF; END"
        )
    else:
        database.run(
            "CREATE FUNCTION refused() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN IF NEW.word = ''bad'' THEN RAISE ''no bad words''; END IF; RETURN NEW; END'"
        )
        database.run("CREATE TRIGGER refuse BEFORE INSERT ON watched FOR EACH ROW EXECUTE FUNCTION refused()")


@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_rows_that_only_the_end_of_the_transaction_refuses_are_left_out(database: Database, kind: str) -> None:
    """SQLite cannot check deferred constraints before: then the batch is halved. MariaDB has
    none."""
    deferred = "DEFERRABLE INITIALLY DEFERRED" if not isinstance(database, MySqlDatabase) else ""
    create(database, "nodes", "PRIMARY KEY (id)", f"FOREIGN KEY (parent) REFERENCES nodes (id) {deferred}")
    rows = rows_of(40)
    for number in range(10, 40):
        rows[number][1] = 1_000 + number if number % 9 == 0 else 3
    rows[11][1] = 12
    table = database.table("nodes")
    built = of_a_table(AppendCommitter(table) if kind == "append" else UpsertCommitter(table, ["id"]), rows)
    store = ran(built)
    wrong = {number for number in range(10, 40) if number % 9 == 0}
    left_out = {offset for _, offset in refused(store)}
    assert wrong <= left_out <= wrong | {11}
    assert set(ids(database, "nodes")) == set(range(40)) - left_out
    if not isinstance(database, SqliteDatabase):
        assert max(attempts(store, built)) <= 6
    assert verify(built, store).right
