"""``python -m benchmarks``: measures W1, W2, W3, W5, W6, W9, W1 by a pipeline, the spouts' reading
alone, topics of many partitions, the states' writing alone, the cost of being watched, a rebuild
and an explanation, and prints JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import (
    closed_windows,
    core_spout_reading,
    exactly_once_overhead,
    many_partitions,
    plots,
    ranges,
    reading,
    rebuild_and_explain,
    rows,
    steady,
    watched,
    workload,
)
from benchmarks.raw_consumer_limit import Limit
from framework import Topology
from framework.observe import configure_logging
from integration import EmbeddedServers

WORKLOADS = [
    "w1",
    "w2",
    "w3",
    "w5",
    "w6",
    "w9",
    "pipeline",
    "reading",
    "ranges",
    "acked",
    "wide",
    "states",
    "watched",
    "page",
    "rebuild",
]
#: Takes many minutes, so only when it is named.
LONG = ["explain"]


def main() -> int:
    arguments = _arguments()
    configure_logging(level="warning")
    with (
        tempfile.TemporaryDirectory(prefix="ratchet-bench-") as made,
        EmbeddedServers(Path(made) / "servers") as servers,
    ):
        folder = Path(made)
        limit = Limit(folder)
        if "w1" in arguments.workloads:
            _print(_throughput(servers, folder, limit, arguments))
        if "w2" in arguments.workloads:
            for each in steady.measure(servers, folder, arguments, _config(servers, arguments.pending or 1)):
                _print(each)
        if "w3" in arguments.workloads:
            _print(_per_tuple(servers, folder, arguments))
        for each in ("w5", "w6"):
            if each in arguments.workloads:
                kind, count = each.upper(), arguments.messages // 2
                _print(rows.measure(servers, kind, count, arguments.repeat, _config(servers, 2)))
        if "w9" in arguments.workloads:
            count = arguments.messages // 2
            _print(closed_windows.measure(servers, count, arguments.repeat, _config(servers, 2)))
        if "pipeline" in arguments.workloads:
            _print(_by_pipeline(servers, folder, arguments))
        if "reading" in arguments.workloads:
            _print(reading.measure(servers.bootstrap_servers, limit, arguments.messages, arguments.repeat))
        if "ranges" in arguments.workloads:
            _print(ranges.measure(servers.bootstrap_servers, arguments.messages, arguments.repeat))
        if "acked" in arguments.workloads:
            _print(core_spout_reading.measure(servers.bootstrap_servers, arguments.messages, arguments.repeat))
        if "wide" in arguments.workloads:
            for partitions in arguments.partitions:
                _print(many_partitions.measure(servers.bootstrap_servers, servers.zookeeper, partitions))
        if "states" in arguments.workloads:
            for each in exactly_once_overhead.measure(folder, arguments.repeat, tuple(arguments.keys)):
                _print(each)
        if "watched" in arguments.workloads:
            _print(_watched(servers, folder, arguments))
        if "page" in arguments.workloads:
            _print(watched.page())
            _print(watched.root(servers.zookeeper))
        if "rebuild" in arguments.workloads:
            _print(rebuild_and_explain.measure_rebuild(servers, folder, arguments.messages, _config(servers, 2)))
            count = arguments.messages // 2
            _print(rebuild_and_explain.measure_rebuild_of_rows(servers, count, _config(servers, 2)))
        if "explain" in arguments.workloads:
            _print(
                rebuild_and_explain.measure_explain(servers, folder, arguments.messages // 2, 2, _config(servers, 2))
            )
    if arguments.plot is not None:
        plots.draw_all(_results, arguments.plot)
    return 0


def _throughput(servers: EmbeddedServers, folder: Path, limit: Limit, arguments: argparse.Namespace) -> dict[str, Any]:
    """W1: a backlog, as fast as possible. Measures in one run: exactly-once, at-least-once (for the
    price of exactly-once), exactly-once with the Python reader, and only reading (the limit)."""
    count = arguments.messages
    topic = workload.filled_topic(servers.bootstrap_servers, count)
    limits = [limit.measure(servers.bootstrap_servers, topic, count)]
    kinds: dict[str, dict[str, Any]] = {
        "exactly once": {},
        "at least once": {"exactly_once": False},
        "Python reader": {"settings": {"kafka.reader": "python"}},
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(arguments.repeat):
        for kind, options in kinds.items():
            rates[kind].append(_exact_rate(servers, folder, topic, arguments, **options))
        limits.append(limit.measure(servers.bootstrap_servers, topic, count))
    rate = max(rates["exactly once"])
    return {
        "workload": "W1",
        "messages": count,
        "records_per_s": round(rate),
        "runs": _rounded(rates["exactly once"]),
        "limit": limit.by,
        "limit_records_per_s": round(max(limits)),
        "limit_runs": _rounded(limits),
        "ratio_to_limit": round(rate / max(limits), 3),
        "price_of_exactly_once": round(rate / max(rates["at least once"]), 3),
        "python_reader_runs": _rounded(rates["Python reader"]),
        "exact": True,
    }


def _per_tuple(servers: EmbeddedServers, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """W3: W1 with the JSON parsed by a bolt that takes one tuple at a time."""
    topic = workload.filled_topic(servers.bootstrap_servers, arguments.messages)
    rates = [_exact_rate(servers, folder, topic, arguments, per_tuple=True) for _ in range(arguments.repeat)]
    return {
        "workload": "W3",
        "messages": arguments.messages,
        "records_per_s": round(max(rates)),
        "runs": _rounded(rates),
    }


def _by_pipeline(servers: EmbeddedServers, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """W1 in turns as a topology of bolts and as a pipeline, where the two fields that are used are
    declared, and where all are: a pipeline decodes only what it uses."""
    topic = workload.filled_topic(servers.bootstrap_servers, arguments.messages)
    kinds: dict[str, dict[str, Any]] = {
        "bolts": {},
        "pipeline": {"make": workload.word_pipeline},
        "bolts, all fields": {"fields": workload.ALL_FIELDS},
        "pipeline, all fields": {"fields": workload.ALL_FIELDS, "make": workload.word_pipeline},
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(arguments.repeat):
        for kind, options in kinds.items():
            rates[kind].append(_exact_rate(servers, folder, topic, arguments, **options))
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    return {
        "workload": "W1 by a pipeline",
        "messages": arguments.messages,
        "records_per_s": {kind: round(each) for kind, each in medians.items()},
        "runs": {kind: _rounded(each) for kind, each in rates.items()},
        "ratio": round(medians["pipeline"] / medians["bolts"], 3),
        "ratio_all_fields": round(medians["pipeline, all fields"] / medians["bolts, all fields"], 3),
        "exact": True,
    }


def _rounded(rates: list[float]) -> list[int]:
    return [round(each) for each in rates]


def _exact_rate(
    servers: EmbeddedServers,
    folder: Path,
    topic: str,
    arguments: argparse.Namespace,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    is_watched: bool = False,
    make: Callable[..., Topology] = workload.word_topology,
    **shape: Any,
) -> float:
    """Records per second, from the first batch emitted to the last transaction closed. Raises
    ``RuntimeError`` if the table is wrong."""
    limits = {"batch_records_max": arguments.batch_records} if arguments.batch_records else {}
    name = uuid.uuid4().hex[:6]
    database = folder / f"{name}.db"
    topology = make(f"w1-{name}", servers.bootstrap_servers, topic, database, **shape, **limits)
    with watched.watched(topology.id) if is_watched else contextlib.nullcontext({}) as watching:
        config = {**_config(servers, arguments.pending or 2), **watching, **settings}
        elapsed_s = workload.seconds_of(topology, config, 300)
    if workload.read_back(database) != workload.expected(arguments.messages):
        raise RuntimeError("the table is not the expected one")
    return arguments.messages / elapsed_s


def _watched(servers: EmbeddedServers, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """W1 and W2 in turns, watched and not."""
    topic = workload.filled_topic(servers.bootstrap_servers, arguments.messages)
    rates: dict[bool, list[float]] = {False: [], True: []}
    latencies: dict[bool, list[Any]] = {False: [], True: []}
    for _ in range(arguments.repeat):
        for is_watched in (False, True):
            rates[is_watched].append(_exact_rate(servers, folder, topic, arguments, is_watched=is_watched))
    store = steady.Store("sqlite", folder)
    for _ in range(arguments.repeat):
        for is_watched in (False, True):
            name = f"w2-{uuid.uuid4().hex[:6]}"
            with watched.watched(name) if is_watched else contextlib.nullcontext({}) as watching:
                found = steady.latency(servers, store, arguments, {**_config(servers, 1), **watching}, name=name)
            latencies[is_watched].append(found["after_2s"])
    return {
        "workload": "watched",
        "records_per_s": _rounded(rates[False]),
        "records_per_s_watched": _rounded(rates[True]),
        "ratio_of_the_best": round(max(rates[True]) / max(rates[False]), 3),
        "latency_after_2s": latencies[False],
        "latency_after_2s_watched": latencies[True],
    }


def _config(servers: EmbeddedServers, pending: int) -> dict[str, Any]:
    return {
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.max.spout.pending": pending,
        "spark.master": "local[2]",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", dest="workloads", nargs="+", default=WORKLOADS, choices=[*WORKLOADS, *LONG])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into an SVG file, too")
    parser.add_argument(
        "--messages",
        type=int,
        default=2_000_000,
        help="W1, W3, reading, ranges, acked, rebuild, explain: messages in the topic; W5, W6, W9: half of them",
    )
    parser.add_argument("--repeat", type=int, default=2, help="runs of each kind; the best counts")
    parser.add_argument(
        "--batch-records", type=int, default=0, help="W1, W3: records per batch; 0: the spout's default"
    )
    parser.add_argument("--partitions", type=int, nargs="+", default=[1_000], help="wide: partitions of both topics")
    parser.add_argument(
        "--keys", type=int, nargs="+", default=exactly_once_overhead.SIZES, help="states: keys per transaction"
    )
    parser.add_argument("--per-second", type=int, default=1_000, help="W2: messages per second")
    parser.add_argument("--seconds", type=int, default=20, help="W2: how long")
    parser.add_argument(
        "--idle", type=float, default=0, metavar="SECONDS", help="W2: also the processor time while nothing comes"
    )
    parser.add_argument("--jobs", action="store_true", help="W2: a Spark job for each batch, no task that stays")
    parser.add_argument("--store", choices=steady.STORES, default="sqlite", help="W2: where the words are counted")
    parser.add_argument(
        "--turns",
        nargs="+",
        default=[],
        choices=steady.VARIANTS,
        help="W2: measured so, too, in turns with the default; a cluster of two workers needs --store postgres or redis",
    )
    parser.add_argument("--parts", action="store_true", help="W2: also the time of a transaction by part")
    parser.add_argument("--pending", type=int, default=0, help="topology.max.spout.pending; 0: 1 for W2, else 2")
    return parser.parse_args()


#: What was measured so far.
_results: list[dict[str, Any]] = []


def _print(result: dict[str, Any]) -> None:
    _results.append(result)
    print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
