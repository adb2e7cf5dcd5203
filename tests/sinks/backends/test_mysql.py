"""What is particular to MariaDB: statements that commit by themselves, settings of the server,
rights, tables that others have altered, and a server that is killed.
"""

from __future__ import annotations

import decimal
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import BadRecordError, ConfigError, RetryableError
from framework.testing.conformance.backend_test_helpers import finish, open_attempt
from framework.topology import ValueType
from framework.transactions import MemoryStore
from integration import MariaDbServer
from sinks import Count, MySqlBackend, OpaqueMapState, StateCommitter, Sum, TransactionalMapState
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.mysql import Client, client
from tests.kit.targets import Often
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("3.1")]
KEY, VALUE = Fields(word=str), Fields(n=int)


@pytest.fixture
def table() -> str:
    return f"t_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def admin(mariadb: MariaDbServer) -> Iterator[Client]:
    with client(mariadb.dsn) as made:
        yield made


def put(backend: MySqlBackend, txid: int, *words: str) -> None:
    state = OpaqueMapState(backend)
    granted = open_attempt(state, txid, 1)
    state.begin_commit(granted)
    state.multi_put([(word,) for word in words], [len(word) for word in words])
    state.commit(granted)
    finish(state)


@pytest.mark.slow
@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("kind", "source"),
    [(OpaqueMapState, OpaqueMemoryTransactionalSpout), (TransactionalMapState, MemoryTransactionalSpout)],
    ids=["opaque", "transactional"],
)
def test_a_server_that_is_killed_while_a_topology_commits_ends_exact(
    own_mariadb: MariaDbServer, name: str, table: str, kind: Any, source: Any, often: Often
) -> None:
    words = [f"w{number % 7}" for number in range(200)]
    spout = source({0: [[word] for word in words]}, Fields(word=str), 5)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = kind(MySqlBackend(own_mariadb.dsn, table))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    with submit(builder.build(), {"topology.max.attempts": 1_000}, MemoryStore(), "local") as run:
        for _ in range(often(1, 5)):
            held = run.status().committed_txid
            run.wait_for_commit(held + 3, PATIENCE_S)
            failed = run.status().attempts_failed
            own_mariadb.kill()
            wait_for(lambda failed=failed: run.status().attempts_failed > failed)  # type: ignore[misc]
            own_mariadb.start()
        run.wait_until_caught_up(PATIENCE_S)
    with client(own_mariadb.dsn) as other:
        assert dict(other.execute(f"SELECT word, n FROM {table}")) == dict(Counter(words))
    state.close()


def test_a_crash_between_the_statements_of_a_start_is_repaired_by_the_next(mariadb: MariaDbServer, table: str) -> None:
    """A statement that creates a table commits by itself."""
    backend = MySqlBackend(mariadb.dsn, table, KEY, VALUE)
    with backend._reading() as connection:
        backend._create_headers(connection)
        backend._create_table(connection)
    assert backend.check("topology") is None
    header = backend.prepare("topology")
    assert backend.prepare("topology") == header
    put(backend, 1, "dog")
    assert [row.value for _, row in backend.scan()] == [(3,)]


def test_the_database_merges_a_batch_by_itself(mariadb: MariaDbServer, table: str) -> None:
    """Without ``NotImplementedError``, at which a state reads, merges and writes."""
    backend = MySqlBackend(mariadb.dsn, table, KEY, Fields(n=int, d=pa.decimal128(38, 20)))
    backend.prepare("topology")
    granted = open_attempt(OpaqueMapState(backend), 1, 1)
    assert granted.fence is not None
    amount = decimal.Decimal("0.00000001234567890123")
    deltas = pa.table({"word": ["a", "b"], "n": [1, 2], "d": pa.array([amount, -amount], pa.decimal128(38, 20))})
    aggregates = {"n": Sum("n"), "d": Sum("d")}
    for writer in ("one", "two"):
        deltas = deltas.set_column(0, "word", pa.array([f"{writer}-a", f"{writer}-b"]))
        backend.apply(backend.read_header(), writer, ValueType.OPAQUE, deltas, aggregates, want_values=False)
    assert {key[0]: row.value for key, row in backend.scan()} == {
        **{f"{writer}-a": (1, amount) for writer in ("one", "two")},
        **{f"{writer}-b": (2, -amount) for writer in ("one", "two")},
    }


def test_many_changed_rows_are_written_by_few_statements(mariadb: MariaDbServer, table: str) -> None:
    rows = 2_000
    backend = MySqlBackend(mariadb.dsn, table, KEY, VALUE)
    backend.prepare("topology")
    keys = [(f"w{number}",) for number in range(rows)]
    state = OpaqueMapState(backend)

    def write(txid: int, values: list[Any]) -> None:
        attempt = open_attempt(state, txid, 1)
        state.begin_commit(attempt)
        assert state.multi_get(keys) == [txid - 1 or None] * rows
        state.multi_put(keys, values)
        state.commit(attempt)

    write(1, [1] * rows)
    with client(mariadb.dsn) as admin:
        before = _questions(admin)
        write(2, [2] * rows)
        assert _questions(admin) - before < rows / 10
    assert {key: (row.value, row.prev) for key, row in backend.scan()} == dict.fromkeys(keys, ((2,), (1,)))


def _questions(connection: Any) -> int:
    return int(connection.execute("SHOW GLOBAL STATUS LIKE 'Questions'")[0][1])


