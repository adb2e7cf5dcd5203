"""What tables of rows hold after each transaction, whatever happens to its attempts (C41, C42)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from sinks.rows import reduction
from sinks.rows import transactional_table as table_module
from sinks.rows.rows_as_of import RowSnapshot
from sinks.rows.transactional_table import RowTable
from sinks.sql.table_base import SqlTableBase
from tests.simulation.patches import Patch, check_noticed
from tests.simulation.rows import run_rows
from tests.simulation.table_world import SimTable

pytestmark = pytest.mark.rule("C41")

SCHEDULES = 20
SCHEDULES_PER_MUTATION = 300


def test_tables_hold_what_the_committed_records_say(seed: int) -> None:
    struck: Counter[str] = Counter()
    for number in range(seed, seed + SCHEDULES):
        wrong, world = run_rows(number)
        assert wrong is None, f"python -m tests.simulation --only rows --seed {number}: {wrong}"
        struck += world.struck
    assert {"attempt died", "another batch", "roll-back", "late task refused", "one step"} <= set(struck)


def rows_from_before_stay_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "_put_back", lambda self, connection, txid: 0)


def appended_rows_stay(patch: pytest.MonkeyPatch) -> None:
    enter = RowTable._enter

    def entered(self: RowTable, connection: Any, expected: Any, new: Any) -> None:
        if self._changes is not None:
            enter(self, connection, expected, new)
        elif not expected.same_attempt(new):
            self._forget(connection)

    patch.setattr(RowTable, "_enter", entered)


def the_header_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(table_module, "check_granted", lambda header, attempt, location: None)
    patch.setattr(SqlTableBase, "_check_header", lambda self, connection, expected, lock: None)


def the_sequence_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "_leave_out_older", lambda self, connection, staged: None)


def a_doubled_task_writes_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "_is_first", lambda self, connection, writer, txid: True)


def rows_from_before_an_earlier_transaction_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "_forget_before", lambda self, connection, txid=None: None)


def a_deletion_outlives_its_roll_back(patch: pytest.MonkeyPatch) -> None:
    without(patch, 'DELETE FROM "t_deleted" WHERE _ratchet_txid =')


def deletions_are_forgotten_at_once(patch: pytest.MonkeyPatch) -> None:
    purge = RowTable.purge
    patch.setattr(RowTable, "purge", lambda self, header, before: purge(self, header, before + 10_000))


def a_born_row_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    keeping = RowTable._keeping
    patch.setattr(RowTable, "_keeping", lambda self, *arguments: keeping(self, *arguments).replace("LEFT JOIN", "JOIN"))


def the_added_column_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    copied = RowTable._copied
    patch.setattr(
        RowTable, "_copied", lambda self, connection: [each for each in copied(self, connection) if each != "extra"]
    )


def changes_are_reduced_backwards(patch: pytest.MonkeyPatch) -> None:
    reduced = reduction.reduced

    def backwards(rows: pa.Table, changes: Any) -> list[pa.Table]:
        return reduced(rows.take(pa.array(range(rows.num_rows - 1, -1, -1))), changes)

    patch.setattr(reduction, "reduced", backwards)


def a_reader_sees_the_open_transaction(patch: pytest.MonkeyPatch) -> None:
    def rows(self: RowSnapshot, txid: int) -> Iterator[tuple[Any, ...]]:
        return self._streamed(self._table._table, list(self._table.schema.names))

    patch.setattr(RowSnapshot, "rows", rows)


def without(patch: pytest.MonkeyPatch, begin: str) -> None:
    """Leave out the statements that begin so."""
    run = SimTable._run

    def some(self: SimTable, connection: Any, statement: str, parameters: Sequence[Any] = ()) -> Any:
        return run(self, connection, "SELECT 1 WHERE 0" if statement.startswith(begin) else statement, parameters)

    patch.setattr(SimTable, "_run", some)


MUTATIONS: list[Patch] = [
    rows_from_before_stay_away,
    appended_rows_stay,
    the_header_is_not_compared,
    the_sequence_is_ignored,
    a_doubled_task_writes_twice,
    rows_from_before_an_earlier_transaction_are_kept,
    a_deletion_outlives_its_roll_back,
    deletions_are_forgotten_at_once,
    a_born_row_is_not_noted,
    the_added_column_is_not_copied,
    changes_are_reduced_backwards,
    a_reader_sees_the_open_transaction,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_the_simulator_notices_each_rule_that_is_taken_out(mutation: Patch, seed: int) -> None:
    check_noticed(mutation, run_rows, range(seed, seed + SCHEDULES_PER_MUTATION))
