"""``python -m benchmarks.core``: what guaranteed message processing costs, as one JSON line.

All topologies read the same topic of sentences, split them by a per-tuple bolt, and count the
words: a core topology with each kind of guarantee, and a transactional topology into SQLite. They
run in turn, on Spark, in one run. For each: messages per second, and the CPU time per message by
part: the driver, Spark's JVM and workers, the workers, and the broker. ``--peers storm bytewax``
runs the same word count there, in turn with the others. Then: the gain from two rounds at once, the
bytes that an acker holds per pending tree, the memory of a process whose bolt is slower than its
spout, and the cost of an idle topology.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.core_peers import PEERS
from benchmarks.workload import create_topic, produce
from framework import (
    BaseBasicBolt,
    BaseRichBolt,
    BaseRichSpout,
    Bolt,
    CoreRun,
    CoreTopology,
    Fields,
    Topology,
    TopologyBuilder,
    TransactionalTopologyBuilder,
    Tuple,
    submit,
)
from framework.acking.ack_reports import EdgeIds, root_of
from framework.acking.table import TreeTable
from framework.core.spark import SparkRounds
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


class SplitUnanchored(BaseRichBolt):
    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        for word in tup["sentence"].split():
            self.collector.emit([word])
        self.collector.ack(tup)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


#: Ways to run the core topology: (ackers, the spout's guarantee, the splitting bolt, rounds at
#: once).
WAYS: dict[str, tuple[int, Any, type[Bolt], int]] = {
    "acked": (1, "at_least_once", Split, 2),
    "acked_one_round_at_once": (1, "at_least_once", Split, 1),
    "unanchored": (1, "at_least_once", SplitUnanchored, 2),
    "no_ids": (1, "none", Split, 2),
    "no_ackers": (0, "at_least_once", Split, 2),
}


def core(
    bootstrap_servers: str, topic: str, guarantee: Any = "at_least_once", split: type[Bolt] = Split
) -> CoreTopology:
    group = uuid.uuid4().hex
    builder = TopologyBuilder("core-cost")
    spout = KafkaSpout(
        [topic], bootstrap_servers=bootstrap_servers, codec=TextCodec("sentence"), group=group, guarantee=guarantee
    )
    builder.set_spout("lines", spout, PARTITIONS)
    builder.set_bolt("split", split(), 2).shuffle_grouping("lines")
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


def rates(
    servers: EmbeddedServers, folder: Path, messages: int, repeat: int, *, only_acked: bool, peers: Sequence[str]
) -> dict[str, Any]:
    """Messages per second for each way, the best of ``repeat`` runs; the ratios to "acked"; the
    microseconds of CPU per message by part, of the last run; and what ``peers`` reach."""
    topic = f"lines-{uuid.uuid4().hex[:6]}"
    create_topic(servers.bootstrap_servers, topic)
    produce(servers.bootstrap_servers, topic, ((b"", SENTENCES[n % len(SENTENCES)].encode()) for n in range(messages)))
    words = sum(len(SENTENCES[n % len(SENTENCES)].split()) for n in range(messages))
    ways = ["acked"] if only_acked else list(WAYS)
    found: dict[str, list[float]] = {way: [] for way in (*ways, *([] if only_acked else ["transactional"]))}
    cpu: dict[str, dict[str, float]] = {}
    theirs: dict[str, list[dict[str, Any]]] = {}
    for number in range(repeat):
        for way in ways:
            ackers, guarantee, split, at_once = WAYS[way]
            topology = core(servers.bootstrap_servers, topic, guarantee, split)
            with (
                patch.object(SparkRounds, "rounds_max", at_once),
                submit(topology, {**_CONF, "topology.acker.executors": ackers}) as run,
            ):
                while (done := run.status().components["count"].executed) == 0:
                    time.sleep(0.005)
                start, before = time.monotonic(), _cpu_by_part(run)
                while (executed := run.status().components["count"].executed) < words:
                    time.sleep(0.005)
                counted = (executed - done) / words * messages
                found[way].append(counted / (time.monotonic() - start))
                cpu[way] = {
                    part: round((spent - before.get(part, 0.0)) / counted * 1e6, 2)
                    for part, spent in _cpu_by_part(run).items()
                }
        for peer in peers:
            theirs.setdefault(peer, []).append(PEERS[peer](servers.bootstrap_servers, topic, messages, folder))
        if "transactional" not in found:
            continue
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
        "of_acked": {way: round(each / best["acked"], 2) for way, each in best.items()},
        "runs": {way: [round(each) for each in runs] for way, runs in found.items()},
        "cpu_us_per_message": {way: {**parts, "all": round(sum(parts.values()), 1)} for way, parts in cpu.items()},
        **({"peers": theirs} if theirs else {}),
    }


_CONF: dict[str, Any] = {"spark.master": "local[2]", "topology.collapse.records.max": 200_000}


class Numbers(BaseRichSpout):
    def __init__(self, count: int) -> None:
        self.count = count

    def open(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:
        self.collector, self.number = collector, 0

    def next_tuple(self) -> None:
        if self.number < self.count:
            self.number += 1
            self.collector.emit([self.number], message_id=self.number)

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(number=int))


class Waits(BaseBasicBolt):
    """Waits with each tuple, like a bolt that calls a service."""

    def execute(self, tup: Tuple, collector: Any) -> None:
        time.sleep(0.0005)
        collector.emit([tup["number"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(number=int))


def overlap(count: int = 4_000) -> dict[str, float]:
    """Tuples per second through a chain of three bolts that wait, with one and with two rounds at
    once."""
    found = {}
    for at_once in (1, 2):
        builder = TopologyBuilder("waits")
        builder.set_spout("numbers", Numbers(count))
        for name, before in (("first", "numbers"), ("second", "first"), ("third", "second")):
            builder.set_bolt(name, Waits(), 2).fields_grouping(before, Fields("number"))
        with (
            patch.object(SparkRounds, "rounds_max", at_once),
            submit(builder.build(), {**_CONF, "topology.max.spout.pending": 200}) as run,
        ):
            while (done := run.status().components["third"].executed) == 0:
                time.sleep(0.005)
            start = time.monotonic()
            while run.status().components["third"].executed < count:
                time.sleep(0.005)
            found[at_once] = (count - done) / (time.monotonic() - start)
    return {
        "one_round_per_s": round(found[1]),
        "two_rounds_per_s": round(found[2]),
        "ratio": round(found[2] / found[1], 2),
    }


def ledger_bytes() -> float:
    """The memory of an acker per pending tree, in bytes."""
    roots = np.arange(root_of(1, 0), root_of(1, TREES), dtype=np.uint64)
    edges, nothing = EdgeIds(1).take(TREES), np.empty(0, np.uint64)
    tracemalloc.start()
    trees = TreeTable(3)
    before = tracemalloc.get_traced_memory()[0]
    trees.apply(born=roots, roots=roots, values=edges, failed=nothing)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    if trees.pending != TREES:
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
    """Resident memory of a process whose bolt is slower than its spout, in MB, after a quarter of
    the time and at the end."""
    builder = TopologyBuilder("slow")
    builder.set_spout("endless", Endless())
    builder.set_bolt("slow", Slow()).global_grouping("endless")
    with submit(builder.build(), {"topology.max.spout.pending": 1_000}, executor="local") as run:
        time.sleep(seconds / 4)
        early = _resident_mb()
        time.sleep(seconds * 3 / 4)
        late, pending = _resident_mb(), run.status().pending
    return {"early_mb": round(early, 1), "late_mb": round(late, 1), "pending": pending}


def idle_cpu(servers: EmbeddedServers, seconds: float) -> float:
    """CPU seconds per second of a topology whose topic is empty: driver, JVM, workers and workers
    together."""
    topic = f"empty-{uuid.uuid4().hex[:6]}"
    create_topic(servers.bootstrap_servers, topic)
    with submit(core(servers.bootstrap_servers, topic), _CONF) as run:
        run.wait_until_idle(60)
        time.sleep(5)
        before = _cpu_by_part(run)
        time.sleep(seconds)
        after = _cpu_by_part(run)
        return sum(after[part] - before.get(part, 0.0) for part in after if part != "broker") / seconds


def _cpu_by_part(run: CoreRun) -> dict[str, float]:
    """CPU seconds so far of this process, of those that it has started, and of the run's
    workers."""
    executor = run._executor
    workers = {each.pid for each in executor._addresses} if isinstance(executor, SparkRounds) else set()
    spent = {"driver": _cpu_s(psutil.Process()), "jvm": 0.0, "workers": 0.0, "task workers": 0.0, "broker": 0.0}
    started = {each.pid: each for each in psutil.Process().children(recursive=True)}
    for pid in {*started, *workers}:
        try:
            each = started.get(pid) or psutil.Process(pid)
        except psutil.Error:
            continue
        command = " ".join(_command(each))
        if pid in workers:
            part = "task workers"
        elif "kafka.Kafka" in command:
            part = "broker"
        else:
            part = "jvm" if "java" in command.split(" ")[0] else "workers"
        spent[part] += _cpu_s(each)
    return spent


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only-acked", action="store_true", help="the acked word count alone, and the peers")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=[])
    arguments = parser.parse_args()
    configure_logging(level="warning")
    with (
        tempfile.TemporaryDirectory(prefix="ratchet-core-") as made,
        EmbeddedServers(Path(made) / "servers") as servers,
    ):
        measured = rates(
            servers,
            Path(made),
            arguments.messages,
            arguments.repeat,
            only_acked=arguments.only_acked,
            peers=arguments.peers,
        )
        if arguments.only_acked:
            print(json.dumps({"workload": "core", **measured}))
            return 0
        idle = idle_cpu(servers, arguments.seconds)
    print(
        json.dumps(
            {
                "workload": "core",
                **measured,
                "idle_cpu_share_of_a_core": round(idle, 3),
                "bolts_that_wait": overlap(),
                "ledger_bytes_per_tree": round(ledger_bytes()),
                "slow_bolt": memory_of_a_slow_bolt(arguments.seconds),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
