"""Tables of rows with a pooler, failovers, a limit of connections, locks, and other writers of the
same rows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pymysql
import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from framework.transactions.run import TopologyFailed
from integration import HaproxyServer, MariaDbServer, PgBouncerServer, PostgresServer, PostgresStandby, TcpProxy
from integration.folder_permissions import open_folder
from ratchet import Pipeline
from sinks import AppendCommitter, Mirror, MySqlTable, PostgresTable, UpsertCommitter
from sinks.rows.transactional_table import RowTable
from spouts import DebeziumChanges, OpaqueMemoryTransactionalSpout
from tests.faults.test_failovers import settle
from tests.kit.mysql import Client, client
from tests.kit.postgres_roles import login
from tests.kit.waiting import wait_for
from tests.sinks.rows.test_mirror import put

pytestmark = [pytest.mark.integration, pytest.mark.rule("C41")]

KEYS, TIMES = 10, 40
#: Each transaction changes every key, and the sum says how often.
CHANGES = [[key, number] for number in range(1, TIMES + 1) for key in range(KEYS)]


def topology(name: str, table: Callable[[str], RowTable], take: int = KEYS) -> Topology:
    spout = OpaqueMemoryTransactionalSpout({0: [list(row) for row in CHANGES]}, Fields(id=int, n=int), take)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("newest", UpsertCommitter(table("newest"), ["id"])).global_grouping("spout")
    builder.set_bolt("every", AppendCommitter(table("every"))).global_grouping("spout")
    return builder.build()


def check(rows: Callable[[str], list[tuple[Any, ...]]]) -> None:
    assert sorted(rows("SELECT id, n FROM newest")) == [(key, TIMES) for key in range(KEYS)]
    assert rows("SELECT count(*), sum(n) FROM every") == [(len(CHANGES), sum(n for _, n in CHANGES))]


@pytest.fixture
def schema(postgres: PostgresServer, name: str) -> Iterator[str]:
    made = name.replace("-", "_")
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {made}".encode())
        yield made
        admin.execute(f"DROP SCHEMA {made} CASCADE".encode())


def asked(dsn: str, schema: str) -> Callable[[str], list[tuple[Any, ...]]]:
    def rows(query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(dsn, options=f"-c search_path={schema}") as connection:
            return connection.execute(query.encode()).fetchall()

    return rows


def test_rows_through_a_pooler_with_one_session(postgres: PostgresServer, schema: str, name: str) -> None:
    address = psycopg.conninfo.conninfo_to_dict(postgres.dsn)
    target, settings = f"{address['host']}:{address['port']}", {"default_pool_size": "1"}
    password = str(address["password"])
    with open_folder() as folder, PgBouncerServer(folder, target, password, settings=settings) as pooler:
        dsn = pooler.dsn

        def table(of: str) -> PostgresTable:
            return PostgresTable(dsn, of, schema=schema)

        with submit(topology(name, table), {}, MemoryStore(), "local") as run:
            run.wait_until_caught_up(240)
        copy = Pipeline(f"{name}-copy")
        records = [dict(zip(("key", "value"), put("people", each, f"p{each}"), strict=True)) for each in range(20)]
        copy.read(records).into(Mirror(table, DebeziumChanges()), name="mirror")
        copy.run(store=MemoryStore(), executor="local", timeout_s=240)
    rows = asked(postgres.dsn, schema)
    check(rows)
    assert len(rows("SELECT * FROM people")) == 20


@pytest.mark.slow
def test_a_database_that_is_read_only_for_seconds_is_waited_for(own_postgres: PostgresServer, name: str) -> None:
    with submit(
        topology(name, lambda of: PostgresTable(own_postgres.dsn, of), take=1), {}, MemoryStore(), "local"
    ) as run:
        run.wait_for_commit(20, 60)
        settle(own_postgres, "SET default_transaction_read_only = on")
        try:
            wait_for(lambda: run.status().attempts_failed >= 3)
        finally:
            settle(own_postgres, "RESET default_transaction_read_only")
        run.wait_until_caught_up(240)
    check(asked(own_postgres.dsn, "public"))


def replicating(primary: PostgresServer) -> list[tuple[Any, ...]]:
    """The standbys that the primary sends its log to."""
    with psycopg.connect(primary.dsn) as connection:
        return connection.execute("SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'").fetchall()


@pytest.mark.slow
def test_a_synchronous_standby_takes_over_behind_haproxy(own_postgres: PostgresServer, name: str) -> None:
    """When the primary is dead, connections lead to the standby, which is read-only at first."""
    with (
        open_folder() as folder,
        PostgresStandby(folder / "standby", own_postgres.address, own_postgres.password) as standby,
    ):
        settle(own_postgres, "SET synchronous_standby_names = '*'")
        wait_for(lambda: replicating(own_postgres) == [("sync",)])
        with HaproxyServer(folder / "haproxy", [own_postgres.address, standby.address], standby.password) as proxy:
            built = topology(name, lambda of: PostgresTable(proxy.dsn, of), take=4)
            with submit(built, {}, MemoryStore(), "local") as run:
                run.wait_for_commit(20, 60)
                own_postgres.kill()
                wait_for(lambda: run.status().attempts_failed >= 3)
                assert run.status().committed_txid < len(CHANGES) / 4
                standby.promote()
                run.wait_until_caught_up(240)
        check(asked(standby.dsn, "public"))


@pytest.mark.slow
def test_a_standby_that_lacks_committed_rows_is_refused(own_postgres: PostgresServer, name: str) -> None:
    """A primary that does not wait for its standby can lose what it has acknowledged."""
    with (
        open_folder() as folder,
        TcpProxy(own_postgres.address) as link,
        PostgresStandby(folder / "standby", link.address, own_postgres.password) as standby,
        HaproxyServer(folder / "haproxy", [own_postgres.address, standby.address], standby.password) as proxy,
    ):
        wait_for(lambda: replicating(own_postgres) == [("async",)])
        built = topology(name, lambda of: PostgresTable(proxy.dsn, of), take=1)
        with submit(built, {}, MemoryStore(), "local") as run:
            run.wait_for_commit(20, 60)
            link.cut()
            run.wait_for_commit(run.status().committed_txid + 20, 60)
            own_postgres.kill()
            standby.promote()
            with pytest.raises(TopologyFailed, match="lost what was not yet on disk"):
                run.wait_until_caught_up(240)


@pytest.mark.slow
def test_a_role_that_may_open_no_connection_is_waited_for(postgres: PostgresServer, schema: str, name: str) -> None:
    dsn = psycopg.conninfo.make_conninfo(postgres.dsn, user=schema)
    built = topology(name, lambda of: PostgresTable(dsn, of, schema=schema), take=4)
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {schema} {login(postgres.dsn)}".encode())
        admin.execute(f"GRANT ALL ON SCHEMA {schema} TO {schema}".encode())
        with submit(built, {}, MemoryStore(), "local") as run:
            run.wait_for_commit(20, 60)
            admin.execute(f"ALTER ROLE {schema} CONNECTION LIMIT 0".encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [schema])
            wait_for(lambda: "too many connections" in str(run.status().last_error))
            admin.execute(f"ALTER ROLE {schema} CONNECTION LIMIT -1".encode())
            run.wait_until_caught_up(240)
        check(asked(postgres.dsn, schema))
        admin.execute(f"DROP OWNED BY {schema}".encode())
        admin.execute(f"DROP ROLE {schema}".encode())


def took_the_only_connection(admin: Client, user: str, held: contextlib.ExitStack, dsn: str) -> bool:
    """Close the connections of ``user``, and open one. False if the topology was faster."""
    admin.execute(f"KILL USER {user}")
    try:
        held.enter_context(client(dsn))
    except pymysql.err.OperationalError:
        return False
    return True


@pytest.mark.slow
def test_an_account_that_may_open_no_more_connections_is_waited_for(mariadb: MariaDbServer, name: str) -> None:
    database = name.replace("-", "_")
    address, limit = (
        mariadb.dsn.partition("@")[2].rpartition("/")[0],
        f"ALTER USER {database} WITH MAX_USER_CONNECTIONS",
    )
    dsn = f"mysql://{database}@{address}/{database}"
    with client(mariadb.dsn) as admin:
        admin.execute(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
        admin.execute(f"CREATE USER {database}")
        admin.execute(f"GRANT ALL ON {database}.* TO {database}")
        built = topology(name, lambda of: MySqlTable(dsn, of), take=4)
        with submit(built, {}, MemoryStore(), "local") as run:
            run.wait_for_commit(20, 60)
            admin.execute(f"{limit} 1")  # holds as soon as the account has no connection
            with contextlib.ExitStack() as held:
                wait_for(lambda: took_the_only_connection(admin, database, held, dsn))
                wait_for(lambda: "max_user_connections" in str(run.status().last_error))
            admin.execute(f"{limit} 0")
            run.wait_until_caught_up(240)
        check(lambda query: admin.execute(query.replace("FROM ", f"FROM {database}.")))


class Others:
    """Change the same rows in an order of their own, in sql_txns that hold their locks a while.
    ``done``: how many of them were committed."""

    def __init__(self, change: Callable[[int, int], None]) -> None:
        self._change, self._stop, self.done = change, threading.Event(), 0
        self._threads = [threading.Thread(target=self._run, args=[number]) for number in range(2)]

    def __enter__(self) -> Others:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _run(self, number: int) -> None:
        missing = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, pymysql.err.ProgrammingError)
        while not self._stop.wait(0.002):
            with contextlib.suppress(psycopg.OperationalError, pymysql.err.OperationalError, *missing):
                first = (self.done + number * 5) % KEYS
                self._change(first, (first + 7) % KEYS)
                self.done += 1


@pytest.mark.slow
def test_other_writers_of_the_same_rows_cause_no_wrong_row(postgres: PostgresServer, schema: str, name: str) -> None:
    def change(first: int, second: int) -> None:
        with psycopg.connect(postgres.dsn, options=f"-c search_path={schema}") as connection:
            connection.execute("UPDATE newest SET n = n WHERE id = %s", [first])
            time.sleep(0.002)
            connection.execute("UPDATE newest SET n = n WHERE id = %s", [second])

    with Others(change) as others:
        built = topology(name, lambda of: PostgresTable(postgres.dsn, of, schema=schema))
        with submit(built, {}, MemoryStore(), "local") as run:
            run.wait_until_caught_up(240)
    assert others.done > 0
    check(asked(postgres.dsn, schema))


@pytest.mark.slow
def test_other_writers_of_the_same_rows_of_mariadb_cause_no_wrong_row(mariadb: MariaDbServer, name: str) -> None:
    database = name.replace("-", "_")
    with client(mariadb.dsn) as admin:
        admin.execute(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
    dsn = f"{mariadb.dsn.rpartition('/')[0]}/{database}"

    def change(first: int, second: int) -> None:
        with client(dsn) as other:
            other.execute("SET autocommit = 0")
            other.execute("UPDATE newest SET n = n + 0 WHERE id = %s", first)
            time.sleep(0.002)
            other.execute("UPDATE newest SET n = n + 0 WHERE id = %s", second)
            other.execute("COMMIT")

    with (
        Others(change) as others,
        submit(topology(name, lambda of: MySqlTable(dsn, of)), {}, MemoryStore(), "local") as run,
    ):
        run.wait_until_caught_up(240)
    assert others.done > 0

    def rows(query: str) -> list[tuple[Any, ...]]:
        with client(dsn) as other:
            return other.execute(query)

    check(rows)


@pytest.mark.slow
def test_a_lock_that_another_client_holds_is_waited_for(postgres: PostgresServer, schema: str, name: str) -> None:
    """Longer than the server lets a statement wait."""
    dsn = psycopg.conninfo.make_conninfo(postgres.dsn, options="-c statement_timeout=600")
    built = topology(name, lambda of: PostgresTable(dsn, of, schema=schema), take=1)
    with submit(built, {}, MemoryStore(), "local") as run:
        run.wait_for_commit(20, 60)
        with psycopg.connect(postgres.dsn, options=f"-c search_path={schema}") as other:
            other.execute("SELECT * FROM newest FOR UPDATE")
            wait_for(lambda: run.status().attempts_failed >= 2)
        run.wait_until_caught_up(240)
    check(asked(postgres.dsn, schema))
