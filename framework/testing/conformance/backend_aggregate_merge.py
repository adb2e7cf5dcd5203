"""Aggregates merge, in the store or by read and put."""

from __future__ import annotations

from typing import Any

import pytest

from framework.errors import InvariantViolation, StaleWriterError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import (
    AGGREGATES,
    DIGEST,
    KEY,
    STATES,
    WIDE,
    finish,
    open_attempt,
)
from framework.topology import CommitFence, OpenCommit, TransactionAttempt, ValueType
from sinks.backend import MapBackend
from sinks.states import OpaqueMapState, TransactionalMapState


class MergeContract(BackendCase):
    """Aggregates merge, in the store or by read and put."""

    def test_apply_matches_the_fold_under_every_replay(self) -> None:
        """Three transactions. The last one is opened three times: with different contents (opaque),
        or with the same."""
        for state_class in STATES:
            backend = self._made(KEY, WIDE)
            state = state_class(backend)
            state.prepare("topology")
            batches: list[dict[str, list[Any]]] = [
                {"a": [3, 5], "b": [-2]},
                {"a": [10], "c": [None]},
                {"b": [1, 1], "d": [7]},
            ]
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
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        dead = open_attempt(state, 1, 1)
        alive = open_attempt(state, 1, 2)
        deltas = self.deltas({"a": [1]})
        with pytest.raises(StaleWriterError):
            state.apply(dead, deltas, AGGREGATES, want_values=False)
        result = state.apply(alive, deltas, AGGREGATES, want_values=True)
        assert result is not None
        assert result.to_pylist() == [{"word": "a", "count": 1, "total": 1, "least": 1, "most": 1}]

    def test_apply_under_another_header_writes_nothing(self, wide_backend: MapBackend) -> None:
        """A store that merges by itself compares the header by itself."""
        header = wide_backend.prepare("topology")
        dead = header.opened(1, OpenCommit(1, 1, DIGEST))
        wide_backend.raise_header(header, header.opened(1, OpenCommit(1, 2, DIGEST)))
        deltas = self.deltas({"a": [1]})
        with pytest.raises((StaleWriterError, NotImplementedError)):
            wide_backend.apply(dead, "bolt:0", ValueType.OPAQUE, deltas, AGGREGATES, want_values=False)
        assert wide_backend.multi_get([("a",)]) == [None]

    def test_a_task_that_has_written_before_is_refused_like_any_other(self, wide_backend: MapBackend) -> None:
        """The task guesses the header. The store compares a guess like a header that was read."""
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        self.apply(state, 1, 1, {"a": [1]})
        dead = open_attempt(state, 2, 1)
        alive = open_attempt(state, 2, 2)
        with pytest.raises(StaleWriterError):
            state.apply(dead, self.deltas({"a": [5]}), AGGREGATES, want_values=False)
        state.apply(alive, self.deltas({"a": [7]}), AGGREGATES, want_values=False)
        finish(state)
        with pytest.raises(StaleWriterError):
            # the transaction is done
            state.apply(alive, self.deltas({"a": [7]}), AGGREGATES, want_values=False)
        assert state.get("a") == (2, 8, 1, 7)
        state.clear("topology")
        self.apply(state, 1, 1, {"a": [3]})  # the guess has the old incarnation
        assert state.get("a") == (1, 3, 3, 3)

    def test_apply_twice_in_an_attempt_by_the_same_task_counts_once(self) -> None:
        """This happens when an answer is lost."""
        for state_class in (TransactionalMapState, OpaqueMapState):
            state = state_class(self._made(KEY, WIDE))
            state.prepare("topology")
            granted = open_attempt(state, 1, 1)
            for _ in range(2):
                state.apply(granted, self.deltas({"a": [4]}), AGGREGATES, want_values=False)
            assert self.rows(state, "a") == {"a": (1, 4, 4, 4)}

    def test_apply_by_two_tasks_to_one_key_is_an_error(self, wide_backend: MapBackend) -> None:
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.apply(granted, self.deltas({"a": [4]}), AGGREGATES, want_values=False)
        other = TransactionAttempt(1, 1, CommitFence("topology", 1, DIGEST, "bolt:1"))
        with pytest.raises(InvariantViolation, match="C12"):
            state.apply(other, self.deltas({"a": [1]}), AGGREGATES, want_values=False)
        assert self.rows(state, "a") == {"a": (1, 4, 4, 4)}

    def test_no_keys_and_no_rows_are_nothing_to_do(self, wide_backend: MapBackend) -> None:
        for state_class in STATES:
            state = state_class(wide_backend)
            granted = open_attempt(state, 1, 1)
            assert wide_backend.multi_get([]) == []
            empty = self.deltas({"a": [1]}).slice(0, 0)
            made = state.apply(granted, empty, AGGREGATES, want_values=True)
            assert made is not None and made.num_rows == 0
            state.begin_commit(granted)
            assert (state.multi_get([]), state.multi_update([], [])) == ([], [])
            state.commit(granted)
            assert list(wide_backend.scan()) == []
