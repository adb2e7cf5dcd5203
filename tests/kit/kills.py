"""A topology over Kafka on Spark whose processes are killed again and again,
while records keep coming.
"""

from __future__ import annotations

import contextlib
import math
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
from integration.server import Server
from integration.spark_cluster import python_workers
from tests.kit.journaled import sentence_of
from tests.kit.processes import RunProcess
from tests.kit.topics import Topics

PARTITIONS = 4
TOPIC = "lines"
#: How long a server is frozen: shorter and longer than clients wait for an answer.
PAUSE_S = (0.5, 8.0)


@dataclass
class Kills:
    """What was sent and killed.

    ``recovery_s``: kind -> seconds from each kill until there was progress again.
    """

    messages: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        shown = {kind: (statistics.median(each), max(each)) for kind, each in self.recovery_s.items()}
        return {"messages": self.messages, "kills": dict(self.kills), "recovery_s": shown}


def numbered(number: int) -> str:
    """The record of a number."""
    return f"{number} {sentence_of(number)}"


def kill_often(
    folder: Path,
    topology: str,
    settings: Mapping[str, Any],
    order: Sequence[str],
    progress: Callable[[], int],
    servers: EmbeddedServers,
    *,
    per_second: int,
    more: Mapping[str, Callable[[], object]] | None = None,
    deploy: Callable[[], object] | None = None,
    record: Callable[[int], str | bytes] = numbered,
    workers: int = 2,
    executor: str = "spark",
    minutes_max: float = math.inf,
    chance: random.Random | None = None,
    overlapping: float = 0.0,
    rises_by: int = 1,
    settled: Callable[[int], bool] | None = None,
    messages_min: int = 0,
) -> Kills:
    """Kill what ``order`` says, one after the other; after each kill, wait until ``progress`` has
    risen by ``rises_by``.

    A kind is "executor", "worker" (a Python worker), "working" (the Python worker that uses most of
    the processor at the moment), "driver", "broker", "zookeeper", "task worker", "broker paused",
    "zookeeper paused", "rescale", "deploy" or one of ``more``. Kinds that are joined by "+" follow
    at once, the one on the other. "rescale" kills the driver or tells it to stop; the next driver
    gets a new ``app.tasks``. "deploy" stops the driver, calls ``deploy``, which changes its code,
    and starts the next one. A share ``overlapping`` of the kills is not waited for: the next kill
    meets the topology in mid-recovery.

    ``settings`` are added to those that every such run needs. ``record``: number -> what is sent.
    ``workers``: of the Spark cluster; 0 means Spark in the driver itself. ``executor``: with
    "local", the whole topology is in the driver. ``minutes_max``: what is not killed by then is
    left alone. At the end the topology runs until it has caught up, and then until ``settled``,
    which is given the number of messages sent. ``messages_min``: at least so many are sent, however
    fast the kills follow. Raises ``TimeoutError`` or ``RuntimeError`` when the topology makes no
    progress.
    """
    chance = chance or random.Random()
    seen = Kills()
    topics = Topics(servers.bootstrap_servers)
    topics.create(TOPIC, PARTITIONS)
    stop = threading.Event()
    feeder = threading.Thread(target=_feed, args=(topics, seen, stop, per_second, record, messages_min))
    tasks = 0  # of the driver that runs now; 0 is the topology's own number
    with contextlib.ExitStack() as stack:
        clustered = executor == "spark" and workers > 0
        spark = stack.enter_context(SparkCluster(folder / "spark", workers)) if clustered else None
        base = {
            "app.topic": TOPIC,
            "app.kafka": servers.bootstrap_servers,
            "app.folder": folder,
            **(spark.settings if spark is not None else {"spark.master": "local[2]"}),
            "spark.executor.memory": "512m",
            "topology.message.timeout.secs": 10,
            "topology.max.spout.pending": 500,
        }
        process = RunProcess(folder / "run.log", topology, {**base, **settings}, executor=executor)

        def kill_driver(*options: str) -> None:
            if not process.kill():
                raise RuntimeError(f"the driver had ended by itself; its log ends:\n{process.tail()}")
            process.start(*options)

        def stop_driver() -> None:
            process.signal(signal.SIGTERM)
            process.finish()

        def other_tasks() -> Sequence[str]:
            nonlocal tasks
            tasks = chance.choice([each for each in range(1, 5) if each != tasks])
            return "--set", f"app.tasks={tasks}"

        def rescale() -> None:
            if chance.random() < 0.5:
                stop_driver()
                process.start(*other_tasks())
            else:
                kill_driver(*other_tasks())

        def deployed() -> None:
            stop_driver()
            if deploy is not None:
                deploy()
            process.start()

        def executors() -> list[int]:
            return spark.await_executors(workers) if spark is not None else []

        def workers_now() -> list[int]:
            return python_workers(spark.executors() if spark is not None else [process.pid])

        def kill_worker() -> None:
            process.wait_for(lambda: _killed(chance, workers_now()))

        kinds: dict[str, Callable[[], object]] = {
            "executor": lambda: _killed(chance, executors()),
            "worker": kill_worker,
            "working": lambda: process.wait_for(lambda: _kill_busiest(workers_now())),
            "driver": kill_driver,
            "rescale": rescale,
            "deploy": deployed,
            "broker": lambda: restarted(servers.kafka),
            "zookeeper": lambda: restarted(servers.zookeeper_server),
            "task worker": lambda: _kill_a_worker(chance, executors),
            "broker paused": lambda: paused(servers.kafka, chance),
            "zookeeper paused": lambda: paused(servers.zookeeper_server, chance),
            **(more or {}),
        }
        feeder.start()
        try:
            process.start()
            _await(process, progress)
            until = time.monotonic() + minutes_max * 60
            for kind in order:
                if time.monotonic() > until:
                    break
                killed_at = time.monotonic()
                process.note(f"kill {seen.kills.total() + 1} of {len(order)}: {kind}")
                for each in kind.split("+"):
                    kinds[each]()
                seen.kills[kind] += 1
                if chance.random() >= overlapping:
                    _await(process, progress, rises_by)
                    seen.recovery_s.setdefault(kind, []).append(time.monotonic() - killed_at)
                time.sleep(chance.uniform(0.0, 2.0))  # a random moment is the point
            _await(process, progress)
            stop.set()
            feeder.join()
            stop_driver()
            process.start("--until-caught-up")
            if process.finish() != 0:
                raise RuntimeError(f"the last run failed; its log ends:\n{process.tail()}")
            if settled is not None:
                process.start()
                if not process.wait_for(lambda: settled(seen.messages), pause_s=1.0):
                    raise RuntimeError(f"it ended before all had settled; its log ends:\n{process.tail()}")
                stop_driver()
        finally:
            stop.set()
            process.end()
    return seen


