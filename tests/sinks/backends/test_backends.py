"""Every backend passes the contract suite, on real servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.lmdb_backend import LmdbBackend
from framework import Fields, TransactionAttempt
from framework.testing.conformance import BackendContract
from integration import MariaDbServer, PostgresServer, RedisServer
from sinks import MapBackend, MemoryBackend, MySqlBackend, OpaqueMapState, PostgresBackend, RedisBackend, SqliteBackend
from sinks.scratch import PickledBackend
from tests.kit.targets import Often

pytestmark = pytest.mark.behaviour("3.1", "3.2", "3.3")
#: The suite is part of the package, so it cannot carry these marks itself.
RULES = {
    "C1": [
        BackendContract.test_raise_header_is_a_compare_and_set,
        BackendContract.test_put_under_another_header_writes_nothing,
        BackendContract.test_a_writer_that_stalls_between_begin_and_commit_is_refused,
        BackendContract.test_apply_under_another_header_writes_nothing,
    ],
    "C4": [BackendContract.test_put_is_conditional_on_every_stamp_and_atomic],
    "C5": [BackendContract.test_replay_of_another_batch_of_an_opaque_spout],
    "C6": [BackendContract.test_replay_returns_previous_and_value_also_when_it_skips],
    "C7": [BackendContract.test_a_rolled_back_transaction_never_was],
    "C12": [
        BackendContract.test_nothing_reaches_the_backend_before_commit,
        BackendContract.test_one_key_has_one_writer_in_an_attempt,
        BackendContract.test_apply_by_two_tasks_to_one_key_is_an_error,
    ],
    "C21": [
        BackendContract.test_purge_removes_tombstones_of_earlier_transactions_only,
        BackendContract.test_purge_under_another_header_is_refused,
        BackendContract.test_null_absent_and_deleted_are_three_things,
    ],
}
for _test in (
    BackendContract.test_a_fault_between_any_two_steps,
    BackendContract.test_a_state_that_becomes_opaque_replays_from_before_the_open_transaction,
):
    pytest.mark.each_value_once(_test)
for _rule, _tests in RULES.items():
    for _test in _tests:
        pytest.mark.rule(_rule)(_test)


class Contract(BackendContract):
    """``make test`` lets each ``FAULT_EACH``-th call fail, ``make test-all`` each one."""

    FAULT_EACH = 3

    @pytest.fixture(autouse=True)
    def some_faults(self, often: Often, seed: int) -> None:
        every = often(self.FAULT_EACH, 1)
        self.faults = seed % every, every


class TestMemoryBackend(Contract):
    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        made = MemoryBackend(name)
        made.bind(key, value)
        return made


class TestSqliteBackend(Contract):
    cannot_hold = (pa.uint64(),)

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "rows.db"

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return SqliteBackend(self.path, name, key, value)


class StagedSqlite(SqliteBackend):
    _staged_from_rows = 0


@pytest.mark.rules_only
class TestStagedSqliteBackend(TestSqliteBackend):
    """All batches go through the temporary table, whatever their size."""

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return StagedSqlite(self.path, name, key, value)


@pytest.mark.behaviour("3.6")
@pytest.mark.rules_only
class TestLmdbBackend(Contract):
    """A backend from outside, under the suite that its author runs."""

    longest_key = 505

    @pytest.fixture(autouse=True)
    def folder_of_files(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return LmdbBackend(self.folder / name, key, value)


@pytest.mark.rules_only
class TestPickledBackend(Contract):
    """The scratch copies of ``verify``, where SQLite's own types do not suffice."""

    @pytest.fixture(autouse=True)
    def folder_of_files(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return PickledBackend(self.folder / name, key, value)

    def test_what_cannot_be_held_is_refused_when_it_is_declared(self) -> None:
        """Nothing is refused: it may stand for any other backend."""
        for kind in (pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.timestamp("ns")):
            self._made(Fields(key=str), Fields.of({"odd": kind}))

    def test_a_null_key_is_refused(self, backend: MapBackend) -> None:
        """It is not, as in memory."""
        state = OpaqueMapState(backend)
        attempt = TransactionAttempt(1, 1)
        state.prepare("standalone")
        state.begin_commit(attempt)
        state.multi_put([(None,)], [1])
        state.commit(attempt)
        assert state.get((None,)) == 1 and [key for key, _ in backend.scan()] == [(None,)]


class IgnoresHeaders(MemoryBackend):
    def multi_put(self, header: Any, keys: Any, expected_stamps: Any, rows: Any) -> None:
        super().multi_put(self.read_header(), keys, expected_stamps, rows)


class IgnoresStamps(MemoryBackend):
    def multi_put(self, header: Any, keys: Any, expected_stamps: Any, rows: Any) -> None:
        found = [row.stamp if row is not None else None for row in self.multi_get(keys)]
        super().multi_put(header, keys, found, rows)


@pytest.mark.rule("C4")
@pytest.mark.parametrize(
    ("backend", "held"),
    [
        (IgnoresHeaders, BackendContract.test_put_under_another_header_writes_nothing),
        (IgnoresStamps, BackendContract.test_put_is_conditional_on_every_stamp_and_atomic),
    ],
)
def test_the_suite_finds_a_backend_that_writes_without_its_condition(
    backend: type[MemoryBackend], held: Callable[[BackendContract, MapBackend], None]
) -> None:
    held(BackendContract(), MemoryBackend())
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        held(BackendContract(), backend())


@pytest.mark.integration
class TestPostgresBackend(Contract):
    FAULT_EACH = 9

    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer) -> None:
        self.dsn = postgres.dsn

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return PostgresBackend(self.dsn, name, key, value)


class ColumnarPostgres(PostgresBackend):
    _columnar_from_rows = 0


@pytest.mark.rules_only
class TestColumnarPostgresBackend(TestPostgresBackend):
    """Arrow makes the arrays of all batches, whatever their size."""

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return ColumnarPostgres(self.dsn, name, key, value)


@pytest.mark.integration
@pytest.mark.rules_only
class TestMySqlBackend(Contract):
    FAULT_EACH = 9
    longest_key = 768
    holds_infinities = False

    @pytest.fixture(autouse=True)
    def server(self, mariadb: MariaDbServer) -> None:
        self.dsn = mariadb.dsn

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return MySqlBackend(self.dsn, name, key, value)


@pytest.mark.integration
class TestRedisBackend(Contract):
    @pytest.fixture(autouse=True)
    def server(self, redis_server: RedisServer) -> None:
        self.url = redis_server.url

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        return RedisBackend(self.url, name, key, value)
