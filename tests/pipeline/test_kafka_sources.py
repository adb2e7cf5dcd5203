"""Kafka spouts in whole topologies over a real broker: topics, starts, loss, groups, progress."""

from __future__ import annotations

import contextlib
import datetime
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import structlog
from confluent_kafka import Consumer, TopicPartition

from framework import TopologyContext, TopologyFailed, TransactionAttempt
from framework.clients.kafka_settings import KafkaSettings
from framework.errors import ConfigError, DataLossError, RetryableError
from integration import KafkaBroker
from integration.server import free_port
from spouts.kafka.group_offsets import GroupOffsets
from tests.kit.kafka_runs import KafkaRuns, values_in
from tests.kit.plans import offsets
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture(params=["opaque", "transactional"])
def runs(request: pytest.FixtureRequest, topics: Topics, name: str, tmp_path: Path) -> KafkaRuns:
    return KafkaRuns(topics, tmp_path, name, opaque=request.param == "opaque")


# --- which records --------------------------------------------------------------------------------


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.1", "2.2")
@pytest.mark.fault(20)
def test_new_topics_and_partitions_are_picked_up_while_running_from_their_beginning(
    runs: KafkaRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.kafka.cluster_metadata.METADATA_AGE_MAX_S", 0.2)
    topics, name = runs.topics, runs.name
    topics.send(topics.create(f"{name}-a"), [b"a"] * 10)
    with runs.start(pattern=f"{name}-.*", start="latest") as run:
        wait_for(lambda: run.status().committed_txid >= 1, what="the start to be kept")
        topics.add_partitions(f"{name}-a", 3)
        topics.send(f"{name}-a", [b"p"] * 4, 2)
        topics.send(topics.create(f"{name}-b"), [b"b"] * 5)
        topics.send(topics.create(f"other-{name}"), [b"no"])
        runs.await_counts(run, {"p": 4, "b": 5})
        plans = [record.plan for record in run.transactions()]
    assert set(plans[0]) == {f"{name}-a/0"}  # the first plan does not change: it has one partition
    assert {f"{name}-a/2", f"{name}-b/0"} <= set(plans[-1])


@pytest.mark.behaviour("2.2")
def test_a_pattern_that_finds_nothing_yet_reads_new_topics_from_their_beginning(
    runs: KafkaRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.kafka.cluster_metadata.METADATA_AGE_MAX_S", 0.2)
    with runs.start(pattern=f"{runs.name}-.*", start="latest") as run:
        wait_for(lambda: run.status().phase == "running", what="the run")
        run.wait_until_caught_up(PATIENCE_S)  # there is nothing to read yet
        runs.topics.send(runs.topics.create(f"{runs.name}-late"), [b"x"] * 3)
        runs.await_counts(run, {"x": 3})


@pytest.mark.quick_for("opaque-earliest", "transactional-timestamp")
@pytest.mark.behaviour("2.3")
@pytest.mark.parametrize("start", ["earliest", "latest", "timestamp"])
def test_a_first_start_begins_where_it_says_and_a_resumed_one_ignores_it(runs: KafkaRuns, start: str) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name)
    topics.send(name, [b"old"] * 5)
    time.sleep(0.05)
    middle = datetime.datetime.now(datetime.UTC)
    time.sleep(0.05)
    topics.send(name, [b"middle"] * 3)
    begins: Any = middle if start == "timestamp" else start
    expected = {"earliest": {"old": 5, "middle": 3}, "latest": {}, "timestamp": {"middle": 3}}[start]
    runs.catch_up(start=begins)
    assert runs.counts() == expected
    topics.send(name, [b"new"])
    run = runs.catch_up(start="earliest" if start == "latest" else "latest")
    assert runs.counts() == {**expected, "new": 1}
    assert run.status().committed_txid >= 1


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.3")
@pytest.mark.rule("C17")
def test_fresh_forgets_positions_by_explicit_wish_and_txids_go_on_rising(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"x"] * 5)
    before = runs.catch_up().status().committed_txid
    assert runs.catch_up().status().committed_txid == before
    after = runs.catch_up(fresh=True).status().committed_txid
    assert runs.counts() == {"x": 10}
    assert after > before
    with runs.start() as running:
        running.wait_until_caught_up(PATIENCE_S)
        with pytest.raises(ConfigError, match="a driver runs topology"):
            runs.start({"transactional.zookeeper.election.timeout.secs": 0.2}, fresh=True)
    assert runs.counts() == {"x": 10}


