"""``python -m benchmarks.commit_overhead``: what the headers cost a transaction, as one JSON line.

How many writes to ZooKeeper a transaction needs, with committers that have a header, that have
none, and of both kinds; what one such write takes. Then, for each store, what it takes to raise a
header and to set it done, in milliseconds, the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.exactly_once_overhead import KEY, VALUE
from framework import BaseTransactionalBolt, Committer, Fields, TransactionalTopologyBuilder, submit
from framework.coordination.store import Change, Leadership, MemoryStore, Put
from framework.coordination.zookeeper import ZooKeeperStore
from framework.observe import configure_logging
from framework.topology import OpenCommit
from integration import PostgresServer, RedisServer, ZooKeeperServer
from integration.folder_permissions import open_folder
from sinks import (
    Count,
    MapBackend,
    MemoryBackend,
    OpaqueMapState,
    PostgresBackend,
    RedisBackend,
    SqliteBackend,
    StateCommitter,
)
from spouts import MemoryTransactionalSpout

#: Transactions whose headers are timed, and whose writes are counted.
TRANSACTIONS, COUNTED = 100, 20


class Prints(BaseTransactionalBolt, Committer):
    """A committer without a header, which writes nothing."""

    deterministic = True

    def execute(self, tup: Any) -> None:
        pass

    def finish_batch(self) -> None:
        pass


class CountingStore(MemoryStore):
    """Counts the writes of leaders."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def _apply_as(self, leadership: Any, changes: Sequence[Change]) -> None:
        self.writes += 1
        super()._apply_as(leadership, changes)


def writes_per_transaction(committers: str) -> float:
    """``committers``: "header", "no header" or "both". What a start and an end cost does not
    count."""
    counted = []
    for transactions in (COUNTED, 3 * COUNTED):
        rows = {0: [[f"word{number}"] for number in range(transactions)]}
        spout = MemoryTransactionalSpout(rows, Fields(word=str), 1)
        builder = TransactionalTopologyBuilder("writes", "spout", spout, 1)
        if committers != "no header":
            state = OpaqueMapState(MemoryBackend("writes"))
            builder.set_bolt("count", StateCommitter(state, ["word"], {"count": Count()})).shuffle_grouping("spout")
        if committers != "header":
            builder.set_bolt("prints", Prints()).shuffle_grouping("spout")
        store = CountingStore()
        with submit(builder.build(), {}, store=store, executor="local") as run:
            run.wait_until_caught_up(120)
        counted.append(store.writes)
    return round((counted[1] - counted[0]) / (2 * COUNTED), 2)


def write_ms(address: str) -> float:
    """What one write of 500 bytes under a leadership takes."""
    store = ZooKeeperStore(address)
    try:
        leadership: Leadership | None = store.lead("prices", "benchmark", 30)
        if leadership is None:
            raise RuntimeError("somebody else leads in a ZooKeeper of its own")
        write = partial(leadership.apply, [Put("prices/open", b"." * 500)])
        return _median_ms([_timed(write) for _ in range(500)])
    finally:
        store.close()


def header_ms(backend: MapBackend) -> dict[str, float]:
    """What it takes to raise a header for an attempt, and to set it done."""
    state = OpaqueMapState(backend)
    header = state.prepare("prices")
    raised, finished = [], []
    for txid in range(1, TRANSACTIONS + 1):
        opened = header.opened(1, OpenCommit(txid, 1, f"digest {txid}"))
        raised.append(_timed(partial(state.raise_header, header, opened)))
        header = opened.finished(txid)
        finished.append(_timed(partial(state.raise_header, opened, header)))
    state.clear("prices")
    state.close()
    return {"raise_ms": _median_ms(raised), "finish_ms": _median_ms(finished)}


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1000, 3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commit_overhead", description=__doc__)
    parser.parse_args()
    configure_logging(level="error")
    result: dict[str, Any] = {
        "writes": {each: writes_per_transaction(each) for each in ("header", "no header", "both")}
    }
    with open_folder() as folder:
        with ZooKeeperServer(folder / "zookeeper") as zookeeper:
            result["write_ms"] = write_ms(zookeeper.address)
        result["sqlite"] = header_ms(SqliteBackend(folder / "rows.db", "rows", KEY, VALUE))
        with RedisServer(folder / "redis") as cache:
            result["redis"] = header_ms(RedisBackend(cache.url, "rows", KEY, VALUE))
        with PostgresServer(folder / "postgres") as database:
            result["postgres"] = header_ms(PostgresBackend(database.dsn, "rows", KEY, VALUE))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
