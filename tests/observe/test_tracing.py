"""Traces, as a collector receives them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from framework import BaseBasicBolt, FailedException, Fields, Run, TransactionalTopologyBuilder, submit
from framework.errors import ConfigError
from framework.observe import tracing
from framework.observe.tracing import PARTS_MAX, TransactionTraces
from framework.transactions import MemoryStore
from integration.server import free_port
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S, wait_for


class Collector:
    """Stands in for an OpenTelemetry collector: takes spans over HTTP. ``answer``: the status;
    ``delay_s``: how long it takes."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.answer = 200
        self.requests = 0
        self.hang = threading.Event()
        self.hang.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests += 1
                outer.hang.wait(PATIENCE_S)
                if outer.answer == 200:
                    outer.take(body)
                self.send_response(outer.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({each.key: each.value.string_value for each in group.resource.attributes})
            for scope in group.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()

    def tree(self) -> dict[bytes, list[Any]]:
        """Span id -> its children, by their beginning; those of no span are roots."""
        below: dict[bytes, list[Any]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda each: (each.start_time_unix_nano, each.end_time_unix_nano)):
            below[span.parent_span_id].append(span)
        return below


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all spans arrive before a run has ended, on a machine that stands still, too."""
    monkeypatch.setattr(tracing, "_SEND_S", PATIENCE_S)
    monkeypatch.setattr(tracing, "_CLOSING_MS", int(PATIENCE_S * 1_000))


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    yield it
    it.close()


class Once(BaseBasicBolt):
    """Fails the first attempt at the batch with ``bad``."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "failed"

    def execute(self, tup: Any, collector: Any) -> None:
        if tup["word"] == "bad" and not self._mark.exists():
            self._mark.touch()
            raise FailedException("the first time")
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def started(folder: Path, endpoint: str, name: str = "words", **settings: Any) -> Run:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"], ["bad"], ["c"]]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder(name, "lines", spout)
    builder.set_bolt("once", Once(folder)).global_grouping("lines")
    state = OpaqueMapState(SqliteBackend(folder / "x.db", "words"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("once")
    return submit(builder.build(), {"tracing.otlp.endpoint": endpoint, **settings}, MemoryStore(), "local")


def caught_up(folder: Path, endpoint: str, **options: Any) -> None:
    with started(folder, endpoint, **options) as run:
        run.wait_until_caught_up(PATIENCE_S)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def test_a_transaction_is_a_trace_with_its_attempts_phases_tasks_and_calls(
    collector: Collector, tmp_path: Path
) -> None:
    caught_up(tmp_path, collector.endpoint)
    below = collector.tree()
    roots = {attributes(each)["ratchet.txid"]: each for each in below[b""]}
    assert sorted(roots) == [1, 2, 3]
    assert {each.name for each in roots.values()} == {"transaction"}
    assert len({each.trace_id for each in roots.values()}) == 3
    assert collector.resources[0]["ratchet.topology"] == "words"

    attempts = [each for each in below[roots[2].span_id] if each.name.startswith("attempt")]
    assert [(each.name, attributes(each)["ratchet.outcome"]) for each in attempts] == [
        ("attempt 1", "failed"),
        ("attempt 2", "committed"),
    ]
    assert "the first time" in attempts[0].status.message
    (processing,) = below[attempts[0].span_id]
    assert (processing.name, processing.status.code) == ("processing", 2)
    failed = [each for each in below[processing.span_id] if each.name.startswith("task") and each.status.code == 2]
    assert any("the first time" in each.status.message for each in failed)

    phases = below[attempts[1].span_id]
    assert [each.name for each in phases] == ["processing", "waiting", "commit"]
    named = {each.name: [part.name for part in below[each.span_id]] for each in phases}
    assert "call process" in named["processing"]
    assert [part for part in named["processing"] if part.startswith("task ")] == ["task lines+once+count 0 of 1"]
    assert [part for part in named["commit"] if part.startswith("task ")] == ["task count 0 of 1"]
    calls = [part for part in named["commit"] if part.startswith("call ")]
    assert calls == ["call check header", "call commit", "call note done"]  # one step of the state
    states = {attributes(part).get("ratchet.state") for part in below[phases[2].span_id] if "header" in part.name}
    assert all("words" in each for each in states)
    saves = [each.name for each in below[roots[2].span_id] if each.name == "call save"]
    assert len(saves) >= 2  # to emit it, and to close it


def test_spans_lie_within_their_parents(collector: Collector, tmp_path: Path) -> None:
    caught_up(tmp_path, collector.endpoint)
    known = {each.span_id: each for each in collector.spans}
    slack_ns = 50_000_000  # a phase is measured by another clock than a task
    for each in collector.spans:
        parent = known.get(each.parent_span_id)
        assert each.start_time_unix_nano <= each.end_time_unix_nano
        if parent is not None:
            assert each.trace_id == parent.trace_id
            assert each.start_time_unix_nano >= parent.start_time_unix_nano - slack_ns
            assert each.end_time_unix_nano <= parent.end_time_unix_nano + slack_ns


def test_a_ratio_of_zero_sends_nothing(collector: Collector, tmp_path: Path) -> None:
    caught_up(tmp_path, collector.endpoint, **{"tracing.otlp.ratio": 0})
    assert (collector.requests, collector.spans) == (0, [])


def test_a_hostile_name_and_a_huge_error_are_sent(collector: Collector) -> None:
    traces = TransactionTraces(collector.endpoint, "half \ud83d <script>")
    traces.began(1, 1, time.time())
    with pytest.raises(ValueError, match="x"):
        steps = traces.timed(failing("x\ud83d" * 100_000), (1, 1), "processing")
        step = next(steps)
        try:
            step()
        except ValueError as error:
            steps.throw(error)
    traces.tasks(1, 1, "processing", [])
    from framework.observe.journal import AttemptRecord

    traces.closed(1, AttemptRecord(attempt_id=1, epoch=1, started_at=time.time(), outcome="committed"))
    traces.close()
    assert collector.resources[0]["ratchet.topology"] == "half \\ud83d <script>"
    assert max(len(each.status.message) for each in collector.spans) <= 10_000


def failing(text: str) -> Any:
    def step() -> None:
        raise ValueError(text)

    yield step


def test_the_spans_of_one_attempt_are_bounded(collector: Collector) -> None:
    from framework.execution.ports import TaskTime
    from framework.observe.journal import AttemptRecord

    traces = TransactionTraces(collector.endpoint, "wide")
    now = time.time()
    traces.began(1, 1, now)
    for _ in range(3):
        traces.tasks(1, 1, "processing", [TaskTime(f"read {task} of 400", now, now, "") for task in range(400)])
    record = AttemptRecord(attempt_id=1, epoch=1, started_at=now, processing_ms=1, waiting_ms=1, commit_ms=1)
    traces.closed(1, record)
    traces.close()
    assert sum(each.name.startswith("task") for each in collector.spans) == PARTS_MAX


def test_what_is_in_flight_when_the_leadership_ends_is_left_to_the_next_leader(collector: Collector) -> None:
    traces = TransactionTraces(collector.endpoint, "words")
    traces.began(5, 1, time.time())
    traces.forget_open()
    traces.close()
    (span,) = collector.spans
    assert (attributes(span)["ratchet.txid"], span.status.message) == (5, "left to the next leader")


@pytest.mark.parametrize("trouble", ["nobody listens", "it refuses", "it hangs"])
def test_a_broken_collector_delays_no_transaction_and_is_one_warning(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, trouble: str
) -> None:
    monkeypatch.setattr(tracing, "_SEND_S", 5.0)
    monkeypatch.setattr(tracing, "_CLOSING_MS", 2_000)
    endpoint = f"http://127.0.0.1:{free_port()}/v1/traces" if trouble == "nobody listens" else collector.endpoint
    collector.answer = 400
    if trouble == "it hangs":
        collector.hang.clear()
    others: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = others.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with structlog.testing.capture_logs() as logs:
            with started(tmp_path, endpoint, name) as run:
                run.wait_until_caught_up(PATIENCE_S)
                assert run.status().committed_txid == 3
            if trouble == "it refuses":
                wait_for(lambda: unsent(logs, name), what="the warning")
    finally:
        logging.getLogger().removeHandler(handler)
    assert len(unsent(logs, name)) <= 1
    # The SDK would log each failure itself. What earlier tests left behind may log what it likes.
    assert [each.getMessage() for each in others if each.name.startswith(("opentelemetry", "urllib3"))] == []


def unsent(logs: Sequence[MutableMapping[str, Any]], topology: str) -> list[Any]:
    """The warnings of this topology: the sender of an earlier one may end later than its run."""
    found = [each for each in logs if each["event"] == "traces.unsent" and each["log_level"] == "warning"]
    return [each for each in found if each["topology"] == topology]


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x/v1", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no URL: write http://HOST:4318/v1/traces"):
        started(tmp_path, endpoint)


def test_a_password_in_the_endpoint_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a password in it") as refused:
        started(tmp_path, "http://me:s3cret@collector:4318/v1/traces")
    assert "s3cret" not in str(refused.value)


def test_without_the_extra_it_says_what_to_install_and_without_the_key_nothing_is_loaded() -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from framework.errors import ConfigError
from framework import Fields, TransactionalTopologyBuilder, submit
from framework.transactions import MemoryStore
from sinks import Count, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
def topology():
    builder = TransactionalTopologyBuilder("t", "s", OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(w=str), 1))
    state = OpaqueMapState(MemoryBackend("words"))
    builder.set_bolt("c", StateCommitter(state, ["w"], {"n": Count()})).global_grouping("s")
    return builder.build()
with submit(topology(), {}, MemoryStore(), "local") as run:
    run.wait_until_caught_up(240)
print([name for name in sys.modules if name.startswith("opentelemetry") and sys.modules[name] is not None])
try:
    submit(topology(), {"tracing.otlp.endpoint": "http://127.0.0.1:9/v1/traces"}, MemoryStore(), "local")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded, _, advice = done.stdout.partition("\n")
    assert loaded == "[]", done.stderr
    assert "pip install 'ratchet-pipelines[otel]'" in advice
