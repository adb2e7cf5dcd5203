"""Parts of the contract suite of backends: values of every type, the driver's part of a commit, a
backend that fails."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from framework.errors import CommitOutcomeUnknown, RetryableError
from framework.topology import CommitFence, Fields, Header, OpenCommit, Reach, TransactionAttempt
from sinks.aggregates import Aggregate, Count, Max, Min, Sum
from sinks.backend import Key, MapBackend, Row
from sinks.states import MapState, NonTransactionalMapState, OpaqueMapState, TransactionalMapState

DIGEST = "digest"
STATES: list[type[MapState]] = [NonTransactionalMapState, TransactionalMapState, OpaqueMapState]
AGGREGATES = {"count": Count(), "total": Sum("n"), "least": Min("n"), "most": Max("n")}
KEY, VALUE = Fields(word=str), Fields(n=int)
WIDE = Fields(count=int, total=int, least=int, most=int)
AWKWARD = ["", "ß", 'it\'s "quoted"', "a\\b\tc\nd\re", "\\N", "NULL", "a,b;c", "\\.", "{}:[]"]
#: For every type that fields can have: a first value, and a value to replace it.
EVERY_TYPE: Mapping[str, tuple[pa.DataType, Sequence[Any]]] = {
    "truth": (pa.bool_(), [True, False]),
    "tiny": (pa.int8(), [-128, 127]),
    "big": (pa.int64(), [-(2**63), 2**63 - 1]),
    "unsigned": (pa.uint32(), [0, 2**32 - 1]),
    "huge": (pa.uint64(), [2**64 - 1, 0]),
    "single": (pa.float32(), [0.5, -1.25]),
    "real": (pa.float64(), [0.1, -1.7976931348623157e308]),
    "boundless": (pa.float64(), [float("inf"), float("-inf")]),
    "text": (pa.string(), AWKWARD),
    "long_text": (pa.large_string(), ["x" * 10_000, ""]),
    "raw": (pa.binary(), [b"", b"\x00\xff'\\"]),
    "day": (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)]),
    "moment": (
        pa.timestamp("us", tz="UTC"),
        [
            datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
            datetime.datetime(2026, 2, 28, 23, 59, 59, 999999, datetime.UTC),
        ],
    ),
    "local": (pa.timestamp("ms"), [datetime.datetime(2000, 2, 29, 12), datetime.datetime(1969, 12, 31, 1, 2, 3, 4000)]),
    "clock": (pa.time64("us"), [datetime.time(0), datetime.time(23, 59, 59, 999999)]),
    "span": (pa.duration("us"), [datetime.timedelta(days=-3, microseconds=1), datetime.timedelta(days=40000)]),
    "exact": (
        pa.decimal128(38, 18),
        [Decimal("0.000000000000000001"), Decimal("-99999999999999999999.500000000000000000")],
    ),
}


def open_attempt(state: MapState, txid: int, attempt: int, epoch: int = 1, task: int = 0) -> TransactionAttempt:
    """Do the driver's part before the commit tasks. Returns the attempt for a task."""
    header = state.prepare("topology")
    state.raise_header(header, header.opened(epoch, OpenCommit(txid, attempt, DIGEST)))
    return TransactionAttempt(txid, attempt, CommitFence("topology", epoch, DIGEST, f"bolt:{task}"))


def to_commit_in_one_step(state: MapState, txid: int, attempt: int, epoch: int = 1) -> TransactionAttempt:
    """The attempt for the only task of a commit in one step, which raises the header itself."""
    fence = CommitFence("topology", epoch, DIGEST, "bolt:0", opens_from=state.prepare("topology"))
    return TransactionAttempt(txid, attempt, fence)


def finish(state: MapState, *, replay: bool = False) -> None:
    """Do the driver's part after the commit tasks."""
    header = state.read_header()
    assert header.open is not None
    if replay and isinstance(state, OpaqueMapState):
        state.sweep(header)
    state.raise_header(header, header.finished(header.open.txid))


def add(amount: int) -> Any:
    return lambda old: (old or 0) + amount


