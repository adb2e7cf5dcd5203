"""Contract suites: what every implementation of a port must do. Subclass and give the fixture.

``BackendContract`` is for authors of backends too: ``class TestMine(BackendContract)`` with a ``backend`` fixture.
"""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest

from framework import TransactionAttempt
from framework.errors import ConfigError, InvariantViolation, StaleWriterError
from framework.topology import CommitFence, Header, OpenCommit, Stamp
from sinks import (
    Count,
    MapBackend,
    MapState,
    Max,
    Min,
    NonTransactionalMapState,
    OpaqueMapState,
    Row,
    Sum,
    TransactionalMapState,
)

DIGEST = "digest"
STATES: list[type[MapState]] = [NonTransactionalMapState, TransactionalMapState, OpaqueMapState]
AGGREGATES = {"count": Count(), "total": Sum("n"), "least": Min("n"), "most": Max("n")}


def open_attempt(state: MapState, txid: int, attempt: int, epoch: int = 1, task: int = 0) -> TransactionAttempt:
    """What the driver does before commit tasks start; returns what a task gets."""
    header = state.prepare("topology")
    state.raise_header(header, header.opened(epoch, OpenCommit(txid, attempt, DIGEST)))
    return TransactionAttempt(txid, attempt, CommitFence("topology", epoch, DIGEST, f"bolt:{task}"))


def finish(state: MapState, *, replay: bool = False) -> None:
    """What the driver does after them."""
    header = state.read_header()
    assert header.open is not None
    if replay and isinstance(state, OpaqueMapState):
        state.sweep(header)
    state.raise_header(header, header.finished(header.open.txid))


def add(amount: int) -> Any:
    return lambda old: (old or 0) + amount


def transact(
    state: MapState, txid: int, attempt: int, amounts: dict[str, int], replay: bool = False, epoch: int = 1
) -> None:
    """A whole commit: add amounts to keys."""
    granted = open_attempt(state, txid, attempt, epoch)
    state.begin_commit(granted)
    state.multi_update(list(amounts), [add(amount) for amount in amounts.values()])
    state.commit(granted)
    finish(state, replay=replay)


