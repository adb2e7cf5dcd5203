"""The compiled JSON reader gives what Arrow's reader gives, or leaves the value to it.

Two things make that so, and both are tested here: a value that the compiled reader decodes, Arrow's
reader decodes to the same row, bit by bit; and every other value is decoded by Arrow's reader.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields
from spouts import BadRecord, JsonCodec, UndecodableValueError
from spouts.codecs import json_native
from spouts.codecs.codec import Values
from spouts.codecs.json_arrow import ArrowJsonCodec
from spouts.codecs.json_native import NativeJson, native_json
from tests.kit.json_documents import INTEGERS, SCHEMAS, Documents
from tests.kit.targets import Often, examples

pytest.importorskip("spouts._native", reason="the compiled part of the spouts was not built")


def _native(schema: pa.Schema) -> NativeJson:
    codec = JsonCodec(schema)
    native = native_json(codec._schema)
    assert native is not None
    return native


def _arrow(schema: pa.Schema) -> ArrowJsonCodec:
    codec = JsonCodec(schema)
    return ArrowJsonCodec(codec._schema)


def _same(one: pa.Array, other: pa.Array) -> bool:
    """Whether two arrays are the same, bit by bit: 0.0 is not -0.0."""
    if pa.types.is_floating(one.type):
        whole = pa.int32() if one.type.bit_width == 32 else pa.int64()
        return bool(one.is_null().equals(other.is_null())) and _same(
            *(pc.fill_null(each, 0.0).view(whole) for each in (one, other))
        )
    if pa.types.is_struct(one.type):
        return bool(one.is_null().equals(other.is_null())) and all(map(_same, one.flatten(), other.flatten()))
    if pa.types.is_list(one.type):
        lengths = [pc.list_value_length(each) for each in (one, other)]
        return bool(lengths[0].equals(lengths[1])) and _same(one.flatten(), other.flatten())
    return bool(one.equals(other))


def _are_same(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    one.validate(full=True)
    return one.schema.equals(other.schema, check_metadata=True) and all(map(_same, one.columns, other.columns))


def _first_difference(values: Sequence[bytes], is_same: Callable[[Sequence[bytes]], bool]) -> Sequence[bytes]:
    """The shortest run of values, by halving, that is not decoded in the same way."""
    while len(values) > 1:
        half = len(values) // 2
        worse = [part for part in (values[:half], values[half:]) if not is_same(part)]
        if not worse:
            return values
        values = worse[0]
    return values


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_the_compiled_reader_decodes_arrow_decodes_to_the_same_rows(name: str, seed: int, often: Often) -> None:
    """A quarter of a million documents for each schema in ``make test-all``, two thirds mutated."""
    native, arrow = _native(SCHEMAS[name]), _arrow(SCHEMAS[name])
    documents = Documents(seed, SCHEMAS[name])

    def is_same(values: Sequence[bytes]) -> bool:
        batch, unusual = native.read(pa.array(values, pa.binary()))
        left = set(unusual.to_pylist())
        usual = [value for index, value in enumerate(values) if index not in left]
        try:
            return _are_same(batch, arrow.decode_together(usual))
        except (ValueError, pa.ArrowException):
            return False

    for number in range(often(2, 64)):
        values = [documents.mutated() if index % 3 else documents.usual() for index in range(4_000)]
        if not is_same(values):
            pytest.fail(f"RATCHET_SEED={seed}, round {number}: {_first_difference(values, is_same)!r}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_most_values_are_usual(name: str) -> None:
    """Else the test above would show nothing, and the reader would save nothing."""
    documents = Documents(7, SCHEMAS[name])
    values = [documents.usual() for _ in range(2_000)]
    _, unusual = _native(SCHEMAS[name]).read(pa.array(values, pa.binary()))
    _, bad = _arrow(SCHEMAS[name]).decode_good(values)
    assert len(unusual) - len(bad) < 0.2 * len(values)


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 2**32), nulls=st.booleans())
def test_the_codec_decodes_what_arrow_decodes_with_the_same_reasons(name: str, seed: int, nulls: bool) -> None:
    documents = Documents(seed, SCHEMAS[name])
    values: list[bytes | None] = [documents.mutated() if index % 2 else documents.usual() for index in range(20)]
    if nulls:
        values[seed % 20] = None
    codec, arrow = JsonCodec(SCHEMAS[name]), _arrow(SCHEMAS[name])
    expected, expected_bad = arrow.decode_good(values)
    array = pa.array([b"left out", *values, None], pa.binary()).slice(1, len(values))
    for batch, bad in (codec.decode_good(values), codec.decode_good_array(array)):
        assert bad == expected_bad
        assert _are_same(batch, expected)
    for decode in (lambda: codec.decode(values), lambda: codec.decode_array(array)):
        if expected_bad:
            with pytest.raises(UndecodableValueError) as error:
                decode()
            assert BadRecord(error.value.index, error.value.reason) == expected_bad[0]
        else:
            assert _are_same(decode(), expected)
            assert _are_same(codec.decode_together(values), expected)


def _read(schema: pa.Schema, *values: bytes | None) -> tuple[list[dict[str, Any]], list[int]]:
    batch, unusual = _native(schema).read(pa.array(values, pa.binary()))
    return batch.to_pylist(), unusual.to_pylist()


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        *((pa.type_for_alias(each), "7", 7) for each in INTEGERS),
        (pa.int8(), "-128", -128),
        (pa.uint8(), "255", 255),
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.int64(), "1234567890123456789", 1234567890123456789),
        (pa.uint64(), "18446744073709551615", 2**64 - 1),
        (pa.float32(), "0.1", 0.10000000149011612),
        (pa.float32(), "0.500000029802322387695", 0.5),  # by way of a double it would be rounded twice
        (pa.float64(), "9007199254740993", 9007199254740992.0),
        (pa.float64(), "2.5E+3", 2500.0),
        (pa.bool_(), "true", True),
        (pa.string(), '"\\u00e4\\n\\ud83d\\ude00ö"', "ä\n\U0001f600ö"),
        (pa.string(), '""', ""),
        (pa.struct([("x", pa.int8())]), '{"y":[{}],"x":1}', {"x": 1}),
        (pa.struct([("x", pa.int8())]), "{}", {"x": None}),
        (pa.list_(pa.list_(pa.string())), '[["a",null],[],null]', [["a", None], [], None]),
    ],
)
def test_usual_values_of_each_type_are_not_left_to_arrow(declared: pa.DataType, text: str, value: object) -> None:
    values = [b"{}", f'{{"v":{text}}}'.encode(), f' {{ "x" : "y" , "v" :\n{text} }} '.encode(), b'{"v":null}', None]
    rows, unusual = _read(pa.schema([("v", declared)]), *values)
    assert [row["v"] for row in rows] == [None, value, value, None, None]
    assert unusual == []


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (pa.int64(), "1.0"),
        (pa.int64(), "1e3"),
        (pa.int64(), "9223372036854775808"),
        (pa.int8(), "128"),
        (pa.uint8(), "-0"),
        (pa.int64(), "01"),
        (pa.int64(), '"1"'),
        (pa.int64(), "true"),
        (pa.float64(), "1e100"),
        (pa.float64(), "0e400"),
        (pa.float64(), "NaN"),
        (pa.float64(), "1" * 65),
        (pa.float32(), "1e39"),
        (pa.bool_(), "1"),
        (pa.string(), "1"),
        (pa.string(), '"\\ud83d"'),
        (pa.string(), '"\x1f"'),
        (pa.struct([("x", pa.int8())]), '{"x":1,"x":1}'),
        (pa.struct([("x", pa.int8())]), "[]"),
        (pa.list_(pa.int8()), "[1,]"),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), "[null]"),
        (pa.int64(), '1,"v":1'),
        (pa.int64(), 'null,"v":null'),
        (pa.int64(), '1,"\\u0076":1'),
        (pa.int64(), '1,"x":1e400'),
        (pa.int64(), '1,"x":[{"y":"1e5\\"","z":1e400}]'),
        (pa.int64(), '1,"x":NaN'),
        (pa.int64(), '1,"x":"\\ud83d"'),
        (pa.int64(), '1,"x":' + "[" * 300 + "]" * 300),
        (pa.int64(), "1}{"),
        (pa.int64(), "1}{}"),
        (pa.int64(), "1,"),
    ],
)
def test_unusual_values_leave_no_row_and_are_named(declared: pa.DataType, text: str) -> None:
    good, bad = b'{"v":null,"w":"a"}', f'{{"w":"b","v":{text}}}'.encode()
    rows, unusual = _read(pa.schema([("v", declared), ("w", pa.string())]), good, bad, bad, good, bad)
    assert rows == [{"v": None, "w": "a"}] * 2
    assert unusual == [1, 2, 4]


def test_keys_in_another_order_than_before_are_found() -> None:
    schema = pa.schema([("a", pa.int64()), ("long name of a field", pa.int64())])
    values = [
        b'{"a":1,"long name of a field":2}',
        b'{"long name of a field":2,"a":1}',
        b'{"long name of a fielt":3,"a":1}',
    ]
    rows, unusual = _read(schema, *values * 3, b'{"a":1,"b":3,"long name of a field":2}')
    assert [tuple(row.values()) for row in rows] == [(1, 2), (1, 2), (1, None)] * 3 + [(1, 2)]
    assert unusual == []


def test_keys_with_escapes_are_found() -> None:
    schema = pa.schema([("größe", pa.int64()), ('"', pa.int64())])
    rows, unusual = _read(schema, *[json.dumps({"größe": 1, "\n": 2, '"': 3}).encode()] * 2, b'{"\\u0022":4}')
    assert [tuple(row.values()) for row in rows] == [(1, 3), (1, 3), (None, 4)]
    assert unusual == []


def test_a_schema_with_another_type_is_left_to_arrow() -> None:
    codec = JsonCodec(pa.schema([("sum", pa.decimal128(9, 2)), ("word", pa.string())]))
    assert native_json(codec._schema) is None
    assert codec.decode_array(pa.array([b'{"word":"a"}'])).to_pylist() == [{"sum": None, "word": "a"}]
    assert native_json(pa.schema([("p", pa.struct([("x", pa.int8()), ("x", pa.int8())]))])) is None


def test_without_the_compiled_part_the_codec_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spouts.codecs.json_reader.native_json", lambda schema: None)
    codec = JsonCodec(SCHEMAS["plain"])
    values = pa.array([b'{"word":"a"}', b"", None], pa.binary())
    batch, bad = codec.decode_good_array(values)
    assert (batch.column(0).to_pylist(), [each.index for each in bad]) == (["a", None], [1])
    assert codec.decode_good(values.to_pylist())[1] == bad


def test_a_subclass_that_decodes_together_in_its_own_way_does_so_in_every_call() -> None:
    class Prefixed(JsonCodec):
        def decode_together(self, values: Values) -> pa.RecordBatch:
            return super().decode_together([value and value.removeprefix(b"v1:") for value in values])

    codec, values = Prefixed(Fields(n=int)), [b'v1:{"n":1}', None]
    array = pa.array(values, pa.binary())
    rows = [{"n": 1}, {"n": None}]
    assert codec.decode(values).to_pylist() == codec.decode_array(array).to_pylist() == rows
    assert codec.decode_good(values)[0].to_pylist() == codec.decode_good_array(array)[0].to_pylist() == rows


def test_a_codec_that_has_decoded_is_pickled_without_its_reader() -> None:
    codec = JsonCodec(Fields(word=str, amount=int))
    codec.decode([b"{}"])
    assert b"_native" not in pickle.dumps(codec)
    json_native.native_json.cache_clear()
    again = pickle.loads(pickle.dumps(codec))
    assert again.decode_array(pa.array([b'{"amount":1}'])).to_pylist() == [{"word": None, "amount": 1}]


def test_buffers_that_are_not_those_of_an_array_are_refused() -> None:
    reader = _native(SCHEMAS["plain"])._reader
    data, offsets = pa.py_buffer(b'{"word":"a"}'), pa.py_buffer(pa.array([0, 12], pa.int32()).buffers()[1])
    assert reader.read(data, offsets, None, 0, 1)[0] == 1
    for first, length in [(0, 2**40), (1, 40), (2**63, 1), (2**64 - 1, 1)]:
        with pytest.raises((ValueError, OverflowError)):
            reader.read(data, offsets, None, first, length)
    with pytest.raises(ValueError, match="not those of a binary array"):
        reader.read(data, offsets, pa.py_buffer(b""), 0, 1)
    for ends in ([0, 13], [5, 2], [-1, 3]):
        with pytest.raises(ValueError, match="not those of a binary array"):
            reader.read(data, pa.array(ends, pa.int32()).buffers()[1], None, 0, 1)


def test_several_threads_read_at_once() -> None:
    codec = JsonCodec(SCHEMAS["plain"])
    values = pa.array([b'{"word":"w%d","amount":%d}' % (index, index) for index in range(20_000)])
    expected = codec.decode_array(values)
    results: list[pa.RecordBatch] = []
    threads = [threading.Thread(target=lambda: results.append(codec.decode_array(values))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(each.equals(expected) for each in results)
