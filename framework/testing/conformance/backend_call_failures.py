"""A fault between any two steps changes no result."""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from framework.errors import CommitOutcomeUnknown, RetryableError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import (
    AGGREGATES,
    DIGEST,
    KEY,
    STATES,
    VALUE,
    WIDE,
    Faulty,
    add,
    finish,
    open_attempt,
    to_commit_in_one_step,
    transact,
)
from framework.topology import CommitFence, TransactionAttempt
from sinks.backend import MapBackend
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState


class FaultContract(BackendCase):
    """A fault between any two steps changes no result."""

    @pytest.mark.parametrize("after", [False, True], ids=["nothing done", "answer lost"])
    @pytest.mark.parametrize("how", ["update", "apply", "one step"])
    def test_a_fault_between_any_two_steps(self, wide_backend: MapBackend, how: str, after: bool) -> None:
        """In each run, a different call to the store fails. The replay applies every row once."""
        for state_class in STATES:
            for step in itertools.count(*self.faults):
                backend = Faulty(self._made(KEY, WIDE))
                backend.fails_at, backend.after = step, after
                applied = self._run_with_faults(state_class(backend), how)
                found = self.rows(state_class(backend.inner), "abcde")
                backend.close()
                expected = self.fold(applied)
                if state_class is not NonTransactionalMapState:
                    assert found == expected, (state_class, step)
                else:
                    assert all(found[word][1] >= row[1] for word, row in expected.items()), step
                if backend.calls <= step:
                    break
            assert step > (10 if how != "one step" else 2)

    def _run_with_faults(self, state: MapState, how: str) -> list[dict[str, list[Any]]]:
        """Run three transactions as a driver does. For an opaque state, a replay has other rows."""
        state.prepare("topology")
        applied: list[dict[str, list[Any]]] = []
        batches: list[dict[str, list[Any]]] = [
            {"a": [3, 5], "b": [2]},
            {"a": [10], "c": [None, 1]},
            {"b": [1, 1], "d": [7]},
        ]
        for txid, batch in enumerate(batches, 1):
            attempt = 0
            done = False
            while not done:
                attempt += 1
                rows = batch
                if attempt > 1 and isinstance(state, OpaqueMapState):
                    rows = {"e": [txid], **dict(list(batch.items())[:1])}
                try:
                    if how == "one step" and attempt == 1 and state.commits_in_one_step:
                        self._write_batch(state, to_commit_in_one_step(state, txid, attempt), rows, "apply")
                    else:
                        granted = open_attempt(state, txid, attempt)
                        self._write_batch(state, granted, rows, how)
                        finish(state, replay=attempt > 1)
                    done = True
                except (RetryableError, CommitOutcomeUnknown):
                    # as the driver does when the answer is lost
                    done = state.read_header().done == txid
                if done:
                    applied.append(rows)
        return applied

    def _write_batch(self, state: MapState, granted: TransactionAttempt, batch: dict[str, list[Any]], how: str) -> None:
        deltas = self.deltas(batch)
        if how != "update":
            state.apply(granted, deltas, AGGREGATES, want_values=False)
            return
        state.begin_commit(granted)
        for row in deltas.to_pylist():
            new = tuple(row[name] for name in AGGREGATES)

            def merged(old: Any, new: tuple[Any, ...] = new) -> tuple[Any, ...]:
                was = old if old is not None else (None,) * len(new)
                return tuple(each.merge(o, n) for each, o, n in zip(AGGREGATES.values(), was, new, strict=True))

            state.multi_update([row["word"]], [merged])
        state.commit(granted)

    def test_a_roll_back_that_fails_is_done_again(self, backend: MapBackend) -> None:
        for state_class in (TransactionalMapState, OpaqueMapState):
            for after in (False, True):
                faulty = Faulty(self._made(KEY, VALUE))
                state = state_class(faulty)
                state.prepare("topology")
                transact(state, 1, 1, {"dog": 1})
                granted = open_attempt(state, 2, 1)
                state.begin_commit(granted)
                state.multi_update(["dog", "cat"], [add(10), add(20)])
                state.commit(granted)
                header = state.read_header()
                faulty.fails_at, faulty.after = faulty.calls, after
                with pytest.raises((RetryableError, CommitOutcomeUnknown)):
                    state.roll_back(header)
                state.roll_back(header)
                assert (state.get("dog"), state.get("cat")) == (1, None)

    def test_tasks_of_one_attempt_write_side_by_side(self, wide_backend: MapBackend) -> None:
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        open_attempt(state, 1, 1)
        carried = pickle.dumps(wide_backend)

        def work(task: int) -> None:
            own = OpaqueMapState(pickle.loads(carried))
            granted = TransactionAttempt(1, 1, CommitFence("topology", 1, DIGEST, f"bolt:{task}"))
            own.apply(
                granted, self.deltas({f"{task}-{each}": [each] for each in range(50)}), AGGREGATES, want_values=False
            )

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        finish(state)
        found = {key[0]: row.value for key, row in wide_backend.scan()}
        assert found == {f"{task}-{each}": (1, each, each, each) for task in range(4) for each in range(50)}
