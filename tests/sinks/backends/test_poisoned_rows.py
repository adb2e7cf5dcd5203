"""Rows and headers of a table that an intruder may write to: a line that names the table, or the
right figures. The types of the columns refuse what is of another type."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from framework import Fields, TransactionalTopologyBuilder, submit
from framework.errors import RatchetError
from framework.transactions import MemoryStore
from sinks import Count, OpaqueMapState, SqliteBackend, StateCommitter
from spouts import OpaqueMemoryTransactionalSpout
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.behaviour("3.3")
WORDS = [["a"], ["b"]] * 4
HUGE = 2**63 - 1
HEADER = ["format", "topology_id", "incarnation", "epoch", "open_txid", "open_attempt", "open_digest", "done"]
VALUES = {"null": None, "negative": -5, "huge": HUGE, "long": "[" * 200_000, "escape": "a\x1b]0;x\x07\nerror: forged"}


def run(path: Path, words: list[list[str]], store: MemoryStore) -> None:
    spout = OpaqueMemoryTransactionalSpout({0: words}, Fields(word=str), 3)
    builder = TransactionalTopologyBuilder("poisoned", "spout", spout)
    state = OpaqueMapState(SqliteBackend(path, "words"))
    builder.set_bolt("count", StateCommitter(state, ["word"], {"n": Count()})).global_grouping("spout")
    with submit(builder.build(), {"topology.max.attempts": 2}, store, "local") as running:
        running.wait_until_caught_up(PATIENCE_S)


def outcome(tmp_path: Path, statement: str, value: object) -> str:
    """What a run says after the change; nothing where it counts right, or the database refuses the
    change."""
    path, store = tmp_path / "x.db", MemoryStore()
    run(path, WORDS, store)
    with sqlite3.connect(path) as intruder:
        try:
            intruder.execute(statement, [value])
        except sqlite3.IntegrityError:
            return ""
    intruder.close()
    try:
        run(path, [*WORDS, ["a"], ["b"]], store)
    except RatchetError as error:
        return str(error)
    with sqlite3.connect(path) as reader:
        assert reader.execute("SELECT word, n FROM words ORDER BY word").fetchall() == [("a", 5), ("b", 5)]
    reader.close()
    return ""


@pytest.mark.each_value_once
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("column", HEADER)
def test_a_header_is_right_or_named(tmp_path: Path, column: str, value: str) -> None:
    said = outcome(tmp_path, f"UPDATE _ratchet_headers SET {column} = ?", VALUES[value])
    assert not said or "words" in said
    assert len(said) < 1_000 and said.isprintable()


@pytest.mark.parametrize("column", ["_txid", "_epoch", "_attempt", "_deleted", "_prev_exists"])
@pytest.mark.parametrize("value", [-5, HUGE])
def test_a_stamp_is_harmless_or_named(tmp_path: Path, column: str, value: int) -> None:
    said = outcome(tmp_path, f"UPDATE words SET {column} = ? WHERE word = 'a'", value)
    assert not said or "key ('a',)" in said


def test_a_row_of_a_later_transaction_is_named(tmp_path: Path) -> None:
    said = outcome(tmp_path, "UPDATE words SET _txid = ? WHERE word = 'a'", HUGE)
    assert "table 'words'" in said and "key ('a',)" in said