@pytest.mark.slow
@pytest.mark.behaviour("2.4")
def test_the_first_batch_of_a_backlog_is_bounded_and_a_skewed_partition_starves_nobody(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 3)
    for partition, count in ((0, 900), (1, 20), (2, 200)):
        topics.send(name, [b"p%d" % partition] * count, partition)
    run = runs.catch_up(batch_records_max=100, partition_records_max=60)
    ranges = [
        [meta["next_offset"] - meta["first_offset"] for _, meta in sorted(record.plan.items())]
        for record in run.transactions()
    ]
    assert ranges[0] == [40, 20, 40]
    assert all(sum(each) <= 100 and max(each) <= 60 for each in ranges)
    assert runs.counts() == {"p0": 900, "p1": 20, "p2": 200}


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.4")
def test_a_limit_of_bytes_is_learned_after_a_small_first_batch(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"x" * 500] * 12_000)
    run = runs.catch_up(batch_bytes_max=1_000_000)
    sizes = [record.attempts[-1].source_bytes for record in run.transactions()]
    assert sizes[0] == 500_000  # a thousand records, since their size is not known yet
    assert len(sizes) >= 6
    assert all(0 < size <= 1_000_000 for size in sizes)
    assert sum(sizes) == 6_000_000


# --- what is lost ---------------------------------------------------------------------------------


@pytest.mark.behaviour("2.6")
@pytest.mark.fault(18)
def test_offsets_that_retention_removed_stop_the_topology_or_are_skipped_and_counted(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"read"] * 10)
    runs.catch_up()
    topics.send(name, [b"lost"] * 7 + [b"kept"] * 3)
    topics.admin.delete_records([TopicPartition(name, 0, 17)])[TopicPartition(name, 0)].result(PATIENCE_S)
    with (
        runs.start() as run,
        pytest.raises(DataLossError, match=f"{name}/0 no longer holds offsets 10 to 17") as failed,
    ):
        run.wait_until_caught_up(PATIENCE_S)
    assert isinstance(failed.value, TopologyFailed)
    assert runs.counts() == {"read": 10}
    with structlog.testing.capture_logs() as logs:
        run = runs.catch_up(on_data_loss="skip")
    assert runs.counts() == {"read": 10, "kept": 3}
    assert run.status().lost_records == 7
    assert run.status().partitions[f"{name}/0"].lost_records == 7
    (gap,) = [each for each in logs if each["event"] == "source.gap"]
    assert (gap["reason"], gap["from_offset"], gap["to_offset"]) == ("retention", 10, 17)
    topics.send(name, [b"kept"])
    assert runs.catch_up(on_data_loss="skip").status().lost_records == 7  # the count outlives the run
    assert runs.counts() == {"read": 10, "kept": 4}


@pytest.mark.behaviour("2.6")
@pytest.mark.fault(19)
def test_a_topic_deleted_and_created_again_between_two_runs_is_data_loss_or_a_recorded_gap(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 10)
    runs.catch_up()
    topics.recreate(name)
    topics.send(name, [b"new"] * 25)  # more than was read: the old position exists in the new topic
    with runs.start() as run, pytest.raises(DataLossError, match=f"'{name}'.*was deleted and created again"):
        run.wait_until_caught_up(PATIENCE_S)
    assert runs.counts() == {"old": 10}
    run = runs.catch_up(on_data_loss="skip")
    assert runs.counts() == {"old": 10, "new": 25}
    assert run.transactions()[0].plan[f"{name}/0"]["gap"]["reason"] == "recreated"


@pytest.mark.behaviour("2.6")
@pytest.mark.fault(19)
def test_records_of_a_topic_created_again_under_a_run_are_never_committed(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 10)
    with runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        topics.recreate(name)
        topics.send(name, [b"new"] * 25)
        # Either the reader notices it (the new topic is too short) or the planner (it asks for the
        # id).
        with pytest.raises(DataLossError, match="created again"):
            run.wait_for_commit(99, PATIENCE_S)
    assert runs.counts() == {"old": 10}


