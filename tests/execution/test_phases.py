"""When a bolt's methods are called: the A-B-C-D example, replays, and shorter opaque batches."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework import (
    BaseBatchBolt,
    BaseTransactionalBolt,
    Committer,
    FailedException,
    Fields,
    TopologyFailed,
    TransactionalTopologyBuilder,
    submit,
)
from framework.execution import Phase, single_task_phase, tasks
from framework.execution.messages import Piece
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.runners import DATA, start
from tests.kit.waiting import PATIENCE_S


class Noted(BaseBatchBolt):
    """Writes down its calls. Emits one row at its first tuple, and one when it finishes."""

    def __init__(self, folder: Path, fails: tuple[str, ...] = ()) -> None:
        self.folder = str(folder)
        self.fails = fails

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.attempt, self.name = collector, batch_id, context.component_id
        self.task, self.rows = context.task_index, 0
        self.note("prepare")

    def execute(self, tup: Any) -> None:
        self.rows += 1
        if self.rows == 1:
            self.collector.emit([1])
        self.note("execute")

    def finish_batch(self) -> None:
        self.note("finish")
        if f"{self.name} {self.attempt}" in self.fails:
            raise FailedException("as asked")
        self.collector.emit([self.rows])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))

    def note(self, what: str) -> None:
        line = json.dumps([self.name, what, self.attempt.txid, self.attempt.attempt_id, self.task, time.monotonic()])
        descriptor = os.open(Path(self.folder) / "calls", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, (line + "\n").encode())
        os.close(descriptor)


class NotedCommitter(Noted, BaseTransactionalBolt):
    """``Noted`` as a committer."""


def abcd(folder: Path, fails: tuple[str, ...] = ()) -> TransactionalTopologyBuilder:
    """The topology of the seed: B and D commit; C is fed by A and by B, D by C."""
    spout = OpaqueMemoryTransactionalSpout({0: [[1]] * 6}, Fields(n=int), 3)
    builder = TransactionalTopologyBuilder("abcd", "spout", spout, 1)
    builder.set_bolt("A", Noted(folder, fails), 2).shuffle_grouping("spout")
    builder.set_committer_bolt("B", NotedCommitter(folder, fails), 2).shuffle_grouping("A")
    builder.set_bolt("C", Noted(folder, fails), 2).shuffle_grouping("A").shuffle_grouping("B")
    builder.set_committer_bolt("D", NotedCommitter(folder, fails)).global_grouping("C")
    return builder


def calls(folder: Path) -> list[tuple[str, str, int, int, int, float]]:
    return [tuple(json.loads(line)) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.behaviour("1.7", "1.6")
def test_bolts_below_a_committer_finish_in_the_same_commit_phase_in_the_order_of_the_graph(
    runner: Any, tmp_path: Path
) -> None:
    with start(abcd(tmp_path).build(), runner, **{"topology.max.spout.pending": 2}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        at = {(event.kind, event.txid): event.at_s for event in run.events()}
    seen = calls(tmp_path)
    for txid in (1, 2):
        when = {
            (name, what): [moment for n, w, t, _, _, moment in seen if (n, w, t) == (name, what, txid)]
            for name in "ABCD"
            for what in ("prepare", "execute", "finish")
        }
        opened, closed = at[("committing", txid)], at[("committed", txid)]
        assert max(when[("A", "finish")]) < opened
        assert max(when[("B", "execute")]) < opened  # a committer executes in the processing phase
        assert opened < min(when[("B", "finish")])
        assert max(when[("B", "finish")]) < min(when[("C", "finish")])
        assert max(when[("C", "finish")]) < min(when[("D", "finish")]) < closed
        tasks = Counter((name, task) for name, what, t, _, task, _ in seen if what == "finish" and t == txid)
        assert tasks == {("A", 0): 1, ("A", 1): 1, ("B", 0): 1, ("B", 1): 1, ("C", 0): 1, ("C", 1): 1, ("D", 0): 1}
    assert at[("committed", 1)] < at[("committing", 2)]


_clock_s = 0.0


def goes_on(seconds: float) -> None:
    global _clock_s
    _clock_s += seconds


class Slow(BaseBatchBolt):
    """Lets the clock go on by ``seconds`` per tuple, before and after it emits, and at the end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector = collector

    def execute(self, tup: Any) -> None:
        goes_on(self.seconds / 2)
        self.collector.emit([tup["n"]])
        goes_on(self.seconds / 2)

    def finish_batch(self) -> None:
        goes_on(self.seconds)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(n=int))


