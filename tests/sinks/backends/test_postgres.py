"""The PostgreSQL backend: rights, sql_txns that hang, lost answers,
columns that any client reads.
"""

from __future__ import annotations

import contextlib
import datetime
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    RatchetError,
    RetryableError,
    StaleWriterError,
)
from framework.topology import CommitFence, Header, OpenCommit
from integration import PostgresServer
from sinks import Count, Max, Min, OpaqueMapState, PostgresBackend, Sum
from sinks.read_as_of import at_one_moment, items_as_of
from sinks.sql import postgres_table_base as postgres_module
from sinks.sql.postgres_adaptive_batch_size import LimitReached
from tests.kit.postgres_exchanges import counted_exchanges
from tests.kit.postgres_roles import dsn_of, end_sessions, login
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
KEY, VALUE = Fields(word=str), Fields(n=int)


@pytest.fixture
def table() -> str:
    return f"t_{uuid.uuid4().hex[:10]}"


@pytest.fixture
def admin(postgres: PostgresServer) -> Iterator[Any]:
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def user(admin: Any, postgres: PostgresServer) -> Iterator[tuple[str, str]]:
    """A user that has a schema of its own and no other rights: (name, dsn)."""
    name = f"u_{uuid.uuid4().hex[:10]}"
    admin.execute(f"CREATE ROLE {name} {login(postgres.dsn)}")
    admin.execute(f"CREATE SCHEMA {name}")
    admin.execute(f"GRANT USAGE ON SCHEMA {name} TO {name}")
    yield name, dsn_of(name, postgres.dsn)
    end_sessions(admin, name)  # they own its temporary tables
    admin.execute(f"DROP SCHEMA {name} CASCADE")
    admin.execute(f"REVOKE ALL ON DATABASE ratchet FROM {name}")
    admin.execute(f"DROP ROLE {name}")


def put(state: OpaqueMapState, txid: int, **values: object) -> None:
    attempt = TransactionAttempt(txid, 1)
    state.begin_commit(attempt)
    state.multi_put(list(values), list(values.values()))
    state.commit(attempt)


def test_rows_are_real_columns_that_any_client_reads(postgres: PostgresServer, admin: Any, table: str) -> None:
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, VALUE))
    put(state, 1, dog=2)
    put(state, 2, dog=5)
    row = admin.execute(f"SELECT word, n, _prev_n, _txid, _deleted FROM {table}").fetchone()
    assert row == ("dog", 5, 2, 2, False)


def apply(state: OpaqueMapState, txid: int, words: Sequence[str], *, want_values: bool = False) -> pa.Table | None:
    """Count words, in a commit that is one step of the store."""
    fence = CommitFence("topology", 1, "digest", "count:0", opens_from=state.backend.read_header())
    deltas = pa.table({"word": words, "n": [1] * len(words)})
    return state.apply(TransactionAttempt(txid, 1, fence), deltas, {"n": Count()}, want_values=want_values)


@pytest.mark.parametrize("number", [1, 200])
def test_a_transaction_takes_three_exchanges_with_the_server(postgres: PostgresServer, table: str, number: int) -> None:
    """BEGIN, the settings and the query of the header; the new header and the rows; COMMIT."""
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, VALUE))
    state.prepare("topology")
    words = [f"word-{each}" for each in range(number)]
    apply(state, 1, words)
    before = state.backend.read_header()
    with counted_exchanges(postgres.dsn) as count:
        apply(state, 2, words)
        assert count() == 3 + 1  # the header for the fence of the test
    opened = before.opened(1, OpenCommit(2, 1, "digest"))
    assert state.backend.read_header() == opened.done_as_open()
    values = apply(state, 3, words[:1], want_values=True)
    assert values is not None and values.to_pylist() == [{"word": "word-0", "n": 3}]


