"""Arrow columns as Avro values: the bytes of every row, made column by column.

A writer takes a column of the type that ``avro_arrow`` gives to an Avro type, and returns the
encoding of each of its values. ``ValueError``: a value is none of the Avro type; the message names
its field.

Source: Apache Avro 1.12, specification, binary encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from framework.errors import TopologyError
from spouts.codecs.avro_arrow_schema import arrow_schema
from spouts.codecs.avro_resolution import default_of
from spouts.codecs.avro_schema import AvroType

Write = Callable[[pa.Array], list[bytes]]
#: A varint of 1, 2, 3 .. bytes holds values below these bounds.
_VARINT_BOUNDS = np.array([1 << (7 * size) for size in range(1, 10)], dtype=np.uint64)
_VARINT_SHIFTS = np.arange(0, 70, 7, dtype=np.uint64)
_VARINT_BYTES = len(_VARINT_SHIFTS)
#: The logical types of a number, as it lies in Arrow.
_STORED = {"int": pa.int32(), "long": pa.int64()}
_DAY_S, _PER_SECOND = 86_400, {"time-millis": 10**3, "time-micros": 10**6}


class RowWriter:
    """Encodes rows of one schema. Raises ``TopologyError`` for a default that is not valid."""

    def __init__(self, schema: AvroType) -> None:
        self._single = schema.kind != "record"
        self._writes: dict[str, Write] = {}
        #: What a field is that the rows do not have: its default, or null.
        self._absent: dict[str, pa.Scalar] = {}
        if self._single:
            self._writes["value"] = _writer(schema, "value")
            return
        target = arrow_schema(schema)
        for each in schema.fields:
            declared = target.field(each.name).type
            self._writes[each.name] = _writer(each.type, each.name)
            if each.has_default:
                self._absent[each.name] = pa.scalar(default_of(each, schema), declared)
            elif _null_of(each.type) is not None or each.type.kind == "null":
                self._absent[each.name] = pa.scalar(None, declared)

    def check(self, names: Sequence[str]) -> None:
        """Raise ``TopologyError`` for a field that rows with these fields do not have, although the
        schema wants it."""
        for name in [] if self._single else self._writes:
            if name not in names and name not in self._absent:
                raise TopologyError(
                    f"the schema has a field {name!r} without a default, and the rows do not have it: add it, or give it a "
                    "default or the type null"
                )

    def write(self, columns: Mapping[str, pa.Array], rows: int) -> list[bytes]:
        """The value of each row. Raises ``ValueError`` with the reason."""
        pieces = []
        for name, write in self._writes.items():
            column = columns.get(name)
            if column is None:
                if name not in self._absent:
                    raise ValueError(f"{name} is missing, and has no default")
                column = pa.repeat(self._absent[name], rows)
            pieces.append(write(column))
        return pieces[0] if len(pieces) == 1 else _joined(pieces)


def _writer(schema: AvroType, where: str) -> Write:
    if schema.kind == "union":
        return _union(schema, where)
    write = _plain(schema, where)
    if schema.kind == "null":
        return write

    def checked(column: pa.Array) -> list[bytes]:
        if column.null_count:
            raise ValueError(f"{where} is null, which the schema does not allow")
        return write(column)

    return checked


def _null_of(schema: AvroType) -> int | None:
    """The number of the branch that is null."""
    return next((number for number, each in enumerate(schema.branches) if each.kind == "null"), None)


def _union(schema: AvroType, where: str) -> Write:
    number, other = next((number, each) for number, each in enumerate(schema.branches) if each.kind != "null")
    write, prefix, null = _writer(other, where), long_bytes(number), _null_of(schema)
    nothing = None if null is None else long_bytes(null)

    def union(column: pa.Array) -> list[bytes]:
        if not column.null_count:
            return [prefix + each for each in write(column)]
        if nothing is None:
            raise ValueError(f"{where} is null, which the schema does not allow")
        pieces = iter(write(column.drop_null()))
        return [prefix + next(pieces) if is_there else nothing for is_there in column.is_valid().to_pylist()]

    return union


def _plain(schema: AvroType, where: str) -> Write:
    """Writes a column without nulls."""
    if schema.kind == "record":
        writes = [_writer(each.type, f"{where}.{each.name}") for each in schema.fields]
        return lambda column: (
            _joined([write(part) for write, part in zip(writes, column.flatten(), strict=True)])
            if writes
            else [b""] * len(column)
        )
    if schema.kind == "array" and schema.items is not None:
        return _array(_writer(schema.items, f"{where}[]"))
    if schema.kind == "map" and schema.items is not None:
        return _map(_writer(schema.items, f"{where}{{}}"), where)
    if schema.kind == "enum":
        return _enum(schema, where)
    if schema.logical is not None and schema.logical.name == "decimal":
        return _decimal(schema, where)
    if schema.kind in _STORED:
        return _integer(schema, where)
    return _PLAIN[schema.kind]


def _array(write: Write) -> Write:
    def array(column: pa.Array) -> list[bytes]:
        return _blocks(write(column.flatten()), pc.list_value_length(column))

    return array


def _map(write: Write, where: str) -> Write:
    def entries(column: pa.Array) -> list[bytes]:
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        sizes = pc.subtract(column.offsets[1:], column.offsets[:-1])
        keys = column.keys.slice(begin, end - begin)
        listed, at = keys.to_pylist(), 0
        for size in sizes.to_pylist():
            if len(set(listed[at : at + size])) < size:
                raise ValueError(f"{where} has a key twice")
            at += size
        return _blocks(_joined([_bytes(keys), write(column.items.slice(begin, end - begin))]), sizes)

    return entries


def _blocks(items: Sequence[bytes], sizes: pa.Array) -> list[bytes]:
    """The items of each value as one block, and the empty block that ends it."""
    found, at = [], 0
    for size, count in zip(sizes.to_pylist(), _varints(sizes.to_numpy(zero_copy_only=False)), strict=True):
        found.append(b"".join((count, *items[at : at + size], b"\x00")) if size else b"\x00")
        at += size
    return found


def _enum(schema: AvroType, where: str) -> Write:
    codes = {symbol: long_bytes(number) for number, symbol in enumerate(schema.symbols)}

    def enum(column: pa.Array) -> list[bytes]:
        try:
            return [codes[each] for each in column.to_pylist()]
        except KeyError as error:
            raise ValueError(f"{where}: {error.args[0]!r:.60} is no symbol of {schema.name}") from None

    return enum


def _decimal(schema: AvroType, where: str) -> Write:
    if schema.logical is None:
        raise TypeError(schema)
    limit = 10**schema.logical.precision

    def decimal(column: pa.Array) -> list[bytes]:
        width = column.type.byte_width
        raw = column.buffers()[1].slice(column.offset * width, len(column) * width).to_pybytes()
        numbers = [
            int.from_bytes(raw[at : at + width], "little", signed=True) for at in range(0, len(column) * width, width)
        ]
        if any(not -limit < each < limit for each in numbers):
            raise ValueError(f"{where}: a decimal of more digits than {schema.logical}")
        if schema.kind == "fixed":
            return [each.to_bytes(schema.size, "big", signed=True) for each in numbers]
        found = [
            each.to_bytes((each if each >= 0 else ~each).bit_length() // 8 + 1, "big", signed=True) for each in numbers
        ]
        return [long_bytes(len(each)) + each for each in found]

    return decimal


def _integer(schema: AvroType, where: str) -> Write:
    per_second = _PER_SECOND.get(schema.logical.name) if schema.logical is not None else None

    def integer(column: pa.Array) -> list[bytes]:
        numbers = column.view(_STORED[schema.kind]).to_numpy(zero_copy_only=False)
        if per_second and len(numbers) and not 0 <= numbers.min() <= numbers.max() < _DAY_S * per_second:
            raise ValueError(f"{where}: not a time of day")
        return _varints(numbers)

    return integer


def _bytes(column: pa.Array) -> list[bytes]:
    sizes = _varints(pc.binary_length(column).to_numpy(zero_copy_only=False))
    return [size + each for size, each in zip(sizes, column.cast(pa.binary()).to_pylist(), strict=True)]


def _floats(kind: str, size: int) -> Write:
    def floats(column: pa.Array) -> list[bytes]:
        data = column.to_numpy(zero_copy_only=False).astype(kind).tobytes()
        return [data[at : at + size] for at in range(0, len(data), size)]

    return floats


_PLAIN: dict[str, Write] = {
    "null": lambda column: [b""] * len(column),
    "boolean": lambda column: [b"\x01" if each else b"\x00" for each in column.to_pylist()],
    "float": _floats("<f4", 4),
    "double": _floats("<f8", 8),
    "string": _bytes,
    "bytes": _bytes,
    "fixed": lambda column: column.to_pylist(),
}


def _joined(pieces: Sequence[Sequence[bytes]]) -> list[bytes]:
    return list(map(b"".join, zip(*pieces, strict=True)))


def long_bytes(number: int) -> bytes:
    """A number as a zig-zag varint."""
    return _varints(np.array([number]))[0]


def _varints(numbers: np.ndarray[Any, Any]) -> list[bytes]:
    """Each number as a zig-zag varint."""
    signed = numbers.astype(np.int64)
    zigzag = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    sizes = np.searchsorted(_VARINT_BOUNDS, zigzag, side="right") + 1
    groups = ((zigzag[:, None] >> _VARINT_SHIFTS) & np.uint64(0x7F)).astype(np.uint8)
    groups[np.arange(_VARINT_BYTES) < sizes[:, None] - 1] |= 0x80
    data = groups.tobytes()
    return [data[at : at + size] for at, size in zip(range(0, len(data), _VARINT_BYTES), sizes.tolist(), strict=True)]