def _feed(
    topics: Topics,
    seen: Kills,
    stop: threading.Event,
    per_second: int,
    record: Callable[[int], str | bytes],
    messages_min: int,
) -> None:
    producer = topics.producer()
    while not stop.wait(0.1) or seen.messages < messages_min:
        for _ in range(per_second // 10):
            producer.produce(TOPIC, record(seen.messages), partition=seen.messages % PARTITIONS)
            seen.messages += 1
        producer.poll(0)
    producer.arrived(60)


def restarted(server: Server) -> None:
    """Kill a server and start it again."""
    server.kill()
    server.start()


def paused(server: Server, chance: random.Random) -> None:
    """Freeze a server for some seconds."""
    server.pause()
    time.sleep(chance.uniform(*PAUSE_S))
    server.resume()


def _killed(chance: random.Random, processes: Sequence[int]) -> bool:
    """Kill one of them; False when there is none."""
    for pid in chance.sample(processes, len(processes)):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _kill_busiest(processes: Sequence[int], for_s: float = 0.2) -> bool:
    """Kill the one that uses most of the processor for a moment; False when none of them works."""
    before = {pid: _used_s(pid) for pid in processes}
    time.sleep(for_s)
    used = {pid: _used_s(pid) - since for pid, since in before.items()}
    busiest = max(used, key=lambda pid: used[pid], default=0)
    return used.get(busiest, 0.0) > 0 and _killed(random.Random(0), [busiest])


def _used_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _kill_a_worker(chance: random.Random, executors: Callable[[], list[int]]) -> None:
    executors()  # waits for them; they start the task workers
    _killed(chance, [each.pid for each in psutil.process_iter() if "framework.core.worker_process" in _command(each)])


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()  # type: ignore[no-any-return]
    except psutil.Error:
        return []


def _await(process: RunProcess, progress: Callable[[], int], by: int = 1) -> None:
    """Wait until there is more progress."""
    before = progress()
    if not process.wait_for(lambda: progress() >= before + by):
        raise RuntimeError(f"the driver ended by itself; its log ends:\n{process.tail()}")
