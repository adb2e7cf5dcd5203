"""The clients that a process keeps: none for longer than it is used, and one for each key."""

from __future__ import annotations

import os
import weakref

import pytest

from framework.clients import client_cache
from framework.clients.client_cache import ClientCache


class Client: ...


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the cache sees."""
    times = [0.0]
    monkeypatch.setattr(client_cache.time, "monotonic", lambda: times[0])
    return times


def test_a_client_that_is_used_again_and_again_is_kept(now: list[float]) -> None:
    cache: ClientCache[Client] = ClientCache()
    kept = weakref.ref(cache.get("a", Client))
    for _ in range(10):
        now[0] += client_cache.IDLE_S - 1
        assert cache.get("a", Client) is kept()


def test_clients_that_are_not_used_end(now: list[float]) -> None:
    cache: ClientCache[Client] = ClientCache()
    idle = [weakref.ref(cache.get(number, Client)) for number in range(100)]
    now[0] += client_cache.IDLE_S - 1
    cache.get(7, Client)
    now[0] += 1
    cache.get("another", Client)
    assert [number for number, each in enumerate(idle) if each() is not None] == [7]
    assert len(cache) == 2


def test_there_is_no_second_client_while_a_caller_holds_one(now: list[float]) -> None:
    cache: ClientCache[Client] = ClientCache()
    held = cache.get("a", Client)
    now[0] += client_cache.IDLE_S
    cache.get("another", Client)
    assert cache.get("a", Client) is held
    cache.forget("a")
    assert cache.get("a", Client) is not held


def test_a_forked_process_has_no_clients_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: ClientCache[Client] = ClientCache()
    inherited = cache.get("a", Client)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert cache.get("a", Client) is not inherited


def test_a_client_that_cannot_be_made_is_not_kept() -> None:
    cache: ClientCache[Client] = ClientCache()
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert isinstance(cache.get("a", Client), Client)