class SlowCommitter(Slow, BaseTransactionalBolt):
    """``Slow`` as a committer."""


def test_the_time_of_each_component_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of components that are fused, and of a committer in both phases."""
    monkeypatch.setattr(tasks, "time", SimpleNamespace(perf_counter=lambda: _clock_s, time=time.time))
    spout = OpaqueMemoryTransactionalSpout({0: [[1]] * 3}, Fields(n=int), 3)
    builder = TransactionalTopologyBuilder("slow", "spout", spout, 1)
    builder.set_bolt("A", Slow(1)).global_grouping("spout")
    builder.set_bolt("B", Slow(10)).global_grouping("A")
    builder.set_committer_bolt("C", SlowCommitter(100)).global_grouping("B")
    with submit(builder.build(), {}, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        (record,) = run.transactions()
    assert record.attempts[0].component_ms == {"spout": 0.0, "A": 4_000.0, "B": 40_000.0, "C": 400_000.0}


@pytest.mark.each_value_once
@pytest.mark.behaviour("1.8")
@pytest.mark.parametrize("where", ["B", "C", "D"])
def test_a_commit_phase_that_fails_is_replayed_from_the_start_of_the_transaction(
    runner: Any, tmp_path: Path, where: str
) -> None:
    topology = abcd(tmp_path, fails=(f"{where} 1:1", f"{where} 1:2")).build()
    with start(topology, runner, **{"topology.max.spout.pending": 2}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        records = run.transactions()
    assert [each.outcome for each in records[0].attempts] == ["failed", "failed", "committed"]
    seen = calls(tmp_path)
    for attempt in (1, 2, 3):  # each attempt has both phases
        assert {name for name, what, txid, a, _, _ in seen if (what, txid, a) == ("finish", 1, attempt)} >= {"A", "B"}
    finished = [a for name, what, txid, a, _, _ in seen if (name, what, txid) == ("D", "finish", 1)]
    assert finished[-1] == 3


class Gathers(BaseTransactionalBolt, Committer):
    """Emits each word at once, and all words of the batch again when it finishes."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector = collector
        self.words: list[str] = []

    def execute(self, tup: Any) -> None:
        self.words.append(tup["word"])
        self.collector.emit([tup["word"]])

    def finish_batch(self) -> None:
        for word in self.words:
            self.collector.emit([word])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.behaviour("1.7")
