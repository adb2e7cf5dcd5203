"""Stateful bolts count words from Kafka under many kills, in a chain and in windows; and the
oracle.

Each word is counted. What was counted is gathered in windows of a second of processing time, whose
results are added up, and in windows by the numbers of the records, which fire again for what comes
late; a bolt keeps what each of these fired.

``python -m tests.kit.kafka_counts --kills 50`` runs this on a Spark cluster. It kills executors,
their workers, workers, the driver, the broker, ZooKeeper and Redis at random, freezes servers for
some seconds, and changes the number of tasks now and then. Then it compares all states with a fold
over the records. ``--seed`` repeats the choice of kills. ``--plot FILE`` draws what the processes
held meanwhile, as ``python -m benchmarks.soak`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak import SERIES, Soak, plot, sampling
from framework import BaseStatefulBolt, Config, CoreTopology, Fields, TopologyBuilder, Tuple
from framework.coordination import store_of
from framework.core.committed_state_reader import TopologyState
from framework.state import BaseWindowedBolt, TimeWindow, Window
from integration import EmbeddedServers, RedisServer
from integration.spark_cluster import descendants
from spouts import KafkaSpout, TextCodec
from tests.kit.journaled import WORDS, note, noted
from tests.kit.kafka_words import SplitNumbered
from tests.kit.kills import PARTITIONS, TOPIC, Kills, kill_often, numbered, paused, restarted
from tests.kit.spans import Fired, KeepFired, Spans
from tests.kit.topics import Topics

KINDS = (
    "executor",
    "worker",
    "task worker",
    "driver",
    "broker",
    "broker paused",
    "zookeeper",
    "zookeeper paused",
    "redis",
    "redis paused",
    "rescale",
)
#: The state has up to this many keys per word.
KEYS = 1_000
#: Numbers of records in a window, how far the watermark is behind, and how late a tuple may be.
SPAN, LAG, LATENESS = 100, 4_000, 2_000
#: Records that are sent at the end, far ahead, each word in one at least: then all others are due.
CLOSING = range(10**9, 10**9 + 3 * len(WORDS))


class CountWords(BaseStatefulBolt):
    """Counts words by the key (word, record number modulo ``KEYS``)."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.counts = state

    def execute(self, tup: Tuple) -> None:
        key = tup["word"], tup["number"] % KEYS
        self.counts.put(key, (self.counts.get(key) or 0) + 1)
        self.collector.emit([tup["word"], tup["number"]], anchors=tup)
        self.collector.ack(tup)

    def pre_commit(self, txid: int) -> None:
        note(self.folder, "commits", txid)

    def grouping_key(self, key: Any) -> tuple[Any, ...]:
        return key[:1]

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str, number=int))


class EachSecond(BaseWindowedBolt):
    """How many of each word came in a second of processing time."""

    def __init__(self) -> None:
        super().__init__(TimeWindow(1), key=["word"])

    def execute_window(self, window: Window, collector: Any) -> None:
        collector.emit([*window.key, len(window.tuples)])

    def declare_output_fields(self, declarer: Any) -> None:
        super().declare_output_fields(declarer)
        declarer.declare(Fields(word=str, count=int))


class AddUp(BaseStatefulBolt):
    """Adds up the counts of the windows. Each word is in one window, which fires once."""

    def prepare(self, conf: Mapping[str, Any], context: Any, collector: Any) -> None:  # type: ignore[override]
        self.collector = collector

    def init_state(self, state: Any) -> None:
        self.totals = state

    def execute(self, tup: Tuple) -> None:
        self.totals.put(tup["word"], (self.totals.get(tup["word"]) or 0) + tup["count"])
        self.collector.ack(tup)


