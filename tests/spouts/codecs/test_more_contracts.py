"""MessagePack, CSV, CloudEvents and compressed values: the contract suite, and round trips."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import json
import re
import struct
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields
from framework.errors import BadRecordError, TopologyError
from framework.testing.conformance import CodecContract
from ratchet import CloudEvents, Json
from spouts import (
    BytesCodec,
    CloudEventsCodec,
    Codec,
    CompressedCodec,
    CsvCodec,
    DebeziumCodec,
    JsonCodec,
    MessagePackCodec,
    TextCodec,
)
from spouts.codecs import compressed, messagepack
from tests.kit.targets import examples

ROWS: list[Mapping[str, Any]] = [{"word": "dog", "n": 1}, {"word": "a, b", "n": -(2**62)}, {"word": "naïve ☃", "n": 0}]
NOON = datetime.datetime(2026, 5, 1, 12, 0, 0, 5, tzinfo=datetime.UTC)


class TestMessagePack(CodecContract):
    def codec(self) -> Codec:
        return MessagePackCodec(Fields(word=str, n=int))

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [(msgpack.packb({**row, "other": [1]}), row) for row in ROWS]

    def bad(self) -> Sequence[bytes]:
        return [
            b"",
            b"\xc1",
            msgpack.packb(ROWS[0])[:-1],
            msgpack.packb(ROWS[0]) + b"\x00",
            msgpack.packb([1]),
            msgpack.packb({"n": 1.5}),
            msgpack.packb({"n": True}),
            msgpack.packb({"n": 2**63}),
            msgpack.packb({"word": 5}),
            b"\x81\xa4word\xa1\xff",
            b"\x91" * 5_000 + b"\x00",
            b"\xdf\xff\xff\xff\xff",  # a map of four thousand million pairs
            b"\xdd\xff\xff\xff\xff",
        ]


class TestCsv(CodecContract):
    def codec(self) -> Codec:
        return CsvCodec(Fields(word=str, n=int))

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        values = [b"dog,1", b'"a, b",-4611686018427387904\r\n', '"naïve ☃",0'.encode()]
        return [*zip(values, ROWS, strict=True), (b'"two\nlines ""x""",', {"word": 'two\nlines "x"', "n": None})]

    def bad(self) -> Sequence[bytes]:
        return [
            b"dog",
            b"",
            b"dog,1,2",
            b"dog,x",
            b"dog,1.5",
            b'"dog,1',
            b"dog,1\ncat,2",
            b"\xff,1",
            b'"a"b,1',
            b"a,1_0",
        ]


class TestCloudEvents(CodecContract):
    def codec(self) -> Codec:
        return CloudEventsCodec(JsonCodec(Fields(word=str, n=int)), attributes=["id", "time", "hops"])

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        return [
            (
                event(data=ROWS[0], time="2026-05-01T14:00:00.000005+02:00"),
                {**ROWS[0], "ce_id": "1", "ce_time": NOON, "ce_hops": None},
            ),
            (event(data=ROWS[1], hops=3), {**ROWS[1], "ce_id": "1", "ce_time": None, "ce_hops": "3"}),
            (
                b'\xef\xbb\xbf { "data_base64" : "eyJuIjo3fQ==" , "specversion":"1.0","id":"x","source":"/","type":"t" }\n',
                {"word": None, "n": 7, "ce_id": "x", "ce_time": None, "ce_hops": None},
            ),
            (event(), {"word": None, "n": None, "ce_id": "1", "ce_time": None, "ce_hops": None}),
        ]

    def bad(self) -> Sequence[bytes]:
        return [
            b"",
            b"[]",
            b"{}",
            b"{",
            b'{"specversion":"1.0"',
            b"\xff",
            event(specversion="0.3"),
            event(specversion=1),
            event(id=""),
            event(source=None),
            event(time="noon"),
            event(hops=[1]),
            event(data={"n": "x"}),
            event(data=[1]),
            event(data_base64="?"),
            event(data=ROWS[0], data_base64="eyJuIjo3fQ=="),
            event() + b"x",
            event(data=ROWS[0])[:-1] + b',"id":"2"}',
            b'{"a":' * 200_000,
        ]


def event(**members: Any) -> bytes:
    return json.dumps({"specversion": "1.0", "id": "1", "source": "/shop", "type": "sold", **members}).encode()


