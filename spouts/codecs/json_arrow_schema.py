"""The Arrow schema of JSON values: from a JSON Schema, or from a sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from framework.errors import TopologyError
from framework.local_paths import local_path

_TYPES = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_ALTERNATIVES = ("oneOf", "anyOf", "allOf")
_OTHERWISE = ("not", "if", "patternProperties", "prefixItems", "$dynamicRef")
_REFUSED = (*_ALTERNATIVES, *_OTHERWISE)


#: Where the documents stand that others refer to.
_OTHERS = "$others"


def schema_of_json_schema(schema: Mapping[str, Any] | str | Path, others: Mapping[str, str] | None = None) -> pa.Schema:
    """The Arrow schema of the objects that a JSON Schema describes. A required field is not
    nullable, in nested objects too. ``others``: the documents that it refers to, by the name that a
    ``$ref`` has before its ``#``. Raises ``TopologyError``, which names the place, for what has no
    Arrow type.

    Source: JSON Schema, draft 2020-12.
    """
    document = self_contained(loaded_schema(schema), others or {})
    root = resolved(document, document, "#")
    if root.get("type", "object") != "object" or not isinstance(root.get("properties"), Mapping):
        raise TopologyError("JSON Schema: the root must be an object with properties")
    return pa.schema(_fields(root, document, "#"))


def loaded_schema(schema: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The document of a JSON Schema: a mapping, its text, or the path of a file. Raises
    ``TopologyError``."""
    try:
        if isinstance(schema, Path) or (isinstance(schema, str) and not schema.lstrip().startswith("{")):
            schema = local_path(schema, "JSON Schema").read_text(encoding="utf-8-sig")
        document = json.loads(schema) if isinstance(schema, str) else schema
    except (OSError, ValueError, RecursionError) as error:
        raise TopologyError(f"JSON Schema cannot be read: {error}") from error
    if not isinstance(document, Mapping):
        raise TopologyError(f"JSON Schema: an object is wanted, not {type(document).__name__}")
    return document


def self_contained(document: Mapping[str, Any], others: Mapping[str, str]) -> Mapping[str, Any]:
    """One document that has the others within it, and refers to nothing outside."""
    if not others:
        return document
    places = {name: f"/{_OTHERS}/{name.replace('~', '~0').replace('/', '~1')}" for name in others}

    def moved(node: Any, here: str) -> Any:
        if isinstance(node, list):
            return [moved(each, here) for each in node]
        if not isinstance(node, dict):
            return node
        found = {key: moved(value, here) for key, value in node.items()}
        if isinstance(reference := node.get("$ref"), str):
            name, _, pointer = reference.partition("#")
            if not name or name in places:
                found["$ref"] = f"#{places[name] if name else here}{pointer}"
        return found

    within = {name: moved(loaded_schema(text), places[name]) for name, text in others.items()}
    return {**moved(dict(document), ""), _OTHERS: within}


def _fields(node: Mapping[str, Any], document: Mapping[str, Any], where: str) -> list[pa.Field]:
    required = node.get("required", ())
    fields = []
    for name, child in node["properties"].items():
        path = f"{where}/properties/{name}"
        declared, nullable = _type(child, document, path)
        fields.append(pa.field(name, declared, nullable=nullable or name not in required))
    return fields


def _type(node: Any, document: Mapping[str, Any], where: str) -> tuple[pa.DataType, bool]:
    """The Arrow type at a place, and whether null is allowed there."""
    node, optional = _resolved(node, document, where)
    declared = node.get("type", "object" if "properties" in node else None)
    kinds = [declared] if isinstance(declared, str) else list(declared or ())
    nullable = optional or "null" in kinds
    kinds = [kind for kind in kinds if kind != "null"]
    if sorted(kinds) == ["integer", "number"]:
        kinds = ["number"]
    if len(kinds) != 1:
        raise TopologyError(f"JSON Schema, {where}: one type is wanted (and null, perhaps), not {declared!r}")
    kind = kinds[0]
    if kind == "object":
        if not node.get("properties"):
            raise TopologyError(f"JSON Schema, {where}: an object without properties has no columns; leave it out")
        return pa.struct(_fields(node, document, where)), nullable
    if kind == "array":
        if "items" not in node:
            raise TopologyError(f"JSON Schema, {where}: an array needs items")
        items, _ = _type(node["items"], document, f"{where}/items")
        return pa.list_(items), nullable
    if kind not in _TYPES:
        raise TopologyError(f"JSON Schema, {where}: type {kind!r} is not known")
    return _TYPES[kind], nullable


