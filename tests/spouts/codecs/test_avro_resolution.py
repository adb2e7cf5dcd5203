"""Values of one schema as values of another: exactly, or a refusal (2.9)."""

from __future__ import annotations

import datetime
import decimal
import io
import struct
import sys
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from framework.errors import TopologyError
from spouts import AvroCodec
from spouts.codecs import avro_resolution
from spouts.codecs.avro_binary import EMPTY_ITEMS_MAX
from spouts.codecs.avro_schema import DEPTH_MAX

pytestmark = pytest.mark.behaviour("2.9")

#: One is decoded alone, a thousand together: the result must be the same.
MANY = pytest.mark.parametrize("many", [1, 1_000])


def record(kind: Any, name: str = "R", **field: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": "at", "type": kind, **field}]}


def logical(kind: str, called: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": called, **more}


def number(value: int) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, "long", value)
    return out.getvalue()


def decoded(codec: AvroCodec, value: bytes, many: int) -> tuple[list[Any], list[str]]:
    """The rows and the reasons, each once, of a value that comes ``many`` times."""
    batch, bad = codec.decode_good([value] * many)
    assert batch.num_rows + len(bad) == many
    column = batch.column(0)
    plain = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
    rows = plain.to_pylist()
    assert all(row == rows[0] for row in rows)
    return rows[:1], sorted({each.reason for each in bad})


# --- logical types --------------------------------------------------------------------------------

INTS = ["date", "time-millis"]
LONGS = ["time-micros"]
LONGS += [f"{zone}timestamp-{unit}" for zone in ("", "local-") for unit in ("millis", "micros", "nanos")]
TIMES = [*[("int", each) for each in INTS], *[("long", each) for each in LONGS]]
UNITS = {"millis": 10**3, "micros": 10**6, "nanos": 10**9}


@MANY
@pytest.mark.parametrize("reader", TIMES, ids=str)
@pytest.mark.parametrize("writer", TIMES, ids=str)
def test_every_pair_of_times_is_converted_or_refused(writer: Any, reader: Any, many: int) -> None:
    (writer_kind, was), (reader_kind, becomes) = writer, reader
    families = [each.rpartition("-")[0] for each in (was, becomes)]
    converts = was == becomes or (families[0] == families[1] != "")
    schemas = record(logical(writer_kind, was)), record(logical(reader_kind, becomes))
    if not converts or (writer_kind, reader_kind) == ("long", "int"):
        with pytest.raises(TopologyError, match=r"R\.at: written as"):
            AvroCodec(*schemas)
        return
    if was == becomes == "date":
        assert AvroCodec(*schemas).decode([number(19_000)] * many).to_pylist()[0] == {"at": datetime.date(2022, 1, 8)}
        return
    seconds = 3_600
    old, new = UNITS[was.rpartition("-")[2]], UNITS[becomes.rpartition("-")[2]]
    codec = AvroCodec(*schemas)
    rows, reasons = decoded(codec, number(seconds * old), many)
    whole = datetime.time(1) if families[0] == "time" else seconds * new
    assert (rows, reasons) == ([whole], [])
    if old > new:
        rows, reasons = decoded(codec, number(seconds * old + 1), many)
        assert rows == []
        assert f"is not exactly a value of {becomes}" in reasons[0]
    if old < new and families[0] != "time":
        rows, reasons = decoded(codec, number(2**63 // (new // old) + 1), many)
        assert rows == []
        assert f"is too large for {becomes}" in reasons[0]


@MANY
@pytest.mark.parametrize(
    ("kind", "name", "day"), [("int", "time-millis", 86_400_000), ("long", "time-micros", 86_400_000_000)]
)
def test_a_time_of_day_is_within_the_day(kind: str, name: str, day: int, many: int) -> None:
    codec = AvroCodec(record(logical(kind, name)))
    assert decoded(codec, number(day - 1), many)[1] == []
    for wrong in (-1, day):
        rows, reasons = decoded(codec, number(wrong), many)
        assert rows == []
        assert "is not a time of day" in reasons[0]


@MANY
def test_a_plain_number_is_read_as_a_time_and_a_time_as_a_plain_number(many: int) -> None:
    at = logical("long", "timestamp-millis")
    assert decoded(AvroCodec(record("long"), record(at)), number(5), many) == ([5], [])
    assert decoded(AvroCodec(record("int"), record(at)), number(5), many) == ([5], [])
    assert decoded(AvroCodec(record(at), record("long")), number(5), many) == ([5], [])
    assert decoded(AvroCodec(record(logical("long", "timestamp-hours"))), number(5), many) == ([5], [])


@pytest.mark.parametrize("container", ["union", "array", "map", "record"])
def test_units_are_converted_wherever_a_type_stands(container: str) -> None:
    def inside(unit: str) -> dict[str, Any]:
        at = logical("long", f"timestamp-{unit}")
        inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": ["null", at]}]}
        kinds = {
            "union": ["null", at],
            "array": {"type": "array", "items": at},
            "map": {"type": "map", "values": at},
            "record": inner,
        }
        return record(kinds[container])

    one = number(1_000)
    value = {
        "union": b"\x02" + one,
        "array": b"\x02" + one + b"\x00",
        "map": b"\x02\x02k" + one + b"\x00",
        "record": b"\x02" + one,
    }
    moment = datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
    expected = {"union": moment, "array": [moment], "map": [("k", moment)], "record": {"x": moment}}
    codec = AvroCodec(inside("millis"), inside("micros"))
    assert codec.decode([value[container]]).to_pylist() == [{"at": expected[container]}]
    with pytest.raises(TopologyError, match="written as timestamp-millis, which is not read as time-micros"):
        AvroCodec(inside("millis"), record(_replaced(inside("millis")["fields"][0]["type"])))


def _replaced(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_replaced(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("logicalType"):
        return logical("long", "time-micros")
    return {key: _replaced(value) for key, value in schema.items()}


def decimals(precision: int, scale: int, kind: str = "bytes", **more: Any) -> dict[str, Any]:
    return logical(kind, "decimal", precision=precision, scale=scale, **more)


@MANY
def test_decimals(many: int) -> None:
    codec = AvroCodec(record(decimals(4, 2)))
    assert decoded(codec, b"\x04\x04\xd2", many) == ([decimal.Decimal("12.34")], [])
    assert decoded(codec, b"\x0a\xff\xff\xff\xfb\x2e", many) == ([decimal.Decimal("-12.34")], [])
    for wrong, reason in [
        (b"\x04\x27\x10", "more digits than decimal(4, 2)"),
        (b"\x00", "a decimal of no bytes"),
        (b"\x14" + b"\x01" * 10, "a decimal of 10 bytes"),
    ]:
        rows, reasons = decoded(codec, wrong, many)
        assert rows == []
        assert reason in reasons[0]
    wider = AvroCodec(record(decimals(4, 2)), record(decimals(40, 2)))
    assert decoded(wider, b"\x04\x04\xd2", many) == ([decimal.Decimal("12.34")], [])
    large = AvroCodec(record(decimals(76, 30)))
    digits = int("7" * 76)
    body = digits.to_bytes(32, "big", signed=True)
    assert decoded(large, b"\x40" + body, many)[0] == [decimal.Decimal((0, (7,) * 76, -30))]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (decimals(4, 2), decimals(4, 3)),
        (decimals(4, 2), "string"),
        ("string", decimals(4, 2)),
        (decimals(4, 2), decimals(4, 2, "fixed", size=4, name="F")),
    ],
)
def test_decimals_without_a_conversion_are_refused(writer: Any, reader: Any) -> None:
    with pytest.raises(TopologyError, match=r"R\.at: written as"):
        AvroCodec(record(writer), record(reader))


def test_a_decimal_that_the_specification_does_not_allow_is_bytes() -> None:
    for each in (decimals(2, 3), decimals(0, 0), {"type": "bytes", "logicalType": "decimal"}):
        assert AvroCodec(record(each)).fields.type_of("at") == pa.binary()
    with pytest.raises(TopologyError, match=r"decimal\(77, 0\) has more digits than Arrow's 76"):
        AvroCodec(record(decimals(77, 0)))


# --- promotions and unions ------------------------------------------------------------------------


@MANY
@pytest.mark.parametrize("value", [0, -1, 2**53 + 1, 2**24 + 1, 2**63 - 1, -(2**63), 2**60 + 2**36 + 1, 2**60 + 2**36])
def test_a_long_becomes_the_nearest_float(value: int, many: int) -> None:
    rows, _ = decoded(AvroCodec(record("long"), record("float")), number(value), many)
    import numpy as np

    assert rows == [float(np.int64(value).astype(np.float32))]


@MANY
def test_text_and_bytes_are_read_as_each_other(many: int) -> None:
    assert decoded(AvroCodec(record("string"), record("bytes")), b"\x04\xc3\xa4", many) == (["ä".encode()], [])
    assert decoded(AvroCodec(record("bytes"), record("string")), b"\x04\xc3\xa4", many) == (["ä"], [])
    rows, reasons = decoded(AvroCodec(record("bytes"), record("string")), b"\x04\xc3\xc3", many)
    assert rows == []
    assert "not valid UTF-8" in reasons[0]


@MANY
def test_of_a_union_only_the_branches_that_resolve_are_good(many: int) -> None:
    codec = AvroCodec(record(["null", "int", "string"]), record(["null", "long"]))
    assert decoded(codec, b"\x00", many) == ([None], [])
    assert decoded(codec, b"\x02\x0e", many) == ([7], [])
    assert "written as string, which is not read as long" in decoded(codec, b"\x04\x02a", many)[1][0]
    narrow = AvroCodec(record(["null", "int"]), record("int"))
    assert "written as null" in decoded(narrow, b"\x00", many)[1][0]
    with pytest.raises(TopologyError, match=r"R\.at: written as string, which is not read as long"):
        AvroCodec(record(["null", "string"]), record(["null", "long"]))


def test_a_field_that_is_not_written_needs_a_default() -> None:
    with pytest.raises(TopologyError, match="R: field 'other' is not written, and has no default"):
        AvroCodec(record("long"), {**record("long"), "fields": [{"name": "other", "type": "long"}]})


def test_other_names_need_an_alias() -> None:
    with pytest.raises(
        TopologyError, match="written as a.R, which is not read as b.S: give the reader's type this name"
    ):
        AvroCodec({**record("long"), "namespace": "a"}, {**record("long", "S"), "namespace": "b"})
    assert AvroCodec({**record("long"), "namespace": "a"}, {**record("long"), "namespace": "b"}).decode([b"\x02"])
    assert AvroCodec({**record("long"), "namespace": "a"}, {**record("long", "S"), "aliases": ["a.R"]}).decode(
        [b"\x02"]
    )


@MANY
def test_symbols_that_the_reader_does_not_know_become_its_default(many: int) -> None:
    old = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    new = {"type": "enum", "name": "E", "symbols": ["C", "A"]}
    codec = AvroCodec(record(old), record(new))
    assert decoded(codec, b"\x00", many) == (["A"], [])
    assert "symbol 'B' is not one of E, which has no default" in decoded(codec, b"\x02", many)[1][0]
    assert decoded(AvroCodec(record(old), record({**new, "default": "C"})), b"\x02", many) == (["C"], [])


# --- defaults -------------------------------------------------------------------------------------

FIXED = {"type": "fixed", "name": "F", "size": 2}
INNER = {
    "type": "record",
    "name": "I",
    "fields": [{"name": "b", "type": "bytes", "default": "\u00ff"}, {"name": "n", "type": "int"}],
}


@MANY
@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("bytes", "\u00ff\u0000", b"\xff\x00"),
        (FIXED, "\u0080\u00ff", b"\x80\xff"),
        (decimals(4, 2), "\u0004\u00d2", decimal.Decimal("12.34")),
        (decimals(4, 2, "fixed", size=2, name="D"), "\u00fb\u002e", decimal.Decimal("-12.34")),
        (["bytes", "null"], "\u00ff", b"\xff"),
        (["null", "bytes"], None, None),
        (["null", "bytes"], "\u00ff", b"\xff"),
        ({"type": "array", "items": "bytes"}, ["\u00ff", ""], [b"\xff", b""]),
        ({"type": "map", "values": FIXED}, {"k": "\u0080\u00ff"}, [("k", b"\x80\xff")]),
        (INNER, {"n": 7}, {"b": b"\xff", "n": 7}),
        (INNER, {"b": "\u00fe", "n": 7}, {"b": b"\xfe", "n": 7}),
        ({"type": "array", "items": ["null", INNER]}, [None, {"n": 1}], [None, {"b": b"\xff", "n": 1}]),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
        ("double", 1, 1.0),
        ("float", 0.5, 0.5),
        ("boolean", True, True),
        (logical("int", "time-millis"), 3_600_000, datetime.time(1)),
        (logical("int", "date"), 19_000, datetime.date(2022, 1, 8)),
    ],
    ids=str,
)
def test_defaults_of_every_type(kind: Any, default: Any, expected: Any, many: int) -> None:
    reader = {**record("long"), "fields": [{"name": "more", "type": kind, "default": default}]}
    assert AvroCodec(record("long"), reader).decode([b"\x02"] * many).to_pylist() == [{"more": expected}] * many


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("bytes", "\u0100"),
        (FIXED, "\u00ff"),
        ("int", 2**31),
        ("int", True),
        ("int", 1.5),
        ("long", "1"),
        ("string", None),
        ("string", "\ud800"),
        ("float", 1e300),
        ("boolean", 1),
        (["null", "int"], "x"),
        (INNER, {}),
        ({"type": "array", "items": "int"}, {}),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B"),
        (decimals(2, 0), "\u007f"),
        (logical("int", "time-millis"), -1),
    ],
    ids=str,
)
def test_a_default_of_another_type_is_refused(kind: Any, default: Any) -> None:
    reader = {**record("long"), "fields": [{"name": "more", "type": kind, "default": default}]}
    with pytest.raises(TopologyError, match=r"R\.more: the default is not valid"):
        AvroCodec(record("long"), reader)


