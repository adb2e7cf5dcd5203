"""Change records of Debezium of any tables, with the columns that their schemas describe."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from framework.errors import BadRecordError, TopologyError
from framework.topology.table_changes import COLUMNS_MAX, DEFAULT, TableChanges
from spouts.codecs import codec_error_isolation
from spouts.codecs.debezium import DebeziumCodec
from spouts.codecs.debezium_columns import Described, column_type
from spouts.codecs.debezium_schema import (
    BEGINNING,
    NOT_OF_A_CHANGE,
    PAYLOAD,
    as_connect_writes,
    columns_of_schema,
    prefix_of,
)
from spouts.codecs.schema_cache import cached_by_schema

_HELD = ("op", "server", "database", "schema", "table", "unavailable", "position")
#: The prefix of the names of Ratchet's columns, here and in tables of rows.
_OWN = "_ratchet_"
_METADATA = {f"{_OWN}{name}": name for name in _HELD}
#: The most characters of a default, which each row without the column holds.
_DEFAULT_MAX = 4_096
_OP, _SERVER, _DATABASE, _SCHEMA, _TABLE, _UNAVAILABLE, _POSITION = _METADATA


class _Run(NamedTuple):
    """Neighbouring changes of a table that have one schema. ``at``: the place of the first."""

    at: int
    changes: TableChanges


class DebeziumChanges:
    """Reads change records as JSON with schemas in the values, of any number of tables, for
    ``sinks.Mirror``. Each table has the columns that the schema of its records describes:

    | in the schema | column |
    |---|---|
    | ``Decimal`` | decimal of its scale and precision (38 where the schema has none) |
    | ``VariableScaleDecimal``, ``Bits``, ``ZonedTime``, intervals, other named strings | text |
    | ``Timestamp``, ``MicroTimestamp``, ``NanoTimestamp`` | timestamp, in microseconds |
    | ``ZonedTimestamp`` | timestamp in UTC |
    | ``Date``, ``Time``, ``MicroTime``, ``NanoTime`` | date, time |
    | points and geometries | bytes (WKB) |
    | arrays | list |

    ``unavailable``: the connector's setting ``unavailable.value.placeholder``. Tombstones,
    heartbeats, messages, and records about transactions and schemas are left out.

    Source: Debezium's documentation of its connectors for PostgreSQL, MySQL and MariaDB.
    """

    def __init__(self, *, unavailable: str = "__debezium_unavailable_value") -> None:
        self._unavailable = unavailable

    def read(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Sequence[TableChanges]:
        try:
            return self._changes(keys, values)
        except BaseException as error:
            if not codec_error_isolation.is_about_values(error):
                raise
            raise BadRecordError(f"a change record that cannot be read: {type(error).__name__}: {error}") from error

    def _changes(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Sequence[TableChanges]:
        keys, values = as_connect_writes(keys), as_connect_writes(values)
        left_out = _any_codec().left_out(values)
        wanted = np.flatnonzero(~left_out) if left_out is not None else np.arange(len(values))
        by_schema: dict[tuple[bytes, tuple[str, ...]], list[int]] = defaultdict(list)
        for place in wanted.tolist():
            value, key = values[place].as_py(), keys[place].as_py()
            prefix = prefix_of(value)
            if not prefix:
                raise BadRecordError(
                    "a change record without the schema of its table: set value.converter.schemas.enable=true in the "
                    "connector"
                )
            if not _described(prefix):
                _check_message(value)
                continue
            by_schema[prefix, _key_names(key)].append(place)
        by_table: dict[tuple[str, tuple[str, ...]], list[_Read]] = defaultdict(list)
        for (prefix, key_names), places in by_schema.items():
            for each in self._read(prefix, key_names, np.array(places), values):
                by_table[each.server, each.table].append(each)
        found = [run for its in by_table.values() for run in _in_order(its)]
        return [run.changes for run in sorted(found, key=lambda run: run.at)]

    def _read(
        self, prefix: bytes, key: tuple[str, ...], places: np.ndarray[Any, Any], values: pa.BinaryArray
    ) -> list[_Read]:
        codec, columns = _codec(prefix, self._unavailable)
        rows, bad = codec_error_isolation.decode_good(codec, values.take(pa.array(places)))
        if bad:
            raise BadRecordError(bad[0].reason)
        names = zip(*(rows.column(name).to_pylist() for name in (_DATABASE, _SCHEMA, _TABLE)), strict=True)
        tables: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        operations, servers = rows.column(_OP).to_pylist(), rows.column(_SERVER).to_pylist()
        for row, (name, operation, server) in enumerate(zip(names, operations, servers, strict=True)):
            if operation == "m":
                continue
            if not name[-1]:
                raise BadRecordError("a change record that does not name its table: it has no source.table")
            if not key and operation != "t":
                raise BadRecordError(
                    f"table {'.'.join(each for each in name if each)} has no primary key in its records: give it one, or name "
                    "columns in message.key.columns of the connector"
                )
            tables[server or "", tuple(each for each in name if each)].append(row)
        return [
            _Read(server, table, key, places[its], rows=_taken(rows, its), columns=columns)
            for (server, table), its in tables.items()
        ]


class _Read(NamedTuple):
    server: str
    table: tuple[str, ...]
    key: tuple[str, ...]
    places: np.ndarray[Any, Any]
    rows: pa.RecordBatch
    columns: pa.Schema


def _in_order(parts: Sequence[_Read]) -> list[_Run]:
    """The changes of a table, apart where the schema changes and where the table is emptied."""
    owner = np.concatenate([np.full(len(each.places), number) for number, each in enumerate(parts)])
    place = np.concatenate([each.places for each in parts])
    within = np.concatenate([np.arange(len(each.places)) for each in parts])
    empties = np.concatenate([np.array([op == "t" for op in each.rows.column(_OP).to_pylist()]) for each in parts])
    order = np.argsort(place, kind="stable")
    owner, place, within, empties = owner[order], place[order], within[order], empties[order]
    cuts = np.flatnonzero((owner[1:] != owner[:-1]) | empties[1:] | empties[:-1]) + 1
    found = []
    for its in np.split(np.arange(len(place)), cuts):
        part = parts[owner[its[0]]]
        rows = _taken(part.rows, within[its])
        if empties[its[0]]:
            changes = TableChanges(part.table, part.key, None, server=part.server, positions=rows.column(_POSITION))
            found.append(_Run(int(place[its[0]]), changes))
            continue
        columns = part.columns
        deleted = pa.array([op == "d" for op in rows.column(_OP).to_pylist()], pa.bool_())
        changes = TableChanges(
            part.table,
            part.key,
            pa.Table.from_arrays([rows.column(each) for each in columns.names], schema=columns),
            deleted,
            unchanged=rows.column(_UNAVAILABLE) if any(rows.column(_UNAVAILABLE).to_pylist()) else None,
            server=part.server,
            positions=rows.column(_POSITION),
        )
        found.append(_Run(int(place[its[0]]), changes))
    return found


def _taken(rows: pa.RecordBatch, places: Sequence[int] | np.ndarray[Any, Any]) -> pa.RecordBatch:
    """The rows at these places, which are ascending."""
    return rows if len(places) == rows.num_rows else rows.take(pa.array(places))


@functools.lru_cache(maxsize=1)
def _any_codec() -> DebeziumCodec:
    """One that tells which records are about something else."""
    return DebeziumCodec(pa.schema([("any", pa.string())]), metadata=())


def _described(prefix: bytes) -> Sequence[Described]:
    """The columns that a record's schema describes."""
    found = columns_of_schema(prefix)
    if found is None:
        raise BadRecordError(NOT_OF_A_CHANGE)
    return found