class BackendContract:
    """A fixture ``backend`` gives an empty backend with key (word: str) and value (n: int); ``wide_backend`` one with
    key (word: str) and values count, total, least, most, all int."""

    @pytest.fixture(params=STATES, ids=lambda each: each.value_type.value)
    def state(self, request: pytest.FixtureRequest, backend: MapBackend) -> MapState:
        made: MapState = request.param(backend)
        made.prepare("topology")
        return made

    # --- header (C1) -----------------------------------------------------------------------------------------

    def test_prepare_is_idempotent_and_keeps_the_incarnation(self, backend: MapBackend) -> None:
        first = backend.prepare("topology")
        assert first == Header("topology", first.incarnation)
        assert backend.prepare("topology") == first == backend.read_header()

    def test_prepare_for_another_topology_is_refused(self, backend: MapBackend) -> None:
        backend.prepare("topology")
        with pytest.raises(ConfigError, match=r"belongs to topology 'topology'.*'other'"):
            backend.prepare("other")

    def test_raise_header_is_a_compare_and_set(self, backend: MapBackend) -> None:
        header = backend.prepare("topology")
        opened = header.opened(3, OpenCommit(1, 1, DIGEST))
        backend.raise_header(header, opened)
        with pytest.raises(StaleWriterError) as refused:
            backend.raise_header(header, header.opened(2, OpenCommit(1, 2, DIGEST)))
        assert refused.value.epoch == 3
        assert backend.read_header() == opened

    def test_put_under_another_header_writes_nothing(self, backend: MapBackend) -> None:
        header = backend.prepare("topology")
        opened = header.opened(1, OpenCommit(1, 2, DIGEST))
        backend.raise_header(header, opened)
        dead = header.opened(1, OpenCommit(1, 1, DIGEST))
        with pytest.raises(StaleWriterError):
            backend.multi_put(dead, [("dog",)], [None], [Row((1,), Stamp(1, 1, 1))])
        with pytest.raises(StaleWriterError):
            backend.sweep(dead)
        assert backend.multi_get([("dog",)]) == [None]

    def test_put_is_conditional_on_every_stamp_and_atomic(self, backend: MapBackend) -> None:
        header = backend.prepare("topology")
        opened = header.opened(1, OpenCommit(2, 1, DIGEST))
        backend.raise_header(header, opened)
        backend.multi_put(opened, [("dog",)], [None], [Row((1,), Stamp(1, 1, 1), None, "w")])
        rows = [Row((5,), Stamp(2, 1, 1)), Row((6,), Stamp(2, 1, 1))]
        with pytest.raises(StaleWriterError):
            backend.multi_put(opened, [("cat",), ("dog",)], [None, None], rows)
        with pytest.raises(StaleWriterError):
            backend.multi_put(opened, [("cat",), ("dog",)], [None, Stamp(1, 1, 2)], rows)
        assert backend.multi_get([("cat",), ("dog",)]) == [None, Row((1,), Stamp(1, 1, 1), None, "w")]

    # --- value types -----------------------------------------------------------------------------------------

    def test_transactions_add_up(self, state: MapState) -> None:
        transact(state, 1, 1, {"dog": 2, "cat": 1})
        transact(state, 2, 1, {"dog": 3})
        assert (state.get("dog"), state.get("cat"), state.get("cow")) == (5, 1, None)

    def test_several_updates_of_a_key_see_each_other(self, state: MapState) -> None:
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        assert state.multi_update(["dog", "dog"], [add(1), add(2)]) == [1, 3]
        assert state.multi_get(["dog"]) == [3]
        state.commit(granted)
        assert state.get("dog") == 3

    def test_nothing_reaches_the_backend_before_commit(self, state: MapState) -> None:
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        state.multi_put(["dog"], [1])
        assert state.get("dog") is None

    def test_replay_of_the_same_batch(self, state: MapState) -> None:
        transact(state, 1, 1, {"dog": 2})
        transact(state, 2, 1, {"dog": 3})
        transact(state, 2, 2, {"dog": 3}, replay=True)
        assert state.get("dog") == (8 if isinstance(state, NonTransactionalMapState) else 5)

    def test_replay_returns_previous_and_value_also_when_it_skips(self, state: MapState) -> None:
        """C6: what is downstream of a skip can be redone."""
        transact(state, 1, 1, {"dog": 2})
        transact(state, 2, 1, {"dog": 3})
        granted = open_attempt(state, 2, 2)
        state.begin_commit(granted)
        pair = state.multi_update_with_previous(["dog"], [add(3)])
        assert pair == ([(None, 8)] if isinstance(state, NonTransactionalMapState) else [(2, 5)])

    def test_replay_of_another_batch_of_an_opaque_spout(self, state: MapState) -> None:
        """Rule 1 of the opaque states in seed 000, and C5: a key that the replay does not touch is put back."""
        if not isinstance(state, OpaqueMapState):
            return
        transact(state, 1, 1, {"dog": 2, "cat": 1})
        transact(state, 2, 1, {"dog": 3, "cat": 7, "cow": 4})
        transact(state, 2, 2, {"dog": 1}, replay=True)
        assert (state.get("dog"), state.get("cat"), state.get("cow")) == (3, 1, None)
        transact(state, 3, 1, {"cow": 9, "cat": 1})
        assert (state.get("cat"), state.get("cow")) == (2, 9)

    def test_delete_keeps_the_previous_value_for_a_replay(self, state: MapState) -> None:
        transact(state, 1, 1, {"dog": 2})
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.delete(["dog", "never"])
        assert state.multi_get(["dog"]) == [None]
        state.commit(granted)
        finish(state)
        assert state.get("dog") is None
        transact(state, 2, 2, {"dog": 3}, replay=True)
        expected = {NonTransactionalMapState: 3, TransactionalMapState: None, OpaqueMapState: 5}
        assert state.get("dog") == expected[type(state)]

    def test_stale_writers_are_refused(self, state: MapState) -> None:
        """A task of a dead attempt, of a dead leader, of a dead transaction: also for a key nobody has touched."""
        late = [open_attempt(state, 1, 1)]
        transact(state, 1, 2, {"dog": 1}, replay=True)
        late.append(open_attempt(state, 2, 1, epoch=1))
        transact(state, 2, 1, {"dog": 1}, replay=True, epoch=2)
        for attempt in late:
            with pytest.raises(StaleWriterError):
                state.begin_commit(attempt)
        assert state.get("dog") == 2

    def test_a_writer_that_stalls_between_begin_and_commit_is_refused(self, state: MapState) -> None:
        """The schedule that row stamps alone do not stop: the successor never touched the key."""
        stalled = open_attempt(state, 1, 1)
        state.begin_commit(stalled)
        state.multi_update(["zombie"], [add(1)])
        other = type(state)(state.backend)
        transact(other, 1, 2, {"dog": 1}, replay=True)
        with pytest.raises(StaleWriterError):
            state.commit(stalled)
        assert state.get("zombie") is None

    def test_one_key_has_one_writer_in_an_attempt(self, state: MapState) -> None:
        """C12."""
        first = open_attempt(state, 1, 1)
        state.begin_commit(first)
        state.multi_put(["dog"], [1])
        state.commit(first)
        second = TransactionAttempt(1, 1, CommitFence("topology", 1, DIGEST, "bolt:1"))
        state.begin_commit(second)
        with pytest.raises(InvariantViolation, match="bolt:0 and by bolt:1"):
            state.multi_get(["dog"])

    def test_standalone_use_needs_no_driver(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        for txid, attempt, amount in [(1, 1, 5), (2, 1, 7), (2, 2, 1)]:
            granted = TransactionAttempt(txid, attempt)
            state.begin_commit(granted)
            state.multi_update(["dog"], [add(amount)])
            state.commit(granted)
        assert state.get("dog") == 6
        with pytest.raises(StaleWriterError):
            state.begin_commit(TransactionAttempt(2, 1))

    # --- aggregates, in the store or by read and put ---------------------------------------------------------

    def test_apply_matches_the_fold_under_every_replay(self, wide_backend: MapBackend) -> None:
        """Three transactions, the last one opened three times with different contents (opaque) or the same one."""
        for state_class in STATES:
            backend = self.fresh(wide_backend, state_class.__name__)
            state = state_class(backend)
            state.prepare("topology")
            batches = [{"a": [3, 5], "b": [-2]}, {"a": [10], "c": [None]}, {"b": [1, 1], "d": [7]}]
            replays: list[dict[str, list[Any]]] = [{"b": [4]}, {"a": [-9], "e": [0]}]
            if state_class is not OpaqueMapState:
                replays = [batches[2], batches[2]] if state_class is TransactionalMapState else []
            for txid, batch in enumerate(batches, 1):
                self.apply(state, txid, 1, batch)
            for attempt, batch in enumerate(replays, 2):
                self.apply(state, 3, attempt, batch, replay=True)
            applied = [*batches[:2], replays[-1] if replays else batches[2]]
            assert self.rows(state, "abcde") == self.fold(applied), state_class

    def test_apply_of_a_dead_attempt_writes_nothing(self, wide_backend: MapBackend) -> None:
        state = OpaqueMapState(self.fresh(wide_backend, "dead"))
        state.prepare("topology")
        dead = open_attempt(state, 1, 1)
        alive = open_attempt(state, 1, 2)
        deltas = self.deltas({"a": [1]})
        with pytest.raises(StaleWriterError):
            state.apply(dead, deltas, AGGREGATES, want_values=False)
        result = state.apply(alive, deltas, AGGREGATES, want_values=True)
        assert result is not None
        assert result.to_pylist() == [{"word": "a", "count": 1, "total": 1, "least": 1, "most": 1}]

    def test_apply_twice_in_an_attempt_by_the_same_task_counts_once(self, wide_backend: MapBackend) -> None:
        """What a lost answer leads to."""
        for state_class in (TransactionalMapState, OpaqueMapState):
            state = state_class(self.fresh(wide_backend, f"twice{state_class.__name__}"))
            state.prepare("topology")
            granted = open_attempt(state, 1, 1)
            for _ in range(2):
                state.apply(granted, self.deltas({"a": [4]}), AGGREGATES, want_values=False)
            assert self.rows(state, "a") == {"a": (1, 4, 4, 4)}

    def test_apply_by_two_tasks_to_one_key_is_an_error(self, wide_backend: MapBackend) -> None:
        state = OpaqueMapState(self.fresh(wide_backend, "two"))
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.apply(granted, self.deltas({"a": [4]}), AGGREGATES, want_values=False)
        other = TransactionAttempt(1, 1, CommitFence("topology", 1, DIGEST, "bolt:1"))
        with pytest.raises(InvariantViolation, match="C12"):
            state.apply(other, self.deltas({"a": [1]}), AGGREGATES, want_values=False)
        assert self.rows(state, "a") == {"a": (1, 4, 4, 4)}

    def fresh(self, backend: MapBackend, name: str) -> MapBackend:
        """Another empty backend like ``backend``."""
        raise NotImplementedError

    # --- helpers ---------------------------------------------------------------------------------------------

    def apply(
        self, state: MapState, txid: int, attempt: int, batch: dict[str, list[Any]], *, replay: bool = False
    ) -> None:
        granted = open_attempt(state, txid, attempt)
        state.apply(granted, self.deltas(batch), AGGREGATES, want_values=False)
        finish(state, replay=replay)

    @staticmethod
    def deltas(batch: dict[str, list[Any]]) -> pa.Table:
        def present(values: list[Any]) -> list[int]:
            return [value for value in values if value is not None]

        rows = [
            (word, len(values), *((sum(p), min(p), max(p)) if (p := present(values)) else (None,) * 3))
            for word, values in batch.items()
        ]
        columns = list(zip(*rows, strict=True))
        types = [pa.string(), *[pa.int64()] * 4]
        return pa.table(
            [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], names=["word", *AGGREGATES]
        )

    @staticmethod
    def rows(state: MapState, words: str) -> dict[str, Any]:
        return {word: value for word in words if (value := state.get(word)) is not None}

    @staticmethod
    def fold(batches: list[dict[str, list[Any]]]) -> dict[str, Any]:
        every: dict[str, list[Any]] = {}
        for word, values in itertools.chain.from_iterable(batch.items() for batch in batches):
            every.setdefault(word, []).extend(values)
        folded = {}
        for word, values in every.items():
            present = [value for value in values if value is not None]
            extremes = (sum(present), min(present), max(present)) if present else (None,) * 3
            folded[word] = (len(values), *extremes)
        return folded

    # --- purge (C21) and reset -------------------------------------------------------------------------------

    def test_purge_removes_tombstones_of_earlier_transactions_only(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        transact(state, 1, 1, {"dog": 1, "cat": 2, "emu": 3})
        for txid, key in ((2, "dog"), (3, "cat")):
            granted = open_attempt(state, txid, 1)
            state.begin_commit(granted)
            state.delete([key])
            state.commit(granted)
            if txid == 2:
                finish(state)
        header = state.read_header()
        assert state.purge(header, 3) == 1
        dog, cat, emu = backend.multi_get([("dog",), ("cat",), ("emu",)])
        assert dog is None
        assert cat is not None and (cat.value, cat.prev) == (None, (2,))
        assert emu is not None and emu.value == (3,)

    def test_purge_under_another_header_is_refused(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        transact(state, 1, 1, {"dog": 1})
        stale = state.read_header()
        open_attempt(state, 2, 1)
        with pytest.raises(StaleWriterError):
            state.purge(stale, 2)

    def test_clear_begins_a_new_incarnation_and_keeps_the_epoch(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        transact(state, 1, 1, {"dog": 1}, epoch=7)
        before = state.read_header()
        cleared = state.clear("topology")
        assert cleared == state.read_header() == Header("topology", cleared.incarnation, 7)
        assert cleared.incarnation != before.incarnation
        assert state.get("dog") is None
        with pytest.raises(StaleWriterError):
            state.sweep(before)
        with pytest.raises(ConfigError, match="belongs to topology 'topology'"):
            state.clear("another")

    # --- roll-back (C7) --------------------------------------------------------------------------------------

    def test_a_rolled_back_transaction_never_was(self, state: MapState) -> None:
        if not state.can_undo:
            assert isinstance(state, NonTransactionalMapState)
            return
        transact(state, 1, 1, {"dog": 1, "cat": 2})
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.multi_update(["dog", "emu"], [add(10), add(30)])
        state.delete(["cat"])
        state.commit(granted)
        open_attempt(state, 2, 2)
        assert state.roll_back(state.read_header()) == 3
        assert [state.get(key) for key in ("dog", "cat", "emu")] == [1, 2, None]
        transact(state, 2, 3, {"dog": 5, "emu": 7})
        assert [state.get(key) for key in ("dog", "cat", "emu")] == [6, 2, 7]
