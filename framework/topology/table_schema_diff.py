"""The columns of a table of a database, beside those that a topology declares (C42)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column, with its type as the database writes it.

    ``declared``: the type that the topology gives the column when it adds it; None: the topology
    does not write the column. ``held``: the type in the database; None: the table lacks the column.
    """

    name: str
    declared: str | None
    held: str | None


@dataclass(frozen=True, slots=True)
class TableSchema:
    """``columns``: those of the table in its order, then those that it lacks. ``statements``: what
    gives the table what it lacks; none when it lacks nothing."""

    columns: tuple[TableColumn, ...]
    statements: tuple[str, ...]


@runtime_checkable
class TableWithSchema(Protocol):
    """A state that is a table with columns of its user's."""

    def table_schema(self) -> TableSchema:
        """Compare the table with the declared columns. Changes nothing. Raises ``ConfigError`` when
        no statement could make the table fit."""

    def apply_schema(self, topology_id: str) -> TableSchema:
        """Run the statements, create what else the topology needs in the database, and return what
        ``table_schema`` returned before. Raises ``ConfigError`` when the table belongs to another
        topology."""
