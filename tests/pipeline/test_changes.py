"""Changed topologies, ``reset``, and the roll-back of batches that can no longer be read."""

from __future__ import annotations

import itertools
import logging
import sqlite3
import statistics
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from framework import Fields, Topology, TopologyFailed, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError
from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.local import LocalExecutor
from framework.execution.messages import AttemptHeader
from framework.execution.ports import PhaseResult
from framework.transactions import Put, ZooKeeperStore, read_history, reset
from integration import EmbeddedServers
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.command import Answer, call
from tests.kit.waiting import PATIENCE_S
from tests.kit.words_runs import EXACT, WORD, Setup

# --- a changed topology ---------------------------------------------------------------------------


def changed(setup: Setup, spout_id: str = "spout") -> Topology:
    """The same topology with another parallelism and a second table."""
    builder = TransactionalTopologyBuilder("words", spout_id, setup.spout, 2)
    first = StateCommitter(OpaqueMapState(setup.backend), ["word"], {"n": Count()})
    builder.set_bolt("count", first, 3).fields_grouping(spout_id, Fields("word"))
    second = StateCommitter(OpaqueMapState(SqliteBackend(setup.path, "more")), ["word"], {"n": Count()})
    builder.set_bolt("more", second).global_grouping(spout_id)
    return builder.build()


def more(setup: Setup) -> dict[str, int]:
    with sqlite3.connect(setup.path) as connection:
        return dict(connection.execute("SELECT word, n FROM more_live"))


def test_a_changed_topology_goes_on_when_the_user_accepts_the_change(setup: Setup) -> None:
    setup.run_all()
    with pytest.raises(ConfigError, match="'count' has 3 tasks, and had 2.*--accept-changed-topology"):
        setup.start(changed(setup)).wait_until_caught_up(PATIENCE_S)
    setup.spout.append(0, [["w0"], ["w1"]])
    with structlog.testing.capture_logs() as logs, setup.start(changed(setup), accept_changed_topology=True) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 5
    (said,) = [each for each in logs if each["event"] == "topology.changed"]
    assert "component 'more' is new" in said["difference"]
    assert setup.counts() == {**EXACT, "w0": 11, "w1": 11}
    assert more(setup) == {"w0": 1, "w1": 1}  # a state that joins begins with the next transaction
    setup.spout.append(0, [["w2"]])
    with setup.start(changed(setup)) as run:  # once is enough: it is now the topology of this state
        run.wait_until_caught_up(PATIENCE_S)
    assert more(setup) == {"w0": 1, "w1": 1, "w2": 1}


@pytest.mark.rule("C2")
def test_a_state_that_was_emptied_does_not_join_a_changed_topology_as_a_new_one(setup: Setup) -> None:
    """The user has accepted the changes of the topology,
    not the loss of what the old state held.
    """
    setup.run_all()
    for each in setup.path.parent.glob(f"{setup.path.name}*"):
        each.unlink()
    with pytest.raises(ConfigError, match="holds transactions up to 0.*the sink is behind"):
        setup.start(changed(setup), accept_changed_topology=True).wait_until_caught_up(PATIENCE_S)


def test_a_renamed_spout_takes_over_the_positions(setup: Setup) -> None:
    setup.run_all()
    renamed = changed(setup, "source")
    with pytest.raises(ConfigError, match="component 'spout' is gone; component 'source' is new"):
        setup.start(renamed).wait_until_caught_up(PATIENCE_S)
    setup.spout.append(0, [["w0"]])
    with setup.start(renamed, accept_changed_topology=True) as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 5
    assert setup.counts() == {**EXACT, "w0": 11}
    assert setup.store.children("words/user/spout") == []


# --- reset ----------------------------------------------------------------------------------------


@pytest.mark.rule("C17")
def test_reset_of_positions_reads_again_under_rising_txids(setup: Setup) -> None:
    setup.run_all()
    assert "transaction 5 is next" in reset.describe(setup.topology(), setup.store)[0]
    assert reset.reset_positions(setup.topology(), setup.store) == 5
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 8
    assert setup.counts() == {word: 2 * count for word, count in EXACT.items()}


def test_reset_of_positions_rolls_an_opened_commit_back_first(setup: Setup) -> None:
    setup.wrap = lambda executor: DiesAfter(executor, 2)
    run = setup.start(**{"topology.max.spout.pending": 1})
    with pytest.raises(TopologyFailed, match="dies here"):
        run.join(PATIENCE_S)
    assert setup.counts() != {}
    reset.reset_positions(setup.topology(), setup.store)
    setup.wrap = lambda executor: executor
    before = setup.counts()
    setup.run_all()
    assert setup.counts() == {word: count + before.get(word, 0) for word, count in EXACT.items()}


