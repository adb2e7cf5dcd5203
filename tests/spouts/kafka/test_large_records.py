"""Records of a few bytes on the broker that become large: read in the end, or bad records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework import ArrowBolt, Fields, TransactionalTopologyBuilder, arrow_spill, submit
from framework.errors import BatchTooLargeError, ConfigError, RatchetError
from framework.transactions import MemoryStore
from framework.transactions.documents import read_history
from sinks import Count, DeadLetterTable, DeadLetterTopic, MemoryBackend, OpaqueMapState, StateCommitter
from spouts import OpaqueKafkaTransactionalSpout, TextCodec
from spouts.codecs import compressed
from spouts.kafka import reader as kafka_reader
from spouts.kafka.consumer import range_consumer
from spouts.kafka.decoding import LARGE_SHOWN_BYTES
from spouts.kafka.planning import batch_limits
from tests.kit.expansion import CODEC, VALUE_BYTES, read_apart, send_bombs
from tests.kit.oracle import read_topics
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

LARGE = 20_000_000


def counted(name: str, topics: Topics, reader: str, **options: Any) -> tuple[Any, list[str]]:
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=TextCodec(),
        settings={"reader": reader},
        **options,
    )
    state = OpaqueMapState(MemoryBackend(name))
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        status = run.status()
    return status, sorted(key[0] for key, _ in state.backend.scan())


@pytest.fixture
def bombs(topics: Topics, name: str) -> Topics:
    """Four records of 20 kB on the broker and 20 MB in memory among small ones."""
    topics.create(name, max_message_bytes="1000000")
    for number in range(4):
        producer = topics.producer(compression_type="gzip", message_max_bytes=LARGE + 1_000, linger_ms=0)
        producer.produce(name, b"%d" % number + b"x" * LARGE, partition=0)
        producer.arrived(120)
        topics.send(name, [b"small %d" % number])
    return topics


SMALL = [f"small {number}" for number in range(4)]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_a_value_above_the_limit_is_a_bad_record(bombs: Topics, name: str, reader: str, tmp_path: Path) -> None:
    letters = OpaqueMapState(MemoryBackend(f"{name}-bad"))
    status, values = counted(
        name,
        bombs,
        reader,
        record_bytes_max=1_000_000,
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTable(letters),
    )
    assert values == SMALL and status.bad_records == 4
    found = [row.value for _, row in letters.backend.scan()]
    assert len(found) == 4
    for value in found:
        assert any(isinstance(each, bytes) and len(each) == LARGE_SHOWN_BYTES for each in value)
        assert any(isinstance(each, str) and "record_bytes_max (1,000,000 bytes)" in each for each in value)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_it_ends_the_topology_where_no_bad_record_may_be(bombs: Topics, name: str, reader: str) -> None:
    with pytest.raises(RatchetError, match=f"topic '{name}', partition 0, offset 0: .*larger than record_bytes_max"):
        counted(name, bombs, reader, record_bytes_max=1_000_000)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_values_below_the_limit_are_read(bombs: Topics, name: str, reader: str) -> None:
    _, values = counted(name, bombs, reader)
    assert len(values) == 8 and max(map(len, values)) == LARGE + 1


class Sizes(ArrowBolt):
    """The first byte of each value, and the bytes of the batch that it is in."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        size = sum(map(len, batch.column("value").to_pylist()))
        values = [f"{each[0]} {size}" for each in batch.column("value").to_pylist()]
        yield pa.record_batch({"value": pa.array(values, pa.string())})

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields.of({"value": pa.string()}))


