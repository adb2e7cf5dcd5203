"""``python -m benchmarks.rows_below_committers``: memory and processor time of sinks that get many
rows of a committer in one transaction, as JSON lines.

The committer sends pages of rows, as one of event time does when windows close, and costs nothing
itself. In the same process are the driver and all tasks. A run whose rows do not all arrive fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from benchmarks.event_time_state_size import POSTGRES, TIMEOUT_S, Memory
from benchmarks.workload import PARTITIONS, create_topic, ends
from framework import ArrowBolt, Bolt, Committer, Fields, OutputFieldsDeclarer, TransactionalTopologyBuilder, submit
from framework.observe import configure_logging
from framework.transactions import MemoryStore
from integration import EmbeddedServers, PostgresServer
from integration.folder_permissions import open_folder
from sinks import (
    AppendCommitter,
    Count,
    KafkaSink,
    OpaqueMapState,
    ParquetTable,
    PostgresBackend,
    PostgresTable,
    StateCommitter,
    UpsertCommitter,
)
from spouts import OpaqueMemoryTransactionalSpout

ROW = Fields(id=int, window_start=pa.timestamp("us", "UTC"), window_end=pa.timestamp("us", "UTC"), n=int)
PAGE_ROWS = 10_000
SINKS = ["parquet", "kafka", "append", "upsert", "state"]
TABLE = "sent"
TASKS = 2


class Sends(ArrowBolt, Committer):
    """Sends rows in the commit phase."""

    deterministic = True

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.task = context.task_index

    def execute_arrow(self, batch: pa.RecordBatch) -> None:
        pass

    def finish_batch(self) -> Iterator[pa.RecordBatch]:
        for first in range(self.task * PAGE_ROWS, self.rows, TASKS * PAGE_ROWS):
            ids = np.arange(first, min(first + PAGE_ROWS, self.rows), dtype=np.int64)
            moments = pa.array(ids // 100 * 1_000_000).cast(ROW.type_of("window_start"))
            yield pa.RecordBatch.from_arrays([pa.array(ids), moments, moments, pa.array(ids % 7)], names=list(ROW))

    def declare_output_fields(self, declarer: OutputFieldsDeclarer) -> None:
        declarer.declare(ROW)


def sink_of(into: str, folder: Path, address: str) -> Bolt:
    if into == "parquet":
        return AppendCommitter(ParquetTable(folder / "files"))
    if into == "kafka":
        return KafkaSink(TABLE, key=["id"], bootstrap_servers=address)
    if into == "append":
        return AppendCommitter(PostgresTable(address, TABLE))
    if into == "upsert":
        return UpsertCommitter(PostgresTable(address, TABLE), ["id"])
    return StateCommitter(OpaqueMapState(PostgresBackend(address, TABLE)), ["id"], {"times": Count()})


@contextlib.contextmanager
def server_for(into: str, folder: Path) -> Iterator[str]:
    """The address of the server that a sink needs."""
    if into == "parquet":
        yield ""
    elif into == "kafka":
        with EmbeddedServers(folder / "servers") as servers:
            create_topic(servers.bootstrap_servers, TABLE)
            yield servers.bootstrap_servers
    else:
        with PostgresServer(folder / "postgres", settings=POSTGRES) as server:
            yield server.dsn


def arrived(into: str, folder: Path, address: str) -> int:
    if into == "parquet":
        table = ParquetTable(folder / "files")
        return sum(each.rows for each in table.files())
    if into == "kafka":
        return sum(ends(address, TABLE).values()) - TASKS * PARTITIONS  # each kafka_txn ends with a marker
    with psycopg.connect(address) as connection:
        found = connection.execute(f"SELECT count(*) FROM {TABLE}").fetchone()
    return int(found[0]) if found else 0


def measure(into: str, rows: int, folder: Path) -> dict[str, Any]:
    """Raises ``RuntimeError`` if rows are missing."""
    with server_for(into, folder) as address:
        spout = OpaqueMemoryTransactionalSpout({0: [[1], [2]]}, Fields(id=int), 2)
        builder = TransactionalTopologyBuilder("below", "spout", spout)
        builder.set_bolt("sends", Sends(rows), TASKS).shuffle_grouping("spout")
        builder.set_bolt("sink", sink_of(into, folder, address), TASKS).fields_grouping("sends", Fields("id"))
        built = builder.build()
        with Memory() as memory:
            time.sleep(1)
            begun_s = time.monotonic()
            with submit(
                built, {"topology.message.timeout.secs": TIMEOUT_S}, store=MemoryStore(), executor="local"
            ) as run:
                run.wait_until_caught_up(TIMEOUT_S)
            ended_s = time.monotonic()
            time.sleep(0.5)
        if (found := arrived(into, folder, address)) != rows:
            raise RuntimeError(f"{into}: {found:,} rows arrived, and {rows:,} were sent")
    return {
        "into": into,
        "rows": rows,
        "memory_mb": {"before": memory.between(0, begun_s), "most": memory.between(begun_s, ended_s)},
        "cpu_s": memory.cpu_between(begun_s, ended_s),
        "took_s": round(ended_s - begun_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows_below_committers", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--into", nargs="+", choices=SINKS, default=SINKS)
    arguments = parser.parse_args()
    configure_logging(level="warning")
    for into in arguments.into:
        for rows in arguments.rows:
            with open_folder() as folder:
                print(json.dumps(measure(into, rows, folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