class TestGzip(CodecContract):
    compression: compressed.Compression = "gzip"

    def codec(self) -> Codec:
        return CompressedCodec(JsonCodec(Fields(word=str, n=int)), self.compression, bytes_max=10_000)

    def good(self) -> Sequence[tuple[bytes, Mapping[str, Any]]]:
        made = CompressedCodec(BytesCodec(), self.compression)
        return [(made.compressed(json.dumps(row).encode()), row) for row in ROWS]

    def bad(self) -> Sequence[bytes]:
        made = CompressedCodec(BytesCodec(), self.compression)
        value = made.compressed(b'{"n": 1}')
        bomb = made.compressed(b" " * 10_001)
        return [
            b"",
            b"{}",
            value[:-1],
            value[:3],
            made.compressed(b'{"n": "x"}'),
            bomb,
            made.compressed(bytes(50_000_000)),
        ]


class TestZstd(TestGzip):
    compression = "zstd"


class TestLz4(TestGzip):
    compression = "lz4"


class TestSnappy(TestGzip):
    compression = "snappy"


class TestBz2(TestGzip):
    compression = "bz2"


def test_values_that_other_libraries_compress_are_read() -> None:
    assert CompressedCodec(TextCodec("w"), "gzip").decode([gzip.compress(b"a") + gzip.compress(b"b")]).to_pydict() == {
        "w": ["ab"]
    }
    assert CompressedCodec(TextCodec("w"), "bz2").decode([bz2.compress(b"ab")]).to_pydict() == {"w": ["ab"]}
    block = pa.Codec("snappy").compress(b"ab", asbytes=True)
    stream = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + 2 * (struct.pack(">i", len(block)) + block)
    codec = CompressedCodec(TextCodec("w"), "snappy", bytes_max=4)
    assert codec.decode([stream]).to_pydict() == {"w": ["abab"]}
    for bad in (
        stream[:-1],
        stream[:17],
        stream + b"\x00\x00\x00\x09x",
        stream + struct.pack(">i", len(block)) + block,
    ):
        assert len(codec.decode_good([bad])[1]) == 1


@pytest.mark.slow
def test_a_value_is_not_decompressed_beyond_its_bound() -> None:
    """512 MiB in half a megabyte."""
    bomb = gzip.compress(bytes(512 << 20), 9)
    before = pa.total_allocated_bytes()
    _, bad = CompressedCodec(BytesCodec(), "gzip", bytes_max=1 << 20).decode_good([bomb])
    assert "more than 1,048,576 bytes" in bad[0].reason
    assert pa.total_allocated_bytes() - before < 8 << 20


@pytest.mark.parametrize("value", [b"\n", b"\r", b"a,1\n", b"a,1\r\n"])
def test_of_a_value_of_csv_with_more_rows_no_third_one_is_read(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counting(text: Any, **options: Any) -> Any:
        for count, row in enumerate(reader(text, **options), 1):
            read.append(count)
            yield row

    reader = csv.reader
    monkeypatch.setattr(csv, "reader", counting)
    _, (bad,) = CsvCodec(Fields(word=str, n=int)).decode_good([value * 1_000])
    assert bad.reason == "more than one row, and a value is one" and max(read) == 2


def test_what_the_codec_inside_leaves_out_is_left_out() -> None:
    row = Fields(id=int)
    inner = DebeziumCodec(row)
    heartbeat = json.dumps({"ts_ms": 1}).encode()
    codec = CompressedCodec(inner, "gzip")
    values = [codec.compressed(heartbeat), b"damaged", None]
    expected = inner.left_out([heartbeat, None])
    found = codec.left_out(values)
    assert (expected is None) == (found is None)
    if expected is not None and found is not None:
        assert [found[0], found[2]] == list(expected) and not found[1]


# --- round trips ----------------------------------------------------------------------------------

TYPES = {
    "text": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
    "n": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small": (pa.uint8(), st.integers(0, 255)),
    "share": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "yes": (pa.bool_(), st.booleans()),
    "at": (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30), timezones=st.just(datetime.UTC)),
    ),
}
CELLS = {
    **TYPES,
    "price": (pa.decimal128(12, 3), st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: Decimal(n).scaleb(-3))),
    "day": (pa.date32(), st.dates()),
    "clock": (pa.time64("us"), st.times()),
    "ms": (
        pa.timestamp("ms"),
        st.datetimes(datetime.datetime(1, 1, 2)).map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)),
    ),
}
NESTED = {
    **CELLS,
    "raw": (pa.binary(), st.binary(max_size=5)),
    "parts": (
        pa.list_(pa.struct([("a", pa.int64()), ("b", pa.decimal128(3, 1))])),
        st.lists(
            st.none() | st.fixed_dictionaries({"a": st.none() | st.integers(0, 9), "b": st.just(Decimal("1.5"))}),
            max_size=3,
        ),
    ),
}


