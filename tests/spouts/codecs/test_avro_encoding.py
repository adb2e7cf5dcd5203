"""Rows as Avro values: what fastavro reads, what is refused, what an absent field becomes."""

from __future__ import annotations

import datetime
import io
import pickle
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import Fields
from framework.errors import BadRecordError, TopologyError
from spouts import AliasedCodec, AvroCodec
from spouts.codecs import encoding_codec
from tests.kit.avro_pairs import Pairs
from tests.kit.comparing import plain_values
from tests.kit.round_trips import round_trip
from tests.kit.targets import Often, examples

pytestmark = pytest.mark.behaviour("2.9")

UTC = datetime.UTC
WIDE = Context(prec=80)
#: Every type: its schema, and values as Python has them.
TYPES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "yes": ("boolean", st.booleans()),
    "small": ("int", st.integers(-(2**31), 2**31 - 1)),
    "n": ("long", st.integers(-(2**63), 2**63 - 1)),
    "half": ("float", st.floats(width=32, allow_nan=False)),
    "share": ("double", st.floats(allow_nan=False)),
    "text": ("string", st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
    "raw": ("bytes", st.binary(max_size=5)),
    "four": ({"type": "fixed", "name": "Four", "size": 4}, st.binary(min_size=4, max_size=4)),
    "color": ({"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}, st.sampled_from(["RED", "BLUE"])),
    "price": (
        {"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 3},
        st.integers(-(10**40) + 1, 10**40 - 1).map(lambda n: Decimal(n).scaleb(-3, WIDE)),
    ),
    "fee": (
        {"type": "fixed", "name": "Fee", "size": 6, "logicalType": "decimal", "precision": 12, "scale": 2},
        st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: Decimal(n).scaleb(-2, WIDE)),
    ),
    "day": ({"type": "int", "logicalType": "date"}, st.dates()),
    "ms": (
        {"type": "int", "logicalType": "time-millis"},
        st.times().map(lambda each: each.replace(microsecond=each.microsecond // 1000 * 1000)),
    ),
    "us": ({"type": "long", "logicalType": "time-micros"}, st.times()),
    "at": (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30), timezones=st.just(UTC)),
    ),
    "local": ({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes(datetime.datetime(1, 1, 2))),
}
INNER = {
    "type": "record",
    "name": "Inner",
    "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": ["string", "null"]}],
}
INNERS = st.fixed_dictionaries({"a": st.integers(-5, 5), "b": st.none() | st.text("ab", max_size=3)})
NESTED: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "inner": (INNER, INNERS),
    "inners": ({"type": "array", "items": ["null", "Inner"]}, st.lists(st.none() | INNERS, max_size=3)),
    "named": ({"type": "map", "values": "Inner"}, st.dictionaries(st.text("xy", max_size=2), INNERS, max_size=3)),
    "deep": (
        {"type": "array", "items": {"type": "array", "items": "int"}},
        st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=3),
    ),
}


def schema_of(types: Mapping[str, Any], *, nullable: bool) -> Any:
    fields = [{"name": name, "type": ["null", kind] if nullable else kind} for name, (kind, _) in types.items()]
    return {"type": "record", "name": "Row", "fields": fields}


def rows_of(types: Mapping[str, Any], *, nullable: bool) -> st.SearchStrategy[list[dict[str, Any]]]:
    values = {name: st.none() | each if nullable else each for name, (_, each) in types.items()}
    return st.lists(st.fixed_dictionaries(values), min_size=1, max_size=8)


def as_fastavro(schema: Any, value: bytes) -> Any:
    stream = io.BytesIO(value)
    row = fastavro.schemaless_reader(stream, fastavro.parse_schema(schema))
    assert stream.read() == b""
    return row


