"""Small and large batches of changes have the same effect on a table of PostgreSQL."""

from __future__ import annotations

import datetime
import decimal
import threading
import uuid
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import sinks.rows.postgres as module
from framework import Fields
from framework.errors import BadRecordError, ConfigError
from framework.topology import CommitFence, Input, TransactionAttempt
from framework.topology.groupings import ShuffleGrouping
from framework.topology.inspectable import inspectable
from sinks import PostgresTable, UpsertCommitter
from sinks.rows.transactional_table import RowTable
from tests.kit.file_tables import granted, opened
from tests.kit.postgres_exchanges import counted_exchanges
from tests.kit.row_tables import PostgresDatabase
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.rule("C41")
SMALL, LARGE = 1_000, 0


@pytest.fixture
def database(request: pytest.FixtureRequest) -> PostgresDatabase:
    return PostgresDatabase(request.getfixturevalue("postgres").dsn, f"s_{uuid.uuid4().hex[:12]}")


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are parameters of the statements, and batches that are copied to a table."""
    monkeypatch.setattr(module, "_GIVEN_ROWS", request.param)


class Writer:
    def __init__(self, table: RowTable, fields: Fields, key: list[str], **options: Any) -> None:
        self.committer = UpsertCommitter(table, key, delete_when="gone", **options)
        self.fields, self.table = fields, table
        self.committer.bind("rows", [Input("spout", "default", fields, ShuffleGrouping())], 1)
        self.table.prepare("topology")

    def begin(self, txid: int, *rows: dict[str, Any], attempt: int = 1) -> Any:
        header = opened(self.table, txid, attempt)
        self.write(granted(header), *rows)
        return header

    def write_in_one_step(self, txid: int, *rows: dict[str, Any]) -> None:
        header = self.table.read_header()
        fence = CommitFence("topology", header.epoch, "digest", "bolt:0", opens_from=header)
        self.write(TransactionAttempt(txid, 1, fence), *rows)

    def write(self, attempt: TransactionAttempt, *rows: dict[str, Any]) -> None:
        self.committer.prepare({}, None, None, attempt)  # type: ignore[arg-type]
        self.committer.execute_arrow(
            pa.RecordBatch.from_pylist([{"gone": False, **each} for each in rows], schema=self.fields.schema())
        )
        self.committer.finish_batch()

    def commit(self, txid: int, *rows: dict[str, Any], attempt: int = 1) -> None:
        header = self.begin(txid, *rows, attempt=attempt)
        self.table.raise_header(header, header.finished(txid))


@pytest.mark.usefixtures("batches")
def test_values_of_every_type_arrive_and_are_put_back(database: PostgresDatabase) -> None:
    fields = Fields.of(
        {
            "id": pa.int64(),
            "text": pa.string(),
            "blob": pa.binary(),
            "flag": pa.bool_(),
            "single": pa.float32(),
            "double": pa.float64(),
            "price": pa.decimal128(12, 3),
            "day": pa.date32(),
            "at": pa.timestamp("us", "UTC"),
            "local": pa.timestamp("us"),
            "clock": pa.time64("us"),
            "parts": pa.list_(pa.string()),
            "gone": pa.bool_(),
        }
    )
    writer = Writer(database.table(), fields, ["id"], columns=fields.names[:-1])
    first = {
        "text": 'a "b" \\ {c}, NULL\n\t%s',
        "blob": b"\x00\xff\\",
        "flag": True,
        "single": 0.1,
        "double": float("nan"),
        "price": decimal.Decimal("-12.345"),
        "day": datetime.date(1, 1, 1),
        "at": datetime.datetime(2026, 1, 1, 1, 2, 3, 456789, datetime.UTC),
        "local": datetime.datetime(1700, 1, 1),
        "clock": datetime.time(23, 59, 59, 999999),
        "parts": ['x"y', None, "\\"],
    }
    writer.commit(1, {"id": 1, **first}, {"id": 2, "text": ""}, {"id": 3, "text": "NULL"})
    stored = database.run(
        "SELECT text, blob, flag, single, double::text, price, day, at, local, clock, parts FROM events ORDER BY id"
    )
    assert stored[0] == (*list(first.values())[:3], stored[0][3], "NaN", *list(first.values())[5:])
    assert stored[0][3] == pytest.approx(0.1)
    assert [row[0] for row in stored[1:]] == ["", "NULL"]
    rows = database.run("SELECT * FROM events ORDER BY id")
    writer.begin(2, {"id": 1, "text": "other"}, {"id": 2, "gone": True}, {"id": 4})
    opened(writer.table, 2, 2)
    assert str(database.run("SELECT * FROM events ORDER BY id")) == str(rows)


@pytest.mark.usefixtures("batches")
def test_types_of_a_table_made_by_hand_decide(database: PostgresDatabase) -> None:
    """A key that the column rounds is one key, and a text that is too long is refused, not cut."""
    database.run("CREATE TYPE mood AS ENUM ('sad', 'glad')")
    database.run(
        "CREATE TABLE events (id numeric(10,1), code char(4), at timestamp(0), mood mood, name varchar(3), email text UNIQUE, "
        "twice numeric GENERATED ALWAYS AS (id * 2) STORED, made text DEFAULT 'by default', PRIMARY KEY (id, code, at))"
    )
    kinds = {"id": pa.decimal128(10, 3), "code": pa.string(), "at": pa.timestamp("us"), "mood": pa.string()}
    fields = Fields.of({**kinds, "name": pa.string(), "email": pa.string(), "gone": pa.bool_()})
    writer = Writer(database.table(stamp=None), fields, ["id", "code", "at"], columns=fields.names[:-1])
    moment = datetime.datetime(2026, 1, 1, 0, 0, 0, 600_000)
    key = {"id": decimal.Decimal("1.250"), "code": "ab", "at": moment}
    writer.commit(1, {**key, "mood": "sad", "name": "abc", "email": "a"})
    assert database.run("SELECT id, mood::text, name, twice, made FROM events") == [
        (decimal.Decimal("1.3"), "sad", "abc", decimal.Decimal("2.6"), "by default")
    ]
    writer.commit(2, {**key, "gone": True}, {**key, "code": "cd", "mood": "glad", "email": "a"})
    assert database.run("SELECT code, mood::text FROM events") == [("cd  ", "glad")]
    writer.begin(3, {**key, "code": "cd", "mood": "sad"})
    opened(writer.table, 3, 2)
    assert database.run("SELECT code, mood::text, email FROM events") == [("cd  ", "glad", "a")]
    for wrong in ({"name": "abcd"}, {"mood": "angry"}, {"code": "abcde"}):
        with pytest.raises(BadRecordError):
            writer.begin(3, {**key, **wrong}, attempt=3)
    assert database.run("SELECT code, mood::text, email FROM events") == [("cd  ", "glad", "a")]


@pytest.mark.each_value_once
@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("kind", ["char(4)", "varchar(3)", "numeric(10,1)", "text COLLATE letters"])
def test_keys_that_only_the_table_holds_for_equal_are_one_row(database: PostgresDatabase, kind: str) -> None:
    """One is deleted and the other one written, in one batch, which is then taken back."""
    database.run("CREATE COLLATION letters (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    database.run(f"CREATE TABLE events (id {kind} PRIMARY KEY, n bigint)")
    first: Any
    first, second = {
        "char(4)": ("ab", "ab "),
        "varchar(3)": ("abc", "abc "),
        "numeric(10,1)": (decimal.Decimal("1.24"), decimal.Decimal("1.21")),
        "text COLLATE letters": ("ab", "AB"),
    }[kind]
    of_key = pa.string() if isinstance(first, str) else pa.decimal128(10, 2)
    fields = Fields.of({"id": of_key, "n": pa.int64(), "gone": pa.bool_()})
    writer = Writer(database.table(stamp=None), fields, ["id"], columns=["id", "n"])
    writer.commit(1, {"id": first, "n": 1})
    writer.begin(2, {"id": first, "gone": True}, {"id": second, "n": 2})
    assert database.run("SELECT n FROM events") == [(2,)]
    opened(writer.table, 2, 2)
    assert database.run("SELECT n FROM events") == [(1,)]


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("mail text UNIQUE", [(1, "x"), (2, "y")]),
        ("mail text, EXCLUDE USING btree (mail WITH =)", [(1, "x"), (2, "y")]),
        ("mail text, at bigserial", [(1, "x", 3), (2, "y", 2)]),
        ("mail text, at bigint GENERATED BY DEFAULT AS IDENTITY", [(1, "x", 3), (2, "y", 2)]),
    ],
)
def test_rows_are_written_in_the_order_of_their_arrival_where_it_has_an_effect(
    database: PostgresDatabase, more: str, found: list[Any]
) -> None:
    """The first row gives a unique value free, which the second one takes; or rows are numbered."""
    database.run(f"CREATE TABLE events (id bigint PRIMARY KEY, {more})")
    fields = Fields.of({"id": pa.int64(), "mail": pa.string(), "gone": pa.bool_()})
    writer = Writer(database.table(stamp=None), fields, ["id"], columns=["id", "mail"])
    if len(found[0]) == 2:
        writer.commit(1, {"id": 2, "mail": "x"})
    else:
        writer.commit(1, {"id": 9, "mail": "z"})
    writer.commit(2, {"id": 2, "mail": "y"}, {"id": 1, "mail": "x"})
    assert database.run("SELECT * FROM events WHERE id < 9 ORDER BY id") == found


@pytest.mark.usefixtures("batches")
def test_a_column_that_was_dropped_stops_the_topology_with_its_name(database: PostgresDatabase) -> None:
    fields = Fields.of({"id": pa.int64(), "name": pa.string(), "gone": pa.bool_()})
    writer = Writer(database.table(), fields, ["id"], columns=["id", "name"])
    database.run("ALTER TABLE events DROP COLUMN name")
    with pytest.raises(ConfigError, match="name"):
        writer.begin(1, {"id": 1, "name": "a"})


@pytest.mark.usefixtures("batches")
def test_an_older_change_is_left_out_also_after_a_replacement(database: PostgresDatabase) -> None:
    fields = Fields.of({"id": pa.int64(), "lsn": pa.int64(), "name": pa.string(), "gone": pa.bool_()})
    table = database.table(stamp=None)
    writer = Writer(table, fields, ["id"], columns=["id", "lsn", "name"], sequence_by="lsn")
    writer.commit(1, {"id": 1, "lsn": 5, "name": "a"}, {"id": 2, "lsn": 5, "gone": True}, {"id": 3, "lsn": 5})
    older = [{"id": 1, "lsn": 4, "gone": True}, {"id": 2, "lsn": 4, "name": "no"}, {"id": 3, "lsn": 6, "name": "yes"}]
    writer.commit(2, *older)
    assert database.rows(columns="id, lsn, name") == [(1, 5, "a"), (3, 6, "yes")]
    writer.commit(3, {"id": 3, "lsn": 7, "gone": True}, {"id": 3, "lsn": 8, "name": "again"}, {"id": 2, "lsn": 6})
    assert database.rows(columns="id, lsn, name") == [(1, 5, "a"), (2, 6, None), (3, 8, "again")]


def test_rows_from_before_are_found_by_the_only_index_of_their_table(database: PostgresDatabase) -> None:
    """Every transaction deletes all of them, and their space stays until the next vacuum."""
    Writer(database.table(), Fields.of({"id": pa.int64(), "gone": pa.bool_()}), ["id"], columns=["id"])
    query = "SELECT indexdef FROM pg_indexes WHERE tablename = 'events_before' AND schemaname = current_schema()"
    ((found,),) = database.run(query)
    assert found.endswith("(_ratchet_txid, id)")


@pytest.mark.parametrize("key", [["id"], ["id", "part"]], ids=["one column", "two columns"])
def test_rows_from_before_are_not_compared_with_each_key_that_is_looked_up(
    database: PostgresDatabase, key: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL has no statistics of the table, and believes that the transaction has few rows."""
    writer = Writer(
        database.table(), Fields.of(dict.fromkeys(["id", "part", "n"], pa.int64()) | {"gone": pa.bool_()}), key
    )
    rows = [{"id": number, "part": number % 7, "n": 1} for number in range(400)]
    writer.commit(1, *rows)
    plans: list[str] = []
    run = PostgresTable._run

    def explained(table: PostgresTable, connection: Any, query: str, parameters: Any = ()) -> Any:
        if query.startswith("SELECT") and "events_before" in query:
            found = run(table, connection, f"EXPLAIN {query}", parameters).fetchall()
            plans.append(" ".join(line.strip() for (line,) in found))
        return run(table, connection, query, parameters)

    monkeypatch.setattr(PostgresTable, "_run", explained)
    asked = [tuple(row[each] for each in key) for row in rows[::2]]
    with inspectable(writer.table, purpose="be read").held_rows() as held:  # type: ignore[attr-defined]
        assert held.values(asked, 0) == dict.fromkeys(asked)
    assert len(plans) == 1 and " OR " not in plans[0], plans


