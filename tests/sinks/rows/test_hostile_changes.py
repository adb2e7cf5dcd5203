"""Whatever somebody writes to the topic of a mirror, the mirror goes on: a record that the copy
cannot have is a bad record, and all others have their effect."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from framework import TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError
from framework.transactions import MemoryStore
from sinks import Mirror, MySqlTable
from sinks.rows import mirror, mirror_catalog
from sinks.rows.sqlite import SqliteTable
from spouts import DebeziumChanges, OpaqueMemoryTransactionalSpout
from spouts.codecs import debezium_changes
from tests.kit.change_records import BIG, INT, TEXT, Record, change_record
from tests.kit.mysql import client
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.kit.waiting import PATIENCE_S
from tests.sinks.rows.test_mirror import COLUMNS, FIELDS, NUMBER, PAIRS, Writer, delete, put, rows

pytestmark = pytest.mark.rule("C51")
SURROGATE, LONG = "\ud800", "x" * 900_000
DOUBLE, MOMENT = {"type": "double"}, {"type": "int64", "name": "io.debezium.time.Timestamp"}
WIDE = {f"c{number}": TEXT for number in range(450)}


def of(table: str = "people", *, key: Sequence[str] = ("id",), **kinds: Mapping[str, Any]) -> Record:
    return change_record(table, {"id": INT, **kinds}, "c", {"id": 9}, key=key)


def texts(table: str, *names: str) -> Record:
    """Python would normalize the names of arguments."""
    return of(table, **dict.fromkeys(names, TEXT))


def by_default(column: str, value: Any, kind: Mapping[str, Any] = TEXT) -> Record:
    return of(name=TEXT, **{column: {**kind, "default": value}})


def written(record: Record, old: str, new: str) -> Record:
    """The record, with other bytes than JSON's own form of a value."""
    return record[0], (record[1] or b"").replace(old.encode(), new.encode())


def from_source(table: str, **named: str) -> Record:
    key, value = put(table, 9)
    read = json.loads(value or b"")
    read["payload"]["source"].update(named)
    return key, json.dumps(read, separators=(",", ":")).encode()


class Hostile(NamedTuple):
    """A record, and in each database the reason for which it is a bad record; empty: it is
    written."""

    record: Record
    sqlite: str = ""
    mysql: str = ""
    postgres: str = ""

    def reason(self, database: Database) -> str:
        kinds = {SqliteDatabase: self.sqlite, MySqlDatabase: self.mysql, PostgresDatabase: self.postgres}
        return kinds[type(database)]  # type: ignore[index]


def everywhere(record: Record, reason: str) -> Hostile:
    return Hostile(record, reason, reason, reason)


def folded(record: Record, reason: str) -> Hostile:
    """Only PostgreSQL can have it."""
    return Hostile(record, reason, reason)


def too_long(record: Record) -> Hostile:
    return everywhere(record, "a name of 900,000 characters")


