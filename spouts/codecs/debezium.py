"""Change records of Debezium as rows of the table that changed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError
from framework.topology import Fields
from spouts.codecs.bad_records import BadRecord
from spouts.codecs.codec import PerValueCodec, Truths, Values, all_good, joined
from spouts.codecs.debezium_columns import NAMED_FLOAT, ColumnReader, Described, SourceSettings, described, in_json
from spouts.codecs.debezium_metadata import METADATA, SOURCE, TRANSACTION, columns_of, names_of
from spouts.codecs.debezium_schema import (
    BEGINNING,
    NOT_OF_A_CHANGE,
    as_connect_writes,
    columns_of_schema,
    prefix_of,
)
from spouts.codecs.json_reader import JsonReader
from spouts.codecs.json_reasons import shortened
from spouts.codecs.schema_cache import cached_by_schema

Numbers = np.ndarray[Any, np.dtype[np.int64]]

#: Values whose form stands for that of the others.
_SAMPLED = 8
#: Operations whose record has no row: truncate, and a message of the source's own.
_WITHOUT_ROW = ("t", "m")


class DebeziumCodec(PerValueCodec):
    """Change records as JSON, with or without schemas in the records.

    ``fields``: the columns of the table that are wanted, with their types: typed ``Fields`` or an
    Arrow schema. A created, updated or read row has the values after the change, a deleted one those
    before, of which PostgreSQL gives only the key unless the table has ``REPLICA IDENTITY FULL``. A
    change of the key comes as a delete and a create.

    ``metadata``: further fields of each row, by the name of what they hold, or as a mapping from the
    field to that name: ``op`` (c, u, d, r, t, m), ``lsn``, ``position`` (an integer that grows with
    the changes of a key: the LSN, or the number of the binary log and the place in it), ``ts_ms``,
    ``source_ts_ms``, ``snapshot``, ``server`` (the connector's ``topic.prefix``), ``database``, ``schema``, ``table``, ``tx_id``,
    ``transaction_id``, ``total_order``, ``data_collection_order``, ``file``, ``pos``, ``row``,
    ``gtid``, and ``unavailable``: the names of the columns that the connector was not given (TOAST),
    which are null in the row. Without that field, a record with such a column is bad.

    ``decimals``, ``times``, ``binaries``, ``unavailable``: the connector's settings
    ``decimal.handling.mode``, ``time.precision.mode``, ``binary.handling.mode`` and
    ``unavailable.value.placeholder``. Records with schemas say the first two themselves. Without
    schemas a moment or a time of day that is a number is in the unit of the declared type.

    A truncate ("t") and a message ("m") have a row of nulls with their ``op``. A record with a null
    value (a tombstone) is left out unless ``tombstones`` is True, because the delete before it says
    the same; heartbeats and records about transactions and schemas are always left out.

    Errors, beside those of ``JsonCodec``: a value that is no change record, a created or updated row
    without its values, a deleted one without its key, and a value that does not fit the declared
    type.

    >>> codec = DebeziumCodec(Fields(id=int, name=str), metadata=["op", "lsn"])
    >>> value = b'{"before": null, "after": {"id": 1, "name": "a"}, "source": {"lsn": 7}, "op": "c"}'
    >>> codec.decode([value]).to_pylist()
    [{'id': 1, 'name': 'a', 'op': 'c', 'lsn': 7}]

    Source: Debezium's documentation of its connectors for PostgreSQL, MySQL and MariaDB.
    """  # noqa: W505 - doctest lines are not wrapped

    def __init__(
        self,
        fields: Fields | pa.Schema,
        *,
        metadata: Sequence[str] | Mapping[str, str] = ("op", "lsn", "ts_ms"),
        decimals: str = "precise",
        times: str = "adaptive",
        binaries: str = "bytes",
        unavailable: str = "__debezium_unavailable_value",
        tombstones: bool = False,
    ) -> None:
        schema = fields.schema() if isinstance(fields, Fields) else fields
        if schema is None or not len(schema):
            raise TopologyError(
                "DebeziumCodec needs a type for every field, as in DebeziumCodec(Fields(id=int, name=str))"
            )
        self._settings = SourceSettings(decimals, times, binaries, unavailable)
        self._columns = pa.schema([(each.name, each.type) for each in schema])
        self._names = dict.fromkeys(self._columns.names)  # in their order
        self._metadata = names_of(metadata, self._columns.names)
        self._floats = [each.name for each in self._columns if _is_floating(each.type)]
        self._keeps_unavailable = "unavailable" in self._metadata.values()
        self._tombstones = tombstones
        self.fields = Fields.of(
            {each.name: each.type for each in self._columns}
            | {field: METADATA[name] for field, name in self._metadata.items()}
        )
        self._rows = pa.schema([(name, self.fields.type_of(name)) for name in self.fields])

    def left_out(self, values: Values | pa.BinaryArray) -> Truths | None:
        array = _as_array(values)
        found: Truths = np.zeros(len(array), np.bool_)
        if not self._tombstones and array.null_count:
            found = array.is_null().to_numpy(zero_copy_only=False).copy()
        without = pc.invert(pc.fill_null(pc.match_substring(array, '"op":'), True)).to_numpy(zero_copy_only=False)
        for place in np.flatnonzero(without):
            found[place] = _is_about_others(array[int(place)].as_py())
        return found if found.any() else None

    def decode_good(self, values: Values) -> tuple[pa.RecordBatch, list[BadRecord]]:
        return self.decode_good_array(_as_array(values))

    def decode_good_array(self, values: pa.BinaryArray) -> tuple[pa.RecordBatch, list[BadRecord]]:
        batches: list[pa.RecordBatch] = []
        places: list[Numbers] = []
        parts, bad = self._parts(as_connect_writes(values))
        for part in parts:
            batch, its_places, its_bad = self._read(part)
            batches.append(batch)
            places.append(its_places)
            bad += its_bad
        if not batches:
            return _nulls(self._rows, 0), bad
        whole, order = joined(batches), np.concatenate(places)
        if np.any(np.diff(order) < 0):
            whole = whole.take(pa.array(np.argsort(order)))
        return whole, sorted(bad, key=lambda each: each.index)

    def decode_array(self, values: pa.BinaryArray) -> pa.RecordBatch:
        return all_good(*self.decode_good_array(values))

    # --- inside -----------------------------------------------------------------------------------

    def _parts(self, values: pa.BinaryArray) -> tuple[list[_Part], list[BadRecord]]:
        """The values, grouped by the columns of their schemas, and the values whose schema is not
        that of a change record."""
        bad: list[BadRecord] = []
        columns: dict[str, dict[str, Described]] = {}
        groups: dict[str, list[tuple[pa.BinaryArray, Numbers]]] = defaultdict(list)
        for prefix, places in _by_prefix(values):
            its_columns = columns_of_schema(prefix) if prefix else ()
            if its_columns is None:
                bad += [BadRecord(place, NOT_OF_A_CHANGE) for place in places.tolist()]
                continue
            wanted = {each["field"]: each for each in its_columns if each["field"] in self._names}
            form = json.dumps(wanted)
            columns[form] = wanted
            its = values if len(places) == len(values) else values.take(pa.array(places))
            groups[form].append((pc.binary_slice(its, len(prefix), -1) if prefix else its, places))
        parts = [
            _Part(pa.concat_arrays([each for each, _ in its]), np.concatenate([each for _, each in its]), columns[form])
            for form, its in groups.items()
        ]
        return parts, bad

    def _read(self, part: _Part) -> tuple[pa.RecordBatch, Numbers, list[BadRecord]]:
        """The rows of a part, the index of the value of each, and the bad values. Values that are
        not written as most are read again, each as it is."""
        valid = part.values.drop_null() if part.values.null_count else part.values
        form = self._form(part.columns, valid[:_SAMPLED].to_pylist())
        batch, rows, bad = self._read_as(form, part.values)
        found = [(batch, part.places[rows])]
        reasons: list[BadRecord] = []
        again: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for each in bad:
            value = _floats_as_text(part.values[each.index].as_py(), self._floats)
            again[self._form(part.columns, [value])].append((each.index, value))
        for its_form, its in again.items():
            its_places = [place for place, _ in its]
            batch, rows, bad = self._read_as(its_form, pa.array([value for _, value in its], part.values.type))
            found.append((batch, part.places[np.array(its_places)[rows]]))
            reasons += [BadRecord(int(part.places[its_places[each.index]]), each.reason) for each in bad]
        whole = joined([each for each, _ in found])
        return whole, np.concatenate([each for _, each in found]), reasons

    def _form(self, columns: dict[str, Described], samples: Sequence[bytes]) -> str:
        """How the columns are written, as JSON: a mapping from a column to its description."""
        rows = [row for each in samples for row in _rows_of(each)]
        found = {}
        for each in self._columns:
            value = next((row[each.name] for row in rows if row.get(each.name) not in (None, [])), None)
            its = columns.get(each.name)
            if its is None:
                its = described(each.type, value, self._settings)
            elif its["type"] in ("float", "double") and isinstance(value, str):
                its = NAMED_FLOAT
            elif its["type"] == "array" and its["items"]["type"] in ("float", "double") and _has_text(value):
                its = {"type": "array", "items": NAMED_FLOAT}
            found[each.name] = its
        return json.dumps(found)

    def _read_as(self, form: str, values: pa.BinaryArray) -> tuple[pa.RecordBatch, Numbers, list[BadRecord]]:
        try:
            reader = _reader(form, self._columns, self._settings)
        except ValueError as error:
            return _nulls(self._rows, 0), np.arange(0), [BadRecord(at, str(error)) for at in range(len(values))]
        read = reader.envelopes.read(values, only_first=False)
        batch, places, bad = read.batch, read.places, list(read.bad)
        reasons: dict[int, str] = {}
        absent = values.take(pa.array(places)).is_null().to_numpy(zero_copy_only=False)
        operations = batch.column("op").to_pylist()
        present: dict[str, Truths] = {
            side: batch.column(side).is_valid().to_numpy(zero_copy_only=False) for side in ("before", "after")
        }
        deleted = np.array([each == "d" for each in operations], np.bool_)
        for row, operation in enumerate(operations):
            if absent[row] or operation in _WITHOUT_ROW:
                continue
            if operation is None:
                reasons[row] = "no change record: it has no 'op'"
            elif operation not in ("c", "u", "r", "d"):
                reasons[row] = f"op {shortened(repr(operation))} is no operation of Debezium"
            elif not present["before" if operation == "d" else "after"][row]:
                reasons[row] = (
                    "a deleted row without its key: give the table a primary key, or REPLICA IDENTITY FULL"
                    if operation == "d"
                    else f"op {operation!r} without the values after it"
                )
        columns, missing = self._converted(reader, batch, deleted, reasons)
        made = [*columns, *columns_of(batch, self._metadata.values(), missing)]
        whole = pa.RecordBatch.from_arrays(
            [
                column if column.type == each.type else column.cast(each.type)
                for column, each in zip(made, self._rows, strict=True)
            ],
            schema=self._rows,
        )
        if not reasons:
            return whole, places, bad
        bad += [BadRecord(int(places[row]), reason) for row, reason in reasons.items()]
        kept = np.delete(np.arange(len(places)), list(reasons))
        return whole.take(pa.array(kept)), places[kept], sorted(bad, key=lambda each: each.index)

    def _converted(
        self, reader: _Reader, batch: pa.RecordBatch, deleted: Truths, reasons: dict[int, str]
    ) -> tuple[list[pa.Array], list[list[str]]]:
        """The columns of the table, and for each row the names of those that the connector was not
        given. Adds a reason for each row with a value that does not fit."""
        after, before = batch.column("after").flatten(), batch.column("before").flatten()
        if deleted.any():
            order = pa.array(np.where(deleted, np.arange(len(deleted)) + len(deleted), np.arange(len(deleted))))
            after = [pa.concat_arrays(sides).take(order) for sides in zip(after, before, strict=True)]
        columns = []
        missing: list[list[str]] = [[] for _ in range(batch.num_rows)]
        for name, column, raw, found in zip(
            self._names, reader.columns, after, _read_columns(reader, after), strict=True
        ):
            made, bad, its_missing = found
            columns.append(made)
            for row in np.flatnonzero(bad):
                shown = shortened(repr(raw[int(row)].as_py()))
                reasons.setdefault(int(row), f"{name}: {shown} is no {column.declared}")
            for row in np.flatnonzero(its_missing):
                missing[row].append(name)
                if not self._keeps_unavailable:
                    reasons.setdefault(
                        int(row),
                        f"{name}: its value did not change, and was not sent; give the table REPLICA IDENTITY FULL, or the "
                        "codec the metadata field 'unavailable'",
                    )
        return columns, missing


class _Part(NamedTuple):
    """Values, their indices, and the columns of their schema; no columns if the records have no
    schema."""

    values: pa.BinaryArray
    places: Numbers
    columns: dict[str, Described]


class _Reader(NamedTuple):
    """Reads envelopes, and makes the columns of their rows. Columns that are read alike have the
    same ``ColumnReader``."""

    envelopes: JsonReader
    columns: list[ColumnReader]


#: The most rows of a batch whose columns are read together. Reading a column takes longer than
#: reading some values.
_FEW_ROWS = 64


def _read_columns(reader: _Reader, raw: Sequence[pa.Array]) -> list[tuple[pa.Array, Truths, Truths]]:
    """As ``ColumnReader.read``, for each column."""
    rows = len(raw[0]) if raw else 0
    if rows > _FEW_ROWS:
        return [column.read(each) for column, each in zip(reader.columns, raw, strict=True)]
    alike: dict[ColumnReader, list[int]] = defaultdict(list)
    for number, column in enumerate(reader.columns):
        alike[column].append(number)
    found: dict[int, tuple[pa.Array, Truths, Truths]] = {}
    for column, numbers in alike.items():
        made, bad, missing = column.read(pa.concat_arrays([raw[number] for number in numbers]))
        for place, number in enumerate(numbers):
            its = slice(place * rows, (place + 1) * rows)
            found[number] = made[its], bad[its], missing[its]
    return [found[number] for number in range(len(raw))]


@cached_by_schema
def _reader(form: str, columns: pa.Schema, settings: SourceSettings) -> _Reader:
    described_columns: dict[str, Described] = json.loads(form)
    readers: list[ColumnReader] = []
    known: dict[tuple[str, pa.DataType], ColumnReader] = {}
    kinds: list[tuple[str, pa.DataType]] = []
    for each in columns:
        its = described_columns[each.name]
        alike = repr({name: value for name, value in its.items() if name != "field"}), each.type
        try:
            if alike not in known:
                known[alike] = ColumnReader(its, each.type, settings)
            kinds.append((each.name, in_json(its)))
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(f"{each.name}: {error}") from error
        readers.append(known[alike])
    row = pa.struct(kinds)
    schema = pa.schema(
        [
            ("before", row),
            ("after", row),
            ("source", pa.struct(list(SOURCE.items()))),
            ("op", pa.string()),
            ("ts_ms", pa.int64()),
            ("transaction", pa.struct(list(TRANSACTION.items()))),
        ]
    )
    return _Reader(JsonReader(schema, schema, non_finite=True), readers)


def _by_prefix(values: pa.BinaryArray) -> Iterable[tuple[bytes, Numbers]]:
    """The values, grouped by the bytes before their payloads: these bytes, and the indices, in the
    order of first occurrence. Values without a schema, and nulls, are one group."""
    first = next((each for each in values if each.is_valid), None)
    prefix = prefix_of(first.as_py()) if first is not None else b""
    if prefix:
        found = pc.fill_null(pc.and_(pc.starts_with(values, prefix), pc.ends_with(values, b"}")), False)
    else:
        found = pc.invert(pc.fill_null(pc.starts_with(values, BEGINNING), False))
    same: Truths = found.to_numpy(zero_copy_only=False)
    groups = {prefix: np.flatnonzero(same).tolist()} if same.any() else {}
    for place in np.flatnonzero(~same).tolist():
        groups.setdefault(prefix_of(values[place].as_py() or b""), []).append(place)
    return [(each, np.sort(places)) for each, places in groups.items()]


def _rows_of(value: bytes | None) -> list[dict[str, Any]]:
    """The rows in a value, as JSON has them; none if it is no change record."""
    try:
        read = json.loads(value or b"")
    except (ValueError, RecursionError):
        return []
    sides = [read.get("after"), read.get("before")] if isinstance(read, dict) else []
    return [each for each in sides if isinstance(each, dict)]


def _is_floating(declared: pa.DataType) -> bool:
    return bool(pa.types.is_floating(declared.value_type if pa.types.is_list(declared) else declared))


def _has_text(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, str) for each in value)


def _floats_as_text(value: bytes, names: Sequence[str]) -> bytes:
    """A value that has NaN or Infinity, which stand as text in JSON, with all numbers of these
    columns as text, so that each column has one form."""
    if b'"NaN"' not in value and b'Infinity"' not in value:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    sides = [read.get("after"), read.get("before")] if isinstance(read, dict) else []
    for row in [each for each in sides if isinstance(each, dict)]:
        for name in names:
            held = row.get(name)
            row[name] = [_number_as_text(each) for each in held] if isinstance(held, list) else _number_as_text(held)
    try:
        return json.dumps(read).encode()
    except RecursionError:
        return value


def _number_as_text(value: Any) -> Any:
    return repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _is_about_others(value: bytes) -> bool:
    """Whether this is a heartbeat, or about a transaction or a change of the schema."""
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return False
    if isinstance(read, dict) and read.keys() == {"schema", "payload"}:
        read = read["payload"]
    if not isinstance(read, dict):
        return False
    names = read.keys()
    return names == {"ts_ms"} or {"status", "id"} <= names or {"ddl", "tableChanges"} <= names


def _as_array(values: Values | pa.BinaryArray) -> pa.BinaryArray:
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = pa.array(values, pa.binary())
    return values.cast(pa.large_binary()).combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _nulls(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(rows, each.type) for each in schema], schema=schema)
