"""Decimals with digits far behind the point: those that Arrow's own conversions end the process
with, or read as 0.
"""

from __future__ import annotations

import decimal
from typing import Any

import pyarrow as pa
import pytest

from framework.topology.arrow_columns import cast_column, column_of
from spouts import CsvCodec, DebeziumCodec, JsonCodec

KINDS = [pa.decimal128(18, 2), pa.decimal256(40, 3)]
#: Texts of numbers that no decimal holds.
FAR = ["1e-77", "1e-3000000", "1E-100000000", "-1e-2000000000", f"0.{'0' * 90}1", f"1.{'3' * 60}"]
#: Texts, and what they are.
NEAR = {"125e-1": "12.5", "1.5e1": "15", "0e-100000000": "0", f"0.10{'0' * 60}": "0.1", "-2.50E+0": "-2.5", "7": "7"}


def numbers(batch: pa.RecordBatch) -> list[decimal.Decimal]:
    return [each["d"] for each in batch.to_pylist()]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> pa.DataType:
    return request.param


@pytest.mark.parametrize("form", ['{"d":%s}', '{"d":"%s"}'])
def test_json_refuses_what_a_decimal_does_not_hold(kind: pa.DataType, form: str) -> None:
    codec = JsonCodec(pa.schema([("d", kind), ("f", pa.float64())]))
    batch, bad = codec.decode_good([(form % each).encode() for each in (*FAR, *NEAR)])
    assert numbers(batch) == [decimal.Decimal(each) for each in NEAR.values()]
    assert [each.index for each in bad] == list(range(len(FAR)))
    assert all(f"does not fit, and Fields declares {kind}" in each.reason for each in bad)


def test_json_reads_the_other_fields_of_a_rewritten_value_as_they_are() -> None:
    schema = pa.schema([("d", KINDS[0]), ("f", pa.float64()), ("n", pa.int64()), ("t", pa.string())])
    value = '{"d":1e-1,"f":1.7976931348623157e-300,"n":9223372036854775807,"t":"ß\\u0022\\n1e-9","more":[1e-5]}'
    usual = value.replace("1e-1,", "0.1,").replace("\\u0022", '\\"').replace("1e-9", "1f-9").replace("[1e-5]", "0")
    found, expected = (JsonCodec(schema).decode([each.encode()]).to_pylist()[0] for each in (value, usual))
    assert found | {"t": ""} == expected | {"t": ""} and found["t"] == 'ß"\n1e-9'


def test_escaped_digits_of_json_and_damaged_json_do_not_reach_arrow() -> None:
    codec = JsonCodec(pa.schema([("d", KINDS[0])]))
    escaped = b'{"d":"1\\u0065-100000000"}'
    batch, bad = codec.decode_good([escaped, b'{"d":1e-100000000,}', b'{"d":1e-100000000', b'{"d":1e-9,"d":2}'])
    assert batch.num_rows == 0 and len(bad) == 4


def test_decimals_inside_of_others_are_read_likewise() -> None:
    codec = JsonCodec(pa.schema([("a", pa.struct([("d", pa.list_(KINDS[0]))]))]))
    batch, bad = codec.decode_good([b'{"a":{"d":[1,1e-100000000]}}', b'{"a":{"d":[1e-1,"2.5e-1",null]}}'])
    assert batch.to_pylist() == [{"a": {"d": [decimal.Decimal("0.10"), decimal.Decimal("0.25"), None]}}]
    assert [each.reason for each in bad] == ["a.d[]: 1e-100000000 does not fit, and Fields declares decimal128(18, 2)"]


def test_csv_refuses_what_a_decimal_does_not_hold(kind: pa.DataType) -> None:
    batch, bad = CsvCodec(pa.schema([("d", kind)])).decode_good([each.encode() for each in (*FAR, "x", "1_0", *NEAR)])
    assert numbers(batch) == [decimal.Decimal(each) for each in NEAR.values()]
    assert [each.index for each in bad] == list(range(len(FAR) + 2))


def test_debezium_refuses_what_a_decimal_does_not_hold(kind: pa.DataType) -> None:
    codec = DebeziumCodec(pa.schema([("d", kind)]), decimals="string", metadata=())
    values = [f'{{"before":null,"after":{{"d":"{each}"}},"op":"c"}}'.encode() for each in (*FAR, *NEAR)]
    batch, bad = codec.decode_good(values)
    assert numbers(batch) == [decimal.Decimal(each) for each in NEAR.values()]
    assert [each.index for each in bad] == list(range(len(FAR)))


def variable(scale: Any, digits: str = "Dw==") -> bytes:
    return f'{{"before":null,"after":{{"d":{{"scale":{scale},"value":"{digits}"}}}},"op":"c"}}'.encode()


