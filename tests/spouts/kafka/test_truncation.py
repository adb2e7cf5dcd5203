"""Logs that lost their ends and have grown again under the same offsets (2.6).

The cause is an unclean election, or a broker that was restored from a backup. Only leader epochs
show it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import TopologyContext, TransactionAttempt
from framework.errors import DataLossError, RetryableError
from integration import KafkaBroker
from spouts.kafka.consumer.consumer_pool import sessions
from spouts.kafka.consumer.record_chunk import RecordChunk
from spouts.kafka.partition_plan_entries import Position
from tests.kit.kafka_runs import KafkaRuns, tail_of
from tests.kit.plans import Plan, offsets
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.behaviour("2.6"), pytest.mark.rule("C26")]
CONTEXT = TopologyContext("t", "spout", 0, 1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    server = KafkaBroker(tmp_path_factory.mktemp("broker"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def runs(reader: str, broker: KafkaBroker, name: str, tmp_path: Path) -> Iterator[KafkaRuns]:
    yield KafkaRuns(Topics(broker.address), tmp_path, name)
    sessions.close()


def log_file(broker: KafkaBroker, topic: str, partition: int = 0) -> Path:
    return broker.folder / "data" / f"{topic}-{partition}" / f"{0:020}.log"


def truncate(broker: KafkaBroker, *logs: tuple[Path, int]) -> None:
    """Cut logs off at a size in bytes, as if their ends had never reached this disk;
    leader epochs rise at the restart.
    """
    broker.stop()
    for log, size in logs:
        with log.open("r+b") as file:
            file.truncate(size)
        for other in log.parent.iterdir():
            if other.suffix in (".index", ".timeindex", ".snapshot"):
                other.unlink()
    (broker.folder / "data" / ".kafka_cleanshutdown").unlink()  # otherwise the broker trusts the ends
    broker.start()


def planned(planner: Any, previous: Plan) -> Plan:
    """The next plan; asked for until there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RetryableError):
            made = planner.plan(previous)
            if made is not None:
                return made
    raise AssertionError(f"no plan in {PATIENCE_S} s")


def read(runs: KafkaRuns, plan: Plan) -> list[str]:
    batches = runs.spout().reader({}, CONTEXT).read_all(TransactionAttempt(1, 1), plan)
    return [value for batch in batches for value in batch.column(0).to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("consumer", ["kept", pytest.param("new", marks=pytest.mark.slow), "warmed up"])
def test_a_range_behind_a_truncated_end_is_data_loss_also_when_the_log_has_grown_again(
    runs: KafkaRuns, broker: KafkaBroker, consumer: str
) -> None:
    """A kept consumer stands exactly where the next range begins, and has already fetched records
    of the old log.

    A consumer that is warmed up knows the leader of the partition before it is assigned.
    """
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 5)
    kept = log_file(broker, name).stat().st_size
    topics.send(name, [b"old"] * 25)
    planner = runs.spout(batch_records_max=10).planner({}, CONTEXT)
    first = planned(planner, {})
    assert read(runs, first) == ["old"] * 10
    truncate(broker, (log_file(broker, name), kept))
    topics.send(name, [b"new"] * 30)
    planner.close()
    planner = runs.spout(batch_records_max=10).planner({}, CONTEXT)
    second = planned(planner, first)
    planner.close()
    assert offsets(second) == {f"{name}/0": (10, 20)}
    if consumer != "kept":
        sessions.close()
    if consumer == "warmed up":
        runs.spout().reader({}, CONTEXT).warm_up()
    with pytest.raises(DataLossError, match="truncat"):
        read(runs, second)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_records_that_replaced_planned_ones_are_never_read(runs: KafkaRuns, broker: KafkaBroker, kept: bool) -> None:
    """The range begins in the part of the log that is left, and ends in the new part."""
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 15)
    size = log_file(broker, name).stat().st_size
    topics.send(name, [b"old"] * 15)
    planner = runs.spout(batch_records_max=10).planner({}, CONTEXT)
    first = planned(planner, {})
    assert read(runs, first) == ["old"] * 10
    second = planned(planner, first)
    planner.close()
    assert offsets(second) == {f"{name}/0": (10, 20)}
    if not kept:
        sessions.close()
    truncate(broker, (log_file(broker, name), size))
    topics.send(name, [b"new"] * 30)
    try:
        assert read(runs, second) == ["old"] * 10  # fetched before the truncation
    except DataLossError as error:
        assert "15" in str(error)
    else:
        assert kept


