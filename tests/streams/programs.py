"""Pipelines that chance draws, with steps that keep state, and the same in plain Python.

A stream in plain Python is a list of transactions, each a list of rows. Each operator turns such a
list into another one, so operators follow each other as in a pipeline. All streams have the columns
k, n and at.
"""

from __future__ import annotations

import asyncio
import datetime
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ratchet import Pipeline, Stream, count, hopping, max_, parquet, session, sliding, sqlite, sum_, tumbling
from tests.streams.topic_programs import failures, sorted_rows

Row = dict[str, Any]
Batches = list[list[Row]]
START = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)


def minutes(number: int) -> datetime.timedelta:
    return datetime.timedelta(minutes=number)


@dataclass(frozen=True)
class Drawn:
    """What chance has drawn for an operator. ``short`` and ``long``: minutes."""

    kind: str
    short: int
    long: int
    late: int
    parallelism: int


@dataclass
class Program:
    """A stream, the same in plain Python, and whether the rows of a key have an order. ``table``:
    makes a place for a table of a name."""

    stream: Stream
    batches: Batches
    table: Callable[[str], Any]
    ordered: bool = True

    def then(self, stream: Stream, batches: Batches, *, ordered: bool | None = None) -> Program:
        return replace(self, stream=stream, batches=batches, ordered=self.ordered if ordered is None else ordered)

    def each(self, stream: Stream, function: Callable[[Row], list[Row]]) -> Program:
        return self.then(stream, [[made for row in batch for made in function(row)] for batch in self.batches])


def watermarks(batches: Batches, late: int) -> list[tuple[datetime.datetime, datetime.datetime]]:
    """Before and after each transaction."""
    found = []
    after = START - minutes(100_000)
    for batch in batches:
        before, after = after, max(after, *(row["at"] - minutes(late) for row in batch)) if batch else after
        found.append((before, after))
    return found


def row_of(key: str, n: int, at: datetime.datetime) -> Row:
    return {"k": key, "n": n, "at": at}


# --- operators ------------------------------------------------------------------------------------


def even(program: Program, drawn: Drawn, name: str) -> Program:
    stream = program.stream.filter("n % 2 = 0")
    return program.each(stream, lambda row: [row] if row["n"] % 2 == 0 else [])


def doubled(program: Program, drawn: Drawn, name: str) -> Program:
    stream = program.stream.flat_map(
        lambda row: [row, {**row, "n": 1}], deterministic=True, k=str, n=int, at=datetime.datetime
    )
    return program.each(stream, lambda row: [row, {**row, "n": 1}])


def added(program: Program, drawn: Drawn, name: str) -> Program:
    return program.each(program.stream.with_columns(n="n + 3"), lambda row: [{**row, "n": row["n"] + 3}])


def branched(program: Program, drawn: Drawn, name: str) -> Program:
    stream = program.stream.branch(a="n > 2", b="k = 'a'")["b"]
    return program.each(stream, lambda row: [row] if row["n"] <= 2 and row["k"] == "a" else [])


def merged(program: Program, drawn: Drawn, name: str) -> Program:
    stream = program.stream.filter("n > 1").merge(
        program.stream.filter("n <= 1"), program.stream.select("k", "at", n="-n")
    )
    made = program.each(stream, lambda row: [row, {**row, "n": -row["n"]}])
    return made.then(stream, made.batches, ordered=False)


def first_rows(program: Program, drawn: Drawn, name: str) -> Program:
    return _first_rows(program, drawn, name, want_late=False)


def late_first_rows(program: Program, drawn: Drawn, name: str) -> Program:
    return _first_rows(program, drawn, name, want_late=True)


def _first_rows(program: Program, drawn: Drawn, name: str, *, want_late: bool) -> Program:
    if not program.ordered:
        return program
    seen = program.stream.deduplicate(
        "k", within=minutes(drawn.long), on="at", late=minutes(drawn.late), name=name, parallelism=drawn.parallelism
    )
    held: dict[str, datetime.datetime] = {}
    made: Batches = []
    for batch, (before, after) in zip(program.batches, watermarks(program.batches, drawn.late), strict=True):
        first, late = [], []
        for row in batch:
            until = held.get(row["k"])
            if until is not None and row["at"] < until:
                continue
            if row["at"] < before:
                late.append(row)
            else:
                held[row["k"]] = row["at"] + minutes(drawn.long)
                first.append(row)
        held = {key: until for key, until in held.items() if until > after}
        made.append(late if want_late else first)
    return program.then(seen.late() if want_late else seen, made)


