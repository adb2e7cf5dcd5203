"""The base of the SQL backends: a batch is merged by ``INSERT .. ON CONFLICT DO UPDATE``, in one
sql_txn that first compares the header (C1).

A subclass provides connections, a dialect, and the fastest way to load a batch.
"""

from __future__ import annotations

import copy
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import pyarrow as pa

from framework.bounded_pages import rows_that_fit
from framework.errors import (
    BadRecordError,
    ConfigError,
    CorruptStateError,
    InvariantViolation,
    RatchetError,
    StaleWriterError,
    TopologyError,
)
from framework.topology import FORMER, REBUILT, Fields, Header, Stamp, ValueType
from framework.topology.canonical_form import has_nan, python_values
from framework.value_size import size_of
from sinks.aggregates import Aggregate
from sinks.backend import SWEPT, Key, Row
from sinks.external_row_sorter import PAGE_BYTES
from sinks.path_checks import somebody_elses
from sinks.read_as_of import SnapshotBackend
from sinks.rebuild_exchange import ExchangeBackend
from sinks.refused_rows import UNREADABLE, explained, refused_delta, refused_row, strange_row
from sinks.sql.schema import (
    HEADERS_TABLE,
    STAMP_COLUMNS,
    TableShape,
    header_values,
    identifier,
)
from sinks.sql.table_base import SqlTableBase

#: The longest name of a table.
NAME_MAX = 63
#: Rows per page of a scan.
SCAN_ROWS = 10_000
#: The rows of the first page, which determine the number of the next ones.
_FIRST_ROWS = 16


@dataclass(frozen=True)
class Upsert:
    """The statement that merges a batch of deltas into the rows of a table."""

    aggregates: tuple[tuple[str, Aggregate], ...]
    value_type: ValueType

    def into(self, shape: TableShape, rows: str = "") -> str:
        """As ``TableShape.upsert``."""
        return _statement(shape, self, rows)


@lru_cache(maxsize=256)
def _statement(shape: TableShape, upsert: Upsert, rows: str) -> str:
    return shape.upsert(dict(upsert.aggregates), upsert.value_type, rows)