CASES = {
    "column": folded(of(NAME=TEXT), "has a column 'name', and the field is 'NAME'"),
    "key": Hostile(
        change_record("people", {"ID": INT}, "c", {"ID": 9}, key=["ID"]),
        *("has a column 'id', and the field is 'ID'",) * 2,
        "has no column 'ID'",
    ),
    "two columns": folded(of("pairs", one=TEXT, ONE=TEXT), "'one' and 'ONE' are the same column"),
    "two columns beyond ASCII": Hostile(of("accents", é=TEXT, É=TEXT), "", "are the same column"),
    "two columns, one with a letter of two capitals": Hostile(of("sharp", straße=TEXT, strasse=TEXT)),
    "two columns, one without a dot": Hostile(of("dotless", ı=TEXT, i=TEXT), "", "are the same column"),
    "two columns, one with a dot more": Hostile(texts("dotted", "\u0130", "i"), "", "are the same column"),
    "two columns, one in kelvin": Hostile(texts("kelvin", "\u212a", "k"), "", "are the same column"),
    "two columns, an iota less": Hostile(texts("iota", "\u1f88", "\u1f80"), "", "are the same column"),
    "composed and not": Hostile(texts("accented", "\u00e9", "e\u0301")),
    "stamp": folded(of("stamped", _TXID=INT), "'_TXID' is a column of Ratchet's"),
    "table": folded(put("PEOPLE", 9, "x"), "cannot be called 'PEOPLE', which is the name of another table"),
    "table beside": folded(put("People_Before", 9), "cannot be called 'People_Before'"),
}
NAMES = {
    "surrogate in a column": everywhere(of(**{SURROGATE: TEXT}), "can't encode"),
    "surrogate in a struct": everywhere(
        of(pair={"type": "struct", "fields": [{"field": SURROGATE, "type": "string"}]}), "can't encode"
    ),
    "surrogate in a table": everywhere(put(f"a{SURROGATE}", 9), "surrogate pair in string is invalid"),
    "surrogate in a key": everywhere((b'{"\\ud800":1}', put("people", 9)[1]), "'.ud800', which is no column"),
    "surrogate in a server": everywhere(from_source("people", name=SURROGATE), "surrogate pair"),
    "NUL in a column": everywhere(of(**{"a\0": TEXT}), "is no name in SQL"),
    "NUL in a database": Hostile(from_source("with_nul", db="\0"), "", "", "0x00"),
    "NUL in a server": Hostile(from_source("of_nul", name="\0"), "", "", "0x00"),
    "long column": too_long(of("long_column", **{LONG: TEXT})),
    "long table": too_long(put(LONG, 9)),
    "long database": too_long(from_source("of_long", db=LONG)),
    "long server": too_long(from_source("of_long", name=LONG)),
    "long column of the key": too_long((json.dumps({LONG: 1}).encode(), put("people", 9)[1])),
    "column of 200 letters": Hostile(of("letters", **{"é" * 200: TEXT}), "", "than 64 bytes", "than 63 bytes"),
    "blank before a column": Hostile(of("blanks", **{" a": TEXT}), "", "is no name in MariaDB"),
    "blank after a column": Hostile(of("blanks_after", **{"a ": TEXT}), "", "is no name in MariaDB"),
    "blank after a table": Hostile(put("blank ", 9), "", "is no name in MariaDB"),
    "control character": Hostile(of("controls", **{"\x01a": TEXT}), "", "is no name in MariaDB"),
    "emoji in a column": Hostile(of("smiling", **{"\U0001f600": TEXT}), "", "is no name in MariaDB"),
    "emoji in a table": Hostile(put("\U0001f600", 9), "", "is no name in MariaDB"),
    "quotes": Hostile(of('"`%s', **{"'\"`%s{}:?\\": TEXT})),
}
DEFAULTS = {
    "surrogate": Hostile(by_default("d0", SURROGATE)),
    "NUL": Hostile(by_default("d1", "a\0")),
    "long text": everywhere(by_default("d2", LONG), "d2: a default of 900,000 characters"),
    "text of 4,096 letters": Hostile(by_default("d17", "é" * 4_096)),
    "text for a number": Hostile(by_default("d3", "x", INT)),
    "number for a text": Hostile(by_default("d4", 5)),
    "truth for a number": Hostile(by_default("d5", True, INT)),
    "text for an array": Hostile(by_default("d6", "x", {"type": "array", "items": TEXT})),
    "text for a struct": Hostile(by_default("d7", "x", {"type": "struct", "fields": [{"field": "a", **TEXT}]})),
    "infinity": Hostile(written(by_default("d8", 12345, DOUBLE), "12345", "1e400")),
    "not a number": Hostile(by_default("d9", "NaN", DOUBLE)),
    "4,000 digits": Hostile(written(by_default("d10", 12345, INT), "12345", "9" * 4_000)),
    "5,000 digits": everywhere(written(by_default("d11", 12345, INT), "12345", "9" * 5_000), "none of a change record"),
    "digits after the point": Hostile(by_default("d12", 1.5, INT)),
    "more bits": Hostile(by_default("d13", 2**40, INT)),
    "long bytes": Hostile(by_default("d14", "QUJD" * 200_000, {"type": "bytes"})),
    "decimal of a million digits": Hostile(
        by_default("d15", "9" * 1_000_000, {**NUMBER, "parameters": {"scale": "2"}})
    ),
    "tiny": Hostile(by_default("d16", 5e-324, DOUBLE)),
}
SCHEMAS = {
    "scale of 5,000 digits": everywhere(of(n={**NUMBER, "parameters": {"scale": "9" * 5_000}}), "which is no number"),
    "scale of a surrogate": everywhere(of(n={**NUMBER, "parameters": {"scale": SURROGATE}}), "which is no number"),
    "negative scale": Hostile(of("tens", n={**NUMBER, "parameters": {"scale": -5}}), "", "holds decimals of up to 65"),
    "texts that do not count": Hostile(
        of(
            name={
                **TEXT,
                "name": "io.debezium.data.Enum",
                "doc": SURROGATE + LONG,
                "parameters": {"allowed": f"a,{SURROGATE},\0"},
            }
        )
    ),
    "2,000 columns": everywhere(of(**{f"c{number}": TEXT for number in range(2_000)}), "the most is 1,000"),
    "450 columns": Hostile(of("wide", **WIDE), "", "Row size too large"),
    "450 more columns": Hostile(of("things", name=TEXT, **WIDE), "", "Row size too large"),
    "a text twice": everywhere(
        (b"{}", b'{"schema":{},"schema":"a","x":{},"payload":{"op":"c"}}'), "none of a change record"
    ),
    "a list twice": everywhere(
        (b"{}", b'{"schema":{},"schema":[],"x":{},"payload":{"op":"c"}}'), "none of a change record"
    ),
    "wider key": everywhere(change_record("people", PAIRS, "c", {"id": 9, "part": 1}, key=["id", "part"]), "part"),
    "other key": everywhere(
        change_record("people", COLUMNS, "d", {"id": 1, "name": "a"}, key=["name"]),
        "no primary key or unique index of name",
    ),
    "key of 32 columns": Hostile(
        change_record(
            "keyed", dict.fromkeys(list(WIDE)[:32], INT), "c", dict.fromkeys(list(WIDE)[:32], 1), key=list(WIDE)[:32]
        )
    ),
    "number for a text": everywhere(of(name=INT), "column 'name' of the source is"),
    "moment for a text": Hostile(of(name=MOMENT), "", *("column 'name' of the source is",) * 2),
    "text for a key": everywhere(
        change_record("people", {"id": TEXT}, "c", {"id": "x"}), "column 'id' of the source is"
    ),
}
HOSTILE = {
    f"{group}: {name}": each
    for group, its in (("case", CASES), ("names", NAMES), ("defaults", DEFAULTS), ("schemas", SCHEMAS))
    for name, each in its.items()
}


