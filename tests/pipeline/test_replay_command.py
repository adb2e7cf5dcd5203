"""What ``ratchet replay`` prints, and how it ends."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    ArrowBolt,
    BaseBasicBolt,
    BaseBatchBolt,
    Committer,
    DataFrameBolt,
    Fields,
    Topology,
    TransactionalTopologyBuilder,
)
from framework.execution import LocalExecutor
from framework.execution.failures import FrameFailed, TaskFailure
from framework.inspect.replay import Watch
from framework.topology.spouts import TransactionalSpout
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, SqliteBackend, StateCommitter, Sum
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.replays import FIELDS, Same, Sums, command, replayed, run, state_at, topology_of

WRITTEN: list[int] = []


class Elsewhere(BaseBatchBolt, Committer):
    """Writes to a place that Ratchet does not see, and emits how much."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.rows = collector, 0

    def execute(self, tup: Any) -> None:
        self.rows += 1

    def finish_batch(self) -> None:
        WRITTEN.append(self.rows)
        self.collector.emit([self.rows])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def through(folder: Path, bolt: Any, rows: int = 2, spout: Any = None) -> Topology:
    """The spout, a bolt, and counts of what it emits."""
    builder = TransactionalTopologyBuilder(
        "through", "spout", spout or OpaqueMemoryTransactionalSpout({0: [["k", 1]] * rows}, FIELDS, 1)
    )
    builder.set_bolt("bolt", bolt).shuffle_grouping("spout")
    counts = StateCommitter(OpaqueMapState(SqliteBackend(folder / "x.db", "counts")), ["word"], {"c": Count()})
    builder.set_bolt("counts", counts).global_grouping("bolt")
    return builder.build()