@cached_by_schema
def _codec(prefix: bytes, unavailable: str) -> tuple[DebeziumCodec, pa.Schema]:
    """A codec for the columns of a schema, and these."""
    described = _described(prefix)
    if len(described) > COLUMNS_MAX:
        raise BadRecordError(f"a change record of a table with {len(described):,} columns: the most is {COLUMNS_MAX:,}")
    for name in (each["field"] for each in described):
        if not name or name.casefold().startswith(_OWN):
            problem = "has no name" if not name else "has a name of Ratchet's"
            raise BadRecordError(f"a change record with a schema in which the column {name!r} {problem}")
    try:
        columns = pa.schema([_column(each) for each in described])
        return DebeziumCodec(columns, metadata=_METADATA, unavailable=unavailable), columns
    except (ValueError, TopologyError) as error:
        raise BadRecordError(str(error)) from None


def _column(described: Described) -> pa.Field:
    declared = column_type(described)
    return pa.field(described["field"], declared, metadata=_default(described, declared))


def _default(column: Described, declared: pa.DataType) -> dict[bytes, bytes] | None:
    """The default of a column, where JSON writes the value itself. Raises ``ValueError`` for one
    that is too long."""
    value = column.get("default")
    if column.get("name") is not None or column["type"] == "bytes" or not _holds(declared, value):
        return None
    if isinstance(value, str) and len(value) > _DEFAULT_MAX:
        raise ValueError(f"{column['field']}: a default of {len(value):,} characters: the most is {_DEFAULT_MAX:,}")
    return {DEFAULT: json.dumps(value).encode()}


def _holds(declared: pa.DataType, value: Any) -> bool:
    """Whether a column holds a JSON value unchanged, in a form that is the same in every SQL
    dialect."""
    if not isinstance(value, (int, float, str)) or isinstance(value, bool) != pa.types.is_boolean(declared):
        return False
    if (isinstance(value, str) and set(value) & set("\\%\0")) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return False
    try:
        return bool(pa.scalar(value, declared).as_py() == value)
    except (ValueError, TypeError, OverflowError):
        return False


def _check_message(value: bytes) -> None:
    """Raise ``BadRecordError`` for a record without columns that is no message of the source's."""
    try:
        operation = json.loads(value)["payload"]["op"]
    except (ValueError, KeyError, TypeError, RecursionError):
        operation = None
    if operation != "m":
        raise BadRecordError(
            "a record whose schema has neither 'before' nor 'after': take transforms such as ExtractNewRecordState out of "
            "the connector"
        )


def _key_names(key: bytes | None) -> tuple[str, ...]:
    """The columns of a record's key, with or without a schema; none without a key."""
    if key is None:
        return ()
    end = key.find(PAYLOAD)
    if key.startswith(BEGINNING) and end > 0:
        return _names_in_schema(key[:end])
    try:
        read = json.loads(key)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise BadRecordError("the key of a change record is no JSON object with the columns of the primary key")
    return tuple(read)


@cached_by_schema
def _names_in_schema(beginning: bytes) -> tuple[str, ...]:
    try:
        fields = json.loads(beginning + b"}}")["schema"].get("fields") or ()
        return tuple(str(each["field"]) for each in fields)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise BadRecordError("the key of a change record has a schema that is none") from None
