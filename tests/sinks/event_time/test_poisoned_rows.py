"""Rows of committers by event time that somebody else has changed: a line that names the table and
the key, or a run to the end."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from framework.errors import CorruptStateError, RatchetError
from framework.operators.event_clock import EventClock
from framework.transactions import MemoryStore
from sinks import Collect
from tests.kit.timed_parts import append, run, source, topology

pytestmark = pytest.mark.behaviour("3.3")

#: The part of the topology, the table and the column.
COLUMNS = {
    "clock": ("first", "clock", "clock"),
    "timers": ("timers", "part", "content"),
    "pairs": ("pairs", "part", "waiting"),
    "valued": ("valued", "part", "waiting"),
    "current": ("current", "part", "row"),
    "expiry": ("expiring", "part", "expires_at"),
    "bucket": ("pairs", "part", "last_row"),
    "session": ("sessions", "part", "first_at"),
    "count": ("counted", "part", "records"),
}
VALUES = {
    "null": None,
    "no JSON": "\x1b]0;x\x07" + "x" * 100_000,
    "another form": "[[1]]",
    "deep": "[" * 200_000,
    "no times": '{"watermark": "x", "planned_at": null, "elapsed": 1e400, "partitions": {"0": [[], {}]}}',
    "huge": f'{{"watermark": {10**30}, "planned_at": 1, "elapsed": 1, "partitions": {{}}}}',
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("column", COLUMNS)
def test_a_row_is_named_that_holds_what_no_committer_writes(tmp_path: Path, column: str, value: str) -> None:
    part, table, name = COLUMNS[column]
    spout, store = source(), MemoryStore()
    run(topology(tmp_path, spout, part), store)
    with closing(sqlite3.connect(tmp_path / "timed.db")) as intruder, intruder:
        try:
            intruder.execute(f'UPDATE "{table}" SET "{name}" = ? WHERE NOT _deleted', [VALUES[value]])
        except sqlite3.IntegrityError:
            return  # the type of the column refuses it
    append(spout)
    with pytest.raises(RatchetError, match=rf"table '{table}' .*, key \(.*: somebody else wrote it") as refused:
        run(topology(tmp_path, spout, part), store)
    assert len(str(refused.value)) < 1_000 and str(refused.value).isprintable()


@pytest.mark.parametrize("text", ["x", "{}", "[" * 200_000, "\x1b]0;x"])
def test_a_list_that_no_aggregate_has_made_is_named(text: str) -> None:
    with pytest.raises(CorruptStateError, match=r"Collect\('v'\): .* is no list that it has made") as refused:
        Collect("v").fold(["[1]", text], partial=True)
    assert len(str(refused.value)) < 1_000 and str(refused.value).isprintable()


def test_a_clock_of_an_earlier_version_is_read() -> None:
    document = EventClock().after({"a": 50}, 7, out_of_orderness=5, idle_after=60).document()
    del document["timeless"]
    assert EventClock.of_document(document).watermark == 45
