"""The documents that the page shows, made from a run and from the coordination store."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from framework.config import Config
from framework.observe.journal import AttemptRecord, TransactionRecord

#: The most failed attempts that are listed, the latest first.
FAILURES_SHOWN = 50
#: The most characters of a reason in a list; the transaction's own document has the whole text.
REASON_MAX = 500
#: The number of last transactions over which the rows of an edge are summed.
EDGES_OVER = 100
#: The same for a core topology, in seconds.
FLOW_S = 30.0
#: The number of partitions with the longest lag that are listed. All others are only drawn.
WORST_SHOWN = 20
#: The most partitions of one transaction that are listed.
PLAN_SHOWN = 1_000
#: The most characters of a trace, from its end.
TRACE_MAX = 20_000

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """The state of one topology at one time. ``parts``: documents by name; a viewer gets the
    changed ones. ``closed``: the closed transactions, oldest first."""

    parts: Mapping[str, Any]
    closed: Sequence[TransactionRecord] = field(default=())


class Source(Protocol):
    """A data source of the page. Every method may block and raise: it is called in threads for
    which no viewer waits."""

    @property
    def title(self) -> str:
        """The subject of the page: a topology, or a root of ZooKeeper."""

    @property
    def every_s(self) -> float:
        """The least number of seconds between two reads."""

    def topologies(self) -> list[Document]:
        """One document for each topology, as ``TopologyOverview.document`` makes it."""

    def topology(self, topology_id: str) -> View | None:
        """One topology; None if it does not exist."""

    def transaction(self, topology_id: str, txid: int) -> Document | None:
        """All data about a transaction; None when it is not kept."""


def driver_document(
    *, host: str, pid: int, phase: str, started_at: float, said_at: float, page: str | None = None
) -> Document:
    """A driver, as in ``TopologyOverview.document``. ``page``: the URL of its own page."""
    safe = page if page is not None and page.startswith(("http://", "https://")) else None
    return {"host": host, "pid": pid, "phase": phase, "started_at": started_at, "said_at": said_at, "page": safe}


def row(record: TransactionRecord) -> list[Any]:
    """A transaction in the form for the time line; ``ROW`` names the columns. Times in
    milliseconds, ``closed_at`` in seconds since the epoch; ``oldest_age_ms``: the age of its oldest
    record when it was closed, if records have times."""
    last = record.attempts[-1] if record.attempts else None
    closed_at = record.closed_at
    reasons = [each.reason for each in record.attempts if each.reason]
    # 0, -1: the record has no time
    oldest_ms = last.oldest_ms if last is not None and (last.oldest_ms or 0) > 0 else None
    return [
        record.txid,
        _rounded(closed_at, 3),
        record.attempts_total,
        *(
            (last.source_rows, last.bad_records, last.processing_ms, last.waiting_ms, last.commit_ms)
            if last is not None
            else (0, 0, None, None, None)
        ),
        None if oldest_ms is None or closed_at is None else max(round(closed_at * 1000) - oldest_ms, 0),
        reasons[-1][:80] if reasons else "",
    ]


ROW = (
    "txid",
    "closed_at",
    "attempts",
    "rows",
    "bad",
    "processing_ms",
    "waiting_ms",
    "commit_ms",
    "oldest_age_ms",
    "reason",
)


def edges(closed: Sequence[TransactionRecord]) -> Document:
    """Rows over each edge and milliseconds in each component: of the last transaction, and of the
    last ``EDGES_OVER``, which took ``seconds`` from the first start to the last end."""
    recent = closed[-EDGES_OVER:]
    last_attempts = [each.attempts[-1] for each in recent if each.attempts]
    ends = [each.closed_at for each in recent if each.closed_at is not None]
    starts = [each.attempts[0].started_at for each in recent if each.attempts]
    seconds = max(max(ends) - min(starts), 0.0) if ends and starts else 0.0
    return {
        "rows": _last_and_sum([each.rows for each in last_attempts]),
        "busy_ms": _last_and_sum([each.component_ms for each in last_attempts]),
        "transactions": len(recent),
        "seconds": round(seconds, 3),
    }


class Flow:
    """Rows over each edge and milliseconds in each component of a core topology, of the last
    ``FLOW_S`` seconds: in the form of ``edges``."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, float], dict[str, float]]] = deque()
        self._lock = threading.Lock()

    def look(self, status: Mapping[str, Any]) -> Document:
        """Add a sample. ``status``: the ``summary()`` of the run, possibly of another version, or
        of a driver whose counters have restarted from 0."""
        now, rows = time.monotonic(), _numbers(status.get("edges"))
        components = status.get("components")
        known = components.items() if isinstance(components, Mapping) else ()
        busy_s = _numbers({name: each.get("busy_s") for name, each in known if isinstance(each, Mapping)})
        with self._lock:
            looks = self._looks
            if looks and any(rows.get(label, 0) < count for label, count in looks[-1][1].items()):
                looks.clear()
            looks.append((now, rows, busy_s))
            while len(looks) > 2 and looks[1][0] <= now - FLOW_S:
                looks.popleft()
            since, rows_then, busy_then = looks[0]
        busy_ms = {name: (seconds - busy_then.get(name, 0)) * 1000 for name, seconds in busy_s.items()}
        return {
            "rows": {label: [None, count - rows_then.get(label, 0)] for label, count in rows.items()},
            "busy_ms": {name: [None, round(max(each, 0.0), 3)] for name, each in busy_ms.items()},
            "transactions": None,
            "seconds": round(now - since, 3),
        }


