"""``python -m benchmarks.event_time_state_size``: the cost of many open windows, waiting records
and remembered ids, as JSON lines.

Each operator keeps ``--rows`` rows open in PostgreSQL or Redis, and each transaction then opens and
closes as many as it has records. In the same process are the driver and all tasks, so its memory is
the memory of both; with ``--executor spark``, the memory is that of the driver, of Spark's JVM and
of the largest Python worker. For comparison, the same runs with a hundredth of the rows. With
``--at-once``, the last transaction lets all rows fall due together. A run whose results are not
exact fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import psycopg
import pyarrow as pa
import redis

from framework import (
    CLOCK_STREAM,
    ArrowBolt,
    Fields,
    OpaquePartitionedTransactionalSpout,
    OutputFieldsDeclarer,
    PartitionPlanner,
    PartitionReader,
    Topology,
    TopologyContext,
    TransactionalTopologyBuilder,
    TransactionAttempt,
    submit,
    tumbling,
)
from framework.observe import configure_logging
from framework.topology.spouts import Meta
from framework.transactions import MemoryStore
from integration import PostgresServer, RedisServer
from integration.folder_permissions import open_folder
from sinks import (
    Count,
    DeduplicatingCommitter,
    JoiningCommitter,
    MapState,
    OpaqueMapState,
    PostgresBackend,
    RedisBackend,
    SessionCommitter,
    SqliteBackend,
    StateCommitter,
    WatermarkCommitter,
    WindowedCommitter,
)

#: Each operator, and the column by which its rows are due.
OPERATORS = {"deduplicate": "until", "windows": "window_end", "sessions": "due_at", "join": "due_at"}
STORES = ["postgres", "redis"]
#: The last of so many records repeats the id of the fifth before it.
REPEATS = 10
#: Transactions after all rows are open.
STEADY = 20
#: At least so many transactions open the rows.
FILLING = 5
#: Longer than a transaction takes that closes everything.
TIMEOUT_S = 7_200
LEFT = Fields(id=int, at=int, one=int)
WINDOW = 1_000
POSTGRES = {"shared_buffers": "512MB", "max_wal_size": "4GB"}


def ids_of(at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The id of the record of each microsecond."""
    return np.where(at % REPEATS == REPEATS - 1, at - 5, at)


class Numbers(OpaquePartitionedTransactionalSpout):
    """``total`` records, one per microsecond of event time, ``take`` per batch. The last batch is
    ``jump`` later than that."""

    def __init__(self, total: int, take: int, jump: int) -> None:
        self.total, self.take, self.jump = total, take, jump

    def output_fields(self) -> Fields:
        return LEFT

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        return NumbersPlanner(self.total, self.take)

    def reader(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionReader:
        return NumbersReader(self.total, self.jump)


class NumbersPlanner(PartitionPlanner):
    def __init__(self, total: int, take: int) -> None:
        self._total, self._take = total, take

    def partitions(self) -> list[str]:
        return ["0"]

    def plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta] | None:
        first = self._next(previous)
        last = min(first + self._take, self._total)
        return {"0": {"first": first, "next": last}} if last > first else None

    def empty_plan(self, previous: Mapping[str, Meta | None]) -> Mapping[str, Meta]:
        return {"0": {"first": self._next(previous), "next": self._next(previous)}}

    def lag(self, previous: Mapping[str, Meta | None]) -> int:
        return self._total - self._next(previous)

    def _next(self, previous: Mapping[str, Meta | None]) -> int:
        return int((previous.get("0") or {"next": 0})["next"])


def times_of(at: np.ndarray[Any, Any], first: int, jump: int) -> np.ndarray[Any, Any]:
    """The times of records. ``first``: the number of the first one of the last batch."""
    return np.where(at >= first, at + jump, at)


class NumbersReader(PartitionReader):
    def __init__(self, total: int, jump: int) -> None:
        self._total, self._jump = total, jump

    def read(self, attempt: TransactionAttempt, partition: str, meta: Meta) -> Iterator[pa.RecordBatch]:
        at = np.arange(meta["first"], meta["next"], dtype=np.int64)
        last = meta["first"] if meta["next"] == self._total else self._total
        columns = [ids_of(at), times_of(at, last, self._jump), np.zeros(len(at), np.int64)]
        yield pa.RecordBatch.from_arrays(columns, names=list(LEFT))