# --- names ----------------------------------------------------------------------------------------


def test_a_name_means_the_type_of_the_namespace_around_it() -> None:
    one = {"type": "enum", "name": "Kind", "namespace": "one", "symbols": ["X"]}
    fields = [{"name": "k", "type": {"type": "fixed", "name": "Kind", "size": 2}}, {"name": "l", "type": "Kind"}]
    two = {"type": "record", "name": "two.P", "fields": [*fields, {"name": "m", "type": "one.Kind"}]}
    schema = {**record(one), "namespace": "shop"}
    none = {"type": "fixed", "name": "Kind", "namespace": "", "size": 1}
    schema["fields"] += [{"name": "a", "type": none}, {"name": "b", "type": two}]
    row = AvroCodec(schema).decode([b"\x00.abcd\x00"]).to_pylist()[0]
    assert row == {"at": "X", "a": b".", "b": {"k": b"ab", "l": b"cd", "m": "X"}}


def test_a_name_that_its_namespace_does_not_define_has_none() -> None:
    outer = {"type": "fixed", "name": "F", "namespace": "", "size": 1}
    inner = {"type": "record", "name": "I", "fields": [{"name": "f", "type": "F"}]}
    schema = {**record(outer), "namespace": "shop"}
    schema["fields"].append({"name": "b", "type": inner})
    assert AvroCodec(schema).decode([b"xy"]).to_pylist() == [{"at": b"x", "b": {"f": b"y"}}]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (record([["null"], "int"]), "a union of union, int"),
        (record(["int", "int"]), "a union of int, int"),
        ({"type": "record", "name": "R"}, "fields must be a list"),
        ({"type": "record", "fields": []}, "name must be a text"),
        ({"type": "record", "name": "\ud800", "fields": []}, "name must be a text"),
        ({**record("int"), "fields": [{"name": "at", "type": "int"}] * 2}, "'at' is declared twice"),
        (record({"type": "array"}), "lacks 'items'"),
        (record({"type": "enum", "name": "E", "symbols": []}), "symbols must be"),
        (record({"type": "fixed", "name": "F", "size": -1}), "size must be"),
        (record({"type": "fixed", "name": "F", "size": 2**40}), "size must be"),
        (record({"type": 5}), "'5' is not defined"),
        (record({"type": {"type": "fixed", "name": "R", "size": 1}}), "'R' is defined twice"),
        ({"type": "record", "name": "R", "fields": []}, "a record without fields has no columns"),
        ("[" * 100_000, "cannot be read"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_schema_that_is_not_valid_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        AvroCodec(schema)


# --- damaged values -------------------------------------------------------------------------------

ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}


