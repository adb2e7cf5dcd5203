"""Transactional and rotating state, as in seed 000 and in Storm."""

from __future__ import annotations

import pytest

from framework.errors import ConfigError, CorruptStateError, InvariantViolation
from framework.transactions import MemoryStore, Put, RotatingTransactionalState, TransactionalState


def named(txid: int, previous: object) -> list[object]:
    return [txid, previous]


@pytest.mark.behaviour("1.13")
def test_strict_state_starts_at_1_and_follows_by_1() -> None:
    state = RotatingTransactionalState(MemoryStore(), "meta", strict_order=True)
    with pytest.raises(InvariantViolation, match="txid 2 would be the first"):
        state.get_state(2, named)
    assert state.get_state(1, named) == [1, None]
    with pytest.raises(InvariantViolation, match="txid 3 cannot follow 1"):
        state.get_state(3, named)
    assert state.get_state(2, named) == [2, [1, None]]


@pytest.mark.behaviour("1.13")
def test_loose_state_of_a_txid_below_an_existing_one_is_none() -> None:
    state = RotatingTransactionalState(MemoryStore(), "meta")
    assert state.get_state(5, named) == [5, None]
    assert state.get_state(3, named) is None
    assert state.get_state(9, named) == [9, [5, None]]


@pytest.mark.behaviour("1.13")
def test_get_or_create_tells_created_from_existing() -> None:
    state = RotatingTransactionalState(MemoryStore(), "meta")
    assert state.get_state_or_create(1, named) is None
    assert state.get_state_or_create(1, named) == [1, None]


@pytest.mark.behaviour("1.13")
def test_previous_last_override_remove_and_cleanup() -> None:
    state = RotatingTransactionalState(MemoryStore(), "meta", strict_order=True)
    for txid in (1, 2, 3):
        state.get_state(txid, lambda txid, previous: txid * 10)
    assert state.get_previous_state(3) == 20
    assert state.get_previous_state(1) is None
    state.override_state(3, 99)
    assert state.last_state() == 99
    state.remove_state(3)
    assert not state.has_cache(3)
    state.cleanup_before(2)
    assert state.txids() == [2]


def test_state_survives_in_its_store() -> None:
    store = MemoryStore()
    first = RotatingTransactionalState(store, "meta")
    first.get_state(1, named)
    first.get_state(2, named)
    first.cleanup_before(2)
    again = RotatingTransactionalState(store, "meta")
    assert again.txids() == [2]
    assert again.last_state() == [2, [1, None]]


def test_a_name_that_is_no_txid_is_an_error_that_names_it() -> None:
    store = MemoryStore()
    store.apply([Put("meta/latest", b"{}")])
    with pytest.raises(CorruptStateError, match="meta/latest"):
        RotatingTransactionalState(store, "meta")


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"{", b"[1]", b'{"value":1}', b'{"format":"1","value":1}'])
@pytest.mark.behaviour("1.13")
def test_a_document_that_does_not_parse_is_corrupt_not_absent(garbage: bytes) -> None:
    store = MemoryStore()
    store.apply([Put("t/coordinator/currtx", garbage)])
    with pytest.raises(CorruptStateError, match="t/coordinator/currtx"):
        TransactionalState(store, "t").get_data("coordinator/currtx")


def test_a_newer_format_is_refused() -> None:
    store = MemoryStore()
    store.apply([Put("t/x", b'{"format":3,"value":1}')])
    with pytest.raises(CorruptStateError, match="format version 3"):
        TransactionalState(store, "t").get_data("x")


def test_atomically_is_all_or_nothing() -> None:
    state = TransactionalState(MemoryStore(), "t")
    with pytest.raises(RuntimeError), state.atomically():
        state.set_data("a", 1)
        raise RuntimeError
    assert state.get_data("a") is None
    with state.atomically():
        state.set_data("a", 1)
        state.set_data("b", 2)
        state.delete("a")
        assert state.get_data("b") is None
    assert (state.get_data("a"), state.get_data("b")) == (None, 2)


def test_a_document_too_large_for_a_znode_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"t/x: the document has .* divide the source among several topologies"):
        TransactionalState(MemoryStore(), "t").set_data("x", "y" * 1_000_000)