def rows_of(types: Mapping[str, Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(
        st.fixed_dictionaries({name: st.none() | values for name, (_, values) in types.items()}),
        min_size=1,
        max_size=20,
    )


def round_trip(codec: Any, types: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    schema = pa.schema([(name, declared) for name, (declared, _) in types.items()])
    batch = pa.RecordBatch.from_pylist(rows, schema)
    codec.check_encodable(Fields.of_schema(schema))
    encoded = codec.encode(batch)
    assert encoded.type == pa.large_binary()
    values = encoded.to_pylist()
    assert codec.decode(values).to_pylist() == batch.to_pylist()
    assert [codec.encode(batch.slice(number, 1))[0].as_py() for number in range(len(rows))] == values


def fields(types: Mapping[str, Any]) -> Fields:
    return Fields.of({name: declared for name, (declared, _) in types.items()})


@settings(deadline=None, max_examples=examples(100))
@given(rows_of(TYPES))
def test_messagepack_is_read_as_it_was_written(rows: list[dict[str, Any]]) -> None:
    codec = MessagePackCodec(fields(TYPES))
    round_trip(codec, TYPES, rows)
    for row in rows:
        assert msgpack.unpackb(codec.encode_row(row), timestamp=3) == row


def test_messagepack_has_maps_for_columns_of_maps() -> None:
    counts = pa.map_(pa.string(), pa.int64())
    types = {"of": counts, "in_struct": pa.struct([("of", counts)]), "in_list": pa.list_(counts), "n": pa.int64()}
    codec = MessagePackCodec(pa.schema(types))
    pairs = [("a", 1), ("b", None)]
    rows = [
        {"of": pairs, "in_struct": {"of": pairs}, "in_list": [pairs, [], None], "n": 1},
        {"of": [], "in_struct": {"of": None}, "in_list": [], "n": None},
        {"of": None, "in_struct": None, "in_list": None, "n": 2},
    ]
    round_trip(codec, {name: (declared, None) for name, declared in types.items()}, rows)
    assert msgpack.unpackb(codec.encode_row(rows[0])) == {
        "of": dict(pairs),
        "in_struct": {"of": dict(pairs)},
        "in_list": [dict(pairs), {}, None],
        "n": 1,
    }
    twice = pa.record_batch([pa.array([{"of": [("a", 1), ("a", 2)]}], types["in_struct"])], names=["in_struct"])
    with pytest.raises(BadRecordError, match=r"in_struct\.of has a key twice"):
        codec.encode(twice)


@pytest.mark.parametrize("place", ["map", "struct", "value"])
def test_integers_of_a_large_map_cannot_be_chosen_to_collide(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``int``, all of these would have one place in a dict of up to 65,536 keys."""
    hashes: set[int] = set()
    made = messagepack._dict_of

    def noted(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        found = made(pairs)
        if len(found) > messagepack.LARGE_MAP_KEYS:
            hashes.update(hash(key) & 0xFFFF for key in found)
        return found

    monkeypatch.setattr(messagepack, "_dict_of", noted)
    numbers = {number << 16: -number for number in range(-1_000, 4_000)} | {2**64 - 1: 1, -(2**63): 2}
    declared, value = {
        "map": (pa.map_(pa.int64(), pa.int64()), {key: item for key, item in numbers.items() if key < 2**63}),
        "struct": (pa.struct({"a": pa.int64()}), numbers | {"a": 7}),
        "value": (pa.int64(), 7),
    }[place]
    given = numbers | {"v": value} if place == "value" else {"v": value}
    batch, bad = MessagePackCodec(pa.schema({"v": declared})).decode_good([msgpack.packb(given), b"\x80"])
    assert not bad and len(hashes) > 4_000
    (row, _) = batch.column(0).to_pylist()
    assert row == (7 if place == "value" else {"a": 7} if place == "struct" else [*value.items()])


def test_a_large_map_has_the_keys_that_it_had() -> None:
    codec = MessagePackCodec(pa.schema({"v": pa.map_(pa.int64(), pa.string())}))
    pairs = [(number, f"t{number}") for number in range(-500, 500)]
    twice = b"\x81\xa1v\xde\x01\x2c" + b"".join(msgpack.packb(n % 299) + msgpack.packb(f"t{n}") for n in range(300))
    rows = codec.decode([msgpack.packb({"v": dict(pairs)}), twice]).to_pylist()
    assert rows == [{"v": pairs}, {"v": [(0, "t299"), *((n, f"t{n}") for n in range(1, 299))]}]
    others = {"v": {number + 0.5: "" for number in range(300)}}
    (bad,) = codec.decode_good([msgpack.packb(others)])[1]
    assert "a map of 300 keys, one of which is a float" in bad.reason
    (bad,) = codec.decode_good([msgpack.packb({"v": {f"{n}": "" for n in range(300)}})])[1]
    assert "a str, and int64 is wanted" in bad.reason


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (pa.timestamp("us"), datetime.datetime(2026, 1, 1, 0, 0, 0, 5)),
        (pa.list_(pa.timestamp("ms")), [datetime.datetime(2026, 1, 1), None]),
        (pa.large_string(), "é"),
        (pa.large_binary(), b"\xff"),
        (pa.binary(2), b"ab"),
        (pa.large_list(pa.int8()), [1, None]),
    ],
)
def test_messagepack_writes_the_types_that_it_holds(declared: pa.DataType, value: Any) -> None:
    round_trip(MessagePackCodec(pa.schema({"v": declared})), {"v": (declared, None)}, [{"v": value}, {"v": None}])


@pytest.mark.parametrize(
    "declared",
    [pa.date32(), pa.decimal128(5, 2), pa.time64("us"), pa.duration("s"), pa.list_(pa.struct([("a", pa.date32())]))],
)
def test_a_type_that_messagepack_does_not_hold_is_refused_by_the_builder(declared: pa.DataType) -> None:
    codec = MessagePackCodec(pa.schema({"n": pa.int64(), "v": declared}))
    codec.check_encodable(Fields(n=int))
    with pytest.raises(TopologyError, match="MessagePackCodec: field 'v' is .*, which MessagePack does not hold"):
        codec.check_encodable(codec.fields)


def test_json_writes_binary_values_of_a_fixed_size_as_it_reads_them() -> None:
    declared = {"v": (pa.binary(2), None), "of": (pa.list_(pa.binary(2)), None)}
    codec = JsonCodec(pa.schema({name: each for name, (each, _) in declared.items()}))
    round_trip(codec, declared, [{"v": b"ab", "of": [b"\xff\x00", None]}, {"v": None, "of": None}])


@pytest.mark.parametrize(
    ("declared", "others"),
    [
        (pa.float64(), [True, "1", b"1"]),
        (pa.bool_(), [1, "true"]),
        (pa.timestamp("us", "UTC"), [1, 1.0, "2026-01-01"]),
        (pa.list_(pa.int64()), ["", b"", b"ab", {}, [True]]),
        (pa.struct([("a", pa.int64())]), ["", b"", [], {"a": "1"}]),
        (pa.map_(pa.string(), pa.float64()), ["", b"", [], {1: 1.0}, {"a": True}]),
    ],
)
def test_messagepack_takes_no_value_of_another_type(declared: pa.DataType, others: Sequence[Any]) -> None:
    codec = MessagePackCodec(pa.schema({"v": declared}))
    values = [msgpack.packb({"v": each}) for each in others]
    batch, bad = codec.decode_good([msgpack.packb({"v": None}), *values])
    assert (batch.to_pylist(), [each.index for each in bad]) == ([{"v": None}], [*range(1, len(others) + 1)])
    assert all(each.reason.startswith("v: a ") for each in bad), bad


@pytest.mark.parametrize("text", ["24:00:00", "12", "12:60", "noon", "12:00:00+01:00"])
def test_csv_takes_no_other_text_for_a_time_of_day(text: str) -> None:
    codec = CsvCodec(pa.schema({"at": pa.time32("ms"), "n": pa.int64()}))
    batch, bad = codec.decode_good([b"12:30,1", f"{text},2".encode(), b",3", b"00:00:00.25Z,4"])
    at = [datetime.time(12, 30), None, datetime.time(0, 0, 0, 250_000)]
    assert batch.column("at").to_pylist() == at
    assert [(each.index, each.reason[:3]) for each in bad] == [(1, "at:")]


@pytest.mark.parametrize(
    ("declared", "text", "advice"),
    [
        (pa.timestamp("us", "UTC"), "2026-01-01T00:00:00", r"has no offset .*: declare pa.timestamp\('us'\) for"),
        (pa.timestamp("ms"), "2026-01-01T00:00:00Z", r"has an offset .*: declare pa.timestamp\('ms', 'UTC'\) for"),
    ],
)
def test_csv_says_how_to_declare_times_with_and_without_an_offset(
    declared: pa.DataType, text: str, advice: str
) -> None:
    _, (bad,) = CsvCodec(pa.schema({"at": declared})).decode_good([text.encode()])
    assert re.match(f"at: '{text}' {advice} such times$", bad.reason), bad.reason


@settings(deadline=None, max_examples=examples(100))
@given(rows_of(NESTED))
def test_json_is_read_as_it_was_written(rows: list[dict[str, Any]]) -> None:
    round_trip(JsonCodec(fields(NESTED)), NESTED, rows)


@settings(deadline=None, max_examples=examples(100))
@given(rows_of(CELLS))
def test_csv_is_read_as_it_was_written(rows: list[dict[str, Any]]) -> None:
    round_trip(
        CsvCodec(fields(CELLS), delimiter=";", null="\\N"),
        CELLS,
        [{**row, "text": None if row["text"] == "\\N" else row["text"]} for row in rows],
    )


@settings(deadline=None, max_examples=examples(50))
@given(rows_of(TYPES), st.sampled_from(["gzip", "zstd", "lz4", "snappy", "bz2"]))
def test_compressed_values_are_read_as_they_were_written(rows: list[dict[str, Any]], compression: Any) -> None:
    round_trip(CompressedCodec(JsonCodec(fields(TYPES)), compression), TYPES, rows)


@settings(deadline=None, max_examples=examples(50))
@given(rows_of(TYPES))
def test_events_are_read_as_they_were_written(rows: list[dict[str, Any]]) -> None:
    types = {
        **TYPES,
        **{f"ce_{name}": (pa.string(), st.just(name)) for name in ("id", "source", "type")},
        "ce_time": (pa.timestamp("us", "UTC"), st.just(NOON)),
    }
    whole = [{**row, "ce_id": "1", "ce_source": "/", "ce_type": "t", "ce_time": NOON} for row in rows]
    attributes = ("id", "source", "type", "time")
    round_trip(CloudEventsCodec(JsonCodec(fields(TYPES)), attributes=attributes), types, whole)
    packed = CloudEventsCodec(
        MessagePackCodec(fields(TYPES)), attributes=attributes, content_type="application/msgpack"
    )
    round_trip(packed, types, whole)


def test_captured_fields_are_written_as_they_were_read() -> None:
    codec = JsonCodec(Fields(n=int), alias={"n": "m"}, extra="capture")
    values = [b'{"m":1,"price":1.50,"a":{"b":[1.00]}}', b'{"m":2}']
    assert codec.encode(codec.decode(values)).to_pylist() == values
    assert JsonCodec(Fields(n=int), extra="capture").encode_row({"extra": '{"a":1}'}) == b'{"a":1}'
    with pytest.raises(ValueError, match="extra is no JSON object of other fields"):
        codec.encode_row({"n": 1, "extra": '{"m":2}'})


def test_binary_events_have_their_attributes_in_headers() -> None:
    codec = CloudEventsCodec(JsonCodec(Fields(n=int)), mode="binary", attributes=["id", "type"])
    assert codec.fields == Fields(n=int)
    assert codec.decode([b'{"n":1}', None]).to_pylist() == [{"n": 1}, {"n": None}]
    assert {name: each.fields.names for name, each in codec.header_codecs().items()} == {
        "ce_id": ("ce_id",),
        "ce_type": ("ce_type",),
    }
    assert codec.headers(source="/käse") == {
        "ce_specversion": b"1.0",
        "ce_source": "/käse".encode(),
        "content-type": b"application/json",
        "ce_id": "ce_id",
        "ce_type": "ce_type",
    }
    with pytest.raises(
        TopologyError, match=r"an event needs source: name it in attributes, or .*headers\(source='...'\)"
    ):
        codec.headers()
    batch = pa.RecordBatch.from_pylist([{"n": 1, "ce_id": "1", "ce_type": "t"}])
    codec.check_encodable(Fields.of_schema(batch.schema))
    assert codec.encode(batch).to_pylist() == [b'{"n":1}']
    without = pa.RecordBatch.from_pylist([{"n": 1, "ce_id": None, "ce_type": "t"}], batch.schema)
    with pytest.raises(BadRecordError, match="ce_id is None, and an event needs it"):
        codec.encode(without)


def test_structured_events_have_a_header_by_which_other_libraries_know_them() -> None:
    """Kafka binding of CloudEvents, 3.3.1."""
    codec = CloudEventsCodec(JsonCodec(Fields(n=int)))
    assert codec.headers() == {"content-type": b"application/cloudevents+json; charset=UTF-8"}
    assert codec.header_codecs() == {}
    with pytest.raises(TopologyError, match="source is no header in structured mode"):
        codec.headers(source="/shop")


def test_a_format_of_events_has_the_headers_of_its_codec() -> None:
    made = CloudEvents(Json(n=int), mode="binary")
    codec = CloudEventsCodec(JsonCodec(Fields(n=int)), mode="binary")
    assert made.headers() == codec.headers() and made.header_codecs().keys() == codec.header_codecs().keys()


@pytest.mark.parametrize(
    ("codec", "row", "words"),
    [
        (CsvCodec(Fields(word=str)), {"word": ""}, "word: '' would be read as null"),
        (JsonCodec(pa.schema([pa.field("n", pa.int64(), nullable=False)])), {"n": None}, "n is null"),
        (CloudEventsCodec(JsonCodec(Fields(n=int))), {"n": 1, "ce_id": "", "ce_source": "/", "ce_type": "t"}, "ce_id"),
    ],
)
def test_a_row_that_would_not_be_read_back_is_refused(codec: Any, row: dict[str, Any], words: str) -> None:
    types = {name: codec.fields.type_of(name) for name in row}
    with pytest.raises(BadRecordError, match=words):
        codec.encode(pa.RecordBatch.from_pylist([row], pa.schema(list(types.items()))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: JsonCodec(Fields(n=int)).check_encodable(Fields(n=str)), "field 'n' is string, and it encodes int64"),
        (lambda: JsonCodec(Fields(n=int)).check_encodable(Fields(m=int)), r"has no field 'm' \(it has: n\)"),
        (
            lambda: CloudEventsCodec(JsonCodec(Fields(n=int))).check_encodable(Fields(n=int)),
            "ce_id, ce_source, ce_type",
        ),
        (lambda: CompressedCodec(TextCodec(), "gzip").check_encodable(Fields(value=str)), "TextCodec decodes only"),
        (lambda: CompressedCodec(TextCodec(), "rar"), "must be one of 'gzip'"),  # type: ignore[arg-type]
        (lambda: CompressedCodec(TextCodec(), "gzip", bytes_max=0), "bytes_max must be 1"),
        (lambda: CsvCodec(Fields(raw=bytes)), "which a cell of text does not hold"),
        (lambda: CsvCodec(Fields(n=int), delimiter=";;"), "give one character"),
        (lambda: CsvCodec(Fields("n")), "needs a type for every field"),
        (lambda: MessagePackCodec(Fields("n")), "needs a type for every field"),
        (lambda: CloudEventsCodec(JsonCodec(Fields(ce_id=str))), "has a field 'ce_id', too"),
        (lambda: CloudEventsCodec(JsonCodec(Fields(n=int)), mode="batch"), "'structured' or 'binary'"),  # type: ignore[arg-type]
    ],
)
def test_what_a_codec_cannot_do_is_said_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        make()
