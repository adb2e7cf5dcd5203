"""Records that a step with a state cannot keep: a key of nearly a megabyte, NUL, no key, no time, a
time of the year 9999. All others have the effect that they have without them. (A table without an
index takes the long key of a window that no transaction had to keep.)"""

from __future__ import annotations

import datetime
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from framework.streams import lookups
from framework.streams.ports import Target
from framework.transactions import MemoryStore
from ratchet import Json, Pipeline, Stream, count, max_, postgres, session, sqlite, tumbling
from tests.kit.topics import Topics
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.integration
START = datetime.datetime(2026, 1, 1, 10, tzinfo=datetime.UTC)
KEYS = [random.Random(1).randbytes(450_000).hex(), "k" * 900_000, "nul\0", None]


def parts(rows: Stream) -> tuple[Stream, Stream]:
    return rows.filter("v % 2 = 0"), rows.filter("v % 2 = 1").rename(v="w")


def closed(rows: Stream, kind: Any) -> Stream:
    windows = rows.window(kind, on="at", late="1 min").group_by("k")
    return windows.agg(n=count(), v=max_("v")).when_closed(name="closed")


#: Each returns a stream to append; None where it has put the rows into the table.
TIMED: Mapping[str, Callable[[Stream, Target], Stream | None]] = {
    "windows": lambda rows, _: closed(rows, tumbling("3 min")),
    "sessions": lambda rows, _: closed(rows.filter("v % 4 < 2"), session("90 s")),
    "first-rows": lambda rows, _: rows.deduplicate("k", within="3 min", on="at", late="1 min", name="first"),
    "pairs": lambda rows, _: parts(rows)[0].join(
        parts(rows)[1], on="k", times="at", within="1 min", how="outer", late="1 min", name="pairs"
    ),
    "valued": lambda rows, _: parts(rows)[0].join(
        parts(rows)[1].latest_by("k"), on="k", times="at", how="left", late="1 min", name="valued"
    ),
}
TABLES: Mapping[str, Callable[[Stream, Target], Stream | None]] = {
    "latest": lambda rows, table: into(rows.latest_by("k"), table),
    "newest": lambda rows, table: into(rows.latest_by("k", sequence_by="at"), table),
    "totals": lambda rows, table: into(rows.group_by("k").agg(n=count(), v=max_("v")), table),
    "current": lambda rows, _: parts(rows)[0].join(parts(rows)[1].latest_by("k"), on="k", how="left", name="current"),
}


def into(rows: Any, table: Target) -> None:
    rows.upsert_into(table, name="found", on_bad_record="skip")


def good() -> list[dict[str, Any]]:
    return [
        {"k": key, "v": minute, "at": (START + datetime.timedelta(minutes=minute)).isoformat()}
        for minute in range(12)
        for key in ("x", "y", "")
    ]


def bad(*, timed: bool) -> list[dict[str, Any]]:
    at = (START + datetime.timedelta(minutes=5)).isoformat()
    keys = [{"k": key, "v": number, "at": at} for key in KEYS for number in (4, 5)]
    times: list[Any] = [None, "9999-12-31T23:59:59Z", "0000-01-01T00:00:00Z"]
    return keys + ([{"k": "x", "v": 4, "at": each} for each in times] if timed else [])


def found(
    topics: Topics, name: str, dsn: str, make: Callable[[Stream, Target], Stream | None], *, records_max: int = 9
) -> Counter[Any]:
    """The rows that the step makes of a topic, in transactions of up to ``records_max`` records."""
    states = name.replace("-", "_")
    shop = Pipeline(name, state=lambda step: postgres(dsn, f"{states}_{step}"[-60:]))
    rows = shop.read_kafka(
        name,
        value=Json(k=str, v=int, at=datetime.datetime),
        bootstrap_servers=topics.bootstrap_servers,
        on_bad_record="skip",
        bad_record_share_max=None,
    )
    table = f"{states}_found"[-60:]
    made = make(rows, postgres(dsn, table))
    if made is not None:
        made.append_into(postgres(dsn, table), name="found", on_bad_record="skip")
    # What a row finds in a table depends on the rows of its transaction.
    with shop.batches(max_records=1 if make is TABLES["current"] else records_max).submit(
        {}, MemoryStore(), "local"
    ) as run:
        run.wait_until_caught_up(PATIENCE_S)
    with psycopg.connect(dsn) as connection:
        columns = [each.name for each in connection.execute(f'SELECT * FROM "{table}" LIMIT 0').description or ()]
        shown = ", ".join(f'"{each}"' for each in columns if not each.startswith("_"))
        rows_found = connection.execute(f'SELECT {shown} FROM "{table}"').fetchall()
    return Counter(each for each in rows_found if not set(each) & set(KEYS[:3]))