@MANY
@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (["null", "int"], b"\x04\x02", "chooses number 2 of the union R.at, which has 2"),
        (["null", "int"], b"\x01\x02", "chooses number -1"),
        (["null", "int"], b"\x84\x00\x02", "chooses number 2"),
        (ENUM, b"\x04", "chooses number 2 of enum E, which has 2"),
        (ENUM, b"\x01", "chooses number -1"),
        ("boolean", b"\x07", "byte 0 is 7, which is not a boolean"),
        (["null", "boolean"], b"\x02\x02", "byte 1 is 2, which is not a boolean"),
        ("int", b"\xff\xff\xff\xff\x1f", "more than 32 bits"),
        ("int", b"\x80\x80\x80\x80\x80\x00", "more than 32 bits"),
        ("long", b"\xff" * 9 + b"\x03", "more than 64 bits"),
        ("long", b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        ("long", b"\xff" * 9 + b"\x81\x00", "more than 64 bits"),
        ("string", b"\x01", "length at byte 0 is negative"),
        ("bytes", b"\x07abc", "length at byte 0 is negative"),
        ("string", b"\x02\xff", "not valid UTF-8"),
        ("string", b"\x06ab", "ends early"),
        ("double", b"1234567", "ends early"),
        ("float", b"123", "ends early"),
        (FIXED, b"1", "ends early"),
        ({"type": "array", "items": "int"}, b"\x02\x02", "ends early"),
        ({"type": "array", "items": "int"}, b"\xfe\xff\xff\xff\x0f\x02", "ends early"),
        ({"type": "array", "items": "int"}, b"\x01\x04\x02\x00", "do not take the bytes that it names"),
        ({"type": "map", "values": "int"}, b"\x02\x01k\x02\x00", "length at byte 1 is negative"),
        ("null", b"\x00", "1 bytes are left"),
        ("int", b"", "ends early"),
    ],
    ids=str,
)
def test_a_damaged_value_is_bad_alone_and_among_others(kind: Any, value: bytes, reason: str, many: int) -> None:
    rows, reasons = decoded(AvroCodec(record(kind)), value, many)
    assert rows == []
    assert len(reasons) == 1
    assert reason in reasons[0]


