"""The words of both workloads, the topology that counts them, and the limit: the rate of reading
alone."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from framework import (
    BaseBasicBolt,
    Fields,
    PartitionPlanner,
    Topology,
    TopologyContext,
    TransactionalTopologyBuilder,
    Tuple,
    submit,
)
from ratchet import Json, Pipeline, count, sqlite, sum_
from sinks import (
    Count,
    MapBackend,
    MapState,
    NonTransactionalMapState,
    OpaqueMapState,
    SqliteBackend,
    StateCommitter,
    Sum,
)
from spouts import JsonCodec, OpaqueKafkaTransactionalSpout, TextCodec

PARTITIONS = 4
WORDS = 20_000
AMOUNT_MODULUS = 997
SEED = 7
#: What the topologies make of a message.
FIELDS = {"word": str, "amount": int}
#: All fields of a message.
ALL_FIELDS = {"id": int, "word": str, "user": str, "amount": int, "ts": int}


def create_topic(bootstrap_servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        future.result(30)


def zipf_words(count: int) -> np.ndarray[Any, Any]:
    """Word numbers, distributed by Zipf's law over ``WORDS`` ranks."""
    weights = 1.0 / np.arange(1, WORDS + 1)
    return np.random.default_rng(SEED).choice(WORDS, size=count, p=weights / weights.sum())


def messages(count: int) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each message, about 81 bytes of JSON."""
    for number, word in enumerate(zipf_words(count).tolist()):
        name = b"word%06d" % word
        amount = number % AMOUNT_MODULUS
        value = b'{"id":%d,"word":"%s","user":"u%05d","amount":%d,"ts":%d}'
        yield name, value % (number, name, number % 10_000, amount, 1_700_000_000_000 + number)


def filled_topic(bootstrap_servers: str, count: int) -> str:
    """A new topic of ``count`` messages."""
    topic = f"words-{uuid.uuid4().hex[:6]}"
    create_topic(bootstrap_servers, topic)
    produce(bootstrap_servers, topic, messages(count))
    return topic


def produce(bootstrap_servers: str, topic: str, made: Iterable[tuple[bytes, bytes]]) -> None:
    """Fill the topic with messages (key, value), as fast as possible."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "compression.type": "lz4",
            "linger.ms": 50,
            "batch.size": 1 << 20,
            "queue.buffering.max.messages": 500_000,
            "acks": "all",
            "enable.idempotence": True,
        }
    )
    for key, value in made:
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush()


@cache
def expected(count: int) -> dict[str, tuple[int, int]]:
    """word -> (count, sum of amounts), computed directly from the generator."""
    words = zipf_words(count)
    amounts = np.arange(count) % AMOUNT_MODULUS
    counts = np.bincount(words, minlength=WORDS)
    sums = np.bincount(words, weights=amounts, minlength=WORDS).astype(np.int64)
    return {f"word{word:06d}": (int(counts[word]), int(sums[word])) for word in np.nonzero(counts)[0]}


class RecordingSpout(OpaqueKafkaTransactionalSpout):
    """Keeps every plan that it returns, so that the transaction of a record can be found."""

    plans: list[Mapping[str, Any]]

    def planner(self, conf: Mapping[str, Any], context: TopologyContext) -> PartitionPlanner:
        planner = super().planner(conf, context)
        self.plans = plans = []
        plan = planner.plan

        def recorded(previous: Any) -> Any:
            made = plan(previous)
            if made is not None:
                plans.append(made)
            return made

        planner.plan = recorded  # type: ignore[method-assign]
        return planner


class ParseJson(BaseBasicBolt):
    """One tuple after the other: the text of a message to its word and its amount."""

    deterministic = True

    def execute(self, tup: Tuple, collector: Any) -> None:
        message = json.loads(tup["value"])
        collector.emit([message["word"], message["amount"]])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(**FIELDS))


def word_count(
    topology_id: str,
    bootstrap_servers: str,
    topic: str,
    place: MapBackend | Path,
    *,
    exactly_once: bool = True,
    per_tuple: bool = False,
    fields: Mapping[str, Any] = FIELDS,
    **limits: int,
) -> tuple[Topology, RecordingSpout]:
    """Count and sum(amount) per word. ``place``: of the words; a path means the table ``words`` of
    a SQLite file. ``per_tuple``: a bolt parses the JSON, not the codec. ``fields``: those that the
    codec decodes."""
    codec = TextCodec() if per_tuple else JsonCodec(Fields(**fields))
    spout = RecordingSpout([topic], bootstrap_servers=bootstrap_servers, codec=codec, **limits)
    backend = SqliteBackend(place, "words") if isinstance(place, Path) else place
    state: MapState = OpaqueMapState(backend) if exactly_once else NonTransactionalMapState(backend)
    builder = TransactionalTopologyBuilder(topology_id, "words", spout, 2, at_least_once=not exactly_once)
    if per_tuple:
        builder.set_bolt("parsed", ParseJson(), 2).local_or_shuffle_grouping("words")
    committer = StateCommitter(state, key=["word"], aggregates={"count": Count(), "amount": Sum("amount")})
    builder.set_bolt("count", committer).global_grouping("parsed" if per_tuple else "words")
    return builder.build(), spout


