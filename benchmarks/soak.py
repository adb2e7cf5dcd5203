"""``python -m benchmarks.soak --minutes N``: whether one topology leaks over many transactions.
``python -m tests.kit.kafka_counts`` does the same for a core topology, and kills its processes.

A driver runs small batches over a Kafka topic that is filled all the time, and keeps its figures in
SQLite. Sampled: the resident memory of the driver and of all its child processes, threads, open
descriptors, znodes, and files in its temporary folder. At the end the figures are compared with the
topic, and each series is checked: the median of its last quarter may exceed that of its second
quarter by a tenth and a fixed amount per series, not more. The first quarter is ignored, because
ZooKeeper keeps records of the last thousand transactions, and caches fill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException

from framework import Fields, Topology, TransactionalTopologyBuilder
from framework.observe.history_plot import picture
from integration import EmbeddedServers
from integration.spark_cluster import descendants
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec

TOPIC, PARTITIONS, WORDS = "soak", 2, 1_000
BATCH_RECORDS = 40
SAMPLE_S = 2.0
#: How many records the topic may be ahead of the driver. With more, the memory of records that are
#: fetched ahead would look like a leak.
AHEAD_RECORDS_MAX = 4_000
#: The growth allowed from the second quarter to the last: this share, plus the amount per series.
GROWTH_MAX = 0.10
SERIES = {
    "memory": ("MB", 8.0),
    "threads": ("", 3.0),
    "descriptors": ("", 8.0),
    "znodes": ("", 20.0),
    "files": ("", 8.0),
}


def topology(app: Mapping[str, Any]) -> Topology:
    """Counts words, in small batches, so that there are many of them."""
    spout = OpaqueKafkaTransactionalSpout(
        [TOPIC], bootstrap_servers=app["app.kafka"], codec=TextCodec(), batch_records_max=BATCH_RECORDS
    )
    builder = TransactionalTopologyBuilder("soak", "spout", spout, PARTITIONS)
    state = OpaqueMapState(SqliteBackend(app["app.database"], "words"))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()}), 2).fields_grouping(
        "spout", Fields("value")
    )
    return builder.build()


@dataclass
class Soak:
    """The result of a run. ``samples``: one mapping per sample, with the series, ``seconds`` and
    ``txid``, the last transaction or checkpoint."""

    minutes: float
    samples: list[dict[str, float]] = field(default_factory=list)
    transactions: int = 0
    records: int = 0
    exact: bool = False

    def growth(self, series: str) -> tuple[float, float]:
        """The medians of the second and of the last quarter of a series."""
        values = [sample[series] for sample in self.samples]
        quarter = max(len(values) // 4, 1)
        return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])

    def problems(self) -> list[str]:
        """What has grown or is wrong, one line each."""
        found = [] if self.exact else ["the figures differ from the topic"]
        for series, (unit, least) in SERIES.items():
            early, late = self.growth(series)
            if late > early * (1 + GROWTH_MAX) + least:
                found.append(f"{series} grew from {early:.0f} to {late:.0f} {unit}".rstrip())
        return found


def run(minutes: float, folder: Path, *, spark: bool = False) -> Soak:
    """Run the soak. Raises ``RuntimeError`` if the driver ends by itself."""
    soak = Soak(minutes)
    sent: Counter[str] = Counter()
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    with EmbeddedServers(folder / "servers") as servers, open(folder / "run.log", "wb") as log:
        admin = AdminClient({"bootstrap.servers": servers.bootstrap_servers})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
        stop = threading.Event()
        feeder = threading.Thread(target=_feed, args=(servers.bootstrap_servers, sent, stop, folder))
        command = _command(servers, folder, spark)
        environment = {**os.environ, "TMPDIR": str(temporary)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        feeder.start()
        try:
            with sampling(
                soak,
                lambda: [process.pid, *descendants(process.pid)],
                temporary,
                servers.zookeeper,
                lambda: _figures(folder)[0],
            ):
                end = time.monotonic() + minutes * 60
                while time.monotonic() < end:
                    time.sleep(SAMPLE_S)
                    if process.poll() is not None:
                        raise RuntimeError(f"the driver ended by itself: see {folder / 'run.log'}")
        finally:
            stop.set()
            feeder.join()
            process.terminate()
            process.wait(60)
        last = subprocess.run(
            [*command, "--until-caught-up"], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        )
        soak.transactions, counts = _figures(folder)
        soak.records = sum(sent.values())
        soak.exact = last.returncode == 0 and counts == dict(sent)
    return soak


def _command(servers: EmbeddedServers, folder: Path, spark: bool) -> list[str]:
    settings = {
        "app.kafka": servers.bootstrap_servers,
        "app.database": folder / "figures.db",
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.max.spout.pending": 2,
        "spark.master": "local[2]",
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    executor = "spark" if spark else "local"
    return [sys.executable, "-m", "framework.run", "benchmarks.soak:topology", "--executor", executor, *options]


def _feed(bootstrap_servers: str, sent: Counter[str], stop: threading.Event, folder: Path) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0, "enable.idempotence": True})
    number = room = 0
    while not stop.wait(0.01):
        if number >= room:
            room = sum(_figures(folder)[1].values()) + AHEAD_RECORDS_MAX
            if number >= room:
                stop.wait(0.1)
                continue
        for _ in range(20):
            number += 1
            word = f"w{number * 7 % WORDS}"
            sent[word] += 1
            producer.produce(TOPIC, word, partition=number % PARTITIONS)
        producer.poll(0)
    producer.flush(30)


@contextlib.contextmanager
def sampling(
    soak: Soak,
    processes: Callable[[], Sequence[int]],
    temporary: Path,
    zookeeper: str,
    txid: Callable[[], int],
) -> Iterator[None]:
    """Meanwhile, sample what these processes hold, what is below ``temporary``, and what ZooKeeper
    has. While ZooKeeper does not answer, no sample is taken."""
    client = KazooClient(zookeeper, connection_retry={"max_tries": -1})
    client.start(15)
    stop = threading.Event()
    start = time.monotonic()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            with contextlib.suppress(KazooException, OSError, StopIteration):
                pids = processes()
                soak.samples.append(
                    {
                        "seconds": time.monotonic() - start,
                        "memory": sum(_status(each, "VmRSS") for each in pids) / 1024,
                        "threads": sum(_status(each, "Threads") for each in pids),
                        "descriptors": sum(_count(Path(f"/proc/{each}/fd")) for each in pids),
                        "znodes": _znodes(client),
                        "files": sum(len(files) for _, _, files in os.walk(temporary)),
                        "txid": txid(),
                    }
                )

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()
        client.stop()
        client.close()


def _status(pid: int, name: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    except OSError:
        pass  # the process has ended since it was listed
    return 0


def _count(folder: Path) -> int:
    try:
        return len(list(folder.iterdir()))
    except OSError:
        return 0


def _znodes(zookeeper: KazooClient) -> int:
    """The number of all znodes, as the server counts them."""
    answer = str(zookeeper.command(b"srvr"))
    return int(next(line for line in answer.splitlines() if line.startswith("Node count:")).split()[-1])


def _figures(folder: Path) -> tuple[int, dict[str, int]]:
    """The last transaction that is done, and the count of each word."""
    try:
        with sqlite3.connect(f"file:{folder / 'figures.db'}?mode=ro", uri=True) as connection:
            done = connection.execute("SELECT max(done) FROM _ratchet_headers").fetchone()[0] or 0
            return done, dict(connection.execute("SELECT value, n FROM words_live"))
    except sqlite3.OperationalError:
        return 0, {}  # before the first batch


def plot(soak: Soak, file: Path, what: str = "transactions") -> None:
    """Draw one panel per series over the time of the run. ``what``: what the txids count."""
    minutes = [sample["seconds"] / 60 for sample in soak.samples]
    units = {**{name: unit for name, (unit, _) in SERIES.items()}, "txid": ""}
    title = f"{soak.transactions:,} {what}, {soak.records:,} records in {soak.minutes:g} minutes"
    with picture(file, title, len(units), width=8, height=1.7) as panels:
        for panel, (series, unit) in zip(panels, units.items(), strict=True):
            panel.plot(minutes, [sample[series] for sample in soak.samples], linewidth=1)
            panel.set_ylim(bottom=0)
            panel.set_ylabel(f"{series} ({unit})" if unit else series)
        panels[-1].set_xlabel("minutes")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--spark", action="store_true", help="on Spark, local[2], instead of in the driver itself")
    parser.add_argument("--plot", type=Path, default=Path("docs/soak.svg"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-soak-") as folder:
        soak = run(arguments.minutes, Path(folder), spark=arguments.spark)
    plot(soak, arguments.plot)
    growth = {series: [round(value, 1) for value in soak.growth(series)] for series in SERIES}
    print(json.dumps({"transactions": soak.transactions, "records": soak.records, "exact": soak.exact, **growth}))
    for problem in soak.problems():
        print(f"not flat: {problem}", file=sys.stderr)
    return 1 if soak.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
