"""``ratchet undo``: the newest transaction is taken back, whatever crashes meanwhile."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import (
    Config,
    Fields,
    Topology,
    TopologyFailed,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    submit,
)
from framework.commands.undo import app
from framework.coordination import store_of
from framework.coordination.election import leadership_of
from framework.coordination.store import Delete, Put
from framework.errors import ConfigError, RetryableError, StaleWriterError
from framework.inspect.explain import explain
from framework.inspect.verify import verify
from framework.topology import CommitFence, TransactionalSpout
from framework.transactions import MemoryStore, committed_txid
from framework.transactions import documents as documents_module
from framework.transactions.document_writer import TopologyDocuments
from framework.transactions.history_reader import HistoryReader
from framework.transactions.reset import reset_everything, reset_positions
from framework.transactions.undo import describe_undo, undo
from integration import EmbeddedServers
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    MapState,
    MemoryBackend,
    MySqlBackend,
    NonTransactionalMapState,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.command import call
from tests.kit.replays import FIELDS, OverKafka, Same, Sums, command, kafka_topology, run, state_at, topology_of
from tests.kit.targets import Often
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

ROWS = [["a", 1], ["b", 2], ["a", 3], ["c", 4], ["a", 5], ["d", 6]]
BEFORE = {"a": (2, 4), "b": (1, 2), "c": (1, 4)}
AFTER = {**BEFORE, "a": (3, 9), "d": (1, 6)}


def counting(folder: Path, state: type[MapState] = OpaqueMapState, backend: Any = None) -> Topology:
    """Counts and sums per word, two rows per batch; and keeps the rows in files."""
    kind = MemoryTransactionalSpout if state is TransactionalMapState else OpaqueMemoryTransactionalSpout
    builder = TransactionalTopologyBuilder("undone", "spout", kind({0: ROWS}, FIELDS, 2))
    builder.set_bolt("same", Same()).shuffle_grouping("spout")
    words = StateCommitter(
        state(backend or SqliteBackend(folder / "x.db", "words")), ["word"], {"count": Count(), "total": Sum("n")}
    )
    builder.set_bolt("words", words, 2).fields_grouping("same", Fields("word"))
    builder.set_bolt("rows", AppendCommitter(ParquetTable(folder / "rows"))).global_grouping("same")
    return builder.build()


def held(built: Topology) -> dict[Any, Any]:
    state = built["words"].states[0]
    assert isinstance(state, MapState)
    return {key[0]: row.value for key, row in state.backend.scan() if row.value is not None}


def kept(folder: Path) -> list[int]:
    return sorted(ParquetTable(folder / "rows").to_table().column("n").to_pylist())


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("state", [OpaqueMapState, TransactionalMapState])
def test_every_sink_is_as_before_the_newest_transaction_which_the_next_run_makes_again(
    tmp_path: Path, store: MemoryStore, state: type[MapState]
) -> None:
    built = counting(tmp_path, state)
    run(built, store)
    assert held(built) == AFTER and kept(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert undo(built, store) == 3
    assert (held(built), kept(tmp_path), committed_txid(store, built.id)) == (BEFORE, [1, 2, 3, 4], 2)
    assert verify(built, store).right
    run(built, store)
    assert (held(built), kept(tmp_path), committed_txid(store, built.id)) == (AFTER, [1, 2, 3, 4, 5, 6], 3)
    assert verify(built, store).right
    assert explain(built, store, state="words", key="a").agrees


def test_a_batch_of_a_mended_bolt_takes_the_place_of_the_wrong_one(tmp_path: Path, store: MemoryStore) -> None:
    class Wrong(Sums):
        def take(self, state: Any, word: str, number: int) -> None:
            super().take(state, word, number * 10 if number == 7 else number)

    rows = [["k", 1], ["k", 7]]
    run(topology_of(rows, Wrong(state_at(tmp_path))), store)
    mended = topology_of(rows, Sums(state_at(tmp_path)))
    assert state_at(tmp_path).get("k") == 71
    undo(mended, store)
    assert state_at(tmp_path).get("k") == 1
    run(mended, store)
    assert state_at(tmp_path).get("k") == 8


def test_history_shows_the_attempt_that_was_taken_back_before_the_new_one(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    undo(built, store)
    (taken,) = documents_module.read_transaction(store, built.id, 3).attempts  # type: ignore[union-attr]
    assert taken.outcome == "undone" and taken.reason.startswith("taken back by ratchet undo at 20")
    run(built, store)
    record = documents_module.read_transaction(store, built.id, 3)
    assert record is not None
    assert [(each.attempt_id, each.outcome) for each in record.attempts] == [(1, "undone"), (3, "committed")]
    assert record.attempts_total == 2 and record.closed_at is not None


def test_only_the_newest_transaction_is_taken_back_and_only_once(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    with pytest.raises(ConfigError, match="has committed no transaction"):
        undo(built, store)
    run(built, store)
    undo(built, store)
    with pytest.raises(ConfigError, match="has rolled transaction 3 back, and knows no values from before 2 any more"):
        undo(built, store)
    assert held(built) == BEFORE
    run(built, store)
    assert undo(built, store) == 3
    assert held(built) == BEFORE


def test_the_first_transaction_is_for_reset(tmp_path: Path, store: MemoryStore) -> None:
    built = topology_of(ROWS, Sums(state_at(tmp_path)), batch=100)
    run(built, store)
    with pytest.raises(ConfigError, match="transaction 1 is the first one .* ratchet reset --everything begins anew"):
        undo(built, store)
    assert state_at(tmp_path).get("a") == 9


def test_a_batch_whose_beginning_is_not_known_is_left_alone(tmp_path: Path, store: MemoryStore) -> None:
    """The first one after forgotten positions, and after an older version that did not record where
    it had begun.
    """
    built = topology_of(ROWS, Sums(state_at(tmp_path)), batch=100)
    run(built, store)
    reset_positions(built, store)
    with pytest.raises(ConfigError, match="its positions were forgotten"):
        undo(built, store)
    run(built, store)
    with pytest.raises(ConfigError, match="transaction 2 is the first one that is known of these positions"):
        undo(built, store)
    assert state_at(tmp_path).get("a") == 18
    older, other = MemoryStore(), tmp_path / "older"
    other.mkdir()
    spout = OpaqueMemoryTransactionalSpout({0: ROWS[:4]}, FIELDS, 2)
    builder = TransactionalTopologyBuilder("older", "spout", spout)
    builder.set_bolt("bolt", Sums(state_at(other))).global_grouping("spout")
    built = builder.build()
    run(built, older)
    with leadership_of(built.id, older) as leadership:
        leadership.apply([Delete("older/origin")])
    spout.append("0", ["a", 5])
    run(built, older)
    with pytest.raises(ConfigError, match="transaction 3 is the first one that is known of these positions"):
        undo(built, older)
    assert state_at(other).get("a") == 9


def test_what_cannot_be_undone_is_named_before_anything_is_done(tmp_path: Path, store: MemoryStore) -> None:
    def refused(bolt: Any, match: str) -> None:
        builder = TransactionalTopologyBuilder(
            "no", "spout", OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2), at_least_once=True
        )
        builder.set_bolt("bolt", bolt).global_grouping("spout")
        with pytest.raises(ConfigError, match=match):
            undo(builder.build(), store)

    twice = NonTransactionalMapState(MemoryBackend("twice"))
    refused(StateCommitter(twice, ["word"], {"count": Count()}), "cannot undo a transaction: .*twice")
    refused(AppendCommitter(DeltaLakeTable(tmp_path / "delta")), "cannot undo a transaction: .*delta")


class Coordinated(TransactionalSpout):
    """A coordinator of one's own, whose emitters may forget what was committed."""

    deterministic = True

    def coordinator(self, conf: Any, context: Any) -> Any:
        raise NotImplementedError

    def emitter(self, conf: Any, context: Any) -> Any:
        raise NotImplementedError

    def output_fields(self) -> Fields:
        return FIELDS