def test_a_table_of_rows_from_before_whose_key_lacks_the_txid_is_kept(database: PostgresDatabase) -> None:
    fields = Fields.of({"id": pa.int64(), "n": pa.int64(), "gone": pa.bool_()})
    writer = Writer(database.table(), fields, ["id"], columns=["id", "n"])
    writer.commit(1, {"id": 1, "n": 1}, {"id": 2, "n": 1})
    database.run("ALTER TABLE events_before DROP CONSTRAINT events_before_pkey, ADD PRIMARY KEY (id)")
    writer.table.prepare("topology")
    header = writer.begin(2, {"id": 1, "n": 2}, {"id": 2, "gone": True}, {"id": 3, "n": 2})
    assert writer.table.roll_back(header) == 3
    assert database.rows(columns="id, n") == [(1, 1), (2, 1)]


def test_a_key_of_as_many_columns_as_an_index_may_have_is_taken(database: PostgresDatabase) -> None:
    key = [f"k{number}" for number in range(32)]
    fields = Fields.of({**dict.fromkeys([*key, "n"], pa.int64()), "gone": pa.bool_()})
    writer = Writer(database.table(), fields, key, columns=[*key, "n"])
    here = dict.fromkeys(key, 1)
    writer.commit(1, {**here, "n": 1})
    header = writer.begin(2, {**here, "n": 2}, {**here, "k31": 2, "n": 2})
    assert database.rows(columns="k31, n") == [(1, 2), (2, 2)]
    assert writer.table.roll_back(header) == 2
    assert database.rows(columns="k31, n") == [(1, 1)]


