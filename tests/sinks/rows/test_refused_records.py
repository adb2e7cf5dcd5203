"""Records that only a database refuses, in the commit: the plan leaves them out (C51, ADR 128)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import structlog

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.inspect.verify import verify
from framework.transactions import MemoryStore, term_loop
from framework.transactions.documents import read_history
from sinks import AppendCommitter, Mirror, UpsertCommitter
from spouts import DebeziumChanges, OpaqueMemoryTransactionalSpout
from tests.kit.change_records import INT, TEXT, change_record
from tests.kit.refusing import refused
from tests.kit.row_tables import Database, MySqlDatabase
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C51")


@pytest.mark.parametrize("which", ["appended", "upserted"])
def test_records_that_only_a_database_refuses_are_found_before_the_next_commit(
    database: Database, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint of the user's table. The attempt after the roll-back tries its writes before the
    commit, so probes find the records."""
    text, check = "varchar(50)", "CHECK (n <> 7)"
    unique = ", PRIMARY KEY (id)" if which == "upserted" else ""
    database.run(f'CREATE TABLE "{which}" (id bigint, word {text}, n bigint, _txid bigint, {check}{unique})')
    rows = [[number, f"w{number}", 7 if number % 10 == 3 else 1] for number in range(100)]
    fields = Fields.of({"id": pa.int64(), "word": pa.string(), "n": pa.int64()})
    spout = OpaqueMemoryTransactionalSpout({0: rows[::2], 1: rows[1::2]}, fields, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    appended: dict[str, Any] = {
        "appended": lambda: AppendCommitter(database.table("appended")),
        "upserted": lambda: UpsertCommitter(database.table("upserted"), ["id"]),
    }
    builder.set_bolt("rows", appended[which](), 2).fields_grouping("spout", Fields("id"))
    topology, store = builder.build(), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    with (
        structlog.testing.capture_logs() as logs,
        submit(topology, {"topology.message.timeout.secs": 10_000}, store, "local") as run,
    ):
        run.wait_until_caught_up(PATIENCE_S)
    assert sorted(row[0] for row in database.rows(which, "id")) == [row[0] for row in rows if row[2] == 1]
    assert (len(refused(store)), run.status().left_out_rows) == (10, 0)
    # the first is refused in the commit and rolled back, the next one finds the records
    assert [len(each.attempts) for each in read_history(store, topology.id)] == [4]
    (told,) = [each for each in logs if each["event"] == "record.refused"]
    assert (told["records"], len(told["also"])) == (10, 9)
    assert verify(topology, store).right


def test_changes_that_a_database_refuses_with_values_of_an_earlier_row_are_found_before_the_next_commit(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier row may be of the same batch, so each try begins with the accepted changes."""
    check = "CHECK (n <> 7 OR word <> 'w')"
    database.run(f"CREATE TABLE kept (id bigint PRIMARY KEY, word varchar(50), n bigint, _txid bigint, {check})")
    words = [[number, "w" if number % 10 == 3 else "x", None] for number in range(40)]
    rows = [*words, *([number, None, 7] for number in range(40)), *([number, "y", None] for number in range(3, 5))]
    fields = Fields.of({"id": pa.int64(), "word": pa.string(), "n": pa.int64()})
    spout = OpaqueMemoryTransactionalSpout({0: rows}, fields, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("keeping", "spout", spout)
    kept = UpsertCommitter(database.table("kept"), ["id"], ignore_nulls=True)
    builder.set_bolt("rows", kept).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    with submit(topology, {"topology.message.timeout.secs": 10_000}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found = {number: tuple(more) for number, *more in database.rows("kept", "id, word, n")}
    bad = {number for _, number in refused(store, topology.id)}
    assert bad <= {43, 53, 63, 73} and bad >= {53, 63, 73}  # the change of word y makes up for one
    expected = {
        number: ("x" if number % 10 != 3 else "w", 7 if number + 40 not in bad else None) for number in range(40)
    }
    assert found == expected | {number: ("y", expected[number][1]) for number in (3, 4)}
    assert [len(each.attempts) for each in read_history(store, topology.id)] == [4]
    assert verify(topology, store).right


def mirrored(
    database: Database, given: dict[int, list[Any]], take: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Topology, MemoryStore]:
    """Run a mirror of these change records to their end, with any time for searches."""
    fields = Fields.of({"key": pa.binary(), "value": pa.binary()})
    spout = OpaqueMemoryTransactionalSpout(given, fields, take, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("mirrored", "spout", spout)
    builder.set_bolt("mirror", Mirror(database.table, DebeziumChanges())).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    with submit(topology, {"topology.message.timeout.secs": 10_000}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return topology, store


@pytest.mark.parametrize("by", ["mirror", "database"])
def test_changes_that_a_mirror_refuses_in_the_commit_are_found_before_the_next_one(
    database: Database, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of a type that their column does not hold, or that a constraint of the user's
    refuses."""
    kinds, bad = {"id": INT, "name": TEXT}, {23, 33, 63, 73}

    def change(number: int) -> list[Any]:
        is_bad = number in bad
        wrong = {"id": INT, "name": INT} if is_bad and by == "mirror" else kinds
        value = "bad" if is_bad and by == "database" else 5 if is_bad else f"w{number}"
        return list(change_record("people", wrong, "c", {"id": number, "name": value}))

    if by == "database":
        database.run("CREATE TABLE people (id bigint PRIMARY KEY, name text, _txid bigint, CHECK (name <> 'bad'))")
    given = {0: [change(number) for number in range(40)], 1: [change(number) for number in range(40, 80)]}
    topology, store = mirrored(database, given, 20, monkeypatch)
    assert {row[0] for row in database.rows("people", "id")} == {*range(80)} - bad
    # the first is refused in the commit and rolled back, the next one finds the records
    assert [len(each.attempts) for each in read_history(store, topology.id)] == [1, 4]
    assert verify(topology, store).right


def test_the_first_change_of_a_table_decides_its_form_also_if_probes_create_the_table(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that creates a table commits in MariaDB, so the table stays after a probe."""
    kinds, wrong = {"id": INT, "name": TEXT}, {"id": INT, "name": INT}
    first = [list(change_record("people", kinds, "c", {"id": n, "name": f"w{n}"})) for n in range(20)]
    others = [list(change_record("others", wrong, "c", {"id": n, "name": n})) for n in range(10)]
    bad = [list(change_record("people", wrong, "c", {"id": n, "name": n})) for n in (100, 101)]
    late = [list(change_record("others", kinds, "c", {"id": 200, "name": "w"}))]
    given = {0: [*first[:10], bad[0], *first[10:], *others], 1: [bad[1], *late]}
    topology, store = mirrored(database, given, 50, monkeypatch)
    assert {row[0] for row in database.rows("people", "id")} == {*range(20)}
    assert {row[0] for row in database.rows("others", "id")} == {*range(10)}
    assert set(refused(store, topology.id)) == {("0", 10), ("1", 0), ("1", 1)}
    assert verify(topology, store).right


def test_a_row_that_needs_another_row_of_its_batch_is_not_left_out(database: Database) -> None:
    """A foreign key of the table to itself, beside a check: parts of the batch do not tell, and the
    batch is halved in order."""
    text = "varchar(50)"
    own = "parent bigint REFERENCES nodes (id)" if not isinstance(database, MySqlDatabase) else "parent bigint"
    key = ", FOREIGN KEY (parent) REFERENCES nodes (id)" if isinstance(database, MySqlDatabase) else ""
    database.run(
        f"CREATE TABLE nodes (id bigint PRIMARY KEY, {own}, word {text}, _txid bigint, CHECK (word <> 'bad'){key})"
    )
    rows = [[1, None, "root"], [2, 1, "a"], [3, 2, "b"], [4, 3, "bad"], [5, 3, "c"], [6, 77, "d"], [7, 5, "e"]]
    fields = Fields.of({"id": pa.int64(), "parent": pa.int64(), "word": pa.string()})
    spout = OpaqueMemoryTransactionalSpout({0: rows}, fields, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    builder.set_bolt("rows", AppendCommitter(database.table("nodes"))).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    with submit(topology, {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert [row[0] for row in database.rows("nodes", "id")] == [1, 2, 3, 5, 7]
    assert {offset for _, offset in refused(store)} == {3, 5}
