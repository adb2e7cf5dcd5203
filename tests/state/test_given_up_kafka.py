"""Records of Kafka that cannot be processed where state is exactly-once: a real broker, and workers
that are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, Config, CoreTopology, Fields, TopologyBuilder, Tuple, submit
from framework.coordination import store_of
from framework.core.committed_state_reader import TopologyState
from framework.core.leader_loop import read_record
from framework.topology import DEAD_LETTER_STREAM
from integration import EmbeddedServers
from spouts import KafkaSpout, RetryPolicy, TextCodec
from tests.kit.state_parts import Count, lmdb
from tests.kit.task_workers import workers_of
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration

RETRIES = 1
IN_OTHER_PROCESSES = "in other processes"


class Refuses(BaseBasicBolt):
    """Passes words on; raises for some, and for others returns what does not fit."""

    def execute(self, tup: Tuple, collector: Any) -> None:
        word = tup["value"]
        if word.startswith("bad"):
            raise ValueError(word)
        collector.emit([1.5j if word.startswith("unfit") else word])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class Values(BaseBasicBolt):
    """The values of dead letters."""

    def execute(self, tup: Tuple, collector: Any) -> None:
        assert tup["error"] == "its tuple tree failed too often"
        collector.emit([f"{tup['value'].decode()}@{tup['partition']}/{tup['offset']}"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


def topology(topology_id: str, topic: str, servers: EmbeddedServers, **options: Any) -> CoreTopology:
    builder = TopologyBuilder(topology_id)
    retry = RetryPolicy(retries_max=RETRIES)
    spout = KafkaSpout([topic], bootstrap_servers=servers.bootstrap_servers, codec=TextCodec(), retry=retry, **options)
    builder.set_spout("lines", spout, 2)
    builder.set_bolt("refuses", Refuses(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", Count(IN_OTHER_PROCESSES), 2).fields_grouping("refuses", Fields("word"))
    if options.get("on_exhausted") == "dead_letter":
        builder.set_bolt("values", Values()).shuffle_grouping("lines", DEAD_LETTER_STREAM)
        builder.set_bolt("letters", Count(IN_OTHER_PROCESSES)).fields_grouping("values", Fields("word"))
    return builder.build()


def send(servers: EmbeddedServers, topic: str, count: int) -> tuple[Counter[str], set[str]]:
    """Send words. Returns those that can be processed, and the dead letters of the others."""
    producer, good = Topics(servers.bootstrap_servers).producer(), Counter[str]()
    letters = set()
    for number in range(count):
        word = {7: f"bad {number}", 123: f"unfit {number}"}.get(number % 400, f"w{number % 97}")
        partition, offset = number % 2, number // 2
        producer.produce(topic, word, partition=partition)
        if " " in word:
            letters.add(f"{word}@{partition}/{offset}")
        else:
            good[word] += 1
    producer.arrived(60)
    return good, letters


def held(made: CoreTopology, conf: dict[str, Any], component_id: str) -> dict[Any, Any]:
    config = Config.of(conf)
    with closing(store_of(config)) as store, TopologyState(made, config, store) as state:
        record = read_record(store, made.id)
        assert record is not None and not any(record.suspects.values())
        return dict(state.items(component_id))


@pytest.mark.quick_for("dead_letter")
@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.4")
@pytest.mark.parametrize("on_exhausted", ["dead_letter", "drop"])
def test_records_that_fail_too_often_are_given_up_and_the_others_counted_once(
    tmp_path: Path, servers: EmbeddedServers, seed: int, on_exhausted: str
) -> None:
    """A second run goes on behind them."""
    name = f"given-up-{on_exhausted}-{seed}-{os.getpid()}".replace("_", "-")
    Topics(servers.bootstrap_servers).create(name, 2)
    good, letters = send(servers, name, 1_000)
    made = topology(name, name, servers, on_exhausted=on_exhausted)
    conf = lmdb(tmp_path, **{"transactional.zookeeper.servers": servers.zookeeper})
    for _ in range(2):
        with submit(made, conf, executor="local") as run:
            run.wait_until_idle(PATIENCE_S)
    assert held(made, conf, "count") == good
    if on_exhausted == "dead_letter":
        assert held(made, conf, "letters") == dict.fromkeys(letters, 1)


@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.4")
@pytest.mark.spark
@pytest.mark.kills
@pytest.mark.slow
def test_records_are_given_up_once_though_workers_are_killed_meanwhile(
    tmp_path: Path, spark: str, servers: EmbeddedServers, seed: int
) -> None:
    name = f"given-up-{seed}-{os.getpid()}"
    Topics(servers.bootstrap_servers).create(name, 2)
    good, letters = send(servers, name, 2_000)
    made = topology(name, name, servers, on_exhausted="dead_letter")
    conf: dict[str, Any] = lmdb(
        tmp_path, **{"spark.master": spark, "transactional.zookeeper.servers": servers.zookeeper}
    )
    conf["topology.max.attempts"] = 20
    with submit(made, conf) as run:
        for number in range(2):
            wait_for(lambda: run.status().checkpoint is not None and run.status().checkpoint.recoveries > 3 * number)  # type: ignore[union-attr]  # noqa: B023
            first = workers_of(run)
            os.kill(first[(seed + number) % 2], signal.SIGKILL)
            wait_for(lambda: workers_of(run) != first)  # noqa: B023
        run.wait_until_idle(PATIENCE_S)
    assert held(made, conf, "count") == good
    assert held(made, conf, "letters") == dict.fromkeys(letters, 1)
