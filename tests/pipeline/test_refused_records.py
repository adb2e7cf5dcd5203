"""Records whose values are refused, by a bolt or by a sink, before or after the commit is opened:
the plan leaves them out (C51).
"""

from __future__ import annotations

import datetime
import decimal
import json
import random
import sqlite3
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from framework import (
    ArrowBolt,
    BaseBasicBolt,
    DataFrameBolt,
    Fields,
    Topology,
    TopologyFailed,
    TransactionalTopologyBuilder,
    submit,
)
from framework.errors import BadRecordError
from framework.inspect.full_recomputation import Unverifiable
from framework.inspect.verify import verify
from framework.topology.spouts import LEFT_OUT, LEFT_OUT_FROM
from framework.transactions import MemoryStore, documents, narrowing, term_loop
from framework.transactions.documents import read_history
from framework.transactions.undo import undo
from integration import EmbeddedServers
from ratchet import Json, Pipeline, count, parquet, tumbling
from sinks import (
    Aggregate,
    AppendCommitter,
    Count,
    DeadLetterTable,
    DeadLetterTopic,
    MapState,
    Max,
    Mean,
    MemoryBackend,
    Min,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    Reduce,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
    append,
)
from spouts import (
    JsonCodec,
    MemoryTransactionalSpout,
    OpaqueKafkaTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
)
from tests.kit import refusing
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.oracle import read_topics
from tests.kit.processes import RunProcess
from tests.kit.readers import READERS
from tests.kit.refusing import refused
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.rule("C51")

FIELDS = Fields.of({"word": pa.string(), "n": pa.int64()})
HUGE = 2**63 - 1
KINDS = (OpaqueMapState, TransactionalMapState)