@settings(deadline=None, max_examples=examples(60))
@given(st.data(), st.booleans())
def test_fastavro_reads_what_is_written(data: st.DataObject, nullable: bool) -> None:
    types = {**TYPES, **NESTED}
    schema = schema_of(types, nullable=nullable)
    rows = data.draw(rows_of(types, nullable=nullable))
    codec = pickle.loads(pickle.dumps(AvroCodec(schema)))
    batch = pa.RecordBatch.from_pylist(rows, codec.fields.schema())
    values = round_trip(codec, batch)
    assert [as_fastavro(schema, value) for value in values] == rows
    assert [codec.encode_row(row) for row in rows] == values


def rows_of_random_schema(seed: int) -> int:
    """Encode what was decoded with a random schema, and decode it again. Returns the number of
    rows."""
    pairs = Pairs(seed)
    schema, _ = pairs.pair()
    try:
        codec = AvroCodec(schema)
        codec.check_encodable(codec.fields)
    except TopologyError:
        return 0
    batch, _ = codec.decode_good([pairs.value(schema) for _ in range(20)])
    try:
        values = codec.encode(batch).to_pylist()
    except BadRecordError as error:
        assert "key twice" in str(error)
        return 0
    again = codec.decode(values)
    for before, after in zip(batch.columns, again.columns, strict=True):
        assert plain_values(before) == plain_values(after), seed
    return len(values)


@pytest.mark.slow
def test_random_schemas_are_written_as_they_are_read(often: Often) -> None:
    assert sum(map(rows_of_random_schema, range(often(300, 20_000)))) > 1_000


def test_moments_of_nanoseconds_are_written_exactly() -> None:
    schema = schema_of({"at": ({"type": "long", "logicalType": "timestamp-nanos"}, None)}, nullable=False)
    codec = AvroCodec(schema)
    column = pa.array([1_700_000_000_123_456_789, -1], pa.timestamp("ns", "UTC"))
    values = codec.encode(pa.record_batch([column], names=["at"])).to_pylist()
    assert codec.decode(values).column("at").equals(column)


@pytest.mark.parametrize("kind", ["long", {"type": "enum", "name": "E", "symbols": ["A"]}])
def test_a_schema_that_is_not_a_record_encodes_the_one_field_that_there_is(kind: Any) -> None:
    codec = AvroCodec(kind)
    given_ = Fields.of({"anything": codec.fields.type_of("value")})
    codec.check_encodable(given_)
    value = "A" if isinstance(kind, dict) else 7
    batch = pa.RecordBatch.from_pylist([{"anything": value}], given_.schema())
    assert codec.decode(codec.encode(batch).to_pylist()).to_pydict() == {"value": [value]}
    with pytest.raises(TopologyError, match="has no field 'other'"):
        codec.check_encodable(Fields.of({"value": codec.fields.type_of("value"), "other": pa.int64()}))


def test_a_field_that_the_rows_do_not_have_gets_its_default_or_null() -> None:
    fields = [
        {"name": "n", "type": "long"},
        {"name": "color", "type": ["string", "null"], "default": "red"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 5},
        {"name": "note", "type": ["null", "string"]},
    ]
    schema = {"type": "record", "name": "R", "fields": fields}
    codec = AvroCodec(schema)
    batch = pa.record_batch([pa.array([1, 2])], names=["n"])
    codec.check_encodable(Fields(n=int))
    moment = datetime.datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC)
    assert [as_fastavro(schema, value) for value in codec.encode(batch).to_pylist()] == [
        {"n": n, "color": "red", "at": moment, "note": None} for n in (1, 2)
    ]
    with pytest.raises(TopologyError, match="has a field 'n' without a default, and the rows do not have it"):
        codec.check_encodable(Fields(color=str))


def test_fields_may_have_other_names_in_the_records() -> None:
    schema = schema_of({"id": ("long", None)}, nullable=False)
    codec = AliasedCodec(AvroCodec(schema), {"order": "id"})
    codec.check_encodable(Fields(order=int))
    value = codec.encode(pa.record_batch([pa.array([7])], names=["order"]))[0].as_py()
    assert as_fastavro(schema, value) == {"id": 7}
    with pytest.raises(TopologyError, match="there is no field 'id'; declared: order"):
        codec.check_encodable(Fields(id=int))


