"""Previous values: purges (C21), resets, roll-backs (C7) and reads as of a transaction."""

from __future__ import annotations

from contextlib import suppress

import pytest

from framework.errors import ConfigError, MovedOnError, StaleWriterError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import add, finish, open_attempt, transact
from framework.topology import Header
from sinks.backend import MapBackend
from sinks.read_as_of import at_one_moment, items_as_of
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState


class PreviousValueContract(BackendCase):
    """Previous values: purges (C21), resets, roll-backs (C7) and reads as of a transaction."""

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
        assert cleared == state.read_header() == Header("topology", cleared.incarnation, epoch=7)
        assert cleared.incarnation != before.incarnation
        assert state.get("dog") is None
        with pytest.raises(StaleWriterError):
            state.sweep(before)
        with pytest.raises(ConfigError, match="belongs to topology 'topology'"):
            state.clear("another")

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

    def test_a_rolled_back_row_does_not_tell_what_was_before_the_transaction_below(self, state: MapState) -> None:
        """The row has the txid of the transaction before, whether or not that transaction
        wrote it."""
        if not state.can_undo:
            assert isinstance(state, NonTransactionalMapState)
            return
        transact(state, 1, 1, {"dog": 1})
        transact(state, 2, 1, {"dog": 10})
        granted = open_attempt(state, 3, 1)
        state.begin_commit(granted)
        state.multi_update(["dog"], [add(100)])
        state.commit(granted)
        open_attempt(state, 3, 2)
        assert state.roll_back(state.read_header()) == 1
        assert state.read_as_of(["dog"], 2) == [11]
        with pytest.raises(MovedOnError, match="'dog'"):
            state.read_as_of(["dog"], 1)

    @staticmethod
    def items(backend: MapBackend, txid: int) -> dict[str, int]:
        found = list(items_as_of(backend, txid))
        assert len({key for key, _ in found}) == len(found)
        return {key[0]: value[0] for key, value in found}

    def test_items_are_as_of_the_newest_transaction_or_the_one_before(self, state: MapState) -> None:
        if not state.can_undo:
            assert isinstance(state, NonTransactionalMapState)
            return
        transact(state, 1, 1, {"old": 1, "dog": 2, "cat": 4})
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.multi_update(["dog", "new"], [add(10), add(20)])
        state.delete(["cat"])
        state.commit(granted)
        before, after = {"old": 1, "dog": 2, "cat": 4}, {"old": 1, "dog": 12, "new": 20}
        assert self.items(state.backend, 1) == before  # while transaction 2 is open
        with pytest.raises(MovedOnError, match="transaction 2 is not done"):
            self.items(state.backend, 2)
        finish(state)
        assert (self.items(state.backend, 1), self.items(state.backend, 2)) == (before, after)
        transact(state, 3, 1, {"cat": 7})
        assert self.items(state.backend, 2) == after
        assert self.items(state.backend, 3) == {**after, "cat": 7}
        with pytest.raises(MovedOnError, match="'cat'.*changed after transaction 2"):
            self.items(state.backend, 1)

    def test_items_that_may_have_been_purged_are_refused(
        self, backend: MapBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a purge every fifth transaction instead of every thousandth."""
        monkeypatch.setattr("framework.topology.fencing.PURGE_EVERY", 5)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        transact(state, 1, 1, {"dog": 1, "cat": 1})
        granted = open_attempt(state, 4, 1)
        state.begin_commit(granted)
        state.delete(["cat"])
        state.commit(granted)
        finish(state)
        assert self.items(backend, 3) == {"dog": 1, "cat": 1}
        open_attempt(state, 5, 1)
        assert self.items(backend, 4) == {"dog": 1}
        assert state.purge(state.read_header(), 5) == 1
        with pytest.raises(MovedOnError, match="may be purged"):
            self.items(backend, 3)
        assert self.items(backend, 4) == {"dog": 1}

    @pytest.mark.parametrize("what", ["roll-back", "leader", "repeated", "reset"])
    def test_items_are_refused_at_the_end_if_their_transaction_did_not_stay(
        self, backend: MapBackend, what: str
    ) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        transact(state, 1, 1, {"dog": 1})
        transact(state, 2, 1, {"dog": 10})
        items = items_as_of(backend, 2)
        assert next(items) == (("dog",), (11,))
        if what == "reset":
            state.clear("topology")
        elif what == "roll-back":
            open_attempt(state, 2, 2)
            assert state.roll_back(state.read_header()) == 1
        elif what == "repeated":
            transact(state, 2, 2, {"dog": 100}, replay=True)
        else:
            transact(state, 3, 1, {"cat": 1}, epoch=2)
        with pytest.raises(MovedOnError):
            list(items)

    def test_a_reader_of_one_moment_reads_right_or_says_that_the_state_moved_on(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        transact(state, 1, 1, {f"w{each:04}": each for each in range(3_000)})
        with at_one_moment(backend) as still:
            assert still.read_header().done == 1
            transact(state, 2, 1, {"w0000": 1, "w2999": 1})
            txid = still.read_header().done
            found = self.items(still, txid)
            assert found == {f"w{each:04}": each + (txid == 2 and each in (0, 2_999)) for each in range(3_000)}
            transact(state, 3, 1, {"w0000": 1, "w2999": 1})
            with suppress(MovedOnError):
                assert self.items(still, 1) == {f"w{each:04}": each for each in range(3_000)}
        assert backend.read_header().done == 3
        assert self.items(backend, 3)["w2999"] == 3_001
