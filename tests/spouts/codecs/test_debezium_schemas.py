"""Change records with schemas that no Debezium writes, and values that their schema does not
describe: bad records, each with its reason, and no others."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import random
import tracemalloc
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from framework.errors import BadRecordError
from framework.topology import Fields
from spouts import DebeziumCodec
from spouts.codecs import debezium, schema_cache
from spouts.codecs.codec import Codec
from spouts.codecs.debezium_changes import DebeziumChanges

ID = {"field": "id", "type": "int64"}
DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE = {
    "field": "d",
    "type": "struct",
    "name": "io.debezium.data.VariableScaleDecimal",
    "fields": [{"field": "scale", "type": "int32"}, {"field": "value", "type": "bytes"}],
}
NO_SCHEMA = "a schema that is none of a change record"


def record(columns: Any, row: Any, *, more: Any = "") -> bytes:
    parts = [{"field": "after", "type": "struct", "fields": columns}]
    schema = {"type": "struct", "fields": parts, "name": more}
    payload = {"before": None, "after": row, "source": {"lsn": 7, "table": "t"}, "op": "c"}
    return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":")).encode()


def nested(depth: int, end: str = '{"type":"string"}') -> bytes:
    inside = '{"type":"array","items":' * depth + end + "}" * depth
    head = '{"schema":{"type":"struct","fields":[{"field":"after","type":"struct","fields":[{"field":"d",'
    return (head + inside[1:] + ']}]},"payload":{"after":{"d":[]},"source":{"table":"t"},"op":"c"}}').encode()


SCHEMAS: dict[str, bytes] = {
    name: record(columns, {"id": 1, "d": "x"})
    for name, columns in {
        "no type": [ID, {"field": "d"}],
        "no name": [ID, {"type": "string"}],
        "a name twice": [ID, ID],
        "a number": [ID, 5],
        "a list": [[1]],
        "null": [None],
        "text for columns": "abc",
        "a number for columns": 7,
        "an object for columns": {"a": 1},
        "a number for a name": [ID, {"type": "int64", "name": 5, "field": "d"}],
        "a list for a type": [ID, {"type": ["x"], "field": "d"}],
        "an object for a type": [ID, {"type": {"x": 1}, "field": "d"}],
        "no items": [ID, {"type": "array", "field": "d"}],
        "text for items": [ID, {"type": "array", "items": "s", "field": "d"}],
        "no fields": [ID, {"type": "struct", "field": "d"}],
        "a list for parameters": [ID, {"type": "bytes", "parameters": ["x"], "field": "d"}],
    }.items()
}
SCHEMAS |= {f"{depth} levels": nested(depth) for depth in (40, 400, 3_000, 100_000)}
SCHEMAS["null for the row"] = b'{"schema":{"fields":[null]},"payload":{"op":"c"}}'
SCHEMAS["no JSON"] = b'{"schema":{"fields":[nul},"payload":{"op":"c"}}'


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("first", [True, False])
def test_a_schema_of_another_shape_makes_a_bad_record_and_a_mirror_names_it(name: str, first: bool) -> None:
    codec = DebeziumCodec(Fields(id=int, d=str), metadata=[], tombstones=True)
    good = record([ID, {"type": "string", "field": "d"}], {"id": 1, "d": "x"})
    values = [SCHEMAS[name], good, None, good] if first else [good, None, SCHEMAS[name], good]
    batch, bad = codec.decode_good(values)
    assert [row["id"] for row in batch.to_pylist()] == ([1, None, 1])
    assert [(each.index, each.reason) for each in bad] == [(0 if first else 2, NO_SCHEMA)]
    with pytest.raises(BadRecordError, match=NO_SCHEMA):
        DebeziumChanges().read(pa.array([b'{"id":1}']), pa.array([SCHEMAS[name]]))


def test_arrays_of_a_few_levels_are_read() -> None:
    value = nested(5)
    batch, bad = DebeziumCodec(pa.schema([("d", _lists(5))]), metadata=[]).decode_good([value])
    assert (batch.to_pylist(), bad) == ([{"d": []}], [])


def _lists(depth: int) -> pa.DataType:
    return pa.list_(_lists(depth - 1)) if depth else pa.string()


PARAMETERS = {
    "none": (DECIMAL, None, "the scale None, which is no number"),
    "text": (DECIMAL, {"scale": "x"}, "the scale 'x', which is no number"),
    "a list": (DECIMAL, {"scale": [1]}, "no number"),
    "large": (DECIMAL, {"scale": "1000000000"}, "a decimal of 1000000000 digits"),
    "negative": (DECIMAL, {"scale": "-1000000000"}, "a decimal of -1000000000 digits"),
    "bits": ("io.debezium.data.Bits", {"length": "x"}, "the length 'x', which is no number"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_a_column_that_make_no_sense_make_bad_records(name: str) -> None:
    its, parameters, reason = PARAMETERS[name]
    column = {"type": "bytes", "name": its, "field": "d"} | ({} if parameters is None else {"parameters": parameters})
    values = [record([ID, {"type": "string", "field": "d"}], {"id": 1, "d": "x"}), record([ID, column], {"id": 2})]
    batch, bad = DebeziumCodec(Fields(id=int, d=str), metadata=[]).decode_good(values)
    assert (batch.to_pylist(), [each.index for each in bad]) == ([{"id": 1, "d": "x"}], [1])
    assert bad[0].reason.startswith("d: ")
    assert reason in bad[0].reason
    with pytest.raises(BadRecordError) as raised:
        DebeziumChanges().read(pa.array([b'{"id":1}']), pa.array(values[1:]))
    assert reason in str(raised.value)


def test_a_column_with_a_name_that_a_mirror_needs_is_refused() -> None:
    value = record([ID, {"field": "_ratchet_op", "type": "string"}], {"id": 1})
    with pytest.raises(BadRecordError, match="_ratchet_op"):
        DebeziumChanges().read(pa.array([b'{"id":1}']), pa.array([value]))


def test_a_key_with_a_deep_schema_is_refused() -> None:
    value = record([ID], {"id": 1})
    key = b'{"schema":{"fields":' + b"[" * 100_000 + b'},"payload":{"id":1}}'
    with pytest.raises(BadRecordError, match="key"):
        DebeziumChanges().read(pa.array([key]), pa.array([value]))


def bits(length: str) -> dict[str, Any]:
    return {"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": length}}


def test_bits_without_a_limit_are_as_long_as_they_are() -> None:
    codec = DebeziumCodec(pa.schema([("d", pa.string())]), metadata=[])
    sent = base64.b64encode(bytes(range(1, 21))).decode()
    limited, unlimited = (record([{"field": "d", **bits(each)}], {"d": sent}) for each in ("160", str(2**31 - 1)))
    rows = codec.decode([limited, unlimited]).column("d").to_pylist()
    assert rows[0] == rows[1]
    assert len(rows[0]) == 160


#: The schema of a column, the type that is declared, a value that fits it, what is read of that,
#: and values that do not.
MISFITS: dict[str, tuple[dict[str, Any], pa.DataType, Any, Any, list[Any]]] = {
    "date": (
        {"type": "int64", "name": "io.debezium.time.Date"},
        pa.date32(),
        3,
        datetime.date(1970, 1, 4),
        [10**12, -(10**12)],
    ),
    "time": (
        {"type": "int64", "name": "io.debezium.time.MicroTime"},
        pa.time32("ms"),
        3_000,
        datetime.time(0, 0, 0, 3_000),
        [10**16],
    ),
    "variable decimal": (
        VARIABLE,
        pa.decimal128(20, 2),
        {"scale": 1, "value": "Dw=="},
        decimal.Decimal("1.50"),
        [{"scale": scale, "value": "Dw=="} for scale in (None, 77, -77, 2 * 10**9, -2 * 10**9)],
    ),
    "text for a variable decimal": ({**VARIABLE, "type": "string"}, pa.decimal128(20, 2), None, None, ["x"]),
    "text for a time": (
        {"type": "string", "name": "io.debezium.time.Timestamp"},
        pa.timestamp("us"),
        None,
        None,
        ["x", ""],
    ),
    "true for a time": (
        {"type": "boolean", "name": "io.debezium.time.Timestamp"},
        pa.timestamp("us"),
        None,
        None,
        [True],
    ),
    "text for a date": ({"type": "string", "name": "io.debezium.time.Date"}, pa.date32(), None, None, ["x"]),
    "numbers for geometry": (
        {"type": "struct", "fields": [{"field": "wkb", "type": "int64"}]},
        pa.binary(),
        None,
        None,
        [{"wkb": 5}],
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_value_that_its_column_does_not_hold_is_bad_and_the_others_are_not(name: str) -> None:
    column, declared, good, read, wrong = MISFITS[name]
    columns = [ID, {**column, "field": "d"}]
    sent = [good, *wrong, None, good, *wrong, good]
    values = [record(columns, {"id": at, "d": each}) for at, each in enumerate(sent)]
    batch, bad = DebeziumCodec(pa.schema([("id", pa.int64()), ("d", declared)]), metadata=[]).decode_good(values)
    fine = [at for at, each in enumerate(sent) if each not in wrong]
    assert batch.to_pylist() == [{"id": at, "d": None if sent[at] is None else read} for at in fine]
    assert [each.index for each in bad] == [at for at, each in enumerate(sent) if each in wrong]
    assert all(each.reason.startswith("d: ") and "is no" in each.reason for each in bad)


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (pa.date32(), 10**12),
        (pa.date32(), 1.5),
        (pa.date32(), True),
        (pa.date64(), 2**40),
        (pa.time32("ms"), 10**16),
        (pa.duration("us"), "x"),
        (pa.decimal128(20, 2), {"value": "Dw=="}),
        (pa.decimal128(20, 2), {"scale": 2 * 10**9, "value": "Dw=="}),
        (pa.binary(), {"wkb": 5}),
        (pa.map_(pa.string(), pa.string()), {"a": "b"}),
    ],
)
def test_without_schemas_too(declared: pa.DataType, value: Any) -> None:
    rows = [{"id": 1}, {"id": 2, "d": value}, {"id": 3}]
    values = [json.dumps({"before": None, "after": row, "source": {"lsn": 1}, "op": "c"}).encode() for row in rows]
    codec = DebeziumCodec(pa.schema([("id", pa.int64()), ("d", declared)]), metadata=[])
    batch, bad = codec.decode_good(values)
    assert [row["id"] for row in batch.to_pylist()] == [1, 3]
    assert [each.index for each in bad] == [1]
    assert bad[0].reason.startswith("d: ")


def test_values_of_many_schemas_are_grouped_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that writes each value with another schema costs a pass, not one per schema."""
    compared = 0
    starts_with, read = pc.starts_with, DebeziumCodec._read
    parts = []

    def counted(array: pa.Array, pattern: bytes) -> pa.Array:
        nonlocal compared
        compared += len(array)
        return starts_with(array, pattern)

    monkeypatch.setattr(pc, "starts_with", counted)
    monkeypatch.setattr(DebeziumCodec, "_read", lambda self, part: parts.append(part) or read(self, part))
    count = 600
    values = [None if at % 5 == 4 else record([ID], {"id": at}, more=at if at % 3 else "same") for at in range(count)]
    codec = DebeziumCodec(Fields(id=int), metadata=[], tombstones=True)
    batch, bad = codec.decode_good_array(pa.array(values, pa.binary()))
    assert bad == []
    assert batch.column("id").to_pylist() == [None if at % 5 == 4 else at for at in range(count)]
    assert compared <= 2 * count
    assert len(parts) == 2  # one with columns, and the nulls


