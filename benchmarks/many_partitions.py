"""Two topics of many partitions: what a plan, a transaction and doing nothing cost the driver, in
processor time. Without Spark: the batches have a few records and run in the driver's process."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from framework import TopologyContext, TransactionalTopologyBuilder, submit
from framework.coordination.zookeeper import ZooKeeperStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec

TOPICS = 2
#: Partitions that move from one batch to the next.
MOVING = 10
IDLE_S = 10.0
_TIMEOUT_S = 120


def measure(bootstrap_servers: str, zookeeper: str, partitions: int) -> dict[str, Any]:
    """Processor time, of all threads of the driver: of a plan when nothing is new, when 10
    partitions have moved, and when all have; of a transaction over 10 partitions; and of a run that
    has nothing to do. Also the bytes of the stored plan."""
    topics = create(bootstrap_servers, partitions)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_measure, args=(bootstrap_servers, zookeeper, topics, partitions, answers))
    process.start()
    found: dict[str, Any] = answers.get()
    process.join()
    return {"workload": "wide", "partitions": partitions, **found}


def create(bootstrap_servers: str, partitions: int) -> list[str]:
    """Two topics, with as many partitions in all."""
    topics = [f"wide-{number}-{uuid.uuid4().hex[:6]}" for number in range(TOPICS)]
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for topic in topics:
        admin.create_topics([NewTopic(topic, partitions // TOPICS, 1)], request_timeout=_TIMEOUT_S)[topic].result()
        _until(lambda topic=topic: _has_leaders(admin, topic, partitions // TOPICS))  # type: ignore[misc]
    return topics


def _has_leaders(admin: AdminClient, topic: str, partitions: int) -> bool:
    found = admin.list_topics(topic, timeout=_TIMEOUT_S).topics[topic].partitions.values()
    return len(found) == partitions and all(each.leader >= 0 for each in found)


def measure_here(bootstrap_servers: str, zookeeper: str, topics: list[str], partitions: int) -> dict[str, Any]:
    """In this process, which must do nothing else."""
    of_plans = _plans(bootstrap_servers, topics, partitions)
    return {**of_plans, **_run(bootstrap_servers, zookeeper, topics, partitions)}


def _measure(
    bootstrap_servers: str, zookeeper: str, topics: list[str], partitions: int, answers: multiprocessing.Queue[Any]
) -> None:
    answers.put(measure_here(bootstrap_servers, zookeeper, topics, partitions))


def _plans(bootstrap_servers: str, topics: list[str], partitions: int) -> dict[str, Any]:
    planner = _spout(bootstrap_servers, topics).planner({}, TopologyContext("wide", "spout", 0, 1))
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    used: dict[str, list[float]] = {"idle": [], "moved": [], "all": []}
    plan: Any = None
    try:
        for _ in range(3):
            _send(producer, topics, partitions, partitions)
            while (made := _timed(used["all"], partial(planner.plan, plan or {}))) is None and plan is None:
                used["all"].pop()  # no broker has told of the records yet
            plan = made or plan
            while (made := planner.plan(plan)) is not None:  # what came a moment later
                plan = made
        for turn in range(10):
            _send(producer, topics, partitions, MOVING, turn)
            plan = _timed(used["moved"], partial(planner.plan, plan)) or plan
            while (made := planner.plan(plan)) is not None:
                plan = made
            _timed(used["idle"], partial(planner.plan, plan))
    finally:
        planner.close()
    return {f"plan_{name}_cpu_ms": round(statistics.median(each), 2) for name, each in used.items()}


def _run(bootstrap_servers: str, zookeeper: str, topics: list[str], partitions: int) -> dict[str, Any]:
    name = f"wide-{uuid.uuid4().hex[:6]}"
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    with tempfile.TemporaryDirectory(prefix="ratchet-wide-") as folder:
        builder = TransactionalTopologyBuilder(name, "spout", _spout(bootstrap_servers, topics), 2)
        state = OpaqueMapState(SqliteBackend(Path(folder) / "wide.db", "counts"))
        builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
        run = submit(builder.build(), {"transactional.zookeeper.servers": zookeeper}, executor="local")
        try:
            run.wait_until_caught_up(_TIMEOUT_S)
            time.sleep(3)
            began, began_s = time.process_time(), time.monotonic()
            time.sleep(IDLE_S)
            idle = (time.process_time() - began) / (time.monotonic() - began_s)
            used, ended_ms = [], []
            for turn in range(10):
                txid = run.status().committed_txid
                began = time.process_time()
                _send(producer, topics, partitions, MOVING, turn)
                run.wait_for_commit(txid + 1, _TIMEOUT_S)
                used.append((time.process_time() - began) * 1000)
                time.sleep(0.2)  # the records may have come in two batches
                ended_ms.append(_closed_ms(run, txid + 1))
            txid = run.status().committed_txid
        finally:
            run.stop()
        store = ZooKeeperStore(zookeeper)
        try:
            document = store.get(f"{name}/user/spout/{txid}") or b""
        finally:
            store.close()
    return {
        "transaction_cpu_ms": round(statistics.median(used), 1),
        "transaction_ms": round(statistics.median(ended_ms), 1),
        "idle_core": round(idle, 4),
        "plan_bytes": len(document),
    }


def _closed_ms(run: Any, txid: int) -> float:
    """From the moment a transaction was emitted to the moment it was closed."""
    at = {each.kind: each.at_s for each in run.events() if each.txid == txid}
    return float(at["committed"] - at["emitted"]) * 1000


def _spout(bootstrap_servers: str, topics: list[str]) -> OpaqueKafkaTransactionalSpout:
    return OpaqueKafkaTransactionalSpout(topics, bootstrap_servers=bootstrap_servers, codec=TextCodec())


def _send(producer: Producer, topics: list[str], partitions: int, wanted: int, turn: int = 0) -> None:
    """One record into so many partitions; others in each turn."""
    for number in range(wanted):
        producer.produce(
            topics[number % TOPICS], b"x", partition=(number // TOPICS + 7 * turn) % (partitions // TOPICS)
        )
        producer.poll(0)
    producer.flush()


def _timed(used_ms: list[float], work: Callable[[], Any]) -> Any:
    began = time.process_time()
    done = work()
    used_ms.append((time.process_time() - began) * 1000)
    return done


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the topics have no leaders yet")
        time.sleep(0.1)
