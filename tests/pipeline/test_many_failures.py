"""A topology with every grouping and every kind of bolt, exact after fifty random failures,
on memory and on Kafka.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import (
    ArrowBolt,
    BaseBasicBolt,
    BaseBatchBolt,
    FailedException,
    Fields,
    Grouping,
    Topology,
    TransactionalTopologyBuilder,
    submit,
)
from framework.execution import BatchExecutor, plan_execution
from framework.execution.failures import FailureKind, TaskFailure
from framework.execution.local import LocalExecutor
from framework.execution.messages import AttemptHeader
from framework.execution.ports import PhaseResult
from framework.transactions import MemoryStore
from integration import EmbeddedServers
from sinks import Count, Max, OpaqueMapState, SqliteBackend, StateCommitter, Sum
from spouts import (
    KafkaTransactionalSpout,
    MemoryTransactionalSpout,
    OpaqueKafkaTransactionalSpout,
    OpaqueMemoryTransactionalSpout,
    TextCodec,
)
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

FAILURES = 50
PARTITIONS = 3
ROWS = 200
WORDS = ["a", "bb", "ccc", "dddd", "ee", "f", "ggg", "ß"]


def rows() -> dict[int, list[str]]:
    chance = random.Random(11)
    return {partition: chance.choices(WORDS, k=ROWS) for partition in range(PARTITIONS)}


ALL = [word for words in rows().values() for word in words]


class ByFirstLetter(Grouping):
    """A custom grouping, as a user writes it."""

    def split(self, batch: pa.RecordBatch, task_count: int, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        targets = [ord(word[0]) % task_count for word in batch.column("word").to_pylist()]
        for task in range(task_count):
            mine = pa.array([target == task for target in targets])
            if any(target == task for target in targets):
                yield task, batch.filter(mine)


class Route(BaseBasicBolt):
    """Emits the word on the default stream, and its length on a direct stream."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.tasks = context.tasks_of("direct")

    def execute(self, tup: Any, collector: Any) -> None:
        collector.emit([tup["word"]])
        collector.emit_direct(len(tup["word"]) % self.tasks, [tup["word"]], "lengths")

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))
        declarer.declare(Fields(word=str), "lengths", direct=True)


class AtTask(ArrowBolt):
    """Emits each row with the number of the task that got it."""

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.task = context.task_index

    def execute_arrow(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"word": pa.array([f"{word}@{self.task}" for word in batch.column("word").to_pylist()])})

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(word=str))


