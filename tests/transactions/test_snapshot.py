"""``ratchet.read``: whole states, as of one transaction."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pandas as pd
import pyarrow as pa
import pytest

import ratchet
from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.commands.read import app
from framework.coordination import Put
from framework.errors import ConfigError, MovedOnError
from framework.inspect import state_snapshots as snapshot_module
from framework.testing.conformance.backend_test_helpers import transact
from framework.transactions import MemoryStore, committed_txid
from framework.transactions.run import Run
from integration import EmbeddedServers, PostgresServer, RedisServer
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    KafkaSink,
    MemoryBackend,
    NonTransactionalMapState,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
)
from sinks.lake.file_table_base import FileTable
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.replays import OverKafka, command, kafka_topology
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FIELDS = Fields(word=str, n=int)
KEY, VALUE = Fields(word=str), Fields(v=int)


class Words:
    """Counts words in two states, and keeps the rows in files; two rows make a transaction."""

    def __init__(self, folder: Path, *backends: Any) -> None:
        self.spout = OpaqueMemoryTransactionalSpout({0: []}, FIELDS, 2)
        self.store = MemoryStore()
        builder = TransactionalTopologyBuilder("words", "spout", self.spout, at_least_once=True)
        for number, each in enumerate(backends or [SqliteBackend(folder / "x.db", f"t{each}") for each in range(2)]):
            committer = StateCommitter(OpaqueMapState(each), ["word"], {"count": Count(), "total": Sum("n")})
            builder.set_bolt(f"words{number}", committer).global_grouping("spout")
        builder.set_bolt("rows", AppendCommitter(ParquetTable(folder / "rows"))).global_grouping("spout")
        self.builder = builder

    def build(self) -> Topology:
        return self.builder.build()

    def feed(self, *rows: tuple[str, int]) -> None:
        for each in rows:
            self.spout.append(0, list(each))

    def run(self, topology: Topology) -> None:
        with submit(topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)


@pytest.fixture
def words(tmp_path: Path) -> Words:
    made = Words(tmp_path)
    made.feed(("dog", 1), ("cat", 2), ("dog", 3), ("emu", 4))
    return made


def rows(found: Any) -> dict[str, tuple[int, int]]:
    return {each["word"]: (each["count"], each["total"]) for each in found.arrow().to_pylist()}


def test_all_states_of_a_topology_are_read_as_of_the_newest_transaction_or_the_one_before(words: Words) -> None:
    topology = words.build()
    words.run(topology)
    with ratchet.read(topology, store=words.store) as found:
        assert (found.txid, [each.name for each in found]) == (2, ["words0", "words1", "rows"])
        assert rows(found["words0"]) == rows(found["words1"]) == {"dog": (2, 4), "cat": (1, 2), "emu": (1, 4)}
        assert found["rows"].arrow().to_pylist()[-1] == {"word": "emu", "n": 4}
        assert [each.row_count for each in found] == [3, 3, 4]
    with ratchet.read(topology, as_of=1) as found:
        assert rows(found["words1"]) == {"dog": (1, 1), "cat": (1, 2)}
        assert found["rows"].row_count == 2
    with pytest.raises(ConfigError, match="transaction 3 is not committed: the newest is 2"):
        ratchet.read(topology, as_of=3)


def test_a_state_that_was_changed_twice_since_is_refused_and_says_which_can_be_asked_for(words: Words) -> None:
    words.feed(("dog", 5), ("dog", 6))
    topology = words.build()
    words.run(topology)
    with pytest.raises(MovedOnError, match="'dog'.*changed after transaction 2.*the newest transaction is 3"):
        ratchet.read(topology, as_of=1)
    with ratchet.read(topology, states=["rows"], as_of=1) as found:  # files know each transaction
        assert found["rows"].row_count == 2


def test_a_state_alone_is_read_without_a_topology() -> None:
    state = OpaqueMapState(MemoryBackend())
    state.bind(KEY, VALUE)
    state.prepare("topology")
    with pytest.raises(ConfigError, match="no transaction is committed yet"):
        ratchet.read(state)
    transact(state, 1, 1, {"dog": 1})
    with ratchet.read(state) as found:
        assert found[state.location].arrow().to_pylist() == [{"word": "dog", "v": 1}]


def test_a_state_that_is_ahead_is_read_as_of_the_one_that_is_behind() -> None:
    ahead, behind = (OpaqueMapState(MemoryBackend()) for _ in range(2))
    for each in (ahead, behind):
        each.bind(KEY, VALUE)
        each.prepare("topology")
        transact(each, 1, 1, {"dog": 1})
    transact(ahead, 2, 1, {"dog": 10, "cat": 1})
    with ratchet.read(ahead, behind) as found:
        assert found.txid == 1
        assert [each.arrow().to_pylist() for each in found] == [[{"word": "dog", "v": 1}]] * 2


def test_what_is_not_closed_is_not_read_where_the_store_is_given(words: Words) -> None:
    """All sinks hold transaction 2, and the driver may repeat it until the store has it, too."""
    topology = words.build()
    words.run(topology)
    behind = MemoryStore()
    for name in ("coordinator/currtx", "incarnation"):
        held = words.store.get(f"words/{name}")
        assert held is not None
        behind.apply([Put(f"words/{name}", held.replace(b"3", b"2") if name.endswith("currtx") else held)])
    assert committed_txid(behind, "words") == 1
    with ratchet.read(topology, store=behind) as found:
        assert found.txid == 1 and rows(found["words0"]) == {"dog": (1, 1), "cat": (1, 2)}


def between(monkeypatch: pytest.MonkeyPatch, moves: Callable[[int], None]) -> None:
    """Call ``moves`` with 0, 1, 2, ... between the reading of any two states."""
    calls = itertools.count()
    held = snapshot_module._Attempt._held

    def interfered(self: Any, each: Any, reading: Any, txid: int, file: Path) -> Any:
        moves(next(calls))
        return held(self, each, reading, txid, file)

    monkeypatch.setattr(snapshot_module._Attempt, "_held", interfered)


@pytest.mark.parametrize("transactions", [1, 2, 3])
def test_a_driver_that_commits_between_two_states_does_not_split_a_transaction(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: int
) -> None:
    """In memory, where nothing stands still: after two transactions the rows do not tell, and all
    is read again."""
    words = Words(tmp_path, MemoryBackend(), MemoryBackend())
    topology = words.build()
    with submit(topology, store=words.store, executor="local") as run:

        def commit(*_: int) -> None:
            for _ in range(transactions):
                words.feed(("dog", 1), ("cat", 1))
                run.wait_until_caught_up(PATIENCE_S)

        commit()
        tries: list[int] = []

        def moves(call: int) -> None:
            tries.append(call)
            if call == 1:  # the first state has been read
                commit()

        between(monkeypatch, moves)
        with ratchet.read(topology, states=["words0", "words1"], store=words.store) as found:
            again = transactions > 1
            assert len(tries) == (4 if again else 2)
            assert found.txid == (2 if again else 1) * transactions
            expected = {"dog": (found.txid, found.txid), "cat": (found.txid, found.txid)}
            assert rows(found["words0"]) == rows(found["words1"]) == expected


@pytest.mark.parametrize(("attempt", "epoch"), [(2, 1), (1, 2)], ids=["repeated", "by another leader"])
def test_a_transaction_that_is_repeated_between_two_states_is_read_of_one_attempt(
    monkeypatch: pytest.MonkeyPatch, attempt: int, epoch: int
) -> None:
    """Its sinks hold it, and ZooKeeper does not yet: the next attempt may give other values."""
    states = [OpaqueMapState(MemoryBackend()) for _ in range(2)]
    for each in states:
        each.bind(KEY, VALUE)
        each.prepare("topology")
        transact(each, 1, 1, {"dog": 1})

    def moves(call: int) -> None:
        if call == 1:
            for each in states:
                transact(each, 1, attempt, {"dog": 100}, replay=True, epoch=epoch)

    between(monkeypatch, moves)
    with ratchet.read(*states) as found:
        assert [each.arrow().to_pylist() for each in found] == [[{"word": "dog", "v": 100}]] * 2


def test_a_driver_that_is_always_faster_ends_the_reading_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words(tmp_path, MemoryBackend(), MemoryBackend())
    topology = words.build()
    with submit(topology, store=words.store, executor="local") as run:

        def moves(call: int) -> None:
            for _ in range(2):
                words.feed(("dog", 1), ("cat", 1))
                run.wait_until_caught_up(PATIENCE_S)

        moves(0)
        between(monkeypatch, moves)
        monkeypatch.setattr(snapshot_module, "TRIES", 3)
        with pytest.raises(MovedOnError, match="tried 3 times, and the driver is faster; read fewer states"):
            ratchet.read(topology, store=words.store)


def test_states_of_one_sqlite_file_are_read_as_of_one_moment_however_fast_the_driver_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words(tmp_path)
    topology = words.build()
    with submit(topology, store=words.store, executor="local") as run:

        def moves(call: int) -> None:
            for _ in range(3):
                words.feed(("dog", 1), ("cat", 1))
                run.wait_until_caught_up(PATIENCE_S)

        moves(0)
        between(monkeypatch, moves)
        with ratchet.read(topology, states=["words0", "words1"], store=words.store) as found:
            assert found.txid == 3 and committed_txid(words.store, "words") == 9
            assert rows(found["words0"]) == rows(found["words1"]) == {"dog": (3, 3), "cat": (3, 3)}
        assert not list(tmp_path.glob("ratchet-read-*"))


def reading(topology: Topology, store: MemoryStore, run: Run, feed: Callable[[], None]) -> Iterator[Any]:
    """Snapshots by a thread, while transactions are committed."""
    seen: list[Any] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                with ratchet.read(topology, store=store) as found:
                    seen.append((found.txid, [each.arrow().to_pylist() for each in found]))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(40):
        feed()
        run.wait_until_caught_up(PATIENCE_S)
    done.set()
    reader.join(PATIENCE_S)
    assert not failures, failures
    yield from seen


@pytest.mark.slow
@pytest.mark.integration
def test_snapshots_of_three_stores_and_a_table_never_show_half_a_transaction(
    postgres: PostgresServer, redis_server: RedisServer, tmp_path: Path, name: str
) -> None:
    table = name.replace("-", "_")
    words = Words(
        tmp_path,
        SqliteBackend(tmp_path / "x.db", table),
        PostgresBackend(postgres.dsn, table),
        RedisBackend(redis_server.url, name),
    )
    topology = words.build()
    words.feed(("a", 1), ("b", 1))
    with submit(topology, store=words.store, executor="local") as run:
        run.wait_for_commit(1, PATIENCE_S)
        numbers = itertools.count()
        seen = list(
            reading(topology, words.store, run, lambda: words.feed(("a", next(numbers)), (f"w{next(numbers) % 9}", 1)))
        )
    assert len({txid for txid, _ in seen}) > 3
    for txid, (one, two, three, files) in seen:
        ordered = [sorted(each, key=lambda row: str(row["word"])) for each in (one, two, three)]
        assert ordered[0] == ordered[1] == ordered[2]
        assert len(files) == sum(row["count"] for row in one) == 2 * txid
        assert sum(row["n"] for row in files) == sum(row["total"] for row in one)


# --- engines ---


def test_a_snapshot_becomes_a_pandas_frame(words: Words) -> None:
    topology = words.build()
    words.run(topology)
    with ratchet.read(topology) as found:
        frame = found["words0"].pandas()
        assert dict(zip(frame["word"], frame["total"], strict=True)) == {"dog": 4, "cat": 2, "emu": 4}
        assert found["rows"].pandas()["n"].sum() == 10
    with pytest.raises(ConfigError, match="this snapshot is closed"):
        found["words0"].pandas()


@pytest.mark.parametrize("module", ["duckdb", "pandas"])
def test_a_library_that_is_missing_is_named_with_what_to_install(
    words: Words, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    topology = words.build()
    words.run(topology)
    monkeypatch.setitem(sys.modules, module, None)
    with (
        ratchet.read(topology) as found,
        pytest.raises(ConfigError, match=rf"{module}: pip install 'ratchet-pipelines\[read\]'"),
    ):
        getattr(found["words0"], module)()


def test_a_snapshot_becomes_a_relation_of_duckdb(words: Words) -> None:
    topology = words.build()
    words.run(topology)
    with ratchet.read(topology) as found, duckdb.connect() as connection:
        assert found["words0"].duckdb(connection).aggregate("sum(total)").fetchall() == [(10,)]
        assert found["rows"].duckdb(connection).filter("word = 'dog'").aggregate("sum(n)").fetchall() == [(4,)]
        assert found["words0"].duckdb().aggregate("count(*)").fetchall() == [(3,)]


@pytest.mark.slow
@pytest.mark.spark
def test_a_snapshot_becomes_a_frame_of_spark(words: Words, spark: str) -> None:
    from pyspark.sql import SparkSession

    topology = words.build()
    words.run(topology)
    session = SparkSession.builder.master(spark).getOrCreate()
    with ratchet.read(topology) as found:
        frame = found["words0"].spark(session)
        assert {each.word: each.total for each in frame.collect()} == {"dog": 4, "cat": 2, "emu": 4}
        files = found["rows"].spark(session)
        assert sorted(each.n for each in files.collect()) == [1, 2, 3, 4]
        assert "FileScan" in files._jdf.queryExecution().toString()


# --- files ---


def test_a_table_gives_exactly_the_files_of_its_version(words: Words) -> None:
    import pyarrow.parquet as pq

    topology = words.build()
    words.run(topology)
    for txid in (1, 2):
        with ratchet.read(topology, as_of=txid, files_only=True) as found:
            (state,) = found
            files = state.files()
            assert sum(each.rows for each in files) == 2 * txid
            assert all(each.path.stat().st_size == each.size for each in files)
            tables = pa.concat_tables([pq.read_table(each.path) for each in files])
            assert tables.to_pylist() == state.arrow().to_pylist()
    with ratchet.read(topology) as found, pytest.raises(ConfigError, match="no table of files: read its rows"):
        found["words0"].files()


@pytest.mark.parametrize("kind", [ParquetTable, DeltaLakeTable])
def test_files_of_a_partitioned_table_come_with_the_values_that_they_lack(
    tmp_path: Path, kind: type[FileTable]
) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["dog/s", 1], ["cat", 2], ["emu", 3]]}, FIELDS, 2)
    builder = TransactionalTopologyBuilder("parts", "spout", spout)
    builder.set_bolt("rows", AppendCommitter(kind(tmp_path / "t", partition_by=["word"]))).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with ratchet.read(topology, as_of=1) as found:
        files = found["rows"].files()
        assert sorted(str(each.partition["word"]) for each in files) == ["cat", "dog/s"]
        assert all(each.path.stat().st_size == each.size and each.rows == 1 for each in files)
        assert sorted(found["rows"].pandas()["word"]) == ["cat", "dog/s"]
    with ratchet.read(topology, store=store) as found:
        assert sorted(found["rows"].pandas()["word"]) == ["cat", "dog/s", "emu"]


def test_a_version_that_delta_has_forgotten_is_one_line(tmp_path: Path) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["dog", each] for each in range(3)]}, FIELDS, 1)
    builder = TransactionalTopologyBuilder("parts", "spout", spout)
    builder.set_bolt("rows", AppendCommitter(DeltaLakeTable(tmp_path / "t"))).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    deltalake.DeltaTable(str(tmp_path / "t")).create_checkpoint()
    (tmp_path / "t" / "_delta_log" / "00000000000000000000.json").unlink()
    with pytest.raises(MovedOnError, match="no longer knows its version of transaction 1.*the newest transaction is 3"):
        ratchet.read(topology, as_of=1)
    with ratchet.read(topology) as found:
        assert found["rows"].row_count == 3


@pytest.mark.integration
def test_a_topology_over_kafka_is_read_by_the_command(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    topic = topics.create(name, 2)
    topics.send(topic, [b"dog", b"cat", b"dog"], 0)
    words = OverKafka("tests.kit.replays:kafka_topology", servers, topic, tmp_path / "x.db")
    nothing = words.ratchet("read")
    assert nothing.returncode == 2 and "no state can be read: words: there is no file" in nothing.stderr
    words.catch_up(kafka_topology(words.settings))
    answer = words.ratchet("read")
    assert (answer.returncode, answer.stderr) == (0, "as of transaction 1\n")
    assert sorted(answer.stdout.splitlines()[1:]) == ["  word='cat', count=1", "  word='dog', count=2"]
    head, row = map(json.loads, words.ratchet("read", "words", "--key", "dog", "--json").stdout.splitlines())
    assert (head["topology"], head["txid"]) == (topic, 1)
    assert row == {"type": "row", "state": "words", "row": {"word": "dog", "count": 2}}


# --- what cannot be read ---


def mixed(folder: Path) -> tuple[Topology, MemoryStore]:
    words = Words(folder, SqliteBackend(folder / "x.db", "words"))
    plain = StateCommitter(NonTransactionalMapState(SqliteBackend(folder / "x.db", "plain")), ["word"], {"n": Count()})
    words.builder.set_bolt("plain", plain).global_grouping("spout")
    words.feed(("dog", 1), ("cat", 2))
    words.run(words.build())
    words.builder.set_bolt("topic", KafkaSink("t", bootstrap_servers="127.0.0.1:1")).global_grouping("spout")
    return words.build(), words.store


def test_what_cannot_be_read_is_left_out_with_the_reason_or_refused_when_it_is_named(tmp_path: Path) -> None:
    topology, store = mixed(tmp_path)
    with ratchet.read(topology, store=store) as found:
        assert [each.name for each in found] == ["words0", "rows"]
        assert found.left_out["topic"].startswith("it writes where nothing is kept for a reader: a Kafka topic")
        assert "may add a batch twice" in found.left_out["plain"]
        with pytest.raises(ConfigError, match="'plain' was not read: .*may add a batch twice"):
            found["plain"]
    with pytest.raises(ConfigError, match="may add a batch twice"):
        ratchet.read(topology, states=["plain"])
    with pytest.raises(ConfigError, match="has no state 'topic'"):
        ratchet.read(topology, states=["topic"])


# --- the command ---


def test_the_command_prints_the_rows_and_their_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology, store = mixed(tmp_path)
    result = command(monkeypatch, store, app=app, topology=topology)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("words0 (table 'words' of ") and lines[0].endswith("): 2 rows")
    assert "  word='dog', count=1, total=1" in lines
    assert "as of transaction 1" in result.stderr
    assert "left out: topic: it writes where nothing is kept for a reader" in result.stderr


def test_the_command_prints_json_csv_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology, store = mixed(tmp_path)

    def ask(*words: str) -> Any:
        return command(monkeypatch, store, *words, app=app, topology=topology)

    head, *found = map(json.loads, ask("words0", "--json").stdout.splitlines())
    assert (head["type"], head["txid"], head["states"][0]["rows"]) == ("read", 1, 2)
    assert {"type": "row", "state": "words0", "row": {"word": "dog", "count": 1, "total": 1}} in found
    assert len(found) == 2
    assert sorted(ask("words0", "--csv").stdout.splitlines()) == ['"cat",1,2', '"dog",1,1', '"word","count","total"']
    assert ask("words0", "--key", "cat", "--key", "cow", "--csv").stdout.splitlines()[1:] == ['"cat",1,2']
    (path,) = ask("--files").stdout.splitlines()
    assert Path(path).is_relative_to(tmp_path / "rows")
    assert (
        len(pd.read_parquet(path)) == duckdb.sql(f"SELECT count(*) FROM read_parquet('{path}')").fetchall()[0][0] == 2
    )
    *_, file = map(json.loads, ask("--files", "--json").stdout.splitlines())
    assert (file["type"], file["path"], file["rows"]) == ("file", path, 2)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["nothing"], 2, "has no state 'nothing': name one of words0"),
        (["--csv"], 2, "--csv writes one state: name words0 or rows"),
        (["--csv", "--json"], 2, "--csv is another form of the rows"),
        (["--key", "dog"], 2, "keys are those of one state: name it"),
        (["rows", "--key", "dog"], 2, "has no keys: leave them out"),
        (["words0", "--files"], 2, "is no table of files: leave --files out"),
        (["--as-of", "9"], 2, "transaction 9 is not committed: the newest is 1"),
    ],
)
def test_the_command_says_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, text: str
) -> None:
    topology, store = mixed(tmp_path)
    result = command(monkeypatch, store, *words, app=app, topology=topology)
    assert result.exit_code == status and text in result.stderr
