"""Consumers that are closed: librdkafka may wait for itself, and nothing of ours waits with it."""

from __future__ import annotations

import threading

import pytest

from framework.clients import consumer_close_timeout
from framework.clients.consumer_close_timeout import close_in_time
from tests.kit.own_logs import own_logs


def test_a_consumer_that_does_not_close_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_close_timeout, "CLOSE_MAX_S", 0.01)
    never = threading.Event()
    with own_logs() as logs:
        assert not close_in_time(lambda: never.wait() and None)
    never.set()
    assert [each["event"] for each in logs] == ["kafka.consumer_left"]


def test_the_error_of_a_consumer_that_is_closed_is_raised() -> None:
    def refuse() -> None:
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        close_in_time(refuse)
    assert close_in_time(lambda: None)