class CountOf(BaseBatchBolt):
    """Counts the tuples of a batch in its task, under a name; fails by chance,
    in whichever phase it runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
        self.collector, self.n = collector, 0
        self.fails = random.Random(f"{self.name} {batch_id} {context.task_index}").random() < 0.02

    def execute(self, tup: Any) -> None:
        self.n += 1

    def finish_batch(self) -> None:
        if self.fails:
            raise FailedException("by chance")
        self.collector.emit([self.name, self.n])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(name=str, n=int))


def build(spout: Any, path: Path) -> Topology:
    def state(table: str) -> OpaqueMapState:
        return OpaqueMapState(SqliteBackend(path, table))

    builder = TransactionalTopologyBuilder("everything", "spout", spout, PARTITIONS)
    builder.set_bolt("route", Route(), 2).shuffle_grouping("spout")
    builder.set_bolt("direct", AtTask(), 3).direct_grouping("route", "lengths")
    builder.set_bolt("custom", AtTask(), 2).custom_grouping("route", ByFirstLetter())
    builder.set_bolt("halves", CountOf("halves"), 4).partial_key_grouping("route", Fields("word"))
    builder.set_bolt("everywhere", CountOf("everywhere"), 3).all_grouping("route")
    words = StateCommitter(state("words"), ["word"], {"n": Count()})
    builder.set_bolt("words", words, 3).fields_grouping("route", Fields("word"))
    seen = StateCommitter(state("seen"), ["word"], {"n": Count()})
    builder.set_bolt("seen", seen).global_grouping("direct").global_grouping("custom")
    totals = StateCommitter(state("totals"), ["name"], {"n": Sum("n")})
    builder.set_bolt("totals", totals, 2).fields_grouping("halves", Fields("name")).fields_grouping(
        "everywhere", Fields("name")
    )
    builder.set_committer_bolt("below", CountOf("below"), 2).local_or_shuffle_grouping("words").none_grouping("totals")
    highest = StateCommitter(state("highest"), ["word"], {"n": Max("n")})
    builder.set_bolt("highest", highest, 2).fields_grouping("words", Fields("word"))
    return builder.build()


class Chaos:
    """Wraps a real executor: loses answers before or after the work, loses results,
    and deposes the leader.
    """

    def __init__(self, inner: BatchExecutor, store: MemoryStore, seed: int) -> None:
        self.inner, self.store, self.chance = inner, store, random.Random(seed)
        self.left = FAILURES
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def process(self, job: Any) -> PhaseResult:
        return self._around(lambda: self.inner.process(job), job.header)

    def commit(self, header: AttemptHeader) -> PhaseResult:
        return self._around(lambda: self.inner.commit(header), header)

    def _around(self, work: Any, header: AttemptHeader) -> PhaseResult:
        with self.lock:
            what = self.chance.choice(("before", "after", "lost", "depose")) if self.chance.random() < 0.95 else ""
            if not what or not self.left:
                what = ""
            else:
                self.left -= 1
        if what == "before":
            return failed(FailureKind.RETRYABLE, "lost before")
        if what == "depose":
            self.store.depose("everything")
        result: PhaseResult = work()
        if what == "lost":
            self.inner.release(header)
        return failed(FailureKind.FAILED, "answer lost") if what == "after" else result


def failed(kind: FailureKind, why: str) -> PhaseResult:
    return PhaseResult(TaskFailure(kind, "chaos", 0, why))


def executors(kind: str, topology: Topology) -> BatchExecutor:
    plan = plan_execution(topology)
    if kind == "local":
        return LocalExecutor(plan, {})
    from framework.execution.spark.batch_executor import SparkExecutor

    return SparkExecutor(plan, {}, {}, collapse_records_max=0)


def table(path: Path, name: str, key: str) -> dict[str, int]:
    with sqlite3.connect(path) as connection:
        return dict(connection.execute(f"SELECT {key}, n FROM {name}_live"))


@pytest.fixture(
    params=[
        pytest.param("memory", marks=pytest.mark.slow),
        "opaque memory",
        pytest.param("kafka", marks=pytest.mark.slow),
        "opaque kafka",
    ]
)
def spout(request: pytest.FixtureRequest) -> Any:
    fields = Fields(word=str)
    if "memory" in request.param:
        kind = OpaqueMemoryTransactionalSpout if "opaque" in request.param else MemoryTransactionalSpout
        return kind({each: [[word] for word in words] for each, words in rows().items()}, fields, 34)
    servers: EmbeddedServers = request.getfixturevalue("servers")
    topics = Topics(servers.bootstrap_servers)
    topic = topics.create(f"many-{uuid.uuid4().hex[:8]}", PARTITIONS)
    for partition, words in rows().items():
        topics.send(topic, [word.encode() for word in words], partition)
    kafka = OpaqueKafkaTransactionalSpout if "opaque" in request.param else KafkaTransactionalSpout
    return kafka([topic], bootstrap_servers=servers.bootstrap_servers, codec=TextCodec("word"), batch_records_max=102)


@pytest.mark.slow_for("opaque kafka")
@pytest.mark.integration
@pytest.mark.parametrize("executor", ["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow])])
@pytest.mark.behaviour("1.10")
def test_every_grouping_is_exact_after_fifty_failures(
    executor: str, spout: Any, tmp_path: Path, request: pytest.FixtureRequest, seed: int
) -> None:
    if executor == "spark":
        request.getfixturevalue("spark")
    path = tmp_path / "x.db"
    topology = build(spout, path)
    assert len(topology.components) >= 8
    store = MemoryStore()
    chaos = Chaos(executors(executor, topology), store, seed)
    config = {"topology.max.spout.pending": 3, "topology.message.timeout.secs": 60}
    with submit(topology, config, store=store, executor=chaos) as run:
        run.wait_until_caught_up(PATIENCE_S)
        epochs = run.status().epoch
    assert chaos.left == 0
    assert epochs > 1
    counts = Counter(ALL)
    assert table(path, "words", "word") == counts
    assert table(path, "highest", "word") == counts
    assert table(path, "totals", "name") == {"halves": len(ALL), "everywhere": 3 * len(ALL)}
    seen: Counter[str] = Counter()
    for word, times in counts.items():
        seen[f"{word}@{len(word) % 3}"] += times
        seen[f"{word}@{ord(word[0]) % 2}"] += times
    assert table(path, "seen", "word") == seen
