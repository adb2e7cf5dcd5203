"""The changes of a batch, reduced to one per key: what a table would hold after all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sinks.rows.table import ACTION, DELETE, DELETED_AT, REPLACE, UPSERT, Changes

#: The column that says which changes delete.
DELETED = "_ratchet_deleted"


def reduced(rows: pa.Table, changes: Changes) -> list[pa.Table]:
    """Rounds of changes, each with a key once, that have the effect of ``rows`` in their order.
    With a sequence, a change below the one before it has no effect."""
    deleted = rows.column(DELETED).combine_chunks().to_numpy(zero_copy_only=False).astype(bool)
    rows = rows.drop_columns([DELETED])
    if rows.num_rows == 0:
        return []
    if changes.sequence is not None and not changes.ignore_nulls:
        places = np.arange(rows.num_rows)
        order = pc.sort_indices(
            pa.table({"sequence": rows.column(changes.sequence), "place": places}),
            sort_keys=[("sequence", "ascending"), ("place", "ascending")],
        )
        rows, deleted = rows.take(order), deleted[order.to_numpy()]
    groups, rank, count = _grouped(rows, changes.key)
    if changes.sequence is not None and changes.ignore_nulls:
        # A change that is left out must not give its values: only the table knows which are.
        return [_acting(rows, deleted, np.flatnonzero(rank == each), changes) for each in range(int(rank.max()) + 1)]
    places = np.arange(rows.num_rows)
    last, last_deleted = np.full(count, -1), np.full(count, -1)
    np.maximum.at(last, groups, places)
    np.maximum.at(last_deleted, groups[deleted], places[deleted])
    action = np.where(last_deleted == last, DELETE, np.where(last_deleted >= 0, REPLACE, UPSERT))
    found = rows.take(pa.array(last))
    if changes.ignore_nulls:
        after = places > last_deleted[groups]
        for number, field in enumerate(rows.schema):
            if field.name not in changes.key:
                valid = after & rows.column(number).is_valid().to_numpy()
                newest = np.full(count, -1)
                np.maximum.at(newest, groups[valid], places[valid])
                found = found.set_column(number, field, rows.column(number).take(pa.array(newest, mask=newest < 0)))
    found = found.append_column(ACTION, pa.array(action, pa.int64()))
    if changes.sequence is not None:
        at = pa.array(last_deleted, mask=action != REPLACE)
        found = found.append_column(DELETED_AT, rows.column(changes.sequence).take(at))
    return [found]


def _acting(rows: pa.Table, deleted: Any, places: Any, changes: Changes) -> pa.Table:
    found = rows.take(pa.array(places))
    found = found.append_column(ACTION, pa.array(np.where(deleted[places], DELETE, UPSERT), pa.int64()))
    kind = rows.schema.field(changes.sequence or "").type
    return found.append_column(DELETED_AT, pa.nulls(len(places), kind))


def _grouped(rows: pa.Table, key: Sequence[str]) -> tuple[Any, Any, int]:
    """For each row the number of its key, and which of the rows of its key it is; and the number of
    keys."""
    names = [f"key{number}" for number in range(len(key))]
    columns = dict(zip(names, (rows.column(each) for each in key), strict=True))
    table = pa.table({**columns, "place": np.arange(rows.num_rows)})
    lists = (
        table.group_by(names, use_threads=False).aggregate([("place", "list")]).column("place_list").combine_chunks()
    )
    places, parents = lists.flatten().to_numpy(), pc.list_parent_indices(lists).to_numpy()
    groups, rank = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
    begins = lists.offsets.to_numpy()[:-1] - lists.offsets.to_numpy()[0]
    groups[places], rank[places] = parents, np.arange(len(places)) - begins[parents]
    return groups, rank, len(lists)
