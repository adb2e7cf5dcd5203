"""A run that starts goes on where the last one ended,
or stops with one line that says what is wrong.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, CorruptStateError, DataLossError, TopologyError
from framework.execution import single_task_phase
from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.local import LocalExecutor
from framework.execution.messages import AttemptHeader, Piece
from framework.execution.ports import PhaseResult
from framework.topology import OpenCommit
from framework.transactions import Delete, MemoryStore
from framework.transactions.run import TopologyFailed
from sinks import Count, OpaqueMapState, StateCommitter
from spouts import memory
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.kit.words_runs import EXACT, Setup


@pytest.mark.behaviour("1.1")
def test_txids_rise_over_restarts_and_nothing_is_counted_twice(setup: Setup) -> None:
    setup.run_all()
    assert setup.counts() == EXACT
    setup.spout.append(1, [["w0"]])
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 5
        assert run.status().epoch == 2
    assert setup.counts() == {**EXACT, "w0": 11}


@pytest.mark.behaviour("1.1")
def test_two_topologies_in_one_store_do_not_see_each_other(setup: Setup, tmp_path: Path) -> None:
    setup.run_all()
    other = Setup(tmp_path / "other")
    other.store = setup.store
    builder = TransactionalTopologyBuilder("others", "spout", other.spout, 1)
    builder.set_bolt("count", StateCommitter(OpaqueMapState(other.backend), ["word"], {"n": Count()})).global_grouping(
        "spout"
    )
    with other.start(builder.build()) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 4
    assert other.counts() == EXACT


@pytest.mark.behaviour("1.15")
def test_an_empty_source_makes_no_transactions(setup: Setup) -> None:
    setup.run_all()
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 4
        assert run.events() == []


class Crash:
    """Wraps an executor: commits fail before or after the real one has done its work."""

    def __init__(self, inner: LocalExecutor, when: str, times: int) -> None:
        self.inner, self.when, self.left = inner, when, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def commit(self, header: AttemptHeader) -> PhaseResult:
        if self.left and self.when == "before":
            self.left -= 1
            return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "test", 0, "lost before"))
        result = self.inner.commit(header)
        if self.left:
            self.left -= 1
            return PhaseResult(TaskFailure(FailureKind.RETRYABLE, "test", 0, "answer lost"))
        return result


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.behaviour("1.8")
def test_commits_whose_answer_is_lost_are_redone_exactly_once(setup: Setup, when: str) -> None:
    setup.wrap = lambda executor: Crash(executor, when, 3)
    setup.run_all()
    assert setup.counts() == EXACT


@pytest.mark.parametrize("opened", [False, True])
def test_an_opaque_batch_is_planned_afresh_unless_its_commit_had_opened(setup: Setup, opened: bool) -> None:
    """The driver dies after it has emitted txid 2, before or after it
    has raised the header of the state.
    """
    hold = threading.Event()

    class Hold(Crash):
        def commit(self, header: AttemptHeader) -> PhaseResult:
            if header.txid == 2:
                hold.set()
                return PhaseResult(TaskFailure(FailureKind.FATAL, "test", 0, "dies here"))
            return self.inner.commit(header)

        def process(self, job: Any) -> PhaseResult:
            if job.header.txid == 2 and not opened:
                hold.set()
                return PhaseResult(TaskFailure(FailureKind.FATAL, "test", 0, "dies here"))
            return self.inner.process(job)

    setup.wrap = lambda executor: Hold(executor, "", 0)
    run = setup.start(**{"topology.max.spout.pending": 1})
    assert hold.wait(PATIENCE_S)
    with pytest.raises(TopologyFailed, match="dies here"):
        run.join(PATIENCE_S)
    planned = json.loads(setup.store.get("words/user/spout/2") or b"")["value"]["plan"]
    setup.wrap = lambda executor: executor
    setup.spout.set_take(15)
    setup.run_all()
    assert setup.counts() == EXACT
    assert planned["0"] == {"first": 10, "next": 20}
    done = setup.backend.read_header().done
    assert done == (4 if opened else 3)  # planned afresh: 10, 15, 15; as pinned: 10, 10, 15, 5


# --- what is refused ------------------------------------------------------------------------------


def refused(setup: Setup, kind: type[Exception], message: str, topology: Topology | None = None) -> None:
    before = setup.counts()
    run = setup.start(topology)
    with pytest.raises(kind, match=message):
        run.wait_until_caught_up(PATIENCE_S)
    assert run.status().phase == "failed"
    run.stop()
    assert setup.counts() == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("coordinator/currtx", b"garbage", "words/coordinator/currtx: .*not JSON"),
        ("coordinator/currtx", "five", "words/coordinator/currtx: 'five' is not a txid"),
        ("coordinator/attempts", [1], "words/coordinator/attempts: not a map"),
        ("user/spout/4", b"\x00", "user/spout/4: .*not JSON"),
        (
            "user/spout/4",
            {"plan": {"0": {"first": 0, "next": 1}}, "digest": "x"},
            "user/spout/4: .*does not match its digest",
        ),
        ("user/spout/latest", {}, "user/spout/latest: the name is not a txid"),
        ("meta", [], "words/meta: not a meta document"),
        ("coordinator/currtx", b'{"format":9,"value":5}', "currtx: format version 9"),
    ],
)
@pytest.mark.fault(28)
def test_corrupt_state_stops_the_start_and_is_named(setup: Setup, path: str, value: Any, message: str) -> None:
    setup.run_all()
    setup.put(path, value)
    refused(setup, CorruptStateError, message)


@pytest.mark.rule("C15")
def test_a_missing_plan_of_the_last_transaction_is_named(setup: Setup) -> None:
    setup.run_all()
    setup.store.apply([Delete("words/user/spout/4")])
    refused(setup, CorruptStateError, "currtx is 5, and the plan of txid 4.*is missing")


@pytest.mark.rule("C2")
def test_a_wiped_store_under_a_live_sink_stops(setup: Setup) -> None:
    """Txid 1 must never be written over rows of later transactions."""
    setup.run_all()
    setup.store = MemoryStore()
    refused(
        setup,
        ConfigError,
        "was written by epoch 1, and ZooKeeper is at epoch 1: ZooKeeper's state is older than the sink",
    )


@pytest.mark.rule("C2")
def test_a_sink_restored_from_a_backup_stops(setup: Setup) -> None:
    setup.run_all()
    header = setup.backend.read_header()
    setup.backend.raise_header(header, header.finished(2))
    refused(setup, ConfigError, "holds transactions up to 2, .*the sink is behind")


@pytest.mark.rule("C2")
def test_a_sink_opened_with_another_plan_stops(setup: Setup) -> None:
    setup.run_all()
    header = setup.backend.read_header()
    setup.backend.raise_header(header, header.opened(1, OpenCommit(5, 1, "other")))
    refused(setup, ConfigError, "was opened for txid 5 with plan other, and ZooKeeper holds plan None")


def test_a_sink_of_a_later_epoch_stops(setup: Setup) -> None:
    setup.run_all()
    header = setup.backend.read_header()
    assert header.open is not None
    setup.backend.raise_header(header, header.opened(99, header.open))
    refused(setup, ConfigError, "was written by epoch 99, and ZooKeeper is at epoch 2")


def test_a_changed_topology_on_old_state_is_refused_with_the_difference(setup: Setup) -> None:
    setup.run_all()
    refused(setup, ConfigError, "'count' has 3 tasks, and had 2", setup.topology(3))


def test_a_table_of_another_topology_is_refused(setup: Setup) -> None:
    setup.run_all()
    builder = TransactionalTopologyBuilder("thief", "spout", setup.spout, 1)
    builder.set_bolt("count", StateCommitter(OpaqueMapState(setup.backend), ["word"], {"n": Count()})).global_grouping(
        "spout"
    )
    refused(setup, ConfigError, "belongs to topology 'words', not 'thief'", builder.build())


def test_submit_takes_a_topology_and_known_executors_only(setup: Setup) -> None:
    with pytest.raises(TopologyError, match="takes what builder.build"):
        submit("words", executor="local")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="executor 'flink' is not known"):
        submit(setup.topology(), executor="flink")


def test_submit_refuses_more_transactions_at_once_than_can_be_meant(setup: Setup) -> None:
    """The same key counts the tuples of a core topology."""
    with pytest.raises(
        ConfigError, match="is 1001: of a transactional topology it counts whole transactions, and 1000"
    ):
        submit(setup.topology(), {"topology.max.spout.pending": 1001}, executor="local")


# --- leadership -----------------------------------------------------------------------------------


def test_a_deposed_driver_steps_down_and_leads_again(setup: Setup) -> None:
    """The session ends during the run, which goes on by itself under a new epoch."""
    with setup.start(**{"topology.max.spout.pending": 1}) as run:
        run.wait_for_commit(1, PATIENCE_S)
        setup.store.depose("words")
        setup.spout.append(0, [["w0"]] * 30)
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().epoch == 2
    assert setup.counts() == {**EXACT, "w0": 40}


@pytest.mark.parametrize("missed_by", ["planner", "task"])
@pytest.mark.behaviour("1.11")
def test_a_deposed_driver_that_misses_records_stands_by(
    setup: Setup, missed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it still plans or reads, its successor may have committed and the source forgotten."""
    deposed = []

    def forgets() -> None:
        if not deposed:
            deposed.append(True)
            setup.store._epochs["words"] += 1  # another one was elected; the leader has not heard of it
            raise DataLossError("the source has forgotten what is read next")

    class Forgetful(Crash):
        def process(self, job: Any) -> PhaseResult:
            try:
                if job.header.txid == 2 and missed_by == "task":
                    forgets()
            except DataLossError as error:
                return PhaseResult(TaskFailure.of(error, "spout", 0))
            return self.inner.process(job)

    def planned(planner: Any, previous: Any) -> Any:
        if previous and missed_by == "planner":
            forgets()
        return plan(planner, previous)

    plan = memory._MemoryPlanner.plan
    monkeypatch.setattr(memory._MemoryPlanner, "plan", planned)
    setup.wrap = lambda executor: Forgetful(executor, "", 0)
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert deposed and run.status().epoch == 3
    assert setup.counts() == EXACT