def test_a_spout_that_may_have_forgotten_its_batch_and_a_topology_without_states_are_refused(
    tmp_path: Path, store: MemoryStore
) -> None:
    builder = TransactionalTopologyBuilder("own", "spout", Coordinated())
    builder.set_bolt("bolt", Sums(state_at(tmp_path))).global_grouping("spout")
    with pytest.raises(ConfigError, match="spout 'spout', which was told that its committed batches"):
        undo(builder.build(), store)
    stateless = TransactionalTopologyBuilder("none", "spout", OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2))
    stateless.set_bolt("same", Same()).shuffle_grouping("spout")
    with pytest.raises(ConfigError, match="it has no state"):
        undo(stateless.build(), store)


def test_another_topology_than_the_one_that_has_run_is_refused(tmp_path: Path, store: MemoryStore) -> None:
    """A sink that it lacks would keep the transaction."""
    rows = OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2)

    def made(*names: str) -> Topology:
        builder = TransactionalTopologyBuilder("changed", "spout", rows)
        for name in names:
            builder.set_bolt(name, Sums(state_at(tmp_path, name))).global_grouping("spout")
        return builder.build()

    run(made("one", "two"), store)
    with pytest.raises(ConfigError, match="is not the one its state was written by: component 'two' is gone"):
        undo(made("one"), store)
    assert state_at(tmp_path, "one").get("a") == 9


