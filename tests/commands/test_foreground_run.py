"""The progress that a run shows, and how a signal stops it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.commands.foreground_run import done_before, stop_on_signal, supervise
from framework.errors import RetryableError
from framework.observe.progress_lines import ProgressLines
from framework.transactions.run_status import RunStatus
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.processes import RunProcess
from tests.kit.waiting import PATIENCE_S, wait_for
from tests.kit.words_runs import EXACT, Setup

STATUS = RunStatus(
    topology_id="words",
    phase="running",
    epoch=1,
    committed_txid=7,
    in_flight={8: "processing"},
    in_flight_rows=50,
    lag=3_000,
    partitions={},
    read_rows=7_050,
    committed_rows=7_000,
    bad_records=0,
    late_records=0,
    left_out_rows=0,
    lost_records=0,
    rows_per_second=0.0,
    attempts_failed=0,
    last_error=None,
    waiting_for=None,
    repeating=None,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.behaviour("6.3")
def test_the_line_of_progress_says_what_is_read_in_flight_committed_and_left() -> None:
    line = STATUS.progress_line(rate=1_000.0)
    for part in ("read 7,050", "in flight 50", "committed 7,000 (txid 7)", "lag 3,000", "1,000 rows/s", "3 s left"):
        assert part in line.split(" | ")
    assert "left" not in STATUS.progress_line(rate=0.0)  # without a rate, the time left is not known


@pytest.mark.behaviour("6.3")
def test_progress_is_rewritten_on_a_terminal_plain_lines_elsewhere_and_json_for_machines() -> None:
    def shown(stream: io.StringIO, **options: Any) -> str:
        progress = ProgressLines(stream=stream, every_s=0, **options)
        progress.show(STATUS)
        progress.show(STATUS)
        progress.done()
        return stream.getvalue()

    terminal = shown(Terminal())
    assert (terminal.count("\r"), terminal.count("\n")) == (2, 1)
    plain = shown(io.StringIO())
    assert [line.split(" | ")[0] for line in plain.splitlines()] == ["running"]  # nothing has changed
    assert "\x1b" not in plain and "\r" not in plain
    documents = [json.loads(line) for line in shown(Terminal(), json_lines=True).splitlines()]
    assert [(each["committed_rows"], each["lag"], each["in_flight_rows"]) for each in documents] == [
        (7_000, 3_000, 50)
    ] * 2


@pytest.mark.behaviour("6.3")
def test_an_appended_line_is_repeated_after_a_change_and_after_a_minute_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("framework.observe.progress_lines.time", SimpleNamespace(monotonic=lambda: now))
    stream = io.StringIO()
    progress = ProgressLines(stream=stream)
    shown: list[tuple[int, str]] = []
    for second in range(150):
        now += 1.0
        progress.show(replace(STATUS, committed_rows=7_000 + 100 * min(second, 3)))
        if line := stream.getvalue():
            shown.append((second, line.strip().split(" | ")[5]))
            stream.seek(0)
            stream.truncate()
    changed = [(0, "0 rows/s"), (1, "100 rows/s"), (2, "100 rows/s"), (3, "100 rows/s")]
    assert shown == [*changed, (63, "0 rows/s"), (123, "0 rows/s")]


@pytest.mark.behaviour("6.2")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_stops_a_run_in_order_and_the_next_one_goes_on(tmp_path: Path, which: signal.Signals) -> None:
    setup = Setup(tmp_path)
    first = setup.start()
    before = signal.getsignal(which)

    def stop() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while signal.getsignal(which) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            first.wait_for_commit(1, PATIENCE_S)
        finally:
            if signal.getsignal(which) != before:  # otherwise the signal would end this process
                os.kill(os.getpid(), which)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with stop_on_signal() as stopped:
        assert supervise(first, stopped, until_caught_up=False) is False
    stopping.join()
    assert first.status().phase == "stopped"
    setup.spout.append(0, [["w0"]])
    with setup.start() as second:
        assert supervise(second, threading.Event(), until_caught_up=True) is True
        assert second.status().epoch == 2
    assert setup.counts() == {**EXACT, "w0": 11}


def test_a_signal_ends_the_checks_before_a_run_too() -> None:
    """A server may leave a check without an answer."""
    with stop_on_signal() as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        assert done_before(stopped, _waits_for_ever) is False
    assert done_before(threading.Event(), lambda: None) is True
    with pytest.raises(TimeoutError, match="waited 0.3 s"):
        done_before(threading.Event(), _waits_for_ever, 0.3)
    with pytest.raises(RetryableError, match="away"):
        done_before(threading.Event(), _fails)


def _waits_for_ever() -> None:
    threading.Event().wait()


def _fails() -> None:
    raise RetryableError("the server is away")


def test_a_signal_while_the_terminal_is_written_to_stops_the_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to write to a stream in the middle of writing to it."""

    class Signals(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            if not stopped.is_set():
                os.kill(os.getpid(), signal.SIGINT)
            return len(data)

    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BufferedWriter(Signals()), line_buffering=True))
    with stop_on_signal() as stopped:
        sys.stderr.write("running\n")
    assert stopped.is_set()


RELEASED = threading.Event()


class LateSpout(OpaqueMemoryTransactionalSpout):
    """Does not say where its source ends."""

    def planner(self, conf: Any, context: Any) -> Any:
        planner = super().planner(conf, context)
        planner.end = RELEASED.wait  # type: ignore[assignment]
        return planner


def test_a_source_that_does_not_say_where_it_ends_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.spout = LateSpout({0: []}, Fields(word=str), 10)
    with setup.start() as run:
        wait_for(lambda: run.status().phase == "running")
        with pytest.raises(TimeoutError, match=r"waited 0.5 s for spout 'spout' to say where its source ends"):
            run.wait_until_caught_up(0.5)
        RELEASED.set()


@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.behaviour("6.2")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_ends_a_run_on_spark_with_status_0(tmp_path: Path, which: signal.Signals) -> None:
    run = RunProcess(tmp_path / "log", "tests.commands.test_foreground_run:endless", {})
    run.start()
    assert run.wait_for(lambda: run.said("committed 1"))
    os.kill(run.pid, which)
    assert run.process is not None
    assert run.process.wait(PATIENCE_S) == 0, run.tail()
    assert run.said("stopping, the commit under way is finished")
    assert not run.said("Traceback")


def endless() -> Topology:
    spout = OpaqueMemoryTransactionalSpout({0: [["w"]] * 100_000}, Fields(word=str), 10)
    builder = TransactionalTopologyBuilder("endless", "spout", spout)
    state = OpaqueMapState(SqliteBackend(Path(tempfile.mkdtemp()) / "x.db", "words"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    return builder.build()
