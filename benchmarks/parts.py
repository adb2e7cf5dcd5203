"""Where the time of a transaction goes: the driver's calls, timed while W2 runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from framework.execution.spark.batch_executor import SparkExecutor
from framework.execution.spark.resident_task import ResidentTask, Work
from framework.transactions.commit import CommitPhase
from framework.transactions.document_writer import TopologyDocuments
from spouts.kafka.planning.planner import KafkaPlanner

#: In the order in which a transaction goes through them. ``gap``: from the end of the last
#: transaction until the plan begins that finds records. ``emit``: the write that closes the last
#: transaction and emits this one; ``close``: a write that only closes. ``send``: a message to
#: Spark's task and its answer, without the task's own time. ``between``: everything else, which is
#: mostly one thread of the driver waking another.
PARTS = ("gap", "plan", "emit", "send", "task", "confirm", "raise", "apply", "finish", "close", "between")


class Used(NamedTuple):
    """What a call took, in seconds: of time, of that on a processor, and of that in the queue for
    one. The rest is waiting: for an answer, the disk, a lock, or Python's interpreter lock."""

    all_s: float
    processor_s: float = 0.0
    queue_s: float = 0.0

    def split(self) -> dict[str, float]:
        """Kind -> seconds."""
        waited = max(self.all_s - self.processor_s - self.queue_s, 0.0)
        return {"processor": self.processor_s, "queue": self.queue_s, "wait": waited}


class _Meter:
    """What this thread has used since it was made."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._processor_s, self._queue_s = time.thread_time(), _queued_s()

    def used(self) -> Used:
        processor_s, queue_s = time.thread_time() - self._processor_s, _queued_s() - self._queue_s
        return Used(time.monotonic() - self.began_s, processor_s, queue_s)


def _queued_s(thread: int | None = None) -> float:
    """How long a thread of this process, or this one, has waited for a processor. 0 where the
    kernel does not say."""
    place = "/proc/thread-self" if thread is None else f"/proc/self/task/{thread}"
    try:
        return int(Path(place, "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass(frozen=True)
class _Timed:
    """Work in the task that also returns what it took."""

    work: Work

    def __call__(self, message: Any) -> Any:
        meter = _Meter()
        answer = self.work(message)
        return answer, meter.used()


@dataclass
class _Row:
    """One transaction. ``ms``: part -> milliseconds. ``kinds``: (part, kind) -> milliseconds.
    ``garbage``: those that the driver's collector took, in whatever part."""

    ms: dict[str, float]
    kinds: dict[tuple[str, str], float]
    garbage: float

    @property
    def cycle(self) -> float:
        return sum(self.ms.values()) - self.ms["gap"]