def test_a_header_is_raised_in_two_exchanges_with_the_server(postgres: PostgresServer, table: str) -> None:
    """BEGIN, the settings and the query of the header; the new header and COMMIT."""
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    header = backend.prepare("topology")
    opened = header.opened(1, OpenCommit(1, 1, "digest"))
    with counted_exchanges(postgres.dsn) as count:
        backend.raise_header(header, opened)
        assert count() == 2
    assert backend.read_header() == opened
    with pytest.raises(StaleWriterError):
        backend.raise_header(header, opened)


def test_other_programs_read_the_live_rows_from_a_view(postgres: PostgresServer, admin: Any, table: str) -> None:
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, VALUE))
    put(state, 1, dog=2, cat=3)
    state.begin_commit(TransactionAttempt(2, 1))
    state.delete(["cat"])
    state.commit(TransactionAttempt(2, 1))
    cursor = admin.execute(f"SELECT * FROM {table}_live")
    assert [each.name for each in cursor.description] == ["word", "n"]
    assert cursor.fetchall() == [("dog", 2)]
    admin.execute(f"DROP VIEW {table}_live")
    state.prepare("standalone")  # the next start creates it again
    assert admin.execute(f"SELECT word FROM {table}_live").fetchall() == [("dog",)]


def test_a_table_whose_name_leaves_no_room_for_the_view_has_none(postgres: PostgresServer, admin: Any) -> None:
    name = f"t_{uuid.uuid4().hex}".ljust(59, "x")
    state = OpaqueMapState(PostgresBackend(postgres.dsn, name, KEY, VALUE))
    put(state, 1, dog=2)
    assert state.get("dog") == 2
    admin.execute(f"DROP TABLE {name}")  # no view depends on it


def test_a_table_with_flags_of_an_earlier_version_is_changed_by_the_statement_of_the_message(
    postgres: PostgresServer, admin: Any, table: str
) -> None:
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    admin.execute(backend.shape.ddl().replace("boolean", "bigint"))
    with pytest.raises(ConfigError, match="an earlier version created it; change it: ALTER TABLE") as refused:
        backend.prepare("topology")
    admin.execute(str(refused.value).partition("change it: ")[2])
    backend.prepare("topology")


def test_another_table_of_that_name_is_refused_with_the_statements_that_mend_it(
    postgres: PostgresServer, admin: Any, table: str
) -> None:
    admin.execute(f"CREATE TABLE {table} (word text PRIMARY KEY, n integer)")
    with pytest.raises(ConfigError, match=r"missing: n bigint, _prev_n bigint.*not expected: n integer.*CREATE TABLE"):
        PostgresBackend(postgres.dsn, table, KEY, VALUE).prepare("topology")
    backend = PostgresBackend(postgres.dsn, f"{table}_wide", KEY, VALUE)
    backend.prepare("topology")
    wider = PostgresBackend(postgres.dsn, f"{table}_wide", KEY, Fields(n=int, more=str))
    with pytest.raises(ConfigError) as refused:
        wider.prepare("topology")
    mend = str(refused.value).split("or add them: ")[1]
    admin.execute(mend)
    assert wider.prepare("topology") == backend.read_header()


