"""What a replay cannot know: values that later transactions have changed, rows that were deleted,
states that joined later, places that hold something else."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError, MovedOnError, RetryableError
from framework.inspect import replay as replay_module
from framework.inspect.replay import differences, plan_to_replay, replay
from framework.topology import Header
from framework.transactions import MemoryStore
from sinks import (
    AppendCommitter,
    Count,
    DeltaLakeTable,
    Max,
    MemoryBackend,
    NonTransactionalMapState,
    OpaqueMapState,
    ParquetTable,
    SqliteBackend,
    StateCommitter,
    Sum,
)
from sinks.backend import MapBackend
from sinks.read_as_of import SnapshotBackend
from spouts import MemoryTransactionalSpout, OpaqueMemoryTransactionalSpout
from tests.kit.replays import FIELDS, Sums, replayed, run, state_at, told, topology_of
from tests.kit.waiting import PATIENCE_S


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def layered(folder: Path, state: type[Any]) -> Topology:
    """Counts of words, and a table of what they were."""
    builder = TransactionalTopologyBuilder(
        "layered", "spout", OpaqueMemoryTransactionalSpout({0: [["k", 1]] * 4}, FIELDS, 1), at_least_once=True
    )
    words = StateCommitter(state(SqliteBackend(folder / "x.db", "words")), ["word"], {"c": Count()})
    builder.set_bolt("words", words).global_grouping("spout")
    builder.set_bolt("changes", AppendCommitter(ParquetTable(folder / "changes"))).global_grouping("words")
    return builder.build()


@pytest.mark.parametrize(("state", "txid"), [(OpaqueMapState, 2), (NonTransactionalMapState, 4)])
def test_what_is_made_of_an_unknown_value_is_not_compared(
    tmp_path: Path, store: MemoryStore, state: type[Any], txid: int
) -> None:
    built = layered(tmp_path, state)
    run(built, store)
    report = replayed(built, store, txid)
    assert report.agrees, report
    assert [each.unknown() == len(each.changes) > 0 for each in report.states] == [True, True]
    newest = replayed(built, store, 4)
    assert state is NonTransactionalMapState or [each.unknown() for each in newest.states] == [0, 0]


def test_another_state_of_a_bolt_that_lacked_a_value_is_not_compared(tmp_path: Path, store: MemoryStore) -> None:
    class Derived(Sums):
        """What the first state knows, under a new key in the second."""

        def finish_batch(self) -> None:
            for each in self.kept:
                each.begin_commit(self.attempt)
            for word, number in self.rows:
                (before,) = self.kept[0].multi_get([word])
                self.kept[0].multi_put([word], [(before or 0) + number])
                self.kept[1].multi_put([f"{word}{self.attempt.txid}"], [(before or 0) + number])
            for each in self.kept:
                each.commit(self.attempt)

    built = topology_of([["k", each] for each in (1, 2, 3, 4)], Derived(state_at(tmp_path), state_at(tmp_path, "two")))
    run(built, store)
    report = replayed(built, store, 2)
    assert report.agrees and [told(each.changes) for each in report.states] == [{"k": None}, {"k2": None}]
    assert all(each.agrees for state in replayed(built, store, 4).states for each in state.changes)


def test_a_key_that_is_asked_for_in_vain_and_not_written_is_named(tmp_path: Path, store: MemoryStore) -> None:
    built = topology_of([["k", 1], ["k", -1], ["k", 3], ["k", 4]], Sums(state_at(tmp_path)))
    run(built, store)
    (state,) = replayed(built, store, 2).states
    assert told(state.changes) == {"k": None}


def test_a_failure_over_an_unknown_value_says_so(tmp_path: Path, store: MemoryStore) -> None:
    class Strict(Sums):
        def take(self, state: Any, word: str, number: int) -> None:
            if number > 1 and state.multi_get([word]) == [None]:
                raise ValueError("an update before the insert")
            state.multi_put([word], [number])

    built = topology_of([["k", each] for each in (1, 2, 3, 4)], Strict(state_at(tmp_path)))
    run(built, store)
    report = replayed(built, store, 2)
    assert report.failure is not None and report.lacked_values
    assert replayed(built, store, 4).failure is None


# --- deleted and purged ---------------------------------------------------------------------------


def test_an_absent_row_tells_nothing_of_the_time_before_tombstones_were_purged() -> None:
    before, after = Header("t", "i", done=998), Header("t", "i", done=1_003)
    assert before.tells_absence(0)
    assert [after.tells_absence(txid) for txid in (998, 999, 1_000)] == [False, True, True]


def test_a_row_that_was_purged_is_not_taken_for_one_that_was_never_there(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a purge each fifth transaction, in place of each thousandth."""
    monkeypatch.setattr("framework.topology.fencing.PURGE_EVERY", 5)
    built = topology_of([["k", 5], ["k", 1], ["k", -1], *[["f", 1]] * 3], Sums(state_at(tmp_path)))
    run(built, store)
    (state,) = built.states
    assert isinstance(state, OpaqueMapState)
    header = state.read_header()
    assert header.done == 6 and state.purge(header, 5) == 1
    for txid in (2, 3, 4):
        assert replayed(built, store, txid).agrees
    (changed,) = replayed(built, store, 2).states
    assert told(changed.changes) == {"k": None}
    with pytest.raises(MovedOnError, match="'k'.*may have been deleted after transaction 3; ask for a later one"):
        state.read_as_of(["k"], 2)
    assert state.read_as_of(["k"], 4) == [None]