def _numbers(values: Any) -> dict[str, float]:
    known = values.items() if isinstance(values, Mapping) else ()
    return {str(name): each for name, each in known if isinstance(each, (int, float))}


def _last_and_sum(each_time: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Name -> its last value, and the sum of all."""
    sums: dict[str, float] = defaultdict(float)
    for values in each_time:
        for name, value in values.items():
            sums[name] += value
    last = each_time[-1] if each_time else {}
    return {name: [last.get(name, 0), round(total, 3)] for name, total in sums.items()}


def failures(records: Iterable[TransactionRecord], open_records: Iterable[TransactionRecord] = ()) -> list[Document]:
    """The failed attempts, the latest first. Attempts at one transaction that failed for the same
    reason are one entry: ``attempts`` is their number, ``attempt`` the last one. Attempts that were
    cancelled because an earlier transaction failed are left out."""
    found: list[Document] = []
    for record in reversed([*records, *open_records]):
        before: AttemptRecord | None = None
        for attempt in reversed(record.attempts):
            if attempt.outcome not in ("failed", "rolled back"):
                continue
            if before is not None and (before.outcome, before.reason) == (attempt.outcome, attempt.reason):
                found[-1]["attempts"] += 1
            elif len(found) == FAILURES_SHOWN:
                return found
            else:
                found.append(
                    {
                        "txid": record.txid,
                        "attempt": attempt.attempt_id,
                        "attempts": 1,
                        "at": _rounded(attempt.started_at, 3),
                        "outcome": attempt.outcome,
                        "reason": shortened(attempt.reason, REASON_MAX),
                    }
                )
            before = attempt
    return found


def transaction_document(record: TransactionRecord, traces: Mapping[int, str] | None = None) -> Document:
    """The complete document of a transaction. ``traces``: attempt -> the trace of its failure."""
    traces = traces or {}
    return {
        "txid": record.txid,
        "plan_digest": record.plan_digest,
        "attempts_total": record.attempts_total,
        "attempts": [
            {**_attempt_document(each), "trace": traces.get(each.attempt_id, "")[-TRACE_MAX:]}
            for each in record.attempts
        ],
        "partitions": len(record.plan),
        "plan": [
            [partition, {str(key): value for key, value in meta.items()} if isinstance(meta, Mapping) else str(meta)]
            for partition, meta in islice(record.plan.items(), PLAN_SHOWN)
        ],
    }


def _attempt_document(attempt: AttemptRecord) -> Document:
    document = {name: getattr(attempt, name) for name in AttemptRecord.__slots__}
    rows, busy_ms = dict(attempt.rows), dict(attempt.component_ms)
    return {**document, "rows": rows, "component_ms": busy_ms, "reason": shortened(attempt.reason, TRACE_MAX)}


def partitions(lags: Mapping[str, tuple[int | None, int, int, int]]) -> Document:
    """``lags``: partition -> lag, committed offset, offsets in flight, lost records. In the result,
    ``all`` has the lag of each in the order of their names, ``worst`` those with the longest lag.
    """
    known = [(name, each) for name, each in lags.items() if each[0] is not None]
    worst = sorted(known, key=lambda item: -(item[1][0] or 0))[:WORST_SHOWN]
    return {
        "total": len(lags),
        "all": [[name, each[0]] for name, each in sorted(lags.items(), key=lambda item: _natural(item[0]))],
        "worst": [[name, *each] for name, each in worst],
    }


def in_flight(phases: Mapping[Any, str], elapsed_s: Mapping[int, float] | None = None) -> list[Document]:
    """``phases``: txid -> attempt and phase, as a status has it. ``elapsed_s``: txid -> seconds in
    this phase."""
    found = []
    for txid, what in phases.items():
        attempt, _, phase = str(what).partition(" ")
        since_s = (elapsed_s or {}).get(int(txid))
        found.append({"txid": int(txid), "attempt": attempt, "phase": phase, "since_s": _rounded(since_s, 1)})
    return sorted(found, key=lambda each: each["txid"])


def configuration(config: Config) -> list[list[Any]]:
    """Key, value without secrets, whether it was set."""
    return [list(each) for each in config.shown()]


def now() -> float:
    """The page's clock, because the viewer's may be wrong."""
    return round(time.time(), 3)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _natural(name: str) -> tuple[str, int]:
    """A sort key that puts ``words/10`` after ``words/9``."""
    head = name.rstrip("0123456789")
    tail = name[len(head) :]
    return (head, int(tail)) if tail and len(tail) < 12 else (name, -1)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
