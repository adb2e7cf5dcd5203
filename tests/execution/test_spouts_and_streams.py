"""The general spout, direct streams, and memory sources that change during a run,
on every executor.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import (
    BaseBasicBolt,
    Fields,
    TopologyFailed,
    TransactionalSpout,
    TransactionalSpoutCoordinator,
    TransactionalSpoutEmitter,
    TransactionalTopologyBuilder,
)
from framework.errors import TopologyError
from framework.transactions import MemoryStore
from sinks import Count, MapState, OpaqueMapState, SqliteBackend, StateCommitter, TransactionalMapState
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.bolts import Relay
from tests.kit.runners import start
from tests.kit.waiting import PATIENCE_S, wait_for


class Numbers(TransactionalSpout):
    """The numbers below ``last``, seven per batch, dealt out to the emitters;
    even ones on a stream of their own.
    """

    def __init__(self, last: int, log: Path) -> None:
        self.last = last
        self.log = str(log)

    def coordinator(self, conf: Any, context: Any) -> TransactionalSpoutCoordinator:
        return SevenAtATime(self.last, self.log)

    def emitter(self, conf: Any, context: Any) -> TransactionalSpoutEmitter:
        return Dealer(context)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))
        declarer.declare(Fields(word=str), "even")


class SevenAtATime(TransactionalSpoutCoordinator):
    def __init__(self, last: int, log: str) -> None:
        self.last, self.log, self.next = last, log, 0

    def initialize_transaction(self, txid: int, previous_metadata: Any) -> Any:
        first = previous_metadata["next"] if previous_metadata else 0
        self.next = min(first + 7, self.last)
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps([txid, first, self.next]) + "\n")
        return {"first": first, "next": self.next}

    def is_ready(self) -> bool:
        lines = Path(self.log).read_text(encoding="utf-8").splitlines() if Path(self.log).exists() else []
        return not lines or json.loads(lines[-1])[2] < self.last

    def record_count(self, metadata: Any) -> int | None:
        return int(metadata["next"] - metadata["first"])


class Dealer(TransactionalSpoutEmitter):
    def __init__(self, context: Any) -> None:
        self.context = context

    def emit_batch(self, attempt: Any, metadata: Any, collector: Any) -> None:
        assert self.cleaned < attempt.txid + 1
        for number in range(metadata["first"], metadata["next"]):
            if number % self.context.task_count == self.context.task_index:
                collector.emit([f"n{number % 5}"])
                if number % 2 == 0:
                    collector.emit([f"n{number % 5}"], "even")

    def cleanup_before(self, txid: int) -> None:
        self.cleaned = txid


def counts(state: MapState, words: Sequence[str]) -> dict[str, Any]:
    return {word: state.get(word) for word in words}


@pytest.mark.slow_for("spread")
@pytest.mark.behaviour("1.1", "1.3")
def test_a_general_spout_plans_once_per_txid_and_every_emitter_gets_it(runner: Any, tmp_path: Path) -> None:
    """Metadata of txid N is made once, from that of N - 1, in spite of failures and a restart."""
    (tmp_path / "failures").write_text("2")
    log, store = tmp_path / "log", MemoryStore()
    states = [TransactionalMapState(SqliteBackend(tmp_path / "x.db", name)) for name in ("every", "even")]

    def build(last: int) -> Any:
        builder = TransactionalTopologyBuilder("numbers", "spout", Numbers(last, log), 3)
        builder.set_bolt("relay", Relay(str(tmp_path / "failures")), 2).shuffle_grouping("spout")
        every = StateCommitter(states[0], ["word"], {"n": Count()})
        builder.set_bolt("every", every, 2).fields_grouping("relay", Fields("word"))
        even = StateCommitter(states[1], ["word"], {"n": Count()})
        builder.set_bolt("even", even).global_grouping("spout", stream="even")
        return builder.build()

    with start(build(30), runner, store, **{"topology.max.spout.pending": 3}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 5
        assert run.status().attempts_failed >= 1
        assert sum(each.attempts[-1].source_rows for each in run.transactions()) == 45
    with start(build(40), runner, store) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 7
    made = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert made == [[txid, 7 * txid - 7, min(7 * txid, 30)] for txid in range(1, 6)] + [[6, 30, 37], [7, 37, 40]]
    expected = Counter(f"n{number % 5}" for number in range(40))
    assert counts(states[0], list(expected)) == expected
    evens = Counter(f"n{number % 5}" for number in range(0, 40, 2))
    assert counts(states[1], list(evens)) == evens


class InPlace(Numbers):
    """Its coordinator changes the metadata that it gets, and returns the same object; its emitters
    use theirs up."""

    def coordinator(self, conf: Any, context: Any) -> TransactionalSpoutCoordinator:
        return SevenInPlace(self.last, self.log)

    def emitter(self, conf: Any, context: Any) -> TransactionalSpoutEmitter:
        return UsesUp(context)


class SevenInPlace(SevenAtATime):
    def initialize_transaction(self, txid: int, previous_metadata: Any) -> Any:
        found = super().initialize_transaction(txid, previous_metadata)
        if previous_metadata is None:
            return found
        previous_metadata.update(found)
        return previous_metadata


class UsesUp(Dealer):
    def emit_batch(self, attempt: Any, metadata: Any, collector: Any) -> None:
        super().emit_batch(attempt, metadata, collector)
        metadata["first"] = metadata["next"]


def test_metadata_that_is_changed_later_is_still_what_it_was_for_its_own_batch(tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("2")
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "every"))
    builder = TransactionalTopologyBuilder("numbers", "spout", InPlace(100, tmp_path / "log"), 2)
    builder.set_bolt("relay", Relay(str(tmp_path / "failures")), 2).shuffle_grouping("spout")
    every = StateCommitter(state, ["word"], {"n": Count()})
    builder.set_bolt("every", every, 2).fields_grouping("relay", Fields("word"))
    with start(builder.build(), ("local", {}), **{"topology.max.spout.pending": 3}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        ranges = [record.plan["batch"]["metadata"] for record in run.transactions()]
    assert ranges == [{"first": first, "next": min(first + 7, 100)} for first in range(0, 100, 7)]
    expected = Counter(f"n{number % 5}" for number in range(100))
    assert counts(state, list(expected)) == expected


# --- direct streams -------------------------------------------------------------------------------


class Route(BaseBasicBolt):
    """Sends a word to a task that depends on its length."""

    deterministic = True

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.tasks = context.tasks_of("seen")

    def execute(self, tup: Any, collector: Any) -> None:
        if self.wrong == "emit":
            collector.emit([tup["word"]], "routed")
        elif self.wrong == "task":
            collector.emit_direct(self.tasks, [tup["word"]], "routed")
        elif self.wrong == "direct":
            collector.emit_direct(0, [tup["word"]])
        else:
            collector.emit_direct(len(tup["word"]) % self.tasks, [tup["word"]], "routed")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))
        declarer.declare(Fields(word=str), "routed", direct=True)


class Seen(BaseBasicBolt):
    """Emits the words that it got, with its task."""

    deterministic = True

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.task = context.task_index

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([f"{tup['word']}@{self.task}"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


DATA = {0: [["a"], ["bb"], ["ccc"], ["dddd"]], 1: [["bb"], ["ee"], ["f"]]}


def routed(state: MapState, wrong: str = "", tasks: int = 3) -> TransactionalTopologyBuilder:
    spout = OpaqueMemoryTransactionalSpout(DATA, Fields(word=str), 10)
    builder = TransactionalTopologyBuilder("routed", "spout", spout, 2)
    builder.set_bolt("route", Route(wrong), 2).shuffle_grouping("spout")
    builder.set_bolt("seen", Seen(), tasks).direct_grouping("route", "routed")
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("seen")
    return builder


@pytest.mark.each_value_once
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.behaviour("1.10")
def test_direct_grouping_brings_each_tuple_to_the_task_that_its_sender_named(
    runner: Any, tmp_path: Path, tasks: int
) -> None:
    """1.10"""
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "seen"))
    with start(routed(state, tasks=tasks).build(), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
    words = Counter(row[0] for rows in DATA.values() for row in rows)
    expected = {f"{word}@{len(word) % tasks}": times for word, times in words.items()}
    assert counts(state, list(expected)) == expected


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("emit", "stream 'routed': it is direct, so use emit_direct"),
        ("task", "'route' sent rows to task 3 of 'seen', which has tasks 0 to 2"),
        ("direct", "stream 'default': it is not declared direct"),
    ],
)
def test_direct_streams_used_the_wrong_way_are_named(runner: Any, tmp_path: Path, wrong: str, message: str) -> None:
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "seen"))
    run = start(routed(state, wrong).build(), runner, **{"topology.max.attempts": 1})
    with pytest.raises(TopologyFailed, match=message):
        run.wait_until_caught_up(PATIENCE_S)


def test_groupings_and_direct_declarations_must_agree(tmp_path: Path) -> None:
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "seen"))
    builder = routed(state)
    builder.set_bolt("other", Relay()).shuffle_grouping("route", stream="routed")
    with pytest.raises(TopologyError, match="'other' and stream 'routed' .*declared direct, so subscribe with direct"):
        builder.build()
    builder = routed(state)
    builder.set_bolt("other", Relay()).direct_grouping("route")
    with pytest.raises(TopologyError, match="direct_grouping needs a stream declared with direct=True"):
        builder.build()


# --- sources that change --------------------------------------------------------------------------


def word_count(spout: Any, path: Path) -> tuple[Any, MapState]:
    kind = OpaqueMapState if isinstance(spout, OpaqueMemoryTransactionalSpout) else TransactionalMapState
    state = kind(SqliteBackend(path, "n"))
    builder = TransactionalTopologyBuilder("changing", "spout", spout, 2)
    committer = StateCommitter(state, ["word"], {"n": Count()})
    builder.set_bolt("count", committer, 2).fields_grouping("spout", Fields("word"))
    return builder.build(), state


@pytest.mark.behaviour("2.7")
def test_an_opaque_spout_goes_on_without_a_partition_that_is_away(runner: Any, tmp_path: Path) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 6, 1: [["b"]] * 6}, Fields(word=str), 2)
    spout.make_unavailable(1)
    topology, state = word_count(spout, tmp_path / "x.db")
    with start(topology, runner) as run:
        run.wait_for_commit(3, PATIENCE_S)
        assert counts(state, "ab") == {"a": 6, "b": None}
        spout.make_available(1)
        run.wait_until_caught_up(PATIENCE_S)
    assert counts(state, "ab") == {"a": 6, "b": 6}


@pytest.mark.behaviour("2.7")
def test_a_transactional_spout_waits_for_a_partition_that_is_away(runner: Any, tmp_path: Path) -> None:
    spout = MemoryTransactionalSpout({0: [["a"]] * 6, 1: [["b"]] * 6}, Fields(word=str), 2)
    topology, state = word_count(spout, tmp_path / "x.db")
    spout.make_unavailable(1)
    with start(topology, runner) as run:
        wait_for(lambda: run.status().waiting_for is not None)
        with pytest.raises(TimeoutError, match="waiting for memory partition 1 is unavailable"):
            run.wait_for_commit(1, 0.5)
        spout.make_available(1)
        run.wait_until_caught_up(PATIENCE_S)
    assert counts(state, "ab") == {"a": 6, "b": 6}


def test_lost_rows_stop_the_run_or_are_skipped_and_counted(runner: Any, tmp_path: Path) -> None:
    for on_data_loss in ("fail", "skip"):
        spout = OpaqueMemoryTransactionalSpout(
            {0: [["a"]] * 3 + [["b"]] * 3}, Fields(word=str), 2, on_data_loss=on_data_loss
        )
        spout.expire(0, 3)
        topology, state = word_count(spout, tmp_path / f"{on_data_loss}.db")
        run = start(topology, runner)
        if on_data_loss == "fail":
            with pytest.raises(TopologyFailed, match="memory partition 0 has forgotten offsets 0 to 3 unread"):
                run.wait_until_caught_up(PATIENCE_S)
        else:
            run.wait_until_caught_up(PATIENCE_S)
            assert [each.plan["0"] for each in run.transactions()] == [
                {"first": 3, "next": 5, "skipped": 3},
                {"first": 5, "next": 6},
            ]
            run.stop()
            assert counts(state, "ab") == {"a": None, "b": 3}