class Picky(ArrowBolt):
    """Refuses the words that ``error`` names, and says so as the user's code does."""

    deterministic = True

    def __init__(self, error: type[Exception] = BadRecordError, prefix: str = "bad") -> None:
        self._error, self._prefix = error, prefix

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        bad = [word for word in batch.column("word").to_pylist() if word is not None and word.startswith(self._prefix)]
        if bad:
            raise self._error(f"the word {bad[0]!r} is refused")
        yield batch

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def built(
    folder: Path, rows: list[list[Any]], kind: type[MapState] = OpaqueMapState, take: int = 100, **changes: Any
) -> Topology:
    """Counts and sums words of two partitions, and keeps the rows in files."""
    spout = MemoryTransactionalSpout if kind is TransactionalMapState else OpaqueMemoryTransactionalSpout
    halves = {0: rows[::2], 1: rows[1::2]}
    policy = changes.get("on_bad_record", "skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout(halves, FIELDS, take, on_bad_record=policy))
    builder.set_bolt(
        "picky", Picky(changes.get("error", BadRecordError), changes.get("prefix", "bad")), 2
    ).shuffle_grouping("spout")
    state = kind(SqliteBackend(folder / "x.db", "words"))
    words = StateCommitter(state, ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("words", words, 2).fields_grouping("picky", Fields("word"))
    builder.set_bolt("rows", AppendCommitter(ParquetTable(folder / "rows"))).global_grouping("picky")
    return builder.build()


def caught_up(topology: Topology, store: MemoryStore, config: Mapping[str, Any] | None = None) -> Any:
    with submit(topology, dict(config or {}), store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    return run


def counts(folder: Path) -> dict[str, tuple[int, int]]:
    with sqlite3.connect(folder / "x.db") as connection:
        rows = connection.execute("SELECT word, count, total FROM words WHERE NOT _deleted").fetchall()
    return {word: (count, total) for word, count, total in rows}


def kept(folder: Path) -> list[int]:
    return sorted(ParquetTable(folder / "rows").to_table().column("n").to_pylist())


def words(count: int) -> list[list[Any]]:
    return [[f"w{number % 7}", number] for number in range(count)]


def expected(rows: list[list[Any]]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for word, n in rows:
        count, total = found.get(word, (0, 0))
        found[word] = count + 1, total + n
    return found


@pytest.mark.quick_for("OpaqueMapState")
@pytest.mark.parametrize("kind", KINDS)
def test_records_that_a_bolt_refuses_are_left_out_and_all_others_count_once(
    tmp_path: Path, kind: type[MapState]
) -> None:
    store, rows = MemoryStore(), words(150)
    good = expected(rows)
    for place, word in ((17, "bad-1"), (90, "bad-2"), (91, "bad-3"), (150, "bad-4")):
        rows.insert(place, [word, 1])
    topology = built(tmp_path, rows, kind)
    caught_up(topology, store)
    assert counts(tmp_path) == good
    assert kept(tmp_path) == list(range(150))
    assert sorted(reason for reason in refused(store).values()) == [
        f"picky: the word 'bad-{number}' is refused" for number in (1, 2, 3, 4)
    ]
    assert verify(topology, store).right


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("take", [100, 7])
def test_records_that_only_a_sink_refuses_are_taken_out_after_a_roll_back(
    tmp_path: Path, kind: type[MapState], take: int
) -> None:
    """A null key, and the record that makes a sum too large for 64 bits."""
    store, rows = MemoryStore(), [*words(60), ["w1", HUGE], *words(60)]
    good = expected(words(60) + words(60))
    rows.insert(20, [None, 5])
    topology = built(tmp_path, rows, kind, take)
    caught_up(topology, store)
    assert counts(tmp_path) == good
    assert kept(tmp_path) == sorted([*range(60), *range(60)])
    reasons = sorted(refused(store).values())
    assert len(reasons) == 2
    assert "key field 'word' is null" in reasons[0] and "'total' does not fit into int64" in reasons[1]


@pytest.mark.parametrize("kind", KINDS)
def test_all_refused_records_of_a_batch_are_left_out_of_its_next_attempt(
    tmp_path: Path, kind: type[MapState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes find them, and commit nothing: what others have sent does not wait for a transaction
    per record."""
    store, good = MemoryStore(), words(300)
    rows = [row for n, each in enumerate(good) for row in (each, *([["bad", n]] if n % 10 == 3 else []))]
    topology = built(tmp_path, rows, kind)
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    caught_up(topology, store, {"topology.message.timeout.secs": 10_000})
    assert counts(tmp_path) == expected(good)
    assert kept(tmp_path) == list(range(300))
    assert len(refused(store)) == 30
    history = read_history(store, topology.id)
    assert len(history) == 2  # of 200 records at most
    assert sum(len(each.attempts) for each in history) == 4
    assert verify(topology, store).right


def attempts_of(store: MemoryStore, topology: Topology) -> list[int]:
    """The number of attempts of each transaction."""
    return [len(each.attempts) for each in read_history(store, topology.id)]


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_of", ["integer", "decimal", "mean"])
def test_records_whose_sums_leave_their_type_in_the_state_are_found_before_the_next_commit(
    tmp_path: Path, kind: type[MapState], type_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the records: the sum of ``b`` is brought back before it grows again."""
    is_decimal = type_of == "decimal"
    most = 10**38 - 1 if is_decimal else HUGE
    first = [["a", most], ["b", most], ["c", most], *words(97)]
    changes = {10: ["b", -1], 30: ["a", 1], 50: ["b", 1], 51: ["b", 1], 80: ["c", 1]}
    rows = [*first, *(changes.get(n, row) for n, row in enumerate(words(100)))]
    rows = [[word, decimal.Decimal(n) if is_decimal else n] for word, n in rows]
    good = [row for n, row in enumerate(rows) if n not in {130, 151, 180}]
    fields = Fields.of({"word": pa.string(), "n": pa.decimal128(38, 0) if is_decimal else pa.int64()})
    spout = MemoryTransactionalSpout if kind is TransactionalMapState else OpaqueMemoryTransactionalSpout
    builder = TransactionalTopologyBuilder("refusing", "spout", spout({0: rows}, fields, 100, on_bad_record="skip"))
    aggregate = Mean("n") if type_of == "mean" else Sum("n")
    state = kind(SqliteBackend(tmp_path / "x.db", "words"))
    totals = StateCommitter(state, ["word"], {"total": aggregate})
    builder.set_bolt("words", totals, 2).fields_grouping("spout", Fields("word"))
    builder.set_bolt("rows", AppendCommitter(ParquetTable(tmp_path / "rows"))).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    caught_up(topology, store, {"topology.message.timeout.secs": 10_000})
    assert set(refused(store)) == {("0", 130), ("0", 151), ("0", 180)}
    assert all("does not fit" in reason for reason in refused(store).values())
    assert kept(tmp_path) == sorted(n for _, n in good)
    held = [state.get(word) for word in "abc"]
    assert [each[1] if type_of == "mean" else each for each in held] == [most] * 3
    assert attempts_of(store, topology) == [1, 4]
    assert verify(topology, store).right


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [1, -5])
def test_records_that_make_the_sum_of_a_batch_too_large_do_not_cost_those_of_others(
    tmp_path: Path, kind: type[MapState], before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the state decides, and not that of the batch, which begins at 0."""
    rows = [["a", before], *words(99)]
    rows += [
        ["a", HUGE] if n in {40, 90, 140} else ["a", 1] if n % 40 > 37 else row for n, row in enumerate(words(150))
    ]
    others = [["x", n] for n in range(len(rows))]
    both = [each for pair in zip(rows, others, strict=True) for each in pair]
    topology, store = built(tmp_path, both, kind), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    caught_up(topology, store, {"topology.message.timeout.secs": 10_000})
    total, too_many = 0, set()
    for offset, (word, n) in enumerate(rows):
        if word == "a" and total + n > HUGE:
            too_many.add(("0", offset))
        elif word == "a":
            total += n
    assert counts(tmp_path)["x"] == (len(others), sum(n for _, n in others))
    assert set(refused(store)) == too_many
    assert counts(tmp_path)["a"][1] == total
    assert max(attempts_of(store, topology)) <= 5 and verify(topology, store).right


def test_errors_that_records_cause_are_found_by_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = words(100)
    rows = [row for n, each in enumerate(good) for row in (each, *([["bad", n]] if n % 10 == 3 else []))]
    topology, store = built(tmp_path, rows, error=ZeroDivisionError), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    config = {"topology.bad.record.errors": True, "topology.max.attempts": 2, "topology.message.timeout.secs": 10_000}
    caught_up(topology, store, config)
    assert counts(tmp_path) == expected(good)
    assert len(refused(store)) == 10
    assert attempts_of(store, topology) == [3]


def test_an_error_of_every_record_is_no_reason_to_leave_out_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's code may ask a server that is away."""
    topology, store = built(tmp_path, [["bad", n] for n in range(100)], error=ConnectionError), MemoryStore()
    monkeypatch.setattr(term_loop, "SEARCH_MAX_MS", 10**9)
    found: list[int] = []
    searched = narrowing.Narrowing.searched

    def noted(self: Any, *given: Any, **options: Any) -> Any:
        result = searched(self, *given, **options)
        found.append(len(result.refused) if result is not None else 0)
        return result

    monkeypatch.setattr(narrowing.Narrowing, "searched", noted)
    config = {"topology.bad.record.errors": True, "topology.max.attempts": 2, "topology.message.timeout.secs": 10_000}
    caught_up(topology, store, config)
    assert max(found) == 1


def test_records_that_bolts_with_different_policies_refuse_are_left_out_in_turn(tmp_path: Path) -> None:
    """The plan's entry of a partition has one policy."""

    class Choosy(Picky):
        def __init__(self) -> None:
            super().__init__(prefix="odd")
            self.on_bad_record = "skip"

    good = words(40)
    rows = [row for n, each in enumerate(good) for row in (each, *([["bad", n], ["odd", n]] if n % 8 == 3 else []))]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, FIELDS, 100, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    builder.set_bolt("picky", Picky()).shuffle_grouping("spout")
    builder.set_bolt("choosy", Choosy()).shuffle_grouping("picky")
    builder.set_bolt("rows", AppendCommitter(ParquetTable(tmp_path / "rows"))).global_grouping("choosy")
    store = MemoryStore()
    caught_up(builder.build(), store)
    assert kept(tmp_path) == list(range(40))
    reasons = list(refused(store).values())
    assert sorted(each.split(":")[0] for each in reasons) == ["choosy"] * 5 + ["picky"] * 5
    policies = [
        (each.plan["0"].get("on_refused"), each.plan["0"]["refused"])
        for each in read_history(store, "refusing")
        if "refused" in each.plan["0"]
    ]
    assert all((policy == "skip") == reason.startswith("choosy") for policy, its in policies for reason in its.values())


class Slow(Picky):
    """Waits while it executes a part of its batch."""

    began, ends = threading.Event(), threading.Event()
    parts: ClassVar[list[int]] = []

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        if batch.num_rows < 64:
            Slow.parts.append(batch.num_rows)
            Slow.began.set()
            Slow.ends.wait(PATIENCE_S)
        yield from super().execute_arrow(batch)


def test_a_run_that_stops_ends_the_search_for_refused_records(tmp_path: Path) -> None:
    rows = [*words(63), ["bad", 1]]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, FIELDS, 64, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    builder.set_bolt("slow", Slow()).shuffle_grouping("spout")
    builder.set_bolt("rows", AppendCommitter(ParquetTable(tmp_path / "rows"))).global_grouping("slow")
    run = submit(builder.build(), {}, MemoryStore(), "local")
    assert Slow.began.wait(PATIENCE_S)
    closing = threading.Thread(target=run.stop)
    closing.start()
    wait_for(lambda: not run.status().in_flight)
    Slow.ends.set()
    closing.join()
    assert Slow.parts == [32]


def test_the_order_decides_which_record_is_the_one_too_many(tmp_path: Path) -> None:
    store = MemoryStore()
    rows = [each for n in (HUGE, 1, -1, 1) for each in (["a", n], ["x", 1])]
    caught_up(built(tmp_path, rows), store)
    assert counts(tmp_path) == {"a": (3, HUGE), "x": (4, 4)}
    assert set(refused(store)) == {("0", 1)}


@pytest.mark.slow
def test_a_topology_leaves_out_more_records_than_its_plans_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrowing, "LEFT_OUT_MAX", 4)
    store, rows = MemoryStore(), words(60)
    good = expected(rows)
    for at in range(0, 60, 3):
        rows.insert(at, ["bad", 1])
    topology = built(tmp_path, rows, take=4)
    caught_up(topology, store)
    assert counts(tmp_path) == good
    plan = read_history(store, topology.id)[-1].plan
    assert all(len(each.get(LEFT_OUT, ())) <= 4 and each[LEFT_OUT_FROM] > 0 for each in plan.values())
    assert verify(topology, store).right  # the record of each transaction has its own
    monkeypatch.setattr(documents, "RECORDS_MAX", 3)
    with pytest.raises(Unverifiable, match=r"those before offset \d+ of partition . are no longer known"):
        verify(topology, store)


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("spout", [MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout])
def test_a_batch_with_too_many_partitions_of_a_table_is_written_in_parts(
    tmp_path: Path, spout: Any, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under "fail", too. A batch with fewer is not divided."""
    monkeypatch.setattr(append, "PARTITIONS_MAX", 10)
    rows = {0: [[f"p{n // 2}", n] for n in range(80)] + [["p7", n] for n in range(80, 160)]}
    builder = TransactionalTopologyBuilder("parts", "spout", spout(rows, FIELDS, 80))
    table = ParquetTable(tmp_path / "t", partition_by=["word"])
    builder.set_bolt("append", AppendCommitter(table), tasks).shuffle_grouping("spout")
    store = MemoryStore()
    with submit(builder.build(), {"topology.max.attempts": 1}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().bad_records == 0
    assert sorted(table.to_table().column("n").to_pylist()) == list(range(160))
    sizes = [each.plan["0"]["next"] - each.plan["0"]["first"] for each in read_history(store, "parts")]
    assert sizes[-1] == 80 and max(sizes[:-1]) <= 20 * tasks, sizes


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_windows_that_close_together_may_belong_to_any_number_of_partitions(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows come of earlier batches: no half of the last one would close fewer."""
    monkeypatch.setattr(append, "PARTITIONS_MAX", 10)
    shop = Pipeline("shop")
    value = Json(k=str, at=datetime.datetime)
    read = shop.read_kafka("t", value=value, bootstrap_servers="127.0.0.1:1", on_bad_record=policy)
    windows = read.window(tumbling("1 min"), on="at", late="1 s").group_by("k").agg(n=count())
    windows.when_closed(name="w").append_into(parquet(tmp_path / "t", partition_by=["k"]), name="out")
    opened = [{"k": f"k{n}", "at": "2026-01-01T00:00:00Z"} for n in range(24)]
    closing = [{"k": "z", "at": f"2026-01-01T0{n}:30:00Z"} for n in (1, 2)]
    rows = shop.test({"t": [*opened, *closing]}, take=8)["out"]
    assert sorted((row["k"], row["n"]) for row in rows) == sorted([(row["k"], 1) for row in opened] + [("z", 1)])


def test_under_fail_the_topology_stops_as_ever(tmp_path: Path) -> None:
    rows = [*words(20), ["bad", 1]]
    refused_as_ever = pytest.raises(BadRecordError, match="the word 'bad' is refused")
    with (
        submit(built(tmp_path, rows, on_bad_record="fail"), {}, MemoryStore(), "local") as run,
        refused_as_ever as failed,
    ):
        run.wait_until_caught_up(PATIENCE_S)
    assert isinstance(failed.value, TopologyFailed)
    assert run.status().committed_txid == 0


@pytest.mark.parametrize("kind", KINDS)
def test_undo_reads_a_refused_record_again(tmp_path: Path, kind: type[MapState]) -> None:
    """The corrected bolt takes it. An idempotent batch never changes."""
    store = MemoryStore()
    rows = [["a", 1], ["x", 1], ["a", 1], ["bad", 1]]
    caught_up(built(tmp_path, rows, kind, take=1), store)
    (last,) = (each.txid for each in read_history(store, "refusing") if "refused" in each.plan["1"])
    corrected = built(tmp_path, rows, kind, take=1, prefix="none")
    assert undo(corrected, store) == last
    caught_up(corrected, store)
    assert counts(tmp_path) == {"a": (2, 2), "x": (1, 1)} | ({"bad": (1, 1)} if kind is OpaqueMapState else {})
    assert verify(corrected, store).right


@pytest.mark.parametrize("kind", KINDS)
def test_any_error_of_a_bolt_that_one_record_causes_makes_it_a_bad_record_if_asked(
    tmp_path: Path, kind: type[MapState]
) -> None:
    store, rows = MemoryStore(), [*words(30), ["bad", 1], *words(10)]
    topology = built(tmp_path, rows, kind, error=ZeroDivisionError)
    config = {"topology.max.attempts": 2}
    with (
        submit(topology, config, MemoryStore(), "local") as run,
        pytest.raises(TopologyFailed, match="ZeroDivisionError"),
    ):
        run.wait_until_caught_up(PATIENCE_S)
    caught_up(topology, store, {**config, "topology.bad.record.errors": True})
    assert counts(tmp_path) == expected(words(30) + words(10))
    assert list(refused(store).values()) == ["picky: ZeroDivisionError: the word 'bad' is refused"]


class Far(ArrowBolt):
    """Gives each row a moment; that of row 3 is of the year 81,191."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        numbers = batch.column("n")
        moments = [2_500_000_000_000_000_000 if n == 3 else n for n in numbers.to_pylist()]
        times = pa.array(moments, pa.int64()).cast(pa.timestamp("us", "UTC"))
        yield pa.RecordBatch.from_arrays([numbers, times], ["n", "at"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"n": pa.int64(), "at": pa.timestamp("us", "UTC")}))


class Reads(BaseBasicBolt):
    """Emits the year of each moment."""

    deterministic = True

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["at"].year])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(year=int))


@pytest.mark.parametrize("rows", [1, 7])
def test_a_moment_outside_of_pythons_years_that_a_bolt_reads_is_refused(tmp_path: Path, rows: int) -> None:
    store = MemoryStore()
    spout = OpaqueMemoryTransactionalSpout({0: [[n] for n in range(7)]}, Fields(n=int), rows, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    builder.set_bolt("far", Far()).shuffle_grouping("spout")
    builder.set_bolt("reads", Reads()).shuffle_grouping("far")
    years = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "years")), ["year"], {"count": Count()})
    builder.set_bolt("years", years).global_grouping("reads")
    caught_up(builder.build(), store)
    with sqlite3.connect(tmp_path / "x.db") as connection:
        assert connection.execute("SELECT year, count FROM years").fetchall() == [(1970, 6)]
    ((place, reason),) = refused(store).items()
    assert place == ("0", 3) and reason.startswith("reads: field 'at': Python cannot hold a value: ")


@pytest.mark.parametrize("tasks", [1, 2])
def test_what_a_combiner_refuses_is_refused_by_its_bolt_and_not_by_the_spout_before_it(
    tmp_path: Path, tasks: int
) -> None:
    store = MemoryStore()
    rows: list[list[Any]] = [["a", 1], [None, 1], ["b", 1], ["a", HUGE]]
    spout = OpaqueMemoryTransactionalSpout({0: rows, 1: [["c", 1]]}, FIELDS, 7, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    counting = StateCommitter(state, ["word"], {"count": Count(), "total": Sum("n")})
    builder.set_bolt("words", counting, tasks).fields_grouping("spout", Fields("word"))
    caught_up(builder.build(), store)
    assert counts(tmp_path) == {"a": (1, 1), "b": (1, 1), "c": (1, 1)}
    found = refused(store)
    assert set(found) == {("0", 1), ("0", 3)} and all(reason.startswith("words: ") for reason in found.values())


#: By what a time outside Python's years reaches a state: as a key, or in a fold.
FOLDED: dict[str, tuple[str, Callable[[], Aggregate]]] = {
    "key": ("at", Count),
    "least": ("n", lambda: Min("at")),
    "most": ("n", lambda: Max("at")),
    "function": ("n", lambda: Reduce("at", lambda one, other: max(one, other))),
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", FOLDED)
@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_time_that_python_cannot_hold_is_refused_by_a_state(
    tmp_path: Path, kind: type[MapState], which: str, where: str
) -> None:
    store, (key, aggregate) = MemoryStore(), FOLDED[which]
    spout = MemoryTransactionalSpout if kind is TransactionalMapState else OpaqueMemoryTransactionalSpout
    source = spout({0: [[n] for n in range(7)]}, Fields(n=int), 7, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", source)
    builder.set_bolt("far", Far()).shuffle_grouping("spout")
    state = kind(SqliteBackend(tmp_path / "x.db", "years") if where == "file" else MemoryBackend())
    years = StateCommitter(state, [key], {"x": aggregate()})
    builder.set_bolt("years", years, 2).fields_grouping("far", Fields(key))
    topology = builder.build()
    caught_up(topology, store)
    ((place, reason),) = refused(store).items()
    field = "x" if which in ("least", "most") else "at"
    assert place == ("0", 3) and reason.startswith(f"years: field {field!r}: Python cannot hold a value: ")
    bound = topology.components[-1].states[0]
    assert isinstance(bound, MapState)
    rows = {key[0]: row.value for key, row in bound.backend.scan()}
    assert len(rows) == 6 and (which == "key" or set(rows) == {0, 1, 2, 4, 5, 6})


# --- from Kafka -----------------------------------------------------------------------------------


class PostgresRuns(KafkaRuns):
    """``KafkaRuns`` that count in PostgreSQL, and keep dead letters in a table of SQLite."""

    dsn = ""

    def topology(self, **changes: Any) -> Topology:
        builder = TransactionalTopologyBuilder(
            self.name, "spout", self.spout(codec=JsonCodec(Fields(value=str)), **changes), 2
        )
        kind = OpaqueMapState if self.opaque else TransactionalMapState
        state = kind(PostgresBackend(self.dsn, self.name.replace("-", "_")))
        builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
        return builder.build()


@pytest.mark.quick_for("native")
@pytest.mark.quick_for("True-native", "False-python")
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("opaque", [True, False])
def test_texts_that_postgresql_refuses_become_dead_letters_with_their_coordinates(
    topics: Topics, name: str, tmp_path: Path, postgres: Any, opaque: bool, reader: str
) -> None:
    """NUL, and a key that is too long for an index."""
    long = random.Random(1).randbytes(10_000).hex()
    values = [f"w{number % 5}" for number in range(60)]
    values[13:13], values[40:40] = ["a\x00b"], [long]
    topics.create(name)
    topics.send(name, [json.dumps({"value": each}).encode() for each in values])
    runs = PostgresRuns(topics, tmp_path, name, opaque=opaque)
    runs.dsn = postgres.dsn
    letters = DeadLetterTable(runs.state("letters"))
    run = runs.catch_up({"kafka.reader": reader}, on_bad_record="dead_letter", dead_letters=letters)
    state = runs.topology().components[-1].states[0]
    assert isinstance(state, MapState)
    assert {row.value[0] for _, row in state.backend.scan() if row.value is not None} == {12}
    found = runs.rows(
        "SELECT topic, partition, offset, record_value, error FROM letters WHERE NOT _deleted ORDER BY offset"
    )
    assert [(topic, partition, offset) for topic, partition, offset, *_ in found] == [(name, 0, 13), (name, 0, 40)]
    assert [json.loads(value)["value"] for *_, value, _ in found] == ["a\x00b", long]
    assert "NUL" in found[0][4] and found[0][4].startswith("count: ")
    assert "index" in found[1][4] and len(found[1][4].encode()) <= 1_024
    assert run.status().bad_records == 2
    meta = next(each.plan[f"{name}/0"] for each in run.transactions() if "refused" in each.plan[f"{name}/0"])
    assert meta["refused"] == {"13": found[0][4], "40": found[1][4]}
    assert verify(runs.topology(on_bad_record="dead_letter", dead_letters=letters), runs.store).right


@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_records_of_a_topic_whose_sums_leave_their_type_become_dead_letters(
    topics: Topics, name: str, tmp_path: Path, reader: str
) -> None:
    """Probes read the beginning of a batch again and again, without the records that were found."""
    rows = [["a", HUGE], *words(300)]
    rows[40:40], rows[90:90], rows[150:150] = [["a", 1]], [["a", -1]], [["a", 1], ["a", 1]]
    topics.create(name)
    topics.send(name, [json.dumps({"word": word, "n": n}).encode() for word, n in rows])
    letters = DeadLetterTable(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "letters")))
    spout = OpaqueKafkaTransactionalSpout(
        [name], codec=JsonCodec(FIELDS), on_bad_record="dead_letter", dead_letters=letters
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    totals = {"count": Count(), "total": Sum("n")}
    words_of = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words")), ["word"], totals)
    builder.set_bolt("words", words_of).global_grouping("spout")
    topology, store = builder.build(), MemoryStore()
    config = {"kafka.bootstrap.servers": topics.bootstrap_servers, "kafka.reader": reader}
    run = caught_up(topology, store, config)
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        found = connection.execute("SELECT topic, partition, offset, error FROM letters ORDER BY offset").fetchall()
    assert [each[:3] for each in found] == [(name, 0, 150), (name, 0, 151)]
    assert all("'total' does not fit into int64" in error for *_, error in found)
    assert counts(tmp_path) == {**expected(words(300)), "a": (3, HUGE)}
    assert run.status().bad_records == 2
    assert verify(topology, store, config).right


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("opaque", [True, False])
def test_texts_that_postgresql_refuses_are_found_before_a_topic_of_dead_letters_would_keep_the_commit(
    topics: Topics, name: str, tmp_path: Path, postgres: Any, opaque: bool
) -> None:
    """A topic cannot undo what a commit has written, so the rows are checked before it."""
    long = random.Random(1).randbytes(2_000).hex()
    values = ["w", "a\x00b", "w", long, "x" * 20_000, "w"]  # the fifth is short when it is compressed
    topics.create(name)
    dead = topics.create(f"{name}-dead")
    topics.send(name, [json.dumps({"value": each}).encode() for each in values])
    runs = PostgresRuns(topics, tmp_path, name, opaque=opaque)
    runs.dsn = postgres.dsn
    letters = DeadLetterTopic(dead, bootstrap_servers=topics.bootstrap_servers)
    run = runs.catch_up(on_bad_record="dead_letter", dead_letters=letters)
    state = runs.topology().components[-1].states[0]
    assert isinstance(state, MapState)
    held = {key: row.value[0] for key, row in state.backend.scan() if row.value is not None}
    assert held == {("w",): 3, ("x" * 20_000,): 1}
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [dead], found.append)
    headers = [dict(each.headers()) for each in found]
    assert [int(each["ratchet.offset"]) for each in headers] == [1, 3]
    assert b"NUL" in headers[0]["ratchet.error"] and b"it is key column 'value'" in headers[0]["ratchet.error"]
    assert b"index" in headers[1]["ratchet.error"] and b"4,000 bytes" in headers[1]["ratchet.error"]
    assert run.status().bad_records == 2


@pytest.mark.slow
@pytest.mark.integration
def test_a_topic_of_dead_letters_takes_what_a_bolt_refuses(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    dead = topics.create(f"{name}-dead")
    topics.send(topics.create(name), [b"a", b"bad-1", b"b", b"bad-2"])
    runs = KafkaRuns(topics, tmp_path, name)
    spout = runs.spout(on_bad_record="dead_letter", dead_letters=DeadLetterTopic(dead))
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("picky", refusing.Picky()).shuffle_grouping("spout")
    builder.set_bolt("count", StateCommitter(runs.state("counts"), ["value"], {"n": Count()})).global_grouping("picky")
    with submit(builder.build(), {"kafka.bootstrap.servers": topics.bootstrap_servers}, runs.store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [dead], found.append)
    assert [each.value() for each in found] == [b"bad-1", b"bad-2"]
    assert dict(found[0].headers())["ratchet.error"] == b"picky: 'bad-1' is refused"
    assert runs.counts() == {"a": 1, "b": 1}


@pytest.mark.integration
@pytest.mark.parametrize("opaque", [True, False])
def test_too_many_refused_values_stop_the_topology(topics: Topics, name: str, tmp_path: Path, opaque: bool) -> None:
    topics.send(topics.create(name), [b"a"] * 5 + [b"bad"] * 3 + [b"a"] * 5)
    runs = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    builder = TransactionalTopologyBuilder(name, "spout", runs.spout(on_bad_record="skip", bad_record_share_max=0.002))
    builder.set_bolt("picky", refusing.Picky()).shuffle_grouping("spout")
    builder.set_bolt("count", StateCommitter(runs.state("counts"), ["value"], {"n": Count()})).global_grouping("picky")
    too_many = pytest.raises(BadRecordError, match="3 of the last .* more than bad_record_share_max")
    with submit(builder.build(), {}, runs.store, "local") as run, too_many:
        run.wait_until_caught_up(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_dead_letters_of_refused_values_are_written_once_though_drivers_die(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path, kind: str, seed: int
) -> None:
    """Each driver dies at a random moment after it has found its first record."""
    chance, values = random.Random(seed), [f"w{number % 5}" for number in range(400)]
    for number in range(8):
        values.insert(chance.randrange(len(values)), f"bad-{number}")
    topics.send(topics.create(name), [each.encode() for each in values])
    file = tmp_path / "x.db"
    settings = {
        "app.topic": name,
        "app.file": file,
        "app.kind": kind,
        "kafka.bootstrap.servers": servers.bootstrap_servers,
        "transactional.zookeeper.servers": servers.zookeeper,
    }
    run = RunProcess(tmp_path / "run.log", "tests.kit.refusing:topology", settings, executor="local")
    try:
        kills = 0
        for _ in range(4):
            run.start("--until-caught-up")
            run.wait_for(lambda: run.said("record.refused"), pause_s=chance.uniform(0.0, 0.05))
            if not run.kill():
                break
            kills += 1
        assert kills, run.tail()
        run.start("--until-caught-up")
        assert run.finish() == 0, run.tail()
    finally:
        run.end()
    with sqlite3.connect(file) as connection:
        letters = connection.execute("SELECT offset, record_value FROM letters WHERE NOT _deleted").fetchall()
        counted = dict(connection.execute("SELECT value, n FROM counts WHERE NOT _deleted").fetchall())
    assert sorted(letters) == [(place, each.encode()) for place, each in enumerate(values) if each.startswith("bad")]
    assert counted == {f"w{number}": 80 for number in range(5)}


@pytest.mark.slow_for("0")
@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.parametrize("collapse_max", [20_000, 0])
def test_records_are_taken_out_of_batches_on_spark(
    topics: Topics, name: str, tmp_path: Path, spark: str, collapse_max: int
) -> None:
    topics.create(name, 2)
    for partition in (0, 1):
        values = [f"w{number % 5}" for number in range(500)]
        values[300:300] = [f"bad-{partition}"]
        topics.send(name, [each.encode() for each in values], partition)
    app = {"app.topic": name, "app.file": tmp_path / "x.db", "app.kind": "opaque"}
    config = {
        "spark.master": spark,
        "topology.collapse.records.max": collapse_max,
        "kafka.bootstrap.servers": topics.bootstrap_servers,
    }
    with submit(refusing.topology(app), config, MemoryStore()) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().bad_records == 2
    with sqlite3.connect(tmp_path / "x.db") as connection:
        letters = connection.execute("SELECT partition, offset, error FROM letters ORDER BY partition").fetchall()
        counted = dict(connection.execute("SELECT value, n FROM counts").fetchall())
    assert letters == [(each, 300, f"picky: 'bad-{each}' is refused") for each in (0, 1)]
    assert counted == {f"w{number}": 200 for number in range(5)}


class Frame(DataFrameBolt):
    """Refuses a value in a function that Spark calls, once with ``error``."""

    deterministic = True

    def __init__(self, error: type[Exception] = BadRecordError) -> None:
        self._error = error

    def execute_dataframe(self, frame: Any) -> Any:
        from pyspark.sql.functions import udf

        error = self._error

        def checked(n):  # type: ignore[no-untyped-def] # Spark reads hints
            if n == 3:
                raise error("three is refused")
            return n

        return frame.select(udf(checked, "long")("n").alias("n"))

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


@pytest.mark.quick_for("local-BadRecordError")
@pytest.mark.spark
@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ("spark", BadRecordError, "three is refused"),
        ("local", BadRecordError, "three is refused"),
        ("local", KeyError, "KeyError: 'three is refused'"),
        pytest.param("spark", KeyError, "KeyError: 'three is refused'", marks=pytest.mark.slow),
    ],
)
def test_a_record_that_a_function_of_a_dataframe_refuses_is_left_out(
    tmp_path: Path, spark: str, error: type[Exception], said: str, where: str
) -> None:
    store = MemoryStore()
    spout = OpaqueMemoryTransactionalSpout({0: [[n] for n in range(5)]}, Fields(n=int), 5, on_bad_record="skip")
    builder = TransactionalTopologyBuilder("refusing", "spout", spout)
    builder.set_bolt("frame", Frame(error)).shuffle_grouping("spout")
    counting = StateCommitter(OpaqueMapState(SqliteBackend(tmp_path / "x.db", "t")), ["n"], {"count": Count()})
    builder.set_bolt("out", counting).global_grouping("frame")
    config = {"spark.master": spark, "topology.bad.record.errors": True, "topology.max.attempts": 2}
    with submit(builder.build(), config, store, where) as run:
        run.wait_until_caught_up(PATIENCE_S)
    component = "spark" if where == "spark" else "frame"
    assert refused(store) == {("0", 3): f"{component}: {said}"}
