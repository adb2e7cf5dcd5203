"""A core topology over Kafka on a Spark cluster whose processes are killed again and again, while records keep coming."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from integration import EmbeddedServers, SparkCluster
from tests.kit.journaled import sentence_of
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics

PARTITIONS = 4
TOPIC = "lines"


@dataclass
class Kills:
    """What was done and seen. ``recovery_s``: kind -> seconds from each kill until the topology got on again."""

    messages: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        shown = {kind: (statistics.median(each), max(each)) for kind, each in self.recovery_s.items()}
        return {"messages": self.messages, "kills": dict(self.kills), "recovery_s": shown}


def kill_often(
    folder: Path,
    topology: str,
    settings: Mapping[str, Any],
    order: Sequence[str],
    progress: Callable[[], int],
    servers: EmbeddedServers,
    *,
    per_second: int,
    more: Mapping[str, Callable[[], None]] | None = None,
) -> Kills:
    """Kill what ``order`` says, one after the other: "executor", "driver", "broker", "zookeeper", "home", or one of ``more``; each
    time wait until ``progress`` has risen. ``settings`` are added to those that every such run needs. In the end the topology
    runs until it has caught up. Raises ``TimeoutError`` or ``RuntimeError`` when it does not get on."""
    seen = Kills()
    topics = Topics(servers.bootstrap_servers)
    topics.create(TOPIC, PARTITIONS)
    stop = threading.Event()
    feeder = threading.Thread(target=_feed, args=(topics, seen, stop, per_second))
    with SparkCluster(folder / "spark", 2) as spark:
        base = {
            "app.topic": TOPIC,
            "app.kafka": servers.bootstrap_servers,
            "app.folder": folder,
            "spark.master": spark.address,
            "spark.executor.memory": "512m",
            "topology.message.timeout.secs": 10,
            "topology.max.spout.pending": 500,
        }
        process = RunProcess(folder / "run.log", topology, {**base, **settings})
        kinds: dict[str, Callable[[], None]] = {
            "executor": lambda: os.kill(random.choice(spark.await_executors(2)), signal.SIGKILL),
            "driver": lambda: (process.kill(), process.start())[1],
            "broker": lambda: _restart(servers.kafka),
            "zookeeper": lambda: _restart(servers.zookeeper_server),
            "home": lambda: _kill_a_home(spark),
            **(more or {}),
        }
        feeder.start()
        try:
            process.start()
            _await(process, progress)
            for kind in order:
                killed_at = time.monotonic()
                kinds[kind]()
                seen.kills[kind] += 1
                _await(process, progress)
                seen.recovery_s.setdefault(kind, []).append(time.monotonic() - killed_at)
                time.sleep(1.0)
            stop.set()
            feeder.join()
            process.signal(signal.SIGTERM)
            process.finish()
            process.start("--until-caught-up")
            if process.finish() != 0:
                raise RuntimeError(f"the last run failed; its log ends:\n{process.tail()}")
        finally:
            stop.set()
            process.end()
    return seen


def numbered(number: int) -> str:
    """The record of a number."""
    return f"{number} {sentence_of(number)}"


def _feed(topics: Topics, seen: Kills, stop: threading.Event, per_second: int) -> None:
    producer = topics.producer()
    while not stop.wait(0.1):
        for _ in range(per_second // 10):
            producer.produce(TOPIC, numbered(seen.messages), partition=seen.messages % PARTITIONS)
            seen.messages += 1
        producer.poll(0)
    producer.flush(60)


def _restart(server: Any) -> None:
    server.kill()
    server.start()


def _kill_a_home(spark: SparkCluster) -> None:
    spark.await_executors(2)
    homes = [each.pid for each in psutil.process_iter() if "framework.acking.homes" in _command(each)]
    os.kill(random.choice(homes), signal.SIGKILL)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()  # type: ignore[no-any-return]
    except psutil.Error:
        return []


def _await(process: RunProcess, progress: Callable[[], int]) -> None:
    """Until there is more progress."""
    before = progress()
    if not process.wait_for(lambda: progress() > before, 120):
        raise RuntimeError(f"the driver ended by itself; its log ends:\n{process.tail()}")