def windows(output: str) -> Callable[[Program, Drawn, str], Program]:
    """``closed``, ``changed`` or ``late`` windows."""

    def operator(program: Program, drawn: Drawn, name: str) -> Program:
        stream, found = _windows(program, drawn, name, output)
        made = [[row_of(key, total * 100 + rows, start) for key, start, total, rows in batch] for batch in found]
        return program.then(stream.select("k", n="total * 100 + rows", at="window_start"), made)

    return operator


#: A window: its key, its start, the sum of n, and the number of rows.
Window = tuple[str, datetime.datetime, int, int]


def _windows(program: Program, drawn: Drawn, name: str, output: str) -> tuple[Stream, list[list[Window]]]:
    length, step = lengths(drawn)
    slides = sliding if drawn.late else hopping
    window = slides(minutes(length), minutes(step)) if step < length else tumbling(minutes(length))
    table = (
        program.stream.window(window, on="at", late=minutes(drawn.late))
        .group_by("k")
        .agg(total=sum_("n"), rows=count())
    )
    options: dict[str, Any] = {"name": name, "parallelism": drawn.parallelism}
    stream = table.when_changed(**options) if output == "changed" else table.when_closed(**options)
    if output == "late":
        stream = stream.late()
    kept: dict[tuple[str, datetime.datetime], tuple[int, int]] = {}
    made: list[list[Window]] = []
    for batch, (before, after) in zip(program.batches, watermarks(program.batches, drawn.late), strict=True):
        came: dict[tuple[str, datetime.datetime], tuple[int, int]] = {}
        for row in batch:
            for start in starts_of(row["at"], length, step):
                total, rows = came.get((row["k"], start), (0, 0))
                came[row["k"], start] = total + row["n"], rows + 1
        late = {key: value for key, value in came.items() if key[1] + minutes(length) <= before}
        changed = {}
        for key, (total, rows) in came.items():
            if key not in late:
                held = kept.get(key, (0, 0))
                kept[key] = changed[key] = total + held[0], rows + held[1]
        closed = {key: value for key, value in kept.items() if key[1] + minutes(length) <= after}
        kept = {key: value for key, value in kept.items() if key not in closed}
        chosen = {"closed": closed, "changed": changed, "late": late}[output]
        ordered = sorted(chosen.items(), key=lambda item: (item[0][1], item[0][0]))
        made.append([(*key, *values) for key, values in ordered])
    return stream, made


def lengths(drawn: Drawn) -> tuple[int, int]:
    """Length and step of windows, in minutes."""
    slides = drawn.long > drawn.short and drawn.long % drawn.short == 0
    return (drawn.long, drawn.short) if slides else (drawn.short, drawn.short)


def windows_of_windows(program: Program, drawn: Drawn, name: str) -> Program:
    """Closed windows in windows of another length."""
    closed, found = _windows(program, drawn, f"{name}-inner", "closed")
    inner, outer = lengths(drawn)[0], 2 * drawn.short
    table = (
        closed.filter("total <> 1").window(tumbling(minutes(outer))).group_by("k").agg(n=sum_("total"), rows=count())
    )
    stream = table.when_closed(name=name, parallelism=3 - drawn.parallelism)
    kept: dict[tuple[str, datetime.datetime], tuple[int, int]] = {}
    made: Batches = []
    for batch, (_, after) in zip(found, watermarks(program.batches, drawn.late), strict=True):
        for key, its_start, total, _ in batch:
            if total != 1:
                (start,) = starts_of(its_start + minutes(inner) - datetime.timedelta(microseconds=1), outer, outer)
                n, rows = kept.get((key, start), (0, 0))
                kept[key, start] = n + total, rows + 1
        over = {key: each for key, each in kept.items() if key[1] + minutes(outer) <= after}
        kept = {key: each for key, each in kept.items() if key not in over}
        ordered = sorted(over.items(), key=lambda item: (item[0][1], item[0][0]))
        made.append([row_of(key, n * 100 + rows, start) for (key, start), (n, rows) in ordered])
    return program.then(stream.select("k", n="n * 100 + rows", at="window_start"), made)


