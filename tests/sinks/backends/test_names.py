"""Names that a database folds, truncates or reserves are quoted, or refused at the start (C33)."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import BaseBatchBolt, Fields, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, TopologyError
from framework.testing.conformance.backend_test_helpers import finish, open_attempt
from framework.transactions import MemoryStore
from integration import PostgresServer
from sinks import (
    AppendCommitter,
    Count,
    MapBackend,
    Mean,
    MySqlBackend,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.mysql import client
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C33")

KEY, VALUE = Fields(word=str), Fields(n=int)
Make = Callable[..., MapBackend]


@pytest.fixture(
    params=["sqlite", *(pytest.param(each, marks=pytest.mark.integration) for each in ("postgres", "mysql"))]
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes backends in an empty database."""
    if request.param == "sqlite":
        yield lambda table, key=KEY, value=VALUE: SqliteBackend(tmp_path / "rows.db", table, key, value)
        return
    if request.param == "mysql":
        dsn = request.getfixturevalue("mariadb").dsn
        database = f"s_{uuid.uuid4().hex[:10]}"
        with client(dsn) as admin:
            admin.execute(f"CREATE DATABASE {database}")
            yield lambda table, key=KEY, value=VALUE: MySqlBackend(
                f"{dsn.rpartition('/')[0]}/{database}", table, key, value
            )
            admin.execute(f"DROP DATABASE {database}")
        return
    import psycopg

    server: PostgresServer = request.getfixturevalue("postgres")
    schema = f"s_{uuid.uuid4().hex[:10]}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {schema}")
        yield lambda table, key=KEY, value=VALUE: PostgresBackend(server.dsn, table, key, value, schema=schema)
        admin.execute(f"DROP SCHEMA {schema} CASCADE")


def applied(backend: MapBackend, *amounts: int, rows: int = 1) -> dict[str, Any]:
    """Run a transaction per amount, each with ``rows`` keys. Returns what the state holds then."""
    key, value = backend.fields
    state = OpaqueMapState(backend)
    state.prepare("topology")
    for txid, amount in enumerate(amounts, 1):
        words = [f"w{each}" for each in range(rows)]
        columns = {next(iter(key)): words} | {name: [amount] * rows for name in value}
        granted = open_attempt(state, txid, 1)
        state.apply(granted, pa.table(columns), {name: Sum(name) for name in value}, want_values=False)
        finish(state)
    return {each[0]: row.value for each, row in backend.scan()}


@pytest.mark.each_value_once
@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("table", ["excluded", "Excluded", "held", "select", "temp", "main", "x" * 63])
def test_a_table_of_any_name_counts_right(make: Make, table: str, rows: int) -> None:
    assert applied(make(table), 1, 2, 3, rows=rows) == {f"w{each}": (6,) for each in range(rows)}


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "column",
    [
        "excluded",
        "held",
        "order",
        "EXCLUDED",
        "rowid",
        "x" * 57,
        "id",
        "_id",
        "_held",
        "txid",
        "attempt",
        "prev_n",
        "__deleted",
    ],
)
def test_a_column_of_any_name_counts_right_and_is_found_again(make: Make, column: str) -> None:
    value = Fields.of({column: int})
    assert applied(make("rows", KEY, value), 1, 2) == {"w0": (3,)}
    make("rows", KEY, value).prepare("topology")


def test_tables_that_are_alike_for_55_letters_are_staged_apart(make: Make) -> None:
    one, other = "t" * 62 + "a", "t" * 62 + "b"
    wide = Fields(n=int, more=int)
    assert applied(make(one), 1, rows=150)["w7"] == (1,)
    assert applied(make(other, KEY, wide), 2, rows=150)["w7"] == (2, 2)