def transact(
    state: MapState, txid: int, attempt: int, amounts: Mapping[Any, int], *, replay: bool = False, epoch: int = 1
) -> None:
    """A whole commit: add amounts to keys."""
    granted = open_attempt(state, txid, attempt, epoch)
    state.begin_commit(granted)
    state.multi_update(list(amounts), [add(amount) for amount in amounts.values()])
    state.commit(granted)
    finish(state, replay=replay)


class Faulty(MapBackend):
    """A backend whose call number ``fails_at`` fails: before it has any effect or, with ``after``,
    afterwards, so that only the answer is lost."""

    def __init__(self, inner: MapBackend) -> None:
        self.inner = inner
        self.calls = 0
        self.fails_at: int | None = None
        self.after = False
        self.commits_in_one_step = inner.commits_in_one_step
        self._counter = self

    def for_one_step(self, opens_from: Header) -> MapBackend:
        other = copy.copy(self)
        other.inner = self.inner.for_one_step(opens_from)
        return other

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        counter = self._counter
        fails = counter.calls == counter.fails_at
        counter.calls += 1
        if fails and not counter.after:
            raise RetryableError("no answer, nothing done")
        answer = getattr(self.inner, name)(*arguments, **options)
        if fails:
            raise CommitOutcomeUnknown("the answer was lost")
        return answer

    @property
    def reach(self) -> Reach:  # type: ignore[override]
        return self.inner.reach

    @property
    def location(self) -> str:
        return self.inner.location

    @property
    def fields(self) -> tuple[Fields, Fields]:
        return self.inner.fields

    @property
    def value_columns(self) -> int:
        return self.inner.value_columns

    def bind(self, key: Fields, value: Fields) -> None:
        self.inner.bind(key, value)

    def prepare(self, topology_id: str) -> Header:
        return self.inner.prepare(topology_id)

    def read_header(self) -> Header:
        header: Header = self._call("read_header")
        return header

    def raise_header(self, expected: Header, new: Header) -> None:
        self._call("raise_header", expected, new)

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        rows: list[Row | None] = self._call("multi_get", keys)
        return rows

    def scan(self) -> Iterator[tuple[Key, Row]]:
        return self.inner.scan()

    def multi_put(self, *arguments: Any) -> None:
        self._call("multi_put", *arguments)

    def sweep(self, header: Header) -> int:
        count: int = self._call("sweep", header)
        return count

    def roll_back(self, header: Header) -> int:
        count: int = self._call("roll_back", header)
        return count

    def purge(self, header: Header, before_txid: int) -> int:
        count: int = self._call("purge", header, before_txid)
        return count

    def clear(self, topology_id: str) -> Header:
        return self.inner.clear(topology_id)

    def apply(self, *arguments: Any, **options: Any) -> pa.Table | None:
        return self._call("apply", *arguments, **options)

    def close(self) -> None:
        self.inner.close()


def either(one: int, other: int) -> int:
    return one | other


def partials(batch: dict[str, list[Any]], aggregates: Mapping[str, Aggregate], types: Mapping[str, Any]) -> pa.Table:
    """The partial results that a committer computes from a batch, in plain Python."""
    rows = []
    for word, values in batch.items():
        present = [value for value in values if value is not None]
        row: dict[str, Any] = {"word": word}
        for name, each in aggregates.items():
            if each.partial_function == "list":
                row[name] = each.fold(values, partial=False)
            elif not each.derived_from:
                folds = {
                    "count_all": len(values),
                    "count": len(present),
                    "sum": sum(present) if present else None,
                    "min": min(present, default=None),
                    "max": max(present, default=None),
                    "first": present[0] if present else None,
                    "last": present[-1] if present else None,
                }
                row[name] = folds[each.partial_function]
        for name, each in aggregates.items():
            if each.derived_from:
                row[name] = each.derive([row[part] for part in each.derived_from])
        rows.append(row)
    schema = pa.schema([("word", pa.string()), *types.items()])
    return pa.Table.from_pylist(rows, schema=schema)
