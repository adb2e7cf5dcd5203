"""The SQLite backend: columns that any client reads,
and clear messages about damaged or foreign files.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt
from framework.errors import BadRecordError, ConfigError, CorruptStateError, RetryableError, TopologyError
from sinks import Count, Max, OpaqueMapState, SqliteBackend, Sum
from sinks.sql import sqlite_table_base as sqlite_module
from sinks.sql.backend import SqlBackend

KEY, VALUE = Fields(word=str), Fields(n=int)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "rows.db"


def put(state: OpaqueMapState, txid: int, **values: object) -> None:
    attempt = TransactionAttempt(txid, 1)
    state.begin_commit(attempt)
    state.multi_put(list(values), list(values.values()))
    state.commit(attempt)


def test_rows_are_real_columns_with_stamp_and_previous_value(path: Path) -> None:
    state = OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE))
    put(state, 1, dog=2)
    put(state, 2, dog=5)
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM rows WHERE word = 'dog'").fetchone())
    assert row == {
        "word": "dog",
        "n": 5,
        "_prev_n": 2,
        "_txid": 2,
        "_epoch": 0,
        "_attempt": 1,
        "_writer": "standalone",
        "_deleted": 0,
        "_prev_exists": 1,
    }


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_new_file_is_for_its_user_alone(path: Path, umask: int) -> None:
    """A user who may read a file of SQLite may lock it, and so hold up every commit."""
    before = os.umask(umask)
    try:
        put(OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE)), 1, dog=2)
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == dict.fromkeys(("rows.db", "rows.db-wal", "rows.db-shm"), 0o600)


def test_a_file_that_is_there_keeps_its_mode(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    path.chmod(0o640)
    put(OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE)), 1, dog=2)
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o640}


def test_other_programs_read_the_live_rows_from_a_view(path: Path) -> None:
    state = OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE))
    put(state, 1, dog=2, cat=3)
    state.begin_commit(TransactionAttempt(2, 1))
    state.delete(["cat"])
    state.commit(TransactionAttempt(2, 1))
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        assert [dict(row) for row in connection.execute("SELECT * FROM rows_live")] == [{"word": "dog", "n": 2}]
        connection.execute("DROP VIEW rows_live")
    state.prepare("standalone")  # the next start creates it again
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT word FROM rows_live").fetchall() == [("dog",)]


def test_what_is_due_is_found_by_an_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its cost is in proportion to what is due, and not to the rows of the table."""
    state = OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE))
    state.backend.order_by("n")
    state.prepare("standalone")
    put(state, 1, **{f"word{number}": number for number in range(20)})
    asked: list[tuple[str, Sequence[Any]]] = []
    streamed = SqlBackend._streamed

    def noted(self: SqlBackend, connection: Any, query: str, parameters: Sequence[Any]) -> Any:
        asked.append((query, parameters))
        return streamed(self, connection, query, parameters)

    monkeypatch.setattr(SqlBackend, "_streamed", noted)
    assert sorted(row.value for _, row in state.backend.due("n", 4, 6, txid=None) if row.value) == [(5,), (6,)]
    ((query, parameters),) = asked
    with sqlite3.connect(path) as connection:
        plan = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", parameters)]
    assert len(plan) == 1 and plan[0].startswith("SEARCH rows USING INDEX due_")


def test_a_state_may_have_the_name_of_another_ones_view(path: Path) -> None:
    other = OpaqueMapState(SqliteBackend(path, "rows_live", KEY, VALUE))
    state = OpaqueMapState(SqliteBackend(path, "rows", KEY, VALUE))
    put(other, 1, dog=1)
    put(state, 1, dog=2)
    assert (other.get("dog"), state.get("dog")) == (1, 2)