class SqlBackend(SqlTableBase, SnapshotBackend, ExchangeBackend):
    """A table with stamped rows, and a row of ``_ratchet_headers`` in the same database."""

    #: Whether a column of floats can store NaN.
    _holds_nan: ClassVar[bool] = True
    commits_in_one_step = True

    def __init__(self, table: str, key: Fields | None, value: Fields | None) -> None:
        self._table = identifier(table, "table")
        self._model = ""  # the table next to which this one is
        self._ordered_by = ""  # the column with an index
        self._shape: TableShape | None = None
        # names of fields -> the places and types of the fields whose values are converted
        self._changing: dict[tuple[str, ...], list[tuple[int, pa.DataType]]] = {}
        if key is not None and value is not None:
            self.bind(key, value)

    # --- provided by a database -------------------------------------------------------------------

    @abstractmethod
    def _merge(self, connection: Any, upsert: Upsert, deltas: pa.Table, stamp: tuple[Any, ...]) -> int:
        """Merge the deltas. ``stamp``: the stamp and the writer. Returns how many rows changed."""

    @abstractmethod
    def _found_columns(self, connection: Any) -> list[tuple[str, str]]:
        """(name, type) of the table's columns as the database prints them; empty if there is no
        table."""

    @abstractmethod
    def _select_keys(self, connection: Any, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        """Every column of the rows of these keys (as stored), in any order."""

    @abstractmethod
    def _told_apart(self, connection: Any) -> str:
        """The problem in how an existing table identifies its rows or stores numbers; empty if
        there is none."""

    def _create_table(self, connection: Any) -> None:
        connection.execute(self.shape.ddl())
        if self._ordered_by:
            connection.execute(self.shape.index_ddl(self._ordered_by, f"due_{uuid.uuid4().hex[:12]}"))

    @abstractmethod
    def _in_the_way(self, connection: Any) -> list[str]:
        """Objects that others have attached to the table, and that a rename would leave behind; and
        reasons why this user cannot rename it."""

    def _lock_briefly(self, connection: Any) -> None:
        """Limit the wait for readers until the end of the sql_txn, because others wait behind
        it."""

    @abstractmethod
    def _rename(self, connection: Any, former: str, rebuilt: str) -> None:
        """Rename the table to ``former``, and ``rebuilt`` to the table's name. ``rebuilt`` gets the
        permissions, the indexes and the view of the live rows."""

    @abstractmethod
    def _may_create_view(self, connection: Any, name: str) -> bool:
        """Whether the name is free in the database, and the user may create a view."""

    def _create_view(self, connection: Any) -> None:
        """Create the view of the live rows, if it is missing. It is optional: without the
        permission to create it, or if its name is taken, there is none."""
        name = self.shape.live_view if not self._model else None
        if name is not None and self._may_create_view(connection, name):
            connection.execute(self.shape.live_view_ddl())

    # --- shape ------------------------------------------------------------------------------------

    def bind(self, key: Fields, value: Fields) -> None:
        shape = TableShape(self.dialect, self._table, key, value, self._home)
        if self._shape is not None and self._shape.columns != shape.columns:
            raise TopologyError(
                f"{self.location} was declared with {self._shape.key} -> {self._shape.value}, and its committer writes {key} "
                f"-> {value}: leave key and value out, or make them equal"
            )
        _ = shape.columns  # check the types now, not in a task
        self._changing.clear()
        self._shape = shape

    @property
    def shape(self) -> TableShape:
        if self._shape is None:
            raise TopologyError(
                f"{self.location} has no columns: give key=Fields(...) and value=Fields(...), or use it in a StateCommitter"
            )
        return self._shape

    @property
    def fields(self) -> tuple[Fields, Fields]:
        return self.shape.key, self.shape.value

    # --- header -----------------------------------------------------------------------------------

    def _prepare(self, connection: Any, topology_id: str) -> Header:
        columns = self._found_columns(connection)
        self._probe(connection, exists=bool(columns))
        self._create_headers(connection)
        header = self._select_header(connection, self._own_header)
        self._check_found(header, connection, columns, topology_id)
        if not columns:
            self._create_table(connection)
        self._create_view(connection)
        if header is None:
            header = Header(topology_id, uuid.uuid4().hex)
            connection.execute(self._headers.insert(), (self._table, *header_values(header)))
        return header

    def _check_found(
        self, header: Header | None, connection: Any, columns: list[tuple[str, str]], topology_id: str
    ) -> None:
        """Raise if the table or its header do not match this state. ``columns``: empty if there is
        no table."""
        self._check_owned(header, columns, topology_id)
        if not columns:
            if header is not None:
                raise CorruptStateError(
                    f"{self.location} is gone, but its header says that it holds transactions up to {header.done}: "
                    "restore the table"
                )
            return
        problem = self._told_apart(connection)
        if problem:
            raise ConfigError(
                f"{self.location} {problem}: use another table, or drop it and create it with: {self.shape.ddl()}"
            )
        if header is None and connection.execute(f"SELECT 1 FROM {self.shape.name} LIMIT 1").fetchone():
            raise ConfigError(f"{self.location} has rows and no header in {HEADERS_TABLE}: restore the header")

    def check_held(self, topology_id: str) -> Header | None:
        with self._reading() as connection:
            columns = self._found_columns(connection)
            header = self._select_header(connection, "") if columns else None
        if columns and header is None:
            raise ConfigError(f"{self.location} has no header in {HEADERS_TABLE}: it is no table of Ratchet")
        self._check_owned(header, columns, topology_id)
        return header

    def _check_owned(self, header: Header | None, columns: list[tuple[str, str]], topology_id: str) -> None:
        if header is not None and header.topology_id != topology_id:
            raise ConfigError(
                f"{self.location} belongs to topology {header.topology_id!r}, not {topology_id!r}: a state has one "
                "owner; use another table"
            )
        problem = self.shape.check_columns(columns) if columns else ""
        if problem:
            raise ConfigError(f"{self.location} {problem}")

    # --- rows -------------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[Key]) -> list[Row | None]:
        with self._explaining(partial(self._refused_key, keys)), self._reading() as connection:
            found = self._rows_of(connection, keys)
        return [found.get(key) for key in keys]

    def _rows_of(self, connection: Any, keys: Sequence[Key]) -> dict[Key, Row]:
        if not keys:
            return {}
        stored = [self._stored_key(key) for key in keys]
        return dict(self._rows(self._select_keys(connection, stored)))

    def scan(self) -> Iterator[tuple[Key, Row]]:
        width = len(self.shape.key)
        names = ", ".join(f'"{name}"' for name in self.shape.key)
        marks = ", ".join([self.dialect.mark] * width)
        after: tuple[Any, ...] | None = None
        limit = _FIRST_ROWS
        while True:
            where = f" WHERE ({names}) > ({marks})" if after is not None else ""
            with self._reading() as connection:
                query = f"{self.shape.select()}{where} ORDER BY {names} LIMIT {limit}"
                page = self._fetched(connection, query, after or ())
            yield from self._rows(page)
            if len(page) < limit:
                return
            after = page[-1][:width]
            limit = rows_that_fit(limit, size_of(page), PAGE_BYTES, min(4 * limit, SCAN_ROWS))

    def order_by(self, column: str) -> None:
        self._ordered_by = column

    def due(self, column: str, after: int, upto: int, *, txid: int | None) -> Iterator[tuple[Key, Row]]:
        mark = self.dialect.mark
        ranges = f' WHERE "{column}" > {mark} AND "{column}" <= {mark} AND NOT _deleted'
        queries: list[tuple[str, Sequence[Any]]] = [(self.shape.select() + ranges, (after, upto))]
        if txid is not None:
            queries.append((f"{self.shape.select()} WHERE _txid = {mark}", (txid,)))
        with self._reading() as connection:
            for query, parameters in queries:
                yield from self._rows(self._streamed(connection, query, parameters))

    def _streamed(self, connection: Any, query: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """As ``_fetched``, but few rows are in memory at a time."""
        yield from connection.execute(query, parameters)

    def _fetched(self, connection: Any, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows that a query of the table selects."""
        rows: list[tuple[Any, ...]] = connection.execute(query, parameters).fetchall()
        return rows

    def multi_put(
        self, header: Header, keys: Sequence[Key], expected_stamps: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        born, changed = [], []
        for key, expected, row in zip(keys, expected_stamps, rows, strict=True):
            stored, values = self._stored_key(key), self._columns_of(row)
            if expected is None:
                born.append((*stored, *values))
            else:
                changed.append((*values, *stored, expected.txid, expected.epoch, expected.attempt_id))
        explaining = self._explaining(partial(self._refused_row, keys, rows))
        with explaining, self._writing_grouped() as connection:
            self._open_under(connection, header)
            for put, given in ((self._insert_rows, born), (self._update_rows, changed)):
                if given and put(connection, given) != len(given):
                    self._explain_refused(connection, keys, expected_stamps, rows)

    def _insert_rows(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> int:
        """Insert rows whose keys have no row. ``rows``: every column. Returns how many were
        inserted."""
        return self._for_each(connection, self.shape.insert_row(), rows)

    def _update_rows(self, connection: Any, rows: Sequence[tuple[Any, ...]]) -> int:
        """Update rows that have the expected stamps. ``rows``: the parameters of
        ``TableShape.update_row``. Returns how many were updated."""
        return self._for_each(connection, self.shape.update_row(), rows)

    def _for_each(self, connection: Any, statement: str, rows: Sequence[tuple[Any, ...]]) -> int:
        cursor = connection.cursor()
        cursor.executemany(statement, rows)
        changed: int = cursor.rowcount
        return changed

    def _explain_refused(
        self, connection: Any, keys: Sequence[Key], expected: Sequence[Stamp | None], rows: Sequence[Row]
    ) -> None:
        found = self._rows_of(connection, keys)
        left_out: list[Key] = []
        for key, stamp, row in zip(keys, expected, rows, strict=True):
            held = found.get(key)
            current = held.stamp if held is not None else None
            if held is not None and (current, held.writer) == (row.stamp, row.writer):
                continue  # it was written
            if current != stamp:
                raise StaleWriterError(f"{self.location}, key {key!r}: its stamp is no longer {stamp}")
            left_out.append(key)
        if left_out:  # no other row is the reason
            raise self._left_out(f"key {left_out[0]!r}")
        raise StaleWriterError(f"{self.location}: a row has another stamp than it had when it was read")

    def sweep(self, header: Header) -> int:
        txid, *stamp = header.stamp
        found = (txid, *stamp)
        return self._changed_under(header, self.shape.sweep(), (*stamp, *found), (self.shape.unswept(), found))

    def roll_back(self, header: Header) -> int:
        txid, *stamp = header.stamp
        left = (self.shape.not_rolled_back(), (txid,))
        return self._changed_under(header, self.shape.roll_back(), (txid - 1, *stamp, txid), left)

    def purge(self, header: Header, before_txid: int) -> int:
        return self._changed_under(header, self.shape.purge(), (before_txid,))

    def _changed_under(
        self,
        header: Header,
        statement: str,
        parameters: tuple[Any, ...],
        left: tuple[str, tuple[Any, ...]] | None = None,
    ) -> int:
        """``left``: a query for a row that the statement has left out, and its parameters."""
        with self._writing() as connection:
            self._check_header(connection, header, self._keep_header)
            changed: int = connection.execute(statement, parameters).rowcount
            if left is not None and connection.execute(*left).fetchone() is not None:
                raise self._left_out(f"a row of transaction {header.stamp.txid}")
            return changed

    def _left_out(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.location}, {what}: the database did not store it and gave no reason: a trigger leaves it out; remove the "
            "trigger, then run the topology again"
        )

    def clear(self, topology_id: str) -> Header:
        self.prepare(topology_id)
        with self._writing() as connection:
            found = self._found_header(connection, self._own_header)
            header = Header(topology_id, uuid.uuid4().hex, epoch=found.epoch)
            connection.execute(f"DELETE FROM {self.shape.name}")
            connection.execute(self._headers.update(), (*header_values(header), self._table))
            return header

    # --- next to another state --------------------------------------------------------------------

    def beside(self, place: str) -> SqlBackend:
        name, other = f"{self._table}__{place}", copy.copy(self)
        if len(name) > NAME_MAX:
            raise ConfigError(
                f"{self.location} cannot be rebuilt: the name {name!r} would be too long; give the table one of "
                f"{NAME_MAX - len(name) + len(self._table)} letters"
            )
        other._table, other._model, other._shape = identifier(name, "table"), self._table, None
        other.bind(*self.fields)
        return other

    def check_exchange(self, topology_id: str) -> None:
        with self._reading() as connection:
            self._refuse_exchange(connection)
            for place in (REBUILT, FORMER):
                self.beside(place)._check_ours(connection, topology_id)

    def _refuse_exchange(self, connection: Any) -> None:
        found = self._in_the_way(connection)
        if found:
            raise ConfigError(
                f"{self.location} cannot be exchanged, because of what would stay with the former table: {', '.join(found)}; "
                "drop it, and create it again afterwards"
            )

    def _check_ours(self, connection: Any, topology_id: str) -> bool:
        """Whether the table or its header exist. Raises ``ConfigError`` when they belong to another
        topology or program.
        """
        if not self._found_columns(connection):
            return False
        header = self._select_header(connection, "")
        if header is not None and header.topology_id == topology_id:
            return True
        raise somebody_elses(self.location)

    def exchange(self, expected: Header, new: Header, rebuilt: Header) -> None:
        other, former = self.beside(REBUILT), self.beside(FORMER)
        with self._writing() as connection:
            self._lock_briefly(connection)
            self._check_header(connection, expected, self._own_header)
            if other._select_header(connection, self._own_header) != rebuilt:
                raise StaleWriterError(f"{other.location}: its header is no longer {rebuilt}")
            self._refuse_exchange(connection)
            former._check_ours(connection, expected.topology_id)
            former._drop(connection)
            self._rename(connection, former._table, other._table)
            taken = replace(expected, incarnation=rebuilt.incarnation)
            connection.execute(self._headers.insert(), (former._table, *header_values(taken)))
            connection.execute(self._headers.delete(), (other._table,))
            connection.execute(self._headers.update(), (*header_values(new), self._table))

    def remove(self, topology_id: str) -> bool:
        if not self._model:
            raise InvariantViolation(f"{self.location} is no table beside another one")
        with self._writing() as connection:
            self._lock_briefly(connection)
            self._create_headers(connection)
            there = self._check_ours(connection, topology_id)
            self._drop(connection)
        return there

    def _drop(self, connection: Any) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {self.shape.name}")
        connection.execute(self._headers.delete(), (self._table,))

    def apply(
        self,
        header: Header,
        writer: str,
        value_type: ValueType,
        deltas: pa.Table,
        aggregates: Mapping[str, Aggregate],
        *,
        want_values: bool,
    ) -> pa.Table | None:
        shape = self.shape
        stamp = header.stamp
        self._refuse_nan(deltas)
        if not shape.mergeable(aggregates):
            raise NotImplementedError
        upsert = Upsert(tuple(aggregates.items()), value_type)
        merged = partial(self._merged_alone, upsert, (*stamp, writer))
        explaining = self._explaining(partial(refused_delta, deltas, tuple(shape.key), merged))
        with explaining, self._writing_grouped() as connection:
            self._open_under(connection, header)
            changed = self._merge(connection, upsert, deltas, (*stamp, writer))
            if changed == deltas.num_rows and not want_values:
                return None
            keys: list[Key] = list(zip(*(python_values(deltas.column(name)) for name in shape.key), strict=True))
            rows = self._rows_of(connection, keys)
            if changed != deltas.num_rows:
                self._explain_unchanged(keys, rows, (stamp, writer), value_type)
        if not want_values:
            return None
        nothing = (None,) * len(shape.value)
        values = [rows[key].value or nothing for key in keys]
        columns = {name: deltas.column(name) for name in shape.key}
        for position, name in enumerate(shape.value):
            kind = deltas.schema.field(name).type
            columns[name] = pa.chunked_array([pa.array([value[position] for value in values], kind)])
        return pa.table(columns)

    # --- refused rows -----------------------------------------------------------------------------

    @contextmanager
    def _explaining(self, explained: Callable[[BadRecordError], BadRecordError]) -> Iterator[None]:
        """Name the row and the column that the database refuses."""
        try:
            yield
        except BadRecordError as error:
            try:
                named = explained(error)
            except RatchetError:  # the database does not answer now
                named = error
            raise named from error

    def _merged_alone(self, upsert: Upsert, stamp: tuple[Any, ...], deltas: pa.Table) -> bool:
        return self._accepts(lambda connection: self._merge(connection, upsert, deltas, stamp))

    def _refused_key(self, keys: Sequence[Key], error: BadRecordError) -> BadRecordError:
        def accepts(first: int, end: int) -> bool:
            return self._accepts(lambda connection: self._rows_of(connection, keys[first:end]))

        found = refused_row(len(keys), accepts)
        if found is None:
            return error
        return explained(error, dict(zip(self.shape.key, keys[found], strict=True)), {}, lambda _: False)

    def _refused_row(self, keys: Sequence[Key], rows: Sequence[Row], error: BadRecordError) -> BadRecordError:
        """The error, extended by the key and the column of the refused row, found by inserts."""
        key, value = self.shape.key, self.shape.value
        statement = self.shape.insert_row()

        def accepts(given: Sequence[tuple[Key, Row]]) -> bool:
            parameters = [(*self._stored_key(each), *self._columns_of(row)) for each, row in given]
            return self._accepts(lambda connection: connection.cursor().executemany(statement, parameters))

        given = list(zip(keys, rows, strict=True))
        found = refused_row(len(given), lambda first, end: accepts(given[first:end]))
        if found is None:
            return error
        place, row = given[found]
        values = dict(zip(value, row.value or (), strict=False))

        def alone(name: str) -> bool:
            only = tuple(held if each == name else None for each, held in values.items())
            return accepts([(place, row._replace(value=only if values else None, prev=None))])

        return explained(error, dict(zip(key, place, strict=True)), values, alone)

    # --- inside -----------------------------------------------------------------------------------

    def _open_under(self, connection: Any, header: Header) -> None:
        """Begin a sql_txn that writes rows under ``header``, or is the whole commit. Then the new
        header goes before the rows, because statements may travel together until a row count is
        needed."""
        if self._opens_from is None:
            self._check_header(connection, header, self._keep_header)
            return
        self._check_header(connection, self._opens_from, self._own_header)
        connection.execute(self._headers.update(), (*header_values(header.done_as_open()), self._table))

    def _explain_unchanged(
        self, keys: Sequence[Key], rows: Mapping[Key, Row], written: tuple[Stamp, str], value_type: ValueType
    ) -> None:
        """Some keys were not written. Raise unless the transactional rule skipped all of them."""
        (stamp, writer), skips = written, value_type is ValueType.TRANSACTIONAL
        for key in keys:
            row = rows.get(key)
            if row is None or row.stamp.txid < stamp.txid:
                raise self._left_out(f"key {key!r}")
            if row.stamp == stamp and row.writer not in (writer, SWEPT) and not skips:
                raise InvariantViolation(
                    f"{self.location}, key {key!r}: written in the same attempt by {row.writer} and by {writer} (C12): one key "
                    "has one writer; group the input by the key"
                )
            if row.stamp.txid > stamp.txid or (row.stamp > stamp and not skips):
                raise StaleWriterError(
                    f"{self.location}, key {key!r}: stamp {tuple(row.stamp)}, this writer has {tuple(stamp)}",
                    row.stamp.epoch,
                )
        if not skips:
            raise InvariantViolation(f"{self.location}: rows were not written, and none says why")

    def _rows(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Key, Row]]:
        """Selected rows, by their keys."""
        key_fields, value_fields = self.fields
        typed_key, typed_value = (self._converter(self._loaded, each) for each in self.fields)
        value_at, prev_at = len(key_fields), len(key_fields) + len(value_fields)
        stamp_at = prev_at + len(value_fields)
        for row in rows:
            txid, epoch, attempt, writer, deleted, prev_exists = row[stamp_at:]
            try:
                key = typed_key(row[:value_at])
                value = None if deleted else typed_value(row[value_at:prev_at])
                prev = typed_value(row[prev_at:stamp_at]) if prev_exists else None
            except UNREADABLE as error:
                raise strange_row(self.location, row[:value_at], error) from error
            if txid is None or epoch is None or attempt is None:
                problem = f"the row has no stamp ({', '.join(STAMP_COLUMNS[:3])} must not be null)"
                raise strange_row(self.location, key, problem)
            yield key, Row(value, Stamp(txid, epoch, attempt), prev, writer)

    def _bound(self, values: Sequence[Any], fields: Fields) -> tuple[Any, ...]:
        return self._converter(self._stored, fields)(values)

    def _converter(
        self, convert: Callable[[Any, pa.DataType], Any], fields: Fields
    ) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """A function that converts the values of these fields, if the database needs it."""
        changing = self._changing.get(fields.names)
        if changing is None:
            kinds = map(fields.type_of, fields)
            changing = [(place, kind) for place, kind in enumerate(kinds) if not self._keeps(kind)]
            self._changing[fields.names] = changing
        if not changing:
            return tuple

        def converted(values: Sequence[Any]) -> tuple[Any, ...]:
            made = list(values)
            for place, kind in changing:
                if made[place] is not None:
                    made[place] = convert(made[place], kind)
            return tuple(made)

        return converted

    def _stored_key(self, key: Key) -> tuple[Any, ...]:
        if None in key:
            raise BadRecordError(f"{self.location}, key {key!r}: a null key cannot be stored; filter it out upstream")
        return self._bound(key, self.shape.key)

    def _columns_of(self, row: Row) -> tuple[Any, ...]:
        """The row as the values of the columns after the key."""
        fields = self.shape.value
        nothing = (None,) * len(fields)
        if not self._holds_nan and row.value is not None:
            for name, item in zip(fields, row.value, strict=True):
                if isinstance(item, float) and item != item:
                    raise self._nan(name)
        stamp = row.stamp
        return (
            *(self._bound(row.value, fields) if row.value is not None else nothing),
            *(self._bound(row.prev, fields) if row.prev is not None else nothing),
            *(stamp.txid, stamp.epoch, stamp.attempt_id, row.writer, row.value is None, row.prev is not None),
        )

    def _refuse_nan(self, table: pa.Table) -> None:
        if self._holds_nan:
            return
        for field, column in zip(table.schema, table.columns, strict=True):
            if has_nan(column):
                raise self._nan(field.name)

    def _nan(self, name: str) -> BadRecordError:
        return BadRecordError(
            f"{self.location}: {name!r} is NaN, which {self.dialect.name} stores as NULL; filter it out upstream"
        )