ONE = pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.string())])


@pytest.mark.parametrize(
    ("kind", "declared", "value", "words"),
    [
        ("long", pa.int64(), None, "f is null, which the schema does not allow"),
        (["long"], pa.int64(), None, "f is null"),
        (TYPES["color"][0], pa.string(), "GREEN", "f: 'GREEN' is no symbol of Color"),
        (INNER, ONE, {"a": None, "b": "x"}, "f.a is null"),
        ({"type": "array", "items": INNER}, pa.list_(ONE), [{"a": 1, "b": None}, None], r"f\[\] is null"),
        (
            {"type": "array", "items": TYPES["color"][0]},
            pa.list_(pa.string()),
            ["RED", "X"],
            r"f\[\]: 'X' is no symbol",
        ),
        ({"type": "map", "values": "long"}, pa.map_(pa.string(), pa.int64()), [("a", None)], "f{} is null"),
        (
            {"type": "map", "values": "long"},
            pa.map_(pa.string(), pa.int64()),
            [("a", 1), ("a", 2)],
            "f has a key twice",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_the_field_is_named(
    kind: Any, declared: pa.DataType, value: Any, words: str
) -> None:
    codec = AvroCodec(schema_of({"f": (kind, None)}, nullable=False))
    codec.check_encodable(Fields.of({"f": declared}))
    with pytest.raises(BadRecordError, match=words):
        codec.encode(pa.record_batch([pa.array([value], declared)], names=["f"]))


def test_a_time_of_day_beyond_the_day_and_a_decimal_beyond_its_digits_are_refused() -> None:
    codec = AvroCodec(schema_of({"f": (TYPES["us"][0], None)}, nullable=True))
    late = pa.array([0, 86_400 * 10**6], pa.int64()).view(pa.time64("us"))
    with pytest.raises(BadRecordError, match="f: not a time of day"):
        codec.encode(pa.record_batch([late], names=["f"]))
    codec = AvroCodec(schema_of({"f": (TYPES["fee"][0], None)}, nullable=False))
    wide = pa.Array.from_buffers(pa.decimal128(12, 2), 1, [None, pa.py_buffer((10**12).to_bytes(16, "little"))])
    with pytest.raises(BadRecordError, match=r"f: a decimal of more digits than decimal\(12, 2\)"):
        codec.encode(pa.record_batch([wide], names=["f"]))


def test_untyped_fields_are_cast_exactly_or_refused() -> None:
    codec = AvroCodec(schema_of({"f": ("int", None)}, nullable=False))
    codec.check_encodable(Fields("f"))
    assert codec.encode(pa.record_batch([pa.array([5], pa.int64())], names=["f"])).to_pylist() == [b"\x0a"]
    with pytest.raises(BadRecordError, match="f: .*not in range"):
        codec.encode(pa.record_batch([pa.array([2**40], pa.int64())], names=["f"]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AvroCodec("long", "double").check_encodable(Fields(value=int)), "with reader_schema= decodes only"),
        (lambda: AvroCodec("int").check_encodable(Fields(value=int)), "is int64, and it encodes int32"),
    ],
)
def test_what_cannot_be_encoded_is_said_before_the_start(make: Any, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        make()


def test_many_rows_are_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = AvroCodec(schema_of({"n": ("long", None), "text": ("string", None)}, nullable=True))
    batch = pa.record_batch(
        [pa.array([n if n % 3 else None for n in range(1_000)]), pa.array([f"t{n}" for n in range(1_000)])],
        names=["n", "text"],
    )
    whole = round_trip(codec, batch)
    monkeypatch.setattr(encoding_codec, "_CHUNK_ROWS", 7)
    assert codec.encode(batch).to_pylist() == whole
    assert codec.encode(batch.slice(0, 0)).to_pylist() == []
