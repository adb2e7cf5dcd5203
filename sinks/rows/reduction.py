"""The changes of a batch, reduced to one per key: what a table would hold after all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.arrow_spill import RowBuffer
from sinks.key_hash_parts import KeyParts
from sinks.rows.table_definition import (
    ACTION,
    DELETED_AT,
    DUE,
    KEPT,
    NEEDED,
    NEVER,
    NOT_NEEDED,
    POSITION,
    ROW_NEEDED,
    WHOLE,
    Changes,
)
from sinks.rows.transactional_table import DELETE, REPLACE, UPSERT

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Truths = np.ndarray[Any, np.dtype[np.bool_]]

#: The column that says which changes delete.
DELETED = "_ratchet_deleted"
#: The column with the names of the columns that a change leaves out, because they are as they were.
UNCHANGED = "_ratchet_unchanged"
#: The unknown position of a deletion, or of another change.
_UNKNOWN, _ABOVE_ALL = -1, 2**63 - 1
_SMALL_ROWS = 200
#: The types whose values are the same values, and equal ones, in Arrow and in Python.
_AS_IN_PYTHON = (
    *(pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_binary),
    *(pa.types.is_large_binary, pa.types.is_boolean, pa.types.is_decimal),
)


def rounds_of(rows: RowBuffer, changes: Changes) -> Iterable[pa.Table]:
    """The rounds of ``reduced``, for a table. If rows wait in a file, they are divided by their
    keys, and the rounds of each part are computed when they are read (ADR 124)."""
    if rows.is_large:
        return _RoundsByParts(rows, changes)
    return reduced(pa.Table.from_batches(rows), changes) if len(rows) else []


class ChangesApart(NamedTuple):
    """Changes, some of which may be left out (``DUE``), by what their keys have."""

    kept: list[pa.Table]
    due: list[pa.Table]
    both: pa.Table
    changes: Changes

    def reduced(self, changes: pa.Table) -> list[pa.Table]:
        return reduced(changes, self.changes)


def apart(rows: RowBuffer, changes: Changes) -> Iterator[ChangesApart]:
    """The changes of the keys that have changes which may be left out, apart from the others."""
    for part in KeyParts(rows, changes.key) if rows.is_large else [rows]:
        table = pa.Table.from_batches(part)
        groups, _, count = _grouped(table, changes.key)
        is_due = table.column(DUE).combine_chunks().to_numpy(zero_copy_only=False).astype(bool)
        has_due, has_kept = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        has_due[groups[is_due]], has_kept[groups[~is_due]] = True, True
        kept, due = (
            reduced(table.filter(pa.array(each[groups])), changes)
            for each in (has_kept & ~has_due, has_due & ~has_kept)
        )
        yield ChangesApart(kept, due, table.filter(pa.array((has_due & has_kept)[groups])), changes)


class _RoundsByParts:
    """The rounds of one part of the rows after the other."""

    def __init__(self, rows: RowBuffer, changes: Changes) -> None:
        self._parts, self._changes = KeyParts(rows, changes.key), changes

    def __iter__(self) -> Iterator[pa.Table]:
        for part in self._parts:
            yield from reduced(pa.Table.from_batches(part), self._changes)


def reduced(rows: pa.Table, changes: Changes) -> list[pa.Table]:
    """Rounds of changes, each with a key once, that have the effect of ``rows`` in their order.
    With a sequence, a change below the one before it has no effect.

    Without a sequence, changes before a deletion of their key have no effect. They may leave out
    values of a missing row, as in changes that a restarted connector repeats. A change that leaves
    out values after a deletion with a higher ``POSITION`` has no effect, either."""
    deleted = rows.column(DELETED).combine_chunks().to_numpy(zero_copy_only=False).astype(bool)
    unchanged = _unchanged(rows, deleted, changes)
    positions = _positions(rows, deleted)
    if positions is not None and unchanged and deleted.any():
        repeated = _repeated(_grouped(rows, changes.key)[0], deleted, _any(unchanged), positions)
        if repeated.any():
            return reduced(rows.filter(pa.array(~repeated)), changes)
    rows = rows.drop_columns([each for each in (DELETED, UNCHANGED, POSITION, DUE) if each in rows.column_names])
    if rows.num_rows == 0:
        return []
    if changes.sequence is None and positions is None and not unchanged and _is_small_without_doubles(rows, changes):
        return [rows.append_column(ACTION, pa.array(np.where(deleted, DELETE, UPSERT), pa.int64()))]
    groups, rank, count = _grouped(rows, changes.key)
    alone = np.full(rows.num_rows, changes.ignore_nulls)
    for each in unchanged.values():
        alone |= np.isin(groups, groups[each])
    if changes.sequence is not None and alone.any():
        # A change that is left out must not give its values: only the table knows which are.
        seen = np.flatnonzero(alone)[np.lexsort((rank[alone], groups[alone]))]
        seen = _seen(rows, changes, deleted=deleted, unchanged=unchanged, groups=groups, places=seen)
        rounds = _one_per_key(groups, seen)
        found = [_acting(rows, deleted, unchanged, each, changes) for each in rounds]
        others = pa.array(np.flatnonzero(~alone))
        return [*found, *reduced(rows.take(others).append_column(DELETED, pa.array(deleted[~alone])), changes)]
    if changes.sequence is not None:
        places = np.arange(rows.num_rows)
        order = pc.sort_indices(
            pa.table({"sequence": rows.column(changes.sequence), "place": places}),
            sort_keys=[("sequence", "ascending"), ("place", "ascending")],
        )
        rows, deleted = rows.take(order), deleted[order.to_numpy()]
        groups, rank, count = _grouped(rows, changes.key)
    return [_ByKey(changes, rows, deleted, unchanged, positions, groups=groups, rank=rank, count=count).folded()]


class _ByKey:
    """Changes in their order, of which the last one of each key decides. ``groups``, ``rank`` and
    ``count``: as of ``_grouped``."""

    def __init__(
        self,
        changes: Changes,
        rows: pa.Table,
        deleted: Truths,
        unchanged: dict[int, Truths],
        positions: Numbers | None,
        *,
        groups: Numbers,
        rank: Numbers,
        count: int,
    ) -> None:
        self._changes, self._rows, self._positions = changes, rows, positions
        self._deleted, self._unchanged = deleted, unchanged
        self._groups, self._rank, self._count = groups, rank, count
        self._places = places = np.arange(rows.num_rows)
        self._last = self._newest(np.ones(len(places), np.bool_))
        self._last_deleted = self._newest(deleted)
        #: Which changes come after the last deletion of their key.
        self._after = places > self._last_deleted[groups]

    def folded(self) -> pa.Table:
        """One change per key that has the effect of all."""
        last, last_deleted, positions = self._last, self._last_deleted, self._positions
        action = np.where(last_deleted == last, DELETE, np.where(last_deleted >= 0, REPLACE, UPSERT))
        found, missing = self._with_newest_values(self._rows.take(pa.array(last)))
        found = found.append_column(ACTION, pa.array(action, pa.int64()))
        if self._changes.sequence is not None:
            at = pa.array(last_deleted, mask=action != REPLACE)
            found = found.append_column(DELETED_AT, self._rows.column(self._changes.sequence).take(at))
        if self._unchanged:
            kept = {} if self._changes.ignore_nulls else missing
            marks = {f"{KEPT}{number}": its & (action == UPSERT) for number, its in kept.items()}
            found = _marked(found, {ROW_NEEDED: self._needed(), **marks})
        return _marked(found, {POSITION: self._newest_positions(positions)}) if positions is not None else found

    def _newest(self, chosen: Truths) -> Numbers:
        """By key, the place of the last one of these changes, or -1."""
        found = np.full(self._count, -1)
        np.maximum.at(found, self._groups[chosen], self._places[chosen])
        return found

    def _with_newest_values(self, found: pa.Table) -> tuple[pa.Table, dict[int, Truths]]:
        """The rows with the newest values that the changes of their keys give; and for each column
        that changes leave out, the keys for which none gives a value."""
        missing: dict[int, Truths] = {}
        for number, field in enumerate(self._rows.schema):
            leaves_out = self._changes.ignore_nulls or number in self._unchanged
            if field.name in self._changes.key or not leaves_out:
                continue
            column = self._rows.column(number)
            given = self._after & ~self._unchanged.get(number, np.False_)
            if self._changes.ignore_nulls:
                given &= column.is_valid().to_numpy()
            newest = self._newest(given)
            found = found.set_column(number, field, column.take(pa.array(newest, mask=newest < 0)))
            if number in self._unchanged:
                missing[number] = newest < 0
        return found, missing

    def _leaving(self) -> Truths:
        """Which changes after the last deletion of their key leave out values."""
        return _any(self._unchanged) & self._after

    def _first_whole(self) -> Numbers:
        """By key, the place of its first change after the last deletion that leaves out nothing, or
        the number of all changes."""
        whole = self._after & ~_any(self._unchanged) & ~self._deleted
        found = np.full(self._count, self._rows.num_rows)
        np.minimum.at(found, self._groups[whole], self._places[whole])
        return found

    def _needed(self) -> Numbers:
        """By key, whether the table must have its row, because changes leave out values."""
        groups, leaving = self._groups, self._leaving()
        needed = np.full(self._count, NOT_NEEDED)
        needs = groups[leaving & (self._rank == 0)]
        needed[needs] = np.where(self._first_whole()[needs] < self._rows.num_rows, WHOLE, NEEDED)
        needed[groups[leaving & _after_a_delete(groups, self._rank, self._deleted)]] = NEVER
        return needed

    def _newest_positions(self, positions: Numbers) -> Numbers:
        """By key, the newest position of its deletions, and of the changes that take values from
        the row in the table."""
        groups, chosen = self._groups, self._deleted
        if self._unchanged:
            chosen = chosen | (self._leaving() & (self._places < self._first_whole()[groups]))
        found = np.full(self._count, _UNKNOWN)
        np.maximum.at(found, groups[chosen], positions[chosen])
        return found


def _is_small_without_doubles(rows: pa.Table, changes: Changes) -> bool:
    """Whether a small batch has each key once. Python tells the keys of a small batch apart in less
    time than Arrow needs to begin. False if keys have a type with values that Python does not have,
    such as dates after the year 9999, or does not compare as Arrow does, such as NaN."""
    columns = [rows.column(name) for name in changes.key]
    if rows.num_rows > _SMALL_ROWS or not all(any(is_a(each.type) for is_a in _AS_IN_PYTHON) for each in columns):
        return False
    different = set(zip(*(each.to_pylist() for each in columns), strict=True))
    return len(different) == int(rows.num_rows)


def _unchanged(rows: pa.Table, deleted: Truths, changes: Changes) -> dict[int, Truths]:
    """By the number of a column, which changes leave it out."""
    if UNCHANGED not in rows.column_names:
        return {}
    lists = rows.column(UNCHANGED).combine_chunks()
    names, of = lists.flatten().to_numpy(zero_copy_only=False), pc.list_parent_indices(lists).to_numpy()
    found: dict[int, Truths] = {}
    for number, name in enumerate(rows.column_names):
        its = of[names == name]
        if len(its) and name not in (*changes.key, DELETED, UNCHANGED):
            found[number] = np.zeros(rows.num_rows, np.bool_)
            found[number][its] = True
            found[number] &= ~deleted
    return {number: each for number, each in found.items() if each.any()}


def _positions(rows: pa.Table, deleted: Truths) -> Numbers | None:
    """The position of each change in the source. An unknown position is below all others for a
    deletion, and above all others for another change, so that it never indicates a repetition."""
    if POSITION not in rows.column_names:
        return None
    column = rows.column(POSITION).combine_chunks()
    known = column.is_valid().to_numpy(zero_copy_only=False)
    numbers: Numbers = pc.fill_null(column, _UNKNOWN).to_numpy(zero_copy_only=False)
    return np.where(known, numbers, np.where(deleted, _UNKNOWN, _ABOVE_ALL))


def _repeated(groups: Numbers, deleted: Truths, leaving: Truths, positions: Numbers) -> Truths:
    """Which changes leave out values of a row that a later change has deleted before them."""
    found = np.zeros(len(groups), np.bool_)
    newest: dict[int, int] = {}  # the highest position of the deletions of a key
    gone: set[int] = set()
    for place in np.flatnonzero(np.isin(groups, groups[deleted]) & np.isin(groups, groups[leaving])).tolist():
        group = int(groups[place])
        if deleted[place]:
            newest[group] = max(int(positions[place]), newest.get(group, _UNKNOWN))
            gone.add(group)
        elif leaving[place] and group in gone:
            found[place] = positions[place] < newest[group]
        else:
            gone.discard(group)
    return found


def _any(unchanged: Mapping[int, Truths]) -> Truths:
    """Which changes leave out values."""
    found: Truths = np.logical_or.reduce(list(unchanged.values()))
    return found


def _after_a_delete(groups: Numbers, rank: Numbers, deleted: Truths) -> Truths:
    """Which changes follow a deletion of their key directly."""
    order = np.lexsort((rank, groups))
    found = np.zeros(len(order), np.bool_)
    found[order[1:]] = deleted[order[:-1]] & (groups[order[1:]] == groups[order[:-1]])
    return found


def _seen(
    rows: pa.Table, changes: Changes, *, deleted: Truths, unchanged: dict[int, Truths], groups: Numbers, places: Numbers
) -> Numbers:
    """The changes with a visible effect, whatever the table contains. ``places``: all changes of
    some keys, by key and in their order.

    A change with a lower sequence than an earlier change has no effect. The sequences of the other
    changes rise, so the table ignores the first changes of a key, or none. So a change has no
    visible effect if three conditions hold: the table does not ignore the next change unless it
    ignores this one; both are of the same kind (deletes, leaves out values, or neither); and later
    changes before the next deletion give all values that this change gives. A change before a
    deletion has no visible effect, either, unless the key has changes that leave out values,
    because these may be bad."""
    sequence = pc.rank(rows.column(changes.sequence), "ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    group = groups[places]
    highest = np.maximum.accumulate(group * (rows.num_rows + 1) + sequence[places])
    places = places[sequence[places] + group * (rows.num_rows + 1) == highest]
    group, deletes = groups[places], deleted[places]
    leaves = _any(unchanged)[places] if unchanged else np.zeros(len(places), np.bool_)
    at = np.arange(len(places))
    last_deleted = np.full(int(group.max()) + 1, -1)
    np.maximum.at(last_deleted, group[deletes], at[deletes])
    kept = (at >= last_deleted[group]) | np.isin(group, group[leaves])
    places, group, deletes, leaves = places[kept], group[kept], deletes[kept], leaves[kept]
    at, kind = np.arange(len(places)), np.where(deletes, DELETE, np.where(leaves, REPLACE, UPSERT))
    kept = np.ones(len(places), np.bool_)
    kept[:-1] = (group[1:] != group[:-1]) | (kind[1:] != kind[:-1])
    run = np.cumsum(deletes | np.concatenate([[True], group[1:] != group[:-1]]))
    for number, name in enumerate(rows.column_names):
        if name in changes.key:
            continue
        gives = ~deletes
        if changes.ignore_nulls:
            gives &= rows.column(number).is_valid().to_numpy()[places]
        if number in unchanged:
            gives &= ~unchanged[number][places]
        newest = np.full(int(run.max()) + 1, -1)
        np.maximum.at(newest, run[gives], at[gives])
        kept |= gives & (newest[run] == at)
    return places[kept]


def _one_per_key(groups: Numbers, places: Numbers) -> list[Numbers]:
    """Rounds with at most one change per key each. ``places``: by key and in their order."""
    group, at = groups[places], np.arange(len(places))
    first = np.maximum.accumulate(np.where(np.concatenate([[True], group[1:] != group[:-1]]), at, 0))
    which = at - first
    return np.split(places[np.lexsort((places, which))], np.cumsum(np.bincount(which))[:-1])


def _acting(
    rows: pa.Table, deleted: Truths, unchanged: dict[int, Truths], places: Numbers, changes: Changes
) -> pa.Table:
    found = rows.take(pa.array(places))
    found = found.append_column(ACTION, pa.array(np.where(deleted[places], DELETE, UPSERT), pa.int64()))
    kind = rows.schema.field(changes.sequence or "").type
    found = found.append_column(DELETED_AT, pa.nulls(len(places), kind))
    if not unchanged:
        return found
    leaving = _any(unchanged)[places]
    kept = {} if changes.ignore_nulls else {f"{KEPT}{number}": each[places] for number, each in unchanged.items()}
    return _marked(found, {ROW_NEEDED: np.where(leaving, NEEDED, NOT_NEEDED), **kept})


def _marked(rows: pa.Table, marks: Mapping[str, Any]) -> pa.Table:
    for name, each in marks.items():
        rows = rows.append_column(name, pa.array(each.astype(np.int64)))
    return rows


def _grouped(rows: pa.Table, key: Sequence[str]) -> tuple[Numbers, Numbers, int]:
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
