"""Avro schemas as trees of types.

A reference by name becomes the type itself, so a recursive schema is a cyclic graph. A name without
a dot means the namespace that encloses it, and if that does not define it, no namespace.

Source: Apache Avro 1.12, specification.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, Union

from framework.errors import TopologyError
from framework.local_paths import local_path

Schema = Union[str, list[Any], dict[str, Any]]
#: Types that a schema refers to but does not define: full name -> schema. Each type comes after the
#: types that it refers to.
Named = Mapping[str, Schema]

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "string", "bytes"})
#: Types in types. Whoever may register a schema may nest it as deeply as he likes.
DEPTH_MAX = 64
#: A fixed type is at most this large: Arrow reserves its size for nulls too.
FIXED_BYTES_MAX = 1 << 24
#: The logical types of each type. Others are ignored, as the specification says.
_LOGICAL = {
    "int": {"date", "time-millis"},
    "long": {
        "time-micros",
        *(f"{zone}timestamp-{unit}" for zone in ("", "local-") for unit in ("millis", "micros", "nanos")),
    },
    "bytes": {"decimal"},
    "fixed": {"decimal"},
}


class Logical(NamedTuple):
    """A logical type. ``precision`` and ``scale`` are those of a decimal."""

    name: str
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        return f"decimal({self.precision}, {self.scale})" if self.name == "decimal" else self.name


@dataclass(slots=True, eq=False)
class AvroType:
    """A type. Each kind uses some of the attributes only."""

    kind: str
    logical: Logical | None = None
    _: KW_ONLY
    name: str = ""  # of record, enum, fixed: with its namespace
    aliases: frozenset[str] = frozenset()
    fields: list[AvroField] = field(default_factory=list)  # of record
    symbols: tuple[str, ...] = ()  # of enum
    default: str | None = None  # of enum: the symbol for symbols that the reader does not know
    size: int = 0  # of fixed
    items: AvroType | None = None  # of array, map
    branches: list[AvroType] = field(default_factory=list)  # of union

    def __str__(self) -> str:
        return self.name or (str(self.logical) if self.logical else self.kind)


@dataclass(slots=True, eq=False)
class AvroField:
    """A field of a record. ``default``: as JSON, if ``has_default``."""

    name: str
    type: AvroType
    aliases: frozenset[str]
    has_default: bool
    default: Any


def loaded(schema: Schema | Path) -> Schema:
    """A schema as JSON data. ``schema``: JSON data, its text, or the path of a file. Raises
    ``TopologyError`` if it cannot be read."""
    try:
        if isinstance(schema, Path) or (isinstance(schema, str) and schema.endswith(".avsc")):
            schema = local_path(schema, "Avro schema").read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise TopologyError(f"Avro schema cannot be read: {error}") from error
    return schema_of_text(schema) if isinstance(schema, str) else schema


def schema_of_text(text: str) -> Schema:
    """A schema as JSON data, or the name of a type. Raises ``TopologyError`` if it is neither."""
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return text.strip()
    try:
        document: Schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"Avro schema cannot be read: {error}") from error
    return document


def parsed(schema: Schema, named: Named | None = None) -> AvroType:
    """The type that a schema declares. ``named``: the types that it refers to. Raises
    ``TopologyError`` if it is not valid."""
    parser = _Parser()
    for each in (named or {}).values():
        parser.parse(each, "", 0)
    return parser.parse(schema, "", 0)


class _Parser:
    """Parses schemas that refer to each other, in order."""

    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}

    def parse(self, schema: Any, namespace: str, depth: int) -> AvroType:
        """The type of a schema inside a namespace, ``depth`` types deep."""
        if depth > DEPTH_MAX:
            raise TopologyError(f"Avro schema is not valid: it nests more than {DEPTH_MAX} types")
        if isinstance(schema, str):
            return AvroType(schema) if schema in PRIMITIVES else self._referred(schema, namespace)
        if isinstance(schema, list):
            return self._union(schema, namespace, depth)
        if not isinstance(schema, dict) or "type" not in schema:
            raise TopologyError(f"Avro schema is not valid: {str(schema)[:100]!r} is not a type")
        kind = schema["type"]
        if isinstance(kind, (dict, list)):
            return self.parse(kind, namespace, depth + 1)
        if kind in ("record", "error", "enum", "fixed"):
            return self._definition(schema, "record" if kind == "error" else kind, namespace, depth)
        if kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            if inner not in schema:
                raise TopologyError(f"Avro schema is not valid: a type {kind!r} lacks {inner!r}")
            return AvroType(kind, items=self.parse(schema[inner], namespace, depth + 1))
        if kind in PRIMITIVES:
            return AvroType(kind, _logical(schema, kind, 0))
        return self._referred(kind, namespace)

    def _referred(self, name: Any, namespace: str) -> AvroType:
        known = (f"{namespace}.{name}", name) if namespace and "." not in str(name) else (name,)
        for each in known:
            if isinstance(each, str) and each in self._named:
                return self._named[each]
        raise TopologyError(f"Avro schema is not valid: type {str(name)[:200]!r} is not defined")

    def _union(self, schema: list[Any], namespace: str, depth: int) -> AvroType:
        branches = [self.parse(each, namespace, depth + 1) for each in schema]
        names = [each.name or each.kind for each in branches]
        if "union" in names or len(set(names)) < len(names):
            raise TopologyError(f"Avro schema is not valid: a union of {', '.join(names)[:200]}")
        return AvroType("union", branches=branches)

    def _definition(self, schema: dict[str, Any], kind: str, namespace: str, depth: int) -> AvroType:
        name = _full_name(_text(schema, "name"), schema.get("namespace"), namespace)
        inside = name.rpartition(".")[0]
        aliases = frozenset(_full_name(each, None, inside) for each in _texts(schema, "aliases", name))
        result = AvroType(kind, name=name, aliases=aliases)
        if name in self._named:
            raise TopologyError(f"Avro schema is not valid: type {name!r} is defined twice")
        self._named[name] = result
        if kind == "record":
            result.fields = self._fields(schema, name, inside, depth)
        elif kind == "enum":
            result.symbols = tuple(_texts(schema, "symbols", name))
            result.default = schema.get("default")
            if not result.symbols or len(set(result.symbols)) < len(result.symbols):
                raise TopologyError(f"Avro schema is not valid: {name}: symbols must be a list of different texts")
            if result.default is not None and result.default not in result.symbols:
                raise TopologyError(f"Avro schema is not valid: {name}: the default is not one of the symbols")
        else:
            size = schema.get("size")
            if not _is_count(size) or size > FIXED_BYTES_MAX:
                raise TopologyError(
                    f"Avro schema is not valid: {name}: size must be from 0 to {FIXED_BYTES_MAX:,}, not "
                    f"{str(size)[:50]}"
                )
            result.size = size
            result.logical = _logical(schema, kind, size)
        return result

    def _fields(self, schema: dict[str, Any], name: str, namespace: str, depth: int) -> list[AvroField]:
        declared = schema.get("fields")
        if not isinstance(declared, list) or not all(isinstance(each, dict) and "type" in each for each in declared):
            raise TopologyError(f"Avro schema is not valid: {name}: fields must be a list of fields with types")
        fields: list[AvroField] = []
        for each in declared:
            aliases = frozenset(_texts(each, "aliases", name))
            kind = self.parse(each["type"], namespace, depth + 1)
            fields.append(AvroField(_text(each, "name"), kind, aliases, "default" in each, each.get("default")))
        twice = next((each for each, times in Counter(each.name for each in fields).items() if times > 1), None)
        if twice is not None:
            raise TopologyError(f"Avro schema is not valid: {name}: field {twice!r} is declared twice")
        return fields


def _logical(schema: Mapping[str, Any], kind: str, size: int) -> Logical | None:
    """The logical type; None if there is none, or if it is not valid: then the specification says
    to use the type itself."""
    name = schema.get("logicalType")
    if not isinstance(name, str) or name not in _LOGICAL.get(kind, ()):
        return None
    if name != "decimal":
        return Logical(name)
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not _is_count(precision) or not _is_count(scale) or not max(scale, 1) <= precision:
        return None
    if kind == "fixed" and precision > math.floor(math.log10(2) * (8 * size - 1)):
        return None
    return Logical(name, precision, scale)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _full_name(name: str, namespace: Any, inside: str) -> str:
    if "." in name:
        return name.removeprefix(".")
    space = namespace if isinstance(namespace, str) else inside
    return f"{space}.{name}" if space else name


def _text(schema: Mapping[str, Any], key: str) -> str:
    value = schema.get(key)
    if not isinstance(value, str) or not value or not _is_utf8(value):
        raise TopologyError(f"Avro schema is not valid: {key} must be a text, not {str(value)[:50]!r}")
    return value


def _texts(schema: Mapping[str, Any], key: str, where: str) -> list[str]:
    values = schema.get(key) or []
    if not isinstance(values, list) or not all(isinstance(each, str) and each and _is_utf8(each) for each in values):
        raise TopologyError(f"Avro schema is not valid: {where}: {key} must be a list of texts")
    return values


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