@pytest.mark.slow_for("mysql", "schemas")
@pytest.mark.parametrize("group", [CASES, NAMES, DEFAULTS, SCHEMAS], ids=["case", "names", "defaults", "schemas"])
def test_a_hostile_change_is_a_bad_record_or_written(database: Database, group: Mapping[str, Hostile]) -> None:
    """And the next changes of the same table and of another one are written."""
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "first"), put("things", 1, "first")])
    for txid, (name, each) in enumerate(group.items(), 2):
        good = [put("people", 1, name), put("things", 1, name)]
        reason, attempt = each.reason(database), 1
        if reason:
            with pytest.raises(BadRecordError, match=re.escape(reason) if "." not in reason else reason):
                writer.commit(txid, [each.record])
            attempt = 2
        writer.commit(txid, good if reason else [each.record, *good], attempt)
        for table in ("people", "things"):
            assert (1, name) in rows(database, table), name


@pytest.mark.quick_for("sqlite")
def test_a_mirror_goes_on_whatever_comes(database: Database) -> None:
    """Some batches are hostile as a whole, and some have a hostile record between good ones."""
    records = [put("people", 1, "ann"), put("things", 1, "pen"), put("people", 2, "bo")]
    for number, each in enumerate([each for name, each in HOSTILE.items() if "columns" not in name]):
        records += [each.record, *([put("people", 3, f"name {number}")] if number % 3 else [])]
    records += [put("people", 4, "cy"), put("things", 4, "cup"), delete("people", 2), put("people", 3, "last")]
    spout = OpaqueMemoryTransactionalSpout({0: [list(each) for each in records]}, FIELDS, 5)
    builder = TransactionalTopologyBuilder("copy", "changes", spout)
    builder.set_bolt("mirror", Mirror(database.table, DebeziumChanges(), on_bad_record="skip")).global_grouping(
        "changes"
    )
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found = [each for each in rows(database) if each[0] < 9]
    assert found == [(1, "ann"), (3, "last"), (4, "cy")]
    assert [each for each in rows(database, "things") if each[0] < 9] == [(1, "pen"), (4, "cup")]


