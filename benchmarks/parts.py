"""Where the time of a transaction goes: the driver's calls, timed while W2 runs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from framework.execution.spark.batches import SparkExecutor
from framework.execution.spark.resident import ResidentTask, Work
from framework.transactions.commit import CommitPhase
from framework.transactions.documents import TopologyDocuments
from spouts.kafka.planner import KafkaPlanner

#: In the order in which a transaction goes through them. ``gap``: from the end of the last
#: transaction until the plan begins that finds records. ``emit``: the write that closes the last
#: transaction and emits this one; ``close``: a write that only closes. ``send``: a message to
#: Spark's task and its answer, without the task's own time. ``between``: everything else, which is
#: mostly one thread of the driver waking another.
PARTS = ("gap", "plan", "emit", "send", "task", "confirm", "raise", "apply", "finish", "close", "between")


@dataclass(frozen=True)
class _Timed:
    """Work in the task that also returns what it took, in seconds of time and of processor."""

    work: Work

    def __call__(self, message: Any) -> Any:
        began, used = time.monotonic(), time.process_time()
        answer = self.work(message)
        return answer, time.monotonic() - began, time.process_time() - used


@dataclass
class Trace:
    """``rows``: one per transaction, part -> milliseconds. ``task_cpu_ms``: the processor time of
    the task, likewise."""

    rows: list[dict[str, float]] = field(default_factory=list)
    task_cpu_ms: list[float] = field(default_factory=list)
    _spans: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _began_s: float | None = None
    _closed_s: float | None = None
    _done_s: float = 0.0

    def took(self, part: str, seconds: float) -> None:
        self._spans[part] += seconds
        if part in ("apply", "finish"):
            self._done_s = time.monotonic()

    def planned(self, began_s: float) -> None:
        if self._began_s is not None:  # the last one will be closed together with this one
            self.closed(self._done_s)
        self._spans = defaultdict(float)
        self._began_s = began_s
        if self._closed_s is not None:
            self._spans["gap"] = began_s - self._closed_s

    def closed(self, now: float) -> None:
        if self._began_s is not None:
            known = sum(seconds for part, seconds in self._spans.items() if part != "gap")
            self._spans["between"] = now - self._began_s - known
            self.rows.append({part: self._spans[part] * 1000 for part in PARTS})
        self._closed_s, self._began_s = now, None

    def summary(self, *, without_first: int = 0) -> dict[str, dict[str, float]]:
        """Part -> its milliseconds per transaction: mean and percentiles."""
        rows = self.rows[without_first:]
        found = {part: sorted(row[part] for row in rows) for part in PARTS}
        found["cycle"] = sorted(sum(row.values()) - row["gap"] for row in rows)
        found["task_cpu"] = sorted(self.task_cpu_ms[without_first:])
        return {
            part: {
                "mean": round(sum(values) / len(values), 2),
                **{f"p{each}": round(values[len(values) * each // 100], 2) for each in (50, 95, 99)},
                "max": round(values[-1], 2),
            }
            for part, values in found.items()
            if values
        }

    def slowest(self, *, without_first: int = 0, share: float = 0.01) -> list[dict[str, float]]:
        """The slowest transactions, slowest first: what each took more than the median, by part,
        from 1 ms. ``txid`` is its number in the run, ``cycle`` all of it."""
        rows = self.rows[without_first:]
        usual = {part: sorted(row[part] for row in rows)[len(rows) // 2] for part in PARTS}
        totals = {number: sum(row.values()) - row["gap"] for number, row in enumerate(rows, without_first + 1)}
        shown = sorted(totals, key=lambda number: -totals[number])[: max(round(len(rows) * share), 1)]
        return [
            {
                "txid": number,
                "cycle": round(totals[number], 1),
                **{
                    part: round(more, 1)
                    for part in PARTS
                    if part != "gap" and (more := self.rows[number - 1][part] - usual[part]) >= 1
                },
            }
            for number in shown
        ]


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """Time the calls of all runs that are made inside. Only for one run at a time with one
    transaction in flight."""
    trace = Trace()
    with contextlib.ExitStack() as undo:
        for owner, name, wrapped in (
            (KafkaPlanner, "plan", _plan(trace, KafkaPlanner.plan)),
            (KafkaPlanner, "confirm", _timed(trace, "confirm", KafkaPlanner.confirm)),
            (TopologyDocuments, "save", _save(trace, TopologyDocuments.save)),
            (CommitPhase, "_raise", _timed(trace, "raise", CommitPhase._raise)),
            (CommitPhase, "_finish", _timed(trace, "finish", CommitPhase._finish)),
            (SparkExecutor, "commit", _timed(trace, "apply", SparkExecutor.commit)),
            (ResidentTask, "__init__", _init(ResidentTask.__init__)),
            (ResidentTask, "run", _run(trace, ResidentTask.run)),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, wrapped)
        yield trace


def _timed(trace: Trace, part: str, call: Any) -> Any:
    @functools.wraps(call)
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*arguments, **named)
        finally:
            trace.took(part, time.monotonic() - began)

    return timed


def _plan(trace: Trace, call: Any) -> Any:
    @functools.wraps(call)
    def plan(self: Any, previous: Any) -> Any:
        began = time.monotonic()
        made = call(self, previous)
        if made is not None:
            trace.planned(began)
            trace.took("plan", time.monotonic() - began)
        return made

    return plan


def _save(trace: Trace, call: Any) -> Any:
    @functools.wraps(call)
    def save(self: Any, change: Any, record: Any = None) -> Any:
        began = time.monotonic()
        saved = call(self, change, record)
        now = time.monotonic()
        trace.took("emit" if change.plans else "close", now - began)
        if not change.plans and change.currtx is not None:
            trace.closed(now)
        return saved

    return save


def _init(call: Any) -> Any:
    @functools.wraps(call)
    def init(self: Any, *arguments: Any, work: Work, **named: Any) -> None:
        call(self, *arguments, work=_Timed(work), **named)

    return init


def _run(trace: Trace, call: Any) -> Any:
    @functools.wraps(call)
    def run(self: Any, attempt: Any, message: Any) -> Any:
        began = time.monotonic()
        answered = call(self, attempt, message)
        if answered is None:
            return None
        answer, task_s, task_cpu_s = answered
        trace.took("task", task_s)
        trace.took("send", time.monotonic() - began - task_s)
        trace.task_cpu_ms.append(task_cpu_s * 1000)
        return answer

    return run