def test_of_two_drivers_one_leads_and_the_other_takes_over(setup: Setup) -> None:
    """The second driver stands by until the first one has stopped."""
    first = setup.start()
    first.wait_until_caught_up(PATIENCE_S)
    second = setup.start()
    wait_for(lambda: second.status().phase == "standby")
    with pytest.raises(TimeoutError, match="standby"):
        second.wait_for_commit(99, 0.5)
    setup.spout.append(0, [["w1"]])
    first.wait_until_caught_up(PATIENCE_S)
    first.stop()
    setup.spout.append(0, [["w2"]])
    second.wait_until_caught_up(PATIENCE_S)
    assert second.status().epoch == 2
    second.stop()
    assert setup.counts() == {**EXACT, "w1": 11, "w2": 11}


def test_a_driver_started_as_standby_lets_another_driver_lead_first(setup: Setup) -> None:
    second = setup.start(standby=True)
    wait_for(lambda: second.status().phase == "standby")
    with pytest.raises(TimeoutError, match="standby"):
        second.wait_for_commit(1, 0.5)
    assert not setup.path.exists()
    first = setup.start()
    first.wait_until_caught_up(PATIENCE_S)
    assert second.status().phase == "standby"
    time.sleep(0.5)  # it checks ten times a second
    first.stop()
    setup.spout.append(0, [["w2"]])
    second.wait_until_caught_up(PATIENCE_S)
    assert second.status().epoch == 2
    second.stop()
    assert setup.counts() == {**EXACT, "w2": 11}