# --- places that hold something else --------------------------------------------------------------


def test_a_state_that_joined_later_is_left_out(tmp_path: Path, store: MemoryStore) -> None:
    def with_tables(*names: str, rows: int) -> Topology:
        spout = OpaqueMemoryTransactionalSpout({0: [[f"k{each}", 1] for each in range(rows)]}, FIELDS, 2)
        builder = TransactionalTopologyBuilder("joined", "spout", spout)
        for name in names:
            state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", name))
            builder.set_bolt(name, StateCommitter(state, ["word"], {"c": Count()})).global_grouping("spout")
        return builder.build()

    run(with_tables("one", rows=4), store)
    both = with_tables("one", "two", rows=8)
    with submit(both, store=store, executor="local", accept_changed_topology=True) as running:
        running.wait_until_caught_up(PATIENCE_S)
    report = replayed(both, store, 1)
    assert report.agrees and [each.component_id for each in report.states] == ["one"]
    assert report.left_out == {"two": "its state joined at transaction 3, and holds nothing from before"}
    assert len(replayed(both, store, 3).states) == 2


def test_a_place_of_another_owner_or_of_other_columns_is_left_out_and_one_without_a_table_is_empty(
    tmp_path: Path, store: MemoryStore
) -> None:
    def summing(table: str = "sums", file: str = "x.db", name: str = "g", **more: Any) -> Topology:
        state = OpaqueMapState(SqliteBackend(tmp_path / file, table))
        return topology_of([["k", 1]] * 3, StateCommitter(state, ["word"], {"c": Count(), **more}), name=name)

    built = summing()
    run(built, store)
    planned = plan_to_replay(store, built, 3)

    def left_out(other: Topology) -> str:
        report = replay(other, store, planned=planned)
        assert report.agrees is None and report.states == []
        return report.left_out["bolt"]

    assert "has other columns" in left_out(summing(top=Max("n")))
    assert "belongs to topology 'g', not 'other'" in left_out(summing(name="other"))
    assert "there is no file" in left_out(summing(file="nowhere/y.db"))
    assert not (tmp_path / "nowhere").exists()
    (empty,) = replay(summing("new"), store, planned=planned).states
    assert [(each.before, each.after, each.held) for each in empty.changes] == [(None, 1, None)]
    assert not sqlite3.connect(tmp_path / "x.db").execute("SELECT 1 FROM sqlite_master WHERE name = 'new'").fetchall()


def test_a_table_of_files_of_another_owner_is_left_out(tmp_path: Path, store: MemoryStore) -> None:
    built = topology_of([["k", 1]] * 2, AppendCommitter(ParquetTable(tmp_path / "rows")))
    run(built, store)
    other = topology_of([["k", 1]] * 2, AppendCommitter(ParquetTable(tmp_path / "rows")), name="other")
    report = replay(other, store, planned=plan_to_replay(store, built, 2))
    assert "belongs to topology 'replayed', not 'other'" in report.left_out["bolt"]
    new = topology_of([["k", 1]] * 2, AppendCommitter(ParquetTable(tmp_path / "new")))
    (state,) = replay(new, store, planned=plan_to_replay(store, built, 2)).states
    assert [(each.after, each.held) for each in state.changes] == [(1, 0)]


def test_a_backend_without_columns_is_left_out(store: MemoryStore) -> None:
    built = topology_of([["k", 1]] * 2, Sums(OpaqueMapState(MemoryBackend("unbound"))))
    run(built, store)
    assert "memory backend 'unbound' has no columns" in replayed(built, store, 2).left_out["bolt"]


class Plain(MemoryBackend):
    """A backend of somebody's own, which has no more than it must."""

    check, check_held = MapBackend.check, SnapshotBackend.check_held


def test_a_backend_that_checks_nothing_is_replayed(store: MemoryStore) -> None:
    built = topology_of([["k", 1]] * 2, StateCommitter(OpaqueMapState(Plain()), ["word"], {"c": Count()}))
    run(built, store)
    (state,) = replayed(built, store, 2).states
    assert [(each.before, each.after, each.held, each.agrees) for each in state.changes] == [(1, 2, 2, True)]
    other = topology_of([["k", 1]] * 2, built["bolt"].instance, name="other")
    report = replay(other, store, planned=plan_to_replay(store, built, 2))
    assert "belongs to topology 'replayed', not 'other'" in report.left_out["bolt"]


