"""The limit of W1: two processes that only read the topic and count, by librdkafka called from C.

Where there is no C compiler, Python's ``consume`` counts, which is slower: the result says which of
the two it was.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from benchmarks.workload import in_two_processes
from spouts.kafka.consumer.native_range_consumer import librdkafka

C, PYTHON = "librdkafka in C", "consume() in Python"
_SOURCE = Path(__file__).with_name("limit.c")
_SETTINGS = {
    "group.id": "limit",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "enable.partition.eof": True,
    "queued.min.messages": 200_000,
    "fetch.queue.backoff.ms": 5,
    "max.partition.fetch.bytes": 8 << 20,
}


class Limit:
    """Measures with the C program if it can be compiled in ``folder``, else with Python."""

    def __init__(self, folder: Path) -> None:
        self._library = _compiled(folder)
        self.by = PYTHON if self._library is None else C

    def measure(self, bootstrap_servers: str, topic: str, count: int) -> float:
        """Records per second. Raises ``RuntimeError`` when it has read another number than
        ``count``."""
        answers, elapsed_s = in_two_processes(_count, self._library, bootstrap_servers, topic)
        if sum(answers) != count:
            raise RuntimeError(f"the limit run read {sum(answers)} of {count} records")
        return count / elapsed_s


def _compiled(folder: Path) -> str | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or librdkafka() is None:
        return None
    library = folder / "limit.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    return str(library)


def _count(
    library: str | None, bootstrap_servers: str, topic: str, partitions: list[int], ready: Any, go: Any, totals: Any
) -> None:
    settings = {"bootstrap.servers": bootstrap_servers, **_SETTINGS}
    (_count_in_python if library is None else _count_in_c)(library, settings, topic, partitions, ready, go, totals)


def _count_in_c(
    library: str, settings: dict[str, Any], topic: str, partitions: list[int], ready: Any, go: Any, totals: Any
) -> None:
    program = ctypes.CDLL(library)
    program.limit_open.restype = ctypes.c_void_p
    program.limit_count.restype = ctypes.c_int64
    program.limit_count.argtypes = [ctypes.c_void_p]
    words = [text.encode() for key, value in settings.items() for text in (key, str(value).lower())]
    error = ctypes.create_string_buffer(512)
    client = librdkafka()
    opened = program.limit_open(
        str(client).encode(),
        (ctypes.c_char_p * (len(words) + 1))(*words, None),
        topic.encode(),
        (ctypes.c_int32 * len(partitions))(*partitions),
        len(partitions),
        error,
        ctypes.c_size_t(len(error)),
    )
    if opened is None:
        raise RuntimeError(f"the limit cannot be measured: {error.value.decode()}")
    ready.wait()
    go.wait()
    totals.put(program.limit_count(opened))


def _count_in_python(
    _: None, settings: dict[str, Any], topic: str, partitions: list[int], ready: Any, go: Any, totals: Any
) -> None:
    consumer = Consumer(settings)
    consumer.list_topics(topic)
    ready.wait()
    go.wait()
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    total, left = 0, len(partitions)
    while left:
        for message in consumer.consume(50_000, 1.0):
            error = message.error()
            if error is None:
                total += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                left -= 1
            else:
                raise RuntimeError(str(error))
    totals.put(total)
    consumer.close()
