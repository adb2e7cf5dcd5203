"""W5 and W6: records land as rows of PostgreSQL, or the newest row of each key does.

In turns with the loop that an engineer writes by hand: two processes, COPY, and offsets that are
committed after the rows, so it is at least once.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
from confluent_kafka import Consumer, TopicPartition

from benchmarks import workload
from framework import Fields, Topology, TransactionalTopologyBuilder
from integration import EmbeddedServers, PostgresServer
from integration.folder_permissions import open_folder
from sinks import AppendCommitter, PostgresTable, UpsertCommitter
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout, TextCodec

KEYS, TOMBSTONES = 200_000, 0.02
VALUE = Fields(event=int, at_ms=int, amount=int, rate=float, note=str)
COLUMNS = ["event", "customer", "at_ms", "amount", "rate", "note"]
_SQL = "event bigint, customer text, at_ms bigint, amount bigint, rate double precision, note text"
_TOWNS = ("Aarhus", "Bologna", "Gothenburg", "Ljubljana", "Poznan", "Rotterdam", "Thessaloniki", "Valladolid")
#: Settings of the server: those of a machine that has some memory; every commit is on disk.
POSTGRES = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
#: Rows of a transaction of the loop.
_LOOP_ROWS = {"W5": 50_000, "W6": 100_000}
_SCHEMA = Fields(event=int, customer=str, at_ms=int, amount=int, rate=float, note=str).schema()


def records(count: int) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The key of each record, its row, and whether it is a tombstone. A JSON value has some 200
    bytes."""
    weights = 1.0 / np.arange(1, KEYS + 1) ** 0.7
    random = np.random.default_rng(workload.SEED)
    keys = random.choice(KEYS, size=count, p=weights / weights.sum()).tolist()
    dead = (random.random(count) < TOMBSTONES).tolist()
    for number, key in enumerate(keys):
        customer = f"cust-{key:07d}"
        note = (
            f"parcel {number} from {_TOWNS[number % 8]} to {_TOWNS[(number // 8 + 3) % 8]}, paid by card, handed to the carrier "
            f"at counter {number % 31}"
        )
        row = {
            "event": number,
            "customer": customer,
            "at_ms": 1_772_323_200_000 + number,
            "amount": number * 7_919 % 100_000,
            "rate": number * 31 % 10_000 / 10_000,
            "note": note,
        }
        yield customer, row, dead[number]


def filled_topic(bootstrap_servers: str, kind: str, count: int) -> str:
    """A new topic with the records of W5 or W6."""
    topic = f"rows-{uuid.uuid4().hex[:6]}"
    workload.create_topic(bootstrap_servers, topic)
    tombstones = kind == "W6"
    values = (
        (key.encode(), None if dead and tombstones else json.dumps(row, separators=(",", ":")).encode())
        for key, row, dead in records(count)
    )
    workload.produce(bootstrap_servers, topic, values)
    return topic