@MANY
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("int", b"\x82\x00", 1),  # longer than needed, which the specification does not forbid
        ("long", b"\xff" * 9 + b"\x01", -(2**63)),
        ({"type": "array", "items": "int"}, b"\x01\x02\x02\x02\x04\x00", [1, 2]),  # blocks with and without a size
        ({"type": "map", "values": "int"}, b"\x04\x02k\x02\x02k\x04\x00", [("k", 2)]),  # the last one of a key
    ],
    ids=str,
)
def test_other_encodings_of_a_value_are_good(kind: Any, value: bytes, expected: Any, many: int) -> None:
    assert decoded(AvroCodec(record(kind)), value, many) == ([expected], [])


# --- bounds ---------------------------------------------------------------------------------------

TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [
        {"name": "left", "type": ["null", "Tree"]},
        {"name": "sons", "type": {"type": "array", "items": "Tree"}},
    ],
}
WITH_TREE = {**record("long"), "fields": [{"name": "tree", "type": TREE}, {"name": "at", "type": "long"}]}


@pytest.mark.parametrize("levels", [10_000, 50_000, DEPTH_MAX + 1])
def test_a_value_that_nests_deeply_is_bad(levels: int) -> None:
    """The reader does not want it, and it must be passed over all the same."""
    codec = AvroCodec(WITH_TREE, record("long"))
    assert codec.decode([b"\x02\x00\x00\x00\x0e"]).to_pylist() == [{"at": 7}]
    for deep in (b"\x02" * levels, b"\x00\x02" * levels):
        batch, bad = codec.decode_good([deep, b"\x00\x00\x0e"])
        assert batch.to_pylist() == [{"at": 7}]
        assert f"nests more than {DEPTH_MAX}" in bad[0].reason


