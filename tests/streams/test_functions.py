"""Functions of the user: plain ones and ``async def``, with setup, retries and time-outs."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from framework.call_site import Call
from framework.errors import BadRecordError, RetryableError, TopologyError
from framework.execution.collector import TaskCollector
from framework.streams import function_calls
from framework.streams.function_calls import Calls, calls_of
from framework.streams.row_growth_limits import ROWS_AT_A_TIME
from framework.streams.stateless_steps import applied
from framework.streams.steps_bolt import Branch, StepsBolt
from framework.testing import fail_attempt, replay
from framework.topology import DEFAULT_STREAM, Fields, TopologyContext
from framework.transactions.code_version import code_digest
from framework.transactions.run import TopologyFailed
from ratchet import Json, OpaqueMemoryTransactionalSpout, Pipeline, Stream, Text, parquet, sqlite
from tests.kit.processes import ROOT
from tests.kit.waiting import PATIENCE_S

CALL = Call("map(function)", "job.py:3")
ROWS = [{"n": n} for n in range(6)]
OPTIONS: dict[str, Any] = {"setup": None, "concurrency": None, "timeout": None, "retries": 0}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_calls, "_DELAY_S", 0.0)


def calls(function: Callable[..., Any], **options: Any) -> Calls:
    return calls_of(CALL, function, str(id(function)), **{**OPTIONS, **options})


def rows_of(tmp_path: Path, make: Callable[[Stream], Stream], **options: Any) -> list[Any]:
    pipeline = Pipeline("rows")
    make(pipeline.read(ROWS)).append_into(parquet(tmp_path / "out"), name="out")
    return list(pipeline.test(**options)["out"])


class Together:
    """Counts the calls that are under way at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, n: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(6 - n):  # the first ones are the last to end
            await asyncio.sleep(0)
        self.now -= 1
        return n * 10


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_results_are_in_the_order_of_the_arguments_and_calls_are_bounded(concurrency: int) -> None:
    function = Together()
    assert calls(function, concurrency=concurrency).results(range(6)) == [0, 10, 20, 30, 40, 50]
    assert function.most == min(concurrency, 6)


def test_rows_of_async_functions_keep_their_order(tmp_path: Path) -> None:
    async def twice(row: dict[str, Any]) -> dict[str, Any]:
        for _ in range(6 - row["n"]):
            await asyncio.sleep(0)
        return {"n": row["n"], "twice": row["n"] * 2}

    async def both(row: dict[str, Any]) -> list[int]:
        return [row["n"], row["twice"]]

    def stream(read: Stream) -> Stream:
        return read.map(twice, n=int, twice=int).flat_map(both, m=int)

    expected = [m for n in range(6) for m in (n, n * 2)]
    last: Any = stream(Pipeline("rows").read(ROWS))._node
    batch = pl.DataFrame(ROWS).to_arrow().to_batches()[0]
    assert applied([last.above.step, last.step], batch)["m"].to_list() == expected
    rows = rows_of(tmp_path, stream, take=4, faults=[replay(), fail_attempt(2)])
    assert sorted(row["m"] for row in rows) == sorted(expected)


