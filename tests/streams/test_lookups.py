"""Lookups: each row with what a function knows about its key."""

from __future__ import annotations

import datetime
import math
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields, submit
from framework.errors import BadRecordError, BatchTooLargeError, TopologyError
from framework.streams import lookups, row_growth_limits
from framework.streams.row_growth_limits import PART_BYTES
from framework.streams.stateless_steps import applied
from framework.testing import crash, fail_attempt, replay
from framework.transactions import MemoryStore
from ratchet import (
    Count,
    MemoryTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
    Pipeline,
    SqliteBackend,
    StateCommitter,
    Stream,
    TransactionalMapState,
    count,
    parquet,
    sqlite,
)
from tests.kit.waiting import PATIENCE_S

Row = dict[str, Any]
NAMES = {1: "ann", 2: "bob", 3: "cid"}
ROWS: list[Row] = [{"n": n, "who": who} for n, who in enumerate([1, 2, 1, None, 9, 3, 2, 1])]
FOUND = [(n, NAMES.get(row["who"])) for n, row in enumerate(ROWS)]


#: How often each key was asked for. Functions travel to tasks, and what is in a module does not.
ASKED: Counter[Any] = Counter()
NOW = [0.0]


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    ASKED.clear()


def one(key: Any) -> str | None:
    ASKED[key] += 1
    return NAMES.get(key)


async def awaited(key: Any) -> str | None:
    return one(key)


def some(keys: list[Any]) -> dict[Any, str]:
    ASKED["calls"] += 1
    return {key: name for key in keys if (name := one(key)) is not None}


def listed(keys: list[Any]) -> list[str | None]:
    ASKED["calls"] += 1
    return [one(key) for key in keys]


def told(keys: Any) -> Any:
    """The text of a key, or of each."""
    if isinstance(keys, list):
        return {key: told(key) for key in keys}
    ASKED[str(keys)] += 1
    return str(keys)


def another_each_time(key: int) -> str:
    ASKED[key] += 1
    return f"{key}-{ASKED[key]}"


def ten_seconds_later(row: Row) -> Row:
    NOW[0] += 10.0
    return row


def enriched(make: Callable[[Stream], Stream], rows: list[Row] | None = None, **options: Any) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline("rows")
        read = pipeline.read(ROWS if rows is None else rows, n=int, who=int)
        make(read).append_into(parquet(Path(folder) / "out"), name="out")
        return list(pipeline.test(**options)["out"])


@pytest.mark.parametrize("function", [one, awaited])
def test_each_row_has_the_answer_of_its_key_which_is_asked_for_once(function: Any) -> None:
    rows = enriched(lambda s: s.lookup(function, on="who", name=str))
    assert [(row["n"], row["name"]) for row in rows] == FOUND
    assert ASKED == {1: 1, 2: 1, 9: 1, 3: 1}


@pytest.mark.parametrize("function", [some, listed])
def test_a_function_of_several_keys_gets_no_more_than_the_batch_size(function: Any) -> None:
    rows = enriched(lambda s: s.lookup(function, on="who", batch_size=3, name=str))
    assert [(row["n"], row["name"]) for row in rows] == FOUND
    assert ASKED == {1: 1, 2: 1, 9: 1, 3: 1, "calls": 2}


def test_a_key_is_asked_for_once_by_a_task_that_gets_its_rows_in_parts() -> None:
    stream: Any = Pipeline("rows").read(ROWS, n=int, who=int).lookup(one, on="who", name=str)
    step = stream._node.step
    for part in range(2):
        batch = pa.RecordBatch.from_pylist(ROWS[part * 4 : part * 4 + 4], schema=pa.schema({"n": "i8", "who": "i8"}))
        assert applied([step], batch)["name"].to_list() == [name for _, name in FOUND[part * 4 : part * 4 + 4]]
    assert ASKED == {1: 1, 2: 1, 9: 1, 3: 1}


@pytest.mark.rule("C29")
@pytest.mark.parametrize("take", [1, 3, 1000])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"cache": "1 h"}], ids=str)
def test_keys_that_are_equal_are_one_key_in_batches_of_any_size(take: int, options: Any) -> None:
    rows = [{"k": key, "n": 1} for key in (math.nan, -0.0, None, 1.5, float("-nan"), 0.0)]
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline("rows")
        read = pipeline.read(rows, k=float, n=int)
        read.lookup(told, on="k", a=str, **options).append_into(parquet(Path(folder) / "out"), name="out")
        read.lookup(told, on=["n", "k"], b=str, **options).drop("k").append_into(parquet(Path(folder) / "b"), name="b")
        made = pipeline.test(take=take)
    assert sorted(str(row["a"]) for row in made["out"]) == ["0.0", "0.0", "1.5", "None", "nan", "nan"]
    assert Counter(row["b"] for row in made["b"])["(1, nan)"] == 2
    if take == 1000 or "cache" in options:
        keys = ["nan", "0.0", "1.5", "(1, nan)", "(1, 0.0)", "(1, 1.5)"]
        assert dict.fromkeys(keys, 1) == ASKED