def test_the_settings_of_the_server_change_nothing(own_mariadb: MariaDbServer, table: str) -> None:
    """Without a strict mode the server would cut what does not fit, and round what is no number."""
    with client(own_mariadb.dsn) as admin:
        for setting in (
            "sql_mode = 'NO_BACKSLASH_ESCAPES'",
            "time_zone = '+05:00'",
            "tx_isolation = 'SERIALIZABLE'",
            "autocommit = 0",
            "character_set_server = latin1",
            "max_statement_time = 0.000001",
        ):
            admin.execute(f"SET GLOBAL {setting}")
    backend = MySqlBackend(own_mariadb.dsn, table, KEY, Fields(n=int, word_of=str))
    backend.prepare("topology")
    state = OpaqueMapState(backend)
    granted = open_attempt(state, 1, 1)
    state.begin_commit(granted)
    state.multi_put([("a\\'b",), ("ä😀 ",)], [(1, "\\n' \0"), (2, "😀" * 100)])
    state.commit(granted)
    assert {key: row.value for key, row in backend.scan()} == {
        ("a\\'b",): (1, "\\n' \0"),
        ("ä😀 ",): (2, "😀" * 100),
    }
    with pytest.raises(BadRecordError, match="'word'"):
        backend.multi_get([("x" * 769,)])
    backend.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("ALTER TABLE {} ENGINE=MyISAM", "in MyISAM"),
        ("ALTER TABLE {} MODIFY word varchar(768) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci", "collation"),
        ("ALTER TABLE {} ADD UNIQUE INDEX other (n)", "unique index other"),
        ("ALTER TABLE {} MODIFY n int", "other columns"),
        ("ALTER TABLE {} DROP PRIMARY KEY", "no primary key"),
    ],
)
def test_a_table_that_others_have_altered_is_refused_at_the_start(
    mariadb: MariaDbServer, admin: Client, table: str, change: str, named: str
) -> None:
    key = Fields(word=int) if "MyISAM" in change else KEY  # which has no long keys
    backend = MySqlBackend(mariadb.dsn, table, key, VALUE)
    backend.prepare("topology")
    admin.execute(change.format(table))
    with pytest.raises(ConfigError, match=named):
        backend.prepare("topology")


def test_a_missing_right_is_named_at_the_start(mariadb: MariaDbServer, admin: Client, table: str) -> None:
    MySqlBackend(mariadb.dsn, table, KEY, VALUE).prepare("topology")
    user = f"u_{uuid.uuid4().hex[:8]}"
    admin.execute(f"CREATE USER {user} IDENTIFIED BY 'x'")
    admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON _ratchet_headers TO {user}")
    admin.execute(f"GRANT SELECT, INSERT, UPDATE ON {table} TO {user}")
    dsn = f"mysql://{user}:x@{mariadb.address}/ratchet"
    with pytest.raises(ConfigError, match=f"grant DELETE on table {table}"):
        MySqlBackend(dsn, table, KEY, VALUE).prepare("topology")
    with pytest.raises(ConfigError, match="grant CREATE on the database"):
        MySqlBackend(dsn, f"{table}_x", KEY, VALUE).prepare("topology")
    admin.execute(f"DROP USER {user}")


def test_a_server_that_takes_no_writes_is_refused_at_the_start_and_waited_for_later(
    own_mariadb: MariaDbServer, table: str
) -> None:
    backend = MySqlBackend(own_mariadb.dsn, table, KEY, VALUE)
    backend.prepare("topology")
    user = "CREATE USER plain IDENTIFIED BY 'x'", "GRANT ALL ON ratchet.* TO plain"
    with client(own_mariadb.dsn) as admin:
        for statement in user:
            admin.execute(statement)
        plain = MySqlBackend(f"mysql://plain:x@{own_mariadb.address}/ratchet", table, KEY, VALUE)
        header = plain.read_header()
        admin.execute("SET GLOBAL read_only = 1")
        with pytest.raises(ConfigError, match="read-only"):
            plain.check("topology")
        with pytest.raises(RetryableError, match="read.only"):
            plain.raise_header(header, header)
        admin.execute("SET GLOBAL read_only = 0")
        plain.raise_header(header, header)
    plain.close()
    backend.close()


def test_a_writer_that_says_nothing_is_ended_by_the_server(
    mariadb: MariaDbServer, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.sql.mysql_connections.IDLE_TIMEOUT_S", 1)
    backend, other = (MySqlBackend(mariadb.dsn, table, KEY, VALUE) for _ in range(2))
    backend.close()  # the connections that are there have the usual time
    header = backend.prepare("topology")
    with pytest.raises(RetryableError), backend._writing() as connection:
        backend._check_header(connection, header, backend._own_header)
        other.raise_header(header, header)  # waits until the server has ended the other one
        connection.execute("SELECT 1")


@pytest.mark.parametrize("bad", ["ratio", "at"])
def test_the_key_column_that_is_infinite_is_named(mariadb: MariaDbServer, table: str, bad: str) -> None:
    backend = MySqlBackend(mariadb.dsn, table, Fields(word=str, ratio=float, at=float), Fields(n=int))
    rows = [{"word": "a longer text", "ratio": 1.0, "at": 2.0, "n": 1} for _ in range(3)]
    rows[1][bad] = float("inf")
    with pytest.raises(BadRecordError, match=f"no infinity; it is key column '{bad}'") as refused:
        backend.check_rows(pa.Table.from_pylist(rows))
    assert "word='a longer text'" in refused.value.about


def test_deadlocks_and_lost_connections_pass_and_values_do_not() -> None:
    import pymysql

    from sinks.sql.mysql_server import named

    kinds = {1213: RetryableError, 1205: RetryableError, 2013: RetryableError, 1021: RetryableError}
    kinds |= {1406: BadRecordError, 1264: BadRecordError, 4025: BadRecordError, 1452: BadRecordError}
    kinds |= {1045: ConfigError, 1146: ConfigError, 1064: ConfigError}
    for code, kind in kinds.items():
        assert type(named(pymysql.err.OperationalError(code, "why"), "table 't'")) is kind, code