def measure(servers: EmbeddedServers, kind: str, count: int, repeat: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """``kind``: W5 or W6. ``repeat`` rounds of the loop and Ratchet. Raises ``RuntimeError`` when a
    table is not the expected one."""
    topic = filled_topic(servers.bootstrap_servers, kind, count)
    rates: dict[str, list[float]] = {"loop": [], "ratchet": []}
    with contextlib.ExitStack() as stack:
        server = PostgresServer(stack.enter_context(open_folder()), settings=POSTGRES)
        server.start()
        stack.callback(server.stop)
        for _ in range(repeat):
            rates["loop"].append(checked(kind, server.dsn, count, _loop(servers, kind, server.dsn, topic, count)))
            rates["ratchet"].append(
                checked(kind, server.dsn, count, _ratchet(servers, kind, server.dsn, topic, config))
            )
    best = {name: max(found) for name, found in rates.items()}
    return {
        "workload": kind,
        "messages": count,
        "records_per_s": round(best["ratchet"]),
        "runs": [round(each) for each in rates["ratchet"]],
        "loop_runs": [round(each) for each in rates["loop"]],
        "ratio_to_loop": round(best["ratchet"] / best["loop"], 3),
        "exact": True,
    }


# --- Ratchet --------------------------------------------------------------------------------------


def topology(name: str, kind: str, bootstrap_servers: str, topic: str, dsn: str) -> Topology:
    if kind == "W5":
        codec = JsonCodec(Fields.of_schema(_SCHEMA))
        spout = OpaqueKafkaTransactionalSpout([topic], bootstrap_servers=bootstrap_servers, codec=codec)
        builder = TransactionalTopologyBuilder(name, "records", spout, 2)
        rows = AppendCommitter(PostgresTable(dsn, "landed"))
        builder.set_bolt("rows", rows, 2).local_or_shuffle_grouping("records")
        return builder.build()
    spout = OpaqueKafkaTransactionalSpout(
        [topic], bootstrap_servers=bootstrap_servers, codec=JsonCodec(VALUE), key_codec=TextCodec("customer")
    )
    builder = TransactionalTopologyBuilder(name, "records", spout, 2)
    newest = UpsertCommitter(PostgresTable(dsn, "landed"), ["customer"], columns=COLUMNS)
    builder.set_bolt("rows", newest, 2).fields_grouping("records", Fields("customer"))
    return builder.build()


def _ratchet(servers: EmbeddedServers, kind: str, dsn: str, topic: str, config: Mapping[str, Any]) -> float:
    """Seconds from the first batch emitted to the last transaction closed."""
    name = f"{kind.lower()}-{uuid.uuid4().hex[:6]}"
    return workload.seconds_of(topology(name, kind, servers.bootstrap_servers, topic, dsn), config, 600)


# --- the loop -------------------------------------------------------------------------------------


def _loop(servers: EmbeddedServers, kind: str, dsn: str, topic: str, count: int) -> float:
    """Seconds from the start of two processes that are ready to the last commit."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        key = ", PRIMARY KEY (customer)" if kind == "W6" else ""
        connection.execute(f"CREATE TABLE landed ({_SQL}{key})".encode())
    return workload.time_loop(count, _land, kind, dsn, servers.bootstrap_servers, topic)


def _land(
    kind: str,
    dsn: str,
    bootstrap_servers: str,
    topic: str,
    partitions: Sequence[int],
    ready: Any,
    go: Any,
    answers: Any,
) -> None:
    consumer = workload.loop_consumer(bootstrap_servers)
    ends = {each: consumer.get_watermark_offsets(TopicPartition(topic, each), 30)[1] for each in partitions}
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TEMP TABLE staged (LIKE landed) ON COMMIT DELETE ROWS")
        connection.commit()
        ready.wait()
        go.wait()
        consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        held: list[Any] = []
        total = 0
        while total + len(held) < sum(ends.values()):
            found = consumer.consume(20_000, 0.2)
            held += [each for each in found if each.error() is None]
            if held and (len(held) >= _LOOP_ROWS[kind] or not found):
                total += _write(kind, connection, consumer, topic, held)
                held = []
        total += _write(kind, connection, consumer, topic, held) if held else 0
    consumer.close()
    answers.put(total)


def _write(kind: str, connection: Any, consumer: Consumer, topic: str, messages: Sequence[Any]) -> int:
    """Commit the rows, then the offsets. Returns the number of messages."""
    cursor = connection.cursor()
    if kind == "W5":
        _copy(cursor, [each.value() for each in messages], "landed")
    else:
        newest = {each.key(): each.value() for each in messages}
        gone = [key.decode() for key, value in newest.items() if value is None]
        cursor.execute("DELETE FROM landed WHERE customer = ANY(%s)", (gone,))
        _copy(cursor, [value for value in newest.values() if value is not None], "staged")
        cursor.execute(
            "INSERT INTO landed SELECT * FROM staged ON CONFLICT (customer) DO UPDATE SET event = excluded.event, "
            "at_ms = excluded.at_ms, amount = excluded.amount, rate = excluded.rate, note = excluded.note"
        )
    connection.commit()
    ends = {each.partition(): each.offset() + 1 for each in messages}
    consumer.commit(offsets=[TopicPartition(topic, *each) for each in ends.items()], asynchronous=False)
    return len(messages)


def _copy(cursor: Any, values: Sequence[bytes], table: str) -> None:
    rows = pa_json.read_json(
        io.BytesIO(b"\n".join(values)),
        pa_json.ReadOptions(use_threads=False, block_size=1 << 24),
        pa_json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
    )
    sink = pa.BufferOutputStream()
    pa_csv.write_csv(rows, sink, pa_csv.WriteOptions(include_header=False))
    with cursor.copy(f"COPY {table} FROM STDIN (FORMAT csv)") as copy:
        copy.write(memoryview(sink.getvalue()))


# --- the expected table ---------------------------------------------------------------------------


def checked(kind: str, dsn: str, count: int, elapsed_s: float) -> float:
    """Records per second. Compares the table with the records, and drops it."""
    expected: dict[Any, tuple[Any, ...]] = {}
    for key, row, dead in records(count):
        if kind == "W6" and dead:
            expected.pop(key, None)
        else:
            expected[key if kind == "W6" else row["event"]] = tuple(row.values())
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = 0
        with connection.cursor().copy(
            f"COPY (SELECT {', '.join(COLUMNS)} FROM landed) TO STDOUT (FORMAT csv)".encode()
        ) as out:
            text = io.StringIO(b"".join(out).decode())
        for event, customer, at_ms, amount, rate, note in csv.reader(text):
            row = int(event), customer, int(at_ms), int(amount), float(rate), note
            found += expected.get(customer if kind == "W6" else int(event)) == row
        total = connection.execute("SELECT count(*) FROM landed").fetchone()
        for table in ("landed", "landed_before", "landed_deleted", "_ratchet_headers", "_ratchet_written"):
            connection.execute(f"DROP TABLE IF EXISTS {table}".encode())
    if total is None or not found == total[0] == len(expected):
        raise RuntimeError(f"{kind}: {found:,} rows are right of {total}, and {len(expected):,} are expected")
    return count / elapsed_s
