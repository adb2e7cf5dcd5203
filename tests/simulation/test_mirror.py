"""A copy of another database is right after each transaction, whatever happens to its attempts
(C41, C42, C49)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sinks.rows import mirror
from sinks.rows import transactional_table as table_module
from sinks.rows.mirror_catalog import Catalog
from sinks.rows.reduction import UNCHANGED
from sinks.rows.rows_as_of import RowSnapshot
from sinks.rows.table_definition import TableDefinition
from sinks.rows.transactional_table import RowTable
from sinks.sql.table_base import SqlTableBase
from spouts.codecs import debezium_changes
from tests.simulation.mirror import run_mirror
from tests.simulation.patches import Patch, check_noticed

pytestmark = pytest.mark.rule("C41")

SCHEDULES = 30
SCHEDULES_PER_MUTATION = 3_000


@pytest.mark.slow
def test_the_copy_holds_what_the_source_holds(seed: int) -> None:
    struck: Counter[str] = Counter()
    for number in range(seed, seed + SCHEDULES):
        wrong, world = run_mirror(number)
        assert wrong is None, f"python -m tests.simulation --only mirror --seed {number}: {wrong}"
        struck += world.struck
    assert {"attempt died", "another batch", "roll-back", "late task refused", "one step"} <= set(struck)
    assert {
        "restarted connector",
        "restarted again",
        "truncate",
        "snapshot",
        "schema change",
        "key change",
        "left out",
    } <= set(struck)
    assert struck["compared with the source"] > SCHEDULES / 2


def rows_from_before_stay_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "_put_back", lambda self, connection, txid: 0)


def only_the_catalog_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "changed_last", lambda self, connection: iter(()))


def the_header_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(table_module, "check_granted", lambda header, attempt, location: None)
    patch.setattr(SqlTableBase, "_check_header", lambda self, connection, expected, lock: None)


def rows_before_a_truncate_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    def empty(self: RowTable, connection: Any, txid: int, position: int | None = None) -> None:
        self._run(connection, f"DELETE FROM {self._at(self._table)}")

    patch.setattr(RowTable, "empty", empty)


def a_truncate_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "empty", lambda self, connection, txid, position: None)


def values_that_are_left_out_become_null(patch: pytest.MonkeyPatch) -> None:
    reduced = mirror.reduced

    def without_marks(rows: pa.Table, changes: Any) -> list[pa.Table]:
        return reduced(rows.drop_columns([each for each in rows.column_names if each == UNCHANGED]), changes)

    patch.setattr(mirror, "reduced", without_marks)


def changes_are_reduced_backwards(patch: pytest.MonkeyPatch) -> None:
    reduced = mirror.reduced

    def backwards(rows: pa.Table, changes: Any) -> list[pa.Table]:
        return reduced(rows.take(pa.array(range(rows.num_rows - 1, -1, -1))), changes)

    patch.setattr(mirror, "reduced", backwards)


def changes_of_one_schema_are_read_together(patch: pytest.MonkeyPatch) -> None:
    def sorted_by_schema(parts: Any) -> Any:
        return [run for each in parts for run in in_order([each])]

    in_order = debezium_changes._in_order
    patch.setattr(debezium_changes, "_in_order", sorted_by_schema)


def deletions_are_left_out(patch: pytest.MonkeyPatch) -> None:
    rows_of = mirror._rows

    def kept(run: Any, settings: Any) -> pa.Table:
        return (
            rows_of(run, settings) if not any(each.deleted.true_count for each in run) else rows_of(run, settings)[:0]
        )

    patch.setattr(mirror, "_rows", kept)


def an_added_column_has_no_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(debezium_changes, "_default", lambda column, declared: None)


def rows_from_before_an_earlier_transaction_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTable, "_forget_before", lambda self, connection, txid=None: None)


def a_changed_schema_is_not_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableDefinition, "_alterations", lambda self, connection, held: [])


def a_reader_sees_the_open_transaction(patch: pytest.MonkeyPatch) -> None:
    def rows(self: RowSnapshot, txid: int) -> Iterator[tuple[Any, ...]]:
        return self._streamed(self._table._table, list(self._table.schema.names))

    patch.setattr(RowSnapshot, "rows", rows)


MUTATIONS: list[Patch] = [
    rows_from_before_stay_away,
    only_the_catalog_is_taken_back,
    the_header_is_not_compared,
    rows_before_a_truncate_are_not_kept,
    a_truncate_is_left_out,
    values_that_are_left_out_become_null,
    changes_are_reduced_backwards,
    changes_of_one_schema_are_read_together,
    deletions_are_left_out,
    an_added_column_has_no_default,
    rows_from_before_an_earlier_transaction_are_kept,
    a_changed_schema_is_not_made,
    a_reader_sees_the_open_transaction,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_the_simulator_notices_each_rule_that_is_taken_out(mutation: Patch, seed: int) -> None:
    check_noticed(mutation, run_mirror, range(seed, seed + SCHEDULES_PER_MUTATION))
