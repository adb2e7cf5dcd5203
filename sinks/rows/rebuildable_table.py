"""Tables of rows that ``rebuild`` can exchange.

Rows are exchanged inside the table, in one sql_txn: the table itself stays, with its indexes,
rights, views, foreign keys, columns of the user's, and rows of the user's (those without a txid).
::

    <table>__rebuilt    the rows that a rebuild makes: a table like this one, with tables beside it
    <table>__former     the rows from before the last exchange
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from framework.errors import ConfigError, InvariantViolation, StaleWriterError, TopologyError
from framework.topology import FORMER, REBUILT, Header, RebuildableState
from sinks.path_checks import somebody_elses
from sinks.rows.inspectable_table import InspectableTable
from sinks.rows.table_definition import EXISTED, TXID, WRITTEN_TABLE
from sinks.sql.schema import HEADERS_TABLE, header_values


class RebuildableTable(InspectableTable, RebuildableState):
    """A table whose rows can be exchanged for others."""

    #: The table next to which this one is; empty for the table of a topology.
    _model: str = ""

    # --- what a database adds ---------------------------------------------------------------------

    @abstractmethod
    def _like_model(self, connection: Any) -> list[str]:
        """The statements that create this table like its model: columns, defaults, checks and
        unique indexes."""

    @abstractmethod
    def _references(self, connection: Any) -> list[str]:
        """The names of the foreign keys of other tables that refer to this one."""

    @abstractmethod
    def _equal(self, one: str, other: str, columns: Sequence[str]) -> str:
        """The condition that these columns of two tables have the same values, nulls included,
        whatever their types and collations are."""

    def _unlimited(self, connection: Any) -> None:
        """Lift the limits that a server sets to the length of a statement, for this sql_txn."""

    def _removal(self, table: str) -> str:
        """The statement that removes a table, or all its rows, in a sql_txn."""
        return f"DROP TABLE IF EXISTS {self._at(table)}"

    # --- next to another table --------------------------------------------------------------------

    def become_beside(self, place: str) -> None:
        if self._stamp is None:
            raise ConfigError(
                f"{self.location} cannot be rebuilt: it has no stamp, which tells the topology's rows from those of others"
            )
        name = f"{self._table}__{place}"
        try:
            for each in (name, f"{name}_before", f"{name}_deleted"):
                self._check_name(each, ", which a rebuild needs")
        except TopologyError as error:
            raise ConfigError(str(error)) from error
        self._model, self._table = self._table, name

    def _beside(self, place: str) -> Self:
        other = copy.copy(self)
        other.become_beside(place)
        return other

    def _creation(self, connection: Any) -> list[str]:
        if self._model and self._held_columns(connection, self._model):
            return self._like_model(connection)
        return super()._creation(connection)

    def remove(self, topology_id: str) -> bool:
        if not self._model:
            raise InvariantViolation(f"{self.location} is no table beside another one")
        with self._writing() as connection:
            if not self._held_columns(connection, HEADERS_TABLE):
                return False
            there = self._check_ours(connection, topology_id)
            self._discard(connection)
        return there

    def _check_ours(self, connection: Any, topology_id: str) -> bool:
        """Whether the table exists. Raises ``ConfigError`` when it belongs to another topology or
        program."""
        if not self._held_columns(connection, self._table):
            return False
        header = self._header_there(connection)
        if header is None or header.topology_id != topology_id:
            raise somebody_elses(self.location)
        return True

    def _discard(self, connection: Any) -> None:
        """Remove the table, those beside it, and its header."""
        for each in self._own_tables(connection):
            self._run(connection, self._removal(each))
        self._run(connection, self._headers.delete(), (self._table,))
        if self._held_columns(connection, WRITTEN_TABLE):
            self._forget_writers(connection)

    def _own_tables(self, connection: Any) -> list[str]:
        """The table and those beside it, as far as they exist."""
        names = (self._table, f"{self._table}_before", f"{self._table}_deleted")
        return [each for each in names if self._held_columns(connection, each)]

    # --- exchanged --------------------------------------------------------------------------------

    def check_exchange(self, topology_id: str) -> None:
        with self._reading() as connection:
            columns = self._held_columns(connection, self._table)
            if columns:
                self._check_columns(connection, columns)
                self._refuse_exchange(connection)
            for place in (REBUILT, FORMER):
                self._beside(place)._check_ours(connection, topology_id)

    def _refuse_exchange(self, connection: Any) -> None:
        found = [f"trigger {each}" for each in self._triggers(connection)]
        if self._changes is None:  # all rows are deleted, and others inserted
            found += [f"foreign key {each}" for each in self._references(connection)]
        if found:
            raise ConfigError(
                f"{self.location} cannot be exchanged, because of what would follow the change of its rows: "
                f"{', '.join(found)}; drop it, and create it again afterwards"
            )

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        with self._writing() as connection:
            other, former = self._beside(REBUILT), self._beside(FORMER)
            self._unlimited(connection)
            self._check_header(connection, expected, self._own_header)
            if other._select_header(connection, self._own_header) != rebuilt:
                raise StaleWriterError(f"{other.location}: its header is no longer {rebuilt}")
            self._check_columns(connection, self._held_columns(connection, self._table))
            self._refuse_exchange(connection)
            names = self._fit(connection) if self._changes is not None else list(self.schema.names)
            is_open = expected.open is not None and expected.open.txid > expected.done
            if is_open:
                self._take_back(connection, expected.stamp.txid)
            else:
                self._forget(connection)
            former._check_ours(connection, expected.topology_id)
            former._become_copy(connection, self)
            own = [*names, self._stamp or ""]
            if self._changes is None:
                self._replace_all(connection, other, own)
            else:
                if not is_open:  # the last transaction can still be taken back
                    self._take_before(connection, other, own)
                self._replace(connection, other, own)
            other._discard(connection)
            taken = replace(expected, incarnation=rebuilt.incarnation)
            self._run(connection, self._headers.insert(), (former._table, *header_values(taken)))
            self._run(connection, self._headers.update(), (*header_values(new), self._table))

    def _become_copy(self, connection: Any, other: RebuildableTable) -> None:
        """Create this table anew, with all rows of the other one."""
        self._discard(connection)
        self._create_empty(connection)
        columns = [each for each in other._held_columns(connection, other._table) if not each.generated]
        names = self._list(each.name for each in columns)
        self._run(
            connection,
            f"INSERT INTO {self._at(self._table)} ({names}) {self._over(any(each.always for each in columns))}"
            f"SELECT {names} FROM {other._at(other._table)}",
        )

    def _create_empty(self, connection: Any) -> None:
        with self._creating(connection):
            for each in self._creation(connection):
                self._run(connection, each)

    def _replace_all(self, connection: Any, other: RebuildableTable, own: Sequence[str]) -> None:
        """Put the rows of the other table in the place of all that have a txid."""
        table, names = self._at(self._table), self._list(own)
        self._run(connection, f"DELETE FROM {table} WHERE {self._q(self._stamp or '')} IS NOT NULL")
        self._run(connection, f"INSERT INTO {table} ({names}) SELECT {names} FROM {other._at(other._table)}")

    def _replace(self, connection: Any, other: RebuildableTable, own: Sequence[str]) -> None:
        """Change the rows that differ from those of the other table."""
        changes = self._by_key()
        key, table, rebuilt = changes.key, self._at(self._table), other._at(other._table)
        same = self._same(rebuilt, table)
        self._run(
            connection,
            f"DELETE FROM {table} WHERE {self._q(self._stamp or '')} IS NOT NULL "
            f"AND NOT EXISTS (SELECT 1 FROM {rebuilt} WHERE {same})",
        )
        names, values = self._list(own), [each for each in own if each not in key]
        staged = self._stage(connection, names)
        self._run(
            connection,
            f"INSERT INTO {staged} ({names}) SELECT {names} FROM {rebuilt} WHERE NOT EXISTS "
            f"(SELECT 1 FROM {table} WHERE {same} AND {self._equal(rebuilt, table, values)})",
        )
        always = {each.name for each in self._held_columns(connection, self._table) if each.always}
        self._upsert(
            connection,
            {name: self._q(name) for name in own},
            f"{staged} WHERE TRUE",
            {name: f"excluded.{self._q(name)}" for name in values if name not in always},
            overriding=bool(always.intersection(own)),
        )
        if changes.sequence is not None:
            deleted, columns = f"{self._table}_deleted", self._list([*key, changes.sequence])
            self._run(connection, f"DELETE FROM {self._at(deleted)}")
            self._run(
                connection,
                f"INSERT INTO {self._at(deleted)} ({columns}, {TXID}) SELECT {columns}, {TXID} "
                f"FROM {other._at(f'{other._table}_deleted')}",
            )

    def _take_before(self, connection: Any, other: RebuildableTable, own: Sequence[str]) -> None:
        """Take the rows from before the last transaction from the other table. Columns of the
        user's keep the values that they have here."""
        table, before = self._at(self._table), other._at(f"{other._table}_before")
        there = f"{table}.{self._q(self._by_key().key[0])} IS NOT NULL"
        found = {each.name for each in other._held_columns(connection, f"{other._table}_before")}
        columns, selected = self._copied(connection), []
        for name in columns:
            here, made = f"{table}.{self._q(name)}", f"{before}.{self._q(name)}"
            if name in own and name in found:
                selected.append(made)
            else:
                selected.append(f"CASE WHEN {there} THEN {here} ELSE {made} END" if name in found else here)
        self._run(
            connection,
            f"INSERT INTO {self._at(f'{self._table}_before')} ({self._list(columns)}, {TXID}, {EXISTED}) "
            f"SELECT {', '.join(selected)}, {before}.{TXID}, {before}.{EXISTED} FROM {before} "
            f"LEFT JOIN {table} ON {self._same(table, before)}",
        )