def test_plans_that_an_idempotent_spout_has_made_already_stay(tmp_path: Path, store: MemoryStore) -> None:
    class Fails(Same):
        def execute(self, tup: Any, collector: Any) -> None:
            if tup["n"] == 6:
                raise ValueError("six")
            super().execute(tup, collector)

    def made(bolt: Any) -> Topology:
        spout = MemoryTransactionalSpout({0: ROWS}, FIELDS, 2)
        builder = TransactionalTopologyBuilder("kept", "spout", spout)
        builder.set_bolt("bolt", bolt).shuffle_grouping("spout")
        state = TransactionalMapState(SqliteBackend(tmp_path / "x.db", "w"))
        builder.set_bolt("words", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("bolt")
        return builder.build()

    with pytest.raises(TopologyFailed):
        run(made(Fails()), store, {"topology.max.attempts": 1})
    before = store.get("kept/user/spout/3")
    assert before is not None and undo(made(Same()), store) == 2
    assert store.get("kept/user/spout/3") == before
    run(made(Same()), store)
    assert held(made(Same())) == {"a": (3,), "b": (1,), "c": (1,), "d": (1,)}


def test_a_topology_that_runs_is_left_alone(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    with submit(built, store=store, executor="local") as running:
        running.wait_until_caught_up(PATIENCE_S)
        with pytest.raises(ConfigError, match="a driver runs topology 'undone'"):
            undo(built, store, 0.2)
    assert held(built) == AFTER


def test_a_transaction_that_was_being_committed_is_closed_first(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    with monkeypatch.context() as patch:
        save = TopologyDocuments.save

        def stuck(self: Any, change: Any, record: Any = None) -> None:
            if change.currtx == 4:
                raise ConfigError("pulled")
            save(self, change, record)

        patch.setattr(TopologyDocuments, "save", stuck)
        with pytest.raises(Exception, match="pulled"):
            run(built, store)
    with pytest.raises(ConfigError, match="transaction 3 was being committed when the last driver ended"):
        undo(built, store)
    run(built, store)
    assert undo(built, store) == 3 and held(built) == BEFORE


def test_a_state_that_joined_later_keeps_older_transactions_from_being_taken_back(
    tmp_path: Path, store: MemoryStore
) -> None:
    rows = OpaqueMemoryTransactionalSpout({0: ROWS}, FIELDS, 2)

    def made(*names: str) -> Topology:
        builder = TransactionalTopologyBuilder("joined", "spout", rows)
        for name in names:
            builder.set_bolt(name, Sums(state_at(tmp_path, name))).global_grouping("spout")
        return builder.build()

    run(made("one"), store)
    both = made("one", "two")
    with submit(both, store=store, executor="local", accept_changed_topology=True) as running:
        running.wait_until_caught_up(PATIENCE_S)
    with pytest.raises(ConfigError, match="joined after transaction 3"):
        undo(both, store)
    rows.append("0", ["a", 7])
    run(both, store)
    assert undo(both, store) == 4
    assert (state_at(tmp_path, "one").get("a"), state_at(tmp_path, "two").get("a")) == (9, None)


def test_reset_everything_forgets_what_was_taken_back(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    undo(built, store)
    reset_everything(built, store)
    run(built, store)
    record = documents_module.read_transaction(store, built.id, 3)
    assert record is not None and [each.outcome for each in record.attempts] == ["committed"]
    assert held(built) == AFTER


# --- leaving records out --------------------------------------------------------------------------


def test_records_are_left_out_of_the_batch_that_is_made_again_and_of_all_that_follow(
    tmp_path: Path, store: MemoryStore
) -> None:
    rows = OpaqueMemoryTransactionalSpout({0: [*ROWS], 1: [["z", 1]]}, FIELDS, 2)

    def made() -> Topology:
        builder = TransactionalTopologyBuilder("without", "spout", rows)
        builder.set_bolt("bolt", Sums(state_at(tmp_path))).global_grouping("spout")
        return builder.build()

    built = made()
    run(built, store)
    assert undo(built, store, leave_out={"0": [4]}) == 3
    run(built, store)
    assert [state_at(tmp_path).get(word) for word in "abcdz"] == [4, 2, 4, 6, 1]
    plan = documents_module.read_transaction(store, "without", 3).plan  # type: ignore[union-attr]
    assert plan == {"0": {"first": 4, "left_out": [4], "next": 6}, "1": {"first": 1, "next": 1}}
    history = documents_module.read_transaction(store, "without", 3)
    assert history is not None
    assert history.attempts[0].reason.endswith(", to be made again without 0/4")
    assert verify(built, store).right
    assert undo(built, store) == 3  # for another reason
    run(built, store)
    assert [state_at(tmp_path).get(word) for word in "abcdz"] == [4, 2, 4, 6, 1]
    for word in "xy":
        rows.append("0", [word, 1])
    run(built, store)
    assert undo(built, store, leave_out={"0": [7]}) == 4
    run(built, store)
    assert [state_at(tmp_path).get(word) for word in "axy"] == [4, 1, None]
    assert verify(built, store).right
    store.apply([Delete("without/history/002"), Delete("without/history/003")])
    report = verify(built, store)  # read over what is not recorded any more
    assert report.right and not report.recorded_batches
    assert explain(built, store, state="bolt", key="a").agrees


def test_a_killed_undo_that_leaves_records_out_is_gone_on_with_by_a_run(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    run(built, store)
    with monkeypatch.context() as patch:
        patch.setattr(SqliteBackend, "roll_back", lambda self, header: 1 / 0)
        with pytest.raises(RetryableError):
            undo(built, store, leave_out={"0": [4]})
    with pytest.raises(ConfigError, match="go on with it first, without leaving out records"):
        undo(built, store, leave_out={"0": [5]})
    run(built, store)
    assert held(built) == {**AFTER, "a": (2, 4)}
    assert kept(tmp_path) == [1, 2, 3, 4, 6]


def test_what_cannot_be_left_out_is_named_before_anything_is_done(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    for leave_out, match in (
        ({"0": [3]}, "0/3 is not in the transaction, which has offsets 4 to 5 of that partition"),
        ({"9": [4]}, "the transaction has no partition '9': it has 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            undo(built, store, leave_out=leave_out)
    assert committed_txid(store, built.id) == 3 and held(built) == AFTER
    folder = tmp_path / "idempotent"
    folder.mkdir()
    idempotent, other = counting(folder, TransactionalMapState), MemoryStore()
    run(idempotent, other)
    with pytest.raises(ConfigError, match="spout 'spout' is idempotent, and its batches never change"):
        undo(idempotent, other, leave_out={"0": [4]})
    assert undo(idempotent, other) == 3


# --- crashes --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Ends the process before or after the n-th write: to the coordination store, or to a state."""
    left = [-1]
    seen: list[str] = []

    def broken(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def crash() -> None:
            if left[0] == 0:
                left[0] = -1
                raise Crash
            left[0] -= 1

        def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
            if left[0] < 0:
                return call(self, *arguments, **named)
            seen.append(name)
            crash()
            answer = call(self, *arguments, **named)
            crash()
            return answer

        monkeypatch.setattr(owner, name, wrapped)

    broken(MemoryStore, "apply")
    for name in ("raise_header", "roll_back"):
        broken(SqliteBackend, name)
        broken(ParquetTable, name)

    def after(writes: int) -> list[str]:
        left[0] = writes
        seen.clear()
        return seen

    yield after


@pytest.mark.slow
def test_a_crash_at_any_step_is_repaired_by_repeating_or_by_running(
    tmp_path: Path, crashing: Callable[[int], list[str]]
) -> None:
    crashes = 0
    for step in range(1_000):
        for repeated in (True, False):
            folder, store = tmp_path / f"{step}-{repeated}", MemoryStore()
            folder.mkdir()
            built = counting(folder)
            run(built, store)
            crashing(step)
            try:
                undo(built, store)
            except Crash:
                crashes += 1
            else:
                crashing(-1)
                assert crashes >= 40, crashes
                return
            crashing(-1)
            if repeated and committed_txid(store, built.id) == 2:  # else it was not begun
                if not json.loads(store.get("undone/undone") or b"{}")["value"]["finished"]:
                    assert undo(built, store) == 3
                assert held(built) == BEFORE and kept(folder) == [1, 2, 3, 4]
            run(built, store)
            assert held(built) == AFTER and kept(folder) == [1, 2, 3, 4, 5, 6], step
            assert verify(built, store).right
    raise AssertionError("it never ended")


@pytest.mark.slow
def test_a_driver_goes_on_with_an_undo_that_was_killed_before_it_runs_mended_code(
    tmp_path: Path, crashing: Callable[[int], list[str]]
) -> None:
    """Otherwise rows that were rolled back would get the mended value, and the others keep the
    wrong one.
    """

    class Mended(Sums):
        deterministic = True

    class Wrong(Mended):
        factor = 10

    def made(folder: Path, kind: type[Sums]) -> Topology:
        builder = TransactionalTopologyBuilder("undone", "spout", MemoryTransactionalSpout({0: ROWS[:4]}, FIELDS, 2))
        for name in ("one", "two"):
            backend = SqliteBackend(folder / "x.db", name, Fields(word=str), Fields(v=int))
            builder.set_bolt(name, kind(TransactionalMapState(backend))).global_grouping("spout")
        return builder.build()

    seen: set[bool] = set()
    for step in range(1_000):
        folder, store = tmp_path / str(step), MemoryStore()
        folder.mkdir()
        run(made(folder, Wrong), store)
        crashing(step)
        try:
            undo(made(folder, Mended), store)
        except Crash:
            crashing(-1)
        else:
            crashing(-1)
            assert seen == {True, False}
            return
        begun = committed_txid(store, "undone") == 1
        seen.add(begun)
        mended = made(folder, Mended)
        run(mended, store)
        for component in mended.components[1:]:
            (state,) = component.states
            assert isinstance(state, MapState)
            assert state.get("a") == (13 if begun else 40) and state.get("c") == (4 if begun else 40), step
    raise AssertionError("it never ended")


def test_whoever_watches_the_history_sees_that_a_transaction_was_taken_back(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    reader = HistoryReader(store, built.id)
    assert [each.attempts[-1].attempt_id for each in reader.read()] == [1, 1, 1]
    undo(built, store)
    run(built, store)
    assert [each.attempts[-1].attempt_id for each in reader.read()] == [1, 1, 3]


def test_what_another_version_noted_of_an_undo_keeps_no_driver_from_starting(
    tmp_path: Path, store: MemoryStore
) -> None:
    built = counting(tmp_path)
    run(built, store)
    undo(built, store)
    document = json.loads(store.get("undone/undone") or b"")
    document["value"]["attempts"][0]["of_a_later_version"] = 7
    with leadership_of(built.id, store) as leadership:
        leadership.apply([Put("undone/undone", json.dumps(document).encode())])
    run(built, store)
    assert held(built) == AFTER


def test_a_driver_that_wakes_up_after_an_undo_can_write_nothing(tmp_path: Path, store: MemoryStore) -> None:
    built = counting(tmp_path)
    run(built, store)
    state = built["words"].states[0]
    assert isinstance(state, MapState)
    old = state.read_header()
    undo(built, store)
    with pytest.raises(StaleWriterError):
        state.raise_header(old, old.finished(3))
    assert old.open is not None
    fence = CommitFence(built.id, old.epoch, old.open.plan_digest, "words:0", old.incarnation)
    with pytest.raises(StaleWriterError):
        state.begin_commit(TransactionAttempt(3, old.open.attempt_id, fence=fence))
    assert held(built) == BEFORE


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["postgres", "redis", pytest.param("mysql", marks=pytest.mark.slow)])
def test_a_transaction_is_taken_back_in_any_store(
    kind: str, store: MemoryStore, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue({"postgres": "postgres", "redis": "redis_server", "mysql": "mariadb"}[kind])
    name = name.replace("-", "_")
    backend = {"postgres": PostgresBackend, "redis": RedisBackend, "mysql": MySqlBackend}[kind](
        server.url if kind == "redis" else server.dsn, name
    )
    built = counting(tmp_path, backend=backend)
    run(built, store)
    undo(built, store)
    assert held(built) == BEFORE
    run(built, store)
    assert held(built) == AFTER
    backend.close()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_what_would_go_and_does_it_with_yes(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    run(built, store)
    epoch = built["words"].states[0].read_header().epoch
    shown = command(monkeypatch, store, app=app, topology=built)
    assert shown.exit_code == 0, shown.output
    assert "transaction 3 would be taken back, 2 records" in shown.output
    assert "  0: {'first': 4, 'next': 6}" in shown.output
    assert shown.output.endswith("nothing was changed; add --yes to take it back\n")
    assert held(built) == AFTER and built["words"].states[0].read_header().epoch == epoch
    done = command(monkeypatch, store, "--yes", app=app, topology=built)
    assert done.output == "transaction 3 is taken back; the next run processes its records again\n"
    assert held(built) == BEFORE
    again = command(monkeypatch, store, app=app, topology=built)
    assert again.exit_code == 2 and "only the newest transaction can be taken back" in again.output


def test_a_command_that_was_killed_says_that_it_goes_on(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counting(tmp_path)
    run(built, store)
    with monkeypatch.context() as patch:
        patch.setattr(SqliteBackend, "roll_back", lambda self, header: 1 / 0)
        with pytest.raises(RetryableError, match="txid 3 could not be rolled back: .*ZeroDivisionError"):
            undo(built, store)
    assert describe_undo(built, store) == [
        "topology 'undone': transaction 3 was being taken back; this goes on with it"
    ]
    assert undo(built, store) == 3 and held(built) == BEFORE


@pytest.mark.slow
@pytest.mark.integration
def test_positions_in_kafka_are_put_back(servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path) -> None:
    topic = topics.create(name, 2)
    for part in range(2):
        topics.send(topic, [f"w{each % 7}".encode() for each in range(100)], part)
    words = OverKafka("tests.kit.replays:kafka_topology", servers, topic, tmp_path / "x.db")

    def counts() -> list[tuple[str, int]]:
        with sqlite3.connect(words.database) as connection:
            return sorted(connection.execute("SELECT word, count FROM words WHERE NOT _deleted"))

    words.catch_up(kafka_topology(words.settings))
    whole = counts()
    assert sum(count for _, count in whole) == 200
    answer = words.ratchet("undo", "--yes")
    assert answer.returncode == 0, answer.stderr
    assert sum(count for _, count in counts()) < 200
    assert words.ratchet("verify").returncode == 0
    words.catch_up(kafka_topology(words.settings))
    assert counts() == whole
    newest = json.loads(words.ratchet("verify", "--json").stdout)["txid"]
    zookeeper = [f"--set={key}={value}" for key, value in words.config.items()]
    planned = json.loads(call("ratchet", "history", topic, "--txid", str(newest), "--json", *zookeeper).stdout)["plan"]
    partition, meta = next((each, meta) for each, meta in planned.items() if meta["next_offset"] > meta["first_offset"])
    answer = words.ratchet("undo", "--yes", "--skip-records", f"{partition}/{meta['first_offset']}")
    assert answer.stdout.endswith("processes its records again, but for those that are left out\n"), answer.stderr
    words.catch_up(kafka_topology(words.settings))
    assert sum(count for _, count in counts()) == 199
    report = words.ratchet("verify", "--json")
    assert report.returncode == 0, report.stdout
    history = call("ratchet", "history", topic, "--txid", str(json.loads(report.stdout)["txid"]), *zookeeper)
    assert "taken back by ratchet undo" in history.stdout


@pytest.mark.slow
@pytest.mark.integration
def test_undo_is_killed_again_and_again_and_every_count_is_right(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path, often: Often, seed: int
) -> None:
    """As a process, at any moment; then the topology goes on, or another undo does."""
    chance, topic, sent = random.Random(seed), topics.create(name, 2), Counter[str]()
    words = OverKafka("tests.kit.replays:kafka_topology", servers, topic, tmp_path / "x.db")
    built, undone = kafka_topology(words.settings), 0
    for _ in range(often(5, 40)):
        values = [f"w{chance.randrange(20)}" for _ in range(chance.randrange(1, 120))]
        topics.send(topic, [value.encode() for value in values], chance.randrange(2))
        sent.update(values)
        words.catch_up(built)
        for _ in range(chance.choice((1, 1, 2))):
            undone += words.killed_after(chance.uniform(0.5, 1.3), "undo", "--yes")
        words.catch_up(built)
        with sqlite3.connect(words.database) as connection:
            assert dict(connection.execute("SELECT word, count FROM words WHERE NOT _deleted AND count > 0")) == sent
    with contextlib.closing(store_of(Config.of(words.config))) as store:
        assert verify(built, store).right
    print(f"seed {seed}: {undone} were not killed")
