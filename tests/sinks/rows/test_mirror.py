"""A mirror holds what the source holds, whatever fails: against a plain-Python oracle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError, TopologyError
from framework.testing import crash, fail_attempt, replay
from framework.topology import CommitFence, Input, TransactionAttempt
from framework.topology.groupings import ShuffleGrouping
from framework.transactions import MemoryStore
from framework.transactions.undo import undo
from ratchet import Pipeline, sqlite
from sinks import Mirror, SqliteTable, UpsertCommitter
from spouts import DebeziumChanges, OpaqueMemoryTransactionalSpout
from tests.kit.change_records import INT, TEXT, UNAVAILABLE, Record, change_record
from tests.kit.file_tables import granted, opened
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.kit.targets import examples
from tests.kit.waiting import PATIENCE_S
from tests.sinks.rows.test_kills import Killed, kill_at

pytestmark = pytest.mark.rule("C41")
FIELDS = Fields.of({"key": pa.binary(), "value": pa.binary()})
OF_TOPICS = Fields.of({"key": pa.binary(), "value": pa.binary(), "topic": pa.string()})
COLUMNS = {"id": INT, "name": TEXT}
WIDER = {**COLUMNS, "note": TEXT}


DECIMAL = "org.apache.kafka.connect.data.Decimal"
#: Where the log of the source begins: positions have more than 32 bits.
BEGIN = 2**40


WIDE_KEY = [f"k{number}" for number in range(900)]


def put(table: str, key: int, name: str | None = None, *, op: str = "u", lsn: int | None = 1, **more: Any) -> Record:
    columns = WIDER if more else COLUMNS
    return change_record(table, columns, op, {"id": key, "name": name, **more}, lsn=in_log(lsn))


def delete(table: str, key: int, *, lsn: int | None = 1) -> Record:
    return change_record(table, COLUMNS, "d", {"id": key}, lsn=in_log(lsn))


def truncate(table: str, *, lsn: int | None = 1) -> Record:
    return change_record(table, COLUMNS, "t", None, lsn=in_log(lsn))


def in_log(lsn: int | None) -> int | None:
    return BEGIN + lsn if lsn is not None else None


def with_column(name: str) -> Record:
    return change_record("people", {**COLUMNS, name: TEXT}, "c", {"id": 1, "name": "a"})


def edited(old: str, new: str) -> Record:
    key, value = put("people", 1, "ann")
    return key, (value or b"").replace(old.encode(), new.encode())


def twice(record: Record) -> Record:
    """The record, with the column ``name`` in the place of the column ``note``."""
    return record[0], (record[1] or b"").replace(b'"field":"note"', b'"field":"name"')


class Writer:
    """Commits batches as a driver and the task of a mirror do."""

    def __init__(self, database: Database, *, topic: str | None = None, **options: Any) -> None:
        self.mirror = Mirror(database.table, DebeziumChanges(), **options)
        fields = FIELDS if topic is None else OF_TOPICS
        self.mirror.bind("mirror", [Input("spout", "default", fields, ShuffleGrouping())], 1)
        #: Where the next records are from; None: the input does not tell.
        self.topic = topic
        self.table = self.mirror.table
        self.table.prepare("topology")

    def fill(self, attempt: TransactionAttempt, records: Sequence[Record]) -> None:
        self.mirror.prepare({}, None, None, attempt)  # type: ignore[arg-type]
        columns = [pa.array(each, pa.binary()) for each in zip(*records, strict=True)]
        if columns:
            batch = pa.RecordBatch.from_arrays(columns, names=list(FIELDS))
            if self.topic is not None:
                batch = batch.append_column("topic", pa.array([self.topic] * batch.num_rows))
            self.mirror.execute_arrow(batch)

    def begin(self, txid: int, records: Sequence[Record], attempt: int = 1) -> Any:
        header = opened(self.table, txid, attempt)
        self.fill(granted(header), records)
        self.mirror.finish_batch()
        return header

    def refuse(self, txid: int, records: Sequence[Record]) -> None:
        """Fill an attempt, and raise what its commit raises."""
        held = self.table.read_header().open
        header = opened(self.table, txid, held.attempt_id + 1 if held is not None else 1)
        self.fill(granted(header), records)
        self.mirror.finish_batch()

    def commit(self, txid: int, records: Sequence[Record], attempt: int = 1) -> None:
        header = self.begin(txid, records, attempt)
        self.table.raise_header(header, header.finished(txid))


def rows(database: Database, table: str = "people", columns: str = "id, name") -> list[tuple[Any, ...]]:
    return database.rows(table, columns)


def test_tables_are_made_and_changed_as_in_the_source(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann", op="c"), put("things", 1, "pen", op="r"), put("people", 2, "bo", op="c")])
    writer.commit(2, [delete("people", 1), put("people", 2, "bob"), (b"{}", None), put("things", 7)])
    assert rows(database) == [(2, "bob")]
    assert rows(database, "things") == [(1, "pen"), (7, None)]
    found = database.rows("ratchet_mirror", "table_name, source_name, changed_in")
    assert found == [("people", "shop.public.people", 2), ("things", "shop.public.things", 2)]


def test_a_replay_takes_back_all_tables(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann"), put("things", 1, "pen")])
    writer.begin(2, [put("people", 1, "x"), delete("things", 1), put("new", 5, "y"), put("people", 3, "z", note="n")])
    assert rows(database, "new") == [(5, "y")] and rows(database, "things") == []
    opened(writer.table, 2, 2)
    assert rows(database) == [(1, "ann")] and rows(database, "things") == [(1, "pen")]
    assert rows(database, "new") == [] and len(database.rows("ratchet_mirror")) == 2
    assert database.rows("new_before") == database.rows("people_before") == []
    header = writer.begin(2, [truncate("people"), put("people", 9, "after"), put("new", 6, "y")], 3)
    assert rows(database) == [(9, "after")]
    assert writer.table.roll_back(header) == 5
    assert rows(database) == [(1, "ann")] and rows(database, "new") == []
    writer.commit(2, [put("people", 4, "d")], 4)
    assert rows(database) == [(1, "ann"), (4, "d")]


def test_the_columns_follow_the_source(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    writer.commit(2, [put("people", 2, "bo"), put("people", 1, "ann", note="tall"), put("people", 3, "cy")])
    assert rows(database, columns="id, name, note") == [(1, "ann", "tall"), (2, "bo", None), (3, "cy", None)]
    writer.begin(3, [put("people", 1, "ann", note="small")])
    writer.commit(3, [], 2)
    assert rows(database, columns="id, name, note")[0] == (1, "ann", "tall")


def test_rows_from_before_hold_the_default_of_an_added_column(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    added = {
        "n": {**INT, "default": -5},
        "word": {**TEXT, "default": "it's"},
        "truth": {"type": "boolean", "default": True},
    }
    row = {"id": 2, "name": "bo", "n": None, "word": None, "truth": None}
    writer.commit(2, [change_record("people", {**COLUMNS, **added}, "c", row)])
    assert rows(database, columns="id, n, word, truth") == [(1, -5, "it's", True), (2, None, None, None)]


def test_decimals_become_longer_as_in_the_source(database: Database) -> None:
    def price(digits: int, value: str) -> Record:
        kind = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}
        kind = {**kind, "parameters": {"scale": "2", "connect.decimal.precision": str(digits)}}
        return change_record("prices", {"id": INT, "price": kind}, "c", {"id": digits, "price": value})

    writer = Writer(database)
    writer.commit(1, [price(4, "BNI=")])
    if isinstance(database, PostgresDatabase):
        writer.commit(2, [price(12, "SZYC0g=="), price(4, "BNI=")])
        assert database.rows("prices", "id, price") == [(12, Decimal("12345678.90")), (4, Decimal("12.34"))]
    elif isinstance(database, MySqlDatabase):
        with pytest.raises(BadRecordError, match=r"is decimal\(12,2\) now, and that of the table is decimal\(4,2\)"):
            writer.commit(2, [price(12, "SZYC0g==")])


def test_values_that_did_not_change_are_kept(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann", note="long")])
    writer.commit(2, [put("people", 1, "anna", note=UNAVAILABLE)])
    assert rows(database, columns="id, name, note") == [(1, "anna", "long")]


#: A row that is made, updated without its unchanged large value, and deleted.
MADE = put("people", 1, "ann", op="c", lsn=10, note="long")
UPDATED = put("people", 1, "anna", lsn=20, note=UNAVAILABLE)
RENAMED = put("people", 1, "anne", lsn=25, note=UNAVAILABLE)
WHOLE = put("people", 1, "annie", lsn=27, note="longer")
GONE = {
    "deleted": delete("people", 1, lsn=30),
    "emptied": truncate("people", lsn=30),
    "key changed": change_record("people", WIDER, "d", {"id": 1, "name": "anna", "note": "long"}, lsn=in_log(30)),
}


@pytest.mark.each_value_once
@pytest.mark.slow_for("mysql")
@pytest.mark.parametrize("gone", GONE.values(), ids=GONE)
@pytest.mark.parametrize(
    "repeated", [[[UPDATED]], [[UPDATED], [RENAMED]], [[UPDATED, RENAMED]], [[put("things", 1), UPDATED]]]
)
def test_a_repeated_change_of_a_row_that_a_later_one_has_removed_is_accepted(
    database: Database, gone: Record, repeated: list[list[Record]]
) -> None:
    """The connector stops again before it repeats the removal, and repeats both once more."""
    writer = Writer(database)
    writer.commit(1, [MADE, UPDATED])
    writer.commit(2, [gone])
    for txid, batch in enumerate([*repeated, [UPDATED, gone, UPDATED], [gone]], 3):
        writer.commit(txid, batch)
        assert rows(database) == []


def test_a_repeated_change_with_all_values_brings_a_row_back_until_its_removal(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [MADE, UPDATED, WHOLE, GONE["deleted"]])
    writer.commit(2, [UPDATED, WHOLE, RENAMED])
    assert rows(database, columns="id, name, note") == [(1, "anne", "longer")]
    writer.commit(3, [GONE["deleted"], UPDATED])
    writer.commit(4, [GONE["deleted"], put("people", 1, "new", op="c", lsn=40, note="n")])
    writer.commit(5, [put("people", 1, "newer", lsn=50, note=UNAVAILABLE)])
    assert rows(database, columns="id, name, note") == [(1, "newer", "n")]


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "lost",
    [
        [put("people", 1, "anna", lsn=40, note=UNAVAILABLE)],
        [put("people", 1, "anna", lsn=None, note=UNAVAILABLE)],
        [put("people", 2, "bo", lsn=20, note=UNAVAILABLE)],
        [UPDATED, put("people", 1, "anna", lsn=40, note=UNAVAILABLE)],
        [GONE["deleted"], put("people", 1, "anna", lsn=40, note=UNAVAILABLE)],
        [delete("people", 1, lsn=None), put("people", 1, "anna", lsn=None, note=UNAVAILABLE)],
    ],
)
def test_a_change_that_lost_its_row_is_refused_beside_repeated_ones(database: Database, lost: list[Record]) -> None:
    writer = Writer(database)
    writer.commit(1, [MADE, UPDATED, put("people", 3, "cy", lsn=22)])
    writer.commit(2, [GONE["deleted"], delete("people", 3, lsn=50)])
    with pytest.raises(BadRecordError, match="leaves out unchanged values"):
        writer.begin(3, lost)
    assert rows(database) == []


def test_a_deletion_that_was_taken_back_excuses_no_change(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [MADE, UPDATED, put("people", 2, "bo", lsn=22)])
    writer.commit(2, [GONE["deleted"]])
    writer.begin(3, [delete("people", 2, lsn=50), truncate("people", lsn=60)])
    assert database.rows("people_deleted", "id") == [(1,), (2,)]
    writer.commit(3, [], 2)
    assert database.rows("people_deleted", "id") == [(1,)] and rows(database) == [(2, "bo")]


def test_a_truncate_removes_all_rows(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [truncate("people"), put("people", 1, "ann"), put("things", 1, "pen")])
    writer.commit(2, [put("people", 2, "bo"), truncate("people"), put("people", 3, "cy")])
    assert rows(database) == [(3, "cy")] and rows(database, "things") == [(1, "pen")]


def test_one_step_is_a_whole_commit(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    for txid, records in ((2, [put("people", 1, "anna"), put("things", 1, "pen")]), (3, [])):
        before = writer.table.read_header()
        fence = CommitFence("topology", 1, "digest", "mirror:0", opens_from=before)
        writer.fill(TransactionAttempt(txid, 1, fence), records)
        writer.mirror.finish_batch()
        assert writer.table.read_header().done == txid
    assert rows(database) == [(1, "anna")] and rows(database, "things") == [(1, "pen")]


@pytest.mark.slow_for("postgres")
@pytest.mark.slow_for("mysql")
def test_a_kill_before_any_statement_is_repaired_by_the_replay(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann"), put("things", 1, "pen")])
    expected, attempt = (rows(database), rows(database, "things")), 1
    changes = [put("people", 1, "x", note="n"), delete("things", 1), put("new", 1, "y"), put("things", 2, "z")]
    while True:
        with monkeypatch.context() as patched:
            kill_at(patched, attempt)
            try:
                writer.begin(2, changes, attempt)
                break
            except Killed:
                found = rows(database), rows(database, "things")
                assert found in (expected, ([(1, "x")], [(2, "z")]))
        attempt += 1
    assert attempt > 25
    writer.commit(2, [put("people", 5, "e")], attempt + 1)
    assert rows(database) == [(1, "ann"), (5, "e")] and rows(database, "things") == [(1, "pen")]
    assert [name for (name,) in database.rows("ratchet_mirror", "table_name")] == ["people", "things"]


KEYS, TABLES = st.integers(0, 3), st.sampled_from(["people", "things"])
CHANGES = st.lists(
    st.one_of(
        st.builds(put, TABLES, KEYS, st.sampled_from(["a", "b", None])),
        st.builds(put, TABLES, KEYS, st.sampled_from(["a", "b"]), note=st.sampled_from(["n", None])),
        st.builds(delete, TABLES, KEYS),
        st.builds(truncate, TABLES),
    ),
    max_size=6,
)


def copied(batches: Iterable[Sequence[Record]]) -> dict[str, dict[int, tuple[Any, ...]]]:
    """What the tables hold after these batches."""
    held: dict[str, dict[int, tuple[Any, ...]]] = {"people": {}, "things": {}}
    for _, value in (record for batch in batches for record in batch):
        payload = json.loads(value or b"")["payload"]
        table, row = held[payload["source"]["table"]], payload["after"] or payload["before"] or {}
        if payload["op"] == "t":
            table.clear()
        elif payload["op"] == "d":
            table.pop(row["id"], None)
        elif row.get("note") != UNAVAILABLE or row["id"] in table:  # otherwise, its deletion is repeated too
            held_note = table.get(row["id"], (None,))[-1]
            note = held_note if row.get("note") == UNAVAILABLE else row.get("note", held_note)
            table[row["id"]] = row["id"], row["name"], note
    return held


def expected_rows(held: dict[str, dict[int, tuple[Any, ...]]], table: str) -> list[tuple[Any, ...]]:
    return sorted(held[table].values(), key=repr)


def copied_rows(database: SqliteDatabase, table: str) -> list[tuple[Any, ...]]:
    """The rows of a copy, with the columns of the widest one; none of a table that is not made."""
    if not database.run("SELECT name FROM sqlite_master WHERE name = ?", table):
        return []
    columns = [name for _, name, *_ in database.run(f"PRAGMA table_info({table})")]
    return rows(database, table, f"id, name, {'note' if 'note' in columns else 'NULL'}")


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(CHANGES, st.none() | CHANGES), min_size=1, max_size=5), st.booleans())
def test_the_mirror_holds_what_the_source_holds(tmp_path_factory: Any, drawn: Any, stamped: bool) -> None:
    """Each transaction has an attempt before it that is lost, where one is drawn."""
    database = SqliteDatabase(tmp_path_factory.mktemp("mirror") / "copy.db")
    options = {} if stamped else {"stamp": None}
    mirror = Writer(database)
    if not stamped:
        mirror.mirror = Mirror(lambda name: database.table(name, **options), DebeziumChanges(), catalog="unstamped")
        mirror.mirror.bind("mirror", [Input("spout", "default", FIELDS, ShuffleGrouping())], 1)
        mirror.table = mirror.mirror.table
        mirror.table.prepare("topology")
    for txid, (changes, lost) in enumerate(drawn, 1):
        if lost is not None:
            mirror.begin(txid, lost, 1)
        mirror.commit(txid, changes, 2)
        expected = copied(each for each, _ in drawn[:txid])
        for table in expected:
            assert copied_rows(database, table) == expected_rows(expected, table)


#: What the source does to a key: insert or update, update but for the large value, change the key,
#: delete; empty the table.
DEEDS = st.lists(st.tuples(st.sampled_from("ppuuukddt"), st.integers(0, 1)), min_size=1, max_size=14)


def history(deeds: Sequence[tuple[str, int]]) -> list[Record]:
    """The changes of a source that does this, as Debezium writes them."""
    there: set[int] = set()
    found: list[Record] = []
    for lsn, (deed, key) in enumerate(deeds):
        name, note = f"name {lsn}", f"note {lsn}"
        if deed == "t":
            there.clear()
            found.append(truncate("people", lsn=lsn))
        elif deed == "d" or (deed == "k" and 1 - key not in there):
            if key in there:
                there.remove(key)
                found.append(delete("people", key, lsn=lsn))
                if deed == "k":
                    there.add(1 - key)
                    found.append(put("people", 1 - key, name, op="c", lsn=lsn, note=note))
        else:
            left_out = deed == "u" and key in there
            op = "u" if key in there else "c"
            found.append(put("people", key, name, op=op, lsn=lsn, note=UNAVAILABLE if left_out else note))
            there.add(key)
    return found


@settings(max_examples=examples(60))
@given(DEEDS, st.data())
def test_a_connector_may_repeat_any_changes_at_any_border(tmp_path_factory: Any, deeds: Any, data: Any) -> None:
    """It goes on behind what it has stored, never before an earlier such place."""
    changes = history(deeds)
    log, at, stored = list[Record](), 0, 0
    while at < len(changes):
        end = data.draw(st.integers(at + 1, len(changes)), "written until")
        log += changes[at:end]
        stored = data.draw(st.integers(stored, end), "stored until")
        at = stored if data.draw(st.integers(0, 2), "restarts") and len(log) < 40 else end
    database = SqliteDatabase(tmp_path_factory.mktemp("mirror") / "copy.db")
    mirror, txid, done = Writer(database), 0, 0
    while done < len(log):
        txid, size = txid + 1, data.draw(st.integers(1, 5), "batch")
        if data.draw(st.booleans(), "lost attempt"):
            mirror.begin(txid, log[done : done + data.draw(st.integers(1, 5))], 1)
        mirror.commit(txid, log[done : done + size], 2)
        done += size
        assert copied_rows(database, "people") == expected_rows(copied([log[:done]]), "people")
    assert copied_rows(database, "people") == expected_rows(copied([changes]), "people")


NUMBER = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}
PRICE = {**NUMBER, "parameters": {"scale": "2", "connect.decimal.precision": "6"}}
PAIRS = {"id": INT, "part": INT, "name": TEXT}


@pytest.mark.each_value_once
@pytest.mark.parametrize(("old", "new"), [(PRICE, {"type": "double"}), (INT, TEXT), (TEXT, INT)])
def test_a_column_that_comes_back_with_another_type_is_named(database: Database, old: Any, new: Any) -> None:
    writer = Writer(database)
    writer.commit(1, [change_record("people", {"id": INT, "value": old}, "c", {"id": 1, "value": None})])
    writer.commit(2, [change_record("people", {"id": INT}, "c", {"id": 2})])
    with pytest.raises(BadRecordError, match="column 'value' of the source is .* now, and that of the table is"):
        writer.begin(3, [change_record("people", {"id": INT, "value": new}, "c", {"id": 3, "value": None})])


def obey(database: Database, advice: str) -> None:
    """Do what the last line of a pipeline advises."""
    if isinstance(database, SqliteDatabase):
        table = advice.rpartition("rename it to ")[2]
        ((made,),) = database.run("SELECT sql FROM sqlite_master WHERE name = 'people'")
        for old, new in (('PRIMARY KEY ("id")', 'PRIMARY KEY ("id", "part")'), ('"name" INTEGER', '"name" TEXT')):
            made = made.replace(old, new) if new.rpartition('"name" ')[2] in advice else made
        database.run(f"ALTER TABLE {table} RENAME TO old")
        database.run(made)
        database.run(f"INSERT INTO {table} SELECT * FROM old")
        database.run("DROP TABLE old")
    else:
        database.run("ALTER TABLE " + advice.rpartition("ALTER TABLE ")[2])


def test_what_is_advised_about_a_type_helps(database: Database) -> None:
    def number(value: Any, kind: Any = INT) -> Record:
        return change_record("people", {"id": INT, "name": kind}, "u", {"id": 1, "name": value})

    writer = Writer(database)
    writer.commit(1, [number(1)])
    writer.commit(2, [number(2)])
    with pytest.raises(BadRecordError) as told:
        writer.begin(3, [number("x", TEXT)])
    obey(database, str(told.value))
    writer = Writer(database)
    writer.begin(3, [number("x", TEXT)], 2)
    writer.begin(3, [number("y", TEXT)], 3)
    writer.commit(3, [], 4)
    assert rows(database) == [(1, "2")]


def test_what_is_advised_about_a_key_helps(database: Database) -> None:
    def pair(key: int, part: int, *by: str, op: str = "c") -> Record:
        return change_record("people", PAIRS, op, {"id": key, "part": part, "name": "a"}, key=by or ("id", "part"))

    writer = Writer(database)
    writer.commit(1, [pair(1, 1, "id")])
    with pytest.raises(BadRecordError) as told:
        writer.begin(2, [pair(1, 2)])
    obey(database, str(told.value))
    writer = Writer(database)
    writer.commit(2, [pair(1, 2)], 2)
    writer.begin(3, [pair(1, 1, op="d"), pair(1, 2, op="d")])
    writer.commit(3, [], 2)
    assert rows(database, columns="id, part") == [(1, 1), (1, 2)]


def test_columns_of_the_copy_may_be_added_and_dropped_by_hand(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann", note="x")])
    writer.commit(2, [put("people", 2, "bo")])
    database.run("ALTER TABLE people DROP COLUMN note")
    database.run(f"ALTER TABLE people ADD COLUMN tag {'varchar(9)' if isinstance(database, MySqlDatabase) else 'text'}")
    database.run("UPDATE people SET tag = 'mine'")
    writer.commit(3, [put("people", 2, "bob")])
    writer.begin(4, [delete("people", 1), truncate("people")])
    writer.commit(4, [], 2)
    assert rows(database, columns="id, name, tag") == [(1, "ann", "mine"), (2, "bob", "mine")]


FLOATS = {"id": INT, "one": {"type": "double"}, "many": {"type": "array", "items": {"type": "double"}}}


def test_floats_that_are_no_numbers_stand_beside_numbers(tmp_path: Any) -> None:
    """As JSON has them: as text."""
    read = [
        change_record(
            "people", FLOATS, "u", {"id": 1, "one": one, "many": many}, before={"id": 1, "one": was, "many": []}
        )
        for one, many, was in ((1.5, [2], "NaN"), ("NaN", ["-Infinity", 2.5, None], 7), ("Infinity", [], 1e300))
    ]
    for records in (read, read[1:], read[:1], read[::-1]):
        keys, values = (pa.array(each, pa.binary()) for each in zip(*records, strict=True))
        (changes,) = DebeziumChanges().read(keys, values)
        assert changes.rows is not None
        for record, row in zip(records, changes.rows.to_pylist(), strict=True):
            after = json.loads(record[1] or b"")["payload"]["after"]
            assert repr(row["one"]) == repr(float(after["one"]))
            assert row["many"] == [None if each is None else float(each) for each in after["many"]]


def test_infinite_moments_are_copied_as_such(database: Database) -> None:
    """What Debezium writes for them, as recorded from one."""
    columns = {
        "id": INT,
        "local": {"type": "int64", "name": "io.debezium.time.MicroTimestamp"},
        "zoned": {"type": "string", "name": "io.debezium.time.ZonedTimestamp"},
    }
    values = ((9223372036825200000, "infinity"), (-9223372036832400000, "-infinity"), (0, "1970-01-01T00:00:00.5Z"))
    records = [
        change_record("people", columns, "c", {"id": key, "local": local, "zoned": zoned})
        for key, (local, zoned) in enumerate(values)
    ]
    writer = Writer(database)
    if isinstance(database, PostgresDatabase):
        writer.commit(1, records)
        assert [local for _, local in rows(database, columns="id, local::text")] == [
            "infinity",
            "-infinity",
            "1970-01-01 00:00:00",
        ]
        assert [zoned for _, zoned in rows(database, columns="id, zoned::text")][:2] == ["infinity", "-infinity"]
    else:
        with pytest.raises(BadRecordError):
            writer.commit(1, records)


def test_a_refused_row_names_its_table_and_that_of_the_source(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann"), put("things", 1, "pen")])
    column = "name(20)" if isinstance(database, MySqlDatabase) else "name"
    database.run(f"CREATE UNIQUE INDEX one_name ON people ({column})")
    with pytest.raises(BadRecordError, match=r"^copy of shop\.public\.people: table '(\w+\.)?people' of "):
        writer.begin(2, [put("things", 2, "ink"), put("people", 2, "ann")])


def test_messages_of_the_source_are_left_out() -> None:
    fields = [{"type": "string", "field": "op"}, {"type": "struct", "field": "message", "fields": []}]
    payload = {"op": "m", "source": {"db": "shop", "schema": "", "table": ""}, "message": {"prefix": "a"}}
    for each, refused in ((payload, False), ({**payload, "op": "c"}, True), ({"id": 1}, True)):
        value = json.dumps({"schema": {"type": "struct", "fields": fields}, "payload": each}, separators=(",", ":"))
        records = [(b'{"prefix":"a"}', value.encode()), put("people", 1, "ann")]
        keys, values = (pa.array(each, pa.binary()) for each in zip(*records, strict=True))
        if refused:
            with pytest.raises(BadRecordError, match="neither 'before' nor 'after'"):
                DebeziumChanges().read(keys, values)
        else:
            assert [each.table[-1] for each in DebeziumChanges().read(keys, values)] == ["people"]


def test_tables_of_one_name_on_two_servers_are_told_apart(tmp_path: Any) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database)
    writer.commit(1, [change_record("people", COLUMNS, "c", {"id": 1, "name": "a"}, server="eu")])
    with pytest.raises(
        BadRecordError, match=r"people of eu and shop\.public\.people of us would both be table 'people'"
    ):
        writer.begin(2, [change_record("people", COLUMNS, "c", {"id": 1, "name": "b"}, server="us")])
    assert rows(database) == [(1, "a")]


def test_a_table_has_one_mirror_or_committer(database: Database) -> None:
    Writer(database).commit(1, [put("people", 1, "ann")])
    with pytest.raises(BadRecordError, match=r"people'.*belongs to topology 'topology \(ratchet_mirror\)'"):
        Writer(database, catalog="other").begin(1, [put("people", 1, "b")])
    fields = Fields.of({"id": pa.int64(), "name": pa.string()})
    for name in ("people", "taken"):
        committer = UpsertCommitter(database.table(name), ["id"])
        committer.bind("upsert", [Input("spout", "default", fields, ShuffleGrouping())], 1)
        if name == "taken":
            committer.table.prepare("topology")
            break
        with pytest.raises(ConfigError, match=r"belongs to topology 'topology \(ratchet_mirror\)'"):
            committer.table.prepare("topology")
    with pytest.raises(BadRecordError, match="taken'.*belongs to topology 'topology'"):
        Writer(database).begin(2, [put("taken", 1, "b")])


def test_what_cannot_be_mirrored_is_named(tmp_path: Any) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database)
    attempt = TransactionAttempt(1, 1)
    for record, message in (
        ((b"{}", b'{"before": null, "after": {"id": 1}, "op": "c"}'), "without the schema of its table"),
        (change_record("people", COLUMNS, "c", {"id": 1}, key=()), "shop.public.people has no primary key"),
        (change_record("people", COLUMNS, "c", {"id": None}), "the key 'id' is null"),
        (change_record("people", COLUMNS, "c", {"id": 1}, key=["no"]), "'no', which is no column"),
        (change_record("people", {**COLUMNS, "pairs": {"type": "map"}}, "c", {"id": 1}), "pairs: a map"),
        (
            change_record("people", {"id": {"type": "array", "items": INT}}, "c", {"id": [1]}),
            "the key 'id' is an array",
        ),
        (
            change_record("people", {"id": INT, "n": {**NUMBER, "parameters": {"scale": "500"}}}, "c", {"id": 1}),
            "n: a decimal of 500 digits after the point",
        ),
        ((b"1", change_record("people", COLUMNS, "c", {"id": 1})[1]), "the key of a change record is no JSON object"),
        (put("ratchet_mirror", 1), "shop.public.ratchet_mirror cannot be called 'ratchet_mirror'"),
        (truncate("ratchet_mirror_before"), "cannot be called 'ratchet_mirror_before'"),
        (put("_Ratchet_headers", 1), "cannot be called '_Ratchet_headers'"),
        (put("sqlite_master", 1), "'sqlite_master' is reserved by SQLite"),
        (truncate("sqlite_master"), "'sqlite_master' is reserved by SQLite"),
        (put("a\0b", 1), "is no name in SQL"),
        (put("", 1), "does not name its table"),
        (with_column("a\0"), "is no name in SQL"),
        *(
            (with_column(name), f"the column '{name}' has a name of Ratchet's")
            for name in ("_ratchet_txid", "_Ratchet_Txid", "_ratchet_op", "_ratchet_deleted", "_ratchet_unchanged")
        ),
        (with_column("Name"), "'name' and 'Name' are the same column in SQLite"),
        (with_column(""), "the column '' has no name"),
        (edited('"field":"name"', '"field":7'), "a schema that is none of a change record"),
        (edited('"field":"name"', '"name":"x"'), "a schema that is none of a change record"),
        (edited('"type":"string"', '"kind":"string"'), "a schema that is none of a change record"),
        (edited('"type":"string"', f'"type":"bytes","name":"{DECIMAL}"'), "scale"),
        (twice(put("people", 1, "ann", note="x")), "a schema that is none of a change record"),
        (
            change_record("people", {"id": INT, **{f"c{n}": TEXT for n in range(1_000)}}, "c", {"id": 1}),
            "a table with 1,001 columns: the most is 1,000",
        ),
        (
            change_record("people", dict.fromkeys(WIDE_KEY, INT), "c", dict.fromkeys(WIDE_KEY, 1), key=WIDE_KEY),
            "shop.public.people has a key of 900 columns: the most is 32",
        ),
        (
            (b'{"schema":{"fields":[{"field":"id"},{"field":"id"}]},"payload":{"id":1}}', put("people", 1)[1]),
            "the record's key has a column twice",
        ),
    ):
        with pytest.raises(BadRecordError, match=message):
            writer.fill(attempt, [record])
    writer.commit(1, [put("people", 1, "ann")])
    for record, message in (
        (
            change_record("people", {"id": INT, "name": INT}, "c", {"id": 1, "name": 1}),
            "column 'name' of the source is",
        ),
        (change_record("people", COLUMNS, "c", {"id": 1, "name": "a"}, key=["id", "name"]), "PRIMARY KEY"),
    ):
        with pytest.raises(BadRecordError, match=message):
            writer.refuse(2, [record])
    wide = {"id": INT, **{f"c{n}": TEXT for n in range(998)}}
    for record, message in (
        (change_record("people", COLUMNS, "c", {"id": 1}, schema="other"), "would both be table 'people'"),
        (put("people_before", 1), "cannot be called 'people_before'"),
        (put("People", 1), "cannot be called 'People', which is the name of another table"),
        (change_record("people", {**wide, "more": TEXT}, "c", {"id": 1}), "would have 1,001 columns"),
    ):
        with pytest.raises(BadRecordError, match=message):
            writer.refuse(2, [record])
    with pytest.raises(TopologyError, match="give a function from a name to a table"):
        Mirror(lambda name: name, DebeziumChanges())  # type: ignore[arg-type,return-value]
    with pytest.raises(TopologyError, match="give it parallelism 1"):
        writer.mirror.bind("mirror", [Input("spout", "default", FIELDS, ShuffleGrouping())], 2)


@pytest.mark.each_value_once
@pytest.mark.parametrize("change", [put("people", 1, "evil"), delete("people", 1), truncate("people")])
def test_only_the_topic_that_brought_a_table_changes_it(database: Database, change: Record) -> None:
    writer = Writer(database, topic="shop.people")
    writer.commit(1, [put("people", 1, "ann"), put("things", 1, "pen")])
    found = database.rows("ratchet_mirror", "table_name, owner_topic")
    assert found == [("people", "shop.people"), ("things", "shop.people")]
    writer.topic = "evil"
    with pytest.raises(BadRecordError, match=r"has its changes from topic 'shop.people'.* from topic 'evil'"):
        writer.refuse(2, [change])
    assert rows(database) == [(1, "ann")]
    writer.topic = "shop.people"
    writer.commit(2, [put("people", 1, "bo")], 2)
    assert rows(database) == [(1, "bo")]


def test_two_topics_that_bring_one_table_in_a_batch_are_told_apart(tmp_path: Any) -> None:
    writer = Writer(SqliteDatabase(tmp_path / "copy.db"), topic="one")
    header = opened(writer.table, 1, 1)
    writer.mirror.prepare({}, None, None, granted(header))  # type: ignore[arg-type]
    records = [put("people", 1, "a"), put("people", 2, "b"), put("things", 1, "c")]
    columns = [pa.array(each, pa.binary()) for each in zip(*records, strict=True)]
    batch = pa.RecordBatch.from_arrays([*columns, pa.array(["one", "two", "two"])], names=list(OF_TOPICS))
    writer.mirror.execute_arrow(batch)
    with pytest.raises(BadRecordError, match=r"from topic 'one', and this one is from topic 'two'"):
        writer.mirror.finish_batch()


def test_topics_may_share_tables(database: Database) -> None:
    writer = Writer(database, topic="one", shared_tables=True)
    writer.commit(1, [put("people", 1, "ann")])
    writer.topic = "two"
    writer.commit(2, [put("people", 2, "bo")])
    assert rows(database) == [(1, "ann"), (2, "bo")]
    assert database.rows("ratchet_mirror", "owner_topic") == [(None,)]


def test_a_catalog_without_owners_gets_them(database: Database) -> None:
    Writer(database).commit(1, [put("people", 1, "ann")])
    for table in ("ratchet_mirror", "ratchet_mirror_before"):
        database.run(f"ALTER TABLE {table} DROP COLUMN owner_topic")
    mirror = Mirror(database.table, DebeziumChanges())
    (state,) = mirror.states()
    with state.held_rows() as held:
        assert list(held.shapes) == ["people"]
    state.prepare("topology")
    writer = Writer(database, topic="one")
    writer.commit(2, [put("people", 2, "bo")])
    assert database.rows("ratchet_mirror", "owner_topic") == [("one",)]
    writer.topic = "two"
    with pytest.raises(BadRecordError, match="from topic 'two'"):
        writer.refuse(3, [put("people", 3, "evil")])


@pytest.mark.parametrize("take", [1, 2, 100])
def test_a_pipeline_leaves_out_what_one_topic_says_of_the_table_of_another(tmp_path: Any, take: int) -> None:
    copy = Pipeline("copy")
    copy.mirror(["shop.people", "evil"], into=sqlite(tmp_path / "copy.db"), on_bad_record="skip")
    good = [put("people", 1, "ann"), put("people", 2, "bo"), put("people", 2, "bob")]
    bad = [put("people", 1, "evil"), delete("people", 1), truncate("people"), put("people_before", 1)]
    bad += [
        put("ratchet_mirror", 1),
        with_column("Name"),
        change_record("people", {"id": INT, "NAME": TEXT}, "c", {"id": 1}),
    ]
    bad += [put("evil", 1, "own")]

    def told(topic: str, records: list[Record]) -> list[dict[str, Any]]:
        return [{"key": key, "value": value, "topic": topic} for key, value in records]

    given = [*told("shop.people", good[:2]), *told("evil", bad), *told("shop.people", good[2:])]
    found = copy.test({"mirror-changes": given}, take=take)["mirror"]
    named = [(each["table"], json.loads(each["row"])["name"]) for each in found]
    assert sorted(named) == [("evil", "own"), ("people", "ann"), ("people", "bob")]


def test_tables_may_have_other_names(tmp_path: Any) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database, name=lambda table: "_".join(table[1:]))
    writer.commit(
        1, [put("people", 1, "ann"), change_record("people", COLUMNS, "c", {"id": 2, "name": "b"}, schema="old")]
    )
    assert rows(database, "public_people") == [(1, "ann")] and rows(database, "old_people") == [(2, "b")]


def test_only_one_topology_writes_a_mirror(tmp_path: Any) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    Writer(database)
    other = Mirror(lambda name: SqliteTable(database.path, name), DebeziumChanges())
    with pytest.raises(ConfigError, match="belongs to topology 'topology'"):
        other.table.prepare("another")


def test_a_pipeline_mirrors_topics(tmp_path: Any) -> None:
    copy = Pipeline("copy")
    copy.mirror(pattern=r"shop\..*", into=sqlite(tmp_path / "copy.db"), bootstrap_servers="broker:9092")
    (mirror,) = [each for each in copy.build().components if each.id == "mirror"]
    committer: Any = mirror.instance
    assert isinstance(committer, Mirror) and committer.table.location.endswith("copy.db")
    records = [put("people", 1, "ann"), put("things", 1, "pen"), put("people", 1, "bob"), delete("things", 1)]
    given = {"mirror-changes": [dict(zip(("key", "value"), each, strict=True)) for each in records]}
    for faults in ([], [replay(2)], [crash(2)], [crash(2, when="written")], [fail_attempt(2), replay(1)]):
        found = copy.test(given, take=2, faults=faults)["mirror"]
        assert found == [{"table": "people", "row": '{"id": 1, "name": "bob"}'}]
    assert not (tmp_path / "copy.db").exists()


def test_undo_takes_back_all_tables(tmp_path: Any) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    records = [put("people", 1, "ann"), put("things", 1, "pen"), put("people", 1, "bob"), delete("things", 1)]
    records += [truncate("people"), put("new", 4, "x")]
    builder = TransactionalTopologyBuilder(
        "copy", "changes", OpaqueMemoryTransactionalSpout({0: [list(each) for each in records]}, FIELDS, 2)
    )
    builder.set_bolt("mirror", Mirror(database.table, DebeziumChanges())).global_grouping("changes")
    built, store = builder.build(), MemoryStore()

    def run() -> tuple[Any, ...]:
        with submit(built, {}, store, "local") as running:
            running.wait_until_caught_up(PATIENCE_S)
        return rows(database), rows(database, "things"), rows(database, "new")

    assert run() == ([], [], [(4, "x")])
    assert undo(built, store) == 3
    assert (rows(database), rows(database, "new")) == ([(1, "bob")], [])
    assert run() == ([], [], [(4, "x")])
