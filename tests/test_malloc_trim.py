"""Freed memory is returned after large rows only, and only where libc can."""

from __future__ import annotations

import pytest

from framework import malloc_trim
from framework.malloc_trim import LARGE_BYTES, LARGE_ROW_BYTES, FreedMemory


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(malloc_trim, "_malloc_trim", lambda: found.append)
    return found


def test_memory_is_returned_once_after_large_rows(returned: list[int]) -> None:
    freed = FreedMemory()
    freed.return_much()
    freed.note(40, LARGE_BYTES)
    freed.note(LARGE_BYTES // LARGE_ROW_BYTES * 2, LARGE_BYTES * 2)
    freed.return_much()
    assert returned == []
    freed.note(40, LARGE_BYTES + 1)
    freed.note(1, 10)
    freed.return_much()
    freed.return_much()
    assert returned == [0]


def test_a_libc_that_cannot_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_trim, "_malloc_trim", lambda: None)
    freed = FreedMemory()
    freed.note(1, LARGE_BYTES + 1)
    freed.return_much()


def test_glibc_returns_memory() -> None:
    freed = FreedMemory()
    freed.note(1, LARGE_BYTES + 1)
    freed.return_much()
