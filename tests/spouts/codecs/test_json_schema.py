"""The schema of a ``JsonCodec``, from a JSON Schema or from a sample (2.9)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from framework.errors import TopologyError
from spouts import JsonCodec, RegistryJsonCodec, UndecodableValueError

pytestmark = pytest.mark.behaviour("2.9")

ORDER = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["id", "total"],
    "properties": {
        "id": {"type": "string", "pattern": "^o-"},
        "total": {"type": "number"},
        "count": {"type": ["integer", "null"]},
        "paid": {"type": "boolean"},
        "address": {"$ref": "#/$defs/address"},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}}},
    },
    "$defs": {"address": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_types_objects_arrays_and_references_become_columns(tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text(json.dumps(ORDER))
    for given in (ORDER, json.dumps(ORDER), file, str(file)):
        codec = JsonCodec.from_json_schema(given)  # type: ignore[arg-type]
        assert {name: codec.fields.type_of(name) for name in codec.fields} == {
            "id": pa.string(),
            "total": pa.float64(),
            "count": pa.int64(),
            "paid": pa.bool_(),
            "address": pa.struct([("city", pa.string())]),
            "lines": pa.list_(pa.struct([("sku", pa.string())])),
        }
    row = {"id": "o-1", "total": 1.5, "address": {"city": "Oslo"}, "lines": [{"sku": "a"}]}
    assert codec.decode([json.dumps(row).encode()]).to_pylist() == [{**row, "count": None, "paid": None}]


#: As Pydantic and Confluent's Java serializer write what may be null.
OPTIONAL = {
    "type": "object",
    "required": ["id", "note"],
    "properties": {
        "id": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Note"},
        "count": {"oneOf": [{"type": "null", "title": "Not included"}, {"type": "integer"}], "default": None},
        "address": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/address"}]},
        "home": {"allOf": [{"$ref": "#/$defs/address"}], "description": "where"},
    },
    "$defs": {"address": {"type": "object", "properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}},
}


def test_a_choice_between_null_and_one_type_is_that_type() -> None:
    codec = JsonCodec.from_json_schema(OPTIONAL)
    assert {name: codec.fields.type_of(name) for name in codec.fields} == {
        "id": pa.string(),
        "note": pa.string(),
        "count": pa.int64(),
        "address": pa.struct([("city", pa.string())]),
        "home": pa.struct([("city", pa.string())]),
    }
    row = {"id": "a", "note": None, "count": 1, "address": {"city": None}, "home": None}
    assert codec.decode([json.dumps(row).encode()]).to_pylist() == [row]
    writer = RegistryJsonCodec("http://localhost:1", schema=OPTIONAL, subject="s").without_registry()
    rows = [row, {**row, "count": None, "address": None, "home": {"city": "Oslo"}}]
    schema = pa.schema([each.with_nullable(True) for each in codec.fields.schema() or ()])
    written = writer.encode(pa.RecordBatch.from_pylist(rows, schema)).to_pylist()
    assert codec.decode([each[5:] for each in written]).to_pylist() == rows


def test_a_missing_required_property_is_bad_and_a_tombstone_is_not() -> None:
    codec = JsonCodec.from_json_schema(ORDER)
    good = b'{"id": "o-1", "total": 1}'
    assert codec.decode([good, None]).num_rows == 2
    values = [good, b'{"id": "o-2"}', None, b'{"id": null, "total": 2}', good]
    with pytest.raises(UndecodableValueError, match="value 1: total is required, and is missing or null"):
        codec.decode(values)
    batch, bad = codec.decode_good(values)
    assert batch.column("id").to_pylist() == ["o-1", None, "o-1"]
    assert [(each.index, each.reason.split()[0]) for each in bad] == [(1, "total"), (3, "id")]


CUSTOMER = {
    "type": "object",
    "properties": {
        "address": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
        },
        "lines": {
            "type": "array",
            "items": {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}},
        },
    },
}


@pytest.mark.parametrize("reader", ["compiled", "Arrow's"])
def test_a_property_that_a_nested_object_requires_may_be_missing_only_with_that_object(
    reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reader == "Arrow's":
        monkeypatch.setattr("spouts.codecs.json_reader.native_json", lambda schema: None)
    codec = JsonCodec.from_json_schema(CUSTOMER)
    good = [
        b'{"address": {"city": "Oslo"}, "lines": [{"sku": "a"}, {"sku": "b"}]}',
        b'{"address": null, "lines": null}',
        b'{"lines": []}',
        None,
    ]
    rows = codec.decode(good).to_pylist()
    assert rows == [
        {"address": {"city": "Oslo", "zip": None}, "lines": [{"sku": "a"}, {"sku": "b"}]},
        {"address": None, "lines": None},
        {"address": None, "lines": []},
        {"address": None, "lines": None},
    ]
    bad = [b'{"address": {"zip": "1"}}', b'{"address": {"city": null}}', b'{"lines": [{"sku": "a"}, {}]}']
    batch, found = codec.decode_good([good[0], *bad, good[1]])
    assert batch.to_pylist() == rows[:2]
    assert [(each.index, each.reason.split()[0]) for each in found] == [
        (1, "address.city"),
        (2, "address.city"),
        (3, "lines[].sku"),
    ]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "items": {}}, "root must be an object"),
        ({"properties": {"x": {"oneOf": []}}}, "#/properties/x: oneOf has no one Arrow type"),
        ({"properties": {"x": {"oneOf": [{"type": "null"}] * 2}}}, "#/properties/x: oneOf has no one Arrow type"),
        (
            {"properties": {"x": {"anyOf": [{"type": "null"}, {"type": "string"}, {"type": "integer"}]}}},
            "#/properties/x: anyOf has no one Arrow type",
        ),
        (
            {"properties": {"x": {"type": "string", "anyOf": [{"type": "string"}, {"type": "null"}]}}},
            "#/properties/x: anyOf has no one Arrow type",
        ),
        ({"properties": {"x": {"type": ["string", "integer"]}}}, "#/properties/x: one type is wanted"),
        ({"properties": {"x": {}}}, "#/properties/x: one type is wanted"),
        ({"properties": {"x": {"type": "object"}}}, "an object without properties"),
        ({"properties": {"x": {"type": "array"}}}, "an array needs items"),
        ({"properties": {"x": {"$ref": "#/nowhere"}}}, "leads nowhere"),
        ({"properties": {"x": {"$ref": "https://example.com/s"}}}, "does not lead to a type in this document"),
        ({"properties": {"x": {"$ref": "#"}}}, "in this document"),
        ("{", "cannot be read"),
        ("no-such-file.json", "cannot be read"),
    ],
)
def test_a_schema_without_columns_is_named(schema: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        JsonCodec.from_json_schema(schema)


def test_a_sample_gives_the_fields_of_all_its_values_and_text_stays_text() -> None:
    sample: list[Any] = [
        b'{"at": "2024-01-02", "n": 1,\n "inner": {"when": "2024-01-02T03:04:05Z"}}',
        {"n": 2, "tags": ["a"]},
        '{"at": "never", "n": null}',
    ]
    codec = JsonCodec.from_sample(sample)
    assert {name: codec.fields.type_of(name) for name in codec.fields} == {
        "at": pa.string(),
        "n": pa.int64(),
        "inner": pa.struct([("when", pa.string())]),
        "tags": pa.list_(pa.string()),
    }
    assert codec.decode([b'{"at": "2024-13-99"}']).to_pylist()[0]["at"] == "2024-13-99"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([], "at least one value"),
        ([b'{"a": 1}', b'{"a": "x"}'], "no one schema"),
        ([b'{"a": null}'], "says nothing about a"),
        ([b'{"a": {"b": []}}'], r"says nothing about a.b\[\]"),
    ],
)
def test_a_sample_without_one_schema_is_named(sample: list[Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        JsonCodec.from_sample(sample)