def test_names_that_cannot_be_kept_are_refused_when_they_are_declared(postgres: PostgresServer, tmp_path: Path) -> None:
    def sqlite(table: str, *value: str, key: str = "word") -> None:
        SqliteBackend(tmp_path / "rows.db", table, Fields.of({key: str}), Fields.of(dict.fromkeys(value, int)))

    def database(table: str, *value: str, key: str = "word") -> None:
        PostgresBackend(postgres.dsn, table, Fields.of({key: str}), Fields.of(dict.fromkeys(value, int)))

    with pytest.raises(TopologyError, match=r"table 'SQLite_rows'.*SQLite reserves"):
        sqlite("SQLite_rows", "n")
    with pytest.raises(TopologyError, match=r"'n' and 'N'.*SQLite"):
        sqlite("rows", "n", "N")
    with pytest.raises(TopologyError, match=r"'Word' and 'word'.*SQLite"):
        sqlite("rows", "word", key="Word")
    with pytest.raises(TopologyError, match=r"'x{58}'.*63 bytes.*'_prev_.*at most 57"):
        database("rows", "x" * 58)
    with pytest.raises(TopologyError, match=r"'xmin'.*PostgreSQL reserves"):
        database("rows", "xmin")
    with pytest.raises(TopologyError, match=r"'ctid'.*PostgreSQL reserves"):
        database("rows", "n", key="ctid")
    for made in (sqlite, database):
        with pytest.raises(
            TopologyError, match=r"column '_txid' of table 'rows'.*keeps a column '_txid'.*rename the field"
        ):
            made("rows", "n", key="_txid")
        with pytest.raises(TopologyError, match=r"column '_prev_n'.*keeps a column '_prev_n'"):
            made("rows", "n", "_prev_n")
        with pytest.raises(TopologyError, match=r"column '_expected_txid'.*rename the field"):
            made("rows", "_expected_txid")
        with pytest.raises(TopologyError, match=r"'1st' is not usable in SQL"):
            made("rows", "1st")
    with pytest.raises(TopologyError, match=r"column '_TXID'.*keeps a column '_txid'"):
        sqlite("rows", "_TXID")
    database("rows", "_TXID")
    sqlite("rows", "x" * 63, "xmin")
    database("rows", "n", "N", key="word")
    database("rows", "n", key="x" * 63)


def test_names_that_a_mean_adds_are_checked_too(postgres: PostgresServer) -> None:
    source = OpaqueMemoryTransactionalSpout({0: []}, Fields(word=str, n=int), 1)
    builder = TransactionalTopologyBuilder("t", "spout", source)
    state = OpaqueMapState(PostgresBackend(postgres.dsn, "rows"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"m" * 53: Mean("n")})).global_grouping("spout")
    with pytest.raises(TopologyError, match=r"'m{53}_count'.*at most 57"):
        builder.build()


def test_two_spellings_of_a_table_are_one_in_sqlite_and_the_second_is_refused(tmp_path: Path) -> None:
    applied(SqliteBackend(tmp_path / "rows.db", "Words", KEY, VALUE), 1)
    with pytest.raises(ConfigError, match=r"'words'.*is the table 'Words'"):
        SqliteBackend(tmp_path / "rows.db", "words", KEY, VALUE).prepare("topology")


def test_a_file_has_one_name_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    paths = [tmp_path / "real" / "x.db", tmp_path / "link" / "x.db", tmp_path / "link" / ".." / "real" / "x.db"]
    assert len({SqliteBackend(path, "rows", KEY, VALUE).location for path in paths}) == 1


class TwoStates(BaseBatchBolt):
    def __init__(self, path: Path) -> None:
        self.one = OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE))
        self.other = OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE))

    def execute(self, tup: Any) -> None: ...

    def finish_batch(self) -> None: ...


def test_two_states_of_a_bolt_at_one_place_are_refused(tmp_path: Path) -> None:
    source = OpaqueMemoryTransactionalSpout({0: []}, Fields(word=str, n=int), 1)
    builder = TransactionalTopologyBuilder("t", "spout", source)
    builder.set_committer_bolt("both", TwoStates(tmp_path / "x.db")).global_grouping("spout")
    with pytest.raises(TopologyError, match=r"bolt 'both' has two states at table 'rows'"):
        builder.build()


def test_two_states_at_one_place_by_different_addresses_are_refused(tmp_path: Path) -> None:
    """Two addresses may lead to one place, by a link or by a host's name and number;
    only the header shows it.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    builder = TransactionalTopologyBuilder("t", "spout", OpaqueMemoryTransactionalSpout({0: []}, KEY, 1))
    for name in ("real", "link"):
        committer = AppendCommitter(ParquetTable(tmp_path / name / "rows"))
        builder.set_bolt(name, committer).shuffle_grouping("spout")
    with pytest.raises(
        ConfigError, match="link/rows has the header that .* given to table .*real/rows: they are one place"
    ):
        submit(builder.build(), store=MemoryStore(), executor="local").wait_until_caught_up(PATIENCE_S)


def test_a_table_made_anew_with_other_columns_is_staged_anew(tmp_path: Path) -> None:
    """This happens in one process, whose connection keeps its temporary tables."""
    path = tmp_path / "rows.db"
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    applied(backend, 1, rows=150)
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE rows")
    connection.execute("DELETE FROM _ratchet_headers")
    connection.commit()
    connection.close()
    assert applied(SqliteBackend(path, "rows", KEY, Fields(n=int, more=int)), 2, rows=150)["w7"] == (2, 2)


def test_count_is_a_name_like_any_other(make: Make) -> None:
    state = OpaqueMapState(make("count", Fields(group=str), Fields(count=int)))
    state.prepare("topology")
    deltas = pa.table({"group": ["a"], "count": [1]})
    state.apply(open_attempt(state, 1, 1), deltas, {"count": Count()}, want_values=False)
    assert state.get("a") == 1
