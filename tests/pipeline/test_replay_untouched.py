"""Replay and verify run copies of committers: what the real ones write to stays as it is. They run
them in the layout of the run."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import BaseTransactionalBolt, Topology, TopologyFailed, TransactionalTopologyBuilder
from framework.errors import ConfigError, RetryableError
from framework.inspect.find_poison import find_poison
from framework.inspect.replay import plan_to_replay, replay
from framework.inspect.verify import verify
from framework.topology import FencedState, OpenCommit
from framework.transactions import MemoryStore
from framework.transactions.plans import plan_digest
from sinks import AppendCommitter, Max, OpaqueMapState, ParquetTable, SqliteBackend, StateCommitter
from sinks.read_as_of import check_held, for_reading
from sinks.sql import sqlite_table_base as sqlite_module
from spouts import MemoryTransactionalSpout
from tests.kit.replays import FIELDS, Same, Sums, replayed, run, state_at, topology_of


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class Anew(Sums):
    """Makes its states at each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def states(self) -> Sequence[FencedState]:
        return [state_at(self.folder)]


class OfTheClass(Sums):
    """Has its state on the class."""

    shared: FencedState

    def __init__(self, folder: Path) -> None:
        type(self).shared = state_at(folder)

    def states(self) -> Sequence[FencedState]:
        return [self.shared]


class Unpickled(Sums):
    """Each copy makes its state anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(state_at(folder))
        self.folder = folder

    def __getstate__(self) -> Any:
        return {**vars(self), "kept": []}

    def __setstate__(self, attributes: Any) -> None:
        vars(self).update(attributes, kept=[state_at(attributes["folder"])])


def everything(folder: Path) -> Any:
    with sqlite3.connect(folder / "x.db") as connection:
        return [connection.execute(f"SELECT * FROM {each}").fetchall() for each in ("sums", "_ratchet_headers")]


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Anew, "makes its states anew"), (OfTheClass, "shared by all copies"), (Unpickled, "makes its states anew")],
)
def test_a_committer_whose_copies_would_write_to_the_real_sink_is_refused(
    tmp_path: Path, store: MemoryStore, kind: Any, why: str
) -> None:
    built = topology_of([["k", 1], ["k", 2], ["k", 3]], kind(tmp_path))
    run(built, store)
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE sums SET v = 99")
    before = everything(tmp_path)
    for txid in (1, 3):
        report = replayed(built, store, txid)
        assert report.states == [] and report.agrees is None
        assert why in report.left_out["bolt"] and "keep states as attributes of the object" in report.left_out["bolt"]
        assert everything(tmp_path) == before
    with pytest.raises(ConfigError, match=f"bolt 'bolt': .*{why}.*keep states as attributes"):
        verify(built, store)
    assert everything(tmp_path) == before


class Part(BaseTransactionalBolt):
    """One row per task: what it got."""

    deterministic = True

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.numbers = collector, list[int]()

    def execute(self, tup: Any) -> None:
        self.numbers.append(tup["n"])

    def finish_batch(self) -> None:
        if self.numbers:
            self.collector.emit(["sum", sum(self.numbers)])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def test_a_batch_is_repeated_in_the_layout_of_the_run(tmp_path: Path, store: MemoryStore) -> None:
    """Which the number of records of each partition decides."""
    data = {0: [["a", each] for each in range(6)], 1: [["b", 100 + each] for each in range(6)]}
    builder = TransactionalTopologyBuilder("parts", "spout", MemoryTransactionalSpout(data, FIELDS, 3), 2)
    builder.set_bolt("part", Part(), 2).shuffle_grouping("spout")
    builder.set_bolt("rows", AppendCommitter(ParquetTable(tmp_path / "rows"))).global_grouping("part")
    most = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "most")), ["word"], {"most": Max("n")})
    builder.set_bolt("most", most).global_grouping("part")
    built = builder.build()
    run(built, store)
    assert [replayed(built, store, txid).agrees for txid in (1, 2)] == [True, True]
    report = verify(built, store)
    assert report.right, report.lines()


class Apart(Same):
    """Fails where a task gets rows of both partitions."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.words = set[str]()

    def execute(self, tup: Any, collector: Any) -> None:
        self.words.add(tup["word"])
        if len(self.words) > 1:
            raise ValueError("both words")
        super().execute(tup, collector)


