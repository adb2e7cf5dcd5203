"""Random values of every type, in every backend, against an oracle in exact arithmetic.

The work: folded batches, a user's own committer, replays that differ, deletions, purges.
"""

from __future__ import annotations

import datetime
import math
import os
import random
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt
from framework.errors import BadRecordError
from framework.inspect.comparison import compare
from framework.testing.conformance.backend_test_helpers import finish, open_attempt
from framework.topology import Input
from framework.topology.groupings import GlobalGrouping
from sinks import (
    Count,
    First,
    Last,
    MapBackend,
    MapState,
    Max,
    Mean,
    MemoryBackend,
    Min,
    OpaqueMapState,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
    Sum,
    TransactionalMapState,
)
from sinks.aggregate_reference_model import Recount
from tests.kit.exact import COLUMNS, PLAIN_COLUMNS, Columns, Exact, Oracle, Values, exact
from tests.kit.targets import Often

pytestmark = pytest.mark.rule("C29")

KEYS = {
    "text": pa.string(),
    "real": pa.float64(),
    "exact": pa.decimal128(38, 2),
    "whole": pa.int64(),
    "moment": pa.timestamp("us", tz="Europe/Paris"),
}
INPUT = {
    "i": pa.int64(),
    "d": pa.decimal128(20, 4),
    "f": pa.float64(),
    "g": pa.float64(),
    "t": pa.string(),
    "at": pa.timestamp("us", tz="Europe/Paris"),
    "b": pa.bool_(),
    "y": pa.binary(),
    "day": pa.date32(),
}
MADE = {"count": Count, "sum": Sum, "min": Min, "max": Max, "first": First, "last": Last, "mean": Mean}
#: Values that a column refuses.
WRONG = [("total", 1.5), ("exact", Decimal("0.00001")), ("exact", Decimal("1E+34")), ("real", "1")]


def check_row(found: dict[str, Exact], expected: dict[str, Exact]) -> None:
    """Compare rows exactly; only the mean may differ by rounding, since it is a quotient."""
    means = (found.get("mean"), expected.get("mean"))
    assert means == (None, None) or math.isclose(*means, rel_tol=1e-14)
    assert {**found, "mean": None} == {**expected, "mean": None}


class StagedSqlite(SqliteBackend):
    _staged_from_rows = 0


class ColumnarPostgres(PostgresBackend):
    _columnar_from_rows = 0


@pytest.fixture(
    params=["memory", "sqlite", "staged sqlite"]
    + [pytest.param(each, marks=pytest.mark.integration) for each in ("postgres", "staged postgres", "redis")]
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], MapBackend]:
    def made() -> MapBackend:
        name = f"v_{uuid.uuid4().hex[:12]}"
        if request.param == "memory":
            return MemoryBackend(name)
        if request.param == "redis":
            return RedisBackend(request.getfixturevalue("redis_server").url, name)
        if "sqlite" in request.param:
            return (StagedSqlite if "staged" in request.param else SqliteBackend)(tmp_path / "x.db", name)
        kind = ColumnarPostgres if "staged" in request.param else PostgresBackend
        return kind(request.getfixturevalue("postgres").dsn, name)

    return made