def test_a_default_that_is_none_of_its_columns_leaves_later_rows_alone(database: Database) -> None:
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    good = {"number": {**INT, "default": 5}, "word": {**TEXT, "default": "it's"}, "share": {**DOUBLE, "default": 7}}
    bad = {"bad": {**INT, "default": "x"}, "worse": {**TEXT, "default": SURROGATE}}
    writer.commit(2, [of(name=TEXT, **good, **bad)])
    writer.commit(3, [put("people", 2, "bo")])
    found = rows(database, columns="id, number, word, share, bad, worse")
    assert found[0] == (1, 5, "it's", 7.0, None, None)


def test_columns_that_differ_by_case_are_two_in_postgres(postgres: Any, name: str) -> None:
    database = PostgresDatabase(postgres.dsn, name.replace("-", "_"))
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann"), put("People", 1, "other")])
    both = {**COLUMNS, "Name": TEXT}
    writer.commit(2, [change_record("people", both, "u", {"id": 1, "name": "ann", "Name": "Ann"})])
    writer.begin(3, [change_record("people", both, "u", {"id": 1, "name": "x", "Name": "y"}), put("People", 1, "z")])
    writer.commit(3, [put("people", 2, "bo")], 2)
    assert rows(database, columns='id, name, "Name"') == [(1, "ann", "Ann"), (2, "bo", None)]
    assert rows(database, "People") == [(1, "other")]


def test_mariadb_takes_no_other_letters_for_one(mariadb: Any) -> None:
    """In names of columns. A table of names that are one to the server cannot be created, and that
    stopped a mirror."""
    letters = [chr(code) for code in range(0x21, 0x10000) if not 0xD800 <= code < 0xE000]
    cased = [each for each in letters if not each == each.lower() == each.upper() == each.casefold()]
    names = [*{MySqlTable.dialect.folded(each): each for each in cased}.values()]
    names.sort(key=lambda each: unicodedata.normalize("NFKD", each.casefold())[0].lower())
    with client(mariadb.dsn) as other:
        for first in range(0, len(names), 500):
            columns = ", ".join(f'"{each}" int' for each in names[first : first + 900])
            other.execute(f"CREATE TEMPORARY TABLE cased ({columns})")
            other.execute("DROP TEMPORARY TABLE cased")


def test_a_table_that_somebody_has_changed_is_no_fault_of_a_record(tmp_path: Any) -> None:
    """``skip`` would leave out all records of the table."""
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    database.run("ALTER TABLE people RENAME TO old")
    database.run("CREATE TABLE people AS SELECT *, 1 AS more FROM old")
    with pytest.raises(ConfigError, match="has no primary key or unique index of id"):
        writer.commit(2, [put("people", 2, "bo")])


