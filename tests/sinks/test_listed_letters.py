"""Dead letters are listed without their content, which may be larger than the memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import Fields, Topology, TransactionalTopologyBuilder, TransactionAttempt
from framework.inspect import dead_letters
from framework.inspect.dead_letters import LetterFilter, Letters
from framework.topology.dead_letters import LetterReader
from framework.topology.spouts import DEAD_LETTER_FIELDS
from sinks import OpaqueMapState, SqliteBackend, map_snapshot_reader
from sinks.dead_letter_table_reader import LETTER_KEY, LETTER_VALUE, TableLetters
from sinks.kafka.dead_letter_reader import TopicLetters
from sinks.sql import backend
from spouts import OpaqueMemoryTransactionalSpout

pytestmark = pytest.mark.rule("C48")

SIZE = 2**16
COUNT = 200


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend, map_snapshot_reader):
        monkeypatch.setattr(module, "PAGE_BYTES", 2**20)
    monkeypatch.setattr(dead_letters, "BYTES_AT_A_TIME", 2**20)


def peak_bytes(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Message:
    """A letter of 64 KiB in a topic, as a client returns it."""

    def __init__(self, offset: int) -> None:
        self._offset, self._value = offset, b"x" * SIZE

    def headers(self) -> list[tuple[str, bytes]]:
        added = {"topology": b"t", "incarnation": b"i", "txid": b"1", "partition": b"0", "error": b"no"}
        return [(f"ratchet.{name}", value) for name, value in {**added, "offset": b"%d" % self._offset}.items()]

    def key(self) -> None:
        pass

    def value(self) -> bytes:
        return self._value

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset


class LargeTopic(TopicLetters):
    """The reader of a topic with letters of 64 KiB."""

    def _messages(self) -> Iterator[Any]:
        yield from map(Message, range(COUNT))

    def _at(self, number: int, offsets: set[int]) -> Iterator[Any]:
        yield from map(Message, sorted(offsets))


def topic(folder: Path) -> LetterReader:
    return LargeTopic(lambda: None, "dead", "t", "i")  # type: ignore[arg-type, return-value]


def table(folder: Path) -> LetterReader:
    state = OpaqueMapState(SqliteBackend(folder / "rows.db", "letters"))
    state.bind(DEAD_LETTER_FIELDS.select(LETTER_KEY), LETTER_VALUE)
    state.begin_commit(TransactionAttempt(1, 0))
    for offset in range(COUNT):
        state.multi_put([("", 0, offset)], [("", None, "no", None, b"x" * SIZE, "[]", 0)])
    state.commit(TransactionAttempt(1, 0))
    return TableLetters(state, "standalone")


def topology() -> Topology:
    spout = OpaqueMemoryTransactionalSpout({0: [["a"]]}, Fields(word=str), 1)
    builder = TransactionalTopologyBuilder("t", "spout", spout)
    return builder.build()


@pytest.mark.parametrize("make", [topic, table])
def test_a_list_of_letters_is_much_smaller_than_their_content(make: Any, tmp_path: Path) -> None:
    reader = make(tmp_path)
    listed = [*reader.letters(lambda: 1)]  # imports are not counted
    assert peak_bytes(lambda: [*reader.letters(lambda: 1)]) < COUNT * SIZE // 2
    assert len(listed) == COUNT and all(each.size == SIZE and not each.is_cut for each in listed)


@pytest.mark.parametrize("make", [topic, table])
def test_content_is_fetched_in_parts(make: Any, tmp_path: Path) -> None:
    letters = Letters(topology(), make(tmp_path), lambda: 1)

    def shown() -> None:
        found = letters.found(LetterFilter(topic=""))
        assert sum(len(each.value or b"") for each in letters.whole(found)) == COUNT * SIZE

    assert peak_bytes(shown) < COUNT * SIZE // 2
