"""Records that cannot be decoded: stop, skip, or dead letters,
exactly once whatever fails (2.10, C20).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from framework import ArrowBolt, FailedException, Fields, TopologyFailed, TransactionalTopologyBuilder, submit
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import (
    BadRecordError,
    CommitOutcomeUnknown,
    ConfigError,
    InvariantViolation,
    RetryableError,
    StaleWriterError,
)
from framework.inspect.verify import verify
from framework.transactions import MemoryStore
from framework.transactions.undo import undo
from integration import EmbeddedServers, RegistryServer
from sinks import Count, DeadLetterTable, DeadLetterTopic, StateCommitter
from sinks.kafka import markers as kafka_markers
from sinks.kafka import writer as kafka_writer
from sinks.kafka.delivery import KafkaRecord
from sinks.kafka.markers import Marker
from sinks.kafka.writer import MarkedWriter, writers
from spouts import JsonCodec, RegistryAvroCodec, TextCodec
from tests.kit.avro import encoded, framed
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.oracle import read_topics
from tests.kit.processes import RunProcess
from tests.kit.readers import READERS
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration

GOOD = [b'{"value": "a"}', b'{"value": "b"}', b'{"value": "a"}']


#: How many more commits fail after the dead letters were written. Global, because bolts are copied.
failures = {"left": 0}


class FailsSometimes(StateCommitter):
    """A ``StateCommitter`` whose commits fail as often as ``failures`` says."""

    def finish_batch(self) -> Any:
        values = super().finish_batch()
        if failures["left"]:
            failures["left"] -= 1
            raise FailedException("the other committers have written already")
        return values


class BadRuns(KafkaRuns):
    """``KafkaRuns`` with JSON values, and a committer whose commits can fail."""

    def topology(self, **changes: Any) -> Any:
        changes.setdefault("codec", JsonCodec(Fields(value=str)))
        builder = TransactionalTopologyBuilder(self.name, "spout", self.spout(**changes), 2)
        count = FailsSometimes(self.state("counts"), ["value"], {"n": Count()})
        # A tombstone has no value to count.
        builder.set_bolt("present", Present(), 2).shuffle_grouping("spout")
        builder.set_bolt("count", count).global_grouping("present")
        return builder.build()


class Present(ArrowBolt):
    """Drops tombstones."""

    deterministic = True

    def execute_arrow(self, batch: pa.RecordBatch) -> Any:
        yield batch.filter(pc.is_valid(batch.column("value"))).select(["value"])

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare(Fields(value=str))


@pytest.fixture(params=["opaque", "transactional"])
def runs(request: pytest.FixtureRequest, topics: Topics, name: str, tmp_path: Path) -> BadRuns:
    return BadRuns(topics, tmp_path, name, opaque=request.param == "opaque")


def committed(topics: Topics, topic: str) -> list[Any]:
    """The records that a read_committed consumer sees, in order."""
    found: list[Any] = []
    read_topics(topics.bootstrap_servers, [topic], found.append)
    return found


@pytest.mark.behaviour("2.10")
def test_a_bad_record_under_fail_stops_naming_topic_partition_and_offset(runs: BadRuns) -> None:
    runs.topics.send(runs.topics.create(runs.name), [*GOOD, b'{"value": 7}'])
    with runs.start() as run, pytest.raises(BadRecordError, match=f"'{runs.name}', partition 0, offset 3: ") as failed:
        run.wait_until_caught_up(PATIENCE_S)
    assert isinstance(failed.value, TopologyFailed)


@pytest.mark.behaviour("2.10")
def test_bad_records_under_skip_are_left_out_and_counted(runs: BadRuns) -> None:
    runs.topics.send(runs.topics.create(runs.name), [b"no", *GOOD, b"\xff", b"[]", b'{"value": "c"}'])
    run = runs.catch_up(on_bad_record="skip")
    assert runs.counts() == {"a": 2, "b": 1, "c": 1}
    assert run.status().bad_records == 3
    assert sum(record.attempts[-1].bad_records for record in run.transactions()) == 3
    assert run.status().committed_rows == 7


@pytest.mark.behaviour("2.10")
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.rule("C20")
def test_dead_letters_in_a_table_are_written_once_under_the_txid_of_their_batch(runs: BadRuns, failing: int) -> None:
    topics, name = runs.topics, runs.name
    producer = topics.producer()
    topics.create(name)
    for value in (*GOOD, b"bad", None, b"\x00\xff"):
        producer.produce(name, value, key=b"k", headers=[("trace", b"t1"), ("none", None)], timestamp=1_700_000_000_000)
    producer.arrived()
    failures["left"] = failing
    options = {"on_bad_record": "dead_letter", "batch_records_max": 4}
    run = runs.catch_up(dead_letters=DeadLetterTable(runs.state("letters")), **options)
    assert runs.counts() == {"a": 2, "b": 1}
    assert run.status().attempts_failed == failing
    letters = runs.rows(
        "SELECT partition, offset, topic, timestamp_ms, record_key, record_value, error, headers, topic_id, _txid "
        "FROM letters WHERE NOT _deleted ORDER BY offset"
    )
    assert [row[:6] for row in letters] == [
        (0, 3, name, 1_700_000_000_000, b"k", b"bad"),
        (0, 5, name, 1_700_000_000_000, b"k", b"\x00\xff"),
    ]
    assert "not a JSON object" in letters[0][6]
    assert json.loads(letters[0][7]) == [["trace", "dDE="], ["none", None]]
    assert len(letters[0][8]) == 22  # a topic id
    assert [row[9] for row in letters] == [1, 2]
    assert run.status().bad_records == 2


@pytest.mark.parametrize("reader", READERS)
def test_records_that_undo_leaves_out_become_dead_letters(
    topics: Topics, name: str, tmp_path: Path, reader: str
) -> None:
    runs = BadRuns(topics, tmp_path, name)
    topics.send(topics.create(name), [b'{"value": "z"}', *GOOD, b"bad"])
    options = {
        "on_bad_record": "dead_letter",
        "batch_records_max": 1,
        "dead_letters": DeadLetterTable(runs.state("letters")),
    }
    config = {"kafka.reader": reader}
    runs.catch_up(config, **options)
    topics.send(name, [*GOOD, b"worse"])
    runs.catch_up(config, **{**options, "batch_records_max": 10})
    assert runs.counts() == {"z": 1, "a": 4, "b": 2}
    topology = runs.topology(**options)
    assert undo(topology, runs.store, leave_out={f"{name}/0": [6, 8]}, conf=config) == 6
    runs.catch_up(config, **{**options, "batch_records_max": 10})
    assert runs.counts() == {"z": 1, "a": 4, "b": 1}
    letters = runs.rows("SELECT offset, record_value, error FROM letters WHERE NOT _deleted ORDER BY offset")
    assert [(offset, value) for offset, value, _ in letters] == [(4, b"bad"), (6, GOOD[1]), (8, b"worse")]
    assert [error for *_, error in letters[1:]] == ["left out by ratchet undo --skip-records"] * 2
    assert verify(runs.topology(**options), runs.store, config).right


@pytest.mark.slow
@pytest.mark.behaviour("2.10")
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.rule("C20")
def test_dead_letters_in_a_topic_are_written_once_whatever_fails_after_them(runs: BadRuns, failing: int) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"bad-0", *GOOD, b"bad-4"])
    dead = topics.create(f"{name}-dead")
    failures["left"] = failing
    letters = DeadLetterTopic(dead, bootstrap_servers=topics.bootstrap_servers)
    run = runs.catch_up(dead_letters=letters, on_bad_record="dead_letter", batch_records_max=3)
    assert run.status().attempts_failed == failing
    assert runs.counts() == {"a": 2, "b": 1}
    found = committed(topics, dead)
    assert [message.value() for message in found] == [b"bad-0", b"bad-4"]
    headers = dict(found[1].headers())
    assert headers["ratchet.topic"] == name.encode()
    assert (headers["ratchet.partition"], headers["ratchet.offset"]) == (b"0", b"4")
    assert headers["ratchet.txid"] == b"2"
    assert b"not a JSON object" in headers["ratchet.error"]
    writers.close()  # then new writers find the markers, as in another process
    topics.send(name, [b"bad-5"])
    runs.catch_up(dead_letters=letters, on_bad_record="dead_letter", batch_records_max=3)
    assert [message.value() for message in committed(topics, dead)] == [b"bad-0", b"bad-4", b"bad-5"]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.behaviour("2.9", "2.10")
@pytest.mark.parametrize("collapse_max", [20_000, 0])
def test_avro_by_a_registry_with_dead_letters_in_both_places_on_spark(
    topics: Topics, name: str, tmp_path: Path, spark: str, collapse_max: int
) -> None:
    """Codec, writer and state travel to workers. The table and the topic of dead letters agree."""
    registry = RegistryServer(tmp_path / "registry")
    registry.start()
    schema = {"type": "record", "name": "Word", "fields": [{"name": "value", "type": "string"}]}
    schema_id = registry.register(f"{name}-value", schema)
    good = [framed(schema_id, *encoded(schema, {"value": f"w{n % 50}"}))[0] for n in range(3_000)]
    topics.create(name, 2)
    for partition in (0, 1):
        topics.send(name, [*good[:1_500], framed(schema_id, b"\x7f")[0], *good[1_500:], b"?"], partition)
    dead = topics.create(f"{name}-dead")
    runs = KafkaRuns(topics, tmp_path, name)
    for letters in (DeadLetterTable(runs.state("letters")), DeadLetterTopic(dead)):
        table = isinstance(letters, DeadLetterTable)
        runs.path = tmp_path / ("table.db" if table else "topic.db")
        runs.name = name
        codec = RegistryAvroCodec(registry.url, subject=f"{name}-value")
        spout = runs.spout(codec=codec, on_bad_record="dead_letter", dead_letters=letters)
        builder = TransactionalTopologyBuilder(f"{name}-{table}", "spout", spout, 2)
        count = StateCommitter(runs.state("counts"), ["value"], {"n": Count()})
        builder.set_bolt("count", count, 2).fields_grouping("spout", Fields("value"))
        config = {
            "spark.master": spark,
            "topology.collapse.records.max": collapse_max,
            "kafka.bootstrap.servers": topics.bootstrap_servers,
        }
        with submit(builder.build(), config, MemoryStore()) as run:
            run.wait_until_caught_up(PATIENCE_S)
            assert run.status().bad_records == 4
        assert runs.counts() == {f"w{n}": 120 for n in range(50)}
    registry.stop()
    runs.path = tmp_path / "figures.db"
    in_table = {(row[0], row[1]) for row in runs.rows("SELECT partition, offset FROM letters")}
    assert in_table == {(0, 1_500), (0, 3_001), (1, 1_500), (1, 3_001)}
    found = [dict(message.headers()) for message in committed(topics, dead)]
    in_topic = [(int(each["ratchet.partition"]), int(each["ratchet.offset"])) for each in found]
    assert sorted(in_topic) == sorted(in_table)


@pytest.mark.behaviour("2.10")
def test_bad_keys_and_headers_are_bad_records_too(runs: BadRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name)
    producer = topics.producer()
    for value, key, header in (
        (b"a", b"k", b"h"),
        (b"b", b"\xff", b"h"),
        (b"c", b"k", b"\xfe"),
        (b"\xff", b"\xff", b"h"),
    ):
        producer.produce(name, value, key=key, headers=[("h", header)])
    producer.arrived()
    run = runs.catch_up(
        codec=TextCodec(),
        key_codec=TextCodec("key_text"),
        header_codecs={"h": TextCodec("h")},
        on_bad_record="dead_letter",
        dead_letters=DeadLetterTable(runs.state("letters")),
    )
    assert runs.counts() == {"a": 1}
    errors = runs.rows("SELECT offset, error FROM letters ORDER BY offset")
    assert errors == [
        (1, "key: invalid UTF-8 at byte 0"),
        (2, "header h: invalid UTF-8 at byte 0"),
        (3, "invalid UTF-8 at byte 0"),
    ]
    assert run.status().bad_records == 3


@pytest.mark.behaviour("2.10")
def test_too_many_bad_records_stop_the_topology_before_their_batch_commits(runs: BadRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [*GOOD * 400, *[b"bad"] * 30])
    runs.catch_up(on_bad_record="skip", bad_record_share_max=0.03)
    assert runs.counts() == {"a": 800, "b": 400}
    topics.send(name, [b"bad"] * 31 + [b'{"value": "c"}'])
    too_many = pytest.raises(BadRecordError, match="31 of the last 32 records could not be decoded.*0.03")
    with runs.start(on_bad_record="skip", bad_record_share_max=0.03) as run, too_many:
        run.wait_until_caught_up(PATIENCE_S)
    assert "c" not in runs.counts()
    runs.catch_up(on_bad_record="skip", bad_record_share_max=None)
    assert runs.counts()["c"] == 1


def test_dead_letters_and_their_committer_belong_together(topics: Topics, name: str) -> None:
    for options in ({"on_bad_record": "dead_letter"}, {"on_bad_record": "drop"}):
        with pytest.raises(ConfigError, match="on_bad_record"):
            KafkaRuns(topics, Path("."), name).spout(**options)


# --- the writer: one marker per txid, whoever writes ----------------------------------------------


@pytest.fixture
def written(topics: Topics, name: str) -> Callable[..., Any]:
    """Makes writers. Each has a producer of its own, as in another process."""
    topics.create(name)

    def make() -> MarkedWriter:
        return MarkedWriter(KafkaSettings(topics.bootstrap_servers, None), f"x-{name}", f"{name}-markers", "bolt/0")

    return make


def marker(txid: int, attempt: int = 1, epoch: int = 1, digest: str = "d") -> Marker:
    return Marker(topology_id="t", writer="bolt/0", epoch=epoch, txid=txid, attempt_id=attempt, plan_digest=digest)


def record(value: str) -> list[KafkaRecord]:
    return [KafkaRecord(None, value.encode())]


class TestMarkedWriter:
    def test_a_replay_writes_nothing_twice_in_the_same_writer_and_in_another(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        first = written()
        assert first.write([name], record("one"), marker(1))
        assert not first.write([name], record("one again"), marker(1, attempt=2))
        assert not written().write([name], record("one again"), marker(1, attempt=3, epoch=2))
        assert [each.value() for each in committed(topics, name)] == [b"one"]

    @pytest.mark.slow
    def test_a_zombie_writer_is_refused_and_the_next_attempt_goes_on(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        zombie, successor = written(), written()
        assert zombie.write([name], record("one"), marker(1))
        assert successor.write([name], record("two"), marker(2, epoch=2))
        with pytest.raises(StaleWriterError):  # its new producer finds a marker of a later epoch
            zombie.write([name], record("two by a zombie"), marker(2))
        with pytest.raises(StaleWriterError):  # its new producer finds a marker of a later txid
            zombie.write([name], record("one by a zombie"), marker(1))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two"]
        assert written().write([name], record("three"), marker(3, epoch=2))

    @pytest.mark.slow
    def test_a_kafka_txn_that_a_dead_writer_left_open_is_aborted(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead = written()
        dead.write([name], record("one"), marker(1))
        assert dead._producer is not None
        dead._producer.begin_transaction()
        dead._producer.produce(name, b"never committed")
        dead._producer.flush(PATIENCE_S)
        assert written().write([name], record("two"), marker(2))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two"]

    @pytest.mark.slow
    def test_a_lost_answer_is_resolved_by_the_marker(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        class LosesTheAnswer:
            def __init__(self, producer: Any) -> None:
                self._producer = producer

            def commit_transaction(self, timeout_s: float) -> None:
                self._producer.commit_transaction(timeout_s)
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))

            def __getattr__(self, attribute: str) -> Any:
                return getattr(self._producer, attribute)

        writer = written()
        writer.write([name], record("one"), marker(1))
        writer._producer = LosesTheAnswer(writer._producer)  # type: ignore[assignment]
        with pytest.raises(CommitOutcomeUnknown, match="the kafka_txn of 2 has no answer"):
            writer.write([name], record("two"), marker(2))
        assert not writer.write([name], record("two again"), marker(2, attempt=2))
        assert writer.write([name], record("three"), marker(3))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two", b"three"]

    @pytest.mark.slow
    def test_a_client_that_raises_a_system_error_is_replaced(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A fenced producer was seen to raise SystemError, with and without a cause.

        A writer replaces a kept producer in place (C26). It fails when a new producer does the
        same.
        """

        class Fails:
            def __init__(self, producer: Any, cause: Exception | None) -> None:
                self._producer = producer
                self._cause = cause

            def flush(self, timeout_s: float) -> int:
                raise SystemError("returned NULL without setting an exception") from self._cause

            def __getattr__(self, attribute: str) -> Any:
                return getattr(self._producer, attribute)

        writer = written()
        writer.write([name], record("one"), marker(1))
        writer._producer = Fails(writer._producer, None)  # type: ignore[assignment]
        assert writer.write([name], record("two"), marker(2))
        writer._producer = Fails(writer._producer, KafkaException(KafkaError(KafkaError._FENCED)))  # type: ignore[assignment]
        assert writer.write([name], record("three"), marker(3))
        made = written()
        with monkeypatch.context() as patched:
            patched.setattr(kafka_markers, "Producer", lambda settings: Fails(Producer(settings), None))
            with pytest.raises(RetryableError, match="bolt/0: the Kafka client failed: returned NULL"):
                made.write([name], record("four"), marker(4))
        assert made.write([name], record("four"), marker(4, attempt=2))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two", b"three", b"four"]

    def test_a_topic_of_markers_that_the_metadata_omits_is_still_read(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written().write([name], record("one"), marker(1))
        for module in (kafka_writer, kafka_markers):
            monkeypatch.setattr(module, "has_markers", lambda cluster, topic: False)
        assert not written().write([name], record("one again"), marker(1, attempt=2))
        assert [each.value() for each in committed(topics, name)] == [b"one"]

    def test_a_txid_that_is_written_is_refused_with_another_plan(
        self, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        written().write([name], record("one"), marker(1))
        with pytest.raises(InvariantViolation, match="txid 1 was written by bolt/0 under plan d.*is e now"):
            written().write([name], record("one"), marker(1, epoch=2, digest="e"))

    def test_a_higher_epoch_with_a_lower_txid_is_not_taken_for_a_reset(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        """C25: it means that ZooKeeper went back."""
        written().write([name], record("seven"), marker(7))
        with pytest.raises(ConfigError, match="bolt/0 has written transactions up to 7 to Kafka.*says that 1 is next"):
            written().write([name], record("one"), marker(1, epoch=2))
        assert [each.value() for each in committed(topics, name)] == [b"seven"]

    @pytest.mark.slow
    def test_after_a_reset_txids_begin_again_and_old_writers_are_refused(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        before = written()
        before.write([name], record("seven"), marker(7))
        written().renew(replace(marker(0, attempt=0, epoch=2, digest=""), incarnation="new"))
        assert written().write([name], record("one"), replace(marker(1, epoch=3), incarnation="new"))
        with pytest.raises(ConfigError, match=r"the marker of bolt/0 is of topology 't', incarnation new, and this is"):
            before.write([name], record("eight"), marker(8))
        assert [each.value() for each in committed(topics, name)] == [b"seven", b"one"]

    @pytest.mark.slow
    def test_a_kept_producer_whose_id_was_taken_over_is_replaced_in_place(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter], capfd: pytest.CaptureFixture[str]
    ) -> None:
        """C26: no attempt fails, in whatever process the task runs,
        and no fatal error is logged.
        """
        processes = [written(), written()]
        for txid in range(1, 9):  # with many records, the client raises while it is given them
            records = [KafkaRecord(None, str(txid).encode())] * (50_000 if txid % 4 == 0 else 1)
            assert processes[txid % 2].write([name], records, marker(txid))
        assert "rdkafka" not in capfd.readouterr().err
        found = Counter(each.value() for each in committed(topics, name))
        assert found == {str(txid).encode(): 50_000 if txid % 4 == 0 else 1 for txid in range(1, 9)}

    @pytest.mark.slow
    def test_a_kept_producer_whose_id_was_taken_over_for_the_same_txid_writes_nothing(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        kept = written()
        kept.write([name], record("one"), marker(1))
        written().write([name], record("two"), marker(2))
        assert not kept.write([name], record("two again"), marker(2, attempt=2))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two"]

    def test_a_kept_client_with_an_unreported_fatal_error_is_replaced_in_place(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter]
    ) -> None:
        """A fenced producer was seen to refuse a record for a fatal
        error that it reports only later.
        """
        kept = written()
        kept.write([name], record("one"), marker(1))
        over = KafkaException(KafkaError(KafkaError._FATAL))
        kept._producer = Mock(wraps=kept._producer, produce=Mock(side_effect=over))
        assert kept.write([name], record("two"), marker(2))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two"]

    def test_markers_are_read_after_the_id_was_initialised(
        self, topics: Topics, name: str, written: Callable[[], MarkedWriter], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C11: until then another producer of the id may still commit;
        here it does so at the last moment.
        """
        kept = written()
        kept.write([name], record("one"), marker(1))

        class Overtaken(Producer):
            def init_transactions(self, *arguments: Any) -> None:
                monkeypatch.undo()
                assert kept.write([name], record("two"), marker(2))
                super().init_transactions(*arguments)

        monkeypatch.setattr(kafka_markers, "Producer", Overtaken)
        assert not written().write([name], record("two again"), marker(2, attempt=2))
        assert [each.value() for each in committed(topics, name)] == [b"one", b"two"]

    def test_a_missing_topic_is_named(self, written: Callable[[], MarkedWriter]) -> None:
        with pytest.raises(RetryableError, match="topic 'not-there' does not exist.*create it"):
            written().write(["not-there"], record("x"), marker(1))


# --- the record that does it ----------------------------------------------------------------------


def poisoned(runs: KafkaRuns, bad: Callable[[set[str]], bool]) -> Any:
    """A topology whose bolt raises for the batches that ``bad`` names."""
    from framework import BaseBatchBolt

    class Touchy(BaseBatchBolt):
        def prepare(self, conf: Any, context: Any, collector: Any, batch_id: Any) -> None:
            self.seen: set[str] = set()

        def execute(self, tup: Any) -> None:
            self.seen.add(tup["value"])
            if bad(self.seen):
                raise ZeroDivisionError("cannot stomach this")

        def finish_batch(self) -> None: ...

    builder = TransactionalTopologyBuilder(runs.name, "spout", runs.spout(), 2)
    builder.set_bolt("touchy", Touchy()).global_grouping("spout")
    return builder.build()


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [True, False])
def test_find_poison_shows_the_one_record_that_fails(topics: Topics, name: str, tmp_path: Path, opaque: bool) -> None:
    from framework import find_poison

    runs = KafkaRuns(topics, tmp_path, name, opaque=opaque)
    topics.create(name, 3)
    for partition in range(3):
        values = [f"{partition}:{number}".encode() for number in range(2_000)]
        topics.send(name, values, partition)
    built = poisoned(runs, lambda seen: "1:1234" in seen)
    failed = pytest.raises(TopologyFailed, match="cannot stomach this")
    with submit(built, {"topology.max.attempts": 2}, runs.store, "local") as run, failed:
        run.wait_until_caught_up(PATIENCE_S)
    found = find_poison(built, runs.store)
    assert found is not None
    assert {each: (meta["first_offset"], meta["next_offset"]) for each, meta in found.ranges.items()} == {
        f"{name}/1": (1234, 1235)
    }
    assert found.rows == ({"value": "1:1234"},)
    assert found.probes < 40
    text = "\n".join(found.lines())
    assert f"{name}/1: offset 1234" in text
    assert "ZeroDivisionError: cannot stomach this" in text


@pytest.mark.slow
def test_find_poison_shows_two_records_that_only_fail_together(topics: Topics, name: str, tmp_path: Path) -> None:
    from framework import find_poison

    runs = KafkaRuns(topics, tmp_path, name)
    topics.create(name, 2)
    for partition in range(2):
        topics.send(name, [f"{partition}:{number}".encode() for number in range(100)], partition)
    built = poisoned(runs, lambda seen: {"0:7", "1:93"} <= seen)
    with submit(built, {"topology.max.attempts": 1}, runs.store, "local") as run, pytest.raises(TopologyFailed):
        run.wait_until_caught_up(PATIENCE_S)
    found = find_poison(built, runs.store)
    assert found is not None
    assert {each: meta["first_offset"] for each, meta in found.ranges.items()} == {f"{name}/0": 7, f"{name}/1": 93}
    assert sorted(row["value"] for row in found.rows) == ["0:7", "1:93"]


def test_find_poison_says_so_when_nothing_fails_or_nothing_is_planned(
    topics: Topics, name: str, tmp_path: Path
) -> None:
    from framework import find_poison

    runs = KafkaRuns(topics, tmp_path, name)
    topics.send(topics.create(name), [b"x"] * 10)
    with pytest.raises(ConfigError, match="has no plan of transaction 1"):
        find_poison(runs.topology(), runs.store)
    with structlog.testing.capture_logs():
        runs.catch_up()
    assert find_poison(runs.topology(), runs.store, txid=1) is None


def test_find_poison_refuses_records_of_another_topic_with_the_same_name(
    topics: Topics, name: str, tmp_path: Path
) -> None:
    """The batch that failed is gone: its offsets hold other records now."""
    from framework import find_poison

    runs = KafkaRuns(topics, tmp_path, name)
    topics.send(topics.create(name), [b"%d" % number for number in range(100)])
    built = poisoned(runs, lambda seen: "77" in seen)
    with submit(built, {"topology.max.attempts": 1}, runs.store, "local") as run, pytest.raises(TopologyFailed):
        run.wait_until_caught_up(PATIENCE_S)
    topics.recreate(name)
    topics.send(name, [b"%d" % number for number in range(100)])
    with pytest.raises(RetryableError, match="transaction 1 cannot be read again: .*deleted and created again"):
        find_poison(built, runs.store)


@pytest.mark.slow
def test_find_poison_by_the_command_line_and_a_fresh_start_behind_it(
    servers: EmbeddedServers, topics: Topics, name: str, tmp_path: Path
) -> None:
    """An operator's steps: the run has stopped; find the record; then start afresh behind it."""
    topics.send(topics.create(name), [b"%d" % number for number in range(500)])
    settings = {
        "app.topic": name,
        "app.poison": "x77",
        "kafka.bootstrap.servers": servers.bootstrap_servers,
        "transactional.zookeeper.servers": servers.zookeeper,
        "topology.max.attempts": 2,
    }
    log = tmp_path / "run.log"
    run = RunProcess(log, "tests.kit.poisoned:topology", settings, executor="local")
    try:
        topics.send(name, [b"x77"])
        run.start()
        assert run.finish() == 1
        assert run.said("cannot stomach this")
        run.start("--find-poison")
        assert run.finish() == 1
        assert run.said(f"{name}/0: offset 500"), run.tail()
        assert run.said("row: {'value': 'x77'}")
        topics.admin.delete_records([TopicPartition(name, 0, 501)])[TopicPartition(name, 0)].result(PATIENCE_S)
        topics.send(name, [b"fine"] * 3)
        run.start("--fresh", "--until-caught-up")
        assert run.finish() == 0, run.tail()
        assert run.said("positions.forgotten")
        assert run.said("committed 3 ")
    finally:
        run.end()