def test_a_name_that_needs_more_than_a_record_says_is_a_bad_record(tmp_path: Any) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database, name=lambda table: f"{table[1]}_{table[2]}")
    writer.commit(1, [put("people", 1, "ann")])
    with pytest.raises(BadRecordError, match="name raised IndexError"):
        writer.commit(2, [change_record("people", COLUMNS, "c", {"id": 1}, schema="")])


def test_schemas_that_alternate_are_compared_with_the_table_once_each(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = SqliteDatabase(tmp_path / "copy.db")
    compared = []
    make = SqliteTable.make
    monkeypatch.setattr(SqliteTable, "make", lambda self, *args: compared.append(self) or make(self, *args))  # type: ignore[func-returns-value]
    kinds = [{"id": INT, "name": TEXT}, {"id": INT, "note": TEXT}, {"id": BIG, "name": TEXT}]
    changes = [change_record("people", kinds[n % 3], "c", {"id": n, "name": "x", "note": "y"}) for n in range(30)]
    writer = Writer(database)
    writer.commit(1, changes)
    assert len(compared) == 3
    found = {n: tuple(more) for n, *more in rows(database, columns="id, name, note")}
    assert found == {n: (None, "y") if n % 3 == 1 else ("x", None) for n in range(30)}


def test_a_change_of_too_many_columns_is_refused_before_its_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 3,000 columns took 13 s, and the time grew with the square of their number."""
    made: list[Any] = []
    monkeypatch.setattr(debezium_changes, "column_type", made.append)
    key, value = of(**{f"c{number}": TEXT for number in range(20_000)})
    with pytest.raises(BadRecordError, match="a table with 20,001 columns: the most is 1,000"):
        DebeziumChanges().read(pa.array([key], pa.binary()), pa.array([value], pa.binary()))
    assert not made


def test_a_wide_change_after_a_narrow_one_takes_the_types_of_its_columns_a_few_times(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per column and column, 900 columns took half a minute, in which PostgreSQL ended the
    session, and the same change was tried for ever."""
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database)
    wide = {"id": INT, **{f"c{number}": INT for number in range(100)}}
    writer.commit(1, [change_record("people", wide, "c", {"id": 1, "c7": 7})])
    writer.commit(2, [put("people", 2, "bo")])
    made: list[str] = []
    column_type = SqliteTable._column_type
    monkeypatch.setattr(
        SqliteTable, "_column_type", lambda self, field: made.append(field.name) or column_type(self, field)
    )  # type: ignore[func-returns-value]
    writer.commit(3, [change_record("people", wide, "c", {"id": 3, "c7": 9})])
    assert rows(database, columns="id, c7") == [(1, 7), (2, None), (3, 9)]
    assert made.count("c7") < 20