class NoPayments(ArrowBolt):
    """An empty right side: all records of the left one wait until the bound has passed."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([batch.column(0)[:0], batch.column(1)[:0]], names=["id", "paid_at"])

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(Fields(id=int, paid_at=int))


def topology(operator: str, state: MapState, rows: int, numbers: Numbers, folder: Path) -> Topology:
    """``rows``: how many microseconds a row stays open. ``sent`` counts what the operator sends.
    ``folder``: for the states that are not measured."""
    builder = TransactionalTopologyBuilder("open-rows", "numbers", numbers)
    open_for, none = datetime.timedelta(microseconds=rows), datetime.timedelta()
    lag = open_for if operator == "windows" else none  # the others stay open by a bound of their own
    watermark = WatermarkCommitter(
        OpaqueMapState(SqliteBackend(folder / "watermark.db", "watermark")), "at", out_of_orderness=lag, unit="us"
    )
    builder.set_bolt("watermark", watermark).global_grouping("numbers").global_grouping("numbers", CLOCK_STREAM)
    one: dict[str, Any] = {"on": "at", "key": ["id"], "unit": "us"}
    both: dict[str, Any] = {"key": ["id"], "left": "at", "right": "paid_at", "unit": "us"}
    count, window = {"n": Count()}, tumbling(datetime.timedelta(microseconds=WINDOW))
    makers: dict[str, Any] = {
        "deduplicate": lambda: DeduplicatingCommitter(state, within=open_for, **one),
        "windows": lambda: WindowedCommitter(state, window, aggregates=count, **one),
        "sessions": lambda: SessionCommitter(state, open_for, aggregates=count, **one),
        "join": lambda: JoiningCommitter(state, within=open_for, how="left", **both),
    }
    bolt = builder.set_bolt("operator", makers[operator](), 2).all_grouping("watermark")
    bolt.fields_grouping("numbers", Fields("id"))
    if operator == "join":
        builder.set_bolt("payments", NoPayments()).shuffle_grouping("numbers")
        bolt.fields_grouping("payments", Fields("id"))
    by = "n" if operator in ("windows", "sessions") else "one"
    sent = StateCommitter(OpaqueMapState(SqliteBackend(folder / "sent.db", "sent")), [by], {"rows": Count()})
    builder.set_bolt("sent", sent).global_grouping("operator")
    return builder.build()


def expected(operator: str, rows: int, numbers: Numbers) -> int:
    """The number of rows that the operator sends."""
    numbered = np.arange(numbers.total, dtype=np.int64)
    ids = ids_of(numbered)
    at = times_of(numbered, (numbers.total - 1) // numbers.take * numbers.take, numbers.jump)
    watermark = int(at[-1])
    if operator == "deduplicate":
        return len(np.unique(ids))
    if operator == "windows":
        closed = (at // WINDOW + 1) * WINDOW <= watermark - rows
        return len(np.unique(np.stack([ids[closed], at[closed] // WINDOW]), axis=1).T)
    if operator == "sessions":
        order = np.lexsort((at, ids))
        ids, at = ids[order], at[order]
        ends = np.append((ids[1:] != ids[:-1]) | (at[1:] - at[:-1] >= rows), [True])
        return int(np.count_nonzero(at[ends] + rows <= watermark))
    return int(np.count_nonzero(at + rows < watermark))


class Memory:
    """Samples memory, in megabytes, and the processor time of this process, in seconds, until the
    block ends. Memory is the resident memory of this process; of its Java processes together; and
    of the largest process of Python below it."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[str, float], float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        this = psutil.Process()
        while not self._ended.wait(0.25):
            found = {"driver": this.memory_info().rss / 1e6}
            for each in this.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    name, size = each.name(), each.memory_info().rss / 1e6
                    if name == "java":
                        found["jvm"] = found.get("jvm", 0.0) + size
                    elif name.startswith("python"):
                        found["worker"] = max(found.get("worker", 0.0), size)
            self.samples.append((time.monotonic(), found, time.process_time()))

    def between(self, first_s: float, last_s: float) -> dict[str, int]:
        """The most memory in a stretch of time, of each kind of process."""
        most: dict[str, int] = {}
        for at, found, _ in self.samples:
            if first_s <= at <= last_s:
                most |= {kind: max(most.get(kind, 0), round(size)) for kind, size in found.items()}
        return most

    def cpu_between(self, first_s: float, last_s: float) -> float:
        """The processor time in a stretch of time."""
        spent = [each for at, _, each in self.samples if first_s <= at <= last_s]
        return round(spent[-1] - spent[0], 1) if spent else 0.0


