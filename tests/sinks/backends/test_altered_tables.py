"""Tables that other programs have altered: with triggers, constraints, policies, generated columns;
and roles with settings that change what statements mean.
"""

from __future__ import annotations

import datetime
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import psycopg
import pyarrow as pa
import pytest

from framework import Fields
from framework.errors import BadRecordError, ConfigError, StaleWriterError
from framework.topology import Header, OpenCommit, ValueType
from integration import PostgresServer
from sinks import Last, PostgresBackend, SqliteBackend, Sum
from sinks.backend import Row
from sinks.sql.backend import SqlBackend
from tests.kit.postgres_roles import dsn_of, end_sessions, login

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
KEY, VALUE, SUMS = Fields(word=str), Fields(n=int), {"n": Sum("n")}


class Store(NamedTuple):
    """``owner``: does what other programs do. ``leaves_out``: makes a trigger by which the table
    leaves out rows of the word ``bad``."""

    backend: SqlBackend
    owner: Callable[[str], Any]
    leaves_out: Callable[[], None]


@pytest.fixture
def role(postgres: PostgresServer) -> Iterator[tuple[str, Any]]:
    """A role with a schema of its own, and the connection of one who may do everything."""
    name = f"u_{uuid.uuid4().hex[:10]}"
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} {login(postgres.dsn)}")
        admin.execute(f"CREATE SCHEMA {name} AUTHORIZATION {name}")
        yield name, admin
        end_sessions(admin, name)
        admin.execute(f"DROP OWNED BY {name} CASCADE")
        admin.execute(f"DROP ROLE {name}")


def in_postgres(
    postgres: PostgresServer, role: tuple[str, Any], key: Fields = KEY, value: Fields = VALUE
) -> PostgresBackend:
    return PostgresBackend(dsn_of(role[0], postgres.dsn), "words", key, value)