def starts_of(at: datetime.datetime, length: int, step: int) -> list[datetime.datetime]:
    zero = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    last = zero + (at - zero) // minutes(step) * minutes(step)
    return [last - minutes(step) * hop for hop in range(length // step)]


def sessions(output: str) -> Callable[[Program, Drawn, str], Program]:
    """``closed`` or ``late`` sessions."""

    def operator(program: Program, drawn: Drawn, name: str) -> Program:
        gap = minutes(drawn.short)
        table = program.stream.window(session(gap), on="at", late=minutes(drawn.late)).group_by("k").agg(n=sum_("n"))
        stream = table.when_closed(name=name, parallelism=drawn.parallelism)
        if output == "late":
            stream = stream.late()
        held: list[tuple[str, datetime.datetime, datetime.datetime, int]] = []
        made: Batches = []
        for batch, (before, after) in zip(program.batches, watermarks(program.batches, drawn.late), strict=True):
            parts = [(True, each) for each in held]
            parts += [(False, (row["k"], row["at"], row["at"], row["n"])) for row in batch]
            parts.sort(key=lambda part: (part[1][0], part[1][1]))
            found: list[tuple[bool, str, datetime.datetime, datetime.datetime, int]] = []
            for was_held, (key, first, last, n) in parts:
                if found and found[-1][1] == key and first < found[-1][3] + gap:
                    was, _, began, ended, total = found[-1]
                    found[-1] = was or was_held, key, began, max(ended, last), total + n
                else:
                    found.append((was_held, key, first, last, n))
            late = [each for each in found if not each[0] and each[3] + gap <= before]
            closed = [each for each in found if each not in late and each[3] + gap <= after]
            held = [each[1:] for each in found if each not in late and each not in closed]
            chosen = sorted(closed if output == "closed" else late, key=lambda each: (each[3], each[1]))
            made.append([row_of(key, n, first) for _, key, first, _, n in chosen])
        return program.then(stream.select("k", n="n", at="session_start"), made)

    return operator


def expiring(output: str) -> Callable[[Program, Drawn, str], Program]:
    """The ``changed``, ``expired`` or ``late`` rows of a table whose rows expire."""

    def operator(program: Program, drawn: Drawn, name: str) -> Program:
        ttl = minutes(drawn.long)
        table = program.stream.group_by("k").agg(total=sum_("n"), rows=count(), at=max_("at"))
        kept = table.expire(ttl, on="at", late=minutes(drawn.late))
        stream = kept.upsert_into(program.table(name), name=name, parallelism=drawn.parallelism)
        if output == "late":
            stream = stream.late()
        elif output == "expired":
            stream = stream.expired()
        rows: dict[str, tuple[datetime.datetime, int, int]] = {}  # key -> its newest time, sum, rows
        made: Batches = []
        for batch, (before, after) in zip(program.batches, watermarks(program.batches, drawn.late), strict=True):
            out: dict[str, list[Row]] = {"changed": [], "expired": [], "late": []}
            changed = set()
            for row in sorted(batch, key=lambda row: row["at"]):
                key, at = row["k"], row["at"]
                if at + ttl <= before:
                    out["late"].append(row)
                    continue
                newest, total, number = rows.pop(key, (at, 0, 0))
                if number and newest + ttl <= min(at, after):
                    out["expired"].append(row_of(key, total * 100 + number, newest))
                    total = number = 0
                rows[key] = max(newest, at), total + row["n"], number + 1
                changed.add(key)
            for key, (newest, total, number) in list(rows.items()):
                if newest + ttl <= after:
                    out["expired"].append(row_of(key, total * 100 + number, newest))
                    del rows[key]
                elif key in changed:
                    out["changed"].append(row_of(key, total * 100 + number, newest))
            made.append(out[output])
        if output != "late":
            stream = stream.select("k", n="total * 100 + rows", at="at")
        return program.then(stream.select("k", "n", "at"), made, ordered=False)

    return operator


def pairs(how: str) -> Callable[[Program, Drawn, str], Program]:
    """Rows of which n is even with those of which it is odd."""

    def operator(program: Program, drawn: Drawn, name: str) -> Program:
        within = minutes(drawn.short)
        left = program.stream.filter("n % 2 = 0")
        right = program.stream.filter("n % 2 <> 0").rename(n="m")
        joined = left.join(
            right,
            on="k",
            times="at",
            within=within,
            how=how,  # type: ignore[arg-type]
            late=minutes(drawn.late),
            name=name,
            parallelism=drawn.parallelism,
        )
        stream = joined.select("k", n="coalesce(n, 0) * 100 + coalesce(m, 0)", at="coalesce(at, at_right)")
        waiting: tuple[list[list[Any]], list[list[Any]]] = ([], [])  # row, whether it is matched
        made: Batches = []
        for batch, (before, after) in zip(program.batches, watermarks(program.batches, drawn.late), strict=True):
            out = []
            for row in batch:
                if row["at"] < before:
                    continue
                side = row["n"] % 2
                one = [row, False]
                for other in waiting[1 - side]:
                    if other[0]["k"] == row["k"] and abs(other[0]["at"] - row["at"]) <= within:
                        one[1] = other[1] = True
                        both = (row, other[0]) if side == 0 else (other[0], row)
                        out.append(row_of(row["k"], both[0]["n"] * 100 + both[1]["n"], both[0]["at"]))
                waiting[side].append(one)
            for side, outer in ((0, how in ("left", "outer")), (1, how in ("right", "outer"))):
                over = [one for one in waiting[side] if one[0]["at"] + within < after]
                waiting[side][:] = [one for one in waiting[side] if one not in over]
                for row, matched in over:
                    if outer and not matched:
                        out.append(row_of(row["k"], row["n"] * (100 if side == 0 else 1), row["at"]))
            made.append(out)
        return program.then(stream, made, ordered=False)

    return operator


def newest_of_a_time(program: Program, drawn: Drawn, name: str) -> Program:
    """Rows of which n is even, with the newest row of which it is odd, at the time of the row."""
    if not program.ordered:
        return program
    table = program.stream.filter("n % 2 <> 0").rename(n="m").latest_by("k")
    joined = program.stream.filter("n % 2 = 0").join(
        table, on="k", times="at", how="left", late=minutes(drawn.late), name=name, parallelism=drawn.parallelism
    )
    waiting: list[Row] = []
    newest: dict[str, list[Row]] = defaultdict(list)
    made: Batches = []
    for batch, (before, after) in zip(program.batches, watermarks(program.batches, drawn.late), strict=True):
        for row in batch:
            if row["n"] % 2:
                newest[row["k"]].append(row)
            elif row["at"] >= before:
                waiting.append(row)
        out = []
        for row in [each for each in waiting if each["at"] < after]:
            known = [
                (each["at"], place, each["n"]) for place, each in enumerate(newest[row["k"]]) if each["at"] <= row["at"]
            ]
            out.append(row_of(row["k"], row["n"] * 100 + (max(known)[2] if known else 0), row["at"]))
        waiting = [each for each in waiting if each["at"] >= after]
        made.append(out)
    return program.then(joined.select("k", n="n * 100 + coalesce(m, 0)", at="at"), made, ordered=False)


def current_row(program: Program, drawn: Drawn, name: str) -> Program:
    """Rows of which n is even, with what the rows of which it is odd leave for their key."""
    by_number, deletes = drawn.short > 1 or not program.ordered, drawn.long == 14
    table = (
        program.stream.filter("n % 2 <> 0")
        .select("k", m="n")
        .latest_by("k", sequence_by="m" if by_number else None, delete_when="m % 3 = 0" if deletes else None)
    )
    joined = program.stream.filter("n % 2 = 0").join(
        table, on="k", how="left", name=name, parallelism=drawn.parallelism
    )
    held: dict[str, int] = {}
    made: Batches = []
    for batch in program.batches:
        for row in batch:
            if row["n"] % 2 and not (by_number and row["n"] < held.get(row["k"], row["n"])):
                held[row["k"]] = row["n"]
        known = {key: m for key, m in held.items() if not (deletes and m % 3 == 0)}
        made.append([{**row, "n": row["n"] * 100 + known.get(row["k"], 0)} for row in batch if row["n"] % 2 == 0])
    return program.then(joined.select("k", "at", n="n * 100 + coalesce(m, 0)"), made)


def lookups(*on: str) -> Callable[[Program, Drawn, str], Program]:
    """Rows with what a function knows about these columns."""

    def operator(program: Program, drawn: Drawn, name: str) -> Program:
        def one(key: Any) -> int | None:
            text = str(key)
            return sum(map(ord, text)) % 7 if len(text) % 2 else None

        async def some(keys: list[Any]) -> dict[Any, int | None]:
            await asyncio.sleep(0)
            return {key: one(key) for key in keys}

        options: dict[str, Any] = {"cache": "1 h" if drawn.late else None, "cache_size": drawn.short}
        several = {"batch_size": drawn.long} if drawn.parallelism == 2 else {}
        stream = program.stream.lookup(some if several else one, on=on, **options, **several, found=int)
        found = stream.select("k", "at", n="n + coalesce(found, 0)")
        return program.each(
            found,
            lambda row: [
                {**row, "n": row["n"] + (one(row[on[0]] if len(on) == 1 else tuple(row[c] for c in on)) or 0)}
            ],
        )

    return operator


def awaited(program: Program, drawn: Drawn, name: str) -> Program:
    async def more(row: Row) -> list[Row]:
        for _ in range(row["n"] % 3):
            await asyncio.sleep(0)
        return [row, {**row, "n": row["n"] + 1}][: 1 + row["n"] % 2]

    stream = program.stream.flat_map(more, concurrency=drawn.short, k=str, n=int, at=datetime.datetime)
    return program.each(stream, lambda row: [row, {**row, "n": row["n"] + 1}][: 1 + row["n"] % 2])


OPERATORS: dict[str, Callable[[Program, Drawn, str], Program]] = {
    "even": even,
    "doubled": doubled,
    "added": added,
    "branched": branched,
    "merged": merged,
    "first": first_rows,
    "late-first": late_first_rows,
    **{f"{output}-windows": windows(output) for output in ("closed", "changed", "late")},
    "windows-of-windows": windows_of_windows,
    **{f"{output}-sessions": sessions(output) for output in ("closed", "late")},
    **{f"{output}-expiring": expiring(output) for output in ("changed", "expired", "late")},
    "as-of-join": newest_of_a_time,
    "now-join": current_row,
    "lookup": lookups("k"),
    "lookup-of-two": lookups("k", "n"),
    "async": awaited,
    **{f"{how}-join": pairs(how) for how in ("inner", "left", "right", "outer")},
}


# --- sinks ----------------------------------------------------------------------------------------


def into_sinks(program: Program, name: str, folder: Path, parallelism: int) -> dict[str, list[Row]]:
    """End the stream in one sink of each kind. Returns what each should hold."""
    stream, rows = program.stream, [row for batch in program.batches for row in batch]
    stream.append_into(parquet(folder / name), name=f"{name}-rows", parallelism=parallelism)
    totals = stream.group_by("k").agg(rows=count(), n=sum_("n"), most=max_("n"))
    totals.upsert_into(sqlite(folder / "a.db", f"{name}_totals"), name=f"{name}-totals", parallelism=parallelism)
    hours = stream.window(sliding("10 min", "5 min"), on="at").group_by("k").agg(n=sum_("n"))
    hours.upsert_into(sqlite(folder / "a.db", f"{name}_hours"), name=f"{name}-hours", parallelism=parallelism)
    by_key: dict[str, list[int]] = defaultdict(list)
    by_window: dict[tuple[datetime.datetime, str], int] = defaultdict(int)
    for row in rows:
        by_key[row["k"]].append(row["n"])
        for start in starts_of(row["at"], 10, 5):
            by_window[start, row["k"]] += row["n"]
    expected = {
        f"{name}-rows": rows,
        f"{name}-totals": [{"k": k, "rows": len(n), "n": sum(n), "most": max(n)} for k, n in by_key.items()],
        f"{name}-hours": [{"window_start": start, "k": k, "n": n} for (start, k), n in by_window.items()],
    }
    if program.ordered:
        newest = stream.latest_by("k", sequence_by="n", delete_when="n % 5 = 0")
        newest.upsert_into(sqlite(folder / "b.db", f"{name}_newest"), name=f"{name}-newest", parallelism=parallelism)
        held: dict[str, Row] = {}
        for row in rows:
            if row["k"] not in held or row["n"] >= held[row["k"]]["n"]:
                held[row["k"]] = row
        expected[f"{name}-newest"] = [row for row in held.values() if row["n"] % 5]
    return expected


# --- programs -------------------------------------------------------------------------------------


def in_time(drawn: list[tuple[str, int, int]]) -> list[Row]:
    """Rows of (k, n, minutes after the row before)."""
    times = accumulate(step for _, _, step in drawn)
    return [row_of(k, n, START + minutes(minute)) for (k, n, _), minute in zip(drawn, times, strict=True)]


#: Time goes on by the lengths of the operators, so rows come just at their ends, and sometimes goes
#: back.
STEPS = [0, 0, 1, 1, 2, 3, 5, 5, 7, 10, 14, 30, -1, -3, -5, -20]
ROWS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(-4, 9), st.sampled_from(STEPS)), min_size=1, max_size=14
).map(in_time)
#: The choices for each part of an operator.
KINDS, SHORT, LONG, LATE = sorted(OPERATORS), [1, 5, 7], [5, 10, 14], [0, 0, 3, 20]
DRAWN = st.builds(
    Drawn,
    kind=st.sampled_from(KINDS),
    short=st.sampled_from(SHORT),
    long=st.sampled_from(LONG),
    late=st.sampled_from(LATE),
    parallelism=st.integers(1, 2),
)
#: The operators of each branch, after those that all branches share.
CHAINS = st.tuples(st.lists(DRAWN, max_size=2), st.lists(st.lists(DRAWN, max_size=2), min_size=1, max_size=2))
#: The arguments of ``check``, besides its folder.
PROGRAMS: dict[str, Any] = {
    "rows": ROWS,
    "chains": CHAINS,
    "take": st.integers(1, 5),
    "faults": st.lists(st.integers(0, 3), max_size=4),
    "tasks": st.integers(1, 2),
}


