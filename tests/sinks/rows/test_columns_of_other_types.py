"""Tables made by hand, whose columns have other types than the fields: the tools read the rows as
the fields are declared, and compare them as the columns store them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, RatchetError
from framework.inspect.explain import explain
from framework.inspect.replay import plan_to_replay, replay
from framework.inspect.state_snapshots import read
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from sinks import AppendCommitter, UpsertCommitter
from sinks.key_parser import key_values
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.row_tables import Database, MySqlDatabase, PostgresDatabase, SqliteDatabase
from tests.kit.waiting import PATIENCE_S

TEXT, WHOLE, FLOAT, DECIMAL = pa.string(), pa.int64(), pa.float64(), pa.decimal128(12, 2)
UUIDS = ["00000000-0000-0000-0000-00000000000a", "C0000000-0000-0000-0000-00000000000B"]
CENTS = [Decimal("0.10"), Decimal("12.35")]
MOMENTS = [datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)]
VARCHAR = "varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
#: The type of the field, its values, and the type of the column, by the kind of database.
PAIRS: dict[type[Database], list[tuple[pa.DataType, list[Any], str]]] = {
    PostgresDatabase: [
        (TEXT, UUIDS, "uuid"),
        (TEXT, ["10.0.0.1", "::1", "10.0.0.0/8"], "inet"),
        (TEXT, ["1 day", "PT5M", "1 mon"], "interval"),
        (TEXT, ["a", "b "], "char(5)"),
        (TEXT, ["1.50", "2"], "numeric"),
        (TEXT, ["1", "2"], "bigint"),
        (TEXT, ["2026-01-01", "2026-1-2"], "date"),
        (TEXT, ["2026-01-01T00:00:00Z", "2026-01-02 00:00:00+02"], "timestamptz"),
        (TEXT, ['{"b": 1,"a":2.50}', "[1,2]"], "jsonb"),
        (TEXT, ["{a,b}", '{"c d"}'], "text[]"),
        (TEXT, ["t", "f"], "boolean"),
        (WHOLE, [1, 2], "varchar(20)"),
        (FLOAT, [0.1, 1e6], "numeric(12,2)"),
        (FLOAT, [-1.5, 0.1], "real"),
        (FLOAT, [0.1, 2.0], "text"),
        (DECIMAL, CENTS, "double precision"),
        (DECIMAL, CENTS, "text"),
        (pa.timestamp("us", "UTC"), MOMENTS, "text"),
        (pa.timestamp("us", "UTC"), [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)], "date"),
        (pa.date32(), [datetime.date(2026, 1, 1)], "text"),
        (pa.date32(), [datetime.date(2026, 1, 1)], "timestamptz"),
    ],
    MySqlDatabase: [
        (TEXT, UUIDS, "uuid"),
        (TEXT, ["1.50", "2"], "decimal(10,2)"),
        (TEXT, ["1", "2"], "int"),
        (TEXT, ["2026-01-01", "2026-1-2"], "date"),
        (TEXT, ["2026-01-01T00:00:00", "2026-01-02 00:00:00"], "datetime"),
        (TEXT, ["2026"], "year"),
        (WHOLE, [1, 2], VARCHAR),
        (FLOAT, [0.1, 12.5], "decimal(12,2)"),
        (FLOAT, [0.1, 12.5], VARCHAR),
        (FLOAT, [-12.5, 0.1], "float"),
        (DECIMAL, CENTS, "double"),
        (pa.bool_(), [True, False], "bit(1)"),
        (WHOLE, [300, 1], "bit(9)"),
    ],
    SqliteDatabase: [
        (TEXT, ["a", "7"], "UUID"),
        (WHOLE, [1, 2], "TEXT"),
        (FLOAT, [0.1, 12.0], "TEXT"),
        (DECIMAL, CENTS, "DECIMAL(12,2)"),
        (DECIMAL, CENTS, "REAL"),
    ],
}
NAMES: dict[type[Database], str] = {PostgresDatabase: "postgres", MySqlDatabase: "mysql", SqliteDatabase: "sqlite"}
CASES = [
    pytest.param(NAMES[kind], *pair, id=f"{NAMES[kind]}-{pair[0]}-{pair[2].split()[0]}")
    for kind, pairs in PAIRS.items()
    for pair in pairs
]


class Written:
    """A topology that upserts and appends rows with the columns ``k``, ``v`` and ``n``, of which
    ``k`` and ``v`` have the type ``field`` and the values ``values``."""

    def __init__(self, database: Database, field: pa.DataType, values: Sequence[Any], batch: int = 1) -> None:
        records = [[value, value, number] for number, value in enumerate([*values, *values])]
        fields = Fields.of({"k": field, "v": field, "n": WHOLE})
        self.store = MemoryStore()
        builder = TransactionalTopologyBuilder(
            "typed", "spout", OpaqueMemoryTransactionalSpout({0: records}, fields, batch)
        )
        builder.set_bolt("keyed", UpsertCommitter(database.table("keyed"), ["k"])).shuffle_grouping("spout")
        builder.set_bolt("log", AppendCommitter(database.table("log"))).shuffle_grouping("spout")
        self.topology = builder.build()

    def run(self) -> Written:
        with submit(self.topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
        return self


def made(database: Database, column: str, key: str | None = None) -> Database:
    """The database, with tables that a user has made."""
    options = " CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin" if isinstance(database, MySqlDatabase) else ""
    database.run(f"CREATE TABLE keyed (k {key or column} NOT NULL PRIMARY KEY, v {column}, n integer){options}")
    database.run(f"CREATE TABLE log (k {column}, v {column}, n integer){options}")
    return database


@pytest.mark.rule("C41")
@pytest.mark.parametrize(("database", "field", "values", "column"), CASES, indirect=["database"])
def test_the_tools_agree_with_columns_of_other_types(
    database: Database, field: pa.DataType, values: list[Any], column: str
) -> None:
    landed = Written(made(database, column, "text" if column == "jsonb" else None), field, values).run()
    report = verify(landed.topology, landed.store)
    assert report.right and not report.not_verified, report.lines()
    assert [each.compared for each in report.states] == [len(values), 2 * len(values)]
    with read(landed.topology, store=landed.store) as found:
        assert sorted(found["keyed"].arrow()["n"].to_pylist()) == list(range(len(values), 2 * len(values)))
        assert found["log"].row_count == 2 * len(values)
        if not pa.types.is_string(field):
            assert sorted(found["keyed"].arrow()["v"].to_pylist()) == sorted(values)
    key = str(values[0]).lower() if pa.types.is_boolean(field) else str(values[0])
    with read(landed.topology, states=["keyed"], keys=[key]) as one:
        assert one["keyed"].arrow()["n"].to_pylist() == [len(values)]
    told = explain(landed.topology, landed.store, state="keyed", key=key)
    assert told.agrees and told.held is not None and len(told.steps) == 2
    for txid in (1, len(values) + 1):
        replayed = replay(landed.topology, landed.store, planned=plan_to_replay(landed.store, landed.topology, txid))
        assert replayed.agrees is not False


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.time64("us"), "01:02:03.000004", datetime.time(1, 2, 3, 4)),
        (pa.time32("s"), "01:02", datetime.time(1, 2)),
        (pa.duration("ms"), "1500", datetime.timedelta(seconds=1.5)),
        (pa.timestamp("us", "UTC"), "2026-01-02 03:04:05", MOMENTS[0]),
        (pa.timestamp("us", "UTC"), "2026-01-02T05:04:05+02:00", MOMENTS[0]),
    ],
)
def test_a_key_of_times_is_written_as_text(kind: pa.DataType, text: str, value: Any) -> None:
    assert key_values(text, Fields.of({"at": kind}), "table t") == (value,)
    with pytest.raises(ConfigError, match=r"'noon' cannot be read as .*, which column 'at' of table t holds"):
        key_values("noon", Fields.of({"at": kind}), "table t")


@pytest.mark.parametrize(
    ("database", "field", "column"),
    [
        ("postgres", pa.duration("us"), "interval"),
        ("postgres", pa.duration("ms"), "time"),
        ("mysql", pa.duration("us"), "time(6)"),
        ("postgres", pa.binary(), "text"),
        ("postgres", pa.binary(), "varchar(20)"),
    ],
    indirect=["database"],
)
def test_a_column_that_takes_values_for_others_is_refused_at_the_start(
    database: Database, field: pa.DataType, column: str
) -> None:
    made(database, column)
    with pytest.raises(ConfigError, match="column '[kv]' is .*, which would .*: make the column"):
        Written(database, field, []).run()


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize("column", ["uuid", "citext", "numeric", "text COLLATE folding"])
@pytest.mark.parametrize("dead", [[False, False], [False, True]])
def test_texts_that_are_one_key_to_the_table_are_named(database: Database, column: str, dead: list[bool]) -> None:
    texts = ["1", "1.0"] if column == "numeric" else [UUIDS[1].lower(), UUIDS[1]]
    database.run("CREATE EXTENSION IF NOT EXISTS citext SCHEMA public")
    database.run("CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    database.run(f"CREATE TABLE keyed (k {column.replace('citext', 'public.citext')} NOT NULL PRIMARY KEY, n integer)")
    fields = Fields.of({"k": TEXT, "n": WHOLE, "tombstone": pa.bool_()})
    records = [[text, number, gone] for number, (text, gone) in enumerate(zip(texts, dead, strict=True))]
    builder = TransactionalTopologyBuilder("folded", "spout", OpaqueMemoryTransactionalSpout({0: records}, fields, 2))
    builder.set_bolt("keyed", UpsertCommitter(database.table("keyed"), ["k"])).shuffle_grouping("spout")
    with (
        pytest.raises(
            RatchetError, match=r"differ and are one value of the key \(k\), such as a uuid in upper and lower"
        ),
        submit(builder.build(), store=MemoryStore(), executor="local") as run,
    ):
        run.wait_until_caught_up(PATIENCE_S)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize("kind", ["VIEW", "MATERIALIZED VIEW"])
def test_a_view_in_place_of_a_table_is_named(database: Database, kind: str) -> None:
    made(database, "text")
    database.run("ALTER TABLE log RENAME TO under")
    database.run(f"CREATE {kind} log AS SELECT * FROM under")
    with pytest.raises(ConfigError, match="is a view, to which no column '_txid' can be added: write to the table"):
        Written(database, TEXT, []).run()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("collation", ["NOCASE", "RTRIM"])
def test_a_key_of_sqlite_that_takes_different_texts_for_one_is_refused(database: Database, collation: str) -> None:
    database.run(f"CREATE TABLE keyed (k text COLLATE {collation} NOT NULL PRIMARY KEY, v text, n integer)")
    with pytest.raises(ConfigError, match=f"the key 'k' has the collation {collation}, which takes different texts"):
        Written(database, TEXT, []).run()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_key_of_sqlite_of_other_collations_beside_it_is_taken(database: Database) -> None:
    database.run("CREATE TABLE keyed (k text NOT NULL PRIMARY KEY, v text COLLATE NOCASE UNIQUE, n integer)")
    database.run("CREATE INDEX other ON keyed (k COLLATE NOCASE)")
    Written(database, TEXT, ["a"]).run()
