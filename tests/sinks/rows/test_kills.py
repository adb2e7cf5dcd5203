"""A writer that dies between any two statements leaves nothing that a replay does not take back."""

from __future__ import annotations

from typing import Any

import pytest

from framework.errors import RetryableError
from sinks.rows.rebuildable_table import RebuildableTable
from sinks.rows.table_definition import TableDefinition
from sinks.rows.transactional_table import RowTable
from tests.kit.row_tables import Database
from tests.sinks.rows.test_upsert import Writer, change

pytestmark = pytest.mark.rule("C41")


class Killed(RetryableError):
    """The writer is gone before this statement."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let the statement of this number, and those after it, fail. Returns the number of statements
    so far, as a list."""
    count, run = [0], TableDefinition._run

    def counted(table: RowTable, *given: Any) -> Any:
        count[0] += 1
        if count[0] >= number:
            raise Killed(f"before statement {number}")
        return run(table, *given)

    for kind in (TableDefinition, *RebuildableTable.__subclasses__()):
        if "_run" in vars(kind):
            monkeypatch.setattr(kind, "_run", counted)
    return count


@pytest.mark.slow_for("mysql")
def test_a_kill_before_any_statement_is_repaired_by_the_replay(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(database, sequence_by="lsn", stamp="_txid")
    writer.commit(1, [change(1, "a", lsn=2), change(2, "b", lsn=2), change(3, "c", lsn=2)])
    attempt, number, expected = 1, 1, database.rows(columns="id, name")
    while True:
        with monkeypatch.context() as patched:
            count = kill_at(patched, number)
            try:
                writer.begin(2, [change(1, "x", lsn=3), change(2, lsn=3, dead=True), change(4, "y")], attempt)
                survived = True
            except Killed:
                survived = False
        assert survived or count[0] >= number
        if survived:
            break
        found = database.rows(columns="id, name")
        assert found in (expected, [(1, "x"), (3, "c"), (4, "y")])
        attempt, number = attempt + 1, number + 1
    assert number > 8
    writer.commit(2, [change(2, "z", lsn=2), change(3, lsn=9, dead=True)], attempt + 1)
    assert database.rows(columns="id, name, _txid") == [(1, "a", 1), (2, "z", 2)]