@pytest.mark.slow
def test_a_healthy_partition_is_not_recorded_as_truncated_after_the_loss_of_another(
    runs: KafkaRuns, broker: KafkaBroker
) -> None:
    topics, name = runs.topics, runs.name
    topics.create(name, 3)
    kept = {}
    for partition in range(3):
        topics.send(name, [b"old"] * 5, partition)
        kept[partition] = log_file(broker, name, partition).stat().st_size
    for partition in range(3):
        topics.send(name, [b"old"] * 5, partition)
    runs.options["on_data_loss"] = "skip"
    runs.catch_up()
    truncate(broker, *((log_file(broker, name, partition), kept[partition]) for partition in (0, 2)))
    for partition in range(3):
        topics.send(name, [b"new"] * 12, partition)
    run = runs.catch_up()
    plan = run.transactions()[0].plan
    gaps = {partition: meta["gap"]["reason"] for partition, meta in plan.items() if "gap" in meta}
    assert gaps == {f"{name}/0": "truncated", f"{name}/2": "truncated"}
    assert runs.counts() == {"old": 30, "new": 7 + 12 + 7}


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True], ids=["topic not known yet", "topic known"])
def test_a_core_spout_that_goes_back_behind_a_truncated_end_is_told_and_may_go_on(
    runs: KafkaRuns, broker: KafkaBroker, known: bool
) -> None:
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 5)
    kept = log_file(broker, name).stat().st_size
    topics.send(name, [b"old"] * 25)
    truncate(broker, (log_file(broker, name), kept))
    topics.send(name, [b"new"] * 40)

    def first_records(skip_lost: bool) -> RecordChunk:
        tail = tail_of(broker.address, name, skip_lost=skip_lost)
        try:
            if known:
                tail._feed._consumer.list_topics(name, timeout=PATIENCE_S)
            tail.seek({(name, 0): Position(30, None, leader_epoch=0)})
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                with contextlib.suppress(RetryableError):
                    tail.look_up()
                    if records := tail.poll():
                        return records
                time.sleep(0.01)
            raise AssertionError(f"nothing came in {PATIENCE_S} s")
        finally:
            tail.close()

    with pytest.raises(DataLossError, match="no longer holds offset 30: .*truncation"):
        first_records(skip_lost=False)
    assert first_records(skip_lost=True).metadata("offset")[0].as_py() == 30


@pytest.mark.slow
def test_records_of_a_core_spout_carry_the_leader_epochs_that_they_were_written_in(
    runs: KafkaRuns, broker: KafkaBroker
) -> None:
    """Message ids and committed positions have them from there."""
    topics, name = runs.topics, runs.name
    topics.send(topics.create(name), [b"old"] * 5)
    truncate(broker)  # nothing is cut off, but epochs rise
    topics.send(name, [b"new"] * 5)
    tail = tail_of(broker.address, name)
    epochs: list[int] = []

    def came() -> bool:
        with contextlib.suppress(RetryableError):
            tail.look_up()
            if records := tail.poll():
                epochs.extend(records.epochs.tolist())
        return len(epochs) == 10

    try:
        tail.seek({(name, 0): Position(0, None)})
        wait_for(came, PATIENCE_S)
    finally:
        tail.close()
    first, second = epochs[0], epochs[-1]
    assert 0 <= first < second
    assert epochs == [first] * 5 + [second] * 5
