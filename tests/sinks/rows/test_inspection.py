"""The tools see what tables of databases hold, and how it came to be."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, MovedOnError, RatchetError
from framework.inspect.explain import explain
from framework.inspect.find_poison import find_poison
from framework.inspect.replay import ReplayReport, plan_to_replay, replay
from framework.inspect.state_snapshots import StateSnapshot, read
from framework.inspect.verify import VerifyReport, verify
from framework.transactions import MemoryStore
from framework.transactions.undo import undo
from sinks import AppendCommitter, UpsertCommitter
from sinks.rows.transactional_table import RowTable
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.row_tables import Database, PostgresDatabase, SqliteDatabase
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C41")
FIELDS = Fields.of(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "price": pa.decimal128(10, 2),
        "at": pa.timestamp("us", "UTC"),
        "tags": pa.list_(pa.string()),
        "lsn": pa.int64(),
        "tombstone": pa.bool_(),
    }
)
COLUMNS = ["id", "name", "price", "at", "tags", "lsn"]
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)


def change(key: int, name: str | None, lsn: int = 0, *, dead: bool = False) -> list[Any]:
    return [key, name, Decimal("1.50"), AT, [name, "x"], lsn, dead]


class Landed:
    """A topology that appends its input to the table ``log``, and upserts it into ``people``."""

    def __init__(self, database: Database, records: Sequence[Any], batch: int = 2, **options: Any) -> None:
        self.database, self.store = database, MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout({0: list(records)}, FIELDS, batch)
        builder = TransactionalTopologyBuilder("landed", "spout", self.spout)
        builder.set_bolt("log", AppendCommitter(database.table("log"), COLUMNS)).shuffle_grouping("spout")
        rows = UpsertCommitter(database.table("people"), ["id"], columns=COLUMNS, **options)
        builder.set_bolt("people", rows).shuffle_grouping("spout")
        self.topology: Topology = builder.build()

    def run(self) -> Landed:
        with submit(self.topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        return self

    def verify(self) -> VerifyReport:
        return verify(self.topology, self.store)


RECORDS = [
    *(change(1, "a"), change(2, "b"), change(1, "c"), change(3, "d")),
    *(change(2, None, dead=True), change(4, "e"), change(4, "f"), change(3, "d")),
    *(change(4, None, dead=True), change(5, "ü 'x' \\ %s")),
]


def test_verify_of_right_tables_finds_no_difference(database: Database) -> None:
    report = Landed(database, RECORDS).run().verify()
    assert report.right and report.not_verified == [], report.lines()
    assert [each.compared for each in report.states] == [len(RECORDS), 3]
    assert report.recorded_batches


def test_verify_names_every_row_that_differs(database: Database) -> None:
    landed = Landed(database, RECORDS).run()
    database.run("UPDATE people SET name = 'wrong' WHERE id = 1")
    database.run("DELETE FROM people WHERE id = 3")
    database.run("INSERT INTO people (id, name, _txid) VALUES (9, 'extra', 2)")
    database.run("DELETE FROM log WHERE id = 5")
    database.run("UPDATE log SET name = 'other' WHERE name = 'e'")
    log, rows = landed.verify().states
    assert {each.key for each in rows.differences} == {1, 3, 9}
    named = {each.key: each for each in rows.differences}
    assert named[1].found[0] == "wrong" and named[1].expected[0] == "c"
    assert named[3].found is None and named[9].expected is None
    assert sorted((each.key[1], each.found, each.expected) for each in log.differences) == [
        ("e", 0, 1),
        ("other", 1, 0),
        ("ü 'x' \\ %s", 0, 1),
    ]
    assert log.compared == len(RECORDS) + 1, "a row with another value is two rows: one found, one expected"


def test_verify_obeys_the_sequence(database: Database) -> None:
    records = [
        *(change(1, "new", 5), change(1, "old", 3), change(2, "x", 7), change(2, None, 8, dead=True)),
        *(change(2, "late", 7), change(1, "same", 5), change(3, None, 4, dead=True), change(3, "late", 3)),
        *(change(3, "again", 4), change(2, "newer", 8)),
        *(change(4, "newest", 9), change(5, "x"), change(4, "stale", 2)),
    ]
    landed = Landed(database, records, sequence_by="lsn").run()
    assert landed.verify().right
    assert database.rows("people", "id, name") == [(1, "same"), (2, "newer"), (3, "again"), (4, "newest"), (5, "x")]


def test_rows_from_before_are_not_compared(database: Database) -> None:
    Landed(database, []).run()
    database.run("INSERT INTO people (id, name) VALUES (77, 'mine')")
    database.run("INSERT INTO log (id, name) VALUES (77, 'mine')")
    landed = Landed(database, RECORDS)
    report = landed.run().verify()
    assert report.right and [each.compared for each in report.states] == [len(RECORDS), 3]


def test_what_a_trigger_changes_is_not_verified_and_the_others_are(database: Database) -> None:
    Landed(database, []).run()
    add_trigger(database)
    report = Landed(database, RECORDS).run().verify()
    (log,) = report.states
    assert log.compared == len(RECORDS) and report.right
    (line,) = report.not_verified
    assert " of 3 differ" in line and "trigger shout" in line


def add_trigger(database: Database) -> None:
    """A trigger that changes the name in each row that is inserted."""
    if isinstance(database, SqliteDatabase):
        database.run(
            "CREATE TRIGGER shout AFTER INSERT ON people BEGIN UPDATE people SET name = upper(name) || '!' WHERE id = new.id; END"
        )
        return
    if isinstance(database, PostgresDatabase):
        database.run(
            "CREATE FUNCTION shouted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.name := upper(NEW.name) || '!'; "
            "RETURN NEW; END $$"
        )
        database.run("CREATE TRIGGER shout BEFORE INSERT OR UPDATE ON people FOR EACH ROW EXECUTE FUNCTION shouted()")
        return
    for event in ("INSERT", "UPDATE"):
        name = "shout" if event == "INSERT" else "shout_again"
        database.run(
            f"CREATE TRIGGER {name} BEFORE {event} ON people FOR EACH ROW SET NEW.name = CONCAT(UPPER(NEW.name), '!')"
        )


def test_explain_says_which_records_made_a_row_and_which_deleted_it(database: Database) -> None:
    landed = Landed(database, RECORDS).run()
    told = explain(landed.topology, landed.store, state="people", key="4")
    assert told.agrees and told.held is None and told.is_independent
    assert [
        (step.txid, step.before and step.before["name"], step.after and step.after["name"]) for step in told.steps
    ] == [
        (3, None, "e"),
        (4, "e", "f"),
        (5, "f", None),
    ]
    assert [[(each.meta, each.rows[0]["name"]) for each in step.causes] for step in told.steps]
    assert [[each.rows[0]["tombstone"] for each in step.causes] for step in told.steps] == [[False], [False], [True]]
    kept = explain(landed.topology, landed.store, state="people", key="1")
    assert kept.agrees and kept.held is not None and kept.held["name"] == "c"
    assert [[each.rows[0]["name"] for each in step.causes] for step in kept.steps] == [["a"], ["c"]]


def test_explain_leaves_out_what_the_sequence_leaves_out(database: Database) -> None:
    records = [change(1, "new", 5), change(1, "old", 3), change(1, None, 4, dead=True), change(1, "newer", 6)]
    landed = Landed(database, records, batch=1, sequence_by="lsn").run()
    told = explain(landed.topology, landed.store, state="people", key="1")
    assert [step.txid for step in told.steps] == [1, 4] and told.agrees


def test_a_table_without_keys_has_no_row_to_explain(database: Database) -> None:
    landed = Landed(database, RECORDS).run()
    with pytest.raises(ConfigError, match="has no keys"):
        explain(landed.topology, landed.store, state="log", key="1")


def test_read_gives_the_newest_transaction_and_the_one_before(database: Database) -> None:
    landed = Landed(database, RECORDS).run()
    with read(landed.topology, store=landed.store) as newest:
        assert newest.txid == 5 and newest.left_out == {}
        assert ids(newest["people"]) == [1, 3, 5] and newest["log"].row_count == len(RECORDS)
        (row,) = (each for each in newest["people"].arrow().to_pylist() if each["id"] == 5)
        assert (row["name"], row["price"], row["at"]) == ("ü 'x' \\ %s", Decimal("1.50"), AT)
        assert json.loads(row["tags"]) == ["ü 'x' \\ %s", "x"]
    with read(landed.topology, store=landed.store, as_of=4) as before:
        assert ids(before["people"]) == [1, 3, 4] and before["log"].row_count == 8
    with read(landed.topology, states=["people"], keys=["4", "1"], as_of=4) as some:
        assert [each["name"] for each in some["people"].arrow().to_pylist()] == ["f", "c"]
    with pytest.raises(MovedOnError, match="does not tell any more"):
        read(landed.topology, states=["people"], as_of=2)
    with read(landed.topology, states=["log"], as_of=1) as first:
        assert ids(first["log"]) == [1, 2]


def ids(state: StateSnapshot) -> list[int]:
    return sorted(state.arrow()["id"].to_pylist())


def test_read_of_a_table_before_its_first_transaction_says_so(database: Database) -> None:
    with pytest.raises(ConfigError, match="no file|nothing yet"):
        read(Landed(database, RECORDS).topology)


@pytest.mark.each_value_once
@pytest.mark.parametrize("sequence", [None, "lsn"])
def test_replay_commits_a_transaction_again_and_compares(database: Database, sequence: str | None) -> None:
    landed = Landed(database, RECORDS, sequence_by=sequence).run()
    log, people = replayed(landed, 5).states
    assert [(each.after, each.agrees) for each in log.changes] == [(1, True), (1, True)]
    told = {each.key: each for each in people.changes}
    assert told[4].before is not None and told[4].before[0] == "f" and told[4].after is None and told[4].agrees
    assert told[5].before is None and told[5].after is not None and told[5].agrees
    database.run("UPDATE people SET name = 'wrong' WHERE id = 5")
    database.run("DELETE FROM log WHERE id = 5")
    report = replayed(landed, 5)
    assert report.agrees is False
    assert [[each.agrees for each in state.differing()] for state in report.states] == [[False], [False]]
    (known, _) = replayed(landed, 2).states
    assert known.unknown() == 0
    assert replayed(landed, 3).states[1].unknown() == 2


def replayed(landed: Landed, txid: int) -> ReplayReport:
    return replay(landed.topology, landed.store, planned=plan_to_replay(landed.store, landed.topology, txid))


def test_replay_of_a_stale_change_starts_from_the_deletion(database: Database) -> None:
    records = [change(1, "a", 5), change(1, None, 6, dead=True), change(1, "stale", 4)]
    landed = Landed(database, records, batch=1, sequence_by="lsn").run()
    _, people = replayed(landed, 3).states
    assert people.changes == []


def test_undo_takes_the_last_rows_and_changes_back(database: Database) -> None:
    landed = Landed(database, RECORDS, sequence_by="lsn").run()
    after = database.rows("people", "id, name"), database.rows("log", "id, name")
    for txid in (5, 5):
        assert undo(landed.topology, landed.store) == txid
        assert database.rows("people", "id, name") == [(1, "c"), (3, "d"), (4, "f")]
        assert len(database.rows("log")) == 8 and landed.verify().right
        landed.run()
        assert (database.rows("people", "id, name"), database.rows("log", "id, name")) == after
    assert landed.verify().right


def test_find_poison_names_the_record_that_a_table_cannot_take(database: Database) -> None:
    records = [*RECORDS, change(6, "g"), [None, "no key", *change(0, "")[2:]]]
    landed = Landed(database, records, batch=4)
    with pytest.raises(RatchetError, match="key field 'id' is null"):
        landed.run()
    found = find_poison(landed.topology, landed.store)
    assert found is not None and [row["name"] for row in found.rows] == ["no key"]
    assert "key field 'id' is null" in str(found.failure)
    assert len(database.rows("log")) == 8  # of the two transactions before


def test_rows_as_of_the_previous_transaction_are_found_by_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise SQLite reads all rows from before for each row of the table."""
    landed = Landed(SqliteDatabase(tmp_path / "rows.db"), RECORDS).run()
    plans: list[str] = []
    streamed = RowTable.streamed

    def explained(table: RowTable, connection: Any, query: str) -> Any:
        plans.extend(str(row[-1]) for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
        return streamed(table, connection, query)

    monkeypatch.setattr(RowTable, "streamed", explained)
    with read(landed.topology, states=["people"], as_of=4) as before:
        assert before["people"].row_count == 3
    beside = [each for each in plans if "people_before" in each]
    assert any(each.startswith("SEARCH people_before") for each in beside), plans
