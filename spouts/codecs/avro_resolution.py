"""Schema resolution: how to read what was written with one schema as values of another.

Everything that the two schemas decide is decided once, when the codec is made: which fields are
skipped, which are filled with defaults, how numbers are promoted and logical types converted. Types
that do not resolve are refused then, except in a union of the writer: there a value is bad only if
it is of that branch.

Records, enums and fixed types resolve if their names without namespaces are equal, or if the
reader's aliases name the writer's type.

Source: Apache Avro 1.12, specification, schema resolution.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from framework.errors import TopologyError
from spouts.codecs import avro_binary as binary
from spouts.codecs.avro_binary import Read
from spouts.codecs.avro_logical import NoConversionError, conversion, value_of
from spouts.codecs.avro_schema import DEPTH_MAX, AvroField, AvroType

_READERS: dict[str, Read] = {
    "null": binary.read_null,
    "boolean": binary.read_boolean,
    "int": binary.read_int,
    "long": binary.read_long,
    "float": binary.read_float,
    "double": binary.read_double,
    "string": binary.read_string,
    "bytes": binary.read_bytes,
}
#: Doubles hold each integer up to here: only larger ones are rounded twice on the way to a float.
_EXACT_IN_DOUBLE = 2**53


def resolved(writer: AvroType, reader: AvroType) -> Read:
    """A reader of values of ``writer`` that returns values of ``reader``. Raises ``TopologyError``
    if the schemas do not resolve."""
    try:
        return _Resolution().read(writer, reader, str(writer))
    except NoConversionError as error:
        raise TopologyError(f"Avro, {error}") from None


def default_of(field: AvroField, record: AvroType) -> Any:
    """The value that a field has if the writer does not know it. Raises ``TopologyError`` if its
    default is not of its type."""
    try:
        return _value(field.type, field.default, 0)
    except (ValueError, NoConversionError, OverflowError) as error:
        raise TopologyError(f"Avro, {record.name}.{field.name}: the default is not valid: {error}") from None


def read_fields(reader: AvroType, writer: AvroType) -> Iterator[tuple[AvroField, AvroField | None]]:
    """Each field of the reader, and the field of ``writer`` that it reads: that of its name, or
    else of an alias that is no other field of the reader."""
    known = {each.name: each for each in writer.fields}
    own = {each.name for each in reader.fields}
    for each in reader.fields:
        names = (each.name, *sorted(each.aliases - own))
        yield each, next((known[name] for name in names if name in known), None)


def _raise(error: NoConversionError) -> Read:
    raise error


class _Resolution:
    """Resolves pairs of types, each once."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[AvroType, AvroType], Read | NoConversionError] = {}
        self._skipped: dict[AvroType, Read | None] = {}
        self._empty: dict[AvroType, bool] = {}
        self._defaults: dict[AvroField, Any] = {}

    def read(self, writer: AvroType, reader: AvroType, where: str) -> Read:
        pair = (writer, reader)
        if pair not in self._pairs:
            try:
                self._pairs[pair] = self._resolve(writer, reader, where)
            except NoConversionError as error:
                self._pairs[pair] = error
        found = self._pairs[pair]
        return _raise(found) if isinstance(found, NoConversionError) else found

    def _resolve(self, writer: AvroType, reader: AvroType, where: str) -> Read:
        if writer.kind == "union":
            return self._of_union(writer, reader, where)
        if reader.kind == "union":
            return self._as_branch(writer, reader, where)
        if writer.kind == reader.kind and writer.name and not _same_name(writer, reader):
            raise NoConversionError(
                f"{where}: written as {writer.name}, which is not read as {reader.name}: give the reader's type this name, "
                "or an alias"
            )
        if writer.kind == reader.kind == "record":
            return self._record(writer, reader, where)
        if writer.kind == reader.kind == "enum":
            return _enum(writer, reader, where)
        if writer.kind == reader.kind and writer.items is not None and reader.items is not None:
            return self._items(writer, self.read(writer.items, reader.items, f"{where}[]"))
        try:
            convert = conversion(writer, reader)
        except NoConversionError as error:
            raise NoConversionError(f"{where}: {error}") from None
        if writer.kind == reader.kind == "fixed" and writer.size == reader.size:
            read = binary.fixed_reader(writer.size)
        elif writer.kind in _READERS and writer.kind == reader.kind:
            read = _READERS[writer.kind]
        else:
            read = _promoted(writer, reader, where)
        return read if convert is None else binary.converting_reader(read, convert)

    def _of_union(self, writer: AvroType, reader: AvroType, where: str) -> Read:
        branches: list[Read] = []
        refused: list[NoConversionError] = []
        values = 0
        for each in writer.branches:
            try:
                branches.append(self.read(each, reader, where))
                values += each.kind != "null"
            except NoConversionError as error:
                refused.append(error)
                branches.append(binary.refusing_reader(str(error)))
        if refused and not values and any(each.kind != "null" for each in writer.branches):
            raise next((each for each in reversed(refused)), refused[0])
        return binary.choice_reader(f"the union {where}", branches)

    def _as_branch(self, writer: AvroType, reader: AvroType, where: str) -> Read:
        error = NoConversionError(f"{where}: written as {writer}, which is not read as an empty union")
        for each in reader.branches:
            try:
                return self.read(writer, each, where)
            except NoConversionError as refused:
                error = refused if each.kind != "null" or writer.kind == "null" else error
        raise error

    def _record(self, writer: AvroType, reader: AvroType, where: str) -> Read:
        reads: dict[str, AvroField] = {}  # by the writer's field: the reader's
        defaults: dict[str, Any] = {}
        for each, written in read_fields(reader, writer):
            if written is not None and written.name not in reads:
                reads[written.name] = each
            elif each.has_default:
                if each not in self._defaults:
                    self._defaults[each] = default_of(each, reader)
                defaults[each.name] = self._defaults[each]
            else:
                raise NoConversionError(f"{where}: field {each.name!r} is not written, and has no default")
        fields: list[tuple[str | None, Read]] = []
        for each in writer.fields:
            wanted = reads.get(each.name)
            if wanted is not None:
                fields.append((wanted.name, self.read(each.type, wanted.type, f"{where}.{each.name}")))
            elif (skip := self._skip(each.type, 0)) is not None:
                fields.append((None, skip))
        return binary.record_reader(fields, defaults)

    def _items(self, writer: AvroType, read: Read) -> Read:
        if writer.kind == "map":
            return binary.converting_reader(binary.items_reader(binary.pair_reader(read)), _last_of_each_key)
        return binary.items_reader(read, empty=writer.items is not None and self._is_empty(writer.items, 0))

    def _skip(self, writer: AvroType, depth: int) -> Read | None:
        """A reader of a value that is not kept; None if it takes no bytes: records of such records
        can take any time. It does not look into texts."""
        if depth > DEPTH_MAX:
            raise NoConversionError(f"{writer}: it nests more than {DEPTH_MAX} types")
        if writer in self._skipped:
            return self._skipped[writer]
        if writer.kind == "record":
            self._skipped[writer] = self._skipped_again(writer)
        found = None if self._is_empty(writer, 0) else self._skip_new(writer, depth)
        self._skipped[writer] = found
        return found

    def _skipped_again(self, writer: AvroType) -> Read:
        """Reads a type inside itself."""

        def read_again(data: bytes, at: int, bounds: binary.Bounds) -> tuple[Any, int]:
            read = self._skipped[writer] or binary.read_null
            return read(data, at, bounds)

        return read_again

    def _skip_new(self, writer: AvroType, depth: int) -> Read:
        if writer.kind == "record":
            reads = [self._skip(each.type, depth + 1) for each in writer.fields]
            return binary.record_reader([(None, each) for each in reads if each is not None], {})
        if writer.kind == "union":
            branches = [self._skip(each, depth + 1) or binary.read_null for each in writer.branches]
            return binary.choice_reader(f"a union of {len(branches)} types", branches)
        if writer.kind == "enum":
            return binary.choice_reader(f"enum {writer.name}", [binary.read_null] * len(writer.symbols))
        if writer.items is not None:
            return self._items(writer, self._skip(writer.items, depth + 1) or binary.read_null)
        if writer.kind == "fixed":
            return binary.fixed_reader(writer.size)
        return binary.read_bytes if writer.kind == "string" else _READERS[writer.kind]

    def _is_empty(self, writer: AvroType, depth: int) -> bool:
        """Whether a value takes no bytes."""
        if writer.kind != "record":
            return writer.kind == "null" or (writer.kind == "fixed" and writer.size == 0)
        if depth > DEPTH_MAX:
            raise NoConversionError(f"{writer}: it nests more than {DEPTH_MAX} types")
        if writer not in self._empty:
            self._empty[writer] = False  # inside itself: it never ends, so that no value is read
            self._empty[writer] = all(self._is_empty(each.type, depth + 1) for each in writer.fields)
        return self._empty[writer]