@pytest.mark.rule("C29")
@pytest.mark.parametrize("take", [1, 2])
def test_two_hours_of_one_name_are_two_keys(take: int) -> None:
    moments = pa.timestamp("us", "Europe/Berlin")
    rows = [{"at": datetime.datetime(2026, 10, 25, hour, 30, tzinfo=datetime.UTC)} for hour in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline("rows")
        read = pipeline.read(rows, at=moments)
        found = read.lookup(lambda at: f"{at:%H:%M %z}", on="at", cache="1 h", a=str)
        found.append_into(parquet(Path(folder) / "out"), name="out")
        assert {row["a"] for row in pipeline.test(take=take)["out"]} == {"02:30 +0200", "02:30 +0100"}


def test_several_columns_are_one_key() -> None:
    rows = enriched(
        lambda s: s.lookup(lambda key: {"sum": sum(key), "text": str(key)}, on=["n", "who"], sum=int, text=str)
    )
    assert [row["sum"] for row in rows] == [n + row["who"] if row["who"] else None for n, row in enumerate(ROWS)]
    assert rows[0]["text"] == "(0, 1)"


@pytest.mark.parametrize(("cache", "asked"), [(None, {1: 3, 2: 2, 9: 1, 3: 1}), ("1 h", {1: 1, 2: 1, 9: 1, 3: 1})])
def test_each_transaction_asks_again_without_a_cache_and_not_with_one(cache: Any, asked: dict[int, int]) -> None:
    rows = enriched(lambda s: s.lookup(one, on="who", cache=cache, name=str), take=2)
    assert [(row["n"], row["name"]) for row in rows] == FOUND
    assert asked == ASKED


def test_a_cache_forgets_what_is_old_and_holds_no_more_than_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row comes each ten seconds. Their keys: 1, 2, 1, none, 9, 3, 2, 1."""
    made: list[Any] = []

    def cache(size: int, ttl: float, **options: Any) -> Any:
        made.append(real(size, ttl, timer=lambda: NOW[0], **options))
        return made[-1]

    real = lookups.TTLCache
    monkeypatch.setattr(lookups, "TTLCache", cache)

    def stream(read: Stream) -> Stream:
        return read.map(ten_seconds_later, n=int, who=int).lookup(one, on="who", cache=25, cache_size=2, name=str)

    rows = enriched(stream, take=1)
    assert [(row["n"], row["name"]) for row in rows] == FOUND
    assert ASKED == {1: 2, 2: 2, 9: 1, 3: 1}
    assert len(made) == 1 and len(made[0]) == 2


def test_large_keys_and_answers_take_the_place_of_several_in_a_cache() -> None:
    """12 keys of 30 kB, in a cache of 16 keys of 8 KiB. One of 200 kB is not kept."""
    keys = [str(n % 10) * 15_000 for n in range(12)] + ["x" * 200_000]
    asked: Counter[str] = Counter()

    def large(key: str) -> str:
        asked[key[:1]] += 1
        return key[:15_000]

    stream: Any = Pipeline("rows").read([], who=str).lookup(large, on="who", cache="1 h", cache_size=16, name=str)
    step = stream._node.step
    for key in keys * 2:
        step.answered.clear()  # as in another transaction
        batch = pa.RecordBatch.from_pylist([{"who": key}])
        assert applied([step], batch)["name"].to_list() == [key[:15_000]]
    cache = lookups._caches[step.calls.key]
    assert len(cache) == 4
    assert cache.currsize <= 16 * lookups.KEY_BYTES
    assert asked["x"] == 2


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}])
def test_rows_with_large_answers_leave_in_parts(options: Any) -> None:
    """Each record of a few bytes gets an answer of 1 MB."""
    answer = "x" * 1_000_000

    def large(given: Any) -> Any:
        return [answer if key == 1 else "y" for key in given] if options else (answer if given == 1 else "y")

    stream: Any = Pipeline("rows").read([], n=int, who=int).lookup(large, on="who", name=str, **options)
    who = [1, 2, None] * 40
    frames = list(stream._node.step.applied(pl.DataFrame({"n": range(120), "who": who})))
    assert max(each.estimated_size() for each in frames) < 2 * PART_BYTES
    assert [row for each in frames for row in each["n"]] == list(range(120))
    sizes = [row for each in frames for row in each["name"].str.len_bytes()]
    assert sizes == [{1: 1_000_000, 2: 1, None: None}[each] for each in who]


def test_an_answer_that_is_too_large_for_a_row_is_a_bad_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_growth_limits, "ROW_BYTES_MAX", 20_000_000)
    stream: Any = Pipeline("rows").read([], who=int).lookup(lambda key: "x" * key, on="who", name=str)
    with pytest.raises(BadRecordError, match="an answer has 20,000,001 bytes: a row may become 20,000,000"):
        list(stream._node.step.applied(pl.DataFrame({"who": [1, 20_000_001]})))


async def thousands(key: int) -> str:
    ASKED["calls"] += 1
    return "x" * 1_000


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda key: f"{key:1000}", {}),
        (lambda keys: {key: f"{key:1000}" for key in keys}, {"batch_size": 2}),
        (thousands, {"concurrency": 2}),
        (lambda key: f"{key:1000}", {"cache": "1 h"}),
    ],
)
def test_answers_of_many_keys_are_held_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, function: Any, options: Any
) -> None:
    monkeypatch.setattr(lookups, "ANSWERS_BYTES_MAX", 10_000)
    stream: Any = Pipeline("rows").read([], who=int).lookup(function, on="who", name=str, **options)
    step = stream._node.step
    assert pl.concat(step.applied(pl.DataFrame({"who": range(5)}))).height == 5
    with pytest.raises(BatchTooLargeError, match="the answers for the keys of a batch have more than 10,000 bytes"):
        list(step.applied(pl.DataFrame({"who": range(1_000)})))
    assert ASKED["calls"] < 20


def test_a_large_answer_of_one_key_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ANSWERS_BYTES_MAX", 10_000)
    stream: Any = Pipeline("rows").read([], who=int).lookup(lambda key: "x" * 20_000, on="who", name=str)
    assert pl.concat(stream._node.step.applied(pl.DataFrame({"who": [1, 1]}))).height == 2


def counted(stream: Callable[[Stream], Stream], folder: Path) -> dict[str, dict[str, float]]:
    """The lookups in the records of all transactions, without their seconds."""
    pipeline = Pipeline("rows")
    stream(pipeline.read(ROWS, n=int, who=int)).append_into(parquet(folder / "out"), name="out")
    found: dict[str, Counter[str]] = {}
    with submit(pipeline.build(), store=MemoryStore(), executor="local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        for transaction in run.transactions():
            for name, counts in transaction.attempts[-1].lookups.items():
                assert counts["seconds"] >= 0
                found.setdefault(name, Counter()).update({kind: counts[kind] for kind in counts if kind != "seconds"})
    return {name: dict(counts) for name, counts in found.items()}


def test_records_of_transactions_tell_what_was_asked_for_cached_and_missing(tmp_path: Path) -> None:
    def stream(read: Stream) -> Stream:
        return read.lookup(one, on="who", cache="1 h", name=str).lookup(some, on="n", batch_size=3, other=str)

    found = counted(stream, tmp_path)
    asked = {"asked": 3, "missing": 1, "failed": 0}
    assert {name: found["rows-steps/one"][name] for name in asked} == asked
    assert found["rows-steps/some"] == {"asked": 3, "cached": 0, "missing": 5, "failed": 0}


def test_records_of_transactions_tell_of_repeated_calls(tmp_path: Path) -> None:
    def second_try(key: int) -> str | None:
        ASKED[key] += 1
        if ASKED[key] == 1:
            raise ConnectionError("reset")
        return NAMES.get(key)

    def stream(read: Stream) -> Stream:
        return read.lookup(second_try, on="who", retries=1, name=str)

    ((name, counts),) = counted(stream, tmp_path).items()
    assert name.endswith(".second_try") and counts["failed"] == 4


KEYS = st.one_of(st.none(), st.integers(-3, 3))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(KEYS, min_size=1, max_size=12),
    take=st.integers(1, 5),
    batch_size=st.sampled_from([None, 1, 2]),
    cache=st.sampled_from([None, "1 h"]),
    cache_size=st.integers(1, 3),
    faults=st.lists(st.sampled_from([replay, crash, fail_attempt]), max_size=3),
)
def test_rows_come_once_and_in_order_with_failures_in_between(
    keys: list[int | None], take: int, batch_size: int | None, cache: str | None, cache_size: int, faults: list[Any]
) -> None:
    def answer(key: int) -> tuple[int, str] | None:
        return (key * key, str(key)) if key % 2 else None

    function: Any = answer if batch_size is None else lambda its: [answer(key) for key in its]
    rows = [{"n": n, "who": key} for n, key in enumerate(keys)]
    transactions = -(-len(rows) // take)
    found = enriched(
        lambda s: s.lookup(
            function, on="who", batch_size=batch_size, cache=cache, cache_size=cache_size, square=int, text=str
        ),
        rows,
        take=take,
        faults=[fault(txid) for txid, fault in enumerate(faults, start=1) if txid <= transactions],
    )
    odd = [key if key is not None and key % 2 else None for key in keys]
    assert found == [
        {
            "n": n,
            "who": who,
            "square": key * key if key is not None else None,
            "text": str(key) if key is not None else None,
        }
        for n, (who, key) in enumerate(zip(keys, odd, strict=True))
    ]


def test_answers_that_change_leave_no_trace_of_the_attempt_before(tmp_path: Path) -> None:
    """C5: the answers of the last attempt count, in all tables of the transaction alike."""
    pipeline = Pipeline("rows")
    stream = (
        pipeline.read(ROWS, name="given", n=int, who=int)
        .filter("who is not null")
        .lookup(another_each_time, on="who", name=str)
    )
    stream.group_by("name").agg(rows=count()).upsert_into(sqlite(tmp_path / "a.db", "names"), name="names")
    stream.append_into(parquet(tmp_path / "rows"), name="rows")
    found = pipeline.test(take=4, faults=[replay(1), crash(2, when="written")])
    assert sum(row["rows"] for row in found["names"]) == 7
    by_row = Counter(row["name"] for row in found["rows"])
    assert by_row == {row["name"]: row["rows"] for row in found["names"]}


def test_a_bad_key_goes_the_way_of_the_spout(tmp_path: Path) -> None:
    def strict(keys: list[int]) -> list[str]:
        if 9 in keys:
            raise BadRecordError("nobody has number 9")
        return [NAMES[key] for key in keys]

    pipeline = Pipeline("rows")
    rows = [[row["n"], row["who"]] for row in ROWS if row["who"] is not None]
    spout = OpaqueMemoryTransactionalSpout({0: rows}, Fields(n=int, who=int), 4, on_bad_record="skip")
    stream = pipeline.spout(spout).lookup(strict, on="who", batch_size=10, name=str)
    stream.group_by("name").agg(rows=count()).upsert_into(sqlite(tmp_path / "a.db", "names"), name="names")
    pipeline.run(executor="local", timeout_s=PATIENCE_S)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert dict(connection.execute("SELECT name, rows FROM names_live")) == {"ann": 3, "bob": 2, "cid": 1}


def test_a_description_says_that_answers_may_change(tmp_path: Path) -> None:
    def described(**options: Any) -> str:
        pipeline = Pipeline("rows")
        stream = pipeline.read(ROWS).lookup(NAMES.get, on="who", cache="5 min", name=str, **options)
        stream.append_into(parquet(tmp_path / "out"), name="out")
        return pipeline.describe()

    assert "does       lookup(get, on='who', cache='5 min')" in described()
    assert "guarantee  a replay asks again, and may get other answers" in described()
    assert "other answers" not in described(deterministic=True)


def test_a_state_that_skips_replays_takes_no_answers_that_may_change(tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    state = TransactionalMapState(SqliteBackend(tmp_path / "a.db", "names"))
    spout = MemoryTransactionalSpout({0: []}, Fields(who=int), 4)
    stream = pipeline.spout(spout, name="rows").lookup(NAMES.get, on="who", name=str)
    stream.into(StateCommitter(state, ["name"], {"rows": Count()}), name="names")
    with pytest.raises(TopologyError, match="rows-steps"):
        pipeline.build()


TYPED = [{"who": 1, "name": "x", "tags": ["a"], "at": datetime.datetime(2026, 1, 1)}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on": "whom"}, "there is no column 'whom'; is it 'who'?"),
        ({"on": []}, "name at least one column, as in on='customer'"),
        ({"on": "tags"}, "column 'tags' is list<.*>, which is no key"),
        ({"on": "who", "name": str}, "there is a column 'name' already: give the answer another name"),
        ({"on": "who", "cache": 0, "x": str}, "cache is 0: give a length of time above 0"),
        ({"on": "who", "cache_size": 0, "x": str}, "cache_size is 0: give a number of 1 or more"),
        ({"on": "who", "batch_size": 0, "x": str}, "batch_size is 0: give a number of 1 or more"),
        ({"on": "who"}, "say which columns the function returns"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        Pipeline("p").read(TYPED).lookup(NAMES.get, **options)


@pytest.mark.parametrize("returned", [None, ["a"], "abc", 5])
def test_a_function_of_several_keys_answers_each(returned: Any) -> None:
    with pytest.raises(Exception, match="return a mapping of keys to answers, or a list with an answer for each key"):
        enriched(lambda s: s.lookup(lambda keys: returned, on="who", batch_size=10, name=str))
