"""Decodes many Avro values in one call, by polars.

An Avro file is a header with the schema, followed by blocks of values. So separate values can be
read as one block of a file in memory. The danger: a damaged value may take bytes of its neighbour.
So the encoded length of each decoded row is computed and compared with the length of its value. If
all are equal, no value has taken bytes of another. Bytes that polars does not check strictly are
checked again. If anything does not fit, the caller decodes the values one by one.

Plain types only: boolean, int, long, float, double, string, bytes, each alone or in a union with
null.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spouts.codecs.avro_schema import Schema

_PLAIN = {"boolean", "int", "long", "float", "double", "string", "bytes"}
#: Promotions for which an Arrow cast gives the same result as Avro's resolution.
_PROMOTED = {("int", "long"), ("int", "double"), ("float", "double")}
#: The second branch (number 1) of a union, as a zig-zag varint.
_SECOND_OF_TWO = 2
#: An int takes this many bytes at most; the last one then has the upper four of its 32 bits.
_INT_BYTES_MAX = 5
_INT_LAST_BYTE_MAX = 0x0F
_FIXED_SIZE = {"boolean": 1, "float": 4, "double": 8}
_SYNC = b"ratchet-in-memory"[:16]
#: A varint of 1, 2, 3 .. bytes holds values below these bounds.
_VARINT_BOUNDS = np.array([1 << (7 * size) for size in range(1, 10)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class _Column:
    """A field as it was written: its plain type, and whether it may be null."""

    name: str
    kind: str
    nullable: bool


class BulkAvro:
    """Decodes values of one schema together. Create it with ``of``."""

    def __init__(self, columns: Sequence[_Column], header: bytes, target: pa.Schema, defaults: dict[str, Any]) -> None:
        self._columns = columns
        self._header = header
        self._target = target
        self._defaults = defaults

    @classmethod
    def of(cls, writer: Schema, reader: Schema | None, target: pa.Schema) -> BulkAvro | None:
        """A decoder for these schemas; None if polars is not installed or the schemas are not
        plain."""
        columns = _columns(writer)
        if find_spec("polars") is None or columns is None:
            return None
        defaults: dict[str, Any] = {}
        if reader is not None:
            wanted = _columns(reader)
            if wanted is None or _last_name(writer) != _last_name(reader):
                return None
            found = _resolution(columns, wanted, reader)
            if found is None:
                return None
            defaults = found
        written = {
            "type": "record",
            "name": "row",
            "fields": [
                {"name": each.name, "type": ["null", each.kind] if each.nullable else each.kind} for each in columns
            ],
        }
        if any(each.nullable and not _null_first(writer, each.name) for each in columns):
            return None
        return cls(columns, _file_header(written), target, defaults)

    def decode(self, values: Sequence[bytes | None]) -> pa.RecordBatch | None:
        """The rows; None if the values must be decoded one by one."""
        import polars  # here, because it is an optional extra and slow to import

        present = [value for value in values if value is not None]
        if not present:
            return None
        body = b"".join(present)
        stream = io.BytesIO(b"".join((self._header, _varint(len(present)), _varint(len(body)), body, _SYNC)))
        try:
            table = polars.read_avro(stream).to_arrow().combine_chunks()
        except BaseException as error:
            # On a damaged value Rust panics, which is not an Exception. fastavro finds the value.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                return None
            raise
        if table.num_rows != len(present) or not self._fits(table, present, body):
            return None
        batch = self._as_target(table, len(present))
        if batch is None or len(present) == len(values):
            return batch
        positions = iter(range(len(present)))
        return batch.take(pa.array([None if value is None else next(positions) for value in values], pa.int64()))

    def _fits(self, table: pa.Table, values: Sequence[bytes], body: bytes) -> bool:
        """Whether the rows are what the values say. Each row must have taken exactly the bytes of
        its value. Each byte that decides between two cases (null or a value, false or true) must be
        one of the two allowed, and no int may have more than 32 bits."""
        lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
        at = np.cumsum(lengths) - lengths
        ends = at + lengths
        deciding: list[tuple[Any, Any, Any]] = []  # positions in the body, least and greatest valid byte
        for each in self._columns:
            column = table.column(each.name)
            array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
            present = array.is_valid().to_numpy(zero_copy_only=False)
            size = np.where(present, _encoded_sizes(array, each.kind), 0)
            if each.nullable:
                branch = np.where(present, _SECOND_OF_TWO, 0)
                deciding.append((at, branch, branch))
                at = at + 1
            elif array.null_count:
                return False
            if each.kind == "boolean":
                deciding.append((at[present], 0, 1))
            at = at + size
            if each.kind == "int":  # polars drops the bits beyond the 32nd: none may be set in a fifth byte
                deciding.append((at[present & (size == _INT_BYTES_MAX)] - 1, 0, _INT_LAST_BYTE_MAX))
        if not np.array_equal(at, ends):
            return False
        raw = np.frombuffer(body, dtype=np.uint8)
        return all(
            bool(np.all((raw[positions] >= least) & (raw[positions] <= most))) for positions, least, most in deciding
        )

    def _as_target(self, table: pa.Table, rows: int) -> pa.RecordBatch | None:
        arrays = []
        for each in self._target:
            if each.name in self._defaults:
                arrays.append(pa.array([self._defaults[each.name]] * rows, each.type))
                continue
            column = table.column(each.name)
            array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
            try:
                arrays.append(array.cast(each.type))
            except pa.ArrowException:
                return None
        return pa.RecordBatch.from_arrays(arrays, names=self._target.names)


def _columns(schema: Schema) -> list[_Column] | None:
    """The fields of a record with plain types only; None for any other schema."""
    if not isinstance(schema, dict) or schema.get("type") != "record":
        return None
    found = []
    for field in schema["fields"]:
        declared, nullable = field["type"], False
        if isinstance(declared, list):
            others = [each for each in declared if each != "null"]
            if len(declared) != 2 or len(others) != 1:
                return None
            declared, nullable = others[0], True
        if isinstance(declared, dict):
            if declared.get("logicalType") == "decimal":
                return None
            declared = declared["type"]
        if not isinstance(declared, str) or declared not in _PLAIN or field.get("aliases"):
            return None
        found.append(_Column(field["name"], declared, nullable))
    return found or None


def _resolution(columns: list[_Column], wanted: list[_Column], reader: Any) -> dict[str, Any] | None:
    """The defaults of reader fields that the writer lacks; None if the resolution needs more than
    defaults and promotions."""
    written = {each.name: each for each in columns}
    defaults: dict[str, Any] = {}
    declared = {field["name"]: field for field in reader["fields"]}
    for each in wanted:
        if each.name in written:
            was = written[each.name]
            same = was.kind == each.kind or (was.kind, each.kind) in _PROMOTED
            if not same or (was.nullable and not each.nullable):
                return None
        elif "default" not in declared[each.name] or each.kind == "bytes":
            return None
        else:
            defaults[each.name] = declared[each.name]["default"]
    return defaults


def _null_first(schema: Any, name: str) -> bool:
    field = next(each for each in schema["fields"] if each["name"] == name)
    return bool(field["type"][0] == "null")


def _last_name(schema: Any) -> str:
    return str(schema["name"]).rpartition(".")[2]


def _file_header(schema: dict[str, Any]) -> bytes:
    """The magic bytes, the schema, and the sync marker that ends each block. Source: Avro 1.12,
    object container files."""
    text = json.dumps(schema).encode()
    metadata = {b"avro.schema": text, b"avro.codec": b"null"}
    entries = (_varint(len(each)) + each for entry in metadata.items() for each in entry)
    return b"".join((b"Obj\x01", _varint(len(metadata)), *entries, _varint(0), _SYNC))


def _varint(value: int) -> bytes:
    """A count as Avro's zig-zag varint."""
    left, out = value << 1, bytearray()
    while left > 0x7F:
        out.append((left & 0x7F) | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def _encoded_sizes(column: pa.Array, kind: str) -> Any:
    """The size of each value in Avro's binary encoding, in bytes. Meaningless for nulls."""
    if kind in _FIXED_SIZE:
        return np.full(len(column), _FIXED_SIZE[kind], dtype=np.int64)
    if kind in ("string", "bytes"):
        lengths = pc.binary_length(column.cast(pa.large_binary())).cast(pa.int64()).fill_null(0).to_numpy()
        return lengths + _varint_sizes(lengths)
    return _varint_sizes(column.cast(pa.int64()).fill_null(0).to_numpy())


def _varint_sizes(values: Any) -> Any:
    zigzag = ((values << 1) ^ (values >> 63)).astype(np.uint64)
    return np.searchsorted(_VARINT_BOUNDS, zigzag, side="right").astype(np.int64) + 1