@pytest.mark.rule("C33")
@pytest.mark.parametrize(
    ("made", "otherwise", "message"),
    [
        (', PRIMARY KEY ("word")', "", "has no primary key of word"),
        (', PRIMARY KEY ("word")', ', PRIMARY KEY ("word", "n")', "has no primary key of word"),
        ('"word" text', '"word" text COLLATE any_case', "has a collation for 'word'"),
        (', PRIMARY KEY ("word")', ', UNIQUE ("word")', None),
    ],
)
def test_a_table_made_by_hand_that_would_mix_up_rows_is_refused(
    postgres: PostgresServer, admin: Any, table: str, made: str, otherwise: str, message: str | None
) -> None:
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    ddl = backend.shape.ddl()
    assert made in ddl
    if "any_case" in otherwise:
        admin.execute(
            "CREATE COLLATION IF NOT EXISTS any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    admin.execute(ddl.replace(made, otherwise))
    if message is None:
        backend.prepare("topology")
        return
    with pytest.raises(ConfigError, match=f"{message}.*create it with: CREATE TABLE"):
        backend.prepare("topology")


def test_rights_are_probed_before_the_first_batch(user: tuple[str, str], admin: Any, table: str) -> None:
    """The test grants one right after the other; each message names the next missing one."""
    name, dsn = user
    backend = PostgresBackend(dsn, table, KEY, VALUE, schema=name)
    admin.execute("REVOKE TEMPORARY ON DATABASE ratchet FROM PUBLIC")  # it is not needed
    try:
        with pytest.raises(ConfigError, match="grant CREATE on the schema"):
            backend.prepare("topology")
        admin.execute(f"GRANT CREATE ON SCHEMA {name} TO {name}")
        backend.prepare("topology")
        admin.execute(f"ALTER TABLE {name}.{table} OWNER TO ratchet")
        admin.execute(f"GRANT SELECT, INSERT, UPDATE ON {name}.{table} TO {name}")
        with pytest.raises(ConfigError, match=f"grant DELETE on table {table}"):
            backend.prepare("topology")
        admin.execute(f"GRANT DELETE ON {name}.{table} TO {name}")
        backend.prepare("topology")
        admin.execute(f"ALTER ROLE {name} SET default_transaction_read_only = on")
        backend.close()
        with pytest.raises(ConfigError, match="read-only"):
            backend.prepare("topology")
    finally:
        admin.execute("GRANT TEMPORARY ON DATABASE ratchet TO PUBLIC")


@pytest.mark.parametrize(
    ("role", "database", "words"),
    [
        ("nobody", "ratchet", "password authentication failed for user .nobody."),
        ("ratchet", "elsewhere", "database .elsewhere. does not exist"),
    ],
)
def test_a_refused_login_is_reported_with_its_reason(
    postgres: PostgresServer, table: str, role: str, database: str, words: str
) -> None:
    dsn = f"{dsn_of(role, postgres.dsn).rpartition('/')[0]}/{database}"
    with pytest.raises(ConfigError, match=words):
        PostgresBackend(dsn, table, KEY, VALUE).prepare("topology")


def test_a_password_appears_in_no_message(postgres: PostgresServer, admin: Any, table: str) -> None:
    backend = PostgresBackend("postgresql://ratchet:s3cret-canary@127.0.0.1:1/ratchet", table, KEY, VALUE)
    with pytest.raises(RetryableError) as failed:
        backend.prepare("topology")
    with pytest.raises(ConfigError) as unparsed:
        PostgresBackend("postgresql://ratchet:s3cret-canary@[half/ratchet", table)
    for text in (str(failed.value), repr(backend), backend.location, str(unparsed.value)):
        assert "canary" not in text


@pytest.mark.parametrize("address", ["postgresql://u:s3cr/et@host/db", "postgresql://u:12/s3cr@host/db", "${DSN}"])
def test_no_part_of_a_password_is_taken_for_a_port_or_a_database_and_shown(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSN", "postgresql://u:s3cr%zz@host/db")
    with pytest.raises(ConfigError, match="does not parse: (.* %2F for /|check its form)") as refused:
        PostgresBackend(address, "words")
    assert "s3cr" not in str(refused.value)


def test_a_location_shows_only_what_looks_like_a_host() -> None:
    with pytest.raises(ConfigError, match="%40 for @"):
        PostgresBackend("postgresql://alice@srv:hunter2@srv.postgres.example/x", "words")
    backend = PostgresBackend("host=srv:hunter2@srv.example dbname=x", "words", KEY, VALUE)
    assert backend.location == "table 'words' of PostgreSQL at (hidden):5432/x"
    backend = PostgresBackend("host=one,two dbname=x", "words", KEY, VALUE)
    assert backend.location == "table 'words' of PostgreSQL at one,two:5432/x"


def test_an_address_takes_secrets_from_the_environment(
    postgres: PostgresServer, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"refers to \$\{NOT_SET\}"):
        PostgresBackend("postgresql://ratchet:${NOT_SET}@localhost/ratchet", table)
    monkeypatch.setenv("PORT_OF_IT", str(postgres.port))
    monkeypatch.setenv("PASSWORD_OF_IT", postgres.password)
    backend = PostgresBackend(
        "postgresql://ratchet:${PASSWORD_OF_IT}@127.0.0.1:${PORT_OF_IT}/ratchet", table, KEY, VALUE
    )
    assert backend.prepare("topology").done == 0


@pytest.mark.rule("C1")
def test_a_hanging_sql_txn_releases_the_header(postgres: PostgresServer, table: str) -> None:
    """C1: a writer that is paused inside its sql_txn does not block its successor for ever,
    and writes nothing later.
    """
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    header = backend.prepare("topology")
    opened = header.opened(1, OpenCommit(1, 1, "d"))
    backend.raise_header(header, opened)
    raised: list[Header] = []
    limits: list[tuple[int]] = []

    def successor() -> None:
        other = PostgresBackend(postgres.dsn, table, KEY, VALUE)
        other.raise_header(opened, opened.opened(1, OpenCommit(1, 2, "d")))
        raised.append(other.read_header())

    with pytest.raises(RetryableError), backend._writing() as connection:
        backend._check_header(connection, opened, backend._keep_header)
        setting = "idle_in_transaction_session_timeout"
        limits.append(connection.execute(f"SELECT setting::int FROM pg_settings WHERE name = '{setting}'").fetchone())
        connection.execute(f"SET LOCAL {setting} = 1000")  # not before: a busy machine is idle for moments, too
        thread = threading.Thread(target=successor)
        thread.start()
        thread.join(PATIENCE_S)
        connection.execute(f"INSERT INTO {table} VALUES ('zombie', 1, NULL, 1, 1, 1, 'z', 0, 0)")
    assert raised and raised[0].open == OpenCommit(1, 2, "d")
    assert limits == [(postgres_module.IDLE_TIMEOUT_MS,)]
    assert backend.multi_get([("zombie",)]) == [None]


@pytest.mark.parametrize("stuck_in", ["COPY", "a pipeline"])
def test_a_writer_that_stops_in_the_middle_of_a_request_is_ended(
    postgres: PostgresServer, table: str, monkeypatch: pytest.MonkeyPatch, stuck_in: str
) -> None:
    """To the database such a writer is not idle, so no timeout of the database ends it."""
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    header = backend.prepare("topology")
    backend.close()
    monkeypatch.setattr(postgres_module, "IDLE_TIMEOUT_MS", 200)
    monkeypatch.setattr(postgres_module, "LOCK_TIMEOUT_MS", 400)
    stuck = psycopg.connect(postgres.dsn, application_name="ratchet")
    limit = "SET idle_in_transaction_session_timeout = 200"  # in one request with what follows it
    headers: list[Header] = []
    with contextlib.suppress(psycopg.Error), contextlib.ExitStack() as held:
        if stuck_in == "a pipeline":
            held.enter_context(stuck.pipeline())
            stuck.execute(limit)
        stuck.execute("SELECT * FROM _ratchet_headers WHERE state = %s FOR SHARE", (table,))
        if stuck_in == "COPY":
            copying = stuck.pgconn.exec_(f"{limit}; COPY {table} FROM STDIN".encode())
            assert copying.status == psycopg.pq.ExecStatus.COPY_IN
        else:
            stuck.pgconn.send_flush_request()
            stuck.pgconn.flush()
        time.sleep(0.6)
        opened = header.opened(1, OpenCommit(1, 2, "d"))
        refusals: list[str] = []

        def is_raised() -> bool:
            try:
                backend.raise_header(header, opened)
            except RetryableError as error:  # a busy machine may leave this transaction idle, too
                refusals.append(str(error))
                return False
            return True

        wait_for(is_raised, PATIENCE_S, what="the stuck writer to be ended")
        assert any("lock" in each for each in refusals)
        headers.append(backend.read_header())
    assert headers == [opened]
    backend.close()
    stuck.close()


@pytest.mark.fault(21)
def test_a_connection_that_dies_in_commit_leaves_the_outcome_unknown(
    postgres: PostgresServer, admin: Any, table: str
) -> None:
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    header = backend.prepare("topology")
    with pytest.raises(CommitOutcomeUnknown), backend._writing() as connection:
        asked = (connection.info.backend_pid, int(PATIENCE_S * 1_000))
        assert admin.execute("SELECT pg_terminate_backend(%s, %s)", asked).fetchone() == (True,)  # it has ended
    assert backend.read_header() == header


@pytest.mark.fault(22)
def test_a_lock_timeout_or_deadlock_is_retried_not_fatal(
    postgres: PostgresServer, admin: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session holds the lock."""
    monkeypatch.setattr(postgres_module, "LOCK_TIMEOUT_MS", 200)
    backend = PostgresBackend(postgres.dsn, table, KEY, VALUE)
    header = backend.prepare("topology")
    backend.close()
    with psycopg.connect(postgres.dsn) as rival:
        rival.execute("SELECT * FROM _ratchet_headers WHERE state = %s FOR UPDATE", (table,))
        with pytest.raises(RetryableError, match="lock"):
            backend.raise_header(header, header.opened(1, OpenCommit(1, 1, "d")))
    backend.raise_header(header, header.opened(1, OpenCommit(1, 1, "d")))


@pytest.mark.parametrize("how", ["put", "apply"])
def test_a_key_that_is_too_long_for_the_index_is_a_bad_record(postgres: PostgresServer, table: str, how: str) -> None:
    """C30: the key would be too long at every replay."""
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, VALUE))
    word = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9_000))
    with pytest.raises(BadRecordError, match="index row"):
        if how == "put":
            put(state, 1, **{word: 1})
        else:
            deltas = pa.table({"word": [word], "n": [1]})
            state.apply(TransactionAttempt(1, 1), deltas, {"n": Max("n")}, want_values=False)


def test_keys_that_the_database_takes_for_equal_are_a_bad_record(
    postgres: PostgresServer, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresBackend, "_columnar_from_rows", 0)
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, Fields(x=float), VALUE))
    deltas = pa.table({"x": [0.0, -0.0], "n": [1, 2]})
    with pytest.raises(BadRecordError, match="a second time"):
        state.apply(TransactionAttempt(1, 1), deltas, {"n": Max("n")}, want_values=False)


PASSING = {"08006", "08P01", "40001", "40P01", "53100", "53200", "53300", "55P03", "57P01", "57P03", "58030"}


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        (RetryableError, PASSING | {"25006", "25P03", "42P07"}),
        (LimitReached, {"25P04", "53400", "57014"}),
        (BadRecordError, {"21000", "22003", "22021", "23502", "23514", "23505", "54000", "54011"}),
        (ConfigError, {"0A000", "28P01", "42703", "42P01", "42501", "3D000", "57P04", "XX000", "P0001"}),
        (CorruptStateError, {"XX001", "XX002"}),
    ],
)
def test_errors_are_permanent_unless_they_are_known_to_pass(kind: type[Exception], states: set[str]) -> None:
    """C30: only errors that are known to pass are retried."""
    backend = PostgresBackend("postgresql://ratchet@localhost/ratchet", "rows", KEY, VALUE)
    for each in sorted(states):
        error = type("Refused", (psycopg.errors.lookup(each),), {"sqlstate": each})("refused")
        assert type(backend._named(error)) is kind, each


def test_an_error_of_the_client_itself_is_permanent_unless_the_connection_is_gone() -> None:
    backend = PostgresBackend("postgresql://ratchet@localhost/ratchet", "rows", KEY, VALUE)
    assert type(backend._named(psycopg.ProgrammingError("cannot adapt type 'x'"))) is ConfigError
    assert type(backend._named(psycopg.OperationalError("the connection is lost"))) is RetryableError
    assert type(backend._named(psycopg.InterfaceError("the connection is closed"))) is RetryableError


def test_two_drivers_may_create_the_first_tables_of_a_database_at_one_time(
    postgres: PostgresServer, admin: Any, table: str
) -> None:
    """One of them may get an error, which passes: the table exists at the next try."""
    admin.execute(f"CREATE SCHEMA {table}")
    errors: list[Exception] = []

    def prepare(each: int) -> None:
        backend = PostgresBackend(postgres.dsn, f"t{each}", KEY, VALUE, schema=table)
        try:
            backend.prepare("topology")
        except RetryableError:
            backend.prepare("topology")
        except RatchetError as error:
            errors.append(error)

    threads = [threading.Thread(target=prepare, args=(each,)) for each in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    admin.execute(f"DROP SCHEMA {table} CASCADE")
    assert errors == []


def test_text_with_nul_is_a_bad_record(postgres: PostgresServer, table: str) -> None:
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, VALUE))
    with pytest.raises(BadRecordError, match="NUL|0x00"):
        put(state, 1, **{"a\0b": 1})


def test_a_table_or_a_header_that_vanished_is_not_started_afresh(
    postgres: PostgresServer, admin: Any, table: str
) -> None:
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, VALUE))
    put(state, 1, dog=2)
    admin.execute("DELETE FROM _ratchet_headers WHERE state = %s", (table,))
    with pytest.raises(ConfigError, match="has rows and no header"):
        state.prepare("topology")
    with pytest.raises(CorruptStateError, match="header is gone"):
        state.read_header()
    other = OpaqueMapState(PostgresBackend(postgres.dsn, f"{table}_b", KEY, VALUE))
    put(other, 1, dog=2)
    admin.execute(f"DROP TABLE {table}_b CASCADE")  # and its view
    with pytest.raises(CorruptStateError, match="is gone, but its header says that it holds transactions up to 1"):
        other.prepare("standalone")


def test_least_and_greatest_of_text_go_by_bytes(postgres: PostgresServer, admin: Any, table: str) -> None:
    """Text is compared as Arrow compares it, not as the database's locale sorts it."""
    admin.execute(f"CREATE DATABASE {table} TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'de'")
    dsn = postgres.dsn.removesuffix("ratchet") + table

    value = Fields(least=str, most=str)
    state = OpaqueMapState(PostgresBackend(dsn, table, KEY, value))
    for txid, text in enumerate(("b", "B", "a", "Z", "ä"), 1):
        deltas = pa.table({"word": ["x"], "least": [text], "most": [text]})
        state.apply(TransactionAttempt(txid, 1), deltas, {"least": Min("t"), "most": Max("t")}, want_values=False)
    assert state.get("x") == ("B", "ä")


@pytest.fixture
def elsewhere(admin: Any, postgres: PostgresServer) -> Iterator[str]:
    """The dsn of a database with another encoding and other settings for dates,
    floats and bytes.
    """
    name = f"d_{uuid.uuid4().hex[:10]}"
    admin.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    for setting in (
        "extra_float_digits = -3",
        "\"DateStyle\" = 'German, DMY'",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
    ):
        admin.execute(f"ALTER DATABASE {name} SET {setting}")
    yield psycopg.conninfo.make_conninfo(postgres.dsn, dbname=name)
    admin.execute(f"DROP DATABASE {name} (FORCE)")


MOMENT = datetime.datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=datetime.UTC)


@pytest.mark.each_value_once
@pytest.mark.rule("C29")
@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("key", ["é", MOMENT, MOMENT.replace(tzinfo=None), MOMENT.date(), b"\\x\x00'\xe9", 0.1 + 0.2])
def test_settings_of_the_database_change_no_value(elsewhere: str, table: str, key: Any, rows: int) -> None:
    """Python writes the arrays of few rows, and Arrow those of many: the key is the same either
    way."""
    kind = pa.scalar(key).type
    keys = Fields.of({"k": pa.timestamp("us", tz="UTC") if key is MOMENT else kind})
    state = OpaqueMapState(PostgresBackend(elsewhere, table, keys, Fields(n=int, x=float)))
    others = [key] * rows if rows == 1 else [key, *(next(_others(key, each)) for each in range(1, rows))]
    for txid in (1, 2):
        deltas = pa.table({"k": pa.array(others, keys.type_of("k")), "n": [1] * rows, "x": [0.1 + 0.2] * rows})
        state.apply(TransactionAttempt(txid, 1), deltas, {"n": Sum("n"), "x": Max("x")}, want_values=False)
    attempt = TransactionAttempt(3, 1)
    state.begin_commit(attempt)
    state.multi_update([key], [lambda held: (held[0] + 1, held[1])])
    state.commit(attempt)
    assert state.get(key) == (3, 0.1 + 0.2)
    assert len(list(state.backend.scan())) == rows
    state.close()


def _others(key: Any, number: int) -> Iterator[Any]:
    if isinstance(key, datetime.date):
        yield key - datetime.timedelta(days=number)
    elif isinstance(key, float):
        yield key + number
    else:
        yield key + (str(number) if isinstance(key, str) else str(number).encode())


@pytest.mark.rule("C29")
def test_a_database_without_an_encoding_takes_text_as_utf_8(admin: Any, postgres: PostgresServer, table: str) -> None:
    name = f"d_{uuid.uuid4().hex[:10]}"
    admin.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    dsn = psycopg.conninfo.make_conninfo(postgres.dsn, dbname=name, client_encoding="SQL_ASCII")
    try:
        state = OpaqueMapState(PostgresBackend(dsn, table, KEY, VALUE))
        put(state, 1, é=2)
        put(state, 2, é=5)
        assert [(key, row.value) for key, row in state.backend.scan()] == [(("é",), (5,))]
        state.close()
    finally:
        admin.execute(f"DROP DATABASE {name} (FORCE)")


def test_a_reader_of_one_moment_does_not_see_what_is_committed_meanwhile(postgres: PostgresServer, table: str) -> None:
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, Fields(word=str), Fields(n=int)))
    put(state, 1, dog=1)
    with at_one_moment(state.backend) as still:
        before = still.read_header()
        for txid in (2, 3, 4):
            put(state, txid, dog=txid, cat=txid)
        assert still.read_header() == before
        assert list(items_as_of(still, 1)) == [(("dog",), (1,))]
    assert dict(items_as_of(state.backend, 4)) == {("dog",): (4,), ("cat",): (4,)}
    state.close()