def test_tables_are_no_larger_than_the_batch_size(tmp_path: Path) -> None:
    async def heights(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(n="n", height=pl.lit(frame.height))

    rows = rows_of(tmp_path, lambda s: s.map_batches(heights, kind="polars", batch_size=4, n=int, height=int))
    assert [(row["n"], row["height"]) for row in rows] == [(n, 4 if n < 4 else 2) for n in range(6)]


@pytest.mark.parametrize("faults", [[], [replay(), fail_attempt(2)]], ids=["none", "faults"])
def test_a_function_gets_all_rows_of_a_task_and_transaction_in_one_call(tmp_path: Path, faults: list[Any]) -> None:
    def numbered(frames: Iterator[pl.DataFrame], factor: int) -> Iterator[pl.DataFrame]:
        rows = pl.concat(frames)
        for start in (0, 2):
            yield rows.slice(start, 2).select(n=pl.col("n") * factor, of=pl.lit(rows.height))

    def stream(read: Stream) -> Stream:
        made = read.flat_map(lambda row: [row, row], n=int).map_partitions(
            numbered, kind="polars", setup=lambda: 10, n=int, of=int
        )
        return made.with_columns(n="n + 1").map_partitions(lambda tables: tables, n=int, of=int)

    rows = rows_of(tmp_path, stream, take=[2, 1], faults=faults)
    # Of four rows at most, which are 0, 0, 1, 1; then two rows of each.
    expected = [{"n": n, "of": 4} for n in (1, 1, 11, 11)] + [
        {"n": n * 10 + 1, "of": 2} for n in range(2, 6) for _ in "ab"
    ]
    assert sorted(rows, key=lambda row: row["n"]) == expected


def test_rows_around_tables_of_tombstones_are_given_once(tmp_path: Path) -> None:
    """Where the same bolt leads to a table that tombstones delete rows of."""
    pipeline = Pipeline("shop")
    value = Json(n=int)
    read = pipeline.read_kafka("orders", key=Text("id"), value=value, bootstrap_servers="127.0.0.1:1")
    read = read.with_columns(n="n + 1")
    read.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "t"), name="t")
    read.map_partitions(lambda tables: list(tables), id=str, n=int).append_into(parquet(tmp_path / "out"), name="out")
    records = [{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "tombstone": True}]
    found = pipeline.test({"orders": records})
    assert [row["id"] for row in found["t"]] == ["b"]
    rows = sorted((row["id"], row["n"] or 0) for row in found["out"])
    assert rows == [("a", 0), ("a", 2), ("b", 3)]
    with pytest.raises(
        TopologyError, match=r"map_partitions\(<lambda>\) gives 'id' a value that a tombstone does not have"
    ):
        again = read.map_partitions(lambda tables: list(tables), id=str, n=int)
        again.latest_by("id").upsert_into(sqlite(tmp_path / "a.db", "u"), name="u")
        pipeline.build()


def test_what_a_function_of_tables_returns_is_checked(tmp_path: Path) -> None:
    for returned, told in (
        (pl.DataFrame(ROWS), "it returned a DataFrame: yield tables, or return a list of them"),
        (5, "it returned 5: yield tables, or return a list of them"),
        (None, "it returned None: yield tables"),
        ([5], "it returned a int: return a table or a record batch of Arrow"),
        ([pl.DataFrame({"m": [1]})], "what it returned has no column 'n'"),
    ):
        with pytest.raises(TopologyFailed, match=f"test_functions.py:.*{told}"):
            rows_of(tmp_path, lambda s, returned=returned: s.map_partitions(lambda tables: returned, n=int))  # type: ignore[misc]