NOTHING = {"type": "record", "name": "Nothing", "fields": [{"name": "n", "type": "null"}]}
EMPTIES = ["null", NOTHING, {"type": "fixed", "name": "F", "size": 0}]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("items", EMPTIES, ids=str)
def test_items_without_bytes_are_few(items: Any, kept: bool) -> None:
    schema = record({"type": "array", "items": items})
    codec = (
        AvroCodec(schema)
        if kept
        else AvroCodec(schema, {**schema, "fields": [{"name": "x", "type": "int", "default": 1}]})
    )
    billion = number(10**9) + b"\x00"
    batch, bad = codec.decode_good([billion, number(3) + b"\x00", number(EMPTY_ITEMS_MAX + 1) + b"\x00"])
    assert batch.num_rows == 1
    assert [each.index for each in bad] == [0, 2]
    assert f"more than {EMPTY_ITEMS_MAX:,} items" in bad[0].reason


def test_items_without_bytes_are_counted_over_the_whole_value() -> None:
    schema = record({"type": "array", "items": {"type": "array", "items": "null"}})
    each = number(EMPTY_ITEMS_MAX) + b"\x00"
    batch, bad = AvroCodec(schema).decode_good([b"\x04" + each * 2 + b"\x00", b"\x02" + each + b"\x00"])
    assert batch.num_rows == 1
    assert [each.index for each in bad] == [0]


