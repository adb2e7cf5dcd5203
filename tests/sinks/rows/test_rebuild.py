"""``ratchet rebuild`` of tables of rows: it fills a second table from the source, and its rows
replace those of the topology's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError
from framework.inspect.rebuild import RebuildReport, clean, rebuild
from framework.inspect.verify import verify
from framework.topology import ArrowBolt
from framework.transactions import MemoryStore
from framework.transactions.documents import read_transaction
from framework.transactions.undo import undo
from sinks import AppendCommitter, UpsertCommitter
from sinks.rows.rebuildable_table import RebuildableTable
from sinks.rows.table_definition import TableDefinition
from sinks.rows.transactional_table import RowTable
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C41")
FIELDS = Fields.of({"id": pa.int64(), "name": pa.string(), "lsn": pa.int64(), "tombstone": pa.bool_()})
COLUMNS = ["id", "name", "lsn"]
_GENERATED = {SqliteDatabase: "VIRTUAL", PostgresDatabase: "STORED", MySqlDatabase: "STORED"}


def change(key: int, name: str | None, lsn: int = 0, *, dead: bool = False) -> list[Any]:
    return [key, name, lsn, dead]


RECORDS = [
    *(change(1, "a"), change(2, "b"), change(1, "c"), change(3, "d")),
    *(change(2, None, dead=True), change(4, "e"), change(5, "f"), change(3, "g")),
    *(change(4, None, dead=True), change(6, "h")),
]
RIGHT = [(1, "c"), (3, "g"), (5, "f"), (6, "h")]


class Same(ArrowBolt):
    """Emits what it gets."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class Wrong(Same):
    """The bolt with the bug: "d" is lost, "f" is "F", and what deletes 4 deletes 40."""

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        batch = batch.filter(pc.not_equal(pc.fill_null(batch.column("name"), ""), "d"))
        names = pc.if_else(pc.equal(batch.column("name"), "f"), "F", batch.column("name"))
        four = pc.and_(batch.column("tombstone"), pc.equal(batch.column("id"), 4))
        keys = pc.if_else(four, 40, batch.column("id"))
        yield batch.set_column(1, "name", names).set_column(0, "id", keys)


