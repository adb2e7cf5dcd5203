"""The spout alone: read a topic and decode it into Arrow columns, in two processes, without
Spark."""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import pyarrow as pa

from benchmarks import workload
from benchmarks.raw_consumer_limit import Limit
from framework import Fields, TopologyContext, TransactionAttempt
from framework.topology import OnStream
from spouts import AvroCodec, BadRecord, BytesCodec, Codec, JsonCodec, OpaqueKafkaTransactionalSpout, TextCodec
from spouts.codecs.codec import Values

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Word",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "word", "type": "string"},
        {"name": "user", "type": "string"},
        {"name": "amount", "type": "int"},
        {"name": "ts", "type": "long"},
    ],
}
#: Codecs by name. They decode all fields of a message, except "json, 2 fields", the codec of W1.
CODECS: dict[str, Callable[[], Codec]] = {
    "bytes": BytesCodec,
    "text": TextCodec,
    "json": lambda: JsonCodec(Fields(id=int, word=str, user=str, amount=int, ts=int)),
    "json, 2 fields": lambda: JsonCodec(Fields(word=str, amount=int)),
    "avro": lambda: AvroCodec(SCHEMA),
    "avro, one by one": lambda: _one_by_one(AvroCodec(SCHEMA)),
}


def _one_by_one(codec: AvroCodec) -> AvroCodec:
    decoder: Any = codec._decoder
    decoder._bulk = None
    return codec


class Timed(Codec):
    """Measures the total time that another codec takes."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.fields = codec.fields
        self.elapsed_s = 0.0

    def decode(self, values: Values) -> pa.RecordBatch:
        return self._timed(self._codec.decode, values)

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return self._timed(self._codec.decode_array, values)

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self._codec.decode_good(values)

    def _timed(self, decode: Callable[[Any], pa.RecordBatch], values: Any) -> pa.RecordBatch:
        begun = time.perf_counter()
        batch = decode(values)
        self.elapsed_s += time.perf_counter() - begun
        return batch


def avro_messages(count: int) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of the messages of ``workload.messages``, in Avro without a header."""
    schema = fastavro.parse_schema(SCHEMA)
    for number, word in enumerate(workload.zipf_words(count).tolist()):
        name = f"word{word:06d}"
        row = {
            "id": number,
            "word": name,
            "user": f"u{number % 10_000:05d}",
            "amount": number % workload.AMOUNT_MODULUS,
        }
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, {**row, "ts": 1_700_000_000_000 + number})
        yield name.encode(), stream.getvalue()


def measure(bootstrap_servers: str, limit: Limit, count: int, repeat: int) -> dict[str, Any]:
    """Records per second by codec, and their ratio to only reading the same topic in the same
    run; the best of ``repeat`` runs. ``decode_share``: the share of a reading process's time that
    the codec takes; the rest goes to librdkafka and its messages."""
    suffix = uuid.uuid4().hex[:6]
    sources = {"json": f"json-{suffix}", "avro": f"avro-{suffix}"}
    for kind, topic in sources.items():
        workload.create_topic(bootstrap_servers, topic)
        made = avro_messages(count) if kind == "avro" else workload.messages(count)
        workload.produce(bootstrap_servers, topic, made)
    limits: dict[str, list[float]] = {kind: [] for kind in sources}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    for _ in range(repeat):
        for kind, topic in sources.items():
            limits[kind].append(limit.measure(bootstrap_servers, topic, count))
        for name in CODECS:
            topic = sources["avro" if name.startswith("avro") else "json"]
            runs[name].append(_one_run(bootstrap_servers, topic, name, count))
    results = {}
    for name, measured in runs.items():
        rate, decode_share = max(measured)
        most = max(limits["avro" if name.startswith("avro") else "json"])
        results[name] = {
            "records_per_s": round(rate),
            "ratio_to_limit": round(rate / most, 3),
            "decode_share": round(decode_share, 2),
        }
    rounded = {kind: [round(each) for each in measured] for kind, measured in limits.items()}
    return {"workload": "reading", "messages": count, "limit": limit.by, "limit_runs": rounded, "codecs": results}


def _one_run(bootstrap_servers: str, topic: str, codec: str, count: int) -> tuple[float, float]:
    """(records per second, the codec's share of the time) of one run."""
    answers, elapsed_s = workload.in_two_processes(_read, bootstrap_servers, topic, codec)
    if sum(rows for rows, _, _ in answers) != count:
        raise RuntimeError(f"{codec}: {answers} is not {count} records")
    return count / elapsed_s, sum(decoding for _, decoding, _ in answers) / sum(whole for _, _, whole in answers)


def _read(
    bootstrap_servers: str, topic: str, name: str, partitions: list[int], ready: Any, go: Any, totals: Any
) -> None:
    codec = Timed(CODECS[name]())
    spout = OpaqueKafkaTransactionalSpout([topic], bootstrap_servers=bootstrap_servers, codec=codec)
    context = TopologyContext("reading", "spout", partitions[0], 2)
    planner = spout.planner({}, context)
    mine = {f"{topic}/{number}" for number in partitions}
    ranges = {each: meta for each, meta in planner.end().items() if each in mine}  # type: ignore[union-attr]
    reader = spout.reader({}, context)
    reader.warm_up()
    codec.elapsed_s = 0.0
    ready.wait()
    go.wait()
    begun = time.perf_counter()
    rows = 0
    for batch in reader.read_all(TransactionAttempt(1, 1), ranges):
        if not isinstance(batch, OnStream):
            rows += batch.num_rows
    totals.put((rows, codec.elapsed_s, time.perf_counter() - begun))
    planner.close()
    spout.release()