@pytest.mark.parametrize("letters", [10, 50_000])
def test_rows_of_any_length_are_inserted_updated_and_deleted(
    postgres: PostgresServer, table: str, letters: int
) -> None:
    """Short rows are arrays of a statement, and long ones have a statement each."""
    state = OpaqueMapState(PostgresBackend(postgres.dsn, table, KEY, Fields(text=str)))
    words = [f"w{number}" for number in range(7)]
    texts = {word: f'{word}\\"{{NULL}}, ' * (letters // 10) for word in words}
    for txid, changes in enumerate((texts, {"w1": "", "w2": None, "w9": "NULL"}), start=1):
        attempt = TransactionAttempt(txid, 1)
        state.begin_commit(attempt)
        gone = [word for word, text in changes.items() if text is None]
        state.multi_put(*zip(*((word, text) for word, text in changes.items() if text is not None), strict=True))
        state.delete(gone)
        state.commit(attempt)
    expected = {**texts, "w1": "", "w2": None, "w9": "NULL"}
    assert {word: state.get(word) for word in expected} == expected


def test_a_table_that_is_bound_again_converts_by_the_new_types(postgres: PostgresServer, table: str) -> None:
    backend = PostgresBackend(postgres.dsn, table, KEY, Fields.of({"took": pa.duration("s")}))
    took = (datetime.timedelta(seconds=5),)
    assert backend._bound(took, backend.shape.value) == (5,)
    backend.bind(KEY, Fields.of({"took": pa.duration("us")}))
    assert backend._bound(took, backend.shape.value) == (5_000_000,)