class Landed:
    """Appends its input to ``log``, and upserts it into ``people``."""

    def __init__(self, database: Database, records: Sequence[Any] = RECORDS, *, stamp: str | None = "_txid") -> None:
        self.database, self.store = database, MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout({0: list(records)}, FIELDS, 2)
        self.stamp = stamp

    def topology(self, bolt: ArrowBolt | None = None, **options: Any) -> Topology:
        committer = options.pop("committer", UpsertCommitter)
        builder = TransactionalTopologyBuilder("landed", "spout", self.spout)
        builder.set_bolt("bolt", bolt or Same()).shuffle_grouping("spout")
        log = AppendCommitter(self.database.table("log"), COLUMNS)
        builder.set_bolt("log", log, 2).shuffle_grouping("bolt")
        rows = committer(self.database.table("people", stamp=self.stamp), ["id"], columns=COLUMNS, **options)
        builder.set_bolt("people", rows).global_grouping("bolt")
        return builder.build()

    def run(self, topology: Topology) -> Landed:
        with submit(topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        return self

    def rebuild(self, topology: Topology, state: str, *, take_over: bool = True) -> RebuildReport:
        return rebuild(topology, self.store, state=state, take_over=take_over)


def people(database: Database, name: str = "people") -> list[Any]:
    return database.rows(name, "id, name")


def log_of(records: Sequence[Any]) -> list[Any]:
    return sorted(((key, name) for key, name, *_ in records), key=repr)


def test_rows_of_a_mended_bolt_are_made_anew_and_take_over(database: Database) -> None:
    landed = Landed(database)
    landed.run(landed.topology(Wrong()))
    wrong = [(1, "c"), (3, "g"), (4, "e"), (5, "F"), (6, "h")]
    assert people(database) == wrong
    mended = landed.topology()
    found = landed.rebuild(mended, "people", take_over=False)
    assert found.difference is not None and found.former is None
    assert {each.key for each in found.difference.differences} == {4, 5}
    assert (found.txid, found.difference.compared) == (5, 5) and people(database) == wrong
    found = landed.rebuild(mended, "people")
    assert people(database) == RIGHT and people(database, "people__former") == wrong
    assert found.former is not None and "people__former" in found.former
    found = landed.rebuild(mended, "log")
    assert found.difference is not None and found.difference.difference_count == 5
    assert people(database, "log") == log_of(RECORDS)
    assert verify(mended, landed.store).right
    assert len(clean(mended, landed.store, "people")) == 1 and clean(mended, landed.store, "people") == []
    assert not [each for each in tables_of(database) if "people__" in each]


def tables_of(database: Database) -> list[str]:
    if isinstance(database, SqliteDatabase):
        return [name for (name,) in database.run("SELECT name FROM sqlite_master")]
    where = "current_schema()" if isinstance(database, PostgresDatabase) else "DATABASE()"
    query = f"SELECT table_name FROM information_schema.tables WHERE table_schema = {where}"
    return [name for (name,) in database.run(query)]


@pytest.mark.each_value_once
@pytest.mark.parametrize("sequence", [None, "lsn"])
def test_the_topology_goes_on_from_rebuilt_rows_and_takes_the_newest_back(
    database: Database, sequence: str | None
) -> None:
    records = [
        *(change(1, "a", 5), change(2, "f", 7), change(1, "c", 6), change(3, "d", 1)),
        *(change(2, None, 9, dead=True), change(1, "newest", 8)),
    ]
    landed = Landed(database, records)
    landed.run(landed.topology(Wrong(), sequence_by=sequence))
    mended = landed.topology(sequence_by=sequence)
    for state in ("people", "log"):
        landed.rebuild(mended, state)
    assert people(database) == [(1, "newest"), (3, "d")]
    assert undo(mended, landed.store) == 3
    assert people(database) == [(1, "c"), (2, "f"), (3, "d")] and people(database, "log") == log_of(records[:4])
    landed.run(mended)
    assert people(database) == [(1, "newest"), (3, "d")] and people(database, "log") == log_of(records)
    for each in (change(2, "late", 8), change(3, "on", 2)):
        landed.spout.append("0", each)
    landed.run(mended)
    kept = [] if sequence else [(2, "late")]
    assert people(database) == [(1, "newest"), *kept, (3, "on")]
    assert verify(mended, landed.store).right


#: What ``Exchanges`` does in the midst of a commit.
IN_COMMIT: dict[int, Callable[[], object]] = {}


class Exchanges(UpsertCommitter):
    """Has something else done when it has written, once for each transaction."""

    def finish_batch(self) -> None:
        super().finish_batch()
        if self._attempt is not None:
            IN_COMMIT.pop(self._attempt.txid, lambda: None)()


@pytest.mark.each_value_once
@pytest.mark.parametrize("state", ["people", "log"])
def test_a_commit_that_is_open_when_rows_are_exchanged_is_repeated(database: Database, state: str) -> None:
    landed = Landed(database)
    exchanged: list[RebuildReport] = []
    mended = landed.topology()
    IN_COMMIT[3] = lambda: exchanged.append(landed.rebuild(mended, state))
    landed.run(landed.topology(Same(), committer=Exchanges))
    assert [each.txid for each in exchanged] == [2]
    assert people(database) == RIGHT and people(database, "log") == log_of(RECORDS)
    record = read_transaction(landed.store, "landed", 3)
    assert record is not None and [each.outcome for each in record.attempts] == ["failed", "committed"]
    assert undo(mended, landed.store) == 5
    assert people(database) == [(1, "c"), (3, "g"), (4, "e"), (5, "f")]


def test_a_table_made_by_hand_keeps_what_is_not_the_topologys(database: Database) -> None:
    """Columns, indexes, defaults, computed columns and rows of the user's, and a key of another
    type."""
    text, end = ("text", " STRICT") if isinstance(database, SqliteDatabase) else ("varchar(9)", "")
    database.run(
        f"CREATE TABLE people (note {text} DEFAULT 'new', id integer NOT NULL, name {text}, lsn integer, "
        f"twice integer GENERATED ALWAYS AS (id * 2) {_GENERATED[type(database)]}, CHECK (id < 100)){end}"
    )
    database.run("CREATE UNIQUE INDEX people_id ON people (id)")
    database.run("INSERT INTO people (id, name, note) VALUES (77, 'mine', 'old')")
    landed = Landed(database)
    landed.run(landed.topology(Wrong()))
    database.run("UPDATE people SET note = 'seen' WHERE id IN (3, 5)")
    landed.rebuild(landed.topology(), "people")
    assert database.rows("people", "id, name, note, twice") == [
        *((1, "c", "new", 2), (3, "g", "seen", 6), (5, "f", "seen", 10), (6, "h", "new", 12), (77, "mine", "old", 154)),
    ]
    assert undo(landed.topology(), landed.store) == 5
    assert database.rows("people", "id, name, note") == [
        *((1, "c", "new"), (3, "g", "seen"), (4, "e", "new"), (5, "f", "seen"), (77, "mine", "old")),
    ]
    assert len(database.rows("people__former")) == 6


def test_rows_that_are_right_are_not_written(database: Database) -> None:
    landed = Landed(database)
    landed.run(landed.topology(Wrong()))
    mended = landed.topology()
    landed.rebuild(mended, "people", take_over=False)
    kind, written = type(mended["people"].states[0]), list[int]()
    upsert = vars(kind).get("_upsert", RowTable._upsert)

    def counted(*given: Any, **options: Any) -> int:
        written.append(upsert(*given, **options))
        return written[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_upsert", counted)
        landed.rebuild(mended, "people")
    assert written == [1]  # 5; 4 is deleted
    assert people(database) == RIGHT


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.each_value_once
@pytest.mark.parametrize("state", ["people", "log"])
def test_an_exchange_that_dies_before_any_statement_has_happened_whole_or_not_at_all(
    database: Database, state: str
) -> None:
    landed = Landed(database)
    landed.run(landed.topology(Wrong()))
    mended = landed.topology(sequence_by=None)
    before, right = people(database, state), RIGHT if state == "people" else log_of(RECORDS)
    landed.rebuild(mended, state, take_over=False)
    kind, number = type(mended[state].states[0]), 0
    exchange = kind.exchange
    while True:
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "exchange", dying(exchange, number))
            try:
                landed.rebuild(mended, state)
            except Killed:
                pass
            else:
                break
        assert people(database, state) in (before, right)
    assert number > 8 and people(database, state) == right
    assert verify(mended, landed.store).states[0 if state == "log" else 1].difference_count == 0
    assert undo(mended, landed.store) == 5


def dying(exchange: Callable[..., None], number: int) -> Callable[..., None]:
    """An exchange whose statement of this number, and those after it, are never sent."""

    def exchanged(table: RebuildableTable, *given: Any) -> None:
        count, ran = 0, type(table)._run

        def run(table: Any, *given: Any) -> Any:
            nonlocal count
            count += 1
            if count >= number:
                raise Killed
            return ran(table, *given)

        with pytest.MonkeyPatch.context() as patch:
            for kind in (TableDefinition, type(table)):
                if "_run" in vars(kind):
                    patch.setattr(kind, "_run", run)
            exchange(table, *given)

    return exchanged


def test_a_table_without_a_stamp_is_refused_before_the_source_is_read(database: Database) -> None:
    landed = Landed(database, stamp=None)
    landed.run(landed.topology())
    with pytest.raises(ConfigError, match="has no stamp, which tells the topology's rows from those of others"):
        landed.rebuild(landed.topology(), "people")


def test_a_trigger_is_named_before_the_source_is_read(database: Database) -> None:
    landed = Landed(database)
    landed.run(landed.topology())
    if isinstance(database, PostgresDatabase):
        database.run("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")
        database.run("CREATE TRIGGER shout BEFORE UPDATE ON people FOR EACH ROW EXECUTE FUNCTION nothing()")
    elif isinstance(database, MySqlDatabase):
        database.run("CREATE TRIGGER shout BEFORE UPDATE ON people FOR EACH ROW SET NEW.name = NEW.name")
    else:
        database.run("CREATE TRIGGER shout AFTER UPDATE ON people BEGIN SELECT 1; END")
    with pytest.raises(ConfigError, match="people.* cannot be exchanged.* trigger shout"):
        landed.rebuild(landed.topology(), "people")


def test_a_table_that_others_refer_to_is_not_emptied(database: Database) -> None:
    big = "integer" if isinstance(database, SqliteDatabase) else "bigint"
    text = "text" if isinstance(database, SqliteDatabase) else "varchar(20)"
    database.run(f"CREATE TABLE log (id {big} NOT NULL, name {text}, lsn {big}, PRIMARY KEY (id))")
    database.run(f"CREATE TABLE child (log_id {big}, FOREIGN KEY (log_id) REFERENCES log (id))")
    landed = Landed(database, [change(1, "a"), change(2, "b")])
    landed.run(landed.topology())
    with pytest.raises(ConfigError, match="log.* cannot be exchanged.* foreign key .*child"):
        landed.rebuild(landed.topology(), "log")


def test_a_column_that_the_mended_code_adds_is_added_by_the_exchange(database: Database) -> None:
    landed = Landed(database)
    database.run("CREATE TABLE people (id integer NOT NULL PRIMARY KEY, lsn integer)")
    landed.run(landed.topology(on_new_column="ignore"))
    with pytest.raises(ConfigError, match="no column 'name'"):
        landed.rebuild(landed.topology(), "people")
    landed.rebuild(landed.topology(on_new_column="add"), "people")
    assert people(database) == RIGHT


def test_the_table_of_another_program_is_not_taken(database: Database) -> None:
    landed = Landed(database)
    landed.run(landed.topology())
    database.run("CREATE TABLE people__former (id integer)")
    database.run("INSERT INTO people__former VALUES (1)")
    with pytest.raises(ConfigError, match="people__former.* is not Ratchet's"):
        landed.rebuild(landed.topology(), "people")
