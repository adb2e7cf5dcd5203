"""The same topologies in this process and on Spark, collapsed and spread: same results,
same failures.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    ArrowBolt,
    BaseBatchBolt,
    BaseTransactionalBolt,
    Committer,
    FailedException,
    Fields,
    TopologyFailed,
    TransactionalTopologyBuilder,
)
from framework.execution import single_task_phase
from framework.transactions import MemoryStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter, Sum, TransactionalMapState
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.bolts import BatchCount, Relay, Split, UpdateGlobalCount
from tests.kit.panics import PanicException
from tests.kit.runners import DATA, SPREAD_ONLY, WORDS, start
from tests.kit.waiting import PATIENCE_S


def global_count(path: Path, opaque: bool = True) -> tuple[TransactionalTopologyBuilder, Any]:
    spout_class = OpaqueMemoryTransactionalSpout if opaque else MemoryTransactionalSpout
    state_class = OpaqueMapState if opaque else TransactionalMapState
    spout = spout_class(DATA, Fields(word=str), 10)
    state = state_class(SqliteBackend(path, "total", Fields(name=str), Fields(n=int)))
    builder = TransactionalTopologyBuilder("global-count", "spout", spout, 3)
    builder.set_bolt("partial", BatchCount(), 5).shuffle_grouping("spout")
    builder.set_bolt("sum", UpdateGlobalCount(state)).global_grouping("partial")
    return builder, state


@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.behaviour("1.1")
def test_global_count_is_exact_and_resumes(runner: Any, tmp_path: Path, opaque: bool) -> None:
    builder, state = global_count(tmp_path / "x.db", opaque)
    store = MemoryStore()
    topology = builder.build()
    with start(topology, runner, store, **{"topology.max.spout.pending": 3}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert state.get("total") == 130
        assert run.status().committed_txid == 10
    topology.spout.instance.append(2, [["more"], ["still more"]])  # type: ignore[union-attr]
    topology.spout.instance.add_partition(3, [["new"]])  # type: ignore[union-attr]
    with start(topology, runner, store) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert state.get("total") == 133
        assert run.status().committed_txid == 11


class Order(BaseTransactionalBolt, Committer):
    """Writes down, per batch and task, the words that it was given, in order."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.attempt, self.task = collector, batch_id, context.task_index
        self.seen: list[str] = []

    def execute(self, tup: Any) -> None:
        self.seen.append(tup["word"])

    def finish_batch(self) -> None:
        name = f"{self.attempt.txid}-{self.task}-{self.attempt.attempt_id}"
        Path(self.folder, name).write_text(" ".join(self.seen), encoding="utf-8")
        self.collector.emit([self.task, len(self.seen)])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(task=int, n=int))


@pytest.mark.behaviour("1.3", "1.6")
def test_a_replay_is_identical_and_each_task_finishes_once(runner: Any, tmp_path: Path) -> None:
    """Tasks without a tuple finish too. A replayed batch has the same tuples in the same order."""
    failures = tmp_path / "failures"
    failures.write_text("2")
    seen = tmp_path / "seen"
    seen.mkdir()
    spout = MemoryTransactionalSpout(DATA, Fields(word=str), 40)
    builder = TransactionalTopologyBuilder("order", "spout", spout, 2)
    builder.set_bolt("order", Order(str(seen)), 12).fields_grouping("spout", Fields("word"))
    builder.set_bolt("fails", Relay(str(failures)), 1).global_grouping("spout")
    builder.set_bolt("after", Failing(str(tmp_path / "late"), 1), 1).global_grouping("order")
    (tmp_path / "late").write_text("1")
    with start(builder.build(), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed == 3
    by_task: dict[tuple[str, str], set[str]] = {}
    for file in seen.iterdir():
        txid, task, _ = file.name.split("-")
        by_task.setdefault((txid, task), set()).add(file.read_text(encoding="utf-8"))
    assert set(by_task) == {(str(txid), str(task)) for txid in (1, 2, 3) for task in range(12)}
    assert all(len(contents) == 1 for contents in by_task.values())


@pytest.mark.rule("C11")
def test_rows_arrive_in_the_order_of_their_senders_whatever_the_exchange_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(folder: Path) -> dict[str, str]:
        folder.mkdir()
        spout = MemoryTransactionalSpout(DATA, Fields(word=str), 40)
        builder = TransactionalTopologyBuilder("order", "spout", spout, 2)
        builder.set_bolt("relay", Relay(), 3).shuffle_grouping("spout")
        builder.set_bolt("order", Order(str(folder)), 2).fields_grouping("relay", Fields("word"))
        with start(builder.build(), ("local", {})) as run:
            run.wait_until_caught_up(PATIENCE_S)
        return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}

    in_order = seen(tmp_path / "in order")
    real = single_task_phase.run_level

    def the_other_way_round(*arguments: Any, **options: Any) -> Any:
        *where, records, report = arguments
        return real(*where, list(reversed(records)), report, **options)

    monkeypatch.setattr(single_task_phase, "run_level", the_other_way_round)
    assert seen(tmp_path / "the other way round") == in_order