def resolved(node: Any, document: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The node itself, the node in the same document that its ``$ref`` points to, or the only one
    besides null among its alternatives."""
    return _resolved(node, document, where)[0]


def _resolved(node: Any, document: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], bool]:
    """The same, and whether null was among the alternatives."""
    seen: list[str] = []
    nullable = False
    while isinstance(node, Mapping):
        only = _only_alternative(node)
        if only is not None:
            node, or_null = only
            nullable |= or_null
            continue
        if "$ref" not in node:
            break
        reference = str(node["$ref"])
        if reference in seen or len(where) > 500 or not (reference == "#" or reference.startswith("#/")):
            raise TopologyError(f"JSON Schema, {where}: $ref {reference!r} does not lead to a type in this document")
        seen.append(reference)
        node = document
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or part not in node:
                raise TopologyError(f"JSON Schema, {where}: $ref {reference!r} leads nowhere")
            node = node[part]
    if not isinstance(node, Mapping):
        raise TopologyError(f"JSON Schema, {where}: {node!r} describes no type")
    for keyword in _REFUSED:
        if keyword in node:
            raise TopologyError(
                f"JSON Schema, {where}: {keyword} has no one Arrow type; write the type out, or leave it out"
            )
    return node, nullable


def _only_alternative(node: Mapping[str, Any]) -> tuple[Any, bool] | None:
    """The only alternative of a node besides null, and whether null is one; None if there are
    others, or if the node itself has a type."""
    given = [each for each in _ALTERNATIVES if each in node]
    if len(given) != 1 or any(each in node for each in ("type", "properties", "$ref", *_OTHERWISE)):
        return None
    options = node[given[0]] if isinstance(node[given[0]], list) else []
    others = [each for each in options if not (isinstance(each, Mapping) and each.get("type") == "null")]
    or_null = len(others) < len(options)
    return (others[0], or_null) if len(others) == 1 and not (or_null and given[0] == "allOf") else None


def schema_of_sample(values: Sequence[bytes]) -> pa.Schema:
    """The schema that Arrow infers from values, one object each. Raises ``TopologyError`` if it
    cannot infer one."""
    if not values:
        raise TopologyError("a sample needs at least one value")
    joined = b"\n".join(value.replace(b"\n", b" ") for value in values)
    options = pj.ReadOptions(use_threads=False, block_size=max(1 << 20, 2 * len(joined) + 2))
    try:
        inferred = pj.read_json(pa.BufferReader(joined), read_options=options).schema
    except pa.ArrowException as error:
        raise TopologyError(f"the sample has no one schema: {error}") from error
    return pa.schema([(field.name, _as_sent(field.type, field.name)) for field in inferred])


def _as_sent(inferred: pa.DataType, where: str) -> pa.DataType:
    """The inferred type, with temporal types replaced by text: Arrow reads text as a time if it
    can, but a later value may not look like a time."""
    if pa.types.is_null(inferred):
        raise TopologyError(
            f"the sample says nothing about {where}, which is null or empty throughout: declare the fields"
        )
    if pa.types.is_temporal(inferred):
        return pa.string()
    if pa.types.is_list(inferred):
        return pa.list_(_as_sent(inferred.value_type, f"{where}[]"))
    if pa.types.is_struct(inferred):
        return pa.struct([(each.name, _as_sent(each.type, f"{where}.{each.name}")) for each in inferred])
    return inferred
