"""Pipelines that chance draws over the records of a topic, with tombstones, null keys and bad
records, and the same in plain Python.

In plain Python a record goes its way alone: it becomes rows, or it is bad, and is then left out of
all sinks. A tombstone goes two ways: as a row of nulls to the streams, and as its key to the tables
whose rows it deletes (ADR 109). All streams have the columns id and n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from framework.errors import BadRecordError
from framework.testing import crash, fail_attempt, replay
from framework.topology import TOMBSTONE
from ratchet import Json, Pipeline, Stream, Text, count, dead_letters, max_, sqlite, sum_
from sinks import AppendCommitter, SqliteTable

Row = dict[str, Any]
FAULTS: list[Callable[[int], Any]] = [replay, fail_attempt, crash, lambda txid: crash(txid, when="written")]


def failures(chosen: Sequence[int], transactions: int) -> list[Any]:
    """A failure for each of the first transactions, of these kinds."""
    return [FAULTS[kind](txid) for txid, kind in enumerate(chosen[:transactions], start=1)]


class Refused(Exception):
    """A record is bad."""


@dataclass(frozen=True)
class Step:
    """``rows``: what becomes of a row. ``keys``: what becomes of the key of a tombstone; None: it
    stays."""

    name: str
    stream: Callable[[Stream], Stream]
    rows: Callable[[Row], list[Row]]
    keys: Callable[[str], list[str]] | None = None

    def __repr__(self) -> str:
        return self.name


def _with(row: Row, change: Callable[[int], int]) -> Row:
    return {**row, "n": change(row["n"]) if row["n"] is not None else None}


def _where(condition: Callable[[Row], Any]) -> Callable[[Row], list[Row]]:
    return lambda row: [row] if condition(row) else []


def _negative(row: Row) -> Row:
    return _with(row, lambda n: -n)


def _without_four(row: Row) -> Row:
    if row["n"] == 4:
        raise BadRecordError("four")
    return row


def _unless(n: int) -> Callable[[Row], list[Row]]:
    def rows(row: Row) -> list[Row]:
        if row["n"] == n:
            raise Refused
        return [row]

    return rows


def _known(key: str) -> int | None:
    return len(key) if key < "b" else None


def _listed(row: Row) -> Row:
    return {"id": row["id"], "items": [row["n"], 1] if row["n"] is not None else []}


STEPS = [
    Step("even", lambda s: s.filter("n % 2 = 0"), _where(lambda r: r["n"] is not None and r["n"] % 2 == 0)),
    Step(
        "not a",
        lambda s: s.filter("id <> 'a'"),
        _where(lambda r: r["id"] is not None and r["id"] != "a"),
        lambda key: [key] if key != "a" else [],
    ),
    Step("null or more", lambda s: s.filter("n IS NULL OR n > 0"), _where(lambda r: r["n"] is None or r["n"] > 0)),
    Step("function", lambda s: s.filter(lambda r: (r["n"] or 0) > 0), _where(lambda r: (r["n"] or 0) > 0)),
    Step("triple", lambda s: s.with_columns(n="n * 3 + 1"), lambda r: [_with(r, lambda n: n * 3 + 1)]),
    Step(
        "upper",
        lambda s: s.with_columns(id="upper(id)"),
        lambda r: [{**r, "id": r["id"].upper() if r["id"] is not None else None}],
        lambda key: [key.upper()],
    ),
    Step(
        "filled", lambda s: s.with_columns(n="coalesce(n, 5)"), lambda r: [{**r, "n": 5 if r["n"] is None else r["n"]}]
    ),
    Step("map", lambda s: s.map(_negative, id=str, n=int), lambda r: [_negative(r)]),
    Step(
        "flat_map",
        lambda s: s.flat_map(lambda r: [r, {**r, "n": 1}], id=str, n=int),
        lambda r: [r, {**r, "n": 1}],
    ),
    Step("map_batches", lambda s: s.map_batches(lambda table: table, id=str, n=int), lambda r: [r]),
    Step("rename", lambda s: s.rename(id="x").rename(x="id"), lambda r: [r]),
    Step(
        "lookup",
        lambda s: s.lookup(_known, on="id", found=int).select("id", n="n + coalesce(found, 0)"),
        lambda r: [_with(r, lambda n: n + (_known(r["id"]) or 0 if r["id"] is not None else 0))],
    ),
    Step(
        "explode",
        lambda s: s.map(_listed, id=str, items=pa.list_(pa.int64())).explode("items").select("id", n="items"),
        lambda r: [{"id": r["id"], "n": n} for n in _listed(r)["items"]],
    ),
    Step(
        "branch",
        lambda s: s.branch(a="n > 2", b="id = 'b'")["b"],
        _where(lambda r: not (r["n"] is not None and r["n"] > 2) and r["id"] == "b"),
    ),
    Step(
        "merge",
        lambda s: s.filter("id <> 'a'").merge(s.filter("id = 'a'").with_columns(n="-n")),
        lambda r: [] if r["id"] is None else [_negative(r) if r["id"] == "a" else r],
    ),
    Step("refuse in a function", lambda s: s.map(_without_four, id=str, n=int), _unless(4)),
    Step(
        "refuse in a cast",
        lambda s: s.with_columns(n="CASE WHEN n = 3 THEN 'three' ELSE cast(n AS text) END").cast(n=int),
        _unless(3),
    ),
]


def rows_of(record: Row, steps: Sequence[Step]) -> list[Row]:
    """The rows of a record, or of a tombstone as a stream sees it. Raises ``Refused``."""
    rows = [{"id": record["id"], "n": record["n"]}]
    for each in steps:
        rows = [made for row in rows for made in each.rows(row)]
    return rows


def keys_of(key: str, steps: Sequence[Step]) -> list[str]:
    """The keys that a tombstone deletes."""
    keys = [key]
    for each in steps:
        if each.keys is not None:
            keys = [made for one in keys for made in each.keys(one)]
    return keys


# --- sinks ----------------------------------------------------------------------------------------


class RefusingSeven(AppendCommitter):
    """Refuses a value when other sinks have written the transaction."""

    def finish_batch(self) -> None:
        if self._attempt is not None and any(7 in each.column("n").to_pylist() for each in self._batches):
            raise BadRecordError("seven")
        super().finish_batch()


def _totals(stream: Stream, name: str, tasks: int) -> None:
    table = stream.group_by("id").agg(rows=count(), n=sum_("n"), most=max_("n * 2"))
    table.upsert_into(sqlite("nowhere.db", name), name=name, parallelism=tasks)


def _rows(stream: Stream, name: str, tasks: int) -> None:
    stream.append_into(sqlite("nowhere.db", name), name=name, parallelism=tasks)


def _newest(stream: Stream, name: str, tasks: int) -> None:
    stream.latest_by("id").upsert_into(sqlite("nowhere.db", name), name=name, parallelism=tasks)


def _refusing(stream: Stream, name: str, tasks: int) -> None:
    stream.into(RefusingSeven(SqliteTable("nowhere.db", name)), name=name, grouping="local")


def _first(stream: Stream, name: str, tasks: int) -> None:
    """By the timestamps of the records, which are equal."""
    first = stream.deduplicate("id", within="1 day", name=f"{name}-keys", parallelism=tasks)
    _rows(first, name, tasks)


SINKS = {"totals": _totals, "rows": _rows, "newest": _newest, "refusing": _refusing, "first": _first}


def check_sink(kind: str, record: Row, steps: Sequence[Step]) -> None:
    """Raise ``Refused`` where the way to a sink, or the sink, refuses the record."""
    if kind == "newest" and record[TOMBSTONE]:
        keys_of(record["id"], steps)
        return
    for row in rows_of(record, steps):
        if (row["id"] is None and kind in ("totals", "newest", "first")) or (row["n"] == 7 and kind == "refusing"):
            raise Refused


def content(kind: str, records: Sequence[Row], steps: Sequence[Step]) -> list[Row]:
    if kind == "newest":
        held: dict[str, Row] = {}
        for record in records:
            if record[TOMBSTONE]:
                for key in keys_of(record["id"], steps):
                    held.pop(key, None)
            else:
                held.update({row["id"]: row for row in rows_of(record, steps)})
        return list(held.values())
    rows = [row for record in records for row in rows_of(record, steps)]
    if kind == "first":
        return list({row["id"]: row for row in reversed(rows)}.values())
    if kind != "totals":
        return rows
    by_key: dict[str, list[int | None]] = defaultdict(list)
    for row in rows:
        by_key[row["id"]].append(row["n"])
    made = []
    for key, values in by_key.items():
        numbers = [each for each in values if each is not None]
        total, most = (sum(numbers), max(numbers) * 2) if numbers else (None, None)
        made.append({"id": key, "rows": len(values), "n": total, "most": most})
    return made


# --- programs -------------------------------------------------------------------------------------

KEYS = ["a", "b", "ß"]
RECORDS = st.lists(
    st.one_of(
        st.builds(
            lambda key, n: {"id": key, "n": n, TOMBSTONE: False},
            st.sampled_from(KEYS),
            st.one_of(st.none(), st.integers(-5, 8)),
        ),
        st.builds(lambda key: {"id": key, "n": None, TOMBSTONE: True}, st.sampled_from(KEYS)),
        st.builds(lambda n: {"id": None, "n": n, TOMBSTONE: False}, st.one_of(st.none(), st.integers(-5, 8))),
    ),
    min_size=1,
    max_size=12,
)
PROGRAMS: dict[str, Any] = {
    "records": RECORDS,
    "shared": st.lists(st.sampled_from(STEPS), max_size=2),
    "branches": st.lists(
        st.tuples(
            st.lists(st.sampled_from(STEPS), max_size=3),
            st.lists(st.sampled_from(sorted(SINKS)), min_size=1, max_size=2, unique=True),
        ),
        min_size=1,
        max_size=2,
    ),
    "takes": st.lists(st.integers(1, 6), min_size=1, max_size=4),
    "policy": st.sampled_from(["skip", "skip", "dead_letter", "fail"]),
    "faults": st.lists(st.integers(0, 3), max_size=3),
    "tasks": st.integers(1, 2),
}


def check(
    *,
    records: list[Row],
    shared: list[Step],
    branches: list[tuple[list[Step], list[str]]],
    takes: list[int],
    policy: str,
    faults: list[int],
    tasks: int,
) -> None:
    """Raise ``AssertionError`` where the pipeline gives something else than plain Python."""
    pipeline = Pipeline("drawn", state=lambda name: sqlite("nowhere.db", name))
    bad: Any = dead_letters(sqlite("nowhere.db", "letters")) if policy == "dead_letter" else policy
    stream = pipeline.read_kafka(
        "topic", key=Text("id"), value=Json(n=int), bootstrap_servers="127.0.0.1:1", on_bad_record=bad
    )
    for step in shared:
        stream = step.stream(stream)
    sinks: dict[str, tuple[str, list[Step]]] = {}
    for number, (steps, kinds) in enumerate(branches):
        own = stream
        for step in steps:
            own = step.stream(own)
        for drawn in kinds:
            name = f"{drawn}{number}"
            has_time = all(step.name != "map_batches" for step in (*shared, *steps))
            kind = drawn if drawn != "first" or has_time else "rows"
            SINKS[kind](own, name, tasks)
            sinks[name] = kind, [*shared, *steps]
    good = [each for each in records if not _is_bad(each, sinks.values())]
    fields = pipeline.build().spout.streams["default"].names
    names = ["id", "n", *([TOMBSTONE] if TOMBSTONE in fields else [])]
    time = {"timestamp_ms": 0} if any(each.endswith("timestamp_ms") for each in fields) else {}
    given = [{name: each[name] for name in names} | time for each in records]
    its_faults = failures(faults, _batches(len(records), takes))

    if policy == "fail" and len(good) < len(records):
        with pytest.raises(BadRecordError):
            pipeline.test({"topic": given}, take=takes, faults=its_faults)
        return
    found = pipeline.test({"topic": given}, take=takes, faults=its_faults)
    for name, (kind, steps) in sinks.items():
        assert sorted_rows(found[name]) == sorted_rows(content(kind, good, steps)), name


def _is_bad(record: Row, sinks: Any) -> bool:
    try:
        for kind, steps in sinks:
            check_sink(kind, record, steps)
    except Refused:
        return True
    return False


def _batches(records: int, takes: Sequence[int]) -> int:
    """How many batches there are where no record is bad."""
    ends = list(accumulate(takes))
    if records <= ends[-1]:
        return next(number for number, end in enumerate(ends, start=1) if end >= records)
    return len(ends) + -(-(records - ends[-1]) // takes[-1])


def sorted_rows(rows: Any) -> list[Row]:
    return sorted(({**row} for row in rows), key=lambda row: repr(sorted(row.items())))
