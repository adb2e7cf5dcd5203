"""Pipelines that chance has drawn, with failures in between, against plain Python."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet import Pipeline, Stream, count, max_, parquet, sqlite, sum_
from tests.kit.targets import examples
from tests.streams import topic_programs

Row = dict[str, Any]
Step = tuple[Callable[[Stream], Stream], Callable[[list[Row]], list[Row]]]

#: Each keeps the columns k and n.
STEPS: list[Step] = [
    (lambda s: s.filter("n % 2 = 0"), lambda rows: [r for r in rows if r["n"] % 2 == 0]),
    (lambda s: s.filter(lambda row: row["n"] > 0), lambda rows: [r for r in rows if r["n"] > 0]),
    (lambda s: s.with_columns(n="n * 3 + 1"), lambda rows: [{**r, "n": r["n"] * 3 + 1} for r in rows]),
    (lambda s: s.with_columns(k="upper(k)"), lambda rows: [{**r, "k": r["k"].upper()} for r in rows]),
    (lambda s: s.with_columns(m="n + 1").drop("m"), lambda rows: rows),
    (lambda s: s.rename(k="x").rename(x="k"), lambda rows: rows),
    (
        lambda s: s.flat_map(lambda r: [(r["k"], r["n"]), (r["k"] + "x", 1)], k=str, n=int),
        lambda rows: [each for r in rows for each in ({"k": r["k"], "n": r["n"]}, {"k": r["k"] + "x", "n": 1})],
    ),
    (
        lambda s: s.select("k", n="n + 1").map_batches(lambda t: t, k=str, n=int),
        lambda rows: [{"k": r["k"], "n": r["n"] + 1} for r in rows],
    ),
    (
        lambda s: s.map_partitions(lambda tables: [t for t in tables for _ in range(2)], k=str, n=int),
        lambda rows: [r for r in rows for _ in range(2)],
    ),
    (
        lambda s: s.filter("n > 1").merge(s.filter("n <= 1"), s.with_columns(n="-n")),
        lambda rows: [*rows, *({**r, "n": -r["n"]} for r in rows)],
    ),
    (
        lambda s: s.branch(a="n > 2", b="k = 'a'")["b"],
        lambda rows: [r for r in rows if not r["n"] > 2 and r["k"] == "a"],
    ),
]

ROW = st.fixed_dictionaries({"k": st.sampled_from(["a", "b", "ß"]), "n": st.integers(-5, 5)})


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(ROW, max_size=12),
    shared=st.lists(st.sampled_from(STEPS), max_size=2),
    own=st.lists(st.lists(st.sampled_from(STEPS), max_size=2), min_size=1, max_size=3),
    take=st.integers(1, 5),
    kinds=st.lists(st.integers(0, 3), max_size=3),
    parallelism=st.integers(1, 2),
)
def test_a_pipeline_gives_what_plain_python_gives(
    rows: list[Row], shared: list[Step], own: list[list[Step]], take: int, kinds: list[int], parallelism: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline("drawn")
        stream = pipeline.read(rows, k=str, n=int)
        expected: dict[str, list[Row]] = {}
        plain = rows
        for step, python in shared:
            stream, plain = step(stream), python(plain)
        for number, steps in enumerate(own):
            its, found = stream, plain
            for step, python in steps:
                its, found = step(its), python(found)
            table = its.group_by("k").agg(rows=count(), n=sum_("n"), most=max_("n * 2"))
            table.upsert_into(sqlite(Path(folder) / "a.db", f"t{number}"), parallelism=parallelism)
            its.select("k", "n").append_into(parquet(Path(folder) / f"f{number}"), parallelism=parallelism)
            expected[f"t{number}"] = totals(found)
            expected[f"f{number}"] = sorted(({"k": r["k"], "n": r["n"]} for r in found), key=repr)
        transactions = -(-len(rows) // take)
        done = pipeline.test(take=take, faults=topic_programs.failures(kinds, transactions))
        assert {name: sorted(map(dict, its), key=repr) for name, its in done.items()} == expected


def totals(rows: list[Row]) -> list[Row]:
    by_key: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        by_key[row["k"]].append(row["n"])
    made = [{"k": k, "rows": len(n), "n": sum(n), "most": max(n) * 2} for k, n in by_key.items()]
    return sorted(made, key=repr)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(**topic_programs.PROGRAMS)
def test_a_topic_with_tombstones_and_bad_records_gives_what_plain_python_gives(**drawn: Any) -> None:
    topic_programs.check(**drawn)


@pytest.mark.slow
@settings(max_examples=3_000, deadline=None, database=None)
@given(**topic_programs.PROGRAMS)
def test_thousands_of_topics_give_what_plain_python_gives(**drawn: Any) -> None:
    topic_programs.check(**drawn)
