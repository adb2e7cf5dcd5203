"""Random pairs of Avro schemas, and random bytes of their values, for comparisons between
implementations."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

PRIMITIVES = ["null", "boolean", "int", "long", "float", "double", "string", "bytes"]
PROMOTIONS = {
    "int": ["long", "float", "double"],
    "long": ["float", "double"],
    "float": ["double"],
    "string": ["bytes"],
    "bytes": ["string"],
}
LOGICAL = {
    "int": ["date", "time-millis"],
    "long": ["time-micros", "timestamp-millis", "timestamp-micros", "timestamp-nanos", "local-timestamp-micros"],
}
NAMESPACES = ["", "a", "a.b", "c"]
TEXTS = ["", "a", "wörd", "\U0001f600", "x" * 70]


class Pairs:
    """Makes pairs from a seed. ``plain``: the share of records with primitive fields only; they
    are decoded together."""

    def __init__(self, seed: int, plain: float = 0.3) -> None:
        self.chance = random.Random(seed)
        self._plain = plain
        self._names = 0

    def pair(self) -> tuple[Any, Any]:
        """A writer's and a reader's schema."""
        self._names = 0
        writer = self._record(0 if self.chance.random() < self._plain else 3)
        reader = self._changed(copy.deepcopy(writer))
        return writer, reader

    # --- schemas ---------------------------------------------------------------------------------

    def _name(self, kind: str) -> dict[str, Any]:
        self._names += 1
        found: dict[str, Any] = {"name": f"{kind}{self._names}"}
        form = self.chance.randrange(4)
        if form == 0:
            found["namespace"] = self.chance.choice(NAMESPACES)
        elif form == 1:
            found["name"] = f"{self.chance.choice(NAMESPACES[1:])}.{found['name']}"
        return found

    def _record(self, depth: int) -> dict[str, Any]:
        fields = [{"name": f"f{n}", "type": self._type(depth)} for n in range(self.chance.randrange(1, 6))]
        return {"type": "record", **self._name("R"), "fields": fields}

    def _type(self, depth: int) -> Any:
        form = self.chance.randrange(10 if depth else 5)
        if form < 3:
            return self._primitive()
        if form < 5:
            other = self._primitive() if depth == 0 else self._type(depth - 1)
            if other == "null" or isinstance(other, list):
                return other
            return ["null", other] if self.chance.random() < 0.8 else [other, "null"]
        if form == 5:
            return {"type": "array", "items": self._type(depth - 1)}
        if form == 6:
            return {"type": "map", "values": self._type(depth - 1)}
        if form == 7:
            return {"type": "fixed", **self._name("F"), "size": self.chance.randrange(4)}
        if form == 8:
            symbols = self.chance.sample("ABCDEF", self.chance.randrange(1, 5))
            return {"type": "enum", **self._name("E"), "symbols": symbols}
        return self._record(depth - 1)

    def _primitive(self) -> Any:
        kind = self.chance.choice(PRIMITIVES[1:] if self.chance.random() < 0.95 else PRIMITIVES)
        if kind in LOGICAL and self.chance.random() < 0.2:
            return {"type": kind, "logicalType": self.chance.choice(LOGICAL[kind])}
        if kind == "bytes" and self.chance.random() < 0.2:
            return {"type": kind, "logicalType": "decimal", "precision": 9, "scale": 2}
        return kind

    # --- changes ---------------------------------------------------------------------------------

    def _changed(self, schema: Any, nested: bool = True) -> Any:
        """A later version of a schema; sometimes one that does not resolve."""
        chance = self.chance.random()
        if isinstance(schema, list):
            if chance < 0.1:
                schema = list(reversed(schema))
            elif chance < 0.13:
                return self._changed(next((each for each in schema if each != "null"), schema), False)
            changed = [self._changed(each, False) for each in schema]
            kinds = [each if isinstance(each, str) else each["type"] for each in changed]
            return changed if len(set(kinds)) == len(kinds) else schema  # a union has each type once
        if isinstance(schema, str) or schema["type"] in PRIMITIVES:
            kind = schema if isinstance(schema, str) else schema["type"]
            if chance < 0.15 and kind in PROMOTIONS:
                return self.chance.choice(PROMOTIONS[kind])
            if chance < 0.18 and not isinstance(schema, str):
                return kind
            if chance < 0.19:
                return self.chance.choice(PRIMITIVES)
            if chance < 0.30 and nested and kind != "null":
                return ["null", schema]
            return schema
        if schema["type"] in ("array", "map"):
            inner = "items" if schema["type"] == "array" else "values"
            return {**schema, inner: self._changed(schema[inner])}
        return self._changed_definition(schema, chance)

    def _changed_definition(self, schema: dict[str, Any], chance: float) -> Any:
        if chance < 0.05:
            schema = self._renamed(schema)
        if schema["type"] == "enum":
            if chance > 0.6:
                schema = {**schema, "symbols": self.chance.sample("ABCDEFG", self.chance.randrange(1, 5))}
                if self.chance.random() < 0.7:
                    schema["default"] = self.chance.choice(schema["symbols"])
        elif schema["type"] == "record":
            fields = [self._changed_field(each) for each in schema["fields"] if self.chance.random() < 0.9]
            for _ in range(self.chance.choice([0, 0, 1, 2])):
                fields.append(self._new_field())
            self.chance.shuffle(fields)
            schema = {**schema, "fields": fields}
        return schema

    def _changed_field(self, field: dict[str, Any]) -> dict[str, Any]:
        field = {**field, "type": self._changed(field["type"])}
        if self.chance.random() < 0.05:
            field = {**field, "name": f"renamed_{field['name']}", "aliases": [field["name"]]}
        return field

    def _renamed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """In another namespace, which does not matter, or with an alias."""
        last = schema["name"].rpartition(".")[2]
        if self.chance.random() < 0.5:
            return {**schema, "name": last, "namespace": "elsewhere"}
        return {**schema, "name": f"elsewhere.N{last}", "aliases": [f"{space}.{last}" for space in ("a", "a.b", "c")]}

    def _new_field(self) -> dict[str, Any]:
        self._names += 1
        kind = self._type(1)
        return {"name": f"new{self._names}", "type": kind, "default": self._default(kind)}

    def _default(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return self._default(schema[0])
        kind = schema if isinstance(schema, str) else schema["type"]
        simple: dict[str, list[Any]] = {
            "null": [None],
            "boolean": [True, False],
            "int": [0, 5, 86_399],
            "long": [0, 5, 86_399],
            "float": [0.5, -1.25],
            "double": [0.1, 1e300],
            "string": TEXTS,
            "bytes": ["\u00ff", "\u0000\u0080", "\u0001"],
        }
        if kind in simple:
            return self.chance.choice(simple[kind])
        if kind == "fixed":
            return "".join(chr(self.chance.randrange(256)) for _ in range(schema["size"]))
        if kind == "enum":
            return self.chance.choice(schema["symbols"])
        if kind == "array":
            return [self._default(schema["items"]) for _ in range(self.chance.randrange(3))]
        if kind == "map":
            return {
                text: self._default(schema["values"]) for text in self.chance.sample(TEXTS, self.chance.randrange(3))
            }
        for field in schema["fields"]:
            if self.chance.random() < 0.5:
                field["default"] = self._default(field["type"])
        return {
            each["name"]: self._default(each["type"])
            for each in schema["fields"]
            if "default" not in each or self.chance.random() < 0.5
        }

    # --- values ----------------------------------------------------------------------------------

    def value(self, schema: Any) -> bytes:
        """The bytes of a random value."""
        if isinstance(schema, list):
            branch = self.chance.randrange(len(schema))
            return _varint(branch) + self.value(schema[branch])
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in ("int", "long"):
            return _varint(self._number(kind, schema))
        if kind in ("string", "bytes"):
            return _sized(self._bytes(kind, schema))
        if kind == "record":
            return b"".join(self.value(each["type"]) for each in schema["fields"])
        if kind in ("array", "map"):
            return self._items(schema)
        if kind == "enum":
            return _varint(self.chance.randrange(len(schema["symbols"])))
        sizes = {"null": 0, "float": 4, "double": 8}
        if kind == "boolean":
            return bytes([self.chance.randrange(2)])
        size = schema["size"] if kind == "fixed" else sizes[kind]
        return self.chance.randbytes(size)

    def _number(self, kind: str, schema: Any) -> int:
        if not isinstance(schema, str) and schema.get("logicalType", "").startswith("time-"):
            return self.chance.randrange(86_400_000)
        bits = self.chance.randrange(1, 32 if kind == "int" else 64)
        return self.chance.randrange(-(1 << bits), 1 << bits)

    def _bytes(self, kind: str, schema: Any) -> bytes:
        if kind == "string":
            return self.chance.choice(TEXTS).encode()
        if not isinstance(schema, str):
            return self.chance.randrange(-(10**9) + 1, 10**9).to_bytes(4, "big", signed=True)
        return self.chance.choice([b"", b"abc", b"\x00\xff", "wörd".encode(), b"y" * 70])

    def _items(self, schema: Any) -> bytes:
        out = b""
        for _ in range(self.chance.randrange(3)):
            items = []
            for _item in range(self.chance.randrange(1, 4)):
                key = _sized(self.chance.choice(TEXTS).encode()) if schema["type"] == "map" else b""
                items.append(key + self.value(schema["items" if schema["type"] == "array" else "values"]))
            body = b"".join(items)
            out += _varint(len(items)) if self.chance.random() < 0.7 else _varint(-len(items)) + _varint(len(body))
            out += body
        return out + _varint(0)

    def damaged(self, value: bytes) -> bytes:
        """The bytes of a value, some of them changed, lost or added."""
        found = bytearray(value)
        for _ in range(self.chance.randrange(1, 3)):
            at = self.chance.randrange(len(found) + 1)
            form = self.chance.randrange(5)
            if form == 0:
                del found[at:]
            elif form == 1:
                found[at:at] = self.chance.randbytes(self.chance.randrange(1, 4))
            elif form == 2:
                found[at : at + 1] = self.chance.choice([b"\x01", b"\x7f", b"\xff", b"\xff" * 9 + b"\x01", b"\x80\x00"])
            elif form == 3:
                del found[at : at + 1]
            elif at < len(found):
                found[at] ^= 1 << self.chance.randrange(8)
        return bytes(found)


def _varint(number: int) -> bytes:
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append((left & 0x7F) | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def _sized(body: bytes) -> bytes:
    return _varint(len(body)) + body


def double_bits(value: float) -> int:
    """As Java shows a double."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
