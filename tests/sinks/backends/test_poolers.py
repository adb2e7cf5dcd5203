"""PostgreSQL behind a pooler that gives each sql_txn another session of the server."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from framework import ArrowBolt, Fields, TransactionalTopologyBuilder, TransactionAttempt, submit
from framework.errors import ConfigError
from framework.testing.conformance import BackendContract
from framework.topology import OutputFieldsDeclarer
from framework.transactions import MemoryStore
from integration import PgBouncerServer, PostgresServer
from integration.folder_permissions import open_folder
from sinks import Count, MapBackend, Max, OpaqueMapState, PostgresBackend, StateCommitter
from spouts import MemoryTransactionalSpout
from tests.kit.targets import Often

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.2")]
KEY, VALUE = Fields(word=str), Fields(n=int)


def pooled(postgres: PostgresServer, **settings: str) -> Iterator[PgBouncerServer]:
    address = psycopg.conninfo.conninfo_to_dict(postgres.dsn)
    target = f"{address['host']}:{address['port']}"
    password = str(address["password"])
    with open_folder() as folder, PgBouncerServer(folder, target, password, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def pooler(postgres: PostgresServer) -> Iterator[PgBouncerServer]:
    """Two sessions for all clients."""
    yield from pooled(postgres, default_pool_size="2")


@pytest.fixture(scope="module")
def narrow(postgres: PostgresServer) -> Iterator[PgBouncerServer]:
    """One session for all clients."""
    yield from pooled(postgres, default_pool_size="1")


@pytest.fixture
def schemas(postgres: PostgresServer) -> Iterator[list[str]]:
    """Two schemas, which exist only for the test."""
    names = [f"{each}_{uuid.uuid4().hex[:8]}" for each in ("one", "other")]
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        for each in names:
            admin.execute(f"CREATE SCHEMA {each}")
        yield names
        for each in names:
            admin.execute(f"DROP SCHEMA {each} CASCADE")


@pytest.mark.rules_only
class TestThroughPooler(BackendContract):
    longest_key = 2_600

    @pytest.fixture(autouse=True)
    def _reach(self, pooler: PgBouncerServer, often: Often, seed: int) -> None:
        self.dsn = pooler.dsn
        every = often(9, 1)
        self.faults = seed % every, every

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return PostgresBackend(self.dsn, name, key, value)


class Only(ArrowBolt):
    """Passes one field on, as ``k``."""

    deterministic = True

    def __init__(self, field: str) -> None:
        self.field = field

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([batch.column(self.field)], ["k"])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(k=str))


@pytest.mark.parametrize("keys", [5, 500])
def test_tables_of_one_name_in_two_schemas_get_their_own_rows(
    narrow: PgBouncerServer, postgres: PostgresServer, schemas: list[str], name: str, keys: int
) -> None:
    rows = [[f"{schema}{number % keys}" for schema in schemas] for number in range(keys * 10)]
    spout = MemoryTransactionalSpout({0: [list(row) for row in rows]}, Fields(a=str, b=str), keys)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    for field, schema in zip("ab", schemas, strict=True):
        builder.set_bolt(f"only-{field}", Only(field)).global_grouping("spout")
        state = OpaqueMapState(PostgresBackend(narrow.dsn, "words", schema=schema))
        builder.set_bolt(schema, StateCommitter(state, ["k"], {"c": Count()})).global_grouping(f"only-{field}")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(240)
    with psycopg.connect(postgres.dsn) as admin:
        for place, schema in enumerate(schemas):
            found = dict(admin.execute(f"SELECT k, c FROM {schema}.words").fetchall())
            assert found == dict(Counter(row[place] for row in rows))


def put(state: OpaqueMapState, txid: int, **values: object) -> None:
    attempt = TransactionAttempt(txid, 1)
    state.begin_commit(attempt)
    state.multi_put(list(values), list(values.values()))
    state.commit(attempt)


MOMENT = pa.timestamp("us", tz="UTC")


def test_what_another_client_leaves_in_a_session_changes_nothing(
    narrow: PgBouncerServer, schemas: list[str], name: str
) -> None:
    """A search path, a temporary table of the same name, forms of values, a level of isolation."""
    table = name.replace("-", "_")
    keys, value = Fields.of({"word": pa.string(), "raw": pa.binary()}), Fields.of({"x": pa.float64(), "at": MOMENT})
    state = OpaqueMapState(PostgresBackend(narrow.dsn, table, keys, value))
    header = state.prepare("standalone")
    at = pa.scalar(1_700_000_000_000_000, MOMENT).as_py()
    for txid in (1, 2):
        with psycopg.connect(narrow.dsn, autocommit=True, prepare_threshold=None) as other:
            for setting in (
                f"search_path = {schemas[txid - 1]}",
                "extra_float_digits = -3",
                "\"DateStyle\" = 'German, DMY'",
                "bytea_output = 'escape'",
                "timezone = 'Asia/Tokyo'",
                "synchronous_commit = 'off'",
                "lock_timeout = '1ms'",
                "default_transaction_isolation = 'serializable'",
                "standard_conforming_strings = off",
            ):
                other.execute(f"SET {setting}")
            other.execute(f"CREATE TEMP TABLE IF NOT EXISTS {table} (word text)")
            other.execute("CREATE TEMP TABLE IF NOT EXISTS _ratchet_headers (state text)")
        attempt = TransactionAttempt(txid, 1)
        deltas = pa.table(
            {"word": ["a"], "raw": [b"\x00\\\xff"], "x": [0.1 + 0.2 * txid], "at": [at]},
            pa.schema([("word", pa.string()), ("raw", pa.binary()), ("x", pa.float64()), ("at", MOMENT)]),
        )
        state.apply(attempt, deltas, {"x": Max("x"), "at": Max("at")}, want_values=False)
        assert state.get(("a", b"\x00\\\xff")) == (0.1 + 0.2 * txid, at)
    fresh = PostgresBackend(narrow.dsn, table, keys, value)
    fresh.close()
    assert fresh.read_header().incarnation == header.incarnation
    assert [key for key, _ in fresh.scan()] == [("a", b"\x00\\\xff")]


def test_commits_through_a_pooler_leave_no_temporary_table_and_no_prepared_statement(
    narrow: PgBouncerServer, name: str
) -> None:
    table = name.replace("-", "_")
    state = OpaqueMapState(PostgresBackend(narrow.dsn, table, KEY, VALUE))
    for txid in range(1, 12):
        put(state, txid, dog=txid)
        deltas = pa.table({"word": [f"w{number}" for number in range(300)], "n": [txid] * 300})
        state.apply(TransactionAttempt(txid, 2), deltas, {"n": Max("n")}, want_values=False)
    with psycopg.connect(narrow.dsn, autocommit=True, prepare_threshold=None) as other:
        assert other.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        query = "SELECT count(*) FROM pg_class WHERE relpersistence = 't' AND relname LIKE '\\_stage%'"
        assert other.execute(query).fetchone() == (0,)


def test_a_pooler_that_keeps_no_session_for_a_transaction_is_refused(postgres: PostgresServer, name: str) -> None:
    for server in pooled(postgres, pool_mode="statement"):
        with pytest.raises(ConfigError, match="the pooler must keep a session for a transaction: set pool_mode"):
            PostgresBackend(server.dsn, name.replace("-", "_"), KEY, VALUE).prepare("topology")


def test_a_startup_parameter_that_the_pooler_refuses_is_named(narrow: PgBouncerServer, name: str) -> None:
    dsn = psycopg.conninfo.make_conninfo(narrow.dsn, options="-c search_path=x")
    with pytest.raises(ConfigError, match="unsupported startup parameter: options"):
        PostgresBackend(dsn, name.replace("-", "_"), KEY, VALUE).prepare("topology")


def test_a_connection_that_the_pooler_has_ended_fails_no_attempt(postgres: PostgresServer, name: str) -> None:
    """As ``client_idle_timeout`` does, and PostgreSQL's ``idle_session_timeout``."""
    backend: Any = PostgresBackend(postgres.dsn, name.replace("-", "_"), KEY, VALUE)
    for server in pooled(postgres):
        backend = PostgresBackend(server.dsn, name.replace("-", "_"), KEY, VALUE)
        header = backend.prepare("topology")
        server.stop()
        server.start()
        assert backend.read_header() == header