@dataclass
class Trace:
    """``rows``: one per transaction."""

    rows: list[_Row] = field(default_factory=list)
    _spans: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _kinds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    _garbage_s: float = 0.0
    _collecting_s: float = 0.0
    _began_s: float | None = None
    _closed_s: float | None = None
    _done_s: float = 0.0
    #: The driver's own thread and the planner's, and how long each has been in the queue.
    _threads: dict[int, float] = field(default_factory=dict)

    def seen_here(self) -> None:
        """This thread is one of those that wake each other."""
        self._threads.setdefault(threading.get_native_id(), _queued_s())

    def took(self, part: str, used: Used) -> None:
        self._spans[part] += used.all_s
        for kind, seconds in used.split().items():
            self._kinds[(part, kind)] += seconds
        if part in ("apply", "finish"):
            self._done_s = time.monotonic()

    def collecting(self, phase: str, info: Any) -> None:
        """For ``gc.callbacks``."""
        if phase == "start":
            self._collecting_s = time.monotonic()
        else:
            self._garbage_s += time.monotonic() - self._collecting_s

    def planned(self, began_s: float) -> None:
        if self._began_s is not None:  # the last one will be closed together with this one
            self.closed(self._done_s)
        self._spans, self._kinds, self._garbage_s = defaultdict(float), defaultdict(float), 0.0
        self._began_s = began_s
        if self._closed_s is not None:
            self._spans["gap"] = began_s - self._closed_s

    def closed(self, now: float) -> None:
        if self._began_s is not None:
            known = sum(seconds for part, seconds in self._spans.items() if part != "gap")
            between_s = self._spans["between"] = max(now - self._began_s - known, 0.0)
            queued_s = min(max(self._newly_queued_s(), 0.0), between_s)
            self._kinds[("between", "queue")], self._kinds[("between", "wait")] = queued_s, between_s - queued_s
            kinds = {each: seconds * 1000 for each, seconds in self._kinds.items()}
            self.rows.append(_Row({part: self._spans[part] * 1000 for part in PARTS}, kinds, self._garbage_s * 1000))
        self._closed_s, self._began_s = now, None

    def _newly_queued_s(self) -> float:
        """How long those threads were in the queue since the last transaction, outside of calls."""
        now = {thread: _queued_s(thread) for thread in self._threads}
        queued_s = sum(now.values()) - sum(self._threads.values())
        self._threads = now
        return queued_s - sum(self._kinds[(part, "queue")] for part in ("plan", "emit", "close"))

    def summary(self, *, without_first: int = 0) -> dict[str, dict[str, float]]:
        """Part -> its milliseconds per transaction: mean and percentiles."""
        rows = self.rows[without_first:]
        found = {part: [row.ms[part] for row in rows] for part in PARTS}
        found["cycle"] = [row.cycle for row in rows]
        found["task_processor"] = [row.kinds.get(("task", "processor"), 0.0) for row in rows]
        found["queue"] = [sum(ms for (_, kind), ms in row.kinds.items() if kind == "queue") for row in rows]
        found["garbage"] = [row.garbage for row in rows]
        return {
            part: {
                "mean": round(sum(values) / len(values), 2),
                **{f"p{each}": round(sorted(values)[len(values) * each // 100], 2) for each in (50, 95, 99)},
                "max": round(max(values), 2),
            }
            for part, values in found.items()
            if values
        }

    def tail(self, *, without_first: int = 0) -> dict[str, Any]:
        """What makes the slowest hundredth of the transactions slow. A cause is a part, and whether
        it was on a processor, in the queue for one, or waiting. ``chief_of``: of how many it is the
        largest cause. ``ms``: what it adds to the median of that part, on average over all of them.
        ``garbage_ms``: of the driver's collector, which is in the other causes. ``first_ms``: what
        the first transactions of the run took."""
        rows = self.rows[without_first:]
        causes = sorted({cause for row in rows for cause in row.kinds if cause[0] != "gap"})
        usual = {cause: statistics.median(row.kinds.get(cause, 0.0) for row in rows) for cause in causes}
        slow = sorted(rows, key=lambda row: -row.cycle)[: max(len(rows) // 100, 1)]
        more = [{cause: row.kinds.get(cause, 0.0) - usual[cause] for cause in causes} for row in slow]
        chiefs = Counter(max(each, key=lambda cause: each[cause]) for each in more)
        mean = {cause: sum(each[cause] for each in more) / len(slow) for cause in causes}
        return {
            "transactions": len(slow),
            "of": len(rows),
            "from_ms": round(slow[-1].cycle, 1),
            "median_ms": round(statistics.median(row.cycle for row in rows), 1),
            "first_ms": [round(row.cycle, 1) for row in self.rows[:5]],
            "garbage_ms": round(sum(row.garbage for row in slow) / len(slow), 2),
            "causes": [
                {"part": part, "kind": kind, "chief_of": chiefs[(part, kind)], "ms": round(mean[(part, kind)], 1)}
                for part, kind in sorted(causes, key=lambda cause: -mean[cause])
                if mean[(part, kind)] >= 0.5 or (part, kind) in chiefs
            ],
        }


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
        gc.callbacks.append(trace.collecting)
        undo.callback(gc.callbacks.remove, trace.collecting)
        yield trace


def _timed(trace: Trace, part: str, call: Any) -> Any:
    @functools.wraps(call)
    def timed(*arguments: Any, **named: Any) -> Any:
        meter = _Meter()
        try:
            return call(*arguments, **named)
        finally:
            trace.took(part, meter.used())

    return timed


def _plan(trace: Trace, call: Any) -> Any:
    @functools.wraps(call)
    def plan(self: Any, previous: Any) -> Any:
        meter = _Meter()
        made = call(self, previous)
        trace.seen_here()
        if made is not None:
            trace.planned(meter.began_s)
            trace.took("plan", meter.used())
        return made

    return plan


def _save(trace: Trace, call: Any) -> Any:
    @functools.wraps(call)
    def save(self: Any, change: Any, record: Any = None) -> Any:
        meter = _Meter()
        saved = call(self, change, record)
        trace.seen_here()
        trace.took("emit" if change.plans else "close", meter.used())
        if not change.plans and change.currtx is not None:
            trace.closed(time.monotonic())
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
        meter = _Meter()
        answered = call(self, attempt, message)
        if answered is None:
            return None
        answer, task = answered
        trace.took("task", task)
        here = meter.used()
        trace.took("send", Used(max(here.all_s - task.all_s, 0.0), here.processor_s, here.queue_s))
        return answer

    return run
