"""Committers that write for good commit after all others, so that a value that another sink
refuses in the commit can still be left out of the batch (C51, C8).
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from framework import (
    BaseBatchBolt,
    Committer,
    Fields,
    Topology,
    TopologyFailed,
    TransactionalTopologyBuilder,
    submit,
)
from framework.errors import BadRecordError, RetryableError
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from sinks import (
    AppendCommitter,
    DeadLetterTopic,
    OpaqueMapState,
    PostgresTable,
    SqliteBackend,
    SqliteTable,
    StateCommitter,
    Sum,
)
from spouts import (
    JsonCodec,
    MemoryTransactionalSpout,
    OpaqueKafkaTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
)
from tests.kit.oracle import read_topics
from tests.kit.refusing import refused
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.rule("C51"), pytest.mark.rule("C8")]

FIELDS = Fields(word=str, n=int)
HUGE = 2**63 - 1
ROWS = [*([f"w{number % 3}", number] for number in range(20)), ["w1", HUGE], ["w2", 7], ["w0", HUGE], ["w2", 5]]
GOOD = [row for row in ROWS if row[1] != HUGE]


class Outside(BaseBatchBolt, Committer):
    """Writes where nothing can be taken back: a line per transaction and task, with the rows.
    Refuses the number ``refuses``."""

    deterministic = True

    def __init__(self, folder: Path, refuses: int = -1) -> None:
        self._folder, self._refuses = folder, refuses

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self._place, self._attempt, self._rows = f"{context.component_id}-{context.task_index}", batch_id, []

    def execute(self, tup: Any) -> None:
        self._rows.append([tup["word"], tup["n"]])

    def finish_batch(self) -> None:
        if any(n == self._refuses for _, n in self._rows):
            raise BadRecordError(f"{self._refuses} is refused")
        with open(self._folder / f"{self._place}.lines", "a") as lines:
            lines.write(json.dumps([self._attempt.txid, self._rows]) + "\n")


def written_for_good(folder: Path) -> list[list[Any]]:
    """The rows that ``Outside`` wrote. Fails if a task wrote a transaction twice."""
    rows: list[list[Any]] = []
    for path in folder.glob("*.lines"):
        lines = [json.loads(each) for each in path.read_text().splitlines()]
        assert len({txid for txid, _ in lines}) == len(lines)
        rows += [row for _, each in lines for row in each]
    return rows


def builder(take: int, kind: Any = OpaqueMemoryTransactionalSpout) -> TransactionalTopologyBuilder:
    halves = {0: ROWS[::2], 1: ROWS[1::2]}
    return TransactionalTopologyBuilder("order", "spout", kind(halves, FIELDS, take, on_bad_record="skip"))


def summed(folder: Path) -> StateCommitter:
    return StateCommitter(OpaqueMapState(SqliteBackend(folder / "x.db", "sums")), ["word"], {"total": Sum("n")})


def summing(folder: Path, take: int, tasks: int = 1, refuses: int = -1) -> Topology:
    made = builder(take)
    made.set_bolt("outside", Outside(folder, refuses), tasks).fields_grouping("spout", Fields("word"))
    made.set_bolt("sums", summed(folder), tasks).fields_grouping("spout", Fields("word"))
    return made.build()


def sums_of(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        return dict(connection.execute("SELECT word, total FROM sums WHERE NOT _deleted").fetchall())


def totals(rows: list[list[Any]]) -> dict[str, int]:
    return {word: sum(n for each, n in rows if each == word) for word in {each for each, _ in rows}}


@pytest.mark.parametrize("pending", [1, 3])
@pytest.mark.parametrize("take", [2, 100])
def test_a_value_that_a_state_refuses_in_the_commit_is_left_out_before_anything_is_written_for_good(
    tmp_path: Path, runner: tuple[str, dict[str, Any]], take: int, pending: int
) -> None:
    executor, config = runner
    store = MemoryStore()
    topology = summing(tmp_path, take, tasks=2)
    with submit(topology, {**config, "topology.max.spout.pending": pending}, store, executor) as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert len(refused(store, "order")) == 2
    assert sums_of(tmp_path) == totals(GOOD)
    assert sorted(written_for_good(tmp_path)) == sorted(GOOD)


def test_a_value_that_is_refused_where_something_may_be_written_for_good_stops_the_topology(tmp_path: Path) -> None:
    with submit(summing(tmp_path, 100, refuses=7), {}, MemoryStore(), "local") as run:
        with pytest.raises(BadRecordError, match="may have written to a sink that cannot undo") as failed:
            run.wait_until_caught_up(PATIENCE_S)
        assert isinstance(failed.value, TopologyFailed)
        assert "on_bad_record" not in "\n".join(failed.value.lines())  # it is set already


@pytest.mark.parametrize("take", [2, 100])
@pytest.mark.parametrize("beside", [False, True])
def test_a_table_without_a_stamp_refuses_a_value_before_it_writes(tmp_path: Path, take: int, beside: bool) -> None:
    """A table made by hand, whose rows do not say which transaction wrote them. It writes in one
    sql_txn."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE rows (word TEXT, n INTEGER CHECK (n < 1000000))")
        connection.commit()
    made = builder(take, MemoryTransactionalSpout)
    table = SqliteTable(tmp_path / "shop.db", "rows", stamp=None)
    made.set_bolt("rows", AppendCommitter(table)).global_grouping("spout")
    if beside:
        made.set_bolt("sums", summed(tmp_path)).global_grouping("spout")
    store = MemoryStore()
    with submit(made.build(), {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert sorted(map(list, connection.execute("SELECT word, n FROM rows"))) == sorted(GOOD)
    assert len(refused(store, "order")) == 2


@pytest.mark.integration
def test_rows_that_constraints_refuse_become_letters_of_a_topic(topics: Topics, name: str, postgres: Any) -> None:
    """A check, a unique value, a foreign key and a trigger."""
    table = name.replace("-", "_")
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{table}_shops" (shop TEXT PRIMARY KEY)')
        connection.execute(f"INSERT INTO \"{table}_shops\" VALUES ('a'), ('b')")
        connection.execute(
            f'CREATE TABLE "{table}" (id BIGINT UNIQUE DEFERRABLE INITIALLY DEFERRED, '
            f'shop TEXT REFERENCES "{table}_shops", cents BIGINT CHECK (cents >= 0))'
        )
        connection.execute(
            f'CREATE FUNCTION "{table}_odd"() RETURNS trigger LANGUAGE plpgsql AS '
            "$$ BEGIN IF NEW.cents = 13 THEN RAISE check_violation USING MESSAGE = 'thirteen'; END IF; RETURN NEW; END $$"
        )
        connection.execute(
            f'CREATE TRIGGER odd BEFORE INSERT ON "{table}" FOR EACH ROW EXECUTE FUNCTION "{table}_odd"()'
        )
    records = [{"id": number, "shop": "ab"[number % 2], "cents": 100 + number} for number in range(40)]
    bad = {5: {"cents": -1}, 11: {"shop": "nowhere"}, 23: {"id": 3}, 31: {"cents": 13}}
    for number, change in bad.items():
        records[number] |= change
    dead = topics.create(f"{name}-dead")
    topics.send(topics.create(name), [json.dumps(each).encode() for each in records])
    servers = topics.bootstrap_servers
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=servers,
        codec=JsonCodec(Fields(id=int, shop=str, cents=int)),
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTopic(dead, bootstrap_servers=servers),
    )
    made = TransactionalTopologyBuilder(name, "spout", spout)
    made.set_bolt("rows", AppendCommitter(PostgresTable(postgres.dsn, table))).global_grouping("spout")
    topology, store = made.build(), MemoryStore()
    with submit(topology, {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().bad_records == len(bad)
    with psycopg.connect(postgres.dsn) as connection:
        ids = [row[0] for row in connection.execute(f'SELECT id FROM "{table}" ORDER BY id')]
    assert ids == [number for number in range(40) if number not in bad]
    found: list[Any] = []
    read_topics(servers, [dead], found.append)
    assert sorted(int(dict(each.headers())["ratchet.offset"]) for each in found) == sorted(bad)
    assert verify(topology, store).right


# --- what must not count as "nothing is written for good" -----------------------------------------


def stops(made: TransactionalTopologyBuilder) -> None:
    cannot = pytest.raises(BadRecordError, match="may have written to a sink that cannot undo")
    with submit(made.build(), {}, MemoryStore(), "local") as run, cannot:
        run.wait_until_caught_up(PATIENCE_S)


def table_of(folder: Path, name: str, check: str = "") -> SqliteTable:
    """An empty table without a stamp."""
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute(f"CREATE TABLE {name} (word TEXT, n INTEGER {check})")
        connection.commit()
    return SqliteTable(folder / "shop.db", name, stamp=None)


class Writes(BaseBatchBolt):
    """Writes its rows into tables, one after the other. A bolt with a state, and no committer."""

    deterministic = True

    def __init__(self, *tables: SqliteTable) -> None:
        self._tables = tables

    def states(self) -> tuple[SqliteTable, ...]:
        return self._tables

    def bind(self, component_id: str, inputs: Any, parallelism: int) -> None:
        super().bind(component_id, inputs, parallelism)
        for table in self._tables:
            table.bind(FIELDS)

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self._attempt, self._rows = batch_id, []

    def execute(self, tup: Any) -> None:
        self._rows.append({"word": tup["word"], "n": tup["n"]})

    def finish_batch(self) -> None:
        for table in self._tables if self._rows else ():
            table.write(self._attempt, [pa.RecordBatch.from_pylist(self._rows, schema=FIELDS.schema())])


class WritesTwice(Writes, Committer):
    """As a committer."""


class RefusesAfterwards(AppendCommitter):
    """Refuses a batch when it has written it."""

    def keep_for_commit(self) -> None:  # type: ignore[override]
        return None

    def commits_in_one_step(self) -> bool:
        return False

    def finish_batch(self) -> None:
        super().finish_batch()
        raise BadRecordError("too late")


class Passes(BaseBatchBolt, Committer):
    """Emits its rows in the commit phase."""

    deterministic = can_undo = True

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self._rows, self._collector = [], collector

    def execute(self, tup: Any) -> None:
        self._rows.append([tup["word"], tup["n"]])

    def finish_batch(self) -> None:
        for row in self._rows:
            self._collector.emit(row)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def test_a_committer_of_two_tables_does_not_refuse_before_it_writes(tmp_path: Path) -> None:
    made = builder(100, MemoryTransactionalSpout)
    tables = table_of(tmp_path, "a"), table_of(tmp_path, "b", "CHECK (n < 1000000)")
    made.set_bolt("both", WritesTwice(*tables)).global_grouping("spout")
    stops(made)


def test_a_subclass_may_refuse_a_batch_after_it_has_written_it(tmp_path: Path) -> None:
    made = builder(100, MemoryTransactionalSpout)
    made.set_bolt("rows", RefusesAfterwards(table_of(tmp_path, "a"))).global_grouping("spout")
    stops(made)


def test_a_bolt_with_a_state_below_a_committer_commits_last_too(tmp_path: Path) -> None:
    made = builder(100, MemoryTransactionalSpout)
    made.set_bolt("passes", Passes()).global_grouping("spout")
    made.set_bolt("writes", Writes(table_of(tmp_path, "a"))).global_grouping("passes")
    made.set_bolt("sums", summed(tmp_path)).global_grouping("passes")
    with submit(made.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert sorted(map(list, connection.execute("SELECT word, n FROM a"))) == sorted(GOOD)
    assert sums_of(tmp_path) == totals(GOOD)


@pytest.mark.parametrize("name", ["table", "commit", "exchange", "executor", "spark"])
def test_a_failure_after_the_last_levels_counts_whatever_the_components_are_called(tmp_path: Path, name: str) -> None:
    """The first attempt writes, and its end is lost. In the next one, the table refuses a row."""
    database = tmp_path / "shop.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(
            "CREATE TABLE rows (word TEXT, n INTEGER); CREATE TABLE closed (word TEXT);"
            "CREATE TRIGGER t BEFORE INSERT ON rows WHEN EXISTS (SELECT 1 FROM closed WHERE word = NEW.word) "
            "BEGIN SELECT RAISE(ABORT, 'this account is closed'); END;"
        )

    class LosesItsEnd(SqliteTable):
        def raise_header(self, expected: Any, new: Any) -> None:
            if new.open is not None and new.done == new.open.txid and not (tmp_path / "lost").exists():
                (tmp_path / "lost").touch()
                with closing(sqlite3.connect(database)) as other:
                    other.execute("INSERT INTO closed VALUES ('w1')")
                    other.commit()
                raise RetryableError("the connection is lost")
            super().raise_header(expected, new)

    made = builder(100)
    made.set_bolt("outside", Outside(tmp_path)).global_grouping("spout")
    made.set_bolt(name, AppendCommitter(LosesItsEnd(database, "rows"))).global_grouping("spout")
    stops(made)
    assert len(written_for_good(tmp_path)) == len(ROWS)