@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_values_that_a_codec_decompresses_are_decoded_in_parts(
    topics: Topics, name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, size = 250_000, 100_000
    monkeypatch.setattr(compressed, "TOGETHER_BYTES_MAX", bound)
    monkeypatch.setattr(compressed, "_CHUNK_BYTES", 0)
    codec = compressed.CompressedCodec(TextCodec(), "zstd", bytes_max=4 * size)
    sent: list[bytes | None] = [codec.compressed(b"%d" % (each % 10) * size) for each in range(20)]
    sent[7], sent[12:12] = codec.compressed(b"5" * 3 * size), [b"damaged", codec.compressed(b"6" * 5 * size)]
    topics.create(name)
    topics.send(name, sent)
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=codec,
        key_codec=compressed.CompressedCodec(TextCodec("key"), "zstd"),
        settings={"reader": reader},
        on_bad_record="skip",
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("sizes", Sizes()).shuffle_grouping("spout")
    state = OpaqueMapState(MemoryBackend(name))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("sizes")
    with submit(builder.build(), {}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        status = run.status()
    found = {key[0]: row.value[0] for key, row in state.backend.scan()}
    assert status.bad_records == 2 and sum(found.values()) == 20
    assert {key for key in found if int(key.split()[1]) > bound} == {f"5 {3 * size}"}


@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_a_batch_of_values_that_a_codec_expands_is_planned_again_in_halves(
    topics: Topics, name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a batch wait together for a bolt with several tasks. Under "fail", too."""
    monkeypatch.setattr(batch_limits, "TASK_ROWS_BYTES_MAX", 450_000)
    refused = too_large(monkeypatch)
    codec = compressed.CompressedCodec(TextCodec(), "zstd")
    topics.create(name)
    topics.send(name, [codec.compressed(b"%d" % (each % 10) * 100_000) for each in range(20)])
    spout = OpaqueKafkaTransactionalSpout(
        [name], bootstrap_servers=topics.bootstrap_servers, codec=codec, settings={"reader": reader}
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    builder.set_bolt("sizes", Sizes(), 2).fields_grouping("spout", Fields("value"))
    state = OpaqueMapState(MemoryBackend(name))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("sizes")
    store = MemoryStore()
    with submit(builder.build(), {"topology.max.attempts": 1}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert run.status().bad_records == 0
    assert sum(row.value[0] for _, row in state.backend.scan()) == 20
    ranges = [next(iter(each.plan.values())) for each in read_history(store, name)]
    assert max(each["next_offset"] - each["first_offset"] for each in ranges) <= 4
    assert len(refused) == 3  # of 20, 10 and 5 records: then the source knows what fits


def too_large(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons why batches are read in halves."""
    check, refused = kafka_reader.KafkaReader._check, []

    def noting(reader: Any, size: Any) -> None:
        try:
            check(reader, size)
        except BatchTooLargeError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(kafka_reader.KafkaReader, "_check", noting)
    return refused


@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_large_records_after_many_small_ones_keep_to_the_bytes_of_a_batch(
    topics: Topics, name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is made before a record is read. Bad records count, too."""
    refused = too_large(monkeypatch)
    topics.create(name)
    topics.send(name, [b"small"] * 1_000)
    spout = OpaqueKafkaTransactionalSpout(
        [name],
        bootstrap_servers=topics.bootstrap_servers,
        codec=TextCodec(),
        settings={"reader": reader},
        batch_bytes_max=30_000,
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTable(letters := OpaqueMapState(MemoryBackend(f"{name}-bad"))),
        bad_record_share_max=None,
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    state = OpaqueMapState(MemoryBackend(name))
    builder.set_bolt("count", StateCommitter(state, ["value"], {"n": Count()})).global_grouping("spout")
    store = MemoryStore()
    with submit(builder.build(), {}, store, "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert not refused
        topics.send(name, [b"\xff" + b"%d" % each * 9_999 for each in range(10)] * 2)
        run.wait_until_caught_up(PATIENCE_S)
    assert len(list(letters.backend.scan())) == 20
    ranges = [next(iter(each.plan.values())) for each in read_history(store, name)]
    sizes = [each["next_offset"] - each["first_offset"] for each in ranges]
    assert sizes[0] == 1_000 and max(sizes[1:]) <= 4
    assert len(refused) <= 3 and all("more than batch_bytes_max" in each for each in refused)


@pytest.mark.integration
@pytest.mark.parametrize("committer", ["table", "topic"])
def test_dead_letters_that_are_too_many_for_the_memory_wait_in_a_file(
    topics: Topics, name: str, committer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_spill, "MEMORY_BYTES", 20_000)
    monkeypatch.setattr(range_consumer, "CHUNK_RECORDS", 10)
    topics.create(name)
    topics.create(f"{name}-bad")
    sent: list[bytes | None] = [b"\xff%d" % each + b"x" * 1_000 for each in range(60)]
    topics.send(name, sent)
    state = OpaqueMapState(MemoryBackend(f"{name}-bad"))
    written: list[int] = []
    write = state.backend.multi_put
    monkeypatch.setattr(
        MemoryBackend, "multi_put", lambda self, *given: (written.append(len(given[1])), write(*given))[1]
    )
    letters = DeadLetterTable(state) if committer == "table" else DeadLetterTopic(f"{name}-bad")
    spout = OpaqueKafkaTransactionalSpout(
        [name], codec=TextCodec(), on_bad_record="dead_letter", dead_letters=letters, bad_record_share_max=None
    )
    builder = TransactionalTopologyBuilder(name, "spout", spout)
    counts = OpaqueMapState(MemoryBackend(name))
    builder.set_bolt("count", StateCommitter(counts, ["value"], {"n": Count()})).global_grouping("spout")
    conf = {"kafka.bootstrap.servers": topics.bootstrap_servers}
    with submit(builder.build(), conf, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    if committer == "table":
        found = [next(each for each in row.value if isinstance(each, bytes)) for _, row in state.backend.scan()]
        assert max(written) <= 10
    else:
        found = []
        read_topics(topics.bootstrap_servers, [f"{name}-bad"], lambda record: found.append(record.value()))
    assert sorted(found) == sorted(each for each in sent if each is not None)


def test_a_limit_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="record_bytes_max must be 1 or more"):
        OpaqueKafkaTransactionalSpout(["t"], record_bytes_max=0)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_memory_does_not_grow_with_the_number_of_batches_that_expand(topics: Topics, name: str, reader: str) -> None:
    peaks = []
    for count in (12, 36):
        send_bombs(topics, f"{name}-{count}", count, 4)
        records, peak = read_apart(topics.bootstrap_servers, f"{name}-{count}", reader)
        assert records == count
        peaks.append(peak)
    assert peaks[1] < peaks[0] * 1.5, peaks


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("reader", READERS)
def test_memory_does_not_grow_with_the_number_of_values_that_a_codec_expands(
    topics: Topics, name: str, reader: str
) -> None:
    """They are 1,600 bytes each in the topic, and 50 MB each for the bolt after the spout."""
    peaks = []
    for count in (4, 16):
        topics.create(f"{name}-{count}")
        topics.send(f"{name}-{count}", [CODEC.compressed(b"x" * VALUE_BYTES)] * count)
        records, peak = read_apart(topics.bootstrap_servers, f"{name}-{count}", reader, "codec")
        assert records == count
        peaks.append(peak)
    assert peaks[1] < peaks[0] * 1.5, peaks