@pytest.mark.behaviour("2.6")
def test_a_topic_created_again_between_plan_and_reading_is_found_after_the_reading(runs: KafkaRuns) -> None:
    """Nothing else finds it: the planner has checked before,
    and the consumer reads topics by name.
    """
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 10)
    context = TopologyContext(name, "spout", 0, 1)
    planner = runs.spout().planner({}, context)
    plan = planner.plan({})
    planner.confirm(plan)
    topics.recreate(name)
    topics.send(name, [b"new"] * 25)
    batches = list(runs.spout().reader({}, context).read_all(TransactionAttempt(1, 1), plan))
    assert [value for batch in batches for value in batch.column(0).to_pylist()] == ["new"] * 10
    with pytest.raises(DataLossError, match="deleted and created again while it was read"):
        planner.confirm(plan)
    planner.close()


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.6")
def test_records_that_a_kept_consumer_prefetched_from_a_deleted_topic_are_discarded(runs: KafkaRuns) -> None:
    """The consumer stands exactly where the next range begins, with old records already fetched."""
    topics, name = runs.topics, runs.name
    context = TopologyContext(name, "spout", 0, 1)
    topics.send(topics.create(name), [b"old"] * 30)
    planner = runs.spout(batch_records_max=10).planner({}, context)
    plan = planner.plan({})
    reader = runs.spout().reader({}, context)
    assert sum(batch.num_rows for batch in reader.read_all(TransactionAttempt(1, 1), plan)) == 10
    topics.recreate(name)
    topics.send(name, [b"new"] * 30)
    planner.close()
    planner = runs.spout(batch_records_max=10).planner({}, context)
    (meta,) = planner.plan({}).values()
    later = {f"{name}/0": {**meta, "first_offset": 10, "next_offset": 20}}
    batches = list(reader.read_all(TransactionAttempt(2, 1), later))
    planner.confirm(later)
    assert [value for batch in batches for value in batch.column(0).to_pylist()] == ["new"] * 10
    planner.close()


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.6")
def test_records_read_from_another_topic_are_never_committed(runs: KafkaRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(planner: Any, plan: Any) -> None:
        raise DataLossError("another topic was read")

    monkeypatch.setattr("spouts.kafka.planning.planner.KafkaPlanner.confirm", found)
    runs.topics.send(runs.topics.create(runs.name), [b"x"] * 10)
    with runs.start() as run, pytest.raises(DataLossError, match="another topic was read"):
        run.wait_until_caught_up(PATIENCE_S)
    assert runs.counts() == {}


@pytest.mark.slow
@pytest.mark.behaviour("2.6")
def test_deleting_an_unread_topic_is_data_loss_and_deleting_a_read_one_is_not(
    topics: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.kafka.cluster_metadata.METADATA_AGE_MAX_S", 0.2)
    monkeypatch.setattr("spouts.kafka.planning.lost_records.BELIEVED_AFTER_S", 0.5)
    planner = KafkaRuns(topics, tmp_path, name).spout(pattern=f"{name}-.*").planner({}, TopologyContext("t", "s", 0, 1))
    for topic in (f"{name}-a", f"{name}-b"):
        topics.send(topics.create(topic), [b"x"] * 5)
    read = planner.plan({})
    assert offsets(read) == {f"{name}-a/0": (0, 5), f"{name}-b/0": (0, 5)}
    topics.delete(f"{name}-a")
    topics.send(f"{name}-b", [b"y"] * 2)
    wait_for(lambda: f"{name}-a/0" not in planner.partitions(), what="the topic to be gone")
    with contextlib.suppress(RetryableError):
        planner.plan(read)
    time.sleep(0.6)
    plan = planner.plan(read)
    assert offsets(plan) == {f"{name}-a/0": (5, 5), f"{name}-b/0": (5, 7)}
    assert planner.plan(plan) is None  # all of it was read: nothing is lost
    topics.send(f"{name}-b", [b"z"] * 3)
    wait_for(lambda: planner.plan(plan) is not None, what="a plan that is never read")
    topics.delete(f"{name}-b")
    with pytest.raises(DataLossError, match=f"{name}-b/0 was deleted, and offsets 7 to 10 were not read"):
        wait_for(lambda: ask_for_a_plan(planner, plan), what="the loss")
    planner.close()


def ask_for_a_plan(planner: Any, after: Any) -> bool:
    """Ask for a plan, as a condition that never holds: the caller waits for the error of ``plan``.

    A source that does not answer is no such error: the caller asks again.
    """
    with contextlib.suppress(RetryableError):
        planner.plan(after)
    return False


@pytest.mark.slow
@pytest.mark.behaviour("2.6")
def test_a_log_that_was_truncated_and_has_grown_again_is_noticed_by_its_leader_epoch(tmp_path: Path, name: str) -> None:
    """The end of the log is again beyond what was read;
    only the leader epochs show the truncation.
    """
    server = KafkaBroker(tmp_path / "broker")
    server.start()
    try:
        topics = Topics(server.address)
        topics.send(topics.create(name), [b"old"] * 10)
        runs = KafkaRuns(topics, tmp_path, name)
        runs.catch_up()
        server.stop()
        for file in (server.folder / "data" / f"{name}-0").iterdir():
            if file.name != "partition.metadata":
                file.unlink()
        server = KafkaBroker(tmp_path / "broker", int(server.address.rpartition(":")[2]))
        server.start()
        topics = Topics(server.address)
        topics.send(name, [b"new"] * 25)
        runs.topics = topics
        with runs.start() as run, pytest.raises(DataLossError, match="truncat"):
            run.wait_until_caught_up(PATIENCE_S)
        assert runs.counts() == {"old": 10}
        run = runs.catch_up(on_data_loss="skip")
        assert runs.counts() == {"old": 10, "new": 15}
        assert run.transactions()[0].plan[f"{name}/0"]["gap"]["reason"] == "truncated"
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.behaviour("2.6")
@pytest.mark.parametrize("runs", ["opaque", pytest.param("transactional", marks=pytest.mark.slow)], indirect=True)
def test_another_cluster_is_refused_or_read_from_its_beginning(
    runs: KafkaRuns, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"here"] * 10)
    runs.catch_up()
    other = KafkaBroker(tmp_path_factory.mktemp("other"))
    other.start()
    try:
        elsewhere = Topics(other.address)
        elsewhere.send(elsewhere.create(name), [b"there"] * 4)
        moved = {"bootstrap_servers": other.address}
        with runs.start(**moved) as run, pytest.raises(DataLossError, match="was read from Kafka cluster"):
            run.wait_until_caught_up(PATIENCE_S)
        assert runs.counts() == {"here": 10}
        runs.catch_up(on_data_loss="skip", **moved)
        assert runs.counts() == {"here": 10, "there": 4}
    finally:
        other.stop()


# --- gaps that are no loss ------------------------------------------------------------------------


@pytest.mark.behaviour("2.5")
@pytest.mark.fault(17)
def test_compacted_records_are_gaps_and_no_loss(cleaning: Topics, name: str, tmp_path: Path) -> None:
    cleaning.create(name, 1, cleanup_policy="compact", segment_ms="200", min_cleanable_dirty_ratio="0.01")
    producer = cleaning.producer()
    for round_ in range(4):
        for key in range(50):
            producer.produce(name, f"{round_}", key=f"k{key}")
        producer.arrived()
        time.sleep(0.3)  # the first record after a segment's time closes the segment
    producer.produce(name, "last", key="last")
    producer.arrived()
    # all that can be removed: otherwise a run may see records that are gone when the topic is read
    wait_for(lambda: values_in(cleaning.bootstrap_servers, name) == {"3": 50, "last": 1}, what="compaction")
    runs = KafkaRuns(cleaning, tmp_path, name)
    run = runs.catch_up(batch_records_max=30)
    assert runs.counts() == dict(values_in(cleaning.bootstrap_servers, name))
    assert run.status().lost_records == 0
    assert run.status().lag == 0


@pytest.mark.behaviour("2.5", "3.7")
def test_a_compacted_topic_under_a_transactional_state_is_refused_by_name(
    topics: Topics, name: str, tmp_path: Path
) -> None:
    """C5: refused also when nothing is to be read of it; accepted under an opaque state,
    and at-least-once.
    """
    topics.create(name, 1, cleanup_policy="compact,delete")
    runs = KafkaRuns(topics, tmp_path, name, opaque=False)
    refused = rf"topic '{name}' is compacted .cleanup.policy=compact,delete.*bolt 'count'.*counts.*transactional.*opaque state"
    with runs.start() as run, pytest.raises(ConfigError, match=refused):
        run.wait_until_caught_up(PATIENCE_S)
    KafkaRuns(topics, tmp_path / "opaque", name).catch_up()


@pytest.mark.behaviour("2.2", "2.5")
def test_a_compacted_topic_that_appears_under_a_transactional_state_is_refused_before_it_is_read(
    topics: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.kafka.cluster_metadata.METADATA_AGE_MAX_S", 0.2)
    topics.send(topics.create(f"{name}-a"), [b"a"] * 10)
    runs = KafkaRuns(topics, tmp_path, name, opaque=False, pattern=f"{name}-.*")
    with runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        topics.create(f"{name}-b", 1, cleanup_policy="compact")
        send_keyed(topics, f"{name}-b", 5)
        with pytest.raises(TopologyFailed, match=f"topic '{name}-b' is compacted"):
            run.wait_for_commit(99, PATIENCE_S)
    assert runs.counts() == {"a": 10}


def send_keyed(topics: Topics, topic: str, records: int) -> None:
    producer = topics.producer()
    for number in range(records):
        producer.produce(topic, b"x", key=b"%d" % number)
    producer.arrived()


@pytest.mark.slow_for("transactional")
def test_a_run_catches_up_with_a_topic_whose_records_are_all_gone(runs: KafkaRuns) -> None:
    runs.topics.create(runs.name)
    runs.topics.send(runs.name, [b"gone"] * 5)
    where = TopicPartition(runs.name, 0, 5)
    runs.topics.admin.delete_records([where])[where].result(PATIENCE_S)
    runs.catch_up()
    assert runs.counts() == {}
    runs.topics.send(runs.name, [b"new"] * 2)
    runs.catch_up()
    assert runs.counts() == {"new": 2}


@pytest.mark.slow
@pytest.mark.behaviour("2.6")
@pytest.mark.fault(18)
def test_retention_that_overtakes_a_run_is_a_gap_when_the_user_allows_it(
    cleaning: Topics, name: str, tmp_path: Path
) -> None:
    cleaning.create(name, 1, cleanup_policy="delete", segment_ms="100", retention_ms="-1")
    runs = KafkaRuns(cleaning, tmp_path, name, on_data_loss="skip")
    cleaning.send(name, [b"first"] * 5)
    runs.catch_up()
    assert runs.counts() == {"first": 5}
    cleaning.alter(name, retention_ms="500")  # only from now on, so that no unread record was removed before
    cleaning.send(name, [b"expired"] * 40)
    time.sleep(0.2)
    cleaning.send(name, [b"roll"])

    def beginning() -> int:
        from confluent_kafka.admin import OffsetSpec

        where = TopicPartition(name, 0)
        return int(cleaning.admin.list_offsets({where: OffsetSpec.earliest()})[where].result(PATIENCE_S).offset)

    wait_for(lambda: beginning() >= 45, 90, what="retention")
    cleaning.alter(name, retention_ms="-1")  # otherwise the next records may expire too on a slow machine
    cleaning.send(name, [b"fresh"] * 3)
    run = runs.catch_up()
    assert runs.counts().get("fresh") == 3
    assert "expired" not in runs.counts()
    assert run.status().lost_records >= 40


@pytest.mark.behaviour("2.5")
@pytest.mark.fault(16)
def test_a_plan_never_passes_an_open_kafka_txn_and_aborted_records_never_count(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"plain"] * 3)
    topics.send_in_kafka_txn(name, [b"aborted"] * 4, end=lambda producer: producer.abort_transaction(PATIENCE_S))
    producer = topics.send_in_kafka_txn(name, [b"open"] * 2, end=None)
    topics.send(name, [b"behind"])
    with runs.start() as run:
        run.wait_until_caught_up(PATIENCE_S)
        assert runs.counts() == {"plain": 3}
        producer.commit_transaction(PATIENCE_S)
        wait_for(lambda: "behind" in runs.counts(), what="the last stable offset to move on")
    assert runs.counts() == {"plain": 3, "open": 2, "behind": 1}
    assert runs.counts() == dict(values_in(topics.bootstrap_servers, name))


# --- what others see ------------------------------------------------------------------------------


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.12")
def test_lag_and_progress_per_partition_in_status_and_in_metrics(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 2)
    topics.send(name, [b"x"] * 10, 0)
    topics.send(name, [b"y"] * 4, 1)
    port = free_port()
    with runs.start({"metrics.prometheus.port": port}) as run:
        run.wait_until_caught_up(PATIENCE_S)
        topics.send_in_kafka_txn(name, [b"z"], end=lambda producer: producer.abort_transaction(PATIENCE_S))
        wait_for(lambda: run.status().partitions[f"{name}/0"].committed_offset == 12, what="the marker")
        wait_for(lambda: run.status().lag == 0, what="the lag")
        progress = run.status().partitions
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).read().decode()
    assert {each: (it.end_offset, it.committed_offset, it.lag, it.in_flight) for each, it in progress.items()} == {
        f"{name}/0": (12, 12, 0, 0),
        f"{name}/1": (4, 4, 0, 0),
    }
    assert run.status().partitions == progress  # also after the run has ended
    label = f'{{partition="{name}/1",topology="{name}"}}'
    assert f"ratchet_source_end_offset{label} 4.0" in text
    assert f"ratchet_source_committed_offset{label} 4.0" in text
    assert f"ratchet_source_lag{label} 0.0" in text
    assert f'ratchet_rows_committed_total{{topology="{name}"}} 14.0' in text
    assert f'ratchet_batch_records_sum{{topology="{name}"}} 14.0' in text
    latency = f'ratchet_end_to_end_latency_seconds_bucket{{le="86400.0",record="oldest",topology="{name}"}} '
    assert float(text.partition(latency)[2].split()[0]) >= 1  # the records were written during this test