def test_many_new_columns_are_added_by_one_statement_per_table(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite adds them one by one."""
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    table, statements = type(writer.table), list[str]()
    run = table._run
    monkeypatch.setattr(
        table,
        "_run",
        lambda self, via, statement, *more: statements.append(statement) or run(self, via, statement, *more),
    )  # type: ignore[func-returns-value]
    wide = {**COLUMNS, "d": {**TEXT, "default": "it's"}, **{f"c{number}": INT for number in range(9)}}
    writer.commit(2, [change_record("people", wide, "c", {"id": 3, "c7": 9})])
    assert rows(database, columns="id, c7, d") == [(1, None, "it's"), (3, 9, None)]
    added = [each for each in statements if "ADD COLUMN" in each]
    assert len(added) == (20 if isinstance(database, SqliteDatabase) else 2)


def test_changes_with_a_new_column_each_add_them_together(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their table is looked at once, not once per change: 300 such changes took 10 to 45 s."""
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    table, statements, looks = type(writer.table), list[str](), list[str]()
    run, columns = table._run, table._held_columns
    monkeypatch.setattr(
        table, "_run", lambda self, via, text, *more: statements.append(text) or run(self, via, text, *more)
    )  # type: ignore[func-returns-value]
    monkeypatch.setattr(table, "_held_columns", lambda self, via, name: looks.append(name) or columns(self, via, name))  # type: ignore[func-returns-value]
    kinds = [INT, TEXT, {**TEXT, "default": "it's"}]
    changes = [
        change_record("people", {"id": INT, f"c{n}": kinds[n % 3]}, "c", {"id": n, f"c{n}": n if n % 3 == 0 else "x"})
        for n in range(2, 32)
    ]
    writer.commit(2, changes)
    found = {row[0]: row[1:] for row in rows(database, columns="id, c3, c4, c5, c31")}
    assert found[1] == found[2] == (None, None, "it's", None)
    assert (found[3], found[4]) == ((3, None, "it's", None), (None, "x", "it's", None))
    assert (found[5], found[31]) == ((None, None, "x", None), (None, None, "it's", "x"))
    added = [each for each in statements if "ADD COLUMN" in each]
    assert len(added) == (60 if isinstance(database, SqliteDatabase) else 2)
    assert looks.count("people") < 15


def test_columns_are_widened_by_one_statement_per_table(
    postgres: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement may write all rows of the table. Changes of other columns may need it, too."""
    database = PostgresDatabase(postgres.dsn, name.replace("-", "_"))
    writer = Writer(database)
    narrow = {
        "id": INT,
        **{f"c{n}": {**NUMBER, "parameters": {"scale": "1", "connect.decimal.precision": "3"}} for n in range(6)},
    }
    wide = {
        "id": INT,
        **{f"c{n}": {**NUMBER, "parameters": {"scale": "2", "connect.decimal.precision": "9"}} for n in range(6)},
    }
    writer.commit(1, [change_record("people", narrow, "c", {"id": 1})])
    statements, run = list[str](), type(writer.table)._run
    monkeypatch.setattr(
        type(writer.table),
        "_run",
        lambda self, via, text, *more: statements.append(text) or run(self, via, text, *more),
    )  # type: ignore[func-returns-value]
    changes = [change_record("people", {"id": INT, f"c{n}": wide[f"c{n}"]}, "c", {"id": 2 + n}) for n in range(6)]
    writer.commit(2, changes)
    assert len([each for each in statements if "ALTER COLUMN" in each]) == 2
    kinds = database.run(
        "SELECT DISTINCT numeric_precision, numeric_scale FROM information_schema.columns WHERE table_name = 'people' "
        "AND table_schema = current_schema() AND column_name LIKE 'c_'"
    )
    assert kinds == [(9, 2)]


def test_columns_of_other_changes_are_added_up_to_the_most_of_a_table(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the change that would add one more is a bad record."""
    monkeypatch.setattr(mirror_catalog, "COLUMNS_MAX", 6)
    database = SqliteDatabase(tmp_path / "copy.db")
    writer = Writer(database)
    writer.commit(1, [put("people", 1, "ann")])
    changes = [change_record("people", {"id": INT, f"c{n}": INT}, "c", {"id": n, f"c{n}": n}) for n in range(2, 8)]
    with pytest.raises(BadRecordError, match="would have 7 columns: the most is 6"):
        writer.commit(2, changes)
    writer.commit(2, changes[:4], 2)
    assert rows(database, columns="id, c5")[-1] == (5, 5)


def test_a_batch_of_too_many_tables_is_planned_in_halves(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "TABLES_MAX", 3)
    database = SqliteDatabase(tmp_path / "copy.db")
    records = [list(put(f"t{number % 20}", number)) for number in range(40)]
    spout = OpaqueMemoryTransactionalSpout({0: records}, FIELDS, 40)
    builder = TransactionalTopologyBuilder("copy", "changes", spout)
    builder.set_bolt("mirror", Mirror(database.table, DebeziumChanges())).global_grouping("changes")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    for number in range(20):
        assert len(rows(database, f"t{number}")) == 2
    changed = {txid for (txid,) in database.rows("ratchet_mirror", "changed_in")}
    assert len(changed) >= 6
