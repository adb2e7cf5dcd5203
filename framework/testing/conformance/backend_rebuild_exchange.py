"""Rebuilt rows replace a state in one step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.errors import ConfigError, InvariantViolation, RatchetError, StaleWriterError
from framework.testing.conformance.backend_case import BackendCase
from framework.testing.conformance.backend_test_helpers import DIGEST, transact
from framework.topology import FORMER, REBUILT, OpenCommit
from sinks.backend import MapBackend
from sinks.rebuild_exchange import ExchangeBackend
from sinks.states import OpaqueMapState


class ExchangeContract(BackendCase):
    """Rebuilt rows replace a state in one step."""

    def test_rebuilt_rows_take_the_place_of_others_in_one_step(self, backend: MapBackend) -> None:
        if not isinstance(backend, ExchangeBackend):
            with pytest.raises(ConfigError, match="cannot be rebuilt"):
                OpaqueMapState(backend).become_beside(REBUILT)
            return
        live, rebuilt = OpaqueMapState(backend), OpaqueMapState(backend.beside(REBUILT))
        former = OpaqueMapState(backend.beside(FORMER))
        transact(live, 1, 1, {"dog": 1, "cat": 1})
        transact(live, 2, 1, {"dog": 10, "cow": 5})
        transact(rebuilt, 1, 1, {"dog": 2}, epoch=7)
        transact(rebuilt, 2, 1, {"dog": 20, "pig": 3}, epoch=7)
        assert {live.get(key) for key in ("dog", "cat", "cow", "pig")} == {11, 1, 5, None}
        header = live.read_header()
        new = header.opened(1, OpenCommit(3, 2, DIGEST))
        for expected, held in ((replace(header, epoch=9), rebuilt.read_header()), (header, header)):
            with pytest.raises(StaleWriterError):
                backend.exchange(expected, new, held)
        assert (live.get("dog"), rebuilt.get("dog")) == (11, 22)
        rebuilt_header = rebuilt.read_header()
        backend.exchange(header, new, rebuilt_header)
        assert live.read_header() == new
        assert [live.get(key) for key in ("dog", "cat", "cow", "pig")] == [22, None, None, 3]
        assert [former.get(key) for key in ("dog", "cat", "cow", "pig")] == [11, 1, 5, None]
        assert former.read_header() == replace(header, incarnation=rebuilt_header.incarnation)
        with pytest.raises(RatchetError):  # it does not exist any more
            rebuilt.read_header()
        transact(live, 3, 2, {"dog": 100, "cat": 1})
        transact(live, 4, 1, {"pig": 1})
        assert [live.get(key) for key in ("dog", "cat", "cow", "pig")] == [122, 1, None, 4]
        assert former.get("dog") == 11

    def test_a_transaction_is_taken_back_from_rebuilt_rows(self, backend: MapBackend) -> None:
        if not isinstance(backend, ExchangeBackend):
            return
        live, rebuilt = OpaqueMapState(backend), OpaqueMapState(backend.beside(REBUILT))
        for state, times in ((live, 1), (rebuilt, 2)):
            transact(state, 1, 1, {"dog": times}, epoch=times)
            transact(state, 2, 1, {"dog": 10 * times, "cow": 1}, epoch=times)
        header = live.read_header()
        backend.exchange(header, header, rebuilt.read_header())
        opened = header.opened(3, OpenCommit(2, 2, DIGEST))
        live.raise_header(header, opened)
        assert live.roll_back(opened) == 2
        assert (live.get("dog"), live.get("cow")) == (2, None)

    def test_what_stands_beside_is_removed_and_made_again(self, backend: MapBackend) -> None:
        if not isinstance(backend, ExchangeBackend):
            return
        live, rebuilt = OpaqueMapState(backend), OpaqueMapState(backend.beside(REBUILT))
        live.prepare("topology")
        assert not rebuilt.remove("topology")
        for dogs in (1, 2, 3):
            transact(rebuilt, 1, 1, {"dog": dogs})
            if dogs != 2:
                assert rebuilt.remove("topology")
                rebuilt.prepare("topology")
                assert rebuilt.get("dog") is None
            else:
                header = live.read_header()
                backend.exchange(header, header, rebuilt.read_header())
        assert live.get("dog") == 2
        former = backend.beside(FORMER)
        with pytest.raises(ConfigError):
            former.remove("another")
        assert former.remove("topology") and not former.remove("topology")
        with pytest.raises(InvariantViolation):
            backend.remove("topology")
        assert live.get("dog") == 2
