"""The readers alone: consecutive ranges of several sizes over four partitions, in one process,
without Spark and without decoding. Native against Python, in turns."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from typing import Any

from benchmarks import workload
from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.consumer.native_range_consumer import NativeSession, why_not_native
from spouts.kafka.consumer.range_consumer import KafkaSession
from spouts.kafka.consumer.range_consumer_base import Range
from spouts.kafka.partition_plan_entries import TopicPartition
from spouts.kafka.record_deserialization import Parts

#: Records per range, over all partitions; and how many ranges of a size are read at most.
SIZES = (1_000_000, 125_000, 25_000, 20)
RANGES_MAX = 200
READERS = {"native": NativeSession, "python": KafkaSession}


def measure(bootstrap_servers: str, count: int, repeat: int) -> dict[str, Any]:
    """By size and reader, the best of ``repeat`` runs: records per second, records per second of
    processor time, and the median of a range in milliseconds. Processor time includes librdkafka's
    threads."""
    topic = workload.filled_topic(bootstrap_servers, count)
    names = [name for name in READERS if name == "python" or why_not_native() is None]
    sizes: dict[str, Any] = {}
    for size in SIZES:
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for _ in range(repeat):
            for name in names:
                runs[name].append(_in_a_process(bootstrap_servers, topic, name, size))
        sizes[f"{size}"] = {
            name: {
                "records_per_s": round(max(each[0] for each in measured)),
                "records_per_cpu_s": round(max(each[1] for each in measured)),
                "range_ms": round(min(each[2] for each in measured), 3),
            }
            for name, measured in runs.items()
        }
    return {"workload": "ranges", "messages": count, "sizes": sizes}


def _in_a_process(*arguments: Any) -> tuple[float, float, float]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_read, args=(*arguments, answers))
    process.start()
    answer: tuple[float, float, float] = answers.get()
    process.join()
    return answer


def _read(bootstrap_servers: str, topic: str, name: str, size: int, answers: Any) -> None:
    session = READERS[name](KafkaSettings(bootstrap_servers, None), "ranges")
    session.connect()
    share = size // workload.PARTITIONS
    ends = workload.ends(bootstrap_servers, topic)
    at = dict.fromkeys(ends, 0)
    records, elapsed_s = 0, []
    begun_cpu = time.process_time()
    while at != ends and len(elapsed_s) < RANGES_MAX:
        upto = {number: min(offset + share, ends[number]) for number, offset in at.items()}
        ranges: dict[TopicPartition, Range] = {(topic, each): Range(at[each], upto[each]) for each in ends}
        begun = time.perf_counter()
        for chunk in session.read(ranges, Parts(keys=False, headers=False, timestamps=False)):
            chunk.raw("value")
            records += len(chunk)
        elapsed_s.append(time.perf_counter() - begun)
        at = upto
    if records != sum(at.values()):
        raise RuntimeError(f"{name} read {records} of {sum(at.values())} records")
    used_s = time.process_time() - begun_cpu
    answers.put((records / sum(elapsed_s), records / used_s, 1000 * statistics.median(elapsed_s)))
    session.close()