@pytest.mark.slow_for("transactional")
@pytest.mark.behaviour("2.12")
def test_a_lag_is_known_while_nothing_can_be_committed(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"x"] * 10)
    runs.catch_up()
    topics.send(name, [b"y"] * 5)
    wait = runs.topology()
    holding = wait.components[-1].instance
    from framework import submit

    def held(*_: Any, **__: Any) -> Any:
        time.sleep(0.05)
        from framework import FailedException

        raise FailedException("not yet")

    holding.finish_batch = held  # type: ignore[union-attr, method-assign]
    with submit(wait, {}, runs.store, "local") as run:
        wait_for(lambda: run.status().lag == 5, what="the lag")
        wait_for(lambda: run.status().partitions[f"{name}/0"].in_flight == 5, what="what is in flight")
        assert run.status().partitions[f"{name}/0"].committed_offset == 10


def published(topics: Topics, topic: str, group: str, partitions: int) -> list[int]:
    """The offsets that a consumer group has committed, per partition; -1001: none."""
    consumer = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": group})
    found = consumer.committed([TopicPartition(topic, number) for number in range(partitions)], timeout=PATIENCE_S)
    consumer.close()
    return [each.offset for each in found]


@pytest.mark.slow
@pytest.mark.behaviour("2.13")
def test_committed_offsets_are_published_to_a_group_after_the_commit(runs: KafkaRuns) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 2)
    topics.send(name, [b"x"] * 10, 0)
    topics.send(name, [b"y"] * 3, 1)
    group = f"{name}-watchers"
    runs.catch_up()
    assert published(topics, name, group, 2) == [-1001, -1001]  # it was not asked for
    with runs.start(consumer_group=group) as run:
        run.wait_until_caught_up(PATIENCE_S)
        topics.send(name, [b"x"] * 2, 0)
        run.wait_until_caught_up(PATIENCE_S)
        wait_for(lambda: published(topics, name, group, 2) == [12, 3], what="the offsets in the group")
        topics.send(name, [b"x"], 1)
        run.wait_until_caught_up(PATIENCE_S)
    assert published(topics, name, group, 2) == [12, 4]  # the offsets of the last commit, after the run has ended


@pytest.mark.behaviour("2.13")
def test_the_last_of_many_offsets_is_published_before_the_run_ends(topics: Topics, name: str) -> None:
    topics.create(name, 1)
    group = GroupOffsets(KafkaSettings(topics.bootstrap_servers, None), name)
    for offset in range(1, 50):
        group.publish({f"{name}/0": offset})
    group.close()
    assert published(topics, name, name, 1) == [49]


@pytest.mark.behaviour("2.13")
def test_a_group_that_cannot_be_written_is_logged_once_and_stops_nothing(runs: KafkaRuns) -> None:
    """A consumer is in the group, so the broker refuses offsets from outside."""
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"x"] * 10)
    member = Consumer(
        {"bootstrap.servers": topics.bootstrap_servers, "group.id": name, "auto.offset.reset": "earliest"}
    )
    member.subscribe([name])
    wait_for(lambda: member.poll(0.1) is not None, what="a member of the group")
    with structlog.testing.capture_logs() as logs, runs.start(consumer_group=name, batch_records_max=2) as run:
        run.wait_until_caught_up(PATIENCE_S)
    member.close()
    assert runs.counts() == {"x": 10}
    assert [each["event"] for each in logs].count("group.not_published") == 1