@pytest.mark.parametrize("rows", [1, 3, debezium._FEW_ROWS + 1])
def test_columns_that_are_read_alike_are_read_together_in_a_small_batch(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a change with a schema of its own and 990 columns takes 990 readings."""
    text, number = {"type": "string"}, {"type": "int32"}
    columns = [{"field": f"c{at}", **(text if at % 2 else number)} for at in range(40)]
    names = {each["field"]: pa.string() if each["type"] == "string" else pa.int16() for each in columns}
    chance, values = random.Random(rows), []
    for at in range(rows):
        row = {name: f"t{at}" if kind == pa.string() else chance.randrange(9) for name, kind in names.items()}
        wrong = {f"c{2 * chance.randrange(20)}": 40_000} if at == 1 else {}
        row |= {"c7": None, "c9": "__debezium_unavailable_value"} | wrong
        value = record([ID, *columns], {"id": at, **row})
        deletion = value.replace(b'"before":null,"after":', b'"after":null,"before":').replace(b'"op":"c"', b'"op":"d"')
        values.append(deletion if at == 2 else value)
    codec = DebeziumCodec(pa.schema([("id", pa.int64()), *names.items()]), metadata=["unavailable"])
    read, readings = debezium.ColumnReader.read, []
    monkeypatch.setattr(debezium.ColumnReader, "read", lambda self, raw: readings.append(len(raw)) or read(self, raw))
    found = codec.decode_good(values)
    again = 3 if rows > 1 else 0  # for the bad value
    assert len(readings) == (3 if rows <= debezium._FEW_ROWS else 41) + again
    monkeypatch.setattr(debezium, "_FEW_ROWS", 0)
    alone = codec.decode_good(values)
    assert (found[0].to_pylist(), found[1]) == (alone[0].to_pylist(), alone[1])
    assert len(found[1]) == (rows > 1) and found[0].column("unavailable").to_pylist()[0] == ["c9"]


def test_a_value_that_is_cut_off_spoils_no_other_and_its_neighbours_make_no_difference() -> None:
    good = record([ID], {"id": 1})
    cut = good[:-20]
    codec: Codec = DebeziumCodec(Fields(id=int), metadata=[])
    for wrong in (cut, good[: good.index(b'"payload"')], good + b"x", good[:-1] + b"x"):
        alone = codec.decode_good([wrong])[1]
        for place in range(3):
            values = [good, good]
            values.insert(place, wrong)
            batch, bad = codec.decode_good(values)
            assert batch.num_rows == 2
            assert [(each.index, each.reason) for each in bad] == [(place, alone[0].reason)]


def test_groups_are_in_the_order_of_their_first_values() -> None:
    a, b = record([ID], {"id": 1}), record([ID], {"id": 1}, more="b")
    plain = b'{"op":"c"}'
    groups = debezium._by_prefix(pa.array([None, b, plain, a, b, a], pa.binary()))
    assert [places.tolist() for _, places in groups] == [[1, 4], [0, 2], [3, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["codec", "mirror", "key of a mirror"])
def test_large_schemas_do_not_stay_in_memory(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_cache, "KEPT_BYTES_MAX", 1 << 20)
    codec, changes, small = DebeziumCodec(Fields(id=int)), DebeziumChanges(), record([ID], {"id": 1})

    def read(number: int) -> object:
        value = record([{**ID, "doc": f"{by} {number}" + "x" * 200_000}], {"id": 1})
        if by == "codec":
            return codec.decode([value])
        keys, values = ([b'{"id": 1}'], [value]) if by == "mirror" else ([value], [small])
        return changes.read(pa.array(keys), pa.array(values))

    tracemalloc.start()
    try:
        for number in range(50):
            assert read(number)
        assert tracemalloc.get_traced_memory()[0] < 6 << 20
    finally:
        tracemalloc.stop()