def _last_of_each_key(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return list(dict(pairs).items())


def _same_name(writer: AvroType, reader: AvroType) -> bool:
    return writer.name.rpartition(".")[2] == reader.name.rpartition(".")[2] or writer.name in reader.aliases


def _enum(writer: AvroType, reader: AvroType, where: str) -> Read:
    choices = []
    for symbol in writer.symbols:
        kept = symbol if symbol in reader.symbols else reader.default
        unknown = f"{where}: symbol {symbol!r} is not one of {reader.name}, which has no default"
        choices.append(binary.refusing_reader(unknown) if kept is None else binary.constant_reader(kept))
    return binary.choice_reader(f"enum {writer.name}", choices)


def _promoted(writer: AvroType, reader: AvroType, where: str) -> Read:
    pair = (writer.kind, reader.kind)
    if pair == ("int", "long"):
        return binary.read_int
    if pair in (("int", "float"), ("int", "double"), ("long", "double")):
        return binary.converting_reader(_READERS[writer.kind], float)
    if pair == ("long", "float"):
        return binary.converting_reader(binary.read_long, _float_of_long)
    if pair == ("float", "double"):
        return binary.read_float
    if pair == ("string", "bytes"):
        return binary.read_bytes
    if pair == ("bytes", "string"):
        return binary.read_string
    sizes = f" of {writer.size} and not {reader.size} bytes" if writer.kind == reader.kind == "fixed" else ""
    raise NoConversionError(f"{where}: written as {writer}{sizes}, which is not read as {reader}")


def _float_of_long(value: int) -> float:
    """The nearest float, and of two the even one. Rounded to a double first, a number could become
    a neighbour: so bits that a float never holds become one bit that says that some were set."""
    if -_EXACT_IN_DOUBLE <= value <= _EXACT_IN_DOUBLE:
        return float(value)
    kept = value >> 16 << 16
    return float(kept | (0x8000 if kept != value else 0))


def _value(schema: AvroType, default: Any, depth: int) -> Any:
    """The value of a default. Raises ``ValueError`` if it is not of the type."""
    if depth > DEPTH_MAX:
        raise ValueError(f"it nests more than {DEPTH_MAX} types")
    check = _DEFAULTS.get(schema.kind)
    if check is not None:
        return check(schema, default)
    if schema.kind == "union":
        error: Exception = ValueError("a union of no types")
        for each in schema.branches:
            try:
                return _value(each, default, depth + 1)
            except (ValueError, NoConversionError) as wrong:
                error = wrong
        raise error
    if schema.kind == "array" and schema.items is not None and isinstance(default, list):
        return [_value(schema.items, each, depth + 1) for each in default]
    if schema.kind == "map" and schema.items is not None and isinstance(default, dict):
        return [(_text(schema, key), _value(schema.items, each, depth + 1)) for key, each in default.items()]
    if schema.kind == "record" and isinstance(default, dict):
        return {each.name: _field_value(each, default, depth) for each in schema.fields}
    raise _not_of(schema, default)


def _field_value(field: AvroField, default: dict[str, Any], depth: int) -> Any:
    if field.name not in default and not field.has_default:
        raise ValueError(f"field {field.name!r} is missing")
    return _value(field.type, default.get(field.name, field.default), depth + 1)


def _not_of(schema: AvroType, default: Any) -> ValueError:
    return ValueError(f"{str(default)[:100]!r} is not of type {schema}")


def _null(schema: AvroType, default: Any) -> Any:
    if default is not None:
        raise _not_of(schema, default)
    return None


def _boolean(schema: AvroType, default: Any) -> Any:
    if not isinstance(default, bool):
        raise _not_of(schema, default)
    return default


def _integer(schema: AvroType, default: Any) -> Any:
    end = 2**31 if schema.kind == "int" else 2**63
    if not isinstance(default, int) or isinstance(default, bool) or not -end <= default < end:
        raise _not_of(schema, default)
    return value_of(schema, default)


def _real(schema: AvroType, default: Any) -> Any:
    if not isinstance(default, (int, float)) or isinstance(default, bool):
        raise _not_of(schema, default)
    struct.pack("<f" if schema.kind == "float" else "<d", default)  # raises OverflowError
    return float(default)


def _text(schema: AvroType, default: Any) -> Any:
    if not isinstance(default, str):
        raise _not_of(schema, default)
    default.encode()  # half of a surrogate pair is a ValueError
    return default


def _binary(schema: AvroType, default: Any) -> Any:
    """Each character stands for the byte of its code point, from 0 to 255."""
    if not isinstance(default, str) or any(ord(each) > 0xFF for each in default):
        raise _not_of(schema, default)
    found = default.encode("iso-8859-1")
    if schema.kind == "fixed" and len(found) != schema.size:
        raise _not_of(schema, default)
    return value_of(schema, found)


def _symbol(schema: AvroType, default: Any) -> Any:
    if default not in schema.symbols:
        raise _not_of(schema, default)
    return default


_DEFAULTS: dict[str, Callable[[AvroType, Any], Any]] = {
    "null": _null,
    "boolean": _boolean,
    "int": _integer,
    "long": _integer,
    "float": _real,
    "double": _real,
    "string": _text,
    "bytes": _binary,
    "fixed": _binary,
    "enum": _symbol,
}
