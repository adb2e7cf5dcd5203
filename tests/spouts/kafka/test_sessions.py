"""The sessions that a process keeps: who gets them, when they rest, and when they end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from framework.clients.kafka_settings import KafkaSettings
from spouts.kafka.consumer import consumer_pool as module
from spouts.kafka.consumer.consumer_pool import KafkaSessions
from tests.kit.own_logs import own_logs
from tests.kit.waiting import PATIENCE_S, wait_for

SETTINGS = KafkaSettings("127.0.0.1:1", None)


class Noted:
    """A session that notes what is done to it."""

    def __init__(self, *_: Any) -> None:
        self.rested, self.closed = threading.Event(), threading.Event()

    def rest(self) -> None:
        self.rested.set()

    def close(self) -> None:
        self.closed.set()


class CannotRest(Noted):
    def rest(self) -> None:
        raise RuntimeError("the consumer is gone")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_made", Noted)


def lent(pool: KafkaSessions, slot: int = 0) -> Any:
    with pool.lend(SETTINGS, "g", slot) as session:
        return session


@pytest.mark.usefixtures("noted")
def test_an_idle_session_rests_and_is_closed_later() -> None:
    pool = KafkaSessions(rest_after_s=0.05, close_after_s=1_000)
    session = lent(pool)
    assert session.rested.wait(PATIENCE_S)
    session.rested.clear()
    assert lent(pool) is session  # it is kept while it rests
    assert session.rested.wait(PATIENCE_S)
    pool._close_after_s = 0.1
    assert session.closed.wait(PATIENCE_S)
    assert len(pool) == 0
    wait_for(lambda: pool._keeper is None)
    assert lent(pool) is not session


@pytest.mark.usefixtures("noted")
def test_a_session_in_use_neither_rests_nor_ends() -> None:
    pool = KafkaSessions(rest_after_s=0.02, close_after_s=0.05)
    other = lent(pool, 1)
    with pool.lend(SETTINGS, "g", 0) as used:
        assert other.closed.wait(PATIENCE_S)
        assert not used.rested.is_set() and not used.closed.is_set()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("noted")
def test_a_session_that_becomes_idle_while_another_rests_rests_in_its_time() -> None:
    pool = KafkaSessions(rest_after_s=0.05, close_after_s=1_000)
    assert lent(pool, 0).rested.wait(PATIENCE_S)
    assert lent(pool, 1).rested.wait(PATIENCE_S)
    pool.close()


def test_a_session_that_cannot_rest_is_dropped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_made", CannotRest)
    pool = KafkaSessions(rest_after_s=0.05, close_after_s=1_000)
    with own_logs() as logs:
        assert lent(pool).closed.wait(PATIENCE_S)
    assert logs == [
        {
            "event": "source.session_dropped",
            "reason": "RuntimeError: the consumer is gone",
            "log_level": "warning",
        }
    ]
    assert len(pool) == 0
