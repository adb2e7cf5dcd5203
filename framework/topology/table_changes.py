"""Changes of tables of another database, as a source gives them and a sink applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

#: In the metadata of a column of ``TableChanges``: what the rows hold in it that are older than it,
#: as JSON.
DEFAULT = b"default"
#: A table has up to this many columns. MariaDB takes 1,017, and PostgreSQL 1,600; the rows from
#: before a transaction have three more.
COLUMNS_MAX = 1_000


class TableChanges(NamedTuple):
    """Changes of one table with one set of columns, in their order.

    ``table``: the database, the schema and the name, as far as the source has them; the name is the
    last. ``key``: the columns of its primary key. ``rows``: a row for each change, with all
    columns; None: the table is emptied. ``deleted``: for each row, whether the change deletes.
    ``unchanged``: for each row, the names of columns whose values did not change and are not in the
    row; None: there are none. ``server``: distinguishes databases of the same name; empty if there
    is only one. ``positions``: for each row, the position of the change in the source, an integer
    that rises with the changes of a key, or null if unknown; for an emptied table a single
    position; None: no position is known."""

    table: tuple[str, ...]
    key: tuple[str, ...]
    rows: pa.Table | None
    deleted: pa.Array | None = None
    unchanged: pa.Array | None = None
    server: str = ""
    positions: pa.Array | None = None


class ChangeReader(Protocol):
    """Reads the change records of any tables. Can be pickled."""

    def read(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Sequence[TableChanges]:
        """The changes, those of each table in the order of the records. Raises ``BadRecordError``
        for the first record that is none."""
