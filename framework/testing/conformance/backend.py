"""The contract suite of backends: what every backend must do. Needs pytest.

::

    class TestMyBackend(BackendContract):
        def make(self, name, key, value):
            return MyBackend(ADDRESS, name, key, value)

``make`` returns an empty backend. ``name`` differs from test to test. The suite uses the backend
itself as the driver does, and pickled copies of it as tasks do.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    MovedOnError,
    RatchetError,
    RetryableError,
    StaleWriterError,
    TopologyError,
)
from framework.testing.conformance.backend_parts import (
    AGGREGATES,
    AWKWARD,
    DIGEST,
    EVERY_TYPE,
    KEY,
    STATES,
    VALUE,
    WIDE,
    Faulty,
    add,
    either,
    finish,
    open_attempt,
    partials,
    to_commit_in_one_step,
    transact,
)
from framework.topology import (
    FORMER,
    REBUILT,
    CommitFence,
    Fields,
    Header,
    OpenCommit,
    Stamp,
    TransactionAttempt,
    ValueType,
)
from sinks.aggregates import Aggregate, ApproxDistinct, First, Last, Max, Mean, Min, Reduce, Sum
from sinks.backend import Key, MapBackend, Row, Value
from sinks.exchange import ExchangeBackend
from sinks.snapshots import at_one_moment, check_held, for_reading, items_as_of
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState


class BackendContract:
    """Subclass it and write ``make``."""

    def make(self, name: str, key: Fields, value: Fields) -> MapBackend:
        """An empty backend called ``name``, bound to these columns."""
        raise NotImplementedError

    #: Types that the store cannot hold. Declaring one of them must raise ``TopologyError``.
    cannot_hold: Sequence[pa.DataType] = ()
    #: The longest text that a key may have, in bytes. A longer one must raise ``BadRecordError``.
    longest_key: int = 1_000_000
    #: Whether columns of floats hold infinities. If not, they must raise ``BadRecordError``.
    holds_infinities = True
    #: Which calls to the store fail, each in a run of its own: (number of the first, step).
    faults: tuple[int, int] = (0, 1)

    @pytest.fixture
    def backend(self) -> Iterator[MapBackend]:
        made = self._made(KEY, VALUE)
        yield made
        made.close()

    @pytest.fixture
    def wide_backend(self) -> Iterator[MapBackend]:
        made = self._made(KEY, WIDE)
        yield made
        made.close()

    def _made(self, key: Fields, value: Fields) -> MapBackend:
        return self.make(f"rows_{uuid.uuid4().hex[:12]}", key, value)

    @pytest.fixture(params=STATES, ids=lambda each: each.value_type.value)
    def state(self, request: pytest.FixtureRequest, backend: MapBackend) -> MapState:
        made: MapState = request.param(backend)
        made.prepare("topology")
        return made

    # --- header (C1) ------------------------------------------------------------------------------

    def test_prepare_is_idempotent_and_keeps_the_incarnation(self, backend: MapBackend) -> None:
        first = backend.prepare("topology")
        assert first == Header("topology", first.incarnation)
        assert backend.prepare("topology") == first == backend.read_header()

    def test_prepare_for_another_topology_is_refused(self, backend: MapBackend) -> None:
        backend.prepare("topology")
        with pytest.raises(ConfigError, match=r"belongs to topology 'topology'.*'other'"):
            backend.prepare("other")

    def test_check_changes_nothing_and_refuses_what_prepare_refuses(self, backend: MapBackend) -> None:
        # some stores try it and roll back, some detect that there is nothing
        before = backend.check("first")
        assert before is None or before.done == 0
        header = backend.prepare("topology")  # because "first" did not become the owner
        assert header == backend.read_header()
        if type(backend).check is not MapBackend.check:  # check is optional
            assert backend.check("topology") == header
            with pytest.raises(ConfigError, match=r"belongs to topology 'topology'.*'other'"):
                backend.check("other")
        assert backend.prepare("topology") == header

    def test_a_backend_for_reading_creates_nothing_and_refuses_another_owner(self, backend: MapBackend) -> None:
        with suppress(RatchetError):  # some stores report that there is nothing
            assert check_held(for_reading(backend), "first") is None
        header = backend.prepare("topology")
        reading = for_reading(backend)
        assert reading.read_header() == header and reading.multi_get([("dog",)]) == [None]
        if type(backend).check is not MapBackend.check:
            assert check_held(reading, "topology") == header
            with pytest.raises(ConfigError, match=r"belongs to topology 'topology'.*'other'"):
                check_held(reading, "other")
        reading.close()
        assert backend.read_header() == header

    def test_raise_header_is_a_compare_and_set(self, backend: MapBackend) -> None:
        header = backend.prepare("topology")
        opened = header.opened(3, OpenCommit(1, 1, DIGEST))
        backend.raise_header(header, opened)
        with pytest.raises(StaleWriterError) as refused:
            backend.raise_header(header, header.opened(2, OpenCommit(1, 2, DIGEST)))
        assert refused.value.epoch == 3
        assert backend.read_header() == opened

    def test_a_header_of_a_later_release_is_refused_plainly(self, backend: MapBackend) -> None:
        header = backend.prepare("topology")
        with suppress(CorruptStateError):  # some stores return the rows that they have written
            backend.raise_header(header, replace(header, format=99))
        with pytest.raises(CorruptStateError, match=r"header format 99, and this Ratchet knows \d+; run the newer"):
            backend.read_header()

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

    def test_every_write_compares_the_whole_header(self, wide_backend: MapBackend) -> None:
        """C1: a writer with another topology, incarnation, epoch, transaction, attempt or plan
        changes nothing."""
        before = wide_backend.prepare("topology")
        first = before.opened(2, OpenCommit(1, 1, DIGEST))
        wide_backend.raise_header(before, first)
        old, tombstone = Row((1, 1, 1, 1), Stamp(1, 2, 1), None, "w"), Row(None, Stamp(1, 2, 1), None, "w")
        wide_backend.multi_put(first, [("dog",), ("dead",)], [None, None], [old, tombstone])
        current = first.finished(2).opened(2, OpenCommit(3, 2, DIGEST))
        wide_backend.raise_header(first, current)
        touched = Row((2, 2, 2, 2), Stamp(3, 1, 1), (1, 1, 1, 1), "w")
        wide_backend.multi_put(current, [("dog",)], [Stamp(1, 2, 1)], [touched])
        held = wide_backend.multi_get([("dog",), ("dead",), ("cat",)])
        new = Row((9, 9, 9, 9), Stamp(3, 2, 2), None, "w")
        for other in (
            replace(current, topology_id="another"),
            replace(current, incarnation="another"),
            replace(current, epoch=1),
            replace(current, open=OpenCommit(2, 2, DIGEST)),
            replace(current, open=OpenCommit(3, 1, DIGEST)),
            replace(current, open=OpenCommit(3, 2, "another")),
            replace(current, done=1),
        ):
            writes: dict[str, Callable[[], object]] = {
                "a new row": partial(wide_backend.multi_put, other, [("cat",)], [None], [new]),
                "a changed row": partial(wide_backend.multi_put, other, [("dog",)], [touched.stamp], [new]),
                "apply": partial(self._applied, wide_backend, other),
                "sweep": partial(wide_backend.sweep, other),
                "roll back": partial(wide_backend.roll_back, other),
                "purge": partial(wide_backend.purge, other, 3),
                "raise": partial(wide_backend.raise_header, other, other.finished(3)),
            }
            for name, write in writes.items():
                with pytest.raises((StaleWriterError, NotImplementedError)):
                    write()
                    pytest.fail(f"{name} went through under {other}, and the header is {current}")
        assert wide_backend.read_header() == current
        assert wide_backend.multi_get([("dog",), ("dead",), ("cat",)]) == held

    def test_a_whole_commit_is_one_step_of_a_store_that_can(self, wide_backend: MapBackend) -> None:
        if not wide_backend.commits_in_one_step:
            with pytest.raises(NotImplementedError):
                wide_backend.for_one_step(wide_backend.prepare("topology"))
            return
        state = OpaqueMapState(wide_backend)
        for txid, batch in enumerate(({"dog": [3], "cat": [1]}, {}, {"dog": [4]}), 1):
            before = state.prepare("topology")
            granted = to_commit_in_one_step(state, txid, 1)
            if batch:
                state.apply(granted, self.deltas(batch), AGGREGATES, want_values=False)
            else:
                state.commit_unchanged(granted)
            assert state.read_header() == before.opened(1, OpenCommit(txid, 1, DIGEST)).finished(txid)
        rows = wide_backend.multi_get([("dog",), ("cat",)])
        held = [row and (row.value, row.stamp, row.prev, row.writer) for row in rows]
        assert held == [
            ((2, 7, 3, 4), Stamp(3, 1, 1), (1, 3, 3, 3), "bolt:0"),
            ((1, 1, 1, 1), Stamp(1, 1, 1), None, "bolt:0"),
        ]

    def test_a_whole_commit_is_refused_from_any_other_header(self, wide_backend: MapBackend) -> None:
        """Two attempts start from one header: the first to arrive commits."""
        if not wide_backend.commits_in_one_step:
            return
        for state_class, batch in itertools.product(STATES, ({"dog": [1]}, {"cow": [1], "dog": [5]}, {})):
            state = state_class(self._made(KEY, WIDE))
            first, second = (to_commit_in_one_step(state, 1, attempt) for attempt in (1, 2))
            state.apply(second, self.deltas({"dog": [1]}), AGGREGATES, want_values=False)
            header, row = state.read_header(), state.backend.multi_get([("dog",), ("cow",)])
            with pytest.raises(StaleWriterError):
                if batch:
                    state.apply(first, self.deltas(batch), AGGREGATES, want_values=False)
                else:
                    state.commit_unchanged(first)
            assert (state.read_header(), state.backend.multi_get([("dog",), ("cow",)])) == (header, row)
            state.close()

    def test_a_whole_commit_that_is_refused_a_row_opens_nothing(self, wide_backend: MapBackend) -> None:
        if not wide_backend.commits_in_one_step:
            return
        state = OpaqueMapState(wide_backend)
        state.apply(to_commit_in_one_step(state, 1, 1), self.deltas({"dog": [1]}), AGGREGATES, want_values=False)
        header = state.read_header()
        granted = to_commit_in_one_step(state, 2, 1)
        state.begin_commit(granted)
        state.multi_put(["dog", "cat"], [(1, 1, 1, 1)] * 2)
        state._begun().found[("dog",)] = None  # as if the row had appeared after it was read
        with pytest.raises(StaleWriterError):
            state.commit(granted)
        assert state.read_header() == header
        assert wide_backend.multi_get([("cat",)]) == [None]

    def _applied(self, backend: MapBackend, header: Header) -> None:
        deltas = self.deltas({"cat": [1], "dog": [1]})
        backend.apply(header, "bolt:0", ValueType.OPAQUE, deltas, AGGREGATES, want_values=False)

    # --- exchange (rebuild) -----------------------------------------------------------------------

    def test_rebuilt_rows_take_the_place_of_others_in_one_step(self, backend: MapBackend) -> None:
        if not isinstance(backend, ExchangeBackend):
            with pytest.raises(ConfigError, match="cannot be rebuilt"):
                OpaqueMapState(backend).become_beside(REBUILT)
            return
        live, rebuilt = OpaqueMapState(backend), OpaqueMapState(backend.beside(REBUILT))
        former = OpaqueMapState(backend.beside(FORMER))
        transact(live, 1, 1, {"dog": 1, "cat": 1})
        transact(live, 2, 1, {"dog": 10, "cow": 5})
        transact(rebuilt, 1, 1, {"dog": 2}, epoch=7)
        transact(rebuilt, 2, 1, {"dog": 20, "pig": 3}, epoch=7)
        assert {live.get(key) for key in ("dog", "cat", "cow", "pig")} == {11, 1, 5, None}
        header = live.read_header()
        new = header.opened(1, OpenCommit(3, 2, DIGEST))
        for expected, held in ((replace(header, epoch=9), rebuilt.read_header()), (header, header)):
            with pytest.raises(StaleWriterError):
                backend.exchange(expected, new, held)
        assert (live.get("dog"), rebuilt.get("dog")) == (11, 22)
        rebuilt_header = rebuilt.read_header()
        backend.exchange(header, new, rebuilt_header)
        assert live.read_header() == new
        assert [live.get(key) for key in ("dog", "cat", "cow", "pig")] == [22, None, None, 3]
        assert [former.get(key) for key in ("dog", "cat", "cow", "pig")] == [11, 1, 5, None]
        assert former.read_header() == replace(header, incarnation=rebuilt_header.incarnation)
        with pytest.raises(RatchetError):  # it does not exist any more
            rebuilt.read_header()
        transact(live, 3, 2, {"dog": 100, "cat": 1})
        transact(live, 4, 1, {"pig": 1})
        assert [live.get(key) for key in ("dog", "cat", "cow", "pig")] == [122, 1, None, 4]
        assert former.get("dog") == 11

    def test_a_transaction_is_taken_back_from_rebuilt_rows(self, backend: MapBackend) -> None:
        if not isinstance(backend, ExchangeBackend):
            return
        live, rebuilt = OpaqueMapState(backend), OpaqueMapState(backend.beside(REBUILT))
        for state, times in ((live, 1), (rebuilt, 2)):
            transact(state, 1, 1, {"dog": times}, epoch=times)
            transact(state, 2, 1, {"dog": 10 * times, "cow": 1}, epoch=times)
        header = live.read_header()
        backend.exchange(header, header, rebuilt.read_header())
        opened = header.opened(3, OpenCommit(2, 2, DIGEST))
        live.raise_header(header, opened)
        assert live.roll_back(opened) == 2
        assert (live.get("dog"), live.get("cow")) == (2, None)

    def test_what_stands_beside_is_removed_and_made_again(self, backend: MapBackend) -> None:
        if not isinstance(backend, ExchangeBackend):
            return
        live, rebuilt = OpaqueMapState(backend), OpaqueMapState(backend.beside(REBUILT))
        live.prepare("topology")
        assert not rebuilt.remove("topology")
        for dogs in (1, 2, 3):
            transact(rebuilt, 1, 1, {"dog": dogs})
            if dogs != 2:
                assert rebuilt.remove("topology")
                rebuilt.prepare("topology")
                assert rebuilt.get("dog") is None
            else:
                header = live.read_header()
                backend.exchange(header, header, rebuilt.read_header())
        assert live.get("dog") == 2
        former = backend.beside(FORMER)
        with pytest.raises(ConfigError):
            former.remove("another")
        assert former.remove("topology") and not former.remove("topology")
        with pytest.raises(InvariantViolation):
            backend.remove("topology")
        assert live.get("dog") == 2

    # --- value types ------------------------------------------------------------------------------

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
            return state.due("n", after, upto, lambda keys: [True] * len(keys))

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
            return [key for key, _ in state.due("n", 0, upto, lambda keys: [True] * len(keys))]

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
            every = state.due("n", after, upto, lambda keys: [True] * len(keys))
            assert [key for (key,), _ in every] == found

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

    # --- aggregates, in the store or by read and put ----------------------------------------------

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

    # --- helpers ----------------------------------------------------------------------------------

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

    # --- one form of every value (C29) ------------------------------------------------------------

    def test_decimals_are_exact_to_their_scale_or_an_error(self) -> None:
        """Sums in the store, or by read and put. A value with more digits than the column holds is
        refused, never rounded."""
        kind = pa.decimal128(38, 2)
        backend = self._made(KEY, Fields(total=kind))
        state = OpaqueMapState(backend)
        state.prepare("topology")
        large, small = Decimal("123456789012345678901234567890123456.78"), Decimal("0.01")
        for txid, amount in enumerate((large, small, large.copy_negate()), 1):
            deltas = pa.table({"word": ["a"], "total": pa.array([amount], kind)})
            state.apply(open_attempt(state, txid, 1), deltas, {"total": Sum("n")}, want_values=False)
            finish(state)
            if txid == 2:
                assert state.get("a") == Decimal("123456789012345678901234567890123456.79")
        assert state.get("a") == small
        state.begin_commit(open_attempt(state, 4, 1))
        for wrong in (Decimal("0.001"), Decimal("1e36"), Decimal("nan"), 0.1, "1"):
            with pytest.raises(BadRecordError, match="'total'"):
                state.multi_put(["a"], [wrong])
        assert state.multi_get(["a"]) == [small]

    def test_integers_have_no_fraction_to_lose(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        for wrong in (1.5, "1", float("nan"), Decimal("0.5")):
            with pytest.raises(BadRecordError, match="'n'"):
                state.multi_put(["a"], [wrong])
        state.multi_put(["a"], [2.0])
        state.commit(granted)
        assert repr(state.get("a")) == "2"

    @pytest.mark.parametrize(
        ("kind", "forms"),
        [
            (pa.float64(), [0.0, -0.0, 0]),
            (pa.float64(), [1, 1.0, Decimal(1)]),
            (pa.int64(), [1, 1.0]),
            (pa.decimal128(10, 2), [Decimal("1.0"), Decimal("1.00"), 1, Decimal("1E+0")]),
            (pa.decimal128(10, 2), [Decimal("-0"), Decimal("0.00")]),
            (
                pa.timestamp("us", tz="Europe/Paris"),
                [
                    datetime.datetime(2026, 1, 1, 12, tzinfo=ZoneInfo("Europe/Paris")),
                    datetime.datetime(2026, 1, 1, 11, tzinfo=datetime.UTC),
                    datetime.datetime(2026, 1, 1, 11),
                ],
            ),
        ],
        ids=str,
    )
    def test_every_form_of_a_key_is_one_row(self, kind: pa.DataType, forms: list[Any]) -> None:
        if kind in self.cannot_hold:
            return
        backend = self._made(Fields.of({"k": kind}), VALUE)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        for txid, form in enumerate(forms, 1):
            transact(state, txid, 1, {form: 1})
        assert [row.value for _, row in backend.scan()] == [(len(forms),)]
        assert [state.get(form) for form in forms] == [len(forms)] * len(forms)
        (key,) = [key[0] for key, _ in backend.scan()]
        assert str(key) != "-0.0"

    def test_nan_is_one_value_above_all_numbers_or_is_refused(self) -> None:
        for order in ([1.0, float("nan"), 2.0], [float("nan"), 1.0, 2.0], [2.0, 1.0, float("nan")]):
            state = OpaqueMapState(self._made(KEY, Fields(least=float, most=float)))
            state.prepare("topology")
            try:
                for txid, value in enumerate(order, 1):
                    deltas = pa.table({"word": ["a"], "least": [value], "most": [value]})
                    granted = open_attempt(state, txid, 1)
                    state.apply(granted, deltas, {"least": Min("n"), "most": Max("n")}, want_values=False)
                    finish(state)
            except BadRecordError:
                continue
            least, most = state.get("a")
            assert (least, most != most) == (1.0, True)

    def test_nan_is_one_key_or_is_refused(self) -> None:
        backend = self._made(Fields(k=float), VALUE)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        try:
            transact(state, 1, 1, {float("nan"): 1})
        except BadRecordError:
            return
        transact(state, 2, 1, {-float("nan"): 1})
        deltas = pa.table({"k": [float("nan")], "n": [1]})
        made = state.apply(open_attempt(state, 3, 1), deltas, {"n": Sum("n")}, want_values=True)
        assert made is not None and made.column("n").to_pylist() == [3]
        assert [row.value for _, row in backend.scan()] == [(3,)]

    def test_an_hour_that_comes_twice_is_two_keys(self) -> None:
        """In the night when clocks go back, Python treats the two hours as equal while they are in
        that zone."""
        kind = pa.timestamp("us", tz="Europe/Paris")
        if kind in self.cannot_hold:
            return
        backend = self._made(Fields.of({"at": kind}), VALUE)
        state = OpaqueMapState(backend)
        state.prepare("topology")
        instants = pa.array([1_603_585_800_000_000, 1_603_589_400_000_000], kind)
        for txid in (1, 2):
            deltas = pa.table({"at": instants, "n": [1, 10]})
            made = state.apply(open_attempt(state, txid, 1), deltas, {"n": Sum("n")}, want_values=True)
            assert made is not None and made.column("n").to_pylist() == [txid, txid * 10]
            finish(state)
        assert {row.value for _, row in backend.scan()} == {(2,), (20,)}

    # --- absent, deleted, zero --------------------------------------------------------------------

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

    # --- purge (C21) and reset --------------------------------------------------------------------

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

    # --- roll-back (C7) ---------------------------------------------------------------------------

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

    # --- whole states as of a transaction ---------------------------------------------------------

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

    # --- faults -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("after", [False, True], ids=["nothing done", "answer lost"])
    @pytest.mark.parametrize("how", ["update", "apply", "one step"])
    def test_a_fault_between_any_two_steps(self, wide_backend: MapBackend, how: str, after: bool) -> None:
        """Each run fails another call to the store. The replay applies every row once."""
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

    # --- shapes and types -------------------------------------------------------------------------

    def test_every_type_comes_back_as_it_went_in(self) -> None:
        """As key, as value, as previous value; by put and by apply."""
        names = list(self._held_types())
        value = Fields.of({name: EVERY_TYPE[name][0] for name in names})
        count = max(len(values) for _, values in EVERY_TYPE.values())
        rows = [tuple(EVERY_TYPE[name][1][each % len(EVERY_TYPE[name][1])] for name in names) for each in range(count)]
        rows.append((None,) * len(names))
        key = Fields.of({"k_text": pa.string(), "k_day": pa.date32(), "k_big": pa.int64(), "k_raw": pa.binary()})
        keys = [(text, datetime.date(2020, 1, 1 + i), i, text.encode()) for i, text in enumerate(AWKWARD)]
        keys.append(("null", datetime.date(1999, 1, 1), -1, b""))
        for how in ("put", "apply"):
            backend = self._made(key, value)
            state = OpaqueMapState(backend)
            state.prepare("topology")
            for txid, shift in ((1, 0), (2, 1)):
                shifted = rows[shift:] + rows[:shift]
                granted = open_attempt(state, txid, 1)
                if how == "put":
                    state.begin_commit(granted)
                    state.multi_put(keys, shifted if len(names) > 1 else [row[0] for row in shifted])
                    state.commit(granted)
                else:
                    columns = [*zip(*keys, strict=True), *zip(*shifted, strict=True)]
                    schema = pa.schema([(n, key.type_of(n)) for n in key] + [(n, value.type_of(n)) for n in value])
                    deltas = pa.table(
                        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
                    )
                    new_values = state.apply(granted, deltas, {n: Last(n) for n in names}, want_values=True)
                    assert new_values is not None and new_values.schema == schema
                    before = rows if txid == 2 else [(None,) * len(names)] * len(rows)
                    merged = [
                        tuple(old if new is None else new for old, new in zip(*pair, strict=True))
                        for pair in zip(before, shifted, strict=True)
                    ]
                    assert [tuple(row.values())[len(key) :] for row in new_values.to_pylist()] == merged
                finish(state)
            found = backend.multi_get(keys)
            assert [row.prev for row in found if row is not None] == rows
            if how == "put":
                assert [row.value for row in found if row is not None] == rows[1:] + rows[:1]
            assert dict(backend.scan()) == dict(zip(keys, found, strict=True))
            backend.close()

    def test_every_type_can_be_a_key(self) -> None:
        for name, (kind, values) in self._held_types().items():
            if isinstance(values[0], str):
                values = [each for each in values if len(each.encode()) <= self.longest_key]
            backend = self._made(Fields.of({name: kind}), VALUE)
            state = OpaqueMapState(backend)
            state.prepare("topology")
            granted = open_attempt(state, 1, 1)
            state.begin_commit(granted)
            state.multi_put([(each,) for each in values], list(range(len(values))))
            state.commit(granted)
            assert {key[0]: row.value for key, row in backend.scan()} == {each: (i,) for i, each in enumerate(values)}
            assert [row.value for row in backend.multi_get([(each,) for each in values]) if row] == [
                (i,) for i in range(len(values))
            ]
            backend.close()

    def _held_types(self) -> dict[str, tuple[pa.DataType, Sequence[Any]]]:
        """The part of ``EVERY_TYPE`` that the store holds."""
        return {
            name: (kind, values)
            for name, (kind, values) in EVERY_TYPE.items()
            if kind not in self.cannot_hold and (self.holds_infinities or name != "boundless")
        }

    def test_an_infinity_that_cannot_be_held_is_refused(self) -> None:
        if self.holds_infinities:
            return
        for value, how in itertools.product(EVERY_TYPE["boundless"][1], ("put", "apply")):
            backend = self._made(KEY, Fields(real=float))
            state = OpaqueMapState(backend)
            state.prepare("topology")
            granted = open_attempt(state, 1, 1)
            with pytest.raises(BadRecordError, match="infinity"):
                if how == "put":
                    state.begin_commit(granted)
                    state.multi_put(["dog"], [value])
                    state.commit(granted)
                else:
                    deltas = pa.table({"word": ["dog"], "real": [value]})
                    state.apply(granted, deltas, {"real": Last("real")}, want_values=False)
            assert backend.multi_get([("dog",)]) == [None]
            backend.close()

    def test_a_key_that_is_too_long_is_refused(self, backend: MapBackend) -> None:
        state = OpaqueMapState(backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        long = "".join(chr(97 + each * 7919 % 26) for each in range(min(self.longest_key, 1_000) + 1))
        if self.longest_key > 1_000:
            state.multi_put([long], [1])
            state.commit(granted)
            assert state.get(long) == 1
            return
        with pytest.raises(BadRecordError, match="longer than"):
            state.multi_put([long], [1])
            state.commit(granted)

    def test_what_cannot_be_held_is_refused_when_it_is_declared(self) -> None:
        if issubclass(type(self._made(KEY, VALUE)), _untyped()):
            return
        for kind in (*self.cannot_hold, pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.timestamp("ns")):
            with pytest.raises(TopologyError, match="'odd'"):
                self._made(KEY, Fields.of({"odd": kind}))

    def test_null_absent_and_deleted_are_three_things(self, wide_backend: MapBackend) -> None:
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        state.multi_put(["null", "dead"], [(None, None, None, None), (1, 2, 3, 4)])
        state.commit(granted)
        finish(state)
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.delete(["dead"])
        state.commit(granted)
        null, absent, dead = wide_backend.multi_get([("null",), ("absent",), ("dead",)])
        assert absent is None
        assert null is not None and null.value == (None,) * 4
        assert dead is not None and (dead.value, dead.prev) == (None, (1, 2, 3, 4))
        assert [state.get(key) for key in ("null", "absent", "dead")] == [(None,) * 4, None, None]

    def test_a_null_key_is_refused(self, backend: MapBackend) -> None:
        if issubclass(type(backend), _untyped()):
            return
        state = OpaqueMapState(backend)
        state.prepare("topology")
        granted = open_attempt(state, 1, 1)
        state.begin_commit(granted)
        with pytest.raises(BadRecordError, match="null"):
            state.multi_put([(None,)], [1])
            state.commit(granted)

    def test_an_integer_beyond_64_bits_is_refused(self, wide_backend: MapBackend) -> None:
        if issubclass(type(wide_backend), _untyped()):
            return
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        self.apply(state, 1, 1, {"a": [2**63 - 1]})
        granted = open_attempt(state, 2, 1)
        with pytest.raises(BadRecordError):
            state.apply(granted, self.deltas({"a": [1]}), AGGREGATES, want_values=False)
        assert state.get("a")[1] == 2**63 - 1

    def test_many_rows_in_one_commit(self, wide_backend: MapBackend) -> None:
        """More rows than fit into one page, chunk or statement."""
        state = OpaqueMapState(wide_backend)
        state.prepare("topology")
        words = [f"w{each:06}" for each in range(12_345)]
        self.apply(state, 1, 1, {word: [each] for each, word in enumerate(words)})
        granted = open_attempt(state, 2, 1)
        state.begin_commit(granted)
        state.multi_put(words, [(each, 0, 0, 0) for each in range(len(words))])
        state.commit(granted)
        open_attempt(state, 2, 2)
        finish(state, replay=True)  # this attempt wrote nothing: all rows are restored
        assert {key[0]: row.value for key, row in wide_backend.scan()} == {
            word: (1, each, each, each) for each, word in enumerate(words)
        }
        granted = open_attempt(state, 3, 1)
        state.begin_commit(granted)
        state.delete(words)
        state.commit(granted)
        finish(state)
        open_attempt(state, 4, 1)
        assert state.purge(state.read_header(), 4) == len(words)
        assert list(wide_backend.scan()) == []

    def test_every_aggregate_merges_as_the_fold(self) -> None:
        """Columns that the store merges, columns that are derived from others, and columns that
        Python merges."""
        aggregates: dict[str, Aggregate] = {}
        declared: dict[str, Aggregate] = {
            **AGGREGATES,
            "mean": Mean("n"),
            "first": First("n"),
            "last": Last("n"),
            "distinct": ApproxDistinct("n"),
            "either": Reduce("n", either),
        }
        for chosen in (("count", "mean", "first", "last"), tuple(declared)):
            aggregates = {n: e for name in chosen for n, e in declared[name].expanded(name).items()}
            types = {name: each.output_type(pa.int64()) for name, each in aggregates.items()}
            for state_class in STATES:
                backend = self._made(KEY, Fields.of(types))
                state = state_class(backend)
                state.prepare("topology")
                batches: list[dict[str, list[Any]]] = [
                    {"a": [4, 4, 2], "b": [None]},
                    {"a": [9], "b": [8, 1]},
                    {"c": [0]},
                ]
                for txid, batch in enumerate(batches, 1):
                    deltas = partials(batch, aggregates, types)
                    state.apply(open_attempt(state, txid, 1), deltas, aggregates, want_values=False)
                    finish(state)
                for word, values in (("a", [4, 4, 2, 9]), ("b", [None, 8, 1]), ("c", [0])):
                    wanted = partials({word: values}, aggregates, types).to_pylist()[0]
                    found = dict(zip(aggregates, state.get(word), strict=True))
                    for name in aggregates:
                        if not name.endswith("_sketch"):
                            assert found[name] == wanted[name], (state_class, word, name)
                backend.close()


def _untyped() -> type[MapBackend]:
    """The only backend without columns: it stores values of any type."""
    from sinks.memory import MemoryBackend

    return MemoryBackend
