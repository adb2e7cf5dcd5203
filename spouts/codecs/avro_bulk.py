"""Decodes many Avro values in one call, by polars.

An Avro file is a header with the schema, followed by blocks of values. So separate values can be
read as one block of a file in memory. The danger: a damaged value may take bytes of its neighbour.
So the encoded length of each decoded row is computed and compared with the length of its value. If
all are equal, no value has taken bytes of another. Bytes that polars does not check strictly are
checked again. If anything does not fit, the caller decodes the values one by one.

Plain types only: boolean, int, long, float, double, string, bytes, each alone or in a union of null
and it, and the times among them.
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

from framework.execution.failures import users_errors
from spouts.codecs.avro_arrow_schema import plain_type
from spouts.codecs.avro_resolution import default_of, read_fields
from spouts.codecs.avro_schema import AvroType

_PLAIN = {"boolean", "int", "long", "float", "double", "string", "bytes"}
#: Promotions for which an Arrow cast gives the same result as Avro's resolution.
_PROMOTED = {("int", "long"), ("int", "double"), ("float", "double")}
_SECONDS_PER_DAY = 86_400
#: The second branch (number 1) of a union, as a zig-zag varint.
_SECOND_OF_TWO = 2
#: The most bytes that a number takes, and the greatest last byte then: four bits of an int are left
#: for it, and one bit of a long.
_LAST_BYTES = {"int": (5, 0x0F), "long": (10, 0x01)}
_FIXED_SIZE = {"boolean": 1, "float": 4, "double": 8}
_SYNC = b"ratchet-in-memory"[:16]
#: A varint of 1, 2, 3 .. bytes holds values below these bounds.
_VARINT_BOUNDS = np.array([1 << (7 * size) for size in range(1, 10)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class _Column:
    """A field as it was written. ``type``: without null."""

    name: str
    type: AvroType
    nullable: bool

    @property
    def kind(self) -> str:
        return self.type.kind


class BulkAvro:
    """Decodes values of one schema together. Create it with ``of``.

    ``sources``: for each column of ``target``, the column that was written, or its default."""

    def __init__(
        self, columns: Sequence[_Column], header: bytes, target: pa.Schema, sources: dict[str, _Column | pa.Scalar]
    ) -> None:
        self._columns = columns
        self._header = header
        self._target = target
        self._sources = sources

    @classmethod
    def of(cls, writer: AvroType, reader: AvroType, target: pa.Schema) -> BulkAvro | None:
        """A decoder for these schemas, which must resolve; None if polars is not installed or the
        schemas are not plain."""
        columns = _columns(writer)
        if find_spec("polars") is None or columns is None or reader.kind != "record":
            return None
        sources = _sources(columns, writer, reader, target)
        if sources is None:
            return None
        written = {
            "type": "record",
            "name": "row",
            "fields": [
                {"name": each.name, "type": ["null", each.kind] if each.nullable else each.kind} for each in columns
            ],
        }
        return cls(columns, _file_header(written), target, sources)

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
        except users_errors():  # on a damaged value polars panics: the caller finds the value
            return None
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
        one of the two allowed, and no number may have more bits than its type."""
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
            if each.kind in _LAST_BYTES:  # polars drops the bits that are too many: none of them may be set
                most, last = _LAST_BYTES[each.kind]
                deciding.append((at[present & (size == most)] - 1, 0, last))
        if not np.array_equal(at, ends):
            return False
        raw = np.frombuffer(body, dtype=np.uint8)
        return all(
            bool(np.all((raw[positions] >= least) & (raw[positions] <= most))) for positions, least, most in deciding
        )

    def _as_target(self, table: pa.Table, rows: int) -> pa.RecordBatch | None:
        """The columns of the reader; None if a value does not fit its type."""
        arrays = []
        for each in self._target:
            source = self._sources[each.name]
            if isinstance(source, pa.Scalar):
                arrays.append(pa.repeat(source, rows))
                continue
            column = table.column(source.name)
            array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
            try:
                # A cast between units raises an error if a value is too large, or would be rounded.
                arrays.append(array.cast(plain_type(source.type)).cast(each.type))
            except pa.ArrowException:
                return None
            if pa.types.is_time(each.type) and not _times_of_day(arrays[-1]):
                return None
        return pa.RecordBatch.from_arrays(arrays, names=self._target.names)


def _times_of_day(column: pa.Array) -> bool:
    """Whether all values are from 0:00 to 24:00, exclusive."""
    found = pc.min_max(column.view(pa.int32() if pa.types.is_time32(column.type) else pa.int64()))
    least, most = found["min"].as_py(), found["max"].as_py()
    end = _SECONDS_PER_DAY * (10**3 if pa.types.is_time32(column.type) else 10**6)
    return least is None or (least >= 0 and most < end)


def _columns(schema: AvroType) -> list[_Column] | None:
    """The fields of a record with plain types only; None for any other schema."""
    found = []
    for field in schema.fields:
        kind, nullable = field.type, False
        if kind.kind == "union":
            if [each.kind == "null" for each in kind.branches] != [True, False]:
                return None
            kind, nullable = kind.branches[1], True
        if kind.kind not in _PLAIN or (kind.logical is not None and kind.logical.name == "decimal"):
            return None
        found.append(_Column(field.name, kind, nullable))
    return found or None


def _sources(
    columns: Sequence[_Column], writer: AvroType, reader: AvroType, target: pa.Schema
) -> dict[str, _Column | pa.Scalar] | None:
    """What each column of the reader reads; None if the resolution needs more than defaults and
    casts."""
    by_name = {each.name: each for each in columns}
    sources: dict[str, _Column | pa.Scalar] = {}
    for each, written in read_fields(reader, writer):
        if each.aliases:
            return None
        if written is None:
            sources[each.name] = pa.scalar(default_of(each, reader), target.field(each.name).type)
            continue
        was = by_name[written.name]
        branches = each.type.branches or [each.type]
        becomes = next((branch for branch in branches if branch.kind != "null"), each.type)
        if was.nullable and all(branch.kind != "null" for branch in branches):
            return None
        if was.kind != becomes.kind and (was.kind, becomes.kind) not in _PROMOTED:
            return None
        if (was.type.logical is None) != (becomes.logical is None):
            was = _Column(was.name, AvroType(was.kind, becomes.logical), was.nullable)
        if becomes.logical is not None and becomes.logical.name == "decimal":
            return None
        sources[each.name] = was
    return sources


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
