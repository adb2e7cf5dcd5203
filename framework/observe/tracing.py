"""Traces of transactions, sent by OTLP. Loaded only by a run that traces; the SDK is in the extra
``otel``.

A trace is one transaction under one leadership::

    transaction                      from its first attempt until it is closed in the store
      attempt 1                      failed
        processing
          task words+count 0 of 2
      attempt 2
        processing
          call process
          task words+count 0 of 2
        waiting
        commit
          call raise header          of each sink
          call commit
          call set done
      call save                      the coordination store

If a commit is one step of its state (ADR 58), the calls are ``check header``, ``commit`` and ``note
done``, of which only ``commit`` sends a request to the store. A save that closes a transaction and
emits the next one is in the traces of both.

Spans of an attempt are made when it ends, from the journal's entries and their times. So a trace
costs its transaction a few microseconds, and nothing waits for a collector: spans that it does not
accept in time are dropped. Source: https://opentelemetry.io/docs/specs/otel/trace/api/.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from framework.errors import ConfigError
from framework.observe.journal import ATTEMPTS_KEPT, AttemptRecord
from framework.observe.wait_log import Waits

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
except ImportError as missing:
    raise ConfigError("tracing.otlp.endpoint needs OpenTelemetry: pip install 'ratchet-pipelines[otel]'") from missing

T = TypeVar("T")
#: Spans that wait to be sent. Further ones are dropped.
QUEUE_MAX = 4_096
#: The most spans of tasks and calls per attempt. For a wide topology, only the first ones are sent.
PARTS_MAX = 500
_TEXT_MAX = 1_000
_SEND_S = 5.0
#: How long the end of a run waits for the collector.
_CLOSING_MS = 2_000
#: Names of steps in traces, and names of the commit's steps that concern one state each.
_CALLS = {"processing_job": "prepare"}
_OF_STATES = {
    "_raise": "raise header",
    "_let_open": "check header",
    "_note_done": "note done",
    "_finish": "set done",
    "_sweep": "sweep",
    "_publish": "publish",
    "_purge": "purge",
    "_undo": "undo",
    "_mark_rolled_back": "mark rolled back",
}


class TimedTask(Protocol):
    """An executor's report about a task. Times: seconds since the Unix epoch."""

    @property
    def name(self) -> str: ...
    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...
    @property
    def failed(self) -> str: ...


class Part(NamedTuple):
    """A task or a call. Times: seconds since the Unix epoch. ``phase``: processing, commit or
    rollback. ``state``: the state that the call concerns."""

    phase: str
    name: str
    began: float
    ended: float
    error: str = ""
    state: str = ""