def test_every_supported_type_comes_back_as_it_went_in(path: Path) -> None:
    key = Fields(text=str, number=int)
    value = Fields(i=int, f=float, s=str, y=bytes, b=bool)
    state = OpaqueMapState(SqliteBackend(path, "rows", key, value))
    attempt = TransactionAttempt(1, 1)
    rows = {
        ("a", 1): (2**63 - 1, 1.5e300, "ß\0x", b"\0\xff", True),
        ("", -(2**63)): (-(2**63), -0.0, "", b"", False),
        ("null", 0): (None, None, None, None, None),
    }
    state.begin_commit(attempt)
    state.multi_put(list(rows), list(rows.values()))
    state.commit(attempt)
    assert [state.get(each) for each in rows] == list(rows.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (Fields("n"), "'n' needs a declared type"),
        (Fields(n=pa.uint64()), "no unsigned 64-bit"),
        (Fields(n=pa.list_(pa.int64())), "cannot hold list"),
        (Fields.of({"n-1": pa.int64()}), "'n-1' is not usable in SQL"),
        (Fields(word=str), "both a key and a value"),
    ],
)
def test_unsupported_columns_are_refused_at_once(path: Path, fields: Fields, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        SqliteBackend(path, "rows", KEY, fields)


def test_errors_that_do_not_pass_by_themselves_are_not_retried(path: Path) -> None:
    """C30: only errors that are known to pass are retried."""
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    header = backend.prepare("topology")
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE rows")
    with pytest.raises(ConfigError, match="no such table.*does not pass by itself"):
        backend.multi_get([("dog",)])
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE _ratchet_headers")
    with pytest.raises(ConfigError, match="no such table.*does not pass by itself"):
        backend.raise_header(header, header.finished(1))


@pytest.mark.parametrize("table", ["drop table x", 'x"', "", "_headers", "1x"])
def test_table_names_are_allow_listed(path: Path, table: str) -> None:
    with pytest.raises(TopologyError, match="not usable in SQL"):
        SqliteBackend(path, table, KEY, VALUE)


def test_a_table_with_other_columns_is_refused_with_the_ddl(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (word TEXT, n TEXT)")
    with pytest.raises(ConfigError, match=r"missing: .*n INTEGER.*CREATE TABLE \"rows\" .*PRIMARY KEY"):
        SqliteBackend(path, "rows", KEY, VALUE).prepare("topology")


@pytest.mark.rule("C33")
@pytest.mark.parametrize(
    ("made", "otherwise", "message"),
    [
        (" STRICT, WITHOUT ROWID", "", "is not STRICT"),
        (', PRIMARY KEY ("word")) STRICT, WITHOUT ROWID', ") STRICT", "has another primary key than word"),
        ('"word" TEXT', '"word" TEXT COLLATE NOCASE', "has a collation"),
        ('"word" TEXT', '"word" TEXT COLLATE "rtrim"', "has a collation"),
        ('"word" TEXT', '"word" TEXT COLLATE BINARY', None),
        (" STRICT, WITHOUT ROWID", " STRICT", None),
    ],
)
def test_a_table_made_by_hand_that_would_mix_up_rows_or_numbers_is_refused(
    path: Path, made: str, otherwise: str, message: str | None
) -> None:
    """A table that is not STRICT turns large sums into floats; without the key,
    or with a collation, it mixes up rows.
    """
    backend = SqliteBackend(path, "counts", Fields(word=str), Fields(n=int))
    ddl = backend.shape.ddl()
    assert made in ddl
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute(ddl.replace(made, otherwise))
    if message is None:
        backend.prepare("topology")
        return
    with pytest.raises(ConfigError, match=f"{message}.*create it with: CREATE TABLE"):
        backend.prepare("topology")


def test_a_table_that_vanished_is_not_started_afresh(path: Path) -> None:
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    put(OpaqueMapState(backend), 1, dog=1)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE rows")
    with pytest.raises(CorruptStateError, match="is gone, but its header says .* up to 1"):
        backend.prepare("standalone")


def test_a_header_that_vanished_is_not_started_afresh(path: Path) -> None:
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    put(OpaqueMapState(backend), 1, dog=1)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM _ratchet_headers")
    with pytest.raises(ConfigError, match="has rows and no header"):
        backend.prepare("standalone")


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database, " * 1000)
    with pytest.raises(CorruptStateError, match=r"rows\.db"):
        SqliteBackend(path, "rows", KEY, VALUE).prepare("topology")


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file"):
        SqliteBackend(tmp_path / "file" / "rows.db", "rows", KEY, VALUE).prepare("topology")


@pytest.mark.fault(22)
def test_a_locked_database_is_retried_not_fatal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module, "BUSY_TIMEOUT_MS", 50)
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    header = backend.prepare("topology")
    rival = sqlite3.connect(path, isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(RetryableError, match="locked"):
            backend.raise_header(header, header.finished(1))
    finally:
        rival.execute("ROLLBACK")
        rival.close()
    backend.raise_header(header, header.finished(1))
    assert backend.read_header().done == 1


def test_an_integer_sum_beyond_64_bits_is_an_error_not_a_float(path: Path) -> None:
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    state = OpaqueMapState(backend)
    state.prepare("standalone")
    deltas = pa.table({"word": ["dog"], "n": [2**62]})
    aggregates = {"n": Sum("n")}
    state.apply(TransactionAttempt(1, 1), deltas, aggregates, want_values=False)
    with pytest.raises(BadRecordError, match="64 bits"):
        state.apply(TransactionAttempt(2, 1), deltas, aggregates, want_values=False)
    assert state.get("dog") == 2**62


def test_nan_is_refused_because_it_would_be_stored_as_null(path: Path) -> None:
    backend = SqliteBackend(path, "rows", KEY, Fields(f=float))
    state = OpaqueMapState(backend)
    state.prepare("standalone")
    deltas = pa.table({"word": ["dog"], "f": [float("nan")]})
    with pytest.raises(BadRecordError, match="'f' is NaN"):
        state.apply(TransactionAttempt(1, 1), deltas, {"f": Max("f")}, want_values=False)
    with pytest.raises(BadRecordError, match="'f' is NaN"):
        put(state, 1, dog=float("nan"))


def test_an_old_sqlite_is_refused_in_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module.sqlite3, "sqlite_version_info", (3, 36, 0))
    with pytest.raises(ConfigError, match="too old"):
        SqliteBackend(path, "rows", KEY, VALUE)


def test_aggregates_of_a_batch_are_one_statement(path: Path) -> None:
    backend = SqliteBackend(path, "rows", KEY, VALUE)
    state = OpaqueMapState(backend)
    state.prepare("standalone")
    statements: list[str] = []
    connection = sqlite_module.SqliteFile.at(str(path)).connected()
    connection.set_trace_callback(statements.append)
    deltas = pa.table({"word": [f"w{number}" for number in range(1000)], "n": [1] * 1000})
    state.apply(TransactionAttempt(1, 1), deltas, {"n": Count()}, want_values=False)
    connection.set_trace_callback(None)
    assert sum('INSERT INTO "rows"' in statement for statement in statements) == 1


@pytest.mark.parametrize("rows", [1, 150])
def test_a_sum_that_is_nan_is_refused_because_it_would_be_stored_as_null(path: Path, rows: int) -> None:
    state = OpaqueMapState(SqliteBackend(path, "rows", KEY, Fields(f=float)))
    state.prepare("standalone")
    words = [f"w{each}" for each in range(rows)]
    for txid, amount in ((1, "inf"), (2, "1")):
        deltas = pa.table({"word": words, "f": [float(amount)] * rows})
        state.apply(TransactionAttempt(txid, 1), deltas, {"f": Sum("f")}, want_values=False)
    deltas = pa.table({"word": words, "f": [float("-inf")] * rows})
    with pytest.raises(BadRecordError, match="cannot be stored"):
        state.apply(TransactionAttempt(3, 1), deltas, {"f": Sum("f")}, want_values=False)
    assert state.get("w0") == float("inf")


def test_a_check_leaves_a_file_as_it_is(path: Path) -> None:
    """Also its journal mode, which others of its readers may need."""
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    state = OpaqueMapState(SqliteBackend(path, "words", KEY, VALUE))
    state.check("words")
    state.close()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