def check(
    folder: Path,
    rows: list[Row],
    chains: tuple[list[Drawn], list[list[Drawn]]],
    take: int,
    faults: list[int],
    tasks: int,
) -> None:
    """Raise ``AssertionError`` where the pipeline gives something else than plain Python."""
    pipeline = Pipeline("drawn", state=lambda name: sqlite(folder / "state.db", name))
    read = pipeline.read(rows, k=str, n=int, at=datetime.datetime)
    batches = [rows[first : first + take] for first in range(0, len(rows), take)]
    program = Program(read, batches, lambda name: sqlite(folder / "tables.db", name.replace("-", "_")))
    shared, branches = chains
    for number, drawn in enumerate(shared):
        program = OPERATORS[drawn.kind](program, drawn, f"shared{number}")
    expected: dict[str, list[Row]] = {}
    for branch, chain in enumerate(branches):
        own = program
        for number, drawn in enumerate(chain):
            own = OPERATORS[drawn.kind](own, drawn, f"step{branch}-{number}")
        expected |= into_sinks(own, f"sink{branch}", folder, tasks)
    tables = pipeline.test(take=take, faults=failures(faults, len(program.batches)))
    for name, its in expected.items():
        assert sorted_rows(tables[name]) == sorted_rows(its), name


def checked(**drawn: Any) -> None:
    """``check`` in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), **drawn)