def test_a_batch_that_does_not_fail_in_its_own_layout_has_no_poison(tmp_path: Path, store: MemoryStore) -> None:
    data = {0: [["a", each] for each in range(6)], 1: [["b", each] for each in range(6)]}
    builder = TransactionalTopologyBuilder("apart", "spout", MemoryTransactionalSpout(data, FIELDS, 6), 2)
    builder.set_bolt("apart", Apart(), 2).shuffle_grouping("spout")
    builder.set_bolt("rows", AppendCommitter(ParquetTable(tmp_path / "rows"))).global_grouping("apart")
    built = builder.build()
    run(built, store)
    assert find_poison(built, store, txid=1) is None


class Prepared(Sums):
    """Makes its state anew in each task, which no look at the bolt can tell."""

    def __init__(self, folder: Path) -> None:
        super().__init__(state_at(folder))
        self.folder = folder

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        super().prepare(conf, context, collector, batch_id)
        self.kept = [state_at(self.folder)]


def test_the_fence_of_the_real_sink_refuses_a_copy_that_reaches_for_it(tmp_path: Path, store: MemoryStore) -> None:
    """Also while the sink is open for the first attempt at that transaction, as a driver that was
    killed leaves it."""

    class Fails(Prepared):
        def execute(self, tup: Any) -> None:
            super().execute(tup)
            if tup["n"] == 2:
                raise ValueError("number 2")

    rows = [["k", 1], ["k", 2]]
    with pytest.raises(TopologyFailed):
        run(topology_of(rows, Fails(tmp_path)), store, {"topology.max.attempts": 1})
    built = topology_of(rows, Prepared(tmp_path))
    txid, plan = planned = plan_to_replay(store, built)
    backend = state_at(tmp_path).backend
    header = backend.read_header()
    backend.raise_header(header, header.opened(header.epoch, OpenCommit(txid, 1, plan_digest(plan))))
    before = everything(tmp_path)
    assert (txid, header.epoch) == (2, 1)
    with pytest.raises(RetryableError, match="transaction 2 cannot be replayed: .* is open for .*txid=2"):
        replay(built, store, planned=planned)
    with pytest.raises(RetryableError, match="could not be recomputed: .* is open for .*txid=2"):
        verify(built, store)
    assert everything(tmp_path) == before


# --- files of SQLite ------------------------------------------------------------------------------


@pytest.fixture
def at_rest(tmp_path: Path, store: MemoryStore) -> Iterator[Topology]:
    """A topology that has run, and whose file nobody has open."""
    built = topology_of([["k", 1]] * 3, Sums(state_at(tmp_path)))
    run(built, store)
    sqlite_module.SqliteFile.at(str(tmp_path / "x.db")).close()
    yield built


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_replay_leaves_the_file_of_sqlite_as_it_is(
    tmp_path: Path, store: MemoryStore, at_rest: Topology, mode: str
) -> None:
    connection = sqlite3.connect(tmp_path / "x.db")
    assert connection.execute(f"PRAGMA journal_mode = {mode}").fetchone() == (mode,)
    connection.close()

    def files() -> dict[str, str]:
        return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in tmp_path.iterdir()}

    before = files()
    assert before.keys() == {"x.db"}
    assert replayed(at_rest, store, 3).agrees
    assert files() == before


def test_a_file_is_read_while_a_driver_writes_to_it(tmp_path: Path) -> None:
    writer = state_at(tmp_path).backend
    header = writer.prepare("topology")
    reader = for_reading(writer)
    for txid in range(1, 4):
        opened = header.opened(1, OpenCommit(txid, 1, "digest"))
        writer.raise_header(header, opened)
        assert reader.read_header() == opened and check_held(reader, "topology") == opened
        header = opened
    reader.close()
    assert writer.read_header() == header
    with pytest.raises(ConfigError, match="belongs to topology 'topology', not 'another'"):
        check_held(reader, "another")
    reader.close()
    writer.close()
    assert [each.name for each in tmp_path.iterdir()] == ["x.db"]