def measure(
    store: str, address: str, operator: str, rows: int, numbers: Numbers, *, folder: Path, executor: str
) -> dict[str, Any]:
    """Raises ``RuntimeError`` if the number of sent rows is wrong."""
    backend = (RedisBackend if store == "redis" else PostgresBackend)(address, "open_rows")
    total, take = numbers.total, numbers.take
    built = topology(operator, OpaqueMapState(backend), rows, numbers, folder)
    committed: dict[int, float] = {}
    begun_s = time.monotonic()
    conf = {"topology.message.timeout.secs": TIMEOUT_S, "spark.master": "local[2]"}
    with Memory() as memory, submit(built, conf, store=MemoryStore(), executor=executor) as run:
        wanted = -(-total // take)
        while len(committed) < wanted:
            with contextlib.suppress(TimeoutError):
                run.wait_for_commit(wanted, 1)
            # The run keeps its last events only.
            committed.update((each.txid, each.at_s) for each in run.events() if each.kind == "committed")
        sent = built["sent"].states[0]
        if not isinstance(sent, MapState):
            raise TypeError(type(sent).__name__)
        found = sum(row.value[0] for _, row in sent.backend.scan() if row.value is not None)
        kept = looked_up(store, address, OPERATORS[operator], total)
    if found != (wanted := expected(operator, rows, numbers)):
        raise RuntimeError(f"{operator}: {found:,} rows were sent, and {wanted:,} are expected")
    times = [committed[txid] for txid in sorted(committed)]
    if numbers.jump:
        return {
            "rows_open": rows,
            "at_once_s": round(times[-1] - times[-2], 1),
            "at_once_cpu_s": memory.cpu_between(times[-2], times[-1]),
            "memory_mb": {
                "before": memory.between(begun_s, times[-2]),
                "at_once": memory.between(times[-2], times[-1]),
            },
            **kept,
            "exact": True,
        }
    took = [after - before for before, after in itertools.pairwise(times)]
    filling, steady = took[:-STEADY], took[-STEADY:]
    fifth = max(len(filling) // 5, 1)
    middle = begun_s + (times[-1] - begun_s) / 2
    return {
        "rows_open": rows,
        "records_per_batch": take,
        "batches": len(times),
        "filling_s_per_batch": round(statistics.median(filling), 3),
        "filling_last_to_first": round(statistics.median(filling[-fifth:]) / statistics.median(filling[:fifth]), 2),
        "steady_s_per_batch": round(statistics.median(steady), 3),
        "steady_last_to_first": round(
            statistics.median(steady[-STEADY // 2 :]) / statistics.median(steady[: STEADY // 2]), 2
        ),
        "memory_mb": {
            "after_three_batches": memory.between(begun_s, times[2]),
            "first_half": memory.between(begun_s, middle),
            "second_half": memory.between(middle, times[-1]),
        },
        "records_per_s": round(total / (times[-1] - begun_s)),
        **kept,
        "exact": True,
    }


def looked_up(store: str, address: str, column: str, upto: int) -> dict[str, Any]:
    """How the store finds the rows that are due next."""
    if store == "redis":
        with redis.Redis.from_url(address) as client:
            key = "{open_rows}:due"
            return {"rows_held": client.zcard(key), "found_by": f"{client.type(key).decode()} {key}"}
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("ANALYZE open_rows")
        held = connection.execute("SELECT count(*) FROM open_rows WHERE NOT _deleted").fetchone()
        query = (
            f"EXPLAIN SELECT * FROM open_rows WHERE {column} > {upto} AND {column} <= {upto + WINDOW} AND NOT _deleted"
        )
        plan = connection.execute(query.encode()).fetchall()
    return {"rows_held": held[0] if held else 0, "found_by": [line.strip() for (line,) in plan[:2]]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.event_time_state_size", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="open rows; a hundredth is measured for comparison")
    parser.add_argument("--batch-records", type=int, default=5_000)
    parser.add_argument("--at-once", action="store_true", help="let all rows fall due in the last transaction")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--executor", choices=["local", "spark"], default="local")
    arguments = parser.parse_args()
    take = arguments.batch_records
    configure_logging(level="warning")
    for store in arguments.stores:
        for operator in arguments.operators:
            for rows in (max(arguments.rows // 100, FILLING * take), max(arguments.rows, FILLING * take)):
                jump, steady = (3 * rows, 1) if arguments.at_once else (0, STEADY)
                with open_folder() as folder:
                    server = (
                        RedisServer(folder / "redis")
                        if store == "redis"
                        else PostgresServer(folder / "postgres", settings=POSTGRES)
                    )
                    with server:
                        address = server.url if isinstance(server, RedisServer) else server.dsn
                        numbers = Numbers(rows + steady * take, take, jump)
                        found = measure(
                            store, address, operator, rows, numbers, folder=folder, executor=arguments.executor
                        )
                print(json.dumps({"store": store, "operator": operator, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
