"""State on Spark, in Redis and on disk, while task workers and parts of a cluster are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from framework import BaseBasicBolt, Config, CoreTopologyFailed, Fields, TopologyBuilder, Tuple, submit
from framework.coordination import store_of
from framework.core.committed_state_reader import TopologyState
from framework.core.spark import SparkRounds
from integration import EmbeddedServers
from tests.kit.kafka_counts import random_kills
from tests.kit.kafka_counts import run as run_and_kill
from tests.kit.state_parts import Count, Log, lmdb
from tests.kit.targets import Often
from tests.kit.task_workers import workers_of
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.slow
@pytest.mark.dies("state 3")
@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.kills
def test_a_worker_that_is_killed_loses_no_state(
    tmp_path: Path, spark: str, servers: EmbeddedServers, seed: int, often: Often
) -> None:
    """The states of all task workers go back to the last checkpoint, and the log with them."""
    words = [[f"{partition}-{n % 97}" for n in range(often(8_000, 30_000))] for partition in range(2)]
    builder = TopologyBuilder(f"t{seed}-{os.getpid()}")
    builder.set_spout("words", Log("in other processes", words, per_call=20), 2)
    builder.set_bolt("count", Count("in other processes"), 3).fields_grouping("words", Fields("word"))
    topology = builder.build()
    conf: dict[str, Any] = lmdb(
        tmp_path, **{"spark.master": spark, "transactional.zookeeper.servers": servers.zookeeper}
    )
    conf["topology.max.spout.pending"] = 500
    with submit(topology, conf) as run:
        wait_for(lambda: run.status().checkpoint is not None and run.status().checkpoint.txid >= 2)  # type: ignore[union-attr]
        first = workers_of(run)
        assert isinstance(run._executor, SparkRounds)
        os.kill(first[seed % 2], signal.SIGKILL)
        wait_for(lambda: workers_of(run) != first)
        run.wait_until_idle(PATIENCE_S)
        assert run.status().checkpoint.recoveries >= 1  # type: ignore[union-attr]
    config = Config.of(conf)
    store = store_of(config)
    with TopologyState(topology, config, store) as state:
        assert dict(state.items("count")) == Counter(word for each in words for word in each)
    store.close()


class Deadly(BaseBasicBolt):
    """Passes words on; one of them ends the process, until a file says that the bolt is mended."""

    def __init__(self, mended: Path) -> None:
        self.mended = mended

    def execute(self, tup: Tuple, collector: Any) -> None:
        if tup["word"] == "poison" and not self.mended.exists():
            os._exit(3)
        collector.emit([tup["word"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


@pytest.mark.slow
@pytest.mark.dies("state 3")
@pytest.mark.rule("C36")
@pytest.mark.behaviour("5.4")
def test_a_tuple_that_ends_its_process_each_time_ends_the_topology_and_the_bolt_is_named(
    tmp_path: Path, spark: str, servers: EmbeddedServers, seed: int
) -> None:
    """With a mended bolt, it goes on and counts everything once."""
    words = [[f"w{number % 7}" for number in range(100)] + ["poison"] for _ in range(2)]
    builder = TopologyBuilder(f"p{seed}-{os.getpid()}")
    builder.set_spout("words", Log("in other processes", words, per_call=20), 2)
    builder.set_bolt("deadly", Deadly(tmp_path / "mended")).shuffle_grouping("words")
    builder.set_bolt("count", Count("in other processes"), 2).fields_grouping("deadly", Fields("word"))
    topology = builder.build()
    conf = lmdb(
        tmp_path,
        **{"spark.master": spark, "transactional.zookeeper.servers": servers.zookeeper, "topology.max.attempts": 2},
    )
    with submit(topology, conf) as run, pytest.raises(CoreTopologyFailed, match=r"ended 2 times in a row.*deadly\[0\]"):
        run.join(PATIENCE_S)
    (tmp_path / "mended").touch()
    with submit(topology, conf) as run:
        run.wait_until_idle(PATIENCE_S)
    config = Config.of(conf)
    with closing(store_of(config)) as store, TopologyState(topology, config, store) as state:
        assert dict(state.items("count")) == Counter(word for each in words for word in each)


FEW = ["task worker", "redis", "rescale"]


@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.kills
@pytest.mark.slow
@pytest.mark.parametrize("kills", [len(FEW), 50])
def test_states_and_windows_are_the_fold_of_the_records_whatever_is_killed(
    tmp_path: Path, kills: int, seed: int
) -> None:
    """``python -m tests.kit.kafka_counts`` does the same with other numbers of kills."""
    order = FEW if kills == len(FEW) else random_kills(kills, seed)
    made = run_and_kill(tmp_path, order, exact=True, per_second=40, seed=seed)
    print(made.summary())
    assert made.seen.kills == Counter(order)
    assert made.expected_totals.total() > 500
    assert made.exact


@pytest.mark.behaviour("5.4", "5.5")
@pytest.mark.kills
@pytest.mark.slow
def test_at_least_once_no_word_is_lost_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    made = run_and_kill(tmp_path, ["executor", "zookeeper"], exact=False, per_second=40, seed=seed)
    print(made.summary())
    assert made.seen.kills.total() == 2
    assert made.expected_totals.total() > 500
    assert not made.expected_counts - made.counts
