"""Offsets of quiet partitions are committed to the consumer group again, before brokers forget
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka import group_offsets as module
from spouts.kafka.group_offsets import GroupOffsets
from spouts.kafka.partition_plan_entries import Position
from tests.kit.kafka_runs import KafkaRuns
from tests.kit.topics import Topics
from tests.kit.waiting import wait_for


class Group:
    """A consumer that answers each commit immediately, and has what was stored before."""

    def __init__(self, answered: Callable[[None, list[Any]], None]) -> None:
        self.answered = answered
        self.commits: list[list[tuple[str, int]]] = []

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self.commits.append([(each.topic, each.offset) for each in offsets])
        self.answered(None, offsets)

    def committed(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 7 if each.topic == "old" else -1001) for each in asked]

    def poll(self, timeout_s: float) -> None:
        pass


def test_quiet_partitions_are_committed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    offsets = GroupOffsets(KafkaSettings("broker:9092", None), "g")
    group = Group(offsets.answered)
    offsets.use(group)  # type: ignore[arg-type]
    offsets.publish({"quiet/0": 3, "busy/0": 4})
    offsets.publish({"quiet/0": 3, "busy/0": 5})
    offsets.advance()
    assert group.commits == [[("quiet", 3), ("busy", 4)], [("busy", 5)]]
    now[0] = module.RENEW_EVERY_S + 1
    offsets.advance()
    offsets.advance()
    assert group.commits[2:] == [[("quiet", 3), ("busy", 5)]]


def test_what_a_former_run_has_published_is_committed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = GroupOffsets(KafkaSettings("broker:9092", None), "g")
    group = Group(offsets.answered)
    offsets.use(group)  # type: ignore[arg-type]
    offsets.adopt(["old/0", "new/0"], 5.0)
    offsets.advance()
    assert group.commits == [[("old", 7)]]
    assert offsets.has("old/0", Position(7, None))


@pytest.mark.integration
def test_a_topology_that_is_idle_from_its_start_renews_its_group(
    topics: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create(name)
    topics.send(name, [b"a"] * 3)
    runs = KafkaRuns(topics, tmp_path, name, consumer_group=name)
    runs.catch_up()
    sent: list[Any] = []
    real = GroupOffsets._send

    def noted(self: GroupOffsets) -> None:
        sent.append(dict(self._waiting))
        real(self)

    monkeypatch.setattr(GroupOffsets, "_send", noted)
    monkeypatch.setattr(module, "RENEW_EVERY_S", 0.0)
    with runs.start() as run:
        wait_for(lambda: len(sent) >= 2)
        assert run.status().committed_txid == 1
    assert {each[f"{name}/0"].offset for each in sent} == {3}