def word_topology(*arguments: Any, **options: Any) -> Topology:
    """The topology of ``word_count``."""
    return word_count(*arguments, **options)[0]


def word_pipeline(
    name: str, bootstrap_servers: str, topic: str, database: Path, *, fields: Mapping[str, Any] = FIELDS, **limits: int
) -> Topology:
    """The same as ``word_count``, as a pipeline. ``fields``: those that are declared."""
    pipeline = Pipeline(name)
    words = pipeline.read_kafka(
        topic, value=Json(**fields), bootstrap_servers=bootstrap_servers, parallelism=2, **limits
    )
    table = words.group_by("word").agg(count=count(), amount=sum_("amount"))
    table.upsert_into(sqlite(database, "words"))
    return pipeline.build()


def read_back(database: Path) -> dict[str, tuple[int, int]]:
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT word, count, amount FROM words_live")
        return {word: (count, amount) for word, count, amount in rows}


def ends(bootstrap_servers: str, topic: str) -> dict[int, int]:
    """Partition -> where its log ends."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "ends"})
    found = {each: consumer.get_watermark_offsets(TopicPartition(topic, each))[1] for each in range(PARTITIONS)}
    consumer.close()
    return found


def seconds_of(topology: Topology, config: Mapping[str, Any], patience_s: float) -> float:
    """Run a topology until it is caught up. Returns the seconds as of ``span_of``."""
    run = submit(topology, config)
    try:
        run.wait_until_caught_up(patience_s)
        return span_of(run.events())
    finally:
        run.stop()


def span_of(events: Sequence[Any]) -> float:
    """Seconds from the first batch emitted to the last transaction closed."""
    started = min(event.at_s for event in events if event.kind == "emitted")
    return float(max(event.at_s for event in events if event.kind == "committed") - started)


def loop_consumer(bootstrap_servers: str) -> Consumer:
    """The consumer of a loop that an engineer writes by hand."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"loop-{uuid.uuid4().hex[:8]}",
            "enable.auto.commit": False,
            "queued.min.messages": 200_000,
            "queued.max.messages.kbytes": 131_072,
            "fetch.queue.backoff.ms": 5,
        }
    )


def time_loop(count: int, target: Callable[..., None], *arguments: Any) -> float:
    """Seconds of ``in_two_processes``, whose answers are numbers of records. Raises
    ``RuntimeError`` if these are not ``count`` together."""
    counts, elapsed_s = in_two_processes(target, *arguments)
    if sum(counts) != count:
        raise RuntimeError(f"the loop read {sum(counts)} of {count} records")
    return elapsed_s


def in_two_processes(target: Callable[..., None], *arguments: Any) -> tuple[list[Any], float]:
    """Run ``target(*arguments, partitions, ready, go, answers)`` in two processes, each with half
    of the partitions. ``target`` must wait at both barriers, and then put one answer. Returns the
    answers, and the seconds from ``go`` to the last answer."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Barrier(3), context.Barrier(3)
    queue = context.Queue()
    halves = [range(0, PARTITIONS, 2), range(1, PARTITIONS, 2)]
    workers = [context.Process(target=target, args=(*arguments, list(half), ready, go, queue)) for half in halves]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.monotonic()
    go.wait()
    answers = [queue.get() for _ in workers]
    elapsed_s = time.monotonic() - started
    for worker in workers:
        worker.join()
    return answers, elapsed_s


#: Before the clock of W2 starts, this many rounds of one probe per partition are sent. They are not
#: counted; a broker's, a producer's and a topology's first seconds are not a steady stream.
PROBES = 20
PROBE_EVERY_S = 0.2


def produce_steadily(bootstrap_servers: str, topic: str, per_second: int, seconds: int) -> None:
    """The producer of W2, run in a separate process. Each value carries its send time in ``ts``, in
    microseconds. Probes, whose ``id`` is negative, come first. Sends at once: what a producer would
    wait for more messages is not the topology's latency."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "acks": "all", "linger.ms": 0})

    def send(number: int, word: str) -> None:
        value = {"id": number, "word": word, "amount": number % AMOUNT_MODULUS, "ts": time.time_ns() // 1000}
        producer.produce(topic, json.dumps(value).encode(), word)

    for _ in range(PROBES):
        for partition in range(PARTITIONS):
            send(-1, f"probe{partition}")
        producer.flush()
        time.sleep(PROBE_EVERY_S)
    words = itertools.cycle(zipf_words(per_second * seconds).tolist())
    started = time.time()
    for number in range(per_second * seconds):
        due = started + number / per_second
        wait = due - time.time()
        if wait > 0:
            producer.poll(0)
            time.sleep(max(due - time.time(), 0))
        send(number, f"word{next(words):06d}")
    producer.flush()
