"""``verify`` accepts right sinks, names differences, and says when it cannot know."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import sqlite3
import threading
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import BaseBatchBolt, Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, RetryableError
from framework.inspect.full_recomputation import Unverifiable
from framework.inspect.verify import verify
from framework.testing.conformance.backend_test_helpers import either
from framework.transactions import CoordinationStore, MemoryStore
from framework.transactions import documents as documents_module
from framework.transactions.reset import reset_everything, reset_positions
from integration import EmbeddedServers
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    First,
    Last,
    Max,
    Mean,
    MemoryBackend,
    Min,
    OpaqueMapState,
    ParquetTable,
    Reduce,
    SqliteBackend,
    StateCommitter,
    Sum,
    aggregates,
    state_committer,
)
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.replays import OverKafka, kafka_topology, only
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FIELDS = Fields(word=str, n=int)
DATA = {part: [[f"w{each % 11}", each] for each in range(300)] for part in range(3)}


WRITTEN: list[int] = []


class Elsewhere(BaseBatchBolt):
    """A committer that writes to a place that Ratchet does not see."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.rows = 0

    def execute(self, tup: Any) -> None:
        self.rows += 1

    def finish_batch(self) -> None:
        WRITTEN.append(self.rows)


class Audited:
    """A topology with a table and two folders, over a memory source."""

    def __init__(self, folder: Path, data: Any = None) -> None:
        self.folder, self.store = folder, MemoryStore()
        self.spout = OpaqueMemoryTransactionalSpout(data if data is not None else DATA, FIELDS, 40)
        builder = TransactionalTopologyBuilder("audited", "spout", self.spout, 2)
        aggregates = {"count": Count(), "total": Sum("n"), "mean": Mean("n")}
        words = StateCommitter(OpaqueMapState(SqliteBackend(folder / "x.db", "words")), ["word"], aggregates)
        builder.set_bolt("words", words, 2).fields_grouping("spout", Fields("word"))
        builder.set_bolt("parquet", AppendCommitter(ParquetTable(folder / "parquet")), 2).shuffle_grouping("spout")
        builder.set_bolt("delta", AppendCommitter(DeltaLakeTable(folder / "delta"))).shuffle_grouping("spout")
        self.topology: Topology = builder.build()

    def run(self) -> None:
        with submit(self.topology, store=self.store, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)

    def sql(self, statement: str) -> None:
        with sqlite3.connect(self.folder / "x.db") as connection:
            connection.execute(statement)


@pytest.fixture
def audited(tmp_path: Path) -> Audited:
    made = Audited(tmp_path)
    made.run()
    return made


def test_verify_of_untouched_sinks_finds_no_difference(audited: Audited) -> None:
    report = verify(audited.topology, audited.store)
    assert report.right
    assert report.recorded_batches
    assert [each.compared for each in report.states] == [11, 900, 900]
    assert report.not_verified == []


def test_every_key_that_differs_is_named_with_both_values(audited: Audited) -> None:
    audited.sql("UPDATE words SET total = total + 1 WHERE word = 'w3'")
    audited.sql("DELETE FROM words WHERE word = 'w5'")
    audited.sql("UPDATE words SET _deleted = 1 WHERE word = 'w6'")
    report = verify(audited.topology, audited.store)
    words = report.states[0]
    assert words.difference_count == 3
    named = {each.key: each for each in words.differences}
    assert set(named) == {"w3", "w5", "w6"}
    assert named["w3"].found[1] == named["w3"].expected[1] + 1
    assert named["w5"].found is None and named["w6"].found is None
    assert "'w5': the sink has no row, the source gives (81," in "\n".join(report.lines())
    assert not report.right


def test_a_doubled_and_a_lost_file_are_found(audited: Audited) -> None:
    table = ParquetTable(audited.folder / "parquet")
    manifests = sorted((audited.folder / "parquet" / "_manifest").glob("*.json"))
    manifests[0].unlink()
    assert len(table.files()) > 0
    report = verify(audited.topology, audited.store)
    assert report.states[1].difference_count > 0
    assert report.states[2].difference_count == 0