class Run:
    """One state under random work, and the oracle of what it should hold."""

    def __init__(self, state: MapState, kind: str, columns: Columns, chance: random.Random) -> None:
        self.state, self.kind, self.chance = state, kind, chance
        self.values = Values(chance, nan=not isinstance(state.backend, SqliteBackend))
        self.oracle = Oracle(columns)
        self.folded: list[pa.RecordBatch] = []
        aggregates = {
            name: MADE[rule](field) for name, (field, rule) in columns.items() if not name.startswith("mean_")
        }
        self.committer = StateCommitter(state, ["k"], aggregates)
        fields = Fields.of({"k": KEYS[kind], **INPUT})
        self.schema = pa.schema([(name, fields.type_of(name)) for name in fields])
        self.committer.bind("kept", [Input("spout", "default", fields, GlobalGrouping())], 1)
        assert list(self.committer.aggregates) == list(columns)
        state.prepare("topology")

    def transaction(self, txid: int) -> None:
        """Run a few attempts, of which the last one counts.

        Opaque states get another batch in each.
        """
        before = self.oracle
        attempts = self.chance.choice([1, 1, 2, 3])
        again = self.chance.getstate()
        for attempt in range(1, attempts + 1):
            if isinstance(self.state, TransactionalMapState):
                self.chance.setstate(again)
            self.oracle = before.copy()
            granted = open_attempt(self.state, txid, attempt)
            first = attempt == 1 or isinstance(self.state, OpaqueMapState)
            if self.chance.random() < 0.6:
                self.fold(granted, checked=first)
            else:
                self.work(granted, checked=first)
        if self.chance.random() < 0.3:
            self.state.purge(self.state.read_header(), txid)
        finish(self.state, replay=attempts > 1)
        self.check(txid)

    def fold(self, granted: TransactionAttempt, *, checked: bool) -> None:
        """Fold rows of several upstream tasks, before they travel and in the committer."""
        self.committer.prepare({}, None, None, granted)  # type: ignore[arg-type]
        touched = set()
        for _ in range(self.chance.choice([1, 1, 3])):
            combiner = self.committer.combiner()
            for _ in range(self.chance.choice([1, 1, 3])):
                rows = [
                    {"k": self.values.key(self.kind), **self.values.row()}
                    for _ in range(self.chance.choice([0, 1, 2, 7]))
                ]
                for row in rows:
                    self.oracle.add(row["k"], row)
                    touched.add(exact(row["k"]))
                if self.kind == "real":  # Arrow takes floats only
                    rows = [{**row, "k": float(row["k"])} for row in rows]
                self.folded.append(pa.RecordBatch.from_pylist(rows, schema=self.schema))
                combiner.add(self.folded[-1])
            made = combiner.finish()
            if made is not None:
                self.committer.execute_arrow(made)
        emitted = list(self.committer.finish_batch())
        if checked:
            found = [tuple(row.values()) for each in emitted for row in each.to_pylist()]
            self.compare([(key, values) for key, *values in found], touched)

    def compare(self, found: Iterable[tuple[Any, Sequence[Any]]], keys: Collection[Exact]) -> None:
        """Check that ``found`` has the right row of each of ``keys``, once, and no other."""
        rows = [(exact(key), self.row_of(values)) for key, values in found]
        held = dict(rows)
        assert len(held) == len(rows)
        assert set(held) == set(keys)
        for key in keys:
            check_row(held[key], self.oracle.rows[key])

    def row_of(self, values: Sequence[Any]) -> dict[str, Exact]:
        return dict(zip(self.oracle.columns, map(exact, values), strict=True))

    def work(self, granted: TransactionAttempt, *, checked: bool) -> None:
        """Work as a user's own committer: reads, puts, updates and deletions,
        each of which sees those before it.
        """
        self.state.begin_commit(granted)
        for _ in range(self.chance.randrange(8)):
            key = self.values.key(self.kind)
            row = self.values.whole_row(self.oracle.columns)
            what = self.chance.choice(["put", "update", "delete", "wrong", "forget"])
            if what == "put":
                self.state.multi_put([key], [row])
                self.oracle.put(key, row)
            elif what == "delete":
                self.state.delete([key])
                self.oracle.delete(key)
            elif what == "update":
                (made,) = self.state.multi_update([key], [self.one_more])
                held = self.oracle.row(key)
                held["total"] = (held["total"] or 0) + 1
                if checked:
                    check_row(self.row_of(made), held)
            elif what == "forget":
                self.state.multi_update([key], [lambda old: None])
                self.oracle.delete(key)
            else:
                column, wrong = self.chance.choice(WRONG)
                values = [wrong if name == column else None for name in self.oracle.columns]
                if checked and column in self.oracle.columns:
                    with pytest.raises(BadRecordError):
                        self.state.multi_put([key], [tuple(values)])
            if checked:
                (seen,) = self.state.multi_get([key])
                expected = self.oracle.rows.get(exact(key))
                assert (seen is None) == (expected is None), (what, key)
                if expected is not None:
                    check_row(self.row_of(seen), expected)
        self.state.commit(granted)

    def one_more(self, old: Any) -> Any:
        columns = self.oracle.columns
        held = dict(zip(columns, old if old is not None else [None] * len(columns), strict=True))
        return tuple({**held, "total": (held["total"] or 0) + 1}.values())

    def check(self, txid: int) -> None:
        """Check every row, and for every key whether it exists."""
        rows = [(key[0], row.value) for key, row in self.state.backend.scan() if row.value is not None]
        self.compare(rows, self.oracle.rows)
        for key in self.values.keys[self.kind]:
            assert (self.state.get(key) is None) == (exact(key) not in self.oracle.rows), key
            (seen,) = self.state.read_as_of([key], txid)
            assert (seen is None) == (exact(key) not in self.oracle.rows), key
        for _, value in rows:
            for name, each in zip(self.oracle.columns, value or (), strict=True):
                assert str(each) != "-0.0" and (not isinstance(each, Decimal) or each.as_tuple().exponent == -4), name