class DiesAfter:
    """An executor whose driver dies after the commit of a txid has written,
    before its answer arrives.
    """

    def __init__(self, inner: LocalExecutor, txid: int) -> None:
        self.inner, self.txid = inner, txid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def commit(self, header: AttemptHeader) -> PhaseResult:
        result = self.inner.commit(header)
        if header.txid == self.txid:
            return PhaseResult(TaskFailure(FailureKind.FATAL, "test", 0, "dies here"))
        return result


@pytest.mark.parametrize("corrupt", [False, True])
def test_reset_of_everything_starts_with_transaction_1(setup: Setup, corrupt: bool) -> None:
    setup.run_all()
    if corrupt:
        setup.store.apply([Put("words/user/spout/4", b"garbage")])
        assert "its state cannot be read" in reset.describe(setup.topology(), setup.store)[0]
    reset.reset_everything(setup.topology(), setup.store)
    assert setup.counts() == {}
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert (run.status().committed_txid, run.status().epoch > 2) == (4, True)
    assert setup.counts() == EXACT


def test_reset_is_refused_while_a_driver_leads(setup: Setup) -> None:
    with setup.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        with pytest.raises(ConfigError, match="a driver runs topology 'words': stop it first"):
            reset.reset_everything(setup.topology(), setup.store, timeout_s=0.2)
    assert setup.counts() == EXACT


@pytest.mark.integration
def test_reset_from_the_command_line_asks_for_yes_and_starts_over(
    servers: EmbeddedServers, name: str, tmp_path: Path
) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "from framework import *\nfrom sinks import *\nfrom spouts import *\n"
        f"b = TransactionalTopologyBuilder({name!r}, 's', MemoryTransactionalSpout({{0: [['a'], ['b']]}}, Fields(word=str), 1))\n"
        f"s = TransactionalMapState(SqliteBackend({str(tmp_path / 'x.db')!r}, 'words'))\n"
        "b.set_bolt('count', StateCommitter(s, ['word'], {'n': Count()})).global_grouping('s')\n"
        "topology = b.build()\n"
    )
    where = ("--set", f"transactional.zookeeper.servers={servers.zookeeper}")

    def reset(*words: str) -> Answer:
        return call("ratchet", "reset", "mine:topology", *words, cwd=tmp_path)

    for _ in range(2):
        made: dict[str, Any] = {}
        exec(module.read_text(), made)
        with submit(made["topology"], {"transactional.zookeeper.servers": servers.zookeeper}, executor="local") as run:
            run.wait_until_caught_up(PATIENCE_S)
            assert run.status().committed_txid == 2
        shown = reset("--everything", *where)
        assert shown.returncode == 0
        assert "transaction 3 is next" in shown.stdout
        assert "nothing was changed; add --yes" in shown.stdout
        assert "everything forgotten, 1 sinks emptied" in reset("--everything", "--yes", *where).stdout
    assert "say what to forget: --positions, or --everything" in reset(*where).stderr
    assert "transactional.zookeeper.servers is not set" in reset("--positions").stderr


# --- what can no longer be read (C7, C8) ----------------------------------------------------------


def opened_and_lost(setup: Setup, on_data_loss: str, committer: Any = None) -> tuple[Topology, Any]:
    """Open the commit of txid 2 and write; then the driver dies,
    and the source loses the rows of txid 2.
    """
    setup.spout = OpaqueMemoryTransactionalSpout(
        {0: [[f"w{number % 5}"] for number in range(40)]}, WORD, 10, on_data_loss=on_data_loss
    )
    builder = TransactionalTopologyBuilder("words", "spout", setup.spout, 2)
    made = StateCommitter(OpaqueMapState(setup.backend), ["word"], {"n": Count()})
    builder.set_bolt("count", made, 2).fields_grouping("spout", Fields("word"))
    if committer is not None:
        builder.set_committer_bolt("other", committer).global_grouping("spout")
    topology = builder.build()
    setup.wrap = lambda executor: DiesAfter(executor, 2)
    run = setup.start(topology, **{"topology.max.spout.pending": 1})
    with pytest.raises(TopologyFailed, match="dies here"):
        run.join(PATIENCE_S)
    setup.wrap = lambda executor: executor
    assert setup.counts() == {f"w{number}": 4 for number in range(5)}
    setup.spout.expire(0, 33)
    return topology, setup


@pytest.mark.rule("C7")
def test_an_opened_batch_whose_records_are_gone_is_rolled_back_and_planned_afresh(setup: Setup) -> None:
    """The dead attempt wrote rows 10 to 19.

    They are gone from the source, and then from the table.
    """
    topology, _ = opened_and_lost(setup, "skip")
    with setup.start(topology) as run:
        run.wait_until_caught_up(PATIENCE_S)
        kinds = [(each.kind, each.txid) for each in run.events()]
        records = run.transactions()
    assert ("rolled back", 2) in kinds
    assert setup.counts() == {"w0": 3, "w1": 3, "w2": 3, "w3": 4, "w4": 4}  # 0 to 9, and 33 to 39
    assert records[0].plan == {"0": {"first": 33, "next": 40, "skipped": 23}}
    assert [each.outcome for each in records[0].attempts] == ["failed", "rolled back", "committed"]
    kept = read_history(setup.store, "words")
    assert [(each.txid, each.plan["0"]["next"]) for each in kept] == [(1, 10), (2, 40)]


