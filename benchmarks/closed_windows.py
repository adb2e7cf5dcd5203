"""W9: five-minute windows per key, closed into a table of PostgreSQL, each once.

In turns with the loop that an engineer writes by hand: two processes that fold their partitions in
memory, COPY, and offsets that are committed after the rows, up to the oldest open window. So the
loop is at least once, and reads the open windows again after a crash. Both get records whose key is
the key of the window, so no record changes the process.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
from confluent_kafka import Consumer, TopicPartition

from benchmarks import workload
from framework import CLOCK_STREAM, Fields, Topology, TransactionalTopologyBuilder, tumbling
from integration import EmbeddedServers, PostgresServer
from integration.folder_permissions import open_folder
from sinks import (
    AppendCommitter,
    Count,
    OpaqueMapState,
    PostgresBackend,
    PostgresTable,
    Sum,
    WatermarkCommitter,
    WindowedCommitter,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout

KEYS, WINDOW_MS = 10_000, 300_000
#: Event time between two records: 1,000,000 of them last 50 minutes.
STEP_MS = 3
START_MS = 1_772_323_200_000
_VALUE = Fields(customer=str, at_ms=int, amount=int)
_SQL = "customer text, window_end timestamptz, n bigint, amount bigint"
_POSTGRES = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
#: Records between two transactions of the loop.
_LOOP_RECORDS = 100_000
_TABLES = ("closed", "closed_before", "closed_deleted", "clock", "open_windows", "_ratchet_headers", "_ratchet_written")

#: (key, end of the window in milliseconds) -> (records, sum of the amounts)
Windows = dict[tuple[str, int], tuple[int, int]]


def records(count: int) -> Iterator[tuple[str, int, int]]:
    """Key, event time and amount."""
    for number in range(count):
        yield f"cust-{number * 7_919 % KEYS:05d}", START_MS + number * STEP_MS, number % 997


def measure(servers: EmbeddedServers, count: int, repeat: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """``repeat`` rounds of the loop and Ratchet. Raises ``RuntimeError`` when a table is not the
    expected one."""
    topic = f"windows-{uuid.uuid4().hex[:6]}"
    workload.create_topic(servers.bootstrap_servers, topic)
    value = b'{"customer":"%s","at_ms":%d,"amount":%d}'
    workload.produce(
        servers.bootstrap_servers,
        topic,
        ((key.encode(), value % (key.encode(), at, amount)) for key, at, amount in records(count)),
    )
    expected = _expected(servers, topic, count)
    rates: dict[str, list[float]] = {"loop": [], "ratchet": []}
    with contextlib.ExitStack() as stack:
        server = PostgresServer(stack.enter_context(open_folder()), settings=_POSTGRES)
        server.start()
        stack.callback(server.stop)
        for _ in range(repeat):
            rates["loop"].append(count / _checked(server.dsn, expected[0], _loop(servers, server.dsn, topic, count)))
            rates["ratchet"].append(
                count / _checked(server.dsn, expected[1], _ratchet(servers, server.dsn, topic, config))
            )
    best = {name: max(found) for name, found in rates.items()}
    return {
        "workload": "W9",
        "messages": count,
        "windows": len(expected[1]),
        "records_per_s": round(best["ratchet"]),
        "runs": [round(each) for each in rates["ratchet"]],
        "loop_runs": [round(each) for each in rates["loop"]],
        "ratio_to_loop": round(best["ratchet"] / best["loop"], 3),
        "exact": True,
    }


# --- Ratchet --------------------------------------------------------------------------------------


def topology(name: str, bootstrap_servers: str, topic: str, dsn: str) -> Topology:
    spout = OpaqueKafkaTransactionalSpout(
        [topic], bootstrap_servers=bootstrap_servers, codec=JsonCodec(_VALUE), metadata=["partition"]
    )
    builder = TransactionalTopologyBuilder(name, "records", spout, 2)
    clock = OpaqueMapState(PostgresBackend(dsn, "clock"))
    watermark = WatermarkCommitter(clock, "at_ms", partition=["partition"], unit="ms")
    builder.set_bolt("watermark", watermark).global_grouping("records").global_grouping("records", CLOCK_STREAM)
    windows = WindowedCommitter(
        OpaqueMapState(PostgresBackend(dsn, "open_windows")),
        tumbling("5 min"),
        on="at_ms",
        key=["customer"],
        aggregates={"n": Count(), "amount": Sum("amount")},
        unit="ms",
    )
    builder.set_bolt("windows", windows, 2).fields_grouping("records", Fields("customer")).all_grouping("watermark")
    closed = AppendCommitter(PostgresTable(dsn, "closed"))
    builder.set_bolt("closed", closed, 2).local_or_shuffle_grouping("windows")
    return builder.build()


def _ratchet(servers: EmbeddedServers, dsn: str, topic: str, config: Mapping[str, Any]) -> float:
    """Seconds from the first batch emitted to the last transaction closed."""
    return workload.seconds_of(
        topology(f"w9-{uuid.uuid4().hex[:6]}", servers.bootstrap_servers, topic, dsn), config, 600
    )


# --- the loop -------------------------------------------------------------------------------------


def _loop(servers: EmbeddedServers, dsn: str, topic: str, count: int) -> float:
    """Seconds from the start of two processes that are ready to the last commit."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE closed ({_SQL})".encode())
    return workload.time_loop(count, _fold, dsn, servers.bootstrap_servers, topic)