@pytest.mark.each_value_once
@pytest.mark.parametrize("state_class", [OpaqueMapState, TransactionalMapState], ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    ("kind", "columns"),
    [*((kind, COLUMNS) for kind in KEYS), ("text", PLAIN_COLUMNS), ("real", PLAIN_COLUMNS)],
    ids=lambda each: each if isinstance(each, str) else f"{len(each)} columns",
)
def test_random_values_are_stored_exactly(
    make: Callable[[], MapBackend], kind: str, columns: Columns, state_class: type[MapState], seed: int, often: Often
) -> None:
    run = Run(state_class(make()), kind, columns, random.Random(seed))
    for txid in range(1, int(os.environ.get("RATCHET_VALUES") or often(3, 12)) + 1):
        run.transaction(txid)
    run.state.close()


MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
#: Type of a column, and values that it cannot hold.
MISFITS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.string(), [5, b"x", True]),
    (pa.binary(), ["x", 5]),
    (pa.bool_(), [2, "no"]),
    (pa.date32(), [MOMENT, "2026-01-02", 5]),
    (pa.timestamp("us"), [MOMENT.date(), "2026-01-02", 5]),
    (pa.timestamp("s"), [MOMENT]),
    (pa.timestamp("ms", tz="UTC"), [MOMENT]),
    (pa.time64("us"), ["03:04:05", MOMENT.time().replace(tzinfo=datetime.UTC)]),
    (pa.time32("s"), [MOMENT.time()]),
    (pa.duration("s"), [5, datetime.timedelta(microseconds=5)]),
    (pa.int8(), [128, -129]),
    (pa.uint8(), [-1, 256]),
    (pa.int64(), [2**63, "5", 1.5]),
]


def test_a_value_of_another_type_or_size_is_refused_and_never_made_to_fit(make: Callable[[], MapBackend]) -> None:
    """A duration was once truncated to its unit; a moment in a column of dates was written,
    and could not be read.
    """
    for kind, wrong in MISFITS:
        for key, value in ((kind, pa.int64()), (pa.int64(), kind)):
            backend = make()
            backend.bind(Fields.of({"k": key}), Fields.of({"v": value}))
            state = OpaqueMapState(backend)
            state.prepare("topology")
            state.begin_commit(open_attempt(state, 1, 1))
            for each in wrong:
                with pytest.raises(BadRecordError, match="cannot hold"):
                    state.multi_put([each if key is kind else 1], [each if value is kind else 1])
            backend.close()


@pytest.mark.parametrize("kind", KEYS)
def test_the_recount_of_verify_agrees_with_the_committer(kind: str, seed: int, tmp_path: Path) -> None:
    run = Run(OpaqueMapState(MemoryBackend()), kind, COLUMNS, random.Random(seed))
    recount = run.committer.recounting(tmp_path)
    assert isinstance(recount, Recount)
    for txid in range(1, 9):
        run.folded.clear()
        run.fold(open_attempt(run.state, txid, 1), checked=True)
        finish(run.state)
        recount._batches.clear()
        recount.prepare({}, None, None, open_attempt(recount.state, txid, 1))  # type: ignore[arg-type]
        for each in run.folded:
            recount.execute_arrow(each)
        emitted = [tuple(row.values()) for each in recount.finish_batch() for row in each.to_pylist()]
        assert len({exact(key) for key, *_ in emitted}) == len(emitted)
        finish(recount.state)
    differences: list[Any] = []
    assert compare(run.state, recount.state, 8, differences.append, differences.append) == len(run.oracle.rows)
    assert differences == []