@pytest.fixture(params=["postgres", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "postgres":
        name, admin = role = request.getfixturevalue("role")

        def leave_out() -> None:
            admin.execute(
                f"CREATE FUNCTION {name}.leave_out() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN IF NEW.word = 'bad' THEN RETURN NULL; END IF; RETURN NEW; END $$"
            )
            admin.execute(
                f"CREATE TRIGGER leaves_out BEFORE INSERT OR UPDATE ON {name}.words FOR EACH ROW "
                f"EXECUTE FUNCTION {name}.leave_out()"
            )

        backend = in_postgres(request.getfixturevalue("postgres"), role)
        yield Store(backend, lambda text: admin.execute(text.replace("words", f"{name}.words", 1)), leave_out)
        backend.close()
        return
    path = tmp_path / "words.db"
    lite = SqliteBackend(path, "words", KEY, VALUE)
    with sqlite3.connect(path, isolation_level=None) as connection:

        def leave_out_of_file() -> None:
            for event in ("INSERT", "UPDATE"):
                connection.execute(
                    f"CREATE TRIGGER leaves_out_{event} BEFORE {event} ON words WHEN NEW.word = 'bad' "
                    "BEGIN SELECT RAISE(IGNORE); END"
                )

        yield Store(lite, connection.execute, leave_out_of_file)
    lite.close()


def opened(backend: SqlBackend, header: Header | None = None) -> Header:
    """The header of the next attempt at transaction 1."""
    found = header if header is not None else backend.prepare("topology")
    new = replace(found, epoch=found.epoch + 1, open=OpenCommit(1, 1, "digest"))
    backend.raise_header(found, new)
    return new


def deltas(**counts: int) -> pa.Table:
    return pa.table({"word": pa.array(counts, pa.string()), "n": pa.array(counts.values(), pa.int64())})


def apply(backend: SqlBackend, header: Header, kind: ValueType, given: pa.Table, *, want: bool = False) -> Any:
    return backend.apply(header, "task", kind, given, SUMS, want_values=want)


# --- triggers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ValueType)
@pytest.mark.parametrize("want", [False, True])
def test_a_row_that_a_trigger_leaves_out_is_told(store: Store, kind: ValueType, want: bool) -> None:
    header = opened(store.backend)
    store.leaves_out()
    with pytest.raises(ConfigError, match=r"key \('bad',\): the database did not store it"):
        apply(store.backend, header, kind, deltas(good=1, bad=2), want=want)
    assert store.backend.multi_get([("good",)]) == [None]


def test_a_row_that_the_transactional_rule_skips_is_none_that_is_left_out(store: Store) -> None:
    header = opened(store.backend)
    for _ in range(2):
        apply(store.backend, header, ValueType.TRANSACTIONAL, deltas(good=1, bad=2))
    assert [each.value for each in store.backend.multi_get([("good",), ("bad",)]) if each] == [(1,), (2,)]


def test_a_put_that_a_trigger_leaves_out_is_told(store: Store) -> None:
    header = opened(store.backend)
    store.leaves_out()
    rows = [Row((each,), header.stamp, None, "task") for each in (1, 2)]
    with pytest.raises(ConfigError, match=r"key \('bad',\): the database did not store it"):
        store.backend.multi_put(header, [("good",), ("bad",)], [None, None], rows)
    assert store.backend.multi_get([("good",)]) == [None]


def test_a_put_over_a_row_of_another_writer_is_still_stale(store: Store) -> None:
    header = opened(store.backend)
    apply(store.backend, header, ValueType.OPAQUE, deltas(good=1))
    with pytest.raises(StaleWriterError, match=r"key \('good',\)"):
        store.backend.multi_put(header, [("good",)], [None], [Row((1,), header.stamp, None, "other")])


@pytest.mark.parametrize("how", ["sweep", "roll_back"])
def test_what_a_trigger_keeps_from_being_taken_back_is_told(store: Store, how: str) -> None:
    header = opened(store.backend)
    apply(store.backend, header, ValueType.OPAQUE, deltas(good=1, bad=2))
    header = opened(store.backend, header)
    assert getattr(store.backend, how)(header) == 2
    again = opened(store.backend, header)
    if how == "roll_back":
        apply(store.backend, again, ValueType.OPAQUE, deltas(good=1, bad=2))
        again = opened(store.backend, again)
    store.leaves_out()
    with pytest.raises(ConfigError, match="a row of transaction 1: the database did not store it"):
        getattr(store.backend, how)(again)


# --- constraints ----------------------------------------------------------------------------------


def test_a_value_that_another_unique_index_refuses_is_a_bad_record(store: Store) -> None:
    header = opened(store.backend)
    store.owner("CREATE UNIQUE INDEX once ON words (n)")
    rows = [Row((7,), header.stamp, None, "task")] * 2
    with pytest.raises(BadRecordError, match=r"(?i)unique"):
        store.backend.multi_put(header, [("one",), ("two",)], [None, None], rows)
    with pytest.raises(BadRecordError, match=r"(?i)unique"):
        apply(store.backend, header, ValueType.OPAQUE, deltas(one=7, two=7))


@pytest.mark.parametrize("rule", ["REPLACE", "IGNORE", "FAIL", "ROLLBACK"])
def test_a_constraint_that_resolves_conflicts_is_refused(tmp_path: Path, rule: str) -> None:
    backend = SqliteBackend(tmp_path / "words.db", "words", KEY, VALUE)
    text = backend.shape.ddl().replace('"n" INTEGER', f'"n" INTEGER UNIQUE on  conflict {rule}', 1)
    with sqlite3.connect(tmp_path / "words.db") as connection:
        connection.execute(text)
    with pytest.raises(ConfigError, match=f"has a constraint on  conflict {rule}"):
        backend.prepare("topology")
    backend.close()


@pytest.mark.parametrize("made", ["GENERATED ALWAYS AS IDENTITY", "GENERATED ALWAYS AS (_txid * 2) STORED"])
def test_a_column_that_makes_its_values_is_refused(postgres: PostgresServer, role: tuple[str, Any], made: str) -> None:
    backend = in_postgres(postgres, role)
    backend.prepare("topology")
    text = backend.shape.ddl()
    role[1].execute(f"DROP TABLE {role[0]}.words CASCADE")
    role[1].execute(text.replace('"n" bigint', f'"n" bigint {made}', 1))
    role[1].execute(f"ALTER TABLE {role[0]}.words OWNER TO {role[0]}")
    with pytest.raises(ConfigError, match="makes the values of 'n' by itself"):
        backend.prepare("topology")
    backend.close()


# --- policies and settings ------------------------------------------------------------------------


def test_row_level_security_is_refused(postgres: PostgresServer, role: tuple[str, Any]) -> None:
    backend, (name, admin) = in_postgres(postgres, role), role
    header = opened(backend)
    apply(backend, header, ValueType.OPAQUE, deltas(seen=1, hidden=2))
    admin.execute(f"ALTER TABLE {name}.words ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    admin.execute(f"CREATE POLICY seen ON {name}.words USING (word <> 'hidden')")
    with pytest.raises(ConfigError, match="has row level security"):
        backend.prepare("topology")
    header = opened(backend, header)
    with pytest.raises(ConfigError, match="row-level security"):  # while it runs
        backend.sweep(header)
    admin.execute(f"ALTER TABLE {name}.words NO FORCE ROW LEVEL SECURITY")  # its owner sees all rows
    backend.prepare("topology")
    assert backend.sweep(header) == 2
    backend.close()


def test_a_null_is_no_text_whatever_the_role_says(postgres: PostgresServer, role: tuple[str, Any]) -> None:
    role[1].execute(f"ALTER ROLE {role[0]} SET array_nulls = off")
    backend = in_postgres(postgres, role, value=Fields(text=str))
    header = opened(backend)
    given = pa.table({"word": pa.array(["a", "b"]), "text": pa.array([None, "NULL"], pa.string())})
    backend.apply(header, "task", ValueType.OPAQUE, given, {"text": Last("text")}, want_values=False)
    assert [each.value for each in backend.multi_get([("a",), ("b",)]) if each] == [(None,), ("NULL",)]
    backend.close()


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("zone", ["America/New_York", "Africa/Monrovia", "Europe/Amsterdam", "UTC"])
def test_a_zone_whose_offset_has_seconds_keeps_them(
    postgres: PostgresServer, role: tuple[str, Any], rows: int, zone: str
) -> None:
    kind, at = pa.timestamp("us", zone), datetime.datetime(1850, 3, 4, 5, 6, 7, 8, tzinfo=ZoneInfo(zone))
    backend = in_postgres(postgres, role, value=Fields(at=kind))
    header = opened(backend)
    words = [str(each) for each in range(rows)]
    given = pa.table({"word": words, "at": pa.array([at] * rows, kind)})
    backend.apply(header, "task", ValueType.OPAQUE, given, {"at": Last("at")}, want_values=False)
    found = backend.multi_get([(each,) for each in words])
    assert {each.value for each in found if each} == {(at,)}
    backend.close()
