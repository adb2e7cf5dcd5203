"""The progress line of a driver shows why it repeats something."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.coordination import Change, Put
from framework.errors import RetryableError
from framework.topology import Header
from framework.transactions import MemoryStore, coordinator, planner_thread
from framework.transactions.run import Run
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for


class Away(MemoryBackend):
    """A backend that does not answer as long as ``away`` is set."""

    away = threading.Event()

    def prepare(self, topology_id: str) -> Header:
        self._check_there()
        return super().prepare(topology_id)

    def raise_header(self, expected: Header, new: Header) -> None:
        self._check_there()
        super().raise_header(expected, new)

    def multi_put(self, *arguments: Any) -> None:
        self._check_there()
        super().multi_put(*arguments)

    def _check_there(self) -> None:
        if Away.away.is_set():
            raise RetryableError("the store says: no room on the disk")


class SlowToClose(MemoryStore):
    """A store that takes the step that closes a transaction only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.asked = threading.Event()

    def _apply_as(self, leadership: Any, changes: Sequence[Change]) -> None:
        if any(isinstance(each, Put) and each.path.endswith("/currtx") for each in changes):
            self.asked.set()
            self.may.wait(PATIENCE_S)
        super()._apply_as(leadership, changes)


def test_a_run_has_caught_up_when_the_last_transaction_is_closed_in_the_store_and_not_before(name: str) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 5}, Fields(word=str), 5)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt(
        "words", StateCommitter(OpaqueMapState(MemoryBackend()), ["word"], {"n": Count()})
    ).global_grouping("spout")
    store = SlowToClose()
    with submit(builder.build(), store=store, executor="local") as run:
        assert store.asked.wait(PATIENCE_S)
        with pytest.raises(TimeoutError):
            run.wait_until_caught_up(0.5)
        store.may.set()
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().committed_txid == 1


def test_the_rate_of_a_run_falls_to_0_when_nothing_is_committed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = started(name)
    with run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().rows_per_second > 0
        monkeypatch.setattr(run._driver.journal._committed_rate, "_clock", lambda: time.monotonic() + 600)
        assert run.status().rows_per_second == 0.0
        assert "| 0 rows/s" in repr(run)


def started(name: str) -> tuple[Run, OpaqueMemoryTransactionalSpout, OpaqueMapState]:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 10}, Fields(word=str), 5)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = OpaqueMapState(Away())
    builder.set_bolt("words", StateCommitter(state, ["word"], {"count": Count()})).global_grouping("spout")
    return submit(builder.build(), store=MemoryStore(), executor="local"), spout, state


class Writes(MemoryStore):
    """Remembers which writes close a transaction, and which store a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[tuple[bool, bool]] = []

    def _apply_as(self, leadership: Any, changes: Sequence[Change]) -> None:
        puts = [each.path for each in changes if isinstance(each, Put)]
        kind = any(each.endswith("/currtx") for each in puts), any("/user/" in each for each in puts)
        if any(kind):
            self.kinds.append(kind)
        super()._apply_as(leadership, changes)


def test_one_write_closes_a_transaction_and_emits_the_next_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner makes a batch as soon as the one before it is committed, closed or not. The last
    one is closed when the run stops: nothing else comes, and it may wait for ever here."""
    monkeypatch.setattr(coordinator, "CLOSE_AFTER_MS", 10**9)
    monkeypatch.setattr(planner_thread, "BESIDE_S", 10**6)
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]] * 20}, Fields(word=str), 5)
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = OpaqueMapState(MemoryBackend())
    builder.set_bolt("words", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    store = Writes()
    with submit(builder.build(), store=store, executor="local") as run:
        wait_for(lambda: state.get("a") == 20)
        run.stop()
    assert store.kinds == [(False, True), *[(True, True)] * 3, (True, False)]


def shown(run: Run) -> str:
    return run.status().progress_line(0.0)


@pytest.mark.rule("C30")
def test_the_progress_line_shows_the_cause_of_a_repetition_until_it_has_passed(name: str) -> None:
    """C30: an operator sees why a topology makes no progress."""
    run, spout, state = started(name)
    with run:
        run.wait_until_caught_up(PATIENCE_S)
        assert "repeated" not in shown(run)
        Away.away.set()
        try:
            for _ in range(5):
                spout.append("0", ["a"])
            wait_for(lambda: "repeated: " in shown(run) and "no room on the disk" in shown(run))
        finally:
            Away.away.clear()
        run.wait_until_caught_up(PATIENCE_S)
        assert "repeated" not in shown(run)
        assert "no room" in (run.status().last_error or "")
    assert state.get("a") == 15


@pytest.mark.rule("C30")
def test_the_progress_line_shows_the_cause_of_a_repeated_start(name: str) -> None:
    Away.away.set()
    run, _, state = started(name)
    try:
        wait_for(lambda: "repeated: the store says: no room on the disk" in shown(run))
    finally:
        Away.away.clear()
    with run:
        run.wait_until_caught_up(PATIENCE_S)
        assert "repeated" not in shown(run)
    assert state.get("a") == 10


def test_a_run_shows_itself_where_it_is_looked_at(name: str) -> None:
    """As the value of a notebook's cell, or in a debugger."""
    run, _, _ = started(name)
    with run:
        run.wait_until_caught_up(PATIENCE_S)
        assert repr(run).startswith(f"<Run of {name!r}: running | read 10 | ")
        shown = run._repr_html_()
        assert f"<th>{name}</th>" in shown and "<td>committed 10 (txid 2)</td>" in shown
