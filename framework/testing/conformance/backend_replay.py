"""Each value type gives the right rows after replays."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from framework.errors import InvariantViolation, StaleWriterError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import DIGEST, STATES, add, finish, open_attempt, transact
from framework.topology import CommitFence, TransactionAttempt
from sinks import external_row_sorter
from sinks.aggregates import Sum
from sinks.backend import Key, MapBackend, Value
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState


class ReplayContract(BackendCase):
    """Each value type gives the right rows after replays."""

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
        """C6: components after a skipped update can repeat their work."""
        transact(state, 1, 1, {"dog": 2})
        transact(state, 2, 1, {"dog": 3})
        granted = open_attempt(state, 2, 2)
        state.begin_commit(granted)
        pair = state.multi_update_with_previous(["dog"], [add(3)])
        assert pair == ([(2, 8)] if isinstance(state, NonTransactionalMapState) else [(2, 5)])

    def test_replay_of_another_batch_of_an_opaque_spout(self, state: MapState) -> None:
        """Rule 1 of the opaque states, and C5: keys that the replay does not touch are restored."""
        if not isinstance(state, OpaqueMapState):
            return
        transact(state, 1, 1, {"dog": 2, "cat": 1})
        transact(state, 2, 1, {"dog": 3, "cat": 7, "cow": 4})
        transact(state, 2, 2, {"dog": 1}, replay=True)
        assert (state.get("dog"), state.get("cat"), state.get("cow")) == (3, 1, None)
        transact(state, 3, 1, {"cow": 9, "cat": 1})
        assert (state.get("cat"), state.get("cow")) == (2, 9)

    def test_due_are_the_rows_of_a_range_as_they_were_before_the_transaction(self, backend: MapBackend) -> None:
        """A replay finds the rows that an earlier attempt at its transaction has deleted or moved
        (C44).
        """
        backend.order_by("n")
        state = OpaqueMapState(backend)
        state.prepare("topology")

        def due(after: int, upto: int) -> list[tuple[Key, Value]]:
            return _due(state, after, upto)

        transact(state, 1, 1, {"dog": 5, "cat": 7, "cow": 9})
        for attempt in (1, 2):
            granted = open_attempt(state, 2, attempt)
            state.begin_commit(granted)
            assert due(4, 7) == [(("dog",), (5,)), (("cat",), (7,))]
            assert due(5, 8) == [(("cat",), (7,))]
            state.delete(["dog"])
            state.multi_put(["cat", "emu"], [8, 6])
            state.commit(granted)
        finish(state, replay=True)
        state.begin_commit(open_attempt(state, 3, 1))
        assert due(0, 8) == [(("emu",), (6,)), (("cat",), (8,))]

    def test_due_are_rows_that_were_put_back_and_none_that_are_gone(self, backend: MapBackend) -> None:
        """After a sweep, a roll-back, a purge, and in a state that was cleared."""
        backend.order_by("n")
        state = OpaqueMapState(backend)
        state.prepare("topology")

        def due(txid: int, attempt: int = 1, *, upto: int = 100) -> list[Key]:
            state.begin_commit(open_attempt(state, txid, attempt))
            return [key for key, _ in _due(state, 0, upto)]

        def write(txid: int, attempt: int, values: dict[str, int]) -> None:
            granted = open_attempt(state, txid, attempt)
            state.begin_commit(granted)
            state.multi_put(list(values), list(values.values()))
            state.commit(granted)

        transact(state, 1, 1, {"dog": 5, "cat": 7})
        write(2, 1, {"cat": 80, "cow": 1})
        assert due(2, 2, upto=20) == [("dog",), ("cat",)]
        finish(state, replay=True)
        assert due(3, upto=20) == [("dog",), ("cat",)]
        write(3, 1, {"dog": 80, "emu": 2})
        open_attempt(state, 3, 2)
        assert state.roll_back(state.read_header()) == 2
        assert due(3, 3, upto=20) == [("dog",), ("cat",)]
        granted = open_attempt(state, 3, 4)
        state.begin_commit(granted)
        state.delete(["dog"])
        state.commit(granted)
        finish(state, replay=True)
        state.purge(state.read_header(), 4)
        assert due(4) == [("cat",)]
        state.clear("topology")
        assert due(1) == []
        transact(state, 1, 1, {"emu": 3})
        assert due(2) == [("emu",)]

    @pytest.mark.parametrize("page", [1, 2, 3])
    def test_due_rows_come_and_go_by_pages_in_one_order(
        self, backend: MapBackend, page: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of numbers that are equal, by the text of the key, whatever the store. An attempt that
        writes some pages only leaves all rows to the next one, as they were."""
        for name, value in {"PAGE_ROWS": page, "SORTED_ROWS": 2, "CHUNK_ROWS": 1, "RUNS_MAX": 2}.items():
            monkeypatch.setattr(external_row_sorter, name, value)
        backend.order_by("n")
        state = OpaqueMapState(backend)
        state.prepare("topology")
        amounts = {"dog": 5, "a'b": 5, 'a"b': 5, "Ant": 5, "é": 5, "10": 5, "9": 5, "cow": 4, "emu": 6, "late": 9}
        transact(state, 1, 1, amounts)
        ordered = sorted(
            ((key,) for key, at in amounts.items() if at < 9), key=lambda key: (amounts[key[0]], repr(key))
        )
        for attempt, ends_after in ((1, 2), (2, 1), (3, None)):
            granted = open_attempt(state, 2, attempt)
            state.begin_commit(granted)
            found: list[Key] = []
            for number, rows in enumerate(state.due("n", 0, 8, _all_mine)):
                assert len(rows) <= page
                found += [key for key, _ in rows]
                state.delete([key for key, _ in rows])
                if number == ends_after:
                    break  # with this page not yet written
                state.write()
            assert found == ordered[: len(found)]
        state.commit(granted)
        assert found == ordered
        finish(state, replay=True)
        assert [word for word in amounts if state.get(word) is not None] == ["late"]

    def test_due_are_numbers_that_no_float_holds(self, backend: MapBackend) -> None:
        backend.order_by("n")
        state = OpaqueMapState(backend)
        state.prepare("topology")
        large = 1 << 60
        transact(state, 1, 1, {"dog": large, "cat": large + 1, "cow": -large - 1})
        state.begin_commit(open_attempt(state, 2, 1))
        for after, upto, found in (
            (large - 1, large, ["dog"]),
            (large, large + 1, ["cat"]),
            (-large - 2, -large - 1, ["cow"]),
            (-large - 1, large - 1, []),
        ):
            assert [key for (key,), _ in _due(state, after, upto)] == found

    @pytest.mark.parametrize("how", ["update", "apply"])
    @pytest.mark.parametrize("before", STATES, ids=lambda each: each.__name__)
    def test_a_state_that_becomes_opaque_replays_from_before_the_open_transaction(
        self, backend: MapBackend, before: type[MapState], how: str
    ) -> None:
        """Every state type keeps the value before its transaction. A key that the replay lacks is
        restored."""

        def write(state: MapState, txid: int, attempt: int, deltas: dict[str, int], *, done: bool = True) -> None:
            granted = open_attempt(state, txid, attempt)
            if how == "apply":
                table = pa.table({"word": list(deltas), "n": list(deltas.values())})
                state.apply(granted, table, {"n": Sum("n")}, want_values=False)
            else:
                state.begin_commit(granted)
                state.multi_update(list(deltas), [add(each) for each in deltas.values()])
                state.commit(granted)
            if done:
                finish(state, replay=attempt > 1)

        old, new = before(backend), OpaqueMapState(backend)
        for txid in (1, 2):
            write(old, txid, 1, {"dog": 5, "cat": 1})
        for attempt in (1, 2):
            write(old, 3, attempt, {"dog": 7, "cat": 1, "cow": 1}, done=False)
        write(new, 3, 3, {"dog": 7})
        assert [new.get(key) for key in ("dog", "cat", "cow")] == [17, 2, None]

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
        """A task of a dead attempt, of a dead leader, of a dead transaction: also for a key that no
        other attempt has written."""
        late = [open_attempt(state, 1, 1)]
        transact(state, 1, 2, {"dog": 1}, replay=True)
        late.append(open_attempt(state, 2, 1, epoch=1))
        transact(state, 2, 1, {"dog": 1}, replay=True, epoch=2)
        for attempt in late:
            with pytest.raises(StaleWriterError):
                state.begin_commit(attempt)
        assert state.get("dog") == 2

    def test_a_writer_that_stalls_between_begin_and_commit_is_refused(self, state: MapState) -> None:
        """Row stamps alone do not stop this schedule: the successor never touched the key."""
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

    def test_a_key_that_this_commit_wrote_can_be_deleted_in_it(self, state: MapState) -> None:
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        state.multi_update(["new"], [add(5)])
        state.delete(["new"])
        assert state.multi_get(["new"]) == [None]
        state.multi_update(["newer"], [add(5)])
        state.delete(["newer"])
        assert state.multi_update(["newer"], [add(1)]) == [1]
        state.commit(granted)
        assert [state.get(key) for key in ("new", "newer")] == [None, 1]


def _all_mine(keys: Sequence[Key]) -> Sequence[bool]:
    return [True] * len(keys)


def _due(state: MapState, after: int, upto: int) -> list[tuple[Key, Value]]:
    return [each for page in state.due("n", after, upto, _all_mine) for each in page]