class Failing(BaseBatchBolt):
    """A bolt whose first ``finish_batch`` calls fail."""

    def __init__(self, file: str, times: int) -> None:
        self.file = file

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.n = 0

    def execute(self, tup: Any) -> None:
        self.n += tup["n"]

    def finish_batch(self) -> None:
        left = int(Path(self.file).read_text() or 0)  # another batch may be writing it
        if left:
            Path(self.file).write_text(str(left - 1))
            raise FailedException("as asked")


@pytest.mark.slow_for("spread")
@pytest.mark.parametrize("opaque", [True, False])
@pytest.mark.behaviour("1.5")
@pytest.mark.parametrize("runner", SPREAD_ONLY, indirect=True)
def test_failed_exceptions_replay_and_count_once(runner: Any, tmp_path: Path, opaque: bool) -> None:
    builder, state = global_count(tmp_path / "x.db", opaque)
    (tmp_path / "failures").write_text("5")
    (tmp_path / "late").write_text("3")
    builder.set_bolt("fails", Relay(str(tmp_path / "failures")), 2).shuffle_grouping("spout")
    builder.set_bolt("late", LateTotal(str(tmp_path / "late")), 1).global_grouping("sum")
    with start(builder.build(), runner, **{"topology.max.spout.pending": 2}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed >= 4
    assert state.get("total") == 130


class LateTotal(Failing):
    """Like ``Failing``, for the stream of the global count."""

    def __init__(self, file: str) -> None:
        super().__init__(file, 0)

    def execute(self, tup: Any) -> None:
        self.n += tup["total"]


@pytest.mark.behaviour("1.5")
def test_other_errors_stop_the_topology_with_the_component_named(runner: Any, tmp_path: Path) -> None:
    builder, state = global_count(tmp_path / "x.db")
    (tmp_path / "failures").write_text("1000")
    builder.set_bolt("broken", Relay(str(tmp_path / "failures"), ZeroDivisionError)).shuffle_grouping("spout")
    run = start(builder.build(), runner, **{"topology.max.attempts": 3})
    with pytest.raises(TopologyFailed, match=r"broken\[0\]: ZeroDivisionError: as asked") as failed:
        run.wait_until_caught_up(PATIENCE_S)
    assert "in execute" in failed.value.failure.trace
    assert run.status().phase == "failed"
    assert state.get("total") is None


@pytest.mark.behaviour("1.5")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, PanicException])
def test_user_code_that_calls_exit_was_cancelled_or_panics_fails_like_any_other(
    tmp_path: Path, error: type[BaseException]
) -> None:
    builder, _ = global_count(tmp_path / "x.db")
    (tmp_path / "failures").write_text("1000")
    builder.set_bolt("broken", Relay(str(tmp_path / "failures"), error)).shuffle_grouping("spout")
    with (
        start(builder.build(), ("local", {}), **{"topology.max.attempts": 3}) as run,
        pytest.raises(TopologyFailed, match=rf"broken\[0\]: {error.__name__}: as asked"),
    ):
        run.wait_until_caught_up(PATIENCE_S)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, PanicException])
def test_a_store_that_raises_anything_at_the_start_ends_the_run_with_it(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: Any, *arguments: Any) -> None:
        raise error("enough")

    monkeypatch.setattr(SqliteBackend, "raise_header", raises)
    builder, _ = global_count(tmp_path / "x.db")
    with start(builder.build(), ("local", {})) as run, pytest.raises(error, match="enough"):
        run.wait_until_caught_up(PATIENCE_S)


class Doubles(ArrowBolt):
    """Emits each batch on the default stream and, doubled, on another."""

    deterministic = True

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector = collector

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        self.collector.emit_arrow(batch, "twice")
        self.collector.emit_arrow(batch, "twice")
        yield batch

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))
        declarer.declare(Fields(word=str), "twice")


@pytest.mark.behaviour("1.9")
def test_streams_diamonds_and_a_committer_below_a_committer_are_exact(runner: Any, tmp_path: Path) -> None:
    """Several streams, a join of two components, the A-B-C-D example, all groupings;
    counts verified on every edge.
    """
    path = tmp_path / "x.db"
    spout = OpaqueMemoryTransactionalSpout(DATA, Fields(word=str), 25)
    builder = TransactionalTopologyBuilder("diamond", "spout", spout, 2)
    builder.set_bolt("doubles", Doubles(), 2).shuffle_grouping("spout")
    builder.set_bolt("relay", Relay(), 3).fields_grouping("spout", Fields("word"))
    words = StateCommitter(OpaqueMapState(SqliteBackend(path, "words")), ["word"], {"n": Count()})
    builder.set_bolt("words", words, 3).fields_grouping("relay", Fields("word")).fields_grouping(
        "doubles", Fields("word"), "twice"
    )
    sizes = StateCommitter(OpaqueMapState(SqliteBackend(path, "sizes")), ["n"], {"words": Count(), "all": Sum("n")})
    builder.set_bolt("sizes", sizes, 2).fields_grouping("words", Fields("n"))
    everywhere = OpaqueMapState(SqliteBackend(path, "everywhere", Fields(name=str), Fields(n=int)))
    builder.set_bolt("per-task", BatchCount(), 4).all_grouping("doubles")
    builder.set_bolt("everywhere", UpdateGlobalCount(everywhere)).global_grouping("per-task")
    builder.set_bolt("tail", BatchCount(), 2).none_grouping("doubles").partial_key_grouping("words", Fields("word"))
    with start(builder.build(), runner, **{"topology.max.spout.pending": 2}) as run:
        run.wait_until_caught_up(PATIENCE_S)
    counts = {word: WORDS.count(word) + WORDS[:30].count(word) for word in set(WORDS)}
    state = OpaqueMapState(SqliteBackend(path, "words", Fields(word=str), Fields(n=int)))
    assert {word: state.get(word) for word in counts} == {word: 3 * count for word, count in counts.items()}
    assert everywhere.get("total") == 4 * 130