# --- what a failed attempt leaves behind ----------------------------------------------------------


class Moody(BaseBasicBolt):
    """Emits other rows in every attempt, like a bolt that reads a clock."""

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([f"attempt{tup.attempt.attempt_id}"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.rule("C5")
def test_rows_of_a_dead_attempt_are_swept_when_its_replay_does_not_touch_them(setup: Setup) -> None:
    """C5: the commit of 1:1 did its work, but its answer was lost; 1:2 writes other keys."""
    setup.wrap = lambda executor: Crash(executor, "after", 1)
    builder = TransactionalTopologyBuilder("words", "spout", setup.spout, 2)
    builder.set_bolt("moody", Moody(), 2).shuffle_grouping("spout")
    committer = StateCommitter(OpaqueMapState(setup.backend), ["word"], {"n": Count()})
    builder.set_bolt("count", committer, 2).fields_grouping("moody", Fields("word"))
    with setup.start(builder.build(), **{"topology.max.spout.pending": 1}) as run:
        run.wait_until_caught_up(PATIENCE_S)
    assert setup.counts() == {"attempt1": 30, "attempt2": 20}


@pytest.mark.parametrize("fault", ["lost", "doubled"])
@pytest.mark.behaviour("1.11")
def test_rows_that_get_lost_between_tasks_fail_the_attempt(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """On each edge as many rows are received as were sent, or the attempt fails and is replayed."""
    real = single_task_phase.run_level
    faults: list[int] = []

    def faulty(*arguments: Any, **options: Any) -> Any:
        for target, record in real(*arguments, **options):
            if isinstance(record, Piece) and not faults:
                faults.append(target)
                if fault == "lost":
                    continue
                yield target, record
            yield target, record

    monkeypatch.setattr(single_task_phase, "run_level", faulty)
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().attempts_failed == 1
        failure = next(event.detail for event in run.events() if event.kind == "failed")
    assert "expected rows per edge" in failure
    assert setup.counts() == EXACT


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"cluster": "B", "topics": {"t": "1"}}, "was read from Kafka cluster 'A', and the configured one is 'B'"),
        ({"cluster": "A", "topics": {"t": "2"}}, "topic 't' is not the one .* its id was 1 and is 2"),
    ],
)
def test_state_of_another_cluster_or_topic_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, now: dict[str, Any], message: str
) -> None:
    identity: dict[str, Any] = {"cluster": "A", "topics": {"t": "1"}}
    monkeypatch.setattr("spouts.memory._MemoryPlanner.source_identity", lambda planner: identity)
    setup.run_all()
    identity = {"cluster": "A", "topics": {"t": "1", "u": "5"}}
    setup.run_all()
    identity = now
    refused(setup, DataLossError, message)