class TransactionTraces:
    """Traces of one run. Safe to use from several threads.

    * ``endpoint``: the URL of the collector, such as ``http://collector:4318/v1/traces``.
    * ``ratio``: the share of transactions that are traced.

    Raises ``ConfigError`` for an endpoint that is no URL."""

    def __init__(self, endpoint: str, topology_id: str, ratio: float = 1.0) -> None:
        _check(endpoint)
        _silence_the_exporter()
        self._provider = TracerProvider(
            sampler=TraceIdRatioBased(ratio),
            resource=Resource.create({"service.name": "ratchet", "ratchet.topology": _text(topology_id)}),
            span_limits=SpanLimits(max_span_attribute_length=_TEXT_MAX),
            shutdown_on_exit=False,
        )
        exporter = _Exporter(endpoint, topology_id)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_MAX))
        self._tracer = self._provider.get_tracer("ratchet")
        self._roots: dict[int, Span] = {}
        self._parts: dict[tuple[int, int], list[Part]] = {}
        self._lock = threading.Lock()

    # --- steps of a transaction -------------------------------------------------------------------

    def began(self, txid: int, attempt_id: int, started_at: float) -> None:
        """An attempt has begun. ``started_at``: seconds since the Unix epoch."""
        with self._lock:
            self._root(txid, started_at)
            self._parts[(txid, attempt_id)] = []
            self._parts.pop((txid, attempt_id - ATTEMPTS_KEPT), None)

    def tasks(self, txid: int, attempt_id: int, phase: str, tasks: Iterable[TimedTask]) -> None:
        """The tasks of a phase have ended."""
        self._add(
            txid, attempt_id, [Part(phase, f"task {each.name}", each.began, each.ended, each.failed) for each in tasks]
        )

    def saved(self, began: float, *, planned: Iterable[int] = (), known: Iterable[int] = ()) -> None:
        """The coordination store has saved a change of these transactions. ``planned``: those that
        begin with it."""
        with self._lock:
            roots = [self._root(txid, began) for txid in planned]
            for root in (*roots, *filter(None, map(self._roots.get, known))):
                self._make(root, Part("", "call save", began, time.time()))

    def timed(
        self,
        steps: Generator[Callable[[], Any], Any, T],
        attempt: tuple[int, int],
        phase: str,
        states: Sequence[str] = (),
    ) -> Generator[Callable[[], Any], Any, T]:
        """Wrap steps, so that each becomes a span of the attempt. ``attempt``: its txid and number.
        ``states``: locations of the states, which steps of a commit name by index."""

        def performed(step: Callable[[], Any]) -> Any:
            called = step.func if isinstance(step, partial) else step
            name = getattr(called, "__name__", type(called).__name__)
            state = states[step.args[0]] if states and isinstance(step, partial) and name in _OF_STATES else ""
            name = _OF_STATES.get(name) or _CALLS.get(name, name)
            began, failed = time.time(), ""
            try:
                return step()
            except BaseException as error:
                failed = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._add(*attempt, [Part(phase, f"call {name}", began, time.time(), error=failed, state=state)])

        try:
            step = next(steps)
            while True:
                try:
                    answer = yield partial(performed, step)
                except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _add(self, txid: int, attempt_id: int, parts: Sequence[Part]) -> None:
        with self._lock:
            known = self._parts.get((txid, attempt_id))
            if known is not None:
                known.extend(parts[: max(PARTS_MAX - len(known), 0)])

    def ended(self, txid: int, attempt: AttemptRecord | None) -> None:
        """An attempt has ended, with this record."""
        if attempt is None:
            return
        with self._lock:
            parts = self._parts.pop((txid, attempt.attempt_id), None)
            root = self._roots.get(txid)
            if root is None or parts is None or not root.is_recording():
                return
            self._attempt(root, attempt, parts)

    def closed(self, txid: int, attempt: AttemptRecord | None) -> None:
        """The store has closed the transaction."""
        self.ended(txid, attempt)
        with self._lock:
            root = self._roots.pop(txid, None)
            if root is not None:
                if attempt is not None:
                    root.set_attributes({"ratchet.rows": attempt.source_rows, "ratchet.attempt": attempt.attempt_id})
                root.end()

    def forget_open(self) -> None:
        """The leadership has ended: the transactions in flight are now the next leader's."""
        with self._lock:
            for root in self._roots.values():
                root.set_status(Status(StatusCode.ERROR, "left to the next leader"))
                root.end()
            self._roots.clear()
            self._parts.clear()

    def close(self) -> None:
        """Send the waiting spans, within a time limit, and end the sending thread."""
        self.forget_open()
        closing = threading.Thread(target=self._close, name="ratchet-traces-close", daemon=True)
        closing.start()
        closing.join(_CLOSING_MS / 1000)  # a collector that hangs delays nothing

    def _close(self) -> None:
        self._provider.force_flush(_CLOSING_MS)
        self._provider.shutdown()

    # --- spans, with the lock held ----------------------------------------------------------------

    def _root(self, txid: int, began: float) -> Span:
        known = self._roots.get(txid)
        if known is None:
            known = self._roots[txid] = self._tracer.start_span(
                "transaction", attributes={"ratchet.txid": txid}, start_time=_ns(began), kind=SpanKind.CONSUMER
            )
        return known

    def _attempt(self, root: Span, attempt: AttemptRecord, parts: Sequence[Part]) -> None:
        now, began = time.time(), attempt.started_at
        span = self._start(root, f"attempt {attempt.attempt_id}", began)
        span.set_attributes(
            {
                "ratchet.attempt": attempt.attempt_id,
                "ratchet.epoch": attempt.epoch,
                "ratchet.outcome": attempt.outcome,
                "ratchet.rows": attempt.source_rows,
                "ratchet.bytes": attempt.source_bytes,
                "ratchet.bad_records": attempt.bad_records,
            }
        )
        phases: dict[str, Span] = {}
        for name, took_ms in (
            ("processing", attempt.processing_ms),
            ("waiting", attempt.waiting_ms),
            ("commit", attempt.commit_ms),
        ):
            ended = now if took_ms is None else began + took_ms / 1000
            phases[name] = self._start(span, name, began)
            for part in parts:
                if part.phase == name:
                    self._make(phases[name], part)
            if took_ms is None:
                phases[name].set_status(Status(StatusCode.ERROR, _text(attempt.reason)))
            phases[name].end(_ns(ended))
            began = ended
            if took_ms is None:
                break  # the attempt did not get further
        for part in parts:
            if part.phase not in phases:
                self._make(span, part)
        if attempt.outcome != "committed":
            span.set_status(Status(StatusCode.ERROR, _text(attempt.reason)))
        span.end(_ns(max(began, now) if attempt.outcome != "committed" else began))

    def _make(self, parent: Span, part: Part) -> None:
        span = self._start(parent, part.name, part.began)
        if part.error:
            span.set_status(Status(StatusCode.ERROR, _text(part.error)))
        if part.state:
            span.set_attribute("ratchet.state", _text(part.state))
        span.end(_ns(part.ended))

    def _start(self, parent: Span, name: str, began: float) -> Span:
        return self._tracer.start_span(_text(name), context=set_span_in_context(parent), start_time=_ns(began))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _text(text: str) -> str:
    """A text that protobuf accepts: without halves of surrogate pairs, and not too long."""
    return text[:_TEXT_MAX].encode("utf-8", "backslashreplace").decode()


class _Exporter(SpanExporter):
    """Sends spans. Warns once when the collector begins to refuse them, and once when it accepts
    them again."""

    def __init__(self, endpoint: str, topology_id: str) -> None:
        self._inner = OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S)
        self._endpoint = endpoint
        self._waits = Waits(topology=topology_id)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - nothing depends on it
            self._waits.again("traces.unsent", f"{type(error).__name__} at {self._endpoint}")
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._waits.over()
        else:
            self._waits.again("traces.unsent", f"{self._endpoint} does not take them")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = _CLOSING_MS) -> bool:
        return self._inner.force_flush(timeout_millis)


def _check(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.username or parts.password:
        raise ConfigError(
            "tracing.otlp.endpoint has a password in it: give it by OTEL_EXPORTER_OTLP_HEADERS in the environment"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"tracing.otlp.endpoint {endpoint!r} is no URL: write http://HOST:4318/v1/traces")


def _silence_the_exporter() -> None:
    """Silence the SDK, which would log each failure with a trace: ``_Exporter`` logs already."""
    for name in ("opentelemetry.exporter", "opentelemetry.sdk.trace.export"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
