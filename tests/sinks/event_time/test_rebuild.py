"""``ratchet rebuild`` of what goes by event time: the state of an operator, then what it has
sent."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from framework import Topology, submit
from framework.errors import ConfigError, RetryableError
from framework.execution.local import LocalExecutor
from framework.execution.plan import plan_execution
from framework.inspect.rebuild import clean, rebuild
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from framework.transactions.commit import CommitPhase
from sinks import MapBackend, MySqlBackend, PostgresBackend, RedisBackend
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.timed_parts import PARTS, append, held, run, source, topology
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.rule("C44")


def check_rebuilt_beside_the_topology(
    wrong: Topology, mended: Topology, control: Topology, spout: OpaqueMemoryTransactionalSpout
) -> None:
    """``wrong`` and ``mended`` are of the same states. ``control``: what ``mended`` would hold,
    had it run from the start."""
    store, own = MemoryStore(), MemoryStore()
    run(wrong, store)
    run(control, own)
    assert held(mended) != held(control)
    has_clock = "watermark" in {each.component_id for each in mended["part"].subscriptions}
    with pytest.raises(ConfigError, match=r"'sent' gets rows from 'part', and .* differ .*; rebuild 'part' first"):
        rebuild(mended, store, state="sent", take_over=True)
    found = rebuild(mended, store, state="part", take_over=True)
    assert found.former is not None and found.below == ["sent"]
    assert [each.difference_count for each in found.above] == ([0] if has_clock else [])
    assert held(mended)["part"] == held(control)["part"]
    found = rebuild(mended, store, state="sent", take_over=True)
    assert found.former is not None and not found.below
    assert [each.difference_count for each in found.above] == [0] * (2 if has_clock else 1)
    assert held(mended) == held(control) and verify(mended, store).right
    append(spout)
    run(mended, store)
    run(control, own)
    assert held(mended) == held(control) and verify(mended, store).right
    assert all(
        "__former" in place or "former" in place
        for place in (*clean(mended, store, "sent"), *clean(mended, store, "part"))
    )


@pytest.mark.quick_for("windows")
@pytest.mark.parametrize("part", PARTS)
def test_an_operator_and_what_it_sent_are_rebuilt_from_the_top_down(part: str, tmp_path: Path) -> None:
    spout, other = source(), tmp_path / "control"
    other.mkdir()
    wrong, mended = topology(tmp_path, spout, part, dropped=7), topology(tmp_path, spout, part)
    check_rebuilt_beside_the_topology(wrong, mended, topology(other, spout, part), spout)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["windows", "sessions", "pairs"])
def test_an_operator_and_what_it_sent_are_rebuilt_while_the_topology_runs(part: str, tmp_path: Path) -> None:
    spout, store, other, over = source(), MemoryStore(), tmp_path / "control", threading.Event()
    other.mkdir()
    run(topology(tmp_path, spout, part, dropped=7), store)
    built, copied = topology(tmp_path, spout, part), topology(tmp_path, spout, part)

    def feed() -> None:
        at = 50
        while not over.wait(0.9):  # no faster than a slow machine recomputes transactions
            for partition in range(2):
                spout.append(partition, [("order", "payment")[at % 3 == 0], f"k{at % 4}", partition, at * 7, at])
            at += 1

    thread = threading.Thread(target=feed)
    with submit(built, {}, store=store, executor=LocalExecutor(plan_execution(built), {})) as running:
        thread.start()
        try:
            for state in ("part", "sent"):
                rebuilt = rebuild(copied, store, state=state, take_over=True)
                assert rebuilt.former is not None
                running.wait_for_commit(rebuilt.txid + 1, PATIENCE_S)
        finally:
            over.set()
            thread.join()
        running.wait_until_caught_up(PATIENCE_S)
    control = topology(other, spout, part)
    run(control, MemoryStore())
    found, wanted = held(copied), held(control)
    assert found["sent"] == wanted["sent"] and verify(copied, store).right
    # how long the row of a waiting record keeps those before it depends on the batches
    assert part == "pairs" or found == wanted


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("part", ["windows", "sessions", "pairs"])
@pytest.mark.parametrize("kind", ["postgres", "redis", "mariadb"])
def test_other_stores_rebuild_operators_too(
    kind: str, part: str, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue({"redis": "redis_server"}.get(kind, kind))
    makers: dict[str, Any] = {
        "postgres": lambda table: PostgresBackend(server.dsn, table),
        "redis": lambda table: RedisBackend(server.url, table),
        "mariadb": lambda table: MySqlBackend(server.dsn, table),
    }

    def backend(table: str) -> MapBackend:
        made: MapBackend = makers[kind](f"{name.replace('-', '_')}_{table}")
        return made

    spout = source()
    wrong = topology(tmp_path, spout, part, dropped=7, backend=backend)
    mended = topology(tmp_path, spout, part, backend=backend)
    check_rebuilt_beside_the_topology(wrong, mended, topology(tmp_path, spout, part), spout)


def test_the_event_time_itself_is_not_rebuilt(tmp_path: Path) -> None:
    built, store = topology(tmp_path, source(), "windows"), MemoryStore()
    run(built, store)
    with pytest.raises(ConfigError, match="'watermark' keeps the event time by which others have sent what was due"):
        rebuild(built, store, state="watermark", take_over=False)


def test_windows_are_not_exchanged_if_event_time_would_have_been_another(tmp_path: Path) -> None:
    spout, store = source(), MemoryStore()
    run(topology(tmp_path, spout, "windows"), store)
    other = topology(tmp_path, spout, "windows")
    other["watermark"].instance._out_of_orderness = 5_000_000  # type: ignore[union-attr]
    found = rebuild(other, store, state="part", take_over=False)
    assert [each.difference_count for each in found.above] == [1]
    before = held(other)
    with pytest.raises(
        ConfigError, match="gets rows from 'watermark'.* by another event time can only be made anew by"
    ):
        rebuild(other, store, state="part", take_over=True)
    assert held(other) == before


@pytest.mark.quick_for("4")
@pytest.mark.parametrize("step", range(1, 12))
def test_a_rebuild_that_ends_between_the_states_of_a_transaction_goes_on(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spout, store, other = source(), MemoryStore(), tmp_path / "control"
    other.mkdir()
    run(topology(tmp_path, spout, "sessions", dropped=7), store)
    control = topology(other, spout, "sessions")
    run(control, MemoryStore())
    mended = topology(tmp_path, spout, "sessions")
    rebuild(mended, store, state="part", take_over=True)
    finish, done = CommitPhase._finish, 0

    def ends(self: CommitPhase, *given: Any) -> None:
        nonlocal done
        done += 1
        if done == step:
            raise RuntimeError("killed")
        finish(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(CommitPhase, "_finish", ends)
        with pytest.raises(RetryableError, match="killed"):
            rebuild(mended, store, state="sent", take_over=True)
    found = rebuild(mended, store, state="sent", take_over=True)
    assert found.resumed_at == (step + 2) // 3  # there are three states, and each transaction finishes each
    assert held(mended) == held(control) and verify(mended, store).right
    with sqlite3.connect(tmp_path / "timed.db") as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not {"clock__rebuilt", "part__rebuilt"} & tables


def test_a_rebuild_of_an_operator_keeps_others_from_what_it_copies(tmp_path: Path) -> None:
    built, store = topology(tmp_path, source(), "windows"), MemoryStore()
    run(built, store)

    def meanwhile(progress: Any) -> None:
        with pytest.raises(ConfigError, match="another rebuild of 'watermark' in topology 'timed' runs"):
            rebuild(built, store, state="part", take_over=True, timeout_s=0.05)

    rebuild(built, store, state="sent", take_over=True, told=meanwhile)
