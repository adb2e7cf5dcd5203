"""The schema in a change record: the columns of the table, as Kafka Connect describes them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spouts.codecs.debezium_columns import Described
from spouts.codecs.schema_cache import cached_by_schema

#: The beginning of a record with a schema.
BEGINNING = b'{"schema":{'
#: The beginning of the payload of such a record.
PAYLOAD = b'},"payload":'
#: The reason for a value with another schema.
NOT_OF_A_CHANGE = "a schema that is none of a change record"
#: The most levels of nested rows, structs and arrays. PostgreSQL and MySQL need three.
_DEPTH_MAX = 32
#: An object whose first member is a schema or a payload, in any notation; and the beginnings of
#: objects that Kafka Connect does not write.
_WITH_SCHEMA = r'^\s*\{\s*"(schema|payload)"\s*:'
_BEGINS_OTHERWISE = r'^(\s|\{\s|\{"payload"|\{"schema"\s|\{"schema":\s)'


def as_connect_writes(values: pa.BinaryArray) -> pa.BinaryArray:
    """The same values, in the notation of Kafka Connect. Another program may have written schema
    and payload again, with blanks or in another order."""
    otherwise = pc.or_(pc.match_substring_regex(values, _BEGINS_OTHERWISE), pc.invert(pc.ends_with(values, b"}")))
    if not pc.any(otherwise, min_count=0).as_py():  # nulls do not count
        return values
    others = pc.and_(otherwise, pc.match_substring_regex(values, _WITH_SCHEMA))
    places = np.flatnonzero(pc.fill_null(others, False).to_numpy(zero_copy_only=False))
    if not len(places):
        return values
    found = values.to_pylist()
    for place in places.tolist():
        found[place] = _rewritten(found[place])
    return pa.array(found, values.type)


def _rewritten(value: bytes) -> bytes:
    try:
        read = json.loads(value)
        schema, payload = read["schema"], read["payload"]
    except (ValueError, KeyError, RecursionError):
        return value
    return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":")).encode()


def prefix_of(value: bytes) -> bytes:
    """The bytes before the payload of a record with a schema; none for any other value."""
    end = value.find(PAYLOAD) if value.startswith(BEGINNING) and value.endswith(b"}") else -1
    return value[: end + len(PAYLOAD)] if end > 0 else b""


@cached_by_schema
def columns_of_schema(prefix: bytes) -> tuple[Described, ...] | None:
    """The columns that a record's schema describes, with distinct names; None for the schema of
    another kind of record, or without a schema. Each description has a type and everything that the
    type needs, so callers need not check that."""
    try:
        schema = json.loads(prefix[: -len(PAYLOAD)] + b"}}")["schema"]
        parts = schema.get("fields") or []
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(parts, list) or not all(isinstance(each, dict) for each in parts):
        return None
    rows = [each for name in ("after", "before") for each in parts if each.get("field") == name]
    columns = (rows[0].get("fields") or []) if rows else []
    return tuple(columns) if _are_columns(columns, 1) else None


def _are_columns(found: Any, depth: int) -> bool:
    if not isinstance(found, list) or not all(_is_described(each, depth) for each in found):
        return False
    names = [each.get("field") for each in found]
    return all(isinstance(each, str) for each in names) and len({*names}) == len(names)


def _is_described(found: Any, depth: int) -> bool:
    if not isinstance(found, dict) or depth > _DEPTH_MAX or not isinstance(found.get("type"), str):
        return False
    if not isinstance(found.get("name", ""), str | None) or not isinstance(found.get("parameters", {}), dict | None):
        return False
    if found["type"] == "struct":
        return _are_columns(found.get("fields"), depth + 1)
    return found["type"] != "array" or _is_described(found.get("items"), depth + 1)