@pytest.mark.parametrize("why", ["fail", "cannot undo"])
@pytest.mark.rule("C8")
def test_an_opened_batch_whose_records_are_gone_stops_where_it_cannot_be_undone(setup: Setup, why: str) -> None:
    topology, _ = opened_and_lost(setup, "skip" if why == "cannot undo" else "fail", Blind() if why != "fail" else None)
    # One batch at a time: the next one has lost records, too.
    run = setup.start(topology, **{"topology.max.spout.pending": 1})
    with pytest.raises(
        TopologyFailed,
        match="forgotten offsets 10 to 20.*on_data_loss='skip' and no sink that cannot undo may have written",
    ):
        run.wait_until_caught_up(PATIENCE_S)
    run.stop()
    assert setup.counts() == {f"w{number}": 4 for number in range(5)}


class Blind(StateCommitter):
    """A committer whose writes Ratchet does not see."""

    def __init__(self) -> None:
        self._fold = None

    def bind(self, component_id: str, inputs: Any, parallelism: int) -> None:
        pass

    def declare_output_fields(self, declarer: Any) -> None:
        pass

    def state_settings(self) -> dict[str, Any]:
        return {}

    def combiner(self) -> Any:
        return None

    def prepare(self, *arguments: Any) -> None:
        pass

    def execute_arrow(self, batch: Any) -> None:
        pass

    def finish_batch(self) -> Any:
        return []


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.rule("C19")
def test_records_of_the_last_transactions_are_kept_in_zookeeper(
    servers: EmbeddedServers, name: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from framework.transactions import documents

    monkeypatch.setattr(documents, "RECORDS_MAX", 3)
    store = ZooKeeperStore(servers.zookeeper, f"/{name}")
    topology = setup.topology()
    with submit(topology, {}, store=store, executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        mine = {each.txid: each for each in run.transactions()}
    kept = read_history(store, "words")
    store.close()
    assert [each.txid for each in kept] == [2, 3, 4]
    for record in kept:
        (attempt,) = record.attempts
        assert (record.plan, record.plan_digest) == (mine[record.txid].plan, mine[record.txid].plan_digest)
        assert attempt.outcome == "committed"
        assert attempt.rows["spout->count"] > 0
        assert None not in (attempt.processing_ms, attempt.waiting_ms, attempt.commit_ms)


def test_every_attempt_has_one_line_in_the_log(setup: Setup) -> None:
    """A committed, failed or cancelled attempt has one line, with its durations."""
    failing = threading.Event()

    class FailsOnce(DiesAfter):
        def process(self, job: Any) -> PhaseResult:
            result = self.inner.process(job)
            if job.header.txid == 2 and not failing.is_set():
                failing.set()
                return PhaseResult(TaskFailure(FailureKind.FAILED, "bolt", 0, "as asked"))
            return result

    setup.wrap = lambda executor: FailsOnce(executor, -1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    with structlog.testing.capture_logs() as logs, setup.start(**{"topology.max.spout.pending": 3}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        records = run.transactions()
        assert run.status().attempts_failed == 1
    lines = [each for each in logs if each["event"].startswith("batch.")]
    told = {(each["txid"], each["attempt"]): each["event"] for each in lines}
    assert len(told) == len(lines)
    ended = {"committed": "batch.committed", "failed": "batch.failed", "cancelled": "batch.cancelled"}
    assert told == {(each.txid, a.attempt_id): ended[a.outcome] for each in records for a in each.attempts}
    assert told[(2, 1)] == "batch.failed"
    committed = next(each for each in lines if each["event"] == "batch.committed")
    assert {"topology", "txid", "attempt", "epoch", "rows", "processing_ms", "waiting_ms", "commit_ms"} <= set(
        committed
    )


# --- an idle source (1.15) ------------------------------------------------------------------------


@pytest.mark.behaviour("1.15")
def test_empty_batches_are_made_when_asked_for_and_no_more_often_than_asked(setup: Setup) -> None:
    setup.run_all()
    config = {"topology.spout.emit.empty.batches": True, "topology.trident.batch.emit.interval.millis": 50}
    with setup.start(**config) as run:
        run.wait_for_commit(8, PATIENCE_S)
        moments = [each.at_s for each in run.events() if each.kind == "emitted"]
        assert [each.attempts[-1].source_rows for each in run.transactions()][:4] == [0, 0, 0, 0]
    # A moment that is noted late makes the next gap short.
    assert statistics.median(later - earlier for earlier, later in itertools.pairwise(moments)) >= 0.045
    assert setup.counts() == EXACT
