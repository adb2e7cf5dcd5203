"""Change records: what a real Debezium wrote (``tests.kit.debezium_types``), decoded and compared
with what the database said about the rows.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import pickle
from typing import Any

import pyarrow as pa
import pytest

from framework.errors import TopologyError
from framework.testing.conformance.codec import CodecContract
from framework.topology import Fields
from spouts import DebeziumChanges, DebeziumCodec, UndecodableValueError
from tests.kit.change_records import INT, TEXT, change_record
from tests.kit.debezium_types import COLUMNS, FOLDER, ROWS, read

#: Column -> the type that is declared for it. The others are text.
DECLARED: dict[str, pa.DataType] = {
    "id": pa.int32(),
    "a_bool": pa.bool_(),
    "a_bit": pa.bool_(),
    "small": pa.int16(),
    "whole": pa.int32(),
    "big": pa.int64(),
    "an_oid": pa.int64(),
    "single": pa.float32(),
    "double": pa.float64(),
    "moment_zoned": pa.timestamp("us", "UTC"),
    "moment": pa.timestamp("us"),
    "moment_0": pa.timestamp("ms"),
    "moment_3": pa.timestamp("ms"),
    "day": pa.date32(),
    "clock": pa.time64("us"),
    "clock_3": pa.time32("ms"),
    "clock_zoned": pa.time64("us"),
    "span": pa.duration("us"),
    "raw": pa.binary(),
    "place": pa.struct([("x", pa.float64()), ("y", pa.float64())]),
    "some": pa.int32(),
    "price": pa.decimal128(12, 2),
    "count": pa.decimal128(30, 0),
    "free": pa.decimal128(38, 12),
    "cash": pa.decimal128(20, 2),
    "ints": pa.list_(pa.int32()),
    "texts": pa.list_(pa.string()),
    "numbers": pa.list_(pa.decimal128(10, 2)),
    "moments": pa.list_(pa.timestamp("us", "UTC")),
    "days": pa.list_(pa.date32()),
    "truths": pa.list_(pa.bool_()),
}
#: The bits are known by the schema alone. Pairs are JSON.
BITS = ("bits", "bits_varying")
CODECS: dict[str, dict[str, str]] = {
    "usual": {},
    "text": {"decimals": "string", "times": "isostring", "binaries": "base64"},
    "numbers": {"decimals": "double", "times": "connect", "binaries": "hex"},
    "finer": {"times": "adaptive_time_microseconds", "binaries": "base64-url-safe"},
}
#: What a connector with these settings does not write exactly.
INEXACT = {
    "usual": {"span"},
    "text": {"span"},
    "numbers": {"moment", "clock", "span", "count", "free"},
    "finer": {"span"},
}


def codec(settings: str, schemas: str, **more: Any) -> DebeziumCodec:
    declared = dict(DECLARED)
    left_out: set[str] = set()
    if settings == "text":
        declared["span"] = pa.string()
    if settings == "numbers":
        declared["count"] = pa.float64()
        left_out = {"pairs"}  # a map
        left_out |= set(BITS) if schemas == "plain" else set()  # without a schema they look like hexadecimal text
    if schemas == "plain":
        declared.update(dict.fromkeys(BITS, pa.binary()))
    fields = pa.schema([(name, declared.get(name, pa.string())) for name in ("id", *COLUMNS) if name not in left_out])
    return DebeziumCodec(fields, **{**CODECS[settings], **more})


def parsed(name: str, text: str | None) -> Any:
    """A value as the database writes it, as Python has it."""
    if text is None:
        return None
    declared = DECLARED.get(name, pa.string())
    if name in ("ints", "texts", "numbers", "moments", "days", "truths"):
        if name == "texts":
            return {'{a,"b,c",NULL}': ["a", "b,c", None], "{}": [], '{""}': [""]}[text]
        items = [each.strip('"') for each in text.strip("{}").split(",") if each]
        return [None if each == "NULL" else scalar(declared.value_type, each) for each in items]
    if name == "pairs":
        return {'"a"=>"1", "b c"=>"d\\"e"': '{"a":"1","b c":"d\\"e"}', "": "{}", '"n"=>NULL': '{"n":null}'}[text]
    if name == "place":
        x, y = text.strip("()").split(",")
        return {"x": float(x), "y": float(y)}
    if name == "a_bit":
        return text == "1"
    if name == "letters":
        return text.ljust(4)
    if name == "address":
        return text.removesuffix("/128").removesuffix("/32")
    return scalar(declared, text)


def scalar(declared: pa.DataType, text: str) -> Any:
    types = pa.types
    if types.is_boolean(declared):
        return text.startswith("t")
    if types.is_integer(declared):
        return int(text)
    if types.is_float32(declared):
        return pa.scalar(float(text), pa.float32()).as_py()
    if types.is_floating(declared):
        return float(text)
    if types.is_decimal(declared):
        return decimal.Decimal(text.replace("$", "").replace(",", ""))
    if types.is_binary(declared):
        return bytes.fromhex(text.removeprefix("\\x"))
    if types.is_timestamp(declared):
        return datetime.datetime.fromisoformat(text)
    if types.is_date(declared):
        return datetime.date.fromisoformat(text)
    if types.is_time(declared):
        found = datetime.datetime.fromisoformat(f"2000-01-01 {text}")
        return found.astimezone(datetime.UTC).time() if found.tzinfo else found.time()
    return text


def said() -> list[dict[str, Any]]:
    return json.loads((FOLDER / "postgres-rows.json").read_text(encoding="utf-8"))


def values(name: str) -> list[bytes | None]:
    return [value for _, value in read(f"postgres-{name}")]


@pytest.mark.each_value_once
@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("schemas", ["plain", "schemas"])
@pytest.mark.parametrize("settings", list(CODECS))
def test_every_type_is_decoded_as_the_database_has_it(settings: str, schemas: str, size: int) -> None:
    records = values(f"{settings}-{schemas}-every")[:ROWS]
    its = codec(settings, schemas)
    found = [row for at in range(0, ROWS, size) for row in its.decode(records[at : at + size]).to_pylist()]
    for row, source in zip(found, said(), strict=True):
        assert row["op"] == "r"
        for name in ("id", *COLUMNS):
            if name in INEXACT[settings] or name not in row:
                continue
            if name in BITS:
                expected: Any = source[name]
                if expected is not None and schemas == "schemas":
                    expected = expected.rjust(13 if name == "bits" else 9, "0")
                elif expected is not None:
                    size_of = (len(expected) + 7) // 8
                    expected = int(expected or "0", 2).to_bytes(size_of, "little").rstrip(b"\0")
                    row[name] = row[name].rstrip(b"\0")
            else:
                expected = parsed(name, source[name])
            assert row[name] == expected, name


def test_what_a_connector_rounds_is_close() -> None:
    found = codec("numbers", "plain").decode(values("numbers-plain-every")[:1]).to_pylist()[0]
    assert found["price"] == decimal.Decimal("12.50")
    assert found["moment"] == datetime.datetime(2024, 2, 29, 12, 34, 56, 123000)
    assert found["clock"] == datetime.time(12, 34, 56, 123000)
    assert found["span"] == datetime.timedelta(days=1, seconds=7384.5)


@pytest.mark.parametrize("schemas", ["plain", "schemas"])
def test_changes_become_rows_in_order(schemas: str) -> None:
    its = DebeziumCodec(Fields(id=int, whole=int), metadata=["op", "lsn", "total_order", "table"], tombstones=True)
    found = its.decode(values(f"usual-{schemas}-every")).to_pylist()[ROWS:]
    assert [(row["op"], row["id"], row["whole"], row["total_order"]) for row in found] == [
        ("u", 1, 6, 1),
        ("d", 2, None, 1),  # the key changes
        (None, None, None, None),
        ("c", 9, -2147483648, 2),
        ("d", 3, None, 1),
        (None, None, None, None),
        ("t", None, None, 1),
    ]
    positions = [row["lsn"] for row in found if row["op"]]
    assert positions == sorted(positions)
    assert {row["table"] for row in found} == {"every", None}


@pytest.mark.parametrize("swapped", [False, True])
def test_records_that_were_written_again_are_the_same_changes(swapped: bool) -> None:
    """Each second one, as a program writes it that has read it as JSON."""
    columns = {"id": INT, "name": TEXT}
    records = [change_record("t", columns, "c", {"id": each, "name": f"wörd {each}"}) for each in range(6)]

    def again(value: bytes) -> bytes:
        found = json.loads(value)
        return json.dumps(dict(reversed(found.items())) if swapped else found, ensure_ascii=False, indent=1).encode()

    keys = [json.dumps({"schema": {"fields": [{"field": "id"}]}, "payload": {"id": each}}) for each in range(6)]
    values = [again(value) if place % 2 else value for place, (_, value) in enumerate(records) if value]
    plain, others = (pa.array(each, pa.binary()) for each in ([value for _, value in records], values))
    read = DebeziumCodec(Fields(id=int, name=str))
    assert read.decode(others.to_pylist()).equals(read.decode(plain.to_pylist()))
    (changes,) = DebeziumChanges().read(pa.array([each.encode() for each in keys], pa.binary()), others)
    assert (changes.key, changes.rows and changes.rows.num_rows) == (("id",), 6)


@pytest.mark.parametrize("schemas", ["plain", "schemas"])
def test_tombstones_and_records_about_others_are_left_out(schemas: str) -> None:
    its = DebeziumCodec(Fields(id=int))
    records = values(f"usual-{schemas}-every")
    left_out = its.left_out(records)
    assert left_out is not None
    assert [at for at, each in enumerate(records) if each is None] == list(left_out.nonzero()[0])
    about_others = [*values("transactions"), b'{"ts_ms": 1}', b'{"schema": {}, "payload": {"ts_ms": 1}}']
    found = its.left_out(about_others)
    assert found is not None and found.all()
    assert its.left_out([b'{"op": "c"}', b"{", b"1"]) is None


@pytest.mark.parametrize("schemas", ["plain", "schemas"])
def test_values_that_were_not_sent_are_named(schemas: str) -> None:
    fields = pa.schema(
        [("id", pa.int32()), ("words", pa.string()), ("raw", pa.binary()), ("ints", pa.list_(pa.int32()))]
    )
    records = values(f"usual-{schemas}-long")
    before, after = DebeziumCodec(fields, metadata=["unavailable"]).decode(records).to_pylist()
    assert before == {
        "id": 1,
        "words": "w" * 3000,
        "raw": b"\xaa" * 3000,
        "ints": list(range(1, 1001)),
        "unavailable": [],
    }
    assert after == {"id": 1, "words": None, "raw": None, "ints": None, "unavailable": ["words", "raw", "ints"]}
    batch, bad = DebeziumCodec(fields).decode_good(records)
    assert batch.num_rows == 1
    assert [each.index for each in bad] == [1]
    assert "REPLICA IDENTITY FULL" in bad[0].reason


def change(row: Any, op: str = "c", **more: Any) -> bytes:
    return json.dumps({"before": None, "after": row, "source": {"lsn": 1}, "op": op, **more}).encode()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{}", "no change record: it has no 'op'"),
        (b"7", "object"),
        (b"\xff", "value"),
        (change({"id": 1}, "x"), "op 'x' is no operation of Debezium"),
        (change(None), "op 'c' without the values after it"),
        (change(None, "d"), "a deleted row without its key"),
        (change({"id": "a"}), "id: 'a' is no int64"),
        (change({"id": 1, "price": "?"}), "price: '[?]' is no decimal128"),
        (change({"id": 1, "price": base64.b64encode(b"\x7f" * 12).decode()}), "price: .* is no decimal128"),
        (change({"id": 1, "at": 2**63 - 1}), "at: .* is no timestamp"),
        (change({"id": 1, "raw": "*"}), "raw: '[*]' is no binary"),
    ],
)
def test_a_bad_record_has_a_reason(value: bytes, reason: str) -> None:
    fields = pa.schema(
        [("id", pa.int64()), ("price", pa.decimal128(12, 2)), ("at", pa.timestamp("ns")), ("raw", pa.binary())]
    )
    its = DebeziumCodec(fields, times="connect", metadata=[])
    good = change({"id": 1, "price": "BOI=", "at": 1, "raw": ""})
    batch, bad = its.decode_good([good, value, good])
    assert batch.num_rows == 2
    assert [each.index for each in bad] == [1]
    with pytest.raises(UndecodableValueError, match=reason):
        its.decode([value])


def test_records_of_several_forms_keep_their_order() -> None:
    fields = pa.schema([("id", pa.int64()), ("free", pa.decimal128(20, 2)), ("rate", pa.float64())])
    schema = {
        "type": "struct",
        "fields": [
            {
                "field": "after",
                "type": "struct",
                "fields": [
                    {"field": "id", "type": "int64"},
                    {"field": "free", "type": "string"},
                    {"field": "rate", "type": "double"},
                ],
            }
        ],
    }

    def with_schema(value: bytes) -> bytes:
        return json.dumps({"schema": schema, "payload": json.loads(value)}, separators=(",", ":")).encode()

    records = [
        change({"id": 1, "free": None, "rate": 1}),
        with_schema(change({"id": 2, "free": "1.5", "rate": 2.5})),
        None,
        change({"id": 3, "free": {"scale": 1, "value": "Dw=="}, "rate": "NaN"}),
        with_schema(change({"id": 4, "free": "-0.25", "rate": "Infinity"})),
        change({"id": 5, "free": "lg==", "rate": 0.5}),
        json.dumps({"payload": json.loads(change({"id": 6})), "schema": schema}).encode(),
        json.dumps({"payload": 7, "schema": schema}).encode(),
    ]
    batch, bad = DebeziumCodec(fields, metadata=[], tombstones=True).decode_good(records)
    free = decimal.Decimal
    rows = batch.to_pylist()
    assert [row["id"] for row in rows] == [1, 2, None, 3, 4, 5, 6]
    assert [row["free"] for row in rows] == [None, free("1.5"), None, free("1.5"), free("-0.25"), free("-1.06"), None]
    assert str([row["rate"] for row in rows]) == "[1.0, 2.5, None, nan, inf, 0.5, None]"
    assert [each.index for each in bad] == [7]


def test_the_position_of_a_binary_log_grows() -> None:
    def at(file: str, pos: int) -> bytes:
        return change({"id": 1}, source={"file": file, "pos": pos, "row": 0})

    its = DebeziumCodec(Fields(id=int), metadata={"sequence": "position"})
    records = [at("binlog.000009", 4_000_000_000), at("binlog.000010", 4), change({"id": 1}), at("strange", 1)]
    assert its.decode(records)["sequence"].to_pylist() == [9 * 2**32 + 4_000_000_000, 10 * 2**32 + 4, 1, None]


def test_it_travels_and_knows_its_fields() -> None:
    its = pickle.loads(pickle.dumps(DebeziumCodec(Fields(id=int), metadata={"change_op": "op"})))
    assert its.fields == Fields(id=int, change_op=str)
    assert its.decode([]).num_rows == 0
    assert its.decode([change({"id": 7})]).to_pylist() == [{"id": 7, "change_op": "c"}]


@pytest.mark.parametrize(
    ("fields", "more", "reason"),
    [
        (Fields("id"), {}, "a type for every field"),
        (Fields(op=str), {}, "change_op"),
        (Fields(id=int), {"metadata": ["lsm"]}, "perhaps 'lsn' is meant"),
        (Fields(id=int), {"metadata": "op"}, "must be a list"),
        (Fields(id=int), {"times": "exact"}, "times must be one of"),
    ],
)
def test_what_cannot_be_decoded_is_refused(fields: Fields, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(TopologyError, match=reason):
        DebeziumCodec(fields, **more)


class TestContract(CodecContract):
    def codec(self) -> DebeziumCodec:
        return DebeziumCodec(Fields(id=int, name=str), metadata=["op"])

    def good(self) -> list[tuple[bytes, dict[str, Any]]]:
        return [(change({"id": number, "name": "a"}), {"id": number, "name": "a", "op": "c"}) for number in (1, 2)]

    def bad(self) -> list[bytes]:
        return [b"", b"{}", change(None), change({"id": "x"})]
