"""What a table of rows held after a transaction, read at one moment.

Invariants:

1. Appended rows carry the txid that wrote them, so a table can be read as of any transaction.
   Without a stamp, it can be read only as of the last transaction, while none is open.
2. Rows that are changed by key can be read as of the last opened transaction, once it is done, and
   as of the previous one, because the former rows are in ``<table>_before``. A single row with a
   stamp is known from the transaction of its stamp on, because it is unchanged since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from framework.bounded_pages import PAGE_KEYS, pages_of
from framework.errors import MovedOnError
from framework.topology import Header
from sinks.rows.table_definition import EXISTED, TXID
from sinks.rows.transactional_table import RowTable

#: Keys of several columns per SELECT: a condition of more alternatives is too deep for SQLite.
KEYS_PER_SELECT = 300

Key = tuple[Any, ...]
Values = tuple[Any, ...]


class _Found(NamedTuple):
    """A row in one of the two tables. ``values``: those beside the key; None: there was no row.
    ``stamp``: the txid that wrote it; None: nobody knows, or it is the user's."""

    values: Values | None
    stamp: int | None


class RowSnapshot:
    """The rows of ``table``, which reads at one moment."""

    def __init__(self, table: RowTable, connection: Any, header: Header) -> None:
        self.connection, self.header = connection, header
        self._opened = header.open.txid if header.open is not None else 0
        #: The table, as it is read at this moment.
        self.table = table
        self._columns = {each.name: each for each in table._held_columns(connection, table._table)}
        self._stamp = table._stamp

    def rows(self, txid: int) -> Iterator[Values]:
        """The declared columns of all rows after a transaction, in any order. Raises
        ``MovedOnError`` where the table does not tell."""
        table, names = self.table, list(self.table.schema.names)
        if table._changes is None:
            if self._stamp is not None:
                where = f" WHERE {table._q(self._stamp)} IS NULL OR {table._q(self._stamp)} <= {txid:d}"
            elif txid == self.header.done >= self._opened:
                where = ""
            else:
                raise self._moved(txid)
            yield from self._streamed(table._table, names, where)
            return
        if txid > self.header.done or txid not in (self._opened, self._opened - 1):
            raise self._moved(txid)
        if txid == self._opened:
            yield from self._streamed(table._table, names)
            return
        before, own = table._at(f"{table._table}_before"), table._at(table._table)
        same = f"{before}.{TXID} = {self._opened:d} AND {table._same(before, own)}"
        yield from self._streamed(table._table, names, f" WHERE NOT EXISTS (SELECT 1 FROM {before} WHERE {same})")
        yield from self._streamed(f"{table._table}_before", names, f" WHERE {EXISTED} = 1")

    def written(self, txid: int) -> Iterator[Values]:
        """As ``rows``, of a table that is appended to, without the rows that Ratchet has not
        written, as far as a stamp tells them."""
        if self._stamp is None:
            return self.rows(txid)
        table = self.table
        return self._streamed(table._table, list(table.schema.names), f" WHERE {table._q(self._stamp)} <= {txid:d}")

    def has_unstamped(self) -> bool:
        """Whether there are rows that Ratchet has not written, as far as a stamp tells them."""
        if self._stamp is None:
            return False
        query = f"SELECT 1 FROM {self.table._at(self.table._table)} WHERE {self.table._q(self._stamp)} IS NULL LIMIT 1"
        return self.table._run(self.connection, query).fetchone() is not None

    def stamped(self, keys: Sequence[Key]) -> set[Key]:
        """Those of these keys that ``stamped_keys`` gives."""
        table, found = self.table, set[Key]()
        parts = ", ".join(self._expressions(table._table, table._by_key().key))
        of_ours = f"{table._q(self._stamp)} IS NOT NULL" if self._stamp is not None else "TRUE"
        for some in self._selects(keys):
            where, given = self._having(some)
            query = f"SELECT {parts} FROM {table._at(table._table)} WHERE {of_ours} AND ({where})"
            found.update(map(self.key, table._run(self.connection, query, given).fetchall()))
        return found

    def rows_of(self, txid: int) -> Iterator[Values]:
        """The rows that a transaction has appended. The table has a stamp."""
        table = self.table
        where = f" WHERE {table._q(self._stamp or '')} = {txid:d}"
        return self._streamed(table._table, list(table.schema.names), where)

    def stamped_keys(self, after: Key | None) -> tuple[list[Key], Key | None]:
        """A page of keys of the rows that Ratchet has written, in the order of the keys, and the
        last of them as the database returns it; ``after``: such a last one."""
        table = self.table
        conditions: list[str] = []
        given: list[Any] = []
        if self._stamp is not None:
            conditions.append(f"{table._q(self._stamp)} IS NOT NULL")
        if after is not None:
            condition, given = self._above(after)
            conditions.append(condition)
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        own = table._by_key().key
        key, parts = table._list(own), ", ".join(self._expressions(table._table, own))
        order = ", ".join(str(len(own) + place) for place in range(1, len(own) + 1))
        query = f"SELECT {parts}, {key} FROM {table._at(table._table)}{where} ORDER BY {order} LIMIT {PAGE_KEYS}"
        found = table._run(self.connection, query, given).fetchall()
        return [self.key(row[: len(own)]) for row in found], tuple(found[-1][len(own) :]) if found else None

    def _above(self, key: Key) -> tuple[str, list[Any]]:
        """A condition for the keys above one, by which an index finds them."""
        own = self.table._by_key().key
        names, marks = [self.table._q(each) for each in own], [self._mark(each) for each in own]
        if len(names) == 1:
            return f"{names[0]} > {marks[0]}", [*key]
        alternatives: list[str] = []
        given = [key[0]]
        for place, name in enumerate(names):
            equal = [f"{each} = {mark}" for each, mark in zip(names[:place], marks, strict=False)]
            alternatives.append(f"({' AND '.join([*equal, f'{name} > {marks[place]}'])})")
            given += key[: place + 1]
        return f"{names[0]} >= {marks[0]} AND ({' OR '.join(alternatives)})", given

    def values(self, keys: Sequence[Key], txid: int) -> dict[Key, Values | None]:
        """The values beside the key that these keys had after a transaction; None: no row. Without
        the keys of which the table does not tell any more."""
        found: dict[Key, Values | None] = {}
        if txid > self.header.done:
            return found
        for some in self._selects(keys):
            now = self._looked_up(self.table._table, some)
            before = self._looked_up(f"{self.table._table}_before", some) if txid < self._opened else {}
            for key in some:
                known, values = self._as_of(txid, now.get(key), before.get(key))
                if known:
                    found[key] = values
        return found

    def _as_of(self, txid: int, now: _Found | None, before: _Found | None) -> tuple[bool, Values | None]:
        """Whether it is known, and what it is. ``before``: None unless the transaction that was
        opened last is a later one, and has changed the row."""
        if before is not None:
            return txid == self._opened - 1 or (before.stamp is not None and before.stamp <= txid), before.values
        if txid >= self._opened - 1:
            return True, now.values if now is not None else None
        if now is None or self._stamp is None:
            return False, None
        return now.stamp is None or now.stamp <= txid, now.values

    def deletions(self, keys: Sequence[Key], txid: int) -> list[tuple[Key, Any]]:
        """The greatest sequence of a deletion of each of these keys before a transaction."""
        table, found = self.table, dict[Key, Any]()
        changes = table._by_key()
        sequence = changes.sequence or ""
        form = table.held_form(sequence)
        names = ", ".join(self._expressions(f"{table._table}_deleted", [*changes.key, sequence]))
        for some in self._selects(keys):
            condition, given = self._having(some)
            query = (
                f"SELECT {names} FROM {table._at(f'{table._table}_deleted')} WHERE {TXID} < {txid:d} AND ({condition})"
            )
            for *parts, value in table._run(self.connection, query, given).fetchall():
                key, deleted_at = self.key(parts), form(value)
                found[key] = max(deleted_at, found.get(key, deleted_at))
        return list(found.items())

    def changed_keys(self) -> list[Key]:
        """The keys of the rows that the transaction that was opened last has changed."""
        table = self.table
        before = f"{table._table}_before"
        query = f"SELECT {', '.join(self._expressions(before, table._by_key().key))} FROM {table._at(before)}"
        return [self.key(row) for row in table._run(self.connection, query).fetchall()]

    def key(self, row: Sequence[Any]) -> Key:
        """A key that the database has returned."""
        return tuple([form(value) for form, value in zip(self._key_forms, row, strict=True)])

    # --- inside -----------------------------------------------------------------------------------

    @cached_property
    def _key_forms(self) -> list[Callable[[Any], Any]]:
        return [self.table.held_form(name) for name in self.table._by_key().key]

    def _selects(self, keys: Sequence[Key]) -> Iterable[Sequence[Key]]:
        """The keys of each SELECT."""
        return pages_of(keys, PAGE_KEYS if len(self.table._by_key().key) == 1 else KEYS_PER_SELECT)

    def _having(self, keys: Sequence[Key], of_txid: str = "TRUE") -> tuple[str, list[Any]]:
        """A condition for these keys of a transaction, and its parameters."""
        columns = [self._columns[each] for each in self.table._by_key().key]
        given = [self.table.key_parameter(each, part) for key in keys for each, part in zip(columns, key, strict=True)]
        return self.table.among(columns, len(keys), of_txid), given

    def _looked_up(self, name: str, keys: Sequence[Key]) -> Mapping[Key, _Found]:
        table = self.table
        own = table._by_key().key
        before = name != table._table
        others = [each for each in table.schema.names if each not in own]
        last = [*([EXISTED] if before else []), *([table._q(self._stamp)] if self._stamp is not None else [])]
        selected = [*self._expressions(name, [*own, *others]), *last]
        where, given = self._having(keys, f"{TXID} = {self._opened:d}" if before else "TRUE")
        rows = table._run(
            self.connection, f"SELECT {', '.join(selected)} FROM {table._at(name)} WHERE {where}", given
        ).fetchall()
        found: dict[Key, _Found] = {}
        forms = [table.held_form(each) for each in others]
        for row in rows:
            values = [form(value) for form, value in zip(forms, row[len(own) :], strict=False)]
            there = not before or bool(row[len(own) + len(others)])
            stamp = row[-1] if self._stamp is not None else None
            found[self.key(row[: len(own)])] = _Found(tuple(values) if there else None, stamp)
        return found

    def _expressions(self, name: str, columns: Iterable[str]) -> list[str]:
        """What to select for declared columns; null for one that the table lacks."""
        held = self._columns
        if name != self.table._table:
            held = {each.name: each for each in self.table._held_columns(self.connection, name)}
        return [self.table._selected(held[each]) if each in held else "NULL" for each in columns]

    def _mark(self, name: str) -> str:
        """The mark of a parameter that is compared with a column."""
        return self.table._marked(self._columns[name])

    def _streamed(self, name: str, columns: Sequence[str], where: str = "") -> Iterator[Values]:
        table = self.table
        query = f"SELECT {', '.join(self._expressions(name, columns))} FROM {table._at(name)}{where}"
        forms = [table.held_form(each) for each in columns]
        for row in table.streamed(self.connection, query):
            yield tuple([form(value) for form, value in zip(forms, row, strict=True)])

    def _moved(self, txid: int) -> MovedOnError:
        return MovedOnError(f"{self.table.location}: it does not tell any more what it held after transaction {txid}")
