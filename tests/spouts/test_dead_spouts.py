"""Spout tasks that die with their process: their sources hand out again what was not done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka import Consumer, TopicPartition

from framework import BaseRichBolt, BaseRichSpout, Fields, TopologyBuilder, Tuple
from framework.core.driver import RoundDriver
from framework.core.plan import CorePlan
from framework.core.worker_client import WorkerSettings
from framework.core.worker_process import start_worker
from framework.execution.plan import plan_execution
from integration import RedisServer
from integration.server import wait_until
from spouts import KafkaSpout, TextCodec
from spouts.redis_streams import RedisStreamSpout
from tests.kit.journaled import alive, note, noted
from tests.kit.task_workers import InATaskWorker
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("4.6"), pytest.mark.dies("core 3")]


class Holding(BaseRichBolt):
    """Writes down its tuples, and holds every third one for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def prepare(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector = collector

    def execute(self, tup: Tuple) -> None:
        note(self.folder, "came", tup["n"])
        if int(tup["n"]) % 3 < 2:
            self.collector.ack(tup)


class Lives:
    """A topology in one task worker, and in another task worker after the first is killed."""

    def __init__(self, folder: Path, spout: BaseRichSpout) -> None:
        builder = TopologyBuilder("lives")
        builder.set_spout("spout", spout)
        builder.set_bolt("holding", Holding(folder)).global_grouping("spout")
        self._folder = folder
        self._plan = CorePlan(plan_execution(builder.build()), {}, ackers=1, pending_max=100)
        self._settings = WorkerSettings.of(self._plan, 60.0, None)
        self._rounds = InATaskWorker(self._plan, self._settings, start_worker(self._settings, 0))
        self._driver = RoundDriver(self._plan, self._rounds, timeout_s=PATIENCE_S, attempts_max=5)

    def until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, self._driver.status()
            self._driver._spout_wait_s = 0.0
            assert self._driver.step()

    def came(self) -> list[int]:
        return [int(line) for line in noted(self._folder, "came")]

    def die(self) -> None:
        pid = self._rounds.worker.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), PATIENCE_S, "the end of the task worker")
        assert not self._driver.step()  # a lost round
        self._rounds.worker = start_worker(self._settings, 0)

    def close(self) -> None:
        os.kill(self._rounds.worker.pid, signal.SIGKILL)


@contextmanager
def lives(folder: Path, spout: BaseRichSpout) -> Iterator[Lives]:
    made = Lives(folder, spout)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_kafka_spout_whose_worker_is_killed_goes_on_from_the_committed_offset(
    topics: Topics, name: str, tmp_path: Path
) -> None:
    topics.create(name)
    topics.send(name, [b"%d" % n for n in range(10)])
    spout = KafkaSpout(
        [name], bootstrap_servers=topics.bootstrap_servers, codec=TextCodec("n"), group=name, commit_every_s=0.05
    )
    with (
        closing(Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": name})) as group,
        lives(tmp_path, spout) as topology,
    ):
        topology.until(
            lambda: (
                len(topology.came()) == 10
                and group.committed([TopicPartition(name, 0)], timeout=PATIENCE_S)[0].offset == 2
            )
        )
        topology.die()
        topology.until(lambda: len(topology.came()) == 18)
        assert topology.came()[10:] == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_a_redis_spout_whose_worker_is_killed_gets_again_what_it_had_locked(
    redis_server: RedisServer, name: str, tmp_path: Path
) -> None:
    with (
        redis.Redis.from_url(redis_server.url) as client,
        lives(tmp_path, RedisStreamSpout(name, Fields(n=int), url=redis_server.url, group="g")) as topology,
    ):
        for number in range(10):
            client.xadd(name, {"n": number})
        topology.until(lambda: len(topology.came()) == 10 and client.xpending(name, "g")["pending"] == 3)
        topology.die()
        topology.until(lambda: len(topology.came()) == 13)
        assert topology.came()[10:] == [2, 5, 8]