def test_a_small_upsert_takes_two_exchanges_with_the_server(database: PostgresDatabase) -> None:
    """BEGIN, the settings, queries of header and columns; the rows, the new header and COMMIT."""
    fields = Fields.of({"id": pa.int64(), "n": pa.int64(), "gone": pa.bool_()})
    writer = Writer(database.table(), fields, ["id"], columns=["id", "n"])
    writer.commit(1, {"id": 1, "n": 1})
    with counted_exchanges(database.dsn) as count:
        writer.write_in_one_step(2, {"id": 1, "n": 2}, {"id": 2, "n": 1})
        assert count() == 2 + 1  # the header for the fence of the test
    assert database.rows(columns="id, n") == [(1, 2), (2, 1)]


def test_a_column_that_is_added_while_a_writer_waits_for_the_header_is_put_back(database: PostgresDatabase) -> None:
    """As by a driver that prepares the table again."""
    fields = Fields.of({"id": pa.int64(), "n": pa.int64(), "gone": pa.bool_()})
    writer = Writer(database.table(), fields, ["id"], columns=["id", "n"])
    writer.commit(1, {"id": 1, "n": 1})
    task = threading.Thread(target=lambda: writer.write_in_one_step(2, {"id": 1, "n": 2}))
    with psycopg.connect(database.dsn, options=f"-c search_path={database.schema}") as rival:
        rival.execute("SELECT * FROM _ratchet_headers FOR UPDATE")
        task.start()
        holds_up = f"SELECT 1 FROM pg_stat_activity WHERE {rival.info.backend_pid} = ANY(pg_blocking_pids(pid))"
        wait_for(lambda: database.run(holds_up), 60)
        rival.execute("ALTER TABLE events ADD COLUMN more text DEFAULT 'kept'")
        rival.execute("ALTER TABLE events_before ADD COLUMN more text")
    task.join()
    assert database.rows(columns="id, n, more") == [(1, 2, "kept")]
    assert writer.table.roll_back(writer.table.read_header()) == 1
    assert database.rows(columns="id, n, more") == [(1, 1, "kept")]