def test_the_text_of_a_number_with_its_own_scale_does_not_depend_on_its_neighbours() -> None:
    codec = DebeziumCodec(pa.schema([("d", pa.string())]), metadata=())
    values = [variable(1), variable(-3), variable(5), variable(500)]
    alone = [codec.decode([each]).to_pylist()[0]["d"] for each in values]
    assert alone[:3] == ["1.5", "15000", "0.00015"] and alone[3] == f"0.{'0' * 498}15"
    assert [each["d"] for each in codec.decode(values).to_pylist()] == alone


def test_a_scale_beyond_all_types_is_a_bad_record() -> None:
    codec = DebeziumCodec(pa.schema([("d", KINDS[0])]), metadata=())
    batch, bad = codec.decode_good([variable(2_000_000_000), variable(-2_000_000_000), variable(1), variable(78)])
    assert numbers(batch) == [decimal.Decimal("1.50")] and [each.index for each in bad] == [0, 1, 3]


@pytest.mark.parametrize("nested", [False, True])
def test_values_of_users_are_stored_exactly_or_refused(kind: pa.DataType, nested: bool) -> None:
    wanted = pa.struct([("d", pa.list_(kind))]) if nested else kind

    def stored(text: str) -> Any:
        value = decimal.Decimal(text)
        found = column_of([{"d": [value]} if nested else value, None], wanted).to_pylist()[0]
        return found["d"][0] if nested else found

    for far in FAR:
        with pytest.raises((ValueError, pa.ArrowInvalid)):
            stored(far)
    assert {text: stored(text) for text in NEAR} == {text: decimal.Decimal(each) for text, each in NEAR.items()}


def test_a_column_of_texts_is_cast_exactly_or_refused(kind: pa.DataType) -> None:
    made = cast_column(pa.array([*NEAR, None]), kind).to_pylist()
    assert made == [*map(decimal.Decimal, NEAR.values()), None]
    for far in FAR:
        with pytest.raises(pa.ArrowInvalid, match="is not exactly a value of"):
            cast_column(pa.array(["1.5", far]), kind)


D = pa.decimal128(18, 2)


def nested(text: str) -> list[tuple[pa.Array, pa.DataType, Any]]:
    """Columns with this text between others, their decimal types, and how the text is in them."""
    plain = pa.array(["9", text, None])
    struct = pa.StructArray.from_arrays([plain, pa.array([1, 2, 3])], ["d", "n"])
    offsets = pa.array([0, 1, 2, 3])
    return [
        (plain.cast(kind), D, lambda value: value)
        for kind in (pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    ] + [
        (plain.dictionary_encode(), D, lambda value: value),
        (struct, pa.struct([("d", D), ("n", pa.int64())]), lambda value: value["d"]),
        (pa.ListArray.from_arrays(offsets, plain), pa.list_(D), lambda value: value[0]),
        (
            pa.LargeListArray.from_arrays(offsets, struct),
            pa.list_(pa.struct([("d", D), ("n", pa.int64())])),
            lambda value: value[0]["d"],
        ),
        (
            pa.ListViewArray.from_arrays(offsets[:3], pa.array([1, 1, 1]), plain),
            pa.large_list(D),
            lambda value: value[0],
        ),
        (pa.FixedSizeListArray.from_arrays(plain, 1), pa.list_(D, 1), lambda value: value[0]),
        (
            pa.MapArray.from_arrays(offsets, pa.array(["a", "b", "c"]), plain),
            pa.map_(pa.string(), D),
            lambda v: v[0][1],
        ),
    ]


@pytest.mark.parametrize("case", range(len(nested("1"))))
@pytest.mark.parametrize("text", [*NEAR, *FAR, "x", "1.234"])
def test_a_cast_reads_texts_at_any_depth_and_no_other_row(case: int, text: str) -> None:
    column, declared, inside = nested(text)[case]
    for others in (column.slice(0, 1), column.slice(2)):
        assert cast_column(others, declared).type == declared
    if text in NEAR:
        found = cast_column(column, declared)
        assert found.type == declared
        assert [inside(each) for each in found.to_pylist()] == [9, decimal.Decimal(NEAR[text]), None]
        return
    with pytest.raises(pa.ArrowInvalid):
        cast_column(column.slice(1), declared)


def test_a_cast_keeps_null_and_empty_lists_and_maps() -> None:
    texts = pa.array([["1e0", None], None, [], ["2e0"]])
    assert cast_column(texts, pa.list_(D)).to_pylist() == [[1, None], None, [], [2]]
    fixed = pa.array([["1e0", None], None], pa.list_(pa.string(), 2))
    assert cast_column(fixed, pa.list_(D, 2)).to_pylist() == [[1, None], None]
    maps = pa.array([[("a", "1e0")], None, [], [("b", None)]], pa.map_(pa.string(), pa.string()))
    assert cast_column(maps, pa.map_(pa.string(), D)).to_pylist() == [[("a", 1)], None, [], [("b", None)]]
    structs = pa.array([{"d": "1e0"}, None])
    assert cast_column(structs, pa.struct([("d", D)])).to_pylist() == [{"d": 1}, None]