@pytest.mark.slow
def test_without_the_record_of_batches_the_offsets_are_enough(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only([]))
    monkeypatch.setattr("framework.inspect.full_recomputation.RECORDS_PER_BATCH", 100)
    report = verify(audited.topology, audited.store)
    assert report.right
    assert not report.recorded_batches
    audited.sql("UPDATE words SET count = 0 WHERE word = 'w3'")
    assert verify(audited.topology, audited.store).states[0].difference_count == 1


def test_partitions_that_came_later_are_read_from_where_they_began(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited.spout.add_partition("9", [["late", 5]] * 70)
    audited.run()
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only([]))
    report = verify(audited.topology, audited.store)
    assert report.right
    assert report.states[1].compared == 970


@pytest.mark.rule("C19")
def test_input_that_is_gone_is_unverifiable_never_right(audited: Audited) -> None:
    audited.spout.expire("1", 50)
    with pytest.raises(Unverifiable, match="the source has lost what the sinks were made of"):
        verify(audited.topology, audited.store)


@pytest.mark.slow
def test_input_read_before_a_reset_of_positions_is_unverifiable_without_a_record(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_positions(audited.topology, audited.store)
    audited.run()
    assert verify(audited.topology, audited.store).right  # the record holds both readings
    monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only([]))
    with pytest.raises(Unverifiable, match="its positions were reset, or first recorded, at transaction"):
        verify(audited.topology, audited.store)


@pytest.mark.slow
def test_verify_beside_a_running_topology_follows_it(tmp_path: Path) -> None:
    audited = Audited(tmp_path, {0: [["w0", 0]]})
    done = threading.Event()

    def feed() -> None:
        number = 0
        while not done.wait(0.1):
            number += 1
            audited.spout.append("0", [f"w{number % 5}", number])

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        with submit(audited.topology, store=audited.store, executor="local") as run:
            run.wait_for_commit(5, PATIENCE_S)
            for _ in range(3):
                report = verify(audited.topology, audited.store)
                assert report.right, report.lines()
                assert report.txid >= 5
    finally:
        done.set()
        feeder.join()


def test_verify_writes_neither_to_the_sinks_nor_to_the_state(audited: Audited) -> None:
    def everything() -> Any:
        files = Counter(str(path) for path in audited.folder.rglob("*.parquet"))
        with sqlite3.connect(audited.folder / "x.db") as connection:
            return (
                files,
                list(connection.execute("SELECT * FROM words")),
                list(connection.execute("SELECT * FROM _ratchet_headers")),
            )

    before = everything()
    verify(audited.topology, audited.store)
    assert everything() == before


def test_verify_lists_the_sinks_that_it_cannot_check(tmp_path: Path) -> None:
    spout = OpaqueMemoryTransactionalSpout(DATA, FIELDS, 400)
    builder = TransactionalTopologyBuilder("half", "spout", spout, 2)
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    builder.set_bolt("words", StateCommitter(state, ["word"], {"count": Count()})).global_grouping("spout")
    builder.set_committer_bolt("elsewhere", Elsewhere()).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    with pytest.raises(ConfigError, match="has committed no transaction yet"):
        verify(topology, store)
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    written = len(WRITTEN)
    report = verify(topology, store)
    assert report.right
    assert report.not_verified == ["bolt 'elsewhere': it writes where nothing can be compared"]
    assert len(WRITTEN) == written > 0
    only = TransactionalTopologyBuilder("none", "spout", spout, 2)
    only.set_committer_bolt("elsewhere", Elsewhere()).global_grouping("spout")
    with pytest.raises(ConfigError, match="no state that could be compared"):
        verify(only.build(), MemoryStore())


def test_a_bolt_that_fails_during_verify_is_an_error_not_a_result(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteBackend, "multi_put", lambda *arguments, **options: 1 / 0)
    with pytest.raises(RetryableError, match="could not be recomputed.*ZeroDivisionError"):
        verify(audited.topology, audited.store)


# --- arithmetic of its own ------------------------------------------------------------------------

NUMBERS = Fields(k=float, n=int, d=pa.decimal128(38, 2), f=float)
LONG = Decimal("123456789012345678901234567890.12")
ROWS = [
    *([0.0, 1, LONG, 1e16], [-0.0, 2, Decimal("0.01"), 1.0], [-0.0, 4, LONG, -1e16]),
    *([1.5, 3, LONG, math.nan], [1.5, 5, LONG, 2.0]),
]
SUMMED = {0: ROWS * 9, 1: ROWS * 9}