def _fold(
    dsn: str, bootstrap_servers: str, topic: str, partitions: Sequence[int], ready: Any, go: Any, answers: Any
) -> None:
    consumer = workload.loop_consumer(bootstrap_servers)
    ends = {each: consumer.get_watermark_offsets(TopicPartition(topic, each), 30)[1] for each in partitions}
    # partition -> its newest event time
    newest = dict.fromkeys(partitions, 0)
    opened: Windows = {}
    #: The end of each open window -> partition -> its first offset.
    first: dict[int, dict[int, int]] = {}
    total = 0
    with psycopg.connect(dsn) as connection:
        ready.wait()
        go.wait()
        consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        held: list[Any] = []
        while total + len(held) < sum(ends.values()):
            found = consumer.consume(20_000, 0.2)
            held += [each for each in found if each.error() is None]
            if held and (len(held) >= _LOOP_RECORDS or not found):
                total += len(held)
                _take(held, newest, opened, first)
                _close(connection, consumer, topic, min(newest.values()), opened, first)
                held = []
        if held:
            total += len(held)
            _take(held, newest, opened, first)
            _close(connection, consumer, topic, min(newest.values()), opened, first)
    consumer.close()
    answers.put(total)


def _take(messages: Sequence[Any], newest: dict[int, int], opened: Windows, first: dict[int, dict[int, int]]) -> None:
    """Fold records into their windows."""
    rows = pa_json.read_json(
        io.BytesIO(b"\n".join(each.value() for each in messages)),
        pa_json.ReadOptions(use_threads=False, block_size=1 << 24),
        pa_json.ParseOptions(explicit_schema=_VALUE.schema(), unexpected_field_behavior="ignore"),
    )
    at = rows.column("at_ms")
    ended = pc.multiply(pc.add(pc.divide(at, WINDOW_MS), 1), WINDOW_MS)
    source = pa.table(
        {
            "partition": [each.partition() for each in messages],
            "offset": [each.offset() for each in messages],
            "at": at,
            "ended": ended,
        }
    )
    for partition, ended_at, offset, latest in zip(
        *source.group_by(["partition", "ended"]).aggregate([("offset", "min"), ("at", "max")]).to_pydict().values(),
        strict=True,
    ):
        newest[partition] = max(newest[partition], latest)
        first.setdefault(ended_at, {}).setdefault(partition, offset)
    folded = (
        rows.append_column("ended", ended)
        .group_by(["customer", "ended"], use_threads=False)
        .aggregate([([], "count_all"), ("amount", "sum")])
    )
    columns = [folded.column(each).to_pylist() for each in ("customer", "ended", "count_all", "amount_sum")]
    for customer, ended_at, n, amount in zip(*columns, strict=True):
        before = opened.get((customer, ended_at), (0, 0))
        opened[customer, ended_at] = before[0] + n, before[1] + amount


