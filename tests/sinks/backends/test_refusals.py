"""A value that a database refuses: its row and its column are named, in a batch of any size."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from framework import Fields, TransactionAttempt
from framework.errors import BadRecordError
from integration import PostgresServer
from sinks import Max, OpaqueMapState, PostgresBackend, SqliteBackend, Sum
from sinks.refused_rows import refused_row

LONG = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9_000))


@pytest.fixture
def checked(postgres: PostgresServer) -> Iterator[tuple[PostgresBackend, Any]]:
    """A table with a constraint of somebody else's."""
    table = f"t_{uuid.uuid4().hex[:10]}"
    backend = PostgresBackend(postgres.dsn, table, Fields(word=str, other=str), Fields(n=int, m=int, text=str))
    backend.prepare("standalone")
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(f"ALTER TABLE {table} ADD CHECK (m < 1000)")
        yield backend, admin
        backend.close()
        admin.execute(f"DROP TABLE {table} CASCADE")


CASES = {
    "a key that is too long": ({"other": LONG}, "it is key column 'other', which has 9,000 bytes"),
    "NUL in a key": ({"word": "a\0b"}, "it is key column 'word', which has 3 bytes"),
    "NUL in a value": ({"text": "a\0b"}, "it is column 'text'"),
    "a constraint": ({"m": 1_000}, "it is column 'm'"),
}


@pytest.mark.each_value_once
@pytest.mark.integration
@pytest.mark.behaviour("3.2")
@pytest.mark.parametrize("rows", [1, 10, 1_000])
@pytest.mark.parametrize("how", ["put", "apply"])
@pytest.mark.parametrize("case", CASES)
def test_postgres_names_the_row_and_the_column_that_it_refuses(
    checked: tuple[PostgresBackend, Any], case: str, how: str, rows: int
) -> None:
    backend, _ = checked
    bad, named = CASES[case]
    given = [{"word": f"w{place}", "other": "x", "n": 1, "m": 2, "text": "y"} for place in range(rows)]
    given[rows // 2] = {**given[rows // 2], **bad}
    state, attempt = OpaqueMapState(backend), TransactionAttempt(1, 1)
    with pytest.raises(BadRecordError, match=named) as refused:
        if how == "put":
            state.begin_commit(attempt)
            state.multi_put(
                [(each["word"], each["other"]) for each in given],
                [(each["n"], each["m"], each["text"]) for each in given],
            )
            state.commit(attempt)
        else:
            aggregates = {"n": Sum("n"), "m": Max("m"), "text": Max("text")}
            state.apply(attempt, pa.Table.from_pylist(given), aggregates, want_values=False)
    assert f"word='{given[rows // 2]['word']}'".replace("\0", "\\x00") in refused.value.about
    assert len(refused.value.about) < 200
    assert list(backend.scan()) == []


@pytest.mark.parametrize("rows", [1, 1_000])
def test_a_sum_beyond_64_bits_names_its_column(tmp_path: Path, rows: int) -> None:
    state = OpaqueMapState(SqliteBackend(tmp_path / "rows.db", "words", Fields(word=str), Fields(n=int, m=int)))
    for txid in (1, 2):
        deltas = pa.table(
            {
                "word": [f"w{number}" for number in range(rows)],
                "n": [1] * rows,
                "m": [2**62 + 1 if number == rows // 2 else 1 for number in range(rows)],
            }
        )
        if txid == 1:
            state.apply(TransactionAttempt(txid, 1), deltas, {"n": Sum("n"), "m": Sum("m")}, want_values=False)
            continue
        with pytest.raises(BadRecordError, match="it is column 'm'") as refused:
            state.apply(TransactionAttempt(txid, 1), deltas, {"n": Sum("n"), "m": Sum("m")}, want_values=False)
    assert f"'w{rows // 2}'" in refused.value.about


@pytest.mark.parametrize("count", [1, 2, 3, 1_000])
def test_the_first_refused_row_is_found(count: int) -> None:
    for bad in (0, count // 2, count - 1):
        assert refused_row(count, lambda first, end, bad=bad: not first <= bad < end) == bad
    assert refused_row(count, lambda first, end: end - first < count if count > 1 else True) is None