def test_a_delta_table_that_was_optimized_after_the_transaction_is_compared_by_what_it_added(
    tmp_path: Path, store: MemoryStore
) -> None:
    def appending(rows: int) -> Topology:
        spout = MemoryTransactionalSpout({0: [[f"w{each % 2}", each] for each in range(rows)]}, FIELDS, 3)
        builder = TransactionalTopologyBuilder("delta", "spout", spout)
        builder.set_bolt("delta", AppendCommitter(DeltaLakeTable(tmp_path / "delta"))).global_grouping("spout")
        return builder.build()

    run(appending(6), store)
    assert DeltaLakeTable(tmp_path / "delta").compact() == (2, 1)
    built = appending(12)
    run(built, store)
    for txid in (1, 2, 3, 4):
        (state,) = replayed(built, store, txid).states
        assert [each.agrees for each in state.changes] == [True] * 3, txid


# --- which batch ----------------------------------------------------------------------------------


def test_a_transaction_after_the_one_that_is_due_is_refused(tmp_path: Path, store: MemoryStore) -> None:
    built = topology_of([["k", 1]] * 2, Sums(state_at(tmp_path)))
    run(built, store)
    with pytest.raises(ConfigError, match="transaction 4 cannot be replayed before transaction 3, which is due"):
        plan_to_replay(store, built, 4)


def test_a_batch_that_is_planned_anew_meanwhile_is_refused(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = topology_of([["k", 1]] * 4, Sums(state_at(tmp_path)))
    run(built, store)
    planned = plan_to_replay(store, built, 4)
    another = {"0": {**planned[1]["0"], "next_offset": 3}}
    with monkeypatch.context() as patched:
        patched.setattr(replay_module, "plan_to_replay", lambda *where: (4, another))
        with pytest.raises(RetryableError, match="transaction 4 was planned anew meanwhile; replay it again"):
            replay(built, store, planned=planned)
    assert replay(built, store, planned=planned).agrees


# --- what another version does --------------------------------------------------------------------


class Times10(Sums):
    def take(self, state: Any, word: str, number: int) -> None:
        times = 10 if state is self.kept[0] else 1
        state.multi_update([word], [lambda value: (value or 0) + number * times])


class Nothing(Sums):
    def take(self, state: Any, word: str, number: int) -> None:
        """Leave the key alone."""


def test_each_state_of_a_bolt_is_compared_between_versions(tmp_path: Path, store: MemoryStore) -> None:
    def summing(kind: type[Sums]) -> Topology:
        return topology_of([["k", 5], ["k", 1]], kind(state_at(tmp_path, "a"), state_at(tmp_path, "b")))

    built = summing(Sums)
    run(built, store)
    (found,) = differences(replayed(built, store, 2), replayed(summing(Times10), store, 2))
    assert (found.component_id, found.now, found.new) == ("bolt", 6, 15)
    assert "'a'" in found.location


@pytest.mark.parametrize(("number", "now"), [(1, 6), (-1, None)])
def test_a_version_that_does_not_touch_a_key_leaves_it_as_it_was(
    tmp_path: Path, store: MemoryStore, number: int, now: int | None
) -> None:
    def summing(kind: type[Sums]) -> Topology:
        return topology_of([["k", 5], ["k", number], ["k", 1], ["k", 1]], kind(state_at(tmp_path)))

    built = summing(Sums)
    with submit(summing(Sums), store=store, executor="local") as running:
        running.wait_until_caught_up(PATIENCE_S)
    unknown = differences(replayed(built, store, 1), replayed(summing(Nothing), store, 1))
    assert [(each.now, repr(each.new)) for each in unknown] == [(5, "not touched")]
    fresh, short = MemoryStore(), topology_of([["k", 5], ["k", number]], Sums(state_at(tmp_path, "short")))
    run(short, fresh)
    other = topology_of([["k", 5], ["k", number]], Nothing(state_at(tmp_path, "short")))
    (found,) = differences(replayed(short, fresh, 2), replayed(other, fresh, 2))
    assert (found.now, found.new) == (now, 5)


def test_nan_at_any_depth_is_no_difference(store: MemoryStore) -> None:
    nan = float("nan")
    spout = OpaqueMemoryTransactionalSpout({0: [["a", 1.0], ["a", nan]]}, Fields(word=str, x=float), 1)
    builder = TransactionalTopologyBuilder("nan", "spout", spout)
    state = OpaqueMapState(MemoryBackend("nan"))
    builder.set_bolt("kept", StateCommitter(state, ["word"], {"c": Count(), "x": Sum("x")})).global_grouping("spout")
    built = builder.build()
    run(built, store)
    now, new = replayed(built, store, 2), replayed(built, store, 2)
    new.states[0].changes[0] = type(new.states[0].changes[0])("a", None, (2, float("nan")), None, True)
    assert differences(now, new) == []


def test_a_bolt_that_one_version_leaves_out_is_not_compared(tmp_path: Path, store: MemoryStore) -> None:
    def counting(**more: Any) -> Topology:
        state = OpaqueMapState(SqliteBackend(tmp_path / "x.db", "counts"))
        return topology_of([["k", 1]] * 2, StateCommitter(state, ["word"], {"c": Count(), **more}))

    built = counting()
    run(built, store)
    changed = replay(counting(top=Max("n")), store, planned=plan_to_replay(store, built, 2))
    assert "has other columns" in changed.left_out["bolt"]
    assert differences(replayed(built, store, 2), changed) == []