def new_one(self: Any, old: Any, new: Any) -> Any:
    return new


FAULTS: dict[str, list[tuple[Any, str, Any]]] = {
    "none": [],
    "decimals are rounded": [(aggregates, "EXACT", decimal.Context(prec=28))],
    "a sum is off by one": [(aggregates.Sum, "_merge", lambda self, old, new: old + new + (new == 24))],
    "the last is the greatest": [(aggregates.Max, "_merge", new_one)],
    "nan is passed over": [(state_committer, "has_nan", lambda column: False)],
    "the first is lost": [(aggregates.First, "_merge", new_one)],
    "a partial result is lost": [(state_committer.Fold, "_merged", lambda self, batches: batches[-1])],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_wrong_sums_though_it_runs_with_the_same_wrong_code(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The same wrong code runs when the sinks are written and when they are verified."""
    for where, name, wrong in FAULTS[fault]:
        monkeypatch.setattr(where, name, wrong)
    spout = OpaqueMemoryTransactionalSpout(SUMMED, NUMBERS, 7)
    builder = TransactionalTopologyBuilder("numbers", "spout", spout, 2)
    kept = {
        "rows": Count(),
        "total": Sum("n"),
        "exact": Sum("d"),
        "mean": Mean("d"),
        "most": Max("n"),
        "above": Max("f"),
        "least": Min("d"),
        "first": First("n"),
        "last": Last("n"),
        "sum": Sum("f"),
        "bits": Reduce("n", either),
    }
    bolt = StateCommitter(OpaqueMapState(MemoryBackend()), ["k"], kept)
    builder.set_bolt("kept", bolt, 2).fields_grouping("spout", Fields("k"))
    topology, store = builder.build(), MemoryStore()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    report = verify(topology, store)
    assert report.right == (fault == "none"), report.lines()
    assert report.states[0].compared == 2


# --- from Kafka, by the command line --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.integration
def test_verify_from_the_command_line_over_kafka_exits_3_on_a_difference(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(name, 2)
    for part in range(2):
        topics.send(topic, [f"w{each % 7}".encode() for each in range(200)], part)
    words = OverKafka("tests.kit.replays:kafka_topology", servers, topic, tmp_path / "x.db")
    topology = kafka_topology(words.settings)
    words.catch_up(topology)

    right = words.ratchet("verify", "--json")
    assert right.returncode == 0, right.stderr
    report = json.loads(right.stdout)
    assert (report["right"], report["states"][0]["compared"], report["recorded_batches"]) == (True, 7, True)
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE words SET count = count - 1 WHERE word = 'w2'")
    wrong = words.ratchet("verify")
    assert wrong.returncode == 3
    assert "1 differ" in wrong.stdout
    assert "'w2': the sink has (57,), the source gives (58,)" in wrong.stdout
    store: CoordinationStore = _store(servers)
    try:
        monkeypatch.setattr("framework.transactions.history_reader.read_transaction", only([]))
        spans = verify(topology, store)
        assert (spans.recorded_batches, spans.states[0].difference_count) == (False, 1)
        assert documents_module.committed_txid(store, topology.id) == spans.txid > 0
    finally:
        store.close()
    topics.delete(topic)
    monkeypatch.setattr("spouts.kafka.planning.lost_records.BELIEVED_AFTER_S", 0.5)
    gone = words.ratchet("verify")
    assert gone.returncode in (1, 3)
    assert len(gone.stderr.strip().splitlines()) >= 1
    assert gone.stdout == ""


def _store(servers: EmbeddedServers) -> CoordinationStore:
    from framework.transactions import ZooKeeperStore

    return ZooKeeperStore(servers.zookeeper, "/ratchet")


NIGHT = datetime.datetime(2024, 10, 27, 0, 30, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [1.0, math.nan, math.nan, -0.0, None]),
        (pa.list_(pa.float64()), [[1.0, math.nan], [], None, [None]]),
        (
            pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
            [{"a": 1, "b": ["x"]}, {"a": None, "b": None}, None],
        ),
        (pa.map_(pa.string(), pa.float64()), [[("a", 1.0), ("b", math.nan)], [], None]),
        (pa.timestamp("us", tz="Europe/Berlin"), [NIGHT, NIGHT + datetime.timedelta(hours=1), None]),
        (pa.list_(pa.timestamp("us", tz="Europe/Berlin")), [[NIGHT], [NIGHT + datetime.timedelta(hours=1)]]),
    ],
    ids=lambda each: str(each) if isinstance(each, pa.DataType) else "",
)
def test_rows_of_any_type_are_compared_in_a_table_of_files(
    tmp_path: Path, kind: pa.DataType, values: list[Any]
) -> None:
    """NaN equals NaN, nested values are compared by value,
    and the hour that comes twice is two hours.
    """
    store = MemoryStore()

    def over(*values: Any) -> Topology:
        rows = [[number, value] for number, value in enumerate(values)]
        spout = OpaqueMemoryTransactionalSpout({0: rows}, Fields.of({"n": pa.int64(), "v": kind}), 2)
        builder = TransactionalTopologyBuilder("audited", "spout", spout)
        builder.set_bolt("rows", AppendCommitter(ParquetTable(tmp_path / "rows"))).shuffle_grouping("spout")
        return builder.build()

    with submit(over(*values), store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    report = verify(over(*values), store)
    assert report.right, report.lines()
    assert report.states[0].compared == len(values)
    assert verify(over(*values[1:], values[0]), store).states[0].difference_count > 0


class Doubled(StateCommitter):
    """A subclass: ``verify`` runs a copy of it, whose state is a scratch copy."""


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.int64())], ids=["NaN", "a list"])
def test_values_that_sqlite_cannot_keep_are_recomputed_by_a_copy_of_the_committer(kind: pa.DataType) -> None:
    given: list[Any] = [1.0, math.nan, math.nan, 2.0] if kind == pa.float64() else [[1], [], [2, 3], [4]]
    data = {0: [[f"w{each % 3}", value] for each, value in enumerate(given)]}
    spout = OpaqueMemoryTransactionalSpout(data, Fields(word=str, x=kind), 2)
    builder = TransactionalTopologyBuilder("odd", "spout", spout, 1)
    backends = [MemoryBackend(), MemoryBackend()]
    for number, backend in enumerate(backends):
        last = Doubled(OpaqueMapState(backend), ["word"], {"last": Last("x")})
        builder.set_bolt(f"last{number}", last).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    report = verify(topology, store)
    assert report.right and [each.compared for each in report.states] == [3, 3]
    shared = backends[1]._rows()
    shared.rows[("w0",)] = shared.rows[("w0",)]._replace(value=(None,))
    report = verify(topology, store)
    assert [each.difference_count for each in report.states] == [0, 1]


def test_decimals_of_whole_hundreds_are_verified(tmp_path: Path) -> None:
    """The scale of such decimals is negative."""
    store, fields = MemoryStore(), Fields.of({"word": pa.string(), "n": pa.decimal128(5, -2)})
    spout = OpaqueMemoryTransactionalSpout({0: [["a", Decimal(100)], ["a", Decimal(300)]]}, fields, 1)
    builder = TransactionalTopologyBuilder("audited", "spout", spout)
    sums = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "sums")), ["word"], {"sum": Sum("n")})
    builder.set_bolt("sums", sums).global_grouping("spout")
    topology = builder.build()
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert verify(topology, store).right


def test_a_state_that_joined_later_is_left_out_and_the_report_says_since_when(tmp_path: Path) -> None:
    """It rightly holds nothing from before it joined."""
    store = MemoryStore()

    def with_states(*names: str, rows: int) -> Topology:
        data = {0: [[f"w{each % 3}", each] for each in range(rows)]}
        builder = TransactionalTopologyBuilder("audited", "spout", OpaqueMemoryTransactionalSpout(data, FIELDS, 10))
        for name in names:
            state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", name))
            builder.set_bolt(name, StateCommitter(state, ["word"], {"count": Count()})).global_grouping("spout")
        return builder.build()

    for topology in (with_states("early", rows=30), with_states("early", "late", rows=50)):
        with submit(topology, store=store, executor="local", accept_changed_topology=True) as run:
            run.wait_until_caught_up(PATIENCE_S)
    report = verify(topology, store)
    assert report.right, report.lines()
    assert [each.compared for each in report.states] == [3]
    assert report.not_verified == ["bolt 'late': its state joined at transaction 4, and holds nothing from before"]
    reset_everything(topology, store)
    with submit(topology, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    report = verify(topology, store)
    assert report.right and report.not_verified == []