class Fails:
    """Raises these errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.called = 0

    def plain(self, n: int) -> int:
        self.called += 1
        if self.errors:
            raise self.errors.pop(0)
        return n

    async def awaited(self, n: int) -> int:
        return self.plain(n)


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_a_call_that_fails_is_made_again(kind: str) -> None:
    fails = Fails(ValueError("one"), ConnectionError("two"))
    assert calls(getattr(fails, kind), retries=2).results([7]) == [7]
    fails = Fails(*[ValueError("never")] * 3)
    with pytest.raises(ValueError, match="never"):
        calls(getattr(fails, kind), retries=2).results([7])
    assert fails.called == 3


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_a_server_that_does_not_answer_is_asked_again_with_the_batch(kind: str) -> None:
    fails = Fails(*[ConnectionRefusedError("no one there")] * 2)
    with pytest.raises(
        RetryableError, match=r"job.py:3: map\(function\): ConnectionRefusedError, 2 of 2 tries: no one"
    ):
        calls(getattr(fails, kind), retries=1).results([7])


@pytest.mark.parametrize(("refusals", "ends"), [(3, True), (1_000, False)])
def test_a_test_ends_where_a_server_never_answers(refusals: int, ends: bool, tmp_path: Path) -> None:
    def asks(row: dict[str, Any]) -> int:
        with (tmp_path / "asked").open("a") as asked:
            asked.write("x")
        if (tmp_path / "asked").stat().st_size <= refusals:
            raise ConnectionRefusedError("no one there")
        return 1

    pipeline = Pipeline("shop")
    pipeline.read([{"n": 1}]).map(asks, x=int).append_into(parquet(tmp_path / "a"), name="a")
    if ends:
        assert list(pipeline.test()["a"]) == [{"x": 1}]
        return
    with pytest.raises(TopologyFailed, match=r"^rows-steps\[0\]: .*ConnectionRefusedError, 1 of 1 tries: no one there"):
        pipeline.test()


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_a_bad_row_is_not_tried_again(kind: str) -> None:
    fails = Fails(BadRecordError("7 is odd"))
    with pytest.raises(BadRecordError, match="7 is odd"):
        calls(getattr(fails, kind), retries=5).results([7])
    assert fails.called == 1


def test_a_call_that_takes_too_long_is_ended_and_made_again() -> None:
    tried: Counter[int] = Counter()
    ended = []

    async def slow_at_first(n: int) -> int:
        tried[n] += 1
        if tried[n] == 1:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(n)
        return n

    assert calls(slow_at_first, timeout=0.01, retries=1).results([1, 2]) == [1, 2]
    assert sorted(ended) == [1, 2]
    with pytest.raises(RetryableError, match="TimeoutError, 1 of 1 tries: no answer in time"):
        calls(slow_at_first, timeout=0.01).results([3])


def test_a_call_that_fails_ends_the_others() -> None:
    ended = []

    async def fails_at_3(n: int) -> int:
        if n == 3:
            raise BadRecordError("3 is bad")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(n)
        return n

    with pytest.raises(BadRecordError, match="3 is bad"):
        calls(fails_at_3).results([1, 2, 3, 4])
    assert sorted(ended) in ([1, 2], [1, 2, 4])


def test_a_bad_row_of_an_async_function_goes_the_way_of_the_spout(tmp_path: Path) -> None:
    async def positive(row: dict[str, Any]) -> int:
        if row["n"] == 3:
            raise BadRecordError("3 is bad")
        return row["n"]

    pipeline = Pipeline("rows")
    spout = OpaqueMemoryTransactionalSpout({0: [[n] for n in range(6)]}, Fields(n=int), 4, on_bad_record="skip")
    pipeline.spout(spout).map(positive, n=int).append_into(parquet(tmp_path / "out"), name="out")
    pipeline.run(executor="local", timeout_s=PATIENCE_S)
    found = pl.read_parquet(tmp_path / "out" / "**" / "*.parquet")
    assert sorted(found["n"]) == [0, 1, 2, 4, 5]


#: What setups have made. Functions travel to tasks, and what is in a module does not.
MADE: list[Any] = []


async def made_in_the_loop() -> asyncio.AbstractEventLoop:
    MADE.append("client")
    return asyncio.get_running_loop()


async def asked_in_the_loop(row: dict[str, Any], made: asyncio.AbstractEventLoop) -> bool:
    return asyncio.get_running_loop() is made


def loaded() -> int:
    MADE.append("model")
    return 10


def test_setup_is_called_once_in_a_process_where_the_function_runs(tmp_path: Path) -> None:
    def stream(read: Stream) -> Stream:
        added = read.map(lambda row, more: row["n"] + more, setup=loaded, n=int)
        return added.map(asked_in_the_loop, setup=made_in_the_loop, same=bool)

    assert [row["same"] for row in rows_of(tmp_path, stream, take=2)] == [True] * 6
    assert sorted(MADE) == ["client", "model"]


def test_threads_of_a_process_share_one_setup() -> None:
    made = []
    begun = threading.Barrier(4)
    shared = calls(lambda n, more: more, setup=lambda: made.append(1) or len(made))

    def ask() -> None:
        begun.wait()
        assert shared.results([1]) == [1]

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert made == [1]


def test_a_function_that_ends_its_process_or_itself_fails_its_call_alone() -> None:
    async def leaves(n: int) -> int:
        sys.exit(3)

    async def cancels(n: int) -> int:
        raise asyncio.CancelledError

    async def works(n: int) -> int:
        return n

    with pytest.raises(RuntimeError, match=r"the function called sys.exit\(3\)"):
        calls(leaves).results([1])
    with pytest.raises(RuntimeError, match="the function cancelled itself"):
        calls(cancels).results([1])
    assert calls(works).results([1]) == [1]


def test_calls_of_an_attempt_that_is_cancelled_are_ended() -> None:
    """The task looks while it waits, and not at the next batch only."""
    begun, ended = threading.Event(), threading.Event()

    async def hangs(row: dict[str, Any]) -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise
        return 1

    class Cancelled(Exception):
        pass

    def check_alive() -> None:
        if begun.is_set():
            raise Cancelled

    pipeline = Pipeline("rows")
    step: Any = pipeline.read(ROWS).map(hangs, n=int)._node
    bolt = StepsBolt(Branch(step.step, [DEFAULT_STREAM], []), {DEFAULT_STREAM: step.schema})
    collector = TaskCollector("steps", {DEFAULT_STREAM: Fields(n=int)})
    collector.check_alive = check_alive
    bolt.prepare({}, TopologyContext("t", "steps", 0, 1), collector, None)
    with pytest.raises(Cancelled):
        bolt.execute_arrow(pl.DataFrame(ROWS).to_arrow().to_batches()[0])
    assert ended.wait(PATIENCE_S)


ENDS = """
import asyncio, threading
from framework.call_site import Call
from framework.streams.function_calls import calls_of