def _close(
    connection: Any,
    consumer: Consumer,
    topic: str,
    watermark: int,
    opened: Windows,
    first: dict[int, dict[int, int]],
) -> None:
    """Commit the closed windows, then the offsets of the oldest open ones."""
    closed = [key for key in opened if key[1] <= watermark]
    if not closed:
        return
    values = [opened.pop(key) for key in closed]
    rows = pa.table(
        {
            "customer": [customer for customer, _ in closed],
            "window_end": pa.array([ended for _, ended in closed], pa.timestamp("ms", "UTC")),
            "n": [n for n, _ in values],
            "amount": [amount for _, amount in values],
        }
    )
    sink = pa.BufferOutputStream()
    pa_csv.write_csv(rows, sink, pa_csv.WriteOptions(include_header=False))
    with connection.cursor().copy("COPY closed FROM STDIN (FORMAT csv)") as copy:
        copy.write(memoryview(sink.getvalue()))
    connection.commit()
    for ended in [each for each in first if each <= watermark]:
        del first[ended]
    needed: dict[int, int] = {}
    for offsets in first.values():
        for partition, offset in offsets.items():
            needed[partition] = min(offset, needed.get(partition, offset))
    if needed:
        consumer.commit(offsets=[TopicPartition(topic, *each) for each in needed.items()], asynchronous=False)


# --- the expected tables --------------------------------------------------------------------------


def _expected(servers: EmbeddedServers, topic: str, count: int) -> tuple[Windows, Windows]:
    """The closed windows of the loop, whose processes have a watermark each, and of Ratchet. The
    partitions of the keys are read from the topic."""
    partition_of, newest = {}, dict.fromkeys(range(workload.PARTITIONS), 0)
    consumer = workload.loop_consumer(servers.bootstrap_servers)
    consumer.assign([TopicPartition(topic, each, 0) for each in range(workload.PARTITIONS)])
    while len(partition_of) < min(KEYS, count):
        for message in consumer.consume(10_000, 1.0):
            partition_of[message.key().decode()] = message.partition()
    consumer.close()
    every: Windows = {}
    for key, at, amount in records(count):
        newest[partition_of[key]] = at
        ended = (at // WINDOW_MS + 1) * WINDOW_MS
        n, total = every.get((key, ended), (0, 0))
        every[key, ended] = n + 1, total + amount
    halves = [min(newest[each] for each in range(half, workload.PARTITIONS, 2)) for half in range(2)]
    loop = {each: values for each, values in every.items() if each[1] <= halves[partition_of[each[0]] % 2]}
    return loop, {each: values for each, values in every.items() if each[1] <= min(halves)}


def _checked(dsn: str, expected: Windows, elapsed_s: float) -> float:
    """The seconds. Compares the table with the expected windows, and drops it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        query = "SELECT customer, (extract(epoch FROM window_end) * 1000)::bigint, n, amount FROM closed"
        rows = connection.execute(query).fetchall()
        for table in _TABLES:
            connection.execute(f"DROP TABLE IF EXISTS {table} CASCADE".encode())
    found = {(customer, ended): (n, amount) for customer, ended, n, amount in rows}
    if len(rows) != len(expected) or found != expected:
        raise RuntimeError(f"W9: {len(rows):,} windows, {len(expected):,} are expected, and they differ")
    return elapsed_s