def doubling(leaf: Any, levels: int) -> list[Any]:
    """Records each of which holds the one before it twice: the last holds 2 ** levels leaves."""
    kinds: list[Any] = [{"type": "record", "name": "T0", "fields": [{"name": "x", "type": leaf}]}]
    for level in range(1, levels + 1):
        fields = [{"name": name, "type": f"T{level - 1}"} for name in "ab"]
        kinds.append({"type": "record", "name": f"T{level}", "fields": fields})
    return kinds


@pytest.mark.parametrize("leaf", ["null", "int"])
def test_records_that_multiply_without_bytes_take_no_time(leaf: str) -> None:
    fields = [{"name": f"f{n}", "type": ["null", each]} for n, each in enumerate(doubling(leaf, 40))]
    writer = {**record("long"), "fields": [*fields, {"name": "at", "type": "long"}]}
    codec = AvroCodec(writer, record("long"))
    batch, bad = codec.decode_good([b"\x00" * 40 + b"\x02" + b"\x0e"])
    assert (batch.to_pylist(), len(bad)) == (([{"at": 7}], 0) if leaf == "null" else ([], 1))
    with pytest.raises(TopologyError, match="fields in fields"):
        AvroCodec(writer)


def test_types_in_types_are_bounded() -> None:
    deep: Any = "int"
    for _ in range(DEPTH_MAX + 1):
        deep = {"type": "array", "items": deep}
    with pytest.raises(TopologyError, match=f"more than {DEPTH_MAX} types"):
        AvroCodec(record(deep))
    kinds: list[Any] = [{"type": "record", "name": "T0", "fields": [{"name": "x", "type": "int"}]}]
    for level in range(1, 3_000):
        kinds.append({"type": "record", "name": f"T{level}", "fields": [{"name": "a", "type": f"T{level - 1}"}]})
    fields = [{"name": f"f{n}", "type": ["null", each]} for n, each in enumerate(kinds)]
    chained = {**record("long"), "fields": [*fields, {"name": "at", "type": "long"}]}
    with pytest.raises(TopologyError, match=f"more than {DEPTH_MAX} types"):
        AvroCodec(chained)
    _, bad = AvroCodec(chained, record("long")).decode_good([b"\x00" * 2_999 + b"\x02\x02\x0e"])
    assert f"nests more than {DEPTH_MAX}" in bad[0].reason
    chosen = {
        **record(["long", *kinds]),
        "fields": [*record(["long", *kinds])["fields"], {"name": "y", "type": "T2999"}],
    }
    with pytest.raises(TopologyError, match=f"more than {DEPTH_MAX} types"):
        AvroCodec(chosen, record("long"))


def test_a_small_value_takes_little_memory() -> None:
    """A length of gigabytes reserves nothing."""
    for kind in ("string", "bytes", {"type": "array", "items": "double"}, {"type": "map", "values": "long"}):
        _, bad = AvroCodec(record(kind)).decode_good([number(2**40)] * 20)
        assert len(bad) == 20
    assert sys.getrecursionlimit() >= 1_000  # untouched


def test_floats_are_read_as_they_are() -> None:
    value = struct.pack("<f", 0.1)
    assert AvroCodec(record("float"), record("double")).decode([value]).to_pylist() == [
        {"at": struct.unpack("<f", value)[0]}
    ]


def test_the_defaults_of_a_reader_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 26 kB of a union of 500 records, each of which lacked a hundred fields, they took three
    seconds."""
    fields = [{"name": f"f{number}", "type": "long", "default": number} for number in range(20)]
    union = [{"type": "record", "name": f"space{number}.R", "fields": []} for number in range(50)]
    made: list[Any] = []
    default_of = avro_resolution.default_of
    monkeypatch.setattr(
        avro_resolution, "default_of", lambda field, record: made.append(field) or default_of(field, record)
    )
    codec = AvroCodec(union, {"type": "record", "name": "R", "fields": fields})
    assert codec.decode([number(7)]).to_pylist() == [{f"f{each}": each for each in range(20)}]
    assert len(made) < 100


def test_a_field_declared_twice_among_many_is_named() -> None:
    fields = [{"name": f"f{number}", "type": "long"} for number in (*range(2_000), 1_999)]
    with pytest.raises(TopologyError, match="field 'f1999' is declared twice"):
        AvroCodec({"type": "record", "name": "R", "fields": fields})
