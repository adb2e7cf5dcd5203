"""Limits of a PostgreSQL server: batches become smaller, and what ends a statement is named."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt
from framework.errors import ConfigError, RetryableError
from integration import PostgresServer
from sinks import Max, OpaqueMapState, PostgresBackend, TransactionalMapState
from sinks.sql.postgres_adaptive_batch_size import StatementSize, reached
from tests.kit.postgres_roles import dsn_of, end_sessions, login
from tests.kit.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.rule("C30")]
KEY, VALUE = Fields(word=str), Fields(n=int)


@pytest.fixture
def admin(postgres: PostgresServer) -> Iterator[Any]:
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def user(admin: Any, postgres: PostgresServer) -> Iterator[tuple[str, str]]:
    """A user with a schema: (name, dsn)."""
    name = f"u_{uuid.uuid4().hex[:10]}"
    admin.execute(f"CREATE ROLE {name} SUPERUSER {login(postgres.dsn)}")
    admin.execute(f"CREATE SCHEMA {name} AUTHORIZATION {name}")
    yield name, dsn_of(name, postgres.dsn)
    end_sessions(admin, name)
    admin.execute(f"DROP SCHEMA {name} CASCADE")
    admin.execute(f"DROP ROLE {name}")


def slow_rows(admin: Any, schema: str, seconds: float) -> None:
    """Each row of the table takes so long to write."""
    admin.execute(
        f"CREATE OR REPLACE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END $$"
    )
    admin.execute(
        f"CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON {schema}.words FOR EACH ROW EXECUTE FUNCTION {schema}.slow()"
    )


def apply(state: OpaqueMapState | TransactionalMapState, txid: int, rows: int) -> None:
    deltas = pa.table({"word": [f"w{number}" for number in range(rows)], "n": [txid] * rows})
    state.apply(TransactionAttempt(txid, 1), deltas, {"n": Max("n")}, want_values=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OpaqueMapState, TransactionalMapState])
def test_a_batch_goes_in_smaller_statements_when_the_server_ends_a_large_one(
    admin: Any, user: tuple[str, str], kind: type[OpaqueMapState]
) -> None:
    name, dsn = user
    state = kind(PostgresBackend(dsn, "words", KEY, VALUE, schema=name))
    apply(state, 1, 1)
    state.close()
    slow_rows(admin, name, 0.1)
    admin.execute(f"ALTER ROLE {name} SET statement_timeout = '2s'")
    apply(state, 2, 60)
    apply(state, 3, 60)
    assert {row.value for _, row in state.backend.scan()} == {(3,)}
    assert state.read_header().done == 3
    state.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "named"),
    [
        ("ALTER ROLE {name} SET", r"for the role \(ALTER ROLE"),
        ("ALTER ROLE {name} IN DATABASE ratchet SET", "for the role in this database"),
        ("the address", r"by the address \(options\)"),
    ],
)
def test_a_limit_that_smaller_statements_do_not_keep_is_named_with_who_set_it(
    admin: Any, user: tuple[str, str], who: str, named: str
) -> None:
    name, dsn = user
    state = OpaqueMapState(PostgresBackend(dsn, "words", KEY, VALUE, schema=name))
    apply(state, 1, 1)
    state.close()
    slow_rows(admin, name, 2)
    if who == "the address":
        dsn = psycopg.conninfo.make_conninfo(dsn, options="-c statement_timeout=500ms")
    else:
        admin.execute(f"{who.format(name=name)} statement_timeout = '500ms'")
    state = OpaqueMapState(PostgresBackend(dsn, "words", KEY, VALUE, schema=name))
    for expected in (RetryableError, RetryableError, ConfigError):
        with pytest.raises(expected, match=f"statement_timeout is 500ms, set {named}.*raise it for this user"):
            apply(state, 2, 3)
    state.close()


@pytest.mark.parametrize("how", ["put", "get", "sweep"])
def test_other_statements_name_the_limit_too(admin: Any, user: tuple[str, str], how: str) -> None:
    name, dsn = user
    backend = PostgresBackend(dsn, "words", KEY, VALUE, schema=name)
    state = OpaqueMapState(backend)
    apply(state, 1, 1)
    state.close()
    admin.execute(f"ALTER ROLE {name} SET statement_timeout = '500ms'")
    with psycopg.connect(dsn, autocommit=False) as other:
        if how == "get":  # which asks for no lock before: a view that is slow stands for a large table
            admin.execute(f"ALTER TABLE {name}.words RENAME TO held")
            admin.execute(f"CREATE VIEW {name}.words AS SELECT held.* FROM {name}.held, pg_sleep(2)")
        else:
            slow_rows(admin, name, 2)
        with pytest.raises(RetryableError, match="statement_timeout is 500ms"):
            if how == "get":
                state.get("w0")
            elif how == "put":
                state.begin_commit(TransactionAttempt(2, 1))
                state.multi_put(["w0"], [7])
                state.commit(TransactionAttempt(2, 1))
            else:
                backend._changed_under(backend.read_header(), f"UPDATE {name}.words SET n = %s", (7,))
        other.rollback()
    state.close()


@pytest.mark.slow
def test_a_wait_for_a_lock_is_no_limit(admin: Any, user: tuple[str, str], postgres: PostgresServer) -> None:
    """It passes: it is over before a statement takes too long."""
    name, dsn = user
    state = OpaqueMapState(PostgresBackend(dsn, "words", KEY, VALUE, schema=name))
    apply(state, 1, 1)
    state.close()
    admin.execute(f"ALTER ROLE {name} SET statement_timeout = '2s'")
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {name}.words IN ACCESS EXCLUSIVE MODE")
        for _ in range(4):
            with pytest.raises(RetryableError, match="lock timeout"):
                apply(state, 2, 3)
        other.rollback()
    apply(state, 2, 3)
    state.close()


def test_a_statement_that_somebody_cancels_is_tried_again(admin: Any, user: tuple[str, str]) -> None:
    name, dsn = user
    state = OpaqueMapState(PostgresBackend(dsn, "words", KEY, VALUE, schema=name))
    apply(state, 1, 1)
    slow_rows(admin, name, 60)
    errors: list[Exception] = []

    def write() -> None:
        try:
            apply(state, 2, 1)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    found = "SELECT pid FROM pg_stat_activity WHERE usename = %s AND wait_event = 'PgSleep'"
    wait_for(lambda: admin.execute(found, [name]).fetchone() is not None)
    admin.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE usename = %s", [name])
    writing.join(60)
    assert [type(each) for each in errors] == [type(reached("", "57014"))]
    assert "user request" in str(errors[0])
    state.close()


def test_a_limit_of_temporary_files_is_named(admin: Any, user: tuple[str, str]) -> None:
    name, dsn = user
    for setting in ("temp_file_limit = '1MB'", "work_mem = '64kB'"):
        admin.execute(f"ALTER ROLE {name} SET {setting}")
    backend = PostgresBackend(dsn, "words", KEY, VALUE, schema=name)
    header = backend.prepare("topology")
    large = f"INSERT INTO {name}.words SELECT g::text FROM generate_series(1, 200000) g ORDER BY random(), %s"
    for expected in (RetryableError, RetryableError, ConfigError):
        with pytest.raises(expected, match=r"temp_file_limit is 1MB, set for the role \(ALTER ROLE"):
            backend._changed_under(header, large, (1,))
    backend.close()


def test_rows_per_statement_grow_again_after_successes() -> None:
    size = StatementSize(100)
    assert size.rows("a") == 100
    assert size.halve("a", 40, reached("", "57014"))
    assert size.rows("a") == 20
    assert size.rows("b") == 100
    for _ in range(60):
        size.succeeded("a", "work")
    assert size.rows("a") == 100
    assert not size.halve("a", 1, reached("", "57014"))
    assert not size.halve("a", 100, reached("", "25P04")), "smaller statements make no sql_txn shorter"
    assert [size.failed("a", "work") for _ in range(3)] == [False, False, True]
    size.succeeded("a", "work")
    assert not size.failed("a", "work")
