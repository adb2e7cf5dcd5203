"""Compares the columns of JSON Schemas with jsonschema, many documents of each schema at a time.

``python -m tests.kit.json_reference --values 10000000 --seed 1``: a document of a random schema is
a row where ``jsonschema`` says that it is valid, and a bad record otherwise; the row is what
Python's ``json`` reads; and what the codec writes of its rows, ``json`` reads as the same.

``JsonCodec`` takes more than the schema, and less. ``as_enforced`` writes this into the schema:
only types, objects, arrays and ``required`` count, an item may be null, and so may a property that
is not required; a required one that may be null may be missing; an integer has 64 bits, and is not
written as ``1.0``. ``test_json_oracle`` compares values that are no JSON, and names of floats.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from jsonschema import Draft202012Validator, validators

from spouts import JsonCodec
from tests.kit.comparing import Difference, check_own, check_rows, check_verdicts, go_through
from tests.kit.fuzzing import Counts

VALUES = 4_000
#: Different values of each property.
_POOL = 30
#: One document of so many is asked about whole.
_WHOLE_EACH = 50
_LEAST, _MOST = -(2**63), 2**63 - 1
_TEXTS = ["", "a", "wörd", "\U0001f600", "\0", '"\\/', "x" * 40, "2026-01-02", "NaN", "1"]
_SCALARS = ("string", "integer", "number", "boolean")
#: Ignored: whether a value meets them is not checked when it is read.
_RESTRICTIONS: dict[str, list[dict[str, Any]]] = {
    "string": [{"minLength": 2}, {"pattern": "^a"}, {"format": "date"}, {"enum": ["a", "b"]}],
    "integer": [{"minimum": 5}, {"multipleOf": 3}, {"const": 1}],
    "number": [{"maximum": 0}, {"exclusiveMinimum": 1}],
    "boolean": [{"default": True}],
}

#: A number that is written with a fraction or an exponent is no integer: a column would round it.
_Validator = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)


class Schemas:
    """A random schema, and texts of documents, most of which it validates."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        #: The share of values of another type, of bad documents therefore.
        self.wrong = self.chance.choice([0, 0, 0, 0.003, 0.02])
        self._definitions: dict[str, Any] = {}
        self.document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **self._object(self.chance.choice([0, 0, 1, 2]), self.chance.randint(1, 6)),
        }
        if self._definitions:
            self.document["$defs"] = self._definitions

    def _type(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        form = chance.random()
        if depth and form < 0.3:
            found = self._object(depth - 1, chance.randint(1, 3))
        elif depth and form < 0.6:
            found = {"type": "array", "items": self._type(depth - 1)}
        else:
            kind = chance.choice(_SCALARS)
            found = {"type": kind}
            if chance.random() < 0.2:
                found |= chance.choice(_RESTRICTIONS[kind])
        if chance.random() < 0.2:
            found["type"] = [found["type"], "null"]
        if found["type"] == "number" and chance.random() < 0.2:
            found["type"] = ["integer", "number"]
        if chance.random() < 0.15:
            name = f"d{len(self._definitions)}/~"
            self._definitions[name] = found
            return {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}
        return found

    def _object(self, depth: int, fields: int) -> dict[str, Any]:
        names = self.chance.sample(["a", "b", "id", "wörd", "x y", "n.m", "\U0001f600", "type", "$ref2"], fields)
        found: dict[str, Any] = {"type": "object", "properties": {name: self._type(depth) for name in names}}
        if self.chance.random() < 0.6:
            found["required"] = [name for name in names if self.chance.random() < 0.4]
        return found

    # --- documents -------------------------------------------------------------------------------

    def members(self, count: int) -> list[tuple[str, ...]]:
        """The members of objects, as text, or empty where one is absent. The properties take their
        values from a few, in all combinations."""
        pools = []
        for name, node in self.document["properties"].items():
            members = [f"{self._text(name)}:{self._value(node)}" for _ in range(_POOL)]
            is_required = name in self.document.get("required", ())
            pools.append(members + [""] * (0 if is_required and not self.wrong else self.chance.choice([0, 3])))
        pools.append([""] * 9 + [f'"other":{text}' for text in ("1", "[]", '{"a":[null]}', '"\u00e9"')])
        self.chance.shuffle(pools)
        return list(zip(*(self.chance.choices(pool, k=count) for pool in pools), strict=True))

    def _value(self, node: Any) -> str:
        chance = self.chance
        if "$ref" in node:
            return self._value(self._definitions[node["$ref"].split("/", 2)[2].replace("~1", "/").replace("~0", "~")])
        if chance.random() < self.wrong:
            return chance.choice(
                ["1", "1.0", "1.5", '"a"', "true", "[]", "{}", "null", "[1]", '{"a":1}', '""', "1e2", "-1.0"]
            )
        kinds = [node["type"]] if isinstance(node["type"], str) else node["type"]
        kind = chance.choice(kinds)
        if kind == "object":
            return self._members(node)
        if kind == "array":
            return f"[{','.join(self._value(node['items']) for _ in range(chance.randrange(4)))}]"
        if kind == "string":
            return self._text(chance.choice(_TEXTS))
        if kind == "null":
            return "null"
        return chance.choice(["true", "false"]) if kind == "boolean" else self._number(kind)

    def _members(self, node: Any) -> str:
        members = [
            f"{self._text(name)}:{self._value(child)}"
            for name, child in node["properties"].items()
            if name in node.get("required", ()) or self.chance.random() < 0.8
        ]
        self.chance.shuffle(members)
        return f"{{{','.join(members)}}}"

    def _number(self, kind: str) -> str:
        chance = self.chance
        whole = chance.choice([0, -1, 7, _MOST, _LEAST, chance.randint(_LEAST, _MOST), chance.randint(-1000, 1000)])
        if kind == "integer":
            return str(whole + chance.choice([0, 1]) * (whole == _MOST) * (chance.random() < self.wrong))
        broken = chance.choice([0.5, -0.0, 1e300, 5e-324, chance.uniform(-1e9, 1e9), chance.random()])
        return chance.choice([str(whole), repr(broken), repr(broken), "1E5", "-1.50", "0.1e-7"])

    def _text(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=self.chance.random() < 0.3)


def as_enforced(node: dict[str, Any], document: dict[str, Any], *, nullable: bool = False) -> dict[str, Any]:
    """The schema whose documents have rows: what the codec says that it enforces."""
    if "$ref" in node:
        return {"anyOf": [node, {"type": "null"}]} if nullable else node
    kinds = [node["type"]] if isinstance(node["type"], str) else list(node["type"])
    found: dict[str, Any] = {"type": [*kinds, "null"] if nullable else kinds}
    if kinds[0] == "integer" and "number" not in kinds:
        found |= {"minimum": _LEAST, "maximum": _MOST}
    if "items" in node:
        found["items"] = as_enforced(node["items"], document, nullable=True)
    if "properties" in node:
        required = [name for name in node.get("required", ()) if not _may_be_null(node["properties"][name], document)]
        found["required"] = required
        found["properties"] = {
            name: as_enforced(each, document, nullable=name not in required)
            for name, each in node["properties"].items()
        }
    if "$defs" in node:
        found["$defs"] = {name: as_enforced(each, document) for name, each in node["$defs"].items()}
    return found


def _may_be_null(node: dict[str, Any], document: dict[str, Any]) -> bool:
    while "$ref" in node:
        node = document["$defs"][node["$ref"].split("/", 2)[2].replace("~1", "/").replace("~0", "~")]
    return "null" in node["type"]


class Verdicts:
    """What jsonschema says of objects. ``properties`` and ``required`` do not depend on each other,
    so each member is asked about once, and each set of names; a few objects are asked about
    whole."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._whole = _Validator(schema).is_valid
        self._member = _Validator({**schema, "required": []}).is_valid
        self._names = _Validator({"required": schema["required"]}).is_valid
        self._known: dict[str, bool] = {}
        self._known_names: dict[tuple[str, ...], bool] = {}
        self._asked = 0

    def __call__(self, members: tuple[str, ...], document: dict[str, Any]) -> bool:
        known = self._known
        for each in members:
            if each not in known:
                known[each] = self._member(json.loads(f"{{{each}}}"))
        names = tuple(document)
        if names not in self._known_names:
            self._known_names[names] = self._names(document)
        valid = self._known_names[names] and all(map(known.__getitem__, members))
        self._asked += 1
        if self._asked % _WHOLE_EACH == 0 and valid != self._whole(document):
            raise Difference(f"jsonschema says of {document!r} whole that it is{' not' if valid else ''} valid")
        return valid


def compare(seed: int, count: int = VALUES) -> Counts:
    """Documents of one schema. Raises ``Difference``."""
    schemas = Schemas(seed)
    codec = JsonCodec.from_json_schema(schemas.document)
    is_valid = Verdicts(as_enforced(schemas.document, schemas.document))
    members = schemas.members(count)
    values = [f"{{{','.join(filter(None, each))}}}".encode() for each in members]
    batch, bad = codec.decode_good(values)
    documents = [json.loads(value) for value in values]
    pairs = enumerate(zip(members, documents, strict=True))
    refused = {place: "not valid" for place, (its, document) in pairs if not is_valid(its, document)}
    check_verdicts({each.index: each.reason for each in bad}, refused, values, schemas.document)
    counts: Counts = collections.Counter(values=count, refused=len(refused))
    if len(batch):
        rows = [each for place, each in enumerate(documents) if place not in refused]
        good = [each for place, each in enumerate(values) if place not in refused]
        check_rows(batch, _columns(rows, batch.schema), good, schemas.document)
        written = codec.encode(batch).to_pylist()
        read = _columns([json.loads(each) for each in written], batch.schema)
        check_rows(batch, read, written, f"{schemas.document}, as written")
        check_own(codec, batch, written, schemas.document)
    return counts


def _columns(rows: Sequence[dict[str, Any]], target: pa.Schema) -> list[pa.Array]:
    return [pa.array(_typed([row.get(each.name) for row in rows], each.type), each.type) for each in target]


def _typed(values: Sequence[Any], declared: pa.DataType) -> Sequence[Any]:
    """The values with floats where they are declared: Arrow takes no large integer for one."""
    if pa.types.is_floating(declared):
        return [None if each is None else float(each) for each in values]
    if pa.types.is_list(declared):
        return [None if each is None else _typed(each, declared.value_type) for each in values]
    if pa.types.is_struct(declared):
        parts = [
            _typed([each.get(field.name) for each in values if each is not None], field.type) for field in declared
        ]
        rows = (dict(zip(declared.names, each, strict=True)) for each in zip(*parts, strict=True))
        return [None if each is None else next(rows) for each in values]
    return values


if __name__ == "__main__":
    go_through(__doc__, compare)