@pytest.mark.quick_for("sessions", "newest")
@pytest.mark.parametrize("step", [*TIMED, *TABLES])
def test_records_that_a_state_cannot_keep_change_nothing_for_others(
    topics: Topics, name: str, postgres: Any, step: str
) -> None:
    chance = random.Random(7)
    make = {**TIMED, **TABLES}[step]
    mixed = good()
    for each in bad(timed=step in TIMED):
        mixed.insert(chance.randrange(15, 21), each)
    results = []
    for suffix, records in (("good", good()), ("mixed", mixed)):
        topics.create(f"{name}-{suffix}")
        topics.send(f"{name}-{suffix}", [json.dumps(each).encode() for each in records])
        results.append(found(topics, f"{name}-{suffix}", postgres.dsn, make))
    assert results[0] == results[1]
    assert len(results[0]) >= 3


@pytest.mark.parametrize(
    "step", [pytest.param(each, marks=pytest.mark.slow) if each != "windows" else each for each in TIMED]
)
def test_a_partition_that_begins_with_undecodable_records_makes_no_record_late(
    topics: Topics, name: str, postgres: Any, step: str
) -> None:
    """The watermark waits while the batches of a backlog have only bad records of a partition."""
    results = []
    for suffix, undecodable in (("good", []), ("mixed", [b"{"] * 60)):
        topic = topics.create(f"{name}-{suffix}", 2)
        for number in (0, 1):
            times = (START + datetime.timedelta(minutes=minute, seconds=number) for minute in range(30))
            records = [{"k": "x", "v": 2 * at.minute + number, "at": at.isoformat()} for at in times]
            begins = undecodable if number == 1 else []
            topics.send(topic, [*begins, *(json.dumps(each).encode() for each in records)], number)
        results.append(found(topics, topic, postgres.dsn, TIMED[step], records_max=10))
    assert results[0] == results[1]
    assert len(results[0]) >= 3


@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("step", ["windows", pytest.param("valued", marks=pytest.mark.slow)])
def test_the_search_for_a_refused_record_makes_no_record_of_another_partition_late(
    topics: Topics, name: str, postgres: Any, step: str, partition: int
) -> None:
    """The halves of a batch read one partition to its end before they begin the other."""
    start = START - datetime.timedelta(days=1)
    results = []
    for suffix, refused in (("good", []), ("mixed", [{"k": None, "v": 4, "at": START.isoformat()}])):
        topic = topics.create(f"{name}-{suffix}", 2)
        for number in (0, 1):
            times = (start + datetime.timedelta(minutes=minute, seconds=number) for minute in range(0, 90, 3))
            records = [{"k": "x", "v": 2 * at.minute + number, "at": at.isoformat()} for at in times]
            records += refused if number == partition else []
            topics.send(topic, [json.dumps(each).encode() for each in records], number)
        results.append(found(topics, topic, postgres.dsn, TIMED[step], records_max=1_000))
    assert results[0] == results[1]
    assert len(results[0]) >= 20


def test_records_whose_answers_are_too_large_together_are_planned_in_halves(
    topics: Topics, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key is answered with 10 kB, and one with more than a batch may have."""
    monkeypatch.setattr(lookups, "ANSWERS_BYTES_MAX", 100_000)
    topics.create(name)
    topics.send(name, [json.dumps({"k": number}).encode() for number in range(60)])
    shop = Pipeline(name)
    rows = shop.read_kafka(name, value=Json(k=int), bootstrap_servers=topics.bootstrap_servers)
    known = rows.lookup(lambda key: "x" * (200_000 if key == 7 else 10_000), on="k", text=str)
    known.append_into(sqlite(tmp_path / "out.db", "out"), name="out")
    with shop.submit({}, MemoryStore(), "local") as run:
        run.wait_until_caught_up(PATIENCE_S)
    with sqlite3.connect(tmp_path / "out.db") as connection:
        sizes = dict(connection.execute("SELECT k, length(text) FROM out"))
    assert sizes == {number: 200_000 if number == 7 else 10_000 for number in range(60)}