begun = threading.Event()

async def hangs(n):
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        print("ended", flush=True)

calls = calls_of(Call("", ""), hangs, "k", setup=None, concurrency=None, timeout=600, retries=0)
threading.Thread(target=calls.results, args=([1],), daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_a_process_that_ends_cancels_what_is_under_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=ROOT
    )
    assert done.stdout == "ended\n"
    assert "was destroyed" not in done.stderr


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    async def process(n: int) -> int:
        return os.getpid()

    own = calls(process)
    assert own.results([1]) == [os.getpid()]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))
        os.write(write, str(own.results([1])[0] == os.getpid()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"True"


async def async_rows(row: Any) -> Any: ...


async def async_yields(row: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (len, {"concurrency": 2}, "concurrency is for an async def"),
        (len, {"timeout": "1 s"}, "timeout is for an async def"),
        (len, {"retries": -1}, "retries is -1"),
        (len, {"setup": 5}, "setup is 5: give a function"),
        (len, {"setup": async_rows}, "setup is an async def, and the function is not"),
        (async_rows, {"concurrency": 0}, "concurrency is 0: give a number of 1 or more"),
        (async_rows, {"timeout": 0}, "timeout is 0: give a length of time above 0"),
        (async_rows, {"timeout": "soon"}, "timeout is 'soon': give a length of time"),
        (async_yields, {}, "an async def that yields is not taken: return a list"),
    ],
)
def test_options_that_do_not_fit_are_refused(function: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        Pipeline("p").read(ROWS).map(function, **options, n=int)


def test_a_coroutine_is_not_taken_for_a_value() -> None:
    with pytest.raises(TopologyError, match="filter takes no async def"):
        Pipeline("p").read(ROWS).filter(async_rows)
    with pytest.raises(TopologyError, match="the function returned a coroutine: give the async def itself"):
        calls(lambda row: async_rows(row)).results([1])


def test_the_history_tells_when_the_code_of_a_function_has_changed(tmp_path: Path) -> None:
    """Functions are deep inside of the bolt of a pipeline."""
    pipeline = Pipeline("rows")
    pipeline.read(ROWS).map(calls, n=int).append_into(parquet(tmp_path / "out"), name="out")
    (steps,) = (each.instance for each in pipeline.build().components if isinstance(each.instance, StepsBolt))
    assert code_digest([steps]) != ""


async def process_of_the_loop() -> tuple[int, int]:
    return os.getpid(), id(asyncio.get_running_loop())


async def where(row: dict[str, Any], made: tuple[int, int]) -> dict[str, Any]:
    assert made == (os.getpid(), id(asyncio.get_running_loop()))
    return {"n": row["n"], "pid": os.getpid()}


async def squares(keys: list[int]) -> dict[int, int]:
    return {key: key * key for key in keys}


def test_async_functions_run_in_the_workers_of_spark(spark: str, tmp_path: Path) -> None:
    pipeline = Pipeline("rows")
    read = pipeline.read([{"n": n} for n in range(2_000)])
    found = read.map(where, setup=process_of_the_loop, n=int, pid=int).lookup(
        squares, on="n", batch_size=100, cache="1 h", square=int
    )
    found.append_into(parquet(tmp_path / "out"), name="out")
    pipeline.run({"spark.master": spark}, timeout_s=PATIENCE_S)
    rows = pl.read_parquet(tmp_path / "out" / "**" / "*.parquet")
    assert sorted(rows["n"]) == list(range(2_000))
    assert (rows["square"] == rows["n"] * rows["n"]).all()
    assert os.getpid() not in set(rows["pid"])


@pytest.mark.parametrize("operator", ["map_batches", "map_partitions"])
def test_a_number_in_a_table_is_no_time(operator: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyFailed, match="it returned int64 for 'n', and a number of a time has no unit"):
        rows_of(tmp_path, lambda s: getattr(s, operator)(lambda given: given, n=datetime.datetime))


def test_rows_with_a_large_value_of_a_function_leave_in_parts() -> None:
    large = "x" * 1_000_000
    stream: Any = Pipeline("rows").read([], n=int).map(lambda row: {"n": row["n"], "text": large}, n=int, text=str)
    frame, n, most = pl.DataFrame({"n": range(1_000)}), 0, 0
    for part in stream._node.step.applied(frame):
        assert part["n"].to_list() == list(range(n, n + part.height))
        n, most = n + part.height, max(most, part.estimated_size())
    assert n == 1_000
    assert most <= 1.1 * ROWS_AT_A_TIME * len(large)


def read_table(table: pa.Table) -> pa.Table:
    return pa.Table.from_pylist([json.loads(each) for each in table["text"].to_pylist()])


GOOD, DEEP = '{"n": 1, "m": 2}', "[" * 800 + "]" * 800
#: Steps whose function reads text as JSON, and a text that it reads well.
READERS: dict[str, tuple[Callable[[Stream], Stream], str]] = {
    "map": (lambda s: s.map(lambda row: json.loads(row["text"]), n=int, m=int), GOOD),
    "flat_map": (lambda s: s.flat_map(lambda row: json.loads(row["text"]), n=int, m=int), f"[{GOOD}]"),
    "lookup": (lambda s: s.lookup(json.loads, on="text", n=int, m=int), GOOD),
    "lookups": (
        lambda s: s.lookup(lambda keys: json.loads(keys[0]), on="text", batch_size=1, n=int, m=int),
        f"[{GOOD}]",
    ),
    "map_batches": (lambda s: s.map_batches(read_table, n=int, m=int), GOOD),
    "time": (lambda s: s.map(lambda row: {"n": json.loads(row["text"])}, n=datetime.date), "null"),
}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        *(("map", text) for text in ('{"n": 1, "more": 2}', "[1]", "null", "5", '"x"', '{"n": "x"}', '{"n": {}}')),
        *(("flat_map", text) for text in (GOOD, "[5]", "null", '"x"', DEEP)),
        *(("lookup", text) for text in ('{"n": 1, "more": 2}', "[1]", '"x"', DEEP)),
        *(("lookups", text) for text in ("5", "[]", "[5]")),
        ("map_batches", '{"n": 1.5, "m": 2}'),
        ("time", "5"),
    ],
)
def test_json_of_another_shape_is_a_bad_record(step: str, text: str, tmp_path: Path) -> None:
    """A producer decides what a function returns that reads its text."""
    make, good = READERS[step]
    texts = [[good], [good], [text], [good]]
    spout = OpaqueMemoryTransactionalSpout({0: texts}, Fields(text=str), 4, on_bad_record="skip")
    pipeline = Pipeline("texts")
    make(pipeline.spout(spout)).append_into(sqlite(tmp_path / "a.db", "t"), name="t")
    pipeline.run(executor="local", timeout_s=PATIENCE_S)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert [n for (n,) in connection.execute("SELECT n FROM t")] == [None if step == "time" else 1] * 3