def topology(app: Mapping[str, Any]) -> CoreTopology:
    spout = KafkaSpout([app["app.topic"]], bootstrap_servers=app["app.kafka"], codec=TextCodec(), group="counts")
    tasks = int(app.get("app.tasks", 2))
    by_word = Fields("word")
    builder = TopologyBuilder("kafka-counts")
    builder.set_spout("lines", spout, 2)
    builder.set_bolt("split", SplitNumbered(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", CountWords(app["app.folder"]), tasks).fields_grouping("split", by_word)
    builder.set_bolt("windows", EachSecond(), tasks).fields_grouping("count", by_word)
    builder.set_bolt("totals", AddUp(), tasks).fields_grouping("windows", by_word)
    builder.set_bolt("spans", Spans(SPAN, LAG, LATENESS), tasks).fields_grouping("count", by_word)
    fired = builder.set_bolt("fired", KeepFired(SPAN), tasks)
    fired.fields_grouping("spans", by_word).fields_grouping("spans", by_word, "late")
    return builder.build()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was killed, what the states hold at the end, and what the records say.

    ``totals``: what the results of the windows by processing time add up to, by word. ``spans``: by
    word and window, the tuples that fired, and those that were late. ``again``: windows that fired
    more than once. ``late``: tuples that were late. ``wrong``: firings out of turn.
    """

    seen: Kills
    counts: Counter[Any]
    totals: Counter[Any]
    spans: Counter[Any]
    again: int
    late: int
    wrong: int
    soak: Soak
    numbers: Sequence[int] = field(repr=False)

    @property
    def expected_counts(self) -> Counter[Any]:
        return Counter((word, number % KEYS) for number, word in _words(self.numbers))

    @property
    def expected_totals(self) -> Counter[Any]:
        return Counter(word for _, word in _words(self.numbers))

    @property
    def expected_spans(self) -> Counter[Any]:
        """Without the windows of the closing records, which stay open."""
        return Counter((word, number // SPAN * SPAN) for number, word in _words(self.numbers) if number < CLOSING.start)

    @property
    def exact(self) -> bool:
        """Whether every state is the fold of the records."""
        found = self.counts, self.totals, self.spans, self.wrong
        return found == (self.expected_counts, self.expected_totals, self.expected_spans, 0)

    def summary(self) -> dict[str, Any]:
        return {
            **self.seen.summary(),
            "checkpoints": self.soak.transactions,
            "words": {
                "counted": _compared(self.counts, self.expected_counts),
                "added up from windows": _compared(self.totals, self.expected_totals),
                "in windows by number": _compared(self.spans, self.expected_spans),
            },
            "windows by number": {
                "fired": len(self.spans),
                "fired again": self.again,
                "late words": self.late,
                "out of turn": self.wrong,
            },
        }


def run(
    folder: Path,
    order: Sequence[str],
    *,
    exact: bool,
    per_second: int,
    seed: int = 1,
    temporary: Path | None = None,
    **options: Any,
) -> Outcome:
    """Kill what ``order`` says. ``options``: those of ``kill_often``.

    With ``exact``, run on until all windows have fired; without, a result may be lost or come
    twice. ``temporary``: the folder for temporary files of the topology; with it, samples are
    taken.
    """
    soak, chance = Soak(0.0), random.Random(seed)
    numbers: list[int] = []
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(EmbeddedServers(folder / "servers"))
        redis = stack.enter_context(RedisServer(folder / "redis"))
        host, port = redis.url.removeprefix("redis://").split("/")[0].rsplit(":", 1)
        settings: dict[str, Any] = {
            "transactional.zookeeper.servers": servers.zookeeper,
            "topology.state.provider": "framework.state.RedisKeyValueStateProvider",
            "topology.state.provider.config.jedisPoolConfig.host": host,
            "topology.state.provider.config.jedisPoolConfig.port": int(port),
            "topology.state.checkpoint.interval.ms": 300,
            "topology.state.exactly.once": str(exact).lower(),
            "transactional.zookeeper.session.timeout.secs": 4,
            "topology.max.attempts": 100,
        }
        app = {"app.topic": TOPIC, "app.kafka": servers.bootstrap_servers, "app.folder": str(folder)}
        config = Config.of({**settings, **app, "topology.state.exactly.once": exact})

        def held(component_id: str) -> dict[Any, Any]:
            with closing(store_of(config)) as store, TopologyState(topology(config.app), config, store) as state:
                return dict(state.items(component_id))

        def held_fired() -> dict[Any, Fired]:
            return {key: Fired(*values) for key, values in held("fired").items()}

        def txid() -> int:
            return max(map(int, noted(folder, "commits")[-10:]), default=0)

        def settled(messages: int) -> bool:
            """Whether every window has fired. The first call sends the records that make the last
            ones due."""
            if not numbers:
                numbers.extend((*range(messages), *CLOSING))
                producer = Topics(servers.bootstrap_servers).producer()
                for number in CLOSING:
                    producer.produce(TOPIC, numbered(number), partition=number % PARTITIONS)
                producer.arrived(60)
            words, open_ = (sum(1 for _ in _words(each)) for each in (numbers, CLOSING))
            fired = sum(each.tuples for each in held_fired().values())
            return sum(held("totals").values()) >= words and fired >= words - open_

        def processes() -> list[int]:
            """Those of Spark and of the topology."""
            others = [each.pid for each in (*servers.all, redis) if each.pid is not None]
            return list({*descendants(os.getpid())} - {*others, *(pid for each in others for pid in descendants(each))})

        commits = folder / "commits"
        start = time.monotonic()
        if temporary is not None:
            stack.enter_context(sampling(soak, processes, temporary, servers.zookeeper, txid))
        seen = kill_often(
            folder,
            "tests.kit.kafka_counts:topology",
            settings,
            order,
            lambda: commits.stat().st_size if commits.exists() else 0,
            servers,
            per_second=per_second,
            more={"redis": lambda: restarted(redis), "redis paused": lambda: paused(redis, chance)},
            chance=chance,
            settled=settled if exact else None,
            **options,
        )
        soak.minutes = round((time.monotonic() - start) / 60, 1)
        fired = held_fired()
        made = Outcome(
            seen,
            Counter(held("count")),
            Counter(held("totals")),
            Counter({key: each.tuples for key, each in fired.items()}),
            again=sum(each.firings > 1 for each in fired.values()),
            late=sum(each.late for each in fired.values()),
            wrong=sum(each.wrong for each in fired.values()),
            soak=soak,
            numbers=numbers or range(seen.messages),
        )
        soak.transactions, soak.records, soak.exact = txid(), seen.messages, made.exact
        return made


def random_kills(kills: int, seed: int, *, clustered: bool = True) -> list[str]:
    """What to kill: every kind about as often. Without a cluster, executors are the driver."""
    chance = random.Random(seed)
    kinds = [each for each in KINDS if clustered or each != "executor"]
    order = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(order)
    return order


def _words(numbers: Iterable[int]) -> Iterable[tuple[int, str]]:
    """The numbers of records, and their words."""
    return ((number, word) for number in numbers for word in numbered(number).split()[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill for so long, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="of the cluster; 0 for Spark in the driver itself")
    parser.add_argument("--at-least-once", action="store_true")
    parser.add_argument("--per-second", type=int, default=400)
    parser.add_argument("--plot", type=Path, help="draw what the processes held")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-kills-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        made = run(
            Path(folder),
            random_kills(arguments.kills, arguments.seed, clustered=arguments.workers > 0),
            exact=not arguments.at_least_once,
            per_second=arguments.per_second,
            seed=arguments.seed,
            temporary=temporary,
            minutes_max=arguments.minutes,
            workers=arguments.workers,
        )
    if arguments.plot is not None:
        plot(made.soak, arguments.plot, "checkpoints")
    growth = {series: [round(value, 1) for value in made.soak.growth(series)] for series in SERIES}
    print(json.dumps({**made.summary(), "second and last quarter": growth}, indent=1))
    if arguments.at_least_once:
        return 1 if made.expected_counts - made.counts else 0
    return 0 if made.exact else 1


def _compared(found: Counter[Any], expected: Counter[Any]) -> dict[str, int]:
    return {
        "found": found.total(),
        "missing": (expected - found).total(),
        "too many": (found - expected).total(),
    }


if __name__ == "__main__":
    sys.exit(main())