def test_a_sink_that_differs_ends_the_command_with_3_whatever_the_other_version_does(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = topology_of([["k", 5], ["k", 1]], Sums(state_at(tmp_path)))
    run(built, store)
    words = ("--txid", "2", "--code", "own:changed")
    right = command(monkeypatch, store, *words, topology=built, changed=built)
    assert right.exit_code == 0, right.output
    assert "own:changed leaves the same values" in right.output
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE sums SET v = 99")
    wrong = command(monkeypatch, store, *words, topology=built, changed=built)
    assert wrong.exit_code == 3 and "1 of them differ from the sink" in wrong.output


def test_json_lines_have_their_type_and_are_valid(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a", 1.0], ["a", float("nan")]]}, Fields(word=str, x=float), 1)
    builder = TransactionalTopologyBuilder("nan", "spout", spout)
    kept = StateCommitter(OpaqueMapState(MemoryBackend("kept")), ["word"], {"c": Count(), "x": Sum("x")})
    builder.set_bolt("kept", kept).global_grouping("spout")
    built = builder.build()
    run(built, store)
    words = ("--txid", "2", "--json", "--code", "own:changed", "--show", "spout->kept")
    answer = command(monkeypatch, store, *words, topology=built, changed=built)
    assert answer.exit_code == 0, answer.output
    row, now, new = (json.loads(line, parse_constant=pytest.fail) for line in answer.output.splitlines())
    assert [each["type"] for each in (row, now, new)] == ["row", "replay", "code"]
    assert row["row"] == {"word": "a", "x": "NaN"} and new["differences"] == [] and new["code"] == "own:changed"
    assert now["states"][0]["changes"][0]["after"] == [2, "NaN"]


def test_values_that_are_no_longer_known_are_said_to_be(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(Sums):
        def take(self, state: Any, word: str, number: int) -> None:
            if number > 1 and state.multi_get([word]) == [None]:
                raise ValueError("an update before the insert")
            state.multi_put([word], [number])

    built = topology_of([["k", 1], ["once", 1], ["k", 1]], Strict(state_at(tmp_path)), batch=2)
    run(built, store)
    told = command(monkeypatch, store, "--txid", "1", topology=built)
    assert told.exit_code == 0 and "2 keys changed, as the sink holds them" in told.output
    built = topology_of([["k", each] for each in (1, 2, 3, 4)], Strict(state_at(tmp_path, "strict")), name="strict")
    run(built, store)
    failing = command(monkeypatch, store, "--txid", "2", topology=built)
    assert failing.exit_code == 1
    assert "it asked for values before this transaction that the sinks no longer tell" in failing.output
    summing = topology_of([["k", each] for each in (1, 2, 3, 4)], Sums(state_at(tmp_path, "more")), name="more")
    run(summing, store)
    unknown = command(monkeypatch, store, "--txid", "2", topology=summing)
    assert unknown.exit_code == 0
    assert "1 keys changed, whose values the sink no longer tells" in unknown.output
    assert "'k': 2, by what is still known of the values before" in unknown.output


def test_a_topology_of_sinks_that_are_left_out_has_nothing_to_compare(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = TransactionalTopologyBuilder(
        "out", "spout", OpaqueMemoryTransactionalSpout({0: [["k", 1]]}, FIELDS, 1), at_least_once=True
    )
    builder.set_bolt("elsewhere", Elsewhere()).global_grouping("spout")
    builder.set_bolt("below", Elsewhere()).global_grouping("elsewhere")
    built = builder.build()
    run(built, store)
    answer = command(monkeypatch, store, "--txid", "1", topology=built)
    assert answer.exit_code == 0 and "nothing was compared: no sink could be replayed" in answer.output
    document = json.loads(command(monkeypatch, store, "--txid", "1", "--json", topology=built).output)
    assert document["agrees"] is None and len(document["left_out"]) == 2
    refused = command(monkeypatch, store, "--txid", "1", "--component", "below", topology=built)
    assert refused.exit_code == 2
    assert "there are no rows to show of bolt 'below': it is below one that is not" in refused.output


# --- rows -----------------------------------------------------------------------------------------


class Stretch(ArrowBolt):
    """Emits moments that Python has no object for."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        moments = pa.array([2**61] * batch.num_rows, pa.timestamp("us"))
        yield pa.record_batch([batch.column("word"), moments], names=["word", "t"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"word": pa.string(), "t": pa.timestamp("us")}))


def test_a_value_that_python_lacks_is_shown_by_its_type(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = through(tmp_path, Stretch())
    run(built, store)
    answer = command(monkeypatch, store, "--txid", "2", "--show", "bolt->counts", topology=built)
    assert answer.exit_code == 0 and "{'word': 'k', 't': '<timestamp[us]>'}" in answer.output


def test_no_more_rows_are_converted_than_are_shown_and_an_error_of_the_watch_is_its_own(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = topology_of([["k", each] for each in range(50)], Sums(state_at(tmp_path)), batch=50)
    run(built, store)
    seen: list[Any] = []
    watch = Watch(edges=["spout->bolt"], row=lambda edge, row: seen.append(row["n"]), rows_max=3)
    assert replayed(built, store, 1, watch).agrees
    assert seen == [0, 1, 2]

    def closed(edge: str, row: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        replayed(built, store, 1, Watch(edges=["spout->bolt"], row=closed))


def test_leaving_the_debugger_of_a_breakpoint_ends_the_command_and_is_no_failure(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bdb import BdbQuit

    class Left(BaseBasicBolt):
        def execute(self, tup: Any, collector: Any) -> None:
            raise BdbQuit  # as "q" does

        def declare_output_fields(self, declarer: Any) -> None:
            declarer.declare(FIELDS)

    run(through(tmp_path, Same()), store)
    answer = command(monkeypatch, store, "--txid", "2", topology=through(tmp_path, Left()))
    assert (answer.exit_code, answer.output) == (130, "")


# --- other code -----------------------------------------------------------------------------------


class General(TransactionalSpout):
    """A spout whose batches are its own affair."""

    def coordinator(self, conf: Any, context: Any) -> Any:
        return _Coordinator()

    def emitter(self, conf: Any, context: Any) -> Any:
        raise AssertionError("there is nothing to emit")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


class _Coordinator:
    def close(self) -> None:
        """Nothing to release."""


def test_a_version_with_another_kind_of_spout_or_another_id_is_refused_in_one_line(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, general = through(tmp_path, Same()), through(tmp_path, Same(), spout=General())
    run(built, store)
    words = ("--txid", "2", "--code", "own:other")
    answer = command(monkeypatch, store, *words, topology=built, other=general)
    assert answer.exit_code == 2
    assert "spout 'spout' cannot read the plan of transaction 2: another kind of spout made it" in answer.output
    renamed = topology_of([["k", 1]] * 2, Sums(state_at(tmp_path)), name="renamed")
    answer = command(monkeypatch, store, *words, topology=built, other=renamed)
    assert answer.exit_code == 2 and "own:other is the topology 'renamed', not 'through'" in answer.output


class Query(DataFrameBolt):
    """Runs nowhere here: the test stands for Spark SQL."""

    deterministic = True

    def execute_dataframe(self, frame: Any) -> Any:
        raise AssertionError("Spark SQL is not started")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(FIELDS)


def test_a_query_that_fails_is_a_failure_of_the_users_code(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(through(tmp_path, Same()), store)

    def fails(component_id: str, *rest: Any) -> Any:
        error = ValueError("my query is wrong")
        raise FrameFailed(TaskFailure.of(error, component_id, 0)) from error

    monkeypatch.setattr(LocalExecutor, "start", lambda self: setattr(self, "_frames", fails))
    errors: list[BaseException] = []
    watch = Watch(error=lambda failure, error: errors.append(error))
    report = replayed(through(tmp_path, Query()), store, 2, watch)
    assert report.failure is not None and report.failure.component_id == "bolt"
    assert "ValueError: my query is wrong" in str(report.failure)
    assert [str(each) for each in errors] == ["my query is wrong"]
