"""``python -m benchmarks.core``: what guaranteed message processing costs, as one JSON line.

The same topic of sentences, split by a per-tuple bolt and counted: by a core topology with ackers and without, and by a
transactional topology into SQLite; in turn, on Spark, in one run. Then the bytes that an acker holds per pending tree, and the
memory of a process whose bolt is slower than its spout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.workload import create_topic, produce
from framework import (
    BaseBasicBolt,
    BaseRichSpout,
    CoreTopology,
    Fields,
    Topology,
    TopologyBuilder,
    TransactionalTopologyBuilder,
    Tuple,
    submit,
)
from framework.acking import Acker
from framework.acking.roots import EdgeIds, root_of
from framework.observe import configure_logging
from integration import EmbeddedServers
from sinks import Count as CountRows
from sinks import OpaqueMapState, SqliteBackend, StateCommitter
from spouts import KafkaSpout, OpaqueKafkaTransactionalSpout, TextCodec

SENTENCES = ("the cow jumped over the moon", "four score and seven years ago", "an apple a day keeps the doctor away")
PARTITIONS = 2
TREES = 100_000


class Split(BaseBasicBolt):
    def execute(self, tup: Tuple, collector: Any) -> None:
        for word in tup["sentence"].split():
            collector.emit([word])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Count(BaseBasicBolt):
    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any, batch_id: Any) -> None:
        self.counts: Counter[str] = Counter()

    def execute(self, tup: Tuple, collector: Any) -> None:
        self.counts[tup["word"]] += 1


def core(bootstrap_servers: str, topic: str) -> CoreTopology:
    group = uuid.uuid4().hex
    builder = TopologyBuilder("core-cost")
    spout = KafkaSpout([topic], bootstrap_servers=bootstrap_servers, codec=TextCodec("sentence"), group=group)
    builder.set_spout("lines", spout, PARTITIONS)
    builder.set_bolt("split", Split(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", Count(), 2).fields_grouping("split", Fields("word"))
    return builder.build()


def transactional(bootstrap_servers: str, topic: str, database: Path) -> Topology:
    spout = OpaqueKafkaTransactionalSpout(
        [topic], bootstrap_servers=bootstrap_servers, codec=TextCodec("sentence"), batch_records_max=20_000
    )
    builder = TransactionalTopologyBuilder(f"cost-{uuid.uuid4().hex[:6]}", "lines", spout, PARTITIONS)
    builder.set_bolt("split", Split(), 2).shuffle_grouping("lines")
    state = OpaqueMapState(SqliteBackend(database, "words"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": CountRows()}), 2).fields_grouping(
        "split", Fields("word")
    )
    return builder.build()


def rates(servers: EmbeddedServers, folder: Path, messages: int, repeat: int) -> dict[str, Any]:
    """Messages per second, each way, best of ``repeat``; and the ratios to the transactional one."""
    topic = f"lines-{uuid.uuid4().hex[:6]}"
    create_topic(servers.bootstrap_servers, topic)
    produce(servers.bootstrap_servers, topic, ((b"", SENTENCES[n % len(SENTENCES)].encode()) for n in range(messages)))
    found: dict[str, list[float]] = {"acked": [], "unacked": [], "transactional": []}
    for number in range(repeat):
        for way, ackers in (("acked", 1), ("unacked", 0)):
            start = time.monotonic()
            with submit(core(servers.bootstrap_servers, topic), {**_CONF, "topology.acker.executors": ackers}) as run:
                while (completed := run.status().rows_done()) == 0:
                    time.sleep(0.005)
                start = time.monotonic()
                run.wait_until_idle(600)
                found[way].append((messages - completed) / (time.monotonic() - start))
                executed = run.status().components["count"].executed
            if executed < sum(len(SENTENCES[n % len(SENTENCES)].split()) for n in range(messages)):
                raise RuntimeError(f"{way}: {executed} words executed are too few")
        database = folder / f"words-{number}.db"
        with submit(transactional(servers.bootstrap_servers, topic, database), _CONF) as batches:
            while (committed := batches.status().committed_rows) == 0:
                time.sleep(0.005)
            start = time.monotonic()
            batches.wait_until_caught_up(600)
            found["transactional"].append((messages - committed) / max(time.monotonic() - start, 1e-9))
    best = {way: max(each) for way, each in found.items()}
    return {
        "messages": messages,
        **{f"{way}_per_s": round(each) for way, each in best.items()},
        "acked_to_unacked": round(best["acked"] / best["unacked"], 2),
        "acked_to_transactional": round(best["acked"] / best["transactional"], 2),
        "runs": {way: [round(each) for each in runs] for way, runs in found.items()},
    }


_CONF: dict[str, Any] = {"spark.master": "local[2]", "topology.collapse.records.max": 200_000}


def ledger_bytes() -> float:
    """What an acker holds per pending tree, in bytes."""
    edges = EdgeIds(1).take(TREES).tolist()
    tracemalloc.start()
    acker: Acker[int, int] = Acker(lambda root, task: None, lambda root, task: None)
    before = tracemalloc.get_traced_memory()[0]
    for number, edge in enumerate(edges):
        acker.init(root_of(1, number), 1, edge)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    if acker.pending != TREES:
        raise RuntimeError("the acker has lost trees")
    return held / TREES


class Endless(BaseRichSpout):
    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.number = collector, 0

    def next_tuple(self) -> None:
        self.number += 1
        self.collector.emit([self.number, "x" * 1_000], message_id=self.number)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(number=int, text=str))


class Slow(BaseBasicBolt):
    def execute(self, tup: Tuple, collector: Any) -> None:
        time.sleep(0.0005)


def memory_of_a_slow_bolt(seconds: float) -> dict[str, float]:
    """Resident memory, in MB, after a quarter of the time and at its end, of a bolt that is slower than its spout."""
    builder = TopologyBuilder("slow")
    builder.set_spout("endless", Endless())
    builder.set_bolt("slow", Slow()).global_grouping("endless")
    with submit(builder.build(), {"topology.max.spout.pending": 1_000}, executor="local") as run:
        time.sleep(seconds / 4)
        early = _resident_mb()
        time.sleep(seconds * 3 / 4)
        late, pending = _resident_mb(), run.status().pending
    return {"early_mb": round(early, 1), "late_mb": round(late, 1), "pending": pending}


def _resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with (
        tempfile.TemporaryDirectory(prefix="ratchet-core-") as made,
        EmbeddedServers(Path(made) / "servers") as servers,
    ):
        measured = rates(servers, Path(made), arguments.messages, arguments.repeat)
    print(
        json.dumps(
            {
                "workload": "core",
                **measured,
                "ledger_bytes_per_tree": round(ledger_bytes()),
                "slow_bolt": memory_of_a_slow_bolt(arguments.seconds),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
