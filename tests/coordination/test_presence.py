"""What drivers say of themselves, and that saying it harms nobody."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from framework import submit
from framework.coordination import MemoryStore, Put
from framework.coordination.presence import TEXT_MAX, Presence, read_drivers
from framework.coordination.transactional_state import encode_document
from framework.errors import ConfigError, CorruptStateError
from framework.inspect.topologies import read_topologies, read_topology
from tests.kit.waiting import wait_for
from tests.kit.words_runs import Setup


def test_a_long_text_is_shortened_and_does_not_end_the_announcements() -> None:
    """An error's message may have megabytes, and a node may not."""
    store, error = MemoryStore(), ["x" * 2_000_000]
    presence = Presence(store, "words", "transactional", lambda: {"phase": "running", "last_error": error[0]}, 0.01)
    wait_for(lambda: read_drivers(store, "words") != [])
    assert len(read_drivers(store, "words")[0].status["last_error"]) == TEXT_MAX + 1
    error[0] = "small"
    wait_for(lambda: read_drivers(store, "words")[0].status["last_error"] == "small")
    presence.close()
    assert read_drivers(store, "words") == []


def test_a_status_that_cannot_be_told_is_told_later(recwarn: pytest.WarningsRecorder) -> None:
    store, asked = MemoryStore(), threading.Event()

    def summary() -> dict[str, Any]:
        if not asked.is_set():
            asked.set()
            raise RuntimeError("dictionary changed size during iteration")
        return {"phase": "running"}

    presence = Presence(store, "words", "transactional", summary, 0.01)
    wait_for(lambda: read_drivers(store, "words") != [])
    presence.close()
    assert read_drivers(store, "words") == []


def test_a_run_that_cannot_be_started_is_no_driver(tmp_path: Any) -> None:
    """Its port for metrics is taken."""
    setup = Setup(tmp_path)
    settings = {"metrics.prometheus.port": 1, "metrics.prometheus.host": "192.0.2.1"}  # nobody has this address
    with pytest.raises(ConfigError, match="metrics.prometheus.port"):
        submit(setup.topology(), settings, setup.store, "local")
    wait_for(lambda: read_drivers(setup.store, "words") == [])
    assert "ratchet-presence-words" not in [each.name for each in threading.enumerate()]


def test_what_another_version_says_of_itself_is_read_as_far_as_it_is_known() -> None:
    store = MemoryStore()
    known = {"kind": "core", "host": "a", "pid": 1, "started_at": 1.0, "said_at": 2.0, "status": {"phase": "running"}}
    store.apply([Put("words/drivers/1", encode_document({**known, "version": 2}, "1"))])
    (driver,) = read_drivers(store, "words")
    assert (driver.host, driver.phase) == ("a", "running")
    for broken in ({}, [1], {**known, "status": 7}):
        store.apply([Put("words/drivers/1", encode_document(broken, "1"))])
        with pytest.raises(CorruptStateError, match="words/drivers/1: not what a driver says of itself"):
            read_drivers(store, "words")


DRIVER = {"kind": "core", "host": "a", "pid": 1, "started_at": 1.0, "said_at": 2.0, "status": {"phase": "running"}}


def document(value: Any) -> bytes:
    return encode_document(value, "node")


@pytest.mark.parametrize(
    ("node", "data"),
    [
        ("coordinator/currtx", b"[" * 200_000),
        ("coordinator/currtx", b'{"format":1,"value":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        ("coordinator/currtx", b'{"format":1,"value":' + b"[" * 300 + b"]" * 300 + b"}"),
        ("coordinator/currtx", b"9" * 200_000),
        ("coordinator/currtx", document("seven")),
        ("drivers/1", b'{"format":1,"value":' + b'{"a":' * 200_000),
        ("drivers/1", document({**DRIVER, "started_at": "yesterday"})),
        ("drivers/1", document({**DRIVER, "host": ["a"]})),
        ("drivers/1", document({**DRIVER, "status": {"phase": "running", "epoch": "first"}})),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else value,
)
def test_one_damaged_node_makes_its_own_topology_unreadable_and_no_other(node: str, data: bytes) -> None:
    store = MemoryStore()
    store.apply([Put("words/coordinator/currtx", document(3))])
    store.apply([Put(f"broken/{node}", data)])
    if node.startswith("drivers/"):
        store.apply([Put("broken/drivers/2", document(DRIVER))])
    found = {each.id: each for each in read_topologies(store)}
    assert (found["words"].state, found["words"].txid) == ("stopped", 2)
    assert found["broken"].state == "unreadable"
    assert "broken" in str(found["broken"].unreadable) and "\n" not in str(found["broken"].unreadable)


def test_a_driver_says_of_which_kind_its_topology_is() -> None:
    """A core topology may have the id of one that was transactional."""
    store = MemoryStore()
    store.apply([Put("words/coordinator/currtx", encode_document(3, "words/coordinator/currtx"))])
    driver = {"kind": "core", "host": "a", "pid": 1, "started_at": 1.0, "said_at": 2.0, "status": {"phase": "running"}}
    store.apply([Put("words/drivers/1", encode_document(driver, "1"))])
    found = read_topology(store, "words")
    assert found is not None
    assert (found.kind, found.txid) == ("core", None)