@pytest.mark.rule("C13")
def test_attributes_and_rows_of_a_committers_execute_reach_the_commit_phase(runner: Any, tmp_path: Path) -> None:
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "words"))
    builder = TransactionalTopologyBuilder(
        "gathers", "spout", OpaqueMemoryTransactionalSpout(DATA, Fields(word=str), 25)
    )
    builder.set_bolt("gathers", Gathers(), 2).shuffle_grouping("spout")
    builder.set_bolt("words", StateCommitter(state, ["word"], {"n": Count()}), 2).fields_grouping(
        "gathers", Fields("word")
    )
    with start(builder.build(), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
    counts = Counter(word for rows in DATA.values() for (word,) in rows)
    assert {word: state.get(word) for word in counts} == {word: 2 * count for word, count in counts.items()}


@pytest.mark.behaviour("1.4")
def test_batches_after_one_that_was_replanned_shorter_begin_where_it_ends(runner: Any, tmp_path: Path) -> None:
    """Batch A is 1 to 50, B is 51 to 100. A fails and comes back as 1 to 40.

    Then B is 41 to 90, and C is 91 to 140.
    """
    spout = OpaqueMemoryTransactionalSpout({0: [[str(number)] for number in range(1, 141)]}, Fields(word=str), 50)
    state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "seen"))
    builder = TransactionalTopologyBuilder("shorter", "spout", spout, 1)
    builder.set_bolt("gate", Gate(tmp_path)).global_grouping("spout")
    builder.set_bolt("seen", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    with start(builder.build(), runner, **{"topology.max.spout.pending": 2}) as run:
        deadline = time.monotonic() + PATIENCE_S
        while len(run.transactions()) < 2:  # B is emitted while A is being processed
            assert time.monotonic() < deadline
            time.sleep(0.01)
        spout.set_take(40)
        (tmp_path / "fail").touch()
        run.wait_for_commit(1, PATIENCE_S)
        spout.set_take(50)
        run.wait_until_caught_up(PATIENCE_S)
        records = run.transactions()
    first, second = records[0], records[1]
    assert first.plan == {"0": {"first": 0, "next": 40}}
    assert second.plan["0"]["first"] == 40
    assert second.attempts[0].outcome == "cancelled" and second.attempts[-1].outcome == "committed"
    assert {number: state.get(str(number)) for number in range(1, 141)} == dict.fromkeys(range(1, 141), 1)


class Gate(BaseBatchBolt):
    """Fails the first attempt at txid 1 as soon as it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.attempt = batch_id

    def execute(self, tup: Any) -> None:
        pass

    def finish_batch(self) -> None:
        if (self.attempt.txid, self.attempt.attempt_id) == (1, 1):
            deadline = time.monotonic() + PATIENCE_S
            while not (Path(self.folder) / "fail").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise FailedException("as asked")


@pytest.mark.behaviour("1.11")
def test_rows_that_get_lost_between_the_phases_fail_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the edge from A to C, rows are sent in the processing phase
    and received in the commit phase.
    """
    real, lost = single_task_phase.run_level, []

    def lossy(topology: Any, phase: Any, *arguments: Any, **options: Any) -> Any:
        for target, record in real(topology, phase, *arguments, **options):
            held = isinstance(record, Piece) and topology.plan.edges[record.edge].phase is not phase
            if held and phase is Phase.PROCESSING and not lost:
                lost.append(record)
            else:
                yield target, record

    monkeypatch.setattr(single_task_phase, "run_level", lossy)
    with start(abcd(tmp_path).build(), ("local", {})) as run:
        run.wait_until_caught_up(PATIENCE_S)
        reasons = [attempt.reason for each in run.transactions() for attempt in each.attempts if attempt.reason]
    assert lost
    assert len(reasons) == 1
    assert re.search(r"edge A->C: \d+ rows sent, \d+ received", reasons[0])


@pytest.mark.each_value_once
@pytest.mark.behaviour("1.7", "1.11")
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.rule("C31")
def test_rows_that_a_committer_emits_in_execute_reach_bolts_in_the_same_task(
    runner: Any, tmp_path: Path, tasks: int
) -> None:
    """C31: rows of both phases arrive, whichever task the committer was in,
    also when its pickle travelled with them.
    """
    data = {number: [[1]] * 3 * (number + 1) for number in range(3)}
    spout = OpaqueMemoryTransactionalSpout(data, Fields(n=int), 3)
    builder = TransactionalTopologyBuilder("execute", "spout", spout, tasks)
    builder.set_committer_bolt("B", Repeating(tmp_path), tasks).local_or_shuffle_grouping("spout")
    builder.set_bolt("C", Repeating(tmp_path), tasks).local_or_shuffle_grouping("B")
    builder.set_bolt("D", Noted(tmp_path), tasks).local_or_shuffle_grouping("C")
    builder.set_bolt("wider", Noted(tmp_path), 4).shuffle_grouping("spout")
    with start(builder.build(), runner, **{"topology.max.attempts": 1}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert [len(each.attempts) for each in run.transactions()] == [1, 1, 1]
    received = Counter((name, task) for name, what, _, _, task, _ in calls(tmp_path) if what == "execute")
    rows = [len(data[number]) for number in data] if tasks == 3 else [18]
    for task in range(tasks):
        assert received[("C", task)] == rows[task] + 3  # each row, and one from finish_batch per batch
        assert received[("D", task)] == received[("C", task)] + 3


@pytest.mark.each_value_once
@pytest.mark.behaviour("1.10")
@pytest.mark.parametrize("grouping", ["shuffle", "none", "local_or_shuffle"])
def test_two_tasks_share_the_records_of_one_partition(runner: Any, tmp_path: Path, grouping: str) -> None:
    """The bolt has as many tasks as the spout, and only one spout task has something to read."""
    spout = OpaqueMemoryTransactionalSpout({0: [[1]] * 10}, Fields(n=int), 10)
    builder = TransactionalTopologyBuilder("shared", "spout", spout, 2)
    getattr(builder.set_bolt("A", Noted(tmp_path), 2), f"{grouping}_grouping")("spout")
    with start(builder.build(), runner) as run:
        run.wait_until_caught_up(PATIENCE_S)
    received = Counter(task for _, what, _, _, task, _ in calls(tmp_path) if what == "execute")
    assert received == ({0: 10} if grouping == "local_or_shuffle" else {0: 5, 1: 5})


def test_shuffled_rows_that_were_read_in_about_equal_shares_stay_where_they_are(tmp_path: Path) -> None:
    """Rows that are spread evenly already need no shuffle."""
    spout = OpaqueMemoryTransactionalSpout({0: [[1]] * 10, 1: [[1]] * 6}, Fields(n=int), 10)
    builder = TransactionalTopologyBuilder("even", "spout", spout, 2)
    builder.set_bolt("A", Noted(tmp_path), 2).shuffle_grouping("spout")
    with start(builder.build(), ("local", {})) as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert Counter(task for _, what, _, _, task, _ in calls(tmp_path) if what == "execute") == {0: 10, 1: 6}


class Repeating(NotedCommitter):
    """Emits a row for each tuple at once, and one more when it finishes."""

    def execute(self, tup: Any) -> None:
        self.collector.emit([1])
        self.rows += 1
        self.note("execute")


@pytest.mark.behaviour("1.11")
@pytest.mark.parametrize("wrong", ["another task", "twice, another lost"])
def test_rows_that_arrive_at_the_wrong_task_fail_the_attempt_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """As many rows are received in all as were sent,
    so only the counts per task show the mistake.
    """
    real, strayed = single_task_phase.run_level, []

    def straying(topology: Any, phase: Any, *arguments: Any, **options: Any) -> Any:
        for target, record in real(topology, phase, *arguments, **options):
            if isinstance(record, Piece) and options["level"] == 0 and phase is Phase.PROCESSING and len(strayed) < 2:
                strayed.append((target, record))
                if wrong == "another task":
                    target = 1 - target if len(strayed) == 1 else target
                elif len(strayed) == 1:
                    continue
                else:
                    yield target, record
            yield target, record

    monkeypatch.setattr(single_task_phase, "run_level", straying)
    spout = OpaqueMemoryTransactionalSpout({0: [[1]] * 6, 1: [[1]] * 6}, Fields(n=int), 6)  # two pieces for each task
    builder = TransactionalTopologyBuilder("stray", "spout", spout, 1)
    builder.set_bolt("A", Noted(tmp_path), 2).shuffle_grouping("spout")
    with start(builder.build(), ("local", {})) as run:
        run.wait_until_caught_up(PATIENCE_S)
        attempts = [attempt for each in run.transactions() for attempt in each.attempts]
    assert len(strayed) == 2
    assert [each.outcome for each in attempts] == ["failed", "committed"]
    assert "expected rows per edge" in str(attempts[0].reason)
    assert not [each for each in calls(tmp_path) if each[3] == 1 and each[1] == "execute" and each[4] == strayed[0][0]]


@pytest.mark.behaviour("1.11")
def test_a_task_that_hears_of_no_task_above_it_fails_and_says_so() -> None:
    """As when Spark has lost what the tasks above it left."""
    failure = tasks._miscounted([], [Piece(0, 0, 1, 0, 30, b"")], level=1, partition=2)
    assert str(failure) == (
        "exchange[2]: level 1 partition 2: heard from no task above, expected rows per edge {}, found {0: 30}"
    )


@pytest.mark.behaviour("1.5", "1.11")
@pytest.mark.parametrize("where", ["spout->A", "A->C"])
@pytest.mark.rule("C30")
def test_rows_that_are_never_received_end_the_topology_after_max_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """C30: this is a fault of the product; more attempts do not help."""
    real = single_task_phase.run_level

    def lossy(topology: Any, phase: Any, *arguments: Any, **options: Any) -> Any:
        for target, record in real(topology, phase, *arguments, **options):
            if not (isinstance(record, Piece) and topology.plan.edges[record.edge].label == where):
                yield target, record

    monkeypatch.setattr(single_task_phase, "run_level", lossy)
    with (
        start(abcd(tmp_path).build(), ("local", {}), **{"topology.max.attempts": 2}) as run,
        pytest.raises(TopologyFailed, match="exchange"),
    ):
        run.wait_until_caught_up(PATIENCE_S)
    assert run.status().attempts_failed == 2