@pytest.mark.rule("C13")
def test_an_unpicklable_committer_fails_with_advice(runner: Any, tmp_path: Path) -> None:
    builder, _ = global_count(tmp_path / "x.db")
    builder.set_committer_bolt("leaky", Leaky()).shuffle_grouping("spout")
    run = start(builder.build(), runner, **{"topology.max.attempts": 1})
    with pytest.raises(TopologyFailed, match="'leaky' cannot be pickled after execute.*open them in finish_batch"):
        run.wait_until_caught_up(PATIENCE_S)


class Leaky(BatchCount):
    """Holds an object that cannot be pickled."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        super().prepare(conf, context, collector, batch_id)
        self.generator = (number for number in range(3))


class ComesBackWrong(BatchCount):
    """Cannot be unpickled once it has executed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def execute(self, tup: Any) -> None:
        super().execute(tup)
        self.executed = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "executed" in state:
            raise self.error("not here")


@pytest.mark.rule("C13")
@pytest.mark.parametrize(
    "error", [FileNotFoundError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, PanicException]
)
def test_a_committer_that_cannot_be_unpickled_is_named(tmp_path: Path, error: type[BaseException]) -> None:
    """Whatever it raises: also what would end a thread, or look like the end of a channel."""
    builder, _ = global_count(tmp_path / "x.db")
    builder.set_committer_bolt("wrong", ComesBackWrong(error)).shuffle_grouping("spout")
    run = start(builder.build(), ("local", {}), **{"topology.max.attempts": 1})
    with pytest.raises(TopologyFailed, match=rf"wrong.*{error.__name__}: not here"):
        run.wait_until_caught_up(PATIENCE_S)


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", "b"], r"'bad' emitted 2 values on stream 'default', which declares 1: word"),
        ([7], r"'bad', stream 'default': field 'word' does not take every value emitted as string"),
        (None, r"'bad' emitted on stream 'other', which it does not declare \(declared: default\)"),
    ],
)
def test_wrong_emissions_name_component_stream_and_field(
    runner: Any, tmp_path: Path, values: list[Any] | None, message: str
) -> None:
    builder, _ = global_count(tmp_path / "x.db")
    builder.set_bolt("bad", Wrong(values)).shuffle_grouping("spout")
    run = start(builder.build(), runner, **{"topology.max.attempts": 1})
    with pytest.raises(TopologyFailed, match=message):
        run.wait_until_caught_up(PATIENCE_S)


class Wrong(Split):
    def __init__(self, values: list[Any] | None) -> None:
        self.values = values

    def execute(self, tup: Any, collector: Any) -> None:
        if self.values is None:
            collector.emit(["x"], "other")
        else:
            collector.emit(self.values)


@pytest.mark.behaviour("1.2")
def test_several_batches_process_at_once_and_commits_do_not_overlap(runner: Any, tmp_path: Path) -> None:
    """By recorded events: with four batches pending, processing overlaps;
    commits come strictly one after the other.
    """
    builder, _ = global_count(tmp_path / "x.db")
    builder.set_bolt("gate", Gate(str(tmp_path / "gate"), 3), 1).global_grouping("spout")
    (tmp_path / "gate").mkdir()
    executor = runner[0]
    with start(builder.build(), runner, **{"topology.max.spout.pending": 4}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        events = run.events()
    processing: set[int] = set()
    most, committing, order = 0, 0, []
    for event in events:
        if event.kind == "emitted":
            processing.add(event.txid)
        elif event.kind == "processed":
            processing.discard(event.txid)
        elif event.kind == "committing":
            committing += 1
            assert committing == 1
            order.append(event.txid)
        elif event.kind == "committed":
            committing -= 1
        most = max(most, len(processing))
    assert order == list(range(1, 11))
    assert 2 <= most <= 4, executor


class Gate(BatchCount):
    """Holds the first batches until two have arrived, which happens
    only if they are processed at once.
    """

    def __init__(self, folder: str, last: int) -> None:
        self.folder = folder

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        import time

        super().prepare(conf, context, collector, batch_id)
        (Path(self.folder) / str(batch_id.txid)).touch()
        deadline = time.monotonic() + PATIENCE_S
        while batch_id.txid <= 2 and len(list(Path(self.folder).iterdir())) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("no second batch came while the first was being processed")
            time.sleep(0.01)
