"""``KafkaSpout`` alone, without Spark: it reads a backlog, decodes it, and gets acks for everything
at once. Its two readers in turns, in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from benchmarks import workload
from framework.topology import Fields, TopologyContext
from spouts import JsonCodec, KafkaSpout, TextCodec
from spouts.codecs.codec import Codec
from spouts.kafka.consumer.native_range_consumer import why_not_native

#: Records per call of ``next_tuples``.
AT_ONCE = 1_000
CODECS: dict[str, Codec] = {"json": JsonCodec(Fields(**workload.FIELDS)), "text": TextCodec("line")}


class _Dropping:
    """A collector that drops rows and remembers whom to ack."""

    def __init__(self) -> None:
        self.rows = 0
        self.ids: list[Sequence[Any]] = []

    def emit_arrow(self, rows: pa.RecordBatch, message_ids: Sequence[Any] | None = None, stream: str = "") -> None:
        self.rows += rows.num_rows
        self.ids += [message_ids] if message_ids is not None else []

    def report_error(self, error: BaseException) -> None:
        """What does not answer yet is asked again."""


def measure(bootstrap_servers: str, count: int, repeat: int) -> dict[str, Any]:
    """By codec and reader, the best of ``repeat`` runs: records per second, and microseconds of
    processor time per record. Processor time includes librdkafka's threads."""
    topic = workload.filled_topic(bootstrap_servers, count)
    readers = ["native", "python"] if why_not_native() is None else ["python"]
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(repeat):
        for codec in CODECS:
            for reader in readers:
                spout = KafkaSpout(
                    [topic],
                    bootstrap_servers=bootstrap_servers,
                    codec=CODECS[codec],
                    group=f"{topic}-{codec}-{reader}-{turn}",
                    settings={"reader": reader},
                )
                runs.setdefault((codec, reader), []).append(_read(spout, count))
    best = {
        codec: {
            reader: {
                "records_per_s": round(max(each[0] for each in runs[codec, reader])),
                "cpu_us": round(min(each[1] for each in runs[codec, reader]), 3),
            }
            for reader in readers
        }
        for codec in CODECS
    }
    return {"workload": "acked", "messages": count, "codecs": best}


def _read(spout: KafkaSpout, count: int) -> tuple[float, float]:
    collector = _Dropping()
    spout.open({}, TopologyContext("benchmark", "spout", 0, 1), collector)
    while not collector.rows:  # finding its positions is not measured
        spout.next_tuples(1)
    first, begun, begun_cpu = collector.rows, time.perf_counter(), time.process_time()
    while collector.rows < count:
        spout.next_tuples(AT_ONCE)
        for ids in collector.ids:
            spout.ack_all(ids)
        collector.ids.clear()
    elapsed_s, used_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    spout.close()
    return (count - first) / elapsed_s, used_s / (count - first) * 1e6
