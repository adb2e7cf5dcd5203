"""The tools see what the tables of a mirror hold, and how it came to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from framework import Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, MovedOnError
from framework.inspect.explain import explain
from framework.inspect.rebuild import rebuild
from framework.inspect.replay import plan_to_replay, replay
from framework.inspect.state_snapshots import read
from framework.inspect.verify import VerifyReport, verify
from framework.transactions import MemoryStore
from framework.transactions.undo import undo
from sinks import Mirror
from sinks.rows.inspectable_mirror import type_of
from spouts import DebeziumChanges, OpaqueMemoryTransactionalSpout
from tests.kit.change_records import INT, TEXT, UNAVAILABLE, Record, change_record
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.kit.waiting import PATIENCE_S
from tests.sinks.rows.test_mirror import COLUMNS, FIELDS, delete, put, truncate

pytestmark = pytest.mark.rule("C41")
PRICE = {
    "type": "bytes",
    "name": "org.apache.kafka.connect.data.Decimal",
    "parameters": {"scale": "2", "connect.decimal.precision": "12"},
}
TYPED = {
    "id": INT,
    "price": PRICE,
    "day": {"type": "int32", "name": "io.debezium.time.Date"},
    "zoned": {"type": "string", "name": "io.debezium.time.ZonedTimestamp"},
    "tags": {"type": "array", "items": TEXT},
    "part": {"type": "double"},
}
ADDED = {**COLUMNS, "n": {**INT, "default": 7}}
RECORDS = [
    *(put("people", 1, "ann"), put("things", 1, "pen"), put("people", 2, "bo"), put("people", 3, "cy", note="long")),
    *(delete("people", 1), put("people", 3, "cyd", note=UNAVAILABLE), put("things", 2, "ink"), truncate("things")),
    change_record("things", ADDED, "c", {"id": 3, "name": "cap", "n": 5}),
    put("people", 2, "bob"),
    change_record(
        "typed",
        TYPED,
        "c",
        {"id": 1, "price": "SZYC0g==", "day": 9, "zoned": "2024-01-02T03:04:05.5Z", "tags": ["ü", None], "part": 0.5},
    ),
    put("people", 4, "dee"),
]


class Mirrored:
    """A topology that mirrors its records, two in a transaction."""

    def __init__(self, database: Database, records: Sequence[Record] = RECORDS) -> None:
        self.database, self.store = database, MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout({0: [list(each) for each in records]}, FIELDS, 2)
        builder = TransactionalTopologyBuilder("mirrored", "spout", self.spout)
        builder.set_bolt("mirror", Mirror(database.table, DebeziumChanges())).global_grouping("spout")
        self.topology: Topology = builder.build()

    def run(self) -> Mirrored:
        with submit(self.topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        return self

    def verify(self) -> VerifyReport:
        return verify(self.topology, self.store)


def test_verify_of_a_right_mirror_finds_no_difference(database: Database) -> None:
    report = Mirrored(database).run().verify()
    assert report.right and report.not_verified == [], report.lines()
    assert [each.compared for each in report.states] == [5]


def test_the_tools_leave_out_repeated_changes_as_the_mirror_does(database: Database) -> None:
    updated = put("people", 1, "anna", lsn=2, note=UNAVAILABLE)
    gone, emptied = delete("people", 1, lsn=3), truncate("things", lsn=6)
    used = put("things", 1, "ink", lsn=5, note=UNAVAILABLE)
    made = [put("people", 1, "ann", lsn=1, note="long"), updated, gone, put("people", 2, "bo", lsn=4, note="n")]
    things = [put("things", 1, "pen", lsn=4, note="long"), used, emptied, put("people", 2, "bob", lsn=7)]
    records = [*made, *things, updated, put("people", 3, "cy", lsn=8), used, gone]
    mirrored = Mirrored(database, records).run()
    assert database.rows("people", "id, name") == [(2, "bob"), (3, "cy")] and database.rows("things") == []
    report = mirrored.verify()
    assert report.right and report.not_verified == [], report.lines()
    for txid in (5, 6):
        planned = plan_to_replay(mirrored.store, mirrored.topology, txid)
        (state,) = replay(mirrored.topology, mirrored.store, planned=planned).states
        assert not state.differing()
    told = explain(mirrored.topology, mirrored.store, state="mirror", key='["people", 1]')
    assert told.agrees and told.held is None and [step.txid for step in told.steps] == [1, 2]


def test_rows_that_are_older_than_a_column_have_its_default(database: Database) -> None:
    records = [put("things", 1, "pen"), put("people", 1), change_record("things", ADDED, "c", {"id": 3, "n": None})]
    mirrored = Mirrored(database, [*records, put("things", 4, "ink")]).run()
    assert database.rows("things", "id, n") == [(1, 7), (3, None), (4, 7)]
    assert mirrored.verify().right


def test_verify_names_every_row_that_differs_by_its_table(database: Database) -> None:
    mirrored = Mirrored(database).run()
    database.run("UPDATE people SET name = 'wrong' WHERE id = 2")
    database.run("DELETE FROM things")
    database.run("INSERT INTO people (id, name, _txid) VALUES (9, 'extra', 2)")
    database.run("UPDATE typed SET price = 1.5")
    (report,) = mirrored.verify().states
    found = {each.key: each for each in report.differences}
    assert set(found) == {("people", 2), ("people", 9), ("things", 3), ("typed", 1)}
    assert found["people", 2].found["name"] == "wrong" and found["people", 2].expected["name"] == "bob"
    assert found["things", 3].found is None and found["people", 9].expected is None
    assert found["typed", 1].expected["price"] == Decimal("12345678.90")


def test_explain_says_which_records_made_a_row(database: Database) -> None:
    mirrored = Mirrored(database).run()
    told = explain(mirrored.topology, mirrored.store, state="mirror", key='["people", 2]')
    assert told.agrees and told.held is not None and told.held["name"] == "bob" and told.is_independent
    assert [(step.txid, step.after and step.after["name"]) for step in told.steps] == [(2, "bo"), (5, "bob")]
    assert [len(step.causes) for step in told.steps] == [1, 1]
    gone = explain(mirrored.topology, mirrored.store, state="mirror", key='["people", 1]')
    assert gone.agrees and gone.held is None and [step.txid for step in gone.steps] == [1, 3]
    emptied = explain(mirrored.topology, mirrored.store, state="mirror", key='["things", 1]')
    assert emptied.agrees and [step.txid for step in emptied.steps] == [1, 4]


@pytest.mark.each_value_once
@pytest.mark.parametrize(("key", "message"), [("people", "JSON array"), ('["nowhere", 1]', "no table 'nowhere'")])
def test_a_key_of_no_table_is_named(database: Database, key: str, message: str) -> None:
    mirrored = Mirrored(database).run()
    with pytest.raises(ConfigError, match=message):
        explain(mirrored.topology, mirrored.store, state="mirror", key=key)


def test_read_gives_all_tables_as_of_one_transaction(database: Database) -> None:
    mirrored = Mirrored(database).run()
    with read(mirrored.topology, store=mirrored.store) as newest:
        rows = newest["mirror"].arrow().to_pylist()
    assert newest.txid == 6
    found = {(each["table"], json.loads(each["row"])["id"]): json.loads(each["row"]) for each in rows}
    assert set(found) == {("people", 2), ("people", 3), ("people", 4), ("things", 3), ("typed", 1)}
    typed = found["typed", 1]
    assert (typed["price"], typed["tags"], typed["part"]) == ("12345678.90", ["ü", None], 0.5)
    with read(mirrored.topology, states=["mirror"], as_of=5) as before:
        assert before["mirror"].row_count == 3
    with read(mirrored.topology, states=["mirror"], keys=['["people", 3]', '["people", 1]']) as some:
        (row,) = some["mirror"].arrow()["row"].to_pylist()
    assert json.loads(row)["name"] == "cyd"
    with pytest.raises(MovedOnError):
        read(mirrored.topology, states=["mirror"], as_of=2)


def test_replay_commits_a_transaction_again_and_compares(database: Database) -> None:
    mirrored = Mirrored(database, RECORDS[:8]).run()
    (state,) = replay(
        mirrored.topology, mirrored.store, planned=plan_to_replay(mirrored.store, mirrored.topology, 4)
    ).states
    told = {each.key: each for each in state.changes}
    assert told["things", 1].before is not None and told["things", 1].after is None and told["things", 1].agrees
    assert all(each.agrees for each in state.changes)
    database.run("INSERT INTO things (id, name, _txid) VALUES (2, 'ink', 4)")
    report = replay(mirrored.topology, mirrored.store, planned=plan_to_replay(mirrored.store, mirrored.topology, 4))
    assert report.agrees is False and [each.key for each in report.states[0].differing()] == [("things", 2)]
    earlier = replay(mirrored.topology, mirrored.store, planned=plan_to_replay(mirrored.store, mirrored.topology, 3))
    assert {each.key: each.agrees for each in earlier.states[0].changes} == {("people", 1): None, ("people", 3): None}


def test_undo_takes_the_last_transaction_of_all_tables_back(database: Database) -> None:
    mirrored = Mirrored(database).run()
    assert undo(mirrored.topology, mirrored.store) == 6
    assert mirrored.verify().right and database.rows("typed") == []
    assert database.rows("people", "id, name") == [(2, "bob"), (3, "cyd")]
    mirrored.run()
    assert mirrored.verify().right and len(database.rows("typed")) == 1


def test_what_a_trigger_changes_is_no_difference(database: Database) -> None:
    mirrored = Mirrored(database, [put("people", 1, "ann")]).run()
    if isinstance(database, SqliteDatabase):
        database.run("CREATE TRIGGER shout AFTER UPDATE ON people BEGIN SELECT 1; END")
    elif isinstance(database, PostgresDatabase):
        database.run("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")
        database.run("CREATE TRIGGER shout BEFORE UPDATE ON people FOR EACH ROW EXECUTE FUNCTION nothing()")
    else:
        assert isinstance(database, MySqlDatabase)
        database.run("CREATE TRIGGER shout BEFORE UPDATE ON people FOR EACH ROW SET NEW.name = NEW.name")
    database.run("UPDATE people SET name = 'other'")
    report = mirrored.verify()
    (line,) = report.not_verified
    assert report.states == [] and "trigger shout of table 'people'" in line


def test_a_mirror_cannot_be_rebuilt_and_says_so(tmp_path: Any) -> None:
    mirrored = Mirrored(SqliteDatabase(tmp_path / "copy.db")).run()
    with pytest.raises(ConfigError, match="ratchet_mirror.* cannot be rebuilt"):
        rebuild(mirrored.topology, mirrored.store, state="mirror", take_over=False)


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.binary(), pa.date32()),
        *(pa.time64("us"), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("us")),
        *(pa.decimal128(38, 0), pa.decimal256(65, 30)),
    ],
    ids=str,
)
def test_the_types_of_the_catalog_are_read_back(kind: pa.DataType) -> None:
    assert type_of(str(kind)) == kind
    assert pa.types.is_nested(type_of(str(pa.list_(kind)))) and pa.types.is_nested(
        type_of(str(pa.struct([("a", kind)])))
    )
    with pytest.raises(ConfigError, match="does not know"):
        type_of("extension<x>")
