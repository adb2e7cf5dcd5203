"""Every write compares the header (C1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from framework.errors import ConfigError, CorruptStateError, RatchetError, StaleWriterError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import (
    AGGREGATES,
    DIGEST,
    KEY,
    STATES,
    WIDE,
    to_commit_in_one_step,
)
from framework.topology import Header, OpenCommit, Stamp, ValueType
from sinks.backend import MapBackend, Row
from sinks.read_as_of import check_held, for_reading
from sinks.states import OpaqueMapState


class HeaderContract(BackendCase):
    """Every write compares the header (C1)."""

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
